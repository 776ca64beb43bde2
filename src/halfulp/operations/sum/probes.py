"""Inputs that expose what goes wrong in a sum."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import normal, normal_rows, with_

INDEPENDENT = ("D",)


def _large_first(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = {"input": normal_rows(sizes, g)["input"].abs() + 0.5}
    x["input"][0] = 200.0
    return x


def _cancelling(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Pairs of opposite rows, nearly: what is left is small."""
    x = normal_rows(sizes, g)
    half = sizes["T"] // 2
    x["input"][half : 2 * half] = -x["input"][:half] * (1 + normal(g, half, sizes["D"]) / 16)
    return x


_ONE_SIGN = with_(normal_rows, input=lambda x: x.abs() + 0.5)

PROBES = (
    Probe("gaussian", "errors that any input shows", "Higham, chapter 4", normal_rows),
    Probe(
        "one_sign",
        "a running sum in low precision",
        "Liger-Kernel PR 950 (dW of a norm reduced in bf16)",
        _ONE_SIGN,
    ),
    Probe(
        "many_rows",
        "a running sum that stops growing",
        "Liger-Kernel PR 950 (dW of a norm reduced in bf16)",
        _ONE_SIGN,
        sizes={"T": 4133, "D": 8},
    ),
    Probe(
        "micro_batches",
        "gradients accumulated in the parameter's dtype",
        "Megatron-LM, accumulate_allreduce_grads_in_fp32",
        _ONE_SIGN,
        sizes={"T": 16, "D": 256},
    ),
    Probe(
        "two_ranks",
        "an all-reduce in bf16",
        "NCCL sums in the operands' dtype",
        _ONE_SIGN,
        sizes={"T": 4, "D": 256},
    ),
    Probe("large_first", "small addends after a large one", "Higham, section 4.2", _large_first),
    Probe("cancelling", "partial sums that are rounded", "jax PR 40128", _cancelling),
    Probe("small", "underflow", "gradients of fp16", with_(normal_rows, input=lambda x: x * 1e-3)),
    Probe("odd_rows", "rows past the last whole block", "ragged tiles", _ONE_SIGN, sizes={"T": 77}),
)
