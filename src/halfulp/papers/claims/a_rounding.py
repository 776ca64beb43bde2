"""Claims about the biased rounding of P̄V: where the error jumps, when it leans, and what a shift
of the row does to it.

Rows are built as the paper describes them: one or several weights that are exactly 1, V of one
sign, and other tokens whose weights add up to less than an ulp of the sum (they set the sticky
bit). That last part matters: where the others weigh more, the sum's low bits are as good as random
and nothing leans, which the figures show beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfulp.attention import emulate, golden
from halfulp.experiments.explain import EXAMPLE, explain
from halfulp.formats import BF16, FP32, round_to, ulp
from halfulp.papers.claim import (
    Claim,
    Lab,
    Mean,
    Measured,
    Rule,
    generator,
    mean_of,
    share_of,
    spread,
)
from halfulp.recipes import BF16_FLASH2, BF16_PAPER_STABILIZED, Recipe, Shift

_ROWS, _TOKENS = 20000, 64
# e⁻¹² of 62 tokens stays below an ulp of a bf16 sum near 4, 2⁻⁵; of e⁻⁶ it is many times that
SHARP, DIFFUSE = -12.0, -6.0  # mean score of the other tokens, the largest being 0


def _jumps(lab: Lab) -> Measured:
    """A12: the running error of bf16(Σ P̄V), its steps at P̄ = 1 and elsewhere, two tied maxima and
    V negative.
    """
    lab.report(0.0, "running error of P̄V")
    weights, value = _tied_rows(2, SHARP, 0)
    error = _running_error(weights, value)
    step = error.diff(dim=1, prepend=torch.zeros(_ROWS, 1, dtype=torch.float64))
    at_one = weights == 1
    ratio = float(step[at_one].abs().mean() / step[~at_one].abs().mean())
    jump, final = mean_of(step[at_one]), _final_bias(weights, value)
    # the same rows with the two largest weights just below 1: steps as large, but without a sign
    drawn = round_to(1 - 0.1 * torch.rand(weights.shape, generator=generator(30)), BF16)
    # 1 − 2⁻⁸ is the largest bf16 number below 1
    below = torch.where(at_one, drawn.clamp_max(1 - 2**-8), weights)
    error = _running_error(below, value)
    control = mean_of(error.diff(dim=1, prepend=torch.zeros(_ROWS, 1, dtype=torch.float64))[at_one])
    diffuse = _final_bias(*_tied_rows(2, DIFFUSE, 1))
    text = (
        f"mean |step| at P̄ = 1 is {ratio:.0f} times that elsewhere; mean step there {jump}, t ="
        f" {jump.t:.0f}; with the two weights in 0.9 to 1 instead {control}; error of the sum"
        f" {final} ulp; where other tokens weigh more than an ulp it is {diffuse} ulp"
    )
    figures = {"jump": jump.value, "t": jump.t, "control": control.value, "bias": final.value}
    intervals = {
        "step at P̄ = 1": spread(jump),
        "step at 0.9 to 1": spread(control),
        "error of the sum, ulp": spread(final),
    }
    return Measured(figures, text, (), intervals)


def _worked_example(_: Lab) -> Measured:
    """A13: the sum of the paper's two numbers, bit by bit."""
    found = explain(EXAMPLE, BF16)
    code = found.final.code
    same = (float(found.exact), found.result, found.error) == (
        -4.703990459442139,
        -4.71875,
        -0.014759540557861328,
    )
    bits = (code.sign, code.exponent, code.fraction) == ("1", "10000001", "0010111")
    figures = {
        "result": found.result,
        "error": found.error,
        "guard": float(found.final.guard),
        "sticky": float(found.final.sticky),
        "same": float(same and bits),
    }
    shown = (
        f"{float(found.exact)!r} → {found.result!r} = {code.sign} {code.exponent} {code.fraction}"
    )
    text = f"{shown}, guard {found.final.guard}, sticky {found.final.sticky}, error {found.error!r}"
    return Measured(figures, text, exact="one sum, bit by bit")


def _no_bias_below_one(lab: Lab) -> Measured:
    """A14: the same rows with the large weights drawn below 1 instead."""
    below: list[Mean] = []
    for number, count in enumerate((1, 2, 3, 6)):
        lab.report(number / 4, f"{count} weights below 1")
        weights, value = _tied_rows(count, SHARP, 10 + number)
        drawn = 0.5 + 0.49 * torch.rand(weights.shape, generator=generator(20 + number))
        below.append(_final_bias(torch.where(weights == 1, round_to(drawn, BF16), weights), value))
    tied = _final_bias(*_tied_rows(2, SHARP, 0))
    worst = max(below, key=lambda mean: abs(mean.value))
    # that there is no bias has to hold of its upper bound, not of the estimate
    limit = max(abs(mean.value) + 3 * mean.error for mean in below)
    text = f"largest of 1, 2, 3 and 6 weights below 1: {worst} ulp; two weights of 1: {tied} ulp"
    figures = {"largest_mean": limit, "tied_mean": tied.value, "tied_t": tied.t}
    intervals = {"below 1, ulp": spread(worst), "at 1, ulp": spread(tied)}
    return Measured(figures, text, (), intervals)


