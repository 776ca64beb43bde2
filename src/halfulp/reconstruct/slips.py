"""One step of tiled attention done wrongly: stage x mistake x tiles, each computed on the dataflow
itself, and held against what the kernel gave.

A slip is data: where it is made (`STAGES`), what is done there (`MISTAKES`), in which tiles or
numbers (`PARTS`). What it does to the results is the difference of two runs in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.reconstruct.emulating import FORWARD, GRADIENTS, Emulator, Twist
from halfulp.reconstruct.panel import Trial, simplicity
from halfulp.reconstruct.regions import Region


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
    "delta": Stage("δ", "no-delta", "no-delta"),
    "b_query": Stage("Q of the backward pass", "backward-scores", "other-data"),
    "b_key": Stage("K of the backward pass", "backward-scores", "other-data"),
    "b_value": Stage("V in dP", "no-delta", "other-data"),
    "grad_out": Stage("dO", "grad-scale", "other-data"),
    "b_scores": Stage("S of the backward pass", "backward-scores", "backward-scores", -math.inf),
    "b_weights": Stage("P of the backward pass", "backward-weights", "backward-weights"),
    "dp": Stage("dP", "grad-scores", "grad-scores"),
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
_RESULTS = {"out", "dq", "dk", "dv"}
_OTHERS = {name for name in MISTAKES if name.startswith(("head", "batch"))}
_MOVED = _OTHERS | {"row-1", "row+1", "stale"}
_SQUARED = {"rescale", "rescale_out", "rescale_sum", "weights", "product"}


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
FITS = 3  # steps towards the factor that explains most
NEAR = 8  # slips that point where the error does, which are tried in parts of the tiles
_SIFTED = {"last1", "last8", "last16", *(f"within{c:g}" for c in _WITHIN[3:])}
"""Mistakes that are tried where one like them is near."""
EXCHANGED = 0.2  # share that another head's data may leave of what some heads err
MANY = 24  # heads, and
LARGEST = 200_000  # pairs of queries and keys of a trial on which slips are looked for
DONE = 0.05  # share left: no part is looked for


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
        did = f"is {self.factor:.4g} × what it should be" if self.mistake == "factor" else (
            MISTAKES[self.mistake][0])  # fmt: skip
        return f"{STAGES[self.stage].text} {did}{PARTS[self.part][0]}"

    @property
    def cause(self) -> str:
        """A key of CAUSES."""
        if self.mistake == "gone" and self.stage in _RESULTS:
            return "unwritten"
        stage = STAGES[self.stage]
        if self.mistake.startswith(("last", "first")) or (
            self.mistake == "gone" and self.part.endswith(("keys", "rows"))):  # fmt: skip
            if self.stage not in FORWARD_STAGES:
                return "grad-tail"
            return "key-tail" if self.stage in BY_KEY or "keys" in self.part else "query-tail"
        return stage.other if self.mistake in _MOVED else stage.cause

    def made(self, x: Tensor, tile: Tile, memory: Memory) -> Tensor:
        """The stage's value with it."""
        if self.mistake == "factor":
            wrong = x * self.factor
        else:
            wrong = MISTAKES[self.mistake][1](x, STAGES[self.stage].neutral, memory)
        here = PARTS[self.part][1](tile, x)
        return torch.where(here, wrong, x) if isinstance(here, Tensor) else wrong if here else x


_TO_SCORES = frozenset({"query", "key", "product", "scores"})
_TO_WEIGHTS = frozenset({"b_query", "b_key", "b_scores"})
_TO_DP = frozenset({"grad_out", "b_value"})
_OF_QUERIES = ("dq_sum", "ds_in_dq", "dq")
_OF_KEYS = ("dv_sum", "dk_sum", "p_in_dv", "ds_in_dk", "dk", "dv")


class Tiles(NamedTuple):
    """Widths of the blocks of queries and of keys; the last ones are filled up, or cut."""

    rows: int
    cols: int
    filled: bool = True


USUAL = Tiles(64, 64)


