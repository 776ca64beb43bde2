"""What results hang on, asked of a kernel; and kinds of mistakes beside it: maxima of a part, what
is chosen among NaN, numbers that are a size's, random numbers that rows share.
"""

from __future__ import annotations

import re
from typing import Literal

import pytest
import torch
from torch.nn import functional

from halfulp.audit import audit
from halfulp.operations import OperationResult, drawn_calls, operation_named
from halfulp.reconstruct.operation_called import trial
from halfulp.reconstruct.operation_random import random_cause
from halfulp.reconstruct.operation_reached import reached
from halfulp.targets import run_operation, target_of


def run_of(kernel, op):
    """A kernel's results, as the search calls it."""
    target = target_of(kernel, op)

    def run(calls):
        result = run_operation(target, calls).result
        return result if isinstance(result, OperationResult) else None

    return run


def asked(kernel, op, probe, **sizes):
    """What is said of a kernel on a call of a probe."""
    operation, run = operation_named(op), run_of(kernel, op)
    sizes = operation.sizes[0].with_(calls=1, **sizes)
    calls = drawn_calls(operation, probe, sizes, "float32", torch.Generator().manual_seed(0))
    one = trial(run, calls, None)
    found = reached(run, one) if one is not None and one.failing else None
    return found and found[:2]


def halves_in_pairs(input, *, format: Literal["mxfp4"]):
    """Codes that lie in halves of a block, and are read in pairs."""
    blocks = input.float().unflatten(-1, (-1, 32))
    scale = torch.exp2(blocks.abs().amax(-1, keepdim=True).log2().floor() - 2)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    near = ((blocks / scale).abs()[..., None] - grid).abs().argmin(-1)
    low, high = (grid[near] * blocks.sign() * scale).chunk(2, -1)
    return torch.stack([low, high], -1).flatten(-3)


def other_rows(x, shape, w, eps):
    return functional.rms_norm(x, shape, w, eps)[torch.arange(len(x)) ^ 1]


def by_the_largest(x, w):
    return x @ w.T / w.abs().amax() ** 2


