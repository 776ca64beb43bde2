"""Masks, softcap, sinks and dropout of the Triton kernels under the interpreter, against the
emulator.

`test_triton_interpreter.py` runs this file, in a process of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

import halfulp
from halfulp import algorithms
from halfulp.algorithms.other_gradients import grad_sinks
from halfulp.calls import Gradients, Saved
from halfulp.formats.counter import keep_mask, least_kept, seed_word
from halfulp.kernels import triton_attention as door
from halfulp.kernels import triton_backward
from halfulp.kernels.triton_arguments import Axes
from halfulp.kernels.triton_launch import LOG2_E
from halfulp.kernels.triton_scores import dropout_row, kept
from halfulp.recipes import BF16_HALFULP
from halfulp.testing import Inputs, gaussian, relative_error
from tests.kernels.asked import Options
from tests.kernels.triton_reference import (
    RECIPES,
    TILES,
    UNIT,
    emulated,
    exact_inputs,
    kernels_tanh,
    same_functions,
)

__all__ = ["same_functions"]  # a fixture of every test here

N, N_K = 20, 40
DRAW = torch.Generator().manual_seed(20)
BOOLEAN = torch.rand(1, 2, N, N_K, generator=DRAW) < 0.7
BOOLEAN[:, :, 3] = False  # a row that sees nothing
WHOLE = torch.randint(-4, 3, (1, 2, N, N_K), generator=DRAW) * UNIT  # in base 2 whole numbers
ADDITIVE = torch.where(BOOLEAN, WHOLE, -math.inf).float()
SINKS = torch.tensor([1.0, -math.inf]) * UNIT
CASES: dict[str, dict[str, Any]] = {
    "boolean": {"attn_mask": BOOLEAN},
    "additive": {"attn_mask": ADDITIVE},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "dropout": {"dropout_p": 0.5, "seed": 7},
    "all": {
        "attn_mask": ADDITIVE,
        "softcap": 1.5,
        "sinks": SINKS,
        "dropout_p": 0.5,
        "seed": -3,
        "is_causal": True,
        "causal_offset": 9,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_forward_of_halfulp_bit_for_bit(case: str) -> None:
    inputs, options = exact_inputs(0, N, N_K), replace(Options(scale=UNIT), **CASES[case])
    saved = door.forward(*options.of(*inputs.operands), config=TILES)
    _, expected = emulated(BF16_HALFULP, inputs, options)
    assert torch.equal(saved.row_max.ceil(), expected.row_max.squeeze(-1))
    torch.testing.assert_close(saved.row_max, expected.largest_score.squeeze(-1), rtol=2e-7, atol=0)
    assert torch.equal(saved.row_sum, expected.row_sum.squeeze(-1))
    assert torch.equal(saved.out.float(), expected.out)
    lse = expected.lse.squeeze(-1) * UNIT
    empty = lse == -math.inf
    assert torch.equal(saved.lse == -math.inf, empty)
    assert empty.any() == ("attn_mask" in CASES[case])
    assert not saved.out[empty].any()
    assert (saved.lse - lse)[~empty].abs().max() <= 5e-7


# Every option with one recipe and every recipe with all options; `test_options_together` draws
# other pairs.
@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("halfulp", case) for case in CASES),
        *((name, "all") for name in RECIPES if name != "halfulp"),
    ],
)
def test_backward_bit_for_bit(name: str, case: str) -> None:
    """Both sides start from the same statistics, chosen so that δ is exact and 1 / l a power of
    two.
    """
    inputs = exact_inputs(2, N, N_K)
    options = replace(Options(recipe=name, scale=UNIT), **CASES[case])
    problem, kept_there = emulated(RECIPES[name], inputs, options)
    empty = kept_there.row_max == -math.inf
    row_max = kept_there.row_max.ceil()
    whole = torch.randint(
        -4, 5, kept_there.out.shape, generator=torch.Generator().manual_seed(3)
    ).float()
    whole[empty.expand_as(whole)] = 0
    row_sum = torch.where(empty, 0.0, 4.0)
    kept_there = algorithms.Kept(whole, whole, row_max + 2, row_max, row_sum, row_max)
    expected = algorithms.attend_backward(problem, kept_there, inputs.grad_out.float(), None)
    residual = torch.zeros(whole.shape, dtype=torch.int8) if name == "halfulp" else None
    natural = ((row_max + 2).double() / math.log2(math.e)).float().squeeze(-1)
    saved = Saved(whole.bfloat16(), residual, natural, row_max.squeeze(-1), row_sum.squeeze(-1))
    actual = door.backward(
        *options.of(*inputs.operands),
        saved,
        inputs.grad_out,
        None,
        configs={"query": TILES, "key": TILES},
    )
    for what, a, b in zip(("dQ", "dK", "dV"), actual, expected, strict=False):
        differ = int((a.float() != b).sum())
        # lse · log2 e is not 2 to the last bit, and a rounded weight may then fall the other way
        assert differ <= (3 if what == "dV" and name == "halfulp" else 0), (what, differ)
    if options.sinks is not None:
        assert actual.sinks is not None
        wanted = grad_sinks(problem, kept_there, inputs.grad_out.float(), None)
        assert relative_error(actual.sinks, wanted) <= 1e-5  # a sum over rows that nearly cancels
        assert actual.sinks[1] == 0  # a sink of −inf


@triton.jit
def _keep_kernel(
    Out, start, last_dropped, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    hashes = dropout_row(start, first_row + row.to(tl.int64))
    keep = kept(hashes[:, None], (first_column + column)[None, :], last_dropped)
    tl.store(Out + row[:, None] * COLUMNS + column[None, :], keep.to(tl.int8))


@given(
    seed=st.integers(-(2**63), 2**63 - 1), p=st.floats(2.0**-32, 1), row=st.integers(0, 2**40),
    column=st.integers(0, 2**31 - 65),
)  # fmt: skip
@settings(max_examples=40)
def test_dropout_counts_as_everywhere_else(seed: int, p: float, row: int, column: int) -> None:
    """The hash in 32-bit words, whatever seed, place and probability."""
    out = torch.empty(32, 64, dtype=torch.int8)
    words = (x - 2**32 if x >= 2**31 else x for x in (seed_word(seed), least_kept(p) - 1))
    _keep_kernel[(1,)](out, *words, row, column, ROWS=32, COLUMNS=64)
    assert torch.equal(
        out.bool(), keep_mask(seed, p, row + torch.arange(32), column + torch.arange(64))
    )


def test_tanh_is_within_its_bound() -> None:
    x = torch.cat(
        [
            torch.linspace(-12, 12, 40_001),
            torch.logspace(-30, 2, 4_001),
            torch.tensor([-math.inf, math.inf]),
        ]
    )
    exact = torch.from_numpy(np.tanh(x.double().numpy()))
    error = kernels_tanh(x).double() - exact
    assert error.abs().max() <= 2**-22
    assert error.mean().abs() <= 2**-29  # and does not lean
    assert kernels_tanh(torch.tensor([math.nan])).isnan().all()


def both(
    inputs: Inputs, options: Options, grad_lse: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the kernels give and what the emulator does, by name."""
    q, k, v, do = inputs = inputs.map(Tensor.bfloat16)
    saved = door.forward(*options.of(q, k, v), config=TILES)
    grads = door.backward(
        *options.of(q, k, v), saved, do, grad_lse, configs={"query": TILES, "key": TILES}
    )
    problem, expected = emulated(RECIPES[options.recipe], inputs, options)
    d_lse = None if grad_lse is None else grad_lse[..., None]
    exact = Gradients(*algorithms.attend_backward(problem, expected, do.float(), d_lse))
    if options.sinks is not None:
        exact = exact._replace(sinks=grad_sinks(problem, expected, do.float(), d_lse))
    return named(saved.out, saved.lse, grads), named(
        expected.out, expected.lse.squeeze(-1) * UNIT, exact
    )


