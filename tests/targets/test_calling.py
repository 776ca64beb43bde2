"""A target may do anything; the caller gets an outcome, one line where it went wrong, and its own
world as it was.
"""

import math
import os
import random
import re
import sys
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from halfulp.attention import golden
from halfulp.targets import Target, run_target
from tests.targets.calls import (
    FORWARD_ONLY,
    MODIFIES,
    B,
    D,
    H,
    N,
    check_right,
    plain,
    relative,
    run,
    tensors,
)

# Arguments.


def only_three(query, key, value):
    return plain(query, key, value)


def with_everything(query, key, value, **options):
    return functional.scaled_dot_product_attention(query, key, value, **options)


def positional_options(query, key, value, is_causal=False, scale=None):
    return plain(query, key, value, is_causal=is_causal, scale=scale)


def test_arguments_that_a_function_does_not_take_are_never_passed():
    assert run(only_three).kind == "ok"
    assert run(only_three, scale=D**-0.5).kind == "ok"
    assert run(only_three, scale=0.3).kind == "unsupported"
    assert run(only_three, is_causal=True).refusal == "does not take is_causal"
    assert run(plain, enable_gqa=True).refusal == "does not take enable_gqa"
    assert (
        run(plain, attn_mask=torch.ones(N, N, dtype=torch.bool)).refusal
        == "does not take attn_mask"
    )
    check_right(Target.of(positional_options), torch.float32, is_causal=True, scale=0.3)
    assert Target.of(with_everything).accepts == {"attn_mask", "enable_gqa"}
    check_right(Target.of(with_everything), torch.float32, enable_gqa=True, scale=0.3)


# Results.


def returning(make):
    def kernel(query, key, value, *, is_causal, scale):
        out = plain(query, key, value, is_causal=is_causal, scale=scale)
        lse = (query @ key.mT * (D**-0.5 if scale is None else scale)).logsumexp(-1)
        return make(out, lse)

    return kernel


@pytest.mark.parametrize(
    ("make", "offered"),
    [
        (lambda out, lse: (out, lse), True),
        (lambda out, lse: [out, lse, None], True),
        (lambda out, lse: (out, lse.unsqueeze(-1)), True),
        (lambda out, lse: (out, lse.transpose(1, 2)), True),
        (lambda out, lse: (out, lse.transpose(1, 2).unsqueeze(-1)), True),
        (lambda out, lse: (out, None), False),
        (lambda out, lse: (out,), False),
        (lambda out, lse: (out, lse[..., :-1]), False),
        (lambda out, lse: (out, {"lse": lse}), False),
        (lambda out, lse: (out, lse.long()), False),
    ],
)
def test_lse_is_recognized_in_its_usual_shapes(make, offered):
    outcome = run(returning(make))
    assert outcome.kind == "ok"
    if offered:
        assert relative(outcome.result.lse, golden(*tensors()[:3]).lse) < 1e-6
    else:
        assert outcome.result.lse is None


def test_an_unrecognized_second_result_is_noted():
    assert any(
        "no lse" in note for note in run(returning(lambda out, lse: (out, lse[..., 1:]))).notes
    )
    assert run(returning(lambda out, lse: (out, None))).notes == ()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda out, lse: out.transpose(1, 2),
            r"out of shape \(1, 21, 2, 16\): expected \(1, 2, 21, 16\)",
        ),
        (lambda out, lse: out.double(), "out of dtype float64: expected float32"),
        (lambda out, lse: None, "returns NoneType"),
        (lambda out, lse: (), "empty tuple"),
        (lambda out, lse: out.to("meta"), "out on meta: expected cpu"),
        (lambda out, lse: ((out, lse), lse), "returns tuple: expected a tensor"),
        (lambda out, lse: out.to_sparse(), "out that is sparse_coo: expected a dense"),
        (lambda out, lse: torch.nested.as_nested_tensor(list(out)), "out that is nested"),
        (lambda out, lse: {"out": out}, "returns dict"),
    ],
)
def test_a_wrong_result_is_refused_in_one_line(make, says):
    outcome = run(returning(make))
    assert (outcome.kind, outcome.result) == ("error", None)
    assert re.search(says, outcome.refusal)


def test_nan_is_a_result():
    outcome = run(returning(lambda out, lse: out * math.nan))
    assert outcome.kind == "ok"
    assert outcome.result.out.isnan().all()
    assert outcome.result.grad_query.isnan().all()


