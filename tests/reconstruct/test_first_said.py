"""What stands first: calls that differ though they are equal, by more than rounding."""

from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.calls import Result
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct import CAUSES
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.first_said import called_twice, first_said
from halfulp.reconstruct.found import Reconstruction
from halfulp.reconstruct.naming import Named
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.places import Place

ASKED = panel(torch.bfloat16)[:3]


def late_rows(out):
    return out.masked_fill(torch.rand(out.shape[:3])[..., None] < 0.1, 0).bfloat16()


def rounded_at_random(out):
    ulps = 2.0 ** (out.frexp().exponent - 8).double()
    return ((out / ulps + torch.rand(out.shape, dtype=out.dtype)).floor() * ulps).bfloat16()


def known_to_be(found):
    return Reconstruction(
        target="", dtype="bfloat16", model=Model.of(BF16_FLASH2), stock=BF16_FLASH2,
        recipe=BF16_FLASH2, explained=(), causes=(), ingredients=(), harmless=(), beside=(),
        places=found, steps=(), nonfinite={}, refused=(), unsteady=True, tried=0, seconds=0.0,
        complete=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "named"),
    [(late_rows, ["unstable"]), (rounded_at_random, []), (torch.Tensor.bfloat16, [])],
)
def test_equal_calls_that_differ_by_more_than_rounding_are_told(made, named):
    def run(trial):
        state = torch.get_rng_state()  # as the audit's own calls leave it
        result = Result(made(golden(trial.call, trial.grad_out).out))
        torch.set_rng_state(state)
        return result

    observed = {trial: run(trial) for trial in ASKED}
    moved = called_twice(run, observed)
    assert bool(moved) == (made is not torch.Tensor.bfloat16)
    found = first_said(known_to_be(()), Emulator(observed, run), moved)
    assert [n.cause for n in found.causes] == [CAUSES[key] for key in named]


@pytest.mark.parametrize("gone", ["zero", "nan", "none"])
def test_a_number_for_minus_infinity_is_read_where_scores_lie_below_it(gone):
    """A fault of ours: all scores below −3000 are as one that is hidden."""

    def run(trial):
        call, out = trial.call, golden(trial.call, trial.grad_out).out
        top = (call.query.double() @ call.key.double().mT * call.scale).amax(-1, keepdim=True)
        instead = {"zero": 0 * out, "nan": out * torch.nan, "none": out}[gone]
        return Result(torch.where(top < -3000, instead, out).bfloat16())

    observed = {trial: run(trial) for trial in ASKED}
    found = first_said(known_to_be(()), Emulator(observed, run), {})
    assert [n.cause.key for n in found.causes] == ["mask-finite"] * (gone != "none")
    for told in (n.text.partition("scores lie below ")[2] for n in found.causes):
        assert float(told.partition(",")[0]) == pytest.approx(-3000, rel=0.06)


@pytest.mark.parametrize(
    ("read", "gone", "left"),
    [
        ("lse-other", ("grad_query", "grad_key", "grad_value"), []),
        ("lse-other", ("grad_query",), ["grad-tail"]),
        ("delta", ("grad_query", "grad_key", "grad_value"), ["grad-tail"]),
    ],
)
def test_gradients_without_a_weight_are_not_unwritten_where_rows_have_anothers_lse(
    read, gone, left
):
    grouped = next(t for t in panel(torch.bfloat16) if t.name == "grouped")
    exact = golden(grouped.call, grouped.grad_out)
    given = {name: getattr(exact, name).clone() for name in ("out", "grad_key", "grad_value")}
    given["grad_query"] = exact.grad_query.clone()
    for name in gone:
        given[name][1] = 0.0
    result = Result(**{name: x.bfloat16() for name, x in given.items()})
    cause = Named(CAUSES["grad-tail"], "never written", 9.0, "grad_query", "grouped", 1.0)
    place = Place("grad_query", "grouped", "", read, 1.0, 9.0, was_read=True)
    found = replace(known_to_be((place,)), causes=(cause,))
    found = first_said(found, Emulator({grouped: result}, lambda _: None), {})
    assert [n.cause.key for n in found.causes] == left


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tensor", ["out", "grad_value", "none"])
def test_bits_of_the_other_format_are_told(dtype, tensor):
    other = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}[dtype]

    def run(trial):
        exact = golden(trial.call, trial.grad_out)
        given = {n: getattr(exact, n) for n in ("out", "grad_query", "grad_key", "grad_value")}
        made = {n: x.to(other).view(dtype) if n == tensor else x.to(dtype)
                for n, x in given.items()}  # fmt: skip
        return Result(**made)

    observed = {trial: run(trial) for trial in panel(dtype)[:3]}
    found = replace(known_to_be(()), dtype=str(dtype).removeprefix("torch."))
    found = first_said(found, Emulator(observed, run), {})
    assert [n.cause.key for n in found.causes] == ["layout"] * (tensor != "none")
    assert all(n.tensor == tensor for n in found.causes)
