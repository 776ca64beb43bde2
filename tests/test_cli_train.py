"""`halfulp train`: what it writes, that it repeats and resumes bit for bit, how it ends, and how it
complains.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from halfulp import cli

TINY = [
    "--steps",
    "6",
    "--set",
    "workload.width=16",
    "--set",
    "workload.context=8",
    "--set",
    "batch=2",
]
TINY += ["--set", "metrics_every=1", "--data", "synthetic"]
KERNEL = """
import os, signal
from pathlib import Path
from torch.nn import functional

def attention(query, key, value, *, is_causal, scale):
    armed = Path(__file__).with_name("armed")
    if armed.exists():
        count = int(armed.read_text()) - 1
        armed.write_text(str(count))
        if count == 0:
            armed.unlink()
            os.kill(os.getpid(), signal.SIGINT)
    attend = functional.scaled_dot_product_attention
    return attend(query, key, value, is_causal=is_causal, scale=scale)
"""


def run(capsys, *arguments):
    code = cli.main(["train", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def rows(folder):
    """Lines of metrics without what a clock says."""
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")}
        for line in lines
    ]


def weights(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step}" / "model.safetensors")


def same(one, two):
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            [],
            (
                "preset is missing: accepted are seconds, minutes, capture, pictures, gpt2,"
                " file.py:function for a model of your own, or --resume DIR alone"
            ),
        ),
        (["minuets", "--out", "run"], "preset='minuets': accepted are seconds, minutes"),
        (
            ["minutes"],
            "out is missing; accepted is a new folder for the run (--out), or --resume DIR",
        ),
        (["minutes", "--out", "no/where"], "out='no/where': there is no folder"),
        (
            ["minutes", "--out", "run", "--steps", "0"],
            "steps=0: accepted is an integer of at least 1",
        ),
        (["minutes", "--out", "run", "--steps", "many"], "steps='many': accepted is an integer"),
        (
            ["minutes", "--out", "run", "--attention", "torch:fast"],
            "attention='torch:fast': accepted is a built-in name",
        ),
        (
            ["minutes", "--out", "run", "--attention", "layer 7: torch"],
            "accepted are layers 0 to 0",
        ),
        (
            ["minutes", "--out", "run", "--data", "nosuch.npy"],
            "data='nosuch.npy': accepted are synthetic, english, or",
        ),
        (
            ["seconds", "--out", "run", "--data", "english"],
            "data='english': accepted with another preset",
        ),
        (
            ["minutes", "--out", "run", "--set", "lr=1"],
            "'lr' is no field of RunConfig; accepted: workload, attention",
        ),
        (
            ["minutes", "--out", "run", "--set", "optimizer.lr=1"],
            "'lr' is no field of Optimizer; accepted: learning_r",
        ),
        (["minutes", "--out", "run", "--set", "batch=x"], "batch='x': accepted is an integer"),
        (["minutes", "--out", "run", "--set", "batch"], "set='batch': accepted is field=value"),
        (
            ["minutes", "--out", "run", "--set", "workload.width=33"],
            "heads=2: accepted is a divisor of width=33",
        ),
        (["minutes", "--out", "run", "--device", "gpu"], "device='gpu': "),
        (["minutes", "--out", "run", "--device", "cuda:77"], "device='cuda:77': "),
        (["minutes", "--out", "run", "--batches", "nosuch"], "batches='nosuch/batches.npy': "),
        (
            ["minutes", "--out", "run", "--parallel", "ddp"],
            "parallel='ddp': accepted under torchrun",
        ),
        (["--resume", "nosuch"], "run='nosuch': there is no such folder"),
        (["--resume", "nosuch", "--steps", "3"], "steps='3': accepted without --resume"),
        (["minutes", "--resume", "nosuch"], "preset='minutes': accepted without --resume"),
        (
            ["minutes", "--out", "run", "--wandb", "project"],
            "wandb: accepted where it is installed",
        ),
    ],
)
def test_a_bad_argument_is_one_line(capsys, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("halfulp.runs.writers.find_spec", lambda name: None)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("halfulp: ")
    assert err.count("\n") == 1
    assert says in err
    assert list(tmp_path.iterdir()) == [], (
        "nothing is written before the arguments are known to be good"
    )


def test_a_run_says_where_it_is_and_repeats(capsys, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    code, out, err = run(capsys, "minutes", "--out", one, *TINY)
    assert (code, err) == (0, "")
    assert "minutes, BF16_FLASH2[out=e8m2], seed 0: done" in out
    last = rows(one)[-1]
    assert f"loss {last['loss']:.6g} at step 6 of 6; the run lies in {one}\n" in out
    record = json.loads((one / "run.json").read_text(encoding="utf-8"))
    assert (record["kind"], record["status"], record["config"]["workload"]["width"]) == (
        "train",
        "done",
        16,
    )
    assert record["command"].startswith("halfulp train minutes --out ")
    code, out, _ = run(capsys, "minutes", "--out", two, *TINY, "--json", "-")
    said = json.loads(out)
    assert (said["folder"], said["status"], said["step"], said["loss"]) == (
        str(two),
        "done",
        6,
        last["loss"],
    )
    assert rows(one) == rows(two)
    assert same(weights(one, 6), weights(two, 6))
    other = tmp_path / "other"
    run(capsys, "minutes", "--out", other, *TINY, "--seed", "1")
    assert rows(other) != rows(one)


def test_the_order_of_another_run_is_replayed(capsys, tmp_path):
    """Same weights, another seed for the data: with the first run's order its losses come back."""
    first, replayed, fresh = (tmp_path / name for name in ("first", "replayed", "fresh"))
    data = tmp_path / "text.npy"
    (tmp_path / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog\n" * 40, encoding="utf-8"
    )
    assert cli.main(["tokens", str(tmp_path / "text.txt"), str(data)]) == 0
    shared = [*TINY[:-1], str(data)]
    run(capsys, "minutes", "--out", first, *shared)
    run(capsys, "minutes", "--out", fresh, *shared, "--set", "data_seed=9")
    run(capsys, "minutes", "--out", replayed, *shared, "--set", "data_seed=9", "--batches", first)
    assert rows(fresh) != rows(first)
    assert rows(replayed) == rows(first)


