"""A kernel's exponential, read off: scores that are exact in every format, the same S − m beside
several maxima.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from halfulp.algorithms.problem import LOG2_E
from halfulp.calls import EVERYTHING
from halfulp.formats import BF16, FP16, OCP_E4M3, OCP_E5M2, TF32, Format, round_to
from halfulp.reconstruct.exact import logarithms, scores_of, weights_of
from halfulp.reconstruct.panel import Run, Trial, panel
from halfulp.reconstruct.part_ratios import COARSEST
from halfulp.reconstruct.weight_ratios import NOISE, Read
from halfulp.reconstruct.weights_read import backward_weights, forward_weights, in_backward

NUMBERS = (0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 0, 9, 10, 11, 12, 0)
"""Of keys in steps from the row's maximum, so few that they are one tile in every kernel; each
quarter has the maximum, and of every four keys one has, so that parts that are merged have it."""
SLOPES = 64  # rows of other steps from key to key
STEP = 17 / 32  # from key to key: what S − m is, no format of 16 bits holds
MAXIMA = (0.0, 3.25, -7.5)  # that rows of one slope have, exact in every format
COMMON = 0.7  # of what weights are off by, that pairs of one S − m must share, whichever their key
BEYOND = 1.7  # times what stores round: from there on a function is another one
UNITS = 1.2  # of the last bit, and one more for every unit of S − m: rounded arguments make half
EXPLAINED = 0.1  # of the squares, that a rounding which is the function may leave
SLOPE = 2.0**-18  # times S − m: another scale, and no rounding of a constant
LINEAR = 0.85  # of the squares, that another scale explains


def exponential_of(run: Run, dtype: torch.dtype, *, backward: bool = False) -> Read | None:
    """Whether weights are another function of S − m than the exponential, by more than a store in
    the kernel's format makes, and whether that is the exponential of what is rounded, or the
    rounded exponential; None where it is the exponential, or what weights are off by is no function
    of S − m.
    """
    found = _read(run, _laid(panel(dtype)[0]), backward)
    if found is None or _scaled(*found):
        return None
    mean, x = found
    common, least = (float(e.square().mean()) for e in (mean, _allowed(x, dtype)))
    for text, cause, made in _roundings(dtype):
        left = float((mean - made(x) - x).square().mean())
        if left < max(EXPLAINED * common, 2 * least / BEYOND**2):
            return _told(text, cause, backward) if cause else None
    size = 100 * math.sqrt(common)
    text = f"the weights are another function of S − m than the exponential, by {size:.2g} %"
    return _told(text, "exponential", backward)


def _told(text: str, cause: str, backward: bool) -> Read:
    return Read(f"P as dV shows it: {text}", in_backward(cause)) if backward else Read(text, cause)


def cap_of(run: Run, dtype: torch.dtype, softcap: float) -> Read | None:
    """Whether weights are another function of the score where it is capped, and no other one of
    S − m where it is not.
    """
    capped = _read(run, _laid(panel(dtype)[0], softcap), False)
    if capped is None or exponential_of(run, dtype) is not None:
        return None
    size = 100 * math.sqrt(float(capped[0].square().mean()))
    return Read(f"the weights are off by {size:.2g} %, as a function of the score, where it is"
                " capped, and the exponential of S − m where it is not: it is the cap",
                "softcap")  # fmt: skip


def _read(run: Run, asked: Trial, backward: bool) -> tuple[Tensor, Tensor] | None:
    """What logarithms of weights are off by, as a function of S − m, and S − m, where they are a
    function of it and off by more than stores, or what rounds arguments, make, and less than no
    rounding makes.
    """
    read = (backward_weights if backward else forward_weights)(run, asked)
    if read is None:
        return None
    call = asked.call
    scores = scores_of(call)
    log, seen = logarithms(read, weights_of(call, scores))
    log = log - log[..., :1]  # beside the key of the maximum, whose factor all have
    known = ((seen * seen[..., :1] > 0) & (torch.tensor(NUMBERS) > 0))[0]
    below = (scores.amax(-1, keepdim=True) - scores)[0]
    plain = scores_of(replace(call, softcap=0.0))[0]
    at = (plain[..., :1] - plain) * 2**12  # what is capped is a function of the score beside it
    at = at + 2**20 * plain[..., :1] if call.softcap else at
    off, x, at, key = (y[known] for y in (
        log[0], below, at.round(), torch.tensor(NUMBERS).expand(known.shape)))  # fmt: skip
    mean, several = _at_each(at, off, key)
    if int(several.sum()) < SLOPES:
        return None
    off, mean, x = off[several], mean[several], x[several]
    rest, total, common, least = (float(e.square().mean()) for e in (
        off - mean, off, mean, _allowed(x, call.query.dtype)))  # fmt: skip
    if rest > (1 - COMMON) * total:
        return None
    return (mean, x) if least < common < COARSEST**2 else None


def _at_each(at: Tensor, off: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of what weights are off by at each place, and which places several keys have."""
    places, group = torch.unique(at, return_inverse=True)

    def mean(y: Tensor) -> Tensor:
        sums, counts = (torch.zeros(len(places), dtype=y.dtype).index_add_(0, group, z) for z in (
            y, torch.ones_like(y)))  # fmt: skip
        return (sums / counts)[group]

    own, number = mean(off), key.double()
    return own, mean(number.square()) - mean(number).square() > 0.1


