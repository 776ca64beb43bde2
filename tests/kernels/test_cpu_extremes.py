"""Holds the native library to IEEE arithmetic at its ends: NaN and infinities reach the rows that
see them and no others, and scores beyond any useful range give what the backend "torch" gives.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfulp import native
from halfulp.kernels import cpu
from halfulp.ops import tiled
from tests.kernels.asked import Options
from tests.kernels.native_calls import ISAS, Operands, drawn, library_results

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

RECIPES = ("halfulp", "stock", "exact_delta", "published")
RESULTS = ("out", "lse", "dq", "dk", "dv")


def seen_sum(terms: Tensor, seen: Tensor, dim: int) -> Tensor:
    """Σ over `dim` of the terms [N, N_k, …] whose pair is seen; the others are not there, whatever
    they hold.
    """
    shape = seen.shape + (1,) * (terms.ndim - 2)
    return torch.where(seen.view(shape), terms, 0).sum(dim)


def by_pairs(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, seen: Tensor, scale: float
) -> dict[str, Tensor]:
    """Attention and its gradients of one head in float64, each sum over the pairs that are seen and
    no others.
    """
    q, k, v, do = (x.double() for x in (q, k, v, do))
    s = (q @ k.mT) * scale
    seen = seen & (s != -math.inf)
    m = torch.where(seen, s, -math.inf).amax(1, keepdim=True)
    w = torch.exp(s - torch.where(m == -math.inf, 0, m))
    l = seen_sum(w, seen, 1)[:, None]
    p = w / l
    out, lse = seen_sum(p[..., None] * v, seen, 1), m + l.log()
    dp = do @ v.mT
    ds = p * (dp - (do * out).sum(1, keepdim=True))
    dq, dk = seen_sum(ds[..., None] * k, seen, 1), seen_sum(ds[..., None] * q[:, None], seen, 0)
    dv = seen_sum(p[..., None] * do[:, None], seen, 0)
    return {"out": out, "lse": lse[:, 0], "dq": scale * dq, "dk": scale * dk, "dv": dv}


def visible(n: int, nk: int, options: Options) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(nk)[None, :]
    seen = (
        torch.ones(n, nk, dtype=torch.bool)
        if options.attn_mask is None
        else options.attn_mask.clone()
    )
    if options.is_causal:
        seen &= j <= i
    return seen if options.window is None else seen & (j >= i - options.window[0])


def poisoned(x: Operands, which: int, row: int, column: int, value: float) -> Operands:
    x = tuple(t.clone() for t in x)
    x[which][0, 0, row % x[which].shape[2], column % x[which].shape[3]] = value
    return x


@settings(max_examples=150)
@given(
    sizes=st.tuples(
        st.integers(1, 140), st.integers(1, 200), st.integers(1, 40), st.integers(1, 40)
    ),
    recipe=st.sampled_from(["halfulp", "stock", "exact_delta"]),
    hidden=st.sampled_from(["nothing", "causal", "window", "mask", "padding"]),
    isa=st.sampled_from(ISAS or ["portable"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    which=st.integers(0, 3),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
    row=st.integers(0, 199),
    column=st.integers(0, 39),
)
def test_what_is_not_finite_reaches_what_sees_it_and_nothing_else(
    sizes, recipe, hidden, isa, dtype, which, value, row, column
):
    n, nk, d, dv = sizes
    clean = drawn(row, 1, 1, 1, n, nk, d, dv, dtype)
    x = poisoned(clean, which, row, column, value)
    mask = torch.rand(n, nk, generator=torch.Generator().manual_seed(row)) < 0.6
    mask = torch.arange(nk).expand(n, nk) < nk // 2 if hidden == "padding" else mask
    options = Options(
        recipe=recipe,
        is_causal=hidden in ("causal", "window"),
        scale=d**-0.5,
        attn_mask=mask if hidden in ("mask", "padding") else None,
        window=(20, -1) if hidden == "window" else None,
    )
    true = by_pairs(*(t[0, 0] for t in x), visible(n, nk, options), options.scale)
    found, before = library_results(x, options, isa), library_results(clean, options, isa)
    for name in RESULTS:
        got, wanted = found[name][0, 0], true[name]
        if name == "lse":
            wanted = wanted.masked_fill(wanted == -math.inf, 0)
            got = got.masked_fill(got == -math.inf, 0)
        assert torch.equal(got.isfinite(), wanted.isfinite()), name
    # rows that see nothing of it have the bits they had
    untouched = true["dq"].isfinite().all(-1) & true["out"].isfinite().all(-1)
    touched_rows = (
        (torch.arange(n) == row % n) if which in (0, 3) else visible(n, nk, options)[:, row % nk]
    )
    same = untouched & ~touched_rows
    for name in ("out", "lse", "dq"):
        assert torch.equal(found[name][0, 0][same], before[name][0, 0][same]), name


def test_an_additive_mask_hides_nan_too():
    x = poisoned(drawn(0, 1, 1, 1, 100, 100, 32, 32), 1, 60, 0, math.nan)
    mask = torch.zeros(100).masked_fill(torch.arange(100) >= 50, -math.inf)
    found = library_results(x, Options(scale=0.2, attn_mask=mask))
    assert all(found[name].isfinite().all() for name in RESULTS)
    boolean = library_results(x, Options(scale=0.2, attn_mask=mask == 0))
    assert all(torch.equal(found[name], boolean[name]) for name in RESULTS)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, {"dropout_p": 0.3}, {"sinks": torch.tensor([0.5])}]
)
def test_nan_with_options(options, isa):
    clean = drawn(1, 1, 1, 1, 120, 120, 32, 40)
    options = Options(scale=0.2, is_causal=True, **options)
    for which in range(4):
        x = poisoned(clean, which, 70, 5, math.nan)
        found, before = library_results(x, options, isa), library_results(clean, options, isa)
        for name in ("out", "lse", "dq"):
            assert torch.equal(found[name][:, :, :70], before[name][:, :, :70]), (name, which)
        for name in ("dk", "dv") if which in (0, 3) else ():
            assert torch.equal(found[name][:, :, 71:], before[name][:, :, 71:]), (name, which)
        assert found["dq"][0, 0, 70].isnan().all()
        assert found["out"][0, 0, 70].isnan().any() == (which != 3)


def test_a_sink_that_is_nan_reaches_its_head_alone():
    x = drawn(1, 1, 2, 2, 30, 40, 16, 16)
    found = library_results(x, Options(scale=0.2, sinks=torch.tensor([math.nan, 0.0])))
    for name in (*RESULTS, "dsinks"):
        finite = found[name].isfinite() if name == "dsinks" else found[name][0].isfinite()
        assert not finite[0].any(), name
        assert finite[1].all(), name


@settings(max_examples=80)
@given(
    sizes=st.tuples(st.integers(1, 140), st.integers(1, 200), st.integers(1, 40)),
    recipe=st.sampled_from(["halfulp", "stock", "exact_delta"]),
    isa=st.sampled_from(ISAS or ["portable"]),
    exponent=st.integers(-60, 126),
    sign=st.sampled_from([1.0, -1.0]),
    causal=st.booleans(),
    offset=st.sampled_from([0.0, 3.0]),
)
def test_scores_of_any_size(sizes, recipe, isa, exponent, sign, causal, offset):
    """Products that are integers, so that both backends have the same scores to the bit but for
    base 2's one factor: rows with a single key at their maximum, or all keys there, whatever the
    size. Otherwise only where NaN is.
    """
    n, nk, d = sizes
    generator = torch.Generator().manual_seed(n)
    q, k = (torch.randint(-2, 3, (1, 1, m, d), generator=generator) + offset for m in (n, nk))
    v, do = (torch.randn(1, 1, m, 8, generator=generator) for m in (nk, n))
    x = tuple(t.bfloat16() for t in (q, k, v, do))
    # the library's scores are in base 2, and overflow by that factor sooner than those of "torch"
    sizes = (q.double() @ k.double().mT).abs() * 2.0**exponent
    sooner = (sizes > 2.0**128 / math.log2(math.e) * (1 - 1e-6)) & (sizes < 2.0**128)
    assume(not bool(sooner.any()))
    options = Options(recipe=recipe, is_causal=causal, scale=sign * 2.0**exponent)
    found = library_results(x, options, isa)
    saved = tiled.forward(*options.of(*x[:3]))
    gradients = tiled.backward(*options.of(*x[:3]), saved, x[3], None)
    like = {
        "out": saved.out,
        "lse": saved.lse,
        "dq": gradients.query,
        "dk": gradients.key,
        "dv": gradients.value,
    }
    for name in RESULTS:  # the tiles of "torch" carry NaN to keys that its row does not see
        surplus = found[name].isnan() != like[name].isnan()
        assert not (surplus if name in ("out", "lse") else surplus & found[name].isnan()).any(), (
            name
        )
    # above 2²⁴ scores an ulp is more than one: lse has no room for log l, so the stock recipe's P
    # is not P any more
    if 5 < exponent < 120:
        torch.testing.assert_close(found["out"], like["out"], rtol=0.05, atol=0.02, equal_nan=True)
    torch.testing.assert_close(found["lse"], like["lse"], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("isa", ISAS)
def test_rows_all_of_whose_scores_are_far_below_zero(recipe, isa):
    """What stands for −∞ in the exponential must lie below any score."""
    q = torch.full((1, 1, 3, 4), -1e15).bfloat16()
    k = torch.full((1, 1, 70, 4), 1e16).bfloat16()
    v, do = (drawn(3, 1, 1, 1, 3, 70, 4, 4)[i] for i in (2, 3))
    for scale in (1.0, 1e4):
        found = library_results((q, k, v, do), Options(recipe=recipe, scale=scale), isa)
        if recipe == "published":  # 70 equal scores below 0: shifted by 0, they underflow
            assert found["out"].isnan().all()
            continue
        mean = v.double().mean(2, keepdim=True).expand(1, 1, 3, 4)
        torch.testing.assert_close(found["out"].double(), mean, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("isa", ISAS)
def test_scores_beyond_float32(isa):
    """+∞ among the scores is NaN for its row, as ∞ − ∞ is; −∞ is a hidden key."""
    x = [t.float() for t in drawn(4, 1, 1, 1, 6, 80, 4, 8)]
    x[0].fill_(1.0)
    x[1].zero_()
    x[0][0, 0, 2], x[1][0, 0, 33, 0] = 3e38, 3e38
    for sign in (1, -1):
        x[1][0, 0, 33, 0] = sign * 3e38
        saved = cpu.forward(*Options(scale=1e-30).of(*x[:3]), isa=isa)
        found = library_results(tuple(x), Options(scale=1e-30), isa)
        assert saved.out[0, 0].isnan().all(-1).tolist() == [i == 2 and sign == 1 for i in range(6)]
        assert found["dq"][0, 0, [0, 1, 3, 4, 5]].isfinite().all()
        assert saved.lse[0, 0, [0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_query_one_key_and_none(recipe):
    options = Options(recipe=recipe, scale=0.5)
    for n, nk in ((1, 1), (1, 77), (77, 1)):
        x = drawn(5, 1, 2, 1, n, nk, 8, 8)
        found, like = library_results(x, options), tiled.forward(*options.of(*x[:3]))
        torch.testing.assert_close(found["out"], like.out, rtol=0.01, atol=0.01)
        torch.testing.assert_close(found["lse"], like.lse)
    x = drawn(5, 1, 2, 1, 7, 0, 8, 8)
    for sinks in (None, torch.tensor([1.0, -2.0])):
        with_sinks = replace(options, sinks=sinks)
        found, like = library_results(x, with_sinks), tiled.forward(*with_sinks.of(*x[:3]))
        assert torch.equal(found["out"], like.out)
        torch.testing.assert_close(found["lse"], like.lse)
        assert (found["dq"] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("isa", ISAS)
def test_softcap_of_scores_of_any_size(dtype, isa):
    """The slope of a capped score falls as e^-2|x|; its factors, e^2|x| and the square of its
    inverse, must not leave the range of float32 on the way.
    """
    k, v = (torch.tensor(x)[None, None, :, None] for x in ([1.0, -1.0, 0.25], [1.0, 2.0, -1.0]))
    unit, least = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    for size in (0.5, 10.0, 43.6, 43.7, 44.0, 60.0, 88.0, 1e3, 6e4, 1e10, 1e19, 1e30):
        if size > torch.finfo(dtype).max:
            continue
        for sign, cap in ((1, 1.0), (-1, 1.0), (1, 3.0), (1, 0.02)):
            q = torch.full((1, 1, 1, 1), sign * size)
            x = tuple(t.to(dtype) for t in (q, k, v, torch.ones(1, 1, 1, 1)))
            found = library_results(x, Options(scale=1.0, softcap=cap), isa)
            q_, k_, v_ = (t.double().flatten() for t in x[:3])
            p = torch.softmax(cap * torch.tanh(q_ * k_ / cap), 0)
            ds = p * (v_ - p @ v_) / torch.cosh(q_ * k_ / cap).square()
            for name, true, terms in (("dq", ds @ k_, ds * k_), ("dk", ds * q_, ds * q_)):
                off = (found[name].double().flatten() - true).abs().max()
                # an ulp of 2x is a relative error of the slope; dS below the least normal is 0
                allowed = (8 + 4 * min(size / cap, 100)) * unit * terms.abs().sum()
                allowed += 4 * least * max(1.0, size)
                assert off <= allowed, (name, sign * size, cap)


def test_softcap_whose_ratio_to_the_scale_is_no_float32_is_refused():
    q = torch.ones(1, 1, 2, 4)
    for options in (Options(scale=10.0, softcap=1e-38), Options(scale=1e-3, softcap=1e37)):
        reason = cpu.supports(*options.of(q, q, q))
        assert reason is not None
        assert "scale / softcap of" in reason
    assert cpu.supports(*Options(scale=0.0, softcap=1e37).of(q, q, q)) is None


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("odd", [None, math.nan, math.inf])
def test_few_queries_have_the_bits_that_they_have_among_many(odd, dtype, isa):
    """Few rows, of several heads at a time, read keys and values where they lie; a value that is
    not finite, seen by some, takes them back to the way of many.
    """
    q, k, v, _ = drawn(7, 1, 5, 1, 200, 173, 64, 64, dtype)
    if odd is not None:
        v[0, 0, 150, 3] = odd
    options = Options(is_causal=True, causal_offset=130)
    many = cpu.forward(*options.of(q, k, v), isa=isa)
    # a position before, in and after the one that the odd value is hidden from
    for first, count in ((0, 1), (19, 2), (18, 4), (12, 16), (40, 3)):
        rows = slice(first, first + count)
        moved = replace(options, causal_offset=130 + first)
        few = cpu.forward(*moved.of(q[:, :, rows], k, v), isa=isa)
        torch.testing.assert_close(few.out, many.out[:, :, rows], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(few.lse, many.lse[:, :, rows])
