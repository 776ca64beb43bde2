"""A model of the user's own: the contract, its run folder, resuming bit for bit, and that nothing
of it is imported unless a command names it.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from halfulp import cli
from halfulp.training.config import UserModel
from halfulp.training.loop import train
from halfulp.training.run_json import config_as_dict, config_from_dict, difference, read_config
from halfulp.training.trust import trusted
from halfulp.training.user_model import CONTRACT, user_run
from halfulp.training.workload import build_workload

MODEL = """
import os, signal
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.BatchNorm1d(8), nn.Linear(8, 11)
        self.drop = nn.Dropout(0.2)

    def forward(self, tokens):
        return self.head(self.drop(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2)))

def loss(model, batch):
    return functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["next"].flatten())

def make(seed, device):
    armed = Path(__file__).with_name("armed")
    model = Net().to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.2, total_steps=40, cycle_momentum=True)

    def batch(step):
        if armed.exists() and step == int(armed.read_text()):
            armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = torch.randint(11, (6, 5))  # a function of seed and step here
        return {"tokens": tokens, "next": (tokens + 1) % 11, "note": "what is no tensor stays"}

    return model, (sgd, schedule), batch, loss
"""


@pytest.fixture
def made(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    return f"{tmp_path / 'mine.py'}:make"


def rows(folder):
    """Lines of metrics without what a clock says."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    timed = ("seconds", "tokens_per_second")
    return [{name: x for name, x in line.items() if name not in timed} for line in lines]


def state(folder, step):
    place = folder / "checkpoints" / f"step-{step}"
    return {
        (file, name): x
        for file in ("model", "state")
        for name, x in load_file(place / f"{file}.safetensors").items()
    }


