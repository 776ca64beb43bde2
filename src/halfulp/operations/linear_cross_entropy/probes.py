"""Inputs that expose what goes wrong in a loss that is fused with its linear layer."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import apart, normal, odd_sizes, rows_apart, with_

INDEPENDENT = ("T",)


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    t, k, v = sizes["T"], sizes["K"], sizes["V"]
    return {
        "input": normal(g, t, k),
        "weight": normal(g, v, k) / k**0.5,
        "target": torch.randint(v, (t,), generator=g),
        "grad_loss": normal(g, t).abs() + 0.5,
    }


def _sure(sizes: Sizes, g: torch.Generator) -> Tensors:
    """The right token has nearly all the mass: p − 1 cancels."""
    x = _plain(sizes, g)
    x["input"] += 11.0 * x["weight"][x["target"]]
    return x


def _one_target(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Tokens that are alike and have one target: their shares of dW have one sign."""
    x = _plain(sizes, g)
    x["input"] = x["input"].abs()
    x["target"] = torch.zeros_like(x["target"])
    return x


def _ignored(sizes: Sizes, g: torch.Generator) -> Tensors:
    """More of the first tokens than of the last, whose losses are smaller."""
    x = _plain(sizes, g)
    half = sizes["T"] // 2
    x["input"][: half + 4] *= 4
    x["target"][:half], x["target"][2::5] = -100, -100
    return x


def _padded(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["target"][1::3] = 0
    return x


def _apart(sizes: Sizes, g: torch.Generator) -> Tensors:
    """A feature that the whole vocabulary weighs alike lifts a row's logits, or lowers them."""
    x = _plain(sizes, g)
    x["weight"][:, 0] = 1.0
    x["input"][:, :1] = apart(torch.zeros(sizes["T"], 1))
    return x


_CHUNKS = "Liger-Kernel, chunks of tokens summed in the weight's dtype"

PROBES = (
    Probe("gaussian", "errors that any input shows", "F.linear_cross_entropy", _plain),
    rows_apart(_apart),
    Probe(
        "large_logits",
        "log-probabilities in low precision",
        "marin PR 8217 (error grows from 1.2 % to 85.8 % with the logits)",
        with_(_plain, weight=lambda x: x * 12),
    ),
    Probe(
        "shifted_logits",
        "logits that are not shifted by their maximum",
        "marin PR 8217 (error grows with the logits)",
        with_(_plain, input=lambda x: x.abs() + 4, weight=lambda x: x + 40 / x.shape[1]),
    ),
    Probe(
        "very_negative",
        "a maximum that begins at 0",
        "flash-attention issue 2082",
        with_(_plain, input=lambda x: x.abs() + 4, weight=lambda x: x - 40 / x.shape[1]),
    ),
    Probe("sure", "p − 1 where p is near 1", "jax PR 40128 (rounded before it cancels)", _sure),
    Probe(
        "many_tokens",
        "dW summed over chunks of tokens in low precision",
        _CHUNKS,
        _one_target,
        sizes={"T": 1024, "K": 16, "V": 32},
    ),
    Probe(
        "large_vocabulary",
        "sums over the vocabulary in low precision, or over a part of it",
        "triton PR 3408 in Meta's fork (row sums too coarse)",
        with_(_plain, weight=lambda x: x * 0.3),
        sizes={"T": 4, "K": 16, "V": 4096},
    ),
    Probe("ignored", "tokens that do not count", "torch.nn.functional, ignore_index", _ignored),
    Probe(
        "ignored_zero",
        "−100 left out whatever was asked for",
        "torch.nn.functional, ignore_index: a tokenizer's padding",
        _padded,
        options={"ignore_index": 0},
    ),
    Probe(
        "ignored_mean",
        "a mean over all tokens, or over the means of chunks",
        "torch.nn.functional, ignore_index and reduction",
        _ignored,
        options={"reduction": "mean"},
    ),
    Probe(
        "mean",
        "gradients that are divided by many tokens before they are kept",
        "TransformerEngine PR 3281 (finite output, zero gradients)",
        _plain,
        options={"reduction": "mean"},
        sizes={"T": 512, "K": 32, "V": 64},
    ),
    Probe(
        "sum",
        "a gradient that is taken as 1",
        "Liger-Kernel, the gradient kept from the forward pass",
        _plain,
        options={"reduction": "sum"},
    ),
    Probe(
        "smoothing",
        "label smoothing in one pass alone, or of tokens that do not count",
        "torch.nn.functional, label_smoothing; Liger-Kernel PR 198",
        _ignored,
        options={"label_smoothing": 0.1},
        sizes={"V": 5},
    ),
    odd_sizes(_plain, "what lies past the last whole chunk or block", K=33, V=77),
)
