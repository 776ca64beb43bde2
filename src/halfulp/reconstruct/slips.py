"""Which step of tiled attention a kernel does wrongly: every slip is computed on the dataflow,
those of one stage side by side, and held against what the kernel gave. What it does to the results
is the difference of two runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.reconstruct.emulating import FORWARD, GRADIENTS, Emulator, Model, Twist
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.panel import Trial, simplicity
from halfulp.reconstruct.regions import Region
from halfulp.reconstruct.slip_flow import USUAL, Flow, Tiles
from halfulp.reconstruct.slip_kinds import (
    AT_MOST_1,
    CODES,
    FACTORS,
    FLUSHED,
    FORMATS,
    FORWARD_STAGES,
    LIMITS,
    MISTAKES,
    MOVED,
    NOT_ROUNDED,
    ONLY_HERE,
    OTHERS,
    PARTS,
    RESCALED,
    ROUNDINGS,
    SCALED,
    SIFTED,
    SQUARED,
    STAGES,
    STEPS,
    TOGETHER,
    Rows,
    Slip,
)

LEAN = 1 / 64  # off a factor of 1: what is less is rounded to one side
LIMIT = 0.125  # within which nobody holds scores
TINY = 4.0  # times what a small factor leaves: what is left out leaves more, and is not meant
SMALL = 0.1  # and no more is a number that becomes 0 because it is small
FITTED = 5  # slips by a factor that are fitted
FITS = 4  # steps towards the factor that explains most
NEAR = 10  # slips that point where the error does, which are tried in parts of the tiles, and
COARSE = 7  # of roundings, and
TWICE = 3  # so many of these in two parts at once
EXCHANGED = 0.2  # share that another head's data may leave of what some heads err
MANY = 24  # heads, and
LARGEST = 200_000  # pairs of queries and keys of a trial on which slips are looked for
OTHER_TILES = ((64, 64), (32, 64), (128, 64), (64, 32), (32, 32), (64, 128), (128, 128))
NOWHERE = 0.985  # share left by the best multiple of what is no part of an error
HALF = 0.5  # share left from which other tiles are tried
DONE = 0.05  # share left: no part is looked for
AT_ONCE = 8  # slips side by side: more of them leave the cache


@lru_cache(maxsize=24)
def _right(trial: Trial, tiles: Tiles) -> tuple[Flow, dict[str, Tensor]]:
    flow = Flow(trial, tiles)
    return flow, flow.results()


def _moved(trial: Trial, tiles: Tiles, slips: Sequence[Slip]) -> dict[str, Tensor]:
    """What slips of one stage add to the results of their pass, `[slip, B, H, ...]`."""
    flow, right = _right(trial, tiles)
    made = flow.results(slips)
    return {
        name: (x - right[name]).nan_to_num(0.0, 0.0, 0.0).expand(len(slips), *right[name].shape)
        for name, x in made.items()
    }


@lru_cache(maxsize=256)
def _moved_by(trial: Trial, tiles: Tiles, slip: Slip) -> dict[str, Tensor]:
    """What one slip adds to the tensors of its pass, as a kernel returns them."""
    moved = {name: x[0] for name, x in _moved(trial, tiles, (slip,)).items()}
    return moved | ({"lse": moved["lse"].squeeze(-1)} if "lse" in moved else {})


def as_twist(slip: Slip, tiles: Tiles, region: Region | None = None) -> Twist:
    """The slip as a candidate of the search, in some heads alone."""

    def turn(trial: Trial) -> Trial | None:
        return replace(trial) if region is None or trial.name in region.heads else None

    def back(trial: Trial, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        moved = {n: x for n, x in _moved_by(trial, tiles, slip).items() if n in tensors}
        if region is not None:
            moved = {n: x * _mask(region, trial, x) for n, x in moved.items()}
        return tensors | {n: tensors[n] + x.to(tensors[n].dtype) for n, x in moved.items()}

    where = "" if region is None else f" {region.text}"
    return Twist(f"slip-{slip}{tiles}{where}", f"{slip.text}{where}", slip.cause, turn, back)


def _mask(region: Region, trial: Trial, x: Tensor) -> Tensor:
    inside = torch.zeros(x.shape[:2])
    groups = trial.call.query.shape[1] // x.shape[1]
    for b, h in region.heads[trial.name]:
        inside[b, h // groups] = 1
    return inside.view(*x.shape[:2], *[1] * (x.ndim - 2))


def _slips(trial: Trial, stages: tuple[str, ...], others: bool) -> Iterator[Slip]:
    """Those that may be on a trial, everywhere."""
    b, h = trial.call.query.shape[:2]
    for stage in stages:
        for mistake in MISTAKES:
            if (mistake.startswith("head") and h == 1) or (mistake.startswith("batch") and b == 1):
                continue
            own = stage.startswith("rescale") or mistake not in RESCALED
            if mistake in SIFTED | ROUNDINGS or not own:
                continue
            if mistake == "squared" and stage not in SQUARED:
                continue
            if (others and mistake not in OTHERS) or (stage in TOGETHER and mistake not in MOVED):
                continue
            yield Slip(stage, mistake)
        if not others and stage not in TOGETHER:
            yield from (Slip(stage, "within", factor=limit) for limit in LIMITS)


def tells(trial: Trial) -> bool:
    """Whether a trial is small enough for hundreds of runs."""
    b, h, n = trial.call.query.shape[:3]
    return b * h <= MANY and b * h * n * trial.call.key.shape[2] <= LARGEST


def likeliest(
    emulator: Emulator,
    trial: Trial,
    tensors: frozenset[str],
    tiles: Tiles,
    model: Model | None = None,
    region: Region | None = None,
    *,
    gross: bool = True,
    coarse: bool = True,
    rows: tuple[Rows, ...] = (),
) -> list[Held]:
    """The slips that explain most of these results' errors on a trial, the best first; of errors
    less a model's, where one is given: what is no rounding, what is one, or both.
    """
    seen = {n: o for n in tensors if (o := emulator.observed.get((trial.name, n))) is not None}
    if region is not None:
        seen = {n: o.within(_mask(region, trial, o.value)) for n, o in seen.items()}
    seen = {n: o for n, o in seen.items() if 4 * o.floor < o.total < math.inf}
    if not seen:
        return []
    holds = _Errors(emulator, trial, tiles, seen, model, rows)
    stages = FORWARD_STAGES if tensors & {"out", "lse"} else tuple(STAGES)[len(FORWARD_STAGES) :]
    every: list[Held] = []
    if gross:
        every = holds.all(_slips(trial, stages, region is not None))
    if region is not None:
        return sorted(every, key=_order)[:6]
    for mistake in FACTORS if gross else ():
        first = [min(holds.all(Slip(s, mistake, factor=f) for f in (1.25, 0.8)), key=_least)
                 for s in stages if s not in TOGETHER]  # fmt: skip
        every += [holds.fitted(h.slip) for h in sorted(first, key=_least)[:FITTED]]
    tiny = [h.left for h in every if h.slip.mistake in FACTORS and abs(h.slip.factor) < LEAN]
    most = TINY * min(tiny, default=math.inf)
    every = [h for h in every if h.slip.mistake != "gone" or h.left < most]
    held = (h for h in every if h.slip.mistake == "within" and h.least < NOWHERE)
    every += [holds.fitted(h.slip) for h in sorted(held, key=_least)[:TWICE]]
    if coarse and min((h.left for h in every), default=1.0) > DONE:
        every += holds.roundings(stages)
    whole = (h for h in every if rows or h.slip.mistake not in FORMATS or h.slip.stage in ONLY_HERE)
    best = sorted(whole, key=_order)[:6]  # recipes round most whole steps
    if best[0].left > DONE:
        best += holds.in_parts(every)
    if min(best).left > HALF:  # the order of sums may not have told the tiles
        widths = OTHER_TILES if coarse else OTHER_TILES[:1]
        others = (tiles._replace(rows=rows, cols=cols) for rows, cols in widths)
        moved = ("stale", "row-1", "row+1")[: 1 if coarse else 3]
        for other in (x for x in others if x != tiles):
            asked = _Errors(emulator, trial, other, seen, model)
            best += asked.all(Slip(stage, mistake) for stage in stages for mistake in moved)
    # a number that is the call's scale is another one of other calls
    best += holds.all(replace(h.slip, mistake=mistake, factor=1.0) for mistake in SCALED
                      for h in best if h.slip.mistake == "factor" and h.tiles == tiles)  # fmt: skip
    clear = [h for h in best if h.slip.mistake not in FACTORS or abs(h.slip.factor - 1) > LEAN]
    return sorted(clear, key=_order)[:6]


class Held(NamedTuple):
    """A slip held against errors: the shares that it leaves, that its best multiple leaves, and
    that multiple.
    """

    left: float
    least: float
    times: float
    slip: Slip
    tiles: Tiles


def _order(h: Held) -> tuple[float, int, int, int]:
    """Of those that explain alike the simplest, and the one nearest to the result; a factor on
    scores rather than on what they lie below the maximum.
    """
    slip, factor = h.slip, h.slip.mistake in FACTORS
    simple = len(slip.parts), 1 + FACTORS.index(slip.mistake) if factor else 0
    stage = "product" if factor and slip.stage == "exponent" else slip.stage
    return round(h.left, 3), *simple, -list(STAGES).index(stage)


class _Errors:
    """What slips are held against: some results' errors on one trial."""

    def __init__(
        self,
        emulator: Emulator,
        trial: Trial,
        tiles: Tiles,
        seen: Mapping[str, Observed],
        model: Model | None,
        rows: tuple[Rows, ...] = (),
    ) -> None:
        self.trial, self.tiles, self.rows = trial, tiles, rows
        self.of = {}
        for name, o in seen.items():
            made = None if model is None else emulator.made(trial, model, name)
            usual = o.exact if made is None else made.double().view_as(o.exact)
            error = torch.where(o.usable & usual.isfinite(), o.value - usual, 0.0)
            weight = 1 / max(float(o.exact.square().sum()), 1e-300)
            self.of[name] = o.usable, error, weight
        total = sum(float(e.square().sum()) * w for _, e, w in self.of.values())
        self.of = {n: (u, e, w / max(total, 1e-300)) for n, (u, e, w) in self.of.items()}

    def __call__(self, slip: Slip) -> Held:
        return self.all((slip,))[0]

    def all(self, slips: Iterable[Slip]) -> list[Held]:
        """Many, those of a stage side by side."""
        found: list[Held] = []
        for _, some in groupby(slips, key=lambda slip: slip.stage):
            of_stage = [replace(slip, rows=self.rows) for slip in some]
            for first in range(0, len(of_stage), AT_ONCE):
                found += self._held(of_stage[first : first + AT_ONCE])
        return found

    def _held(self, slips: Sequence[Slip]) -> list[Held]:
        moved = _moved(self.trial, self.tiles, slips)
        along, size = torch.zeros(2, len(slips), dtype=torch.float64)
        for name, (usable, error, weight) in self.of.items():
            if name not in moved:
                continue
            x = torch.where(usable, moved[name].double(), 0.0)
            along += (x * error).flatten(1).sum(1) * weight
            size += x.square().flatten(1).sum(1) * weight
        return [
            Held(1 - 2 * a + s, 1 - (a * a / s if s else 0.0), a / s if s else 0.0, slip,
                 self.tiles)
            for slip, a, s in zip(slips, along.tolist(), size.tolist(), strict=True)
        ]  # fmt: skip

    def fitted(self, slip: Slip) -> Held:
        """With the factor, or the threshold, that fits best."""
        if slip.mistake in {*FLUSHED, "within"}:
            best, most = self(slip), math.inf if slip.mistake == "within" else SMALL
            for step in (4.0, 4.0, 2.0, 1.4, 1.2, 1.1):
                near = (best.slip.factor * s for s in (step, 1 / step))
                best = min(best, *self.all(replace(slip, factor=f) for f in near if f <= most))
            capped = slip.mistake == "within" and slip.stage in ("product", "scores")
            return self._or_gone(best) if capped and best.slip.factor < LIMIT else best
        if slip.mistake not in FACTORS:
            return self(slip)
        best = self(slip if slip.factor != 1 else replace(slip, factor=1.25))
        for _ in range(FITS):
            factor = 1 + (best.slip.factor - 1) * max(-4.0, min(4.0, best.times))
            best = min(best, self(replace(slip, factor=factor)))
        for step in (2.0, 1.4, 1.2) if best.left > DONE else ():  # what is exponentiated is no line
            near = (1 + (best.slip.factor - 1) * s for s in (step, 1 / step))
            best = min(best, *self.all(replace(slip, factor=f) for f in near))
        return self._or_gone(best) if abs(best.slip.factor) < LEAN else best

    def _or_gone(self, best: Held) -> Held:
        """What leaves next to nothing of numbers, or none of them where that is as good."""
        slip = best.slip
        later = ("later keys",) if slip.mistake == "grows" else ()
        gone = self(replace(slip, mistake="gone", factor=1.0, parts=(*slip.parts, *later)))
        return best if TINY * best.left < gone.left else gone

    def roundings(self, stages: Sequence[str]) -> list[Held]:
        """Numbers of a stage that are coarse, or 0 where they are small."""
        some = [s for s in stages if s not in NOT_ROUNDED]
        every = self.all(Slip(stage, m) for stage in some for m in (*FORMATS, *CODES))
        every += self.all(Slip(s, mistake) for s in stages if s in AT_MOST_1 for mistake in STEPS)
        small = self.all(Slip(stage, mistake, factor=start * by) for stage in some
                         for mistake, start in FLUSHED.items() for by in (1 / 16, 1.0))  # fmt: skip
        near = sorted(small, key=_least)[:FITTED]
        return [*every, *small, *(self.fitted(h.slip) for h in near)]

    def in_parts(self, every: Sequence[Held]) -> list[Held]:
        """Slips that point where the error does, in parts of the tiles and numbers."""
        parted = [h for h in every if h.slip.mistake not in ("grows", "goes on")]
        coarse = [h for h in parted if h.slip.mistake in ROUNDINGS]
        others = [h for h in parted if h.slip.mistake not in {*ROUNDINGS, *RESCALED}]
        near = [*sorted(others, key=_least)[:NEAR], *sorted(coarse, key=_least)[:COARSE]]
        found: list[Held] = []
        for whole in (h for h in near if h.least < NOWHERE):
            kind = whole.slip.mistake.rstrip("0123456789.")
            found += self.all(replace(whole.slip, mistake=m)
                              for m in SIFTED if m.startswith(kind))  # fmt: skip
            parts = self.all(replace(whole.slip, parts=(part,)) for part in PARTS)
            found += [h for h in parts if h.left != whole.left]  # a part that is all is none
        two = self._nearest(found)
        if two and min(two).left > DONE:
            two += self._nearest(self.all(replace(h.slip, parts=(*h.slip.parts, part))
                                          for h in two for part in PARTS
                                          if part not in h.slip.parts))  # fmt: skip
        return found + two

    def _nearest(self, found: Sequence[Held]) -> list[Held]:
        """The few that explain most, those with a number by what it may be."""
        open_ = {*FACTORS, *FLUSHED, "within"}
        free = sorted((h for h in found if h.slip.mistake in open_), key=_least)[:TWICE]
        whole = sorted((h for h in found if h.slip.mistake not in open_), key=_order)[:TWICE]
        return sorted((*map(self.fitted, (h.slip for h in free)), *whole), key=_order)[:TWICE]