class Flow:
    """Tiled attention on one trial, with at most one slip at a time."""

    def __init__(self, trial: Trial, tiles: Tiles) -> None:
        call = trial.call
        self.slip: Slip | None = None
        self.memory, self.kept = Memory(), Memory()  # what no slip reaches is computed once
        self.call, self.groups = call, call.groups
        self.n, self.nk = call.query.shape[2], call.key.shape[2]
        self.rows, self.cols = (
            [slice(i, i + w if tiles.filled else min(i + w, n)) for i in range(0, n, w)]
            for n, w in ((self.n, tiles.rows), (self.nk, tiles.cols))
        )
        self.q, self.do = (self._filled(x, self.rows) for x in (call.query, trial.grad_out))
        self.k, self.v = (
            self._filled(x.repeat_interleave(call.groups, 1), self.cols) for x in call.operands[1:]
        )
        n, nk = self.rows[-1].stop, self.cols[-1].stop
        hidden = torch.zeros(1, 1, self.n, self.nk)
        hidden = call.sees.apply(hidden, slice(0, self.n), slice(0, self.nk), 1.0)
        self.added = functional.pad(hidden, (0, nk - self.nk), value=-math.inf)
        self.added = functional.pad(self.added, (0, 0, 0, n - self.n))

    def _filled(self, x: Tensor, tiles: list[slice]) -> Tensor:
        return functional.pad(x.float(), (0, 0, 0, tiles[-1].stop - x.shape[2]))

    def results(self, slip: Slip | None) -> dict[str, Tensor]:
        """Those of the pass that the slip is made in; all without one."""
        self.slip = slip
        self.memory.clear()
        if slip is None or slip.stage in FORWARD_STAGES:
            made = self.forward()
            if slip is not None:
                return made
            self.lse, self.delta = made["lse"], (self.do[:, :, : self.n] * made["out"]).sum(
                -1, keepdim=True)  # fmt: skip
            return made | self.backward()
        return self.backward()

    def once(self, key: str, reached: frozenset[str], make: Callable[[], Tensor]) -> Tensor:
        """What is the same as without a slip where none of these stages has one."""
        if self.slip is not None and self.slip.stage in reached:
            return make()
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def at(self, name: str, x: Tensor, rows: slice, cols: slice | None = None) -> Tensor:
        """A stage's value, with the slip where that is it."""
        if self.slip is None or self.slip.stage != name:
            return x
        cols = slice(0, self.nk) if cols is None else cols
        return self.slip.made(x, Tile(rows, cols, self.n, self.nk), self.memory)

    def scores(self, q: Tensor, k: Tensor, rows: slice, cols: slice, back: str) -> Tensor:
        """Of one tile."""
        s, cap = q @ k.mT, self.call.softcap
        s = s if back else self.at("product", s, rows, cols)
        s = s * self.call.scale
        s = self.at(f"{back}scores", cap * torch.tanh(s / cap) if cap else s, rows, cols)
        return s + self.added[:, :, rows, cols]

    def _seen(self, q: Tensor, rows: slice, cols: slice) -> Tensor:
        key = self.at("key", self.k[:, :, cols], rows, cols)
        return self.scores(q, key, rows, cols, "")

    def _again(self, q: Tensor, k: Tensor, lse: Tensor, rows: slice, cols: slice) -> Tensor:
        return torch.exp(self.scores(q, k, rows, cols, "b_") - lse[:, :, rows])

    def forward(self) -> dict[str, Tensor]:
        """O and lse."""
        outs, lses = [], []
        for r in self.rows:
            q = self.at("query", self.q[:, :, r], r)
            m, l = q.new_full((*q.shape[:3], 1), -math.inf), q.new_zeros((*q.shape[:3], 1))
            acc = q.new_zeros((*q.shape[:3], self.v.shape[3]))
            if self.call.sinks is not None:
                m, l = m.fill_(0) + self.call.sinks.float().view(1, -1, 1, 1), l + 1
            for c in self.cols:
                if self.call.sees.hides(r, c):
                    continue
                v = self.at("value", self.v[:, :, c], r, c)
                s = self.once(f"S {r.start} {c.start}", _TO_SCORES, partial(self._seen, q, r, c))
                new = self.at("row_max", torch.maximum(m, s.amax(-1, keepdim=True)), r, c)
                safe = torch.where(new == -math.inf, 0.0, new)
                p = self.at("weights", torch.exp(s - safe), r, c)
                a = self.at("rescale", torch.exp(m - safe), r, c)
                l = l * self.at("rescale_sum", a, r, c) + p.sum(-1, keepdim=True)
                l, m = self.at("row_sum", l, r, c), new
                acc = self.at("accumulator", acc * self.at("rescale_out", a, r, c) + p @ v, r, c)
            outs.append(self.at("out", acc / torch.where(l == 0, 1.0, l), r))
            lses.append(self.at("lse", m + l.log(), r))
        out, lse = (torch.cat(x, 2)[:, :, : self.n] for x in (outs, lses))
        return {"out": out, "lse": lse}

    def backward(self) -> dict[str, Tensor]:
        """The gradients."""
        missing = (0, 0, 0, self.rows[-1].stop - self.n)
        delta = functional.pad(self.at("delta", self.delta, slice(0, self.n)), missing)
        lse = torch.where(self.lse == -math.inf, 0.0, self.lse)
        lse = functional.pad(lse, missing, value=math.inf)
        total = {name: torch.zeros_like(x) for name, x in zip(
            GRADIENTS, (self.q, self.k, self.v), strict=True)}  # fmt: skip
        wants = "" if self.slip is None else self.slip.stage
        for by_key in (True, False):  # two kernels: tiles come in another order
            if wants in (_OF_QUERIES if by_key else _OF_KEYS):
                for name in GRADIENTS[1:] if by_key else GRADIENTS[:1]:
                    del total[name]  # they are right
                continue
            pairs = [(r, c) for c in self.cols for r in self.rows] if by_key else [
                (r, c) for r in self.rows for c in self.cols]  # fmt: skip
            for r, c in pairs:
                if self.call.sees.hides(r, c):
                    continue
                q, do = (self.at(n, x[:, :, r], r, c)
                         for n, x in (("b_query", self.q), ("grad_out", self.do)))  # fmt: skip
                k, v = (self.at(n, x[:, :, c], r, c)
                        for n, x in (("b_key", self.k), ("b_value", self.v)))  # fmt: skip
                tile = f"{r.start} {c.start}"
                p = self.once(f"P {tile}", _TO_WEIGHTS, partial(self._again, q, k, lse, r, c))
                p = self.at("b_weights", p, r, c)
                dp = self.once(f"dP {tile}", _TO_DP, partial(torch.matmul, do, v.mT))
                dp = self.at("dp", dp, r, c)
                ds = p * (dp - delta[:, :, r])
                if cap := self.call.softcap:
                    ds = ds * (1 - torch.tanh(q @ k.mT * self.call.scale / cap).square())
                ds = self.at("ds", ds, r, c)
                if by_key:
                    p, own = self.at("p_in_dv", p, r, c), self.at("ds_in_dk", ds, r, c)
                    for name, part, stage in (("grad_value", p.mT @ do, "dv_sum"),
                                              ("grad_key", own.mT @ q, "dk_sum")):  # fmt: skip
                        x = total[name][:, :, c]
                        x.copy_(self.at(stage, x + part, r, c))
                else:
                    x = total["grad_query"][:, :, r]
                    x.copy_(self.at("dq_sum", x + self.at("ds_in_dq", ds, r, c) @ k, r, c))
            self.memory.clear()
        for name, stage in zip(GRADIENTS, ("dq", "dk", "dv"), strict=True):
            if name not in total:
                continue
            x = total[name]
            x = x if stage == "dv" else x * self.call.scale
            if wants == stage:
                tiles = ([(t, slice(0, self.nk)) for t in self.rows] if stage == "dq" else
                         [(slice(0, self.n), t) for t in self.cols])  # fmt: skip
                x = torch.cat([self.at(stage, x[:, :, t[stage != "dq"]], *t) for t in tiles], 2)
            if stage != "dq" and self.groups > 1:
                x = x.reshape(x.shape[0], -1, self.groups, *x.shape[2:]).sum(2)
            total[name] = x[:, :, : self.n if stage == "dq" else self.nk]
        return total


