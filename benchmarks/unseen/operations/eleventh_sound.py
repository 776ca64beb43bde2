"""Sound kernels of the eleventh set of operations' faults, each written in a way of its own:
logarithms of a size, moments in fp64, powers of a unit, scaled complementary error functions,
differences for a maximum, a search among thresholds.
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


def rms_by_a_logarithm(input, normalized_shape, weight, eps):
    """One over the root is e to minus half a logarithm, in fp64."""

    def forward(x, w):
        wide = x.double()
        r = torch.exp(-0.5 * torch.log(mean(wide * wide) + eps))
        normal = wide * r
        return (normal * w).float(), (normal.float(), w, r.float())

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        return r * (wdy - normal * mean(wdy * normal)), torch.einsum("td,td->d", dy, normal)

    return passes(forward, backward, input, weight)


def layer_norm_of_moments(input, normalized_shape, weight, bias, eps):
    """Σ x and Σ x² of a row less its first number, in fp64, where their difference is exact
    enough.
    """

    def forward(x, w, b):
        wide = x.double() - x[:, :1]
        n = x.shape[1]
        first, second = wide.sum(-1, keepdim=True), (wide * wide).sum(-1, keepdim=True)
        v = ((second - first * first / n) / n).clamp_min(0)
        r = (v + eps).rsqrt()
        normal = (wide - first / n) * r
        return (normal * w + b).float(), (normal.float(), w, r.float())

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        dx = wdy - normal * mean(wdy * normal)
        return (dx - mean(wdy)) * r, (dy * normal).sum(0), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


def softmax_of_running_logarithms(input, dim=-1):
    """The last of a row's running logarithms of sums, in fp64, is taken off."""

    def forward(x):
        wide = x.double()
        y = torch.exp(wide - torch.logcumsumexp(wide, -1)[:, -1:])
        return y.float(), y

    def backward(y, dy):
        dy = dy.double()
        return ((y * dy - y * (y * dy).sum(-1, keepdim=True)).float(),)

    return passes(forward, backward, input)


