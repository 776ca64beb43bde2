"""Every Triton kernel under Triton's interpreter against the emulator. `test_triton_interpreter.py`
runs this file.

It needs a process of its own, since TRITON_INTERPRET decides when triton is imported.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.triton_tune import tune
from benchmarks.triton_weights import rounded_weights, weights_that_differ
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from halfulp import algorithms
from halfulp.algorithms import Problem
from halfulp.calls import Call, Saved, Sees
from halfulp.formats import FP16
from halfulp.kernels import triton_attention as door
from halfulp.kernels import triton_launch
from halfulp.kernels.triton_configs import Config, shipped_table
from halfulp.recipes import BF16_HALFULP, Step, flash2
from halfulp.testing import (
    Inputs,
    assert_within_budget,
    attend,
    gaussian,
    golden,
    relative_error,
    value_offset,
)
from tests.kernels.asked import Options
from tests.kernels.triton_reference import (
    RECIPES,
    TILES,
    UNIT,
    WIDE,
    emulated,
    exact_inputs,
    run,
    same_functions,
)

__all__ = ["same_functions"]  # a fixture of every test here


@pytest.mark.parametrize("causal", [False, True])
def test_forward_of_halfulp_bit_for_bit(causal: bool) -> None:
    """Weights with fractions, rounded; l from the rounded ones; O; its residual; an odd length."""
    inputs, options = exact_inputs(0, 45, 61), Options(is_causal=causal, scale=UNIT)
    saved = door.forward(*options.of(*inputs.operands), config=TILES)
    _, expected = emulated(BF16_HALFULP, inputs, options)
    assert torch.equal(saved.out.float(), expected.out)
    assert torch.equal(saved.row_max, expected.largest_score.squeeze(-1))
    assert torch.equal(saved.row_sum, expected.row_sum.squeeze(-1))
    # its l sums numbers that are not exact
    assert (saved.lse - expected.lse.squeeze(-1) * UNIT).abs().max() <= 5e-7
    assert torch.equal(out_for_delta(saved), expected.out_for_delta)
    assert (out_for_delta(saved) != expected.out).float().mean() > 0.5


def out_for_delta(saved: Saved) -> Tensor:
    assert saved.residual is not None
    out = saved.out.float()
    _, exponent = torch.frexp(out)
    return out + torch.ldexp(saved.residual.float(), exponent.clamp_min(-100) - 16)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("causal", [False, True])
def test_forward_with_whole_scores_bit_for_bit(name: str, causal: bool) -> None:
    """Weights are powers of two, so sums are exact in every recipe; maxima repeat, and "published"
    shifts them.
    """
    q, k, v, do = exact_inputs(1, 45, 61)
    inputs, options = (
        Inputs((q * 16).sign(), k, v, grad_out=do),
        Options(recipe=name, is_causal=causal, scale=UNIT / 4),
    )
    inputs = replace(inputs, query=inputs.query * 4)
    saved = door.forward(*options.of(*inputs.operands), config=TILES)
    _, expected = emulated(RECIPES[name], inputs, options)
    row_max = expected.largest_score if name == "halfulp" else expected.row_max
    assert torch.equal(saved.row_max, row_max.squeeze(-1))
    finite = expected.out.isfinite()
    assert finite.any()
    assert torch.equal(saved.out.float()[finite], expected.out[finite])
    assert torch.equal(saved.out.isfinite(), finite)
    assert (saved.lse - expected.lse.squeeze(-1) * UNIT).abs().nan_to_num(0).max() <= 3e-6


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("causal", [False, True])
def test_backward_bit_for_bit(name: str, causal: bool) -> None:
    """Both sides start from the same statistics, chosen so that δ is exact and 1 / l a power of
    two.
    """
    inputs, options = exact_inputs(2, 24, 32), Options(recipe=name, is_causal=causal, scale=UNIT)
    problem, kept = emulated(RECIPES[name], inputs, options)
    row_max = kept.row_max.ceil()
    whole = torch.randint(-4, 5, kept.out.shape, generator=torch.Generator().manual_seed(3)).float()
    kept = algorithms.Kept(
        whole, whole, row_max + 2, row_max, torch.full_like(row_max, 4.0), row_max
    )
    expected = algorithms.attend_backward(problem, kept, inputs.grad_out.float(), None)
    residual = torch.zeros(whole.shape, dtype=torch.int8) if name == "halfulp" else None
    natural = ((row_max + 2).double() / math.log2(math.e)).float().squeeze(-1)
    saved = Saved(
        whole.bfloat16(), residual, natural, row_max.squeeze(-1), kept.row_sum.squeeze(-1)
    )
    configs = {"query": TILES, "key": TILES}
    actual = door.backward(
        *options.of(*inputs.operands), saved, inputs.grad_out, None, configs=configs
    )
    for what, a, b in zip(("dQ", "dK", "dV"), actual, expected, strict=False):
        differ = int((a.float() != b).sum())
        # lse · log2 e is not 2 to the last bit, and a rounded weight may then fall the other way
        assert differ <= (2 if what == "dV" and name == "halfulp" else 0), (what, differ)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("causal", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
def test_gaussian_numbers(name: str, causal: bool, dtype: torch.dtype) -> None:
    """Grouped heads, odd lengths, D and D_v no powers of two and unlike: a wrong rounding would
    differ by 1e-3.
    """
    recipe = RECIPES[name]
    if dtype == torch.float16:
        wide = {step: FP16 for step in vars(flash2(FP16)) if getattr(flash2(FP16), step) == FP16}
        recipe = recipe.with_(**wide)
    inputs = gaussian(4, heads=2, key_heads=1, length=37, key_length=43, dim=24, value_dim=20)
    inputs = value_offset(inputs, 4.0)
    options = Options(recipe=name, is_causal=causal, scale=24**-0.5)
    actual = run(inputs.map(lambda x: x.to(dtype)), options, WIDE)
    exact = {"is_causal": causal, "enable_gqa": True}
    tiled = recipe.with_(block_query=WIDE.block_m, block_key=WIDE.block_n)
    assert_within_budget(actual, inputs, tiled, **exact)
    expected = attend(tiled, inputs, **exact)
    for what, value in expected.given().items():
        assert relative_error(getattr(actual, what), value) <= 2e-4, what
    if causal:
        return
    unlike = RECIPES["stock" if name == "halfulp" else "halfulp"]
    other = attend(unlike.with_(block_query=WIDE.block_m, block_key=WIDE.block_n), inputs, **exact)
    # the comparison tells recipes apart
    assert relative_error(actual.grad_query, other.grad_query) > 2e-4


def test_a_weight_that_dominates_its_row_is_balanced() -> None:
    """Scores three times as far apart: what dS's weights are divided by is then neither l nor l̂."""
    inputs = gaussian(4, heads=2, key_heads=1, length=37, key_length=43, dim=24, value_dim=20)
    tiles = {"block_query": WIDE.block_m, "block_key": WIDE.block_n}
    actual = run(inputs.map(Tensor.bfloat16), Options(scale=3 * 24**-0.5), WIDE)
    for divisor, agrees in (("balanced", True), ("row_sum", False), ("lse", False)):
        recipe = BF16_HALFULP.with_(divisor_from=divisor, **tiles)
        expected = attend(recipe, inputs, scale=3 * 24**-0.5, enable_gqa=True)
        off = [
            relative_error(getattr(actual, what), getattr(expected, what))
            for what in ("grad_query", "grad_key")
        ]
        assert max(off) <= 2e-4 if agrees else min(off) > 6e-4, (divisor, off)


