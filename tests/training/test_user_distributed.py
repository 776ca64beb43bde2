"""A model of the user's own in two processes: the losses of one, by DDP and FSDP2;
and what was interrupted or killed goes on, in as many processes or in one.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from halfulp.runs.threads import one_thread
from halfulp.training.checkpoint import load_checkpoint
from halfulp.training.loop import train
from halfulp.training.run_json import read_config, read_record
from halfulp.training.user_model import user_run

MODEL = """
import os, signal
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.unused = nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

def make(seed, device):
    model, armed = Net(), Path(__file__).with_name("armed")
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    halving = torch.optim.lr_scheduler.StepLR(adam, 3, 0.5)

    def batch(step):
        killed = armed.exists() and step == int(armed.read_text())
        if killed and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randint(11, (4, 6)).cumsum(1) % 11

    return model, (adam, halving), batch
"""
PROCESS = """
import os, signal, socket, sys
from dataclasses import replace
from pathlib import Path
import torch
from torch.distributed import fsdp
from halfulp import cli
from halfulp.training.distributed import world
from halfulp.training.loop import train
from halfulp.training.operations import OperationPlan
from halfulp.training.user_model import user_run
torch.set_num_threads(1)
out = Path(sys.argv[1])

def both():
    name, steps = f"{out}/mine.py:make", {"steps": 8, "metrics_every": 1, "checkpoint_every": 2}
    config = user_run(name, **steps, keep=None)
    config = replace(config, operations=OperationPlan.of("linear in layers.1: e8m5"))
    with world("ddp", "cpu") as group:
        for parallel in ("ddp", "fsdp"):
            train(config, out / parallel, parallel=parallel)
            train(config, out / f"{parallel}-cut", parallel=parallel, deadline=0.0)
            torch.distributed.barrier()  # until the one that leads has written
            train(config, out / f"{parallel}-cut", parallel=parallel, resume=True)
        if group.leads:
            (out / "armed").write_text("5")
        torch.distributed.barrier()
        train(config, out / "killed", parallel="fsdp")

def resumed():
    workload = ["--workload", f"{out}/mine.py:make", "--parallel", "ddp"]
    cli.main(["train", "--resume", str(out / "killed"), *workload])

def rank(number, count, port, work):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_RUN_ID"] = "forked"
    try:
        work()
    finally:
        os._exit(1)

def until_killed(count, work):
    # what torchrun does, from an interpreter that has imported everything: one that dies takes the
    # others along
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for number in range(count):
        children.append(os.fork())
        if not children[-1]:
            rank(number, count, port, work)
    killed = children.pop(1)
    status = os.waitpid(killed, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, status
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

until_killed(2, both)
(out / "armed").write_text("7")
until_killed(4, resumed)
(out / "armed").unlink()
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("user-distributed")
    (out / "mine.py").write_text(MODEL)
    command = [sys.executable, "-c", PROCESS, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_give_the_losses_of_one_and_resume_exactly(out, parallel):
    with one_thread():
        alone = train(read_config(out / parallel))
    assert losses(out / parallel) == pytest.approx(alone.curve("loss"), rel=2e-5)
    assert read_record(out / f"{parallel}-cut")["resumed"][0]["step"] == 1
    assert losses(out / f"{parallel}-cut") == losses(out / parallel)
    ends = [
        load_checkpoint(out / n / "checkpoints" / "step-8") for n in (parallel, f"{parallel}-cut")
    ]
    for kind in ("model", "optimizer"):
        one, other = (getattr(end, kind) for end in ends)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), kind
    plain = train(user_run(f"{out}/mine.py:make", steps=8, metrics_every=1)).curve("loss")
    assert losses(out / parallel) != pytest.approx(plain, rel=2e-5), "the plan of operations ran"


def test_a_run_that_was_killed_goes_on_in_another_number_of_processes(out):
    """By FSDP2 in two, then by DDP in four (one row each), killed again, then in one."""
    folder = out / "killed"
    with one_thread():
        run = train(read_config(folder), folder, resume=True)
    assert run.status == "done"
    assert [one["step"] for one in read_record(folder)["resumed"]] == [4, 6]
    assert losses(folder) == pytest.approx(losses(out / "fsdp"), rel=2e-5)