def loss_down_columns(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    """Classes first, and tokens along the last dimension, in fp64."""
    kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
    index = target.masked_fill(~kept, 0)[None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x):
        z = x.double().T.contiguous()
        top = z.amax(0)
        lse = top + (z - top).exp().sum(0).log()
        away = (z - lse).neg()
        loss = (1 - s) * away.gather(0, index)[0] + s * away.mean(0) + lse_square_scale * lse**2
        loss = torch.where(kept, loss, 0.0)
        g = (-away).exp() * (1 + 2 * lse_square_scale * lse) - s / v
        g[index[0], torch.arange(len(kept))] -= 1 - s
        return (loss if reduction == "none" else loss.sum() / count).float(), g

    def backward(g, dy):
        return (torch.where(kept, g * (dy / count), 0.0).T.float(),)

    return passes(forward, backward, input)


def loss_of_five_tokens(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """Five tokens at a time in fp64, with logits again in the backward pass."""
    kept, s, v = target != ignore_index, label_smoothing, len(weight)
    index = torch.where(kept, target, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def logs(rows: Tensor, w: Tensor) -> Tensor:
        return torch.log_softmax(rows.double() @ w.double().T, -1)

    def forward(x, w):
        parts = zip(x.split(5), index.split(5), strict=True)
        found = []
        for rows, own in parts:
            logarithms = logs(rows, w)
            found.append((s - 1) * logarithms.gather(1, own)[:, 0] - s * logarithms.mean(-1))
        loss = torch.where(kept, torch.cat(found), 0.0)
        return (loss if reduction == "none" else loss.sum() / count).float(), (x, w)

    def backward(saved, dy):
        x, w = saved
        scale = (kept * (dy / count)).double()[:, None]
        dx, dw = [], torch.zeros_like(w, dtype=torch.float64)
        for rows, own, each in zip(x.split(5), index.split(5), scale.split(5), strict=True):
            g = logs(rows, w).exp() - s / v
            g = g.scatter_add(1, own, torch.full_like(own, s - 1, dtype=torch.float64)) * each
            dx.append(g @ w.double())
            dw += g.T @ rows.double()
        return torch.cat(dx).float(), dw.float()

    return passes(forward, backward, input, weight)


def rope_by_powers_of_a_unit(input, positions, *, base, interleaved=False):
    """e^{i f} to the power of the position, squared and multiplied bit by bit, in fp64."""
    width = input.shape[-1]
    f = base ** -(torch.arange(0, width, 2).double() / width)
    unit, left = torch.polar(torch.ones_like(f), f), positions.long().abs()
    turn = torch.ones(len(positions), width // 2, dtype=torch.complex128)
    while bool((left > 0).any()):
        turn = torch.where((left % 2 == 1)[:, None], turn * unit, turn)
        unit, left = unit * unit, left // 2
    turn = torch.where((positions < 0)[:, None], turn.conj(), turn)[:, None]

    def rotate(x: Tensor, by: Tensor) -> Tensor:
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        found = torch.complex(a.double(), b.double()) * by
        if interleaved:
            return torch.view_as_real(found).flatten(-2).float()
        return torch.cat([found.real, found.imag], -1).float()

    return passes(
        lambda x: (rotate(x, turn), ()), lambda saved, dy: (rotate(dy, turn.conj()),), input
    )


def swiglu_by_two_quotients(gate, up):
    """1 / (1 + e^−g) and 1 / (1 + e^g) in fp64, neither from the other."""

    def forward(g, u):
        return (g.double() / (1 + torch.exp(-g.double())) * u).float(), (g, u)

    def backward(saved, dy):
        g, u = (x.double() for x in saved)
        s, rest = 1 / (1 + torch.exp(-g)), 1 / (1 + torch.exp(g))
        return (dy * u * s * (1 + g * rest)).float(), (dy * (g * s)).float()

    return passes(forward, backward, gate, up)


def geglu_of_scaled_tails(gate, up, *, approximate="none"):
    """½ e^{−g² / 2} erfcx(|g| / √2) beyond |g|, and one less it on the other side, in fp64."""
    root = math.sqrt(2 / math.pi)

    def tail(size: Tensor) -> tuple[Tensor, Tensor]:
        if approximate == "tanh":
            e = torch.exp(-2 * root * size * (1 + 0.044715 * size * size))
            return e / (1 + e), 2 * root * (1 + 0.134145 * size * size) * e / (1 + e) ** 2
        bell = torch.exp(-0.5 * size * size)
        return 0.5 * bell * torch.special.erfcx(size * math.sqrt(0.5)), bell * (0.5 * root)

    def forward(g, u):
        g, u = g.double(), u.double()
        beyond, density = tail(g.abs())
        p = torch.where(g < 0, beyond, 1 - beyond)
        return (g * p * u).float(), (g, u, p, density)

    def backward(saved, dy):
        g, u, p, density = saved
        return (dy * u * (p + g * density)).float(), (dy * (g * p)).float()

    return passes(forward, backward, gate, up)


def linear_from_the_last_feature(input, weight):
    """Tiles of 20 of what is summed over, from the end, in fp64."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(len(a), b.shape[1], dtype=torch.float64)
        parts = list(zip(a.split(20, 1), b.split(20), strict=True))
        for left, right in reversed(parts):
            total = torch.addmm(total, left.double(), right.double())
        return total.float()

    return passes(
        lambda x, w: (product(x, w.T), (x, w)),
        lambda saved, dy: (product(dy, saved[1]), product(dy.T, saved[0])),
        input,
        weight,
    )


def nvfp4_products_in_fp64(input, weight, *, format: Literal["nvfp4"]):
    """Blocks' products of codes, each multiplied by both of its scales, in fp64; the tensors'
    scales last.
    """

    def forward(x, w):
        (a, sa, wa), (b, sb, wb) = nvfp4_codes(x), nvfp4_codes(w)
        total = torch.zeros(len(x), len(w), dtype=torch.float64)
        for k in range(a.shape[1]):
            products = a[:, k].double() @ b[:, k].double().T
            total += products * torch.outer(sa[:, k].double(), sb[:, k].double())
        return (total * (wa.double() * wb.double())).float()

    return quantized(forward, nvfp4_back)(input, weight)


def fp4_by_a_search(input, *, format: Literal["mxfp4"]):
    """Where a size lies among midpoints; those whose upper neighbor is even begin a little lower,
    so that it gets the tie.
    """
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    middle = (values[1:] + values[:-1]) / 2
    lower = torch.nextafter(middle, torch.zeros(()))
    middle = torch.where(torch.arange(7) % 2 == 1, lower, middle)
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, power_of_two(amax, 2))
    found = values[torch.searchsorted(middle, (x / scale).abs().contiguous())]
    return (torch.copysign(found, x) * scale).flatten(-2)


def router_of_differences(logits, k, *, renormalize=True):
    """One over a sum of powers of differences to the own logit, in fp64."""

    def forward(z):
        index = z.topk(k, -1).indices
        wide = z.double()
        chosen = wide.gather(1, index)
        p = torch.softmax(wide, -1)
        of = chosen if renormalize else wide
        w = 1 / torch.exp(of[:, None, :] - chosen[..., None]).sum(-1)
        return (w.to(logits.dtype), index), (p, index, w)

    def backward(saved, dy):
        p, index, w = saved
        dy = dy.double()
        inner = (w * dy).sum(-1, keepdim=True)
        if renormalize:
            dz = torch.zeros_like(p).scatter(1, index, w * (dy - inner))
        else:
            dz = (-p * inner).scatter_add(1, index, w * dy)
        return (dz.float(),)

    return passes(forward, backward, logits)
