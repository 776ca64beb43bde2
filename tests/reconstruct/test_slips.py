"""Steps of tiled attention done wrongly: the dataflow they are made in is attention, and a slip is
found again; heads that alone are wrong are asked for themselves.
"""

from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.calls import Result
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct.emulating import GRADIENTS, Emulator, Model
from halfulp.reconstruct.exact import row_maximum
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.regions import calls_of, region_of, restricted, rows_of
from halfulp.reconstruct.slip_flow import Flow, Tiles
from halfulp.reconstruct.slip_kinds import FORWARD_STAGES, ROUNDINGS, Rows, Slip
from halfulp.reconstruct.slips import USUAL, as_twist, likeliest, of_rows
from halfulp.reconstruct.suggested import vanished

TRIALS = {t.name: t for r in (False, True) for t in panel(torch.bfloat16, rarer=r)}
SMALL = [name for name in TRIALS if name not in ("long", "long_causal", "many")]
STOCK = Model.of(BF16_FLASH2)


@pytest.mark.parametrize("filled", [True, False])
def test_the_dataflow_without_a_slip_is_attention(filled):
    for name in SMALL:
        trial = TRIALS[name]
        made = Flow(trial, Tiles(64, 48, filled)).results()
        truth = golden(trial.call, trial.grad_out)
        seen = truth.lse.isfinite()[..., None]
        for tensor in ("out", *GRADIENTS):
            exact, got = getattr(truth, tensor), made[tensor].double()
            if tensor in ("out", "grad_query"):
                exact, got = (torch.where(seen, x, 0.0) for x in (exact, got))
            assert float((got - exact).norm()) <= 2e-4 * float(exact.norm()), (name, tensor)


def kernel(slip, where=lambda trial, x: x.new_ones(())):
    """A kernel that makes stock's results, and a slip where it is told to."""

    def run(trial):
        made = Emulator({}).tensors(trial, STOCK.forward, None)
        made = made | Emulator({}).tensors(trial, STOCK.forward, STOCK.gradients[0])
        changed = as_twist(slip, USUAL).back(trial, made)
        made = {n: torch.where(where(trial, x) > 0, changed[n], x) for n, x in made.items()}
        made = {n: x.to(trial.call.query.dtype) for n, x in made.items() if n != "lse"}
        return Result(**made)

    return run


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "slip",
    [
        Slip("key", "stale"),
        Slip("scores", "factor", ("last keys",), 1.25),
        Slip("b_weights", "row-1"),
        Slip("out", "goes on"),
        Slip("b_query", "row+1"),
        Slip("grad_out_in_dp", "head-1"),
        Slip("grad_out_in_dv", "head-1"),
        Slip("product", "int8 tile", ("upper columns",)),
        Slip("divided_statistics", "stale", ("later keys", "other warps")),
    ],
)
def test_a_slip_is_found_again(slip):
    run, trial = kernel(slip), TRIALS["plain"]
    emulator = Emulator({trial: run(trial)}, run)
    forward = slip.stage in FORWARD_STAGES
    tensors = frozenset({"out"}) if forward else frozenset(GRADIENTS)
    found = likeliest(emulator, trial, tensors, USUAL)
    assert found[0].left < (0.2 if slip.mistake in ROUNDINGS else 0.02)
    assert found[0].slip.cause == slip.cause


def odd(trial, x):
    heads = torch.arange(x.shape[1]) % 2
    return heads.view(1, -1, *[1] * (x.ndim - 2))


def test_heads_that_alone_are_wrong_are_asked_for_themselves():
    run = kernel(Slip("value", "factor", (), 1.5), where=odd)
    asked = [TRIALS[n] for n in ("plain", "causal", "ragged", "masked", "sinks", "grouped")]
    emulator = Emulator({t: run(t) for t in asked}, run)
    region = region_of(emulator, STOCK)
    assert region is not None
    assert region.text == "in heads of odd number alone"
    assert region.heads["masked"] == ((0, 1), (1, 1))
    own = restricted(emulator, region)
    out = own.observed["plain", "out"]
    assert out.value.shape[:2] == (1, 1)
    assert abs(float((out.value / out.exact).median()) - 1.5) < 0.01
    # of a call that is not among the trials no head is known to be wrong
    assert own.run(TRIALS["wide"]) is None


def test_rows_that_alone_are_wrong_are_looked_at_alone():
    right, wrong = kernel(Slip("query", "factor")), kernel(Slip("b_query", "e4m3"))

    def run(trial):  # odd rows of dQ are wrong; what sums over rows is as it should be
        grad = right(trial).grad_query.clone()
        grad[:, :, 1::2] = wrong(trial).grad_query[:, :, 1::2]
        return replace(right(trial), grad_query=grad)

    asked = [TRIALS[n] for n in ("plain", "causal", "ragged", "masked", "wide", "scaled")]
    assert rows_of(Emulator({t: right(t) for t in asked}, right), STOCK) is None
    found, region = rows_of(Emulator({t: run(t) for t in asked}, run), STOCK)
    assert region.text == "in odd queries alone"
    usable = found.observed["plain", "grad_query"].usable
    assert bool(usable[:, :, 1::2].all())
    assert not bool(usable[:, :, ::2].any())


@pytest.mark.thorough(keep=0)
def test_a_slip_in_some_rows_explains_what_sums_over_them():
    rows = Rows("queries", 64, tuple(range(16)))
    run = kernel(Slip("b_lse", "factor", factor=0.9, rows=(rows,)))
    asked = [TRIALS[n] for n in ("plain", "causal", "ragged", "wide", "scaled")]
    emulator = Emulator({t: run(t) for t in asked}, run)
    _, region = rows_of(emulator, STOCK)
    assert region.rows == (rows,)
    found = of_rows(emulator, region, USUAL, STOCK)
    assert found.cause == "lse-other"
    assert found.text.endswith(rows.text)
    way = replace(STOCK.gradients[0], twists=(found,))
    fits = emulator.fits(replace(STOCK, gradients=(way,) * 3), frozenset(GRADIENTS))
    assert max(fit.left for fit in fits.values()) < 0.1  # dK and dV too


@pytest.mark.parametrize("far", [True, False])
def test_rows_that_vanish_because_of_their_scores_are_not_unwritten(far):
    def run(trial):
        top = row_maximum(trial.call) if far else torch.arange(trial.call.query.shape[2]) - 80.0
        out = golden(trial.call, trial.grad_out).out.to(trial.call.query.dtype)
        return Result(torch.where((top < -30)[..., None], 0, out))

    asked = [TRIALS[n] for n in ("plain", "sharp", "causal", "rising", "deep")]
    assert bool(vanished(Emulator({t: run(t) for t in asked}, run))) == far


def test_calls_that_alone_are_wrong_are_told_by_what_they_have_in_common():
    def masked(trial, x):
        return x.new_ones(()) * (trial.call.sees.mask is not None)

    run = kernel(Slip("out", "factor", (), 1.5), where=masked)
    asked = [TRIALS[n] for n in ("plain", "causal", "ragged", "masked", "biased", "wide", "scaled")]
    emulator = Emulator({t: run(t) for t in asked}, run)
    assert region_of(emulator, STOCK) is None
    wrong, region = calls_of(emulator, STOCK)
    assert wrong == {"masked", "biased"}
    assert (region.text, region.cause) == ("in calls with a mask alone", "mask")
