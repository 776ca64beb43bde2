"""Isolation of runs that are really trained: the planted head, operation and number of bits;
resumed after anything.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfulp import cli
from halfulp.isolate import climb, questions, rung
from halfulp.isolate import conclusion as verdict
from halfulp.isolate.isolation import isolate
from halfulp.isolate.result import Isolation
from halfulp.isolate.rule import Rule
from halfulp.isolate.rung import Job, run_rung, rung_config
from halfulp.runs.folder import read_json
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, LayerTask, Optimizer, RunConfig
from halfulp.training.journal import read_rows
from halfulp.training.loop import train
from halfulp.training.run_json import new_record

# The one-layer task, smaller and hotter, with an O of one mantissa bit: it fails within 150 steps
# of 2 ms.
SMALL = RunConfig(
    LayerTask(batch=8, tokens=16, width=16, constant=4),
    AttentionPlan.of("BF16_FLASH2[out=e8m1]"),
    Optimizer(learning_rate=1e-2, warm_up=20),
    steps=150,
    metrics_every=5,
)
MODEL = Language(layers=2, heads=3, width=24, context=8, vocabulary=16)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that are trained, by folder, as they begin."""
    trained: list[str] = []

    def counting(config: RunConfig, folder: Path, **options: Any) -> Any:
        trained.append("/".join(folder.parts[-2:]))
        return train(config, folder, **options)

    monkeypatch.setattr(rung, "train", counting)
    return trained


@pytest.fixture
def fewer_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five operations in the place of sixteen, so that the test is short; all of them are tested
    without training.
    """
    names = ("delta-exact-O", "residual", "delta-dP.P", "row-sum", "delta-fp32")
    few = tuple(one for one in questions.OPERATIONS if one.name in names)
    for module in (questions, verdict):
        monkeypatch.setattr(module, "OPERATIONS", few)


def test_a_planted_head_operation_and_format_are_named_whatever_interrupts(
    tmp_path: Path, counted: list[str], fewer_operations: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every head runs the stock recipe; in one, δ is rounded upwards to a power of two as well.
    Ctrl-C after 4 runs.
    """
    monkeypatch.setattr(questions, "_FULL", 4)  # bits that are tried at most: bisected in few runs
    config = RunConfig(
        MODEL,
        AttentionPlan.of("BF16_FLASH2", "layer 1 head 2: BF16_FLASH2[delta=e8m0/up]"),
        Optimizer(learning_rate=1e-2, warm_up=2),
        steps=30,
        batch=4,
        metrics_every=1,
        measure_every=3,
    )
    rule = Rule(loss_factor=1.5, least_loss=0, score_drift=30, patience=3)
    options: dict[str, Any] = {"out": tmp_path / "out", "seeds": (0,), "workers": 1, "rule": rule}
    whole = climb.run_rung

    def interrupting(job: Job) -> Any:
        if len(counted) == 4:
            raise KeyboardInterrupt
        return whole(job)

    monkeypatch.setattr(climb, "run_rung", interrupting)
    with pytest.raises(KeyboardInterrupt):
        isolate(config, **options)
    record, partial = (
        read_json(tmp_path / "out" / "run.json"),
        read_json(tmp_path / "out" / "isolation.json"),
    )
    assert (record["kind"], record["status"], partial["status"]) == (
        "isolate",
        "interrupted",
        "interrupted",
    )
    assert [r["name"] for r in partial["rungs"]][:2] == ["original", "fp32"]
    monkeypatch.setattr(climb, "run_rung", whole)
    found = isolate(config, **options)
    assert len(counted) == len(set(counted)), "what was done is read"
    assert found.places == ((1, 2),)
    assert found.rescues[0].operations == ("delta-fp32",)
    assert found.verdict.startswith("The rounding of δ, head 2 of layer 1; 1 of 1 seed")
    assert "This change alone saves the run: δ and its terms in fp32 (1 of 1)." in found.verdict
    assert found.bits[0].step == "delta"
    assert "halfulp's own recipe (attention BF16_HALFULP) survives on 1 of 1 seeds" in found.fix


