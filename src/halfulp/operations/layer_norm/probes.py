"""Inputs that expose what goes wrong in LayerNorm."""

from __future__ import annotations

import torch

from halfulp.operations.norm_probes import CANCELLING, MANY_TOKENS, REDUCED, normed
from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import normal, with_

INDEPENDENT = ("T",)


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    t, d = sizes["T"], sizes["D"]
    weight, bias = 1 + 0.1 * normal(g, d), 0.1 * normal(g, d)
    return {"input": normal(g, t, d), "weight": weight, "bias": bias}


def _one_sign(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["grad_output"] = normal(g, *x["input"].shape).abs() + 0.5
    return x


def _correlated(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Terms of dW of one sign, however x is centered."""
    x = _one_sign(sizes, g)
    sign = x["input"].sign()
    x["input"] = sign * (x["input"].abs() + 0.5)
    x["grad_output"] = x["grad_output"] * sign
    return x


def _constant_gradient(sizes: Sizes, g: torch.Generator) -> Tensors:
    """dy ∘ w nearly constant over a row: its mean, which dx subtracts, takes nearly all of it."""
    x = _plain(sizes, g)
    x["grad_output"] = (1 + 0.02 * normal(g, *x["input"].shape)) / x["weight"]
    return x


PROBES = (
    Probe("gaussian", "errors that any input shows", "LayerNorm, arXiv 1607.06450", _plain),
    Probe(
        "offset",
        "variance as E[x²] − mean², or a rounded mean",
        "Chan, Golub & LeVeque 1983 (one-pass variance)",
        with_(_plain, input=lambda x: x + 30.0),
    ),
    *normed(
        _plain,
        _correlated,
        Probe(
            "constant_gradient",
            "the mean that dx subtracts, rounded or left out",
            CANCELLING,
            _constant_gradient,
        ),
        Probe(
            "many_tokens_bias",
            "db summed over tokens in low precision",
            REDUCED,
            _one_sign,
            sizes=MANY_TOKENS,
        ),
        Probe(
            "large_bias",
            "the bias added after the rounding",
            "a second rounding of the result",
            with_(_plain, bias=lambda b: 4 + b),
        ),
        variance="a variance in low precision, where one feature holds it",
        eps="layer_norm_eps of 1e-5 and 1e-12",
        small=3e-3,
        least=-1.5,
    ),
)
