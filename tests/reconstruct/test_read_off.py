"""What is read off a kernel directly: its weights, the order of its sums, factors on results."""

import math
from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct import panel, suggested
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.order_read import Order, key_order, query_order
from halfulp.reconstruct.reconstruction import runner
from halfulp.reconstruct.weights_read import backward_weights, compared, forward_weights
from halfulp.targets import Target, resolve
from tests.audit.zoo_kernel import TEXTBOOK

TRIALS = {trial.name: trial for trial in panel.panel(torch.bfloat16)}


def exact(name, change=lambda scores: scores):
    call = TRIALS[name].call
    return weights_of(call, change(scores_of(call)))


def without_keys(start, stop):
    def change(scores):
        scores = scores.clone()
        scores[..., start:stop] = -math.inf
        return scores

    return change


def without_scale(start, factor=40**0.5):
    def change(scores):
        return torch.where(torch.arange(scores.shape[-1]) >= start, scores * factor, scores)

    return change


def dropped(name):
    kept = torch.rand(exact(name).shape, generator=torch.Generator().manual_seed(0)) > 0.1
    return exact(name) * kept / 0.9


def every_tenth(name):
    """A pattern of pairs that only their distance decides, the others made larger."""
    i, j = (torch.arange(n) for n in exact(name).shape[2:])
    return ((7 * i[:, None] + 13 * j) % 10 > 0) / 0.9


def with_zeros(name, count):
    """Keys of score 0, whose weight the others lack."""
    scores = scores_of(TRIALS[name].call)
    return torch.nn.functional.pad(scores, (0, count)).softmax(-1)[..., : scores.shape[-1]]


def seen_twice(name, start, stop):
    """Weights where a last block is moved back over keys that have been counted."""
    keys = torch.arange(exact(name).shape[-1])
    weights = exact(name) * (1 + ((keys >= start) & (keys < stop)))
    return weights / weights.sum(-1, keepdim=True)


def seeing_one_more(name):
    call = TRIALS[name].call
    call = replace(call, sees=replace(call.sees, offset=1))
    return weights_of(call, scores_of(call))


@pytest.mark.parametrize(
    ("trial", "weights", "cause", "told"),
    [
        ("plain", exact("plain"), "", "right"),
        ("plain", exact("plain", lambda s: s * 1.01), "scale", "1.01 ×"),
        ("ragged", exact("ragged", without_keys(150, 157)), "key-tail", "keys 150-156"),
        ("ragged", exact("ragged", without_scale(128)), "scale", "scores of keys 128-156 of 157"),
        ("causal", seeing_one_more("causal"), "causal-mask", "key − query 1 have weight"),
        ("plain", exact("plain") * torch.linspace(0.5, 2, 192)[:, None], "unnormalized", "to 2"),
        ("plain", exact("plain") * (1 + (torch.arange(192) >= 176)), "key-tail", "2 ×"),
        ("plain", with_zeros("plain", 9), "padding", "9 keys of score 0"),
        ("plain", exact("plain") * (1 + (torch.arange(192) >= 96)), "split-merge", "96-191"),
        ("plain", seen_twice("plain", 64, 96), "other-data", "keys 64-95 of 192 have 2 ×"),
        ("plain", exact("plain").masked_fill(exact("plain") < 1e-3, 0), "weights", "are 0"),
        ("plain", dropped("plain"), "dropout", "of the pairs, wherever they are"),
        ("plain", exact("plain") * every_tenth("plain"), "dropout", "key − query"),
        ("ragged", exact("ragged", without_scale(144, 0.5)), "operand", "keys 144-156 of 157"),
        ("ragged", exact("ragged", without_scale(128, 0)), "key-tail", "keys 128-156 of 157"),
        (
            "plain",
            scores_of(TRIALS["plain"].call).softmax(-2),
            "unnormalized",
            "over the other dimension",
        ),
        ("plain", exact("plain").tril(64).triu(-64), "window", "key − query"),
    ],
)
def test_weights_that_differ_say_how(trial, weights, cause, told):
    read = compared(TRIALS[trial], weights)
    assert read.cause == cause, read.text
    assert told in read.text


@pytest.mark.parametrize(
    ("lse", "cause"),
    [
        (lambda x: x.bfloat16().double(), "lse"),
        (lambda x: x.to(torch.float8_e4m3fn).double(), "lse"),
        (lambda x: x * 1.44, "lse-other"),
        (lambda x: x.roll(1, 2), "lse-other"),
        (lambda x: x[:, :, torch.arange(192) & ~1], "lse-other"),
        (lambda x: x.flip(1), "lse-other"),
    ],
)
def test_lse_that_is_coarse_is_told_from_another_rows(lse, cause):
    scores = scores_of(TRIALS["causal"].call)
    weights = (scores - lse(scores.logsumexp(-1, keepdim=True))).exp()
    read = compared(TRIALS["causal"], weights, backward=True)
    assert read.cause == cause, read.text