def same(one, other):
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path, made, capsys):
    """Killed by SIGKILL in the middle of a step, with momentum, a scheduler, dropout, running
    statistics and batches drawn from the global generator.
    """
    options = ["--steps", "20", "--set", "checkpoint_every=4", "--set", "metrics_every=1"]
    assert cli.main(["train", made, "--out", str(tmp_path / "whole"), *options]) == 0
    (tmp_path / "armed").write_text("13")
    line = [sys.executable, "-m", "halfulp", "train", made, "--out", str(tmp_path / "cut")]
    killed = subprocess.run([*line, *options], capture_output=True, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert cli.main(["train", "--resume", str(tmp_path / "cut")]) == 2
    said = capsys.readouterr().err
    assert f"names code, '{made}'" in said
    assert f"accepted with --trust (trust=True), or --workload {made} for the model" in said
    assert cli.main(["train", "--resume", str(tmp_path / "cut"), "--workload", made]) == 0
    record = json.loads((tmp_path / "cut" / "run.json").read_text())
    assert [one["step"] for one in record["resumed"]] == [12]
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert len({row["learning_rate"] for row in rows(tmp_path / "cut")}) > 15
    assert same(state(tmp_path / "cut", 20), state(tmp_path / "whole", 20))
    keys = {name for _, name in state(tmp_path / "cut", 20)}
    assert {"optimizer|embed.weight/momentum_buffer", "norm.running_mean"} <= keys


def test_reading_a_run_imports_nothing(tmp_path, made, capsys):
    folder = tmp_path / "run"
    train(user_run(made, steps=4, checkpoint_every=2, keep=None), folder)
    (tmp_path / "mine.py").write_text("raise SystemExit('it was imported')\n")
    assert cli.main(["report", str(folder)]) == 0
    again = shutil.copytree(folder, tmp_path / "again")
    assert cli.main(["compare", str(folder), str(again)]) == 0
    assert "it was imported" not in capsys.readouterr().err
    assert cli.main(["train", "--resume", str(folder), "--trust"]) == 2
    assert "does not load: line 1: SystemExit: it was imported" in capsys.readouterr().err


def test_the_record_names_source_and_digest_and_a_change_is_said(tmp_path, made):
    folder = tmp_path / "run"
    config = user_run(made, steps=4, checkpoint_every=2)
    halfway = train(config, folder, stop=lambda row: None)
    assert halfway.status == "done"
    recorded = read_config(folder)
    assert recorded == config
    assert isinstance(recorded.workload, UserModel)
    assert recorded.workload.make == made
    assert len(recorded.workload.sha256) == 64
    moved = replace(recorded.workload, make="elsewhere.py:make")
    assert replace(recorded, workload=moved) == recorded, "where a file lies is no part of a run"
    other = replace(recorded, workload=replace(recorded.workload, make="elsewhere.py:other"))
    assert difference(recorded, other) == ["workload.function: make → other"]
    for kind in ("", "operations=norm in nowhere: fp32"):  # told by the first pass alone
        line = ["train", made, "--out", str(tmp_path / "new"), "--steps", "2"]
        assert cli.main([*line, *(["--set", kind] if kind else ["--attention", "halfulp"])]) == 2
        assert not list((tmp_path / "new").iterdir())
    with pytest.raises(ValueError, match="a run of the function 'make'; accepted is one of that"):
        trusted(recorded, folder, trust=False, workload="mine.py:other")
    (tmp_path / "mine.py").write_text(MODEL + "\n# a change\n")
    with pytest.warns(UserWarning, match=r"changed since the run was recorded \(SHA-256"):
        train(recorded, tmp_path / "again")
    assert config_from_dict(config_as_dict(config)) == config


@pytest.mark.parametrize(
    ("optimizer", "entries"),
    [
        ("torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)", "max_exp_avg_sq"),
        ("torch.optim.Adafactor(model.parameters(), lr=0.1)", "row_var"),
        ("torch.optim.Rprop(model.parameters(), lr=0.1)", "prev"),
    ],
)
def test_other_optimizers_resume_exactly(tmp_path, optimizer, entries):
    text = MODEL.replace("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", optimizer)
    text = text.replace("(sgd, schedule)", "sgd").replace("schedule =", "None #")
    (tmp_path / "mine.py").write_text(text)
    config = user_run(f"{tmp_path / 'mine.py'}:make", steps=6, checkpoint_every=3, metrics_every=1)
    half = train(config, tmp_path / "cut", stop=lambda row: "half" if row["step"] == 3 else None)
    assert half.status == "stopped"
    train(config, tmp_path / "whole")
    record = tmp_path / "cut" / "run.json"
    record.write_text(record.read_text().replace('"stopped"', '"running"'))
    assert train(config, tmp_path / "cut", resume=True).status == "done"
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert same(state(tmp_path / "cut", 6), state(tmp_path / "whole", 6))
    assert any(name.endswith(entries) for _, name in state(tmp_path / "cut", 6))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("return model, (sgd", "return model, batch #"), "returns a tuple of 2"),
        (("return model, (sgd", "return 3 #"), "returns a int"),
        (("return model, (sgd", "return model, model, batch #"), "its optimizer is a Net"),
        (("model.parameters(), lr", "[torch.ones(1)], lr"), "no parameters of the model"),
        (("def make(seed, device):", "def make(seed):"), "raises TypeError"),
        (("tokens = torch", "tokens = next(draws) * torch"), "gave other values when it was"),
        (("return {", "return 7\n        return {"), "batch(0) gave a int"),
        (
            (").flatten(0, 1), batch", ").detach().flatten(0, 1), batch"),
            "the loss carries no gradient",
        ),
        (("return functional", "return model\n    return functional"), "the loss is a Net"),
        (("flatten())", "flatten(), reduction='none')"), "the loss is a tensor of shape (30,)"),
        (("batch, loss\n", "batch\n"), "does not take its batch, and no loss does: "),
    ],
)
def test_a_misfit_is_one_line_with_the_contract(tmp_path, change, says):
    head = "draws = iter(range(1, 99))\n"
    (tmp_path / "mine.py").write_text(head + MODEL.replace(*change))
    with pytest.raises(ValueError, match="workload=") as caught:
        train(user_run(f"{tmp_path / 'mine.py'}:make", steps=1))
    assert says in str(caught.value)
    assert CONTRACT in str(caught.value)
    assert "\n" not in str(caught.value)


