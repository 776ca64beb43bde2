"""The drawn half of the third set of operations' faults: stage × kind of mistake × region × dtype,
in an order that a seed says, by the second grid's tables of what is right and the kinds and regions
that it has not: E4M3, small values flushed, neighbors' values repeated; the first rows, every
fourth row, the last half of the columns.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import second_grid as second
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.second_kernels import e4m3
from torch import Tensor

KINDS = {**second.KINDS, "e4m3": "rounded codes", "flush": "limited missing rounded",
         "repeated": "neighbor"}  # fmt: skip
REGIONS = (*("everywhere",) * 3, "first_rows", "fourth_rows", "last_columns", "last_half")
ONE_FORMAT = ("quantize",)
"""Operations whose faults are of bf16 alone: they round to what an argument says."""
ONE_GRADIENT = {"embedding": "weight", "softmax": "input", "router": "logits", "sum": "input",
                "cross_entropy": "input", "rope": "input"}  # fmt: skip
"""Where a mistake in the incoming gradient is just as well one of the only gradient there is."""


def mistaken(kind: str, x: Tensor, bits: torch.Generator, name: str) -> Tensor:
    """What the stage gives by this kind of mistake."""
    if kind == "e4m3":
        size = x.abs().amax().clamp_min(1e-30) / 448
        return e4m3(x / size) * size
    if kind == "flush":
        return torch.where(x.abs() < x.abs().amax() * 2**-6, 0.0, x)
    if kind == "repeated":
        return x[..., torch.arange(x.shape[-1]) // 2 * 2]
    if kind == "factor":
        return x * 0.9375
    if kind in ("neighbor", "off_by_one"):
        return x.roll(-1, 0 if kind == "neighbor" else -1)
    return second.mistaken(kind, x, bits, name)


def faulty(op: str, name: str, kind: str, region: str) -> Any:
    bits = torch.Generator().manual_seed(0)

    def seam(stage: str, x: Tensor) -> Tensor:
        if stage != name:
            return x
        rows = torch.arange(x.shape[0]).view(-1, *(1,) * (x.ndim - 1))
        columns, wide = torch.arange(x.shape[-1]), x.shape[-1]
        here = {"everywhere": torch.tensor(True), "first_rows": rows < 8,
                "fourth_rows": rows % 4 == 3, "last_columns": columns >= wide // 16 * 16,
                "last_half": columns >= wide // 2}  # fmt: skip
        return torch.where(here[region], mistaken(kind, x, bits, name), x)

    return getattr(kernels, {"sum": "sum_rows"}.get(op, op))(seam)


def expected(op: str, name: str, kind: str, region: str) -> tuple[str, str]:
    """What, and where, by the tables; an end that a step leaves out is one of the result."""
    what = KINDS[kind].replace("coarser", "").split()
    if region.startswith("last") and kind in ("left_out", "tail", "factor", "clamp", "flush"):
        what.append("end")
    if op == "quantize":
        what = ["scale", "codes", *what]
    where = second.STAGES[op][name]
    if where and "end" in what and not name.startswith(("grad", "b_", "inner")):
        where += " output loss"
    if where and name.startswith("grad_"):
        where += " " + ONE_GRADIENT.get(op, "")
    return " ".join(what), where


def grid(seed: int = 20261123) -> list[tuple[str, str, str, str, str]]:
    """Operation, stage, kind, region and dtype of the whole grid, in the order of the seed."""
    chance = random.Random(seed)
    every = [
        (op, name, kind, region, "bfloat16" if op in ONE_FORMAT else
         chance.choices(("bfloat16", "float16", "float32"), (11, 5, 4))[0])
        for op, names in second.STAGES.items()
        for name, kind, region in itertools.product(names, KINDS, REGIONS)
    ]  # fmt: skip
    chance.shuffle(every)
    return every


def fault(op: str, name: str, kind: str, region: str, dtype: str) -> OperationFault:
    what, where = expected(op, name, kind, region)
    return OperationFault(op, "_".join((name, kind, region)), faulty(op, name, kind, region),
                          frozenset(what.split()), tuple(where.split()), dtype)  # fmt: skip


DRAWN: tuple[tuple[str, str, str, str, str], ...] = (
    ("router", "chosen", "toward_zero", "everywhere", "bfloat16"),
    ("geglu", "inner", "left_out", "everywhere", "float32"),
    ("cross_entropy", "lse", "e4m3", "last_columns", "float32"),
    ("adamw_step", "new", "repeated", "first_rows", "bfloat16"),
    ("adamw_step", "second", "low", "everywhere", "float16"),
    ("layer_norm", "mean", "neighbor", "last_columns", "float32"),
    ("linear", "products", "neighbor", "last_columns", "float32"),
    ("swiglu", "b_sigmoid", "low", "first_rows", "float16"),
    ("swiglu", "sigmoid", "off_by_one", "everywhere", "float32"),
    ("layer_norm", "mean", "neighbor", "fourth_rows", "bfloat16"),
    ("sum", "terms", "e4m3", "last_columns", "bfloat16"),
    ("linear_cross_entropy", "logits", "off_by_one", "first_rows", "bfloat16"),
    ("cross_entropy", "grad_input", "repeated", "last_half", "bfloat16"),
    ("linear_cross_entropy", "loss", "neighbor", "everywhere", "bfloat16"),
    ("softmax", "grad_output", "noise", "last_half", "float32"),
    ("sum", "grad_input", "flush", "everywhere", "bfloat16"),
    ("router", "grad_weights", "repeated", "last_columns", "bfloat16"),
    ("rms_norm", "b_normalized", "repeated", "last_half", "bfloat16"),
    ("embedding", "grad_output", "off_by_one", "everywhere", "bfloat16"),
    ("cross_entropy", "unit_gradient", "left_out", "everywhere", "bfloat16"),
    ("rope", "cos", "flush", "fourth_rows", "bfloat16"),
    ("rope", "output", "left_out", "everywhere", "float32"),
    ("geglu", "activated", "low", "first_rows", "float32"),
    ("router", "logits", "factor", "everywhere", "bfloat16"),
    ("rms_norm", "inverse_rms", "low", "last_columns", "float32"),
    ("embedding", "grad_output", "tail", "last_half", "float32"),
    ("swiglu", "grad_up", "e4m3", "last_columns", "float32"),
    ("linear_cross_entropy", "logits", "noise", "last_half", "float32"),
    ("sum", "output", "left_out", "everywhere", "bfloat16"),
    ("router", "grad_weights", "noise", "everywhere", "float32"),
)
FAULTS = [fault(*one) for one in DRAWN]
