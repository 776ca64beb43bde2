"""Gradients of JAX's functions that are taken from what the forward pass rounded, as kept_results.

Needs the package jax, on a CPU. `python -m benchmarks.findings --only jax_kept_results`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from benchmarks.findings.jax_kernels import through
from benchmarks.findings.kept_results import HIGH_ROWS, LINE, LOW_ROWS, ROWS, Case, between
from jax.scipy.special import logsumexp
from torch import Tensor

jax.config.update("jax_enable_x64", True)  # for the values that the others are held against


def _of(function: Callable[..., jax.Array]) -> Callable[[Tensor], Tensor]:
    return partial(through, function)


_LSE, _RUNNING = _of(partial(logsumexp, axis=-1)), _of(partial(jax.lax.cumlogsumexp, axis=1))
CASES = {
    "jax logsumexp, N(0, 1)": Case(_LSE, ROWS),
    "jax logsumexp, N(20, 1)": Case(_LSE, HIGH_ROWS),
    "jax logsumexp, N(-200, 1)": Case(_LSE, LOW_ROWS),
    "jax cumlogsumexp, N(0, 1)": Case(_RUNNING, ROWS),
    "jax cumlogsumexp, N(-200, 1)": Case(_RUNNING, LOW_ROWS),
    "jax.nn.sigmoid, N(0, 1)": Case(_of(jax.nn.sigmoid), LINE),
    "jax.nn.sigmoid, 5 to 8": Case(_of(jax.nn.sigmoid), between(5, 8)),
    "jax.numpy.tanh, N(0, 1)": Case(_of(jnp.tanh), LINE),
    "jax.numpy.tanh, 3 to 5": Case(_of(jnp.tanh), between(3, 5)),
    "jax.numpy.expm1, -8 to -4": Case(_of(jnp.expm1), between(-8, -4)),
    "jax.nn.elu, -4 to -2": Case(_of(jax.nn.elu), between(-4, -2)),
    "jax.nn.elu, -8 to -4": Case(_of(jax.nn.elu), between(-8, -4)),
    "jax.nn.selu, -8 to -4": Case(_of(jax.nn.selu), between(-8, -4)),
    "jax.nn.celu, -8 to -4": Case(_of(jax.nn.celu), between(-8, -4)),
    "jax.nn.softplus, -8 to 8": Case(_of(jax.nn.softplus), between(-8, 8)),
    "jax rsqrt, 0.1 to 9": Case(_of(jax.lax.rsqrt), between(0.1, 9)),
    "jax.numpy.var, N(20, 1)": Case(_of(partial(jnp.var, axis=-1)), HIGH_ROWS),
    "jax.numpy.std, N(20, 1)": Case(_of(partial(jnp.std, axis=-1)), HIGH_ROWS),
    "jax.numpy.prod, 0.9 to 1.1": Case(_of(partial(jnp.prod, axis=-1)), between(0.9, 1.1, 64, 256)),
    "jax.numpy.cumprod, 0.9 to 1.1": Case(
        _of(partial(jnp.cumprod, axis=-1)), between(0.9, 1.1, 64, 256)
    ),
    "jax.numpy.linalg.norm, N(0, 1)": Case(_of(partial(jnp.linalg.norm, axis=-1)), ROWS),
    "jax.numpy.linalg.norm with ord=10, N(0, 1)": Case(
        _of(partial(jnp.linalg.norm, ord=10, axis=-1)), ROWS
    ),
}
