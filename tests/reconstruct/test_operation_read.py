"""The numbers that a step has in a kernel, solved for, and what is said of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfulp.operations import OperationResult, drawn_calls, operation_named
from halfulp.reconstruct.operation_called import trial
from halfulp.reconstruct.operation_read import read_ways, steps_read
from halfulp.targets import run_operation, target_of


def asked(kernel, op, probe="gaussian", dtype="float32", failing=None):
    """A call of a kernel."""
    operation, target = operation_named(op), target_of(kernel, op)

    def run(calls):
        return OperationResult(run_operation(target, calls).result.tensors)

    sizes = operation.sizes[0].with_(calls=1)
    generator = torch.Generator().manual_seed(0)
    return trial(run, drawn_calls(operation, probe, sizes, dtype, generator), failing)


def norm(of_root):
    def kernel(input, normalized_shape, weight, eps):
        root = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + eps)
        return (input.float() * of_root(root) * weight.float()).to(input.dtype)

    return kernel


@given(seed=st.integers(0, 2**31), spread=st.floats(0.01, 3.0))
@settings(max_examples=10, deadline=None)
def test_the_numbers_of_rows_are_solved_for(seed, spread):
    factors = (spread * torch.randn(1000, generator=torch.Generator().manual_seed(seed))).exp()
    one = asked(norm(lambda root: root * factors[: len(root), None]), "rms_norm",
                failing=("output",))  # fmt: skip
    found = {read.name: read for read in steps_read(one, one.calls.operation.floor)}
    read = found["inverse_rms"]
    assert read.share > 0.99
    due = read.own * factors[: len(read.own), None]
    assert ((read.found - due).norm() / due.norm()) < 0.01


def softmax_over(of_sum):
    def kernel(input, dim):
        terms = (input.float() - input.float().amax(-1, keepdim=True)).exp()
        return (terms / of_sum(terms.sum(-1, keepdim=True))).to(input.dtype)

    return kernel


def bits(count):
    """Cut to so many bits of a significand."""
    return lambda x: (x.contiguous().view(torch.int32) >> 23 - count << 23 - count).view(
        torch.float32
    )


@pytest.mark.parametrize(
    ("op", "kernel", "told"),
    [
        ("softmax", softmax_over(lambda x: x + 1), "row_sum has 1 added to it"),
        ("rms_norm", norm(lambda x: x.clamp(max=1)), "inverse_rms is at most 1"),
        ("rms_norm", norm(lambda x: x**2), "inverse_rms is what it should be to the power of 2"),
        ("rms_norm", norm(lambda x: (x * 64).round() / 64), "rounded to multiples of 2^-6"),
        ("rms_norm", norm(bits(5)), "inverse_rms is cut to 5 bits"),
    ],
)
def test_what_became_of_them_is_told(op, kernel, told):
    probe = "mixed_rows" if op == "rms_norm" else "gaussian"
    one = asked(kernel, op, probe, failing=("output",))
    base = one.calls.operation.floor

    def left(way):  # of the result: autograd's gradient is of what the kernel computes
        return one.left(one.emulated(base, (way,)), "output")

    best = min(read_ways(one, base), key=left)
    assert told in str(best)
    assert left(best) < 0.01 * one.errors["output"]
