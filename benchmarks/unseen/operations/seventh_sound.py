"""Sound kernels of the seventh set of operations' faults, each written in a way of its own:
Newton's roots, trees of moments, tangents of half angles, sums token by token.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Literal

import torch
from benchmarks.unseen.operations.second_kernels import e4m3, mean, passes
from torch import Tensor
from torch.nn import functional


def newton(x: Tensor) -> Tensor:
    """1 / √x from half of its bits, four times improved."""
    y = (0x5F3759DF - (x.contiguous().view(torch.int32) >> 1)).view(torch.float32)
    for _ in range(4):
        y = y * (1.5 - 0.5 * x * y * y)
    return y


def rms_by_newton(input, normalized_shape, weight, eps):
    def forward(x, w):
        r = newton(mean(x * x) + eps)
        return x * r * w, (x, w, r)

    def backward(saved, dy):
        x, w, r = saved
        wdy = dy * w
        return r * wdy - x * (r * r * r * mean(wdy * x)), (dy * (x * r)).sum(0)

    return passes(forward, backward, input, weight)


def layer_norm_by_a_tree(input, normalized_shape, weight, bias, eps):
    """Columns less the first are merged in pairs, then pairs of those, with means and squares."""

    def moments(x):
        count, middle, squares = torch.ones(x.shape[1]), x, torch.zeros_like(x)
        while len(count) > 1:
            odd = (0, len(count) % 2)
            (n, m), (a, b), (p, q) = (
                (t[..., ::2], t[..., 1::2])
                for t in (functional.pad(t, odd) for t in (count, middle, squares))
            )
            count, away = n + m, b - a
            middle = a + away * (m / count)
            squares = p + q + away * away * (n * m / count)
        return middle, squares / x.shape[1]

    def forward(x, w, b):
        x = x - x[:, :1]
        middle, variance = moments(x)
        r = 1 / (variance + eps).sqrt()
        normal = (x - middle) * r
        return normal * w + b, (normal, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        dx = r * (wdy - mean(wdy) - normal * mean(wdy * normal))
        return dx, (dy * normal).sum(0), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


def softmax_by_its_logarithm(input, dim=-1):
    def forward(x):
        m = x.amax(-1, keepdim=True)
        y = ((x - m) - (x - m).exp().sum(-1, keepdim=True).log()).exp()
        return y, y

    def backward(y, dy):
        return (y * dy - y * (y * dy).sum(-1, keepdim=True),)

    return passes(forward, backward, input)


def loss_beside_the_best(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    """The largest logit's own power is 1; the logarithm is of the others' sum beside it."""
    kept, s = target != ignore_index, label_smoothing
    label = target.masked_fill(~kept, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x):
        best = x.max(-1, keepdim=True)
        others = (x - best.values).exp().scatter(1, best.indices, 0.0).sum(-1, keepdim=True)
        log = torch.log1p(others)
        nats = log + (best.values - x)
        lse = log + best.values
        loss = (1 - s) * nats.gather(1, label) + s * mean(nats) + lse_square_scale * lse * lse
        loss = torch.where(kept, loss[:, 0], 0.0)
        return loss if reduction == "none" else loss.sum() / count, (nats, lse)

    def backward(saved, dy):
        nats, lse = saved
        g = (-nats).exp() * (1 + 2 * lse_square_scale * lse) - s / nats.shape[1]
        g = g.scatter_add(1, label, torch.full_like(lse, s - 1))
        return (g * (kept * dy / count)[:, None],)

    return passes(forward, backward, input)


def loss_token_by_token(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """One row of logits at a time, whose gradients are outer products."""
    kept, s = target != ignore_index, label_smoothing
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x, w):
        losses = torch.zeros(len(x))
        for i in kept.nonzero()[:, 0].tolist():
            away = (z := w @ x[i]).logsumexp(0) - z
            losses[i] = (1 - s) * away[target[i]] + s * away.mean()
        return losses if reduction == "none" else losses.sum() / count, (x, w)

    def backward(saved, dy):
        x, w = saved
        dy = (dy / count).expand(len(x))
        dx, dw = torch.zeros_like(x), torch.zeros_like(w)
        for i in kept.nonzero()[:, 0].tolist():
            g = (w @ x[i]).softmax(0) - s / len(w)
            g[target[i]] -= 1 - s
            dx[i] = dy[i] * (g @ w)
            dw += torch.outer(dy[i] * g, x[i])
        return dx, dw

    return passes(forward, backward, input, weight)


def rope_by_half_angles(input, positions, *, base, interleaved=False):
    """Sines and cosines of the tangent of half the angle."""
    width = input.shape[-1]
    turn = positions.double()[:, None] * base ** -(torch.arange(0, width, 2).double() / width)
    t = (turn / 2).tan()[:, None]
    cos, sin = ((1 - t * t) / (1 + t * t)).float(), (2 * t / (1 + t * t)).float()
    pairs = input.float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
    return torch.stack(turned, -1 if interleaved else -2).flatten(-2).to(input.dtype)


def swiglu_by_logarithms(gate, up):
    """The sigmoid and its complement from their logarithms, in fp64."""

    def forward(g, u):
        s = functional.logsigmoid(g.double()).exp()
        return (g * s * u).float(), (g, u, s)

    def backward(saved, dy):
        g, u, s = saved
        slope = s + g * s * functional.logsigmoid(-g.double()).exp()
        return (dy * u * slope).float(), (dy * g * s).float()

    return passes(forward, backward, gate, up)


def linear_by_outer_products(input, weight):
    def product(a, b):
        total = torch.zeros(len(a), b.shape[1])
        for column, row in zip(a.T, b, strict=True):
            total.addr_(column, row)
        return total

    return passes(
        lambda x, w: (product(x, w.T), (x, w)),
        lambda saved, dy: (product(dy, saved[1]), product(dy.T, saved[0])),
        input,
        weight,
    )


def scales_after_the_product(input, weight, *, format: Literal["fp8_row"]):
    """Codes are multiplied, and the rows' and columns' scales with what comes of it."""

    def codes(x):
        most = x.abs().amax(-1, keepdim=True)
        scale = torch.where(most > 0, most / 448, 1.0)
        return e4m3(x / scale), scale

    def product(a, b):
        (x, sx), (y, sy) = codes(a), codes(b)
        return torch.einsum("tk,nk->tn", x, y) * sx * sy.T

    return passes(
        lambda x, w: (product(x, w), (x, w)),
        lambda saved, dy: (product(dy, saved[1].T), product(dy.T, saved[0].T)),
        input,
        weight,
    )


def nvfp4_in_a_table(input, *, format: Literal["nvfp4"]):
    """All of FP4's numbers in order, and halfway between two of them the even code."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    halfway = (table[1:] + table[:-1]) / 2
    x = input.float()
    whole = x.abs().amax() / (448 * 6)
    blocks = x.unflatten(-1, (-1, 16))
    most = blocks.abs().amax(-1, keepdim=True)
    scale = e4m3((most / (6 * whole.clamp_min(1e-38))).clamp_max(448)) * whole
    size = blocks.abs() / torch.where(scale > 0, scale, math.inf)
    place = torch.bucketize(size, halfway)
    tie = size == halfway[place.clamp_max(len(halfway) - 1)]
    place = place + (tie & (place % 2 == 1)).long()
    return torch.copysign(table[place] * scale, blocks).flatten(-2)


def router_from_the_smallest(logits, k, *, renormalize=True):
    """Powers are summed in the order of their size."""
    z = logits.float()
    best = z.topk(k, -1)
    most = best.values[:, :1].detach()
    of = best.values.flip(-1) if renormalize else z.sort(-1).values
    total = (of - most).exp().sum(-1, keepdim=True)
    return ((best.values - most).exp() / total).to(logits.dtype), best.indices


def adamw_of_factors(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps,
                     weight_decay):  # fmt: skip
    """Both corrections in the rate and in eps."""
    g = grad.float()
    m = exp_avg + (1 - beta1) * (g - exp_avg)
    v = exp_avg_sq + (1 - beta2) * (g * g - exp_avg_sq)
    root = math.sqrt(1 - beta2**step)
    rate = lr * root / (1 - beta1**step)
    return param - lr * weight_decay * param - rate * m / (v.sqrt() + eps * root), m, v
