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

from halfulp.algorithms.problem import LOG2_E
from halfulp.reconstruct.ranges import ranges


class Stage(NamedTuple):
    """A quantity of the dataflow."""

    text: str
    cause: str  # of a number of it that is wrong
    other: str  # of another's in its place
    rounding: str  # of numbers of it that are coarse
    neutral: float = 0.0  # what it is where it is left out


STAGES: dict[str, Stage] = {
    "query": Stage("Q", "scale", "other-data", "operand"),
    "key": Stage("K", "scale", "other-data", "operand"),
    "value": Stage("V", "unnormalized", "other-data", "operand"),
    "key_value": Stage("K and V", "scale", "other-data", "operand"),
    "product": Stage("Q Kᵀ", "scale", "other-data", "scores"),
    "scores": Stage("S", "scale", "other-data", "scores", -math.inf),
    "row_max": Stage("the running maximum", "row-max", "row-max", "row-max"),
    "statistics": Stage("m and l as a tile reads them", "rescale", "rescale", "rescale"),
    "divided_statistics": Stage("m and l as a tile reads them, O being kept divided,",
        "rescale", "rescale", "rescale"),
    "exponent": Stage("S − m", "exponential", "row-max", "row-max"),
    "weights": Stage("exp(S − m)", "exponential", "other-data", "weights"),
    "weights_in_out": Stage("exp(S − m) in O", "weights-disagree", "other-data", "weights"),
    "rescale": Stage("the factor that rescales O and l", "rescale", "rescale", "rescale", 1.0),
    "rescale_out": Stage("the factor that rescales O", "rescale", "rescale", "rescale", 1.0),
    "rescale_sum": Stage("the factor that rescales l", "rescale", "rescale", "rescale", 1.0),
    "row_sum": Stage("l", "unnormalized", "unnormalized", "row-sum"),
    "accumulator": Stage("O as it is summed", "accumulator", "accumulator", "accumulator"),
    "divided_out": Stage("O as it is summed, divided at each step,",
        "accumulator", "accumulator", "accumulator"),
    "out": Stage("O", "unnormalized", "other-data", "out"),
    "lse": Stage("lse", "lse-other", "lse-other", "lse", math.inf),
    "b_lse": Stage("lse in the backward pass", "lse-other", "lse-other", "lse", math.inf),
    "delta": Stage("δ", "no-delta", "no-delta", "delta"),
    "b_query": Stage("Q of the backward pass", "backward-scores", "other-data", "backward-scores"),
    "b_key": Stage("K of the backward pass", "backward-scores", "other-data", "backward-scores"),
    "b_key_value": Stage("K and V of the backward pass", "backward-scores", "other-data",
        "backward-scores"),
    "b_value": Stage("V in dP", "no-delta", "other-data", "operand"),
    "grad_out": Stage("dO", "grad-scale", "other-data", "operand"),
    "grad_out_in_dp": Stage("dO in dP", "no-delta", "other-data", "operand"),
    "grad_out_in_dv": Stage("dO in dV", "grad-scale", "other-data", "operand"),
    "b_scores": Stage("S of the backward pass",
        "backward-scores", "backward-scores", "backward-scores", -math.inf),
    "b_exponent": Stage("S − lse in the backward pass", "backward-scores", "lse", "lse"),
    "b_weights": Stage("P of the backward pass",
        "backward-weights", "backward-weights", "backward-weights"),
    "every_grad_out": Stage("dO, in δ as well,", "grad-scale", "other-data", "operand"),
    "dp": Stage("dP", "no-delta", "no-delta", "delta"),
    "ds": Stage("dS", "grad-scale", "grad-scores", "grad-scores"),
    "p_in_dv": Stage("P in dV", "probabilities", "other-data", "probabilities"),
    "ds_in_dq": Stage("dS in dQ", "grad-scale", "other-data", "grad-scores"),
    "ds_in_dk": Stage("dS in dK", "grad-scale", "other-data", "grad-scores"),
    "key_in_dq": Stage("K in dQ", "grad-scale", "other-data", "operand"),
    "query_in_dk": Stage("Q in dK", "grad-scale", "other-data", "operand"),
    "dq_sum": Stage("dQ as it is summed",
        "grad-accumulator", "grad-accumulator", "grad-accumulator"),
    "dk_sum": Stage("dK as it is summed",
        "grad-accumulator", "grad-accumulator", "grad-accumulator"),
    "dv_sum": Stage("dV as it is summed",
        "grad-accumulator", "grad-accumulator", "grad-accumulator"),
    "dq": Stage("dQ", "grad-scale", "other-data", "grad-stored"),
    "dk": Stage("dK", "grad-scale", "other-data", "grad-stored"),
    "dv": Stage("dV", "grad-scale", "other-data", "grad-stored"),
}  # fmt: skip
FORWARD_STAGES = tuple(STAGES)[: list(STAGES).index("b_lse")]
JOINT = {
    "key": "key_value",
    "value": "key_value",
    "b_key": "b_key_value",
    "b_value": "b_key_value",
    "grad_out": "every_grad_out",
}
"""Stages that another stands for as well."""
PAIRS = {
    "product", "scores", "exponent", "weights", "weights_in_out", "b_scores", "b_exponent",
    "b_weights", "dp", "ds",
    "p_in_dv", "ds_in_dq", "ds_in_dk",
}  # fmt: skip
"""Stages of queries by keys."""
BY_KEY = {"key", "value", "key_value", "b_key", "b_value", "dk_sum", "dv_sum", "dk", "dv"}

