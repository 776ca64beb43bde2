"""What stands at the end of a head, beyond it, or in nobody's place: what is 0 as another's
block reaches there, gradients that do not follow dO, an lse that O has not, parts that
take keys in turn.
"""

from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct.call_causes import of_calls
from halfulp.reconstruct.call_kinds import condition
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.moved_read import over_the_end
from halfulp.reconstruct.naming import Named
from halfulp.reconstruct.others_read import of_no_grad_out
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.part_ratios import hidden_counted
from halfulp.reconstruct.parts_read import merged
from halfulp.reconstruct.places import unexplained
from halfulp.reconstruct.regions import Region
from halfulp.reconstruct.silent_read import silent, silent_rows
from tests.reconstruct.exact_kernel import right

TRIALS = {t.name: t for rare in (False, True) for t in panel(torch.bfloat16, rarer=rare)}
DTYPE = torch.bfloat16


@pytest.mark.parametrize(("lengths", "width"), [((80, 157), 128), ((80, 80), 0), ((80, 150), 0)])
def test_rows_are_0_as_far_as_the_block_of_the_head_before_reaches(lengths, width):
    zero = {}
    for number, n in enumerate(lengths):
        gone = torch.zeros(1, 2, n, 16, dtype=torch.bool)
        gone[:, 1:, : {80: 48, 157: 99, 150: 30}[n]] = True
        zero[f"call {number}", "grad_value"] = gone
    assert over_the_end(zero) == width


def test_heads_are_0_that_are_others_where_more_sequences_follow():
    trial = TRIALS["decode"]

    def run(asked):
        made = right(asked)
        grad = torch.zeros_like(made.grad_query)  # each sequence read at twice its own place
        grad[: -(-len(grad) // 2)] = made.grad_query[::2]
        return replace(made, grad_query=grad)

    told = silent(Emulator({trial: run(trial)}, run))
    assert [(t.cause, "more sequences" in t.text) for t in told] == [("other-data", True)]

    def unwritten(asked):
        made = right(asked)
        grad = made.grad_query.clone()
        grad[len(grad) // 2 :] = 0
        return replace(made, grad_query=grad)

    told = silent(Emulator({trial: unwritten(trial)}, unwritten))
    assert [t.cause for t in told] == ["unwritten"]


def test_features_are_0_though_others_hold_their_numbers_as_well():
    exact = torch.randn(1, 2, 32, 16, dtype=torch.float64)
    pairs = torch.zeros_like(exact)
    pairs[..., ::2] = exact[..., ::2] + exact[..., 1::2]
    told, cause = silent_rows(Observed.of(pairs, exact))
    assert (cause, told) == ("unwritten", "features 1, 3, 5, 7 … of 16 are 0")


@pytest.mark.parametrize(("ones", "cause"), [(True, "other-data"), (False, "")])
def test_a_gradient_follows_do_or_not(ones, cause):
    trial = TRIALS["scaled"]

    def run(asked):
        do = torch.ones_like(asked.grad_out) if ones else asked.grad_out
        return right(replace(asked, grad_out=do))

    exact = golden(trial.call, trial.grad_out).grad_value
    observed = Observed.of(run(trial).grad_value, exact)
    assert of_no_grad_out(run, trial, "grad_value", observed)[1] == cause


@pytest.mark.parametrize(
    ("twist", "cause"),
    [("heads-next-key-value", "key-heads"), ("heads-batch-next-key-value", "other-data")],
)
def test_pairs_of_heads_that_grouped_calls_alone_have_wrong_are_a_matter_of_groups(twist, cause):
    trial = TRIALS["grouped"]
    told = Named(CAUSES["other-data"], "the next one's", 9.0, "out", "grouped", 1.0, function=True,
                 twists=(twist,))  # fmt: skip
    region = Region("in calls grouped alone", {}, "key-heads")
    assert of_calls(told, region, Emulator({trial: right(trial)})).cause.key == cause


def test_what_some_calls_with_an_option_have_wrong_and_no_others_is_a_matter_of_it():
    wrong = {"biased_grouped", "biased_cross"}
    some, others = ([t for t in TRIALS.values() if (t.name in wrong) == own]
                    for own in (True, False))  # fmt: skip
    assert condition(some, others) == ("some calls with a mask alone", "mask")
    assert condition(some[:1], others)[1] in ("", "mask")
    mixed = [t for t in TRIALS.values() if t.name in {"biased_grouped", "ragged_causal"}]
    rest = [t for t in TRIALS.values() if t.name not in {"biased_grouped", "ragged_causal"}]
    assert condition(mixed, rest) == ("", "")


@pytest.mark.parametrize("counted", [True, False])
def test_sums_that_have_hidden_pairs_are_told_from_those_that_have_other_numbers(counted):
    call = TRIALS["causal"].call
    lse = scores_of(call).logsumexp(-1)
    every = scores_of(replace(call, sees=replace(call.sees, causal=False))).logsumexp(-1)
    empty = (192 - torch.arange(192) - 1) // 64  # blocks of 64 that a row does not see
    more = every if counted else torch.logaddexp(lse, empty.double().log())
    assert hidden_counted(call, lse - more, torch.ones_like(lse, dtype=torch.bool)) == counted


def test_parts_that_take_keys_one_by_one_in_turn_are_read():
    trial = TRIALS["decode"]

    def run(asked):
        scores = scores_of(asked.call)
        p, part = weights_of(asked.call, scores), torch.arange(scores.shape[-1]) % 4
        tops = torch.stack([scores[..., part == x].amax(-1) for x in range(4)], -1)
        p = p / tops.exp()[..., part]  # sums of parts are added as they are
        value = asked.call.value.double().repeat_interleave(asked.call.groups, 1)
        return right(asked, out=(p @ value / p.sum(-1, keepdim=True)).to(DTYPE))

    shown, told = merged(Emulator({trial: run(trial)}, run))
    assert shown == "decode"
    assert told.startswith("4 parts of the keys (one by one in turn)")


def test_an_lse_that_o_has_not_is_another_lse():
    names = ("plain", "ragged", "wide", "scaled", "causal", "cross")

    def run(asked):
        last = (asked.call.key.shape[2] - 1) // 64 * 64
        some = scores_of(asked.call)[..., last:].logsumexp(-1)
        return right(asked, lse=torch.where(some.isfinite(), some, 0.0).float())

    emulator = Emulator({TRIALS[n]: run(TRIALS[n]) for n in names}, run)
    places = unexplained(emulator, Model.of(BF16_FLASH2), 0.3)
    assert [p.cause for p in places if p.tensor == "lse"] == ["lse-other"]
