"""In fp64 every algorithm, shift, base, block size and structural choice is the same function: the
plain definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfulp import emulate, golden
from halfulp.algorithms import Problem, blocks_for_memory, flash2
from halfulp.calls import Sees
from halfulp.recipes import FP64, Recipe, Shift
from halfulp.testing import Inputs, gaussian

CLOSE = 1e-12
STRUCTURES = {
    "plain": {},
    "base 2": {"base": "2"},
    "integer": {"base": "2", "shift": Shift("integer")},
    "split": {"base": "2", "shift": Shift("integer"), "exponential": "split"},
    "halfulp": {
        "base": "2",
        "shift": Shift("integer"),
        "delta_from": "residual",
        "residual_bits": 8,
        "backward_weights": "rounded",
    },
    "stabilized": {"shift": Shift("stabilized", beta=2.0), "backward_weights": "maximum"},
    "tolerant ties": {"shift": Shift("stabilized", beta=1.5, gamma=0.5, tie_tolerance=0.5)},
    "unconditional": {"shift": Shift("stabilized", beta=2.0, unconditional=True), "base": "2"},
    "offset": {"shift": Shift("offset", offset=3.0), "backward_weights": "rounded"},
    "delta from P": {"delta_from": "probabilities", "gradient_scale_at": "scores"},
    "delta from exact O": {"delta_from": "exact_out", "gradient_scale_at": "probabilities"},
    "delta from recomputed O": {"delta_from": "recomputed"},
    "pre-scale": {"weights_scale": 256.0, "lse_from": "exact"},
}


def plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """softmax(α QKᵀ + mask) V and lse by the definition, for autograd; a fully masked row is 0 and
    −inf.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    seen = (s > -math.inf).any(-1, keepdim=True)
    p = torch.softmax(torch.where(seen, s, 0.0), -1) * seen
    lse = torch.where(seen[..., 0], torch.logsumexp(torch.where(seen, s, 0.0), -1), -math.inf)
    return p @ v, lse


@dataclass(frozen=True)
class Case:
    inputs: Inputs
    mask: Tensor | None
    causal: bool
    lse_weight: Tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads, key_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (2, 2), (3, 1)]))
    n_q, n_k, batch = draw(st.integers(1, 24)), draw(st.integers(1, 24)), draw(st.integers(1, 2))
    sizes = {
        "batch": batch,
        "heads": heads,
        "key_heads": key_heads,
        "length": n_q,
        "key_length": n_k,
    }
    seed = draw(st.integers(0, 10**6))
    dims = {"dim": draw(st.integers(1, 9)), "value_dim": draw(st.integers(1, 9))}
    inputs = gaussian(seed, **sizes, **dims, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    kind = draw(st.sampled_from(["none", "causal", "bool", "additive", "additive with -inf"]))
    mask = None
    if kind not in ("none", "causal"):
        full = (batch, heads, n_q, n_k)
        kept = draw(st.integers(0, 4))  # trailing dimensions that the mask has
        shape = [n if draw(st.booleans()) else 1 for n in full][4 - kept :]
        mask = torch.randn(shape, generator=generator, dtype=torch.float64)
        if kind == "bool":
            mask = mask > draw(st.sampled_from([-1.0, 0.0, 1.0]))
        elif kind == "additive with -inf":
            mask = mask.masked_fill(mask > 0.5, -math.inf)
    weight = torch.randn((batch, heads, n_q), generator=generator, dtype=torch.float64)
    return Case(inputs, mask, kind == "causal", weight)


blocks = st.none() | st.integers(1, 30)
recipes = st.builds(
    lambda algorithm, structure, rows, cols: FP64.with_(
        algorithm=algorithm, block_query=rows, block_key=cols, **STRUCTURES[structure]
    ),
    st.sampled_from(["standard", "flash1", "flash2"]),
    st.sampled_from(sorted(STRUCTURES)),
    blocks,
    blocks,
)


def emulated(case: Case, recipe: Recipe, *, with_lse: bool) -> list[Tensor]:
    return _gradients(
        case,
        with_lse,
        lambda q, k, v: emulate(
            q,
            k,
            v,
            case.mask,
            is_causal=case.causal,
            enable_gqa=True,
            recipe=recipe,
            return_lse=True,
        ),
    )


def by_definition(case: Case, *, with_lse: bool) -> list[Tensor]:
    return _gradients(case, with_lse, lambda q, k, v: plain(q, k, v, case.mask, case.causal))


def _gradients(case: Case, with_lse: bool, attention: object) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in case.inputs.operands)
    out, lse = attention(q, k, v)  # type: ignore[operator]
    loss = (out * case.inputs.grad_out).sum()
    if with_lse:
        loss = loss + (torch.where(lse > -math.inf, lse, 0.0) * case.lse_weight).sum()
    loss.backward()
    return [out.detach(), lse.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


def assert_agree(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, e in zip(("out", "lse", "dQ", "dK", "dV"), actual, expected, strict=True):
        assert a.shape == e.shape, name
        assert torch.equal(a.isinf(), e.isinf()), name
        finite = e.isfinite()
        assert not a.isnan().any(), name
        worst = (a - e)[finite].abs().max().item() if finite.any() else 0.0
        scale = max(1.0, e[finite].abs().max().item() if finite.any() else 0.0)
        assert worst <= CLOSE * scale, f"{name}: {worst:.1e}"


@settings(max_examples=250)
@given(case=cases(), recipe=recipes, with_lse=st.booleans())
def test_every_algorithm_is_the_plain_definition(
    case: Case, recipe: Recipe, with_lse: bool
) -> None:
    assert_agree(emulated(case, recipe, with_lse=with_lse), by_definition(case, with_lse=with_lse))


@settings(max_examples=100)
@given(case=cases())
def test_golden_is_the_plain_definition(case: Case) -> None:
    g = golden(*case.inputs, case.mask, is_causal=case.causal, enable_gqa=True)
    actual = [g.out, g.lse, g.grad_query, g.grad_key, g.grad_value]
    assert_agree(actual, by_definition(case, with_lse=False))  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "flash2"])