def test_ctrl_c_leaves_a_run_that_goes_on_as_if_nothing_had_been(capsys, tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(KERNEL, encoding="utf-8")
    attention = ["--attention", f"{kernel}:attention"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(capsys, "minutes", "--out", whole, *TINY, *attention)
    # the fourth call of attention is that of step 4
    (tmp_path / "armed").write_text("4", encoding="utf-8")
    code, out, _ = run(capsys, "minutes", "--out", broken, *TINY, *attention)
    assert code == 130
    assert "interrupted (asked to stop after step 4)" in out
    assert f"go on with: halfulp train --resume {broken} --trust\n" in out
    assert rows(broken) == rows(whole)[:4]
    code, out, _ = run(capsys, "--resume", broken, "--trust")
    assert (code, rows(broken)) == (0, rows(whole))
    assert same(weights(broken, 6), weights(whole, 6))
    # over: it says so once more and trains nothing
    code, again, _ = run(capsys, "--resume", broken, "--trust")
    assert (code, again, rows(broken)) == (0, out, rows(whole))


def test_a_loss_that_is_no_number_ends_the_run_with_1(capsys, tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        "def attention(query, key, value, *, is_causal, scale):\n    return query / 0\n",
        encoding="utf-8",
    )
    folder = tmp_path / "run"
    code, out, _ = run(
        capsys, "minutes", "--out", folder, *TINY, "--attention", f"{kernel}:attention"
    )
    assert code == 1
    assert "failed (the loss of step 1 is nan)" in out
    assert "loss none yet" not in out
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"] == "failed"


def test_a_place_changes_the_presets_attention_there(capsys, tmp_path):
    folder = tmp_path / "run"
    run(capsys, "minutes", "--out", folder, *TINY, "--attention", "head 1: torch:fp32")
    config = json.loads((folder / "run.json").read_text(encoding="utf-8"))["config"]
    assert config["attention"] == ["BF16_FLASH2[out=e8m2]", "head 1: torch:fp32"]


def test_tokens(capsys, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("abc", encoding="utf-8")
    (tmp_path / "texts" / "b.bin").write_bytes(b"\xff\xfe\x00")
    file = tmp_path / "corpus.npy"
    assert cli.main(["tokens", str(tmp_path / "texts"), str(file)]) == 0
    said = f"4 tokens of 1 documents lie in {file}; 1 files that are no text were left out\n"
    assert capsys.readouterr().out == said
    assert cli.main(["tokens", str(tmp_path / "texts"), str(file), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 4
    assert cli.main(["tokens", str(tmp_path / "nothing"), str(file)]) == 2
    assert "nothing': there is no such folder" in capsys.readouterr().err
