"""`halfulp prescribe`: the planted cause's remedy is found and no other, the line that it prints
does what was tried, and where nothing helps or nothing is wrong it says so.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tests.isolate.test_user_model import MODEL

import halfulp
from halfulp import cli
from halfulp.isolate.climb import Substitution
from halfulp.prescribe import candidates
from halfulp.prescribe.candidates import Remedy
from halfulp.prescribe.prescribing import prescribe
from halfulp.prescribe.prescription import Prescription
from halfulp.prescribe.trials import Control, Seen, Trial, ranked
from halfulp.training.journal import read_rows
from halfulp.training.loop import train
from halfulp.training.user_model import user_run

MORE = """
def rising(seed, device):
    '''Whatever is done, a weight grows.'''
    model, adam, batch = make(seed, device)
    adam.register_step_post_hook(lambda *_: model.head.weight.data.mul_(1.2))
    return model, adam, batch

def late(seed, device):
    '''From step 9 on its sign changes besides.'''
    model, adam, batch = make(seed, device)
    def grow(*_):
        steps = adam.state[model.head.weight]["step"]
        model.head.weight.data.mul_(-2.0 if steps > 8 else 1.0)
    adam.register_step_post_hook(grow)
    return model, adam, batch

def fast(seed, device):
    return make(seed, device, rate=1.0)

def stepped(seed, device):
    model, adam, batch = make(seed, device)
    return model, (adam, torch.optim.lr_scheduler.StepLR(adam, 2, 0.5)), batch
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(MODEL + MORE)
    return path


def run_of(file, name, **fields):
    return user_run(f"{file}:{name}", metrics_every=1, autocast="bf16", **fields)


def losses(folder):
    return [row["loss"] for row in read_rows(folder)]


LINES = {
    "halfulp": "with halfulp.patch():",
    "qk-norm": 'with halfulp.planned(model, "attention: qk-norm"):',
    "qk-clip": "with halfulp.planned(model, optimizer=optimizer, most_score=0.01):",
    "rate-tenth": "halfulp.adjust(optimizer, rate=0.1)",
    "warm-up": "halfulp.adjust(optimizer, warm_up=2)",
    "clip": "torch.nn.utils.clip_grad_norm_(model.parameters(), ",
}


def test_the_printed_line_gives_the_same_losses(tmp_path, file, monkeypatch):
    monkeypatch.setattr(candidates, "MOST", 0.01)  # which the small model's scores are beyond
    found = prescribe(
        run_of(file, "stepped", steps=8),
        out=tmp_path / "out",
        seeds=2,
        only=tuple(LINES),
        workers=1,
    )
    assert {one.remedy.name for one in found.trials} == {*LINES, "fp32"}
    space: dict = {}
    exec(compile(MODEL + MORE, "mine.py", "exec"), space)
    as_it_is = losses(tmp_path / "out" / "rungs" / "original" / "seed-0")
    for trial in found.trials:
        line, name = trial.remedy.line, trial.remedy.name
        assert line.startswith(LINES.get(name, "with halfulp.planned("))
        torch.manual_seed(0)
        with torch.random.fork_rng():
            from halfulp.training.determinism import seed_generators

            seed_generators(torch.device("cpu"), 0, 0, 0)
            model, (optimizer, scheduler), batch = space["stepped"](0, "cpu")
        known = {"halfulp": halfulp, "model": model, "optimizer": optimizer, "torch": torch}
        if line.startswith("halfulp.adjust"):
            exec(line, known)
        around = eval(line[5:-1], known) if line.startswith("with") else nullcontext()
        made = []
        with around:
            for step in range(8):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(batch(step))
                loss.backward()
                if "clip_grad" in line:
                    exec(line, known)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                made.append(loss.item())
        recorded = losses(tmp_path / "out" / "rungs" / name / "seed-0")
        assert made == recorded, name
        assert made != as_it_is or name == "clip", name  # of small gradients it changes nothing