Wrong = Callable[[Tensor, float, "Memory"], Tensor]
Memory = dict[str, Tensor]


def _stale(x: Tensor, _: float, memory: Memory) -> Tensor:
    before = memory.get("before", x)
    memory["before"] = x
    return before if before.shape == x.shape else x


def _goes_on(x: Tensor, _: float, memory: Memory) -> Tensor:
    before = memory.get("sum", x)
    if before is x or before.shape != x.shape:
        memory["sum"] = x
        return x
    memory["sum"] = before + x
    return memory["sum"]


_LAST = (4, 1, 8, 16)


def _gone(x: Tensor, neutral: float, _: Memory) -> Tensor:
    return torch.full_like(x, neutral)


def _cut(count: int) -> Wrong:
    """A tile's last rows left out, or its first where the count is negative."""

    def wrong(x: Tensor, neutral: float, _: Memory) -> Tensor:
        some = torch.arange(x.shape[2])
        gone = some >= x.shape[2] - count if count > 0 else some < -count
        return torch.where(gone[:, None], neutral, x)

    return wrong


def _codes(dims: tuple[int, ...], most: float, code: Callable[[Tensor], Tensor]) -> Wrong:
    """Codes of what is divided by the largest, which is `most` then."""

    def wrong(x: Tensor, *_: object) -> Tensor:
        size = x.nan_to_num(0.0, 0.0, 0.0).abs().amax(dims, keepdim=True).clamp_min(1e-30) / most
        return code(x / size) * size

    return wrong


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _e5m2(x: Tensor) -> Tensor:
    return x.clamp(-57344, 57344).to(torch.float8_e5m2).float()


def _truncated(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)


IN_BASE_2 = {"scores", "b_scores", "exponent", "b_exponent", "row_max", "lse", "b_lse"}
"""Stages that kernels keep in base 2, where they are rounded."""
ONLY_HERE = {*IN_BASE_2, "divided_out", "dq_sum", "dk_sum", "dv_sum"}
"""Stages whose rounding no recipe has so."""
FORMATS: dict[str, tuple[str, Wrong]] = {
    "bf16": ("is rounded to bf16", lambda x, *_: x.bfloat16().float()),
    "fp16": ("is rounded to fp16", lambda x, *_: x.half().float()),
    "e4m3": ("is rounded to e4m3", lambda x, *_: _e4m3(x)),
    "e5m2": ("is rounded to e5m2", lambda x, *_: _e5m2(x)),
    "cut": ("is truncated to bf16", lambda x, *_: _truncated(x)),
}
"""Roundings that recipes have for whole steps, and slips for a part of one."""
CODES: dict[str, tuple[str, Wrong]] = {
    f"{name} {of}": (f"is kept in {name} codes of a scale for each {of}", _codes(dims, most, code))
    for name, most, code in (("int8", 127, torch.round), ("e4m3", 448, _e4m3))
    for of, dims in (("row", (-1,)), ("tile", (-1, -2)))
}


def _steps(most: int) -> tuple[str, Wrong]:
    return f"is rounded to multiples of 1/{most}", lambda x, *_: (x * most).round() / most


STEPS: dict[str, tuple[str, Wrong]] = {f"steps {n}": _steps(n) for n in (127, 255)}
"""Codes of what is at most 1, of a scale that is the same everywhere."""
FLUSHED = {"flush row": 2.0**-8, "flush tile": 2.0**-6, "flush": 2.0**-10}
"""What is 0 below a share of its row's or tile's largest, or below a number; and where to begin."""


