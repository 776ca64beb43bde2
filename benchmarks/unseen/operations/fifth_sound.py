"""Sound kernels of the fifth set of operations' faults, each written in a way of its own: Welford's
merge, base two, tiles of the vocabulary, tables of codes, compensated sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from benchmarks.unseen.operations.fifth_steps import mx_codes, step_of_adamw
from benchmarks.unseen.operations.second_kernels import bf16, mean, passes
from torch import Tensor
from torch.nn import functional


def rms_of_lanes(input, normalized_shape, weight, eps):
    """Sums of squares by eight lanes; a root that is divided by; the gradient from the result."""

    def forward(x, w):
        lanes = functional.pad(x, (0, -x.shape[1] % 8)).unflatten(1, (-1, 8))
        root = (lanes.square().sum(1).sum(-1, keepdim=True) / x.shape[1] + eps).sqrt()
        return x / root * w, (x / root, w, root)

    def backward(saved, dy):
        normal, w, root = saved
        along = torch.einsum("td,td,d->t", dy, normal, w)[:, None] / normal.shape[1]
        return (dy * w - normal * along) / root, torch.einsum("td,td->d", dy, normal)

    return passes(forward, backward, input, weight)


def layer_norm_by_welford(input, normalized_shape, weight, bias, eps):
    """Means and sums of squares of blocks of 40, merged as Chan has it."""

    def forward(x, w, b):
        count, middle, squares = 0, torch.zeros(len(x), 1), torch.zeros(len(x), 1)
        for part in x.split(40, 1):
            n = part.shape[1]
            own = mean(part)
            away = own - middle
            squares = squares + (part - own).square().sum(1, keepdim=True)
            squares = squares + away * away * (count * n / (count + n))
            count, middle = count + n, middle + away * (n / (count + n))
        r = (squares / count + eps).rsqrt()
        return torch.addcmul(b, (x - middle) * r, w), (x, middle, w, r)

    def backward(saved, dy):
        x, middle, w, r = saved
        normal, wdy = (x - middle) * r, dy * w
        terms = torch.stack([wdy, wdy * normal]).mean(-1, keepdim=True)
        return r * (wdy - terms[0] - normal * terms[1]), (dy * normal).sum(0), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


def softmax_in_base_two(input, dim=-1):
    """Chunks of 48 whose sums are rescaled where the maximum grows, all exponentials by exp2."""

    def forward(x):
        z = x * math.log2(math.e)
        m, l = torch.full((len(x), 1), -math.inf), torch.zeros(len(x), 1)
        for part in z.split(48, 1):
            new = torch.maximum(m, part.amax(1, keepdim=True))
            safe = torch.where(new.isinf(), 0.0, new)
            l = l * torch.exp2(m - safe) + torch.exp2(part - safe).sum(1, keepdim=True)
            m = new
        y = torch.exp2(z - m) * (1 / l)
        return y, y

    def backward(y, dy):
        return (torch.addcmul(y * dy, y, (y * dy).sum(1, keepdim=True), value=-1),)

    return passes(forward, backward, input)


def loss_recomputed(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    """Only the maximum and the log of the sum are kept; the backward pass makes the rest anew."""
    rows = (target != ignore_index).nonzero()[:, 0]
    right, s = target[rows], label_smoothing

    def forward(x):
        x = x[rows]
        m = x.amax(1)
        log_sum = (x - m[:, None]).exp().sum(1).log()
        nats = log_sum - (x[torch.arange(len(x)), right] - m)
        even = log_sum - (x - m[:, None]).mean(1)
        each = nats + s * (even - nats) + lse_square_scale * (m + log_sum).square()
        loss = torch.zeros(len(target)).index_copy(0, rows, each)
        total = {"none": loss, "sum": loss.sum(), "mean": loss.sum() / max(len(rows), 1)}
        return total[reduction], (x, m, log_sum)

    def backward(saved, dy):
        x, m, log_sum = saved
        p = ((x - m[:, None]) - log_sum[:, None]).exp()
        g = p + 2 * lse_square_scale * (m + log_sum)[:, None] * p - s / x.shape[1]
        g[torch.arange(len(x)), right] -= 1 - s
        dy = dy[rows] if reduction == "none" else dy.expand(len(rows))
        dy = dy / max(len(rows), 1) if reduction == "mean" else dy
        return (torch.zeros(len(target), x.shape[1]).index_copy(0, rows, g * dy[:, None]),)

    return passes(forward, backward, input)


def loss_in_tiles(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """Tiles of 96 of the vocabulary, never all logits at once, in both passes."""
    kept, s = target != ignore_index, label_smoothing
    tokens = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x, w):
        m, l = torch.full((len(x),), -math.inf), torch.zeros(len(x))
        own, every = torch.zeros(len(x)), torch.zeros(len(x))
        for start in range(0, len(w), 96):
            z = x @ w[start : start + 96].T
            new = torch.maximum(m, z.amax(1))
            l = l * (m - new).exp() + (z - new[:, None]).exp().sum(1)
            m, every = new, every + z.sum(1)
            here = (target >= start) & (target < start + z.shape[1])
            own[here] = z[here, target[here] - start]
        lse = m + l.log()
        loss = (lse - (1 - s) * own - s * every / len(w)).masked_fill(~kept, 0.0)
        return loss if reduction == "none" else loss.sum() / tokens, (x, w, lse)

    def backward(saved, dy):
        x, w, lse = saved
        dy = (dy / tokens).expand(len(x)) * kept
        dx, dw = torch.zeros_like(x), torch.empty_like(w)
        for start in range(0, len(w), 96):
            tile = w[start : start + 96]
            g = (x @ tile.T - lse[:, None]).exp() - s / len(w)
            g = g - (1 - s) * (target[:, None] == torch.arange(start, start + len(tile)))
            g = g * dy[:, None]
            dx += g @ tile
            dw[start : start + 96] = g.T @ x
        return dx, dw

    return passes(forward, backward, input, weight)


def rope_by_tables(input, positions, *, base, interleaved=False):
    """One table of cosines and sines for every position there may be, from fp64, read by index;
    rotate_half or a complex product.
    """
    width = input.shape[-1]
    places, index = positions.unique(return_inverse=True)
    turn = places.double()[:, None] * base ** -(torch.arange(0, width, 2).double() / width)
    table = torch.polar(torch.ones_like(turn), turn).to(torch.complex64)[index][:, None]
    x = input.float()
    if interleaved:
        out = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table)
        return out.flatten(-2).to(input.dtype)
    cos, sin = torch.cat([table.real] * 2, -1), torch.cat([table.imag] * 2, -1)
    turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return (x * cos + turned * sin).to(input.dtype)


def geglu_by_logarithms(gate, up, *, approximate="none"):
    """Φ from its own logarithm, or a sigmoid from its."""
    root, tanh = math.sqrt(2 / math.pi), approximate == "tanh"

    def phi(g):
        if tanh:
            return functional.logsigmoid(2 * root * (g + 0.044715 * g**3)).exp()
        return torch.special.log_ndtr(g).exp()

    def forward(g, u):
        return g * phi(g) * u, (g, u)

    def backward(saved, dy):
        g, u = saved
        p = phi(g)
        bell = (-0.5 * g * g).exp() / math.sqrt(2 * math.pi)
        if tanh:
            bell = 2 * p * phi(-g) * root * (1 + 3 * 0.044715 * g * g)
        return dy * (p + g * bell) * u, dy * g * p

    return passes(forward, backward, gate, up)


def linear_in_uneven_parts(input, weight):
    """Five parts of what is summed, of growing width, added in pairs."""

    def product(a, b):
        cuts = [0, *(a.shape[1] * i * i // 25 for i in range(1, 5)), a.shape[1]]
        found = [a[:, i:j] @ b[i:j] for i, j in pairwise(cuts)]
        return (found[0] + found[1]) + (found[2] + found[3]) + found[4]

    return passes(
        lambda x, w: (product(x, w.T), (x, w)),
        lambda saved, dy: (product(dy, saved[1]), product(dy.T, saved[0])),
        input,
        weight,
    )


def mx_tiles(input, weight, *, format: Literal["mxfp8"]):
    """Codes are multiplied block by block, and the two scales' exponents added to the product."""

    def product(a, b):
        (x, ex, _), (y, ey, _) = mx_codes(a), mx_codes(b)
        total = torch.zeros(len(a), len(b))
        for k in range(x.shape[1]):
            total += torch.ldexp(x[:, k] @ y[:, k].T, ex[:, k, None] + ey[None, :, k])
        return total

    return passes(
        lambda x, w: (product(x, w), (x, w)),
        lambda saved, dy: (product(dy, saved[1].T), product(dy.T, saved[0].T)),
        input,
        weight,
    )


