"""Whose weights stand where none should, or twice: parts of the keys that overlap, another's
numbers beside what is 0, and what a kernel that reshapes its values shows of them.
"""

from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.calls import Result
from halfulp.formats import BF16, OCP_E4M3, round_to
from halfulp.recipes import BF16_FLASH2, FP16_FLASH2
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.dataflow import grad_scores
from halfulp.reconstruct.emulating import TENSORS, Emulator, Model, Way
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.heads import sums
from halfulp.reconstruct.moved_read import misplaced
from halfulp.reconstruct.naming import Named, differences
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.places import Place, unexplained
from halfulp.reconstruct.regions import Region, restricted
from halfulp.reconstruct.result_read import result_read
from halfulp.reconstruct.suggested import vanished
from halfulp.reconstruct.sums_read import one_term
from halfulp.reconstruct.twists import scales
from halfulp.reconstruct.upheld import upheld
from halfulp.reconstruct.weight_ratios import Read
from halfulp.reconstruct.weights_read import compared
from tests.reconstruct.exact_kernel import right

TRIALS = {t.name: t for rare in (False, True) for t in panel(torch.bfloat16, rarer=rare)}
STOCK = Model.of(BF16_FLASH2)


@pytest.mark.parametrize(("twice", "cause"), [(True, "split-merge"), (False, "causal-mask")])
def test_tiles_that_count_twice_beside_lost_ones_are_parts_that_overlap(twice, cause):
    """Every block of 32 queries loses the tile before its own, and has its first one twice."""
    call = TRIALS["causal"].call
    col = torch.arange(192).div(32, rounding_mode="floor").expand(192, 192)
    row = col.T
    many = torch.ones(192, 192, dtype=torch.float64)
    many[(row >= 2) & (col == row - 1)] = 0
    if twice:
        many[(row >= 2) & (col == 0)] = 2
    read = compared(TRIALS["causal"], weights_of(call, scores_of(call) + many.log()))
    assert read.cause == cause, read.text
    assert ("count twice" in read.text) == twice


@pytest.mark.parametrize("whose", ["others", "own"])
def test_hidden_pairs_that_weigh_as_other_keys_do_are_no_matter_of_the_mask(whose):
    call = TRIALS["causal"].call
    exact = weights_of(call, scores_of(call))
    every = weights_of(call, scores_of(replace(call, sees=replace(call.sees, causal=False))))
    read = exact.clone()
    # queries 0-63 see keys 64-127: with what keys 0-63 weigh, or with weights of their own
    there = exact[:, :, :64, :64] if whose == "others" else every[:, :, :64, 64:128]
    read[:, :, :64, 64:128] = there
    told = compared(TRIALS["causal"], read, backward=True)
    assert told.cause == ("other-data" if whose == "others" else "backward-mask"), told.text


def packed_as_if_padded(x):
    """Rows written at multiples of 64, and read one sequence after the other."""
    b, n = x.shape[0], x.shape[2]
    flat = torch.nn.functional.pad(x, (0, 0, 0, -n % 64)).transpose(0, 1).flatten(1, 2)
    return flat[:, : b * n].unflatten(1, (b, n)).transpose(0, 1)


def test_rows_that_are_0_beside_rows_that_are_moved_are_read_elsewhere():
    def run(asked):
        return right(asked, out=packed_as_if_padded(right(asked).out))

    asked = {TRIALS[name]: run(TRIALS[name]) for name in ("masked", "plain", "scaled")}
    places = unexplained(Emulator(asked, run), STOCK, 0.3)
    assert [(p.tensor, p.cause) for p in places] == [("out", "layout")]
    assert "rows are 0; numbers stand in another's place" in places[0].text


@pytest.mark.parametrize(("cause", "kept"), [("layout", 0), ("non-finite", 0), ("out", 1)])
def test_what_is_0_in_a_call_says_less_than_what_is_moved_in_others(cause, kept):
    trials = {TRIALS[n]: right(TRIALS[n]) for n in ("decode", "plain")}
    lost = Named(CAUSES["unwritten"], "never written", 99.0, "out", "decode", 1.0)
    elsewhere = Place("out", "plain", "moved", cause, 1.0, 9.0, was_read=cause != "out")
    left = upheld([lost], [elsewhere], Emulator(trials, right), STOCK, STOCK, BF16_FLASH2,
                    "bfloat16", None)  # fmt: skip
    assert len(left) == kept


def test_a_kernel_that_is_asked_of_some_heads_is_not_asked_of_more_sequences():
    trial = TRIALS["masked"]
    half = restricted(
        Emulator({trial: right(trial)}, right), Region("", {"masked": ((1, 0), (1, 2))}, "")
    )
    (own,) = half.trials.values()
    assert half.run(own) is not None
    call = own.call
    two = replace(call, query=call.query.repeat(2, 1, 1, 1), key=call.key.repeat(2, 1, 1, 1),
                  value=call.value.repeat(2, 1, 1, 1))  # fmt: skip
    assert half.run(replace(own, call=two, grad_out=own.grad_out.repeat(2, 1, 1, 1))) is None


