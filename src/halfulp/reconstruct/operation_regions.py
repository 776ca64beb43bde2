"""In which part of the indices alone a kernel errs, read off its results: index by index, whether
they are as a way makes them or as they are without it; where they are sums over the indices, by
least squares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from halfulp.operations import OperationCalls, Rounding, sizes_of
from halfulp.reconstruct.operation_mistakes import Region, fitting, regions
from halfulp.reconstruct.operation_steps import shapes_of_steps
from halfulp.reconstruct.operation_trials import BROKEN, Trial
from halfulp.reconstruct.operation_ways import Way

NOISY = 2.0  # times the squares that rounding makes, which are no error yet
CLOSER = 0.25  # times the square of the distance: as one of two ways makes it, not the other
UNLIKE = 0.01  # of squared cosines to the error, below which a way is not in 1/64 of the rows
LONGEST = 64  # indices of a sum that are told apart by least squares
NEAR = 0.3  # of 0 or 1, of what least squares say


def visible_regions(trial: Trial) -> list[Region]:
    """Regions outside which what fails is off by what rounding makes, the smallest first."""
    operation, found = trial.calls.operation, {}
    made_by = [trial.emulated(recipe, ()) for recipe in (operation.stock, operation.floor)]
    for symbol, length in sizes_of(trial.calls).items():
        for name, dim in _showing(trial, symbol):
            exact = trial.exact[name]
            each, *dues = (
                _along(x[name], exact, dim)
                for x in (trial.kernel, *(made for made in made_by if made is not None))
            )
            due = NOISY * float(torch.stack([each * 0, *dues]).sum(0).mean()) + 1e-6 * each.mean()
            for region in fitting(symbol, each > due, torch.zeros(length, dtype=torch.bool)):
                here = region.rule(length)
                if not bool(here.all()) and float(each[~here].mean()) <= due:
                    found[region.text] = (float(here.double().mean()), region)
    return [region for _, region in sorted(found.values(), key=lambda one: one[0])]


def regions_of(trial: Trial, base: Rounding, way: Way) -> Iterator[tuple[float, Region]]:
    """Regions in which results are as this way makes them, outside as without it, and the share of
    the error that the way would explain there.
    """
    if trial.like(base, way) < UNLIKE:
        return
    start, other = (trial.emulated(base, ways) for ways in ((), (replace(way, alone=""),)))
    if start is None or other is None:
        return
    for symbol in sizes_of(trial.calls):
        found: dict[str, tuple[float, Region]] = {}
        # by itself: what one tensor's indices share may be a sum over another's
        for name, dim in _showing(trial, symbol):
            without, made = (_along(trial.kernel[name], x[name], dim) for x in (start, other))
            here, clean = made < CLOSER * without, without < CLOSER * made
            share = 1 - float(torch.minimum(without, made).sum() / without.sum().clamp_min(1e-300))
            if here.any() and clean.any():
                for region in fitting(symbol, here, clean):
                    if share > found.get(region.text, (-1.0, region))[0]:
                        found[region.text] = share, region
        yield from found.values()


def hidden_regions(trial: Trial, base: Rounding, way: Way) -> Iterator[Region]:
    """The same along symbols over which what fails is summed, index by index where those are few
    enough.
    """
    start = trial.emulated(base, ())
    for symbol, length in sizes_of(trial.calls).items():
        if start is None or length > LONGEST or _showing(trial, symbol):
            continue
        single = [
            trial.emulated(base, (replace(way, region=Region(f"{i}", symbol, partial(_one, i))),))
            for i in range(length)
        ]
        columns = [trial.weighted(one, start) for one in single if one is not None]
        if len(columns) == length and columns[0].numel() >= length:
            by = torch.stack(columns, 1)
            off = trial.weighted(trial.kernel, start)
            try:
                share = torch.linalg.lstsq(by, off[:, None], driver="gelsd").solution[:, 0]
            except RuntimeError:  # of columns that are beyond all numbers
                continue
            here, clean = (share - 1).abs() < NEAR, share.abs() < NEAR
            if here.any() and clean.any() and bool((here | clean).all()):
                yield from fitting(symbol, here, clean)


def _one(index: int, length: int) -> Tensor:
    return torch.arange(length) == index


def _showing(trial: Trial, symbol: str) -> list[tuple[str, int]]:
    """What fails that has an index of this symbol, and its dimension."""
    shapes = trial.calls.operation.shapes_of_results
    return [(n, 1 + shapes[n].split().index(symbol)) for n in trial.failing
            if symbol in shapes[n].split()]  # fmt: skip


def _along(x: Tensor, exact: Tensor, dim: int) -> Tensor:
    broken = BROKEN * (x.isfinite() != exact.isfinite())
    off = (x - exact).nan_to_num(0.0, 0.0, 0.0).square() + broken
    other = [d for d in range(x.ndim) if d != dim]
    return off.sum(other) if other else off


def groups_of(calls: OperationCalls) -> list[list[Region]]:
    """Regions of every symbol, those together that are the same indices in this call."""
    sizes = sizes_of(calls)
    lengths = {n for shape in shapes_of_steps(calls).values() for n in shape}
    known = sizes | {
        f"{s} / 2": n // 2 for s, n in sizes.items() if n // 2 in lengths - set(sizes.values())
    }
    groups: dict[tuple[str, bytes], list[Region]] = {}
    for symbol, n in known.items():
        for region in regions(symbol):
            if (here := region.rule(n)).any():
                groups.setdefault((symbol, here.numpy().tobytes()), []).append(region)
    return list(groups.values())