def of_rows(emulator: Emulator, region: Region, tiles: Tiles, model: Model) -> Twist | None:
    """One step done wrongly in the rows that alone are wrong, where it explains what sums over them
    as well.
    """
    some = [n for n in region.trials if tells(emulator.trials[n])]
    for name in sorted(some, key=simplicity)[:2]:
        for tensors in (frozenset(FORWARD), frozenset(GRADIENTS)):
            found = likeliest(emulator, emulator.trials[name], tensors, tiles, model,
                              rows=region.rows)  # fmt: skip
            if found and found[0].left < EXCHANGED:
                return as_twist(found[0].slip, found[0].tiles)
    return None


def _least(h: Held) -> float:
    return h.least


def of_others(emulator: Emulator, region: Region, tiles: Tiles) -> Twist | None:
    """What heads that alone are wrong take from others, where that explains them."""
    some = [n for n in region.heads if tells(emulator.trials[n])]
    for name in sorted(some, key=simplicity)[:2]:
        for tensors in (frozenset(FORWARD), frozenset(GRADIENTS)):
            found = likeliest(emulator, emulator.trials[name], tensors, tiles, region=region)
            if found and found[0].left < EXCHANGED:
                return as_twist(found[0].slip, found[0].tiles, region)
    return None


__all__ = ["DONE", "USUAL", "Held", "Tiles", "as_twist", "likeliest", "of_others",
           "of_rows", "tells"]  # fmt: skip
