"""Sound kernels of the tenth set of operations' faults, each written in a way of its own: rows
scaled before they are squared, norms in fp64, labels' gradients from the other classes, polar
coordinates, integers, a magic number, ranks.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Literal

import torch
from benchmarks.unseen.operations.eighth_steps import quantized
from benchmarks.unseen.operations.fifth_steps import mx_codes
from benchmarks.unseen.operations.second_kernels import mean, passes, power_of_two
from benchmarks.unseen.operations.tenth_steps import mx_back
from torch import Tensor


def rms_of_scaled_rows(input, normalized_shape, weight, eps):
    """Rows are divided by a power of two near their largest number before they are squared."""

    def forward(x, w):
        most = x.abs().amax(-1, keepdim=True).clamp_min(2.0**-10)
        by = torch.ldexp(torch.ones_like(most), torch.frexp(most)[1] - 1)
        x = x / by
        r = (mean(x * x) + eps / by / by).rsqrt()
        return x * r * w, (x * r, w, r / by)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        return (wdy - normal * mean(wdy * normal)) * r, (dy * normal).sum(0)

    return passes(forward, backward, input, weight)


def layer_norm_of_a_norm_in_fp64(input, normalized_shape, weight, bias, eps):
    """Sums by products with ones in fp64, and a Euclidean norm for the deviation."""

    def forward(x, w, b):
        wide = x.double()
        c = wide - wide @ torch.full((x.shape[1], 1), 1 / x.shape[1], dtype=torch.float64)
        c = c - mean(c)
        spread = torch.linalg.vector_norm(c, dim=-1, keepdim=True) / math.sqrt(x.shape[1])
        r = 1 / torch.hypot(spread, spread.new_tensor(math.sqrt(eps)))
        normal = (c * r).float()
        return torch.addcmul(b, normal, w), (normal, w, r.float())

    def backward(saved, dy):
        normal, w, r = saved
        wdy = (dy * w).double()
        dx = wdy - mean(wdy) - normal * mean(wdy * normal)
        return dx.float() * r, (dy * normal).sum(0), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


def softmax_of_squared_powers(input, dim=-1):
    """Powers of half the distances, squared; the gradient from distances of dy to its mean."""

    def forward(x):
        halves = torch.exp((x - x.amax(-1, keepdim=True)) * 0.5)
        powers = halves * halves
        y = powers / powers.sum(-1, keepdim=True)
        return y, y

    def backward(y, dy):
        c = dy - mean(dy)
        inner = torch.bmm(y[:, None], c[..., None])[:, 0]
        return ((c - inner) * y,)

    return passes(forward, backward, input)


def loss_with_labels_last(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    """The gradient of a label is what is missing from those of all others."""
    kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
    index = target.masked_fill(~kept, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x):
        m = x.amax(-1, keepdim=True)
        powers = (x - m).exp()
        row_sum = powers.sum(-1, keepdim=True)
        distance, p = row_sum.log(), powers / row_sum
        away = distance + (m - x.gather(1, index))
        lse = m + distance
        loss = (1 - s) * away + lse_square_scale * lse * lse
        loss = loss + s * (distance + mean(m - x)) if s else loss
        others = p.scatter(1, index, 0.0)
        g = others.scatter(1, index, s - others.sum(-1, keepdim=True)) - s / v
        g = g + 2 * lse_square_scale * lse * p
        loss = torch.where(kept, loss[:, 0], 0.0)
        return loss if reduction == "none" else loss.sum() / count, g

    def backward(g, dy):
        return (torch.where(kept[:, None], g * (dy / count).expand(len(g))[:, None], 0.0),)

    return passes(forward, backward, input)


def loss_of_slices_of_k(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """Logits are added up over slices of 16 features, and so are both gradients, slice by slice."""
    kept, s = target != ignore_index, label_smoothing
    index = torch.where(kept, target, 0)[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x, w):
        z = torch.zeros(len(x), len(w))
        for left, right in zip(x.split(16, -1), w.split(16, -1), strict=True):
            z = torch.addmm(z, left, right.T)
        logs = torch.log_softmax(z, -1)
        loss = -(1 - s) * logs.gather(1, index)[:, 0] - s * logs.mean(-1)
        loss = torch.where(kept, loss, 0.0)
        g = logs.exp().scatter_add(1, index, torch.full((len(x), 1), s - 1)) - s / len(w)
        return loss if reduction == "none" else loss.sum() / count, (x, w, g)

    def backward(saved, dy):
        x, w, g = saved
        g = g * (kept * (dy / count))[:, None]
        dx = torch.cat([g @ part for part in w.split(16, -1)], -1)
        return dx, torch.cat([g.T @ part for part in x.split(16, -1)], -1)

    return passes(forward, backward, input, weight)


def rope_in_polar_coordinates(input, positions, *, base, interleaved=False):
    """Each pair's length and angle in fp64; positions are added to the angle."""
    width = input.shape[-1]
    f = base ** -(torch.arange(0, width, 2).double() / width)
    turn = (positions.double()[:, None] * f)[:, None]

    def rotate(x: Tensor, sign: float) -> Tensor:
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        a, b = a.double(), b.double()
        length, angle = torch.hypot(a, b), torch.atan2(b, a) + sign * turn
        pair = (length * angle.cos()).float(), (length * angle.sin()).float()
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    return passes(lambda x: (rotate(x, 1.0), ()), lambda saved, dy: (rotate(dy, -1.0),), input)


