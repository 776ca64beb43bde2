"""Sound kernels of the ninth set of operations' faults, each written in a way of its own: merged
blocks, corrected means, sums from the end, tables of two parts, products of codes.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Literal

import torch
from benchmarks.unseen.operations.eighth_steps import nvfp4_back, quantized
from benchmarks.unseen.operations.ninth_steps import nvfp4_codes
from benchmarks.unseen.operations.second_kernels import mean, passes, power_of_two
from torch import Tensor
from torch.nn import functional

LOG2_E = 1 / math.log(2)


def rms_of_merged_blocks(input, normalized_shape, weight, eps):
    """Mean squares of blocks of 48 columns, merged by their counts; dγ as a product with ones."""

    def forward(x, w):
        square, count = torch.zeros(len(x), 1), 0
        for block in x.split(48, -1):
            count += block.shape[1]
            square = square + (mean(block * block) - square) * (block.shape[1] / count)
        r = 1 / torch.sqrt(square + eps)
        return (x * r) * w, (x * r, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        inner = torch.bmm(wdy[:, None], normal[..., None])[:, 0] / w.numel()
        return (wdy - normal * inner) * r, (torch.ones(1, len(dy)) @ (dy * normal))[0]

    return passes(forward, backward, input, weight)


def layer_norm_of_a_corrected_mean(input, normalized_shape, weight, bias, eps):
    """A mean, and the mean of what it leaves; the gradient in one expression of both sums."""

    def forward(x, w, b):
        c = x - mean(x)
        c = c - mean(c)
        r = (torch.linalg.vector_norm(c, dim=-1, keepdim=True) ** 2 / x.shape[1] + eps).rsqrt()
        return torch.addcmul(b, c * r, w), (c * r, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy, d = dy * w, dy.shape[1]
        sums = torch.stack([wdy.sum(-1), (wdy * normal).sum(-1)], -1)
        dx = (r / d) * (d * wdy - sums[:, :1] - normal * sums[:, 1:])
        return dx, (dy * normal).sum(0), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


def softmax_from_the_end(input, dim=-1):
    """Blocks of 40 columns, the last one first, in powers of two; a second pass divides."""

    def forward(x):
        m, total = torch.full((len(x), 1), -1e30), torch.zeros(len(x), 1)
        for block in reversed(x.split(40, -1)):
            new = torch.maximum(m, block.amax(-1, keepdim=True))
            powers = torch.exp2((block - new) * LOG2_E).sum(-1, keepdim=True)
            total, m = total * torch.exp2((m - new) * LOG2_E) + powers, new
        y = torch.exp2((x - m) * LOG2_E) / total
        return y, y

    def backward(y, dy):
        terms = y * dy
        return (terms - y * terms.sum(-1, keepdim=True),)

    return passes(forward, backward, input)


def loss_of_the_others(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    """The label's logit against the logarithm of all others' sum."""
    kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
    index = target.clamp_min(0).masked_fill(~kept, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x):
        own = x.gather(1, index)
        others = x.scatter(1, index, -math.inf).logsumexp(-1, keepdim=True)
        away = functional.softplus(others - own, threshold=1e9)
        lse = own + away
        loss = (1 - s) * away + lse_square_scale * lse * lse
        loss = (loss + s * (away + mean(own - x)) if s else loss)[:, 0].masked_fill(~kept, 0.0)
        p = torch.exp((x - own) - away)
        g = p.scatter_add(1, index, torch.full_like(own, s - 1)) - s / v
        if not s:
            g = g.scatter(1, index, -torch.sigmoid(others - own))
        g = g + 2 * lse_square_scale * lse * p
        return loss if reduction == "none" else loss.sum() / count, g

    def backward(g, dy):
        return (g * (kept * dy / count)[:, None],)

    return passes(forward, backward, input)


def rope_of_two_tables(input, positions, *, base, interleaved=False):
    """Angles of positions' 64s and of what is left, from two tables in fp64."""
    width = input.shape[-1]
    f = base ** -(torch.arange(0, width, 2).double() / width)
    coarse = (positions // 64 * 64).double()[:, None] * f
    fine = (positions % 64).double()[:, None] * f
    cos = (coarse.cos() * fine.cos() - coarse.sin() * fine.sin()).float()[:, None]
    sin = (coarse.sin() * fine.cos() + coarse.cos() * fine.sin()).float()[:, None]

    def rotate(x: Tensor, sin: Tensor) -> Tensor:
        out = torch.empty_like(x)
        half = width // 2
        first, second = (
            (slice(0, None, 2), slice(1, None, 2))
            if interleaved
            else (slice(0, half), slice(half, None))
        )
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    return passes(lambda x: (rotate(x, sin), ()), lambda saved, dy: (rotate(dy, -sin),), input)


def swiglu_by_one_quotient(gate, up):
    """g u / (1 + e^−g), the exponent no larger than 80; slopes of the same denominator."""

    def forward(g, u):
        e = torch.exp((-g).clamp_max(80.0))
        return g / (1 + e) * u, (g, u, e)

    def backward(saved, dy):
        g, u, e = saved
        s = 1 / (1 + e)
        return dy * u * (s * (1 + g * (e * s))), dy * (g * s)

    return passes(forward, backward, gate, up)


def geglu_of_two_branches(gate, up, *, approximate="none"):
    """erf where the gate is above −1, erfc below; the tanh formula by a sigmoid of each sign."""
    root = math.sqrt(2 / math.pi)

    def phi(g: Tensor) -> tuple[Tensor, Tensor]:
        if approximate == "tanh":
            turn = 2 * root * torch.addcmul(g, g * g, g, value=0.044715)
            below = torch.sigmoid(turn)
            return below, below * torch.sigmoid(-turn) * 2 * root * (1 + 0.134145 * g * g)
        x = g * math.sqrt(0.5)
        below = torch.where(g > -1, 0.5 + 0.5 * torch.erf(x), 0.5 * torch.erfc(-x))
        return below, torch.exp(-x * x) * (root / 2)

    def forward(g, u):
        return (g * u) * phi(g)[0], (g, u)

    def backward(saved, dy):
        g, u = saved
        below, density = phi(g)
        return (dy * u) * torch.addcmul(below, g, density), (dy * g) * below

    return passes(forward, backward, gate, up)


def linear_of_stripes(input, weight):
    """K in four stripes of every fourth number, whose sums are added in pairs."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        parts = [a[:, start::4] @ b[start::4] for start in range(4)]
        return (parts[0] + parts[1]) + (parts[2] + parts[3])

    return passes(
        lambda x, w: (product(x, w.T), (x, w)),
        lambda saved, dy: (product(dy, saved[1]), product(dy.T, saved[0])),
        input,
        weight,
    )


def products_of_codes(input, weight, *, format: Literal["nvfp4"]):
    """Codes are multiplied block by block, and each block's product by both blocks' scales."""

    def forward(x, w):
        (a, sa, whole_a), (b, sb, whole_b) = nvfp4_codes(x), nvfp4_codes(w)
        total = torch.zeros(len(x), len(w))
        for k in range(a.shape[1]):
            total = total + (a[:, k] @ b[:, k].T) * (sa[:, k, None] * sb[None, :, k])
        return total * whole_a * whole_b

    return quantized(forward, nvfp4_back)(input, weight)


def fp8_by_steps(input, *, format: Literal["mxfp8_e4m3"]):
    """E4M3 as multiples of the step of a number's own exponent, which is −6 at least."""
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, power_of_two(amax, 8))
    y = (x / scale).clamp(-448, 448)
    exponent = (torch.frexp(y)[1] - 1).clamp_min(-6)
    step = torch.ldexp(torch.ones_like(y), exponent - 3)
    return ((y / step).round() * step * scale).flatten(-2)


