"""The number that stands for −∞: as what hides a pair, or as a maximum to begin with, it does as
long as scores lie above it. Read on scores that are all one number, which roundings leave alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from halfulp.algorithms import golden
from halfulp.algorithms.problem import LOG2_E
from halfulp.reconstruct.panel import FLAT, Run, lying_at, with_peaks

FAR, NEAR = -61_440.0, -150.0  # float16 holds no number much lower; what other trials have
LITTLE = 2.0**-9  # a scale at which products of `NEAR` scores lie beyond float16
LESS = 1 / 16  # a scale at which it is asked whether scores are beyond, or products
EXACTLY = 1.05  # times the number: how near it is read
LARGEST = 60_000.0  # which stands for −∞ and leaves scores their digits in float32
OFF = 0.25  # of a row's O, the mean of a few values: no rounding is so coarse
SOME = 0.5  # of the rows
IN_BASE_2 = -65504 / LOG2_E * 1.06  # of scores that are too large for float16 in base 2
OVERFLOW = "O is 0, or not finite, where products before their scale are beyond float16"


class Floor(NamedTuple):
    """What is wrong below the number."""

    cause: str  # a key of CAUSES
    tensor: str
    text: str
    gone: bool  # nothing is left of O, as where its statistics leave their format


_WRONG = {
    "gone": ("mask-finite", "out", "O is 0, or not finite, in rows whose"),
    "shown": ("mask-finite", "out", "O has what is hidden in it in rows whose"),
    "back": ("backward-mask", "grad_value", "dV of keys that are hidden is not 0 in rows whose"),
}


def floor_of(run: Run, dtype: torch.dtype) -> Floor | None:
    """The number, where there is one above `FAR`."""
    windowed: str | None = None
    for hidden in ("window", "causal", "mask"):
        if hidden == "causal" and windowed is not None:
            continue  # the call with a window is causal as well
        wrong = _wrong(run, FAR, dtype, hidden)
        windowed = wrong if hidden == "window" else windowed
        if not wrong or _wrong(run, NEAR, dtype, hidden):
            continue
        alone = wrong if wrong == "gone" else _wrong(run, FAR, dtype, "nothing")
        if alone in ("shown", "back"):
            continue  # numbers of rows that are rounded are as wrong where nothing is hidden
        low, high, told = FAR, NEAR, ""
        while low / high > EXACTLY:
            middle = -math.sqrt(low * high)
            right = not _wrong(run, middle, dtype, hidden)
            low, high = (low, middle) if right else (middle, high)
        if alone == "gone" and _wrong(run, LESS * low, dtype, "nothing", LESS / EXACTLY) == "gone":
            if low > IN_BASE_2:
                return Floor("scores", "out", OVERFLOW, gone=True)  # the same products, not scores
            wrong, told = "gone", " before their scale"
        cause, tensor, text = _WRONG[wrong]
        return Floor(cause, tensor, f"{text} scores{told} lie below {low:.2g}", alone == "gone")
    return None


def leaks(run: Run, dtype: torch.dtype, above: float) -> bool | None:
    """Whether O has what a boolean mask hides where it scores so far above what that shows; None
    where the kernel does not take the call.
    """
    trial = with_peaks(above, dtype)
    result = run(trial)
    if result is None:
        return None
    out, exact = result.out.double(), golden(trial.call).out
    return not bool(((out - exact).norm(dim=-1) < OFF * exact.norm(dim=-1)).all())


def products_overflow(run: Run, dtype: torch.dtype) -> bool:
    """Whether products that no float16 holds leave nothing of O though their scores are no larger
    than others are that it is right with.
    """
    return _wrong(run, NEAR, dtype, "nothing", LITTLE) == "gone" and not _wrong(
        run, NEAR, dtype, "nothing")  # fmt: skip


def _wrong(
    run: Run, level: float, dtype: torch.dtype, hidden: str, scale: float = 1.0
) -> str | None:
    """What is wrong with scores of that level; None where the kernel does not take the call."""
    trial = lying_at(level, dtype, hidden, scale)
    result = run(trial)
    if result is None:
        return None
    out, exact = result.out.double(), golden(trial.call, trial.grad_out)
    gone = ~out.isfinite().all(-1) | ((out == 0).all(-1) & (exact.out != 0).any(-1))
    if float(gone.double().mean()) > SOME:
        return "gone"
    off = (out - exact.out).norm(dim=-1) > OFF * exact.out.norm(dim=-1)
    if float(off.double().mean()) > SOME:
        return "shown"
    if result.grad_value is None:
        return ""
    if hidden == "nothing" and (right := exact.grad_value) is not None:
        off = result.grad_value.double() - right
        return "" if bool(off.norm() < OFF * right.norm()) else "back"
    return "back" if bool((result.grad_value[:, :, FLAT // 4 :] != 0).any()) else ""