def two_rows_one_mean(x, shape, w, b, eps):
    mean = x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps)
    return (x - mean[torch.arange(len(x)) // 2 * 2]) * scale * w + b


@pytest.mark.parametrize(
    ("op", "kernel", "said"),
    [
        ("sum", lambda x, dim: x[:48].sum(0),
         ("end", "output does not hang on input, at the last 16 along T")),
        ("linear", lambda x, w: x[:, ::2] @ w[:, ::2].T,
         ("term-missing", "output does not hang on input, where K is odd")),
        ("rms_norm", other_rows,
         ("neighbor", "output is made of other input: at 0 along T of that at 1")),
        ("layer_norm", two_rows_one_mean,
         ("neighbor", "output is made of other input beside its own: of what lies 1 along T before,"
          " where T is odd")),
        ("linear", by_the_largest,
         ("factor", "output grows with weight to the power of -1, where 1 is due")),
    ],
)  # fmt: skip
def test_what_results_hang_on_is_asked(op, kernel, said):
    assert asked(kernel, op, operation_named(op).probes[0].name) == said


@pytest.mark.thorough(keep=0)
def test_codes_of_another_place_are_no_codes_that_are_rounded_otherwise():
    report = audit(halves_in_pairs, op="quantize")
    assert report.causes[0].key == "neighbor", report.evidence
    # of two halves of 16, in turns
    row, of = map(int, re.findall(r"made of other input: at (\d+) along D of that at (\d+)",
                                  report.evidence[0])[0])  # fmt: skip
    assert row // 32 == of // 32
    assert row % 32 == of % 32 // 16 + 2 * (of % 16)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("op", ["rms_norm", "softmax", "linear", "quantize", "router"])
def test_of_a_sound_kernel_nothing_is_said(op):
    operation = operation_named(op)
    run = run_of("recipe:stock", op)
    for probe in operation.probes[:4]:
        sizes = operation.sizes[0].with_(**{**probe.sizes, "calls": 1})
        calls = drawn_calls(
            operation, probe.name, sizes, "bfloat16", torch.Generator().manual_seed(0)
        )
        one = trial(run, calls, tuple(r.name for r in operation.results))
        assert one is None or reached(run, one) is None, probe.name


def test_a_maximum_of_a_part_of_the_row_is_named():
    def first_block(input, dim):
        powers = (input.float() - input[:, :64].float().amax(-1, keepdim=True)).exp()
        return (powers / powers.sum(-1, keepdim=True)).to(input.dtype)

    report = audit(first_block, op="softmax", only=["rising"])
    assert report.causes[0].key == "maximum", report.evidence
    assert report.evidence[0].startswith("maximum is that of the first 64 of 256: explains 100 %")


def test_what_is_chosen_among_nan_tells_nothing():
    def unshifted(logits, k, *, renormalize=True):
        powers = logits.float().exp()
        weights, chosen = (powers / powers.sum(-1, keepdim=True)).topk(k, -1)
        weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
        return weights.to(logits.dtype), chosen

    report = audit(unshifted, op="router")
    assert report.causes[0].key == "term-missing", report.evidence
    assert report.evidence[0].startswith("maximum is left out")


@pytest.mark.thorough(keep=0)
def test_a_number_of_meaning_that_is_next_to_1_elsewhere_is_told():
    def among_the_others(input, target, *, ignore_index=-100, reduction="none",
                         label_smoothing=0.0):  # fmt: skip
        logs, seen = input.float().log_softmax(-1), target != ignore_index
        own = -logs.gather(1, torch.where(seen, target, 0)[:, None])[:, 0]
        rest = (-logs.sum(-1) - own) / (input.shape[1] - 1)
        loss = torch.where(seen, (1 - label_smoothing) * own + label_smoothing * rest, 0.0)
        if reduction == "mean":
            return loss.sum() / seen.sum().clamp_min(1)
        return loss.sum() if reduction == "sum" else loss

    report = audit(among_the_others, op="cross_entropy", dtype="float32")
    assert report.causes[0].key == "option", report.evidence
    assert report.evidence[0].startswith("label_smoothing is taken V / (V − 1) times")


@pytest.mark.thorough(keep=0)
def test_a_sum_too_long_to_be_tried_on_the_worst_call_is_all_that_is_named():
    def short_sum(input, dim):
        powers = (input.float() - input.float().amax(-1, keepdim=True)).exp()
        total = torch.zeros(len(powers), 1)
        for one in powers.split(1, -1):
            total = (total + one).bfloat16().float()
        return (powers / total).to(input.dtype)

    report = audit(short_sum, op="softmax")
    assert report.causes[0].key == "sum-low", report.evidence
    assert "held within" not in report.evidence[0]


def steps_of_adamw(noise, number=lambda first, shape: first):
    """A kernel that rounds by `noise(shape)`, and counts by `number(step, shape)`."""

    def kernel(param, grads, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
        p, m, v = param.float(), exp_avg, exp_avg_sq
        for n, g in enumerate(grads.float(), step):
            t = torch.as_tensor(number(n, p.shape), dtype=torch.float64)
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            size = (v / (1 - beta2**t)).sqrt() + eps
            p = (p * (1 - lr * weight_decay) - lr * m / (1 - beta1**t) / size).float()
            p = ((p.view(torch.int32) + noise(p.shape)) & -65536).view(torch.float32)
        return p.to(param.dtype), m, v

    return kernel


def drawn(*shape):
    return torch.randint(0, 1 << 16, shape, dtype=torch.int32)


def random_words(kernel, probe):
    operation = operation_named("adamw_low")
    known = next(p for p in operation.probes if p.name == probe)
    sizes = operation.sizes[0].with_(**known.sizes)
    calls = drawn_calls(operation, probe, sizes, "bfloat16", torch.Generator().manual_seed(0))
    return random_cause(run_of(kernel, "adamw_low"), calls)


def test_rows_that_share_random_numbers_are_told():
    kernel = steps_of_adamw(lambda shape: drawn(16, shape[1]).repeat(shape[0] // 16, 1))
    assert random_words(kernel, "one_way") == "random numbers repeat after 16 rows"


def test_what_no_random_number_can_do_is_no_bias_of_theirs():
    sound = steps_of_adamw(lambda shape: drawn(*shape))
    assert random_words(sound, "plain") == ""
    counted = steps_of_adamw(
        lambda shape: drawn(*shape),
        lambda n, shape: n * shape.numel() + torch.arange(shape.numel()).view(shape),
    )
    assert random_words(counted, "plain") == ""


def test_a_product_in_place_of_a_quotient_is_no_factor():
    def multiplied(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps,
                   weight_decay):  # fmt: skip
        g = grad.float()
        m, v = beta1 * exp_avg + (1 - beta1) * g, beta2 * exp_avg_sq + (1 - beta2) * g * g
        size = (v / (1 - beta2**step)).sqrt() + eps
        decayed = param * (1 - lr * weight_decay)
        return decayed - lr * m / (1 - beta1**step) * size, m, v

    report = audit(multiplied, op="adamw_step", dtype="float32")
    assert report.causes[0].key == "term-missing", report.evidence
    assert "lr * mean * size stands in place of lr * mean / size" in report.evidence[0]


@pytest.mark.thorough(keep=0)
def test_a_way_that_leaves_a_part_of_other_calls_is_not_named():
    def slope_of_the_activated(gate, up, *, approximate="none"):
        class Unit(torch.autograd.Function):
            @staticmethod
            def forward(ctx, g, u):
                act = functional.gelu(g, approximate=approximate)
                ctx.save_for_backward(act, u)
                return act * u

            @staticmethod
            def backward(ctx, dy):
                act, u = ctx.saved_tensors
                with torch.enable_grad():
                    at = act.detach().requires_grad_()
                    slope = torch.autograd.grad(
                        functional.gelu(at, approximate=approximate).sum(), at
                    )[0]
                return dy * u * slope, dy * act

        return Unit.apply(gate.float(), up.float()).to(gate.dtype)

    report = audit(slope_of_the_activated, op="geglu")  # but the one that leaves none is
    assert report.causes[0].key == "exchanged", report.evidence
    assert "activated stands where gate should" in report.evidence[0]


def test_codes_that_are_each_decoded_as_another_are_told_beside_missing_numbers():
    def other_decoder(input, *, format: Literal["mxfp8_e4m3"]):
        blocks = input.float().unflatten(-1, (-1, 32))
        largest = blocks.abs().amax(-1, keepdim=True)
        scale = torch.exp2(largest.log2().floor() - 8).clamp_min(2.0**-127)
        codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return (codes.view(torch.float8_e4m3fnuz).float() * scale).flatten(-2)

    report = audit(other_decoder, op="quantize")
    assert "codes are given as others: -448 as -224" in report.evidence[0]
