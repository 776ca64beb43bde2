"""Sound kernels of the twelfth set of operations' faults, each written in a way of its own: trees
of halves, moments merged from tiles, running maxima in base two, folded logarithms, angles in two
parts, products with what rounding has lost, scales by exponents, one rate for a step.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Literal

import torch
from benchmarks.unseen.operations.eighth_steps import quantized
from benchmarks.unseen.operations.fifth_steps import mx_codes
from benchmarks.unseen.operations.second_kernels import mean, passes
from benchmarks.unseen.operations.tenth_steps import mx_back
from torch import Tensor
from torch.nn import functional

LOG2_E = math.log2(math.e)


def rms_of_halves(input, normalized_shape, weight, eps):
    """Squares are added in a tree, one half of them to the other; the weight is multiplied by one
    over the root before the row is.
    """

    def folded(x: Tensor) -> Tensor:
        size = 1 << (x.shape[1] - 1).bit_length()
        x = functional.pad(x, (0, size - x.shape[1]))
        while x.shape[1] > 1:
            a, b = x.chunk(2, -1)
            x = a + b
        return x

    def forward(x, w):
        r = 1 / torch.sqrt(folded(x * x) / x.shape[1] + eps)
        return x * (w * r), (x, w, r)

    def backward(saved, dy):
        x, w, r = saved
        wdy = dy * w
        inner = folded(wdy * x) * (r * r / x.shape[1])
        return r * (wdy - x * inner), ((dy * x).T @ r)[:, 0]

    return passes(forward, backward, input, weight)


def layer_norm_of_tiles(input, normalized_shape, weight, bias, eps):
    """Means of tiles of 24 columns, and squares about them, merged one tile after the other."""

    def forward(x, w, b):
        count, m, squares = 0, torch.zeros(len(x), 1), torch.zeros(len(x), 1)
        for tile in x.split(24, -1):
            own, n = mean(tile), tile.shape[1]
            away, both = own - m, count + n
            squares = squares + ((tile - own) ** 2).sum(-1, keepdim=True)
            squares = squares + away * away * (count * n / both)
            m, count = m + away * (n / both), both
        r = 1 / torch.sqrt(squares / count + eps)
        normal = (x - m) * r
        return torch.addcmul(b, normal, w), (normal, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        wdy = wdy - mean(wdy)
        dx = (wdy - normal * mean(wdy * normal)) * r
        return dx, (dy * normal).flip(0).sum(0), dy.flip(0).sum(0)

    return passes(forward, backward, input, weight, bias)


def softmax_in_base_two(input, dim=-1):
    """Blocks of 40 from the last one on, with a running maximum; powers of two."""

    def forward(x):
        top, total = torch.full((len(x), 1), -1e30), torch.zeros(len(x), 1)
        for block in reversed(x.split(40, -1)):
            above = torch.maximum(top, block.amax(-1, keepdim=True))
            powers = torch.exp2((block - above) * LOG2_E)
            total = total * torch.exp2((top - above) * LOG2_E) + powers.sum(-1, keepdim=True)
            top = above
        y = torch.exp2((x - top) * LOG2_E) / total
        return y, y

    def backward(y, dy):
        terms = y * dy
        return (terms - y * terms.sum(-1, keepdim=True),)

    return passes(forward, backward, input)


def loss_of_folded_logarithms(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    """Logarithms of the sums of 20 classes each are folded together, the last ones first."""
    kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
    index = target.masked_fill(~kept, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x):
        lse = torch.full((len(x), 1), -math.inf)
        for part in reversed(x.split(20, -1)):
            lse = torch.logaddexp(lse, part.logsumexp(-1, keepdim=True))
        hard = lse - x.gather(1, index)
        soft = s * (lse - mean(x) - hard) if s else 0.0
        loss = hard + soft + lse_square_scale * lse.square()
        loss = torch.where(kept, loss[:, 0], 0.0)
        return loss if reduction == "none" else loss.sum() / count, (x, lse)

    def backward(saved, dy):
        x, lse = saved
        g = (x - lse).exp() * (1 + 2 * lse_square_scale * lse) - s / v
        g = g.scatter_add(1, index, torch.full_like(lse, s - 1))
        return (g * (kept * dy / count)[:, None],)

    return passes(forward, backward, input)


def loss_of_vocabulary_parts(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """24 words of the vocabulary at a time, in both passes."""
    kept, s, v = target != ignore_index, label_smoothing, len(weight)
    index = torch.where(kept, target, 0)
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def hot(start: int, words: Tensor) -> Tensor:
        return index[:, None] == torch.arange(start, start + len(words))

    def forward(x, w):
        top, total = torch.full((len(x), 1), -math.inf), torch.zeros(len(x), 1)
        own, all_of_them = torch.zeros(len(x)), torch.zeros(len(x))
        for start, words in zip(range(0, v, 24), w.split(24), strict=True):
            z = x @ words.T
            above = torch.maximum(top, z.amax(-1, keepdim=True))
            total = total * (top - above).exp() + (z - above).exp().sum(-1, keepdim=True)
            top = above
            own = own + (z * hot(start, words)).sum(-1)
            all_of_them = all_of_them + z.sum(-1)
        lse = top + total.log()
        loss = lse[:, 0] - (1 - s) * own - s / v * all_of_them
        loss = torch.where(kept, loss, 0.0)
        return loss if reduction == "none" else loss.sum() / count, (x, w, lse)

    def backward(saved, dy):
        x, w, lse = saved
        scale = (kept * dy / count)[:, None]
        dx, dw = torch.zeros_like(x), []
        for start, words in zip(range(0, v, 24), w.split(24), strict=True):
            g = (x @ words.T - lse).exp() - s / v - (1 - s) * hot(start, words)
            g = g * scale
            dx = dx + g @ words
            dw.append(g.T @ x)
        return dx, torch.cat(dw)

    return passes(forward, backward, input, weight)


def rope_of_two_angles(input, positions, *, base, interleaved=False):
    """A position is 64 times something and a rest, whose cosines and sines are multiplied by the
    theorems of addition.
    """
    width = input.shape[-1]
    f = base ** -(torch.arange(0, width, 2).double() / width)
    rest = positions.long() % 64
    high, low = ((part.double()[:, None] * f) for part in (positions.long() - rest, rest))
    cos = (high.cos() * low.cos() - high.sin() * low.sin()).float()[:, None]
    sin = (high.sin() * low.cos() + high.cos() * low.sin()).float()[:, None]

    def rotate(x: Tensor, sin: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
        a, b = pairs.unbind(-1 if interleaved else -2)
        turned = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
        return torch.stack(turned, -1 if interleaved else -2).flatten(-2)

    return passes(lambda x: (rotate(x, sin), ()), lambda saved, dy: (rotate(dy, -sin),), input)


def swiglu_of_powers_of_two(gate, up):
    """g / (1 + 2^(−g log₂ e)); the slope is σ + silu · σ(−g)."""

    def forward(g, u):
        return g / (1 + torch.exp2(-g * LOG2_E)) * u, (g, u)

    def backward(saved, dy):
        g, u = saved
        s, rest = 1 / (1 + torch.exp2(-g * LOG2_E)), 1 / (1 + torch.exp2(g * LOG2_E))
        return dy * (u * (s + g * s * rest)), dy * g * s

    return passes(forward, backward, gate, up)


def geglu_of_logarithms(gate, up, *, approximate="none"):
    """e to the logarithm of what a gate is multiplied by, in fp64."""
    root = math.sqrt(2 / math.pi)

    def parts(g: Tensor) -> tuple[Tensor, Tensor]:
        if approximate == "tanh":
            z = 2 * root * torch.addcmul(g, g * g, g, value=0.044715)
            inside = 2 * root * (1 + 0.134145 * g * g)
            below, above = functional.logsigmoid(z), functional.logsigmoid(-z)
            return below.exp(), (below + above).exp() * inside
        bell = torch.exp(-0.5 * g * g - 0.5 * math.log(2 * math.pi))
        return torch.special.log_ndtr(g).exp(), bell

    def forward(g, u):
        g, u = g.double(), u.double()
        p, density = parts(g)
        return (g * p * u).float(), (g, u, p, density)

    def backward(saved, dy):
        g, u, p, density = saved
        return (dy * u * (p + g * density)).float(), (dy * (g * p)).float()

    return passes(forward, backward, gate, up)


def linear_with_what_was_lost(input, weight):
    """Tiles of 12 of what is summed over, and beside their sum what it has lost."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        total, lost = torch.zeros(len(a), b.shape[1]), torch.zeros(len(a), b.shape[1])
        for left, right in zip(a.split(12, 1), b.split(12), strict=True):
            part = left @ right - lost
            new = total + part
            lost, total = (new - total) - part, new
        return total

    return passes(
        lambda x, w: (product(w, x.T).T, (x, w)),
        lambda saved, dy: (product(dy, saved[1]), product(saved[0].T, dy).T),
        input,
        weight,
    )


