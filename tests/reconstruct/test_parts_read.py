"""Parts of the keys that are merged with other weights than theirs are told from O alone, and from
what a running sum does wrongly in its tiles.
"""

from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.calls import Result
from halfulp.formats import MXFP4, round_to
from halfulp.reconstruct.emulating import Emulator
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.parts_read import merged
from halfulp.reconstruct.weights_read import compared
from tests.audit.zoo_kernel import TEXTBOOK_PLAN, kernel

TRIALS = {t.name: t for t in panel(torch.bfloat16)}
ASKED = [TRIALS[name] for name in ("plain", "long", "decode", "masked")]


def results(out_of):
    return Emulator({t: Result(out_of(t).to(torch.bfloat16)) for t in ASKED})


def in_parts(part_of, weigh):
    """O merged of parts whose weights are changed."""

    def out(trial):
        weights = weights_of(trial.call, scores_of(trial.call))
        value = trial.call.value.double().repeat_interleave(trial.call.groups, 1)
        part = part_of(torch.arange(weights.shape[-1]))
        own = torch.stack([(weights * (part == p)).sum(-1) for p in range(3)], -1)
        other = weigh(own) / own.clamp_min(1e-30)
        return (weights * other[..., part]) @ value

    return out


def counted_twice(own):
    twice = own * torch.tensor([1.0, 2.0, 1.0])
    return twice / twice.sum(-1, keepdim=True)


def by_the_next_ones_sum(own):
    return own.roll(1, -1)


@pytest.mark.parametrize(
    ("part_of", "weigh", "told"),
    [
        (lambda j: j // 64 % 3, by_the_next_ones_sum, "blocks of 64 in turn"),
        (lambda j: j * 3 // len(j), lambda own: torch.ones_like(own) / 3, "keys in a row"),
    ],
)
def test_parts_with_other_weights_are_told(part_of, weigh, told):
    _, text = merged(results(in_parts(part_of, weigh)))
    assert text.startswith("3 parts of the keys")
    assert told in text


@pytest.mark.parametrize(
    "out_of",
    [
        lambda trial: golden(trial.call, trial.grad_out).out,
        lambda trial: golden(trial.call, trial.grad_out).out * 1.5,
        lambda trial: golden(replace(trial.call, scale=0.1), trial.grad_out).out,
        in_parts(lambda j: j // 64 % 3, counted_twice),
    ],
)
def test_what_is_right_or_wrong_as_a_whole_has_no_parts(out_of):
    assert merged(results(out_of)) is None


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (lambda x: torch.cat([x[:, :, :64] * 2, x[:, :, 64:]], 2), ("key", "value")),
        (lambda x: round_to(x.float(), MXFP4), ("query", "key")),
    ],
)
def test_other_operands_are_no_parts(other, names):
    """As many parts as a row has features, or large weights, explain any O."""

    def out(call):
        return golden(replace(call, **{name: other(getattr(call, name)) for name in names})).out

    every = {t: Result(out(t.call).to(torch.bfloat16)) for t in TRIALS.values()}
    assert merged(Emulator(every)) is None


def test_sums_that_are_not_rescaled_are_no_parts():
    never = replace(TEXTBOOK_PLAN, accumulate=lambda a, r, pv, j, low: a + pv)
    made = kernel("planned", never)
    outs = results(lambda t: made(*t.call.operands, is_causal=t.call.sees.causal,
                                  scale=t.call.scale, attn_mask=t.call.sees.mask,
                                  enable_gqa=t.call.groups > 1))  # fmt: skip
    assert merged(outs) is None


def test_what_leaves_rows_right_that_several_parts_are_in_merges_none():
    """The first of 3 parts in turn lacks a factor in every second 32 rows, as where a sum that runs
    begins again.
    """

    def out(trial):
        weights = weights_of(trial.call, scores_of(trial.call))
        i, j = (torch.arange(n) for n in weights.shape[2:])
        wrong = (i // 32 % 2 == 1)[:, None] & (j // 64 % 3 == 1)
        value = trial.call.value.double().repeat_interleave(trial.call.groups, 1)
        return torch.where(wrong, 3 * weights, weights) @ value

    assert merged(results(out)) is None
    everywhere = in_parts(lambda j: j // 64 % 3, lambda own: own * own.roll(1, -1))
    assert merged(results(everywhere)) is not None


@pytest.mark.parametrize("power", [1.4427, 0.5, 2.0])
def test_parts_weighed_by_a_power_of_their_sums_are_merged_wrongly(power):
    trial = TRIALS["plain"]
    weights = weights_of(trial.call, scores_of(trial.call))
    each = weights.unflatten(-1, (3, 64))
    own = each.sum(-1, keepdim=True)
    other = own**power / (own**power).sum(-2, keepdim=True)
    read = compared(trial, (each / own * other).flatten(-2).bfloat16().double())
    assert (read.cause, f"to the power of {power:.3g}" in read.text) == ("split-merge", True)


def test_a_longer_part_and_the_rest_are_told_by_the_power_of_their_sums():
    trial = TRIALS["plain"]
    weights = weights_of(trial.call, scores_of(trial.call))
    own = torch.stack([weights[..., :128].sum(-1), weights[..., 128:].sum(-1)], -1)
    factor = own / own.square().sum(-1, keepdim=True)
    read = compared(trial, (weights * factor.repeat_interleave(128, -1)[..., :192]).bfloat16())
    assert (read.cause, "the power of 2" in read.text) == ("split-merge", True)
    # one factor for each part in all rows is no matter of sums
    same = compared(trial, weights * torch.tensor([1.2, 0.6]).repeat_interleave(128)[:192])
    assert same.cause == "rescale"


@pytest.mark.parametrize(("of_value", "cause"), [(2.0, "scale"), (1.0, "operand")])
def test_a_prefix_without_its_scales_is_told_with_its_values(of_value, cause):
    trial = TRIALS["plain"]
    first = torch.ones(192).double()
    first[:64] = 2
    weights = (scores_of(trial.call) * first).softmax(-1)
    read = compared(trial, weights * torch.where(first > 1, of_value, 1.0))
    assert read.cause == cause
    assert read.text.startswith("scores of keys 0-63 of 192")
    assert ("and V of these" in read.text) == (cause == "scale")
