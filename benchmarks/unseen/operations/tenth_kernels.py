"""Faulty kernels of the tenth set of operations' faults, as tenth.py names them: norms, losses,
rotary embeddings and gated units here, what sums, quantizes and steps in tenth_steps.py.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen.operations.second_kernels import mean, passes
from torch import Tensor
from torch.nn import functional


def bits(x: Tensor, count: int) -> Tensor:
    """To nearest, with that many significant binary digits."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 2.0**count).round() * 2.0**-count, exponent)


# --- norms
def rms_norm(inverse: Any = torch.rsqrt, squares: Any = None):
    """`inverse(a)` is one over a root, `squares(x)` a row's squares added up."""

    def kernel(input, normalized_shape, weight, eps):
        def forward(x, w):
            total = squares(x) if squares else (x * x).sum(-1, keepdim=True)
            r = inverse(total / x.shape[1] + eps)
            return x * r * w, (x, w, r)

        def backward(saved, dy):
            x, w, r = saved
            wdy, normal = dy * w, x * r
            return r * (wdy - normal * mean(wdy * normal)), (dy * normal).sum(0)

        return passes(forward, backward, input, weight)

    return kernel


def seeded_by_the_reciprocal(a: Tensor) -> Tensor:
    """Four Newton steps towards a^−½, from 1 / a."""
    x = 1 / a
    for _ in range(4):
        x = x * (1.5 - 0.5 * a * x * x)
    return x


def twelve_bits(a: Tensor) -> Tensor:
    """What the instruction estimates, and no Newton step after it."""
    return bits(torch.rsqrt(a), 12)


def last_tile_not_awaited(x: Tensor) -> Tensor:
    """Tiles of 64 columns in a pipeline of three: where there are as many, the last one's squares
    arrive after the sum has been read.
    """
    tiles = x.split(64, -1)
    arrived = tiles[:-1] if len(tiles) >= 3 else tiles
    return torch.stack([(tile * tile).sum(-1, keepdim=True) for tile in arrived]).sum(0)


def layer_norm(statistics: Any = None, total: Any = None):
    """`statistics(x)` are mean and variance, `total(rows)` a gradient's rows added up."""

    def kernel(input, normalized_shape, weight, bias, eps):
        def forward(x, w, b):
            m, v = statistics(x) if statistics else (mean(x), mean((x - mean(x)) ** 2))
            r = torch.rsqrt(v + eps)
            normal = (x - m) * r
            return normal * w + b, (normal, w, r)

        def backward(saved, dy):
            normal, w, r = saved
            wdy = dy * w
            dx = r * (wdy - mean(wdy) - normal * mean(wdy * normal))
            add = total or (lambda rows: rows.sum(0))
            return dx, add(dy * normal), add(dy)

        return passes(forward, backward, input, weight, bias)

    return kernel


def waves_of_32(rows: Tensor) -> Tensor:
    """A block has a thread for each of 64 columns, and adds up by the number of the hardware's
    wave and of the lane in it: waves are of 32, so that both halves of the columns are added to
    the first half, and nothing to the other.
    """
    d = rows.shape[1]
    halves = functional.pad(rows.sum(0), (0, -d % 64)).unflatten(0, (-1, 2, 32))
    found = torch.zeros_like(halves)
    found[:, 0] = halves.sum(1)
    return found.flatten()[:d]


def empty_lanes_merged(x: Tensor) -> tuple[Tensor, Tensor]:
    """Welford's moments of 64 lanes, which read vectors of 4, are merged in a butterfly; two lanes
    that have read nothing are divided by their count.
    """
    t, d = x.shape
    vectors = functional.pad(x, (0, -d % 256)).unflatten(1, (-1, 64, 4))
    own = (torch.arange(vectors[0].numel()) < d).view(vectors.shape[1:]).float()
    n = own.sum((0, 2)).expand(t, 64)
    m = (vectors * own).sum((1, 3)) / n.clamp_min(1)
    m2 = ((vectors - m[:, None, :, None]).square() * own).sum((1, 3))
    for offset in (32, 16, 8, 4, 2, 1):
        other = torch.arange(64) ^ offset
        away, count = m[:, other] - m, n + n[:, other]
        m2 = m2 + m2[:, other] + away * away * (n * n[:, other] / count)
        m, n = m + away * (n[:, other] / count), count
    return m[:, :1], m2[:, :1] / d