def test_values_that_are_coarse_are_not_told_as_a_division():
    """One-hot values in blocks with a scale are all off by one factor, and others are not."""
    trial = TRIALS["plain"]

    def coarse(x):
        n = x.shape[2]
        blocks = torch.nn.functional.pad(x.double(), (0, 0, 0, -n % 16)).unflatten(2, (-1, 16))
        top = blocks.abs().amax(3, keepdim=True).clamp_min(1e-30)
        return ((blocks / top * 7).round() / 7 * top * 0.97).flatten(2, 3)[:, :, :n]

    def run(asked):
        call = asked.call
        p = weights_of(call, scores_of(call))
        value = coarse(call.value).repeat_interleave(call.groups, 1)
        return right(asked, out=(p @ value).bfloat16())

    read = result_read(Emulator({trial: run(trial)}, run), STOCK, trial, "out")
    assert read is not None
    assert read.cause == "operand", read.text


@pytest.mark.parametrize(("apart", "cause"), [(True, "reciprocal"), (False, "row-sum")])
def test_a_coarse_row_sum_that_lse_does_not_have_is_its_inverse(apart, cause):
    model = replace(STOCK, forward=Way(BF16_FLASH2.with_(row_sum=BF16)), apart=apart)
    assert [d.cause for d in differences(model, BF16_FLASH2)] == [cause]


@pytest.mark.parametrize("low", ["operands", "weights"])
def test_weights_of_dv_that_are_off_by_their_scores_are_told_from_rounded_ones(low):
    """Q and K in codes of eight bits by row, or P in E4M3, in the backward pass alone."""
    trial = TRIALS["scaled"]

    def codes(x):
        step = x.double().abs().amax(-1, keepdim=True) / 127
        return (x.double() / step.clamp_min(1e-30)).round() * step

    def run(asked):
        call, do = asked.call, asked.grad_out.double()
        other = replace(call, query=codes(call.query), key=codes(call.key))
        p = weights_of(
            *((other, scores_of(other)) if low == "operands" else (call, scores_of(call)))
        )
        p = p if low == "operands" else round_to(p.float(), OCP_E4M3).double()
        return right(asked, grad_value=(p.mT @ do).bfloat16())

    read = result_read(Emulator({trial: run(trial)}, run), STOCK, trial, "grad_value")
    assert read is not None
    assert read.cause == ("backward-scores" if low == "operands" else "probabilities"), read.text


def test_keys_that_lose_bits_beside_their_mean_are_another_operand():
    """What their rounding makes of a weight is no more than O's own rounding does."""
    trial = TRIALS["plain"]

    def run(asked):
        key = asked.call.key
        other = (key - key.float().mean(2, keepdim=True).bfloat16()).bfloat16()
        call = replace(asked.call, key=other)  # which has the same weights, but for its bits
        p = weights_of(call, scores_of(call)).bfloat16().double()
        return right(asked, out=(p @ call.value.double()).bfloat16())

    read = result_read(Emulator({trial: run(trial)}, run), STOCK, trial, "out")
    assert read is not None
    assert read.cause == "operand", read.text


def test_an_operand_by_one_scale_of_all_is_found_though_zeros_have_none():
    """dO in E4M3 by its largest number: of dO that is 0 the scale is no number."""
    trial = TRIALS["plain"]

    def run(asked):
        scale = 448 / asked.grad_out.double().abs().amax()
        low = round_to((asked.grad_out.double() * scale).float(), OCP_E4M3).double() / scale
        exact = golden(asked.call, low)
        return right(asked, grad_value=exact.grad_value.bfloat16())

    assert one_term(run, trial, "grad_value") == "operand"


