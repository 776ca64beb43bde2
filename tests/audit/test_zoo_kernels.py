"""The zoo is what it says: sound kernels err no more than the stock recipe, faulty ones do, on the
input each names.
"""

import functools
from dataclasses import fields

import pytest
import torch

from halfulp.attention import emulate, golden
from tests.audit import zoo_inputs as on
from tests.audit.zoo import FAULTY, SOUND, TEXTBOOK, kernels, main
from tests.audit.zoo_kernel import TEXTBOOK_PLAN, Plan

NAMES = ("out", "dQ", "dK", "dV")
# times the unfaulted twin's error; the weakest fault, a lean of half an ulp, reaches 1.4
SHOWN = 1.3
VALUE_OFFSET_BIAS = 0.5  # of stock's error in dQ: what a kernel free of δ's bias stays below


def call(fn, x):
    """out, dQ, dK, dV of one call."""
    leaves = [t.clone().requires_grad_() for t in (x.query, x.key, x.value)]
    out = fn(*leaves, **x.options())
    out = out[0] if isinstance(out, tuple) else out
    return out.detach(), *torch.autograd.grad(out, leaves, x.grad_out)


@functools.cache
def truth(maker, dtype=torch.bfloat16):
    x = maker(dtype)
    exact = golden(x.query, x.key, x.value, x.grad_out, **x.options())
    return x, (exact.out, exact.grad_query, exact.grad_key, exact.grad_value)


def errors(results, exact):
    """Relative L2 errors; of a tensor that vanishes in exact arithmetic none can be given."""
    return {
        n: float((r.double() - e).norm() / e.norm())
        for n, r, e in zip(NAMES, results, exact, strict=True)
    }


@functools.cache
def twin(maker):
    x, exact = truth(maker)
    return call(TEXTBOOK, x), errors(call(TEXTBOOK, x), exact)


def stock(query, key, value, **options):
    return emulate(query, key, value, recipe="BF16_FLASH2", **options)


def named(zoo):
    return pytest.mark.parametrize("kernel", zoo, ids=lambda kernel: kernel.name)


def test_the_zoo_is_large_enough_and_names_are_unique():
    names = [kernel.name for kernel in (*FAULTY, *SOUND)]
    assert len(set(names)) == len(names)
    assert len(FAULTY) >= 24
    assert len(SOUND) >= 10
    assert {kernel.direction for kernel in FAULTY} == {"forward", "backward", "both"}
    assert {kernel.expected for kernel in SOUND} == {"sound", "stock"}
    assert sum(kernel.allclose for kernel in FAULTY) > len(FAULTY) / 2
    assert all(getattr(kernels, kernel.name) is kernel.fn for kernel in (*FAULTY, *SOUND))


@named(FAULTY)
def test_a_fault_shows_on_its_input_beside_the_unfaulted_twin(kernel):
    x, exact = truth(kernel.shows_on)
    twin_results, twin_errors = twin(kernel.shows_on)
    worst = 0.0
    for _ in range(12 if kernel.name == "update_lost" else 1):
        results = call(kernel.fn, x)
        found = errors(results, exact)
        # A tensor that is all error for the twin too (dQ where V is constant) tells nothing.
        ratios = [found[n] / max(e, 1e-9) for n, e in twin_errors.items() if e < 0.5]
        worst = max([worst, *(float("inf") if r != r else r for r in ratios)])
    assert worst > SHOWN
    # A fault of the backward pass leaves O as it is, bit for bit; one of the forward pass does not.
    assert torch.equal(results[0], twin_results[0]) == (kernel.direction == "backward")


