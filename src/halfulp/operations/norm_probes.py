"""Inputs of normalized rows, whatever is normalized: LayerNorm and RMSNorm differ in the mean that
is subtracted, and in the bias.
"""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import Draw, Sizes, Tensors
from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.random_tensors import normal, odd_sizes, opposed_tokens, outlier, with_

CANCELLING = "jax PR 40128 (rounded before a cancelling sum)"
REDUCED = "Liger-Kernel PR 950 (dW of a norm reduced in bf16)"
MANY_TOKENS = {"T": 512, "D": 32}


def normed(
    plain: Draw, correlated: Draw, *own: Probe, variance: str, eps: str, small: float, least: float
) -> tuple[Probe, ...]:
    """Return the probes of a norm.

    Args:
        plain: rows `[T, D]`, their weight and what else the norm takes.
        correlated: the same with terms of dW of one sign, so that rounding each of them, or their
            sum on the way, shows.
        own: what this norm alone asks for.
        variance: what one large feature spoils.
        eps: where the sizes of eps in use come from.
        small: the factor that brings rows to where eps counts.
        least: log₁₀ of the smallest row's factor where rows of all sizes meet.
    """

    def aligned(sizes: Sizes, g: torch.Generator) -> Tensors:
        """dy ∘ w nearly along x: what dx subtracts takes nearly all of it."""
        x = plain(sizes, g)
        x["grad_output"] = x["input"] / x["weight"] * (1 + 0.02 * normal(g, *x["input"].shape))
        return x

    def mixed(sizes: Sizes, g: torch.Generator) -> Tensors:
        x = plain(sizes, g)
        x["input"] *= torch.logspace(least, 2, sizes["T"])[:, None]
        return x

    return (
        Probe(
            "small_rows",
            "eps left out, misplaced or of another size",
            eps,
            with_(plain, input=lambda x: x * small),
        ),
        Probe(
            "large_rows",
            "squares that overflow or lose digits",
            "IRON PR 139 (coherent norm error)",
            with_(plain, input=lambda x: x * 200.0),
        ),
        Probe("outlier_feature", variance, "helion PR 2273 (inv_rms)", outlier(plain)),
        Probe("aligned_gradient", "the sum that dx subtracts, rounded", CANCELLING, aligned),
        Probe(
            "many_tokens",
            "dW summed over tokens in low precision",
            REDUCED,
            correlated,
            sizes=MANY_TOKENS,
        ),
        Probe(
            "opposed_tokens",
            "parts of dW's sum that are rounded before they are summed",
            CANCELLING,
            opposed_tokens(plain),
            sizes=MANY_TOKENS,
        ),
        Probe("mixed_rows", "a factor of another row", "pytorch issue 190828", mixed),
        *_long(plain),
        *own,
        odd_sizes(plain),
        Probe(
            "large_eps",
            "an eps that is never read",
            eps,
            with_(plain, input=lambda x: x * 0.1),
            options={"eps": 1e-2},
        ),
    )


def _long(plain: Draw) -> tuple[Probe, ...]:
    return (
        Probe(
            "wide_rows",
            "features past the widest block",
            "Liger-Kernel, MAX_FUSED_SIZE",
            plain,
            sizes={"calls": 2, "T": 2, "D": 16413},
        ),
        Probe(
            "many_narrow_rows",
            "the last rows' part of dW, where a program takes several",
            "attorch issue 18",
            plain,
            sizes={"calls": 2, "T": 1029, "D": 40},
        ),
    )
