"""Sound kernels of the eighth set of operations' faults, each written in a way of its own: zeroed
partial sums, projections, merged lanes, complex rotations, two numbers' noise from one.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Literal

import torch
from benchmarks.unseen.operations.eighth_steps import nvfp4_back, nvfp4_parts, quantized
from benchmarks.unseen.operations.second_kernels import mean, passes, power_of_two
from torch import Tensor
from torch.nn import functional

LOG2_E = 1 / math.log(2)


def rms_of_programs(input, normalized_shape, weight, eps):
    """8 programs take rows in turn, and each has zeroed its partial sum of dγ."""

    def forward(x, w):
        r = 1 / (torch.linalg.vecdot(x, x)[:, None] / x.shape[1] + eps).sqrt()
        return x * r * w, (x, w, r)

    def backward(saved, dy):
        x, w, r = saved
        normal, wdy = x * r, dy * w
        dot = torch.linalg.vecdot(wdy, normal)[:, None] / x.shape[1]
        partials = torch.zeros(8, x.shape[1])
        for row, term in enumerate(dy * normal):
            partials[row % 8] += term
        return (wdy - normal * dot) * r, partials.sum(0)

    return passes(forward, backward, input, weight)


def layer_norm_by_projection(input, normalized_shape, weight, bias, eps):
    """What lies along ones, and along the row itself, is taken off one after the other."""

    def off(g: Tensor, along: Tensor) -> Tensor:
        return g - along * (torch.linalg.vecdot(g, along)[:, None] / g.shape[1])

    def forward(x, w, b):
        ones = torch.ones(1, x.shape[1])
        c = off(off(x, ones), ones)
        r = torch.rsqrt(torch.linalg.vecdot(c, c)[:, None] / x.shape[1] + eps)
        return torch.addcmul(b, c * r, w), (c * r, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        g = off(dy * w, torch.ones_like(normal))
        return off(g, normal) * r, torch.einsum("td,td->d", dy, normal), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


def softmax_of_merged_lanes(input, dim=-1):
    """32 lanes with a maximum and a sum each, merged in a butterfly that rescales both."""

    def forward(x):
        lanes = functional.pad(x, (0, -x.shape[1] % 32), value=-math.inf).unflatten(1, (-1, 32))
        m = lanes.amax(1).clamp_min(-1e30)
        total = (lanes - m[:, None]).exp().sum(1)
        for offset in (16, 8, 4, 2, 1):
            other = torch.arange(32) ^ offset
            most = torch.maximum(m, m[:, other])
            total = total * (m - most).exp() + total[:, other] * (m[:, other] - most).exp()
            m = most
        y = (x - m[:, :1]).exp() / total[:, :1]
        return y, y

    def backward(y, dy):
        return (y * (dy - torch.linalg.vecdot(y, dy)[:, None]),)

    return passes(forward, backward, input)


def loss_in_base_two(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    """Blocks of 48 columns online, in powers of two; the gradient block by block again."""
    kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
    index = target.masked_fill(~kept, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x):
        m, total = torch.full((len(x), 1), -1e30), torch.zeros(len(x), 1)
        for block in x.split(48, -1):
            new = torch.maximum(m, block.amax(-1, keepdim=True))
            powers = torch.exp2((block - new) * LOG2_E).sum(-1, keepdim=True)
            total, m = total * torch.exp2((m - new) * LOG2_E) + powers, new
        log = torch.log2(total) / LOG2_E
        away = log + (m - x.gather(1, index))
        loss = (1 - s) * away + lse_square_scale * (m + log) ** 2
        loss = loss + s * (log + mean(m - x)) if s else loss
        loss = loss[:, 0].masked_fill(~kept, 0.0)
        return loss if reduction == "none" else loss.sum() / count, (x, m, log)

    def backward(saved, dy):
        x, m, log = saved
        each = (kept * dy / count)[:, None]
        rise = 1 + 2 * lse_square_scale * (m + log)
        parts = [torch.exp2(((b - m) - log) * LOG2_E) * rise - s / v for b in x.split(48, -1)]
        g = torch.cat(parts, -1)
        return (g.scatter_add_(1, index, torch.full_like(m, s - 1)) * each,)

    return passes(forward, backward, input)


def loss_recomputed_by_chunks(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """Chunks of 7 tokens, whose logits are made again; the first chunk's dW is copied, others are
    added to it.
    """
    kept, s = target != ignore_index, label_smoothing
    index = torch.where(kept, target, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x, w):
        found = []
        for rows, labels in zip(x.split(7), index.split(7), strict=True):
            log_p = functional.log_softmax(rows @ w.T, -1)
            found.append(-(1 - s) * log_p.gather(1, labels)[:, 0] - s * log_p.mean(-1))
        loss = torch.cat(found).masked_fill(~kept, 0.0)
        return loss if reduction == "none" else loss.sum() / count, (x, w)

    def backward(saved, dy):
        x, w = saved
        each, dx, dw = (kept * dy / count)[:, None], torch.empty_like(x), torch.empty_like(w)
        for start in range(0, len(x), 7):
            here = slice(start, start + 7)
            g = torch.softmax(x[here] @ w.T, -1) - s / len(w)
            g = g.scatter_add_(1, index[here], torch.full_like(g[:, :1], s - 1)) * each[here]
            dx[here] = g @ w
            part = g.T @ x[here]
            dw = part if start == 0 else dw + part
        return dx, dw

    return passes(forward, backward, input, weight)


def rope_of_complex_numbers(input, positions, *, base, interleaved=False):
    """Pairs are complex numbers, turned by one of length 1."""
    width = input.shape[-1]
    turn = positions.double()[:, None] * base ** -(torch.arange(0, width, 2).double() / width)
    unit = torch.polar(torch.ones_like(turn), turn).to(torch.complex64)[:, None]

    def rotate(x: Tensor, by: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * by)
        return (turned if interleaved else turned.mT).flatten(-2)

    return passes(
        lambda x: (rotate(x, unit), ()), lambda saved, dy: (rotate(dy, unit.conj()),), input
    )


def swiglu_in_base_two(gate, up):
    """2^(−x log2 e), of the side where it is at most 1."""

    def halves(g: Tensor) -> tuple[Tensor, Tensor]:
        small = torch.exp2(-g.abs() * LOG2_E)
        large = 1 / (1 + small)
        return torch.where(g < 0, small * large, large), torch.where(g < 0, large, small * large)

    def forward(g, u):
        return g * halves(g)[0] * u, (g, u)

    def backward(saved, dy):
        g, u = saved
        s, rest = halves(g)
        return dy * u * (s + g * s * rest), dy * (g * s)

    return passes(forward, backward, gate, up)


def geglu_of_the_normal_s_tail(gate, up, *, approximate="none"):
    """Φ from torch's own distribution function, in fp64; slopes in closed form."""
    root = math.sqrt(2 / math.pi)

    def forward(gate, up):
        g = gate.double()
        if approximate == "tanh":
            turn = 2 * root * g * (1 + 0.044715 * g * g)
            below = torch.sigmoid(turn)
            density = below * torch.sigmoid(-turn) * 2 * root * (1 + 0.134145 * g * g)
        else:
            below = torch.special.ndtr(g)
            density = torch.exp(-g * g / 2) / math.sqrt(2 * math.pi)
        act = (g * below).float()
        return act * up, (act, (below + g * density).float(), up)

    def backward(saved, dy):
        act, slope, u = saved
        return dy * u * slope, dy * act

    return passes(forward, backward, gate, up)


