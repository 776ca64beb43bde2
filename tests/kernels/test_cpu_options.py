"""Holds the options of the native library to the backend "torch", which computes each in plain
PyTorch: the published shift, softcap, sinks and dropout, forward and backward, alone and together.

The truth is that backend in float64 (itself held to plain autograd by
tests/attention/test_options.py), the error allowed is what it makes in the dtype of the inputs.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import halfulp
from halfulp import native
from halfulp.formats.counter import keep_mask
from halfulp.kernels import cpu
from halfulp.ops import tiled
from tests.kernels.asked import Options
from tests.kernels.native_calls import (
    ISAS,
    RECIPES,
    Operands,
    assert_same,
    drawn,
    error,
    library_results,
)

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

SINKS = torch.tensor([0.3, -1.5, 2.0, 0.0])
OPTIONS = {
    "softcap": {"softcap": 1.5},
    "wide softcap": {"softcap": 50.0, "is_causal": True},
    "sinks": {"sinks": SINKS},
    "dropout": {"dropout_p": 0.3, "seed": -(2**40) - 17},
    "all": {
        "softcap": 4.0,
        "sinks": SINKS,
        "dropout_p": 0.15,
        "seed": 2**62 + 5,
        "is_causal": True,
        "window": (70, -1),
        "causal_offset": 60,
    },
}


def plain(x: Operands, options: Options, grad_lse: Tensor | None = None) -> dict[str, Tensor]:
    """What the backend "torch" gives."""
    q, k, v, do = x
    saved = tiled.forward(*options.of(q, k, v))
    gradients = tiled.backward(*options.of(q, k, v), saved, do, grad_lse)
    found = {
        "out": saved.out,
        "lse": saved.lse,
        "dq": gradients.query,
        "dk": gradients.key,
        "dv": gradients.value,
    }
    return found if gradients.sinks is None else found | {"dsinks": gradients.sinks}


def exact(x: Operands, options: Options, grad_lse: Tensor | None = None) -> dict[str, Tensor]:
    sinks = None if options.sinks is None else options.sinks.double()
    lse = None if grad_lse is None else grad_lse.double()
    return plain(tuple(t.double() for t in x), replace(options, sinks=sinks), lse)


def too_far(
    found: dict[str, Tensor],
    x: Operands,
    options: Options,
    grad_lse: Tensor | None = None,
    factor: float = 1.15,
) -> list[str]:
    """The results whose error is above `factor` times the recipe's, but for the ulp that any result
    has.

    The gradient of a sink is one number a head, where the recipe's error can be small by luck: 3
    times is allowed.
    """
    true, like = exact(x, options, grad_lse), plain(x, options, grad_lse)
    unit = 2.0**-22 if x[0].dtype == torch.float32 else torch.finfo(x[0].dtype).eps / 8
    wrong = []
    for name, value in true.items():
        mask = value.isfinite()
        off, allowed = (error(t[name][mask], value[mask]) for t in (found, like))
        slack = (2.0**-22 if name == "lse" else unit) * float(value[mask].norm())
        if name == "dsinks":
            allowed, slack = 3 * allowed, 1e-3 * float(value.norm())
        same = torch.equal(mask, found[name].isfinite())
        if not (same and off <= factor * allowed + slack):
            wrong.append(f"{name}: {off} where the recipe has {allowed} and {slack} is an ulp's")
    return wrong


def inputs(dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> tuple[Operands, Tensor]:
    """Operands with repeated keys, so that maxima tie, and a gradient of lse."""
    q, k, v, do = drawn(seed, 2, 4, 2, 150, 300, 40, 56, dtype)
    for first, second in ((3, 7), (140, 250), (255, 256)):
        k[:, :, second] = k[:, :, first] = 2 * k[:, :, first]
    return (q, k, v, do), torch.randn(2, 4, 150, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", OPTIONS)
def test_the_error_is_that_of_the_recipe(case, isa):
    x, grad_lse = inputs()
    for recipe in RECIPES if isa == ISAS[-1] else ("halfulp", "published"):
        options = Options(recipe=recipe, scale=0.15, **OPTIONS[case])
        assert not too_far(library_results(x, options, isa, grad_lse), x, options, grad_lse), recipe


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(case, dtype):
    x, grad_lse = inputs(dtype)
    for recipe in RECIPES:
        options = Options(recipe=recipe, scale=0.15, **OPTIONS[case])
        factor = 2 if dtype == torch.float32 else 1.15
        assert not too_far(
            library_results(x, options, None, grad_lse), x, options, grad_lse, factor
        ), recipe


@settings(max_examples=40)
@given(
    shape=st.tuples(
        st.integers(1, 2),
        st.integers(1, 2),
        st.integers(1, 2),
        st.integers(1, 210),
        st.integers(1, 330),
        st.integers(1, 100),
        st.integers(1, 100),
    ),
    recipe=st.sampled_from(sorted(RECIPES)),
    softcap=st.sampled_from([0.0, 0.8, 30.0]),
    dropout_p=st.sampled_from([0.0, 0.1, 0.9]),
    with_sinks=st.booleans(),
    with_mask=st.booleans(),
    causal=st.booleans(),
    seed=st.integers(-9, 9),
)
def test_any_options(shape, recipe, softcap, dropout_p, with_sinks, with_mask, causal, seed):
    b, hk, groups, n, nk, d, dv = shape
    x = drawn(seed + 9, b, hk * groups, hk, n, nk, d, dv)
    sinks = SINKS[: hk * groups].bfloat16() if with_sinks else None
    mask = (
        torch.rand(n, nk, generator=torch.Generator().manual_seed(seed + 9)) < 0.8
        if with_mask
        else None
    )
    options = Options(recipe, causal, d**-0.5, mask, None, softcap, sinks, dropout_p, seed)
    found = library_results(x, options)
    assert not too_far(found, x, options, factor=1.4)
    if with_sinks:
        assert found["dsinks"].dtype == torch.bfloat16


FAULTS = {
    "dropout of another seed": {"seed": 4},
    "no dropout": {"dropout_p": 0.0},
    "no softcap": {"softcap": 0.0},
    "another softcap": {"softcap": 4.2},
    "the causal triangle": {"is_causal": False},
    "scale": {"scale": 0.1505},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_backward_pass_of_another_option_is_seen(fault):
    x, grad_lse = inputs()
    options = Options(scale=0.15, **OPTIONS["all"] | {"seed": 3})
    saved = cpu.forward(*options.of(*x[:3]))
    for wrong in (False, True):
        meant = replace(options, **FAULTS[fault]) if wrong else options
        gradients = cpu.backward(*meant.of(*x[:3]), saved, x[3], grad_lse)
        found = {"out": saved.out, "lse": saved.lse, "dq": gradients.query, "dk": gradients.key}
        found |= {"dv": gradients.value, "dsinks": gradients.sinks}
        assert bool(too_far(found, x, options, grad_lse)) == wrong


def test_each_option_is_at_work_in_the_forward_pass():
    x, _ = inputs()
    options = Options(scale=0.15, **OPTIONS["all"])
    whole = library_results(x, options)
    for change in (
        {"softcap": 0.0},
        {"sinks": None},
        {"dropout_p": 0.0},
        {"seed": 1},
        {"recipe": "published"},
    ):
        other = library_results(x, replace(options, **change))
        assert error(other["out"], whole["out"]) > 1e-3 * float(whole["out"].double().norm()), (
            change
        )


# The published shift.


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_maxima_are_counted_in_blocks_of_128_keys(dtype, isa):
    """One query of 1; the scores are the keys."""
    key = torch.full((1, 5, 300, 1), -40.0)
    key[0, 0, [3, 7]] = 2.0  # twice in one block: 7 · 2
    key[0, 1, [127, 128]] = 2.0  # in two blocks: once in each
    key[0, 2, [5, 260, 299]] = 3.0  # twice in the last block
    key[0, 3] = -1.0  # negative and repeated: 0
    key[0, 4, [3, 7, 200]] = torch.tensor([1.0, 1.0, 8.0])[:, None]  # 7 · 1 against a single 8
    x = (torch.ones(1, 5, 1, 1, dtype=dtype), key.to(dtype), torch.ones(1, 5, 300, 1, dtype=dtype))
    saved = cpu.forward(*Options(recipe="published").of(*x), isa=isa)
    unit = math.log2(math.e)
    wanted = torch.tensor([14.0, 2.0, 21.0, 0.0, 8.0])[None, :, None]
    torch.testing.assert_close(saved.row_max / unit, wanted)
    torch.testing.assert_close(
        saved.row_max / unit, tiled.forward(*Options(recipe="published").of(*x)).row_max
    )
    torch.testing.assert_close(saved.lse, torch.logsumexp(key.mT, -1))


def test_an_underflow_of_the_published_shift_is_nan_in_all_that_its_row_gives():
    """β · m is 7 · 20: every weight e⁻¹²⁰ is 0 in float32, as in the published code."""
    x = [torch.ones(1, 1, n, 1) for n in (3, 200, 200, 3)]
    x[0][..., 1, :] = 0.1
    options = Options(recipe="published", scale=20.0)
    saved = cpu.forward(*options.of(*x[:3]))
    gradients = cpu.backward(*options.of(*x[:3]), saved, x[3], None)
    assert saved.out.isnan().flatten().tolist() == [True, False, True]
    assert gradients.query.isnan().flatten().tolist() == [True, False, True]
    assert gradients.value.isnan().all()
    assert tiled.forward(*options.of(*x[:3])).out.isnan().flatten().tolist() == [True, False, True]


# Softcap.


@pytest.mark.parametrize("isa", ISAS)
def test_tanh_and_its_slope_to_seven_digits(isa):
    """One key: lse is the capped score, and the gradient of lse by the query its slope."""
    x = torch.cat([torch.logspace(-38, 1.6, 4000), torch.linspace(0.01, 12, 4000)])
    x = torch.cat([x, -x])
    query, one = x.view(1, 1, -1, 1), torch.ones(1, 1, 1, 1)
    options = Options(recipe="stock", softcap=1.0)
    saved = cpu.forward(*options.of(query, one, one), isa=isa)
    nothing = torch.zeros_like(saved.out)
    gradients = cpu.backward(
        *options.of(query, one, one), saved, nothing, torch.ones_like(saved.lse), isa=isa
    )
    true = torch.tanh(x.double())
    off = (saved.lse.flatten().double() / true - 1).abs().max()
    assert off < 6e-7  # of it 1.2e-7 from base 2 and back
    slope = 1 / torch.cosh(x.double()).square()
    assert (gradients.query.flatten().double() / slope - 1).abs().max() < 5e-6  # e²ˣ where x is 40
    beyond = torch.tensor([1e5, -1e5, 3e38, -3e38, torch.inf, -torch.inf, torch.nan]).view(
        1, 1, -1, 1
    )
    capped = cpu.forward(*options.of(beyond, one, one), isa=isa).lse.flatten()
    torch.testing.assert_close(
        capped, torch.tensor([1, -1, 1, -1, 1, -1, torch.nan]), equal_nan=True
    )


# Sinks.


def test_a_sink_of_minus_infinity_is_none_and_a_row_may_see_a_sink_alone():
    x, grad_lse = inputs()
    mask = torch.rand(150, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[5:120] = False
    options = Options(scale=0.15, attn_mask=mask, sinks=torch.full((4,), -math.inf))
    found = library_results(x, options, grad_lse=grad_lse)
    assert (found.pop("dsinks") == 0).all()
    assert_same(found, library_results(x, replace(options, sinks=None), grad_lse=grad_lse))
    options = replace(options, sinks=SINKS)
    found = library_results(x, options, grad_lse=grad_lse)
    assert not too_far(found, x, options, grad_lse)
    torch.testing.assert_close(found["lse"][:, :, 5:120], SINKS[None, :, None].expand(2, 4, 115))
    assert (found["out"][:, :, 5:120] == 0).all()


# Dropout.


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("p", [0.25, 0.9, 1e-12])
def test_what_is_dropped_is_formats_counters_choice(p, isa):
    """Uniform weights, and the unit matrix as V (forward) and dO (backward): out is the mask, and
    so is dV.
    """
    b, h, n, seed = 2, 3, 120, -987654321987
    zero, unit = torch.zeros(b, h, n, 8), torch.eye(n).expand(b, h, n, n)
    options = Options(dropout_p=p, seed=seed, softcap=3.0)
    saved = cpu.forward(*options.of(zero, zero, unit), isa=isa)
    gradients = cpu.backward(*options.of(zero, zero, unit), saved, unit, None, isa=isa)
    keep = keep_mask(seed, p, torch.arange(b * h * n).view(b, h, n), torch.arange(n))
    torch.testing.assert_close(saved.out, keep / (1 - p) / n)
    torch.testing.assert_close(gradients.value, (keep / (1 - p) / n).mT)


def test_dropout_of_everything():
    x, _ = inputs()
    found = library_results(x, Options(scale=0.15, dropout_p=1.0))
    assert (found["out"] == 0).all()
    assert all((found[name] == 0).all() for name in ("dq", "dk", "dv"))
    assert torch.equal(found["lse"], library_results(x, Options(scale=0.15))["lse"])


# Bits.


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("shape", [(1, 1, 1, 700, 1100, 64, 64), (2, 4, 2, 200, 130, 40, 72)])
def test_bits_do_not_depend_on_the_number_of_threads(shape, recipe):
    x = drawn(2, *shape)
    sinks = SINKS[: shape[1]]
    options = Options(recipe=recipe, scale=0.125, softcap=2.0, sinks=sinks, dropout_p=0.2, seed=1)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(library_results(x, options))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.skipif("avx512" not in ISAS, reason="one of the two instruction sets is not here")
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_avx2_and_avx512_give_the_same_bits(recipe):
    x, grad_lse = inputs()
    options = Options(recipe=recipe, scale=0.15, **OPTIONS["all"])
    assert_same(
        library_results(x, options, "avx512", grad_lse),
        library_results(x, options, "avx2", grad_lse),
    )


def test_bits_do_not_depend_on_batch_position_or_on_later_tokens():
    x = drawn(3, 2, 2, 2, 500, 500, 64, 64)
    options = Options(is_causal=True, scale=0.125, softcap=3.0, sinks=SINKS[:2])
    whole = library_results(x, options)
    alone = library_results(tuple(t[1:2] for t in x), options)
    for name in ("out", "residual", "lse", "dq", "dk", "dv"):
        assert torch.equal(whole[name][1:2], alone[name]), name
    prefix = library_results(tuple(t[:, :, :333] for t in x), options)
    for name in ("out", "residual", "lse", "dq"):
        assert torch.equal(whole[name][:, :, :333], prefix[name]), name
    # rows are numbered within the batch: the first keeps its numbers
    dropped = replace(options, dropout_p=0.3, seed=8)
    first = library_results(tuple(t[:1] for t in x), dropped)
    assert torch.equal(library_results(x, dropped)["dv"][:1], first["dv"])


# Dispatch.


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("case", OPTIONS)
def test_it_is_what_runs(case, recipe):
    x, _ = inputs()
    call = {name: value for name, value in OPTIONS[case].items() if name != "seed"}
    sinks = call.pop("sinks", None)
    learned = None if sinks is None else sinks.clone().requires_grad_()
    call |= {"enable_gqa": True, "recipe": recipe, "sinks": learned}
    told = halfulp.explain_dispatch(*x[:3], **call)
    assert told.backend == "cpu", str(told)
    leaves = [t.clone().requires_grad_() for t in x[:3]] + ([] if learned is None else [learned])
    results = []
    for backend in (None, "torch"):
        torch.manual_seed(3)
        out = halfulp.attention(*leaves[:3], **call, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, x[3])])
    for got, wanted in zip(*results, strict=True):
        assert error(got, wanted) < 0.05 * float(wanted.double().norm())
