"""Faulty kernels of the eleventh set of operations' faults, as eleventh.py names them: norms,
losses, rotary embeddings and gated units here, what sums, quantizes and steps in
eleventh_steps.py.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen.operations.fifth_steps import fp16
from benchmarks.unseen.operations.second_kernels import added, bf16, mean, passes
from torch import Tensor


# --- norms
def rms_norm(inverse: Any = None, read: Any = None):
    """`inverse(x, eps)` is one over a row's root mean square, `read(x)` the input as the pass that
    normalizes reads it.
    """

    def kernel(input, normalized_shape, weight, eps):
        def forward(x, w):
            r = inverse(x, eps) if inverse else torch.rsqrt(mean(x * x) + eps)
            return (read(x) if read else x) * r * w, (x, w, r)

        def backward(saved, dy):
            x, w, r = saved
            wdy, normal = dy * w, x * r
            return r * (wdy - normal * mean(wdy * normal)), (dy * normal).sum(0)

        return passes(forward, backward, input, weight)

    return kernel


def eps_of_scaled_rows(x: Tensor, eps: float) -> Tensor:
    """Rows are divided by their largest number first, and eps is added as it is."""
    most = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    scaled = x / most
    return 1 / (torch.sqrt(mean(scaled * scaled) + eps) * most)


def eps_in_the_sum(x: Tensor, eps: float) -> Tensor:
    """eps is added to the sum of squares, and divided with it."""
    return torch.rsqrt(((x * x).sum(-1, keepdim=True) + eps) / x.shape[1])


def without_its_stride(x: Tensor) -> Tensor:
    """Columns are one apart, whatever their stride is."""
    return x.as_strided(x.shape, (x.stride(0), 1))


def rows_beyond_the_cores(y: Tensor) -> Tensor:
    """20 programs, one row each."""
    return y * (torch.arange(len(y)) < 20)[:, None]


def small_ones_to_zero(variance: Tensor) -> Tensor:
    return torch.where(variance < 1e-6, 0.0, variance)


def difference_in_tiles(x: Tensor) -> Tensor:
    """E[x²] − E[x]² where a row is wider than a tile of 32, else the mean of squared distances."""
    m = mean(x)
    return mean(x * x) - m * m if x.shape[1] > 32 else mean((x - m) ** 2)


# --- softmax
def softmax(power: Any = torch.exp, gradient: float = 1.0):
    """`power(d)` is e to a distance from the maximum; the input's gradient is multiplied."""

    def kernel(input, dim=-1):
        def forward(x):
            terms = power(x - x.amax(-1, keepdim=True))
            y = terms / terms.sum(-1, keepdim=True)
            return y, y

        def backward(y, dy):
            return (gradient * y * (dy - (y * dy).sum(-1, keepdim=True)),)

        return passes(forward, backward, input)

    return kernel


def first_of_the_row(x: Tensor) -> Tensor:
    return x[:, :1]


def by_a_line(distance: Tensor) -> Tensor:
    """2 to the fraction of log₂ e · d by a polynomial of degree one, right to 3 %."""
    logarithm = (distance * math.log2(math.e)).clamp_min(-126)
    whole = logarithm.floor()
    return torch.ldexp(0.9702 * (1 + (logarithm - whole)), whole.int())


def nothing_beyond_13(distance: Tensor) -> Tensor:
    return torch.where(distance < -13, 0.0, distance.exp())


# --- losses
def in_fp16_by_sixteens(terms: Tensor, maximum: Tensor) -> Tensor:
    """Powers in fp16, whose sum is fp16 after every 16 of them."""
    return added(fp16, 16)(fp16(terms).T)[:, None]