def test_both_passes_show_their_weights():
    trial = TRIALS["ragged_causal"]
    run = runner(Target.of(TEXTBOOK))
    for read in (forward_weights(run, trial), backward_weights(run, trial)):
        assert torch.allclose(read, exact("ragged_causal"), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("block", [32, 72])
def test_masks_of_huge_values_reveal_blocks(block):
    run = runner(resolve(f"recipe:BF16_FLASH2[block_key={block},block_query=64]"))
    assert key_order(run, torch.bfloat16) == Order(256, block, backward=False)
    assert query_order(run, torch.bfloat16) == Order(256, 64, backward=False)
    assert BF16_FLASH2.block_key != block


def test_a_sum_from_the_last_key_to_the_first_is_told():
    def backward(query, key, value, *, is_causal, scale):
        with torch.no_grad():
            return TEXTBOOK(query, key.flip(2), value.flip(2), is_causal=is_causal, scale=scale)

    found = key_order(runner(Target.of(backward)), torch.bfloat16)
    assert found.backward


def test_a_factor_is_told_from_noise():
    generator = torch.Generator().manual_seed(0)
    exact_out = torch.randn(1, 2, 64, 32, generator=generator, dtype=torch.float64)
    noise = torch.randn(exact_out.shape, generator=generator, dtype=torch.float64) * 2e-3
    for factor in (1.0, 1.02):
        observed = suggested.Observed.of(exact_out * factor + noise, exact_out)
        fitted = {"plain": suggested.factor_of(observed, exact_out)}
        assert fitted["plain"].factor == pytest.approx(factor, abs=2e-4)
        twists = suggested.factors("grad_value", fitted, TRIALS)
        assert [t.cause for t in twists] == ([] if factor == 1 else ["grad-scale"])


def test_a_factor_of_each_head_is_one_on_the_values_or_on_o():
    exact_out = torch.randn(3, 6, 64, 32, generator=torch.Generator().manual_seed(0)).double()
    shared = torch.linspace(0.7, 1.3, 6).view(3, 2, 1, 1).double()
    heads = shared.repeat_interleave(3, 1)
    observed = suggested.Observed.of(exact_out * heads, exact_out)
    fitted = {"grouped": suggested.factor_of(observed, exact_out)}
    found = suggested.factors("out", fitted, TRIALS)
    assert [t.cause for t in found] == ["value-factor"] * 2
    assert "0.7 to 1.3, another in each head" in found[1].text
    call = TRIALS["grouped"].call
    assert torch.allclose(found[1].turn(TRIALS["grouped"]).call.value, call.value * shared.float())


def test_the_calls_have_every_two_options_at_once():
    """What a kernel does in the wrong order shows where both are asked for."""
    every = [t.call for r in (False, True) for t in panel.panel(torch.bfloat16, rarer=r)]

    def of(call):
        mask = call.sees.mask
        return {
            "softcap": bool(call.softcap),
            "sinks": call.sinks is not None,
            "window": call.sees.window is not None,
            "causal": call.sees.causal,
            "boolean": mask is not None and mask.dtype == torch.bool,
            "additive": mask is not None and mask.dtype != torch.bool,
        }

    seen = {(a, b) for call in every for a, x in of(call).items() for b, y in of(call).items()
            if x and y and a < b}  # fmt: skip
    wanted = {("additive", "softcap"), ("boolean", "softcap"), ("softcap", "window"),
              ("sinks", "window"), ("additive", "sinks"), ("additive", "causal"),
              ("sinks", "softcap"), ("causal", "softcap"), ("causal", "sinks")}  # fmt: skip
    assert not wanted - seen
    given = [c for c in every if abs(c.scale * math.sqrt(c.query.shape[-1]) - 1) > 1e-6]
    assert any(c.softcap and c.sees.mask is not None for c in given)


@pytest.mark.parametrize(("option", "without"), [("softcap", 0.0), ("sinks", None)])
def test_few_queries_are_asked_with_options_that_show(option, without):
    """A cap or sinks that decode alone does not read: a tenth of O, at least."""
    few = [t.call for t in panel.panel(torch.bfloat16, rarer=True) if t.call.query.shape[2] < 16]
    asked = [c for c in few if getattr(c, option) is not None and c.sees.mask is None
             and (option == "sinks" or c.softcap)]  # fmt: skip
    assert asked
    for call in asked:
        whole, other = golden(call).out, golden(replace(call, **{option: without})).out
        assert float((whole - other).norm()) > 0.1 * float(whole.norm())
