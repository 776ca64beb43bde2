"""What a kernel's scores are, as the weights of chosen inputs show them: whether the exponential is
what is off, or an operand, or the sum of products.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from halfulp.calls import EVERYTHING
from halfulp.reconstruct.exact import centered, logarithms, rms, scores_of, weights_of
from halfulp.reconstruct.panel import Run, Trial
from halfulp.reconstruct.weight_ratios import NOISE, Read
from halfulp.reconstruct.weights_read import forward_weights

GROWN = 1.6  # times the error where scores are eight times as large: it is made in them
RIGHT = 0.9  # of what weights are off by elsewhere: nothing that rounding P makes is right
FEW_KEYS = 16  # one tile in every kernel
ALIKE = 16  # pairs of nearly one S − m, and how many times
SOME_PAIRS = 8
SOME_KEYS = 4  # with a function of their own


def of_distance(run: Run, trial: Trial) -> Read | None:
    """Whether weights are another function of S − m than the exponential, whichever: asked with so
    few keys that they are one tile, and pairs of like S − m are off alike.
    """
    call = trial.call
    few = {name: getattr(call, name)[:, :, :FEW_KEYS] for name in ("key", "value")}
    asked = replace(trial, name=f"{trial.name}/few keys",
                    call=replace(call, **few, sees=EVERYTHING, sinks=None))  # fmt: skip
    read = forward_weights(run, asked)
    if read is None:
        return None
    scores = scores_of(asked.call)
    exact = weights_of(asked.call, scores)
    log, seen = logarithms(read, exact)
    rest, clear = centered(log, seen), seen > 0
    below = scores.amax(-1, keepdim=True) - scores
    least = NOISE[call.query.dtype] ** 2
    if _alike(rest[clear], below[clear], least):
        return Read("the weights are another function of S − m than the exponential", "exponential")
    # each key less what it is off by itself, which is no matter of the exponential
    each = [(rest[..., j][clear[..., j]], below[..., j][clear[..., j]]) for j in range(FEW_KEYS)]
    some = [(y - y.mean(), x) for y, x in each if len(y)]
    told = [j for j, (y, x) in enumerate(some) if _alike(y, x, least)]
    if len(told) < SOME_KEYS:
        return None
    return Read(f"the weights of {len(told)} of {FEW_KEYS} keys are another function of S − m than"
                " the exponential", "exponential")  # fmt: skip


def _alike(off: Tensor, below: Tensor, least: float) -> bool:
    """Whether what weights are off by is a function of S − m."""
    y = off[below.argsort()]
    y = y[: len(y) // ALIKE * ALIKE].view(-1, ALIKE)
    if len(y) < SOME_PAIRS:
        return False
    total = float(y.square().mean())
    # what the means of so many random numbers explain does not count
    alike = float(y.mean(-1).square().mean()) - total / ALIKE
    return total >= least and alike >= 0.5 * total


def unit_scores(run: Run, trial: Trial) -> Read | None:
    """Whether Q or K alone is what makes weights be off, or the sum of their products: against unit
    vectors every score is one number of the other operand, and no sum. What is off in weights
    themselves is off as much where scores are an eighth as large; what is off where such scores are
    capped, and right where they are not, is the cap.
    """
    off = []
    for name, other in (("query", "key"), ("key", "query")):
        large, small = (_unit_error(run, trial, name, other, size) for size in (64.0, 8.0))
        if math.isnan(large + small):
            return None
        off.append((name[0].upper(), large, small))
    noise = NOISE[trial.call.query.dtype]
    # what P itself is off by is there as well where scores are small
    found = [name for name, error, small in off
             if error > GROWN * small and error**2 - small**2 > noise**2]  # fmt: skip
    if found:
        return Read(f"the scores are those of another {' and '.join(found)}", "operand")
    if all(error < 2 * noise for _, error, _ in off):
        capped = trial.call.softcap
        if capped and _unit_error(run, trial, "query", "key", 64.0, capped) > 2 * noise:
            return Read("weights are right where a score is one product that is not capped, and off"
                        " where it is: it is the cap", "softcap")  # fmt: skip
        if max(error for _, error, _ in off) < RIGHT * _off_here(run, trial):
            told = "weights are right where a score is one product, so it is the sum"
            return Read(told, "products")
    return None


def _off_here(run: Run, trial: Trial) -> float:
    """The rms of what log weights are off by, in rows of their own; NaN where nothing is given."""
    read = forward_weights(run, trial)
    if read is None:
        return math.nan
    log, seen = logarithms(read, weights_of(trial.call, scores_of(trial.call)))
    return rms(centered(log, seen), seen)


def _unit_error(run: Run, trial: Trial, name: str, other: str, size: float,
                softcap: float = 0.0) -> float:  # fmt: skip
    """The same where every score is one number of an operand, at most `size`."""
    call, d = trial.call, trial.call.query.shape[3]
    unit = torch.zeros_like(getattr(call, other)[:, :, :1]).repeat(1, 1, d, 1)
    largest = float(getattr(call, name).abs().max()) or 1.0
    unit[:] = torch.eye(d) * 2.0 ** round(math.log2(size / largest))
    value = call.value[:, :, torch.arange(d) % call.value.shape[2]]
    changed: dict[str, Tensor] = {other: unit} | ({"value": value} if other == "key" else {})
    asked = replace(call, **changed, sees=EVERYTHING, sinks=None, scale=0.125, softcap=softcap)  # type: ignore[arg-type]
    do = trial.grad_out[:, :, torch.arange(asked.query.shape[2]) % trial.grad_out.shape[2]]
    name = f"{trial.name}/unit {other} {size}"
    return _off_here(run, replace(trial, name=name, call=asked, grad_out=do))
