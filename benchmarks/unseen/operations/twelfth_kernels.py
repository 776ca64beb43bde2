"""Faulty kernels of the twelfth set of operations' faults, as twelfth.py names them: norms,
losses, rotary embeddings and gated units here, what sums, quantizes and steps in
twelfth_steps.py.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.eleventh_kernels import ROOT
from benchmarks.unseen.operations.fifth_steps import fp16
from benchmarks.unseen.operations.second_kernels import added, bf16, mean, passes
from torch import Tensor
from torch.nn import functional


# --- norms
def leftovers_not_squared(x: Tensor, eps: float) -> Tensor:
    """What is left of a row after whole fours is added to their squares as it is."""
    whole = x.shape[1] // 4 * 4
    terms = torch.cat([x[:, :whole] ** 2, x[:, whole:]], -1)
    return torch.rsqrt(mean(terms) + eps)


def sum_of_the_next_token(x: Tensor, r: Tensor) -> Tensor:
    """64 threads go from token to token. The last warp of 16 is late: where one over the root was,
    it reads what the first warp has written for the next token, its part of the squares.
    """
    lane = torch.arange(x.shape[1]) % 64
    part = (x * x * (lane < 16)).sum(-1, keepdim=True)
    late = torch.cat([part[1:], r[-1:]])
    return x * torch.where(lane >= 48, late, r)


def merged_as_moments(x: Tensor, eps: float) -> Tensor:
    """Sums of squares of 32 lanes are merged with what merges variances: the square of their
    difference, times a quotient of whole numbers that is 0.
    """
    squares = functional.pad(x * x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).sum(1)
    while squares.shape[1] > 1:
        a, b = squares.chunk(2, -1)
        squares = a + b + (b - a) ** 2 * 0.0
    return torch.rsqrt(squares / x.shape[1] + eps)


def mean_after_its_reset(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sum's place in shared memory is set to 0 for the variance before the second warp of 32
    has read the mean there.
    """
    m = mean(x) * (torch.arange(x.shape[1]) % 64 < 32)
    return m, mean((x - m) ** 2)


