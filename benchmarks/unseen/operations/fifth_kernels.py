"""Faulty kernels of the fifth set of operations' faults, as fifth.py names them:
norms, losses, gated units and rotary embeddings here, what sums, quantizes and steps in
fifth_steps.py.

Each is written out by hand in fp32 between two casts, with its own backward pass where the mistake
is in one.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.second_kernels import mean, passes
from torch import Tensor
from torch.nn import functional


# --- rms_norm
def eps_of_the_dtype(input, normalized_shape, weight, eps):
    """What a norm without eps takes: the format's own, 2⁻⁷ in bf16."""
    return kernels.rms_norm()(input, normalized_shape, weight, torch.finfo(input.dtype).eps)


def weight_first(input, normalized_shape, weight, eps):
    """x · w is normalized."""

    def forward(x, w):
        z = x * w
        r = torch.rsqrt(mean(z * z) + eps)
        return z * r, (x, w, z * r, r)

    def backward(saved, dy):
        x, w, normal, r = saved
        dz = r * (dy - normal * mean(dy * normal))
        return dz * w, (dz * x).sum(0)

    return passes(forward, backward, input, weight)


def gradient_without_the_one(input, normalized_shape, weight, eps):
    """The weight is kept less one; the backward pass forgets to add it."""

    def forward(x, w):
        gamma, r = w - 1, torch.rsqrt(mean(x * x) + eps)
        return x * r * (1 + gamma), (x * r, gamma, r)

    def backward(saved, dy):
        normal, gamma, r = saved
        wdy = dy * gamma
        return r * (wdy - normal * mean(wdy * normal)), (dy * normal).sum(0)

    return passes(forward, backward, input, weight)


# --- layer_norm
def padded_variance(x: Tensor) -> Tensor:
    """Zeros fill up the block; less the mean they are no zeros any more."""
    width = x.shape[-1]
    block = 1 << (width - 1).bit_length()
    centered = functional.pad(x, (0, block - width)) - mean(x)
    return (centered * centered).sum(-1, keepdim=True) / width


def another_column_s_gamma(input, normalized_shape, weight, bias, eps):
    """dγ from the output, (y − β) / γ, with the β and γ of the thread's row in its tile of 32."""

    def forward(x, w, b):
        centered = x - mean(x)
        r = torch.rsqrt(mean(centered * centered) + eps)
        y = centered * r * w + b
        return y, (y, centered * r, w, b, r)

    def backward(saved, dy):
        y, normal, w, b, r = saved
        tokens, width = dy.shape
        tile = torch.arange(width) // 32 * 32
        place = (tile + torch.arange(tokens)[:, None] % 32).clamp_max(width - 1)
        wdy = dy * w
        dx = r * (wdy - mean(wdy) - normal * mean(wdy * normal))
        return dx, (dy * (y - b[place]) / w[place]).sum(0), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


