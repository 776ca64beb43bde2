"""What a kernel's scores are, as the weights of chosen inputs show them: whether an operand is what
is off, or the sum of products.
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
from halfulp.reconstruct.weights_read import backward_weights, forward_weights, in_backward

OTHER = 0.5  # rms of what log weights are off by: no sum is so coarse
LARGE = 256.0  # products, at most: scores of 32, whose operand's last bit is 6 % of a weight
GROWN = 1.6  # times the error where scores are 32 times as large: it is made in them
RIGHT = 0.9  # of what weights are off by elsewhere: nothing that rounding P makes is right


def unit_scores(run: Run, trial: Trial, *, backward: bool = False) -> Read | None:
    """Whether Q or K alone is what makes weights be off, or the sum of their products: against unit
    vectors every score is one number of the other operand, and no sum. What is off in weights
    themselves is off as much where scores are a 32nd as large; what is off where such scores are
    capped, and right where they are not, is the cap. `backward`: of the weights that dV shows.
    """
    read = _unit_scores(run, trial, backward=backward)
    return replace(read, cause=in_backward(read.cause)) if read and backward else read


def _unit_scores(run: Run, trial: Trial, *, backward: bool) -> Read | None:
    off = []
    for name, other in (("query", "key"), ("key", "query")):
        large, small = (
            _unit_error(run, trial, name, other, size, backward=backward) for size in (LARGE, 8.0)
        )
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
        if (
            capped
            and _unit_error(run, trial, "query", "key", LARGE, capped, backward=backward)
            > 2 * noise
        ):
            return Read("weights are right where a score is one product that is not capped, and off"
                        " where it is: it is the cap", "softcap")  # fmt: skip
        here = _off_here(run, trial, backward)
        if max(error for _, error, _ in off) < RIGHT * here:
            told = "weights are right where a score is one product"
            if here > OTHER:
                return Read(f"{told}, and off by more than sums make them here", "other-data")
            return Read(f"{told}, so it is the sum", "products")
    return None


def _off_here(run: Run, trial: Trial, backward: bool) -> float:
    """The rms of what log weights are off by, in rows of their own; NaN where nothing is given."""
    read = (backward_weights if backward else forward_weights)(run, trial)
    if read is None:
        return math.nan
    log, seen = logarithms(read, weights_of(trial.call, scores_of(trial.call)))
    return rms(centered(log, seen), seen)


def _unit_error(run: Run, trial: Trial, name: str, other: str, size: float,
                softcap: float = 0.0, *, backward: bool) -> float:  # fmt: skip
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
    return _off_here(run, replace(trial, name=name, call=asked, grad_out=do), backward)
