"""Cross-entropy of logits, a loss a token, as torch.nn.functional.cross_entropy."""

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
from halfulp.operations.seam import running_maximum

SIGNATURE = (
    "cross_entropy(input, target, *, ignore_index, reduction, label_smoothing, lse_square_scale)"
)
OPERANDS = (
    Operand("input", "T V"),
    Operand("target", "T", dtype="int64", differentiable=False),
)
RESULTS = (Output("loss", "T", dtype="float", rows=1),)
SIZES = (Sizes.given(T=32, V=256), Sizes.given(T=12, V=8192), Sizes.given(T=33, V=250))
OPTIONS: dict[str, Any] = {
    "ignore_index": -100,
    "reduction": "none",
    "label_smoothing": 0.0,
    "lse_square_scale": 0.0,  # of z-loss: its square times this is added (PaLM, arXiv 2204.02311)
}


def define(
    step: Seam, x: Tensors, options: Options, squared: bool = True, block: int = 0
) -> Tensors:
    """T rows of V logits; the gradient of a loss is kept as `unit_gradient` until the loss's own
    gradient multiplies it, as fused kernels do. Some leave the lse of the z-loss un`squared`;
    of others the sum, which runs over a row in a `block` at a time, is not rescaled.
    """
    rows, target = x["input"].detach(), x["target"]
    smoothing, z_scale = options["label_smoothing"], options["lse_square_scale"]
    seen = target != options["ignore_index"]
    right = torch.where(seen, target, 0)[:, None]
    largest = step("_maximum", rows.amax(-1, keepdim=True))
    weights = step("weights", step("_shifted", rows - largest).exp())
    terms = weights * (largest - running_maximum(rows, block)).exp() if block else weights
    row_sum = step("row_sum", step("_row_sum_terms", terms).sum(-1, keepdim=True))
    log_sum = step("_log_sum", row_sum.log())
    whole = largest + log_sum
    kept = step("_lse", whole)  # of which kernels take the loss and the gradient
    lse = step("lse", kept)
    loss = (1 - smoothing) * step("own", lse - rows.gather(1, right))
    if smoothing:
        loss = loss + smoothing * step("others", lse - rows).mean(-1, keepdim=True)
    loss = (loss + z_scale * (lse * lse if squared else lse))[:, 0]
    # over the row sum, but with the errors of its logarithm and of the lse, as kernels have them
    # that keep these
    errors = (row_sum.log() - log_sum) + (whole - kept)
    p = step("_log_probabilities", (weights / row_sum).log() + errors).exp()
    p = step("_probabilities", p)
    wanted = torch.zeros_like(rows).scatter(1, right, 1 - smoothing) + smoothing / rows.shape[1]
    # ∂lse/∂x = p, so the square of lse adds 2 z · lse · p
    unit = p - wanted + (2 * z_scale * lse if squared else z_scale) * p
    count = (
        step("_count", seen.sum().clamp_min(1).to(rows)) if options["reduction"] == "mean" else 1
    )
    unit = step("unit_gradient", torch.where(seen[:, None], unit, 0.0) / count)
    zero = x["input"] - rows  # 0, whose gradient is that of the logits
    losses = torch.where(seen, loss, 0.0) / count + (unit * zero).sum(-1)
    if options["reduction"] != "none":
        losses = losses.sum().expand_as(losses)
    return {"loss": losses}


def _eager(step: Seam, x: Tensors, options: Options, logarithms: Any = None) -> Tensors:
    """From logarithms of probabilities, with autograd's gradient."""
    rows, target = x["input"], x["target"]
    smoothing, z_scale = options["label_smoothing"], options["lse_square_scale"]
    seen = target != options["ignore_index"]
    logs = step("_log_probabilities", logarithms(step, rows))
    loss = (smoothing - 1) * logs.gather(1, torch.where(seen, target, 0)[:, None])[:, 0]
    if smoothing:
        loss = loss - smoothing * logs.mean(-1)
    if z_scale:
        loss = loss + z_scale * torch.logsumexp(rows, -1).square()
    losses = torch.where(seen, loss, 0.0)
    if options["reduction"] != "none":
        losses = losses.sum().expand_as(losses)
    if options["reduction"] == "mean":
        losses = losses / seen.sum().clamp_min(1)
    return {"loss": losses}


def _less_lse(step: Seam, rows: Tensor) -> Tensor:
    return rows - step("lse", torch.logsumexp(rows, -1, keepdim=True))


def _of_probabilities(step: Seam, rows: Tensor) -> Tensor:
    return step("_probabilities", torch.softmax(rows, -1)).log()


EAGER = (
    define,
    partial(_eager, logarithms=lambda _, rows: torch.log_softmax(rows, -1)),
    partial(_eager, logarithms=_less_lse),
    partial(_eager, logarithms=_of_probabilities),
)


def _of_the_label(step: Seam, x: Tensors, options: Options) -> Tensors:
    """A smoothed loss whose uniform part has no gradient."""
    share, seen = options["label_smoothing"], x["target"] != options["ignore_index"]
    known: Tensors = {}

    def without(name: str, exact: Tensor) -> Tensor:
        known[name] = exact
        if name == "unit_gradient":
            uniform = share * (known["_probabilities"] - 1 / exact.shape[1])
            exact = exact - torch.where(seen[:, None], uniform, 0.0) / known.get("_count", 1)
        return step(name, exact)

    return define(without, x, options)


RELATED = {
    "unit_gradient is (1 − label_smoothing) times the label's, and has no uniform part": (
        "term-missing",
        _of_the_label,
    ),
    "lse stands in place of its square in the z-loss": (
        "term-missing",
        partial(define, squared=False),
    ),
} | {
    f"row_sum is not rescaled where the maximum rises from one block of {block} to another": (
        "term-missing",
        partial(define, block=block),
    )
    for block in (32, 64, 128)
}


def read(returned: Any, x: Tensors, options: Options) -> Tensors:
    """A loss a token; the mean and the sum stand for every token."""
    found = whole(returned, RESULTS)
    if found["loss"].ndim == 0:
        if options["reduction"] == "none":
            raise ValueError(
                "one loss where reduction='none' asks for one a token; of a function that has a"
                " mean alone, say reduction: Literal['mean'] = 'mean', and every probe asks"
                " for it"
            )
        found["loss"] = found["loss"].expand(x["target"].shape)
    return found
