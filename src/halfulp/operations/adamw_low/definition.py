"""Steps of AdamW on weights of 16 bits: from a float32 master, rounded stochastically, or with what
was lost carried along.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfulp.operations.operation_data import (
    Operand,
    Options,
    Output,
    Seam,
    Sizes,
    Tensors,
    whole,
)

SIGNATURE = (
    "adamw_low(param, grads, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay)"
)
OPERANDS = (
    Operand("param", "R C", differentiable=False),
    Operand("grads", "S R C", differentiable=False),  # of one step after the other
    Operand("exp_avg", "R C", dtype="float32", differentiable=False),
    Operand("exp_avg_sq", "R C", dtype="float32", differentiable=False),
)
_MOMENTS = tuple(Output(name, "R C", dtype="float32") for name in ("exp_avg", "exp_avg_sq"))
RETURNED = (Output("param", "R C"), *_MOMENTS)
RESULTS = (
    Output("update", "R C", dtype="float32"),  # what the parameters changed by over all steps
    # its means: near the exact ones where parameters are rounded independently
    Output("row_mean", "R", dtype="float32", rows=0),
    Output("column_mean", "C", dtype="float32", rows=0),
    *_MOMENTS,
)
SIZES = (
    Sizes.given(S=48, R=24, C=20),
    Sizes.given(S=160, R=32, C=32),
    Sizes.given(S=20, R=9, C=37),
)
OPTIONS: dict[str, Any] = {
    "step": 100,  # of the first gradient, counted from 1
    "lr": 2e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
}


def define(step: Seam, x: Tensors, o: Options, decoupled: bool = True) -> Tensors:
    """S steps; every parameter for itself. Adam's decay is not `decoupled`."""
    param, first, second = x["param"], x["exp_avg"], x["exp_avg_sq"]
    keep = 1 - decoupled * o["lr"] * o["weight_decay"]
    for number, grad in enumerate(x["grads"], o["step"]):
        grad = grad if decoupled else grad + o["weight_decay"] * param
        first = step("first", o["beta1"] * first + (1 - o["beta1"]) * grad)
        second = step(
            "second", o["beta2"] * second + (1 - o["beta2"]) * step("_squared", grad * grad)
        )
        mean = step("_mean", first / (1 - o["beta1"] ** number))
        size = step("_size", (second / (1 - o["beta2"] ** number)).sqrt() + o["eps"])
        move = step("move", o["lr"] * mean / size)
        param = step("stored", step("_decayed", param * keep) - move)
    update = step("returned", param) - x["param"]
    return {**_with_means(update), "exp_avg": first, "exp_avg_sq": second}


RELATED = {
    "weight_decay × param is added to grads, as Adam has it": (
        "option",
        partial(define, decoupled=False),
    )
}


def _as_torch(step: Seam, x: Tensors, o: Options) -> Tensors:
    """The same as torch.optim.AdamW has it, whose operators round once where two would twice."""
    param, first, second = x["param"], x["exp_avg"], x["exp_avg_sq"]
    for number, grad in enumerate(x["grads"], o["step"]):
        param = step("_decayed", param * (1 - o["lr"] * o["weight_decay"]))
        first = step("first", torch.lerp(first, grad, 1 - o["beta1"]))
        second = torch.addcmul(o["beta2"] * second, grad, grad, value=1 - o["beta2"])
        root = step("second", second).sqrt() / (1 - o["beta2"] ** number) ** 0.5
        size, rate = step("_size", root + o["eps"]), o["lr"] / (1 - o["beta1"] ** number)
        param = step("stored", torch.addcdiv(param, first, size, value=-rate))
    update = step("returned", param) - x["param"]
    return {**_with_means(update), "exp_avg": first, "exp_avg_sq": second}


EAGER = (define, _as_torch)


def _with_means(update: Tensor) -> Tensors:
    return {"update": update, "row_mean": update.mean(1), "column_mean": update.mean(0)}


def read(returned: Any, x: Tensors, _: Options) -> Tensors:
    """What the parameters changed by, and the two moments."""
    found = whole(returned, RETURNED)
    if found["param"].dtype != x["param"].dtype:
        raise ValueError(f"param of dtype {found['param'].dtype}: expected {x['param'].dtype}")
    # the change, not the weights: beside their size an update that is never applied would not show
    update = (found.pop("param").double() - x["param"].double()).float()
    return {**_with_means(update), **found}
