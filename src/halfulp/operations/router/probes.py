"""Inputs that expose what goes wrong in a router."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import apart, normal, rows_apart, with_

INDEPENDENT = ("T",)
TIES = False


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Logits that bf16 tells apart: eighths, each expert its own in a row."""
    t, e = sizes["T"], sizes["E"]
    ranks = torch.stack([torch.randperm(e, generator=g) for _ in range(t)])
    return {"logits": (ranks - e / 2) / 8, "grad_weights": normal(g, t, sizes["K"])}


def _near_ties(sizes: Sizes, g: torch.Generator) -> Tensors:
    """The best that is not chosen lies one part in 128 below the last that is."""
    x = _plain(sizes, g)
    order = x["logits"].argsort(-1, descending=True)
    k = sizes["K"]
    # 2⁻⁶ is the ulp of bf16 from 2 to 4: different as operands, one in any coarser arithmetic
    close = torch.tensor([3.0 + 2.0**-6 * (k + 1 - i) for i in range(k + 1)])
    x["logits"].scatter_(1, order[:, : k + 1], close.expand(len(order), -1))
    return x


def _ties(sizes: Sizes, g: torch.Generator) -> Tensors:
    """The chosen experts have equal logits; what reaches their weights is equal too."""
    x = _plain(sizes, g)
    order = x["logits"].argsort(-1, descending=True)
    x["logits"].scatter_(1, order[:, : sizes["K"]], 4.0)
    x["grad_weights"] = x["grad_weights"][:, :1].expand(-1, sizes["K"]).clone()
    return x


def _one(sizes: Sizes, g: torch.Generator) -> Tensors:
    """A weight of 1, whatever the logits: its gradient, of which only rounding is left, is 0."""
    return _plain(sizes, g) | {"grad_weights": torch.zeros(sizes.shape("T K"))}


PROBES = (
    Probe("plain", "errors that any input shows", "Mixtral, arXiv 2401.04088", _plain),
    # whole numbers, which bf16 tells apart at 120
    rows_apart(with_(_plain, logits=lambda x: apart(x * 8))),
    Probe(
        "near_ties",
        "a choice made in low precision",
        "sglang 38695 (a logit difference of 2.6e-7 moved a benchmark by 12.6 points)",
        _near_ties,
    ),
    Probe(
        "near_ties_high",
        "a choice made in low precision, of large logits",
        "sglang 38695",
        with_(_near_ties, logits=lambda x: x * 4),
    ),
    Probe(
        "near_ties_low",
        "a choice made among rounded probabilities, which small logits hardly move",
        "sglang 38695",
        with_(_plain, logits=lambda x: x / 512),
        sizes={"T": 37},
    ),
    Probe("ties", "an expert chosen twice", "sglang 38695", _ties),
    Probe(
        "large",
        "logits that overflow unshifted",
        "flash-attention issue 2082",
        with_(_plain, logits=lambda x: x * 8 + 96),
    ),
    Probe(
        "negative",
        "a maximum that begins at 0",
        "flash-attention issue 2082",
        with_(_plain, logits=lambda x: x * 8 - 128),
    ),
    Probe(
        "sure",
        "one weight near 1",
        "load imbalance of trained routers",
        with_(_plain, logits=lambda x: x * 16),
    ),
    Probe(
        "raw",
        "weights that are renormalized unasked",
        "Qwen's norm_topk_prob",
        _plain,
        options={"renormalize": False},
    ),
    Probe(
        "one",
        "the weight of one expert, normalized over tokens",
        "megablocks PR 87",
        _one,
        sizes={"K": 1},
        options={"k": 1},
    ),
    Probe(
        "one_raw",
        "the weight of one expert, renormalized to 1 unasked",
        "minimind issue 858, megablocks PR 87",
        _plain,
        sizes={"K": 1},
        options={"k": 1, "renormalize": False},
    ),
    Probe(
        "raw_ties",
        "ties, not renormalized",
        "Qwen's norm_topk_prob",
        _ties,
        options={"renormalize": False},
    ),
    Probe(
        "many_experts",
        "a sum over experts in low precision",
        "DeepSeek-V3, arXiv 2412.19437 (256 experts)",
        with_(_plain, logits=lambda x: x / 8),
        sizes={"T": 8, "E": 128, "K": 8},
        options={"k": 8, "renormalize": False},
    ),
)