def swiglu_of_the_modulus(gate, up):
    """e^−|g| in fp64, and both sigmoids of it."""

    def sigmoids(g: Tensor) -> tuple[Tensor, Tensor]:
        e = torch.exp(-g.double().abs())
        high, low = 1 / (1 + e), e / (1 + e)
        return torch.where(g < 0, low, high), torch.where(g < 0, high, low)

    def forward(g, u):
        return (g * sigmoids(g)[0] * u).float(), (g, u)

    def backward(saved, dy):
        g, u = saved
        s, rest = sigmoids(g)
        return (dy * u * (s + g * s * rest)).float(), (dy * (g * s)).float()

    return passes(forward, backward, gate, up)


def geglu_of_what_is_lost(gate, up, *, approximate="none"):
    """relu(g) less |g| times the normal's tail beyond |g|, and slopes of it, in fp64."""
    root = math.sqrt(2 / math.pi)

    def tail(size: Tensor) -> tuple[Tensor, Tensor]:
        if approximate == "tanh":
            e = torch.exp(-2 * root * size * (1 + 0.044715 * size * size))
            return e / (1 + e), 2 * root * (1 + 0.134145 * size * size) * e / (1 + e) ** 2
        return 0.5 * torch.erfc(size * math.sqrt(0.5)), torch.exp(-0.5 * size * size) * (root / 2)

    def forward(g, u):
        g, u = g.double(), u.double()
        size = g.abs().clamp_max(1e3)  # beyond, the tail is 0
        beyond, density = tail(size)
        value, low = torch.relu(g) - size * beyond, beyond - size * density
        return (value * u).float(), (u, value, torch.where(g < 0, low, 1 - low))

    def backward(saved, dy):
        u, value, slope = saved
        return (dy * u * slope).float(), (dy * value).float()

    return passes(forward, backward, gate, up)


def linear_of_compensated_blocks(input, weight):
    """Blocks of 24 of K, whose sum carries along what every addition has lost."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        total, lost = torch.zeros(len(a), b.shape[1]), torch.zeros(len(a), b.shape[1])
        for left, right in zip(a.split(24, -1), b.split(24), strict=True):
            part = left @ right
            new = total + part
            other = new - total
            lost = lost + ((total - (new - other)) + (part - other))
            total = new
        return torch.where(lost.isfinite(), total + lost, total)

    return passes(
        lambda x, w: (product(x, w.T), (x, w)),
        lambda saved, dy: (product(dy, saved[1]), product(dy.T, saved[0])),
        input,
        weight,
    )


def products_in_integers(input, weight, *, format: Literal["mxfp8"]):
    """E4M3's numbers are whole multiples of 2⁻⁹: a block's products are summed exactly."""

    def forward(x, w):
        (a, ea, _), (b, eb, _) = mx_codes(x), mx_codes(w)
        a, b = (a * 512).double(), (b * 512).double()
        total = torch.zeros(len(x), len(w), dtype=torch.float64)
        for k in range(a.shape[1]):
            exponent = ea[:, None, k] + eb[None, :, k] - 18
            total += (a[:, k] @ b[:, k].T) * torch.exp2(exponent.double())
        return total.float()

    return quantized(forward, mx_back)(input, weight)


def fp8_by_a_magic_number(input, *, format: Literal["mxfp8_e4m3"]):
    """1.5 · 2²³ steps are added, which rounds to a whole one, and taken off again."""
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, power_of_two(amax, 8))
    y = (x / scale).clamp(-448, 448)
    exponent = (torch.frexp(y)[1] - 1).clamp_min(-6)
    magic = torch.ldexp(torch.full_like(y, 1.5), exponent - 3 + 23)
    return (((y + magic) - magic) * scale).flatten(-2)


def router_by_ranks(logits, k, *, renormalize=True):
    """How many experts are before another: those with fewer than k are chosen."""

    def ranks(z: Tensor) -> Tensor:
        earlier = torch.ones(z.shape[1], z.shape[1]).tril(-1).bool()
        before = (z[:, None] > z[..., None]) | ((z[:, None] == z[..., None]) & earlier)
        return before.sum(-1)

    def forward(z):
        rank = torch.cat([ranks(part) for part in z.split(16)])
        index = torch.argsort(rank, dim=-1, stable=True)[:, :k].contiguous()
        powers = (z - z.amax(-1, keepdim=True)).exp()
        p = powers / powers.sum(-1, keepdim=True)
        w = powers.gather(1, index)
        w = w / w.sum(-1, keepdim=True) if renormalize else p.gather(1, index)
        return (w.to(logits.dtype), index), (p, index, w)

    def backward(saved, dy):
        p, index, w = saved
        dy = dy - dy[:, :1] if renormalize else dy  # of which weights that add to 1 see nothing
        inner = (w * dy).sum(-1, keepdim=True)
        if renormalize:
            return (torch.zeros_like(p).scatter(1, index, w * (dy - inner)),)
        return (torch.scatter(-inner.expand_as(p), 1, index, dy - inner) * p,)

    return passes(forward, backward, logits)
