"""What may be done wrongly in tiled attention, as data: where it is made (`STAGES`), what is done
there (`MISTAKES`), in which tiles or numbers (`PARTS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Stage(NamedTuple):
    """A quantity of the dataflow."""

    text: str
    cause: str  # of a number of it that is wrong
    other: str  # of another's in its place
    neutral: float = 0.0  # what it is where it is left out


STAGES: dict[str, Stage] = {
    "query": Stage("Q", "scale", "other-data"),
    "key": Stage("K", "scale", "other-data"),
    "value": Stage("V", "unnormalized", "other-data"),
    "product": Stage("Q Kᵀ", "scale", "other-data"),
    "scores": Stage("S", "scale", "other-data", -math.inf),
    "row_max": Stage("the running maximum", "row-max", "row-max"),
    "weights": Stage("exp(S − m)", "exponential", "other-data"),
    "rescale": Stage("the factor that rescales O and l", "rescale", "rescale", 1.0),
    "rescale_out": Stage("the factor that rescales O", "rescale", "rescale", 1.0),
    "rescale_sum": Stage("the factor that rescales l", "rescale", "rescale", 1.0),
    "row_sum": Stage("l", "unnormalized", "unnormalized"),
    "accumulator": Stage("O as it is summed", "accumulator", "accumulator"),
    "out": Stage("O", "unnormalized", "other-data"),
    "lse": Stage("lse", "lse-other", "lse-other", math.inf),
    "b_lse": Stage("lse in the backward pass", "lse", "lse", math.inf),
    "delta": Stage("δ", "no-delta", "no-delta"),
    "b_query": Stage("Q of the backward pass", "backward-scores", "other-data"),
    "b_key": Stage("K of the backward pass", "backward-scores", "other-data"),
    "b_value": Stage("V in dP", "no-delta", "other-data"),
    "grad_out": Stage("dO", "grad-scale", "other-data"),
    "b_scores": Stage("S of the backward pass", "backward-scores", "backward-scores", -math.inf),
    "b_weights": Stage("P of the backward pass", "backward-weights", "backward-weights"),
    "dp": Stage("dP", "no-delta", "no-delta"),
    "ds": Stage("dS", "grad-scores", "grad-scores"),
    "p_in_dv": Stage("P in dV", "probabilities", "probabilities"),
    "ds_in_dq": Stage("dS in dQ", "grad-scores", "grad-scores"),
    "ds_in_dk": Stage("dS in dK", "grad-scores", "grad-scores"),
    "dq_sum": Stage("dQ as it is summed", "grad-accumulator", "grad-accumulator"),
    "dk_sum": Stage("dK as it is summed", "grad-accumulator", "grad-accumulator"),
    "dv_sum": Stage("dV as it is summed", "grad-accumulator", "grad-accumulator"),
    "dq": Stage("dQ", "grad-scale", "other-data"),
    "dk": Stage("dK", "grad-scale", "other-data"),
    "dv": Stage("dV", "grad-scale", "other-data"),
}
FORWARD_STAGES = tuple(STAGES)[:14]
BY_KEY = {"key", "value", "b_key", "b_value", "dk_sum", "dv_sum", "dk", "dv"}

Wrong = Callable[[Tensor, float, "Memory"], Tensor]
Memory = dict[str, Tensor]


def _stale(x: Tensor, _: float, memory: Memory) -> Tensor:
    before = memory.get("before", x)
    memory["before"] = x
    return before if before.shape == x.shape else x


_LAST, _WITHIN = (4, 1, 8, 16), (2.0, 0.5, 8.0, 0.25, 1.0, 4.0, 16.0, 64.0)


def _gone(x: Tensor, neutral: float, _: Memory) -> Tensor:
    return torch.full_like(x, neutral)


def _cut(count: int) -> Wrong:
    """A tile's last rows left out, or its first where the count is negative."""

    def wrong(x: Tensor, neutral: float, _: Memory) -> Tensor:
        some = torch.arange(x.shape[2])
        gone = some >= x.shape[2] - count if count > 0 else some < -count
        return torch.where(gone[:, None], neutral, x)

    return wrong


def _within(limit: float) -> Wrong:
    return lambda x, *_: x.clamp(-limit, limit)