def narrow_logits_forward(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """The forward pass has the logits in bf16; the backward one has them anew in fp32, and takes
    off the other's logarithm of a sum.
    """
    kept, s, v = target != ignore_index, label_smoothing, len(weight)
    index = torch.where(kept, target, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x, w):
        z = bf16(x @ w.T)
        lse = z.logsumexp(-1, keepdim=True)
        loss = (1 - s) * (lse - z.gather(1, index)) + s * (lse - mean(z))
        loss = torch.where(kept, loss[:, 0], 0.0)
        return loss if reduction == "none" else loss.sum() / count, (x, w, lse)

    def backward(saved, dy):
        x, w, lse = saved
        g = (x @ w.T - lse).exp() - s / v
        g = g.scatter_add(1, index, torch.full_like(lse, s - 1))
        g = g * (kept * dy / count)[:, None]
        return g @ w, g.T @ x

    return passes(forward, backward, input, weight)


# --- rope
def all_in_bf16(stage: str, x: Tensor) -> Tensor:
    """A cache that is built in the model's dtype: frequencies, positions and their products."""
    return bf16(x) if stage in ("frequency", "positions", "angle") else x


def partners_by_xor(input, positions, *, base, interleaved=False):
    """Vectors of 4 find their partner in the other half at lane ^ h, h the vectors of a half; a
    lane that is not there gives the own vector.
    """
    width = input.shape[-1]
    f = base ** -(torch.arange(0, width, 2).double() / width)
    angle = positions.double()[:, None] * f
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    vectors = width // 4
    lane = torch.arange(vectors)
    other = lane ^ (vectors // 2)
    other = torch.where(other < vectors, other, lane)

    def rotate(x: Tensor, sign: float) -> Tensor:
        if interleaved:
            a, b = x[..., ::2], x[..., 1::2]
            pair = a * cos - sign * b * sin, b * cos + sign * a * sin
            return torch.stack(pair, -1).flatten(-2)
        partner = x.unflatten(-1, (-1, 4))[..., other, :].flatten(-2)
        both = torch.cat([-sin, sin], -1) * sign
        return x * torch.cat([cos, cos], -1) + partner * both

    return passes(lambda x: (rotate(x, 1.0), ()), lambda saved, dy: (rotate(dy, -1.0),), input)


# --- gated units
def slope_without_parentheses(gate, up):
    """1 + e + g · e / (1 + e)², for (1 + e + g · e) / (1 + e)², e = e^−g."""

    def forward(g, u):
        return g * torch.sigmoid(g) * u, (g, u)

    def backward(saved, dy):
        g, u = saved
        e = torch.exp(-g)
        slope = 1 + e + g * e / (1 + e) ** 2
        return dy * u * slope, dy * (g * torch.sigmoid(g))

    return passes(forward, backward, gate, up)


def three_lines(g: Tensor) -> Tensor:
    """Two lines up to 1 and 2, and 1 beyond: 0.12 beside the sigmoid at 2."""
    size = g.abs()
    half = torch.where(size < 1, 0.2311 * size, 0.1497 * size + 0.0813)
    half = torch.where(size < 2, half, 0.5)
    return 0.5 + torch.copysign(half, g)


def times_the_input(g: Tensor) -> Tensor:
    """x / (1 + e^−x)."""
    return g / (1 + torch.exp(-g))


ROOT = math.sqrt(2 / math.pi)


def geglu(below: Any = None, tanh_below: Any = None):
    """`below(g)` and `tanh_below(g)` are, for either formula, what a gate is multiplied by and its
    slope.
    """

    def exact(g):
        return 0.5 * torch.erfc(-g * math.sqrt(0.5)), (-0.5 * g * g).exp() / math.sqrt(2 * math.pi)

    def by_tanh(g):
        p = torch.sigmoid(2 * ROOT * g * (1 + 0.044715 * g * g))
        return p, 2 * p * (1 - p) * ROOT * (1 + 0.134145 * g * g)

    def kernel(gate, up, *, approximate="none"):
        own = (tanh_below or by_tanh) if approximate == "tanh" else (below or exact)

        def backward(saved, dy):
            g, u = saved
            p, density = own(g)
            return dy * u * (p + g * density), dy * (g * p)

        return passes(lambda g, u: (g * own(g)[0] * u, (g, u)), backward, gate, up)

    return kernel


def tanh_of_one_exponential(g: Tensor) -> tuple[Tensor, Tensor]:
    """(e^2z − 1) / (e^2z + 1) is ∞ / ∞ for gates of 11 and more."""
    e = torch.exp(2 * ROOT * (g + 0.044715 * g**3))
    p = 0.5 * (1 + (e - 1) / (e + 1))
    return p, 2 * p * (1 - p) * ROOT * (1 + 0.134145 * g * g)


def cube_in_fp16(g: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.sigmoid(2 * ROOT * (g + 0.044715 * fp16(g**3)))
    return p, 2 * p * (1 - p) * ROOT * (1 + 0.134145 * g * g)


def sigmoid_of_1702(g: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.sigmoid(1.702 * g)
    return p, 1.702 * p * (1 - p)
