"""The drawn half of the sixth set: stage × kind of mistake × region × way to write the kernel, in
an order that a seed says, by the fifth grid's tables of what is right (`fifth_grid`) and
the kinds and regions that it has not: 8-bit codes by rows, small values flushed, heads exchanged in
pairs; odd rows, the upper half of the columns.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fifth_grid as fifth
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.attention.sixth_kernel import STYLES
from torch import Tensor

STAGES = {
    **fifth.STAGES,
    "normalized": ("weights-normalized weights probabilities backward-weights",
                   "weights-normalized unnormalized weights-disagree backward-weights"),
}  # fmt: skip
TILED = ("rescale", "accumulator", "lse", "b_scores", "dk_acc", "dv_acc", "dq_acc")
ROUNDINGS = (*fifth.ROUNDINGS, "codes", "flush")
KINDS = {
    **fifth.KINDS, "codes": "", "flush": "tiles-skipped underflow",
    "exchanged": "other-data layout key-heads group-sum",
}  # fmt: skip
REGIONS = (*("everywhere",) * 3, "last_block", "first_block", "odd_heads", "later_sequences",
           "odd_rows", "upper_half")  # fmt: skip
PLACES = {**fifth.PLACES, "odd_rows": "other-data layout", "upper_half": "other-data layout"}


def mistaken(name: str, kind: str, x: Tensor, memory: dict[str, Any], dtype: str) -> Tensor:
    """What the stage gives by this kind of mistake."""
    if kind == "codes":
        size = x.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return (x / size).round() * size
    if kind == "flush":
        most = x.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True)
        return torch.where(x.abs() < most * 2**-8, 0.0, x)
    if kind == "exchanged":
        heads = torch.arange(x.shape[1])
        return x[:, (heads ^ 1).clamp_max(x.shape[1] - 1)]
    if kind == "factor":
        return x * (0.9375 if name in ("rescale", "row_sum") else 0.875)
    return fifth.mistaken(name, kind, x, memory, dtype)


def faulty(name: str, kind: str, region: str, way: str, dtype: str) -> type[Kernel]:
    """The kernel with that mistake."""
    by_key = name in fifth.BY_KEY

    def here(x: Tensor, own: slice, last: int) -> Tensor:
        b, h, i = (torch.arange(x.shape[d]).view([-1 if d == e else 1 for e in range(4)])
                   for d in range(3))  # fmt: skip
        wide = x.shape[-1]
        where = {
            "everywhere": torch.tensor(True), "last_block": torch.tensor(own.stop >= last),
            "first_block": torch.tensor(own.start == 0), "odd_heads": h % 2 == 1,
            "later_sequences": b >= 1, "odd_rows": i % 2 == 1,
            "upper_half": torch.arange(wide) >= (wide // 2 if wide > 1 else 1),
        }  # fmt: skip
        return where[region]

    class Faulty(STYLES[way]):  # type: ignore[misc]
        def seam(self, at: str, x: Tensor, rows: slice, cols: slice | None = None) -> Tensor:
            if at != name:
                return x
            own = cols if cols is not None and name != "dq_acc" else rows
            last = self.at.nk if by_key or cols is not None else self.at.n
            return torch.where(here(x, own, last), mistaken(name, kind, x, self.memory, dtype), x)

    Faulty.__name__ = "_".join((name, kind, region, way))
    return Faulty


def expected(name: str, kind: str, region: str) -> str:
    """The causes that are right, by the tables: a rounding's are those of its step, wherever it
    is; a gross mistake's are its step's, its kind's and its place's.
    """
    rounding, gross = STAGES[name]
    if kind in ROUNDINGS:
        return f"{rounding} {KINDS[kind]}" if kind != "flush" else f"{rounding} {gross} underflow"
    back = [*STAGES].index(name) >= [*STAGES].index("b_q") and name != "normalized"
    ends = "grad-tail" if back else "key-tail" if name in fifth.BY_KEY else "query-tail key-tail"
    parts = [gross, KINDS[kind], PLACES.get(region, "")]
    if kind in ("left_out", "tail") or region.endswith("block"):
        parts.append(ends)
    if kind == "clamp":
        parts.append(rounding)
    return " ".join(parts)


def grid(seed: int = 20261123) -> list[tuple[str, str, str, str, str]]:
    """Stage, kind, region, way and dtype of the whole grid, in the order of the seed."""
    chance = random.Random(seed)
    every = [
        (name, kind, region, chance.choices([*STYLES], (2, 1, 1))[0],
         chance.choices(("bfloat16", "float16", "float32"), (11, 5, 4))[0])
        for name, kind, region in itertools.product(STAGES, KINDS, REGIONS)
        if (kind != "sums_low" or name in fifth.SUMS) and kind != "mask"
    ]  # fmt: skip
    chance.shuffle(every)
    return [one for one in every
            if not (one[3] == "kept" and one[0] in TILED)
            and not (one[3] != "kept" and one[0] == "normalized")]  # fmt: skip


def fault(name: str, kind: str, region: str, way: str, dtype: str) -> Fault:
    return Fault("_".join((name, kind, region, way)),
                 frozenset(expected(name, kind, region).split()),
                 attention(faulty(name, kind, region, way, dtype)), dtype,
                 frozenset({"elements"}))  # fmt: skip


DRAWN: tuple[tuple[str, str, str, str, str], ...] = (
    ("do", "neighbor", "later_sequences", "kept", "float16"),
    ("out", "codes", "everywhere", "divided", "bfloat16"),
    ("out", "clamp", "odd_heads", "tiles", "float16"),
    ("b_q", "stale", "everywhere", "tiles", "bfloat16"),
    ("accumulator", "tail", "odd_heads", "tiles", "float16"),
    ("lse", "factor", "odd_rows", "tiles", "float16"),
    ("product", "stale", "later_sequences", "tiles", "bfloat16"),
    ("scores", "left_out", "odd_heads", "tiles", "float16"),
    ("row_sum", "exchanged", "odd_heads", "tiles", "bfloat16"),
    ("dp", "codes", "first_block", "tiles", "bfloat16"),
    ("b_scores", "flush", "odd_heads", "tiles", "bfloat16"),
    ("v", "neighbor", "later_sequences", "tiles", "bfloat16"),
    ("dv_acc", "flush", "everywhere", "tiles", "bfloat16"),
    ("v", "neighbor", "everywhere", "divided", "bfloat16"),
    ("dp", "noise", "odd_rows", "kept", "float16"),
    ("scores", "factor", "first_block", "tiles", "bfloat16"),
    ("b_v", "codes", "upper_half", "kept", "float16"),
    ("ds", "clamp", "everywhere", "kept", "bfloat16"),
    ("q", "flush", "everywhere", "tiles", "float16"),
    ("b_scores", "codes", "first_block", "tiles", "bfloat16"),
    ("accumulator", "noise", "odd_rows", "divided", "bfloat16"),
    ("b_weights", "stale", "first_block", "tiles", "float32"),
    ("row_sum", "neighbor", "odd_heads", "kept", "bfloat16"),
    ("weights", "tail", "odd_heads", "kept", "float16"),
    ("b_k", "stale", "everywhere", "divided", "float32"),
    ("b_weights", "left_out", "everywhere", "tiles", "bfloat16"),
    ("product", "flush", "upper_half", "divided", "float16"),
    ("dv", "off_by_one", "last_block", "kept", "bfloat16"),
    ("b_k", "noise", "odd_rows", "tiles", "float16"),
    ("b_v", "low", "odd_rows", "kept", "bfloat16"),
)
FAULTS = [fault(*one) for one in DRAWN]