def butterfly_of_six(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of 6 warps of 8 are exchanged at distances 3 and 1."""

    def total(terms: Tensor) -> Tensor:
        threads = functional.pad(terms, (0, -terms.shape[1] % 48)).unflatten(1, (-1, 6, 8))
        warps = functional.pad(threads.sum((1, 3)), (0, 2))
        for distance in (3, 1):
            warps = warps + warps[:, torch.arange(8) ^ distance]
        return warps[:, :1]

    m = total(x) / x.shape[1]
    return m, total((x - m) ** 2) / x.shape[1]


# --- softmax
def raw_leftovers(input, dim=-1):
    """16 lanes. What is left of a row after whole sixteens is raised to a power as well, but the
    power is stored nowhere: the scores themselves stand for it.
    """

    def forward(x):
        terms = (x - x.amax(-1, keepdim=True)).exp()
        whole = x.shape[1] // 16 * 16
        terms = torch.cat([terms[:, :whole], x[:, whole:]], -1)
        y = terms / terms.sum(-1, keepdim=True)
        return y, y

    def backward(y, dy):
        return (y * (dy - (y * dy).sum(-1, keepdim=True)),)

    return passes(forward, backward, input)


def counter_of_the_loop_before(y: Tensor) -> Tensor:
    """Sixteens of a row are all stored where the loop before ended, behind the last whole one;
    what is left of the row then comes there too.
    """
    rows, columns = y.shape
    whole = columns // 16 * 16
    if not whole:
        return y
    start = torch.arange(rows)[:, None] * columns + whole
    flat = torch.zeros(rows * columns + 16)
    flat[start + torch.arange(16)] = y[:, whole - 16 : whole]
    flat[start + torch.arange(columns - whole)] = y[:, whole:]
    return flat[: rows * columns].view(rows, columns)


def five_powers(distance: Tensor) -> Tensor:
    """Taylor's series up to the fifth power, of what is left after cutting off whole binary
    logarithms towards 0.
    """
    x = distance.clamp(-87, 87)
    whole = (x / math.log(2)).trunc()
    t = x - whole * math.log(2)
    series = ((((t / 120 + 1 / 24) * t + 1 / 6) * t + 0.5) * t + 1) * t + 1
    return torch.ldexp(series, whole.int())


# --- losses
def cross_entropy(rest: Any = None, logarithm: Any = None):
    """`rest(s)` is the weight of the mean over all classes, where labels are smoothed by s;
    `logarithm(x, lse)` are the logarithms of probabilities.
    """

    def kernel(input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0,
               lse_square_scale=0.0):  # fmt: skip
        kept, s = target != ignore_index, label_smoothing
        index = torch.where(kept, target, 0)[:, None]
        count = kept.sum().clamp_min(1) if reduction == "mean" else 1
        share = rest(s) if rest and s else s

        def forward(x):
            lse = x.logsumexp(-1, keepdim=True)
            logs = logarithm(x, lse) if logarithm else x - lse
            loss = (s - 1) * logs.gather(1, index) - share * mean(logs)
            loss = torch.where(kept, (loss + lse_square_scale * lse * lse)[:, 0], 0.0)
            return loss if reduction == "none" else loss.sum() / count, (logs, lse)

        def backward(saved, dy):
            logs, lse = saved
            g = (1 - s + share + 2 * lse_square_scale * lse) * logs.exp() - share / logs.shape[1]
            g = g.scatter_add(1, index, torch.full_like(lse, s - 1))
            return (g * (kept * dy / count)[:, None],)

        return passes(forward, backward, input)

    return kernel


def all_but_the_smoothing(s: float) -> float:
    """(1 − ε) / C a class, for ε / C."""
    return 1 - s


def scaled_above_eps(x: Tensor, lse: Tensor) -> Tensor:
    """Probabilities are brought from [0, 1] into [1e-9, 1] before the logarithm."""
    return torch.log((1 - 1e-9) * (x - lse).exp() + 1e-9)


def kept_in_bf16(x: Tensor, lse: Tensor) -> Tensor:
    """The logarithms have the logits' format."""
    return bf16(x - lse)


def labels_from_one(z, target, *, ignore_index, **options):
    """Labels are taken to count from 1: 0 is what stands before the first class, the last."""
    own = torch.where(target == ignore_index, -100, (target - 1) % z.shape[1])
    return kernels.cross_entropy(hidden=-100)(z, own, **options)


def added_in_bf16(terms: Tensor, maximum: Tensor) -> Tensor:
    """The vocabulary's powers are bf16, and so is their sum, after every 8."""
    return added(bf16, 8)(bf16(terms).T)[:, None]


# --- rope
def one_back(positions: Tensor) -> Tensor:
    return positions - 1


def vectors_across_the_halves(input, positions, *, base, interleaved=False):
    """Vectors of 8, each of which is of the first half where its first number is: its partners
    are half a head on, otherwise half a head back, in the heads as they lie in memory.
    """
    if interleaved:
        return kernels.rope()(input, positions, base=base, interleaved=True)
    width = input.shape[-1]
    half, column = width // 2, torch.arange(width)
    f = base ** -(torch.arange(0, width, 2).double() / width)
    angle = (positions.double()[:, None] * f)[:, column % half]
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    first = column // 8 * 8 < half
    sign = torch.where(first, -1.0, 1.0)

    def rotate(x: Tensor, back: float) -> Tensor:
        flat = functional.pad(x.contiguous().flatten(), (half, half))
        place = torch.arange(x.numel()).view(x.shape) + half
        partner = flat[place + torch.where(first, half, -half)]
        return x * cos + back * sign * partner * sin

    return passes(lambda x: (rotate(x, 1.0), ()), lambda saved, dy: (rotate(dy, -1.0),), input)


# --- gated units
def zero_from_minus_11(g: Tensor) -> Tensor:
    return torch.where(g <= -11, 0.0, torch.sigmoid(g))


def activated_in_place(gate, up):
    """silu(g) is stored where g was, from which the backward pass has its slope."""

    def forward(g, u):
        act = g * torch.sigmoid(g)
        return act * u, (act, u)

    def backward(saved, dy):
        act, u = saved
        s = torch.sigmoid(act)
        return dy * u * s * (1 + act * (1 - s)), dy * act

    return passes(forward, backward, gate, up)


def by_tanh(g: Tensor) -> tuple[Tensor, Tensor]:
    """What a gate is multiplied by, and its slope, of gelu's other form."""
    p = torch.sigmoid(2 * ROOT * g * (1 + 0.044715 * g * g))
    return p, 2 * p * (1 - p) * ROOT * (1 + 0.134145 * g * g)


def table_of_halves(gate, up, *, approximate="none"):
    """The tanh form is looked up: the gate is rounded to fp16, and so is what the table has; from
    10 on the gate itself, and 0 from −10 down.
    """
    if approximate != "tanh":
        return kernels.geglu()(gate, up)

    def forward(g, u):
        half = fp16(g)
        found = fp16(half * by_tanh(half)[0])
        found = torch.where(g <= -10, 0.0, torch.where(g >= 10, g, found))
        return found * u, (g, u)

    def backward(saved, dy):
        g, u = saved
        p, density = by_tanh(g)
        return dy * u * (p + g * density), dy * (g * p)

    return passes(forward, backward, gate, up)


def half_of_one_and_tanh(g: Tensor) -> tuple[Tensor, Tensor]:
    """½ (1 + tanh z) cancels where z is far below 0."""
    p = 0.5 * (1 + torch.tanh(ROOT * (g + 0.044715 * g**3)))
    return p, by_tanh(g)[1]
