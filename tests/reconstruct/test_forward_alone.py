"""One pass, or one gradient, that alone rounds otherwise: what is sound beside it tells where to
look, and numbers of a row that are kept in one format are found together.
"""

from dataclasses import replace

import pytest
import torch

from halfulp.calls import Result
from halfulp.formats import FP16, custom, round_to
from halfulp.recipes import FP16_FLASH2, Shift
from halfulp.reconstruct import space
from halfulp.reconstruct.changed import open_among, with_own_forward
from halfulp.reconstruct.descent import Search
from halfulp.reconstruct.emulating import GRADIENTS, TENSORS, Emulator, Model, Way
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.naming import differences
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.slip_flow import USUAL
from halfulp.reconstruct.slip_kinds import Slip
from halfulp.reconstruct.slips import as_twist, likeliest
from halfulp.reconstruct.stages import Stages
from halfulp.reconstruct.sums_read import one_term
from halfulp.reconstruct.weights_read import compared

TRIALS = {t.name: t for t in panel(torch.float16)}
ASKED = ("plain", "ragged", "scaled")
BACKWARD = frozenset(GRADIENTS)
TILED = FP16_FLASH2.with_(block_key=64)
STOCK = Model.of(TILED)
IN_HALF = TILED.with_(base="2", row_max=FP16, block_sum=FP16, row_sum=FP16)
PRESCALED = {"scale_into": "query", "scaled_operand": FP16, "base": "2", "shift": Shift()}


def of_model(model):
    """A kernel that gives what a model gives."""

    def run(trial):
        made = {n: Emulator({}).made(trial, model, n) for n in TENSORS}
        return Result(**{n: x if n == "lse" else x.half() for n, x in made.items()})

    return run


def seen(run):
    return Emulator({TRIALS[name]: run(TRIALS[name]) for name in ASKED}, run)


@pytest.fixture(scope="module")
def forward_alone():
    """Statistics in 16 bits, beside a backward pass that runs a sound forward pass anew."""
    return seen(of_model(replace(STOCK, forward=Way(IN_HALF), apart=True)))


@pytest.fixture(scope="module")
def query_alone():
    """Q is scaled and rounded once more for dQ alone."""
    return seen(of_model(space.setting(frozenset({"grad_query"}), **PRESCALED)(STOCK)))


def test_a_sound_backward_pass_tells_that_its_forward_pass_is_its_own(forward_alone):
    search = Search(forward_alone.fits)
    found = with_own_forward(search, Model.of(FP16_FLASH2), BACKWARD, ())
    assert found.apart
    assert found.forward.recipe.block_key == 64  # as its weights are rounded, no sum shows it
    assert all(f.left < 0.05 for f in forward_alone.fits(found, BACKWARD).values())


def test_numbers_of_a_row_in_one_format_are_found_together(forward_alone):
    model = Stages(forward_alone, torch.float16, 2500).run()
    told = {d.field: d.cause for d in differences(model, FP16_FLASH2) if d.field}
    assert "row-sum" in told.values()
    assert all(f.left < 0.05 for f in forward_alone.fits(model, frozenset(TENSORS)).values())
    assert model.gradients[0].recipe.row_sum == FP16_FLASH2.row_sum


def test_one_gradient_that_errs_is_asked_alone(query_alone):
    assert open_among(query_alone.fits(STOCK, BACKWARD)) == {"grad_query"}
    model = Stages(query_alone, torch.float16, 2500).run()
    assert model.gradients[0].recipe.scale_into == "query"
    assert model.gradients[1:] == STOCK.gradients[1:]
    assert all(f.left < 0.05 for f in query_alone.fits(model, BACKWARD).values())


def test_log2e_is_folded_into_an_operand_in_base_2():
    trial = TRIALS["plain"]
    query = (trial.call.query.float() * (trial.call.scale * 1.4426950408889634)).half()
    by_hand = replace(trial, call=replace(trial.call, query=query, scale=0.6931471805599453))
    folded = Emulator({}).made(trial, Model.of(TILED.with_(**PRESCALED)), "lse")
    own = Emulator({}).made(by_hand, STOCK, "lse")
    assert float((folded - own).abs().max()) < 1e-5


def test_what_fits_alike_on_all_calls_is_told_by_the_other_results():
    error = torch.randn(1, 2, 64, 16)
    observed = Observed.of(error, torch.zeros_like(error))
    near, far = observed.against(error * 0.99), observed.against(error * 0)

    def fits(model, tensors, _):
        good = {"start": (), "wrong": ("out",), "right": ("out", "grad_query")}[model]
        return {("call", name): near if name in good else far for name in tensors}

    search = Search(fits, also=frozenset({"out", "grad_query"}))
    changes = [("wrong", "wrong"), ("right", "right")]
    assert search.best("", "start", changes, frozenset({"out"}), 1) == "right"


def test_a_number_that_is_the_scale_is_said_to_be_it():
    slip, trial = Slip("ds_in_dq", "scaled", ("diagonal",)), TRIALS["plain"]
    made = of_model(STOCK)(trial)
    grads = {n: getattr(made, n).float() for n in GRADIENTS}
    changed = as_twist(slip, USUAL).back(trial, grads)
    result = Result(made.out, **{n: x.half() for n, x in changed.items()})
    emulator = Emulator({trial: result}, lambda _: None)
    found = likeliest(emulator, trial, BACKWARD, USUAL, coarse=False)[0].slip
    assert (found.mistake, found.parts, found.cause) == ("scaled", ("diagonal",), "grad-scale")


@pytest.mark.parametrize(
    ("value", "out", "where"),
    [
        (lambda v: v, lambda o: (o * 64).round() / 64, "store"),
        (lambda v: (v * 16).round() / 16, lambda o: o, "operand"),
    ],
)
def test_an_operand_is_off_by_the_same_numbers_however_little_it_weighs(value, out, where):
    def run(trial):
        call = replace(trial.call, value=value(trial.call.value.float()).half())
        made = of_model(STOCK)(replace(trial, call=call))
        return replace(made, out=out(made.out.float()).half())

    assert one_term(run, TRIALS["plain"], "out") == where


@pytest.mark.parametrize("cause", ["reciprocal", "weights"])
def test_a_row_s_number_that_is_cut_is_no_matter_of_its_weights(cause):
    trial = panel(torch.float32)[0]
    exact = weights_of(trial.call, scores_of(trial.call))
    of = scores_of(trial.call).logsumexp(-1, keepdim=True).exp() if cause == "reciprocal" else exact
    cut = round_to(1 / of, custom(8, 12).with_(rounding="toward_zero")) * of
    assert compared(trial, exact * cut).cause == cause
