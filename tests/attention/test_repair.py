"""That it repairs: the failing run lives, the audit finds nothing, and every ingredient of the
recipe is needed.

The runs are the `seconds` preset, true bf16 with nothing accelerated but the task, asked for
PyTorch's flash kernel.
"""

import functools
import math
from dataclasses import fields

import pytest
import torch

import halfulp
from halfulp import native
from halfulp.attention import emulate, golden
from halfulp.audit import Shape, audit
from halfulp.audit.inputs import Case
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, Recipe, recipe_named
from halfulp.training.loop import train
from halfulp.training.presets import seconds

SMALL = Shape(batch=1, heads=16, n_query=160, n_key=160, head_dim=32)  # two tiles
BACK_TO_STOCK = {
    "no residual": "delta_from=out,residual_bits=none",
    "l from weights before rounding": "row_sum_from=exact",
    "other weights in the backward pass": "backward_weights=lse",
    "a maximum that is no integer": "shift=maximum",
}
AUDITED = BACK_TO_STOCK | {"lse of the weights after rounding": "lse_from=row_sum"}


KERNELS = ("torch",) if native.missing() else ("torch", "cpu")


def run(recipe, seed=0, backend="torch"):
    """Loss and mean score at step 800 of the run that asks for torch:flash, with attention patched
    in.
    """
    with halfulp.patch(recipe=recipe, backend=backend):
        last = train(seconds("torch:flash", seed=seed, steps=800)).metrics[-1]
    return last["loss"], last["mean_score"]


def test_the_failing_run_lives_with_nothing_else_changed():
    """Stock arithmetic through the same patch runs away (mean score 9), so it is the recipe that
    repairs.

    benchmarks/repair_seeds.py runs as many seeds as asked for to step 4000.
    """
    loss, score = run("halfulp")
    stock_loss, stock_score = run("stock")
    assert loss < 4e-5
    assert abs(score) < 1.5
    assert stock_loss > 1.5 * loss
    assert stock_score > 5


def test_another_seed_lives_with_the_kernel_that_is_chosen():
    loss, score = run("halfulp", seed=1, backend=None)
    assert loss < 4e-5
    assert abs(score) < 1.5


@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("no_lengths")
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_audit_finds_it_sound(kernel):
    """On every probe: none is left out, and none is unmeasured."""
    report = audit(f"halfulp:{kernel}", shapes=(SMALL,), explain=False)
    assert report.verdict == "sound", report.reason


def test_every_difference_from_the_stock_recipe_is_taken_back_below():
    """But base 2, without which an integer maximum is not exact, and what dV and dS divide by
    (tests below).
    """
    differ = {
        f.name
        for f in fields(Recipe)
        if getattr(BF16_HALFULP, f.name) != getattr(BF16_FLASH2, f.name)
    }
    changed = {part.split("=")[0] for text in AUDITED.values() for part in text.split(",")}
    assert differ - changed == {"name", "base", "grad_value_from", "divisor_from"}


@pytest.mark.thorough(keep=2)
@pytest.mark.usefixtures("no_lengths")
@pytest.mark.parametrize("name", AUDITED)
def test_the_audit_notices_a_missing_ingredient(name):
    recipe = recipe_named(f"BF16_HALFULP[{AUDITED[name]}]")

    def attention(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False):
        options = {
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "recipe": recipe,
        }
        return emulate(query, key, value, attn_mask, return_lse=True, **options)

    assert audit(attention, shapes=(SMALL,), explain=False).verdict != "sound"


# Two keys alone carry each row, one in the first tile and one in the last, and all the others weigh
# exactly nothing. Then dS is two numbers that cancel, their rounding to bf16 cancels too, and what
# is left in a row of dS is where the backward pass disagrees with the forward pass about the
# weights.


@functools.cache
def two_live_keys():
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 8, 256, 32, generator=generator) for _ in range(4))
    q[..., 1] = 4
    k[..., 1] = -200 * math.sqrt(32) / 4
    k[..., [5, 251], 1] = 0
    k[..., 0] = 32  # every key's: dQ reads the sum of a row of dS there
    return [x.bfloat16() for x in (q, k, v, do)]


