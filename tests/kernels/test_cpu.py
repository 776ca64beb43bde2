"""Holds the native library to the recipes it claims to compute: their errors, their residual, bits
that no thread count, neighbor or layout changes, and a refusal for everything it was not made for.
"""

import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfulp import emulate, golden, native
from halfulp.algorithms.problem import _residual
from halfulp.audit.inputs import Case
from halfulp.audit.probes import Shape
from halfulp.calls import Saved
from halfulp.kernels import cpu
from halfulp.recipes import BF16_HALFULP, FP16_FLASH2, FP32, FP64
from tests.kernels.asked import Options
from tests.kernels.native_calls import (
    EXACT_DELTA,
    FP16_HALFULP,
    ISAS,
    RECIPES,
    Operands,
    assert_same,
    drawn,
    error,
    library_results,
)

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def emulated(x: Operands, recipe, **call: Any) -> dict[str, Tensor]:
    q, k, v = (t.detach().clone().requires_grad_() for t in x[:3])
    out, lse = emulate(
        q, k, v, recipe=recipe, enable_gqa=q.shape[1] != k.shape[1], return_lse=True, **call
    )
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), x[3])
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def exact(x: Operands, **call: Any) -> dict[str, Tensor]:
    found = golden(*x, enable_gqa=x[0].shape[1] != x[1].shape[1], **call)
    return {
        "out": found.out,
        "lse": found.lse,
        "dq": found.grad_query,
        "dk": found.grad_key,
        "dv": found.grad_value,
    }


def assert_within(
    x: Operands,
    options: Options,
    recipe,
    isa=None,
    factor: float = 1.15,
    least: float = 0.0,
    **call: Any,
) -> None:
    """Every result's error at most `factor` times that of the recipe emulated, but for the ulp that
    any result has.

    `least` is allowed in any case: where a row has one key, dP − δ is 0 up to float32's rounding.
    """
    true, like, found = (
        exact(x, **call),
        emulated(x, recipe, **call),
        library_results(x, options, isa),
    )
    unit = 2.0**-24 if x[0].dtype == torch.float32 else torch.finfo(x[0].dtype).eps / 4
    for name in true:
        mask = true[name].isfinite()
        assert torch.equal(mask, found[name].isfinite()), name
        off, allowed = (error(t[name][mask], true[name][mask]) for t in (found, like))
        slack = (2.0**-22 if name == "lse" else unit) * float(true[name][mask].double().norm())
        assert off <= factor * allowed + slack / 2 + least, (name, off, allowed, slack)


PROBES = (
    "gaussian_causal",
    "value_offset",
    "sink",
    "diffuse",
    "deep_negative",
    "keys_common",
    "very_large",
    "tiny",
)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("probe", PROBES)
def test_the_error_is_that_of_the_recipe(probe, isa):
    inputs = Case(probe, Shape(1, 2, 200, 200, 64)).inputs()
    x = (inputs.query, inputs.key, inputs.value, inputs.grad_out)
    for name in ("halfulp", "stock") if isa == ISAS[-1] else ("halfulp",):
        options = Options(recipe=name, is_causal=inputs.sees.causal, scale=inputs.scale)
        call = {"is_causal": inputs.sees.causal, "scale": inputs.scale}
        assert_within(x, options, RECIPES[name], isa, **call)


@pytest.mark.parametrize("isa", ISAS)
def test_exact_delta_and_other_dtypes(isa):
    options = Options(scale=0.125, is_causal=True)
    call = {"scale": 0.125, "is_causal": True}
    x = drawn(1, 1, 2, 1, 130, 130, 64, 48)
    assert_within(x, replace(options, recipe="exact_delta"), EXACT_DELTA, isa, **call)
    half = tuple(t.to(torch.float16) for t in x)
    assert_within(half, options, FP16_HALFULP, isa, **call)
    assert_within(half, replace(options, recipe="stock"), FP16_FLASH2, isa, **call)
    single = tuple(t.float() * 1.001 for t in x)
    assert_within(single, options, FP32, isa, factor=2, **call)