@named(FAULTY)
def test_a_fault_is_one_step_of_the_pass_it_names(kernel):
    """Forward faults reach the gradients through O and lse alone."""
    steps = (f.name for f in fields(Plan))
    changed = {
        step for step in steps if getattr(kernel.plan, step) is not getattr(TEXTBOOK_PLAN, step)
    }
    backward = {
        "scores_again",
        "probabilities",
        "probabilities_operand",
        "delta",
        "grad_scores",
        "queries_visited",
    }
    # lse is what the forward pass keeps for the backward pass alone
    backward |= {"add_grad", "lse"}
    shared = {
        "repeat_heads",
        "alpha",
        "read_value",
        "keys_visited",
        "scores",
        "hidden",
        "visible",
        "mask_head",
    }
    expected = {"backward": backward, "both": shared}.get(kernel.direction)
    assert changed
    assert changed <= expected if expected else not changed & (backward | shared)
    assert len(changed) == 1 or (
        kernel.name == "published_fix" and changed == {"row_max", "divide"}
    )


@named([*FAULTY, *SOUND])
def test_the_allclose_flag_is_true_to_fact(kernel):
    x, exact = truth(gaussian_256)
    # enough to lose one, wherever its counter stands
    calls = 8 if kernel.name == "update_lost" else 1
    passes = all(
        torch.allclose(r.float(), e.float(), rtol=1e-2, atol=1e-2)
        for _ in range(calls)
        for r, e in zip(call(kernel.fn, x), exact, strict=True)
    )
    assert passes == kernel.allclose


def gaussian_256(dtype=torch.bfloat16):
    return on.gaussian(dtype, n=256)


INPUTS = (
    on.gaussian,
    on.causal,
    on.ragged,
    on.grouped,
    on.masked_rows,
    on.value_offset,
    on.common_keys,
    on.all_negative,
)


@pytest.mark.parametrize("maker", INPUTS, ids=lambda maker: maker.__name__)
@named(SOUND)
def test_a_sound_kernel_errs_like_the_stock_recipe_or_less(kernel, maker):
    x, exact = truth(maker)
    reference, found = stock_errors(maker), errors(call(kernel.fn, x), exact)
    for n in NAMES:
        assert found[n] < 1.25 * reference[n], n
        if kernel.expected == "stock":
            # "grad_scores_in_two" saves one of two equal roundings: 0.7
            assert found[n] > 0.65 * reference[n], n
    if maker is on.value_offset:
        assert (found["dQ"] < VALUE_OFFSET_BIAS * reference["dQ"]) == (kernel.expected == "sound")


@functools.cache
def stock_errors(maker):
    x, exact = truth(maker)
    return errors(call(stock, x), exact)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 3e-6), (torch.float16, 6e-4)], ids=str
)
@named(SOUND)
def test_other_dtypes(kernel, dtype, limit):
    x, exact = truth(on.ragged, dtype)
    results = call(kernel.fn, x)
    assert {r.dtype for r in results} == {dtype}
    # the degree of polynomial_exp is for bf16 weights
    assert (
        max(errors(results, exact).values())
        < (2e-5 if kernel.name == "polynomial_exp" else 0) + limit
    )


@named(SOUND)
def test_any_lengths_and_widths(kernel):
    g = torch.Generator().manual_seed(0)
    for n, n_key, d, width, is_causal in (
        (1, 1, 8, 8, True),
        (5, 131, 20, 36, False),
        (70, 70, 24, 24, True),
    ):
        q, k, v, do = (
            torch.randn(2, 2, *s, generator=g)
            for s in ((n, d), (n_key, d), (n_key, width), (n, width))
        )
        x = on.Inputs(q, k, v, do, is_causal, 0.3)
        exact = golden(q, k, v, do, is_causal=is_causal, scale=0.3)
        found = call(kernel.fn, x)
        for r, e in zip(
            found, (exact.out, exact.grad_query, exact.grad_key, exact.grad_value), strict=True
        ):
            assert float((r.double() - e).norm()) < 3e-5 * max(1.0, float(e.norm()))


def test_lost_updates_make_two_calls_differ():
    x = on.gaussian()
    lost = next(kernel for kernel in FAULTY if kernel.name == "update_lost")
    assert len({call(lost.fn, x)[1].float().sum().item() for _ in range(12)}) > 1


def test_the_list_names_every_kernel(capsys):
    main()
    printed = capsys.readouterr().out
    for kernel in (*FAULTY, *SOUND):
        assert f" {kernel.name} " in printed