def test_the_one_layer_task_blames_delta_and_the_recorded_run_is_used(
    tmp_path: Path, counted: list[str], fewer_operations: None
) -> None:
    recorded = train(SMALL, tmp_path / "run")
    found = small(tmp_path)
    assert "original/seed-1" in counted
    assert "original/seed-0" not in counted, "the recorded run is that one"
    assert found.verdict.startswith("δ from the rounded O; 2 of 2 seeds")
    assert {one.operations for one in found.rescues} == {
        ("delta-exact-O",),
        ("residual",),
        ("delta-dP.P",),
    }
    assert found.tables()[0].rows[0][:3] == ("the run", "nothing: BF16_FLASH2[out=e8m1]", "failed")
    assert recorded.status == "done", "its loss is finite; what fails it is the rule"
    replayed = (tmp_path / "out" / "rungs" / "fp32" / "seed-0" / "batches.npy").read_bytes()
    assert replayed == (tmp_path / "run" / "batches.npy").read_bytes()


def test_runs_that_are_there_are_taken_and_no_others(
    tmp_path: Path, counted: list[str], fewer_operations: None
) -> None:
    exact = AttentionPlan.of("torch:fp32")
    runs = {
        "twin": replace(SMALL, attention=exact, seed=1, metrics_every=10, preset="other"),
        "original": replace(SMALL, seed=1),
        "hotter": replace(SMALL, attention=exact, optimizer=Optimizer(learning_rate=2e-2)),
    }
    for name, config in runs.items():
        train(config, tmp_path / name)
    # what is asked for first is enough
    short: dict[str, Any] = {"workers": 1, "budget_steps": 3 * SMALL.steps}
    options = short | {"seeds": (0, 1), "recorded": [tmp_path / name for name in runs]}
    found = isolate(SMALL, out=tmp_path / "out", **options)
    assert not {"fp32/seed-1", "original/seed-1"} & set(counted)
    assert {"fp32/seed-0", "original/seed-0"} <= set(counted), "another learning rate, no record"
    original = found.rungs[0].runs[1]
    assert (original.made, original.folder) == (0, "../original")
    again = isolate(SMALL, out=tmp_path / "again", seeds=(1,), **short)
    both = (found.rungs[0].runs[1], again.rungs[0].runs[1])
    assert both[0].failed_at == both[1].failed_at is not None


def small(folder: Path, **options: Any) -> Isolation:
    return isolate(
        folder / "run", out=folder / "out", **({"seeds": (0, 1), "workers": 1} | options)
    )


def time_is_over() -> None:
    raise rung.OutOfTimeError


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("happens", "resumed"), [(time_is_over, 100), (ctrl_c, 120)])
def test_a_run_cut_off_in_the_middle_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None], resumed: int
) -> None:
    """After step 120: from the checkpoint of step 100, or from where the run saved itself when
    asked to stop.
    """
    config = rung_config(SMALL, SMALL.steps)
    whole = run_rung(job(config, tmp_path / "whole"))

    class Late(rung._Sentinel):
        def stop(self, row: dict[str, Any]) -> str | None:
            if row["step"] == 120:
                happens()
            return super().stop(row)

    monkeypatch.setattr(rung, "_Sentinel", Late)
    with pytest.raises(KeyboardInterrupt) if happens is ctrl_c else nullcontext():
        assert run_rung(job(config, tmp_path / "cut")) is None
    monkeypatch.undo()
    assert read_rows(tmp_path / "cut")[-1]["step"] == 120
    again = run_rung(job(config, tmp_path / "cut"))
    assert read_json(tmp_path / "cut" / "run.json")["resumed"][0]["step"] == resumed
    assert whole is not None
    assert again is not None
    assert (again.outcome, again.figures) == (whole.outcome, whole.figures)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def job(config: RunConfig, folder: Path, **options: Any) -> Job:
    return Job("test", config, folder, Rule(score_drift=1e9), config.steps, **options)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_rows(folder)]


def test_a_run_ends_as_soon_as_the_rule_says_so(tmp_path: Path) -> None:
    twin = replace(SMALL, attention=AttentionPlan.of("torch:fp32"))
    for name, config in (("twin", twin), ("run", SMALL)):
        found = run_rung(
            job(
                rung_config(config, 150),
                tmp_path / name,
                twin=tmp_path / "twin" if name == "run" else None,
            )
        )
    assert found is not None
    assert found.outcome == "failed"
    assert found.failed_at == found.last_step < 150
    assert read_json(tmp_path / "run" / "run.json")["status"] == "stopped"


