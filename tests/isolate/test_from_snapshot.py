"""Isolation from a snapshot of a watched training of the user's own."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import halfulp
from halfulp import cli
from halfulp.training.checkpoint import load_checkpoint
from halfulp.training.from_snapshot import run_of_snapshot
from halfulp.training.loop import train
from halfulp.training.run_json import read_config
from tests.isolate.test_user_model import MODEL


def test_a_snapshot_without_moments_begins_anew_and_says_so(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    space: dict = {}
    exec(compile(MODEL, "mine.py", "exec"), space)
    model, _, batch = space["make"](0, "cpu")
    watcher = halfulp.watch(model)
    watcher.snapshot(tmp_path / "snap")
    model(batch(0)).backward()
    watcher.step(1.0)
    watcher.close()
    with pytest.warns(UserWarning, match="no state of the optimizer"):
        done = run_of_snapshot(tmp_path / "snap", f"{tmp_path}/mine.py:make", 3, tmp_path / "run")
    assert done == 1
    state = load_checkpoint(tmp_path / "run" / "checkpoints" / "step-1")
    assert all(torch.equal(state.model[name], p) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="accepted"):
        run_of_snapshot(tmp_path / "nothing", f"{tmp_path}/mine.py:make", 3, tmp_path / "no")


def test_a_grad_scaler_goes_on_from_a_snapshot(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    space: dict = {}
    exec(compile(MODEL, "mine.py", "exec"), space)
    torch.manual_seed(5)
    model, adam, batch = space["make"](0, "cpu")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    followed = []
    with halfulp.watch(model) as watcher:
        for step in range(14):
            if step == 8:
                kept = scaler.state_dict()
                watcher.snapshot(tmp_path / "snap")
            with torch.autocast("cpu", torch.float16):
                loss = model(batch(step))
            scaler.scale(loss).backward()
            scaler.step(adam)
            scaler.update()
            adam.zero_grad()
            followed.append(loss.item())
    assert kept["scale"] < 2.0**20, "steps were left out before"
    done = run_of_snapshot(tmp_path / "snap", f"{tmp_path}/mine.py:make", 6, tmp_path / "run")
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{done}").scaler == kept
    went_on = train(read_config(tmp_path / "run"), tmp_path / "run", resume=True)
    assert went_on.curve("loss")[-1] == followed[-1]


def test_a_watched_training_is_taken_apart_from_a_snapshot(tmp_path, capsys):
    """The user's own loop, watched; a kernel breaks in what follows the snapshot, in one module."""
    (tmp_path / "mine.py").write_text(MODEL)
    space: dict = {}
    exec(compile(MODEL, "mine.py", "exec"), space)
    torch.manual_seed(5)
    model, adam, batch = space["make"](0, "cpu")
    watcher = halfulp.watch(model)
    for step in range(4):
        if step == 3:
            kept = {name: p.detach().clone() for name, p in model.named_parameters()}
            watcher.snapshot(tmp_path / "snap")
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(step))
        loss.backward()
        adam.step()
        adam.zero_grad()
    watcher.close()
    out = tmp_path / "out"
    line = ["isolate", str(tmp_path / "snap"), "--out", str(out), "--steps", "2", "--workers", "1"]
    assert cli.main(line) == 2
    assert "is a snapshot; accepted with --workload" in capsys.readouterr().err
    assert cli.main([*line, "--workload", f"{tmp_path}/mine.py:linear"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "verdict Linear in blocks.1.down (NarrowLinear); 1 of 1 seed" in said
    start = tmp_path / "out-start"
    recorded = json.loads((start / "run.json").read_text())
    assert (recorded["start"], recorded["config"]["autocast"]) == (3, "bf16")
    began = load_file(start / "checkpoints" / "step-3" / "model.safetensors")
    assert all(torch.equal(began[name], x) for name, x in kept.items())
    found = json.loads((out / "isolation.json").read_text())
    assert (found["start"], found["horizon"], found["sites"]) == (3, 5, ["cast in blocks.1.down"])
