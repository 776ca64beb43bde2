"""Whose rows a kernel reads: other keys of the same head, others' past an end; and which columns of
O have weights of their own.
"""

from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.calls import Result
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct import panel
from halfulp.reconstruct.call_asked import holds
from halfulp.reconstruct.dataflow import grad_scores_of
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.groups_read import members_counted, of_whole_heads
from halfulp.reconstruct.others_read import of_memory, of_other_operands, reads_others
from halfulp.reconstruct.places import unexplained
from halfulp.reconstruct.result_read import result_read
from halfulp.reconstruct.weight_ratios import Read
from halfulp.reconstruct.weights_read import compared

TRIALS = {t.name: t for r in (False, True) for t in panel.panel(torch.bfloat16, rarer=r)}
STOCK = Model.of(BF16_FLASH2)


def pages_of_32_as_of_16(n):
    j = torch.arange(n)
    return ((j // 16).clamp_max((n - 1) // 32) * 32 + j % 16).clamp_max(n - 1)


def half_as_far(n):
    j = torch.arange(n)
    return j // 64 * 32 + j % 64


def read_at(trial, keys, *, values_alone):
    """Weights, by the keys that V is read from, where each key is read at another's place."""
    scores = scores_of(trial.call)
    weights = weights_of(trial.call, scores if values_alone else scores[..., keys])
    return torch.zeros_like(weights).index_add_(-1, keys, weights)


@pytest.mark.parametrize("name", ["plain", "decode", "sinks_grouped"])
@pytest.mark.parametrize("keys", [pages_of_32_as_of_16, half_as_far])
def test_keys_that_are_read_more_than_once_are_told_from_lost_ones(name, keys):
    trial = TRIALS[name]
    read = compared(trial, read_at(trial, keys(trial.call.key.shape[2]), values_alone=False))
    assert read.cause == "other-data", read.text
    assert "are read in their place" in read.text


@pytest.mark.parametrize("keys", [pages_of_32_as_of_16, half_as_far])
def test_values_that_are_read_elsewhere_are_told_from_lost_keys(keys):
    trial = TRIALS["plain"]
    read = compared(trial, read_at(trial, keys(192), values_alone=True))
    assert read.cause == "other-data", read.text
    assert "V of keys" in read.text


def test_keys_whose_values_alone_are_lost_have_no_other_in_their_place():
    trial = TRIALS["plain"]
    weights = weights_of(trial.call, scores_of(trial.call)) * (torch.arange(192) % 32 < 16)
    assert compared(trial, weights).cause == "key-tail"


@pytest.mark.parametrize(("whose", "own"), [("rows", True), ("features", False)])
def test_rows_of_dv_that_are_those_of_other_keys_say_so_of_ds(whose, own):
    trial = TRIALS["plain"]

    def run(asked):
        result = golden(asked.call, asked.grad_out)
        names = ("out", "lse", "grad_query", "grad_key", "grad_value")
        return Result(*(getattr(result, name).bfloat16() for name in names))

    said = [Read(f"{whose} 16-31 are those of 32-47", "layout")]
    read = result_read(Emulator({trial: run(trial)}, run), STOCK, trial, "grad_query", said)
    assert read is not None
    assert (read.cause == "layout") == own, read.text


def of_warps(call, change):
    """Weights that each 32 columns have of their own: of their features, or with another fault."""
    scores, parts = scores_of(call), []
    for first in range(0, call.query.shape[3], 32):
        some = slice(first, first + 32)
        if change == "features":
            scores = call.query[..., some].double() @ call.key[..., some].double().mT * call.scale
        weights = scores.softmax(-1)
        if change != "features" and first:
            weights = weights * (torch.arange(weights.shape[-1]) < (128 if change == "tail" else 0))
        parts.append((some, weights))
    return parts


@pytest.mark.parametrize("tensor", ["out", "grad_value"])
@pytest.mark.parametrize(("change", "causes"), [("features", ("ragged", "ragged")),
                                                ("tail", ("key-tail", "grad-tail")),
                                                ("all", ("unwritten", "unwritten"))])  # fmt: skip
def test_columns_that_have_weights_of_their_own_say_which(tensor, change, causes):
    def run(trial):
        result = golden(trial.call, trial.grad_out)
        out, dv = result.out.clone(), result.grad_value.clone()
        for some, weights in of_warps(trial.call, change):
            if tensor == "out":
                out[..., some] = weights @ trial.call.value[..., some].double()
            else:
                dv[..., some] = weights.mT @ trial.grad_out[..., some].double()
        return Result(*(x.bfloat16() for x in (
            out, result.lse, result.grad_query, result.grad_key, dv)))  # fmt: skip

    trial = TRIALS["plain"]
    read = result_read(Emulator({trial: run(trial)}, run), STOCK, trial, tensor)
    assert read is not None
    assert read.cause == causes[tensor != "out"], read.text
    assert ("columns 32-63 of 64" in read.text) or change == "features"


@pytest.mark.parametrize("others", [True, False])
def test_a_sequence_alone_is_asked_with_another_behind_it(others):
    """Keys past the end are the next sequence's first, which alone are a sequence's own."""

    def run(trial):
        call = trial.call
        key, value = (torch.cat([x, (x.roll(-1, 0) if others else x)[:, :, :40]], 2)
                      for x in (call.key, call.value))  # fmt: skip
        scores = call.query.double() @ key.double().mT * call.scale
        return Result((scores.softmax(-1) @ value.double()).to(call.query.dtype))

    trial = TRIALS["ragged"]
    observed = Observed.of(run(trial).out, golden(trial.call, trial.grad_out).out)
    assert (reads_others(run, trial, "out", observed) is not None) == others


@pytest.mark.parametrize("of_groups", [True, False])
def test_calls_that_are_grouped_are_asked_without_groups(of_groups):
    def run(trial):
        call = trial.call
        result = golden(call, trial.grad_out)
        wrong = call.groups > 1 if of_groups else call.key.shape[2] % 48 > call.query.shape[2] % 48
        return Result((2 * result.out if wrong else result.out).to(call.query.dtype))

    emulator = Emulator({TRIALS[n]: run(TRIALS[n]) for n in ("grouped", "decode")}, run)
    some = frozenset({"grouped", "decode"})
    assert holds(emulator, STOCK, "calls grouped alone", some) == of_groups


@pytest.mark.parametrize(
    ("tensor", "told"),
    [("grad_key", "features 8-11 are made of dO in place of Q"),
     ("grad_value", "rows 0-15 are 32-47 of dK"), ("", "")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["plain", "grouped", "softcap"])
def test_what_is_of_another_gradients_operand_or_rows_says_so(name, tensor, told):
    trial = TRIALS[name]
    right = golden(trial.call, trial.grad_out)
    value = getattr(right, tensor or "grad_value").clone()
    if tensor == "grad_key":
        groups = trial.call.groups
        made = grad_scores_of(trial).mT @ trial.grad_out.double() * trial.call.scale
        value[..., 8:12] = made.unflatten(1, (-1, groups)).sum(2)[..., 8:12]
    elif tensor:
        value[:, :, :16] = right.grad_key[:, :, 32:48]
    observed = Observed.of(value.bfloat16(), getattr(right, tensor or "grad_value"))
    assert of_other_operands(trial, tensor or "grad_value", observed)[0] == told


@pytest.mark.parametrize(("misread", "told"), [(True, "dO is misread"), (False, "")])
def test_numbers_that_are_right_in_dense_memory_are_misread_in_another(misread, told):
    trial = TRIALS["strided"]

    def run(asked):
        do = asked.grad_out
        if misread and not do.is_contiguous():
            do = do.transpose(1, 2).reshape(do.shape)
        result = golden(asked.call, do if misread else do.roll(1, 1))
        return Result(result.out, grad_query=result.grad_query)

    exact = golden(trial.call, trial.grad_out).grad_query
    observed = Observed.of(run(trial).grad_query, exact)
    text, cause = of_memory(run, trial, "grad_query", observed)
    assert text.startswith(told)
    assert cause == ("layout" if misread else "")


@pytest.mark.parametrize("tensor", ["grad_key", "grad_value"])
@pytest.mark.parametrize(
    ("times", "told"),
    [((2.0, 1.0, 1.0), "2, 1, 1 ×"), ((0.0, 0.0, 1.0), "0, 0, 1 ×"), ((1.0, 1.0, 1.0), ""),
     ((0.5, 0.5, 0.5), "")],
)  # fmt: skip
def test_heads_of_a_group_are_counted(tensor, times, told):
    trial = TRIALS["grouped"]
    do, (query, _, _) = trial.grad_out, trial.call.operands
    total = 0
    for member in range(3):  # the gradient of one head of each group alone
        own = (torch.arange(query.shape[1]) % 3 == member).view(1, -1, 1, 1)
        total = total + times[member] * getattr(golden(trial.call, do * own), tensor).double()
    exact = getattr(golden(trial.call, do), tensor)
    text, cause = members_counted(trial, tensor, Observed.of(total.bfloat16(), exact))
    assert cause == ("group-sum" if told else "")
    assert text.endswith(told)


@pytest.mark.parametrize("paired", [True, False])
def test_heads_that_overlap_in_memory_are_no_pairing(paired):
    trial = TRIALS["grouped"]
    exact = golden(trial.call, trial.grad_out).grad_value
    if paired:  # query head h is taken for one of the group h % 2, not h // 3
        order = [0, 2, 4, 1, 3, 5]
        call = replace(trial.call, query=trial.call.query[:, order])
        got = golden(call, trial.grad_out[:, order]).grad_value
    else:  # rows lie twice as far apart as heads leave room for
        got = torch.zeros_like(exact)
        got[:, :, ::2] = exact[:, :, :40]
        got[:, 1:, ::2] += exact[:, :-1, 40:]
    assert of_whole_heads(trial, "grad_value", Observed.of(got.bfloat16(), exact)) == paired


@pytest.mark.parametrize("added", [True, False])
def test_rows_that_are_0_as_others_have_what_is_theirs_were_written(added):
    def run(trial):
        result = golden(trial.call, trial.grad_out).map(torch.Tensor.bfloat16)
        dv = result.grad_value
        first = dv.sum(0, keepdim=True) if added else dv[:1]
        return replace(result, grad_value=torch.cat([first, torch.zeros_like(dv[1:])]))

    emulator = Emulator({TRIALS["grouped"]: run(TRIALS["grouped"])}, run)
    place = unexplained(emulator, STOCK, 0.05)[-1]
    assert (place.tensor, place.cause) == ("grad_value", "other-data" if added else "unwritten")


def test_another_sequences_query_is_followed_in_o():
    trial = TRIALS["grouped"]

    def run(asked):
        query = asked.call.query
        moved = torch.cat([query.roll(1, 0)[:, :, -1:], query[:, :, 1:]], 2)
        result = golden(replace(asked.call, query=moved), asked.grad_out)
        return Result(result.out.bfloat16())

    observed = Observed.of(run(trial).out, golden(trial.call).out)
    assert reads_others(run, trial, "out", observed).told == "heads"
