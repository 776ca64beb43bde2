"""Keys that lanes and tiles take by turns: lost, read in one another's place, or merged; and what
is made of no softmax.
"""

from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.calls import Result
from halfulp.formats import OCP_E4M3, round_to
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct.dataflow import grad_scores, grad_scores_of
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.parts_read import merged
from halfulp.reconstruct.result_read import result_read
from halfulp.reconstruct.weights_read import compared
from tests.reconstruct.exact_kernel import right

TRIALS = {t.name: t for rare in (False, True) for t in panel(torch.bfloat16, rarer=rare)}


@pytest.mark.parametrize(
    ("kept", "cause"),
    [
        (lambda j: j % 4 == 0, "split-merge"),
        (lambda j: j % 8 < 6, "split-merge"),
        (lambda j: j < 150, "key-tail"),
        (lambda j: (j < 20) | (j >= 40), "key-tail"),
    ],
)
def test_keys_that_every_so_many_lack_are_those_of_parts_that_take_turns(kept, cause):
    trial = TRIALS["plain"]
    exact = weights_of(trial.call, scores_of(trial.call))
    weights = exact * kept(torch.arange(exact.shape[-1]))
    read = compared(trial, weights / weights.sum(-1, keepdim=True))
    assert read.cause == cause


@pytest.mark.parametrize(("read", "cause"), [(True, "other-data"), (False, "split-merge")])
def test_keys_of_lanes_that_count_alike_are_told_where_the_last_are_fewer(read, cause):
    """Of sixteen keys all are the last one, or it alone counts: the same but in ragged calls."""

    def run(trial):
        n = trial.call.key.shape[2]
        last = (torch.arange(n) // 16 * 16 + 15).clamp_max(n - 1)
        last = last if read else last.unique()
        key, value = (x[:, :, last] for x in (trial.call.key, trial.call.value))
        made = golden(replace(trial.call, key=key, value=value)).out
        return Result(made.to(torch.bfloat16))

    some = [TRIALS[name] for name in ("plain", "ragged")]
    emulator = Emulator({t: run(t) for t in some}, run)
    found = result_read(emulator, Model.of(BF16_FLASH2), some[0], "out")
    assert found.cause == cause, found.text


@pytest.mark.parametrize("backward", [False, True])
def test_weights_that_are_all_1_are_of_no_scale(backward):
    trial = TRIALS["plain"]
    ones = torch.ones(*trial.call.scores_shape, dtype=torch.float64)
    read = compared(trial, ones, backward=backward)
    assert read.cause == ("lse-other" if backward else "unnormalized"), read.text
    even = compared(trial, ones / ones.shape[-1], backward=backward)  # a scale of 0
    assert even.cause == ("backward-scores" if backward else "scale"), even.text


@pytest.mark.parametrize("left_out", [True, False])
def test_tiles_of_ds_that_both_gradients_lack_are_left_out(left_out):
    def run(trial):
        ds = grad_scores_of(trial)
        i, j = torch.arange(ds.shape[2])[:, None], torch.arange(ds.shape[3])
        ds = ds * (((i // 64 + j // 64) % 2 == 0) if left_out else 0.5)
        key = trial.call.key.double().repeat_interleave(trial.call.groups, 1)
        grads = {"grad_query": ds @ key, "grad_key": ds.mT @ trial.call.query.double()}
        return right(trial, **{n: (x * trial.call.scale).bfloat16() for n, x in grads.items()})

    said = grad_scores(run, TRIALS["plain"], "grad_query")
    assert (said.cause == "grad-tail") == left_out, said.text


def test_parts_that_only_keep_neighbours_apart_are_not_merged_otherwise():
    """K in E4M3: where scores rise, a row's largest weights lie side by side, and parts that take
    keys one by one have each one of them.
    """

    def run(trial):
        key = trial.call.key.float()
        step = key.abs().amax((-1, -2), keepdim=True) / 448
        call = replace(trial.call, key=round_to(key / step, OCP_E4M3) * step)
        return Result(golden(call).out.to(torch.bfloat16))

    some = [TRIALS[name] for name in ("rising",)]
    assert merged(Emulator({t: run(t) for t in some}, run)) is None
