"""Inputs that expose what goes wrong in the gradient of an embedding."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import Draw, Sizes, Tensors
from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.random_tensors import normal, odd_sizes, opposed_tokens

INDEPENDENT = ("T",)


def _drawn(most: int | None = None, one_sign: bool = False) -> Draw:
    """Tokens of the first `most` of the vocabulary (None: of all of it)."""

    def draw(sizes: Sizes, g: torch.Generator) -> Tensors:
        t, v = sizes["T"], sizes["V"]
        tokens = torch.randint(v if most is None else min(most, v), (t,), generator=g)
        x = {"input": tokens, "weight": normal(g, v, sizes["D"])}
        if one_sign:
            x["grad_output"] = normal(g, t, sizes["D"]).abs() + 0.5
        return x

    return draw


def _neighbors(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Runs of equal tokens, which kernels sum before they write."""
    x = _drawn(one_sign=True)(sizes, g)
    x["input"] = x["input"].sort().values
    return x


def _mixed(sizes: Sizes, g: torch.Generator) -> Tensors:
    """A large gradient first, small ones after it."""
    x = _drawn(4, one_sign=True)(sizes, g)
    x["grad_output"][:8] *= 300.0
    return x


_REPEATED = "PyTorch's own gradient on a CPU (docs/operations.md)"

PROBES = (
    Probe("gaussian", "errors that any input shows", "torch.nn.functional.embedding", _drawn()),
    Probe(
        "all_tokens_one",
        "equal indices summed in low precision",
        _REPEATED,
        _drawn(1, one_sign=True),
    ),
    Probe(
        "many_equal",
        "a running sum that stops growing",
        _REPEATED,
        _drawn(4, one_sign=True),
        sizes={"T": 2048, "V": 8, "D": 8},
    ),
    Probe("runs", "equal neighbors", _REPEATED, _neighbors),
    Probe("large_first", "small addends after a large one", _REPEATED, _mixed),
    Probe(
        "opposed_tokens",
        "parts of a row's sum that are rounded before they are summed",
        "jax PR 40128 (rounded before a cancelling sum)",
        opposed_tokens(_drawn()),
        sizes={"T": 512, "V": 8, "D": 8},
    ),
    Probe("distinct", "rows that no token names", "zeros that are not written", _drawn(3)),
    Probe(
        "padding",
        "the padded row's gradient",
        "torch.nn.functional, padding_idx",
        _drawn(),
        options={"padding_idx": 1},
    ),
    Probe(
        "padding_many",
        "a padded row in a kernel for many tokens",
        "pytorch issue 28716 (beyond 768 indices the padded row had a gradient)",
        _drawn(),
        sizes={"T": 2048, "V": 8, "D": 8},
        options={"padding_idx": 1},
    ),
    Probe(
        "large_vocabulary",
        "indices that a low format does not hold",
        "RosettaCommons/foundry PR 236 (indices that inherit bfloat16)",
        _drawn(),
        sizes={"T": 64, "V": 4099, "D": 8},
    ),
    odd_sizes(_drawn()),
)