def _scaled(off: Tensor, x: Tensor) -> bool:
    """Whether what weights are off by is another scale's."""
    slope = float((off * x).sum() / x.square().sum())
    left, total = (float(e.square().sum()) for e in (off - slope * x, off))
    return abs(slope) > SLOPE and left < (1 - LINEAR) * total


def _laid(trial: Trial, softcap: float = 0.0) -> Trial:
    """A call whose scores are a step of each row times the key's number, less than a maximum that
    is another in each third of the rows; in the second head no product is S − m.
    """
    call = trial.call
    shape = (*call.query.shape[:2], len(MAXIMA) * SLOPES, call.query.shape[3])
    query, key = torch.zeros(shape), torch.zeros(*call.key.shape[:2], len(NUMBERS), shape[3])
    unit = 1 / call.scale
    slopes = (SLOPES + torch.arange(SLOPES)) / (2 * SLOPES)  # 1/2 to 1, in seven bits
    query[..., 0] = unit * slopes.repeat(len(MAXIMA))
    query[..., 1] = unit * torch.tensor(MAXIMA).repeat_interleave(SLOPES)
    key[..., 0], key[..., 1] = -STEP * torch.tensor(NUMBERS), 1.0
    key[:, 1, :, 0] += STEP * max(NUMBERS)
    dtype = call.query.dtype
    changed = replace(call, query=query.to(dtype), key=key.to(dtype), sees=EVERYTHING,
                      value=call.value[:, :, : len(NUMBERS)], softcap=softcap)  # fmt: skip
    return replace(trial, name=f"{trial.name}/exponential", call=changed)


def _allowed(below: Tensor, dtype: torch.dtype) -> Tensor:
    """What a weight may be off by: stores in 16 bits; in float32 the rounding of the argument."""
    if dtype != torch.float32:
        return torch.full_like(below, BEYOND * NOISE[dtype])
    return UNITS * 2.0**-24 * (2 + below)


def _roundings(dtype: torch.dtype) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    """Roundings before and after the exponential, with what weights of S − m are then, as
    logarithms; one without a cause is no fault.
    """
    own = {torch.bfloat16: BF16, torch.float16: FP16}.get(dtype)

    def after(fmt: Format) -> Callable[[Tensor], Tensor]:
        return lambda x: round_to((-x).exp(), fmt).clamp_min(1e-300).log()

    def before(fmt: Format, unit: float) -> Callable[[Tensor], Tensor]:
        return lambda x: round_to(-x * unit, fmt) / unit

    if own is not None:
        yield "", "", after(own)
    first = (TF32,) if own is None else ()  # of as many bits as fp16
    for nearest in (*first, BF16, FP16, OCP_E4M3, OCP_E5M2):
        for fmt in (nearest, nearest.with_(rounding="toward_zero")):
            if fmt != own:
                how = "cut" if fmt != nearest else "rounded"
                yield f"weights are {how} to {nearest.name}", "weights", after(fmt)
                if fmt.exponent_bits < 8:  # what they are multiplied by before keeps them normal
                    told = f"weights times a power of two are {how} to {nearest.name}"
                    wide = fmt.with_(name=f"{fmt.name}, wide", exponent_bits=8, bias=127)
                    yield told, "weights", after(wide)
            for unit in (1.0, LOG2_E):
                yield (f"S − m is rounded to {nearest.name} before the exponential", "row-max",
                       before(fmt, unit))  # fmt: skip
