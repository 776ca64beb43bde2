"""`halfulp record` and `halfulp diff` on the command line, on a model that one file makes."""

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional

from halfulp.cli import main
from halfulp.diff import Setting
from halfulp.diff.recording import compare_recordings, record

SOURCE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16, eps=eps)
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(self.norm(x) + x)


def tokens(step):
    draw = torch.Generator().manual_seed(step)
    return {"input_ids": torch.randint(32, (4, 12), generator=draw)}


def make(seed, device):
    model = Model()
    return model, torch.optim.SGD(model.parameters(), 0.1), tokens


def other():
    return Model(eps=1e-2), [tokens(0), tokens(1)]


def shorter():
    return Model(), [{"input_ids": tokens(0)["input_ids"][:2]}]


def lone():
    return Model()


def wrong():
    return 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_settings_of_a_model(folder, capsys):
    assert main(["diff", "my.py:make", "my.py:make"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "are identical, bit by bit, on 2 batches, 8 sequences" in out
    assert main(["diff", "my.py:make", "my.py:other", "--html", "p.html", "--json", "d.json"]) == 1
    out = capsys.readouterr().out
    out = " ".join(out.split())
    assert "norm carries 100% of it" in out
    assert "norm layer_norm: eps=0.01 for 1e-05" in out
    plain = json.loads((folder / "d.json").read_text())
    assert plain["groups"][0]["name"] == "norm"
    assert "layer_norm" in (folder / "p.html").read_text()
    assert main(["diff", "my.py:make", "autocast=bf16", "--no-swaps", "--gradients"]) in (0, 1)
    out = " ".join(capsys.readouterr().out.split())
    assert "rounding to the coarser of both formats explains it" in out
    assert "Gradients: largest gap" in out


def test_recordings_of_two_environments(folder, capsys):
    assert main(["record", "my.py:make", "--out", "a.rec", "--gradients"]) == 0
    assert main(["record", "my.py:other", "--out", "b.rec"]) == 0
    assert main(["record", "my.py:make", "--out", "c.rec", "--setting", "autocast=bf16"]) == 0
    capsys.readouterr()
    assert main(["diff", "a.rec", "a.rec"]) == 0
    assert "identical" in capsys.readouterr().out
    assert main(["diff", "a.rec", "b.rec"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "First to part: norm layer_norm: eps=0.01 for 1e-05" in out
    found = compare_recordings("a.rec", "c.rec")
    rows = {row.place: row for row in found.operations}
    assert rows["head linear"].formats == "bfloat16 for float32"
    assert rows["head linear"].over_floor == pytest.approx(1, abs=0.35)
    assert not rows["head linear"].beyond
    # what came in and what is its own are the gap
    norm = rows["norm layer_norm"]
    assert norm.gap == norm.own == 0


class Sorted(nn.Module):
    """Sorts tokens by a score before a product."""

    def __init__(self, dtype, product):
        super().__init__()
        torch.manual_seed(0)
        self.score = nn.Linear(16, 1).to(dtype)
        self.weight, self.product = nn.Parameter(torch.randn(16, 16)), product

    def forward(self, x):
        flat = x.flatten(0, 1)
        order = self.score(flat.to(self.score.weight.dtype))[:, 0].argsort()
        return self.product(flat[order], self.weight)[order.argsort()].view_as(x)


def test_tokens_in_another_order_are_not_the_fault_of_a_function_of_another_name(tmp_path):
    x = [torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(1))]
    record(Setting(Sorted(torch.float32, torch.matmul)), x, tmp_path / "a")
    record(Setting(Sorted(torch.bfloat16, torch.mm)), x, tmp_path / "b")
    found = compare_recordings(tmp_path / "a", tmp_path / "b")
    rows = {row.place: row for row in found.operations}
    assert rows["(model) mm"].asks == "mm for matmul"
    assert rows["(model) mm"].gap > 0.1  # rows of other tokens
    assert not rows["(model) mm"].beyond
    assert found.first.place == "(model) to"  # into bf16, for the score


class Attention(nn.Module):
    def __init__(self, mask=None):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)


def test_a_tensor_that_one_side_leaves_out_is_told(tmp_path):
    mask, x = torch.ones(8, 8).tril().bool(), torch.randn(4, 8, 16)
    for name, model in (("a", Attention(mask)), ("b", Attention())):
        record(Setting(model), [x], tmp_path / name)
    found = compare_recordings(tmp_path / "a", tmp_path / "b")
    assert found.first.asks == "attn_mask=None for a tensor"
    assert found.first.beyond


def test_a_recording_is_safetensors_and_json_and_whole_or_not_there(folder, capsys):
    assert main(["record", "my.py:make", "--out", "a.rec"]) == 0
    names = {file.suffix for file in (folder / "a.rec").iterdir()}
    assert names == {".safetensors", ".json"}
    with safe_open(folder / "a.rec" / "000000.safetensors", "pt") as tensors:
        kept = tensors.get_tensor("0 head linear")
        error = tensors.get_tensor("0 head linear error")
    assert kept.shape == (4, 12, 32)
    assert 0 < float(error.abs().max()) < 1e-5
    assert main(["record", "my.py:make", "--out", "a.rec"]) == 2
    assert "is there already" in capsys.readouterr().err
    (folder / "fails.py").write_text(
        SOURCE + "\n\ndef broken():\n    return Model(), [{'input_ids': torch.tensor([[99]])}]\n"
    )
    assert main(["record", "fails.py:broken", "--out", "f.rec"]) != 0
    assert not list(folder.glob("*f.rec*"))
    assert {path.name for path in folder.iterdir()} <= {"my.py", "fails.py", "a.rec", "__pycache__"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["diff", "my.py:make", "autocats=bf16"], "did you mean 'autocast'"),
        (["diff", "my.py:make", "pieces=x"], "accepted is a whole number from 1"),
        (
            ["diff", "old.rec", "new.rec"],
            "a='old.rec': there is no such folder; accepted are 'file",
        ),
        (["diff", "my.py:lone", "pieces=1"], "makes no batches"),
        (["diff", "my.py:wrong", "pieces=1"], "returns int; make(seed, device)"),
        (["diff", "my.py:nothing", "pieces=1"], "a='my.py:nothing': my.py has no 'nothing'"),
        (["diff", "my.py:shorter", "decode=0"], "decode=0: accepted is a whole number"),
        (["record", "my.py:make", "--out", "x", "--setting", "pieces=2"], "cannot be recorded"),
    ],
)
def test_what_cannot_be_compared(folder, capsys, line, message):
    assert main(line) == 2
    assert message in capsys.readouterr().err