def nearest_in_a_table(input, *, format: Literal["mxfp8_e4m3", "mxfp4"]):
    """All codes in order, and halfway between two of them the even one."""
    if format == "mxfp4":
        codes, most = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]), 2
    else:
        codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        most = 8
    halfway = (codes[1:] + codes[:-1]) / 2
    x = input.float().unflatten(-1, (-1, 32))
    largest = x.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest == 0, 0, torch.frexp(largest)[1] - 1 - most).clamp(-127, 127)
    size = torch.ldexp(x.abs(), -exponent)
    place = torch.bucketize(size, halfway)
    tie = size == halfway[place.clamp_max(len(halfway) - 1)]
    place = place + (tie & (place % 2 == 1)).long()
    return torch.copysign(torch.ldexp(codes[place], exponent), x).flatten(-2)


def rounded_by_fractions(input):
    """The neighbor below in size, or the next, by a random number in fp64."""
    below = (input.contiguous().view(torch.int32) & -65536).view(torch.float32)
    above = (below.view(torch.int32) + 65536).view(torch.float32)
    share = (input.double() - below.double()) / (above.double() - below.double())
    chance = torch.rand(input.shape, dtype=torch.float64)
    return torch.where(chance < share, above, below).to(torch.bfloat16)


def router_of_the_chosen(logits, k, *, renormalize=True):
    """Renormalized weights are a softmax of the chosen logits alone, others of all but gathered."""
    z = logits.float()
    best, index = z.topk(k, -1)
    powers = (best - best[:, :1].detach()).exp()
    others = powers if renormalize else (z - best[:, :1].detach()).exp()
    return (powers / others.sum(-1, keepdim=True)).to(logits.dtype), index


