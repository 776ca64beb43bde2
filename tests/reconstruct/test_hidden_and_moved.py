"""What hides pairs, and numbers that are right and stand elsewhere: told apart from what looks the
same on one call.
"""

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from halfulp.algorithms.problem import LOG2_E
from halfulp.calls import EVERYTHING, Result, Sees
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct import reconstruct
from halfulp.reconstruct.call_causes import of_calls
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.elements_read import by_number
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.exponential_read import exponential_of
from halfulp.reconstruct.first_said import _with_silent_rows
from halfulp.reconstruct.floor_read import OVERFLOW, floor_of, leaks
from halfulp.reconstruct.keys_read import in_their_place
from halfulp.reconstruct.naming import Named
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.places import Place, _row_sums
from halfulp.reconstruct.regions import Region
from halfulp.reconstruct.suggested import exchanged
from halfulp.reconstruct.twists import masks
from halfulp.reconstruct.upheld import holds
from halfulp.reconstruct.weights_read import compared, leaves_out
from tests.reconstruct.exact_kernel import right
from tests.reconstruct.test_first_said import known_to_be

TRIALS = {t.name: t for rare in (False, True) for t in panel(torch.bfloat16, rarer=rare)}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weighed(trial, weights):
    value = trial.call.value.double().repeat_interleave(trial.call.groups, 1)
    return Result((weights @ value).to(trial.call.query.dtype))


# --- numbers in place of others


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda k: k.bfloat16().view(torch.int16).view(torch.float16).double(), True),
        (lambda k: k.sign() * k.abs().log2().round().exp2(), True),
        (lambda k: k.roll(1, 0), False),
        (lambda k: k.flip(-1), False),
    ],
)
def test_bits_of_another_format_are_a_function_of_the_numbers(change, told):
    own = normal(24, 64).bfloat16().double()
    assert by_number(change(own), own) is told


def test_numbers_that_are_all_different_tell_no_function():
    own = normal(24, 64).double()
    assert not by_number(own.square(), own)


@pytest.mark.parametrize("dims", [(0, *some) for some in permutations((1, 2, 3))][1:])
def test_a_result_stored_in_any_order_of_dimensions_is_recognized(dims):
    exact = normal(2, 3, 40, 24).double()
    read_as = exact.permute(dims).reshape(exact.shape)
    seen_as = exact.reshape([exact.shape[i] for i in dims]).permute(
        [dims.index(i) for i in range(4)]
    )
    for got in (read_as, seen_as):
        assert exchanged(Observed.of(got, exact))[1] == "layout"
    assert exchanged(Observed.of(exact + 0.01 * normal(2, 3, 40, 24, seed=1), exact)) == ("", "")
    assert exchanged(Observed.of(normal(2, 3, 40, 24, seed=1).double(), exact)) == ("", "")


# --- weights


def test_a_read_of_weights_that_are_all_lost_says_so():
    exact = weights_of(TRIALS["plain"].call, scores_of(TRIALS["plain"].call))
    nothing = torch.zeros_like(exact)
    assert isinstance(in_their_place(nothing, exact, exact > 0), str)


@pytest.mark.parametrize("times", [1.0, 256.0, 0.3])
def test_weights_in_fewer_bits_are_told_whatever_they_are_multiplied_by(times):
    def run(trial):
        p = scores_of(trial.call)
        p = (p - p.amax(-1, keepdim=True)).exp() * times
        # of as many bits, and never below the normal ones
        fraction, exponent = torch.frexp(p)
        p = torch.ldexp((fraction * 16).round() / 16, exponent)
        return weighed(trial, p / p.sum(-1, keepdim=True))

    read = exponential_of(run, torch.bfloat16)
    assert read is not None
    assert read.cause == ("weights" if math.log2(times).is_integer() else "exponential"), read.text


def test_queries_that_see_themselves_alone_lack_keys_and_are_not_left_out():
    trial = TRIALS["causal"]
    exact = weights_of(trial.call, scores_of(trial.call))
    own = torch.eye(192).double().expand_as(exact)
    later = (torch.arange(192) >= 96)[:, None]
    read = compared(trial, torch.where(later, own, exact))
    assert (read.cause, "beside others that do" in read.text) == ("key-tail", True), read.text
    gone = compared(trial, torch.where(later, 0.0, exact))
    assert gone.cause == "query-tail", gone.text


