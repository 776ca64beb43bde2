"""The paper's ten additions of two last bits (A25): which of them round, which way, and how far.

Two negative bf16 numbers of one exponent overflow the significand when they are added, so the sum's
last bit is shifted out and becomes the round bit. A small residual of the same sign, from the other
tokens of the row, sets the sticky bit: a round bit of 1 is then never a tie.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import torch
from torch import Tensor

from halfulp.formats import BF16, round_to, ulp
from halfulp.papers.claim import Claim, Lab, Mean, Measured, Rule, generator, mean_of, spread
from halfulp.runs.results import Figure, Series

PAPER = ["00", "01", "10", "11", "10", "11", "100", "100", "101", "110"]
"""Sums of 00 + 00, 00 + 01, 00 + 10, 00 + 11, 01 + 01, …, 11 + 11 as the paper prints them."""
_SAMPLES = 4096
_RESIDUAL = 0.1  # of an ulp of the operands, at most: the tokens that set the sticky bit


def carry_errors(first: int, second: int, *, residual: float, seed: int) -> Tensor:
    """Return the error of bf16(a + b + r) in ulps of the sum, negative away from zero, float64
    `[4096]`.

    a and b are negative, of one exponent, with 7 bits that end in the two given ones; r ≤ 0 is the
    residual, up to that share of an ulp of a.
    """
    g = generator(seed)
    # 7 fraction bits: five that are drawn, then the two that are given
    high = 4 * torch.randint(0, 32, (2, _SAMPLES), generator=g)
    a, b = -(1 + (high + torch.tensor([[first], [second]])).double() / 128)
    exact = a + b - residual * torch.rand(_SAMPLES, generator=g, dtype=torch.float64) / 128
    errors: Tensor = (round_to(exact, BF16) - exact) / ulp(exact, BF16)
    return errors


def _carries(lab: Lab) -> Measured:
    """A25: the ten sums, and the errors of each with and without a residual."""
    pairs = list(combinations_with_replacement(range(4), 2))
    sums = [f"{a + b:02b}" for a, b in pairs]
    errors: dict[str, list[Mean]] = {"with": [], "without": []}
    away: list[float] = []
    one, zero, bare = list[Tensor](), list[Tensor](), list[Tensor]()
    for number, (a, b) in enumerate(pairs):
        sticky = carry_errors(a, b, residual=_RESIDUAL, seed=number)
        plain = carry_errors(a, b, residual=0.0, seed=number)
        errors["with"].append(mean_of(sticky))
        errors["without"].append(mean_of(plain))
        round_bit = (a + b) % 2
        (one if round_bit else zero).append(sticky)
        if round_bit:
            away.append(float((sticky < 0).double().mean()))
            bare.append(plain)
    up, down, tied = (mean_of(torch.cat(x)) for x in (one, zero, bare))
    figures = {
        "sums": float(sums == PAPER),
        "away from zero": min(away),
        "round bit 1": up.value,
        "round bit 0": down.value,
        "ties, t": abs(tied.t),
    }
    text = (
        f"the ten sums {'are' if sums == PAPER else 'ARE NOT'} the paper's; errors in ulps of the"
        f" sum, negative away from zero: round bit 1 {up}, every one away from zero; round bit 0"
        f" {down}; round bit 1 without a residual, so a tie, {tied}"
    )
    names = tuple(f"{a:02b}+{b:02b}" for a, b in pairs)
    figure = Figure(
        "Error of adding two last bits (after section 3.3.2)",
        "last bits of two negative bf16 numbers",
        "mean error, ulps of the sum",
        tuple(
            Series(label, names, tuple(m.value for m in errors[key]), style="bar")
            for key, label in (("with", "sticky bit set"), ("without", "not set"))
        ),
        "Sums of odd endings have a round bit of 1. Without a sticky bit it is a tie and goes to"
        " even, up as often as down.",
        lab.command("A25"),
    )
    intervals = {"round bit 1": spread(up), "round bit 0": spread(down), "ties": spread(tied)}
    return Measured(figures, text, (figure.as_dict(),), intervals)


CLAIMS = (
    Claim(
        "A25",
        "of ten additions of two last bits those with a round bit of 1 are rounded away from zero,"
        " which outweighs the others",
        "section 3.3.2: the table of ten sums",
        _carries,
        Rule(
            "the ten sums are the paper's; with a sticky bit every sum with a round bit of 1 errs"
            " away from zero, by at least 5 times what the others err on average; without it the"
            " mean is not told from 0 (|t| < 5)",
            lambda f: (
                f["sums"] == 1
                and f["away from zero"] == 1
                and f["round bit 1"] < 0
                and -f["round bit 1"] >= 5 * abs(f["round bit 0"])
                and f["ties, t"] < 5
            ),
        ),
        history="2026-11-22: new, its rule set before running",
    ),
)
