"""Faulty kernels of the sixth set of operations' faults, as sixth.py names them:
norms, losses, rotary embeddings and gated units here, what sums, quantizes and steps in
sixth_steps.py.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.second_kernels import bf16, mean, passes
from torch import Tensor
from torch.nn import functional


# --- rms_norm
def weight_twice(input, normalized_shape, weight, eps):
    """Of the input's gradient the second term is multiplied by the weight outside its sum too."""

    def forward(x, w):
        r = torch.rsqrt(mean(x * x) + eps)
        return x * r * w, (x * r, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        return r * (wdy - w * normal * mean(wdy * normal)), (dy * normal).sum(0)

    return passes(forward, backward, input, weight)


def squares_not_averaged(input, normalized_shape, weight, eps):
    """Σ x² where its mean is meant, in both passes."""

    def forward(x, w):
        r = torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
        return x * r * w, (x * r, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        dx = r * (wdy - normal * (wdy * normal).sum(-1, keepdim=True))
        return dx, (dy * normal).sum(0)

    return passes(forward, backward, input, weight)


# --- layer_norm
def variances_merged(x: Tensor) -> Tensor:
    """Blocks of 64, whose variances are merged by the formula for sums of squares."""
    count, middle, total = 0, torch.zeros(len(x), 1), torch.zeros(len(x), 1)
    for part in x.split(64, 1):
        n, own = part.shape[1], mean(part)
        total = total + mean((part - own) ** 2)
        total = total + (own - middle) ** 2 * (count * n / (count + n))
        count, middle = count + n, middle + (own - middle) * (n / (count + n))
    return total


def tree_of_48(x: Tensor) -> Tensor:
    """48 threads, whose sums are halved by shifts: 24, 12, 6, 3, 1, so that of 3 one is lost."""
    lanes = torch.zeros(48, x.shape[1])
    for start in range(0, len(x), 48):
        part = x[start : start + 48]
        lanes[: len(part)] += part
    step = 24
    while step:
        lanes[:step] += lanes[step : 2 * step].clone()
        step //= 2
    return lanes[0]


def layer_norm(bias_sum: Any = kernels.over_rows, first: Any = mean):
    """`bias_sum` over rows for the bias, and the `first` of dX's two means."""

    def kernel(input, normalized_shape, weight, bias, eps):
        def forward(x, w, b):
            c = x - mean(x)
            r = torch.rsqrt(mean(c * c) + eps)
            return c * r * w + b, (c * r, w, r)

        def backward(saved, dy):
            normal, w, r = saved
            wdy = dy * w
            dx = r * (wdy - first(wdy) - normal * mean(wdy * normal))
            return dx, (dy * normal).sum(0), bias_sum(dy)

        return passes(forward, backward, input, weight, bias)

    return kernel


def last_tile(x: Tensor) -> Tensor:
    """The mean of which only the last tile of 32 columns is summed."""
    start = (x.shape[1] - 1) // 32 * 32
    return x[:, start:].sum(-1, keepdim=True) / x.shape[1]


# --- softmax
def softmax(terms: Any = None, row_sum: Any = None, gradient: Any = None, read: Any = None):
    def kernel(input, dim=-1):
        def forward(x):
            x = read(x) if read else x
            e = terms(x) if terms else (x - x.amax(-1, keepdim=True)).exp()
            y = e / (row_sum(e) if row_sum else e.sum(-1, keepdim=True))
            return y, y

        def backward(y, dy):
            if gradient:
                return (gradient(y, dy),)
            return (y * (dy - (y * dy).sum(-1, keepdim=True)),)

        return passes(forward, backward, input)

    return kernel


def passed_through(y: Tensor, dy: Tensor) -> Tensor:
    return dy


def as_if_contiguous(x: Tensor) -> Tensor:
    """Rows are read one after the other, whatever the strides are."""
    shape, start = x.shape, x.storage_offset()
    held = x.untyped_storage().nbytes() // x.element_size()
    if held < start + x.numel():  # fewer numbers than elements: a broadcast one
        return x
    return x.as_strided(shape, (shape[1], 1), start)


# --- losses
def entropy(gradient: Any = None, kept_of: Any = None):
    """`gradient` changes the logits' gradient, `kept_of` says which targets are not ignored."""

    def kernel(
        input,
        target,
        *,
        ignore_index=-100,
        reduction="none",
        label_smoothing=0.0,
        lse_square_scale=0.0,
    ):
        kept, s = target != ignore_index, label_smoothing
        kept = kept_of(target, ignore_index) if kept_of else kept
        hot = torch.zeros(input.shape)
        inside = (target >= 0) & (target < input.shape[1])
        hot[inside, target[inside]] = 1.0
        tokens = kept.sum() if reduction == "mean" else 1

        def forward(x):
            lse = x.logsumexp(-1)
            loss = (1 - s) * (lse - (x * hot).sum(-1)) + s * (lse - x.mean(-1))
            loss = torch.where(kept, loss + lse_square_scale * lse * lse, 0.0)
            return loss if reduction == "none" else loss.sum() / tokens, (x, lse[:, None])

        def backward(saved, dy):
            x, lse = saved
            p = (x - lse).exp()
            g = p * (1 + 2 * lse_square_scale * lse) - (1 - s) * hot - s / x.shape[1]
            g = g * kept[:, None] * (dy / tokens).expand(len(x))[:, None]
            return (gradient(g, reduction) if gradient else g,)

        return passes(forward, backward, input)

    return kernel


def none_without_gradient(g: Tensor, reduction: str) -> Tensor:
    return torch.zeros_like(g) if reduction == "none" else g


def over_the_batch(g: Tensor, reduction: str) -> Tensor:
    """Divided by the number of tokens, whatever the reduction is."""
    return g / len(g)


def unless_the_default(target: Tensor, ignore_index: int) -> Tensor:
    """-100 is taken for "nothing is ignored"."""
    return torch.ones_like(target, dtype=torch.bool) if ignore_index == -100 else (
        target != ignore_index
    )  # fmt: skip


def without_smoothing(z, labels, **options):
    return kernels.cross_entropy()(z, labels, **{**options, "label_smoothing": 0.0})


probabilities_first_in_bf16 = kernels.cross_entropy(
    lambda name, x: bf16(x) if name == "probabilities" else x
)


# --- rope
def rope(table: Any = None, joined: Any = None):
    """`table(cos, sin)` for what is read of a table, `joined(first, second)` for both halves."""

    def kernel(input, positions, *, base, interleaved=False):
        width = input.shape[-1]
        angle = positions.double()[:, None] * base ** -(torch.arange(0, width, 2).double() / width)
        cos, sin = angle.cos().float(), angle.sin().float()
        cos, sin = table(cos, sin) if table else (cos, sin)
        cos, sin = cos[:, None], sin[:, None]

        def rotate(x, sign):
            a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            pair = a * cos - sign * b * sin, b * cos + sign * a * sin
            pair = joined(*pair) if joined and sign > 0 else pair
            return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

        return passes(lambda x: (rotate(x, 1.0), ()), lambda saved, dy: (rotate(dy, -1.0),), input)

    return kernel


def counted_from_minus_one(base: float, width: int) -> Tensor:
    """base^(−2 (i − 1) / D)."""
    return base ** -((torch.arange(0, width, 2).double() - 2) / width)


def halves_of_two_heads(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Of two heads both get the first half of the first and the second half of the second."""
    even = first.shape[1] // 2 * 2
    first, second = first.clone(), second.clone()
    first[:, 1:even:2] = first[:, 0:even:2]
    second[:, 0:even:2] = second[:, 1:even:2]
    return first, second


def table_by_halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Sines and cosines lie in turns; the halves of the table are taken for them."""
    sines, cosines = torch.stack([sin, cos], -1).flatten(-2).chunk(2, -1)
    return cosines, sines


def sines_of_the_padded_width(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A row has cosines and then sines, which are read from half of the next power of two."""
    half = cos.shape[1]
    start = 1 << (half - 1).bit_length()
    flat = torch.cat([torch.cat([cos, sin], -1).flatten(), torch.zeros(start)])
    at = torch.arange(len(cos))[:, None] * 2 * half + start + torch.arange(half)
    return cos, flat[at]


# --- gated units
def clipped_cubic(x: Tensor) -> Tensor:
    """The sigmoid by a cubic in place of tanh, which is cut at 1 from 1.74 on."""
    y = x / 2
    return 0.5 + 0.5 * (y * (1 + 0.1834 * y * y)).clamp(-1, 1)


def beyond_the_threads(gate, up):
    """One element a thread: those beyond 64 keep the gate as it is."""

    def forward(g, u):
        out = functional.silu(g) * u
        out[:, 64:] = g[:, 64:]
        return out, (g, u)

    def backward(saved, dy):
        g, u = saved
        s = torch.sigmoid(g)
        return dy * u * s * (1 + g * (1 - s)), dy * g * s

    return passes(forward, backward, gate, up)


def slope_of_the_input(gate, up):
    """The sigmoid's derivative x (1 − x), with the gate for x."""

    def forward(g, u):
        return functional.silu(g) * u, (g, u)

    def backward(saved, dy):
        g, u = saved
        s = torch.sigmoid(g)
        return dy * u * (s + g * (g * (1 - g))), dy * g * s

    return passes(forward, backward, gate, up)


def geglu(one: float = math.sqrt(2 / math.pi), two: float = 0.044715, sech: Any = None):
    """GELU's tanh form with its two coefficients, and what stands for 1 − tanh²."""

    def kernel(gate, up, *, approximate="none"):
        if approximate != "tanh":
            return kernels.geglu()(gate, up)

        def forward(g, u):
            below = torch.sigmoid(2 * one * (g + two * g**3))
            return g * below * u, (g, u, below)

        def backward(saved, dy):
            g, u, below = saved
            inner = one * (g + two * g**3)
            steep = sech(inner) if sech else 4 * below * (1 - below)
            slope = below + 0.5 * g * steep * one * (1 + 3 * two * g * g)
            return dy * u * slope, dy * g * below

        return passes(forward, backward, gate, up)

    return kernel


def tail_without_its_denominator(x: Tensor) -> Tensor:
    """4 e^(−2 |x|) beyond 3, where it is to be divided by (1 + e^(−2 |x|))²."""
    e = torch.exp(-2 * x.abs())
    return torch.where(x.abs() > 3, 4 * e, 4 * e / (1 + e) ** 2)