@pytest.mark.parametrize("width", [16, 64])
def test_chunks_are_a_window_and_tiles_that_are_lost_are_not(width):
    trial = TRIALS["plain"]
    exact = weights_of(trial.call, scores_of(trial.call))
    of = torch.arange(192) // width
    same = of[:, None] == of
    kept = exact * same
    assert compared(trial, kept / kept.sum(-1, keepdim=True)).cause == "window"
    lost = exact * ~((of[:, None] == 0) & (of == 1))
    assert compared(trial, lost / lost.sum(-1, keepdim=True)).cause != "window"


def unmasked(call):
    added = call.sees.added
    return scores_of(replace(call, sees=EVERYTHING)) + (0.0 if added is None else added.double())


@pytest.mark.parametrize("of_others", [True, False])
def test_hidden_pairs_that_weigh_as_other_sequences_keys_are_other_data(of_others):
    trial = TRIALS["sequences_causal"]
    every = unmasked(trial.call)
    causal = torch.ones(48, 48).tril().bool()
    scores = torch.where(causal, every, every.roll(1, 0)) if of_others else every
    shown = torch.where((torch.arange(3) > 0).view(-1, 1, 1, 1), scores, scores_of(trial.call))
    read = compared(trial, shown.softmax(-1))
    assert read.cause == ("other-data" if of_others else "causal-mask"), read.text


@pytest.mark.parametrize(("every_third", "cause"), [(True, "mask"), (False, "key-tail")])
def test_keys_here_and_there_are_a_masks(every_third, cause):
    trial = TRIALS["masked_ragged"]
    exact = weights_of(trial.call, scores_of(trial.call))
    j = torch.arange(93)
    kept = exact * ~((j % 3 == 1) if every_third else (j >= 80))
    assert compared(trial, kept / kept.sum(-1, keepdim=True).clamp_min(1e-9)).cause == cause


# --- what stands for −∞


def hidden_by(number):
    def run(trial):
        every, seen = unmasked(trial.call), scores_of(trial.call).isfinite()
        scores = torch.where(seen, every, every + number).float()
        return weighed(trial, scores.softmax(-1).double())

    return run


def test_a_finite_number_leaks_where_hidden_scores_lie_so_far_above():
    for number in (-100.0, -1e4):
        run = hidden_by(number)
        assert leaks(run, torch.bfloat16, 2 * abs(number))
        assert not leaks(run, torch.bfloat16, abs(number) / 2)
    assert not leaks(right, torch.bfloat16, 120_000.0)


def silent_rows_see(trial):
    """Attention whose rows that are to see nothing see every key."""
    seen = scores_of(trial.call).isfinite()
    seen = seen | ~seen.any(-1, keepdim=True)
    return weighed(trial, unmasked(trial.call).masked_fill(~seen, -math.inf).softmax(-1))


@pytest.mark.parametrize(
    ("run", "cause"), [(silent_rows_see, "mask"), (hidden_by(-100.0), "mask-finite")]
)
def test_rows_that_see_everything_are_told_from_a_number_that_hides_too_little(run, cause):
    def kernel(query, key, value, *, is_causal, scale, attn_mask=None):
        call = replace(
            TRIALS["plain"].call,
            query=query,
            key=key,
            value=value,
            scale=scale,
            sees=Sees(causal=is_causal, mask=attn_mask),
        )
        return run(replace(TRIALS["plain"], call=call)).out

    found = reconstruct(kernel, dtype="bfloat16")
    assert found.causes[0].cause.key == cause, found.sentence


@pytest.mark.parametrize(("trial", "cause"), [("masked", "mask"), ("deep", "mask-finite")])
def test_what_hides_the_future_is_no_masks(trial, cause):
    """Rows that see nothing see everything under masks; a number was found to hide the future."""
    start = Model.of(BF16_FLASH2)
    number = next(t for t in masks() if t.number == -100.0)
    model = replace(start, forward=replace(start.forward, twists=(number,)))
    named = Named(CAUSES["mask-finite"], "hidden pairs get -100", 80.0, "out", trial, 1.0,
                  function=True, twists=(number.key,))  # fmt: skip
    found = replace(known_to_be(()), model=model, causes=(named,))
    asked = Emulator({TRIALS[trial]: silent_rows_see(TRIALS[trial])}, silent_rows_see)
    assert _with_silent_rows(found, asked).causes[0].cause.key == cause
    refused = Emulator({TRIALS[trial]: silent_rows_see(TRIALS[trial])}, lambda _: None)
    assert _with_silent_rows(found, refused).causes[0].cause.key == "mask-finite"


def zeros_below(number, *, before_the_scale):
    """Rows are 0 whose maximum, with or without its scale, lies below a number."""

    def run(trial):
        made, top = right(trial), scores_of(trial.call).amax(-1, keepdim=True)
        top = top / trial.call.scale if before_the_scale else top
        return replace(made, out=made.out.masked_fill(top < number, 0.0), grad_value=None)

    return run


