"""The loop: equal configurations give equal bits, whatever stops a run and whenever it is taken up
again.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from halfulp.runs.threads import one_thread
from halfulp.training.attention import AttentionPlan
from halfulp.training.checkpoint import checkpoint_steps, checkpoints, load_checkpoint
from halfulp.training.config import Language, LayerTask, Optimizer, RunConfig
from halfulp.training.journal import read_order, read_rows
from halfulp.training.loop import train
from halfulp.training.run_json import config_as_dict, config_from_dict, read_record
from halfulp.training.tokens import write_tokens
from halfulp.training.updates import learning_rate

CONFIG = RunConfig(
    LayerTask(batch=2, tokens=8, width=8, constant=2),
    AttentionPlan.of("BF16_FLASH2"),
    Optimizer(1e-2, warm_up=5, schedule="cosine", least_rate=1e-4, clip=0.5),
    steps=24,
    metrics_every=3,
    checkpoint_every=7,
    keep=None,
)
TEXT = RunConfig(
    Language(layers=2, heads=2, width=16, context=12, vocabulary=256),
    AttentionPlan.of("torch:math"),
    Optimizer(1e-2, clip=1.0),
    steps=6,
    batch=4,
    metrics_every=1,
)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def bits(run) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in run.workload.model.named_parameters()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing stopped."""
    with one_thread():
        return train(CONFIG, tmp_path_factory.mktemp("whole") / "run")


def same(run, other) -> bool:
    return (
        run.curve("loss") == other.curve("loss")
        and run.steps == other.steps
        and bits(run) == bits(other)
    )


def test_the_same_configuration_gives_the_same_bits(whole) -> None:
    again = train(CONFIG)
    assert same(again, whole)
    assert again.folder is None
    assert not same(train(replace(CONFIG, seed=1)), whole)


def test_twins_share_weights_and_data_whatever_their_attention() -> None:
    one, other = (
        train(replace(TEXT, attention=AttentionPlan.of(a), steps=1))
        for a in ("torch:fp32", "BF16_AUTHORS")
    )
    assert one.curve("loss")[0] == pytest.approx(other.curve("loss")[0], rel=1e-3)
    assert np.array_equal(*(run.workload.order(5, 4) for run in (one, other)))
    reseeded = train(replace(TEXT, seed=5, data_seed=0, steps=1))
    assert np.array_equal(reseeded.workload.order(5, 4), one.workload.order(5, 4))
    assert bits(reseeded) != bits(one)


def test_the_order_of_batches_is_recorded_and_replayed(tmp_path) -> None:
    first = train(TEXT, tmp_path / "first")
    order = read_order(tmp_path / "first")
    assert order.shape == (6, 4)
    assert np.array_equal(order, first.workload.order(6, 4))
    replayed = train(replace(TEXT, data_seed=TEXT.seed), batches=order)
    assert same(replayed, first)
    reversed_order = train(TEXT, batches=order[::-1].copy())
    assert not same(reversed_order, first)
    with pytest.raises(ValueError, match="batches of shape"):
        train(TEXT, batches=order[:3])
    for beyond in (order + 10**9, order - 10**9):
        with pytest.raises(ValueError, match="batches: windows start at"):
            train(TEXT, batches=beyond)