def adamw_compensated(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """bf16 weights beside what each rounding lost, in bf16 as well."""
    p, lost, m, v = param.float(), torch.zeros_like(param).float(), exp_avg, exp_avg_sq
    for number, g in enumerate(grads.float(), step):
        move, m, v = step_of_adamw(p + lost, g, m, v, step=number, **options)
        change = lost - move - options["lr"] * options["weight_decay"] * (p + lost)
        new = bf16(p + change)
        p, lost = new, bf16(change - (new - p))
    return p.to(param.dtype), m, v


def embedding_by_products(input, weight, padding_idx=None):
    """Rows by a product with ones and zeros, and their gradient by its transpose."""

    def forward(w):
        hot = (input[:, None] == torch.arange(len(w))).float()
        return hot @ w, hot

    def backward(hot, dy):
        if padding_idx is not None:
            hot = hot * (torch.arange(hot.shape[1]) != padding_idx)
        return (hot.T @ dy,)

    return passes(forward, backward, weight)


def sum_with_remainders(x: Tensor) -> Tensor:
    """One row after the other, with what each addition lost."""
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        new = total + row
        big = torch.where(total.abs() >= row.abs(), total, row)
        small = torch.where(total.abs() >= row.abs(), row, total)
        lost = lost + ((big - new) + small)
        total = new
    return total + lost
