"""One step of AdamW on float32 master weights (arXiv 1711.05101), as torch.optim.AdamW computes."""

from __future__ import annotations

from functools import partial
from typing import Any

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
    "adamw_step(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay)"
)
OPERANDS = (
    Operand("param", "N", dtype="float32", differentiable=False),
    Operand("grad", "N", differentiable=False),
    Operand("exp_avg", "N", dtype="float32", differentiable=False),
    Operand("exp_avg_sq", "N", dtype="float32", differentiable=False),
)
RETURNED = tuple(Output(name, "N", dtype="float32") for name in ("param", "exp_avg", "exp_avg_sq"))
RESULTS = (Output("update", "N", dtype="float32"), *RETURNED[1:])  # what the parameter changed by
SIZES = (Sizes.given(N=512), Sizes.given(N=4096), Sizes.given(N=333))
OPTIONS: dict[str, Any] = {
    "step": 10,  # of this step, counted from 1
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
}


def define(step: Seam, x: Tensors, o: Options, decoupled: bool = True) -> Tensors:
    """N parameters, none of which sees another; Adam's decay is not `decoupled`."""
    param, grad = x["param"], step("_grad", x["grad"])
    grad = grad if decoupled else grad + o["weight_decay"] * param
    first = step("first", x["exp_avg"] * o["beta1"]) + step("new", grad * (1 - o["beta1"]))
    second = step("second", x["exp_avg_sq"] * o["beta2"])
    second = second + step("square", step("_squared", grad * grad) * (1 - o["beta2"]))
    mean = step("_mean", first / (1 - o["beta1"] ** o["step"]))
    size = step("_size", (second / (1 - o["beta2"] ** o["step"])).sqrt() + o["eps"])
    decayed = step("decayed", step("_param", param) * (1 - decoupled * o["lr"] * o["weight_decay"]))
    stored = step("_stored", decayed - step("moved", o["lr"] * mean / size))
    update = stored - param
    return {"update": update, "exp_avg": first, "exp_avg_sq": second}


def _ahead(step: Seam, x: Tensors, o: Options) -> Tensors:
    """The mean as NAdam has it, one step on."""
    keep, part = o["beta1"], (1 - o["beta1"]) / (1 - o["beta1"] ** o["step"])

    def on(name: str, exact: Tensor) -> Tensor:
        return step(name, keep * exact + part * x["grad"] if name == "_mean" else exact)

    return define(on, x, o)


def _of_the_largest(step: Seam, x: Tensors, o: Options) -> Tensors:
    """The size as AMSGrad has it, which never becomes smaller."""
    before = (x["exp_avg_sq"] / (1 - o["beta2"] ** o["step"])).sqrt() + o["eps"]

    def held(name: str, exact: Tensor) -> Tensor:
        return step(name, exact.maximum(before) if name == "_size" else exact)

    return define(held, x, o)


RELATED = {
    "weight_decay × param is added to grad, as Adam has it": (
        "option",
        partial(define, decoupled=False),
    ),
    "mean has beta1 × itself and (1 − beta1) × grad in its place, as NAdam has it": (
        "term-missing",
        _ahead,
    ),
    "size is at least that of exp_avg_sq before the step, as AMSGrad has it": (
        "limited",
        _of_the_largest,
    ),
}


def read(returned: Any, x: Tensors, _: Options) -> Tensors:
    """What the parameter changed by, and the two moments."""
    found = whole(returned, RETURNED)
    # the change, not the parameters: beside their size the error of an update would not show
    update = (found.pop("param").double() - x["param"].double()).float()
    return {"update": update, **found}
