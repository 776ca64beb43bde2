"""Sound kernels of the sixth set of operations' faults, each written in a way of its own: scaled
squares, shifted means, merged shards, rotations as matrices, codes by magic numbers.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Literal

import torch
from benchmarks.unseen.operations.fifth_steps import codes_of_128, step_of_adamw
from benchmarks.unseen.operations.second_kernels import mean, passes
from torch import Tensor
from torch.nn import functional


def rms_by_the_largest(input, normalized_shape, weight, eps):
    """Rows are divided by their largest number before they are squared."""

    def forward(x, w):
        most = x.abs().amax(-1, keepdim=True).clamp_min(1e-20)
        root = torch.hypot(most * mean((x / most) ** 2).sqrt(), torch.full_like(most, eps**0.5))
        return x / root * w, (x / root, w, 1 / root)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        dot = torch.bmm(wdy[:, None], normal[:, :, None])[:, 0] / normal.shape[1]
        return r * torch.addcmul(wdy, normal, dot, value=-1), (normal * dy).sum(0)

    return passes(forward, backward, input, weight)


def layer_norm_by_a_shift(input, normalized_shape, weight, bias, eps):
    """Less the row's first number, then less the mean of what is left."""

    def forward(x, w, b):
        shifted = x - x[:, :1]
        c = shifted - shifted.sum(-1, keepdim=True) / x.shape[1]
        r = 1 / (c.square().sum(-1, keepdim=True) / x.shape[1] + eps).sqrt()
        return torch.addcmul(b, c * r, w), (c * r, w, r)

    def backward(saved, dy):
        normal, w, r = saved
        wdy = dy * w
        wdy = wdy - mean(wdy)
        return r * (wdy - normal * mean(wdy * normal)), (dy * normal).sum(0), dy.sum(0)

    return passes(forward, backward, input, weight, bias)


def softmax_of_differences(input, dim=-1):
    """The largest number leaves its row by its index; its own power is 1."""

    def forward(x):
        best = x.max(-1, keepdim=True)
        powers = (x - best.values).exp().scatter(1, best.indices, 0.0)
        whole = 1 + powers.sum(-1, keepdim=True)
        y = powers.scatter(1, best.indices, 1.0) / whole
        return y, y

    def backward(y, dy):
        return (y * (dy - torch.bmm(y[:, None], dy[:, :, None])[:, 0]),)

    return passes(forward, backward, input)


def loss_of_columns(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    """Logits turned round, so that tokens are columns, and all gradients from one matrix."""
    kept, s = target != ignore_index, label_smoothing
    label = target.where(kept, torch.zeros_like(target))
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x):
        z = x.mT.contiguous()
        lse = z.logsumexp(0)
        away = lse - z
        hot = functional.one_hot(label, len(z)).mT.float()
        wanted = hot * (1 - s) + s / len(z)
        loss = ((wanted * away).sum(0) + lse_square_scale * lse.square()) * kept
        g = (-away).exp() * (1 + 2 * lse_square_scale * lse) - wanted
        return loss if reduction == "none" else loss.sum() / count, g * kept

    def backward(g, dy):
        return ((g * dy / count).mT,)

    return passes(forward, backward, input)


def loss_of_shards(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """Three shards of the vocabulary, whose maxima, sums and gradients are merged."""
    kept, s = target != ignore_index, label_smoothing
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x, w):
        shards, start, own, every = w.chunk(3), 0, torch.zeros(len(x)), torch.zeros(len(x))
        parts = [x @ shard.T for shard in shards]
        most = torch.stack([z.amax(1) for z in parts]).amax(0)
        total = sum((z - most[:, None]).exp().sum(1) for z in parts)
        for z in parts:
            here = kept & (target >= start) & (target < start + z.shape[1])
            own[here] = z[here, target[here] - start]
            every, start = every + z.sum(1), start + z.shape[1]
        lse = most + total.log()
        loss = ((1 - s) * (lse - own) + s * (lse - every / len(w))) * kept
        found = loss if reduction == "none" else loss.sum() / count
        return found, (x, shards, parts, lse, len(w))

    def backward(saved, dy):
        x, shards, parts, lse, size = saved
        dy = (dy / count).expand(len(x)) * kept
        dx, found, start = torch.zeros_like(x), [], 0
        for shard, z in zip(shards, parts, strict=True):
            g = (z - lse[:, None]).exp() - s / size
            g = g - (1 - s) * (target[:, None] == torch.arange(start, start + len(shard)))
            g, start = g * dy[:, None], start + len(shard)
            dx = dx + g @ shard
            found.append(g.T @ x)
        return dx, torch.cat(found)

    return passes(forward, backward, input, weight)