def router_by_sorting(logits, k, *, renormalize=True):
    """All experts in the order of their logits, of which the first k are kept."""

    def forward(z):
        ordered, order = torch.sort(z, dim=-1, descending=True, stable=True)
        powers = (ordered - ordered[:, :1]).exp()
        among = powers[:, :k] if renormalize else powers
        w = powers[:, :k] / among.sum(-1, keepdim=True)
        return (w.to(logits.dtype), order[:, :k].contiguous()), (powers, order, w)

    def backward(saved, dy):
        powers, order, w = saved
        inner = (dy * w).sum(-1, keepdim=True)
        dz = torch.zeros_like(powers)
        dz[:, :k] = w * dy
        p = powers / powers.sum(-1, keepdim=True)
        if renormalize:
            dz[:, :k] -= w * inner
        else:
            dz -= p * inner
        return (torch.zeros_like(dz).scatter_(1, order, dz),)

    return passes(forward, backward, logits)


def adamw_by_lerp(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
    """Moments as interpolations; the corrections in fp64, in the size of a step and the root."""
    g = grad.float()
    m = torch.lerp(exp_avg, g, 1 - beta1)
    v = (exp_avg_sq * beta2).addcmul(g, g, value=1 - beta2)
    one, two = -math.expm1(step * math.log(beta1)), -math.expm1(step * math.log(beta2))
    size = v.sqrt() / math.sqrt(two) + eps
    return (param - lr * weight_decay * param).addcdiv(m, size, value=-lr / one), m, v


def embedding_token_by_token(input, weight, padding_idx=None):
    """Tokens' gradients are added one after the other, those of the padding row skipped."""

    def backward(shape, dy):
        dw = torch.zeros(shape)
        for token, row in enumerate(input.tolist()):
            if row != padding_idx:
                dw[row] += dy[token]
        return (dw,)

    return passes(lambda w: (torch.index_select(w, 0, input), w.shape), backward, weight)
