"""The half of the fifth set that no taste chose: stage × kind of mistake × region, drawn by a seed.

`python -m benchmarks.unseen.draw` drew it: it goes through the whole grid in an order that a seed
says, takes at most two of a stage and four of a kind, and drops what errs no more than 1.5 × the
sound kernel on any of its inputs. Which causes are right follows from stage, kind and region by
the tables below, not from the fault.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, bf16, cut, e4m3
from torch import Tensor

# Of each stage: the causes of a rounding there, then those of a gross mistake there.
STAGES = {
    "q": ("operand prescaled", "scale other-data"),
    "k": ("operand prescaled", "scale other-data key-heads"),
    "v": ("operand", "unnormalized other-data key-heads"),
    "product": ("products scores", "scale"),
    "scores": ("scores row-max", "scale softcap"),
    "row_max": ("row-max", "maximum row-max rescale underflow"),
    "weights": ("weights exponential row-max", "weights-disagree lse-other exponential"),
    "rescale": ("rescale accumulator row-sum exponential", "rescale"),
    "row_sum": ("row-sum", "row-sum unnormalized weights-disagree lse-other"),
    "accumulator": ("accumulator", "accumulator unnormalized rescale weights-disagree"),
    "out": ("out reciprocal", "out reciprocal unnormalized"),
    "lse": ("lse backward-weights", "lse lse-other backward-weights"),
    "b_q": ("operand backward-scores", "backward-scores backward-weights grad-scale"),
    "b_k": ("operand backward-scores prescaled", "backward-scores backward-weights grad-scale"),
    "do": ("operand delta", "no-delta grad-scale delta"),
    "b_v": ("operand delta", "no-delta delta"),
    "delta": ("delta", "no-delta delta"),
    "b_scores": ("backward-scores", "backward-scores backward-weights"),
    "b_weights": ("backward-weights probabilities", "backward-weights probabilities"),
    "dp": ("delta grad-scores", "no-delta delta grad-scores"),
    "ds": ("grad-scores", "grad-scores grad-scale no-delta"),
    "dk_acc": ("grad-accumulator", "grad-accumulator grad-scale"),
    "dv_acc": ("grad-accumulator", "grad-accumulator grad-scale"),
    "dq_acc": ("grad-accumulator", "grad-accumulator grad-scale"),
    "dk": ("grad-stored", "grad-scale"),
    "dv": ("grad-stored", "grad-scale"),
    "dq": ("grad-stored", "grad-scale"),
}
ROUNDINGS = ("low", "toward_zero", "noise", "sums_low")
KINDS = {
    **dict.fromkeys(ROUNDINGS, ""),
    "factor": "",
    "left_out": "tiles-skipped unwritten",
    "neighbor": "other-data layout group-sum",
    "off_by_one": "other-data layout",
    "tail": "ragged",
    "stale": "other-data",
    "mask": "causal-mask mask",
    "clamp": "softcap",
}
REGIONS = ("everywhere", "everywhere", "last_block", "first_block", "odd_heads", "later_sequences")
PLACES = {"last_block": "ragged", "odd_heads": "other-data key-heads",
          "later_sequences": "other-data"}  # fmt: skip
OPERANDS = ("q", "k", "v", "do", "b_q", "b_k", "b_v", "out", "ds", "dq", "dk", "dv")
BY_KEY = ("k", "v", "b_k", "b_v", "dk", "dv", "dk_acc", "dv_acc")
SUMS = ("row_sum", "accumulator", "dq_acc", "dk_acc", "dv_acc")
FACTORS = {"q": 1.0625, "rescale": 0.9375, "row_sum": 1.125, "ds": 0.5, "delta": 0.75}
NEUTRAL = {"rescale": 1.0, "scores": -INF, "b_scores": -INF, "product": 0.0, "lse": INF}
LIMITS = {"weights": 0.5, "b_weights": 0.25, "rescale": 0.5, "row_sum": 64.0, "lse": 8.0}


def mistaken(name: str, kind: str, x: Tensor, memory: dict[str, Any], dtype: str) -> Tensor:
    """What the stage gives by this kind of mistake."""
    coarse = e4m3 if name in OPERANDS else bf16
    if kind in ("low", "sums_low"):
        return coarse(x)
    if kind == "toward_zero":
        return cut(x, 16 if dtype == "bfloat16" and name not in OPERANDS else
                   18 if dtype == "bfloat16" else 13)  # fmt: skip
    if kind == "noise":  # bf16 with random bits of the kernel's own
        bits = memory.setdefault("random", torch.Generator().manual_seed(0))
        return cut(x + (cut(x) - cut(x * (1 + 2**-7))).abs() * torch.rand(
            x.shape, generator=bits) * x.sign(), 16)  # fmt: skip
    if kind == "factor":
        return x * FACTORS.get(name, 1.25)
    if kind == "left_out":
        return torch.full_like(x, NEUTRAL.get(name, 0.0))
    if kind == "neighbor":
        return x.roll(1, 1)
    if kind == "off_by_one":
        return x.roll(1, 2)
    if kind == "tail":
        return torch.cat([x[:, :, :-4], torch.full_like(x[:, :, -4:], NEUTRAL.get(name, 0.0))], 2)
    if kind == "stale":
        before = memory.get(name, x)
        memory[name] = x
        return before if before.shape == x.shape else x
    assert kind == "clamp"
    limit = LIMITS.get(name, 2.0)
    return x.clamp(-limit, limit)


def faulty(name: str, kind: str, region: str, dtype: str) -> type[Kernel]:
    """The kernel with that mistake; `mask` hides what lies on the diagonal as well."""

    def here(x: Tensor, own: slice, last: int) -> Tensor:
        b = torch.arange(x.shape[0]).view(-1, 1, 1, 1)
        h = torch.arange(x.shape[1]).view(1, -1, 1, 1)
        every = {"everywhere": True, "last_block": own.stop >= last, "first_block": own.start == 0}
        where = {"odd_heads": h % 2 == 1, "later_sequences": b >= 1}
        return where[region] if region in where else torch.tensor(every[region])

    class Faulty(Kernel):
        def seam(self, at: str, x: Tensor, rows: slice, cols: slice | None = None) -> Tensor:
            if at != name or kind == "mask":
                return x
            by_key = name in BY_KEY or (cols is not None and name not in ("dq_acc",))
            own = cols if by_key and cols is not None else rows
            last = self.at.nk if by_key else self.at.n
            wrong = mistaken(name, kind, x, self.memory, dtype)
            return torch.where(here(x, own, last), wrong, x)

        def hide(self, s: Tensor, rows: slice, cols: slice, back: bool) -> Tensor:
            hidden = super().hide(s, rows, cols, back)
            if kind != "mask" or back != name.startswith("b_"):
                return hidden
            i = torch.arange(rows.start, rows.stop)[:, None]
            over = i == torch.arange(cols.start, cols.stop)[None]  # the diagonal too
            return torch.where(here(s, cols, self.at.nk) & over & (i > 0), -INF, hidden)

    Faulty.__name__ = "_".join((name, kind, region))
    return Faulty


def expected(name: str, kind: str, region: str) -> str:
    """The causes that are right, by the tables."""
    rounding, gross = STAGES[name]
    back = list(STAGES).index(name) >= list(STAGES).index("b_q")
    if kind in ROUNDINGS:
        return rounding
    if kind == "mask":
        return "backward-mask" if back else "causal-mask mask"
    ends = "grad-tail" if back else "key-tail" if name in BY_KEY else "query-tail key-tail"
    parts = [gross, KINDS[kind], PLACES.get(region, "")]
    if kind in ("left_out", "tail") or region.endswith("block"):
        parts.append(ends)
    if kind == "clamp":
        parts.append(rounding)
    return " ".join(parts)


def grid() -> list[tuple[str, str, str, str]]:
    """Stage, kind, region and dtype of the whole grid, in the order of the seed."""
    chance = random.Random(20261122)
    every = [
        (name, kind, region, chance.choices(("bfloat16", "float16", "float32"), (16, 3, 1))[0])
        for name, kind, region in itertools.product(STAGES, KINDS, REGIONS)
        if (kind != "sums_low" or name in SUMS) and (kind != "mask" or name.endswith("scores"))
    ]
    chance.shuffle(every)
    return every


def fault(name: str, kind: str, region: str, dtype: str) -> Fault:
    return Fault("_".join((name, kind, region)), frozenset(expected(name, kind, region).split()),
                 attention(faulty(name, kind, region, dtype)), dtype,
                 frozenset({"elements"}))  # fmt: skip


DRAWN: tuple[tuple[str, str, str, str], ...] = (
    ("do", "left_out", "later_sequences", "bfloat16"),
    ("dq_acc", "sums_low", "later_sequences", "float16"),
    ("b_q", "off_by_one", "everywhere", "float32"),
    ("b_k", "stale", "later_sequences", "bfloat16"),
    ("dv_acc", "toward_zero", "odd_heads", "bfloat16"),
    ("out", "left_out", "everywhere", "bfloat16"),
    ("row_max", "off_by_one", "last_block", "bfloat16"),
    ("dk_acc", "factor", "last_block", "float16"),
    ("out", "clamp", "last_block", "bfloat16"),
    ("weights", "stale", "later_sequences", "bfloat16"),
    ("do", "off_by_one", "odd_heads", "bfloat16"),
    ("dp", "noise", "first_block", "bfloat16"),
    ("dp", "toward_zero", "everywhere", "bfloat16"),
    ("delta", "off_by_one", "first_block", "bfloat16"),
    ("dq_acc", "stale", "later_sequences", "bfloat16"),
    ("product", "factor", "everywhere", "bfloat16"),
    ("rescale", "clamp", "everywhere", "bfloat16"),
    ("k", "low", "later_sequences", "float16"),
    ("dq", "clamp", "everywhere", "bfloat16"),
    ("dk", "toward_zero", "later_sequences", "bfloat16"),
    ("b_weights", "toward_zero", "everywhere", "bfloat16"),
    ("dv_acc", "neighbor", "first_block", "bfloat16"),
    ("b_weights", "noise", "everywhere", "bfloat16"),
    ("rescale", "stale", "everywhere", "float32"),
    ("dq", "left_out", "first_block", "float16"),
    ("scores", "low", "everywhere", "bfloat16"),
    ("delta", "neighbor", "everywhere", "bfloat16"),
    ("b_k", "neighbor", "later_sequences", "bfloat16"),
    ("dv", "left_out", "later_sequences", "bfloat16"),
    ("ds", "tail", "odd_heads", "bfloat16"),
)
FAULTS = [fault(*one) for one in DRAWN]
