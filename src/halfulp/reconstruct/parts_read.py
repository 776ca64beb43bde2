"""Whether parts of the keys are merged with other weights than theirs, read off O: with the exact
results of parts, the weight that each has in a row is what explains the row best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.reconstruct.emulating import Emulator
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import Trial

WRONG = 0.05  # of O: an error from which it is asked how parts are merged
LEFT = 0.1  # share of an error that weights of parts may leave, and
RIGHT = 1e-4  # of it, that is nothing: of rules that leave as little the one of fewest parts
BESIDE = 0.25  # of what one factor in each row leaves
LONGEST = 128  # keys of a tile, as which a part of equal width is not taken
CLEAR = 0.05  # of a part's weight: what is less is none
RIGHT_ROWS = 0.25  # of the rows in which several parts have weight
FINER = 0.5  # of what parts leave, that tiles may leave, and of what parts at random leave
_WIDTHS = (64, 32, 128, 16)
_TILES = (16, 32, 48, 64, 96, 128)


class Rule(NamedTuple):
    """How keys are shared among parts: in turn by blocks of a width, or in a row; without a width
    by equal numbers.
    """

    parts: int
    width: int
    in_turn: bool

    def of(self, n: int) -> Tensor | None:
        """The part of each key; None where as few parts may be as many tiles."""
        blocks = -(-n // self.width) if self.width else 0
        wide = -(-blocks // self.parts) * self.width if self.width else -(-n // self.parts)
        j = torch.arange(n)
        if self.in_turn:
            return j // self.width % self.parts if blocks > self.parts + 1 else None
        tiles = wide % 16 == 0 and wide <= LONGEST
        return None if tiles or wide >= n else j // wide

    @property
    def text(self) -> str:
        """In words."""
        how = f"blocks of {self.width} in turn" if self.in_turn else "keys in a row"
        how = "one by one in turn" if self.in_turn and self.width == 1 else how
        return f"{self.parts} parts of the keys ({how}) have other weights in O than their own"


def _rules() -> Iterator[Rule]:
    for parts in (2, 3, 4, 5, 8):
        if parts < 5:
            yield Rule(parts, 0, in_turn=False)
        for width in _WIDTHS:
            if parts < 5:
                yield Rule(parts, width, in_turn=False)
            yield Rule(parts, width, in_turn=True)
    for parts in (2, 4, 8, 16, 32):  # as lanes and vectors share them
        yield Rule(parts, 1, in_turn=True)


def merged(emulator: Emulator) -> tuple[str, str] | None:
    """The call that shows it best, and in words how parts are merged that have wrong weights."""
    shares: dict[Rule, dict[str, float]] = {}
    for (name, tensor), observed in emulator.observed.items():
        if tensor != "out" or observed.relative < WRONG or name == "small":
            continue
        trial, seen = emulator.trials[name], set[tuple[int, ...]]()
        weights = weights_of(trial.call, scores_of(trial.call))
        whole = _left(trial, observed, weights, torch.zeros(weights.shape[-1], dtype=torch.int64))
        for rule in _rules():
            part = rule.of(weights.shape[-1])
            few = 2 * rule.parts <= observed.exact.shape[-1]  # else they explain any row
            if part is None or not few or tuple(part.tolist()) in seen:
                continue
            seen.add(tuple(part.tolist()))
            left = _left(trial, observed, weights, part)
            shares.setdefault(rule, {})[name] = left if left < BESIDE * whole else 1.0
    told = [(median(found.values()), -len(found), rule) for rule, found in shares.items()]
    if not told or min(told)[0] > LEFT:
        return None
    least = max(2 * min(told)[0], RIGHT)
    rule = min((r for left, _, r in told if left <= least), key=lambda r: r.parts)
    shown = min(shares[rule], key=shares[rule].__getitem__)
    if _by_tiles(emulator, shares[rule]) or _by_any_keys(emulator, rule, shares[rule]):
        return None
    observed, trial = emulator.observed[shown, "out"], emulator.trials[shown]
    weights = weights_of(trial.call, scores_of(trial.call))
    part = rule.of(weights.shape[-1])
    if part is None or _counted(trial, observed, weights, part):
        return None
    return None if _in_some_rows(trial, observed, weights, part) else (shown, rule.text)


def _by_tiles(emulator: Emulator, shares: Mapping[str, float]) -> bool:
    """Whether tiles with a weight of their own each explain O better than parts do, which leave
    these shares, on most calls that show it with few enough tiles.
    """
    better = dict[int, list[bool]]()
    for name, share in shares.items():
        observed, trial = emulator.observed[name, "out"], emulator.trials[name]
        weights = weights_of(trial.call, scores_of(trial.call))
        keys = torch.arange(weights.shape[-1])
        for width in _TILES:
            tiles = -(-len(keys) // width)
            if tiles > 1 and 2 * tiles <= trial.call.value.shape[3]:
                left = _left(trial, observed, weights, keys // width)
                better.setdefault(width, []).append(left < FINER * share)
    return any(2 * sum(found) > len(found) for found in better.values())


def _by_any_keys(emulator: Emulator, rule: Rule, shares: Mapping[str, float]) -> bool:
    """Whether as many parts of keys taken at random explain O as well: where few keys hold a row,
    parts of theirs explain any weights that they have. So do parts that keep neighbours apart, as
    those do which take keys one by one, where a row's largest lie side by side.
    """
    drawn = []
    for name in shares:
        observed, trial = emulator.observed[name, "out"], emulator.trials[name]
        weights = weights_of(trial.call, scores_of(trial.call))
        part = rule.of(weights.shape[-1])
        assert part is not None  # else it has no share
        draw = torch.Generator().manual_seed(0)
        mixed = [part[torch.randperm(len(part), generator=draw)]]
        if rule.in_turn and rule.width == 1:
            turns = [torch.randperm(rule.parts, generator=draw) for _ in part[:: rule.parts]]
            mixed.append(torch.cat(turns)[: len(part)])
        drawn.append(min(_left(trial, observed, weights, x) for x in mixed))
    return FINER * median(drawn) < median(shares.values())


def _counted(trial: Trial, observed: Observed, weights: Tensor, part: Tensor) -> bool:
    """Whether parts have no weight in some rows, and all others one factor, or one has twice the
    others' in every row: keys are left out, or counted twice, and nothing is merged.
    """
    factor = _solved(trial, observed, weights, part)[1]
    shares = torch.stack([weights[..., part == p].sum(-1) for p in range(int(part.max()) + 1)], -1)
    known = (shares > CLEAR).all(-1)
    most, least = factor[known].amax(-1), factor[known].amin(-1)
    if len(most) and float((most / least - 2).abs().quantile(0.9)) < 2 * CLEAR:
        return True
    factor = factor[shares > CLEAR]
    gone = factor.abs() < CLEAR
    kept = factor[~gone]
    alike = float((kept - kept.median()).abs().quantile(0.9)) < CLEAR if len(kept) else False
    return alike and float(gone.double().mean()) > CLEAR


def _in_some_rows(trial: Trial, observed: Observed, weights: Tensor, part: Tensor) -> bool:
    """Whether many rows of heads that err are right though several parts have weight in them: parts
    are merged alike in every row, and what goes wrong where a sum runs is not.
    """
    factor = _solved(trial, observed, weights, part)[1]
    shares = torch.stack([weights[..., part == p].sum(-1) for p in range(factor.shape[-1])], -1)
    seen = shares > CLEAR
    several = seen.sum(-1) > 1
    right = several & ((factor - 1).abs() < CLEAR / 2).logical_or(~seen).all(-1)
    some = (several & ~right).any(-1, keepdim=True) & several
    return float((right & some).sum()) > RIGHT_ROWS * float(some.sum())


def _left(trial: Trial, observed: Observed, weights: Tensor, part: Tensor) -> float:
    """Share of O's error that a weight for each part in each row leaves, chance allowed for."""
    made, factor = _solved(trial, observed, weights, part)
    width, count = made.shape[-1], factor.shape[-1]
    rest = torch.where(observed.usable, observed.value - made, 0.0)
    return float(rest.square().sum()) / max(observed.total, 1e-300) * width / max(1, width - count)


def _solved(
    trial: Trial, observed: Observed, weights: Tensor, part: Tensor
) -> tuple[Tensor, Tensor]:
    """O of the weight for each part in each row that explains it best, and these weights."""
    value = trial.call.value.double().repeat_interleave(trial.call.groups, 1)
    count = int(part.max()) + 1
    each = torch.stack([(weights * (part == p)) @ value for p in range(count)], -2)
    each = torch.where(observed.usable.unsqueeze(-2), each, 0.0)
    gram = each @ each.mT
    ridge = 1e-9 * gram.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None] + 1e-300
    gram = gram + ridge * torch.eye(count, dtype=gram.dtype)
    along = each @ observed.value.unsqueeze(-1)
    factor = torch.linalg.solve(gram, along)
    return (factor.mT @ each).squeeze(-2), factor.squeeze(-1)
