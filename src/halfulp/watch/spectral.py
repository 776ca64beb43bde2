"""Largest singular values while a model trains, by power iteration that goes on where the last one
stopped.

Weights move little between two measurements, so a few products find again what a decomposition
would compute anew. All iterations run on matrices of the head dimension: σ(W_Q) through W_Q W_Qᵀ,
and σ(W_Qᵀ W_K) through the two of them, so that a width × width matrix is never formed (Qiu & Yao,
fig. 3 and 9; claims A6 and A19).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-3
MOST = 300
_BETWEEN_CHECKS = 5  # iterations; a check waits for the device
_FRESH = 1e-2  # share of random direction in a warm start


@dataclass(frozen=True)
class Largest:
    """The largest eigenvalue of each operator in a batch, and how sure it is."""

    value: Tensor  # [...]
    vector: Tensor  # [..., n], unit length in the operator's inner product
    residual: Tensor  # [...], ‖Ty − λy‖ / λ
    iterations: int


def power_iteration(
    apply: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    metric: Callable[[Tensor], Tensor] | None = None,
    tolerance: float = TOLERANCE,
    most: int = MOST,
) -> Largest:
    """Largest eigenvalue of positive operators T, self-adjoint in an inner product.

    It stops when ‖Ty − λy‖ ≤ `tolerance` · λ for the whole batch, or after `most` products. Then an
    eigenvalue lies within `tolerance` · λ of the result, which is a Rayleigh quotient: never above
    the largest, and its error is of second order in the residual. That it is the largest rests on
    the start, which must not be orthogonal to its vector.

    Args:
        apply: T of `[..., n]`, every operator of the batch on its own vector.
        start: `[..., n]`, not zero.
        metric: G of the inner product yᵀGz; the usual one if None.
        tolerance: of the residual, relative.
        most: products at most; `residual` says how far it came.

    Returns:
        Values that are 0 for a zero operator, and NaN for one that is not finite.
    """

    def dot(y: Tensor, z: Tensor) -> Tensor:
        return (y * (z if metric is None else metric(z))).sum(-1, keepdim=True)

    def unit(y: Tensor) -> Tensor:
        # squares must not underflow
        y = y / y.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
        return y / dot(y, y).sqrt().clamp_min(torch.finfo(y.dtype).tiny)

    y = unit(start)
    for done in range(1, most + 1):
        z = apply(y)
        # the Rayleigh quotient: its error is of second order in the residual that ends the search
        value = dot(y, z)
        if done % _BETWEEN_CHECKS == 1 or done == most:
            rest = z - value * y
            residual = dot(rest, rest).clamp_min(0).sqrt() / value.clamp_min(
                torch.finfo(y.dtype).tiny
            )
            if not bool((residual > tolerance).any()):
                break
        y = unit(z)
    return Largest(value.squeeze(-1), y, residual.squeeze(-1), done)


@dataclass(frozen=True)
class HeadSigmas:
    """Largest singular values of one layer, by head, and the vectors to start from next time."""

    query: Tensor  # σ(W_Q) [H]
    key: Tensor  # σ(W_K) [H_k]
    query_key: Tensor  # σ(α W_Qᵀ W_K) [H]: the largest score of unit inputs
    vectors: tuple[Tensor, Tensor, Tensor]  # [H, D], [H_k, D], [H, D]


def head_sigmas(
    query: Tensor,
    key: Tensor,
    scale: float,
    starts: tuple[Tensor, Tensor, Tensor] | None,
    generator: torch.Generator,
    *,
    tolerance: float = TOLERANCE,
    most: int = MOST,
) -> HeadSigmas:
    """σ(W_Q), σ(W_K) and σ(α W_Qᵀ W_K) of one layer.

    Args:
        query: W_Q `[H, D, width]`.
        key: W_K `[H_k, D, width]`; H_k divides H (shared key heads).
        scale: α.
        starts: `vectors` of an earlier call, or None. A hundredth of a random direction is mixed
            in: a vector that has converged cannot find by itself another that has overtaken its
            own.
        generator: of the random directions, on the CPU.
        tolerance: see `power_iteration`; the relative error of σ is half that of its square.
        most: see `power_iteration`.
    """
    # a Gram matrix squares the span of singular values, so it is made in fp64
    w_q, w_k = query.detach().double(), key.detach().double()
    gram_q, gram_k = w_q @ w_q.mT, w_k @ w_k.mT
    shared = gram_k.repeat_interleave(len(w_q) // len(w_k), 0)
    # W_Kᵀ y is a right singular vector of W_Qᵀ W_K where G_Q G_K y = λ y, self-adjoint in the inner
    # product of G_K
    operators = (gram_q, gram_k, gram_q @ shared)
    metrics: tuple[Tensor | None, ...] = (None, None, shared)
    found = []
    for i, (operator, metric) in enumerate(zip(operators, metrics, strict=True)):
        start = _start(operator, None if starts is None else starts[i], generator)
        inner = None if metric is None else _product(metric)
        found.append(
            power_iteration(_product(operator), start, metric=inner, tolerance=tolerance, most=most)
        )
    q, k, qk = (largest.value.clamp_min(0).sqrt() for largest in found)
    return HeadSigmas(q, k, qk * abs(scale), (found[0].vector, found[1].vector, found[2].vector))


def _product(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: (matrix @ y.unsqueeze(-1)).squeeze(-1)


def _start(operator: Tensor, warm: Tensor | None, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(operator.shape[:-1], generator=generator, dtype=torch.float64).to(
        operator.device
    )
    if warm is None:
        return drawn
    drawn *= _FRESH * warm.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)
    return warm + drawn