@functools.cache
def row_sums(name):
    """Root mean square of Σ_j dS_ij, 0 in exact arithmetic; `name` is a recipe's, or a backend of
    halfulp.attention.
    """
    *operands, grad_out = two_live_keys()
    leaves = [x.clone().requires_grad_() for x in operands]
    out = (
        halfulp.attention(*leaves, backend=name)
        if name == "torch"
        else emulate(*leaves, recipe=recipe_named(name))
    )
    grad_query = torch.autograd.grad(out, leaves[0], grad_out)[0]
    return float(grad_query[..., 0].double().square().mean().sqrt()) * math.sqrt(32) / 32


@pytest.mark.parametrize("name", BACK_TO_STOCK)
def test_every_ingredient_is_needed_to_agree_on_the_weights(name):
    """Measured: 3.0e-4 whole, 3.4e-3 to 7.8e-3 with one ingredient taken back to stock, 8.1e-3
    stock.
    """
    whole = row_sums("torch")
    assert whole < row_sums("BF16_FLASH2") / 20
    assert row_sums(f"BF16_HALFULP[{BACK_TO_STOCK[name]}]") > 8 * whole


def sum_of_grad_value(name):
    """‖Σ_j dV_j − Σ_i dO_i‖ / ‖dO‖ in unit roundoffs, on diffuse rows of 256 keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 16, 256, 32, generator=generator) for _ in range(4))
    leaves = [x.bfloat16().requires_grad_() for x in (q * 0.1, k, v)]
    do = do.bfloat16()
    grad_value = torch.autograd.grad(emulate(*leaves, recipe=recipe_named(name)), leaves[2], do)[0]
    return (
        float((grad_value.double().sum(2) - do.double().sum(2)).norm() / do.double().norm()) * 2**8
    )


def test_weights_of_grad_value_are_needed_where_rows_are_diffuse():
    """Measured: 0.038 as stock, 0.24 with the weights of dS; the audit allows 0.4, which rounding
    dO would make.
    """
    assert sum_of_grad_value("BF16_HALFULP") < 1.05 * sum_of_grad_value("BF16_FLASH2")
    assert sum_of_grad_value("BF16_HALFULP[grad_value_from=probabilities]") > 5 * sum_of_grad_value(
        "BF16_FLASH2"
    )


def lean(probe, tensor, name):
    """Mean error of a gradient in its own direction, in unit roundoffs of it, on one of the audit's
    probes.
    """
    shapes = {
        "sink": Shape(batch=1, heads=16, n_query=512, n_key=512, head_dim=32),
        "ties_many": Shape(),
    }
    x = Case(probe, shapes[probe]).inputs()
    leaves = [t.clone().requires_grad_() for t in (x.query, x.key, x.value)]
    emulate(*leaves, recipe=recipe_named(name), **x.options()).backward(x.grad_out)
    found = leaves[["query", "key"].index(tensor)].grad.double()
    true = getattr(golden(x.query, x.key, x.value, x.grad_out, **x.options()), f"grad_{tensor}")
    return float(((found - true) * true.sign()).sum() / true.abs().sum()) * 2**8


def test_what_a_large_weights_rounding_does_to_the_rest_of_its_row():
    """An integer maximum rounds it, alike in rows that share it: each l that dS may be over leans
    somewhere.

    Measured on `sink`, `ties_many`: over l̂ −0.72, −0.01; over the l of lse +0.02, +0.86; balanced
    −0.03, −0.01; stock +0.02, −0.01.
    """
    over_row_sum, over_lse = (f"BF16_HALFULP[divisor_from={l}]" for l in ("row_sum", "lse"))
    assert 0.4 < abs(lean("sink", "query", over_row_sum)) < 1
    assert abs(lean("ties_many", "key", over_row_sum)) < 0.15
    assert abs(lean("sink", "query", over_lse)) < 0.15
    assert 0.4 < abs(lean("ties_many", "key", over_lse)) < 1.5
    assert abs(lean("sink", "query", "BF16_HALFULP")) < 0.15
    assert abs(lean("ties_many", "key", "BF16_HALFULP")) < 0.15