MISTAKES: dict[str, tuple[str, Wrong]] = {
    "gone": ("is left out", _gone),
    "head-1": ("is that of the head before", lambda x, *_: x.roll(1, 1)),
    "head+1": ("is that of the head after", lambda x, *_: x.roll(-1, 1)),
    "head0": ("is that of the first head", lambda x, *_: x[:, :1].expand_as(x)),
    "batch-1": ("is that of the sequence before", lambda x, *_: x.roll(1, 0)),
    "batch+1": ("is that of the sequence after", lambda x, *_: x.roll(-1, 0)),
    "batch0": ("is that of the first sequence", lambda x, *_: x[:1].expand_as(x)),
    "row-1": ("is that of the row before", lambda x, *_: x.roll(1, 2)),
    "row+1": ("is that of the row after", lambda x, *_: x.roll(-1, 2)),
    "stale": ("is that of the tile before", _stale),
    "squared": ("is taken twice", lambda x, *_: x.square()),
    **{f"last{c}": (f"lacks the last {c} rows of a tile", _cut(c)) for c in _LAST},
    "first1": ("lacks the first row of a tile", _cut(-1)),
    **{f"within{c:g}": (f"is held within ±{c:g}", _within(c)) for c in _WITHIN},
}  # fmt: skip
FACTORS = ("factor", "grows")  # mistakes that a number belongs to
_RESULTS = {"out", "dq", "dk", "dv"}
OTHERS = {name for name in MISTAKES if name.startswith(("head", "batch"))}
_MOVED = OTHERS | {"row-1", "row+1", "stale"}
SQUARED = {"rescale", "rescale_out", "rescale_sum", "weights", "product"}


class Tile(NamedTuple):
    """Where a stage is, and how many queries and keys there are."""

    rows: slice
    cols: slice
    queries: int
    keys: int


PARTS: dict[str, tuple[str, Callable[[Tile, Tensor], Tensor | bool]]] = {
    "": ("", lambda *_: True),
    "last keys": (" in the last block of keys", lambda t, _: t.cols.stop >= t.keys),
    "first keys": (" in the first block of keys", lambda t, _: t.cols.start == 0),
    "later keys": (" in later blocks of keys", lambda t, _: t.cols.start > 0),
    "last rows": (" in the last block of queries", lambda t, _: t.rows.stop >= t.queries),
    "first rows": (" in the first block of queries", lambda t, _: t.rows.start == 0),
    "later rows": (" in later blocks of queries", lambda t, _: t.rows.start > 0),
    "diagonal": (" in tiles on the diagonal", lambda t, _: t.rows.start == t.cols.start),
    "positive": (" where it is positive", lambda _, x: x > 0),
    "large": (" where it is large", lambda _, x: x.abs() > 0.5 * x.abs().nan_to_num(
        0.0, 0.0, 0.0).amax((-1, -2), keepdim=True)),
}  # fmt: skip
SIFTED = {"last1", "last8", "last16", *(f"within{c:g}" for c in _WITHIN[3:])}
"""Mistakes that are tried where one like them is near."""


@dataclass(frozen=True, order=True)
class Slip:
    """A mistake at a stage, in some tiles; `factor` where the stage is multiplied by a number."""

    stage: str
    mistake: str
    part: str = ""
    factor: float = 1.0

    @property
    def text(self) -> str:
        """In words."""
        if self.mistake in FACTORS:
            more = " and again in each further block of keys" * (self.mistake == "grows")
            did = f"is {self.factor:.4g} × what it should be{more}"
        else:
            did = MISTAKES[self.mistake][0]
        return f"{STAGES[self.stage].text} {did}{PARTS[self.part][0]}"

    @property
    def cause(self) -> str:
        """A key of CAUSES."""
        if self.mistake == "gone" and self.stage in _RESULTS:
            return "unwritten"
        stage = STAGES[self.stage]
        if self.mistake.startswith(("last", "first")) or (
            self.mistake == "gone" and self.part.endswith(("keys", "rows"))):  # fmt: skip
            if self.stage in ("b_lse", "b_weights", "delta"):  # of whole rows, in all they enter
                return stage.cause
            if self.stage not in FORWARD_STAGES:
                return "grad-tail"
            return "key-tail" if self.stage in BY_KEY or "keys" in self.part else "query-tail"
        return stage.other if self.mistake in _MOVED else stage.cause

    def made(self, x: Tensor, tile: Tile, memory: Memory) -> Tensor:
        """The stage's value with it."""
        if self.mistake in FACTORS:
            times = tile.cols.start // (tile.cols.stop - tile.cols.start)
            wrong = x * self.factor ** (times if self.mistake == "grows" else 1)
        else:
            wrong = MISTAKES[self.mistake][1](x, STAGES[self.stage].neutral, memory)
        here = PARTS[self.part][1](tile, x)
        return torch.where(here, wrong, x) if isinstance(here, Tensor) else wrong if here else x