@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("memory", [200, 3000, 10**6])
def test_blocks_for_any_memory(algorithm: str, exchanged: bool, memory: int) -> None:
    recipe = FP64.with_(algorithm=algorithm, **blocks_for_memory(memory, 16, exchanged=exchanged))
    inputs = gaussian(3, heads=1, length=70, key_length=90, dim=16, dtype=torch.float64)
    case = Case(inputs, None, False, torch.zeros(1, 1, 70, dtype=torch.float64))
    assert_agree(emulated(case, recipe, with_lse=False), by_definition(case, with_lse=False))


def test_block_sizes_are_those_of_flash_attention_1() -> None:
    assert blocks_for_memory(4096, 64) == {"block_query": 16, "block_key": 16}
    assert blocks_for_memory(65536, 64) == {"block_query": 64, "block_key": 256}
    assert blocks_for_memory(65537, 64) == {"block_query": 64, "block_key": 257}
    assert blocks_for_memory(65536, 64, exchanged=True) == {"block_query": 256, "block_key": 64}


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "flash2"])
@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_fully_masked_rows_are_zero(algorithm: str, structure: str) -> None:
    inputs = gaussian(5, heads=2, length=20, dim=8)
    mask = torch.rand(20, 20, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[[0, 7, 19]] = False
    recipe = FP64.with_(algorithm=algorithm, block_query=6, block_key=5, **STRUCTURES[structure])
    q, k, v = (x.double().requires_grad_() for x in inputs.operands)
    out, lse = emulate(q, k, v, mask, recipe=recipe, return_lse=True)
    (out.sum() + lse.exp().sum()).backward()
    masked = ~mask.any(1)
    assert (out[:, :, masked] == 0).all()
    assert (lse[:, :, masked] == -math.inf).all()
    assert (q.grad[:, :, masked] == 0).all()
    assert all(x.isfinite().all() for x in (out, lse[:, :, ~masked], q.grad, k.grad, v.grad))


def test_masked_keys_get_no_gradient() -> None:
    q, k, v, do = gaussian(6, length=9, key_length=12, dim=4, dtype=torch.float64)
    g = golden(q, k, v, do, is_causal=True)  # key 9 and later are seen by no query
    k.requires_grad_()
    emulate(q, k, v, is_causal=True, recipe=FP64.with_(block_query=4, block_key=5)).backward(do)
    assert (g.grad_key[:, :, 9:] == 0).all()
    assert (k.grad[:, :, 9:] == 0).all()


def _planted() -> Iterator[tuple[object, str, object]]:
    apply, rescale, shift_of = Sees.apply, Problem.rescale, flash2.shift_of

    def one_key_late(self: Sees, scores: Tensor, rows: slice, cols: slice, unit: float) -> Tensor:
        return apply(self, scores, slice(rows.start + 1, rows.stop + 1), cols, unit)

    def forgets(self: Problem, m: Tensor, shift: Tensor) -> Tensor:
        return torch.ones_like(rescale(self, m, shift))

    yield Sees, "apply", one_key_late
    yield Problem, "rescale", forgets
    yield flash2, "shift_of", lambda m: shift_of(m) + 1e-9 * (m > 0)  # m that lse does not know of


@pytest.mark.parametrize(
    ("owner", "name", "fault"), list(_planted()), ids=["mask", "rescale", "shift"]
)
def test_a_planted_fault_is_caught(
    owner: object, name: str, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = gaussian(2, length=20, dim=4, dtype=torch.float64)
    case = Case(inputs, None, True, torch.ones(1, 2, 20, dtype=torch.float64))
    recipe, expected = FP64.with_(block_query=8, block_key=8), by_definition(case, with_lse=True)
    assert_agree(emulated(case, recipe, with_lse=True), expected)
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        assert_agree(emulated(case, recipe, with_lse=True), expected)
