"""What a kernel is asked and what it gives back: the one contract of every backend, torch alone
needed to read it.

A backend is a module with three functions: `supports(query, key, value, options) -> str | None`
(None: it runs these; else the reason in words), `forward(query, key, value, options) -> Saved` and
`backward(grad_out, grad_lse, query, key, value, saved, options) -> Gradients`. Tensors are `[B, H,
N, D]`; key and value may have fewer heads, a divisor of H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor

KernelRecipe = Literal["halfulp", "stock", "published", "exact_delta"]
KERNEL_RECIPES: tuple[str, ...] = get_args(KernelRecipe)


@dataclass(frozen=True)
class Options:
    """Everything about one call but its three operands."""

    recipe: str = "halfulp"  # one of KERNEL_RECIPES
    is_causal: bool = False  # query i sees keys j ≤ i + causal_offset
    scale: float = 1.0
    # bool (True: may see) or float (added to the scaled scores), broadcasts to [B, H, N, N_k]
    attn_mask: Tensor | None = None
    # (left, right): i + causal_offset − left ≤ j ≤ … + right; −1: no bound
    window: tuple[int, int] | None = None
    softcap: float = 0.0  # c > 0: scaled scores become c·tanh(S / c), before any mask is added
    sinks: Tensor | None = None  # [H]: one more key with this score and a value of 0, for every row
    dropout_p: float = 0.0
    seed: int = 0  # of dropout: formats.counter.keep_mask at row (b·H + h)·N + i and column j
    causal_offset: int = 0  # 0: top left, as SDPA; N_k − N: bottom right, as FlashAttention


class Saved(NamedTuple):
    """What the forward pass gives; N is the number of queries.

    The residual is that of O in 8 bits, in units of 2⁻⁸ ulp of O; None where the recipe or the
    dtype keeps none.
    """

    out: Tensor  # [B, H, N, D_v], query's dtype, contiguous; 0 in a fully masked row
    residual: Tensor | None  # int8 [B, H, N, D_v]
    # float32 [B, H, N] (float64 for float64 inputs), natural logarithm; −inf in a fully masked row
    lse: Tensor
    # as lse, in the kernel's own base: what scores are shifted by, an integer before it is rounded
    # up
    row_max: Tensor
    row_sum: Tensor  # as lse: what O was divided by
    # as lse, in the kernel's own base: for a backward pass that wants its very bits
    own_lse: Tensor | None = None


class Gradients(NamedTuple):
    """What the backward pass gives, in the dtypes of what they are gradients of."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None  # [H], where there are sinks
    # the mask's shape; only from the backend "torch", which alone offers it
    attn_mask: Tensor | None = None
