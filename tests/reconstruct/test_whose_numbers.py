"""What is told of numbers that are counted once too often, or made of others: the last key, dP,
rows of one gradient; and of sinks that no format of 16 bits holds.
"""

from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct import call_options, upheld
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.dataflow import grad_scores
from halfulp.reconstruct.emulating import Emulator, Model, Way
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.naming import Named
from halfulp.reconstruct.others_read import of_no_grad_out
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.part_ratios import in_turn
from halfulp.reconstruct.places import Place, unexplained
from halfulp.reconstruct.weights_read import compared
from tests.reconstruct.exact_kernel import right

TRIALS = {t.name: t for rare in (False, True) for t in panel(torch.bfloat16, rarer=rare)}
STOCK = Model.of(BF16_FLASH2)


@pytest.mark.parametrize(("many", "cause"), [(1, "padding"), (16, "key-tail")])
def test_a_last_key_that_counts_twice_has_a_copy_behind_it(many, cause):
    call = TRIALS["plain"].call
    twice = torch.arange(192) >= 192 - many
    read = compared(TRIALS["plain"], weights_of(call, scores_of(call) + twice * 2.0**0.5 * 0.4901))
    assert read.cause == cause, read.text


@pytest.mark.parametrize("name", ["sinks", "sinks_grouped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_of_the_panel_are_numbers_that_16_bits_do_not_hold(name, dtype):
    sinks = TRIALS[name].call.sinks
    assert bool((sinks.to(dtype).float() != sinks).all())


def test_sinks_that_lose_bits_are_a_matter_of_sinks():
    trial = TRIALS["sinks"]

    def run(asked):
        sinks = asked.call.sinks
        coarse = None if sinks is None else sinks.bfloat16().float()
        return right(replace(asked, call=replace(asked.call, sinks=coarse)))

    (low,) = (t for t in call_options.asked() if t.key == "sinks-bf16")
    emulator = Emulator({trial: run(trial)}, run)
    way = Way(BF16_FLASH2, (low,))
    with_it, without = (emulator.fits(m, frozenset({"lse"})) for m in (
        Model(way, (way,) * 3), STOCK))  # fmt: skip
    (own,), (usual,) = with_it.values(), without.values()
    assert low.cause == "sinks"
    assert float(own.residual.sum()) < 0.05 * float(usual.residual.sum())


@pytest.mark.parametrize(
    ("form", "cause"), [("square", "no-delta"), ("ones", "other-data"), ("", "")]
)
def test_a_gradient_that_grows_as_the_square_of_do_is_not_one_that_lacks_it(form, cause):
    trial = TRIALS["scaled"]

    def run(asked):
        do = torch.ones_like(asked.grad_out) if form == "ones" else asked.grad_out
        made = right(replace(asked, grad_out=do))
        if form != "square":
            return made
        call, do = asked.call, asked.grad_out.double()
        p, dp = weights_of(call, scores_of(call)), do @ call.value.double().mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * dp * call.scale
        return replace(made, grad_query=(ds @ call.key.double()).bfloat16())

    exact = golden(trial.call, trial.grad_out).grad_query
    observed = Observed.of(run(trial).grad_query, exact)
    assert of_no_grad_out(run, trial, "grad_query", observed)[1] == cause


@pytest.mark.parametrize(("form", "cause"), [("others", "other-data"), ("lost", "grad-tail")])
def test_rows_of_one_gradient_made_of_other_numbers_leave_nothing_out(form, cause):
    """dQ of the first 64 queries: of dK in K's place, or without the last 64 keys."""
    trial = TRIALS["plain"]

    def run(asked):
        call, do = asked.call, asked.grad_out.double()
        p, dp = weights_of(call, scores_of(call)), do @ call.value.double().mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * call.scale
        made = right(asked)
        other = made.grad_key.double() if form == "others" else call.key.double().clone()
        if form == "lost":
            other[:, :, -64:] = 0
        dq = ds @ call.key.double()
        dq[:, :, :64] = (ds @ other)[:, :, :64]
        return replace(made, grad_query=dq.bfloat16())

    read = grad_scores(run, trial, "grad_query")
    assert read is not None
    assert read.cause == cause, read.text


@pytest.mark.parametrize(("name", "cause"), [("masked", "backward-mask"), ("biased", "mask")])
def test_pairs_of_a_boolean_mask_that_the_backward_pass_sees_are_its_own(name, cause):
    """The last key has weight in dV wherever a mask, or a bias below −2, hides it."""

    def run(asked):
        call, mask = asked.call, asked.call.sees.mask
        if mask is None:
            return right(asked)
        p = weights_of(call, scores_of(call)).clone()
        seen = mask if mask.dtype == torch.bool else mask > -2
        p[..., -1] += (~seen)[..., -1].expand(p.shape[:-1]) * 0.3
        return right(asked, grad_value=(p.mT @ asked.grad_out.double()).bfloat16())

    asked = {TRIALS[n]: run(TRIALS[n]) for n in (name, "plain", "scaled", "causal", "ragged")}
    (place,) = unexplained(Emulator(asked, run), STOCK, 0.3)
    assert place.cause == cause, place.text


@pytest.mark.parametrize(("trial", "kept"), [("small", True), ("plain", False)])
def test_what_small_values_show_does_not_stand_for_what_others_do(trial, kept):
    low = Named(CAUSES["probabilities"], "P in dV is 0 where small", 9.0, "grad_value", "long",
                0.95, function=True)  # fmt: skip
    elsewhere = Place("grad_value", trial, "off after its sum", "grad-stored", 1.0, 10.0,
                      was_read=True)  # fmt: skip
    assert upheld.holds(low, [elsewhere], known=False) == kept


@pytest.mark.parametrize(("kind", "parts"), [("in turn", 3), ("each", 0), ("halves", 0)])
def test_blocks_that_parts_take_in_turn_have_one_factor(kind, parts):
    generator = torch.Generator().manual_seed(0)
    each = torch.randn(1, 2, 40, 6, generator=generator, dtype=torch.float64) * 1e-3
    factors = {"in turn": each[..., [0, 1, 2, 0, 1, 2]], "each": each,
               "halves": each[..., [0, 0, 0, 1, 1, 1]]}[kind]  # fmt: skip
    noise = torch.randn(factors.shape, generator=generator, dtype=torch.float64) * 1e-4
    assert in_turn(factors + noise) == parts


def test_what_follows_do_in_the_place_of_p_is_other_data():
    trial = TRIALS["scaled"]

    def run(asked):
        call, do = asked.call, asked.grad_out.double()
        p, dp = weights_of(call, scores_of(call)), do @ call.value.double().mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        return right(asked, grad_value=(ds.mT @ do).bfloat16())

    observed = Observed.of(run(trial).grad_value, golden(trial.call, trial.grad_out).grad_value)
    told, cause = of_no_grad_out(run, trial, "grad_value", observed)
    assert (cause, "in the place of P" in told) == ("other-data", True)
