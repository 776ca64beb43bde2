"""Sound kernels of the thirteenth set of operations' faults, each written in a way of its own:
moments merged from tiles, powers of two, the other classes' share of a loss, half angles, products
of integers' size, mantissas rounded by hand, running means as interpolations.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Literal

import torch
from benchmarks.unseen.operations.eighth_steps import quantized
from benchmarks.unseen.operations.fifth_steps import mx_codes
from benchmarks.unseen.operations.second_kernels import mean, passes, power_of_two
from benchmarks.unseen.operations.tenth_steps import mx_back
from torch import Tensor


def rms_of_tiles(input, normalized_shape, weight, eps):
    """Squares of 24 columns at a time in fp64, and a quotient by the root."""

    def forward(x, w):
        wide, total = x.double(), torch.zeros(len(x), 1, dtype=torch.float64)
        for tile in wide.split(24, -1):
            total = total + (tile * tile).sum(-1, keepdim=True)
        size = torch.sqrt(total / x.shape[1] + eps)
        return (wide / size * w).float(), (wide / size, w.double(), size)

    def backward(saved, dy):
        normal, w, size = saved
        wdy = dy.double() * w
        dx = (wdy - normal * mean(wdy * normal)) / size
        return dx.float(), (dy * normal).sum(0).float()

    return passes(forward, backward, input, weight)


def layer_norm_merged(input, normalized_shape, weight, bias, eps):
    """Means and squared distances of 20 columns at a time, each merged with those before."""

    def forward(x, w, b):
        count = 0
        m = m2 = torch.zeros(len(x), 1, dtype=torch.float64)
        for tile in x.double().split(20, -1):
            n = tile.shape[1]
            own = mean(tile)
            away = own - m
            m2 = (
                m2 + ((tile - own) ** 2).sum(-1, keepdim=True) + away**2 * (count * n / (count + n))
            )
            m, count = m + away * (n / (count + n)), count + n
        deviation = torch.sqrt(m2 / count + eps)
        normal = (x - m) / deviation
        return torch.addcmul(b.double(), normal, w.double()).float(), (normal, w, deviation)

    def backward(saved, dy):
        normal, w, deviation = saved
        wdy = (dy * w).double()
        wdy = wdy - mean(wdy)
        dx = (wdy - normal * mean(wdy * normal)) / deviation
        return dx.float(), (dy * normal).sum(0).float(), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


def softmax_in_powers_of_two(input, dim=-1):
    """2 to x · log₂ e, 40 columns at a time, in fp64; what was added up is rescaled wherever the
    maximum rises.
    """

    def forward(x):
        wide = x.double() * math.log2(math.e)
        top = torch.full((len(x), 1), -math.inf, dtype=torch.float64)
        total = torch.zeros_like(top)
        for tile in wide.split(40, -1):
            new = torch.maximum(top, tile.amax(-1, keepdim=True))
            total = total * torch.exp2(top - new) + torch.exp2(tile - new).sum(-1, keepdim=True)
            top = new
        y = torch.exp2(wide - top - total.log2())
        return y.float(), y

    def backward(y, dy):
        inner = torch.einsum("tv,tv->t", y, dy.double())[:, None]
        return (torch.addcmul(y * dy, y, inner, value=-1).float(),)

    return passes(forward, backward, input)


def loss_of_the_others(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    """log(1 + what all other classes have beside the label's own), in fp64."""
    kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
    index = torch.where(kept, target, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x):
        wide = x.double()
        own = wide.gather(1, index)
        others = wide.scatter(1, index, -math.inf).logsumexp(-1, keepdim=True) - own
        loss = torch.logaddexp(torch.zeros_like(others), others)
        lse = own + loss
        loss = loss + s * (own - mean(wide)) + lse_square_scale * lse**2
        loss = loss[:, 0].masked_fill(~kept, 0.0)
        return (loss if reduction == "none" else loss.sum() / count).float(), (wide, lse)

    def backward(saved, dy):
        wide, lse = saved
        hot = torch.full_like(wide, s / v).scatter_add(1, index, torch.full_like(lse, 1 - s))
        g = (wide - lse).exp() * (1 + 2 * lse_square_scale * lse) - hot
        return ((g * (kept * dy / count)[:, None]).float(),)

    return passes(forward, backward, input)


def loss_of_blocks_of_classes(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """24 classes at a time in fp64: logarithms of sums are added as logarithms."""
    kept, s, v = target != ignore_index, label_smoothing, len(weight)
    index = torch.where(kept, target, 0)
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x, w):
        wide, lse = x.double(), torch.full((len(x),), -math.inf, dtype=torch.float64)
        every = torch.zeros_like(lse)
        for block in w.double().split(24):
            z = wide @ block.T
            lse, every = torch.logaddexp(lse, z.logsumexp(-1)), every + z.sum(-1)
        own = (wide * w.double()[index]).sum(-1)
        loss = (lse - (1 - s) * own - s / v * every).masked_fill(~kept, 0.0)
        return (loss if reduction == "none" else loss.sum() / count).float(), (wide, w, lse)

    def backward(saved, dy):
        x, w, lse = saved
        scale = (kept * dy / count).double()[:, None]
        dx, dw = torch.zeros_like(x), []
        for start in range(0, v, 24):
            block = w[start : start + 24].double()
            g = (x @ block.T - lse[:, None]).exp() - s / v
            hot = index[:, None] == torch.arange(start, start + len(block))
            g = (g - (1 - s) * hot) * scale
            dx = dx + g @ block
            dw.append(g.T @ x)
        return dx.float(), torch.cat(dw).float()

    return passes(forward, backward, input, weight)


def rope_by_half_angles(input, positions, *, base, interleaved=False):
    """1 − 2 sin² and 2 sin cos of half an angle, in fp64."""
    width = input.shape[-1]
    f = torch.exp(torch.arange(0, width, 2).double() * (-math.log(base) / width))
    half = positions.double()[:, None, None] * f / 2
    sin, cos = 2 * half.sin() * half.cos(), 1 - 2 * half.sin() ** 2

    def rotate(x: Tensor, sin: Tensor) -> Tensor:
        pairs = x.double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
        a, b = pairs.unbind(-1 if interleaved else -2)
        found = a * cos - b * sin, b * cos + a * sin
        return torch.stack(found, -1 if interleaved else -2).flatten(-2).float()

    return passes(lambda x: (rotate(x, sin), ()), lambda saved, dy: (rotate(dy, -sin),), input)


def swiglu_by_logarithms(gate, up):
    """e to minus log(1 + e^−g) and to minus log(1 + e^g), in fp64."""

    def sigmoid(g: Tensor) -> Tensor:
        return torch.exp(-torch.logaddexp(torch.zeros_like(g), -g))

    def forward(g, u):
        wide = g.double()
        return (wide * u * sigmoid(wide)).float(), (wide, u.double())

    def backward(saved, dy):
        g, u = saved
        s = sigmoid(g)
        return (dy * u * torch.addcmul(s, s * g, sigmoid(-g))).float(), (dy * (g * s)).float()

    return passes(forward, backward, gate, up)


def linear_of_outer_products(input, weight):
    """Eight features at a time in fp64, and the weight's gradient five tokens at a time."""

    def added(a: Tensor, b: Tensor, size: int) -> Tensor:
        total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64)
        for left, right in zip(a.double().split(size), b.double().split(size), strict=True):
            total = total + torch.einsum("ki,kj->ij", left, right)
        return total.float()

    return passes(
        lambda x, w: (added(x.T, w.T, 8), (x, w)),
        lambda saved, dy: (added(dy.T, saved[1], 8), added(dy, saved[0], 5)),
        input,
        weight,
    )


