"""Tiled attention in float32, forward and backward, with one step done wrongly: in as many ways at
once as are asked for, along a dimension before all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.algorithms.backward import sum_groups
from halfulp.reconstruct.emulating import GRADIENTS
from halfulp.reconstruct.panel import Trial
from halfulp.reconstruct.slip_kinds import FORWARD_STAGES, JOINT, Memory, Slip, Tile

_TO_SCORES = frozenset({"query", "key", "key_value", "product", "scores"})
_TO_WEIGHTS = frozenset({"b_lse", "b_query", "b_key", "b_key_value", "b_scores", "b_exponent"})
_TO_DP = frozenset({"grad_out", "grad_out_in_dp", "every_grad_out", "b_value", "b_key_value"})
_TO_DELTA = _TO_WEIGHTS | _TO_DP | {"b_weights", "dp"}
_OF_QUERIES = ("dq_sum", "ds_in_dq", "key_in_dq", "dq")
_OF_KEYS = ("dv_sum", "dk_sum", "p_in_dv", "grad_out_in_dv", "ds_in_dk", "query_in_dk", "dk", "dv")


class Tiles(NamedTuple):
    """Widths of the blocks of queries and of keys; the last ones are filled up, or cut; δ is from
    dO and O, or from P and dP.
    """

    rows: int
    cols: int
    filled: bool = True
    from_weights: bool = False


USUAL = Tiles(64, 64)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Tiles of rows one after another, some of which no slip has reached."""
    most = max(parts, key=torch.Tensor.dim)
    ways = most.shape[:-4]
    return torch.cat([x.expand(*ways, *x.shape[-4:]) for x in parts], -2)