@pytest.mark.parametrize(
    ("number", "before", "cause"),
    [
        (-5e4, True, "mask-finite"),
        (-5e4, False, "mask-finite"),
        (-65504 / LOG2_E, True, "scores"),  # float16's end, in base 2
    ],
)
def test_a_number_before_the_scale_is_told_from_the_end_of_float16(number, before, cause):
    found = floor_of(zeros_below(number, before_the_scale=before), torch.bfloat16)
    assert found is not None
    assert found.cause == cause, found.text
    assert (found.text == OVERFLOW) == (cause == "scores")


def test_bits_read_as_another_formats_are_an_operand():
    def kernel(query, key, value, *, is_causal, scale):
        other = key.detach().contiguous().view(torch.float16)
        return torch.nn.functional.scaled_dot_product_attention(
            query.float(), other.float(), value.float(), is_causal=is_causal, scale=scale
        ).to(query.dtype)

    found = reconstruct(kernel, dtype="bfloat16")
    told = [n.cause.key for n in found.causes] + [p.cause for p in found.places]
    assert told[0] == "operand", found.sentence


# --- which of two readings says more


def test_keys_that_no_row_has_were_not_chosen_by_other_rows():
    trial = TRIALS["plain"]

    def first_chunk(asked):
        read = torch.arange(192) % 64
        parts = {name: getattr(asked.call, name)[:, :, read] for name in ("query", "key", "value")}
        return right(replace(asked, call=replace(asked.call, **parts)))

    def chosen(asked):
        """Of each row the half of the keys that its neighbor weighs most."""
        scores = scores_of(asked.call)
        most = scores.roll(1, -2).topk(96).indices
        seen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, most, True)
        return weighed(asked, scores.masked_fill(~seen, -math.inf).softmax(-1))

    assert leaves_out(chosen, trial)
    assert not leaves_out(first_chunk, trial)


@pytest.mark.parametrize(
    ("change", "sums"),
    [
        (lambda o: o * (1 + torch.arange(192.0) / 64)[:, None], True),  # of its own in each row
        (lambda o: o * torch.tensor([0.5, 3.0]).view(1, 2, 1, 1), False),  # a head's, as scales are
        (lambda o: o.roll(1, 1), False),
    ],
)
def test_rows_with_a_factor_of_their_own_are_row_sums(change, sums):
    exact = normal(1, 2, 192, 64).double()
    assert _row_sums(Observed.of(change(exact), exact)) == sums


@pytest.mark.parametrize(("harm", "kept"), [(600.0, True), (4.0, False)])
def test_a_little_that_is_wrong_in_o_makes_nothing_gross_of_a_gradient(harm, kept):
    cause = Named(CAUSES["operand"], "", harm, "grad_key", "plain", 1.0, function=True)
    little = Place("out", "wide", "", "weights", 0.5, 1.9, was_read=True)
    assert holds(cause, [little], known=True) == kept
    much = replace(little, times=600.0)
    assert not holds(cause, [much], known=True)


@pytest.mark.parametrize(
    ("region", "told"), [("mask", "mask"), ("ragged", "tiles-skipped"), ("causal-mask", None)]
)
def test_keys_left_out_under_masks_alone_are_the_masks(region, told):
    cause = Named(CAUSES["tiles-skipped"], "keys are left out", 900.0, "out", "masked", 1.0,
                  function=True)  # fmt: skip
    calls = Region(f"in calls {region} alone", {}, cause=region)
    made = of_calls(cause, calls, Emulator({TRIALS["masked"]: right(TRIALS["masked"])}, right))
    assert made.cause.key == (told or "tiles-skipped")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_operands_beside_large_ones_are_held_by_every_format(dtype):
    trials = {t.name: t for t in panel(dtype, rarer=True)}
    for name in ("small_queries", "small_keys"):
        assert (name in trials) == (dtype != torch.float16)
        if name in trials:
            call = trials[name].call
            scores = scores_of(call)
            assert 1 < float(scores.std()) < 10  # softmax has something to tell apart
            for x in (call.query, call.key):
                assert bool((x.double() * call.scale).half().isfinite().all())
            small = call.query if name == "small_queries" else call.key
            lost = (small.half().double() - small.double()).norm() / small.double().norm()
            assert lost > 2.0**-9 > 0.0
            made = right(trials[name])
            assert all(bool(x.half().isfinite().all()) for x in (made.grad_query, made.grad_key))