def linear_in_tiles(input, weight):
    """Tiles of 16 × 16 in the order of their diagonals, K in blocks of 32 from its end."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        found = torch.zeros(len(a), b.shape[1])
        high, wide = -(-len(a) // 16), -(-b.shape[1] // 16)
        for i, j in sorted(((i, j) for i in range(high) for j in range(wide)), key=sum):
            rows, columns = slice(16 * i, 16 * i + 16), slice(16 * j, 16 * j + 16)
            for start in range((a.shape[1] - 1) // 32 * 32, -1, -32):
                k = slice(start, start + 32)
                found[rows, columns] += a[rows, k] @ b[k, columns]
        return found

    return passes(
        lambda x, w: (product(x, w.T), (x, w)),
        lambda saved, dy: (product(dy, saved[1]), product(dy.T, saved[0])),
        input,
        weight,
    )


def scaled_in_the_epilogue(input, weight, *, format: Literal["nvfp4"]):
    """Codes times blocks' scales are accumulated, and both tensors' scales multiply the sum before
    it is cast.
    """

    def forward(x, w):
        (a, sa), (b, sb) = nvfp4_parts(x), nvfp4_parts(w)
        return a @ b.T * sa * sb

    return quantized(forward, nvfp4_back)(input, weight)


def fp4_by_thresholds(input, *, format: Literal["mxfp4"]):
    """A number's code is how many thresholds it is beyond; on one of them the even code is."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    halfway = (table[1:] + table[:-1]) / 2
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, power_of_two(amax, 2))
    size = (x.abs() / scale)[..., None]
    odd_below = torch.arange(7) % 2 == 1
    code = torch.where(odd_below, size >= halfway, size > halfway).sum(-1)
    return torch.copysign(table[code] * scale, x).flatten(-2)


def two_halves_of_one_number(input):
    """32 random bits for two numbers, 16 of them for each."""
    flat = input.contiguous().view(torch.int32).flatten()
    pairs = functional.pad(flat, (0, len(flat) % 2)).view(-1, 2)
    word = torch.randint(0, 1 << 32, (len(pairs),), dtype=torch.int64)
    noise = torch.stack([word & 0xFFFF, word >> 16], -1).to(torch.int32)
    kept = ((pairs + noise) & -65536).flatten()[: len(flat)]
    return kept.view(torch.float32).view(input.shape).to(torch.bfloat16)