def test_a_kernel_without_gradients_is_noted():
    outcome = run(returning(lambda out, lse: out.detach()))
    assert outcome.kind == "ok"
    assert FORWARD_ONLY in outcome.notes
    assert outcome.result.grad_query is None


def test_a_missing_gradient_is_noted():
    outcome = run(
        lambda query, key, value, is_causal=False, scale=None: plain(query, key.detach(), value)
    )
    assert outcome.notes == ("no gradient for key",)
    assert outcome.result.grad_key is None
    assert outcome.result.grad_value is not None


def test_without_grad_out_no_graph_is_built():
    def kernel(query, key, value, *, is_causal, scale):
        assert not torch.is_grad_enabled()
        assert not query.requires_grad
        return plain(query, key, value)

    outcome = run(kernel, differentiate=False)
    assert (outcome.kind, outcome.notes) == ("ok", ())


def test_results_are_the_callers_own():
    buffer = torch.zeros(B, H, N, D)

    def kernel(query, key, value, *, is_causal, scale):
        return buffer.copy_(plain(query, key, value))

    first = run(kernel, differentiate=False).result.out
    expected = first.clone()
    buffer.zero_()
    assert torch.equal(first, expected)


# Faults of its code.


def raiser(error):
    def kernel(query, key, value, *, is_causal, scale):
        raise error

    return kernel


class BackwardRaises(torch.autograd.Function):
    error: BaseException = RuntimeError("x")

    @staticmethod
    def forward(ctx, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        raise BackwardRaises.error


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (RuntimeError("bad\nTraceback of it"), "error", "raises RuntimeError: bad"),
        (TypeError("bad"), "error", "raises TypeError: bad"),
        (KeyError("bad"), "error", "raises KeyError: 'bad'"),
        (
            NotImplementedError("only bf16"),
            "refused",
            "refuses: NotImplementedError: only bf16",
        ),
        (ValueError("D must be 64"), "refused", "refuses: ValueError: D must be 64"),
        (AssertionError(), "refused", "refuses: AssertionError"),
        (MemoryError("x" * 900), "error", "raises MemoryError: xxx"),
    ],
)
def test_an_exception_is_one_line(error, kind, says):
    outcome = run(raiser(error))
    assert (outcome.kind, outcome.result) == (kind, None)
    assert outcome.refusal.startswith(says)
    assert "\n" not in outcome.refusal
    assert len(outcome.refusal) < 260


def test_the_users_stop_is_obeyed():
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        run(raiser(KeyboardInterrupt()))
    assert torch.get_num_threads() == threads


class UnreadableError(Exception):
    def __str__(self):
        raise RuntimeError("in __str__")


class Passing(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SystemExit(0), "raises SystemExit: 0"),
        (GeneratorExit(), "raises GeneratorExit"),
        (Passing("through"), "raises Passing: through"),
        (UnreadableError(), "raises UnreadableError: (a message that cannot be read)"),
        (RuntimeError("\x1b[31mred\x07"), "raises RuntimeError: �[31mred�"),
    ],
)
def test_exceptions_that_would_pass_through_are_one_line(error, says):
    outcome = run(raiser(error))
    assert (outcome.kind, outcome.refusal) == ("error", says)


def test_an_exception_of_the_backward_pass(monkeypatch):
    monkeypatch.setattr(BackwardRaises, "error", RuntimeError("no such kernel\nmore"))
    outcome = run(lambda query, key, value: BackwardRaises.apply(query, key, value))
    assert (outcome.kind, outcome.result) == ("error", None)
    assert outcome.refusal == "backward pass raises RuntimeError: no such kernel"
    monkeypatch.setattr(BackwardRaises, "error", NotImplementedError("forward only"))
    outcome = run(lambda query, key, value: BackwardRaises.apply(query, key, value))
    assert outcome.kind == "ok"
    assert outcome.result.out is not None
    assert outcome.result.grad_query is None
    assert FORWARD_ONLY in outcome.notes


# The caller's world.


@pytest.mark.parametrize("differentiate", [True, False])
def test_writing_into_the_inputs_is_seen_and_harmless(differentiate):
    def kernel(query, key, value, *, is_causal, scale):
        query.mul_(D**-0.5)
        return functional.scaled_dot_product_attention(query, key, value, scale=1.0)

    q, k, v, do = tensors()
    before = [x.clone() for x in (q, k, v, do)]
    target = Target.of(kernel)
    outcome = run_target(
        target, q, k, v, do if differentiate else None, is_causal=False, scale=None
    )
    assert outcome.kind == "ok"
    assert outcome.notes[0] == f"{MODIFIES}: query"
    assert all(torch.equal(a, b) for a, b in zip((q, k, v, do), before, strict=True))
    truth = golden(q, k, v, do)
    assert relative(outcome.result.out, truth.out) < 1e-5
    if differentiate:
        assert relative(outcome.result.grad_query, truth.grad_query) < 1e-5