def test_from_a_recorded_checkpoint(tmp_path: Path, counted: list[str]) -> None:
    """From step 50 the runs are bit for bit what they would have been from the beginning."""
    train(replace(SMALL, checkpoint_every=50, keep=None), tmp_path / "run")
    found = small(tmp_path, from_step=50, seeds=None, budget_steps=200)
    assert found.seeds == (0,)
    assert [run.made for run in next(r for r in found.rungs if r.name == "fp32").runs.values()] == [
        100
    ]
    original = tmp_path / "out" / "rungs" / "original" / "seed-0"
    if original.exists():
        assert (
            losses(original)
            == [pair for pair in losses(tmp_path / "run") if pair[0] > 50][: len(losses(original))]
        )
    with pytest.raises(
        ValueError, match=r"from_step=70: accepted are 0 and the run's checkpoints \[50, 100, 150\]"
    ):
        small(tmp_path, from_step=70)
    with pytest.raises(
        ValueError, match=r"seeds=\[0, 1\]: accepted are the run's own 0 with from_step"
    ):
        small(tmp_path, from_step=50)


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    run_rung(job(replace(SMALL, steps=5), tmp_path / "run"))
    with pytest.raises(
        ValueError, match=r"holds another run .steps: 5 → 6.; accepted is a new folder"
    ):
        run_rung(job(replace(SMALL, steps=6), tmp_path / "run"))


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def halfulp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


KILLER = """
import os, signal
def attention(query, key, value, *, is_causal, scale):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_is_one_line_and_leaves_a_readable_folder(
    halfulp: Run, tmp_path: Path
) -> None:
    """A kernel that kills its process, in a run of the command line with two workers."""
    (tmp_path / "kernel.py").write_text(KILLER, encoding="utf-8")
    config = replace(
        SMALL, attention=AttentionPlan.of("kernel.py:attention"), steps=4, metrics_every=1
    )
    train(replace(config, attention=AttentionPlan.of("torch:fp32")), tmp_path / "run")
    record = read_json(tmp_path / "run" / "run.json")
    named = replace(config, attention=AttentionPlan.of(f"{tmp_path / 'kernel.py'}:attention"))
    record |= new_record(named, record["data"], record["batches"], None)
    (tmp_path / "run" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    code, _, err = halfulp("isolate", "run", "--seeds", 2, "--workers", 2)
    assert (code, err.count("\n")) == (2, 1)
    assert "its run.json names code" in err
    assert "accepted with --trust" in err
    code, _, err = halfulp("isolate", "run", "--seeds", 2, "--workers", 2, "--trust")
    assert (code, err.count("\n")) == (2, 1)
    assert "a worker process was killed" in err
    assert "the same command goes on" in err
    assert read_json(tmp_path / "run-isolated" / "isolation.json")["status"] == "interrupted"


def test_the_command_prints_a_verdict_and_writes_a_page(halfulp: Run, tmp_path: Path) -> None:
    train(replace(SMALL, steps=60), tmp_path / "run")
    options = ("--seeds", 1, "--workers", 1, "--patience", 5, "--budget-steps", 300)
    code, out, err = halfulp("isolate", "run", *options)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "Substitution ladder" in text
    assert "verdict δ from the rounded O; 1 of 1 seed" in text
    assert "the budget of 300 steps of training was spent" in text
    assert "The page lies in run-isolated/report.html" in text
    page = (tmp_path / "run-isolated" / "report.html").read_text(encoding="utf-8")
    assert "What makes this run fail" in page
    code, out, _ = halfulp("isolate", "run", *options, "--json", "-")
    assert json.loads(out)["exit_code"] == code


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "run='nosuch': there is no such folder; accepted are one of halfulp train"),
        (["minutes", "--steps", "0"], "steps=0: accepted are 1 to the run's 2000"),
        (["minutes", "--seeds", "0"], "seeds=[]: accepted are different ones, at least one"),
        (
            ["minutes", "--from-step", "5"],
            "from_step=5: accepted are 0 and the run's checkpoints []",
        ),
        (
            ["minutes", "--loss-factor", "0.5"],
            "loss_factor=0.5: accepted is a finite factor above 1",
        ),
        (["minutes", "--workers", "0"], "workers=0: accepted is an integer of at least 1"),
        (["minutes", "--out", "no/where"], "out='no/where': there is no folder"),
    ],
)
def test_a_bad_argument_is_one_line_and_code_2(
    halfulp: Run, tmp_path: Path, arguments: list[str], says: str
) -> None:
    code, out, err = halfulp("isolate", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert list(tmp_path.iterdir()) == []
