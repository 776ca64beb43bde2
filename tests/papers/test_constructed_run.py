"""The constructed run: each of the paper's conditions is there, and taking one away takes the push
away.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from halfulp.formats import BF16, round_to
from halfulp.papers import constructed_run
from halfulp.papers.constructed_run import (
    VARIANTS,
    MechanismRun,
    Ties,
    Variant,
    profile,
    run_variant,
    run_variants,
)
from halfulp.recipes import Shift

NAMED = {variant.name: variant for variant in VARIANTS}
STEPS = 240


@pytest.fixture(scope="module")
def runs() -> dict[str, MechanismRun]:
    names = ("described", "softmax fix", "no ties", "dO flipped")
    return {name: run_variant(NAMED[name], steps=STEPS) for name in names}


def late(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values[len(values) // 3 :], dtype=torch.float64)


def t_of(values: tuple[float, ...]) -> float:
    x = late(values)
    return float(x.mean() / x.std() * math.sqrt(len(x)))


def test_the_described_recipe_is_pushed_by_its_first_order_part(
    runs: dict[str, MechanismRun],
) -> None:
    run = runs["described"]
    assert t_of(run.first_order) > 5
    assert late(run.first_order).mean() > 20 * late(run.curvature).mean() > 0
    assert t_of(run.sharp_error) < -5
    assert late(run.agreement).mean() > 0.53
    assert run.mean_score[-1] > 15 + run.mean_score[0]


@pytest.mark.parametrize("name", ["softmax fix", "no ties"])
def test_without_ties_that_weigh_one_nothing_pushes(
    runs: dict[str, MechanismRun], name: str
) -> None:
    run = runs[name]
    assert abs(t_of(run.first_order)) < 4
    assert abs(run.mean_score[-1] - run.mean_score[0]) < 8
    assert late(run.first_order).mean().abs() < 0.2 * late(runs["described"].first_order).mean()


def test_the_sign_of_the_gradient_turns_the_push_around(runs: dict[str, MechanismRun]) -> None:
    assert t_of(runs["dO flipped"].first_order) < -5
    assert runs["dO flipped"].mean_score[-1] < runs["dO flipped"].mean_score[0] - 15


def test_keys_tie_and_jitter_unties_them(runs: dict[str, MechanismRun]) -> None:
    assert min(runs["described"].tied_rows) == 1
    assert max(runs["no ties"].tied_rows) < 0.1


def test_the_parts_add_up_to_the_error_of_delta() -> None:
    """Against a slow definition: δ of the run's own dO, minus δ with the exact O, row by row in
    fp64.
    """
    *_, now = constructed_run._steps(NAMED["described"], 3, 5)
    *_, first, curvature, _, _, _ = constructed_run._figures(now)
    query, key, value = (round_to(x.detach(), BF16).double()[:, 0] for x in now.inputs)
    scores = round_to((query @ key.mT * 32**-0.5).float(), BF16).double()
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    exact = weights / weights.sum(-1, keepdim=True) @ value
    out = now.out.detach().double().requires_grad_()
    pulled, loss = now.made.losses(out, now.batch.target.double())
    (grad,) = torch.autograd.grad(pulled + loss, out)
    wanted = ((grad * out).sum(-1) - (grad * exact).sum(-1)).sum().item()
    assert first + curvature == pytest.approx(wanted, rel=2e-3)


def test_a_run_repeats_and_does_not_depend_on_workers() -> None:
    alone = run_variants(["described", "fp32"], (0,), 6, workers=1)
    assert {name: len(same) for name, same in alone.items()} == {"described": 1, "fp32": 1}
    again = run_variant(NAMED["described"], 0, 6)
    assert alone["described"] == [again]
    assert again.steps == (6,)


def test_variants_share_teacher_and_data() -> None:
    first, second = (
        next(constructed_run._steps(NAMED[name], 1, 1)) for name in ("described", "authors")
    )
    assert all(
        torch.equal(a, b) for a, b in zip(first.batch.inputs, second.batch.inputs, strict=True)
    )
    assert torch.equal(first.batch.target, second.batch.target)


def test_a_number_that_is_not_finite_ends_the_run() -> None:
    # of every P̄ in a sharp row
    underflow = NAMED["softmax fix"].recipe.with_(shift=Shift("stabilized", beta=60.0))
    run = run_variant(Variant("underflow", "", underflow), steps=8)
    assert run.outcome == "failed"
    assert run.steps == (1,)
    assert "not finite" in run.reason


def test_a_profile_shows_steps_down_where_weights_are_one() -> None:
    found = profile(NAMED["described"], steps=3)
    ones = [i for i, weight in enumerate(found.weights) if weight == 1]
    assert len(ones) == 3
    jumps = [
        abs(b - a) for a, b in zip((0.0, *found.running_error), found.running_error, strict=False)
    ]
    others = [jump for i, jump in enumerate(jumps) if i not in ones]
    assert max(jumps[i] for i in ones) > 5 * statistics.median(others)
    assert found.running_error[-1] < -0.01
    assert max(found.all_values) < 0
    assert all(grad < 0 for grad in found.grad_out[: found.guilty])
    assert max(map(abs, found.grad_out[found.guilty :])) < 0.1 * abs(found.grad_out[0])


def test_values_of_both_signs_is_of_both_signs() -> None:
    now = next(constructed_run._steps(NAMED["V of both signs"], 0, 1))
    means = now.inputs[2].detach().mean((0, 1, 2))[:8]
    assert (means[::2] > 1).all()
    assert (means[1::2] < -1).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [({"keys": 0}, "at least 1"), ({"keys": 33}, "at most"), ({"guilty": 40}, "at most")],
)
def test_impossible_tasks_are_refused(change: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(Ties(), **change)


def test_unknown_variants_and_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="variant='none': accepted are described"):
        run_variants(["none"])
    with pytest.raises(ValueError, match="steps=0"):
        run_variant(NAMED["fp32"], steps=0)
    with pytest.raises(ValueError, match="steps=0"):
        profile(NAMED["fp32"], steps=0)