def half_of_gamma(input, normalized_shape, weight, bias, eps):
    """Of 32 channels' weight and bias the second 16 are never fetched."""

    def forward(x, w, b):
        fetched = torch.arange(x.shape[-1]) % 32 < 16
        centered = x - mean(x)
        r = torch.rsqrt(mean(centered * centered) + eps)
        normal = centered * r
        return normal * (w * fetched) + b * fetched, (normal, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        dx = r * (wdy - mean(wdy) - normal * mean(wdy * normal))
        return dx, (dy * normal).sum(0), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


# --- softmax
def softmax(row_sum: Any = None, exponential: Any = torch.exp, gradient: Any = None):
    def kernel(input, dim=-1):
        def forward(x):
            m = x.amax(-1, keepdim=True)
            terms = exponential(x - m)
            y = terms / (row_sum(x, m, terms) if row_sum else terms.sum(-1, keepdim=True))
            return y, y

        def backward(y, dy):
            if gradient:
                return (gradient(y, dy),)
            return (y * (dy - (y * dy).sum(-1, keepdim=True)),)

        return passes(forward, backward, input)

    return kernel


def last_tile_unshifted(x: Tensor, m: Tensor, terms: Tensor) -> Tensor:
    """The maximum is not subtracted in the row sum's last 32 columns."""
    whole = (x.shape[-1] - 1) // 32 * 32
    return terms[:, :whole].sum(-1, keepdim=True) + x[:, whole:].exp().sum(-1, keepdim=True)


def diagonal_only(y: Tensor, dy: Tensor) -> Tensor:
    return dy * y * (1 - y)


def schraudolph(x: Tensor) -> Tensor:
    """exp by its bits: a straight line between powers of two, off by up to 6 %."""
    bits = x.clamp_min(-87.0) * (2**23 / math.log(2)) + (127 * 2**23 - 486_411)
    return bits.to(torch.int32).view(torch.float32)


# --- losses
def entropy(sums: Any = None, others: Any = mean, even: int = 1, seen: Any = None):
    """A vocabulary in `even` shards: `sums` of all exponentials, the mean of the `others`, and the
    columns whose gradient is `seen`.
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
        kept, s = target != ignore_index, label_smoothing
        index = torch.where(kept, target, 0)[:, None]
        tokens = kept.sum() if reduction == "mean" else 1

        def forward(x):
            m = x.amax(-1, keepdim=True)
            total = (x - m).exp().sum(-1, keepdim=True)
            lse = m + (sums(total) if sums else total).log()
            loss = (1 - s) * (lse - x.gather(1, index)) + s * (lse - others(x))
            loss = (loss + lse_square_scale * lse * lse)[:, 0].masked_fill(~kept, 0.0)
            return loss if reduction == "none" else loss.sum() / tokens, (x, lse)

        def backward(saved, dy):
            x, lse = saved
            wanted = torch.full_like(x, s * even / x.shape[1])
            wanted.scatter_add_(1, index, torch.full_like(lse, 1 - s))
            g = (x - lse).exp() * (1 + 2 * lse_square_scale * lse) - wanted
            g = seen(g, index) if seen else g
            return (g * kept[:, None] * (dy / tokens).expand(len(x))[:, None],)

        return passes(forward, backward, input)

    return kernel


def of_the_first_shard(x: Tensor) -> Tensor:
    return mean(x[:, : (x.shape[1] + 1) // 2])


def in_the_target_s_shard(g: Tensor, index: Tensor) -> Tensor:
    """The all-reduce of the sums has no gradient, so that shards without the target get none."""
    half = (g.shape[1] + 1) // 2
    return g * ((torch.arange(g.shape[1]) // half) == index // half)


def dx_of_one_shard(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """Two shards of the vocabulary; dX is the first shard's part, never summed over both."""
    kept, s = target != ignore_index, label_smoothing
    index = torch.where(kept, target, 0)[:, None]
    tokens = kept.sum() if reduction == "mean" else 1

    def forward(x, w):
        logits = [x @ shard.T for shard in w.chunk(2)]
        lse = torch.stack([z.logsumexp(-1, keepdim=True) for z in logits]).logsumexp(0)
        z = torch.cat(logits, 1)
        loss = (1 - s) * (lse - z.gather(1, index)) + s * (lse - mean(z))
        loss = loss[:, 0].masked_fill(~kept, 0.0)
        g = (z - lse).exp() - s / z.shape[1]
        g.scatter_add_(1, index, torch.full_like(lse, s - 1))
        return loss if reduction == "none" else loss.sum() / tokens, (x, w, g * kept[:, None])

    def backward(saved, dy):
        x, w, g = saved
        g = g * (dy / tokens).expand(len(x))[:, None]
        shard = w.chunk(2)[0]
        return g[:, : len(shard)] @ shard, g.T @ x

    return passes(forward, backward, input, weight)


def z_loss_unasked(z, labels, **options):
    """1e-4 · lse² is added whatever is asked for."""
    return kernels.cross_entropy()(z, labels, lse_square_scale=1e-4, **options)


# --- rope
def halves_for_pairs(input, positions, *, base, interleaved=False):
    """Pairs (2 i, 2 i + 1) are rotated, and written as halves."""
    if not interleaved:
        return kernels.rope()(input, positions, base=base)
    width = input.shape[-1]
    frequency = base ** -(torch.arange(0, width, 2).double() / width)
    angle = (positions.double()[:, None, None] * frequency).float()
    a, b = input.float().unflatten(-1, (-1, 2)).unbind(-1)
    out = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.cat(out, -1).to(input.dtype)


def turned_backwards(input, positions, *, base, interleaved=False):
    """x · cos − rotate_half(x) · sin."""
    return kernels.rope()(input, -positions, base=base, interleaved=interleaved)


def base_not_passed(input, positions, *, base, interleaved=False):
    return kernels.rope()(input, positions, base=10000.0, interleaved=interleaved)


# --- gated units
def rows_to_row_0(gate, up):
    """Every row's gradients are stored in row 0, where the last one stays."""

    def forward(g, u):
        return functional.silu(g) * u, (g, u)

    def backward(saved, dy):
        g, u = saved
        s = torch.sigmoid(g)
        found = dy * u * s * (1 + g * (1 - s)), dy * g * s
        stored = [torch.zeros_like(x) for x in found]
        for to, rows in zip(stored, found, strict=True):
            to[:1] = rows[-1:]
        return tuple(stored)

    return passes(forward, backward, gate, up)


def silu_of_up(gate, up):
    return kernels.swiglu()(up, gate)


def slope_through_a_quotient(gate, up):
    """The backward pass takes the sigmoid as silu(x) / x."""

    def forward(g, u):
        act = g * torch.sigmoid(g)
        return act * u, (g, u, act)

    def backward(saved, dy):
        g, u, act = saved
        s = act / g
        return dy * u * s * (1 + g * (1 - s)), dy * act

    return passes(forward, backward, gate, up)


def sigmoid_of_steps(gate, up):
    """1 / (1 + exp(−x)) and its gradient step by step: ∞ / ∞ far below zero."""

    def forward(g, u):
        below = 1 + (-g).exp()
        return g / below * u, (g, u, below)

    def backward(saved, dy):
        g, u, below = saved
        slope = 1 / below + g * (below - 1) / (below * below)
        return dy * u * slope, dy * g / below

    return passes(forward, backward, gate, up)


def gelu_of_both(gate, up, *, approximate="none"):
    act = [functional.gelu(x.float(), approximate=approximate) for x in (gate, up)]
    return (act[0] * act[1]).to(gate.dtype)


TANH_ABOVE = (4.89352455891786e-3, 6.37261928875436e-4, 1.48572235717979e-5, 5.12229709037114e-8,
              -8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16)  # fmt: skip
TANH_BELOW = (4.89352518554385e-3, 2.26843463243900e-3, 1.18534705686654e-4, 1.19825839466702e-6)


def rational(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    """A polynomial whose coefficients have gone through fp16, where the last are zero."""
    total = torch.zeros_like(z)
    for c in torch.tensor(coefficients).half().float().flip(0):
        total = total * z + c
    return total


def tanh_beyond_one(x: Tensor) -> Tensor:
    """The quotient of single precision with fp16's coefficients: above 1 for large x."""
    x = x.clamp(-9.0, 9.0)
    return x * rational(TANH_ABOVE, x * x) / rational(TANH_BELOW, x * x)


def tanh_of_exponentials(x: Tensor) -> Tensor:
    up, down = x.exp(), (-x).exp()
    return (up - down) / (up + down)


def geglu(tanh: Any):
    def kernel(gate, up, *, approximate="none"):
        if approximate != "tanh":
            return kernels.geglu()(gate, up)
        root = math.sqrt(2 / math.pi)

        def forward(g, u):
            t = tanh(root * (g + 0.044715 * g * g * g))
            return 0.5 * g * (1 + t) * u, (g, u, t)

        def backward(saved, dy):
            g, u, t = saved
            inner = root * (1 + 0.134145 * g * g)
            slope = 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * inner
            return dy * u * slope, dy * 0.5 * g * (1 + t)

        return passes(forward, backward, gate, up)

    return kernel
