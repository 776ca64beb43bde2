"""Every figure of a call against loops over its definition, the identities that it serves, and
planted causes.
"""

import math
from dataclasses import replace

import pytest
import torch

from halfulp.attention import emulate
from halfulp.calls import Sees
from halfulp.formats import BF16
from halfulp.recipes import FP64
from halfulp.watch import measures
from halfulp.watch.directions import error_direction
from halfulp.watch.measures import exact_call
from halfulp.watch.taps import Observed
from tests.watch.toy import random_call, slow_scores, slow_weights

SHAPES = [{"is_causal": True}, {"is_causal": False, "n_k": 3}, {"is_causal": True, "n_k": 9}]


def close(found: torch.Tensor, expected: object) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-12, atol=1e-14)


def weights_of(call: Observed) -> torch.Tensor:
    return slow_weights(call.query, call.key, call.sees.causal, call.scale)


def scores_of(call: Observed) -> list[list[list[list[float]]]]:
    return slow_scores(call.query, call.key, call.sees.causal, call.scale)


def by_head(call: Observed) -> list[list[list[float]]]:
    """Rows of visible scores of each head, over all batch entries."""
    scores = scores_of(call)
    return [[row for entry in scores for row in entry[h]] for h in range(call.query.shape[1])]


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_and_weights_are_those_of_the_loops(shape):
    call = random_call(1, **shape)
    exact = exact_call(call)
    weights, heads = weights_of(call), by_head(call)
    close(exact.weights, weights)
    close(exact.out, weights @ call.value)
    found = measures.score_figures(exact)
    close(found["mean_score"], [sum(map(sum, rows)) / sum(map(len, rows)) for rows in heads])
    close(found["max_score"], [max(map(max, rows)) for rows in heads])
    found = measures.weight_figures(exact)
    terms = [-p * math.log(p) if p > 0 else 0.0 for p in weights.flatten().tolist()]
    rows = torch.tensor(terms, dtype=torch.float64).reshape(weights.shape).sum(-1)
    close(found["entropy"], rows.mean((0, 2)))
    close(found["sink_first"], weights[..., 0].mean((0, 2)))
    largest = [
        [max(weights[b, h, :, j].mean() for j in range(weights.shape[3])) for h in range(3)]
        for b in range(2)
    ]
    close(found["sink_largest"], torch.tensor(largest, dtype=torch.float64).mean(0))


def test_single_precision_is_an_option_of_its_own_error():
    call = random_call(1)
    double, single = exact_call(call), exact_call(call, torch.float32)
    assert single.out.dtype == torch.float32
    difference = (single.out.double() - double.out).abs().max()
    assert 0 < difference < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_repetitions_are_counted_as_a_kernel_would_meet_them(shape):
    call = random_call(2, **shape)
    call.key[:, 1, 2] = call.key[:, 1, 1]  # an exact tie wherever both are seen and largest
    call.key[:, 2, 2] = call.key[:, 2, 1] * (1 + 1e-4)  # a tie in bf16
    call.key[:, 1:, 1:3] *= 4
    exact = exact_call(call)
    found = measures.repetition_figures(exact)
    tied, tied_half, units, several = [], [], [], []
    for h in range(3):
        rows = [
            exact.scores[b, h, i][exact.scores[b, h, i].isfinite()]
            for b in range(2)
            for i in range(6)
        ]
        for counts, cast in ((tied, torch.float32), (tied_half, torch.bfloat16)):
            held = [row.float().to(cast) for row in rows]
            counts.append(sum(int((row == row.max()).sum() > 1) for row in held) / len(rows))
        ones = [int(((row - row.max()).exp().float().bfloat16() == 1).sum()) for row in rows]
        units.append(sum(ones) / len(ones))
        several.append(sum(count > 1 for count in ones) / len(ones))
    for name, expected in zip(found, (tied, tied_half, units, several), strict=True):
        close(found[name], expected)
    assert found["tied_rows"][1] > 0
    assert found["tied_rows"][0] == found["tied_rows"][2] == 0
    assert found["tied_rows_bf16"][2] > 0