def test_writing_into_mask_or_grad_out_is_seen():
    class ScalesGrad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.mul_(2)

    assert (
        f"{MODIFIES}: grad_out"
        in run(lambda query, key, value: ScalesGrad.apply(plain(query, key, value))).notes
    )

    def kernel(query, key, value, *, is_causal, scale, attn_mask):
        attn_mask[0, 0] = False
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)

    mask = torch.ones(N, N, dtype=torch.bool)
    assert f"{MODIFIES}: attn_mask" in run(kernel, attn_mask=mask).notes
    assert mask.all()


def test_negative_zero_and_nan_inputs_are_not_taken_for_changes():
    q, k, v, do = tensors()
    q[0, 0, 0, 0], k[0, 0, 0, 0] = -0.0, math.nan
    assert run_target(Target.of(plain), q, k, v, do, is_causal=False, scale=None).notes == ()


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODE, INFERENCE = Counting(), torch.inference_mode()


def _replace_softmax():
    torch.softmax = torch.log_softmax


@pytest.mark.parametrize(
    ("leave", "what"),
    [
        (INFERENCE.__enter__, "inference mode"),
        (MODE.__enter__, "the modes that torch is in"),
        (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
        (lambda: torch.set_default_device("meta"), "the default device"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "the number of threads"),
        (lambda: torch.set_grad_enabled(True), "grad mode"),
        (lambda: torch.backends.cuda.enable_math_sdp(False), "the math backend of attention"),
        (lambda: torch.set_flush_denormal(True), "denormal numbers"),
        (lambda: torch.manual_seed(99), "torch's random numbers"),
        (lambda: random.random(), "Python's random numbers"),
        (lambda: np.random.seed(3), "numpy's random numbers"),  # noqa: NPY002
        (_replace_softmax, "torch.softmax"),
        (lambda: os.chdir("/"), "the working folder"),
        (lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1), "the recursion limit"),
        (lambda: torch.set_autocast_enabled("cpu", True), "autocast"),
        (lambda: sys.path.append("x"), "sys.path"),
    ],
)
def test_what_a_kernel_leaves_changed_is_put_back_and_said(leave, what):
    def kernel(query, key, value, *, is_causal, scale):
        out = plain(query, key, value)
        leave()
        return out

    before = run(plain, differentiate=False)
    outcome = run(kernel, differentiate=False)
    assert outcome.kind == "ok"
    (note,) = outcome.notes
    assert note.startswith("leaves changed (put back): ")
    assert what in note
    after = run(plain, differentiate=False)
    assert after.notes == ()
    assert torch.equal(after.result.out, before.result.out)


def test_torch_is_left_as_it_was():
    def kernel(query, key, value, *, is_causal, scale):
        torch.manual_seed(99)
        torch.rand(7)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        warnings.simplefilter("ignore")
        return functional.scaled_dot_product_attention(query, key, value)

    def state():
        modes = (
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        )
        return torch.get_num_threads(), torch.get_default_dtype(), *modes, list(warnings.filters)

    torch.manual_seed(5)
    before, expected = state(), torch.rand(3)
    torch.manual_seed(5)
    assert run(kernel).kind == "ok"
    assert state() == before
    assert torch.equal(torch.rand(3), expected)


def test_autocast_of_the_caller_does_not_reach_the_kernel():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outcome = run(lambda query, key, value: torch.softmax(query @ key.mT * D**-0.5, -1) @ value)
    assert outcome.kind == "ok"
    assert relative(outcome.result.out, golden(*tensors()[:3]).out) < 1e-6


def test_warnings_are_notes_and_deprecations_are_not():
    def kernel(query, key, value, *, is_causal, scale):
        warnings.warn("falls back to fp32\nsee docs", UserWarning, stacklevel=1)
        warnings.warn("falls back to fp32\nsee docs", UserWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return plain(query, key, value)

    assert run(kernel).notes == ("warns: falls back to fp32",)


def test_gradients_are_of_out_alone():
    outcome = run(returning(lambda out, lse: (out, lse)))
    truth = golden(*tensors())
    for name in ("grad_query", "grad_key", "grad_value"):
        assert relative(getattr(outcome.result, name), getattr(truth, name)) < 1e-5