def rope_by_matrices(input, positions, *, base, interleaved=False):
    """A 2 × 2 matrix for every pair."""
    t, heads, width = input.shape
    turn = positions.double()[:, None] / base ** (torch.arange(0, width, 2).double() / width)
    rows = torch.stack([turn.cos(), -turn.sin()], -1), torch.stack([turn.sin(), turn.cos()], -1)
    matrix = torch.stack(rows, -2).float()
    shape = (t, heads, -1, 2) if interleaved else (t, heads, 2, width // 2)
    pairs = input.float().view(shape)
    pairs = pairs if interleaved else pairs.mT
    out = (matrix[:, None] @ pairs[..., None])[..., 0]
    return (out if interleaved else out.mT).reshape(input.shape).to(input.dtype)


def swiglu_of_both_signs(gate, up):
    """e^(−|x|) for the sigmoid of either sign, and the slope as a product."""

    def forward(g, u):
        e = (-g.abs()).exp()
        s = torch.where(g < 0, e, 1.0) / (1 + e)
        return g * u * s, (g, u, s, torch.where(g < 0, 1.0, e) / (1 + e))

    def backward(saved, dy):
        g, u, s, rest = saved
        return dy * u * s * torch.addcmul(torch.ones_like(g), g, rest), g * s * dy

    return passes(forward, backward, gate, up)


def geglu_in_double(gate, up, *, approximate="none"):
    g, u = gate.double(), up.double()
    if approximate == "tanh":
        act = g * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    else:
        act = 0.5 * g * torch.special.erfc(-g / math.sqrt(2))
    return (act * u).to(gate.dtype)


def linear_compensated(input, weight):
    """Eighths of what is summed, each added with what the addition before it lost."""

    def product(a, b):
        total, lost = torch.zeros(len(a), b.shape[1]), torch.zeros(len(a), b.shape[1])
        for x, y in zip(a.chunk(8, 1), b.chunk(8), strict=True):
            part = x @ y - lost
            new = total + part
            total, lost = new, (new - total) - part
        return total

    return passes(
        lambda x, w: (product(x, w.T), (x, w)),
        lambda saved, dy: (product(dy, saved[1]), product(dy.T, saved[0])),
        input,
        weight,
    )


def blocks_rescaled(input, weight, *, format: Literal["fp8_block"]):
    """Codes of 128, each block's product multiplied by both scales as it is added."""

    def product(a, b, square):
        (x, sx), (y, sy) = codes_of_128(a, False), codes_of_128(b, square)
        parts = torch.einsum("tkc,nkc->ktn", x, y)
        return (parts * sx.T[:, :, None] * sy.T[:, None]).sum(0)

    return passes(
        lambda x, w: (product(x, w, True), (x, w)),
        lambda saved, dy: (product(dy, saved[1].T, True), product(dy.T, saved[0].T, False)),
        input,
        weight,
    )


def codes_by_magic(input, *, format: Literal["mxfp8_e4m3", "mxfp4"]):
    """Numbers are rounded by adding and taking off 1.5 · 2²³ steps of their own binade."""
    most, low, high = (8, -6, 448.0) if "8" in format else (2, 0, 6.0)
    bits = 3 if "8" in format else 1
    x = input.float().unflatten(-1, (-1, 32))
    largest = x.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest == 0, 0, torch.frexp(largest)[1] - 1 - most).clamp(-127, 127)
    y = torch.ldexp(x, -exponent)
    own = torch.where(y == 0, low, torch.frexp(y)[1] - 1).clamp_min(low) - bits
    magic = torch.ldexp(torch.full_like(y, 1.5 * 2**23), own)
    return torch.ldexp(((y + magic) - magic).clamp(-high, high), exponent).flatten(-2)


def rounded_by_comparison(input):
    """The lower half of the bits is compared with a number below 2¹⁶."""
    bits = input.contiguous().view(torch.int32)
    up = torch.randint(0, 1 << 16, bits.shape) < (bits & 0xFFFF)
    return ((bits >> 16) + up.int()).to(torch.int16).view(torch.bfloat16)


def router_one_by_one(logits, k, *, renormalize=True):
    """The best is taken out k times; weights from logarithms."""
    z, found = logits.float(), []
    left = z.detach().clone()
    for _ in range(k):
        best = left.argmax(-1, keepdim=True)
        found.append(best)
        left = left.scatter(1, best, -math.inf)
    index = torch.cat(found, -1)
    chosen = z.gather(1, index)
    of = chosen if renormalize else z
    return (chosen - of.logsumexp(-1, keepdim=True)).exp().to(logits.dtype), index


def adamw_of_torch(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
    """In the order of torch.optim: decay, lerp, addcmul, addcdiv."""
    p, g = param * (1 - lr * weight_decay), grad.float()
    m = torch.lerp(exp_avg, g, 1 - beta1)
    v = (exp_avg_sq * beta2).addcmul(g, g, value=1 - beta2)
    size = v.sqrt() / math.sqrt(1 - beta2**step) + eps
    return p.addcdiv(m, size, value=-lr / (1 - beta1**step)), m, v


def adamw_of_a_master(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """A float32 master for all steps, rounded once."""
    p, m, v = param.float(), exp_avg, exp_avg_sq
    for number, g in enumerate(grads.float(), step):
        moved, m, v = step_of_adamw(p, g, m, v, step=number, **options)
        p = p * (1 - options["lr"] * options["weight_decay"]) - moved
    return p.to(param.dtype), m, v


def embedding_of_sorted(input, weight, padding_idx=None):
    """Tokens are sorted, and every run of equal ones is summed by itself."""

    def forward(w):
        return torch.index_select(w, 0, input), w.shape

    def backward(shape, dy):
        order = input.argsort(stable=True)
        values, counts = input[order].unique_consecutive(return_counts=True)
        dw = torch.zeros(shape)
        for value, rows in zip(values.tolist(), order.split(counts.tolist()), strict=True):
            if value != padding_idx:
                dw[value] = dy[rows].sum(0)
        return (dw,)

    return passes(forward, backward, weight)


def sum_by_ones(x: Tensor) -> Tensor:
    return torch.ones(1, len(x)).matmul(x)[0]
