"""Inputs that expose what goes wrong in RMSNorm."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import normal, with_

INDEPENDENT = ("T",)


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    d = sizes["D"]
    return {"input": normal(g, sizes["T"], d), "weight": 1 + 0.1 * normal(g, d)}


def _aligned(sizes: Sizes, g: torch.Generator) -> Tensors:
    """dy ∘ w nearly along x: the two parts of dx cancel."""
    x = _plain(sizes, g)
    x["grad_output"] = x["input"] / x["weight"] * (1 + 0.02 * normal(g, *x["input"].shape))
    return x


def _outlier(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["input"][:, 3 % sizes["D"]] *= 300.0
    return x


def _one_sign(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Terms of dW of one sign, so that rounding each of them, or their sum on the way, shows."""
    x = _plain(sizes, g)
    x["input"] = x["input"].abs() + 0.5
    x["grad_output"] = normal(g, *x["input"].shape).abs() + 0.5
    return x


def _mixed(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = _plain(sizes, g)
    x["input"] *= torch.logspace(-2, 2, sizes["T"])[:, None]
    return x


PROBES = (
    Probe("gaussian", "errors that any input shows", "RMSNorm, arXiv 1910.07467", _plain),
    Probe(
        "small_rows",
        "eps left out, misplaced or of another size",
        "transformers, rms_norm_eps of 1e-5 and 1e-6",
        with_(_plain, input=lambda x: x * 1e-3),
    ),
    Probe(
        "large_rows",
        "squares that overflow or lose digits",
        "IRON PR 139 (coherent norm error)",
        with_(_plain, input=lambda x: x * 200.0),
    ),
    Probe(
        "outlier_feature",
        "a mean of squares in low precision, where one feature holds it",
        "helion PR 2273 (inv_rms)",
        _outlier,
    ),
    Probe(
        "equal_features",
        "an error of the row's factor, coherent over the row",
        "IRON PR 139 (coherent norm error)",
        with_(_plain, input=lambda x: x.sign() * (1 + x[:, :1].abs())),
    ),
    Probe(
        "aligned_gradient",
        "the sum that dx subtracts, rounded",
        "jax PR 40128 (rounded before a cancelling sum)",
        _aligned,
    ),
    Probe(
        "many_tokens",
        "dW summed over tokens in low precision",
        "Liger-Kernel PR 950 (dW of a norm reduced in bf16)",
        _one_sign,
        sizes={"T": 512, "D": 32},
    ),
    Probe(
        "mixed_rows",
        "a factor of another row",
        "pytorch issue 190828 (dW off by orders of magnitude)",
        _mixed,
    ),
    Probe(
        "weight_offset",
        "weights stored less one, or multiplied before the rounding",
        "Gemma's RMSNorm, (1 + w)",
        with_(_plain, weight=lambda w: (w - 1) * 0.5),
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
        "transformers, rms_norm_eps of 1e-5 and 1e-6",
        with_(_plain, input=lambda x: x * 0.1),
        options={"eps": 1e-2},
    ),
)