def _fixed_offset(lab: Lab) -> Measured:
    """A16: signed error of O under fixed offsets, against no offset and the dynamic shift, in units
    of |O| 2⁻⁸.
    """
    offsets = (0.25, 0.5, 1.0, 2.0)
    found: dict[str, Mean] = {}
    shifts = {"none": Shift(), **{f"{c:g}": Shift("offset", offset=c) for c in offsets}}
    shifts["dynamic, β = 7"] = BF16_PAPER_STABILIZED.shift
    for number, (name, shift) in enumerate(shifts.items()):
        lab.report(number / len(shifts), f"offset {name}")
        found[name] = signed_error(BF16_FLASH2.with_(shift=shift))
    fixed = max((found[f"{c:g}"] for c in offsets), key=lambda mean: abs(mean.value))
    text = (
        "; ".join(f"offset {name}: {mean}" for name, mean in found.items())
        + " (units |O| 2⁻⁸, stock recipe)"
    )
    figures = {"fixed": fixed.value, "fixed_t": fixed.t, "none": found["none"].value}
    return Measured(figures, text, (), {f"offset {name}": spread(m) for name, m in found.items()})


def _unconditional(_: Lab) -> Measured:
    """A17: rows with one large positive maximum, shifted whether or not it is repeated."""
    maxima = (5.0, 20.0, 50.0, 100.0)
    stabilized = BF16_PAPER_STABILIZED.shift
    always = BF16_PAPER_STABILIZED.with_(
        shift=Shift("stabilized", beta=stabilized.beta, unconditional=True)
    )
    zero = dict.fromkeys(("always", "where repeated"), 0)
    for r_m in maxima:
        scores = row_scores(r_m, 1, rows=64, seed=int(r_m))
        for name, recipe in (("always", always), ("where repeated", BF16_PAPER_STABILIZED)):
            zero[name] += int((observed(recipe, scores, "row_sum")[-1] == 0).sum())
    total = 64 * len(maxima)
    text = (
        f"rows with l = 0: {zero['always']} of {total} with the shift everywhere,"
        f" {zero['where repeated']} with it where the maximum is repeated; single maxima"
        f" {', '.join(f'{m:g}' for m in maxima)}, β = {stabilized.beta:g}"
    )
    figures = {"always": zero["always"] / total, "conditional": zero["where repeated"] / total}
    intervals = {f"l = 0, shift {name}": share_of(hits, total) for name, hits in zero.items()}
    return Measured(figures, text, (), intervals)


def _gamma_near_one(_: Lab) -> Measured:
    """A18: negative repeated maxima with m = γ r_m, and with m = 0."""
    rates, intervals = {}, {}
    maxima = torch.linspace(-0.05, -4.0, 80)
    for gamma in (0.0, 0.5, 0.99, 0.999):
        recipe = BF16_PAPER_STABILIZED.with_(shift=Shift("stabilized", beta=7.0, gamma=gamma))
        ones = [
            bool(
                (
                    observed(recipe, row_scores(float(m), 2, rows=4, seed=7), "weights")[-1] == 1
                ).any()
            )
            for m in maxima
        ]
        rates[gamma] = sum(ones) / len(ones)
        intervals[f"P̄ = 1, γ = {gamma:g}"] = share_of(sum(ones), len(ones))
    text = "rows that keep P̄ = 1: " + ", ".join(
        f"γ = {g:g}: {100 * r:.0f} %" for g, r in rates.items()
    )
    return Measured(
        {"near_one": rates[0.999], "zero": rates[0.0]},
        f"{text}; {len(maxima)} maxima from −0.05 to −4",
        (),
        intervals,
    )


def row_scores(
    r_m: float, repeats: int, *, rows: int, seed: int, positions: tuple[int, ...] = ()
) -> Tensor:
    """Return scores `[rows, 64]` whose maximum r_m stands `repeats` times, all others 3 to 5 below
    it; bf16 values.
    """
    g = generator(seed)
    scores = r_m - 3.0 - 2.0 * torch.rand(rows, _TOKENS, generator=g)
    where = positions or tuple(range(3, 3 + repeats))
    scores[:, list(where)] = r_m
    return round_to(scores, BF16)


def observed(
    recipe: Recipe, scores: Tensor, name: str, value: Tensor | None = None
) -> list[Tensor]:
    """Return what a step held, tile by tile, in attention whose scores `[rows, keys]` are given as
    an additive mask.
    """
    seen: list[Tensor] = []

    def watch(step: str, _exact: Tensor, rounded: Tensor) -> None:
        if step == name:
            seen.append(rounded.clone())

    attend_rows(recipe, scores, value, observers=(watch,))
    return seen


def attend_rows(
    recipe: Recipe, scores: Tensor, value: Tensor | None = None, observers: tuple[Any, ...] = ()
) -> Tensor:
    """Return O `[rows, D]` of rows of given scores; value `[keys, D]`, ones if None."""
    rows, keys = scores.shape
    # Q = K = 0, so that the additive mask is what scores are
    q, k = torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, keys, 1)
    v = torch.ones(keys, 1) if value is None else value
    out = emulate(q, k, v[None, None], scores[None, None], recipe=recipe, observers=observers)
    return out[0, 0]