def test_recordings_that_do_not_fit(folder, capsys):
    assert main(["record", "my.py:make", "--out", "a.rec"]) == 0
    assert main(["record", "my.py:shorter", "--out", "b.rec"]) == 0
    assert main(["diff", "a.rec", "b.rec"]) == 2
    assert "recorded on other batches" in capsys.readouterr().err
    assert main(["diff", "a.rec", "my.py:make"]) == 2
    assert "record the other one too" in capsys.readouterr().err
    plain = json.loads((folder / "a.rec" / "record.json").read_text())
    plain["tensors"] = dict.fromkeys(plain["tensors"], "../b.rec/000000.safetensors")
    (folder / "a.rec" / "record.json").write_text(json.dumps(plain))
    assert main(["diff", "a.rec", "a.rec"]) == 2
    assert "names files outside of it" in capsys.readouterr().err
    (folder / "a.rec" / "record.json").write_text('{"kind": "halfulp recording"}')
    assert main(["diff", "a.rec", "a.rec"]) == 2
    assert "is torn" in capsys.readouterr().err


def test_a_dtype_of_nobody_is_refused(folder, capsys):
    assert main(["record", "my.py:make", "--out", "a.rec"]) == 0
    text = (folder / "a.rec" / "record.json").read_text()
    (folder / "a.rec" / "record.json").write_text(text.replace("torch.float32", "torch.load"))
    assert main(["diff", "a.rec", "a.rec"]) == 2
    assert "is no dtype" in capsys.readouterr().err
    assert torch.float32.is_floating_point
