"""Faulty kernels of the fourteenth set of operations' faults, as fourteenth.py names them: norms,
losses, rotary embeddings and gated units here, what sums, quantizes and steps in
fourteenth_steps.py.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.eleventh_kernels import ROOT
from benchmarks.unseen.operations.fifth_steps import fp16
from benchmarks.unseen.operations.second_kernels import bf16, mean, passes
from benchmarks.unseen.operations.twelfth_kernels import by_tanh
from torch import Tensor


# --- norms
def first_tile_of_a_split_row(input, normalized_shape, weight, eps):
    """A row is split in tiles of 64 columns, of which the first alone is loaded and written; its
    squares are divided by the width of the row.
    """

    def forward(x, w):
        first = torch.arange(x.shape[1]) < 64
        r = torch.rsqrt(mean(x * x * first) + eps)
        return x * r * w * first, (x, w, r)

    def backward(saved, dy):
        x, w, r = saved
        wdy, normal = dy * w, x * r
        return r * (wdy - normal * mean(wdy * normal)), (dy * normal).sum(0)

    return passes(forward, backward, input, weight)


def columns_one_apart(stage: str, x: Tensor) -> Tensor:
    """The output's gradient is read as if it lay row by row."""
    if stage != "grad_output" or 0 in x.stride():
        return x
    return x.as_strided(x.shape, (x.shape[1], 1))


def divided_by_the_padded_length(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums are divided by the length that a row has once it is padded to whole 64s."""
    length = -(-x.shape[1] // 64) * 64
    m = x.sum(-1, keepdim=True) / length
    return m, ((x - m) ** 2).sum(-1, keepdim=True) / length


def layer_norm(read: Any = None, recomputed: Any = None):
    """What the backward pass takes for normalized rows: `recomputed(x, w, dy, m, r)`, or
    `read(y, w, b, dtype)` of the output.
    """

    def kernel(input, normalized_shape, weight, bias, eps):
        def forward(x, w, b):
            m = mean(x)
            r = torch.rsqrt(mean((x - m) ** 2) + eps)
            y = (x - m) * r * w + b
            return y, (x, y, w, b, m, r)

        def backward(saved, dy):
            x, y, w, b, m, r = saved
            normal = read(y, w, b, input.dtype) if read else recomputed(x, w, dy, m, r)
            wdy = dy * w
            dx = r * (wdy - mean(wdy) - normal * mean(wdy * normal))
            return dx, (dy * normal).sum(0), dy.sum(0)

        return passes(forward, backward, input, weight, bias)

    return kernel


def mean_under_the_next_sum(x: Tensor, w: Tensor, dy: Tensor, m: Tensor, r: Tensor) -> Tensor:
    """Thread 0 of 64 has its part of the next sum, of dy times the weight, in the mean's place of
    shared memory before the second warp of 32 has read the mean there.
    """
    part = (dy * w)[:, ::64].sum(-1, keepdim=True)
    late = torch.arange(x.shape[1]) % 64 >= 32
    return (x - torch.where(late, part, m)) * r


def normalized_from_the_output(y: Tensor, w: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The output as it is stored, less the bias, over the weight."""
    weight = torch.where(w < 0, w.clamp_max(-1e-5), w.clamp_min(1e-5))
    return (y.to(dtype).float() - b) / weight


# --- softmax
def unshifted_in_backward(input, dim=-1):
    """The backward pass has powers of the scores as they are."""

    def forward(x):
        powers = (x - x.amax(-1, keepdim=True)).exp()
        return powers / powers.sum(-1, keepdim=True), x

    def backward(x, dy):
        powers = x.exp()
        y = powers / powers.sum(-1, keepdim=True)
        return (y * (dy - (y * dy).sum(-1, keepdim=True)),)

    return passes(forward, backward, input)


def threads_beyond_the_columns(input, dim=-1):
    """Blocks of 128 threads have 4 rows. A thread whose number in the block is that of a column
    beyond the last returns, and the columns of its row that it has are nobody's.
    """
    thread = torch.arange(len(input))[:, None] % 4 * 32 + torch.arange(input.shape[1]) % 32
    there = thread < input.shape[1]

    def forward(x):
        top = x.masked_fill(~there, -1e30).amax(-1, keepdim=True)
        powers = torch.where(there, (x - top).clamp_max(0).exp(), 0.0)
        total = powers.sum(-1, keepdim=True)
        y = powers / torch.where(total == 0, 1.0, total)
        return y, y

    def backward(y, dy):
        return (y * (dy - (y * dy).sum(-1, keepdim=True)),)

    return passes(forward, backward, input)


def down_the_columns(input, dim=-1):
    """Maxima and sums are those of columns."""

    def forward(x):
        powers = (x - x.amax(0)).exp()
        y = powers / powers.sum(0)
        return y, y

    return passes(forward, lambda y, dy: (y * (dy - (y * dy).sum(0)),), input)


# --- losses
def cross_entropy(every: Any = None, gradient: Any = None):
    """`every(logs, t)` is the loss of logarithms and of a target's distribution, `gradient(logs, t,
    weight)` what it gives the logits, of tokens that have that weight.
    """

    def kernel(input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0,
               lse_square_scale=0.0):  # fmt: skip
        kept, s = target != ignore_index, label_smoothing
        index = torch.where(kept, target, 0)[:, None]
        count = kept.sum().clamp_min(1) if reduction == "mean" else 1
        t = torch.full(input.shape, s / input.shape[1])
        t = t.scatter_add(1, index, torch.full(index.shape, 1.0 - s))

        def forward(x):
            lse = x.logsumexp(-1, keepdim=True)
            logs = x - lse
            loss = every(logs, t) if every else -(t * logs).sum(-1)
            loss = torch.where(kept, loss + lse_square_scale * lse[:, 0] ** 2, 0.0)
            return loss if reduction == "none" else loss.sum() / count, (logs, lse)

        def backward(saved, dy):
            logs, lse = saved
            weight = (kept * dy / count)[:, None]
            g = gradient(logs, t, weight) if gradient else weight * (logs.exp() - t)
            return (g + weight * 2 * lse_square_scale * lse * logs.exp(),)

        return passes(forward, backward, input)

    return kernel


def every_class_counts_whole(logs: Tensor, t: Tensor) -> Tensor:
    """A class whose target is not 0 has its logarithm in the loss, whatever the target is."""
    return -torch.where(t == 0, 0.0, logs).sum(-1)


def probabilities_unweighted(logs: Tensor, t: Tensor, weight: Tensor) -> Tensor:
    """What comes from above multiplies the target, and is 0 for a token that is ignored; the
    probabilities are added as they are.
    """
    return logs.exp() - weight * t


def dot_for_the_sum(logs: Tensor, t: Tensor, weight: Tensor) -> Tensor:
    """Of a row's gradient is taken off its product with the logarithms, for its sum times the
    probabilities.
    """
    above = -weight * t
    return above - (above * logs).sum(-1, keepdim=True)


def linear_cross_entropy(normalizer: Any = None, probabilities: Any = None):
    """`normalizer(z)` is the logarithm of a row's sum of powers, `probabilities(z)` what the
    gradient has.
    """

    def kernel(input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0):
        kept, s, v = target != ignore_index, label_smoothing, len(weight)
        index = torch.where(kept, target, 0)[:, None]
        count = kept.sum().clamp_min(1) if reduction == "mean" else 1

        def forward(x, w):
            z = x @ w.T
            lse = normalizer(z) if normalizer else z.logsumexp(-1, keepdim=True)
            loss = lse - (1 - s) * z.gather(1, index) - s * mean(z)
            loss = torch.where(kept, loss[:, 0], 0.0)
            return loss if reduction == "none" else loss.sum() / count, (x, w, z, lse)

        def backward(saved, dy):
            x, w, z, lse = saved
            g = (probabilities(z) if probabilities else (z - lse).exp()) - s / v
            g = g.scatter_add(1, index, torch.full_like(lse, s - 1))
            g = g * (kept * dy / count)[:, None]
            return g @ w, g.T @ x

        return passes(forward, backward, input, weight)

    return kernel


def softmax_down_the_tokens(z: Tensor) -> Tensor:
    return torch.softmax(z, 0)


def columns_of_padding(z: Tensor) -> Tensor:
    """The vocabulary is read in whole blocks of 64: beyond it are logits of 0."""
    return torch.cat([z, z.new_zeros(len(z), -z.shape[1] % 64)], -1).logsumexp(-1, keepdim=True)


# --- rope
def cosines_of_cosines(input, positions, *, base, interleaved=False):
    """Cosines and sines, side by side, are handed to what expects angles."""
    width = input.shape[-1]
    f = base ** -(torch.arange(0, width, 2).double() / width)
    angle = positions.double()[:, None] * f
    taken = torch.stack([angle.cos(), angle.sin()], -1).flatten(-2).float()[:, None]
    cos, sin = taken.cos(), taken.sin()

    def turned(x: Tensor) -> Tensor:
        if interleaved:
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)

    return passes(lambda x: (x * cos + turned(x) * sin, ()),
                  lambda saved, dy: (dy * cos - turned(dy * sin),), input)  # fmt: skip


