"""What goes by the distance of key and query, a window that nobody asked for, and row sums that are
rounded as they run.
"""

import pytest
import torch

from halfulp.calls import Result
from halfulp.formats import BF16
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.operation_sums import running
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.places import unexplained
from halfulp.reconstruct.result_read import result_read
from halfulp.reconstruct.weights_read import compared

TRIALS = {t.name: t for rare in (False, True) for t in panel(torch.bfloat16, rarer=rare)}
STOCK = Model.of(BF16_FLASH2)


@pytest.mark.parametrize("of_heads", [True, False])
def test_a_bias_of_distances_may_be_another_in_each_head(of_heads):
    call = TRIALS["grouped"].call
    i, j = torch.arange(64)[:, None], torch.arange(80)
    head = torch.arange(6).view(-1, 1, 1) if of_heads else torch.zeros(())
    bias = torch.cos((i - j).clamp_min(0) * 0.7 + head)
    read = compared(TRIALS["grouped"], weights_of(call, scores_of(call) + bias))
    assert read.cause == "mask", read.text
    assert ("another in each head" in read.text) == of_heads


def test_keys_beyond_a_distance_are_those_of_a_window_though_none_was_asked_for():
    trial = TRIALS["causal"]

    def run(asked):
        scores = scores_of(asked.call)
        i, j = (torch.arange(n) for n in scores.shape[2:])
        near = i[:, None] - j < 64
        weights = weights_of(asked.call, scores.masked_fill(~near, -torch.inf))
        value = asked.call.value.double().repeat_interleave(asked.call.groups, 1)
        return Result((weights @ value).to(torch.bfloat16))

    emulator = Emulator({trial: run(trial)}, run)
    (place,) = unexplained(emulator, STOCK, 0.1)
    assert place.cause == "window", place.text


@pytest.mark.parametrize(("rounded", "cause"), [(True, "row-sum"), (False, "unnormalized")])
def test_a_row_sum_that_is_rounded_as_it_runs_grows_worse_with_its_keys(rounded, cause):
    """The other has a share of its own in each row, however many keys there are."""
    trial = TRIALS["scaled"]

    def run(asked):
        scores = scores_of(asked.call)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        sums = weights.sum(-1, keepdim=True)
        if rounded:  # twice as coarse as bf16, and O with it
            coarse = BF16.with_(mantissa_bits=BF16.mantissa_bits - 2)
            sums = running(weights.float(), coarse, dim=3, block=1).double().sum(-1, keepdim=True)
        else:
            sums = sums * (1 + 0.2 * torch.sin(torch.arange(sums.shape[2])[:, None] * 1.0))
        value = asked.call.value.double().repeat_interleave(asked.call.groups, 1)
        return Result((weights @ value / sums).to(torch.bfloat16))

    emulator = Emulator({trial: run(trial)}, run)
    found = result_read(emulator, STOCK, trial, "out")
    assert found.cause == cause, found.text


@pytest.mark.parametrize(("each", "cause"), [(True, "products"), (False, "accumulator")])
def test_terms_that_are_rounded_are_told_from_a_sum_that_is(each, cause):
    """P is right, and P V is not: its terms are rounded to bf16, or the sum after each of them."""
    trial = TRIALS["plain"]

    def run(asked):
        weights = weights_of(asked.call, scores_of(asked.call)).bfloat16()
        value = asked.call.value.repeat_interleave(asked.call.groups, 1)
        if each:
            terms = weights.unsqueeze(-1) * value.unsqueeze(2)
            return Result(terms.double().sum(3).bfloat16())
        total = torch.zeros(())
        for j in range(weights.shape[-1]):
            total = (total + weights[..., j, None].float() * value[:, :, None, j]).bfloat16()
        return Result(total)

    emulator = Emulator({trial: run(trial)}, run)
    found = result_read(emulator, STOCK, trial, "out")
    assert found.cause == cause, found.text