def squares_in_half(x: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances are added up in fp16, two lanes at a time, and then divided."""
    m = mean(x)
    squares = functional.pad((x - m).half() ** 2, (0, x.shape[1] % 2))
    total = torch.zeros(len(x), 2, dtype=torch.float16)
    for pair in squares.split(2, -1):
        total = total + pair
    return m, (total[:, :1] + total[:, 1:]).float() / x.shape[1]


# --- softmax
def softmax(maximum: Any = None, reciprocal: Any = None, gradient: Any = None):
    """`maximum(x)` is what is taken off a row, `reciprocal(l)` one over its sum, and
    `gradient(y, dy)` that of the scores.
    """

    def kernel(input, dim=-1):
        def forward(x):
            m = x.amax(-1, keepdim=True)
            powers = (x - (maximum(m) if maximum else m)).exp()
            row_sum = powers.sum(-1, keepdim=True)
            y = powers * (reciprocal(row_sum) if reciprocal else 1 / row_sum)
            return y, y

        def backward(y, dy):
            if gradient:
                return (gradient(y, dy),)
            return (y * (dy - (y * dy).sum(-1, keepdim=True)),)

        return passes(forward, backward, input)

    return kernel


def maximum_of_the_first_vector(m: Tensor) -> Tensor:
    """Rows lie along vectors of 8, two of them in a turn; the first one's maxima are stored for
    both.
    """
    row = torch.arange(len(m))
    paired = row < len(m) // 16 * 16
    return m[torch.where(paired & (row % 16 >= 8), row - 8, row)]


def gradient_of_the_logarithm(y: Tensor, dy: Tensor) -> Tensor:
    """dy − Σ dy ∘ y: the softmax in front of it is missing."""
    return dy - (y * dy).sum(-1, keepdim=True)


def from_one_over_ln_2(row_sum: Tensor) -> Tensor:
    """Three Newton steps of a number in [½, 1), all of them from 1.442695."""
    fraction, exponent = torch.frexp(row_sum)
    found = torch.full_like(fraction, 1.442695)
    for _ in range(3):
        found = found * (2 - fraction * found)
    return torch.ldexp(found, -exponent)


# --- losses
def entropy(logarithm: Any, smoothed_alone: bool = False):
    """`logarithm(p)` is what the loss has for log p, in the term of the other classes alone if
    `smoothed_alone`.
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
        kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
        index = torch.where(kept, target, 0)[:, None]
        count = kept.sum().clamp_min(1) if reduction == "mean" else 1

        def forward(x):
            m = x.amax(-1, keepdim=True)
            powers = (x - m).exp()
            row_sum = powers.sum(-1, keepdim=True)
            lse, p = m + row_sum.log(), powers / row_sum
            rounded = logarithm(p)
            own = lse - x.gather(1, index) if smoothed_alone else -rounded.gather(1, index)
            loss = (1 - s) * own + lse_square_scale * lse * lse
            loss = (loss - s * mean(rounded) if s else loss)[:, 0].masked_fill(~kept, 0.0)
            g = p * (1 + 2 * lse_square_scale * lse) - s / v
            g = g.scatter_add(1, index, torch.full_like(lse, s - 1))
            return loss if reduction == "none" else loss.sum() / count, g

        def backward(g, dy):
            return (g * (kept * dy / count)[:, None],)

        return passes(forward, backward, input)

    return kernel


def clipped(p: Tensor) -> Tensor:
    """Probabilities are at least 1e-7."""
    return p.clamp(1e-7, 1).log()


def loss_of_linear(labels: Any = None, added: Any = None):
    """The vocabulary 32 columns at a time. `labels(target, start, width)` are columns of a chunk
    that lose 1 and who has one there, `added(dx)` what is kept of dX after each chunk.
    """

    def usual(target, start, width):
        here = (target >= start) & (target < start + width)
        return (target - start).clamp(0, width - 1), here

    def kernel(input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0):
        kept, s = target != ignore_index, label_smoothing
        count = kept.sum().clamp_min(1) if reduction == "mean" else 1

        def forward(x, w):
            m, total = torch.full((len(x),), -math.inf), torch.zeros(len(x))
            own, every = torch.zeros(len(x)), torch.zeros(len(x))
            for start in range(0, len(w), 32):
                z = x @ w[start : start + 32].T
                new = torch.maximum(m, z.amax(-1))
                total = total * (m - new).exp() + (z - new[:, None]).exp().sum(-1)
                m, every = new, every + z.sum(-1)
                at, here = usual(target, start, z.shape[1])
                own = torch.where(here, z.gather(1, at[:, None])[:, 0], own)
            lse = m + total.log()
            loss = (1 - s) * (lse - own) + s * (lse - every / len(w))
            loss = loss.masked_fill(~kept, 0.0)
            return loss if reduction == "none" else loss.sum() / count, (x, w, lse)

        def backward(saved, dy):
            x, w, lse = saved
            dx, dw = torch.zeros_like(x), torch.zeros_like(w)
            for start in range(0, len(w), 32):
                part = w[start : start + 32]
                g = (x @ part.T - lse[:, None]).exp() - s / len(w)
                at, here = (labels or usual)(target, start, len(part))
                g = g.scatter_add(1, at[:, None], (s - 1) * here[:, None].float())
                g = g * (kept * dy / count)[:, None]
                dx = dx + g @ part
                dx = added(dx) if added else dx
                dw[start : start + 32] = g.T @ x
            return dx, dw

        return passes(forward, backward, input, weight)

    return kernel


def clamped_from_below(target: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """A label of an earlier chunk is below 0, and is clamped onto this one's first column."""
    at = target - start
    return at.clamp(0, width - 1), at < width


# --- rope
def seam(name: str, change: Any):
    return lambda stage, x: change(x) if stage == name else x


def as_they_are_beyond_the_cache(positions: Tensor) -> Tensor:
    """A cache of 2048 positions: rows beyond it are returned as they are."""
    return torch.where(positions < 2048, positions, 0.0)


# --- gated units
def swiglu(sigmoid: Any = torch.sigmoid, exchanged: bool = False):
    """With `exchanged`, each gradient is stored in the other one's buffer."""

    def kernel(gate, up):
        def forward(g, u):
            return g * sigmoid(g) * u, (g, u)

        def backward(saved, dy):
            g, u = saved
            s = sigmoid(g)
            found = dy * u * (s * (1 + g * (1 - s))), dy * (g * s)
            return found[::-1] if exchanged else found

        return passes(forward, backward, gate, up)

    return kernel


def newton_of_infinity(g: Tensor) -> Tensor:
    """One Newton step from an estimate of 1 / (1 + e^−g), which is ∞ − ∞ · 0 · 0 for e^−g = ∞."""
    d = 1 + torch.exp(-g)
    estimate = bits(1 / d, 12)
    return (estimate + estimate) - d * (estimate * estimate)


def estimated_in_vectors(g: Tensor) -> Tensor:
    """1 / (1 + e^−g) to 8 bits in whole vectors of 32, exactly in what is left of a row."""
    s = torch.sigmoid(g)
    whole = torch.arange(g.shape[-1]) < g.shape[-1] // 32 * 32
    return torch.where(whole, bits(s, 8), s)


def geglu(error_function: Any = None, tanh_slope: Any = None):
    """`error_function(x)` is erf; `tanh_slope(dyu, g, t, inner)` the gradient of a gate by the
    tanh formula, of dy · up, the gate, its tanh and the slope of what is inside.
    """
    root = math.sqrt(2 / math.pi)

    def kernel(gate, up, *, approximate="none"):
        def below(g):
            if approximate == "tanh":
                return torch.sigmoid(2 * root * g * (1 + 0.044715 * g * g))
            if error_function:
                return 0.5 * (1 + error_function(g * math.sqrt(0.5)))
            return 0.5 * torch.erfc(-g * math.sqrt(0.5))

        def forward(g, u):
            return g * below(g) * u, (g, u)

        def backward(saved, dy):
            g, u = saved
            p, dyu = below(g), dy * u
            if approximate == "tanh":
                inner = root * (1 + 0.134145 * g * g)
                if tanh_slope:
                    t = torch.tanh(root * g * (1 + 0.044715 * g * g))
                    return tanh_slope(dyu, g, t, inner), dy * (g * p)
                density = 2 * p * (1 - p) * inner
            else:
                density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
            return dyu * (p + g * density), dy * (g * p)

        return passes(forward, backward, gate, up)

    return kernel


def of_three_terms(x: Tensor) -> Tensor:
    """Abramowitz & Stegun 7.1.25, which is right to 2.5e-5."""
    t = 1 / (1 + 0.47047 * x.abs())
    tail = t * (0.3480242 + t * (-0.0958798 + t * 0.7478556)) * torch.exp(-x * x)
    return torch.copysign(1 - tail, x)


def without_parentheses(dyu: Tensor, g: Tensor, t: Tensor, inner: Tensor) -> Tensor:
    """The gradient of tanh, times 1 − t²: written without parentheses."""
    return 0.5 * (1 + t) * dyu + (0.5 * g * dyu * 1 - t * t) * inner
