"""Inputs that expose what goes wrong in SwiGLU."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import normal, with_

INDEPENDENT = ("T",)


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    t, d = sizes["T"], sizes["D"]
    return {"gate": normal(g, t, d), "up": normal(g, t, d)}


def _root(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Gates about −1.278, where the activation's slope vanishes by cancellation."""
    x = _plain(sizes, g)
    x["gate"] = -1.2785 + 0.02 * x["gate"]
    return x


def _both_outliers(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Two features whose product is far above all others, as trained models have them."""
    x = _plain(sizes, g)
    x["gate"][:, 5 % sizes["D"]] = 60.0
    x["up"][:, 5 % sizes["D"]] *= 60.0
    return x


PROBES = (
    Probe("gaussian", "errors that any input shows", "Shazeer, arXiv 2002.05202", _plain),
    Probe(
        "negative_gates",
        "a sigmoid that loses its tail",
        "1 + tanh, which cancels",
        with_(_plain, gate=lambda x: -x.abs() * 4 - 4),
    ),
    Probe(
        "very_negative_gates",
        "exp(−x) that overflows to NaN",
        "pytorch issue 196678 (exp that overflows)",
        with_(_plain, gate=lambda x: x - 95.0),
    ),
    Probe(
        "large_gates",
        "gates beyond 1",
        "outliers of trained gates",
        with_(_plain, gate=lambda x: x * 8),
    ),
    Probe(
        "very_large_gates",
        "exp(x) that overflows to NaN",
        "pytorch issue 196678 (exp that overflows)",
        with_(_plain, gate=lambda x: x + 95.0),
    ),
    Probe("slope_root", "a slope that cancels", "jax PR 40128 (rounded before it cancels)", _root),
    Probe(
        "small",
        "values near 0",
        "an approximation that is off at 0",
        with_(_plain, gate=lambda x: x * 1e-2),
    ),
    Probe(
        "outliers",
        "a product far above all others",
        "Smooth-SwiGLU, arXiv 2409.12517",
        _both_outliers,
    ),
    Probe(
        "one_sign",
        "a rounding that leans",
        "aiter 5151 (truncation)",
        with_(_plain, gate=torch.abs, up=torch.abs),
    ),
    Probe(
        "odd_width",
        "features past the last whole vector",
        "masked loads of Triton kernels, ragged tiles",
        _plain,
        sizes={"D": 77},
    ),
)
