"""Inputs that expose what goes wrong in softmax."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import apart, normal, odd_sizes, rows_apart, with_

INDEPENDENT = ("T",)


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    return {"input": normal(g, sizes["T"], sizes["V"])}


def _ties(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["input"][:, 1:3] = 8.0
    return x


def _one_hot(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["input"][:, sizes["V"] // 3] += 12.0
    return x


def _constant_gradient(sizes: Sizes, g: torch.Generator) -> Tensors:
    """dy nearly constant over a row: Σ dy ∘ y, which is subtracted, takes nearly all of it."""
    x = _plain(sizes, g)
    x["grad_output"] = 1 + 0.05 * normal(g, sizes["T"], sizes["V"])
    return x


def _masked(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["input"][:, sizes["V"] // 2 :] = -torch.inf
    return x


def _rising(sizes: Sizes, g: torch.Generator) -> Tensors:
    """The maximum comes last, and is far above what came first: kernels rescale."""
    x = _plain(sizes, g)
    x["input"] += torch.linspace(-60, 60, sizes["V"])
    return x


PROBES = (
    Probe("gaussian", "errors that any input shows", "Milakov & Gimelshein, 1805.02867", _plain),
    Probe(
        "flat",
        "a row sum in low precision",
        "triton PR 3408 in Meta's fork (row sums too coarse)",
        with_(_plain, input=lambda x: x * 0.1),
    ),
    Probe(
        "wide",
        "a row sum that stops growing",
        "triton PR 3408 in Meta's fork (row sums too coarse)",
        with_(_plain, input=lambda x: x * 0.1),
        sizes={"T": 2, "V": 8229},
    ),
    Probe(
        "large",
        "overflow of scores that are not shifted, or are shifted after rounding",
        "flash-attention issue 2082",
        with_(_plain, input=lambda x: x * 4 + 300.0),
    ),
    Probe(
        "very_negative",
        "a maximum that begins at 0, a finite −inf",
        "flash-attention issue 2082, flashinfer 4267",
        with_(_plain, input=lambda x: x - 300.0),
    ),
    Probe("ties", "equal maxima", "Qiu & Yao, arXiv 2510.04212", _ties),
    Probe("one_large", "one weight near 1", "attention sinks, arXiv 2309.17453", _one_hot),
    Probe(
        "constant_gradient",
        "the sum that the gradient subtracts, rounded",
        "jax PR 40128 (rounded before a cancelling sum)",
        _constant_gradient,
    ),
    Probe("masked", "scores of −inf", "pytorch, masked softmax", _masked),
    Probe("rising", "a maximum that comes late", "Milakov & Gimelshein, 1805.02867", _rising),
    rows_apart(with_(_plain, input=apart)),
    odd_sizes(_plain, "rows and scores past the last whole block", V=77),
)
