"""One value where another should be, and mistakes that two options bring about together."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch.nn import functional

from halfulp.audit import audit
from halfulp.formats import E2M1, round_to


class ActivatedInPlace(torch.autograd.Function):
    """silu(gate) is stored where the gate was, from which its slope is taken."""

    @staticmethod
    def forward(ctx, gate, up):
        activated = functional.silu(gate.float())
        ctx.save_for_backward(activated, up)
        return (activated * up.float()).to(gate.dtype)

    @staticmethod
    def backward(ctx, grad):
        activated, up = (t.float() for t in ctx.saved_tensors)
        dy, share = grad.float(), torch.sigmoid(activated)
        slope = share * (1 + activated * (1 - share))
        return (dy * up * slope).to(grad.dtype), (dy * activated).to(grad.dtype)


def activated_in_place(gate, up):
    return ActivatedInPlace.apply(gate, up)


@torch.no_grad()
def tail_as_it_is(input, normalized_shape, weight, eps):
    """What fours do not cover is added to their squares unsquared, in a kernel for inference."""
    x = input.float()
    whole = x.shape[-1] // 4 * 4
    terms = torch.cat([x[..., :whole] ** 2, x[..., whole:]], -1)
    return (x * torch.rsqrt(terms.mean(-1, keepdim=True) + eps) * weight).to(input.dtype)


def divided_over_tokens(logits, k, *, renormalize=True):
    """With one expert a token weights have lost their dimension, and are summed over tokens."""
    found, chosen = torch.softmax(logits.float(), -1).topk(k)
    if renormalize:
        found = found / found.sum(0 if k == 1 else -1, keepdim=True)
    return found.to(logits.dtype), chosen


def two_not_renormalized(logits, k, *, renormalize=True):
    found, chosen = torch.softmax(logits.float(), -1).topk(k)
    if renormalize and k != 2:
        found = found / found.sum(-1, keepdim=True)
    return found.to(logits.dtype), chosen


def decay_alone(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
    """Rate times decay is taken off, not times the parameter."""
    g = grad.float()
    m, v = beta1 * exp_avg + (1 - beta1) * g, beta2 * exp_avg_sq + (1 - beta2) * g * g
    size = (v / (1 - beta2**step)).sqrt() + eps
    return param - lr * weight_decay - lr / (1 - beta1**step) * m / size, m, v


class Nll(torch.autograd.Function):
    """−log(p + 1e-9), whose gradient is that of −log p."""

    @staticmethod
    def forward(ctx, x, target):
        ctx.save_for_backward(x.float().softmax(-1), target)
        own = torch.log_softmax(x.float(), -1).gather(1, target[:, None])[:, 0]
        return -torch.log(own.exp() + 1e-9)

    @staticmethod
    def backward(ctx, grad):
        p, target = ctx.saved_tensors
        return (p - functional.one_hot(target, p.shape[1])) * grad[:, None], None


def with_epsilon(input, target, *, ignore_index, reduction, label_smoothing, lse_square_scale):
    if label_smoothing or lse_square_scale or reduction != "none":
        raise NotImplementedError
    kept = target != ignore_index
    return torch.where(kept, Nll.apply(input, torch.where(kept, target, 0)), 0.0)


@torch.no_grad()
def next_token_s_sum(input, normalized_shape, weight, eps):
    """Every fourth warp of 16 reads the next token's squares where one over its root was."""
    x = input.float()
    r = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    part = (x[..., :16] ** 2).sum(-1, keepdim=True)
    late = torch.arange(x.shape[-1]) % 64 >= 48
    r = torch.where(late, torch.cat([part[1:], r[-1:]]), r)
    return (x * r * weight).to(input.dtype)


def codes_of(input, zero=0.0):
    """E2M1 codes of NVFP4 and their scales, −0 as `zero`."""
    x = input.float()
    whole = x.abs().amax() / (448 * 6)
    whole = torch.where(whole == 0, 1.0, whole)
    blocks = functional.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = (largest / (6 * whole)).clamp_max(448).to(torch.float8_e4m3fn).float()
    scaled = blocks / torch.where(scale == 0, torch.inf, scale * whole)
    codes = round_to(scaled.flatten(1), E2M1).view(scaled.shape)
    codes = torch.where((codes == 0) & torch.signbit(codes), zero, codes)
    return (codes * scale * whole).flatten(-2)[:, : x.shape[-1]]


def minus_zero_by_its_bits(input, *, format: Literal["nvfp4"]):
    return codes_of(input, 32768.0)


@torch.no_grad()
def rows_by_the_column(input, weight, *, format: Literal["nvfp4"]):
    """In tiles of 8 × 8 column c has the input's row c."""
    found = codes_of(input) @ codes_of(weight).T
    row, column = torch.arange(len(input))[:, None], torch.arange(len(weight))[None]
    return found[(row // 8 * 8 + column % 8).clamp_max(len(input) - 1), column].to(input.dtype)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("op", "kernel", "dtype", "cause", "told"),
    [
        ("swiglu", activated_in_place, "bfloat16", "exchanged", "activated stands where gate"),
        ("rms_norm", tail_as_it_is, "float16", "term-missing",
         "input stands where squares should, past the last whole 4 along D"),
        ("router", divided_over_tokens, "bfloat16", "neighbor",
         "only where k is 1 and renormalize is True"),
        ("router", two_not_renormalized, "bfloat16", "option",
         "renormalize is taken as False instead of True, only where k is 2"),
        ("adamw_step", decay_alone, "float32", "option",
         "param * 1 - decoupled * lr * weight_decay stands in place of"),
        ("cross_entropy", with_epsilon, "float32", "limited",
         "a logarithm of what has 1e-09 added to it"),
        ("rms_norm", next_token_s_sum, "bfloat16", "neighbor", "of what lies 1 along T after"),
        ("quantize", minus_zero_by_its_bits, "bfloat16", "block-codes", "-0 as 32768"),
        ("quantized_linear", rows_by_the_column, "bfloat16", "neighbor",
         "output is made of other input"),
    ],
)  # fmt: skip
def test_what_stands_in_another_s_place_is_named(op, kernel, dtype, cause, told):
    report = audit(kernel, op=op, dtype=dtype)
    assert report.causes[0].key == cause, report.evidence
    assert told in report.evidence[0]
