"""Is a gap more than rounding? A's own pass is made again with every differing operation's operands
and results moved at random by one rounding, and B's gap is held against the gaps that makes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfulp.chances import student_tail
from halfulp.diff.local_gap import step_of
from halfulp.diff.setting import Setting
from halfulp.interpose import KINDS, Operation, Swap
from halfulp.interpose.operation import mapped

ORDERS = 4.0
"""Roundings of float32 that operands are moved by: its sums differ by their order, too."""
MARGIN = 2.0
"""How many times the gap of rounding alone a gap may be on average before it counts."""
# not less: over 8 sequences a bf16 router has p = 0.002, as its effect comes with single flips
# (docs/log.md)
LEVEL = 0.01
"""Below which a chance speaks against rounding."""
LEAST = 4
"""Sequences from which on a chance is told."""
FAR = 1e3
"""A gap of so many times rounding counts as no more."""
_EXACT = ("other", "selection", "custom")  # may count, or choose, which no rounding touches


class Moved:
    """Operations whose operands and results are moved at random by one rounding.

    Args:
        setting: that runs.
        steps: relative size of a rounding by place; places that are missing are left alone.
        seed: of the noise.
    """

    def __init__(self, setting: Setting, steps: Mapping[str, float], seed: int) -> None:
        self._setting, self._steps, self._seed = setting, steps, seed

    def swap(self) -> Swap:
        """For `interpose`."""
        return Swap(self, kinds=KINDS)

    def __call__(self, operation: Operation) -> Any:
        """What the model gets."""
        # where it is known which operations differ only these are moved: noise on all of them made
        # the chance blind (a bf16 router in an fp32 Mixtral had p = 1, docs/log.md)
        step = self._steps.get(operation.place)
        if step is None or operation.kind in _EXACT or not operation.tensors():
            return self._setting.compute(operation)
        # a seed of the place, so that what an operation gets does not depend on which others are
        # moved; the factor is 2³² over the golden ratio, which sets neighbouring seeds far apart
        seed = zlib.crc32(operation.place.encode()) ^ (self._seed * 0x9E3779B1 & 0xFFFFFFFF)
        generator = torch.Generator().manual_seed(seed)

        def moved(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            noise = torch.randn(x.shape, generator=generator).to(x.device)
            wide = x if x.dtype == torch.float64 else x.float()
            return (wide * (1 + step * noise)).to(x.dtype)

        return mapped(self._setting.compute(operation.changed(moved)), moved)


def noise_step(dtype: torch.dtype) -> float:
    """How far a rounding to a dtype moves what an operation takes and gives."""
    wide = torch.finfo(dtype).bits >= 32
    return step_of(dtype) * (ORDERS if wide else 1.0)


@dataclass(frozen=True)
class Chance:
    """Whether rounding alone explains a gap."""

    p: float  # of a gap as large as this from rounding alone; NaN: too few sequences
    ratio: float  # of the gap to what rounding alone makes (geometric mean over sequences)
    sequences: int
    lean: float  # mean over sequences of the mean gap
    lean_t: float
    lean_p: float


def speaks_for_rounding(found: Chance) -> bool:
    """Whether a gap is within rounding."""
    return found.p >= LEVEL and math.isfinite(found.ratio)


def chance(gaps: Sequence[Tensor], noise: Sequence[Sequence[Tensor]]) -> Chance:
    """Hold gaps against those of rounding.

    Args:
        gaps: by batch `[sequences, numbers]`: B − A.
        noise: by batch, by repetition `[sequences, numbers]`: A moved − A.

    The test is Student's on log(rms gap / rms of rounding) over sequences, against log(MARGIN).
    """
    # a sequence is one sample: the numbers in it share tokens and weights and are not independent
    sizes = torch.cat([gap.square().mean(1).sqrt() for gap in gaps])
    means = torch.cat([gap.mean(1) for gap in gaps])
    count = len(sizes)
    lean, lean_t = _t(means)
    lean_p = 2 * student_tail(abs(lean_t), count - 1) if count >= LEAST else math.nan
    if not noise:
        return Chance(math.nan, math.nan, count, lean, lean_t, lean_p)
    usual = torch.cat([
        torch.stack([one.square().mean(1) for one in batch]).mean(0).sqrt() for batch in noise
    ])  # fmt: skip
    ratios = torch.where(usual > 0, sizes / usual, torch.where(sizes > 0, math.inf, 0.0))
    if bool((usual == 0).all()):
        none = not bool((sizes > 0).any())
        return Chance(1.0 if none else 0.0, 0.0 if none else math.inf, count, lean, lean_t, lean_p)
    # one that does not differ at all counts as one that hardly does, and the other way round
    # of logarithms, in which twice and half weigh alike and no single sequence decides the mean
    logs = ratios.clamp(1 / FAR, FAR).log()
    mean, t = _t(logs - math.log(MARGIN))
    p = student_tail(t, count - 1) if count >= LEAST else math.nan
    return Chance(p, math.exp(mean) * MARGIN, count, lean, lean_t, lean_p)


def _t(x: Tensor) -> tuple[float, float]:
    mean = float(x.mean())
    if len(x) < 2:
        return mean, math.nan
    spread = float(x.std()) / math.sqrt(len(x))
    return mean, (mean / spread if spread else math.copysign(math.inf, mean) if mean else 0.0)
