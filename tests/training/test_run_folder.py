"""What a run folder may be after a crash, a full disk, a bad copy or somebody's hand, and what a
run makes of it: the same bits, or one line that says what is wrong.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from halfulp import cli
from halfulp.runs import sealed
from halfulp.runs.lock import Lock
from halfulp.runs.record import new_record as any_record
from halfulp.training import journal
from halfulp.training.attention import AttentionPlan
from halfulp.training.checkpoint import (
    checkpoint_steps,
    checkpoints,
    load_checkpoint,
    prune,
    save_checkpoint,
)
from halfulp.training.config import Language, LayerTask, Optimizer, RunConfig
from halfulp.training.journal import read_rows
from halfulp.training.loop import train
from halfulp.training.run_json import new_record, read_record
from halfulp.training.trust import named_code, trusted

CONFIG = RunConfig(
    LayerTask(batch=2, tokens=8, width=8, constant=2),
    AttentionPlan.of("mine"),
    Optimizer(1e-2, clip=0.5),
    steps=12,
    metrics_every=2,
    checkpoint_every=4,
    keep=None,
)


def drawing(query, key, value, *, is_causal, scale):
    """Attention with dropout, which draws from all three global generators."""
    query = query * (1 + 0.01 * random.random()) * (1 + 0.01 * np.random.random())  # noqa: NPY002
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, dropout_p=0.3
    )


def drawn(folder: Path | None = None, config: RunConfig = CONFIG, **options):
    return train(config, folder, own={"mine": drawing}, **options)


def bits(run) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in run.workload.model.named_parameters()}


def same(run, other) -> bool:
    return run.curve("loss") == other.curve("loss") and bits(run) == bits(other)


def unfinished(folder: Path, source: Path) -> Path:
    """A copy of a run as a killed process leaves it: the record says running, its lock lies there
    free, and the last checkpoint is not written yet.
    """
    shutil.copytree(source, folder)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"status": "running", "ended": None}))
    shutil.rmtree(folder / "checkpoints" / "step-12")
    (folder / ".lock").write_text("process 1 on nowhere\n")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    torch.set_num_threads(1)
    return drawn(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def broken(whole, tmp_path) -> Path:
    return unfinished(tmp_path / "run", whole.folder)


def test_what_attention_draws_is_the_same_whatever_the_caller_drew_before(whole) -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    assert same(drawn(), whole)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert not same(drawn(config=replace(CONFIG, seed=1, data_seed=0)), whole)
    losses = drawn(config=replace(CONFIG, optimizer=Optimizer(1e-30))).curve("loss")
    assert len(set(losses)) == len(losses), "every step draws anew"


def test_what_attention_draws_is_the_same_after_a_resume_from_a_checkpoint_and_measured(
    whole, broken
) -> None:
    random.random()
    torch.rand(3)
    assert same(drawn(broken, resume=True), whole)
    tail = drawn(start=load_checkpoint(whole.folder / "checkpoints" / "step-8"))
    assert bits(tail) == bits(whole)
    text = replace(
        CONFIG,
        workload=Language(layers=1, heads=2, width=16, context=8),
        optimizer=Optimizer(1e-2),
        batch=2,
        steps=4,
    )
    plain, measured = (drawn(config=replace(text, measure_every=n)) for n in (0, 2))
    assert same(plain, measured)
    assert measured.measures[0]["measure"]["loss"] == pytest.approx(measured.curve("loss")[0])


def flipped(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["model.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("byte", [-2, 700, 12])
def test_an_altered_byte_makes_a_checkpoint_a_torn_one(whole, broken, file, byte) -> None:
    """A flipped bit of a weight once changed the result in silence."""
    path = broken / "checkpoints" / "step-8" / file
    flipped(path, byte % path.stat().st_size)
    with pytest.warns(UserWarning, match=r"skipped: .*step-8"):
        ended = drawn(broken, resume=True)
    assert same(ended, whole)
    assert [taken["step"] for taken in read_record(broken)["resumed"]] == [4]


def test_a_checkpoint_under_another_steps_name_is_a_torn_one(whole, broken) -> None:
    folder = broken / "checkpoints"
    (folder / "step-8").rename(folder / "step-10")
    (folder / "step-007").mkdir()
    with pytest.warns(UserWarning, match=r"skipped: .*step-10.*is of step 8"):
        assert same(drawn(broken, resume=True), whole)


def test_another_runs_checkpoint_is_not_taken_up(whole, broken, tmp_path) -> None:
    """Of the same shapes, as twins have them."""
    drawn(tmp_path / "twin", config=replace(CONFIG, seed=1, data_seed=0))
    shutil.copytree(
        tmp_path / "twin" / "checkpoints" / "step-12", broken / "checkpoints" / "step-12"
    )
    with pytest.warns(UserWarning, match=r"skipped: .* step 12: it is another run's"):
        assert same(drawn(broken, resume=True), whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: replace(c, optimizer={k: v for k, v in c.optimizer.items() if "exp" in k}),
        lambda c: replace(c, optimizer={k: v[:1] if v.ndim else v for k, v in c.optimizer.items()}),
        lambda c: replace(c, optimizer=c.optimizer | {"nobody/step": torch.tensor(1.0)}),
        lambda c: replace(c, model={k: v.double() for k, v in c.model.items()}),
        lambda c: replace(c, model={k: v for k, v in c.model.items() if k != "key"}),
        lambda c: replace(c, scaler={"scale": "much"}),
        lambda c: replace(c, step=99),
    ],
)
def test_a_malformed_state_with_a_sound_hash_is_a_torn_one(whole, broken, change) -> None:
    config = replace(CONFIG, autocast="fp16")  # whose scaler has a state
    straight = drawn(config=config)
    shutil.rmtree(broken)
    drawn(broken, config=config, stop=lambda row: "enough" if row["step"] == 8 else None)
    record = read_record(broken) | {"status": "running"}
    (broken / "run.json").write_text(json.dumps(record))
    bad = change(load_checkpoint(broken / "checkpoints" / "step-8"))
    shutil.rmtree(broken / "checkpoints" / "step-8")
    save_checkpoint(broken / "checkpoints", bad)
    with pytest.warns(UserWarning, match=f"skipped: .*step.{bad.step}"):
        assert same(drawn(broken, config=config, resume=True), straight)


def test_an_altered_line_is_noticed(whole, broken) -> None:
    path = broken / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    row = json.loads(lines[1])
    lines[1] = json.dumps(row | {"loss": row["loss"] / 2}) + "\n"
    path.write_text("".join(lines))
    with pytest.warns(UserWarning, match="up to step 8 are not those that the run wrote"):
        assert bits(drawn(broken, resume=True)) == bits(whole)


def test_an_emptied_metrics_file_is_noticed(whole, broken, tmp_path) -> None:
    (broken / "metrics.jsonl").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"4 of the lines up to step 8 are missing|not those that"):
        ended = drawn(broken, resume=True)
    assert bits(ended) == bits(whole)
    assert read_record(broken)["resumed"][-1]["lost lines"] == 4
    over = tmp_path / "over"
    shutil.copytree(whole.folder, over)
    lines = (over / "metrics.jsonl").read_text().splitlines(keepends=True)
    (over / "metrics.jsonl").write_text("".join(lines[:-2]))
    with pytest.warns(UserWarning, match=r"2 of the lines up to step 12|not those"):
        drawn(over, resume=True)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 4}x',
        '{"step": true, "loss": 1}',
        '{"step": -1, "loss": 1}',
        '{"step": 4, "loss": "1"}',
        '{"step": 4, "loss": 1e999}',
        '{"step": 4, "loss": NaN}',
        '{"step": 4, "loss": 1' + "0" * 40 + "}",
        '{"step": 4, "measure": {"entropy": [1]}}',
        '{"step": 4, "measure": {"entropy": [["a"]]}}',
        '{"step": 4, "measure": 3}',
        "[" * 100_000,
        "[4]",
        "\udcff",
    ],
)
def test_a_line_that_no_run_writes_is_left_out(tmp_path, line) -> None:
    good = '{"step": 2, "loss": null, "measure": {"entropy": [[1.5, null], []], "loss": 3}}\n'
    (tmp_path / "metrics.jsonl").write_text(good + line, errors="surrogateescape")
    with pytest.warns(UserWarning, match="line 2 is torn and was left out"):
        assert [row["step"] for row in read_rows(tmp_path)] == [2]


def test_an_altered_order_or_record_does_not_go_on(broken) -> None:
    for name, byte, says in (
        ("batches.npy", -1, "its SHA-256 is another"),
        ("batches.npy", 0, "accepted is a whole .npy file"),
        ("run.json", 0, "there is no run.json, or it is torn"),
    ):
        flipped(broken / name, byte)
        with pytest.raises(ValueError, match=says):
            drawn(broken, resume=True)
        flipped(broken / name, byte)
    record = json.loads((broken / "run.json").read_text())
    record["config"]["optimizer"]["learning_rate"] = 0.02
    (broken / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"what is sealed .* was altered"):
        drawn(broken, resume=True)


def test_two_processes_do_not_write_one_run(whole, broken, tmp_path) -> None:
    lock = Lock(broken)
    with pytest.raises(ValueError, match=f"being written by process {os.getpid()}"):
        drawn(broken, resume=True)
    lock.release()
    with pytest.raises(ValueError, match="being written by process"):
        drawn(tmp_path / "new", stop=lambda row: drawn(tmp_path / "new", resume=True) and "no")
    assert same(drawn(broken, resume=True), whole)
    assert not (broken / ".lock").exists()


def test_a_folder_killed_before_it_had_a_record_is_used_again(whole, tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").write_text("process 1 on nowhere\n")
    (folder / "batches.npy").write_bytes(b"half")
    (folder / ".halfulp-abcdefgh").write_bytes(b"half")
    assert same(drawn(folder), whole)
    assert not list(folder.glob(".*"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "batches.npy").write_bytes(b"mine")  # without a lock it is the user's
    with pytest.raises(ValueError, match="it is not empty"):
        drawn(tmp_path / "own")


def test_leftovers_are_swept_on_resume(whole, broken) -> None:
    (broken / ".halfulp-abcdefgh").write_bytes(b"half")
    (broken / "checkpoints" / ".halfulp-12345678").mkdir()
    (broken / "checkpoints" / ".halfulp-12345678" / "model.safetensors").write_bytes(b"half")
    assert same(drawn(broken, resume=True), whole)
    assert not list(broken.rglob(".halfulp-*"))


def test_a_run_that_is_over_says_what_it_has_lost_and_keeps_no_lock(whole, tmp_path) -> None:
    over = tmp_path / "over"
    shutil.copytree(whole.folder, over)
    (over / ".lock").write_text("process 1 on nowhere\n")
    assert same(drawn(over, resume=True), whole)
    assert not (over / ".lock").exists()
    shutil.rmtree(over / "checkpoints" / "step-12")
    with pytest.warns(UserWarning, match="its last whole checkpoint is of step 8"):
        drawn(over, resume=True)


def test_checkpoints_behind_a_link_are_left_alone(whole, tmp_path) -> None:
    """Pruning once removed the checkpoints of another run."""
    other = tmp_path / "other"
    shutil.copytree(whole.folder, other)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(other / "checkpoints")
    prune(tmp_path / "run" / "checkpoints", 0)
    assert checkpoint_steps(other / "checkpoints") == [4, 8, 12]
    with pytest.raises(ValueError, match="is a link; accepted is a folder of the run"):
        save_checkpoint(tmp_path / "run" / "checkpoints", next(checkpoints(other / "checkpoints")))
    (other / "checkpoints" / "step-2").symlink_to(tmp_path)
    prune(other / "checkpoints", 0)
    assert checkpoint_steps(other / "checkpoints") == [12]
    assert (tmp_path / "run").is_dir()


class Full:
    """A disk that is full from the n-th write on."""

    def __init__(self, monkeypatch, function: str, module, after: int) -> None:
        real = getattr(module, function)
        self.calls = 0

        def write(*args, **options):
            self.calls += 1
            if self.calls > after:
                raise OSError(errno.ENOSPC, "No space left on device", "file")
            return real(*args, **options)

        monkeypatch.setattr(module, function, write)


@pytest.mark.parametrize(
    ("module", "function", "after"),
    [
        (journal, "save_checkpoint", 1),
        (sealed, "sync_file", 3),
        (sealed, "write_json", 1),
        (journal, "line_text", 5),
        (journal, "write_json", 1),
    ],
)
def test_a_full_disk_is_said_and_loses_nothing(
    whole, tmp_path, monkeypatch, module, function, after
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        full = Full(patched, function, module, after)
        with pytest.raises(OSError, match="No space left on device"):
            drawn(folder)
        assert full.calls > after
        assert not list(folder.rglob(".halfulp-*"))
    assert not (folder / ".lock").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(drawn(folder, resume=True), whole)


LIMITED = """
import resource, signal, sys
from halfulp import cli
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_file_that_may_grow_no_more_ends_training_in_a_line_that_says_how_to_go_on(
    tmp_path, capsys
) -> None:
    """What the system itself says: no file may be larger than 20 kB, and a checkpoint is."""
    small = ["--steps", "6", "--set", "workload.width=32", "--set", "workload.context=8"]
    small += ["--set", "batch=2", "--data", "synthetic", "--set", "metrics_every=1"]
    arguments = ["train", "minutes", *small, "--out"]
    folder, straight = tmp_path / "run", tmp_path / "whole"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments, str(folder)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert "File too large" in done.stderr
    assert f"what was saved lies there: halfulp train --resume {folder}\n" in done.stderr
    assert cli.main(["train", "--resume", str(folder)]) == 0
    assert cli.main([*arguments, str(straight)]) == 0
    ends = [
        load_file(f / "checkpoints" / "step-6" / "model.safetensors") for f in (folder, straight)
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    capsys.readouterr()


def test_code_that_a_folder_names_waits_for_a_word(tmp_path) -> None:
    plan = AttentionPlan.of("torch:flash", "head 0: BF16_FLASH2[out=fp32]", "layer 0: kernel.py:f")
    config = replace(CONFIG, attention=plan)
    assert named_code(config) == ["kernel.py:f"]
    with pytest.raises(ValueError, match=r"names code, 'kernel\.py:f', .* accepted with --trust"):
        trusted(config, tmp_path, trust=False)
    assert trusted(config, tmp_path, trust=True) is config
    for choice in ("os:system", "a.b:c", "/x/y.py:f", "halfulpx:f", "torchx.y:f"):
        assert named_code(replace(CONFIG, attention=AttentionPlan.of(choice))) == [choice]
    for choice in (
        "torch",
        "torch:fp32",
        "halfulp:cpu",
        "BF16_FLASH2",
        "recipe:BF16_FLASH2",
        "sdpa",
    ):
        assert named_code(replace(CONFIG, attention=AttentionPlan.of(choice))) == []


MARKING = """
from pathlib import Path
from torch.nn.functional import scaled_dot_product_attention as attention
Path(__file__).with_suffix(".ran").write_text("x")
"""


def test_no_command_runs_what_a_folder_names(whole, tmp_path, capsys, monkeypatch) -> None:
    """A pictures run with a checkpoint was drawn by `report` with the code that run.json named."""
    monkeypatch.chdir(tmp_path)
    kernel, ran = tmp_path / "kernel.py", tmp_path / "kernel.ran"
    kernel.write_text(MARKING, encoding="utf-8")
    small = ["--steps", "2", "--set", "workload.width=16", "--set", "workload.layers=1"]
    small += ["--set", "batch=2", "--set", "workload.count=4", "--data", "shapes"]
    assert cli.main(["train", "pictures", *small, "--out", "run"]) == 0
    record = read_record(Path("run"))
    record["config"]["attention"] = [f"{kernel}:attention"]
    sealed = {"data": record["data"], "batches": record["batches"]}
    record["seal"] = any_record("train", record["config"], None, **sealed)["seal"]
    record["status"] = "running"
    Path("run/run.json").write_text(json.dumps(record))
    shutil.copytree("run", "twin")
    capsys.readouterr()
    page = Path("page.html")
    assert cli.main(["report", "run", "--html", str(page)]) == 0
    assert "Drawn with torch:fp32 in the place of" in page.read_text(encoding="utf-8")
    assert cli.main(["compare", "run", "twin", "--html", str(page)]) == 0
    for command in (["train", "--resume", "run"], ["isolate", "run", "--out", "isolated"]):
        capsys.readouterr()
        assert cli.main(command) == 2
        assert "accepted with --trust" in capsys.readouterr().err
    assert not ran.exists(), "nothing that a folder names is run"
    assert cli.main(["report", "run", "--html", str(page), "--trust"]) == 0
    assert ran.exists()


def test_new_record_is_one_for_all_kinds() -> None:
    record = new_record(CONFIG, {"data": "x"}, "0", None, start=3)
    assert {"halfulp", "kind", "status", "seal", "machine", "versions"} <= record.keys()
    assert (record["start"], record["status"], record["kind"]) == (3, "running", "train")