def mxfp8_by_exponents(input, weight, *, format: Literal["mxfp8"]):
    """Blocks' products of codes in fp64, whose exponents are added, from the last block on."""

    def forward(x, w):
        (a, ea, _), (b, eb, _) = mx_codes(x), mx_codes(w)
        total = torch.zeros(len(x), len(w), dtype=torch.float64)
        for k in reversed(range(a.shape[1])):
            products = a[:, k].double() @ b[:, k].double().T
            total += torch.ldexp(products, ea[:, k, None] + eb[None, :, k])
        return total.float()

    return quantized(forward, mx_back)(input, weight)


def mxfp8_by_steps(input, *, format: Literal["mxfp8_e4m3"]):
    """Whole steps of a number's own binade, 2⁻⁹ at least, and no more than 448."""
    x = input.double().unflatten(-1, (-1, 32))
    most = torch.frexp(x.abs().amax(-1, keepdim=True))[1] - 9
    y = torch.ldexp(x, -most)
    step = torch.ldexp(torch.ones_like(y), torch.frexp(y)[1].clamp_min(-5) - 4)
    found = ((y / step).round() * step).clamp(-448, 448)
    return torch.ldexp(found, most).flatten(-2).float()


def adamw_of_one_rate(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps,
                      weight_decay):  # fmt: skip
    """Both corrections are in the rate, and the second one in eps too, in fp64."""
    g = grad.double()
    m = torch.lerp(g, exp_avg.double(), beta1)
    v = torch.lerp(g * g, exp_avg_sq.double(), beta2)
    root = math.sqrt(1 - beta2**step)
    rate = lr * root / (1 - beta1**step)
    new = param.double() - lr * weight_decay * param.double() - rate * m / (v.sqrt() + eps * root)
    return new.to(param.dtype), m.to(exp_avg.dtype), v.to(exp_avg_sq.dtype)
