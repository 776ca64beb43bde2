"""Faulty kernels of the seventh set of operations' faults, as seventh.py names
them: norms, losses, rotary embeddings and gated units here, what sums, quantizes and steps in
seventh_steps.py.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.second_kernels import bf16, mean, passes
from torch import Tensor
from torch.nn import functional


# --- norms
def another_row_s_term(input, normalized_shape, weight, eps):
    """Tiles of 32 × 32: column j is corrected by the sum of row j of its tile."""

    def forward(x, w):
        r = torch.rsqrt(mean(x * x) + eps)
        return x * r * w, (x * r, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        sums = functional.pad(mean(wdy * normal)[:, 0], (0, -len(dy) % 32))
        tile = torch.arange(len(dy))[:, None] // 32 * 32
        taken = sums[tile + torch.arange(dy.shape[1]) % 32]
        return r * (wdy - normal * taken), (dy * normal).sum(0)

    return passes(forward, backward, input, weight)


def partial_warp(input, normalized_shape, weight, eps):
    """36 threads, one whole warp and 4 threads more, whose sums nobody reads."""

    def forward(x, w):
        read = torch.arange(x.shape[1]) % 36 < 32
        r = torch.rsqrt((x * x * read).sum(-1, keepdim=True) / x.shape[1] + eps)
        return x * r * w, (x * r, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        return r * (wdy - normal * mean(wdy * normal)), (dy * normal).sum(0)

    return passes(forward, backward, input, weight)


def by_the_deviation(input, normalized_shape, weight, eps):
    """The root of torch.std, which subtracts the mean and has its root already."""
    x = input.float()
    return (x / (x.std(-1, keepdim=True) + eps).sqrt() * weight.float()).to(input.dtype)


def layer_norm(inverse: Any):
    """`inverse(centered, eps)` is what a row is multiplied by."""

    def kernel(input, normalized_shape, weight, bias, eps):
        c = input.float() - mean(input.float())
        return (c * inverse(c, eps) * weight.float() + bias.float()).to(input.dtype)

    return kernel


def eps_beside_the_count(c: Tensor, eps: float) -> Tensor:
    """1 / √(Σ / (D + eps))."""
    return torch.rsqrt((c * c).sum(-1, keepdim=True) / (c.shape[1] + eps))


def squared_for_the_root(c: Tensor, eps: float) -> Tensor:
    """1 / (variance + eps)²."""
    return (mean(c * c) + eps) ** -2


# --- softmax
def softmax(powers: Any):
    """`powers(x)` are the terms and what they are divided by."""

    def kernel(input, dim=-1):
        def forward(x):
            terms, total = powers(x)
            return terms / total, terms / total

        def backward(y, dy):
            return (y * (dy - (y * dy).sum(-1, keepdim=True)),)

        return passes(forward, backward, input)

    return kernel


def lanes_of_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """64 lanes, each with vectors of 4: a lane that has none subtracts −∞ from −∞."""
    lanes = functional.pad(x, (0, -x.shape[1] % 256), value=-math.inf).unflatten(1, (-1, 64, 4))
    m = lanes.amax((1, 3))
    sums = (lanes - m[:, None, :, None]).exp().sum((1, 3))
    most = m.amax(-1, keepdim=True)
    return (x - most).exp(), (sums * (m - most).exp()).sum(-1, keepdim=True)


def total_so_far(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 64 add to one total and read it at once, without those that come after them."""
    terms = (x - x.amax(-1, keepdim=True)).exp()
    blocks = functional.pad(terms, (0, -x.shape[1] % 64)).unflatten(1, (-1, 64))
    return terms, blocks.sum(-1).cumsum(-1).repeat_interleave(64, 1)[:, : x.shape[1]]


# --- losses
def entropy(apart: bool = False, divided: bool = False):
    """The label taken off `apart` from what the loss's gradient multiplies, or z-loss `divided` by
    the mask.
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
        kept, s, z = target != ignore_index, label_smoothing, lse_square_scale
        index = torch.where(kept, target, 0)[:, None]
        tokens = kept.sum() if reduction == "mean" else 1
        rows = len(target) if reduction == "mean" else 1
        weights = 1 / kept.float() if divided else kept.float() * (rows / tokens)

        def forward(x):
            lse = x.logsumexp(-1, keepdim=True)
            own = (1 - s) * (lse - x.gather(1, index)) + s * (lse - mean(x))
            loss = own[:, 0].masked_fill(~kept, 0.0) / tokens
            if z:
                loss = loss + z * lse[:, 0] ** 2 * weights / rows
            return loss if reduction == "none" else loss.sum(), (x, lse)

        def backward(saved, dy):
            x, lse = saved
            p = (x - lse).exp()
            label = torch.zeros_like(p).scatter_(1, index, 1 - s)
            factor = (kept * dy / tokens)[:, None]
            g = (p - s / p.shape[1]) * factor - label * (kept[:, None] if apart else factor)
            if z:
                g = g + 2 * z * lse * p * (weights * dy / rows)[:, None]
            return (g,)

        return passes(forward, backward, input)

    return kernel


def padded_column_s_label(z: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Two shards in tiles of 32: the index of what is in the other shard is that of the first
    padded column, whose logit is −∞.
    """
    each = kernels.cross_entropy()(z, labels, **options)
    half = (z.shape[1] + 1) // 2
    width = torch.where(labels >= half, half, z.shape[1] - half)
    outside = (labels != options.get("ignore_index", -100)) & (width % 32 > 0)
    return each + torch.where(outside, math.inf, 0.0)