def _paired(heads: int) -> Tensor:
    return (torch.arange(heads) ^ 1).clamp_max(heads - 1)


def _left(jump: float) -> tuple[str, Wrong]:
    return (f"is left out where the maximum grows by less than {jump:g}",
            lambda x, *_: torch.where(x > math.exp(-jump), 1.0, x))  # fmt: skip


RESCALED: dict[str, tuple[str, Wrong]] = {
    "dropped": ("is 0 where the maximum grows", lambda x, *_: (x == 1).float()),
    "floor": ("is kept above e⁻⁵", lambda x, *_: x.clamp_min(math.exp(-5)).masked_fill(x == 0, 0)),
    **{f"left{jump:g}": _left(jump) for jump in (2**-5, 0.5, 1.0, 5.0)},
}
"""What only factors of rescaling have."""
MISTAKES: dict[str, tuple[str, Wrong]] = {
    "gone": ("is left out", _gone),
    "head-1": ("is that of the head before", lambda x, *_: x.roll(1, 1)),
    "head+1": ("is that of the head after", lambda x, *_: x.roll(-1, 1)),
    "head0": ("is that of the first head", lambda x, *_: x[:, :1].expand_as(x)),
    "heads": ("is exchanged between heads", lambda x, *_: x[:, _paired(x.shape[1])]),
    "batch-1": ("is that of the sequence before", lambda x, *_: x.roll(1, 0)),
    "batch+1": ("is that of the sequence after", lambda x, *_: x.roll(-1, 0)),
    "batch0": ("is that of the first sequence", lambda x, *_: x[:1].expand_as(x)),
    "row-1": ("is that of the row before", lambda x, *_: x.roll(1, 2)),
    "row+1": ("is that of the row after", lambda x, *_: x.roll(-1, 2)),
    "stale": ("is that of the tile before", _stale),
    "goes on": ("has what the tiles before had as well", _goes_on),
    "squared": ("is taken twice", lambda x, *_: x.square()),
    **{f"last{c}": (f"lacks the last {c} rows of a tile", _cut(c)) for c in _LAST},
    "first1": ("lacks the first row of a tile", _cut(-1)),
    **RESCALED,
    **FORMATS,
    **CODES,
    **STEPS,
}  # fmt: skip
SCALED = {"scaled": ("has the scale twice", 1), "unscaled": ("lacks the scale", -1)}
"""What another call's scale makes another number of; and its power."""
FACTORS = ("factor", "grows")  # mistakes that a factor belongs to
LIMITS = 2.0, 0.5, 8.0  # of numbers that are held within limits, from where one is fitted
TOGETHER = {"key_value", "b_key_value", "statistics", "divided_statistics"}
"""Stages of several quantities, which others' or a tile before's may be."""
NOT_ROUNDED = {*TOGETHER, "rescale_out", "rescale_sum"}
ROUNDINGS = {*FORMATS, *CODES, *STEPS, *FLUSHED}
AT_MOST_1 = ("weights", "weights_in_out", "b_weights", "p_in_dv")
MULTIPLIED = {"value", "weights_in_out", "out"}
"""Stages of which a factor is one on O."""
_RESULTS = {"out", "dq", "dk", "dv"}
_SUMS = {"dq_sum", "dk_sum", "dv_sum"}
_OUT = {"accumulator", "divided_out"}
COARSE = 0.1  # off a factor of 1: no format of a sum makes more
OTHERS = {name for name in MISTAKES if name.startswith(("head", "batch"))}
MOVED = OTHERS | {"row-1", "row+1", "stale", "goes on"}
SQUARED = {"rescale", "rescale_out", "rescale_sum", "weights", "product"}


class Tile(NamedTuple):
    """Where a stage is, how many queries and keys there are, and the scale of the call."""

    rows: slice
    cols: slice
    queries: int
    keys: int
    scale: float


def _heads(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])[:, None, None]


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2])[:, None]


def _columns(x: Tensor) -> Tensor:
    return torch.arange(x.shape[3])