def signed_error(recipe: Recipe, *, heads: int = 64, rows: int = 64) -> Mean:
    """Return the mean of (O − golden)/(|O| 2⁻⁸), two tied maxima and V of one sign; away from zero
    is positive.

    Each head has its own scores and V, and counts as one sample.
    """
    errors = []
    for head in range(heads):
        g = generator(5000 + head)
        scores = row_scores(
            float(torch.randint(1, 128, (), generator=g)) / 16, 2, rows=rows, seed=head
        )
        value = round_to(-(torch.randn(_TOKENS, 16, generator=g).abs() + 0.5), BF16)
        out = attend_rows(recipe, scores, value).double()
        zeros = torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, _TOKENS, 1)
        truth = golden(*zeros, value[None, None], attn_mask=scores[None, None]).out[0, 0]
        errors.append((((out - truth) / truth) * 2**8).mean())
    return mean_of(torch.stack(errors))


def _tied_rows(count: int, level: float, seed: int) -> tuple[Tensor, Tensor]:
    """Weights P̄ with `count` ones in every row and others around exp(level), and negative V;
    `[rows, tokens]`, bf16.
    """
    g = generator(seed)
    scores = level + 1.5 * torch.randn(_ROWS, _TOKENS, generator=g)
    scores.clamp_(max=-0.01).scatter_(
        1, torch.rand(_ROWS, _TOKENS, generator=g).argsort(1)[:, :count], 0.0
    )
    value = -(2 + 0.5 * torch.randn(_ROWS, _TOKENS, generator=g)).abs()
    return round_to(scores.exp(), BF16), round_to(value, BF16)


def _running_error(weights: Tensor, value: Tensor) -> Tensor:
    """bf16(Σ_{t' ≤ t} P̄V) less the exact running sum, `[rows, tokens]`; products and sums are
    exact in float64.
    """
    exact = (weights.double() * value.double()).cumsum(1)
    # through fp32, in which a kernel holds the sum before it stores it
    return round_to(round_to(exact, FP32), BF16) - exact


def _final_bias(weights: Tensor, value: Tensor) -> Mean:
    """Mean error of the whole sum in ulps; negative is away from zero, for V is negative."""
    exact = (weights.double() * value.double()).sum(1)
    return mean_of((round_to(round_to(exact, FP32), BF16) - exact) / ulp(exact, BF16))


CLAIMS = (
    Claim(
        "A12",
        "the error of Ō jumps at the tokens where P̄ = 1",
        "fig. 6: negative jumps at P̄ = 1, V negative",
        _jumps,
        Rule(
            "the mean step at P̄ = 1 is negative with t < −5, and at weights of 0.9 to 1 in the"
            " same places at most a fifth of it, of either sign",
            lambda f: f["t"] < -5 and abs(f["control"]) <= abs(f["jump"]) / 5,
        ),
        history=(
            "2026-11-22: judged by sign; before, by steps 10 times those elsewhere, which weights"
            " just below 1 have as well"
        ),
    ),
    Claim(
        "A13",
        "worked example: −2.4071154594421387 + −2.296875 rounds to −4.71875 in bf16",
        "−4.703990459442139 → −4.71875 = 1 10000001 0010111, error −0.014759540557861328",
        _worked_example,
        Rule("sum, result, error and bits equal the paper's, exactly", lambda f: f["same"] == 1),
    ),
    Claim(
        "A14",
        "where P̄ < 1 there is no bias",
        "remark 1",
        _no_bias_below_one,
        Rule(
            "below 1: |mean| + 3 standard errors at most 0.02 ulp for every count; at 1: |mean|"
            " above it with |t| > 5",
            lambda f: f["largest_mean"] <= 0.02 < abs(f["tied_mean"]) and abs(f["tied_t"]) > 5,
        ),
    ),
    Claim(
        "A16",
        "a fixed offset instead of the dynamic shift brings the bias back",
        "appendix C",
        _fixed_offset,
        Rule(
            "some fixed offset gives a signed error of O above 0.1 |O| 2⁻⁸ with |t| > 5, and above"
            " that without offset",
            lambda f: abs(f["fixed"]) > max(0.1, abs(f["none"])) and abs(f["fixed_t"]) > 5,
        ),
    ),
    Claim(
        "A17",
        "applying the shift unconditionally can underflow to a zero denominator",
        "appendix C",
        _unconditional,
        Rule(
            "rows with l = 0 under the unconditional shift, none under the conditional one",
            lambda f: f["always"] > 0 and f["conditional"] == 0,
        ),
    ),
    Claim(
        "A18",
        "for a negative repeated maximum, m = γ r_m with γ near 1 rounds back to P̄ = 1; m = 0"
        " does not",
        "appendix C",
        _gamma_near_one,
        Rule(
            "P̄ = 1 in more than half of the rows at γ = 0.999 and in none at γ = 0",
            lambda f: f["near_one"] > 0.5 and f["zero"] == 0,
        ),
    ),
)
