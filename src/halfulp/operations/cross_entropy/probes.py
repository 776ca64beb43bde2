"""Inputs that expose what goes wrong in cross-entropy."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import apart, normal, odd_sizes, rows_apart, with_

INDEPENDENT = ("T",)


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    t, v = sizes["T"], sizes["V"]
    return {
        "input": normal(g, t, v),
        "target": torch.randint(v, (t,), generator=g),
        "grad_loss": normal(g, t).abs() + 0.5,
    }


def _sure(sizes: Sizes, g: torch.Generator) -> Tensors:
    """The right token has nearly all the mass: p − 1 cancels."""
    x = _plain(sizes, g)
    x["input"].scatter_(1, x["target"][:, None], 11.0)
    return x


def _wrong(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Another token has nearly all the mass: a large loss."""
    x = _plain(sizes, g)
    x["input"].scatter_(1, (x["target"][:, None] + 1) % sizes["V"], 40.0)
    return x


def _ignored(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["target"][1::3] = -100
    return x


def _padded(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["target"][1::3] = 0
    return x


def _edges(sizes: Sizes, g: torch.Generator) -> Tensors:
    """The first and the last token of the vocabulary."""
    x = _plain(sizes, g)
    x["target"] = torch.arange(sizes["T"]) % 2 * (sizes["V"] - 1)
    return x


PROBES = (
    Probe("gaussian", "errors that any input shows", "torch.nn.functional.cross_entropy", _plain),
    Probe(
        "large_logits",
        "log-probabilities in low precision",
        "marin PR 8217 (error grows from 1.2 % to 85.8 % with the logits)",
        with_(_plain, input=lambda x: x * 12),
    ),
    Probe(
        "shifted_logits",
        "logits that are not shifted by their maximum",
        "marin PR 8217 (error grows with the logits)",
        with_(_plain, input=lambda x: x + 200.0),
    ),
    rows_apart(with_(_plain, input=apart)),
    Probe(
        "very_negative",
        "a maximum that begins at 0",
        "flash-attention issue 2082",
        with_(_plain, input=lambda x: x - 200.0),
    ),
    Probe(
        "large_vocabulary",
        "a sum over the vocabulary in low precision, or over a part of it",
        "triton PR 3408 in Meta's fork (row sums too coarse)",
        with_(_plain, input=lambda x: x * 0.3),
        sizes={"T": 1, "V": 32805},
    ),
    Probe("sure", "p − 1 where p is near 1", "jax PR 40128 (rounded before it cancels)", _sure),
    Probe("wrong", "a large loss", "label noise", _wrong),
    Probe("ignored", "tokens that do not count", "torch.nn.functional, ignore_index", _ignored),
    Probe(
        "ignored_mean",
        "a mean over all tokens instead of those that count",
        "torch.nn.functional, ignore_index and reduction",
        _ignored,
        options={"reduction": "mean"},
    ),
    Probe(
        "ignored_zero",
        "−100 left out whatever was asked for",
        "torch.nn.functional, ignore_index: a tokenizer's padding",
        _padded,
        options={"ignore_index": 0},
    ),
    Probe("edges", "the first and the last token", "an offset by one", _edges),
    Probe(
        "smoothing",
        "label smoothing in one pass alone, or of tokens that do not count",
        "torch.nn.functional, label_smoothing; Liger-Kernel PR 198",
        _ignored,
        options={"label_smoothing": 0.1},
    ),
    Probe(
        "smoothing_alone",
        "the many small probabilities, which the right token's −1 hides",
        "marin PR 8217 (error grows with the logits)",
        _plain,
        options={"label_smoothing": 1.0},
        sizes={"T": 8, "V": 2048},
    ),
    Probe(
        "small_vocabulary",
        "a share that counts one class too few",
        "torch.nn.functional, label_smoothing (1 / V of it, the right class included)",
        _plain,
        options={"label_smoothing": 0.1},
        sizes={"V": 5},
    ),
    Probe(
        "z_loss",
        "the gradient of z-loss, of tokens that do not count too",
        "PaLM, arXiv 2204.02311; Liger-Kernel's lse_square_scale",
        _ignored,
        options={"lse_square_scale": 1e-2},
    ),
    odd_sizes(_plain, "rows and a vocabulary that are no multiples of a block", V=77),
)
