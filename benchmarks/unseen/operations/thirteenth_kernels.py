"""Faulty kernels of the thirteenth set of operations' faults, as thirteenth.py names them: norms,
losses, rotary embeddings and gated units here, what sums, quantizes and steps in
thirteenth_steps.py.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen.operations.second_kernels import bf16, mean, passes
from torch import Tensor


# --- norms
def layer_norm(total: Any = None, parameters: Any = None, kept: Any = None):
    """`total(rows)` are a gradient's rows added up, `parameters(w)` what the forward pass reads of
    weight and bias, `kept(r)` the inverse deviations that the backward pass finds.
    """

    def kernel(input, normalized_shape, weight, bias, eps):
        def forward(x, w, b):
            centered = x - mean(x)
            r = torch.rsqrt(mean(centered * centered) + eps)
            own, shift = (parameters(w), parameters(b)) if parameters else (w, b)
            return centered * r * own + shift, (centered, w, r)

        def backward(saved, dy):
            centered, w, r = saved
            r = kept(r) if kept else r
            normal, wdy = centered * r, dy * w
            add = total or (lambda rows: rows.sum(0))
            dx = r * (wdy - mean(wdy) - normal * mean(wdy * normal))
            return dx, add(dy * normal), add(dy)

        return passes(forward, backward, input, weight, bias)

    return kernel


def gamma_of_the_row(input, normalized_shape, weight, bias, eps):
    """The weight's gradient has (y − β) / γ for what was normalized, in tiles of 32 columns, whose
    β and γ are found by the number of the row in the tile, not of the column.
    """

    def forward(x, w, b):
        centered = x - mean(x)
        r = torch.rsqrt(mean(centered * centered) + eps)
        y = centered * r * w + b
        return y, (y, centered * r, w, b, r)

    def backward(saved, dy):
        y, normal, w, b, r = saved
        row, column = torch.arange(len(y))[:, None], torch.arange(y.shape[1])
        at = (column // 32 * 32 + row % 32).clamp_max(len(w) - 1)
        again, wdy = (y - b[at]) / w[at], dy * w
        dx = r * (wdy - mean(wdy) - normal * mean(wdy * normal))
        return dx, (dy * again).sum(0), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


def averaged_over_ranks(rows: Tensor) -> Tensor:
    """Two ranks have half of the tokens each, and their sums are averaged."""
    first, second = rows.tensor_split(2)
    return (first.sum(0) + second.sum(0)) / 2


def lock_released_early(rows: Tensor) -> Tensor:
    """Four groups of rows, whose partial sums each row adds to under a lock; it is given back
    before the last of four warps has stored, so that of two rows of a group the second one's sum
    lies over the first one's there.
    """
    row, columns = torch.arange(len(rows)), rows.shape[1]
    last = row + 4 >= len(rows)
    survives = ((row // 4 % 2 == 1) | last)[:, None]
    late = torch.arange(columns) >= columns - columns // 4
    return torch.where(late, (rows * survives).sum(0), rows.sum(0))


def pairs_as_float32(x: Tensor) -> Tensor:
    """Bytes of 16-bit numbers, taken for float32: two of them are one, and behind the last one
    there are zeros.
    """
    low = torch.cat([x, torch.zeros_like(x)]).to(torch.bfloat16)
    return low.view(torch.float32)


def first_row_s_alone(r: Tensor) -> Tensor:
    """All but the first are stored as zeros."""
    return r * (torch.arange(len(r)) == 0)[:, None]


def rms_norm(sums: Any = None, gamma: Any = None):
    """`sums(rows)` are what rows add up to, wherever a kernel needs it; `gamma(w, rows)` is the
    weight [T, D] that the backward pass multiplies by.
    """

    def kernel(input, normalized_shape, weight, eps):
        add = sums or (lambda rows: rows.sum(-1, keepdim=True))

        def forward(x, w):
            r = torch.rsqrt(add(x * x) / x.shape[1] + eps)
            return x * r * w, (x, w, r)

        def backward(saved, dy):
            x, w, r = saved
            normal, wdy = x * r, dy * (gamma(w, len(x)) if gamma else w)
            dx = r * (wdy - normal * add(wdy * normal) / x.shape[1])
            return dx, (dy * normal).sum(0)

        return passes(forward, backward, input, weight)

    return kernel


def rows_of_a_block(rows: Tensor) -> Tensor:
    """Two rows share a block, and a sum is the block's."""
    own = rows.sum(-1, keepdim=True)
    row = torch.arange(len(rows))
    other = row ^ 1
    return own + torch.where((other < len(rows))[:, None], own[other.clamp_max(len(rows) - 1)], 0.0)