def mxfp8_by_added_exponents(input, weight, *, format: Literal["mxfp8"]):
    """Sums of 32 products of codes in fp64, each times 2 to the sum of both scales' exponents."""

    def forward(x, w):
        (a, ea, _), (b, eb, _) = mx_codes(x), mx_codes(w)
        sums = torch.einsum("tkc,nkc->tnk", a.double(), b.double())
        return torch.ldexp(sums, ea[:, None] + eb[None]).sum(-1).float()

    return quantized(forward, mx_back)(input, weight)


def mxfp8_mantissas_by_hand(input, *, format: Literal["mxfp8_e4m3"]):
    """Steps of an eighth of a number's binade, none below 2⁻⁹, and 448 for all that is more."""
    x = input.double().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, power_of_two(amax, 8))
    y = x / scale
    exponent = (torch.frexp(y)[1] - 1).clamp_min(-6)
    step = torch.ldexp(torch.ones_like(y), exponent - 3)
    return (((y / step).round() * step).clamp(-448, 448) * scale).flatten(-2).float()


def router_of_logarithms(logits, k, *, renormalize=True):
    """A logarithm of the sum of the chosen, or of all, is taken off the chosen logits, in fp64."""

    def forward(z):
        index = z.topk(k, -1).indices
        wide = z.double()
        picked = wide.gather(1, index)
        w = (picked - (picked if renormalize else wide).logsumexp(-1, keepdim=True)).exp()
        return (w.to(logits.dtype), index), (torch.softmax(wide, -1), index, w)

    def backward(saved, dy):
        p, index, w = saved
        own = w * dy
        rest = own.sum(-1, keepdim=True)
        if renormalize:
            return (torch.zeros_like(p).scatter(1, index, own - w * rest).float(),)
        return (torch.zeros_like(p).scatter(1, index, own).sub(p * rest).float(),)

    return passes(forward, backward, logits)


def adamw_by_interpolation(
    param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay
):
    """Moments as interpolations in fp64; a rate with both corrections, and eps with its own."""
    g = grad.double()
    m, v = torch.lerp(g, exp_avg.double(), beta1), torch.lerp(g * g, exp_avg_sq.double(), beta2)
    root = math.sqrt(-math.expm1(step * math.log(beta2)))
    rate = lr * root / -math.expm1(step * math.log(beta1))
    new = torch.addcdiv(param.double(), m, v.sqrt() + eps * root, value=-rate)
    new = new - (lr * weight_decay) * param
    return new.float(), m.float(), v.float()
