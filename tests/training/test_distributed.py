"""Two processes on one run: DDP and FSDP2 give the losses of one process to fp32 rounding, and
resume exactly.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from halfulp.runs.threads import one_thread
from halfulp.training.attention import AttentionPlan
from halfulp.training.checkpoint import load_checkpoint
from halfulp.training.config import Language, Optimizer, RunConfig
from halfulp.training.loop import train
from halfulp.training.run_json import config_as_dict, read_record

CONFIG = RunConfig(
    Language(layers=2, heads=2, width=16, context=12),
    AttentionPlan.of("BF16_FLASH2"),
    Optimizer(1e-2, clip=0.3),
    steps=8,
    batch=8,
    accumulation=2,
    metrics_every=1,
    checkpoint_every=4,
    keep=None,
)

PROCESS = """
import faulthandler, json, os, sys
from pathlib import Path
import torch
faulthandler.enable()  # of an abort, where it was
from halfulp.training.distributed import world
from halfulp.training.loop import train
from halfulp.training.run_json import config_from_dict
torch.set_num_threads(1)
config, out = config_from_dict(json.loads(sys.argv[1])), Path(sys.argv[2])
with world("ddp", "cpu"):  # one group for all of them
    for parallel in ("ddp", "fsdp"):
        half = lambda row: "half" if row["step"] == 4 else None
        train(config, out / f"{parallel}-half", parallel=parallel, stop=half)
        train(config, out / parallel, parallel=parallel)
assert not torch.distributed.is_initialized()
# what DDP and FSDP import keeps the group, and its threads have aborted an interpreter that ends
os._exit(0)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("distributed")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = out / "process.py"
    script.write_text(PROCESS)
    arguments = [sys.executable, *launch, str(script), json.dumps(config_as_dict(CONFIG)), str(out)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    with one_thread():
        return out, train(CONFIG)


def recorded(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_give_the_losses_of_one(runs, parallel) -> None:
    out, alone = runs
    rows = recorded(out / parallel)
    assert [row["loss"] for row in rows] == pytest.approx(alone.curve("loss"), rel=2e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(alone.curve("grad_norm"), rel=1e-4)
    assert read_record(out / parallel)["status"] == "done"
    ended = load_checkpoint(out / parallel / "checkpoints" / "step-8")
    weights = dict(alone.workload.model.named_parameters())
    assert ended.model.keys() == weights.keys()
    for name, x in ended.model.items():
        assert torch.allclose(x, weights[name], atol=2e-4), name


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_processes_is_taken_up_by_one(runs, parallel) -> None:
    out, alone = runs
    start = load_checkpoint(out / f"{parallel}-half" / "checkpoints" / "step-4")
    with one_thread():
        tail = train(CONFIG, start=start)
    assert tail.steps == (5, 6, 7, 8)
    assert tail.curve("loss") == pytest.approx(alone.curve("loss")[4:], rel=2e-5)


def test_a_batch_read_twice_by_two_processes_would_show(runs) -> None:
    """The planted fault: both processes read the first half of every micro-batch."""
    _, alone = runs
    with one_thread():
        halves = train(CONFIG, batches=alone.workload.order(8, 8)[:, [0, 1, 0, 1, 4, 5, 4, 5]])
    assert halves.curve("loss")[0] != pytest.approx(alone.curve("loss")[0], rel=2e-5)


def test_parallel_needs_torchrun_and_a_batch_that_divides() -> None:
    with pytest.raises(ValueError, match="accepted under torchrun"):
        train(CONFIG, parallel="ddp")
    with pytest.raises(ValueError, match="accepted are none, ddp and fsdp"):
        train(CONFIG, parallel="many")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parallel='fsdp' is 0"):
        train(replace(CONFIG, measure_every=5), parallel="fsdp")
