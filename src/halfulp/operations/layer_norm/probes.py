"""Inputs that expose what goes wrong in LayerNorm."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import normal, with_

INDEPENDENT = ("T",)


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    t, d = sizes["T"], sizes["D"]
    weight, bias = 1 + 0.1 * normal(g, d), 0.1 * normal(g, d)
    return {"input": normal(g, t, d), "weight": weight, "bias": bias}


def _aligned(sizes: Sizes, g: torch.Generator) -> Tensors:
    """dy ∘ w nearly along x: what dx subtracts takes nearly all of it."""
    x = _plain(sizes, g)
    x["grad_output"] = x["input"] / x["weight"] * (1 + 0.02 * normal(g, *x["input"].shape))
    return x


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


def _mixed(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["input"] *= torch.logspace(-1.5, 2, sizes["T"])[:, None]
    return x


def _outlier(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["input"][:, 3 % sizes["D"]] *= 300.0
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
    Probe(
        "small_rows",
        "eps left out, misplaced or of another size",
        "layer_norm_eps of 1e-5 and 1e-12",
        with_(_plain, input=lambda x: x * 3e-3),
    ),
    Probe(
        "large_rows",
        "squares that overflow or lose digits",
        "IRON PR 139 (coherent norm error)",
        with_(_plain, input=lambda x: x * 200.0),
    ),
    Probe(
        "outlier_feature",
        "a variance in low precision, where one feature holds it",
        "helion PR 2273 (inv_rms)",
        _outlier,
    ),
    Probe(
        "aligned_gradient",
        "the sum that dx subtracts, rounded",
        "jax PR 40128 (rounded before a cancelling sum)",
        _aligned,
    ),
    Probe(
        "constant_gradient",
        "the mean that dx subtracts, rounded or left out",
        "jax PR 40128 (rounded before a cancelling sum)",
        _constant_gradient,
    ),
    Probe(
        "many_tokens",
        "dW summed over tokens in low precision",
        "Liger-Kernel PR 950 (dW of a norm reduced in bf16)",
        _correlated,
        sizes={"T": 512, "D": 32},
    ),
    Probe(
        "many_tokens_bias",
        "db summed over tokens in low precision",
        "Liger-Kernel PR 950 (dW of a norm reduced in bf16)",
        _one_sign,
        sizes={"T": 512, "D": 32},
    ),
    Probe("mixed_rows", "a factor of another row", "pytorch issue 190828", _mixed),
    Probe(
        "large_bias",
        "the bias added after the rounding",
        "a second rounding of the result",
        with_(_plain, bias=lambda b: 4 + b),
    ),
    Probe(
        "odd_width",
        "features past the last whole vector",
        "masked loads of Triton kernels, ragged tiles",
        _plain,
        sizes={"D": 77},
    ),
    Probe("one_row", "sizes of one", "decode: one token", _plain, sizes={"T": 1}),
    Probe(
        "large_eps",
        "an eps that is never read",
        "layer_norm_eps of 1e-5 and 1e-12",
        with_(_plain, input=lambda x: x * 0.1),
        options={"eps": 1e-2},
    ),
)