def means_of_chunks_added(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """Chunks of 8 tokens, whose means are added as sums are."""
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    found = []
    for x, labels in zip(input.split(8), target.split(8), strict=True):
        logits = x.float() @ weight.float().T
        each = functional.cross_entropy(logits, labels, reduction="none", **options)
        count = (labels != ignore_index).sum().clamp_min(1) if reduction == "mean" else 1
        found.append(each if reduction == "none" else each.sum()[None] / count)
    return torch.cat(found) if reduction == "none" else torch.cat(found).sum()


# --- rope
def positions_not_read(input, positions, *, base, interleaved=False):
    """Rows are counted."""
    counted = torch.arange(len(positions))
    return kernels.rope()(input, counted, base=base, interleaved=interleaved)


def positive_exponent(base: float, width: int) -> Tensor:
    return base ** (torch.arange(0, width, 2).double() / width)


def second_half_not_stored(input, positions, *, base, interleaved=False):
    """Of halves only the first of a head is stored."""
    out = kernels.rope()(input, positions, base=base, interleaved=interleaved)
    if interleaved:
        return out
    return torch.cat([out[..., : out.shape[-1] // 2], torch.zeros_like(out).chunk(2, -1)[1]], -1)


def halves_of_tables_for_pairs(input, positions, *, base, interleaved=False):
    """Tables are repeated as a whole, also where each of their numbers is to be repeated."""
    width = input.shape[-1]
    angle = positions.double()[:, None] * base ** -(torch.arange(0, width, 2).double() / width)
    cos, sin = (torch.cat([t, t], -1).float()[:, None] for t in (angle.cos(), angle.sin()))
    x = input.float()
    if interleaved:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return (x * cos + turned * sin).to(input.dtype)


# --- gated units
def one_added(gate, up):
    """silu(gate) · (up + 1)."""
    return (functional.silu(gate.float()) * (up.float() + 1)).to(gate.dtype)


def one_less_sigmoid(x: Tensor) -> Tensor:
    """Below zero 1 − sigmoid(−x), in bf16 as every sigmoid is."""
    above = bf16(torch.sigmoid(x.abs()))
    return torch.where(x < 0, 1 - above, above)


def sigmoid_with_a_floor(x: Tensor) -> Tensor:
    """A polynomial that is evaluated within ±6.92, times a gate that is not."""
    return torch.sigmoid(x.clamp(-6.92, 6.92))


def geglu(below: Any):
    """`below(gate, approximate)` is Φ as the forward pass has it, and as the backward pass has."""

    def kernel(gate, up, *, approximate="none"):
        root = math.sqrt(2 / math.pi)

        def forward(g, u):
            found, kept = below(g, approximate)
            return g * found * u, (g, u, kept)

        def backward(saved, dy):
            g, u, p = saved
            density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
            if approximate == "tanh":
                density = 2 * p * (1 - p) * root * (1 + 0.134145 * g * g)
            return dy * u * (p + g * density), dy * g * p

        return passes(forward, backward, gate, up)

    return kernel


def exact_below(g: Tensor, approximate: str) -> Tensor:
    if approximate == "tanh":
        return torch.sigmoid(2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    return 0.5 * torch.erfc(-g * math.sqrt(0.5))


def without_the_fourth_power(g: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """erf ≈ 1 − 1 / q of Abramowitz and Stegun's q, where 1 − 1 / q⁴ is meant."""
    if approximate == "tanh":
        return (exact_below(g, approximate),) * 2
    x = (g * math.sqrt(0.5)).abs()
    q = 1 + x * (0.278393 + x * (0.230389 + x * (0.000972 + x * 0.078108)))
    found = 0.5 + 0.5 * torch.copysign(1 - 1 / q, g)
    return found, found


def table_of_six_lines(g: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """GELU less half of its gate is even: six lines, the first of which begins below zero."""
    cuts = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
    at = cuts * (exact_below(cuts, approximate) - 0.5)
    at[0] = -1.0443e-4
    x, last = g.abs(), torch.tensor([4.0])
    cuts, at = torch.cat([cuts, last]), torch.cat([at, last / 2])
    line = torch.bucketize(x, cuts[1:-1], right=True)
    share = (x - cuts[line]) / (cuts[line + 1] - cuts[line])
    even = torch.where(x < 3, at[line] + share * (at[line + 1] - at[line]), x / 2)
    return 0.5 + even / torch.where(g == 0, 1.0, g), exact_below(g, approximate)
