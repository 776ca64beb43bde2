"""Kernels without a fault, written differently from one another: the audit must raise no alarm on
any.

`stock` ones do what FlashAttention-2 does in another order, with other blocks, another base or
another way to rescale. `sound` ones have a δ that is free of O's rounding, and round nothing but
operands and results.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tests.audit import zoo_inputs as on
from tests.audit.zoo_kernel import INF, TEXTBOOK_PLAN, Low, ZooKernel, divide, finite, kernel

LOG2_E = math.log2(math.e)


def binary_exponential(x: Tensor) -> Tensor:
    return torch.exp2(x * LOG2_E)


def polynomial_exponential(x: Tensor) -> Tensor:
    """exp by 2ⁿ times a polynomial of degree 4 on [0, 1), 4e-6 off at most."""
    y = x * LOG2_E
    n = y.floor()
    f = y - n
    series = 1 + f * (0.69304420 + f * (0.24130511 + f * (0.05223827 + f * 0.01341243)))
    return torch.where(y == -INF, torch.zeros_like(y), torch.ldexp(series, n.clamp_min(-126)))


def late_maximum(s: Tensor, m: Tensor) -> Tensor:
    """FlashAttention-4: keep the old shift until the maximum has grown by 5, so weights reach
    e⁵.
    """
    top = s.amax(-1, keepdim=True)
    return torch.where((m == -INF) | (top > m + 5), torch.maximum(m, top), m)


def times_reciprocal(acc: Tensor, l: Tensor, low: Low) -> Tensor:
    return acc * (1 / torch.where(l == 0, torch.ones_like(l), l))


def split_operand(p: Tensor, dp: Tensor, delta: Tensor, low: Low) -> Tensor:
    """dS as the sum of a high and a low part."""
    ds = p * (dp - delta)
    high = low(ds)
    return high + low(ds - high)


def stock(name: str, **steps) -> ZooKernel:
    fn = kernel(name, replace(TEXTBOOK_PLAN, **steps))
    return ZooKernel(name, fn, shows_on=on.gaussian, expected="stock")


# Kernels of another build than the tiled one.


def _full_scores(
    q: Tensor, k: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> Tensor:
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -INF)
    if mask is None:
        return s
    return s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else s + mask.float()


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    k, v = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    return query.float(), k, v


def fp32_autograd(query, key, value, *, is_causal, scale=None, attn_mask=None, enable_gqa=False):
    """Everything in fp32 and differentiated by autograd; results rounded once."""
    q, k, v = _repeated(query, key, value)
    s = _full_scores(q, k, scale, is_causal, attn_mask)
    p = torch.exp(s - finite(s.amax(-1, keepdim=True)).detach())
    l = p.sum(-1, keepdim=True)
    return ((p / torch.where(l == 0, torch.ones_like(l), l)) @ v).to(query.dtype)


def fp32_with_lse(query, key, value, *, is_causal, scale=None, attn_mask=None, enable_gqa=False):
    """fp32 again, through logsumexp, and offering lse as `[B, N, H]`."""
    q, k, v = _repeated(query, key, value)
    s = _full_scores(q, k, scale, is_causal, attn_mask)
    lse = torch.logsumexp(s, -1, keepdim=True)
    p = torch.exp(s - finite(lse.detach()) - (lse - lse.detach()).nan_to_num(0.0))
    return (p @ v).to(query.dtype), lse.detach().squeeze(-1).transpose(1, 2)


class _Consistent(torch.autograd.Function):
    """The weights rounded once, and numerator, denominator and gradient all made of those; O's
    residual is kept for δ.

    The integer maximum in base 2 makes the rounded weights independent of where tiles end, so the
    backward pass finds the same ones from lse alone.
    """

    @staticmethod
    def forward(ctx, query, key, value, is_causal, scale, mask):
        low, (q, k, v) = Low(query.dtype), _repeated(query, key, value)
        s = _full_scores(q, k, scale, is_causal, mask) * LOG2_E
        m = finite(torch.ceil(s.amax(-1, keepdim=True)))
        p = low(torch.exp2(s - m))
        l = p.sum(-1, keepdim=True)
        exact = divide(p @ v, l, low)
        out = exact.to(query.dtype)
        ctx.save_for_backward(q, k, v, s, m, l, exact - out.float())
        ctx.settings = (key.shape, q.shape[-1] ** -0.5 if scale is None else scale, out)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        (q, k, v, s, m, l, rest), (key_shape, alpha, out) = ctx.saved_tensors, ctx.settings
        low, do = Low(grad_out.dtype), grad_out.float()
        exact = torch.exp2(s - m)
        p = divide(low(exact), l, low)
        delta = (do * (out.float() + rest)).sum(-1, keepdim=True)
        ds = low(p * (do @ v.mT - delta))
        exact = divide(exact, exact.sum(-1, keepdim=True), low)  # low(p) would round twice
        dq, dk, dv = ds @ k * alpha, ds.mT @ q * alpha, low(exact).mT @ do
        groups = q.shape[1] // key_shape[1]
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
        return (*(x.to(low.dtype) for x in (dq, dk, dv)), None, None, None)


def consistent_weights(
    query, key, value, *, is_causal, scale=None, attn_mask=None, enable_gqa=False
):
    """δ from O and its residual, one set of rounded weights everywhere."""
    return _Consistent.apply(query, key, value, is_causal, scale, attn_mask)


class _Untiled(torch.autograd.Function):
    """Stock numerics built otherwise: a forward pass given as a function, a backward pass on all
    scores at once.
    """

    @staticmethod
    def forward(ctx, query, key, value, is_causal, scale, mask, attend):
        low, (q, k, v) = Low(query.dtype), _repeated(query, key, value)
        s = _full_scores(q, k, scale, is_causal, mask)
        exact, lse = attend(s, v, low)
        out = low(exact)
        ctx.save_for_backward(q, k, v, s, lse, out)
        ctx.settings = (key.shape, q.shape[-1] ** -0.5 if scale is None else scale)
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        (q, k, v, s, lse, out), (key_shape, alpha) = ctx.saved_tensors, ctx.settings
        low, do = Low(grad_out.dtype), grad_out.float()
        p = torch.exp(s - finite(lse))
        ds = low(p * (do @ v.mT - (do * out).sum(-1, keepdim=True)))
        groups = q.shape[1] // key_shape[1]
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (ds.mT @ q * alpha, low(p).mT @ do))
        return (*(x.to(low.dtype) for x in (ds @ k * alpha, dk, dv)), *([None] * 4))


def _two_passes(s: Tensor, v: Tensor, low: Low) -> tuple[Tensor, Tensor]:
    """First the maximum and the sum of every row, then the product with V."""
    m = finite(s.amax(-1, keepdim=True))
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    return divide(low(p) @ v, l, low), m + torch.log(l)


def _split_keys(s: Tensor, v: Tensor, low: Low) -> tuple[Tensor, Tensor]:
    """Flash-decoding: four ranges of keys on their own, merged in fp32 by their lse."""
    parts = [
        _two_passes(a, b, low)
        for a, b in zip(s.tensor_split(4, -1), v.tensor_split(4, -2), strict=True)
        if a.numel()
    ]
    each = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(each, 0)
    weight = torch.exp(each - finite(lse))
    return sum(w * out for w, (out, _) in zip(weight, parts, strict=True)), lse


def _renormalized(s: Tensor, v: Tensor, low: Low) -> tuple[Tensor, Tensor]:
    """FlashAttention-1: O is a proper average after every tile of keys."""
    out, lse = None, None
    for a, b in zip(s.split(96, -1), v.split(96, -2), strict=True):
        block, block_lse = _two_passes(a, b, low)
        if out is None:
            out, lse = block, block_lse
            continue
        merged = torch.logaddexp(lse, block_lse)
        out = out * torch.exp(lse - finite(merged)) + block * torch.exp(block_lse - finite(merged))
        lse = merged
    return out, lse


def _integer_maximum(s: Tensor, v: Tensor, low: Low) -> tuple[Tensor, Tensor]:
    """Base 2, shifted by an integer; O is divided by the sum of the rounded weights, as none of
    them is 1.
    """
    m = finite(torch.ceil(s.amax(-1, keepdim=True) * LOG2_E))
    p = torch.exp2(s * LOG2_E - m)
    lse = (m + torch.log2(p.sum(-1, keepdim=True))) / LOG2_E
    return divide(low(p) @ v, low(p).sum(-1, keepdim=True), low), lse


def untiled(name: str, attend) -> ZooKernel:
    def attention(query, key, value, *, is_causal, scale=None, attn_mask=None, enable_gqa=False):
        return _Untiled.apply(query, key, value, is_causal, scale, attn_mask, attend)

    attention.__name__ = attention.__qualname__ = name
    return ZooKernel(name, attention, shows_on=on.gaussian, expected="stock")


def sound(name: str, fn, shows_on=on.gaussian) -> ZooKernel:
    return ZooKernel(name, fn, shows_on=shows_on, expected="sound")


SOUND: tuple[ZooKernel, ...] = (
    stock("blocks_64"),
    stock("blocks_16_32", block_query=16, block_key=32),
    stock("blocks_128_512", block_query=128, block_key=512),
    stock("keys_reversed", reverse_keys=True, returns_lse=True),
    stock("base_two", exponential=binary_exponential),
    stock("polynomial_exp", exponential=polynomial_exponential),
    stock("late_rescale", row_max=late_maximum),
    stock("times_reciprocal", divide=times_reciprocal),
    stock("queries_outside", queries_outside=True, block_query=96),
    stock("grad_scores_in_two", grad_scores=split_operand),
    untiled("two_passes", _two_passes),
    untiled("split_keys", _split_keys),
    untiled("flash1", _renormalized),
    untiled("integer_maximum", _integer_maximum),
    sound("fp32_autograd", fp32_autograd),
    sound("fp32_with_lse", fp32_with_lse),
    sound(
        "delta_of_probabilities",
        kernel("delta_of_probabilities", replace(TEXTBOOK_PLAN, delta_again=True)),
    ),
    sound("consistent_weights", consistent_weights),
)
