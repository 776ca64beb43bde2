"""What is kept of a run, δ with a changed error, weights over tilings, and the rules on planted
runs.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halfulp.attention import emulate
from halfulp.calls import Sees
from halfulp.formats import BF16
from halfulp.papers import figures_a as pictures
from halfulp.papers.claim import Lab, generator
from halfulp.papers.claims.a_cause import excess, failed_share, traced
from halfulp.papers.claims.a_growth import loss_rises, sink_figures
from halfulp.papers.claims.a_mechanism import sign_shares
from halfulp.papers.claims.delta_mean import final_weights
from halfulp.papers.constructed_run import VARIANTS, profile, run_variant
from halfulp.papers.delta_changes import CHANGES, changed_attention
from halfulp.papers.runs_a import (
    TASK_STOCK,
    Plan,
    Snapshot,
    Traced,
    language_attention,
    trace,
    trace_all,
)
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, FP64, recipe_named
from halfulp.training.loop import train
from halfulp.watch.taps import Observed

ROUNDED_OUT = FP64.with_(name="lp", out=BF16)


@pytest.fixture(scope="module")
def run() -> Traced:
    return trace(Plan((TASK_STOCK,), 0, 12, measure_every=6, at=(6, 12)))


def test_a_traced_run_has_the_bits_of_a_plain_one(run: Traced) -> None:
    plain = train(replace(run.config, measure_every=0, metrics_every=1))
    losses = dict(zip(plain.steps, plain.curve("loss"), strict=True))
    steps, traced_losses = run.loss()
    assert steps == (10, 12) or steps == (10,)
    assert traced_losses == tuple(losses[step] for step in steps)
    assert run.measured_steps() == (6, 12)
    assert run.measured_steps(since=7) == (12,)


def test_a_snapshot_agrees_with_the_measurement_of_its_step(run: Traced) -> None:
    snapshot = run.calls[12][0]
    error = snapshot.call.out.double() - snapshot.exact().out
    assert snapshot.call.grad_out is not None
    later = trace(Plan((TASK_STOCK,), 0, 13, measure_every=13, at=(12,)))
    assert torch.equal(later.calls[12][0].call.out, snapshot.call.out)
    first = float((snapshot.exact_grad.double() * error).sum())
    whole = float((snapshot.call.grad_out.double() * error).sum())
    assert whole > first  # the curvature part is positive whatever the rounding
    assert snapshot.call.inputs is not None
    assert snapshot.call.inputs.shape == (16, 32, 32)


def test_plans_name_layers_and_tasks() -> None:
    plan = Plan((language_attention(2, delta_from="exact_out"),), 1, 7, layers=3, heads=4)
    config = plan.config()
    assert (config.workload.layers, config.workload.heads, config.steps, config.seed) == (
        3,
        4,
        7,
        1,
    )  # type: ignore[union-attr]
    recipe = recipe_named(language_attention(2, delta_from="exact_out"))
    assert (recipe.out.mantissa_bits, recipe.delta_from) == (2, "exact_out")  # type: ignore[union-attr]
    assert recipe_named(language_attention(None)).out.mantissa_bits == 23  # type: ignore[union-attr]
    assert trace_all([], workers=1) == []


def test_the_lab_traces_each_plan_once() -> None:
    lab, plan = Lab(workers=1), Plan((TASK_STOCK,), 0, 2, at=(2,))
    first, second = traced(lab, {"x": [plan, plan]})["x"]
    assert traced(lab, {"y": [plan]})["y"][0] is first is second


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, do = torch.randn(4, 2, 1, 9, 4, generator=generator(seed), dtype=torch.float64)
    return q, k, v, do


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_changed_delta_against_the_written_out_backward_pass(name: str) -> None:
    """dS_ij = P_ij (dP_ij − δ'_i) with δ' = δ_hp + change(e), loop by loop in fp64; dV does not
    change.
    """
    q, k, v, do = problem()
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = changed_attention(ROUNDED_OUT, CHANGES[name])(*inputs, is_causal=True, scale=0.5)
    dq, dk, dv = torch.autograd.grad(out, inputs, do)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    p = (0.5 * q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1)
    exact = p @ v
    rounded = exact.bfloat16().double()
    assert torch.equal(out, rounded)
    error = (do * (rounded - exact)).sum(-1)
    mean = sum(error.flatten().tolist()) / error.numel()
    wanted = {
        "as it is": error,
        "mean alone": torch.full_like(error, mean),
        "mean removed": error - mean,
        "mean flipped": error - 2 * mean,
        "removed": torch.zeros_like(error),
    }[name]
    ds = torch.zeros_like(p)
    for b in range(2):
        for i in range(9):
            delta = float((do[b, 0, i] * exact[b, 0, i]).sum() + wanted[b, 0, i])
            for j in range(i + 1):
                ds[b, 0, i, j] = p[b, 0, i, j] * (float(do[b, 0, i] @ v[b, 0, j]) - delta)
    for found, slow in ((dq, 0.5 * ds @ k), (dk, 0.5 * ds.mT @ q), (dv, p.mT @ do)):
        torch.testing.assert_close(found, slow, rtol=1e-11, atol=1e-13)


def test_changes_meet_the_recipes_own_options() -> None:
    q, k, v, do = (x.float() for x in problem(1))
    recipe = BF16_FLASH2.with_(block_query=4, block_key=4)

    def gradient(attend: Any) -> Tensor:
        query = q.clone().requires_grad_()
        (found,) = torch.autograd.grad(attend(query, k, v, is_causal=True), query, do)
        return found

    same = gradient(changed_attention(recipe, CHANGES["as it is"]))
    assert torch.equal(same, gradient(lambda *x, **o: emulate(*x, recipe=recipe, **o)))
    removed = gradient(changed_attention(recipe, CHANGES["removed"]))
    exact = gradient(lambda *x, **o: emulate(*x, recipe=recipe.with_(delta_from="exact_out"), **o))
    assert not torch.equal(removed, same)
    torch.testing.assert_close(removed, exact, rtol=0.01, atol=1e-4)
    with pytest.raises(ValueError, match="delta_from='residual'"):
        changed_attention(BF16_HALFULP, CHANGES["removed"])


def test_weights_of_all_tilings_and_the_planted_ones_that_differ() -> None:
    q, k, v = 3 * torch.randn(3, 1, 2, 96, 32, generator=generator(1))
    split = BF16_HALFULP.with_(name="split", exponential="split")
    order = torch.randperm(96, generator=generator(2))
    scores = (q.bfloat16().float() @ k.bfloat16().float().mT) * 32**-0.5 * math.log2(math.e)
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True).ceil())
    whole = final_weights(split.with_(block_query=None, block_key=None), q, k, v)
    torch.testing.assert_close(whole, weights, rtol=2**-8, atol=1e-30)
    for block in (7, 32):
        for keys in (None, order):
            assert torch.equal(
                final_weights(split.with_(block_query=40, block_key=block), q, k, v, keys), whole
            )
    unsplit = BF16_HALFULP.with_(block_query=None, block_key=None)
    found = sum(
        int((final_weights(unsplit.with_(block_key=16), *x) != final_weights(unsplit, *x)).sum())
        for x in (3 * torch.randn(3, 1, 4, 192, 64, generator=generator(seed)) for seed in range(3))
    )
    assert 0 < found < 100
    stock = BF16_FLASH2.with_(block_query=None)
    moved = final_weights(stock.with_(block_key=16), q, k, v) != final_weights(
        stock.with_(block_key=None), q, k, v
    )
    assert moved.double().mean() > 0.1


def planted(loss: list[float], sigma: float) -> Traced:
    metrics = [{"step": 10 * (i + 1), "loss": x} for i, x in enumerate(loss)]
    measures = [{"step": 10, "measure": {"sigma_query": [[1.0, sigma]]}}]
    return Traced(Plan((TASK_STOCK,)).config(), metrics, measures, {})


def test_a_language_run_fails_by_loss_and_sigma_together() -> None:
    twin = planted([3.0] * 8 + [2.0, 2.2], 3.0)
    worse = planted([3.0] * 8 + [2.6, 2.8], 40.0)
    assert excess(worse, twin) == pytest.approx(0.6)
    assert failed_share([worse, twin], [twin, twin]) == 0.5
    assert failed_share([planted([2.8] * 10, 4.0)], [twin]) == 0  # a loss alone may be a coarse O
    assert failed_share([planted([2.1] * 10, 40.0)], [twin]) == 0


def test_when_a_loss_rises_above_its_twin() -> None:
    twin, rising = planted([2.0] * 20, 1.0), planted([2.5] * 5 + [2.1] * 5 + [2.9] * 10, 1.0)
    # two of five at +0.9, three at +0.1: 0.32 above the smallest mean, 0.1
    assert loss_rises(*rising.loss(), twin.loss()[1]) == 120
    assert loss_rises(*twin.loss(), twin.loss()[1]) == math.inf


def snapshot(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad: Tensor, exact_grad: Tensor
) -> Snapshot:
    call = Observed(query, key, value, Sees(True), 0.5, out=out, grad_out=grad)
    return Snapshot(call, exact_grad)


def test_sign_shares_are_counted() -> None:
    q, k, v, do = problem(2)
    bare = snapshot(q, k, v, v, do, do)
    exact = bare.exact().out
    lean = snapshot(q, k, v, exact + 0.01 * do.sign(), do, -do)
    assert sign_shares(lean) == {"rounded": 1.0, "exact": 0.0}
    noisy = snapshot(q, k, v, exact + torch.randn(do.shape, generator=generator(3)), do, do)
    products = [
        a * b
        for a, b in zip(
            do.flatten().tolist(), (noisy.call.out - exact).flatten().tolist(), strict=True
        )
    ]
    assert sign_shares(noisy)["rounded"] == pytest.approx(
        sum(x > 0 for x in products) / len(products)
    )


def test_a_planted_sink_is_where_the_weights_are_one() -> None:
    n = 40
    q = torch.ones(3, 1, n, 4)
    k = torch.randn(3, 1, n, 4, generator=generator(4))
    sink, flat = k.clone(), k.clone()
    sink[:, :, 5] = 8.0
    value = torch.randn(3, 1, n, 4, generator=generator(5))
    ((correlation, p, ratio, mass),) = sink_figures(snapshot(q, sink, value, value, value, value))
    # all rows see it, and 25 keys are seen by 16 rows and more
    assert ratio == pytest.approx(25, rel=0.05)
    assert mass > 0.9
    assert correlation > 0.2
    assert 0 < p < 1
    ((correlation, p, ratio, _),) = sink_figures(snapshot(0 * q, flat, value, value, value, value))
    assert (correlation, p) == (0.0, 1.0)  # every P̄ is 1, so there are no ranks to compare
    assert ratio == pytest.approx(1)


def test_cosines_are_those_of_the_written_out_terms() -> None:
    a, x, b, y = torch.randn(4, 5, 3, generator=generator(6), dtype=torch.float64)
    found = pictures.cosines((a, x), (b, y))
    for i in range(5):
        for j in range(5):
            left, right = torch.outer(a[i], x[i]), torch.outer(b[j], y[j])
            assert float(found[i, j]) == pytest.approx(
                float((left * right).sum() / left.norm() / right.norm())
            )


def test_every_picture_is_plain_data_with_a_command(run: Traced) -> None:
    seen = profile(VARIANTS[0], steps=2)
    built = {
        name: run_variant(VARIANTS[i], steps=4) for i, name in enumerate(("described", "fp32"))
    }
    drawn = [
        pictures.cumulative_error(run, 0, "c"),
        *pictures.similarity_maps(run, 0, 0, "c"),
        *pictures.feature_bars(seen, "c"),
        pictures.running_error(seen, "c"),
        pictures.value_distribution(seen, "c"),
        pictures.constructed_error(built, "c"),
        pictures.fix_losses({name: [one, one] for name, one in built.items()}, "c"),
        pictures.head_sigmas(run, run, 6, "c"),
        *pictures.raw_maps(run, 0, 0, "c"),
        pictures.layer_losses({"only layer 0": run}, "c"),
        pictures.layer_sigmas({"everywhere": run, "nowhere": run}, "c"),
    ]
    json.dumps(drawn, allow_nan=False)
    assert {picture["command"] for picture in drawn} == {"c"}
    maps = [picture for picture in drawn if picture.get("kind") == "heat map"]
    assert [len(one["values"]) for one in maps] == [32] * 11
    assert all(max(abs(x) for row in one["values"] for x in row) <= 1 + 1e-12 for one in maps)
    assert maps[0]["values"][3][3] == pytest.approx(1)
    sums = drawn[0]["series"]
    assert sums[0]["y"][-1] == pytest.approx(sum(h[0] for h in run.measured("delta_error")))
    assert sums[0]["y"][-1] == pytest.approx(sums[1]["y"][-1] + sums[2]["y"][-1], rel=1e-6)
