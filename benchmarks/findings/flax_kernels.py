"""Flax's layers and Optax's loss and optimizer on a CPU, their gradients by jax.vjp.

Needs the packages flax and optax.
`halfulp audit --op layer_norm benchmarks/findings/flax_kernels.py:layer_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from flax import linen
from torch import Tensor

AUDITED = {
    "attention": "attention",
    "rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "layer_norm_two_passes": "layer_norm",
    "cross_entropy": "cross_entropy",
    "embedding": "embedding",
    "adamw_step": "adamw_step",
}


def _array(x: Tensor) -> jax.Array:
    return jax.dlpack.from_dlpack(x.detach().contiguous())


class _Through(torch.autograd.Function):
    """A function of JAX arrays as one of tensors."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., jax.Array], *tensors: Tensor) -> Tensor:
        result, ctx.backwards = jax.vjp(function, *map(_array, tensors))
        return torch.from_dlpack(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, *(torch.from_dlpack(g) for g in ctx.backwards(_array(gradient)))


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float
) -> Tensor:
    """flax.linen.dot_product_attention of [B, N, H, D], whose scale is 1 / √D."""
    if scale is not None and abs(scale * query.shape[-1] ** 0.5 - 1) > 1e-6:
        raise NotImplementedError("its scale is 1 / √D")
    if query.shape[1] != key.shape[1]:
        raise NotImplementedError("it has no shared key heads")
    n, nk = query.shape[2], key.shape[2]
    mask = jnp.ones((1, 1, n, nk), bool)
    swapped = (x.transpose(1, 2) for x in (query, key, value))
    function = _attention(jnp.tril(mask) if is_causal else mask)
    return _Through.apply(function, *swapped).transpose(1, 2)


def _attention(mask: jax.Array) -> Callable[..., jax.Array]:
    return lambda q, k, v: _attend(q, k, v, mask)


_attend = jax.jit(lambda q, k, v, mask: linen.dot_product_attention(q, k, v, mask=mask))


@cache
def _norm(layer: Any) -> Callable[..., jax.Array]:
    """One function for all calls, so that each shape is compiled once."""

    def forward(x: jax.Array, *parameters: jax.Array) -> jax.Array:
        return layer.apply({"params": dict(zip(("scale", "bias"), parameters))}, x)  # noqa: B905

    return jax.jit(forward)


def rms_norm(input: Tensor, _: Any, weight: Tensor, eps: float) -> Tensor:
    """flax.linen.RMSNorm."""
    return _Through.apply(_norm(linen.RMSNorm(epsilon=eps)), input, weight)


def layer_norm(input: Tensor, _: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """flax.linen.LayerNorm as it comes, with use_fast_variance."""
    return _Through.apply(_norm(linen.LayerNorm(epsilon=eps)), input, weight, bias)


def layer_norm_two_passes(
    input: Tensor, _: Any, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """flax.linen.LayerNorm with use_fast_variance=False."""
    layer = linen.LayerNorm(epsilon=eps, use_fast_variance=False)
    return _Through.apply(_norm(layer), input, weight, bias)


def cross_entropy(input: Tensor, target: Tensor, *, ignore_index: int = -100) -> Tensor:
    """optax.softmax_cross_entropy_with_integer_labels, a loss a token."""
    labels = jnp.asarray(target.numpy())
    kept = labels != ignore_index

    return _Through.apply(lambda x: _losses(x, labels, kept), input)


@jax.jit
def _losses(x: jax.Array, labels: jax.Array, kept: jax.Array) -> jax.Array:
    loss = optax.softmax_cross_entropy_with_integer_labels(x, jnp.where(kept, labels, 0))
    return jnp.where(kept, loss, 0)


def embedding(input: Tensor, weight: Tensor) -> Tensor:
    """flax.linen.Embed."""
    index = jnp.asarray(input.numpy())
    return _Through.apply(lambda w: _rows(w, index), weight)


@jax.jit
def _rows(table: jax.Array, index: jax.Array) -> jax.Array:
    layer = linen.Embed(*table.shape, dtype=table.dtype)
    return layer.apply({"params": {"embedding": table}}, index)


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
    """optax.adamw and optax.apply_updates, with moments as they are given."""
    own = optax.adamw(lr, beta1, beta2, eps, weight_decay=weight_decay)
    p, g, m, v = map(_array, (param, grad, exp_avg, exp_avg_sq))
    first, *others = own.init(p)
    state = (first._replace(count=jnp.asarray(step - 1, jnp.int32), mu=m, nu=v), *others)
    updates, (after, *_) = own.update(g, state, p)
    new = optax.apply_updates(p, updates)
    return tuple(torch.from_dlpack(x) for x in (new, after.mu, after.nu))