@settings(max_examples=40)
@given(
    shape=st.tuples(
        st.integers(1, 2),
        st.integers(1, 3),
        st.integers(1, 2),
        st.integers(1, 210),
        st.integers(1, 330),
        st.integers(1, 140),
        st.integers(1, 140),
    ),
    recipe=st.sampled_from(sorted(RECIPES)),
    causal=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_shape(shape, recipe, causal, seed):
    b, hk, groups, n, nk, d, dv = shape
    x = drawn(seed, b, hk * groups, hk, n, nk, d, dv)
    options = Options(recipe=recipe, is_causal=causal, scale=d**-0.5)
    assert_within(
        x,
        options,
        RECIPES[recipe],
        factor=1.3,
        least=1e-7 * float(x[3].double().norm()),
        is_causal=causal,
    )


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("shape", [(1, 1, 1, 700, 1100, 64, 64), (2, 6, 3, 200, 130, 40, 72)])
def test_bits_do_not_depend_on_the_number_of_threads(shape, recipe):
    x = drawn(2, *shape)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(library_results(x, Options(recipe=recipe, scale=0.125)))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.skipif("avx512" not in ISAS, reason="one of the two instruction sets is not here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_avx2_and_avx512_give_the_same_bits(recipe, dtype):
    for causal, shape in (
        (True, (1, 2, 1, 233, 350, 64, 72)),
        (False, (1, 1, 1, 100, 700, 40, 33)),
    ):
        x = drawn(3, *shape, dtype=dtype)
        options = Options(recipe=recipe, is_causal=causal, scale=0.3)
        assert_same(library_results(x, options, "avx512"), library_results(x, options, "avx2"))


def test_callers_in_parallel_do_not_disturb_each_other():
    calls = [drawn(seed, 1, 2, 2, 150 + 90 * seed, 200, 64, 64) for seed in range(4)]
    options = Options(scale=0.125)
    alone = [library_results(x, options) for x in calls]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for one, other in zip(
                alone, pool.map(lambda x: library_results(x, options), calls), strict=True
            ):
                assert_same(one, other)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_the_child_of_a_fork_computes_the_same():
    """The threads of the OpenMP runtime are the parent's alone: waiting for them would not end."""
    program = """
import os, torch, halfulp
torch.set_num_threads(3)
x = torch.randn(2, 4, 200, 32, generator=torch.Generator().manual_seed(0))
before = halfulp.attention(x, x, x).numpy().tobytes()
if (child := os.fork()) == 0:
    os._exit(halfulp.attention(x, x, x).numpy().tobytes() != before)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


def test_bits_do_not_depend_on_batch_position_or_on_later_tokens():
    """With an integer shift the weights know no tile: a causal prefix gives the bits of the
    whole.
    """
    x = drawn(3, 2, 2, 2, 500, 500, 64, 64)
    options = Options(is_causal=True, scale=0.125)
    whole = library_results(x, options)
    alone = library_results(tuple(t[1:2] for t in x), options)
    assert_same({name: value[1:2] for name, value in whole.items()}, alone)
    prefix = library_results(tuple(t[:, :, :333] for t in x), options)
    for name in ("out", "residual", "lse", "dq"):
        assert torch.equal(whole[name][:, :, :333], prefix[name]), name


def test_layout_does_not_matter():
    x = drawn(4, 2, 4, 2, 77, 93, 33, 65)
    options = Options(scale=0.2)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x[:3]]
    strided[1] = x[1].mT.contiguous().mT
    grad = torch.ones(()).bfloat16().expand(x[3].shape)
    assert_same(
        library_results((*x[:3], grad.contiguous()), options),
        library_results((*strided, grad), options),
    )


def test_the_residual_is_the_recipes():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40_000, generator=generator) * torch.exp2(
        torch.randint(-130, 100, (40_000,), generator=generator)
    )
    ties = (torch.arange(256) / 256 + 1) * (1 + 2**-8)
    x = torch.cat([x, ties, -ties, torch.tensor([0.0, -0.0, 2.0**-140, 3e38, -1e-30])])
    for dtype, recipe in ((torch.bfloat16, BF16_HALFULP), (torch.float16, FP16_HALFULP)):
        values = x.clamp(-6e4, 6e4) if dtype == torch.float16 else x
        out = values.to(dtype).float()
        true = _residual(values, out, recipe)
        for isa in ISAS:
            rounded, residual = cpu.round_out(values, dtype, isa=isa)
            assert torch.equal(rounded.float(), out), (dtype, isa)
            # one unit of the residual
            units = _residual(torch.full_like(out, torch.inf), out, recipe) / 127
            assert torch.equal(residual * units, true), (dtype, isa)
    assert residual.abs().max() > 100


def bands(n: int, nk: int, left: int, right: int, offset: int) -> Tensor:
    i, j = torch.arange(n)[:, None] + offset, torch.arange(nk)[None, :]
    seen = torch.ones(n, nk, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    return seen & (j <= i + right) if right >= 0 else seen


@pytest.mark.parametrize(
    ("window", "causal", "offset"),
    [
        ((40, -1), True, 0),
        ((3, 5), False, 0),
        (None, True, 97),
        (None, True, -60),
        ((-1, 70), False, -100),
        ((0, 0), True, 0),
    ],
)
def test_windows_offsets_and_rows_that_see_nothing(window, causal, offset):
    n, nk = 210, 307
    x = drawn(5, 1, 2, 1, n, nk, 48, 64)
    left, right = window or (-1, -1)
    seen = bands(n, nk, left, (0 if right < 0 else min(0, right)) if causal else right, offset)
    options = Options(is_causal=causal, scale=0.2, window=window, causal_offset=offset)
    assert_within(x, options, BF16_HALFULP, attn_mask=seen, scale=0.2)
    found = library_results(x, options, grad_lse=torch.full((1, 2, n), torch.inf))
    blind = ~seen.any(-1)
    assert blind.any() == (offset < 0)
    assert (found["out"][:, :, blind] == 0).all()
    assert (found["dq"][:, :, blind] == 0).all()
    assert (found["lse"][:, :, blind] == -math.inf).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((2, 2, 130, 150), "bool"),
        ((130, 150), "bool"),
        ((2, 1, 1, 150), "bool"),
        ((130, 1), "bool"),
        ((2, 1, 130, 150), "float"),
        ((1, 150), "bfloat16"),
        ((2, 1, 1), "float"),
        ((130, 150), "hiding"),
    ],
)
def test_masks(shape, kind, isa):
    x = drawn(9, 2, 2, 1, 130, 150, 48, 40)
    generator = torch.Generator().manual_seed(2)
    drop = torch.rand(shape, generator=generator) < 0.3
    added = 3 * torch.randn(shape, generator=generator)
    masks = {
        "bool": ~drop,
        "float": added,
        "bfloat16": added.bfloat16(),
        "hiding": added.masked_fill(drop, -math.inf),
    }
    mask = masks[kind]
    if kind in ("bool", "hiding") and len(shape) == 2:
        mask[7] = False if kind == "bool" else -math.inf  # a row that sees nothing
    for recipe in ("halfulp", "exact_delta") if isa == ISAS[-1] else ("halfulp",):
        options = Options(recipe=recipe, scale=0.2, attn_mask=mask)
        assert_within(x, options, RECIPES[recipe], isa, factor=1.3, attn_mask=mask, scale=0.2)


def test_a_mask_may_have_any_layout():
    x = drawn(9, 2, 2, 1, 130, 150, 48, 40)
    mask = torch.randn(150, 130, generator=torch.Generator().manual_seed(3))
    one = library_results(x, Options(scale=0.2, attn_mask=mask.mT))
    assert_same(one, library_results(x, Options(scale=0.2, attn_mask=mask.mT.contiguous())))
    assert_same(
        one, library_results(x, Options(scale=0.2, attn_mask=mask.mT.expand(2, 2, 130, 150)))
    )


def test_nothing_to_attend_to_and_nothing_that_attends():
    options = Options(scale=1.0)
    found = library_results(drawn(0, 1, 2, 2, 5, 0, 8, 8), options)
    assert (found["out"] == 0).all()
    assert (found["lse"] == -math.inf).all()
    assert (found["dq"] == 0).all()
    found = library_results(drawn(0, 1, 2, 2, 0, 5, 8, 8), options)
    assert (found["dk"] == 0).all()
    assert library_results(drawn(0, 0, 2, 2, 5, 5, 8, 8), options)["dv"].shape == (0, 2, 5, 8)


def test_the_gradient_of_lse():
    x = drawn(6, 1, 2, 2, 60, 80, 32, 32)
    grad_lse = torch.randn(1, 2, 60, generator=torch.Generator().manual_seed(1))
    found = library_results(x, Options(scale=0.2), grad_lse=grad_lse)
    q, k, v = (t.double().requires_grad_() for t in x[:3])
    out, lse = emulate(q, k, v, scale=0.2, recipe=FP64, return_lse=True)
    true = torch.autograd.grad((out * x[3].double()).sum() + (lse * grad_lse).sum(), (q, k, v))
    for name, value in zip(("dq", "dk", "dv"), true, strict=True):
        assert error(found[name], value) < 5e-3 * float(value.norm()), name


def test_nan_reaches_its_own_row_and_no_other():
    x = drawn(7, 1, 1, 1, 100, 100, 64, 64)
    clean = library_results(x, Options(scale=0.125))
    x[0][0, 0, 50, 3] = math.nan
    found = library_results(x, Options(scale=0.125))
    assert found["out"][0, 0, 50].isnan().all()
    rest = torch.arange(100) != 50
    assert torch.equal(found["out"][:, :, rest], clean["out"][:, :, rest])
    assert found["dk"].isnan().any()


def test_each_repair_is_at_work():
    """On values with an offset the stock recipe's error is many times the repaired one's; without
    residual, too.
    """
    inputs = Case("value_offset", Shape(1, 2, 300, 300, 64)).inputs()
    x = (inputs.query, inputs.key, inputs.value, inputs.grad_out)
    options = Options(is_causal=inputs.sees.causal, scale=inputs.scale)
    true = exact(x, is_causal=inputs.sees.causal, scale=inputs.scale)["dq"]
    repaired = error(library_results(x, options)["dq"], true)
    assert error(library_results(x, replace(options, recipe="stock"))["dq"], true) > 3 * repaired
    saved = cpu.forward(*options.of(*x[:3]))
    assert saved.residual is not None
    lost = saved._replace(residual=torch.zeros_like(saved.residual))
    assert error(cpu.backward(*options.of(*x[:3]), lost, x[3], None).query, true) > 2 * repaired


@pytest.mark.parametrize("isa", ISAS)
def test_a_weight_that_dominates_its_row_is_balanced(isa):
    """Scores three times as far apart as usual: what dS's weights are divided by is then neither l
    nor l̂.
    """
    x, scale = drawn(4, 1, 2, 1, 37, 43, 24, 20), 3 * 24**-0.5
    found = library_results(x, Options(scale=scale), isa)
    for divisor, agrees in (("balanced", True), ("row_sum", False), ("lse", False)):
        expected = emulated(x, BF16_HALFULP.with_(divisor_from=divisor), scale=scale)
        off = [
            error(found[name], expected[name]) / float(expected[name].double().norm())
            for name in ("dq", "dk")
        ]
        assert max(off) <= 2e-4 if agrees else min(off) > 6e-4, (divisor, off)


X = drawn(0, 1, 2, 2, 10, 12, 16, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"recipe": "stochastic"}, "recipe 'stochastic'"),
        ({"attn_mask": torch.ones(10, 11, dtype=torch.bool)}, "an attention mask of shape"),
        ({"attn_mask": torch.ones(1, 1, 1, 10, 12)}, "an attention mask of shape"),
        ({"attn_mask": torch.ones(10, 12, dtype=torch.int32)}, "an attention mask of torch.int32"),
        ({"attn_mask": torch.ones(10, 12, device="meta")}, "an attention mask on meta"),
        ({"softcap": -1.0}, "a softcap"),
        ({"softcap": 3e38}, "a softcap"),
        ({"sinks": torch.zeros(3)}, "sinks of shape"),
        ({"sinks": torch.zeros(2, device="meta")}, "on meta: accepted is one"),
        ({"sinks": torch.zeros(2, dtype=torch.int64)}, "sinks of shape .* and torch.int64"),
        ({"dropout_p": 1.5}, "a dropout_p"),
        ({"scale": math.nan}, "a scale"),
    ],
)
def test_what_is_not_offered_is_refused_with_its_reason(change, reason):
    options = replace(Options(scale=0.25), **change)
    assert re.search(reason, cpu.supports(*options.of(*X[:3])))
    with pytest.raises(ValueError, match=reason):
        cpu.forward(*options.of(*X[:3]))


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        (drawn(0, 1, 2, 2, 4, 4, 257, 8)[:3], "257"),
        (drawn(0, 1, 2, 2, 4, 4, 8, 8, torch.float64)[:3], "float64"),
        ((X[0], X[1].float(), X[2]), "different dtypes"),
        ((X[0], X[1][:, :, :5], X[2]), "do not fit"),
        ((X[0][0], X[1][0], X[2][0]), "not \\[B, H, N, D\\]"),
        (drawn(0, 1, 3, 2, 4, 4, 8, 8)[:3], "3 query heads over 2"),
        (tuple(t.to("meta") for t in X[:3]), "meta tensors"),
    ],
)
def test_operands_that_do_not_fit_are_refused(operands, reason):
    with pytest.raises(ValueError, match=reason):
        cpu.forward(*Options().of(*operands))


def test_a_backward_call_that_does_not_fit_is_refused():
    q, k, v, do = X
    options = Options(scale=0.25)
    saved = cpu.forward(*options.of(q, k, v))
    for name, wrong in (
        ("row_max", saved.row_max[:, :1]),
        ("out", saved.out.float()),
        ("lse", saved.lse.double()),
    ):
        broken: Saved = saved._replace(
            **{name: wrong}, **({"own_lse": None} if name == "lse" else {})
        )
        with pytest.raises(ValueError, match=r"saved\."):
            cpu.backward(*options.of(q, k, v), broken, do, None)
    with pytest.raises(ValueError, match="grad_out"):
        cpu.backward(*options.of(q, k, v), saved, do[..., :8], None)
    with pytest.raises(ValueError, match="grad_lse"):
        cpu.backward(*options.of(q, k, v), saved, do, saved.lse[:, :1])
    with pytest.raises(ValueError, match="isa='neon'"):
        cpu.forward(*options.of(q, k, v), isa="neon")


def test_lse_alone_stands_in_for_its_own_base():
    x = drawn(8, 1, 2, 2, 90, 90, 64, 64)
    options = Options(scale=0.125)
    saved = cpu.forward(*options.of(*x[:3]))
    one = cpu.backward(*options.of(*x[:3]), saved, x[3], None)
    other = cpu.backward(*options.of(*x[:3]), saved._replace(own_lse=None), x[3], None)
    assert torch.equal(one.query, other.query)
    assert error(other.value, one.value) < 1e-3 * float(one.value.double().norm())


def test_a_library_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    native._found.cache_clear()
    try:
        assert "no C++ compiler" in native.missing()
        assert cpu.supports(*Options().of(*X[:3])) == native.missing()
        (tmp_path / "libhalfulp.so").write_bytes(b"no library")
        native._found.cache_clear()
        assert "does not load" in native.missing()
    finally:
        native._found.cache_clear()
