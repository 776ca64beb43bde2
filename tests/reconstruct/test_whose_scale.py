"""Scales that are another number's, codes that share one, masks behind the softmax, and other masks
in the backward pass alone.
"""

import math
from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.calls import Result
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct import panel, suggested
from halfulp.reconstruct.emulating import GRADIENTS, Emulator, Model
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.naming import named
from halfulp.reconstruct.non_finite import not_finite
from halfulp.reconstruct.sums_read import one_term
from halfulp.reconstruct.twists import masks
from tests.reconstruct.exact_kernel import right

TRIALS = {t.name: t for rare in (False, True) for t in panel.panel(torch.bfloat16, rarer=rare)}


def scaled(scale, names=("plain", "causal", "ragged", "wide", "scaled", "masked", "grouped")):
    def run(trial):
        call = replace(trial.call, scale=scale(trial.call))
        return Result(golden(call, trial.grad_out).out.to(torch.bfloat16))

    outs = {n: Observed.of(run(TRIALS[n]).out, golden(TRIALS[n].call).out) for n in names}
    return suggested.scales_of_their_own(Emulator({TRIALS[n]: run(TRIALS[n]) for n in names}, run),
                                         outs)  # fmt: skip


def test_a_scale_by_the_number_of_heads_says_so_and_holds_for_others():
    (twist,) = scaled(lambda call: call.query.shape[1] ** -0.5)
    assert twist.text == "the scale is 1/√ of the number of heads"
    other = replace(
        TRIALS["decode"].call, query=TRIALS["decode"].call.query[:, :1].tile(1, 5, 1, 1)
    )
    turned = twist.turn(replace(TRIALS["decode"], call=other)).call.scale
    assert turned == pytest.approx(1 / math.sqrt(5))


@pytest.mark.parametrize("factor", [4.0, 1.01])
def test_one_factor_on_every_scale_is_no_matter_of_what_calls_have(factor):
    assert scaled(lambda call: call.scale * factor) == []


def coded(x, shared):
    """256 numbers from the least to the largest, of all or of each row."""
    dims = tuple(range(x.ndim)) if shared else (-1,)
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    step = ((high - low) / 255).clamp_min(2**-20)
    return ((x - low) / step).round() * step + low


@pytest.mark.parametrize("tensor", ["out", "grad_value"])
def test_codes_that_share_a_scale_are_told_from_a_store(tensor):
    def run(trial):
        if tensor == "out":
            call = replace(trial.call, value=coded(trial.call.value.float(), True))
            return right(trial, out=golden(call, trial.grad_out).out.to(torch.bfloat16))
        made = golden(trial.call, coded(trial.grad_out.float(), True))
        return right(trial, grad_value=made.grad_value.to(torch.bfloat16))

    def stored(trial):
        exact = golden(trial.call, trial.grad_out)
        return right(trial, **{tensor: coded(getattr(exact, tensor).float(), False).bfloat16()})

    assert one_term(run, TRIALS["plain"], tensor) == "operand"
    assert one_term(stored, TRIALS["plain"], tensor) == "store"


@pytest.mark.parametrize("lets_in", [True, False])
def test_a_mask_behind_the_softmax_is_told_from_rows_that_see_nothing(lets_in):
    def run(trial):
        out, mask = right(trial).out, trial.call.sees.mask
        if mask is None or mask.dtype != torch.bool:
            return right(trial)
        gone = ~(mask.all(-1) if lets_in else mask.any(-1))
        return right(trial, out=out.masked_fill(gone.unsqueeze(-1), math.nan))

    masked = TRIALS["masked"]
    emulator = Emulator({masked: run(masked)}, run)
    assert not_finite(emulator)[3] == ("mask" if lets_in else "masked-row")


@pytest.mark.parametrize(("name", "cause"), [("biased_cross", "mask"), ("masked", "backward-mask")])
def test_another_mask_in_the_backward_pass_is_told_by_whether_it_hides(name, cause):
    (first,) = (t for t in masks() if t.key == "mask-batch-0")
    wrong = Model.of(BF16_FLASH2).with_ways(
        frozenset(GRADIENTS), lambda way: replace(way, twists=(first,))
    )
    trial = TRIALS[name]
    ways, seen = (wrong.forward, wrong.gradients[0]), Emulator({})
    made = seen.tensors(trial, ways[0], None) | seen.tensors(trial, *ways)
    result = Result(**{n: x if n == "lse" else x.to(torch.bfloat16) for n, x in made.items()})
    found, _ = named(Emulator({trial: result}), wrong, BF16_FLASH2)
    assert [n.cause.key for n in found] == [cause]
