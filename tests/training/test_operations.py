"""Plans of operations: their text, which assignment counts, and that what they put into a model is
what runs, forward and backward.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from halfulp.interpose import interpose
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, RunConfig
from halfulp.training.operations import Assigned, OperationPlan, check_seen, planned, swaps_of
from halfulp.training.run_json import config_as_dict, config_from_dict
from halfulp.training.settings import with_settings

KINDS = st.lists(st.sampled_from(["linear", "norm", "cast", "attention"]), unique=True)
PATHS = st.lists(st.from_regex(r"=?[a-z]+(\.[a-z0-9]+){0,2}", fullmatch=True), max_size=2)
ASSIGNED = st.builds(
    Assigned,
    st.sampled_from(["fp32", "fp64", "own", "e8m4"]),
    KINDS.map(tuple),
    PATHS.map(tuple),
)


@settings(max_examples=20)
@given(st.lists(ASSIGNED, max_size=4))
def test_texts_are_read_back(assigned):
    plan = OperationPlan(tuple(assigned))
    assert OperationPlan.of(*map(str, assigned)) == plan


def test_the_last_that_covers_counts_and_a_path_covers_what_is_below():
    plan = OperationPlan.of("all: fp32", "linear,norm in a.b: own", "all in =a.b: e8m4")
    assert plan.choice("a.c", "linear") == "fp32"
    assert plan.choice("a.b.x", "norm") == "own"
    assert plan.choice("a.b.x", "cast") == "fp32"
    assert plan.choice("a.b", "linear") == "e8m4"
    assert plan.choice("a.bc", "linear") == "fp32"
    assert OperationPlan.of("all in (outside): fp32").choice("", "softmax") == "fp32"
    assert OperationPlan().choice("a", "linear") == "own"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("linear", "accepted is 'KIND,KIND in MODULE,MODULE: ARITHMETIC'"),
        ("linaer: fp32", "operations='linaer': accepted are all, linear"),
        ("linear: fp31", "of every kind accepted are 'fp32', 'fp64'"),
    ],
)
def test_bad_texts_are_one_line(text, says):
    with pytest.raises(ValueError, match="operations=") as caught:
        OperationPlan.of(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_covers_nothing_is_told_with_the_nearest_module():
    seen = [("layers.0.up", "linear"), ("layers.0.norm", "norm")]
    check_seen(OperationPlan.of("linear: fp32", "all in layers.0: fp32"), seen)
    with pytest.raises(ValueError, match=r"'all in layer\.0\.up: fp32'.*mean 'layers\.0\.up'\?"):
        check_seen(OperationPlan.of("all in layer.0.up: fp32"), seen)


def test_halfulps_own_models_have_none_and_settings_set_it():
    config = RunConfig(Language(layers=1, heads=1, width=8, context=8))
    with pytest.raises(ValueError, match="accepted with a model of your own"):
        with_settings(config, ["operations=all: fp32"])
    assert config_from_dict(config_as_dict(config)) == config
    older = {k: v for k, v in config_as_dict(config).items() if k != "operations"}
    assert config_from_dict(older) == config, "runs recorded before there were plans are read"


class Two(nn.Module):
    """Attention in two layers of four heads; keys are shared by pairs of heads."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 64) for _ in range(2))

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = x + self.attend(layer(x), mask)
        return x

    def attend(self, y, mask):
        q, k, v = (z.unflatten(-1, (-1, 8)).transpose(1, 2) for z in y.split([32, 16, 16], -1))
        out = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return out.sum(1)


@pytest.mark.parametrize("masked", [False, True])
def test_heads_run_what_the_plan_says_and_the_others_their_own(masked):
    torch.manual_seed(0)
    model, x = Two().bfloat16(), torch.randn(2, 6, 8, dtype=torch.bfloat16)
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if masked else None
    calls = []

    def stock(*args, **kwargs):
        calls.append(args[0].shape[1])
        return functional.scaled_dot_product_attention(*args, **kwargs)

    def run(*plan):
        swaps, heads = swaps_of(AttentionPlan.of(*plan), OperationPlan(), {"mine": stock})
        with interpose(model, swaps=swaps):
            out = model(x, mask)
            out.float().square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        if heads is not None:
            heads.check()
        return out.detach(), grads

    plain = run("own")
    same = run("own", "layer 1 head 0,2: own")
    assert torch.equal(plain[0], same[0])
    exact = run("own", "layer 1 head 1: torch:fp32")
    assert not torch.equal(plain[0], exact[0])
    assert all(torch.isfinite(g).all() for g in exact[1])
    torch.testing.assert_close(exact[0], plain[0], rtol=0.05, atol=0.05)
    for choice in ("BF16_FLASH2", "halfulp"):
        other = run("own", f"layer 0 head 3: {choice}")
        torch.testing.assert_close(other[0], plain[0], rtol=0.05, atol=0.05)
    if not masked:
        run("own", "layer 1 head 1,3: mine")
        assert calls == [2]
    with pytest.raises(ValueError, match=r"'layer 2: halfulp'.*accepted are layers 0 to 1"):
        run("own", "layer 2: halfulp")
    hidden = torch.compile(model, backend="eager")
    with (
        pytest.raises(ValueError, match=r"no call of PyTorch's .*; not seen: .*it is compiled"),
        planned(hidden, attention="halfulp"),
    ):
        hidden(x, mask)


