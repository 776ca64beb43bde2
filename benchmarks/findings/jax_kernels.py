"""JAX's own functions on a CPU, their gradients by jax.vjp, tensors handed over through DLPack.

Needs the package jax. `halfulp audit --op softmax benchmarks/findings/jax_kernels.py:softmax`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
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
}


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