@pytest.mark.parametrize(
    ("name", "steps", "only", "cures", "says"),
    [
        ("linear", 4, (), ["fp32-cast", "fp32-blocks.1.down", "fp32"], "It is rounding: "),
        (
            "fast",
            16,
            ("rate-tenth",),
            ["rate-tenth"],
            "It is not rounding, in what was tried: with everything in fp32 the run fails too, on 2"
            " of 2 seeds. What helps is in the optimization: a tenth of the learning rate cures 2",
        ),
        (
            "rising",
            20,
            ("rate-tenth",),
            [],
            "Nothing tried here helps (2 remedies). It is not rounding, in what was tried",
        ),
        ("make", 8, (), [], "Nothing to cure: in 8 steps the run as it is does not fail, on 2"),
    ],
)
def test_a_planted_cause_has_its_remedy(tmp_path, file, name, steps, only, cures, says):
    run = run_of(file, name, steps=steps)
    found = prescribe(run, out=tmp_path / "out", seeds=2, only=only, workers=1)
    assert sorted(cures) == sorted(one.remedy.name for one in found.helping), found.verdict
    assert found.verdict.startswith(says)
    assert found.exit_code == (0 if cures else 1)
    plain = json.loads((tmp_path / "out" / "prescription.json").read_text())
    assert plain["verdict"] == found.verdict
    assert plain["helping"] == [one.remedy.name for one in found.helping]


def test_a_snapshot_is_gone_on_with_in_several_orders(tmp_path, file, capsys):
    """The user's own loop, watched: seed 0 is what follows in it, other seeds its steps in another
    order; the same command goes on, and a page shows it.
    """
    space: dict = {}
    exec(compile(MODEL, "mine.py", "exec"), space)
    torch.manual_seed(5)
    model, adam, batch = space["make"](0, "cpu")
    followed = []
    with halfulp.watch(model, folder=tmp_path / "mine", snapshots=1) as watcher:
        for step in range(9):
            if step == 3:
                watcher.snapshot()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(step))
            loss.backward()
            adam.step()
            adam.zero_grad()
            followed.append(loss.item())
    out = tmp_path / "out"
    line = [
        "prescribe",
        str(tmp_path / "mine"),
        "--out",
        str(out),
        "--steps",
        "6",
        "--workers",
        "1",
    ]
    line += ["--seeds", "2", "--remedy", "rate-half"]
    assert cli.main(line) == 2
    assert "is a snapshot; accepted with --workload" in capsys.readouterr().err
    line += ["--workload", f"{file}:make"]
    assert cli.main(line) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Steps 4 to 9, seeds 0, 1: a seed is another order of the batches" in said
    runs = [out / "rungs" / "original" / f"seed-{seed}" for seed in (0, 1)]
    assert losses(runs[0]) == followed[3:]
    assert losses(runs[1]) != followed[3:]
    plain = json.loads((out / "prescription.json").read_text())
    assert {one["name"] for one in plain["trials"]} == {"fp32", "rate-half"}
    assert not plain["alike"]
    assert plain["symptoms"] == ["snapshot of step 4: asked for"]
    written = (runs[1] / "metrics.jsonl").stat().st_mtime_ns
    assert cli.main([*line, "--json", "-"]) == 1
    again = json.loads(capsys.readouterr().out)
    assert again["verdict"] == plain["verdict"]
    assert (runs[1] / "metrics.jsonl").stat().st_mtime_ns == written
    assert cli.main(["report", str(out)]) == 0
    assert "Nothing tried here helps" in (out / "report.html").read_text()