@pytest.mark.parametrize("name", RECIPES)
def test_fp32_rounds_nothing(name: str) -> None:
    inputs = gaussian(5, heads=2, key_heads=1, length=20, key_length=37, dim=24, value_dim=8)
    actual = run(inputs, Options(recipe=name, is_causal=True, scale=24**-0.5))
    exact = golden(*inputs, is_causal=True, enable_gqa=True)
    for what, value in exact.given().items():
        assert relative_error(getattr(actual, what), value) <= 2e-6, what
    assert (
        door.forward(*Options(recipe=name, scale=1.0).of(*inputs.operands), config=TILES).residual
        is None
    )


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("window", "causal", "offset"),
    [
        ((5, -1), True, 0),
        ((3, 4), False, 0),
        ((-1, 9), False, 3),
        ((20, 0), True, -7),
        (None, True, 14),
        ((1, 0), False, 0),
        (None, True, -50),
    ],
)
def test_windows_and_offsets_are_masks(
    window: tuple[int, int] | None, causal: bool, offset: int
) -> None:
    inputs = gaussian(6, length=34, key_length=48, dim=16)
    i, j = torch.arange(34)[:, None] + offset, torch.arange(48)[None, :]
    left, right = window or (-1, -1)
    mask = torch.ones(34, 48, dtype=torch.bool)
    if causal:
        mask &= j <= i
    if left >= 0:
        mask &= j >= i - left
    if right >= 0:
        mask &= j <= i + right
    options = Options(is_causal=causal, scale=0.25, window=window, causal_offset=offset)
    actual = run(inputs.map(Tensor.bfloat16), options)
    tiled = BF16_HALFULP.with_(block_query=TILES.block_m, block_key=TILES.block_n)
    expected = attend(tiled, inputs, attn_mask=mask)
    empty = ~mask.any(1)
    assert torch.equal(actual.lse[..., empty], torch.full_like(actual.lse[..., empty], -math.inf))
    assert not actual.out[:, :, empty].any()
    assert not actual.grad_query[:, :, empty].any()
    for what, value in expected.given().items():
        assert relative_error(getattr(actual, what), value) <= 2e-4, what


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", RECIPES)
def test_gradient_of_lse(name: str) -> None:
    inputs = gaussian(7, length=30, key_length=40, dim=16)
    grad_lse = torch.randn(1, 2, 30, generator=torch.Generator().manual_seed(8))
    tiled = RECIPES[name].with_(block_query=TILES.block_m, block_key=TILES.block_n)
    problem, kept = emulated(tiled, inputs, Options(scale=0.25))
    expected = algorithms.attend_backward(problem, kept, inputs.grad_out, grad_lse[..., None])
    options = Options(recipe=name, scale=0.25)
    actual = run(inputs.map(Tensor.bfloat16), options, grad_lse=grad_lse)
    for a, b in zip((actual.grad_query, actual.grad_key, actual.grad_value), expected, strict=True):
        assert relative_error(a, b) <= 2e-4
    plain = algorithms.attend_backward(problem, kept, inputs.grad_out, None)
    assert relative_error(actual.grad_query, plain[0]) > 1e-2