def test_micro_batches_are_rows_of_the_batch(tmp_path, made):
    """Without dropout and batch statistics a step in two halves is the step, to fp32 rounding."""
    (tmp_path / "mine.py").write_text(
        MODEL.replace("0.2)", "0.0)").replace("BatchNorm1d", "Identity")
    )
    config = user_run(made, steps=6, metrics_every=1)
    whole = train(config).curve("loss")
    halves = train(replace(config, accumulation=3)).curve("loss")
    assert whole != halves
    assert whole == pytest.approx(halves, rel=1e-5)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("optimizer.learning_rate=0.1", "is what its optimizer has"),
        ("data_seed=3", "is given one seed"),
        ("batch=3", "is the 6 rows that its batches have"),
    ],
)
def test_fields_that_the_function_decides_are_refused(tmp_path, made, field, says, capsys):
    assert cli.main(["train", made, "--out", str(tmp_path / "run"), "--set", field]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_example_of_the_document_trains(tmp_path):
    pytest.importorskip("transformers")
    document = (Path(__file__).parents[2] / "docs" / "your_model.md").read_text(encoding="utf-8")
    (example,) = re.findall(
        r"^```python\n(.*?def make\(seed, device\):.*?)^```", document, re.S | re.M
    )
    (tmp_path / "my.py").write_text(example)
    run = train(user_run(f"{tmp_path / 'my.py'}:make", steps=20, metrics_every=1))
    assert run.curve("loss")[-1] < run.curve("loss")[0]
    assert " ".join(CONTRACT.split("->")[0].split()) in document


SCORED = """
import torch
from torch import nn
from torch.nn import functional

class Layer(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.v_proj = nn.Linear(8, 8)
        self.drop, self.by_hand = nn.Dropout(0.1), by_hand

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.by_hand:
            scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) / 2
            out = torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, (-1, 2))
        else:
            out = functional.scaled_dot_product_attention(q, k, v)
        return x + self.drop(out.transpose(1, 2).flatten(2))

def make(seed, device):
    model = nn.Sequential(Layer(True), Layer(False))
    def loss(model, x):
        return model(x).square().mean()
    return model, torch.optim.Adam(model.parameters()), lambda step: torch.randn(6, 5, 8), loss
"""


def test_scores_and_sigmas_are_measured_and_the_run_keeps_its_bits(tmp_path, made):
    (tmp_path / "scored.py").write_text(SCORED)
    config = user_run(f"{tmp_path / 'scored.py'}:make", steps=4, metrics_every=1)
    plain, run = train(config), train(replace(config, measure_every=3))
    assert plain.curve("loss") == run.curve("loss")
    weights = (dict(one.workload.model.named_parameters()) for one in (plain, run))
    assert all(torch.equal(*pair) for pair in zip(*(w.values() for w in weights), strict=True))
    assert [row["step"] for row in run.measures] == [1, 3]
    halves = train(replace(config, measure_every=3, accumulation=2)).measures[0]["measure"]
    fresh = build_workload(config)
    first, model, x = run.measures[0]["measure"], fresh.model, fresh.batch(np.arange(6), 1)
    q, k = (
        getattr(model[0], name)(x).unflatten(-1, (2, 4)).transpose(1, 2)
        for name in ("q_proj", "k_proj")
    )
    assert first["max_score"][0] == pytest.approx((q @ k.mT / 2).amax((0, 2, 3)).tolist(), rel=1e-5)
    for layer in range(2):
        for name, by in (("sigma_query", "q_proj"), ("sigma_key", "k_proj")):
            heads = getattr(model[layer], by).weight.view(2, 4, 8)
            exact = torch.linalg.matrix_norm(heads, 2).tolist()
            assert first[name][layer] == pytest.approx(exact, rel=1e-3)
    assert halves["max_score"][0] == pytest.approx(first["max_score"][0], rel=1e-5)
    with pytest.raises(ValueError, match="measure_every=2: no attention of the model is seen"):
        train(user_run(made, steps=4, measure_every=2))


def test_what_models_return_is_read(tmp_path):
    """A loss as attribute, in a dictionary, as the only scalar of a tuple, or alone."""
    for out in ("types.SimpleNamespace(loss=x)", "{'loss': x}", "(tokens, x)", "x"):
        text = MODEL.replace("import os", "import types, os")
        text = text.replace("def forward(self, tokens):", "def forward(self, tokens, next, note):")
        text = text.replace("return self.head(", "x = self.head(")
        after = (
            f"x = functional.cross_entropy(x.flatten(0, 1), next.flatten())\n        return {out}"
        )
        text = text.replace("\n\ndef loss", f"\n        {after}\n\ndef loss")
        text = text.replace("batch, loss\n", "batch\n")
        (tmp_path / "mine.py").write_text(text)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run = train(user_run(f"{tmp_path / 'mine.py'}:make", steps=2, metrics_every=1))
        assert all(map(np.isfinite, run.curve("loss")))
    assert torch.is_grad_enabled()