def test_a_run_folder_is_gone_on_with_from_its_last_good_checkpoint(tmp_path, file):
    run = replace(run_of(file, "late", steps=24), checkpoint_every=4, keep=9)
    folder = tmp_path / "run"
    recorded = train(run, folder).curve("loss")
    name = f"{file}:late"
    found = prescribe(
        folder, out=tmp_path / "out", workload=name, seeds=2, only=("rate-tenth",), workers=1
    )
    assert found.start == 8, "the last checkpoint before it goes wrong"
    assert any(text.startswith("the recorded run failed: ") for text in found.symptoms)
    rungs = tmp_path / "out" / "rungs" / "original"
    went_on = losses(rungs / "seed-0")
    assert went_on == list(recorded[found.start : found.start + len(went_on)])
    assert losses(rungs / "seed-1")[0] != went_on[0], "other batches, in another order"
    assert found.verdict.startswith("Nothing tried here helps")
    other = prescribe(
        folder, out=tmp_path / "two", workload=name, seeds=2, only=("rate-tenth",), workers=1,
        from_step=4, steps=6,
    )  # fmt: skip
    assert (other.start, other.horizon) == (4, 10)
    with pytest.raises(ValueError, match=r"from_step=5: accepted are 0 and .*4, 8"):
        prescribe(folder, out=tmp_path / "no", workload=name, from_step=5)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["nowhere"], "there is no such folder; accepted are one of halfulp train"),
        (["seconds", "--seeds", "1"], "seeds=1: accepted are 2 or more"),
        (["seconds", "--remedy", "halfulpp"], "did you mean 'halfulp'?"),
        (["seconds", "--steps", "0"], "steps=0: accepted is an integer of at least 1"),
        (["seconds", "--from-step", "9"], "from_step=9: accepted with the folder of a run"),
    ],
)
def test_a_bad_argument_is_one_line(tmp_path, capsys, monkeypatch, more, says):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["prescribe", *more]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def runs_with(cures, group="rounding", name="x", noise=0.0, losses=(1.0, 1.0)):
    """A trial of three seeds, of which the run fails on all."""

    def one(loss, trouble=""):
        losses = dict.fromkeys(range(1, 11), loss) | {1: 1e-6}
        return Seen(None, losses, 10, False, trouble)  # type: ignore[arg-type]

    control = Control(
        {s: replace(one(losses[0]), run=Failed()) for s in range(3)},
        {s: one(losses[0] * math.exp(noise * (-1) ** s)) for s in range(3)},
        dict.fromkeys(range(3), "it fails"),
        remedies=10,
    )
    made = {s: one(losses[1], "" if s < cures else "it fails") for s in range(3)}
    change = Substitution(name, "remedy", name, {})
    return Trial(Remedy(change, group, "an operation", "", ""), made, control)


class Failed:
    outcome = "failed"


def test_what_chaos_makes_of_a_rounding_is_no_cure():
    """A loss 20 % lower on every seed counts where the run itself repeats, not where it wanders."""
    assert runs_with(3, losses=(1.0, 0.8)).effect == "cures"
    assert runs_with(2, losses=(1.0, 0.8)).effect == "helps on some seeds"
    assert runs_with(3, losses=(1.0, 0.8), noise=0.3).effect == "no effect"
    assert runs_with(3, losses=(1.0, 1e-4), noise=0.3).effect == "cures"
    lucky = runs_with(3, losses=(1.0, 0.8), noise=0.3, name="fp32")
    told = Prescription(
        "run", {}, "", (0, 1, 2), 0, 10, False, "done", (), lucky.control, (lucky,), (), (), (),
        1.0, 30, "",
    )  # fmt: skip
    assert told.verdict.startswith(
        "Nothing tried here helps (1 remedy). Whether it is rounding is not known: fp32 gets"
        " through 2 of 3 seeds, with no lower loss"
    )
    assert "no effect, 2 of 3 by chance" in told.tables()[0].rows[0]
    assert runs_with(3, losses=(1.0, 0.97)).effect == "no effect"
    assert runs_with(3, losses=(math.nan, 0.97)).effect == "cures"
    assert runs_with(3, losses=(math.nan, math.nan)).effect == "no effect"
    assert runs_with(0, losses=(1.0, 2.0)).effect == "worse"
    order = ranked([runs_with(3, losses=(1.0, 0.3)), runs_with(3, losses=(1.0, 0.1), name="y")])
    assert [one.remedy.name for one in order] == ["x", "y"]  # alike: as they were given
    order = ranked([runs_with(3, losses=(1.0, 0.5)), runs_with(3, losses=(1.0, 0.1), name="y")])
    assert [one.remedy.name for one in order] == ["y", "x"]