def test_descriptors_read_the_same_numbers() -> None:
    inputs = gaussian(9, length=24, key_length=40, dim=24).map(Tensor.bfloat16)
    options = Options(is_causal=True, scale=0.2)
    launch, _ = triton_launch.forward_launch(
        *options.of(*inputs.operands), triton_launch.Target(80), Config(16, 32, 4, 1, True)
    )
    assert launch.arguments["tiles"].DESCRIPTORS
    described = run(inputs, options, Config(16, 32, 4, 1, True))
    for a, b in zip(run(inputs, options).given().values(), described.given().values(), strict=True):
        assert torch.equal(a, b)
    odd = gaussian(9, length=20, dim=20).map(Tensor.bfloat16)
    launch, _ = triton_launch.forward_launch(
        *options.of(*odd.operands), triton_launch.Target(80), Config(16, 32, 4, 1, True)
    )
    assert not launch.arguments["tiles"].DESCRIPTORS  # rows of 40 bytes


def test_layouts_are_read_as_they_lie() -> None:
    """Heads inside rows, an expanded batch, a transposed last dimension: no copy may change a
    bit.
    """
    q, k, v, do = (x.bfloat16() for x in gaussian(10, batch=2, heads=2, length=20, dim=16))
    options = Options(scale=0.25)
    plain = run(Inputs(q, k[:1].expand(2, -1, -1, -1).contiguous(), v, grad_out=do), options)
    inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, v, do)]
    turned = inside[1].mT.contiguous().mT
    other = run(Inputs(inside[0], k[:1].expand(2, -1, -1, -1), turned, grad_out=inside[2]), options)
    for a, b in zip(plain.given().values(), other.given().values(), strict=True):
        assert torch.equal(a, b)


def test_an_empty_batch_launches_nothing() -> None:
    q = torch.empty(0, 2, 8, 16, dtype=torch.bfloat16)
    saved = door.forward(*Options().of(q, q, q))
    grads = door.backward(*Options().of(q, q, q), saved, q, None)
    assert [x.shape for x in grads[:3]] == [q.shape] * 3


def test_a_constant_value_gives_a_constant_output() -> None:
    """Numerator and denominator sum the same rounded weights in the same order."""
    q, k, _, _ = (x.bfloat16() for x in gaussian(11, length=20, key_length=300, dim=16))
    ones = torch.ones(1, 2, 300, 16, dtype=torch.bfloat16)
    assert (door.forward(*Options(scale=0.3).of(q, k, ones), config=TILES).out == 1).all()


