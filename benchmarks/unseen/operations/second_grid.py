"""The half of the second set of operations' faults that no taste chose: stage × kind of mistake ×
region, drawn by a seed as fifth_grid.py says; at most two of a stage, four of an operation
and four of a kind.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from benchmarks.unseen import OperationFault
from benchmarks.unseen.attention.fifth_kernel import cut
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.second_kernels import bf16
from torch import Tensor

# Of each operation the stages, and the words that say where each is.
STAGES = {
    "rms_norm": {
        "squares": "squares mean_square", "mean_square": "mean_square squares inverse_rms",
        "inverse_rms": "inverse_rms mean_square", "normalized": "normalized",
        "b_normalized": "normalized", "grad_output": "grad_output output weight",
        "grad_normalized": "grad_normalized normalized weighted",
        "inner_terms": "squares mean_square grad_input normalized inverse_rms",
        "inner": "squares mean_square grad_input normalized inverse_rms",
        "weight_terms": "weight", "grad_input": "grad_input", "grad_weight": "weight",
    },
    "layer_norm": {
        "mean": "mean", "centered": "centered", "squares": "squares variance",
        "variance": "variance squares deviation", "inverse_deviation": "deviation variance",
        "normalized": "normalized", "output": "output", "grad_output": "grad_output output",
        "grad_normalized": "grad_normalized normalized weighted", "grad_mean": "mean centered",
        "inner": "squares variance deviation normalized grad_input",
        "grad_input": "grad_input", "grad_weight": "weight", "grad_bias": "bias",
    },
    "softmax": {
        "maximum": "maximum shifted", "shifted": "shifted maximum", "terms": "terms",
        "row_sum": "row_sum", "weights": "weights output", "grad_output": "grad_output output",
        "inner_terms": "inner", "inner": "inner", "grad_input": "grad_input input",
    },
    "cross_entropy": {
        "maximum": "maximum shifted lse", "shifted": "shifted", "terms": "terms row_sum summed",
        "row_sum": "row_sum lse summed", "lse": "lse", "own": "own", "loss": "loss",
        "probabilities": "probabilities", "unit_gradient": "unit_gradient grad_input input",
        "grad_input": "grad_input input",
    },
    "linear_cross_entropy": {
        "logits": "logits", "grad_logits": "grad_logits logits", "loss": "loss",
        "weight_parts": "weight", "grad_input": "input", "grad_weight": "weight",
    },
    "swiglu": {
        "sigmoid": "sigmoid", "activated": "activated", "output": "output",
        "b_sigmoid": "sigmoid slope", "slope": "slope sigmoid gate", "grad_gate": "gate",
        "grad_up": "up", "grad_output": "grad_output output",
    },
    "geglu": {
        "inner": "inner", "below": "below activated", "activated": "activated",
        "output": "output", "slope": "slope gate below", "grad_gate": "gate", "grad_up": "up",
        "grad_output": "grad_output output",
    },
    "rope": {
        "frequency": "frequency angle base", "positions": "position angle",
        "angle": "angle position frequency", "cos": "cos", "sin": "sin", "output": "output",
        "grad_input": "input",
    },
    "linear": {
        "inputs": "input", "weights": "weight", "products": "products output",
        "output": "output products", "grad_output": "grad_output output products",
        "grad_input": "input", "grad_weight": "weight",
    },
    "embedding": {
        "rows": "rows output", "grad_output": "grad_output output rows", "grad_weight": "weight",
    },
    "sum": {"terms": "terms input", "output": "output terms", "grad_input": "input"},
    "router": {
        "logits": "logits", "maximum": "maximum", "powers": "powers",
        "row_sum": "row_sum powers", "probabilities": "chosen powers probabilities weights",
        "chosen": "chosen weights", "chosen_sum": "chosen_sum", "grad_weights": "weights chosen",
        "inner": "inner row_sum powers logits", "grad_logits": "logits",
    },
    "adamw_step": {
        "first": "first exp_avg mean", "second": "second exp_avg_sq",
        "square": "square second exp_avg_sq", "size": "size moved", "moved": "moved update size",
        "decayed": "decayed param weight_decay", "new": "new param update stored",
    },
    "quantize": {"amax": "", "scale": "", "scaled": "", "values": ""},
}  # fmt: skip
KINDS = {
    "low": "rounded coarser", "toward_zero": "rounded", "noise": "rounded random",
    "factor": "factor scale option", "left_out": "missing factor", "neighbor": "neighbor",
    "off_by_one": "neighbor exchanged", "tail": "end missing", "clamp": "limited",
}  # fmt: skip
REGIONS = ("everywhere", "everywhere", "everywhere", "last_rows", "odd_rows", "last_columns")


def mistaken(kind: str, x: Tensor, bits: torch.Generator, name: str) -> Tensor:
    """What the stage gives by this kind of mistake."""
    if kind == "low":
        return bf16(x)
    if kind == "toward_zero":
        return cut(x, 16)
    if kind == "noise":
        raw = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, generator=bits)
        return ((x.contiguous().view(torch.int32) + raw) & -65536).view(torch.float32)
    if kind == "factor":
        return x * 1.125
    if kind == "left_out":
        return torch.ones_like(x) if name in ("row_sum", "scale", "size") else torch.zeros_like(x)
    if kind == "neighbor":
        return x.roll(1, 0)
    if kind == "off_by_one":
        return x.roll(1, -1)
    if kind == "tail":
        whole = x.shape[-1] // 16 * 16 if x.shape[-1] % 16 else max(0, x.shape[-1] - 4)
        return torch.cat([x[..., :whole], torch.zeros_like(x[..., whole:])], -1)
    assert kind == "clamp"
    return x.clamp(-1, 1)


def faulty(op: str, name: str, kind: str, region: str) -> Any:
    bits = torch.Generator().manual_seed(0)

    def seam(stage: str, x: Tensor) -> Tensor:
        if stage != name:
            return x
        wrong = mistaken(kind, x, bits, name)
        rows = torch.arange(x.shape[0]).view(-1, *(1,) * (x.ndim - 1))
        columns = torch.arange(x.shape[-1])
        here = {"odd_rows": rows % 2 == 1, "last_rows": rows >= len(x) // 16 * 16,
                "last_columns": columns >= x.shape[-1] // 32 * 32}  # fmt: skip
        return torch.where(here[region], wrong, x) if region in here else wrong

    makers = {"sum": "sum_rows"}
    return getattr(kernels, makers.get(op, op))(seam)


def expected(op: str, name: str, kind: str, region: str) -> tuple[str, str]:
    """What, and where, by the tables."""
    what = [word for word in KINDS[kind].split() if word != "coarser"]
    if region.startswith("last") and kind in ("left_out", "tail", "factor", "clamp"):
        what.append("end")
    if op == "quantize":
        what = ["scale", "codes", *what]
    where = STAGES[op][name]
    if where and "end" in what and not name.startswith(("grad", "b_", "inner")):
        where += " output loss"  # an end that a step leaves out is one of the result
    return " ".join(what), where


def grid() -> list[tuple[str, str, str, str]]:
    """Operation, stage, kind and region of the whole grid, in the order of the seed."""
    every = [
        (op, name, kind, region)
        for op, names in STAGES.items()
        for name, kind, region in itertools.product(names, KINDS, REGIONS)
    ]
    random.Random(20261122).shuffle(every)
    return every


def fault(op: str, name: str, kind: str, region: str) -> OperationFault:
    what, where = expected(op, name, kind, region)
    return OperationFault(op, "_".join((name, kind, region)), faulty(op, name, kind, region),
                          frozenset(what.split()), tuple(where.split()))  # fmt: skip


DRAWN: tuple[tuple[str, str, str, str], ...] = (
    ("quantize", "values", "clamp", "last_rows"),
    ("cross_entropy", "lse", "tail", "everywhere"),
    ("cross_entropy", "shifted", "off_by_one", "last_columns"),
    ("rms_norm", "grad_output", "off_by_one", "everywhere"),
    ("quantize", "amax", "neighbor", "odd_rows"),
    ("router", "probabilities", "neighbor", "last_columns"),
    ("cross_entropy", "loss", "neighbor", "last_rows"),
    ("rms_norm", "grad_input", "neighbor", "everywhere"),
    ("sum", "grad_input", "left_out", "last_rows"),
    ("rms_norm", "weight_terms", "toward_zero", "odd_rows"),
    ("sum", "output", "toward_zero", "odd_rows"),
    ("softmax", "row_sum", "left_out", "everywhere"),
    ("adamw_step", "decayed", "off_by_one", "last_rows"),
    ("quantize", "amax", "clamp", "everywhere"),
    ("geglu", "grad_output", "left_out", "last_rows"),
    ("linear", "grad_input", "off_by_one", "everywhere"),
    ("rms_norm", "grad_input", "clamp", "everywhere"),
    ("router", "inner", "factor", "everywhere"),
    ("cross_entropy", "lse", "low", "everywhere"),
    ("geglu", "inner", "left_out", "last_columns"),
    ("rope", "positions", "tail", "everywhere"),
    ("router", "probabilities", "toward_zero", "last_columns"),
    ("swiglu", "activated", "factor", "everywhere"),
    ("rope", "frequency", "toward_zero", "everywhere"),
    ("geglu", "grad_gate", "clamp", "everywhere"),
    ("geglu", "output", "tail", "odd_rows"),
    ("adamw_step", "new", "tail", "everywhere"),
    ("layer_norm", "grad_input", "noise", "everywhere"),
    ("quantize", "values", "factor", "everywhere"),
    ("softmax", "shifted", "factor", "odd_rows"),
)
FAULTS = [fault(*one) for one in DRAWN]
