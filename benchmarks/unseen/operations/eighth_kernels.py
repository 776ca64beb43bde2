"""Faulty kernels of the eighth set of operations' faults, as eighth.py names them: norms, losses,
rotary embeddings and gated units here, what sums, quantizes and steps in eighth_steps.py.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen.operations.second_kernels import mean, passes
from torch import Tensor
from torch.nn import functional


def toward_zero(x: Tensor) -> Tensor:
    """The upper half of the bits."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def downward(x: Tensor) -> Tensor:
    """bf16 toward −∞."""
    bits = x.contiguous().view(torch.int32)
    below = (bits < 0) & ((bits & 0xFFFF) != 0)
    return ((bits & -65536) + (below.int() << 16)).view(torch.float32)


# --- norms
def shifted_on_store(input, normalized_shape, weight, eps):
    """Only the result is stored by a shift of 16 bits."""

    def forward(x, w):
        r = torch.rsqrt(mean(x * x) + eps)
        return toward_zero(x * r * w), (x * r, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        return r * (wdy - normal * mean(wdy * normal)), (dy * normal).sum(0)

    return passes(forward, backward, input, weight)


def gamma_not_written(input, normalized_shape, weight, eps):
    """The pass over rows writes dX; dγ is as it was allocated."""

    def forward(x, w):
        r = torch.rsqrt(mean(x * x) + eps)
        return x * r * w, (x, w, r)

    def backward(saved, dy):
        x, w, r = saved
        wdy = dy * w
        return r * wdy - x * (r * r * r * mean(wdy * x)), torch.zeros_like(w)

    return passes(forward, backward, input, weight)


def partials_not_zeroed(input, normalized_shape, weight, eps):
    """16 programs with whole blocks of rows: those that get none leave their partial sum of dγ as
    the memory was, where a row of results had been.
    """

    def forward(x, w):
        r = torch.rsqrt(mean(x * x) + eps)
        return x * r * w, (x * r, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy, height = dy * w, -(-len(dy) // 16)
        partials = (normal * w)[torch.arange(16) % len(normal)]
        for program, rows in enumerate((dy * normal).split(height)):
            partials[program] = rows.sum(0)
        return r * (wdy - normal * mean(wdy * normal)), partials.sum(0)

    return passes(forward, backward, input, weight)


def layer_norm(spread: Any = None, kept: Any = None):
    """`spread(c)` is the variance of centered rows, `kept(r, eps)` what is read of 1 / √variance
    in the backward pass.
    """

    def kernel(input, normalized_shape, weight, bias, eps):
        def forward(x, w, b):
            c = x - mean(x)
            r = torch.rsqrt((spread(c) if spread else mean(c * c)) + eps)
            return c * r * w + b, (c, w, kept(r, eps) if kept else r)

        def backward(saved, dy):
            c, w, r = saved
            normal, wdy = c * r, dy * w
            dx = r * (wdy - mean(wdy) - normal * mean(wdy * normal))
            return dx, (dy * normal).sum(0), dy.sum(0)

        return passes(forward, backward, input, weight, bias)

    return kernel


def squares_cut(c: Tensor) -> Tensor:
    """Squares leave their register in bf16, toward zero."""
    return mean(toward_zero(c * c))


def inverse_of_the_inverse(r: Tensor, eps: float) -> Tensor:
    """What was saved is taken for the variance."""
    return torch.rsqrt(r + eps)


# --- softmax
def sums_of_other_maxima(input, dim=-1):
    """32 lanes, each with a maximum and a sum of its own; maxima are reduced, and sums."""

    def forward(x):
        lanes = functional.pad(x, (0, -x.shape[1] % 32), value=-math.inf).unflatten(1, (-1, 32))
        own = lanes.amax(1, keepdim=True)
        of_lanes = (lanes - own.clamp_min(-1e30)).exp().sum(1)
        y = (x - x.amax(-1, keepdim=True)).exp() / of_lanes.sum(-1, keepdim=True)
        return y, y

    def backward(y, dy):
        return (y * (dy - (y * dy).sum(-1, keepdim=True)),)

    return passes(forward, backward, input)


def whole_tiles_of_gradients(input, dim=-1):
    """The backward pass has as many tiles of 8 rows as fit."""

    def forward(x):
        y = torch.softmax(x, -1)
        return y, y

    def backward(y, dy):
        dx = torch.zeros_like(y)
        for start in range(0, len(y) // 8 * 8, 8):
            rows = slice(start, start + 8)
            terms = y[rows] * dy[rows]
            dx[rows] = terms - y[rows] * terms.sum(-1, keepdim=True)
        return (dx,)

    return passes(forward, backward, input)


# --- losses
def entropy(even: Any = None, penalized: Any = None):
    """`even(s, v)` is what smoothing gives every class, `penalized(x, lse)` what is squared."""

    def kernel(
        input,
        target,
        *,
        ignore_index=-100,
        reduction="none",
        label_smoothing=0.0,
        lse_square_scale=0.0,
    ):
        kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
        index = torch.where(kept, target, 0)[:, None]
        count = kept.sum().clamp_min(1) if reduction == "mean" else 1
        share = even(s, v) if even and s else s / v

        def forward(x):
            lse = x.logsumexp(-1, keepdim=True)
            wanted = torch.full_like(x, share).scatter_add_(1, index, torch.full_like(lse, 1 - s))
            z = penalized(x, lse) if penalized else lse
            loss = (1 - s) * (lse - x.gather(1, index)) + lse_square_scale * z * z
            loss = loss[:, 0] + share * (lse - x).sum(-1) if s else loss[:, 0]
            loss = torch.where(kept, loss, 0.0)
            p = (x - lse).exp()
            g = p * wanted.sum(-1, keepdim=True) - wanted + 2 * lse_square_scale * z * p
            return loss if reduction == "none" else loss.sum() / count, g

        def backward(g, dy):
            return (g * (kept * dy / count)[:, None],)

        return passes(forward, backward, input)

    return kernel


def one_for_the_smoothing(s: float, v: int) -> float:
    """1 / C, whatever ε is."""
    return 1 / v


def maximum_and_sum(x: Tensor, lse: Tensor) -> Tensor:
    """m + d, d the sum of powers itself."""
    m = x.amax(-1, keepdim=True)
    return m + (x - m).exp().sum(-1, keepdim=True)


def loss_of_linear(total: Any = None, dx: Any = torch.matmul):
    """`total(losses, kept)` adds losses up, `dx(g, w)` is the product of the input's gradient."""

    def kernel(input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0):
        kept, s = target != ignore_index, label_smoothing
        index = torch.where(kept, target, 0)[:, None]
        count = kept.sum().clamp_min(1) if reduction == "mean" else 1

        def forward(x, w):
            nats = -functional.log_softmax(x @ w.T, -1)
            each = (1 - s) * nats.gather(1, index)[:, 0] + s * nats.mean(-1)
            each = torch.where(kept, each, 0.0)
            whole = each if reduction == "none" else (total(each, kept) if total else each.sum())
            return whole / count, (x, w, nats)

        def backward(saved, dy):
            x, w, nats = saved
            g = (-nats).exp() - s / len(w)
            g.scatter_add_(1, index, torch.full_like(g[:, :1], s - 1))
            g = g * (kept * dy / count)[:, None]
            return dx(g, w), g.T @ x

        return passes(forward, backward, input, weight)

    return kernel


def counts_over_sums(each: Tensor, kept: Tensor) -> Tensor:
    """16 lanes' sums of losses and their counts share a buffer: the counts of the upper 8 are there
    before the sums have been read.
    """
    lanes = torch.arange(len(each)) % 16
    sums = torch.zeros(16).index_add_(0, lanes, each)
    counts = torch.zeros(16).index_add_(0, lanes, kept.float())
    return sums[:8].sum() + counts[8:].sum()


def one_of_two_dots(g: Tensor, w: Tensor) -> Tensor:
    """Blocks of 32 of the vocabulary, two products an iteration into one accumulator: of the two
    the first is lost.
    """
    total = torch.zeros(len(g), w.shape[1])
    for start in range(0, g.shape[1], 64):
        second = slice(start + 32, start + 64)
        if start + 32 >= g.shape[1]:
            second = slice(start, start + 32)
        total = total + g[:, second] @ w[second]
    return total


# --- rope
def rotary(at: Any = None, store: Any = None):
    """`at(positions, heads)` are positions [T, H], `store(out)` what is left of a result."""

    def kernel(input, positions, *, base, interleaved=False):
        width, heads = input.shape[-1], input.shape[1]
        where = at(positions, heads) if at else positions[:, None]
        turn = where.double()[..., None] * base ** -(torch.arange(0, width, 2).double() / width)
        cos, sin = turn.cos().float(), turn.sin().float()

        def rotate(x, sign):
            a, b = x.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(
                -1 if interleaved else -2
            )
            pair = a * cos - sign * b * sin, sign * a * sin + b * cos
            out = torch.stack(pair, -1 if interleaved else -2).flatten(-2)
            return store(out) if store else out

        return passes(lambda x: (rotate(x, 1.0), ()), lambda saved, dy: (rotate(dy, -1.0),), input)

    return kernel


def position_and_head(positions: Tensor, heads: int) -> Tensor:
    """Heads are counted where tokens are meant."""
    return positions[:, None] + torch.arange(heads)


def first_head_alone(out: Tensor) -> Tensor:
    """A flat grid, all of which is one block: that of head 0."""
    return torch.cat([out[:, :1], torch.zeros_like(out[:, 1:])], 1)


# --- gated units
def without_the_minus(gate, up):
    """1 / (1 + exp(x))."""
    g = gate.float()
    return (g * torch.sigmoid(-g) * up.float()).to(gate.dtype)


def recomputed_before_the_gate(gate, up):
    """The backward pass recomputes what the sigmoid has not yet multiplied."""

    def forward(g, u):
        return functional.silu(g) * u, (g, u)

    def backward(saved, dy):
        g, u = saved
        s = torch.sigmoid(g)
        return dy * u * (s + g * s * (1 - s)), dy * g

    return passes(forward, backward, gate, up)


def geglu(of_the_other: bool = False, reach: int | None = None):
    """The tanh formula with the slope `of_the_other`; numbers beyond `reach` have no offset."""
    root = math.sqrt(2 / math.pi)

    def stored(x: Tensor) -> Tensor:
        return x if reach is None else x * (torch.arange(x.numel()) < reach).view(x.shape)

    def kernel(gate, up, *, approximate="none"):
        def of_erf(g):
            density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
            below = 0.5 * torch.erfc(-g * math.sqrt(0.5))
            return below, below + g * density

        def of_tanh(g):
            below = torch.sigmoid(2 * root * (g + 0.044715 * g**3))
            inner = 2 * root * (1 + 0.134145 * g * g)
            above = torch.sigmoid(-2 * root * (g + 0.044715 * g**3))
            return below, below + g * below * above * inner

        def forward(g, u):
            below, own = (of_tanh if approximate == "tanh" else of_erf)(g)
            own = of_erf(g)[1] if of_the_other else own
            return stored(g * below * u), (g * below, u, own)

        def backward(saved, dy):
            activated, u, own = saved
            return stored(dy * u * own), stored(dy * activated)

        return passes(forward, backward, gate, up)

    return kernel