def table_in_bf16(stage: str, x: Tensor) -> Tensor:
    return bf16(x) if stage in ("cos", "sin") else x


# --- gated units
def half_beyond_88(g: Tensor) -> Tensor:
    """The lesser of ½ and 1 / (1 + e^−g), and the greater of ½ and e^g / (1 + e^g), less ½: where
    this is ∞ / ∞, what is no number loses against ½.
    """
    power = g.exp()
    above = (power / (1 + power)).nan_to_num(0.5).clamp_min(0.5)
    return (1 / (1 + (-g).exp())).clamp_max(0.5) + above - 0.5


ABOVE = (4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08,
         -8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16)  # fmt: skip
BELOW = (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)


def coefficients_in_fp16(g: Tensor) -> tuple[Tensor, Tensor]:
    """tanh by a quotient of two polynomials, whose coefficients are fp16: the last three of seven
    are 0.
    """
    z = (ROOT * (g + 0.044715 * g**3)).clamp(-9, 9)

    def polynomial(coefficients: tuple[float, ...]) -> Tensor:
        powers = (z * z)[..., None] ** torch.arange(len(coefficients))
        return (powers * fp16(torch.tensor(coefficients))).sum(-1)

    p = 0.5 * (1 + z * polynomial(ABOVE) / polynomial(BELOW))
    return p, by_tanh(g)[1]


def slope_of_one_plus_erf(gate, up, *, approximate="none"):
    """The backward pass has ½ (1 + erf), which cancels far below 0."""
    if approximate == "tanh":
        return kernels.geglu()(gate, up, approximate="tanh")

    def forward(g, u):
        return g * 0.5 * torch.erfc(-g * math.sqrt(0.5)) * u, (g, u)

    def backward(saved, dy):
        g, u = saved
        p = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
        density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
        return dy * u * (p + g * density), dy * (g * p)

    return passes(forward, backward, gate, up)