@pytest.mark.parametrize(
    ("moved", "cause"), [("others", "other-data"), ("own", "layout"), ("", "")]
)
def test_numbers_of_another_gradient_are_told_from_moved_ones(moved, cause):
    """Three gradients that are views of one tensor, each stored as if it had its own."""
    exact = torch.randn(
        3, 1, 2, 64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    memory = torch.zeros(1, 2, 3 * 64, 32, dtype=torch.float64)
    for first, x in enumerate(exact):
        memory[:, :, first : first + 64] = x if moved == "others" else exact[0]
    read = memory[:, :, ::3] if moved else exact[0].bfloat16().double()
    told = misplaced(Observed.of(read, exact[0]), {"dK": exact[1], "dV": exact[2]})
    assert told[1] == cause, told
    assert ("dV" in told[0]) == (moved == "others")


@pytest.mark.parametrize(("cut", "cause"), [(True, "grad-scores"), (False, "backward-weights")])
def test_a_gradient_of_scores_in_few_bits_is_its_own_whatever_dv_says(cut, cause):
    """A kernel in float16 whose backward pass has dS, or P, in bf16."""
    trial = {t.name: t for t in panel(torch.float16)}["plain"]

    def run(asked):
        call, do = asked.call, asked.grad_out.double()
        p = weights_of(call, scores_of(call)).bfloat16().double()
        dp = do @ call.value.double().mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        ds = ds.bfloat16().double() if cut else ds
        dq, dk = (x * call.scale for x in (ds @ call.key.double(), ds.mT @ call.query.double()))
        made = {"grad_query": dq, "grad_key": dk, "grad_value": p.mT @ do}
        exact = golden(call, asked.grad_out)
        return Result(exact.out.half(), exact.lse.float(), *(x.half() for x in made.values()))

    emulator = Emulator({trial: run(trial)}, run)
    said = [Read("the weights are off by 0.2 %, whatever the score", "probabilities")]
    stock = Model.of(FP16_FLASH2)
    read = result_read(emulator, stock, trial, "grad_query", said)
    assert read is not None
    assert read.cause == cause, read.text


def test_rows_far_below_a_sum_that_has_more_do_not_lack_their_maximum():
    """A key of zeros behind the others, which every query sees."""
    more = next(iter(sums()))
    way = Way(BF16_FLASH2, (more,))
    model = Model(way, (way,) * 3)

    def run(asked):
        made = {n: Emulator({}).made(asked, model, n) for n in TENSORS}
        made = {n: x if n == "lse" else x.bfloat16() for n, x in made.items()}
        # in float16 what is left of a weight of exp(−40) is 0
        return Result(**(made | {"out": made["out"].half().bfloat16()}))

    emulator = Emulator({TRIALS[n]: run(TRIALS[n]) for n in ("sharp", "plain", "causal")}, run)
    assert vanished(emulator)
    assert not vanished(emulator, {"sharp"})
    named = Named(CAUSES["unnormalized"], more.text, 9.0, "out", "sharp", 1.0, function=True,
                  twists=(more.key,))  # fmt: skip
    left = upheld([named], [], emulator, STOCK, model, BF16_FLASH2, "bfloat16", None)
    assert [n.cause.key for n in left] == ["unnormalized"]


def test_o_that_is_scaled_in_place_of_the_scores_is_a_matter_of_the_scale():
    """softmax(Q Kᵀ) scale V, and the gradients of that, by autograd."""

    def run(asked):
        call = asked.call
        q, k, v = (x.double().requires_grad_() for x in (call.query, call.key, call.value))
        out = (q @ k.mT).softmax(-1) * call.scale @ v
        grads = torch.autograd.grad(out, (q, k, v), asked.grad_out.double())
        return Result(*(x.detach().bfloat16() for x in (out, out[..., 0])),
                      *(x.bfloat16() for x in grads))  # fmt: skip

    trial = TRIALS["plain"]
    emulator = Emulator({trial: run(trial)}, run)
    (after,) = (twist for twist in scales() if twist.key == "scale-after")
    way = Way(BF16_FLASH2.with_(delta_from="probabilities"), (after,))
    names = frozenset(TENSORS) - {"lse"}
    fits = emulator.fits(Model(way, (way,) * 3), names)
    assert len(fits) == len(names)
    assert max(fit.left for fit in fits.values()) < 0.05, {k: f.left for k, f in fits.items()}


@pytest.mark.parametrize(("low", "cause"), [("delta", "delta"), ("sum", "grad-accumulator")])
def test_a_coarse_delta_is_told_from_the_sums_of_its_gradients(low, cause):
    """Both err by about what rounding makes, the one by rows, the other as its sums run."""
    trial = TRIALS["scaled"]

    def summed(left, right_):
        total = torch.zeros(*left.shape[:-1], right_.shape[-1], dtype=torch.float64)
        for first in range(0, left.shape[-1], 8):
            some = slice(first, first + 8)
            total = total + left[..., some] @ right_[..., some, :]
            total = total.bfloat16().double() if low == "sum" else total
        return total

    def run(asked):
        call, do = asked.call, asked.grad_out.double()
        p = weights_of(call, scores_of(call))
        delta = (do * (p @ call.value.double())).sum(-1, keepdim=True)
        coarse = round_to(delta.float(), OCP_E4M3).double() if low == "delta" else delta
        ds = p * (do @ call.value.double().mT - coarse) * call.scale
        return right(asked, grad_query=summed(ds, call.key.double()).bfloat16(),
                     grad_key=summed(ds.mT, call.query.double()).bfloat16())  # fmt: skip

    read = grad_scores(run, trial, "grad_query")
    assert read is not None
    assert read.cause == cause, read.text
