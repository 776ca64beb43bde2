"""Inputs of gated units, y = act(gate) · up, whatever the activation: GeGLU and SwiGLU differ in
where its tail cancels and in where its slope has a root.
"""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import normal, odd_sizes, with_


def plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Standard normal gates `[T, D]` and values."""
    t, d = sizes["T"], sizes["D"]
    return {"gate": normal(g, t, d), "up": normal(g, t, d)}


def _both_outliers(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Two features whose product is far above all others, as trained models have them."""
    x = plain(sizes, g)
    x["gate"][:, 5 % sizes["D"]] = 60.0
    x["up"][:, 5 % sizes["D"]] *= 60.0
    return x


def gated(tail: Probe, root: float, *own: Probe) -> tuple[Probe, ...]:
    """Return the probes of a gated unit.

    Args:
        tail: gates where the activation's tail is lost.
        root: a gate at which the activation's slope vanishes by cancellation.
        own: what this activation alone asks for.
    """
    return (
        Probe("gaussian", "errors that any input shows", "Shazeer, arXiv 2002.05202", plain),
        tail,
        Probe(
            "very_negative_gates",
            "exp(−x) that overflows to NaN",
            "pytorch issue 196678 (exp that overflows)",
            with_(plain, gate=lambda x: x - 95.0),
        ),
        Probe(
            "zero_gates",
            "a slope by a quotient that is 0 / 0",
            "candle issue 2082 (silu(x) / x)",
            with_(plain, gate=lambda x: x * (x.abs() > 0.5)),
        ),
        Probe(
            "large_gates",
            "gates beyond 1",
            "outliers of trained gates",
            with_(plain, gate=lambda x: x * 8),
        ),
        Probe(
            "very_large_gates",
            "exp(x) that overflows to NaN",
            "pytorch issue 196678 (exp that overflows)",
            with_(plain, gate=lambda x: x + 95.0),
        ),
        Probe(
            "slope_root",
            "a slope that cancels",
            "jax PR 40128 (rounded before it cancels)",
            with_(plain, gate=lambda x: root + 0.02 * x),
        ),
        Probe(
            "small",
            "values near 0",
            "an approximation that is off at 0",
            with_(plain, gate=lambda x: x * 1e-2),
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
            with_(plain, gate=torch.abs, up=torch.abs),
        ),
        *own,
        odd_sizes(plain),
    )