DEATHS = """
import json, os, signal, sys
from pathlib import Path
import torch
from halfulp.runs import folder as files, sealed
from halfulp.training import journal, loop
from halfulp.training.run_json import config_from_dict
torch.set_num_threads(1)
config = config_from_dict(json.loads(sys.argv[1]))

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Sink:
    def __init__(self, step):
        self.step = step
    def row(self, row):
        if row["step"] == self.step:
            die()
    def close(self): ...

def run(folder, moment):
    # the second one, after its files were written and before it has its name
    if moment == "checkpoint":
        seen = []
        def sync(path):
            seen.append(path)
            if len(seen) == 5:
                die()
        sealed.sync_file = sync
    if moment == "begin":  # the folder is there and nothing of the run
        journal.new_record = die
    sinks = [Sink(int(moment))] if moment.isdigit() else []
    loop.train(config, Path(folder), resume=True, sinks=sinks)

for one in sys.argv[2:]:  # a process each, which has imported everything
    if not (child := os.fork()):
        run(*one.rsplit(":", 1))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_run_killed_again_and_again_ends_in_the_same_bits(whole, tmp_path) -> None:
    deaths = {"early": ("begin", "3"), "late": ("checkpoint", "18")}
    command = [sys.executable, "-c", DEATHS, json.dumps(config_as_dict(CONFIG))]
    command += [f"{tmp_path / run}:{moment}" for run in deaths for moment in deaths[run]]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * 4
    for run, step in (("early", 0), ("late", 14)):
        folder = tmp_path / run
        last = max(checkpoint_steps(folder / "checkpoints"), default=0)
        ended = train(CONFIG, folder, resume=True)
        assert last == step
        assert same(ended, whole)
        assert [row["step"] for row in read_rows(folder)] == list(whole.steps)
        record = read_record(folder)
        assert record["status"] == "done"
        assert [taken["step"] for taken in record["resumed"]][-1] == last
        assert not list((folder / "checkpoints").glob(".*"))


def test_a_torn_checkpoint_is_skipped_with_a_warning(whole, tmp_path) -> None:
    folder = tmp_path / "run"
    train(replace(CONFIG), folder, stop=lambda row: "enough" if row["step"] == 21 else None)
    record = json.loads((folder / "run.json").read_text())
    # as a killed run leaves it
    (folder / "run.json").write_text(json.dumps(record | {"status": "running"}))
    newest = folder / "checkpoints" / "step-21" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-8])
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 24, "lo')
    with pytest.warns(UserWarning, match=r"skipped.*step-21|torn") as warned:
        ended = train(CONFIG, folder, resume=True)
    assert {"step-21" in str(w.message) for w in warned} == {True, False}
    assert same(ended, whole)
    with pytest.raises(ValueError, match="accepted is a whole one"):
        load_checkpoint(tmp_path / "run" / "checkpoints" / "step-0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_finishes_the_step_and_can_go_on(whole, tmp_path, number) -> None:
    class Ask:
        def row(self, row):
            if row["step"] == 12:
                os.kill(os.getpid(), number)

        def close(self): ...

    before = signal.getsignal(number)
    run = train(CONFIG, tmp_path / "run", sinks=[Ask()])
    assert (run.status, run.steps[-1]) == ("interrupted", 12)
    assert signal.getsignal(number) == before
    assert read_record(tmp_path / "run")["status"] == "interrupted"
    assert max(checkpoint_steps(tmp_path / "run" / "checkpoints")) == 12
    assert same(train(CONFIG, tmp_path / "run", resume=True), whole)


def test_asked_twice_it_stops_at_once_and_leaves_a_record(tmp_path) -> None:
    class Insist:
        def row(self, row):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

        def close(self): ...

    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, tmp_path / "run", sinks=[Insist()])
    assert read_record(tmp_path / "run")["status"] == "interrupted"


def test_what_breaks_inside_closes_the_record(tmp_path) -> None:
    def broken(query, key, value, *, is_causal, scale):
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        train(
            replace(CONFIG, attention=AttentionPlan.of("mine")),
            tmp_path / "run",
            own={"mine": broken},
        )
    assert read_record(tmp_path / "run")["status"] == "broken"


def test_a_run_that_is_over_is_returned_as_it_stands(whole) -> None:
    before = {p: p.stat().st_mtime_ns for p in whole.folder.rglob("*")}
    assert same(train(CONFIG, whole.folder, resume=True), whole)
    assert {p: p.stat().st_mtime_ns for p in whole.folder.rglob("*")} == before


def test_nothing_that_is_there_is_written_over(whole) -> None:
    with pytest.raises(ValueError, match="it is not empty"):
        train(CONFIG, whole.folder)
    with pytest.raises(ValueError, match=r"another configuration \(steps: 24 → 25\)"):
        train(replace(CONFIG, steps=25), whole.folder, resume=True)
    with pytest.raises(ValueError, match="accepted with the folder"):
        train(CONFIG, resume=True)


def test_a_run_starts_from_another_runs_checkpoint(whole) -> None:
    start = load_checkpoint(whole.folder / "checkpoints" / "step-14")
    tail = train(CONFIG, start=start)
    assert tail.steps == (15, 18, 21, 24)
    assert bits(tail) == bits(whole)
    other = replace(CONFIG, workload=LayerTask(batch=2, tokens=8, width=4, constant=2))
    with pytest.raises(ValueError, match=r"checkpoint: query has shape \(8, 8\)"):
        train(other, start=start)


@pytest.mark.parametrize(("keep", "left"), [(None, [7, 14, 21, 24]), (1, [21, 24]), (0, [24])])
def test_old_checkpoints_go(tmp_path, keep, left) -> None:
    train(replace(CONFIG, keep=keep), tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == left
    assert next(checkpoints(tmp_path / "run" / "checkpoints")).step == 24


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path) -> None:
    calls = []

    def breaking(query, key, value, *, is_causal, scale):
        calls.append(1)
        return value * (math.nan if len(calls) == 10 else 1.0)

    config = replace(CONFIG, attention=AttentionPlan.of("mine"))
    run = train(config, tmp_path / "run", own={"mine": breaking})
    assert (run.status, run.steps[-1], run.reason) == ("failed", 10, "the loss of step 10 is nan")
    rows = read_rows(tmp_path / "run")
    assert rows[-1]["loss"] is None
    # weights that are NaN are not worth keeping
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [7]
    as_recorded = train(config, tmp_path / "run", resume=True, own={"mine": breaking})
    assert (as_recorded.status, as_recorded.reason) == (run.status, run.reason)
    assert math.isnan(as_recorded.curve("loss")[-1])


def test_stop_sees_every_line_again_after_a_resume(tmp_path) -> None:
    def third():
        seen = []
        return lambda row: (
            f"{len(seen)} lines" if (seen.append(row["step"]) or len(seen) >= 5) else None
        )

    class Ask:
        def row(self, row):
            if row["step"] == 9:
                os.kill(os.getpid(), signal.SIGINT)

        def close(self): ...

    straight = train(CONFIG, stop=third())
    assert (straight.status, straight.reason, straight.steps[-1]) == ("stopped", "5 lines", 15)
    train(CONFIG, tmp_path / "run", stop=third(), sinks=[Ask()])
    resumed = train(CONFIG, tmp_path / "run", resume=True, stop=third())
    assert (resumed.status, resumed.steps) == ("stopped", straight.steps)


def test_micro_batches_add_up_to_the_batch() -> None:
    one, parts = (
        train(replace(TEXT, accumulation=n, optimizer=Optimizer(1e-2, clip=None))) for n in (1, 4)
    )
    assert parts.curve("loss") == pytest.approx(one.curve("loss"), rel=1e-4)
    assert parts.curve("grad_norm") == pytest.approx(one.curve("grad_norm"), rel=1e-3)
    with pytest.raises(ValueError, match="accumulation=3"):
        replace(TEXT, accumulation=3)


def test_clipping_and_the_reported_norm_are_of_the_whole_gradient() -> None:
    free, clipped = (
        train(replace(TEXT, steps=1, optimizer=Optimizer(1e-2, clip=c))) for c in (None, 0.1)
    )
    assert clipped.curve("grad_norm")[0] == pytest.approx(free.curve("grad_norm")[0], rel=1e-6)
    norms = [
        torch.stack([p.grad.norm() for p in run.workload.model.parameters()]).norm()
        for run in (free, clipped)
    ]
    assert norms[0].item() == pytest.approx(free.curve("grad_norm")[0], rel=1e-5)
    assert norms[1].item() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_autocast_trains_in_half_precision_and_resumes_exactly(tmp_path, autocast) -> None:
    config = replace(
        TEXT, autocast=autocast, attention=AttentionPlan.of("torch:flash"), checkpoint_every=2
    )
    straight = train(config)
    exact = train(replace(config, autocast="none", attention=AttentionPlan.of("torch:fp32")))
    assert straight.curve("loss") == pytest.approx(exact.curve("loss"), rel=2e-2)
    assert straight.curve("loss") != exact.curve("loss")
    assert all(p.dtype == torch.float32 for p in straight.workload.model.parameters())
    train(config, tmp_path / "run", stop=lambda row: "enough" if row["step"] == 4 else None)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(record | {"status": "running"}))
    assert same(train(config, tmp_path / "run", resume=True), straight)


def test_the_rate_warms_up_and_follows_the_cosine() -> None:
    cosine = Optimizer(1e-3, warm_up=10, schedule="cosine", least_rate=1e-5)
    assert [learning_rate(cosine, n, 110) for n in (1, 5, 10)] == pytest.approx([1e-4, 5e-4, 1e-3])
    assert learning_rate(cosine, 60, 110) == pytest.approx((1e-3 + 1e-5) / 2)
    assert learning_rate(cosine, 110, 110) == pytest.approx(1e-5)
    assert learning_rate(Optimizer(1e-3), 1, 10) == 1e-3


@pytest.mark.parametrize(
    "config", [CONFIG, TEXT, replace(TEXT, attention=AttentionPlan.of("torch", "layer 1: FP32"))]
)
def test_configurations_read_back_from_json(config) -> None:
    assert config_from_dict(json.loads(json.dumps(config_as_dict(config)))) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": "many"}, "accepted is int"),
        ({"steps": 0}, "steps=0"),
        ({"speed": 3}, "speed"),
        ({"attention": ["layer 1: torch"]}, "first a choice for every head"),
        ({"workload": {"kind": "Unknown"}}, "config"),
    ],
)
def test_a_configuration_that_is_none_is_refused_in_a_line(change, said) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        config_from_dict(config_as_dict(CONFIG) | change)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_out_of_time_it_saves_the_step_and_can_go_on(whole, tmp_path) -> None:
    run = train(CONFIG, tmp_path / "run", deadline=0.0)
    assert (run.status, run.reason) == ("interrupted", "out of time after step 1")
    assert same(train(CONFIG, tmp_path / "run", resume=True), whole)


def test_a_measured_run_has_the_bits_of_one_that_is_not_and_measures_the_same_after_a_resume(
    tmp_path,
) -> None:
    config = replace(TEXT, steps=9, measure_every=2, checkpoint_every=3)
    plain, measured = train(replace(config, measure_every=0)), train(config)
    assert bits(plain) == bits(measured)
    assert plain.curve("loss") == measured.curve("loss")
    assert [row["step"] for row in measured.measures] == [2, 4, 6, 8]
    assert np.shape(measured.measures[0]["measure"]["sigma_query"]) == (2, 2)
    train(config, tmp_path / "run", deadline=0.0)
    resumed = train(config, tmp_path / "run", resume=True)
    assert json.dumps(resumed.measures) == json.dumps(measured.measures)


def test_a_run_does_not_go_on_with_other_data(tmp_path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for words in ("to be or not to be ", "that is the question "):
        (corpus / "text.txt").write_text(words * 50)
        write_tokens(corpus, tmp_path / "tokens.npy")
        config = replace(
            TEXT,
            workload=replace(TEXT.workload, data=str(tmp_path / "tokens.npy")),
            checkpoint_every=2,
        )
        if words.startswith("to"):
            train(config, tmp_path / "run", deadline=0.0)
    with pytest.raises(ValueError, match="its data were"):
        train(config, tmp_path / "run", resume=True)