def named(out: Tensor, lse: Tensor, grads: Gradients) -> dict[str, Tensor]:
    found = {"out": out, "lse": lse, "query": grads.query, "key": grads.key, "value": grads.value}
    return found | ({} if grads.sinks is None else {"sinks": grads.sinks})


def apart(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error over what is allowed: two rounded numbers that fall the other way, and 2e-4
    beside them.

    A rounding left out or put elsewhere makes 1e-3 and more. Results below 10⁻³ count as that: what
    one visible key leaves of dS is the rounding of 0.
    """
    worst = 0.0
    for name, wanted in expected.items():
        finite = wanted.isfinite()
        if not torch.equal(finite, actual[name].isfinite()) or (not finite.all() and name != "lse"):
            return math.inf
        root = math.sqrt(wanted.numel())
        size = max(wanted[finite].double().norm().item(), 1e-3 * root)
        error = (actual[name].double() - wanted.double())[finite].norm().item() / size
        worst = max(worst, error / (2e-4 + 2**-7 / root))
    return worst


@st.composite
def calls(draw: Callable[..., Any]) -> tuple[Inputs, Options, Tensor | None]:
    seed = draw(st.integers(0, 2**20))
    batch, groups, length, key_length = draw(
        st.tuples(*(st.integers(1, n) for n in (2, 2, 22, 40)))
    )
    random = torch.Generator().manual_seed(seed)
    shape = tuple(draw(st.sampled_from([n, 1])) for n in (batch, 2, length, key_length))
    shape = shape[draw(st.integers(0, 2)) :]
    kind = draw(st.sampled_from(["none", "bool", "float", "bfloat16"]))
    mask: Tensor | None = None
    if kind != "none":
        visible = torch.rand(shape, generator=random) < 0.8
        mask = (
            visible
            if kind == "bool"
            else torch.randn(shape, generator=random).masked_fill(~visible, -math.inf)
        )
        mask = mask.bfloat16() if kind == "bfloat16" else mask
    options = Options(
        recipe=draw(st.sampled_from(sorted(RECIPES))),
        is_causal=draw(st.booleans()),
        scale=0.25,
        attn_mask=mask,
        window=draw(st.sampled_from([None, (7, -1), (-1, 5), (9, 3)])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        sinks=torch.randn(2, generator=random) if draw(st.booleans()) else None,
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        causal_offset=draw(st.sampled_from([0, 0, key_length - length, 4])),
    )
    inputs = gaussian(
        seed,
        batch=batch,
        heads=2,
        key_heads=2 // groups,
        length=length,
        key_length=key_length,
        dim=16,
        value_dim=12,
    )
    grad_lse = torch.randn(batch, 2, length, generator=random) if draw(st.booleans()) else None
    return inputs, options, grad_lse


@given(call=calls())
@settings(max_examples=8, phases=[Phase.generate])  # shrinking takes minutes
def test_options_together(call: tuple[Inputs, Options, Tensor | None]) -> None:
    assert apart(*both(*call)) <= 1


EVERYTHING = Options(
    scale=0.25,
    attn_mask=torch.where(BOOLEAN, torch.randn(1, 2, N, N_K, generator=DRAW), -math.inf),
    softcap=2.0,
    sinks=torch.tensor([0.5, -1.0]),
    dropout_p=0.3,
    seed=11,
)


@triton.jit
def _next_row(start, row):
    return dropout_row(start, row + 1)


def test_planted_faults_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison above would miss it would not be worth its time for."""
    inputs = gaussian(3, heads=2, length=20, key_length=40, dim=16).map(Tensor.bfloat16)
    actual, expected = both(inputs, EVERYTHING)
    assert apart(actual, expected) <= 1
    saved = door.forward(*EVERYTHING.of(*inputs.operands), config=TILES)
    run = door.run

    def found() -> float:
        tiles = {"query": TILES, "key": TILES}
        grads = door.backward(
            *EVERYTHING.of(*inputs.operands), saved, inputs.grad_out, None, configs=tiles
        )
        return apart(named(saved.out, saved.lse, grads), expected)

    capped = {"call": {"scale": 0.25 * LOG2_E}, "switches": {"CAPPED": tl.constexpr(False)}}
    word = seed_word(12)
    faults: dict[str, dict[str, Any]] = {
        "the mask of another head": {"strides": {"mask": Axes(0, 0, N_K, 1)}},
        "the slope of the softcap left out": capped,
        "dropped gradients not scaled": {"kept_scale": 1.0},
        "another seed": {"dropout_start": word - 2**32 if word >= 2**31 else word},
    }
    for fault, changes in faults.items():

        def faulty(launches: Any, query: Tensor, wrong: dict[str, Any] = changes) -> None:
            launches = list(launches)
            for launch in launches:
                if "Grad_value" in launch.arguments:
                    for name, value in wrong.items():
                        given = launch.arguments[name]
                        launch.arguments[name] = (
                            given._replace(**value) if isinstance(value, dict) else value
                        )
            run(launches, query)

        monkeypatch.setattr(door, "run", faulty)
        assert found() > 10, fault
    monkeypatch.setattr(door, "run", run)
    assert found() <= 1
    monkeypatch.setattr(triton_backward, "dropout_row", _next_row)  # a counter off by one
    assert found() > 10


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 5e-4), (torch.float16, 1e-4), (torch.float32, 3e-6)]
)
def test_the_public_door_takes_them_too(dtype: torch.dtype, limit: float) -> None:
    """Autograd, a seed from torch's generator, an expanded mask; against backend "torch", whose
    tiles are others.
    """
    q, k, v, do = (
        x.to(dtype).requires_grad_() for x in gaussian(5, batch=2, heads=2, length=20, dim=16)
    )
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    mask = torch.randn(2, 1, 1, 20, generator=DRAW)

    def result(backend: str) -> list[Tensor]:
        torch.manual_seed(0)
        options = {"sinks": sinks, "softcap": 3.0, "dropout_p": 0.2, "return_lse": True}
        out, lse = halfulp.attention(q, k, v, mask.expand(2, 2, 20, 20), backend=backend, **options)
        return [
            out.detach(),
            lse.detach(),
            *torch.autograd.grad((out * do).sum() + lse.sum(), (q, k, v, sinks)),
        ]

    for a, b in zip(result("triton"), result("torch"), strict=True):
        assert relative_error(a, b) <= limit
    with pytest.raises(ValueError, match="no gradient of attn_mask"):
        halfulp.attention(q, k, v, mask.requires_grad_(), backend="triton")


def test_hidden_tiles_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of matrices, two a tile forward and 3 + 4 backward: what a causal mask or a window
    hides costs none.
    """
    counted = []
    honest = InterpreterBuilder.create_dot

    def counting(self: Any, *arguments: Any) -> Any:
        counted.append(1)
        return honest(self, *arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counting)
    q, k, v, do = (x.bfloat16() for x in gaussian(6, heads=1, length=64, dim=16))

    def products(**changes: Any) -> tuple[int, int]:
        counted.clear()
        options = replace(Options(recipe="stock", scale=0.25), **changes)
        saved = door.forward(*options.of(q, k, v), config=TILES)
        forward = len(counted)
        door.backward(*options.of(q, k, v), saved, do, None, configs={"query": TILES, "key": TILES})
        return forward, len(counted) - forward

    assert products() == (2 * 8, 7 * 8)  # tiles of 16 × 32
    assert products(is_causal=True) == (2 * 6, 7 * 6)
    assert products(window=(8, 0)) == (2 * 5, 7 * 5)