def test_the_unit_score_is_where_bf16_rounds_to_one():
    just, below = (
        math.exp(measures.UNIT_SCORE * (1 - 1e-4)),
        math.exp(measures.UNIT_SCORE * (1 + 1e-4)),
    )
    assert torch.tensor(just).bfloat16() == 1
    assert torch.tensor(1 - 2.0**-9).bfloat16() == 1
    assert torch.tensor(below).bfloat16() < 1


@pytest.mark.parametrize("shape", SHAPES)
def test_delta_error_is_the_difference_of_the_two_deltas(shape):
    call = random_call(3, **shape)
    assert call.grad_out is not None
    weights = weights_of(call)
    low = (call.grad_out * call.out).sum(-1)
    # rowsum(dP ∘ P): another formula for the exact δ
    high = ((call.grad_out @ call.value.mT) * weights).sum(-1)
    found = measures.delta_error(call, exact_call(call))
    close(found, low - high)
    assert found.abs().max() > 1e-4
    exact = random_call(3, **shape, rounded=False)
    assert measures.delta_error(exact, exact_call(exact)).abs().max() < 1e-14, (
        "no rounding, no error"
    )


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_identities_of_the_gradient_error(is_causal):
    """A7: dQ_hp − dQ_lp = α diag(e) PK. A8: dW_Q,hp − dW_Q,lp = α Σ e[T] (PK)[T]ᵀ X[T] = αR. Both
    to fp64 rounding.
    """
    call = random_call(4, is_causal=is_causal)
    gradients = {}
    for name, recipe in (("hp", FP64), ("lp", FP64.with_(out=BF16))):
        query = call.query.clone().requires_grad_()
        out = emulate(
            query, call.key, call.value, is_causal=is_causal, scale=call.scale, recipe=recipe
        )
        (gradients[name],) = torch.autograd.grad(out, query, call.grad_out)
    call = replace(call, out=out.detach())
    exact = exact_call(call)
    error = measures.delta_error(call, exact)
    difference = gradients["hp"] - gradients["lp"]
    close(difference, call.scale * error[..., None] * (exact.weights @ call.key))
    assert difference.abs().max() > 1e-5
    assert call.inputs is not None
    of_weights = torch.einsum("bhnd,bnw->hdw", difference, call.inputs)
    close(of_weights, call.scale * error_direction(call, exact, error))


def test_row_sums_of_the_score_gradient():
    call = random_call(5)
    exact = exact_call(call)
    error = measures.delta_error(call, exact)
    weights, grad = weights_of(call), call.grad_out
    assert grad is not None
    grad_scores = weights * (grad @ call.value.mT - (grad * call.out).sum(-1, keepdim=True))
    found = measures.row_sum_figures(call, exact, error)
    close(
        found["row_sum_grad_scores"],
        grad_scores.sum(-1).abs().sum((0, 2)) / grad_scores.abs().sum((0, 2, 3)),
    )
    assert found["key_gradient_sum"].isnan().all()
    call = replace(call, grad_key=call.scale * grad_scores.mT @ call.query)
    found = measures.row_sum_figures(call, exact, error)
    size = call.scale * (grad_scores.abs().sum(-1) * call.query.norm(dim=-1)).sum(2)
    close(found["key_gradient_sum"], call.grad_key.sum(2).norm(dim=-1).sum(0) / size.sum(0))
    exact_sums = random_call(5, rounded=False)
    exact_scores = weights * (grad @ call.value.mT - (grad * exact.out).sum(-1, True))
    exact_sums = replace(exact_sums, grad_key=call.scale * exact_scores.mT @ call.query)
    found = measures.row_sum_figures(exact_sums, exact, torch.zeros_like(error))
    assert all((figure < 1e-14).all() for figure in found.values()), (
        "exact arithmetic has no row sums"
    )


