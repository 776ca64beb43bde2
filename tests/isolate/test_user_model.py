"""Isolation in a model of the user's own: what is planted in one module, head or operation is
named, and what rounding did not cause is not blamed on it.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from halfulp import cli
from halfulp.isolate import user_conclusion
from halfulp.isolate.conclusion import conclude
from halfulp.isolate.isolation import isolate
from halfulp.isolate.result import Seeds
from halfulp.isolate.rule import Rule, judge_rows, read_curves, rule_for
from halfulp.isolate.sites import layout_of, only_sites, without_sites
from halfulp.training.attention import AttentionPlan
from halfulp.training.loop import train
from halfulp.training.operations import OperationPlan
from halfulp.training.user_model import user_run

MODEL = '''
import torch
from torch import nn
from torch.nn import functional as F

def narrow(y):
    """What overflows fp16 does so here."""
    return (y * 2e5).half().to(y.dtype) / 2e5

class NarrowLinear(nn.Linear):
    def forward(self, x):
        return narrow(super().forward(x))

class Norm(nn.LayerNorm):
    def forward(self, x):
        return narrow(super().forward(x))

class Block(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.norm, self.norm2 = kinds["norm"](16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), kinds["down"](32, 16)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

class Gpt(nn.Module):
    def __init__(self, planted):
        super().__init__()
        stock = {"norm": nn.LayerNorm, "down": nn.Linear}
        self.embed = nn.Embedding(13, 16)
        self.blocks = nn.ModuleList(Block(stock | planted.get(i, {})) for i in range(2))
        self.head = nn.Linear(16, 13)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

def make(seed, device, planted={}, rate=3e-3):
    model = Gpt(planted).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=rate), lambda step: torch.arange(
        step, step + 40
    ).view(4, 10) % 13

def linear(seed, device):
    return make(seed, device, {1: {"down": NarrowLinear}})

def norm(seed, device):
    return make(seed, device, {0: {"norm": Norm}})

def broken(query, key, value, *, is_causal, scale):
    out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
    return narrow(out.float()).to(out.dtype)

def wild(seed, device):
    return make(seed, device, rate=1e4)

class Pushed(torch.autograd.Function):
    """The values of q; its gradient also says that q · k, of the k that all share, should grow."""

    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(k)
        return q.clone()

    @staticmethod
    def backward(ctx, grad):
        (k,) = ctx.saved_tensors
        return grad - k.mean((0, 2), keepdim=True), None

def pushed(query, key, value, *, is_causal, scale):
    return F.scaled_dot_product_attention(
        Pushed.apply(query, key), key, value, is_causal=is_causal, scale=scale)

def shared(seed, device):
    """All keys share a part, whose score softmax takes out again."""
    model, _, _ = make(seed, device)
    for block in model.blocks:
        block.qkv.bias.data[16:32] = 3

    def batch(step):
        return torch.randint(13, (4, 10), generator=torch.Generator().manual_seed(step))

    return model, torch.optim.SGD([model.blocks[1].qkv.weight], lr=1e-2), batch
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(MODEL)
    return path


def run_of(file, name, **fields):
    return user_run(f"{file}:{name}", steps=3, metrics_every=1, autocast="bf16", **fields)


@pytest.mark.parametrize(
    ("name", "seeds", "site", "says"),
    [
        ("linear", (0,), "cast in blocks.1.down", "Linear in blocks.1.down (NarrowLinear); 1 of 1"),
        ("norm", (0, 1), "norm in blocks.0.norm", "Norm in blocks.0.norm (Norm); 2 of 2 seeds"),
    ],
)
def test_a_planted_operation_is_named(monkeypatch, tmp_path, file, name, seeds, site, says):
    found = isolate(run_of(file, name), out=tmp_path / "out", seeds=seeds, workers=1)
    assert found.sites == (site,)
    assert found.verdict.startswith(says)
    held = (found.found, found.confidence.held, found.confidence.tried)
    assert held == (True, len(seeds), len(seeds))
    assert f"the run survives on {len(seeds)} of {len(seeds)} seeds" in found.fix
    assert found.steps < 200
    plain = json.loads((tmp_path / "out" / "isolation.json").read_text())
    assert plain["sites"] == list(found.sites)
    # what no seed bears out is no finding
    never = lambda *given: replace(conclude(*given), confidence=Seeds(0, 1))  # noqa: E731
    monkeypatch.setattr(user_conclusion, "conclude", never)
    lost = isolate(run_of(file, name), out=tmp_path / "out", seeds=seeds, workers=1)
    assert (lost.exit_code, lost.fix) == (1, "")
    assert re.match(
        r"Not found: the search ended at .*, which holds on 0 of 1 seed\.", lost.verdict
    )
    # what was said to save the run does
    option = found.fix.partition("operations=")[2].rstrip("'")
    saved = replace(run_of(file, name), operations=OperationPlan.of(*option.split("; ")))
    assert train(saved).status == "done"
    assert train(run_of(file, name)).status == "failed"


def test_a_planted_head_is_named_by_command(tmp_path, file, capsys):
    """In a kernel that the plan puts into one head; the command goes by a run folder."""
    folder, out = tmp_path / "run", tmp_path / "out"
    plans = ["--attention", "own", "--attention", f"layer 1 head 2: {file}:broken"]
    options = ["--steps", "3", "--set", "metrics_every=1", "--set", "autocast=bf16", *plans]
    assert cli.main(["train", f"{file}:make", "--out", str(folder), *options]) == 1
    assert cli.main(["isolate", str(folder)]) == 2
    assert "--workload" in capsys.readouterr().err
    line = ["isolate", str(folder), "--out", str(out), "--seeds", "1", "--workers", "1"]
    assert cli.main([*line, "--trust"]) == 0
    found = json.loads((out / "isolation.json").read_text())
    assert found["places"] == [[1, 2]]
    assert found["sites"] == ["attention in blocks.1"]
    said = " ".join(capsys.readouterr().out.split())
    assert "verdict Head 2 of layer 1, attention in blocks.1 (Block); 1 of 1 seed" in said
    assert "--attention 'layer 1 head 2: torch:fp32'" in said


def test_scores_that_run_away_though_the_loss_holds_are_a_failure_where_they_are_measured(
    tmp_path, file
):
    plan = AttentionPlan.of("own", f"layer 1 head 2: {file}:pushed")
    config = user_run(f"{file}:shared", steps=8, metrics_every=1, autocast="bf16")
    config = replace(config, attention=plan)
    blind = isolate(config, out=tmp_path / "blind", seeds=(0,), workers=1)
    assert blind.verdict == "The run does not fail: it survives on 1 of 1 seeds."
    found = isolate(replace(config, measure_every=2), out=tmp_path / "out", seeds=(0,), workers=1)
    assert found.places == ((1, 2),), found.verdict
    failed = next(rung for rung in found.rungs if rung.name == "original").runs[0]
    assert "of layer 1, head 2" in failed.reason
    assert "times the twin's at step" in failed.reason


def test_what_fp32_does_not_save_is_not_blamed_on_rounding(tmp_path, file):
    found = isolate(run_of(file, "wild"), out=tmp_path / "wild", seeds=(0,), workers=1)
    assert not found.found
    assert "is not the cause: with everything in fp32 the run fails too" in found.verdict
    sound = isolate(run_of(file, "make"), out=tmp_path / "sound", seeds=(0,), workers=1)
    assert sound.verdict == "The run does not fail: it survives on 1 of 1 seeds."


def test_only_what_fp32_could_change_is_suspected(file):
    """Under autocast everything is; without it what is rounded to less, and attention."""
    config = run_of(file, "linear")
    whole = layout_of(config)
    assert whole.attention == tuple((f"blocks.{i}", 4) for i in range(2))
    assert {"embedding", "linear", "norm", "activation", "attention"} <= {k for _, k in whole.sites}
    few = layout_of(replace(config, autocast="none"))
    cast = ("blocks.1.down", "cast")
    assert sorted(few.sites) == [("blocks.0", "attention"), ("blocks.1", "attention"), cast]
    assert few.named([cast]) == "linear in blocks.1.down (NarrowLinear)"


def test_plans_of_sites_say_exactly_those(file):
    config = replace(run_of(file, "make"), operations=OperationPlan.of("linear in blocks.1: e8m9"))
    kept = [("blocks.1", "elementwise"), ("blocks.1.up", "linear"), ("", "cross_entropy")]
    only, rest = only_sites(config, kept), without_sites(config, kept)
    assert [only.choice(*site) for site in kept] == ["own", "e8m9", "own"]
    assert [rest.choice(*site) for site in kept] == ["fp32"] * 3
    for site in (("blocks.1.norm", "elementwise"), ("blocks.1", "linear"), ("head", "linear")):
        assert only.choice(*site) == "fp32"
        assert rest.choice(*site) == config.operations.choice(*site)
    assert OperationPlan.of(*str(only).split("; ")) == only


def test_a_run_far_behind_its_twin_has_failed(file):
    rule = rule_for(run_of(file, "make").workload)
    assert rule.behind is not None
    lines = [[{"step": n, "loss": x * (1 - n / 200)} for n in range(1, 101)] for x in (1, 1.06)]
    twin = read_curves(lines[0])
    assert judge_rows(lines[0], rule, 100, twin).survived
    late = judge_rows(lines[1], rule, 100, twin)
    assert (late.outcome, late.failed_at) == ("failed", 10)
    assert "1.06 times the twin's at step 10" in late.reason
    assert judge_rows(lines[1], replace(rule, behind=None), 100, twin).survived
    slow = [[{"step": n, "loss": 4 - x * n / 500} for n in range(1, 101)] for x in (1, 0.6)]
    stuck = judge_rows(slow[1], rule, 100, read_curves(slow[0]))
    assert stuck.outcome == "failed"
    assert "45% of the twin's way from 3.99 lost at step 54" in stuck.reason
    assert judge_rows(slow[1], replace(rule, lost_way=0.5), 100, read_curves(slow[0])).survived
    with pytest.raises(ValueError, match="lost_way=2: accepted is a share"):
        Rule(lost_way=2)
    with pytest.raises(ValueError, match=r"behind=1\.0: accepted is a finite factor above 1"):
        Rule(behind=1.0)
