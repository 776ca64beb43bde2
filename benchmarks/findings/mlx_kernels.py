"""MLX's functions on a CPU, their gradients by mlx.core.vjp.

Needs the packages mlx and mlx-cpu (`pip install "mlx[cpu]"`).
`halfulp audit --op rms_norm benchmarks/findings/mlx_kernels.py:rms_norm`. Run as a script it prints
what the softmax of equal logits sums to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.optimizers import AdamW
from torch import Tensor

AUDITED = {
    "attention": "attention",
    "rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "rope": "rope",
    "softmax": "softmax",
    "softmax_precise": "softmax",
    "cross_entropy": "cross_entropy",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "linear": "linear",
    "embedding": "embedding",
    "sum_rows": "sum",
    "adamw_step": "adamw_step",
}
_DTYPES = {
    torch.float32: mx.float32,
    torch.float16: mx.float16,
    torch.bfloat16: mx.bfloat16,
}


def _array(x: Tensor) -> mx.array:
    """Its own copy; through fp32, since NumPy has no bf16."""
    return mx.array(x.detach().float().contiguous().numpy()).astype(_DTYPES[x.dtype])


def _tensor(x: mx.array) -> Tensor:
    dtype = next(torch_one for torch_one, own in _DTYPES.items() if own == x.dtype)
    return torch.from_numpy(np.array(x.astype(mx.float32))).to(dtype)


class _Through(torch.autograd.Function):
    """A function of MLX arrays as one of tensors."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., mx.array], *tensors: Tensor) -> Tensor:
        ctx.function, ctx.arrays = function, [_array(t) for t in tensors]
        return _tensor(function(*ctx.arrays))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        _, found = mx.vjp(ctx.function, ctx.arrays, [_array(gradient)])
        return None, *(_tensor(g) for g in found)


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float
) -> Tensor:
    """mx.fast.scaled_dot_product_attention; its own "causal" ends in the last key, a mask's not."""
    n, nk = query.shape[2], key.shape[2]
    mask: Any = "causal" if is_causal else None
    if is_causal and n != nk:
        mask = mx.array(np.tril(np.ones((n, nk), bool)))
    function = partial(mx.fast.scaled_dot_product_attention, scale=scale, mask=mask)
    return _Through.apply(function, query, key, value)


def rms_norm(input: Tensor, _: Any, weight: Tensor, eps: float) -> Tensor:
    """mx.fast.rms_norm."""
    return _Through.apply(lambda x, w: mx.fast.rms_norm(x, w, eps), input, weight)


def layer_norm(input: Tensor, _: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """mx.fast.layer_norm."""
    return _Through.apply(lambda x, w, b: mx.fast.layer_norm(x, w, b, eps), input, weight, bias)


def rope(input: Tensor, positions: Tensor, *, base: float, interleaved: bool = False) -> Tensor:
    """mx.fast.rope, every token a sequence of its own at its own offset."""
    where = mx.array(positions.to(torch.int32).numpy())

    def forward(x: mx.array) -> mx.array:
        turned = mx.fast.rope(x[:, :, None], x.shape[-1], traditional=interleaved,
                              base=base, scale=1.0, offset=where)  # fmt: skip
        return turned[:, :, 0]

    return _Through.apply(forward, input)


def softmax(input: Tensor, dim: int) -> Tensor:
    """mx.softmax."""
    return _Through.apply(partial(mx.softmax, axis=dim), input)


def softmax_precise(input: Tensor, dim: int) -> Tensor:
    """mx.softmax with precise=True, which computes in fp32."""
    return _Through.apply(partial(mx.softmax, axis=dim, precise=True), input)


def cross_entropy(
    input: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """mlx.nn.losses.cross_entropy, a loss a token; what is ignored has weight 0."""
    labels = mx.array(torch.where(target == ignore_index, 0, target).to(torch.int32).numpy())
    kept = _array((target != ignore_index).to(input.dtype))
    function = partial(nn.losses.cross_entropy, label_smoothing=label_smoothing)
    return _Through.apply(lambda x: function(x, labels, kept, reduction="none"), input)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """nn.silu(gate) * up."""
    return _Through.apply(lambda g, u: nn.silu(g) * u, gate, up)


def geglu(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    """nn.gelu(gate) * up, or nn.gelu_approx."""
    act = nn.gelu_approx if approximate == "tanh" else nn.gelu
    return _Through.apply(lambda g, u: act(g) * u, gate, up)


def linear(input: Tensor, weight: Tensor) -> Tensor:
    """x @ w.T."""
    return _Through.apply(lambda x, w: x @ w.T, input, weight)


def embedding(input: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table, as nn.Embedding takes them."""
    index = mx.array(input.to(torch.int32).numpy())
    return _Through.apply(lambda w: w[index], weight)


def sum_rows(input: Tensor, dim: int) -> Tensor:
    """mx.sum."""
    return _Through.apply(partial(mx.sum, axis=dim), input)


def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """mlx.optimizers.AdamW with bias_correction."""
    own = AdamW(lr, [beta1, beta2], eps, weight_decay, bias_correction=True)
    state = {"m": _array(exp_avg), "v": _array(exp_avg_sq)}
    own.state["step"] = mx.array(step, mx.uint64)
    new = own.apply_single(_array(grad), _array(param), state)
    return _tensor(new).to(param.dtype), _tensor(state["m"]), _tensor(state["v"])


if __name__ == "__main__":
    for width in (256, 1024, 4096):
        for dtype in _DTYPES.values():
            weights = mx.softmax(mx.zeros((width,)).astype(dtype))
            print(width, dtype, float(weights.astype(mx.float32).sum()))
