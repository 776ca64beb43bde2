"""Why Σ(δ_lp − δ_hp) is positive: its first-order part and what the curvature of the loss adds.

With err = O_lp − O_hp, e = dO(O_lp) · err. Had the rounding of O nothing to do with the gradient, e
would be dO(O_hp) · err, which has no sign of its own: the first-order part. The rest, (dO(O_lp) −
dO(O_hp)) · err ≈ errᵀ H err with H the Hessian of the loss in O, is positive at a minimum
*whatever* the rounding (D9; it stands against A10's explanation by rounding that leans). dO(O_hp)
comes from a second pass in which out is exact in every measured layer, so the curvature part of a
layer holds what the errors of the other layers add to its gradient too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from halfulp.calls import Call

Read = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(layer, query, key, value) as the attention of that layer reads them."""


class ExactOut:
    """A tap that puts exact attention in place of out, in the first `entries` batch entries, on
    out's gradient path.

    Exact is PyTorch's fp32 attention (fp64 where out is): its error is 2⁻¹⁶ of bf16's.
    """

    def __init__(self, read: Read, entries: int) -> None:
        self.read, self.entries = read, entries
        self.outs: dict[int, Tensor] = {}

    def __call__(self, layer: int, call: Call, out: Tensor) -> Tensor:
        """Return out with the value of exact attention, `[B, H, N, D_v]`."""
        wide = torch.promote_types(out.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
            kept = (x.detach()[: self.entries].to(wide) for x in call.operands)
            exact = functional.scaled_dot_product_attention(
                *self.read(layer, *kept), is_causal=call.sees.causal, scale=call.scale
            )
            change = torch.zeros_like(out, dtype=wide)
            change[: self.entries] = exact - out[: self.entries]
        # a sum, so that gradients still flow through the layer that ran
        # the value is rounded once more in a sum, but only to O's own fp32
        self.outs[layer] = replaced = out + change
        return replaced


class FullPrecision(TorchFunctionMode):
    """Autocast off for every torch function inside, also where the code inside switches it on.

    An exact O would be rounded again by the first autocast product behind it.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        del types
        with torch.autocast(self.device, enabled=False):
            return func(*args, **(kwargs or {}))


def t_value(samples: Tensor) -> Tensor:
    """Mean over the first dimension in standard errors of it, `[S, ...]` to `[...]`; NaN for fewer
    than two samples.
    """
    count = len(samples)
    if count < 2:
        return torch.full_like(samples[0], math.nan)
    return samples.mean(0) * math.sqrt(count) / samples.std(0)
