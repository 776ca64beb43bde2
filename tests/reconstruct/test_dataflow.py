"""What lies between a kernel's inputs and its results is read, and the first that is wrong told."""

from dataclasses import replace

import pytest
import torch

from halfulp.reconstruct import panel
from halfulp.reconstruct.dataflow import grad_scores
from halfulp.reconstruct.reconstruction import runner
from halfulp.reconstruct.sums_read import from_terms, one_term
from halfulp.reconstruct.unlike import mantissa_bits
from halfulp.targets import Target
from tests.audit.zoo_kernel import TEXTBOOK, TEXTBOOK_PLAN, keep_bits, kernel

TRIALS = {trial.name: trial for trial in panel.panel(torch.bfloat16)}


def planned(**steps):
    return runner(Target.of(kernel("planned", replace(TEXTBOOK_PLAN, **steps))))


@pytest.mark.parametrize("name", ["plain", "sharp", "ragged_causal", "masked", "scaled"])
def test_nothing_is_wrong_where_nothing_is(name):
    run = runner(Target.of(TEXTBOOK))
    for tensor in ("grad_query", "grad_key"):
        assert grad_scores(run, TRIALS[name], tensor).cause == ""
    assert one_term(run, TRIALS[name], "out") == "sum"
    assert one_term(run, TRIALS[name], "grad_value") == "sum"


def last_queries(x):
    return torch.cat([x[:, :, :-16], x[:, :, -16:] * 0.9], 2)


@pytest.mark.parametrize(
    ("steps", "cause", "told"),
    [
        ({"grad_scores": lambda p, dp, d, low: keep_bits(p * (dp - d), 4)}, "grad-scores",
         "comes in 5 bits, in dQ and dK alike"),
        ({"grad_scores": lambda p, dp, d, low: low(p * (dp - 0.9 * d))}, "no-delta",
         "δ is 0.9"),
        ({"delta": lambda do, out, x, low: (do * out).sum(-1, keepdim=True) + 0.5}, "no-delta",
         "δ of each row is another number"),
        ({"delta": lambda do, out, x, low: (do * out)[..., :40].sum(-1, keepdim=True)}, "no-delta",
         "δ of each row is another number"),
        ({"delta": lambda do, out, x, low: keep_bits((do * out).sum(-1, keepdim=True), 3)}, "delta",
         "δ of each row is off"),
        ({"grad_scores": lambda p, dp, d, low: low(p * (1.02 * dp - d))}, "grad-scale",
         "dP is 1.02"),
        ({"add_grad": lambda name, total, block, low: total + block * (
            1.03 if name == "dq" else 1)}, "grad-scale", "dS is right in dK, in dQ it is 1.03"),
    ],
)  # fmt: skip
def test_the_part_of_the_backward_pass_that_is_wrong_is_told(steps, cause, told):
    said = grad_scores(planned(**steps), TRIALS["plain"], "grad_query")
    assert said.cause == cause, said.text
    assert told in said.text


def by_autograd(held):
    """Tiles of keys whose sums are rescaled by a rounded factor, differentiated by PyTorch."""

    def attention(query, key, value, *, is_causal, scale):
        total = row_sum = torch.zeros(())
        row_max = torch.full((*query.shape[:3], 1), -torch.inf)
        for k, v in zip(key.float().split(64, 2), value.float().split(64, 2), strict=True):
            scores = query.float() @ k.mT * scale
            new = torch.maximum(row_max, held(scores).amax(-1, keepdim=True))
            weights, factor = (scores - new).exp(), (row_max - new).exp()
            row_sum = row_sum * factor + weights.sum(-1, keepdim=True)
            total = total * factor.bfloat16().float() + weights.bfloat16().float() @ v
            row_max = new
        return (total / row_sum).to(query.dtype)

    return runner(Target.of(attention))


def test_a_gradient_of_the_maximum_is_told_from_one_of_the_scores():
    trial = TRIALS["plain"]
    trial = replace(trial, call=replace(trial.call, value=trial.call.value + 8))
    said = grad_scores(by_autograd(lambda scores: scores), trial, "grad_query")
    assert said.cause == "max-gradient", said.text
    said = grad_scores(by_autograd(torch.Tensor.detach), trial, "grad_query")
    assert said.cause != "max-gradient", said.text


def rest_to_the_largest(p, dp, delta, low):
    """What the rounded dS of a row do not cancel goes to its largest score."""
    ds, top = low(p * (dp - delta)), p == p.amax(-1, keepdim=True)
    return ds - ds.sum(-1, keepdim=True) * top


def test_what_rounding_leaves_of_a_row_goes_through_its_maximum():
    trial = TRIALS["scaled"]  # 96 keys
    run = planned(grad_scores=rest_to_the_largest, block_key=128)
    for tensor in ("grad_query", "grad_key"):
        said = grad_scores(run, trial, tensor)
        assert said.cause == "max-gradient", said.text


def test_a_gradient_that_autograd_adds_up_tile_by_tile_is_called_a_low_sum():
    run = by_autograd(torch.Tensor.detach)
    said = grad_scores(run, TRIALS["plain"], "grad_query")
    assert said.cause == "grad-accumulator", said.text  # query.float() in every tile
    said = grad_scores(run, TRIALS["plain"], "grad_key")
    assert said.cause != "grad-accumulator", said.text


@pytest.mark.parametrize(
    ("steps", "where"),
    [
        ({"read_value": lambda v: keep_bits(v, 4)}, "operand"),
        ({"store": lambda out, low: low(keep_bits(out, 4))}, "store"),
        ({"store": lambda out, low: low(out + 1e-3)}, "store"),
        ({"accumulate": lambda a, r, pv, j, low: low(a * r + pv)}, "sum"),
    ],
)
def test_one_term_tells_operands_and_the_store_from_sums(steps, where):
    assert one_term(planned(**steps), TRIALS["plain"], "out") == where


@pytest.mark.parametrize(
    ("steps", "terms"),
    [
        ({"accumulate": lambda a, r, pv, j, low: low(a * r + pv) * 1.02}, 64),
        ({"store": lambda out, low: low(out * 1.02)}, 0),
    ],
)
def test_what_gets_worse_with_more_terms_is_the_sum_as_it_runs(steps, terms):
    found = from_terms(planned(**steps), TRIALS["plain"], "out")
    assert (found >= terms) == (terms > 0) or found == terms == 0


def test_mantissas_are_counted():
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    assert mantissa_bits(x.bfloat16().double()) == 8
    assert mantissa_bits(keep_bits(x, 3).double()) == 4
    assert mantissa_bits(x[:8]) == 0  # too few to tell