def test_the_gradient_tells_which_delta_an_attention_took():
    """Read from dK alone: e itself where δ comes from O, nothing where it comes from dP ∘ P, though
    O errs alike.
    """
    g = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 40, 4, generator=g, dtype=torch.float64) + 2
    key, value, grad = (
        torch.randn(2, 3, 40, 4, generator=g, dtype=torch.float64) for _ in range(3)
    )
    read = {}
    for delta_from in ("out", "probabilities"):
        recipe = FP64.with_(out=BF16, delta_from=delta_from)
        operands = [x.clone().requires_grad_() for x in (query, key, value)]
        out = emulate(*operands, is_causal=True, recipe=recipe)
        grad_key = torch.autograd.grad(out, operands[1], grad)[0]
        given = {"out": out.detach(), "grad_out": grad, "grad_key": grad_key}
        call = Observed(query, key, value, Sees(True), 0.5, **given)
        read[delta_from] = measures.delta_error_in_gradient(call)
        error = measures.delta_error(call, exact_call(call))
    mean = query.mean((0, 2))
    by_row = (query * mean[:, None]).sum(-1) / mean.square().sum(-1)[:, None]
    close(by_row.mean((0, 2)), torch.ones(3))
    close(read["out"], (by_row * error).sum(-1))
    assert error.sum(-1).abs().min() > 1e-5
    assert read["probabilities"].abs().max() < 1e-14


def test_signs_by_feature_and_the_guilty_one():
    call = random_call(6)
    exact = exact_call(call)
    assert call.grad_out is not None
    call.grad_out[0, 0, 0, 0] = 0  # a pair without a sign
    agreement, contribution = measures.feature_signs(call, exact)
    difference = call.out - exact.out
    for h in range(3):
        for f in range(4):
            pairs = [
                (float(call.grad_out[b, h, i, f]), float(difference[b, h, i, f]))
                for b in range(2)
                for i in range(6)
            ]
            signed = [x * y > 0 for x, y in pairs if x * y != 0]
            close(agreement[h, f], sum(signed) / len(signed))
            close(contribution[h, f], sum(x * y for x, y in pairs))
    close(contribution.sum(-1), measures.delta_error(call, exact).sum((0, 2)))
    found = measures.sign_figures(call, exact)
    guilty = contribution.abs().argmax(-1)
    close(found["guilty_feature"], guilty)
    close(found["guilty_share"], contribution.abs().amax(-1) / contribution.abs().sum(-1))
    close(found["sign_agreement"], agreement.mean(-1))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_error_that_leans_with_the_gradient_is_seen_and_named(sign):
    """A11 planted: in feature 2 the error of O has dO's sign, elsewhere a sign of its own."""
    call = random_call(7, n=200, n_k=200, rounded=False)
    assert call.grad_out is not None
    noise = torch.randn(
        call.out.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64
    )
    error = 1e-3 * noise
    error[..., 2] = sign * 1e-3 * call.grad_out[..., 2].sign()
    call = replace(call, out=call.out + error)
    exact = exact_call(call)
    found = measures.sign_figures(call, exact)
    assert (found["guilty_feature"] == 2).all()
    close(found["guilty_sign_agreement"], torch.full((3,), 0.5 + sign / 2))
    total = measures.delta_error(call, exact).sum((0, 2))
    assert (sign * total > 0.2).all()
    order = torch.randperm(200, generator=torch.Generator().manual_seed(9))
    call = replace(call, out=call.out - error + error[:, :, order])
    shuffled = measures.sign_figures(call, exact)
    assert ((shuffled["sign_agreement"] - 0.5).abs() < 0.05).all(), (
        "the same errors at other tokens lean no more"
    )


def test_activations():
    call = random_call(9)
    found = measures.activation_figures(call)
    assert call.inputs is not None
    for name, x in (
        ("query", call.query),
        ("value", call.value),
        ("out", call.out),
        ("grad_out", call.grad_out),
    ):
        squares = [
            sum(v * v for v in x[:, h].flatten().tolist()) / x[:, h].numel() for h in range(3)
        ]
        close(found[f"{name}_rms"], torch.tensor(squares, dtype=torch.float64).sqrt())
    close(found["input_rms"], [float(call.inputs.square().mean().sqrt())] * 3)
    close(found["input_max"], [float(call.inputs.abs().max())] * 3)


def test_a_call_without_its_gradient_is_refused():
    call = random_call(0)
    call = replace(call, grad_out=None)
    with pytest.raises(
        ValueError, match=r"call\.grad_out=None: accepted is a call whose backward pass has run"
    ):
        measures.delta_error(call, exact_call(call))