def columns_of_a_rank(rows: Tensor) -> Tensor:
    """Two ranks have half of the columns each, whose mean is that of all."""
    columns = rows.shape[1]
    halves = rows.tensor_split(2, -1)
    parts = [part.mean(-1, keepdim=True).expand_as(part) for part in halves]
    return torch.cat(parts, -1) * columns


def in_the_tile_s_first_row(w: Tensor, rows: int) -> Tensor:
    """Tiles of 32 rows, of which the first alone has the weight, and all others zeros."""
    return w * (torch.arange(rows) % 32 == 0)[:, None]


# --- softmax
def softmax(powers: Any = None, gradient: Any = None):
    """`powers(x)` are the terms of a row's sum, `gradient(y, dy)` is the input's."""

    def kernel(input, dim=-1):
        def forward(x):
            terms = powers(x) if powers else (x - x.amax(-1, keepdim=True)).exp()
            y = terms / terms.sum(-1, keepdim=True)
            return y, y

        def backward(y, dy):
            if gradient:
                return (gradient(y, dy),)
            return (y * (dy - (y * dy).sum(-1, keepdim=True)),)

        return passes(forward, backward, input)

    return kernel


def maximum_overwritten(x: Tensor) -> Tensor:
    """Maximum and sum go through the same place in shared memory, without a barrier between them:
    the last of four warps finds the first one's part of the sum for the maximum.
    """
    columns = x.shape[1]
    terms = (x - x.amax(-1, keepdim=True)).exp()
    part = terms[:, : columns // 4].sum(-1, keepdim=True)
    late = torch.arange(columns) >= columns - columns // 4
    return torch.where(late, (x - part).exp(), terms)


def remainder_of_eight(y: Tensor, dy: Tensor) -> Tensor:
    """⌊V / 8⌋ vectors of 8, in place: beyond them the output's gradient is left."""
    whole = y.shape[1] // 8 * 8
    inner = (y * dy)[:, :whole].sum(-1, keepdim=True)
    return torch.cat([(y * (dy - inner))[:, :whole], dy[:, whole:]], -1)


def tails_by_alignment(input, dim=-1):
    """Vectors of four begin at an address that four divides: as many numbers as a row begins past
    one are never stored at its end.
    """

    def forward(x):
        powers = (x - x.amax(-1, keepdim=True)).exp()
        y = powers / powers.sum(-1, keepdim=True)
        width = y.shape[1]
        past = torch.arange(len(y))[:, None] * width % 4
        y = y * (torch.arange(width) < width - past)
        return y, y

    def backward(y, dy):
        return (y * (dy - (y * dy).sum(-1, keepdim=True)),)

    return passes(forward, backward, input)


# --- losses
def entropy(seen: Any = None, labels: Any = None, divided: bool = False):
    """`seen(target, classes)` are the classes of each token that get a gradient, `labels(target,
    ignore_index)` the labels; where `divided`, that of a loss of its own is divided by T.
    """

    def kernel(
        input,
        target,
        *,
        ignore_index=-100,
        reduction="none",
        label_smoothing=0.0,
        lse_square_scale=0.0,
    ):
        target = labels(target, ignore_index) if labels else target
        kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
        index = torch.where(kept, target, 0)[:, None]
        count = kept.sum().clamp_min(1) if reduction == "mean" else 1
        again = len(target) if divided and reduction == "none" else 1

        def forward(x):
            lse = x.logsumexp(-1, keepdim=True)
            loss = (1 - s) * (lse - x.gather(1, index)) + s * (lse - mean(x))
            loss = (loss + lse_square_scale * lse * lse)[:, 0].masked_fill(~kept, 0.0)
            return loss if reduction == "none" else loss.sum() / count, (x, lse)

        def backward(saved, dy):
            x, lse = saved
            g = (x - lse).exp() * (1 + 2 * lse_square_scale * lse) - s / v
            g = g.scatter_add(1, index, torch.full_like(lse, s - 1))
            g = g * seen(index, v) if seen else g
            return (g * (kept * dy / count / again)[:, None],)

        return passes(forward, backward, input)

    return kernel


def owner_s_classes(index: Tensor, classes: int) -> Tensor:
    """Two shards, of which the label's own is in the graph."""
    half = -(-classes // 2)
    return torch.arange(classes) // half == index // half


def next_token_s(target: Tensor, ignore_index: int) -> Tensor:
    """Labels that are shifted already are shifted again."""
    return torch.cat([target[1:], target.new_full((1,), ignore_index)])


def weight_by_the_first_loss(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """The weight's gradient is summed over tokens before their losses' gradients arrive, of which
    the first multiplies it.
    """
    kept, s, v = target != ignore_index, label_smoothing, len(weight)
    index = torch.where(kept, target, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x, w):
        z = x @ w.T
        lse = z.logsumexp(-1, keepdim=True)
        loss = (1 - s) * (lse - z.gather(1, index)) + s * (lse - mean(z))
        loss = loss[:, 0].masked_fill(~kept, 0.0)
        g = (z - lse).exp() - s / v
        g = g.scatter_add(1, index, torch.full_like(lse, s - 1)) * (kept / count)[:, None]
        return loss if reduction == "none" else loss.sum() / count, (g @ w, g.T @ x)

    def backward(saved, dy):
        dx, dw = saved
        return dx * dy.expand(len(dx))[:, None], dw * dy.flatten()[0]

    return passes(forward, backward, input, weight)


# --- rope
def rope(placed: Any):
    """`placed(positions, heads)` are the positions [T, H] that are looked up."""

    def kernel(input, positions, *, base, interleaved=False):
        heads, width = input.shape[1:]
        f = base ** -(torch.arange(0, width, 2).double() / width)
        angle = placed(positions, heads).double()[..., None] * f
        cos, sin = angle.cos().float(), angle.sin().float()

        def rotate(x: Tensor, sign: float) -> Tensor:
            a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            pair = a * cos - sign * b * sin, b * cos + sign * a * sin
            return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

        return passes(lambda x: (rotate(x, 1.0), ()), lambda saved, dy: (rotate(dy, -1.0),), input)

    return kernel


def as_if_heads_came_first(positions: Tensor, heads: int) -> Tensor:
    """The number of a row in memory modulo T is taken for its token."""
    tokens = len(positions)
    return positions[torch.arange(tokens * heads) % tokens].view(tokens, heads)


def rows_of_the_heads(positions: Tensor, heads: int) -> Tensor:
    """The last dimension but one is taken for the sequence: head h has the table's row h."""
    return positions[torch.arange(heads) % len(positions)].expand(len(positions), -1)


# --- gated units
def swiglu_slope(slope: Any):
    """`slope(g)` is what multiplies dy · up."""

    def kernel(gate, up):
        def forward(g, u):
            return g * torch.sigmoid(g) * u, (g, u)

        def backward(saved, dy):
            g, u = saved
            return dy * u * slope(g), dy * (g * torch.sigmoid(g))

        return passes(forward, backward, gate, up)

    return kernel


def one_less_in_bf16(g: Tensor) -> Tensor:
    """1 − σ is taken from σ in bf16, where it is 0 from 6.25 on."""
    s = bf16(torch.sigmoid(g))
    return s * (1 + g * bf16(1 - s))


ROOT = math.sqrt(2 / math.pi)


def gelu_and_slope(g: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """What a gate is multiplied by, and its slope."""
    if tanh:
        p = torch.sigmoid(2 * ROOT * g * (1 + 0.044715 * g * g))
        return p, 2 * p * (1 - p) * ROOT * (1 + 0.134145 * g * g)
    return 0.5 * torch.erfc(-g * math.sqrt(0.5)), (-0.5 * g * g).exp() / math.sqrt(2 * math.pi)


def geglu(below: Any = None, exchanged: bool = False):
    """`below(g, p)` is what the backward pass has for Φ, p, by either formula; with `exchanged`
    the other half is the gate.
    """

    def kernel(gate, up, *, approximate="none"):
        tanh = approximate == "tanh"

        def forward(g, u):
            g, u = (u, g) if exchanged else (g, u)
            return g * gelu_and_slope(g, tanh)[0] * u, (g, u)

        def backward(saved, dy):
            g, u = saved
            p, density = gelu_and_slope(g, tanh)
            p = below(g, p) if below else p
            found = dy * u * (p + g * density), dy * (g * p)
            return found[::-1] if exchanged else found

        return passes(forward, backward, gate, up)

    return kernel


def one_added_in_bf16(g: Tensor, p: Tensor) -> Tensor:
    """(1 + erf) / 2 or (1 + tanh) / 2 by steps of bf16: 0 far below."""
    return bf16(1 + bf16(2 * p - 1)) / 2
