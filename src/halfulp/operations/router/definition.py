"""A router of experts: the k largest of a softmax and their weights (Mixtral, arXiv 2401.04088)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from halfulp.formats import BF16, FP16, Format, round_to
from halfulp.operations.operation_data import (
    Operand,
    Options,
    Output,
    Seam,
    Sizes,
    Tensors,
    whole,
)

SIGNATURE = "router(logits, k, *, renormalize)"
OPERANDS = (Operand("logits", "T E"),)
RETURNED = (Output("weights", "T K", dtype="float"), Output("indices", "T K", dtype="int64"))
RESULTS = (
    RETURNED[0],  # in the order of the logits that were chosen, the largest first
    # by how much the logits of the chosen experts fall short of the k largest: 0
    Output("shortfall", "T", dtype="float32", differentiable=False, rows=1),
)
SIZES = (
    Sizes.given(T=32, E=16, K=2),
    Sizes.given(T=64, E=64, K=2),
    Sizes.given(T=33, E=9, K=2),
)
OPTIONS: dict[str, Any] = {"k": 2, "renormalize": True}


def define(
    step: Seam,
    x: Tensors,
    options: Options,
    low: Format | None = None,
    sigmoid: bool = False,
) -> Tensors:
    """T tokens, E experts, the K best of which are chosen; among probabilities that are `low`, with
    weights of a `sigmoid`, as other routers do.
    """
    logits, exact = step("_logits", x["logits"]), x["logits"].detach()
    scores = logits.detach() if low is None else round_to(logits.detach().softmax(-1), low)
    scores = scores.float().sigmoid() if sigmoid else scores  # of which large ones are all 1
    chosen = step("_choice", scores).topk(options["k"], -1).indices
    # experts may be named in any order: that of their logits
    picked, order = exact.gather(-1, chosen).sort(dim=-1, descending=True, stable=True)
    chosen = chosen.gather(-1, order)
    largest = step("_maximum", logits.detach().amax(-1, keepdim=True))
    powers = step("powers", (logits - largest).exp())
    weights = step(
        "weights", powers / step("row_sum", step("_row_sum_terms", powers).sum(-1, keepdim=True))
    )
    weights = (logits.sigmoid() if sigmoid else weights).gather(-1, chosen)
    if options["renormalize"]:
        weights = weights / step("chosen_sum", weights.sum(-1, keepdim=True))
    best = exact.topk(options["k"], -1).values
    return {"weights": weights, "shortfall": best.sum(-1) - picked.sum(-1)}


def _chosen_first(step: Seam, x: Tensors, options: Options) -> Tensors:
    """A softmax of the chosen logits alone, where its sum would divide it."""
    logits, exact = x["logits"], x["logits"].detach()
    chosen = step("_choice", logits.detach()).topk(options["k"], -1).indices
    if options["renormalize"]:
        weights = torch.softmax(logits.gather(-1, chosen), -1)
    else:
        weights = torch.softmax(logits, -1).gather(-1, chosen)
    best = exact.topk(options["k"], -1).values
    short = best.sum(-1) - exact.gather(-1, chosen).sum(-1)
    return {"weights": step("weights", weights), "shortfall": short}


EAGER = (define, _chosen_first)
RELATED = {
    f"the choice is made among probabilities that are rounded to {fmt}": (
        "step-low",
        partial(define, low=fmt),
    )
    for fmt in (BF16, FP16)
} | {"weights are of a sigmoid, not of a softmax": ("term-missing", partial(define, sigmoid=True))}


def arguments(x: Tensors, options: Options) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As halfulp's signature says; torch has no such function."""
    return (x["logits"], options["k"]), {"renormalize": options["renormalize"]}


def read(returned: Any, x: Tensors, options: Options) -> Tensors:
    """The weights in the order of their experts' logits, and what the choice falls short by."""
    found = whole(returned, RETURNED)
    logits, indices, experts = x["logits"].double(), found["indices"].long(), x["logits"].shape[-1]
    if indices.shape != found["weights"].shape or not bool(
        ((indices >= 0) & (indices < experts)).all()
    ):
        raise ValueError(f"indices of shape {tuple(indices.shape)} that name no {experts} experts")
    picked = logits.gather(-1, indices)
    # experts may be named in any order: golden's is that of their logits
    order = picked.sort(dim=-1, descending=True, stable=True).indices
    best = logits.topk(options["k"], -1).values.sum(-1)
    shortfall = (best - picked.sum(-1)).float()
    return {"weights": found["weights"].gather(-1, order), "shortfall": shortfall}
