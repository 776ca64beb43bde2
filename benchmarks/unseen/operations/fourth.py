"""The fourth set of faults of operations, small: mistakes as in common kinds of kernel, and ten
drawn from the third set's grid by another seed. What is right was set down before anything ran.
All err more than 1.5 × their sound twin
(`python -m benchmarks.unseen.draw operations.fourth --check`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations import third_grid as grid
from benchmarks.unseen.operations.third_kernels import adamw, at, variant

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []


def fault(op: str, name: str, fn: Any, what: str, where: str, dtype: str = "bfloat16") -> None:
    FAULTS.append(OperationFault(op, name, fn, frozenset(what.split()), tuple(where.split()),
                                 dtype))  # fmt: skip


def sound(op: str, name: str, fn: Any, dtype: str = "bfloat16") -> None:
    SOUND.append(OperationFault(op, name, fn, frozenset(), (), dtype))


def step_from_zero(param, grad, exp_avg, exp_avg_sq, *, step, **options):
    """Bias correction by the step before; the first step's is right."""
    return adamw(param, grad, exp_avg, exp_avg_sq, step=max(step - 1, 1), **options)


def neighbors_moment(param, grad, exp_avg, exp_avg_sq, **options):
    """The second moment of the next parameter."""
    p, _, _ = adamw(param, grad, exp_avg, exp_avg_sq.roll(-1, 0), **options)
    return (p, *adamw(param, grad, exp_avg, exp_avg_sq, **options)[1:])


def eps_in_the_root(param, grad, exp_avg, exp_avg_sq, **options):
    return adamw(param, grad, exp_avg, exp_avg_sq, **options,
                 size=lambda v, two, eps: (v / two + eps).sqrt())  # fmt: skip


def last_added(shape, index, dy):
    """Each token stores its gradient; the last of a row's tokens stays."""
    dw = torch.zeros(shape)
    for i, row in zip(index.tolist(), dy, strict=True):
        dw[i] = row
    return dw


def unbiased(x):
    return x.var(-1, keepdim=True)


fault("adamw_step", "correction_a_step_behind", step_from_zero, "option factor exchanged missing",
      "step first second update size moved", "float32")  # fmt: skip
fault("adamw_step", "second_moment_of_the_next", neighbors_moment, "neighbor exchanged",
      "second exp_avg_sq size update", "float32")  # fmt: skip
fault("adamw_step", "eps_in_the_root", eps_in_the_root, "option exchanged missing factor",
      "eps size second update moved", "float32")  # fmt: skip
fault("embedding", "last_token_overwrites", kernels.embedding(total=last_added),
      "missing summed exchanged", "weight rows")  # fmt: skip
fault("layer_norm", "variance_by_n_minus_1", kernels.layer_norm(spread=unbiased),
      "factor exchanged option", "variance squares deviation", "float32")  # fmt: skip
fault("layer_norm", "dx_without_the_mean",
      kernels.layer_norm(dx=lambda wdy, normal, r: r * (wdy - normal * (wdy * normal).mean(
          -1, keepdim=True))), "missing", "mean centered grad_input")  # fmt: skip
fault("rms_norm", "dx_without_its_sum", kernels.rms_norm(at("inner", torch.zeros_like)), "missing",
      "squares mean_square grad_input normalized inverse_rms")  # fmt: skip
fault("softmax", "sum_of_even_lanes",
      kernels.softmax(row_sum=lambda terms, m: 2 * terms[..., ::2].sum(-1, keepdim=True)),  # noqa: ARG005
      "missing factor summed exchanged neighbor", "row_sum", "float16")  # fmt: skip
fault("cross_entropy", "penalty_of_log2",
      variant(penalty=lambda z: z / math.log(2) ** 2), "option factor exchanged",
      "lse_square_scale lse loss", "float32")  # fmt: skip
fault("linear_cross_entropy", "chunks_overwrite_dw", kernels.linear_cross_entropy(forget=True),
      "missing summed", "weight")  # fmt: skip
fault("rope", "frequencies_by_half_the_width",
      kernels.rope(frequency=lambda base, width: base ** (
          -torch.arange(0, width, 2).double() / (width - 2))), "factor exchanged option",
      "frequency angle base")  # fmt: skip
fault("swiglu", "slope_at_most_1", kernels.swiglu(at("slope", lambda s: s.clamp_max(1))),
      "limited", "slope sigmoid gate")  # fmt: skip

DRAWN: tuple[tuple[str, str, str, str, str], ...] = (
    ("router", "logits", "left_out", "everywhere", "float32"),
    ("rope", "sin", "toward_zero", "last_half", "bfloat16"),
    ("rms_norm", "normalized", "toward_zero", "last_columns", "bfloat16"),
    ("adamw_step", "new", "off_by_one", "everywhere", "float32"),
    ("softmax", "inner_terms", "repeated", "everywhere", "bfloat16"),
    ("swiglu", "grad_up", "repeated", "first_rows", "bfloat16"),
    ("linear", "weights", "factor", "everywhere", "float16"),
    ("rope", "cos", "flush", "first_rows", "bfloat16"),
    ("rms_norm", "mean_square", "clamp", "fourth_rows", "float32"),
    ("swiglu", "activated", "clamp", "everywhere", "float32"),
)
FAULTS += [grid.fault(*one) for one in DRAWN]


sound("rms_norm", "by_hand", kernels.rms_norm(), "float16")
sound("layer_norm", "by_hand", kernels.layer_norm())
sound("cross_entropy", "modules_fp16", variant(), "float16")
sound("rope", "by_hand", kernels.rope())
