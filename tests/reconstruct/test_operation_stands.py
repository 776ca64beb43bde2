"""One value where another should be, and mistakes that two options bring about together."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from halfulp.audit import audit


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
    ],
)  # fmt: skip
def test_what_stands_in_another_s_place_is_named(op, kernel, dtype, cause, told):
    report = audit(kernel, op=op, dtype=dtype)
    assert report.causes[0].key == cause, report.evidence
    assert told in report.evidence[0]
