"""Mistakes in some calls alone, functions that are others, and where numbers are missing from."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from halfulp.audit import audit
from halfulp.operations import drawn_calls, operation_named
from halfulp.reconstruct.operation_called import trial
from halfulp.reconstruct.operation_operands import operand_ways
from halfulp.reconstruct.operation_places import only_in, place
from halfulp.reconstruct.operation_read import function_ways
from tests.reconstruct.test_operation_reached import run_of


def asked(kernel, op, **sizes):
    """A call of a kernel."""
    operation = operation_named(op)
    sizes = operation.sizes[0].with_(calls=1, **sizes)
    generator = torch.Generator().manual_seed(0)
    calls = drawn_calls(operation, operation.probes[0].name, sizes, "float32", generator)
    found = trial(run_of(kernel, op), calls, None)
    assert found is not None
    return found


def norm(squares=lambda x: (x * x).mean(-1, keepdim=True), inverse=torch.rsqrt):
    def kernel(input, normalized_shape, weight, eps):
        x = input.float()
        return (x * inverse(squares(x) + eps) * weight).to(input.dtype)

    return kernel


def two_of_three_tiles(x):
    """The last tile of 64 columns is not added where there are three or more."""
    read = x[..., :-64] if x.shape[-1] % 64 == 0 and x.shape[-1] >= 192 else x
    return (read * read).sum(-1, keepdim=True) / x.shape[-1]


@pytest.mark.thorough(keep=0)
def test_a_mistake_from_a_size_on_is_told_with_it():
    report = audit(norm(two_of_three_tiles), op="rms_norm", dtype="float32")
    assert report.causes[0].key == "end"
    assert "left out in the last 64 of 256" in report.evidence[0]


def test_the_calls_that_fail_alone_are_told_from_the_others():
    large, small = (asked(norm(two_of_three_tiles), "rms_norm", D=d) for d in (256, 96))
    assert large.failing
    assert not small.failing
    again = asked(norm(two_of_three_tiles), "rms_norm", D=320)
    only = only_in(large, [small, again])
    assert only is not None
    assert only.text == "only from D = 256 on, not up to 96"
    assert only.holds(again.calls)
    assert not only.holds(small.calls)
    assert only_in(large, [again]) is None  # where no call is right nothing tells


def half_a_step(x):
    """1 / √x from a straight line over each binade, and a step of Newton's."""
    fraction, exponent = torch.frexp(x)
    odd = exponent % 2
    start = (1.45 - 0.48 * fraction) * torch.where(odd == 1, 0.5**0.5, 1.0)
    y = torch.ldexp(start, -torch.div(exponent - odd, 2, rounding_mode="floor"))
    return y * (1.5 - 0.5 * x * y * y)


def sigmoid_of_three_pieces(x):
    return (x / 6 + 0.5).clamp(0.001, 1)


def gated(sigmoid):
    return lambda gate, up: (gate.float() * sigmoid(gate.float()) * up.float()).to(gate.dtype)


def test_another_function_foretells_other_numbers():
    one = asked(gated(sigmoid_of_three_pieces), "swiglu")
    base = one.calls.operation.floor
    found = [way for way in function_ways(one, base) if "_sigmoid" in way.steps]
    assert any("another function of its value" in way.text for way in found)


@pytest.mark.parametrize("sound", [gated(torch.sigmoid), gated(lambda x: 1 / (1 + (-x).exp()))])
def test_a_sound_kernel_has_no_other_function(sound):
    one = asked(sound, "swiglu")
    assert not one.failing or not list(function_ways(one, one.calls.operation.floor))


def test_errors_without_rule_are_no_function():
    noise = torch.randn(1000, 1, generator=torch.Generator().manual_seed(0))
    kernel = norm(inverse=lambda x: torch.rsqrt(x) * (1 + 0.01 * noise[: len(x)]))
    one = asked(kernel, "rms_norm")
    assert one.failing
    assert not list(function_ways(one, one.calls.operation.floor))


def test_numbers_are_missing_from_a_step_on():
    def kernel(input, dim=-1):
        x = functional.softmax(input.float(), dim)
        return torch.where(torch.arange(len(x))[:, None] == 3, torch.nan, x).to(input.dtype)

    one = asked(kernel, "softmax")
    told = place(one, one.calls.operation.floor, []).text
    assert "numbers are missing from" in told
    assert "row_sum" in told
    assert "at 3 of" in told


class Online(torch.autograd.Function):
    """Rows in blocks of 64, whose sum is not rescaled to a new maximum."""

    @staticmethod
    def forward(ctx, rows):
        x = rows.float()
        total, running = torch.zeros(len(x), 1), torch.full((len(x), 1), -torch.inf)
        for part in x.split(64, -1):
            running = torch.maximum(running, part.amax(-1, keepdim=True))
            total = total + (part - running).exp().sum(-1, keepdim=True)
        kept = (x - running).exp() / total
        ctx.save_for_backward(kept)
        return kept.to(rows.dtype)

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return (kept * (grad.float() - (kept * grad).sum(-1, keepdim=True))).to(grad.dtype)


def test_a_sum_that_is_not_rescaled_is_known():
    one = asked(lambda input, dim: Online.apply(input), "softmax")
    base = one.calls.operation.floor
    shares = {way.text: one.share(base, (way,)) for way in operand_ways(one.calls)}
    told = max(shares, key=shares.__getitem__)
    assert "row_sum is not rescaled" in told
    assert "one block of 64 to" in told
    assert shares[told] > 0.99
