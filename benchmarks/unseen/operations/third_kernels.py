"""Kernels of operations as model code has them, for the third set of unseen faults: fp32 between
two casts, and what an author may get wrong as a function.
"""

# ruff: noqa: ARG001, ARG004, D102 - kernels and steps of autograd have their signatures

from __future__ import annotations

from typing import Any, Literal

import torch
from benchmarks.unseen.operations.second_kernels import added, bf16, by_rows, e4m3, passes, to
from torch import Tensor

fp16 = to(torch.float16)


def straight(value: Tensor, gradient: Tensor) -> Tensor:
    """The one's value with the other's gradient."""
    return value.detach() + gradient - gradient.detach()


def at(names: str, change: Any):
    """A seam that changes some stages."""
    return lambda stage, x: change(x) if stage in names.split() else x


def in_fp16(width: int):
    """Rows summed in fp16, rounded after every `width` terms."""
    return lambda terms: added(fp16, width)(terms.mT)[:, None]


def cross_entropy(
    input,
    target,
    *,
    ignore_index=-100,
    reduction="none",
    label_smoothing=0.0,
    lse_square_scale=0.0,
    hard=None,
    smooth=None,
    penalty=None,
):
    """As modules write it. What an author may get wrong is a function of what it is made of."""
    x, kept = input.float(), target != ignore_index
    lse = x.logsumexp(-1)
    own = x.gather(1, torch.where(kept, target, 0)[:, None])[:, 0]
    others = lse - x.mean(-1) if smooth is None else smooth(lse, x, label_smoothing)
    z = lse_square_scale * lse * lse
    loss = (1 - label_smoothing) * (lse - own) + label_smoothing * others
    loss = loss + (z if penalty is None else penalty(z))
    loss = torch.where(kept, loss, 0.0)
    loss = loss if hard is None else hard(loss, label_smoothing * others, kept)
    total = loss if reduction == "none" else loss.sum() / (kept.sum() if reduction == "mean" else 1)
    return total.to(input.dtype)


def variant(**parts: Any):
    def kernel(
        input,
        target,
        *,
        ignore_index=-100,
        reduction="none",
        label_smoothing=0.0,
        lse_square_scale=0.0,
    ):
        return cross_entropy(
            input,
            target,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale,
            **parts,
        )

    return kernel


class FirstGradient(torch.autograd.Function):
    """Multiplies every token's gradient by the first token's."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad[:1].expand_as(grad) if grad.ndim else grad


def adamw(
    param,
    grads,
    exp_avg,
    exp_avg_sq,
    *,
    step,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    size=lambda v, two, eps: (v / two).sqrt() + eps,
    second=lambda v: v,
    stored=lambda p: p,
):
    p, m, v = param.float(), exp_avg.float(), exp_avg_sq.float()
    for i, g in enumerate(grads.float().reshape(-1, *param.shape)):
        m, v = beta1 * m + (1 - beta1) * g, second(beta2 * v + (1 - beta2) * g * g)
        one, two = 1 - beta1 ** (step + i), 1 - beta2 ** (step + i)
        p = p * (1 - lr * weight_decay) - lr * (m / one) / size(v, two, eps)
        p = stored(p)
    return p.to(param.dtype), m.to(exp_avg.dtype), v.to(exp_avg_sq.dtype)


def with_scales(change: Any):
    """FP8 by rows in both passes; the weight's scales are `change`d in the forward pass."""

    def kernel(input, weight, *, format: Literal["fp8_row"]):
        def forward(x, w):
            scale = (w.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-30)
            return by_rows(x) @ (e4m3(w / scale) * change(scale)).T, (x, w)

        def backward(saved, dy):
            x, w = saved
            return by_rows(dy) @ by_rows(w.T).T, by_rows(dy.T) @ by_rows(x.T).T

        return passes(forward, backward, input, weight)

    return kernel


def parts_in_bf16(a: Tensor, b: Tensor, width: int) -> Tensor:
    """a b, its partial sums rounded to bf16 where they are added."""
    total = bf16(a[:, :width] @ b[:width])
    for i in range(width, a.shape[1], width):
        total = bf16(total + bf16(a[:, i : i + width] @ b[i : i + width]))
    return total


def linear(forward_width: int = 0, dx_width: int = 0, dw_width: int = 0):
    """Products in parts of so many terms; 0 for all at once, in fp32."""

    def product(a: Tensor, b: Tensor, width: int) -> Tensor:
        return parts_in_bf16(a, b, width) if width else a @ b

    def kernel(input, weight):
        def backward(saved, dy):
            x, w = saved
            return product(dy, w, dx_width), product(dy.T, x, dw_width)

        return passes(
            lambda x, w: (product(x, w.T, forward_width), (x, w)), backward, input, weight
        )

    return kernel
