"""JAX's own functions on a CPU, their gradients by jax.vjp, tensors handed over through DLPack.

Needs the package jax. `halfulp audit --op softmax benchmarks/findings/jax_kernels.py:softmax`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental.pallas.ops.gpu import attention as pallas_attention_module
from jax.experimental.pallas.ops.gpu import layer_norm as pallas_layer_norm_module
from jax.experimental.pallas.ops.gpu import rms_norm as pallas_rms_norm_module
from jax.experimental.pallas.ops.gpu import softmax as pallas_softmax_module
from torch import Tensor

AUDITED = {
    "attention": "attention",
    "rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "softmax": "softmax",
    "cross_entropy": "cross_entropy",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "linear": "linear",
    "sum_rows": "sum",
    "pallas_attention": "attention",
    "pallas_rms_norm": "rms_norm",
    "pallas_layer_norm": "layer_norm",
    "pallas_softmax": "softmax",
}


_PALLAS = {
    "mha": pallas_attention_module,
    "rms_norm": pallas_rms_norm_module,
    "layer_norm": pallas_layer_norm_module,
    "softmax": pallas_softmax_module,
}
_SIZES = pallas_attention_module.BlockSizes(64, 64, 64, 64, 64, 64)


class _Through(torch.autograd.Function):
    """A function of JAX arrays as one of tensors."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., jax.Array], *tensors: Tensor) -> Tensor:
        arrays = [jax.dlpack.from_dlpack(t.detach().contiguous()) for t in tensors]
        result, ctx.backwards = jax.vjp(jax.jit(function), *arrays)
        return torch.from_dlpack(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        found = ctx.backwards(jax.dlpack.from_dlpack(gradient.contiguous()))
        return None, *(torch.from_dlpack(g) for g in found)


def through(function: Callable[..., jax.Array], *tensors: Tensor) -> Tensor:
    """What the function gives of them, and its gradient."""
    return _Through.apply(function, *tensors)


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float | None
) -> Tensor:
    """jax.nn.dot_product_attention of [B, N, H, D], the implementation of XLA."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, implementation="xla"
        )

    swapped = (x.transpose(1, 2) for x in (query, key, value))
    return _Through.apply(forward, *swapped).transpose(1, 2)


def rms_norm(input: Tensor, _: Any, weight: Tensor, eps: float) -> Tensor:
    """As flax.linen.RMSNorm writes it: the mean of squares in fp32."""

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.mean(jax.lax.square(wide), -1, keepdims=True) + eps)
        return (wide * (factor * w.astype(jnp.float32))).astype(x.dtype)

    return _Through.apply(forward, input, weight)


def layer_norm(input: Tensor, _: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """jax.nn.standardize in the operands' dtype, then weight and bias."""

    def forward(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return jax.nn.standardize(x, epsilon=eps) * w + b

    return _Through.apply(forward, input, weight, bias)


def softmax(input: Tensor, dim: int) -> Tensor:
    """jax.nn.softmax."""
    return _Through.apply(partial(jax.nn.softmax, axis=dim), input)


def cross_entropy(
    input: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """−log_softmax at the target, from jax.nn.log_softmax of the operands' dtype."""
    chosen = jnp.asarray(target.numpy())
    counts = chosen != ignore_index

    def forward(x: jax.Array) -> jax.Array:
        rows = jax.nn.log_softmax(x)
        rows = -jnp.take_along_axis(rows, jnp.where(counts, chosen, 0)[:, None], -1)[:, 0]
        rows = jnp.where(counts, rows, 0)
        whole = {"mean": rows.sum() / counts.sum().astype(x.dtype), "sum": rows.sum()}
        return whole.get(reduction, rows)

    return _Through.apply(forward, input)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """jax.nn.silu(gate) * up."""
    return _Through.apply(lambda g, u: jax.nn.silu(g) * u, gate, up)


def geglu(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    """jax.nn.gelu(gate) * up."""
    tanh = approximate == "tanh"
    return _Through.apply(lambda g, u: jax.nn.gelu(g, approximate=tanh) * u, gate, up)


def linear(input: Tensor, weight: Tensor) -> Tensor:
    """x @ w.T."""
    return _Through.apply(lambda x, w: x @ w.T, input, weight)


def sum_rows(input: Tensor, dim: int) -> Tensor:
    """jnp.sum."""
    return _Through.apply(partial(jnp.sum, axis=dim), input)


@cache
def _pallas(name: str, **options: Any) -> Callable[..., jax.Array]:
    """One function for all calls, so that each shape is compiled once."""
    made = getattr(_PALLAS[name], name)
    more = (None,) if name == "mha" else ()  # no segments
    return jax.jit(lambda *arrays: made(*arrays, *more, **options, interpret=True))


def pallas_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float
) -> Tensor:
    """Pallas's FlashAttention for GPUs, interpreted, by blocks of 64."""
    if query.shape[2] % 64 or key.shape[2] % 64 or query.shape[2] > 512:
        raise NotImplementedError("multiples of 64 up to 512: it interprets slowly")
    function = _pallas("mha", sm_scale=scale, causal=is_causal, block_sizes=_SIZES)
    swapped = (x.transpose(1, 2) for x in (query, key, value))
    return _Through.apply(function, *swapped).transpose(1, 2)


def pallas_rms_norm(input: Tensor, _: Any, weight: Tensor, eps: float) -> Tensor:
    """Pallas's RMSNorm for GPUs, interpreted; it adds a bias, which is 0 here."""
    found = _Through.apply(_pallas("rms_norm", eps=eps), input[None], weight, 0 * weight.detach())
    return found[0]


def pallas_layer_norm(input: Tensor, _: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Pallas's LayerNorm for GPUs, interpreted."""
    return _Through.apply(_pallas("layer_norm", eps=eps), input[None], weight, bias)[0]


def pallas_softmax(input: Tensor, dim: int) -> Tensor:
    """Pallas's softmax for GPUs, interpreted; forward alone."""
    array = jax.dlpack.from_dlpack(input.detach().contiguous())
    return torch.from_dlpack(_pallas("softmax", axis=dim)(array))
