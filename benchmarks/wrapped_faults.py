"""Mistakes around PyTorch's own attention, as in code that calls it: whose data it is given, which
scale and mask, what is done to its results; and its definition written out with one thing wrong.
A set that causes were developed on: no unseen set.
"""

# ruff: noqa: ARG001, ARG005 - a kernel is named after its mistake, and may not heed an option

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.unseen import Fault
from torch import Tensor
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

FAULTS: list[Fault] = []
SOUND: list[Fault] = []
Kernel = Callable[..., Any]


def fault(right: str) -> Callable[[Kernel], Kernel]:
    def put(kernel: Kernel) -> Kernel:
        name = kernel.__name__
        FAULTS.append(Fault(name, frozenset(right.split()), kernel, vague=frozenset({"elements"})))
        return kernel

    return put


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)


def scores(q: Tensor, k: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    s = (q.float() @ k.float().mT) * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return s


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def ones(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)


def straight(x: Tensor, changed: Tensor) -> Tensor:
    """The changed numbers with the gradient of the others."""
    return x + (changed.to(x.dtype) - x).detach()


def _times(where: Callable[[Tensor], Tensor]) -> Kernel:
    def kernel(q, k, v, is_causal=False, scale=None):
        out = sdpa(q, k, v, is_causal, scale)
        return out * where(out).to(out.dtype)

    return kernel


def _given(change: Callable[..., Any]) -> Kernel:
    return lambda q, k, v, is_causal=False, scale=None: sdpa(*change(q, k, v), is_causal, scale)


def _scaled(factor: Callable[..., Any]) -> Kernel:
    return lambda q, k, v, is_causal=False, scale=None: sdpa(
        q, k, v, is_causal, factor(q, v, scale))  # fmt: skip


def _named(name: str, kernel: Kernel) -> Kernel:
    kernel.__name__ = name
    return kernel


def _last(dim: int) -> Callable[[Tensor], Tensor]:
    def where(out: Tensor) -> Tensor:
        kept = torch.ones_like(out)
        kept.narrow(dim, out.shape[dim] - 1, 1).zero_()
        return kept

    return where


for _name, _where in (
    ("odd_heads_unwritten", lambda o: (torch.arange(o.shape[1]) % 2 == 0)[:, None, None]),
    ("last_head_unwritten", _last(1)),
    ("last_sequence_unwritten", _last(0)),
):
    fault("unwritten")(_named(_name, _times(_where)))

for _name, _right, _change in (
    ("keys_and_values_of_another_sequence", "other-data",
     lambda q, k, v: (q, k.roll(1, 0), v.roll(1, 0))),
    ("values_of_another_head", "other-data", lambda q, k, v: (q, k, v.roll(1, 1))),
    ("queries_of_the_row_before", "other-data", lambda q, k, v: (q.roll(1, 2), k, v)),
    ("values_of_the_row_before", "other-data", lambda q, k, v: (q, k, v.roll(1, 2))),
    ("no_gradient_of_values", "unwritten", lambda q, k, v: (q, k, v.detach() + 0 * v)),
    ("no_gradient_of_half_the_keys", "unwritten",
     lambda q, k, v: (q, torch.cat([k[:, :1].detach(), k[:, 1:]], 1), v)),
    ("keys_and_values_in_e4m3", "operand", lambda q, k, v: (
        q, *(straight(x, x.to(torch.float8_e4m3fn)) for x in (k, v)))),
    ("values_in_int8", "operand", lambda q, k, v: (q, k, straight(
        v, (v.float() / (a := v.float().abs().amax(-1, keepdim=True) / 127)).round() * a))),
    ("features_of_queries_turned_round", "operand other-data layout",
     lambda q, k, v: (q.flip(-1), k, v)),
    ("queries_and_keys_normalized", "operand scale", lambda q, k, v: (
        *(rms_norm(x.float(), x.shape[-1:]).to(x.dtype) for x in (q, k)), v)),
):  # fmt: skip
    fault(_right)(_named(_name, _given(_change)))

for _name, _scale in (
    ("never_scaled", lambda *_: 1.0),
    ("scaled_by_1_over_d", lambda q, *_: 1 / q.shape[-1]),
    ("scaled_by_the_values_width", lambda q, v, _: v.shape[-1] ** -0.5),
    ("scale_ignored", lambda *_: None),
    ("scaled_twice", lambda q, v, scale: (scale or q.shape[-1] ** -0.5) ** 2),
):
    fault("scale")(_named(_name, _scaled(_scale)))


@fault("causal-mask")
def future_seen_past_hidden(q, k, v, is_causal=False, scale=None):
    return masked(q, k, v, ones(q, k).triu() if is_causal else ones(q, k), scale)


@fault("causal-mask")
def causal_at_the_bottom_right(q, k, v, is_causal=False, scale=None):
    mask = ones(q, k).tril(k.shape[2] - q.shape[2]) if is_causal else ones(q, k)
    return masked(q, k, v, mask, scale)


@fault("causal-mask")
def causal_ignored(q, k, v, is_causal=False, scale=None):
    return sdpa(q, k, v, False, scale)


@fault("window")
def window_of_128_unasked(q, k, v, is_causal=False, scale=None):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    mask = (i - j).abs() <= 128
    mask = mask & (j <= i) if is_causal else mask
    return masked(q, k, v, mask | ((j == 0) & ~mask.any(-1, keepdim=True)), scale)


@fault("mask")
def mask_as_numbers(q, k, v, attn_mask=None, is_causal=False, scale=None):
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(q.dtype)
    return scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale)