@lru_cache(maxsize=24)
def _right(trial: Trial, tiles: Tiles) -> tuple[Flow, dict[str, Tensor]]:
    flow = Flow(trial, tiles)
    return flow, flow.results(None)


@lru_cache(maxsize=256)
def _moved(trial: Trial, tiles: Tiles, slip: Slip) -> dict[str, Tensor]:
    """What a slip adds to the results of its own pass."""
    flow, right = _right(trial, tiles)
    made = flow.results(slip)
    moved = {name: (x - right[name]).nan_to_num(0.0, 0.0, 0.0) for name, x in made.items()}
    return moved | ({"lse": moved["lse"].squeeze(-1)} if "lse" in moved else {})


def as_twist(slip: Slip, tiles: Tiles, region: Region | None = None) -> Twist:
    """The slip as a candidate of the search, in some heads alone."""

    def turn(trial: Trial) -> Trial | None:
        return replace(trial) if region is None or trial.name in region.heads else None

    def back(trial: Trial, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        moved = {n: x for n, x in _moved(trial, tiles, slip).items() if n in tensors}
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
            if mistake in _SIFTED or (mistake == "squared" and stage not in _SQUARED):
                continue
            if others and mistake not in _OTHERS:
                continue
            yield Slip(stage, mistake)


def tells(trial: Trial) -> bool:
    """Whether a trial is small enough for hundreds of runs."""
    b, h, n = trial.call.query.shape[:3]
    return b * h <= MANY and b * h * n * trial.call.key.shape[2] <= LARGEST


def likeliest(
    emulator: Emulator,
    trial: Trial,
    tensors: frozenset[str],
    tiles: Tiles,
    region: Region | None = None,
) -> list[Held]:
    """The slips that explain most of these results' errors on a trial, the best first."""
    seen = {n: o for n in tensors if (o := emulator.observed.get((trial.name, n))) is not None}
    if region is not None:
        seen = {n: o.within(_mask(region, trial, o.value)) for n, o in seen.items()}
    seen = {n: o for n, o in seen.items() if o.total > 4 * o.floor}
    if not seen:
        return []
    weight = {n: 1 / max(float(o.exact.square().sum()), 1e-300) for n, o in seen.items()}
    total = sum(o.total * weight[n] for n, o in seen.items())
    weight = {n: w / total for n, w in weight.items()}
    stages = FORWARD_STAGES if tensors & {"out", "lse"} else tuple(STAGES)[len(FORWARD_STAGES) :]

    def held(slip: Slip) -> Held:
        moved = _moved.__wrapped__(trial, tiles, slip)
        along = size = 0.0
        for name, o in seen.items():
            if name not in moved:
                continue
            x = moved[name].double()
            x = torch.where(o.usable, x.unsqueeze(-1) if x.ndim == 3 else x, 0.0)
            error = torch.where(o.usable, o.value - o.exact, 0.0)
            along += float((x * error).sum()) * weight[name]
            size += float(x.square().sum()) * weight[name]
        least = 1 - (along * along / size if size else 0.0)
        return Held(1 - 2 * along + size, least, along / size if size else 0.0, slip)

    def fitted(slip: Slip) -> Held:
        """With the factor that fits best."""
        best = held(replace(slip, factor=1.25))
        for _ in range(FITS):
            factor = 1 + (best.slip.factor - 1) * max(-4.0, min(4.0, best.times))
            best = min(best, held(replace(slip, factor=factor)))
        return best

    def order(h: Held) -> tuple[float, int]:
        """Of those that explain alike the one nearest to the result."""
        return round(h.left, 3), -list(STAGES).index(h.slip.stage)

    every = [held(slip) for slip in _slips(trial, stages, region is not None)]
    if region is None:
        first = [held(Slip(stage, "factor", factor=1.25)) for stage in stages]
        every += [fitted(h.slip) for h in sorted(first, key=lambda h: h.least)[:6]]
    best, near = sorted(every, key=order)[:6], sorted(every, key=lambda h: h.least)[:NEAR]
    if region is None and best[0].left > DONE:
        for slip in dict.fromkeys(h.slip for h in near):
            kind = slip.mistake.rstrip("0123456789.")
            like = [replace(slip, mistake=m) for m in _SIFTED if m.startswith(kind)]
            parts = [replace(slip, part=part) for part in PARTS if part]
            best += map(fitted if slip.mistake == "factor" else held, (*like, *parts))
    return sorted(best, key=order)[:6]


class Held(NamedTuple):
    """A slip held against errors: the shares that it leaves, that its best multiple leaves, and
    that multiple.
    """

    left: float
    least: float
    times: float
    slip: Slip


def of_others(emulator: Emulator, region: Region, tiles: Tiles) -> Twist | None:
    """What heads that alone are wrong take from others, where that explains them."""
    some = [n for n in region.heads if tells(emulator.trials[n])]
    for name in sorted(some, key=simplicity)[:2]:
        for tensors in (frozenset(FORWARD), frozenset(GRADIENTS)):
            found = likeliest(emulator, emulator.trials[name], tensors, tiles, region)
            if found and found[0].left < EXCHANGED:
                return as_twist(found[0].slip, tiles, region)
    return None
