"""What rows hold that no sum of V makes: what lay in memory, V that is normalized, codes; and pairs
that only some rows see, or that hang on other rows.
"""

from dataclasses import replace

import pytest
import torch

from halfulp.calls import EVERYTHING, Result, Sees
from halfulp.formats import BF16, OCP_E4M3, round_to
from halfulp.recipes import BF16_FLASH2, FP16_FLASH2
from halfulp.reconstruct import reconstruct
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.non_finite import not_finite
from halfulp.reconstruct.others_read import of_no_value, reads_others
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.result_read import result_read
from halfulp.reconstruct.weights_read import compared, leaves_out
from tests.reconstruct.exact_kernel import right

TRIALS = {t.name: t for rare in (False, True) for t in panel(torch.bfloat16, rarer=rare)}
STOCK = Model.of(BF16_FLASH2)


def weighed_by(trial, scores):
    weights = scores.softmax(-1).nan_to_num(0.0)
    value = trial.call.value.double().repeat_interleave(trial.call.groups, 1)
    return Result((weights @ value).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("held", "cause"),
    [
        (lambda call: call.query, "unwritten"),
        (lambda call: torch.ones_like(call.query), "unwritten"),
        # all keys alike, as of a softmax over −10⁹: a matter of what hides them
        (lambda call: call.value.mean(2, keepdim=True).expand_as(call.query), ""),
    ],
)
def test_rows_that_see_nothing_are_not_written_where_they_hold_no_v(held, cause):
    trial = TRIALS["masked"]
    empty = scores_of(trial.call).isneginf().all(-1)[..., None]

    def run(asked):
        made = right(asked)
        return replace(made, out=torch.where(empty, held(asked.call), made.out))

    observed = Observed.of(run(trial).out, right(trial).out)
    assert of_no_value(run, trial, "out", observed)[1] == cause
    # what is wrong elsewhere as well is no matter of these rows
    other = replace(observed, value=observed.value + 0.1)
    assert of_no_value(run, trial, "out", other) == ("", "")


@pytest.mark.parametrize(
    ("held", "cause"),
    [
        (lambda call: torch.ones_like(call.query), "unwritten"),
        # keys in the place of values: what is returned was computed
        (lambda call: right_of(call, call.key), "other-data"),
        (lambda call: right_of(call, call.value), ""),
    ],
)
def test_o_that_follows_no_v_was_computed_where_it_follows_q(held, cause):
    trial = TRIALS["plain"]

    def run(asked):
        return replace(right(asked), out=held(asked.call))

    observed = Observed.of(run(trial).out, right(trial).out + 0.5)
    assert of_no_value(run, trial, "out", observed)[1] == cause


def right_of(call, value):
    return (weights_of(call, scores_of(call)) @ value.double()).bfloat16()


def test_a_result_in_another_format_is_what_it_is_when_it_is_returned():
    """O through bf16 of values below fp16's normal numbers: both round it."""
    trial = next(t for t in panel(torch.float16) if t.name == "small")
    model = Model.of(replace(FP16_FLASH2, out=BF16))
    stored = Emulator({}).tensors(trial, model.forward, None)["out"]
    returned = Result(stored.to(torch.float16))
    emulator = Emulator({trial: returned}, right)
    (fit,) = emulator.fits(model, frozenset({"out"})).values()
    assert fit.left == 0
    again = returned.out.to(stored.dtype)
    assert not torch.equal(stored, again)
    assert torch.equal(emulator.made(trial, model, "out"), again)


@pytest.mark.parametrize(("every", "cause"), [(True, "masked-row"), (False, "mask")])
def test_rows_that_see_nothing_and_weigh_some_keys_see_these_by_their_mask(every, cause):
    trial = TRIALS["masked"]
    exact = weights_of(trial.call, scores_of(trial.call))
    empty = (exact == 0).all(-1, keepdim=True)
    some = torch.arange(exact.shape[-1]) % 27 == 0
    weights = torch.where(empty & (some | every), 1.0, exact)
    assert compared(trial, weights / weights.sum(-1, keepdim=True)).cause == cause


@pytest.mark.parametrize(("apart", "cause"), [(2, "layout"), (3, "layout"), (0, "dropout")])
def test_distances_on_a_lattice_are_those_of_tokens_that_are_taken_for_heads(apart, cause):
    trial = TRIALS["plain"]
    exact = weights_of(trial.call, scores_of(trial.call))
    distance = torch.arange(192)[:, None] - torch.arange(192)
    some = torch.rand(383, generator=torch.Generator().manual_seed(0)) < 0.5
    seen = distance % apart == 0 if apart else some[distance + 191] | (distance == 0)
    read = compared(trial, exact * seen / (exact * seen).sum(-1, keepdim=True))
    assert read.cause == cause, read.text


def of_values(change):
    def run(trial):
        return right(replace(trial, call=replace(trial.call, value=change(trial.call.value))))

    return run


def normed(value):
    return torch.nn.functional.layer_norm(value.float(), value.shape[-1:]).to(value.dtype)