PARTS: dict[str, tuple[str, Callable[[Tile, Tensor], Tensor | bool]]] = {
    "last keys": (" in the last block of keys", lambda t, _: t.cols.stop >= t.keys),
    "first keys": (" in the first block of keys", lambda t, _: t.cols.start == 0),
    "later keys": (" in later blocks of keys", lambda t, _: t.cols.start > 0),
    "last rows": (" in the last block of queries", lambda t, _: t.rows.stop >= t.queries),
    "first rows": (" in the first block of queries", lambda t, _: t.rows.start == 0),
    "later rows": (" in later blocks of queries", lambda t, _: t.rows.start > 0),
    "diagonal": (" in tiles on the diagonal", lambda t, _: t.rows.start == t.cols.start),
    "positive": (" where it is positive", lambda _, x: x > 0),
    "odd heads": (" in heads of odd number", lambda _, x: _heads(x) % 2 == 1),
    "last head": (" in the last head", lambda _, x: _heads(x) == x.shape[1] - 1),
    "later sequences": (" in sequences after the first",
                        lambda _, x: torch.arange(x.shape[0]).view(-1, 1, 1, 1) > 0),
    "odd rows": (" in odd rows", lambda _, x: _rows(x) % 2 == 1),
    "even rows": (" in even rows", lambda _, x: _rows(x) % 2 == 0),
    "fourth rows": (" in every fourth row", lambda _, x: _rows(x) % 4 == 3),
    "last 8 rows": (" in the last 8 rows of a tile", lambda _, x: _rows(x) >= x.shape[2] - 8),
    "other warps": (" in rows from 16 on of a tile", lambda _, x: _rows(x) >= 16),
    "odd columns": (" in odd columns", lambda _, x: _columns(x) % 2 == 1),
    "even columns": (" in even columns", lambda _, x: _columns(x) % 2 == 0),
    "upper columns": (" in the upper half of the columns",
                      lambda _, x: _columns(x) >= max(1, x.shape[3] // 2)),
    "lower columns": (" in the lower half of the columns",
                      lambda _, x: _columns(x) < x.shape[3] // 2),
    "large": (" where it is large", lambda _, x: x.abs() > 0.5 * x.abs().nan_to_num(
        0.0, 0.0, 0.0).amax((-1, -2), keepdim=True)),
}  # fmt: skip
_BLOCKS = tuple(PARTS)[:7]
SIFTED = {"last1", "last8", "last16"}
"""Mistakes that are tried where one like them is near."""


END = 1 << 30  # of a sequence, however long


@dataclass(frozen=True, order=True)
class Rows:
    """Some of the queries, or of the keys, wherever they lie: those whose number, divided by
    `period`, leaves one of `some`; without a period those numbers from the first to before the last
    of `some`, negative ones counted from the end.
    """

    whose: str
    period: int
    some: tuple[int, ...]

    @property
    def text(self) -> str:
        """In words."""
        if self.period == 2:
            return f"{('even', 'odd')[self.some[0]]} {self.whose}"
        if self.period:
            told = ranges(torch.tensor(self.some))
            return f"{self.whose} {told} of every {self.period}"
        first, last = self.some
        told = f"the first {last}" if not first else f"the last {-first}" if first < 0 else ""
        return f"{told} {self.whose}" if told else f"{self.whose} after the first {first}"

    def at(self, numbers: Tensor, count: int) -> Tensor:
        """Which of these numbers, of `count` in all, are meant."""
        if self.period:
            return torch.isin(numbers % self.period, torch.tensor(self.some))
        first, last = self.some
        return (numbers >= (first if first >= 0 else count + first)) & (numbers < last)

    def here(self, stage: str, tile: Tile, x: Tensor) -> Tensor | bool:
        """Where they are in a stage's value."""
        keys = self.whose == "keys"
        if not keys:
            some = self.at(tile.rows.start + torch.arange(x.shape[2]), tile.queries)
            return stage not in BY_KEY and some[:, None]
        if stage not in BY_KEY | PAIRS:
            return False
        some = self.at(tile.cols.start + torch.arange(x.shape[2 + (stage in PAIRS)]), tile.keys)
        return some if stage in PAIRS else some[:, None]


@dataclass(frozen=True, order=True)
class Slip:
    """A mistake at a stage, in parts of it, and in some rows alone; `factor` is what it is
    multiplied by, or below which it is 0.
    """

    stage: str
    mistake: str
    parts: tuple[str, ...] = ()
    factor: float = 1.0
    rows: tuple[Rows, ...] = ()

    @property
    def text(self) -> str:
        """In words."""
        if self.mistake in FACTORS:
            more = " and again in each further block of keys" * (self.mistake == "grows")
            did = f"is {self.factor:.4g} × what it should be{more}"
        elif self.mistake == "within":
            did = f"is held within ±{self.factor:.3g}"
        elif self.mistake in FLUSHED:
            _, _, of = self.mistake.partition(" ")
            did = f"is 0 where it is below {self.factor:.2g}" + f" of its {of}'s largest" * bool(of)
        elif self.mistake in SCALED:
            did = SCALED[self.mistake][0]
        else:
            did = MISTAKES[self.mistake][0]
        what = STAGES[self.stage].text
        parts = (PARTS[p][0] for p in self.parts)
        return f"{what} {did}{''.join((*parts, *(f' in {r.text}' for r in self.rows)))}"

    @property
    def cause(self) -> str:
        """A key of CAUSES."""
        if self.mistake == "gone" and self.stage in _RESULTS:
            return "unwritten"
        stage, blocks = STAGES[self.stage], {p for p in self.parts if p in _BLOCKS}
        if self.mistake == "gone" and self.stage in PAIRS and self.rows:
            tail = "key-tail" if self.rows[0].whose == "keys" else "query-tail"
            return tail if self.stage in FORWARD_STAGES else "grad-tail"
        if self.mistake == "stale" and self.stage in _SUMS:
            return "grad-tail"  # what blocks add is lost
        if self.mistake == "stale" and self.stage in _OUT and "last keys" in self.parts:
            return "key-tail"  # likewise
        if self.mistake in FACTORS and self.stage in _SUMS and abs(self.factor - 1) > COARSE:
            return "grad-tail" if blocks else "grad-scale"
        if self.mistake in ROUNDINGS:
            return stage.rounding
        if self.mistake in SCALED and self.stage not in MULTIPLIED:
            later = self.stage not in FORWARD_STAGES and stage.cause != "backward-scores"
            return "grad-scale" if later else stage.cause
        if self.mistake == "within" and self.stage in ("product", "scores"):
            return "softcap"  # that nobody asked for
        if self.mistake == "within" and stage.rounding == "operand":
            return "operand"
        multiplied = self.mistake in ("factor", *SCALED) and self.stage in MULTIPLIED
        if multiplied and not (self.parts or self.rows):
            return "value-factor"
        some = blocks or (self.rows and self.stage not in FORWARD_STAGES)
        if self.mistake.startswith(("last", "first")) or (self.mistake == "gone" and some):
            # of whole rows, in all they enter; a factor that is 1 instead loses no key
            if self.stage in ("b_lse", "b_weights", "delta") or stage.neutral == 1:
                return stage.cause
            if self.stage not in FORWARD_STAGES:
                return "grad-tail"
            return (
                "key-tail"
                if self.stage in BY_KEY or any("keys" in p for p in blocks)
                else "query-tail"
            )
        return stage.other if self.mistake in MOVED else stage.cause

    def made(self, x: Tensor, tile: Tile, memory: Memory) -> Tensor:
        """The stage's value with it."""
        if self.mistake in FACTORS:
            times = tile.cols.start // (tile.cols.stop - tile.cols.start)
            wrong = x * self.factor ** (times if self.mistake == "grows" else 1)
        elif self.mistake in SCALED:
            wrong = x * tile.scale ** SCALED[self.mistake][1]
        else:
            unit = LOG2_E if self.mistake in ROUNDINGS and self.stage in IN_BASE_2 else 1.0
            wrong = self._done(x * unit, memory) / unit
        for here in (*(PARTS[part][1](tile, x) for part in self.parts),
                     *(rows.here(self.stage, tile, x) for rows in self.rows)):  # fmt: skip
            wrong = torch.where(here, wrong, x) if isinstance(here, Tensor) else (
                wrong if here else x)  # fmt: skip
        return wrong

    def _done(self, x: Tensor, memory: Memory) -> Tensor:
        if self.mistake == "within":
            return x.clamp(-self.factor, self.factor)
        if self.mistake in FLUSHED:
            return torch.where(x.abs() < self.factor * _largest(x, self.mistake), 0.0, x)
        return MISTAKES[self.mistake][1](x, STAGES[self.stage].neutral, memory)


def _largest(x: Tensor, mistake: str) -> Tensor | float:
    """What smallness is measured by."""
    if mistake == "flush":
        return 1.0
    dims = (-1,) if mistake == "flush row" else (-1, -2)
    return x.nan_to_num(0.0, 0.0, 0.0).abs().amax(dims, keepdim=True)