class Flow:
    """Tiled attention on one trial, with slips of at most one stage at a time."""

    def __init__(self, trial: Trial, tiles: Tiles) -> None:
        call = trial.call
        self.slips: Sequence[Slip] = ()
        self.stage = ""
        self.memory, self.kept = (
            dict[tuple[str, int], Memory](),
            dict[str, Tensor](),
        )  # what no slip reaches is computed once
        self.call, self.groups, self.from_weights = call, call.groups, tiles.from_weights
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

    def results(self, slips: Sequence[Slip] = ()) -> dict[str, Tensor]:
        """Those of the pass that the slips, of one stage, are made in, a way each; of both passes
        without any.
        """
        assert len({slip.stage for slip in slips}) <= 1
        self.slips, self.stage = slips, slips[0].stage if slips else ""
        self.memory.clear()
        if not slips or self.stage in FORWARD_STAGES:
            made = self.forward()
            if slips:
                return made
            self.lse, self.out = made["lse"], made["out"]
            self.delta = self._delta(self.do)
            return made | self.backward()
        return self.backward()

    def once(self, key: str, reached: frozenset[str], make: Callable[[], Tensor]) -> Tensor:
        """What is the same as without a slip where none of these stages has one."""
        if self.stage in reached:
            return make()
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def at(self, name: str, x: Tensor, rows: slice, cols: slice | None = None) -> Tensor:
        """A stage's value, with the slips where that is theirs."""
        if not self.stage or self.stage not in (name, JOINT.get(name)):
            return x
        cols = slice(0, self.nk) if cols is None else cols
        tile = Tile(rows, cols, self.n, self.nk, self.call.scale)
        ways = x.expand(len(self.slips), *x.shape[-4:])
        return torch.stack([
            slip.made(way, tile, self.memory.setdefault((name, i), {}))
            for i, (slip, way) in enumerate(zip(self.slips, ways, strict=True))
        ])  # fmt: skip

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
        exponent = self.scores(q, k, rows, cols, "b_") - lse[..., rows, :]
        return torch.exp(self.at("b_exponent", exponent, rows, cols))

    def _read(
        self, acc: Tensor, m: Tensor, l: Tensor, rows: slice, cols: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """O, m and l as a tile takes them up; where O is kept divided it is multiplied by l."""
        for stage in ("statistics", "divided_statistics"):
            if self.stage == stage:
                read, sum_ = self.at(stage, torch.cat([m, l], -1), rows, cols).chunk(2, -1)
                if stage.startswith("divided"):
                    acc = acc * sum_ / torch.where(l == 0, 1.0, l)
                return acc, read, sum_
        return acc, m, l

    def forward(self) -> dict[str, Tensor]:
        """O and lse."""
        outs, lses = [], []
        for r in self.rows:
            q = self.at("query", self.q[:, :, r], r)
            m, l = q.new_full((*q.shape[:-1], 1), -math.inf), q.new_zeros((*q.shape[:-1], 1))
            acc = q.new_zeros((*q.shape[:-1], self.v.shape[3]))
            if self.call.sinks is not None:
                m, l = m.fill_(0) + self.call.sinks.float().view(1, -1, 1, 1), l + 1
            for c in self.cols:
                if self.call.sees.hides(r, c):
                    continue
                v = self.at("value", self.v[:, :, c], r, c)
                s = self.once(f"S {r.start} {c.start}", _TO_SCORES, partial(self._seen, q, r, c))
                acc, m, l = self._read(acc, m, l, r, c)
                new = self.at("row_max", torch.maximum(m, s.amax(-1, keepdim=True)), r, c)
                safe = torch.where(new == -math.inf, 0.0, new)
                p = self.at("weights", torch.exp(self.at("exponent", s - safe, r, c)), r, c)
                a = self.at("rescale", torch.exp(m - safe), r, c)
                l = l * self.at("rescale_sum", a, r, c) + p.sum(-1, keepdim=True)
                l, m = self.at("row_sum", l, r, c), new
                p = self.at("weights_in_out", p, r, c)
                acc = self.at("accumulator", acc * self.at("rescale_out", a, r, c) + p @ v, r, c)
                if self.stage == "divided_out":
                    some = torch.where(l == 0, 1.0, l)
                    acc = self.at("divided_out", acc / some, r, c) * some
            outs.append(self.at("out", acc / torch.where(l == 0, 1.0, l), r))
            lses.append(self.at("lse", m + l.log(), r))
        out, lse = (_joined(x)[..., : self.n, :] for x in (outs, lses))
        return {"out": out, "lse": lse}

    def _pairs(self, lse: Tensor, r: slice, c: slice) -> tuple[Tensor, ...]:
        """Q, K, dO, P and dP of one tile of the backward pass."""
        q, do = (self.at(n, x[:, :, r], r, c)
                 for n, x in (("b_query", self.q), ("grad_out", self.do)))  # fmt: skip
        k, v = (self.at(n, x[:, :, c], r, c)
                for n, x in (("b_key", self.k), ("b_value", self.v)))  # fmt: skip
        tile = f"{r.start} {c.start}"
        p = self.once(f"P {tile}", _TO_WEIGHTS, partial(self._again, q, k, lse, r, c))
        own = self.at("grad_out_in_dp", do, r, c)
        dp = self.once(f"dP {tile}", _TO_DP, partial(torch.matmul, own, v.mT))
        return q, k, do, self.at("b_weights", p, r, c), self.at("dp", dp, r, c)

    def _more(self, lse: Tensor, r: slice) -> Tensor:
        """What slips add to rowsum(P ∘ dP) of some queries."""
        made: list[Tensor | int] = []
        stage = self.stage
        for self.stage in ("", stage):
            seen = [c for c in self.cols if not self.call.sees.hides(r, c)]
            pairs = (self._pairs(lse, r, c)[3:] for c in seen)
            made.append(sum((p * dp).sum(-1, keepdim=True) for p, dp in pairs))
        more = made[1] - made[0]
        assert isinstance(more, Tensor)
        return more

    def _delta(self, grad_out: Tensor) -> Tensor:
        return (grad_out[..., : self.n, :] * self.out).sum(-1, keepdim=True)

    def backward(self) -> dict[str, Tensor]:
        """The gradients."""
        missing, delta = (0, 0, 0, self.rows[-1].stop - self.n), self.delta
        if self.stage == "every_grad_out" and not self.from_weights:
            made = [self.at("grad_out", self.do[:, :, r], r) for r in self.rows]
            delta = self._delta(_joined(made))
            self.memory.clear()
        delta = functional.pad(self.at("delta", delta, slice(0, self.n)), missing)
        lse = functional.pad(self.lse, missing, value=math.inf)
        lse = _joined([self.at("b_lse", lse[:, :, r], r) for r in self.rows])
        lse = torch.where(lse == -math.inf, 0.0, lse)
        if self.from_weights and self.stage in _TO_DELTA:
            delta = delta + _joined([self._more(lse, r) for r in self.rows])
        of_tiles = zip(GRADIENTS, (self.q, self.k, self.v), (self.rows, self.cols, self.cols),
                       strict=True)  # fmt: skip
        sums = {n: {t.start: torch.zeros_like(x[:, :, t]) for t in some} for n, x, some in of_tiles}
        for by_key in (True, False):  # two kernels: tiles come in another order
            if self.stage in (_OF_QUERIES if by_key else _OF_KEYS):
                for name in GRADIENTS[1:] if by_key else GRADIENTS[:1]:
                    del sums[name]  # they are right
                continue
            pairs = [(r, c) for c in self.cols for r in self.rows] if by_key else [
                (r, c) for r in self.rows for c in self.cols]  # fmt: skip
            for r, c in pairs:
                if self.call.sees.hides(r, c):
                    continue
                q, k, do, p, dp = self._pairs(lse, r, c)
                ds = p * (dp - delta[..., r, :])
                if cap := self.call.softcap:
                    ds = ds * (1 - torch.tanh(q @ k.mT * self.call.scale / cap).square())
                ds = self.at("ds", ds, r, c)
                if by_key:
                    q = self.at("query_in_dk", q, r, c)
                    p, own = self.at("p_in_dv", p, r, c), self.at("ds_in_dk", ds, r, c)
                    do = self.at("grad_out_in_dv", do, r, c)
                    for name, part, stage in (("grad_value", p.mT @ do, "dv_sum"),
                                              ("grad_key", own.mT @ q, "dk_sum")):  # fmt: skip
                        tile = sums[name]
                        tile[c.start] = self.at(stage, tile[c.start] + part, r, c)
                else:
                    tile = sums["grad_query"]
                    ds, k = self.at("ds_in_dq", ds, r, c), self.at("key_in_dq", k, r, c)
                    tile[r.start] = self.at("dq_sum", tile[r.start] + ds @ k, r, c)
        return {name: self._stored(stage, list(sums[name].values()))
                for name, stage in zip(GRADIENTS, ("dq", "dk", "dv"), strict=True)
                if name in sums}  # fmt: skip

    def _stored(self, stage: str, tiles: list[Tensor]) -> Tensor:
        """A gradient, of the sums of its tiles."""
        tiles = tiles if stage == "dv" else [x * self.call.scale for x in tiles]
        if self.stage == stage:
            own, every = (self.rows, slice(0, self.nk)) if stage == "dq" else (
                self.cols, slice(0, self.n))  # fmt: skip
            where = ((t, every) if stage == "dq" else (every, t) for t in own)
            tiles = [self.at(stage, x, *at) for x, at in zip(tiles, where, strict=True)]
        x = _joined(tiles)
        if stage != "dq" and self.groups > 1:
            summed = sum_groups(x.flatten(0, -4), self.groups)
            x = summed.view(*x.shape[:-3], *summed.shape[1:])
        return x[..., : self.n if stage == "dq" else self.nk, :]
