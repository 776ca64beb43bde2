"""Softmax of rows, as torch.nn.functional.softmax over the last dimension."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors
from halfulp.operations.seam import running_maximum, valued

SIGNATURE = "softmax(input, dim)"
OPERANDS = (Operand("input", "T V"),)
RESULTS = (Output("output", "T V"),)
SIZES = (Sizes.given(T=24, V=256), Sizes.given(T=8, V=4096), Sizes.given(T=33, V=250))


def define(step: Seam, x: Tensors, _: Options, block: int = 0) -> Tensors:
    """T rows of V scores; the gradient y ∘ (dy − Σ dy ∘ y) is taken from `kept`, as kernels do. The
    sum of some that run over a row in a `block` at a time is not rescaled to a new maximum.
    """
    rows = x["input"].detach()
    largest = step("_maximum", rows.amax(-1, keepdim=True))
    weights = step("weights", step("_shifted", rows - largest).exp())
    terms = weights * (largest - running_maximum(rows, block)).exp() if block else weights
    row_sum = step("row_sum", step("_row_sum_terms", terms).sum(-1, keepdim=True))
    kept = step("kept", weights * step("_reciprocal", 1 / row_sum))
    zero = (x["input"] - rows).nan_to_num()  # 0, whose gradient is that of the scores
    terms = step("terms", kept * zero)
    return {"output": valued(kept, kept + terms - kept * _inner(step, terms))}


def _inner(step: Seam, terms: Tensor) -> Tensor:
    """Σ, whose gradient is Σ dy ∘ y."""
    total = step("_inner", terms.sum(-1, keepdim=True))
    return step("_inner_terms", total.expand_as(terms))


def _quotient(step: Seam, x: Tensors, _: Options) -> Tensors:
    """exp(x − max) / Σ, whose gradient is autograd's, which passes through the maximum as well."""
    largest = step("_maximum", x["input"].max(-1, keepdim=True).values)
    weights = step("weights", step("_shifted", x["input"] - largest).exp())
    return {"output": weights / step("row_sum", weights.sum(-1, keepdim=True))}


def _of_lse(step: Seam, x: Tensors, _: Options) -> Tensors:
    """exp(x − lse)."""
    lse = step("_lse", torch.logsumexp(x["input"], -1, keepdim=True))
    return {"output": step("_log_probabilities", x["input"] - lse).exp()}


def _of_logarithms(step: Seam, x: Tensors, _: Options) -> Tensors:
    return {"output": step("_log_probabilities", torch.log_softmax(x["input"], -1)).exp()}


EAGER = (_quotient, _of_lse, _of_logarithms)


def _without_maximum(step: Seam, x: Tensors, _: Options) -> Tensors:
    weights = step("weights", x["input"].exp())
    return {"output": weights / step("row_sum", weights.sum(-1, keepdim=True))}


RELATED = {
    "no maximum is subtracted: weights overflow or vanish": ("maximum", _without_maximum)
} | {
    f"row_sum is not rescaled where the maximum rises from one block of {block} to another": (
        "term-missing",
        partial(define, block=block),
    )
    for block in (32, 64, 128)
}


def arguments(x: Tensors, _: Options) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As torch.nn.functional.softmax is called."""
    return (x["input"], -1), {}