def test_keys_that_nobody_sees() -> None:
    """Keys that no query sees have a gradient of exactly 0."""
    inputs = gaussian(12, length=5, key_length=40, dim=16)
    actual = run(inputs.map(Tensor.bfloat16), Options(is_causal=True, scale=0.25))
    assert not actual.grad_key[:, :, 5:].any()
    assert not actual.grad_value[:, :, 5:].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forward_and_backward_round_to_the_same_weights(causal: bool, dtype: torch.dtype) -> None:
    """Also against the emulator's: read from O, dQ and dK as on a GPU, where this counts what exp2
    does.
    """
    q, k, _, _ = (x.to(dtype) for x in gaussian(13, heads=2, length=64, dim=64))
    tiles = {kind: Config(32, 32, 4, 1) for kind in ("forward", "query", "key")}
    weights = rounded_weights(q, k, scale=0.125, is_causal=causal, configs=tiles)
    counts = weights_that_differ(weights)
    assert counts["of"] == 2 * 64 * 64
    assert counts["query, key"] == 0
    # the running maximum is not the final one
    assert max(counts["forward, query"], counts["forward, key"]) <= 2
    step = Step(
        BF16_HALFULP if dtype == torch.bfloat16 else BF16_HALFULP.with_(weights_operand=FP16)
    )
    problem = Problem.read(Call(q, k, k, Sees(causal), 0.125), step)
    scores = problem.scores(slice(0, 64), slice(0, 64))
    exact = problem.weights(scores, scores.amax(-1, keepdim=True).ceil())
    expected = problem.weights_operand(exact)
    assert int((weights["key"].float() != expected).sum()) <= 2  # one fma here, two roundings there
    assert int((weights["key"].float() != exact).sum()) > 1000


def test_other_shifts_are_seen_as_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a backward pass that shifts by lse rounds elsewhere."""
    q, k, _, _ = (x.bfloat16() for x in gaussian(13, heads=1, length=64, dim=64))
    honest = InterpreterBuilder.create_fma

    def off(self: Any, x: Any, y: Any, z: Any) -> Any:
        return honest(self, x, y, self.create_fmul(z, self.get_fp32(1.0 + 2.0**-12)))

    tiles = {kind: Config(32, 32, 4, 1) for kind in ("forward", "query", "key")}
    sound = weights_that_differ(rounded_weights(q, k, scale=0.125, configs=tiles))
    run_launches = door.run

    def faulty(launches: Any, query: Tensor) -> None:
        launches = list(launches)
        if "Grad_key" in launches[0].arguments:
            monkeypatch.setattr(InterpreterBuilder, "create_fma", off)
        run_launches(launches, query)
        monkeypatch.setattr(InterpreterBuilder, "create_fma", honest)

    monkeypatch.setattr(door, "run", faulty)
    counts = weights_that_differ(rounded_weights(q, k, scale=0.125, configs=tiles))
    assert counts["forward, query"] == sound["forward, query"]
    assert counts["forward, key"] > 100


def test_tuning_keeps_the_fastest_and_writes_a_table(tmp_path: Path) -> None:
    """With a clock that is told what to say: the second candidate wins, and one that does not fit
    is passed over.
    """
    slow, fast, large = Config(16, 32, 4, 1), Config(32, 16, 4, 1), Config(64, 64, 8, 1)

    class OutOfResourcesError(Exception):
        pass

    def clock(call: Any) -> float:
        config = call.keywords.get("config") or next(iter(call.keywords["configs"].values()))
        if config == large:
            raise OutOfResourcesError
        return {slow: 2.0, fast: 1.0}.get(config, 3.0)

    table = tune(
        (16,),
        length=16,
        timer=clock,
        device="cpu",
        choices=lambda kind, dim: [slow, fast, large],
        write=tmp_path / "table.json",
    )
    assert json.loads((tmp_path / "table.json").read_text()) == table
    rows = table["80"]["16"]
    names = {f"{kind}{which}" for kind in ("forward", "query", "key") for which in ("", " causal")}
    assert {Config(**rows[name]) for name in names} == {fast}
    untimed = {
        f"{kind} {which}" for kind in ("forward", "query", "key") for which in ("option", "options")
    }
    assert set(rows) == names | untimed
    assert table["90"] == shipped_table()["90"]
    with pytest.raises(ZeroDivisionError):
        tune((16,), length=16, timer=lambda call: 1 / 0, device="cpu", choices=lambda kind, dim: [])
