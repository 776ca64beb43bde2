"""How far rounding alone can take every element of a short call's results: an a-priori bound.

Assumed of a kernel: operands are multiplied as they are given; scores, their exponentials, dP, δ
and sums are fp32, in any order (Higham 2002, ch. 3: γ_n = n u / (1 - n u)); weights and dS are
rounded to the audited format up to twice, O once before δ is made of it, every result once a head.
Gradients may be summed with what all keys, or all queries, have in common taken off first, so that
an element has fp32's rounding of the largest of its column, though nothing reaches it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.audit.figures import GRADIENTS, place_of, short, unlike
from halfulp.audit.inputs import Inputs
from halfulp.calls import Result
from halfulp.formats import FORMAT_OF, FP32

_MOST_KEYS, _MOST, _MOST_FP32 = 128, 2**16, 2**19
"""Keys, beyond which γ_n leaves gross faults alone, and elements of the query: 2 % of an audit; in
float32, where the proof also speaks for kernels, of every call of the array of sizes.
"""
_FLUSHED = 2**8 * FP32.min_normal  # what sums of terms that underflow in fp32 lose
_EXPONENTIAL = 2.0**-17  # what a polynomial of degree 4 is off by


def beyond_rounding(result: Result, truth: Result, x: Inputs) -> dict[str, tuple[float, str]]:
    """By tensor how many times its worst element is beyond its bound, at most 1 where none is, and
    where; {} of calls that the bound is not made for.
    """
    plain = not x.softcap and x.dropout is None
    elements = _MOST_FP32 if x.query.dtype == torch.float32 else _MOST
    short_rows = x.key.shape[2] <= _MOST_KEYS and x.query.numel() <= elements
    if not (plain and short_rows) or truth.lse is None:
        return {}
    # sound kernels reach 0.71 of these bounds in bf16, 0.50 in fp16 and 0.19 in fp32 (docs/log.md)
    found = {}
    for name, most in rounding_bounds(x, truth).items():
        got, exact = getattr(result, name), getattr(truth, name)
        if got is None or exact is None or not bool(got.isfinite().all()):
            continue
        over = (got.double() - exact).abs_().div_(most)
        # where a bound overflows, staying below it proves nothing, while passing another one does
        bounded = bool(most.isfinite().all())
        place = place_of(int(over.nan_to_num_(0.0, 0.0).argmax()), over.shape)
        ratio, told = float(over[place]), f"element {place} of {short(name)}"
        told += f" is {unlike(float(got[place]), float(exact[place]))}"
        if ratio > 1 or bounded:
            found[name] = (ratio, f"{told}: {ratio:.3g} × beyond what rounding can do")
    return found


def rounding_bounds(x: Inputs, truth: Result) -> dict[str, Tensor]:
    """The bound of every element of O, dQ, dK and dV: of golden's O, lse and δ, in fp32, which is
    off by far less than sound kernels stay below it.

    A weight's exponent, a sink's too, is off by at most h; the weight, by the numerator's and the
    row sum's, by the factor 1 + r, 1 + r = e^h / Σ_j P_j e^-h_j. Then |ΔO| <= Σ P r |V|, and with
    it dS is off by P r |dP - δ| + P (1 + r) (γ |dO| |V|ᵀ + |dO| |ΔO| + γ |dO| |O|).
    """
    fmt, t = FORMAT_OF[x.query.dtype], FP32.unit_roundoff
    # below the normal numbers errors are absolute, not relative
    least = max(2 * (u := fmt.unit_roundoff) * fmt.min_normal, _FLUSHED)
    groups, (n, width) = x.query.shape[1] // x.key.shape[1], truth.out.shape[2:]
    q, do, out = x.query.float(), x.grad_out.float(), truth.out.float().nan_to_num_(0.0)
    k, v = (y.float().repeat_interleave(groups, 1) for y in (x.key, x.value))
    assert truth.lse is not None
    s, terms = q @ k.mT * x.scale, k.shape[2]
    seen = x.sees.apply(s, slice(0, n), slice(0, terms), 1.0)
    p = torch.exp(seen - truth.lse.float().unsqueeze(-1)).nan_to_num_(0.0)
    # a key without weight may have any score, and must not widen the bound of the row
    s = (s.abs() + (seen - s).abs()).masked_fill_(p == 0, 0.0)
    # Σ |q| |k| and not |q · k|: a score that cancels keeps the error of its terms (Higham, ch. 3)
    h = (q.abs() @ k.abs().mT).mul_(x.scale * _gamma(q.shape[3] + 4, t))
    # the shift rounds at the size of score and maximum; weights are rounded twice; then the row sum
    largest, same = s.amax(-1, keepdim=True), 2 * u + _EXPONENTIAL + _gamma(2 * terms, t)
    sink = None if x.sinks is None else x.sinks.float().view(1, -1, 1, 1)
    if sink is not None:
        largest = largest.maximum(sink.abs())
    h += (s + largest).mul_(4 * t) + same
    # Σ P e^-h, by its distance from 1: h is small, and e^-h alone would lose its digits
    total = 1 - (p * -torch.expm1(-h)).sum(-1, keepdim=True)
    if sink is not None:
        own = torch.exp(sink - truth.lse.float().unsqueeze(-1))
        total -= own * -torch.expm1(-(8 * t * largest + same))
    far = h.exp_().div_(total).sub_(1)
    wrong = p * far + least * (p > 0)
    of_out = (wrong @ v.abs()).mul_(1 + u).add_(out.abs(), alpha=u).add_(least)
    bounds = {"out": of_out}
    if truth.grad_query is None:
        return bounds
    delta, both, g = (do * out).sum(-1, keepdim=True), do.abs(), _gamma(width + 4, t)
    ds = (do @ v.mT).sub_(delta).abs_()
    # what dP − δ is off by: dP's sum, O's error through δ, and δ's own sum
    moved = (both @ v.abs().mT).mul_(g) + (both * (of_out + g * out.abs())).sum(-1, keepdim=True)
    off = (p * (far + 1)).mul_(moved.add_(ds * (2 * u))).add_(wrong * ds).add_(least * (p > 0))
    # dS and P are rounded once more as operands, and then summed over rows or keys
    again = 2 * u + _gamma(groups * max(n, terms) + 4, t)
    off.add_(off + p * ds, alpha=again).mul_(x.scale)
    most_of = (off @ k.abs(), off.mT @ q.abs(), wrong.add_(wrong + p, alpha=again).mT @ both)
    # γ of the largest in a column, whose bound is `same` of it or more
    common = min(1.0, _gamma(max(n, terms), t) / same)
    for name, most in zip(GRADIENTS, most_of, strict=True):
        most.add_(most.amax(-2, keepdim=True), alpha=common)
        shared = name != "grad_query" and groups > 1
        bounds[name] = (
            most.view(*x.key.shape[:2], groups, terms, -1).sum(2) if shared else most
        ).add_(least)
    return bounds


def _gamma(n: int, u: float) -> float:
    return n * u / (1 - n * u)