FORMS = {
    "matmul": (lambda q, k: q @ k.mT, lambda p, v: (p @ v).transpose(1, 2)),
    "einsum": (
        lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
        lambda p, v: torch.einsum("b h q k, b k h d -> b q h d", p, v.transpose(1, 2)),
    ),
    "einsum with dots": (
        lambda q, k: torch.einsum("...id,...jd->...ij", q, k),
        lambda p, v: torch.einsum("b...ij,b...je->bi...e", p, v),
    ),
    "einsum, heads last": (
        lambda q, k: torch.einsum("bnid,bnjd->bijn", q, k),
        lambda p, v: torch.einsum("bijn,bnje->bine", p, v),
    ),
    "bmm": (
        lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT),
        lambda p, v: torch.bmm(p, v.flatten(0, 1)).unflatten(0, (-1, 4)).transpose(1, 2),
    ),
    "baddbmm": (
        lambda q, k: torch.zeros(8, 6, 6, dtype=q.dtype).baddbmm(
            batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).mT
        ),
        lambda p, v: (p @ v.flatten(0, 1)).unflatten(0, (-1, 4)).transpose(1, 2),
    ),
}


class ByHand(nn.Module):
    """Attention in products; what a head gives is what the model gives."""

    def __init__(self, form):
        super().__init__()
        self.scores, self.out = FORMS[form]
        self.heads_last = form == "einsum, heads last"

    def forward(self, q, k, v):
        q, k, v = map(self.projected, (q, k, v))
        scores = self.scores(q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        hidden = hidden[..., None] if self.heads_last else hidden
        scores = scores.masked_fill(hidden, -1e4)
        weights = scores.softmax(2 if self.heads_last else -1, dtype=torch.float32).to(q.dtype)
        return self.out(weights, v)

    def projected(self, x):
        """What comes in, through a linear layer that changes nothing."""
        tokens = functional.linear(x.transpose(1, 2).flatten(2), torch.eye(32, dtype=x.dtype))
        return tokens.unflatten(-1, (4, 8)).transpose(1, 2)


@pytest.mark.parametrize("form", FORMS)
def test_heads_of_attention_that_is_written_out_are_told_apart(form):
    """Those in fp32 have the values of fp32, forward and backward, the others their own bits; in
    the second pass as in the first.
    """
    torch.manual_seed(0)
    model = ByHand(form)
    x = [torch.randn(2, 4, 6, 8).bfloat16().requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, 6, 4, 8).bfloat16().float()

    def run(operands, *plan):
        swaps, heads = swaps_of(AttentionPlan.of(*plan), OperationPlan())
        for _ in range(2):
            with interpose(model, swaps=swaps):
                out = model(*operands)
                found = torch.autograd.grad(out, operands, upstream.to(out.dtype))
        if heads is not None:
            heads.check()
        return [out.transpose(1, 2).float(), *(grad.float() for grad in found)]

    own, exact = run(x, "own"), run([y.detach().float().requires_grad_() for y in x], "own")
    mixed = run(x, "own", "layer 0 head 1,2: torch:fp32")
    for ours, theirs, wide in zip(mixed, own, exact, strict=True):
        assert torch.equal(ours[:, [0, 3]], theirs[:, [0, 3]])
        assert not torch.equal(ours[:, [1, 2]], theirs[:, [1, 2]])
        torch.testing.assert_close(ours[:, [1, 2]], wide[:, [1, 2]], rtol=2**-8, atol=1e-4)
    with pytest.raises(ValueError, match=r"layer 0, \(model\), is written out in products"):
        run(x, "own", "layer 0 head 1: halfulp")
    with pytest.raises(ValueError, match="accepted are heads 0 to 3"):
        run(x, "own", "head 4: torch:fp32")
