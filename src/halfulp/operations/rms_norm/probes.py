"""Inputs that expose what goes wrong in RMSNorm."""

from __future__ import annotations

import torch

from halfulp.operations.norm_probes import normed
from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import normal, with_

INDEPENDENT = ("T",)


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    d = sizes["D"]
    return {"input": normal(g, sizes["T"], d), "weight": 1 + 0.1 * normal(g, d)}


def _one_sign(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Terms of dW of one sign."""
    x = _plain(sizes, g)
    x["input"] = x["input"].abs() + 0.5
    x["grad_output"] = normal(g, *x["input"].shape).abs() + 0.5
    return x


PROBES = (
    Probe("gaussian", "errors that any input shows", "RMSNorm, arXiv 1910.07467", _plain),
    *normed(
        _plain,
        _one_sign,
        Probe(
            "equal_features",
            "an error of the row's factor, coherent over the row",
            "IRON PR 139 (coherent norm error)",
            with_(_plain, input=lambda x: x.sign() * (1 + x[:, :1].abs())),
        ),
        Probe(
            "weight_offset",
            "weights stored less one, or multiplied before the rounding",
            "Gemma's RMSNorm, (1 + w)",
            with_(_plain, weight=lambda w: (w - 1) * 0.5),
        ),
        variance="a mean of squares in low precision, where one feature holds it",
        eps="transformers, rms_norm_eps of 1e-5 and 1e-6",
        small=1e-3,
        least=-2.0,
    ),
)
