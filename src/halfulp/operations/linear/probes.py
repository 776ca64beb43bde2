"""Inputs that expose what goes wrong in a linear layer."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import normal, odd_sizes, outlier, with_

INDEPENDENT = ("T", "N")


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    t, k, n = sizes["T"], sizes["K"], sizes["N"]
    return {"input": normal(g, t, k), "weight": normal(g, n, k) / k**0.5}


def _one_sign(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Terms of one sign in all three products."""
    x = {name: tensor.abs() for name, tensor in _plain(sizes, g).items()}
    x["grad_output"] = normal(g, sizes["T"], sizes["N"]).abs()
    return x


def _cancelling(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Terms that cancel to a sixteenth of what rounding the running sum must keep."""
    x = _plain(sizes, g)
    half = sizes["K"] // 2
    x["input"][:, half : 2 * half] = x["input"][:, :half]
    noise = normal(g, sizes["N"], half) / 16
    x["weight"][:, half : 2 * half] = -x["weight"][:, :half] * (1 + noise)
    return x


PROBES = (
    Probe("gaussian", "errors that any input shows", "Higham, chapter 3", _plain),
    Probe(
        "one_sign",
        "a running sum in low precision",
        "DeepSeek-V3, arXiv 2412.19437 (14-bit accumulators)",
        _one_sign,
    ),
    Probe(
        "long_sum",
        "a running sum that stops growing",
        "DeepSeek-V3, arXiv 2412.19437 (14-bit accumulators)",
        _one_sign,
        sizes={"T": 4, "K": 4133, "N": 8},
    ),
    Probe(
        "many_tokens",
        "dW summed over tokens in low precision",
        "Liger-Kernel PR 950 (dW reduced in bf16)",
        _one_sign,
        sizes={"T": 1024, "K": 16, "N": 8},
    ),
    Probe(
        "many_outputs",
        "dX summed over outputs in low precision",
        "pytorch, allow_bf16_reduced_precision_reduction (split-K)",
        _one_sign,
        sizes={"T": 4, "K": 16, "N": 1024},
    ),
    Probe(
        "cancelling",
        "products or partial sums that are rounded",
        "jax PR 40128 (rounded before a cancelling sum)",
        _cancelling,
    ),
    Probe(
        "outlier_feature",
        "a feature far larger than others",
        "LLM.int8(), 2208.07339",
        outlier(_plain),
    ),
    Probe(
        "tiny_gradient",
        "gradients that underflow",
        "TransformerEngine PR 3281 (finite output, zero gradients)",
        with_(_one_sign, grad_output=lambda x: x * 2e-4),
    ),
    odd_sizes(_plain, "what lies past the last whole tile", K=77, N=19),
)