@pytest.mark.parametrize(
    ("change", "cause"), [(normed, "value-factor"), (lambda v: v.flip(-1), "other-data")]
)
def test_v_that_is_normalized_is_told_from_other_numbers(change, cause):
    trial = TRIALS["plain"]
    run = of_values(change)
    read = result_read(Emulator({trial: run(trial)}, run), STOCK, trial, "out")
    assert read is not None
    assert read.cause == cause, read.text


def test_codes_of_a_result_are_told_by_how_few_numbers_it_takes():
    trial = TRIALS["plain"]

    def run(asked):
        made = right(asked)
        return replace(made, out=(round_to(made.out.float() * 100, OCP_E4M3) / 100).bfloat16())

    read = result_read(Emulator({trial: run(trial)}, run), STOCK, trial, "out")
    assert read is not None
    assert read.cause == "out"
    assert "numbers alone, as codes do" in read.text


def taken_out_after_exp(trial):
    """exp of all scores by the maximum of those that are seen, hidden ones times 0 then."""
    every = scores_of(replace(trial.call, sees=EVERYTHING))
    seen = scores_of(trial.call).isfinite()
    top = every.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True).clamp_min(-1e30)
    weights = (every - top).float().exp() * seen
    weights = (weights / weights.sum(-1, keepdim=True)).double()
    value = trial.call.value.double().repeat_interleave(trial.call.groups, 1)
    return Result((weights @ value).to(torch.bfloat16))


def test_hidden_scores_far_above_the_rest_are_asked_for():
    trial = TRIALS["hidden_peaks"]
    found = not_finite(Emulator({trial: taken_out_after_exp(trial)}, taken_out_after_exp))
    assert found is not None
    assert found[3] == "non-finite"
    assert "what is hidden scores far above what is seen" in found[2]
    # rows that see nothing but what is far below 0 are another matter
    deep = TRIALS["deep_ragged"]
    broken = right(deep, out=torch.full_like(deep.call.query, torch.nan))
    found = not_finite(Emulator({deep: broken}, right))
    assert found is not None
    assert "what is hidden" not in found[2]


def by_the_last_queries(trial):
    """Keys that the last queries weigh most, and each query's own."""
    scores = scores_of(trial.call)
    n = scores.shape[-1]
    most = scores[..., -16:, :].softmax(-1).sum(-2).topk(n // 4).indices
    seen = torch.zeros_like(scores[..., 0, :], dtype=torch.bool).scatter(-1, most, True)
    seen = seen[..., None, :] | torch.eye(scores.shape[-2], n, dtype=torch.bool)
    return weighed_by(trial, scores.masked_fill(~seen, -torch.inf))


def by_the_query_before(trial):
    return weighed_by(trial, scores_of(trial.call).roll(1, -2))


@pytest.mark.parametrize(
    ("kernel", "left"), [(by_the_last_queries, True), (by_the_query_before, False)]
)
def test_pairs_that_other_rows_leave_out_are_told_from_other_rows(kernel, left):
    trial = TRIALS["plain"]
    observed = Observed.of(kernel(trial).out, right(trial).out)
    others = reads_others(kernel, trial, "out", observed)
    assert others is not None
    assert others.told == "rows"
    assert leaves_out(kernel, trial) == left


def attend(query, key, value, is_causal, scale):
    s = query.float() @ key.float().mT * scale
    later = torch.arange(s.shape[-1]) > torch.arange(s.shape[-2])[:, None]
    return (s.masked_fill(later & is_causal, -torch.inf).softmax(-1) @ value.float()).to(
        query.dtype
    )


def packed_without_a_mask(query, key, value, *, is_causal=False, scale=None):
    """Sequences one behind the other, where what is causal alone keeps them apart."""
    b, n = query.shape[0], query.shape[2]
    if not is_causal or n != key.shape[2]:
        return attend(query, key, value, is_causal, scale).detach()
    packed = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    return attend(*packed, True, scale)[0].unflatten(1, (b, n)).transpose(0, 1).detach()


def lost_scores(query, key, value, *, is_causal=False, scale=None):
    """What is visible gets a number that leaves nothing of its score, where it is causal."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    s = query.float() @ key.float().mT * scale
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    if is_causal:
        s = (s - 1e9).masked_fill(j > i, -torch.inf)
    return (s.softmax(-1) @ value.float()).to(query.dtype)


@pytest.mark.parametrize(
    ("kernel", "cause"), [(packed_without_a_mask, "other-data"), (lost_scores, "causal-mask")]
)
def test_what_causal_calls_alone_have_is_named(kernel, cause):
    found = reconstruct(kernel)
    named = [n.cause.key for n in found.causes] + [p.cause for p in found.places]
    assert named[0] == cause, found.sentence


def test_calls_with_many_shapes_of_masks_are_among_the_rarer_ones():
    rarer = {t.name: t.call for t in panel(torch.bfloat16, rarer=True)}
    masks = [c.sees.mask.shape for c in rarer.values() if c.sees.mask is not None]
    assert any(shape[2] == 1 < shape[3] for shape in masks)
    as_many = rarer["as_many_heads"]
    assert as_many.query.shape[1] == as_many.query.shape[2]
    peaks = rarer["hidden_peaks"]
    above = scores_of(replace(peaks, sees=Sees())) - scores_of(peaks).logsumexp(-1, keepdim=True)
    assert float(above.max()) > 150