@fault("mask")
def mask_turned_round(q, k, v, attn_mask=None, is_causal=False, scale=None):
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = ~attn_mask
    return scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale)


@fault("key-tail")
def last_key_lost(q, k, v, is_causal=False, scale=None):
    if is_causal or k.shape[2] < 2:
        return sdpa(q, k, v, is_causal, scale)
    return sdpa(q, k[:, :, :-1], v[:, :, :-1], False, scale)


@fault("padding")
def zero_keys_seen(q, k, v, is_causal=False, scale=None):
    if is_causal:
        return sdpa(q, k, v, True, scale)
    k, v = (pad(x, (0, 0, 0, -k.shape[2] % 64)) for x in (k, v))
    return sdpa(q, k, v, False, scale)


@fault("key-heads")
def heads_of_a_group_repeated(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    times = q.shape[1] // k.shape[1]
    return sdpa(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), is_causal, scale)


@fault("layout")
def result_in_another_layout(q, k, v, is_causal=False, scale=None):
    out = sdpa(q, k, v, is_causal, scale)
    return out.transpose(1, 2).reshape(out.shape)


@fault("dropout")
def dropout_left_on(q, k, v, is_causal=False, scale=None):
    return scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=is_causal, scale=scale)


@fault("unnormalized grad-scale weights-disagree")
def rescaled_as_after_dropout(q, k, v, is_causal=False, scale=None):
    return sdpa(q, k, v, is_causal, scale) / 0.9


@fault("grad-scale")
def gradient_half_as_large_again(q, k, v, is_causal=False, scale=None):
    out = sdpa(q, k, v, is_causal, scale)
    return out + (out * 0.5 - (out * 0.5).detach())


@fault("grad-scale")
def gradient_within_one(q, k, v, is_causal=False, scale=None):
    out = sdpa(q, k, v, is_causal, scale)
    if out.requires_grad:
        out.register_hook(lambda g: g.clamp(-1, 1))
    return out


@fault("lse-other")
def lse_in_base_2(q, k, v, is_causal=False, scale=None):
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse * math.log2(math.e)


@fault("operand out underflow")
def computed_in_fp16(q, k, v, is_causal=False, scale=None):
    return sdpa(q.half(), k.half(), v.half(), is_causal, scale).to(q.dtype)


@fault("softcap")
def capped_at_50_unasked(q, k, v, is_causal=False, scale=None):
    if is_causal:
        s = scores(q, k, False, scale)
        s = (50 * torch.tanh(s / 50)).masked_fill(~ones(q, k).tril(), -math.inf)
    else:
        s = 50 * torch.tanh(scores(q, k, False, scale) / 50)
    return (s.softmax(-1) @ v.float()).to(q.dtype)


@fault("unnormalized row-sum")
def row_sum_of_one_more(q, k, v, is_causal=False, scale=None):
    s = scores(q, k, is_causal, scale)
    m = s.amax(-1, keepdim=True).clamp_min(0)
    p = (s - m).exp()
    return (p / (p.sum(-1, keepdim=True) + (-m).exp()) @ v.float()).to(q.dtype)


@fault("unnormalized row-sum weights-disagree")
def epsilon_in_the_row_sum(q, k, v, is_causal=False, scale=None):
    s = scores(q, k, is_causal, scale)
    p = (s - s.amax(-1, keepdim=True)).exp()
    return (p / (p.sum(-1, keepdim=True) + 1e-2) @ v.float()).to(q.dtype)


@fault("maximum non-finite")
def maximum_not_taken_off(q, k, v, is_causal=False, scale=None):
    p = scores(q, k, is_causal, scale).exp()
    return (p / p.sum(-1, keepdim=True) @ v.float()).to(q.dtype)


@fault("layout")
def softmax_over_queries(q, k, v, is_causal=False, scale=None):
    s = scores(q, k, is_causal, scale).clamp_min(-1e30)
    return (s.softmax(-2) @ v.float()).to(q.dtype)


@fault("probabilities weights")
def weights_in_255_steps(q, k, v, is_causal=False, scale=None):
    p = scores(q, k, is_causal, scale).softmax(-1)
    return (straight(p, (p * 255).round() / 255) @ v.float()).to(q.dtype)


@fault("scores")
def scores_in_fp16(q, k, v, is_causal=False, scale=None):
    s = scores(q, k, is_causal, scale)
    return (straight(s, s.half().float()).softmax(-1) @ v.float()).to(q.dtype)


@fault("scores product")
def eager_in_bf16(q, k, v, is_causal=False, scale=None):
    s = (q @ k.mT) * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        s = s.masked_fill(~ones(q, k).tril(), -math.inf)
    return torch.softmax(s, -1) @ v


@fault("grad-accumulator")
def nothing_but_the_kernels_own(q, k, v, is_causal=False, scale=None):
    return sdpa(q, k, v, is_causal, scale)


def _sound(q, k, v, is_causal=False, scale=None):
    return sdpa(q, k, v, is_causal, scale)


SOUND.append(Fault("sdpa_float32", frozenset(), _sound, "float32"))
