"""Eager code in low precision, as people write it, is named as a whole; so is a mistake in it."""

import re
from typing import Literal

import pytest
import torch

from halfulp import audit
from halfulp.operations import changed, drawn_calls, operation_named
from halfulp.reconstruct.operation_eager import eager_ways
from halfulp.targets import resolve
from halfulp.targets.operation_calling import run_operation


def _norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _norm_of_wide_squares(x, weight, eps=1e-6):
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + eps).to(x.dtype) * weight


def _layer_norm_weighted_first(x, weight, bias, eps=1e-5):
    deviation = torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + eps)
    return weight * (x - x.mean(-1, keepdim=True)) / deviation + bias


def _layer_norm(x, weight, bias, eps=1e-5):
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


def _softmax(x):
    weights = torch.exp(x - x.max(-1, keepdim=True).values)
    return weights / weights.sum(-1, keepdim=True)


def _norm_of_products(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _softmax_of_lse(x):
    return (x - x.logsumexp(-1, keepdim=True)).exp()


def _cross_entropy(x, target, *, ignore_index):
    logs = torch.softmax(x, -1).log()
    own = logs.gather(1, target.clamp_min(0)[:, None])[:, 0]
    return torch.where(target != ignore_index, -own, 0.0)


def _geglu(gate, up):
    return 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up


def _divided(gate, up):
    return gate / (1 + torch.exp(-gate)) * up


def _swiglu(gate, up):
    return gate * torch.sigmoid(gate) * up


def _rope(x, positions, *, base, interleaved: Literal[False]):
    half = x.shape[-1] // 2
    angle = positions.to(x.dtype)[:, None, None] * (base ** (torch.arange(half) / -half)).to(x)
    first, second = x.split(half, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("op", "kernel", "since"),
    [
        ("rms_norm", _norm, ""),
        ("rms_norm", _norm_of_wide_squares, ", from inverse_rms on"),
        ("layer_norm", _layer_norm, ""),
        ("layer_norm", _layer_norm_weighted_first, ""),
        ("rms_norm", _norm_of_products, ""),
        ("softmax", _softmax, ""),
        ("softmax", _softmax_of_lse, ""),
        ("cross_entropy", _cross_entropy, ""),
        ("geglu", _geglu, ""),
        ("swiglu", _swiglu, ""),
        ("swiglu", _divided, ""),
        ("rope", _rope, ", from frequency on"),
    ],
)
def test_eager_code_in_low_precision_is_named_as_a_whole(op, kernel, since):
    report = audit(kernel, op=op)
    text = r"every step of both passes( \(.*\))? is rounded to bf16, as eager code does"
    assert report.causes[0].key == "step-low"
    assert re.match(f"{text}{since}: explains (9[89]|100) % of the error of", report.evidence[0])


def _norm_over_size(x, weight, eps=1e-6):
    size = x.norm(2, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
    return weight * x / (size + eps)


def _softmax_as_it_comes(x):
    return x.exp() / x.exp().sum(-1, keepdim=True)


@pytest.mark.thorough(keep=0)
@pytest.mark.parametrize(
    ("op", "kernel", "cause", "text"),
    [
        ("rms_norm", _norm_over_size, "option", "eps is added to the root mean square, not under"),
        ("softmax", _softmax_as_it_comes, "maximum", "no maximum is subtracted"),
    ],
)
def test_a_mistake_in_eager_code_is_told_with_it(op, kernel, cause, text):
    report = audit(kernel, op=op)
    assert report.causes[0].key == cause
    assert report.evidence[0].startswith(text)
    assert "as eager code does: explains 100 % of" in report.evidence[0]


@pytest.mark.parametrize("probe", [p.name for p in operation_named("adamw_low").probes])
def test_eager_adamw_gives_the_bits_of_torch(probe):
    """Of torch.optim.AdamW on bf16 weights and moments, whose lerp and addcmul round once."""
    operation = operation_named("adamw_low")
    sizes = operation.sizes[0].with_(calls=1, S=6)
    calls = drawn_calls(operation, probe, sizes, "bfloat16", torch.Generator().manual_seed(0))
    own = run_operation(resolve("torch", operation="adamw_low"), calls).result.tensors
    define, recipe = next(w.eager for w in eager_ways(calls) if w.eager and "decayed" in w.text)()
    with recipe:
        made = changed(calls, recipe, define)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(made[name].bfloat16(), own[name].bfloat16()), name
    # the difference of two bf16 weights, which eager code rounds as well
    assert torch.allclose(made["update"], own["update"], rtol=2**-8, atol=0)
