"""What stands first: calls that differ though they are equal, by more than rounding."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.calls import Result
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct import CAUSES
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.first_said import called_twice, first_said
from halfulp.reconstruct.floor_read import floor_of, products_overflow
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


def eager(query, key, value, is_causal, scale, attn_mask, *, hidden, begins=-torch.inf, low=True):
    """As plain code has it, scores in the operands' format or not; a fault where what hides, or a
    maximum to begin with, is a number that scores may lie below.
    """
    scores = (query @ key.mT if low else query.float() @ key.float().mT) * scale
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    seen = seen if attn_mask is None else seen & attn_mask
    scores = scores.masked_fill(~seen, hidden).float()
    weights = (scores - scores.amax(-1, keepdim=True).clamp_min(begins)).exp()
    return (weights / weights.sum(-1, keepdim=True)).to(value.dtype) @ value


def said_of(kernel, dtype, known=()):
    observed = {t: Result(golden(t.call).out.to(dtype)) for t in panel(dtype)[:3]}
    found = replace(known_to_be(()), dtype=str(dtype).removeprefix("torch."), causes=known)

    def run(trial):
        call = trial.call
        given = [x.detach().requires_grad_() for x in (call.query, call.key, call.value)]
        if call.sees.window is not None:
            return None
        out = kernel(*given, call.sees.causal, call.scale, call.sees.mask)
        return Result(out.detach(), None, *torch.autograd.grad(out, given, trial.grad_out))

    return first_said(found, Emulator(observed, run), {}).causes


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_number_for_minus_infinity_is_read_where_scores_lie_below_it(dtype, low):
    for number in (-1e4, -3e4, -5e4):
        for fault in ({"hidden": number}, {"hidden": -torch.inf, "begins": number}):
            told = said_of(partial(eager, low=low, **fault), dtype)
            assert [n.cause.key for n in told] == ["mask-finite"]
            read = float(told[0].text.partition("scores lie below ")[2])
            assert read == pytest.approx(number, rel=0.06)


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_number_that_no_score_lies_below_is_as_good(dtype, low):
    for number in (-torch.inf, torch.finfo(dtype).min):
        assert not said_of(partial(eager, low=low, hidden=number), dtype)


def test_a_number_in_the_backward_pass_alone_is_read():
    def kernel(*given):
        wrong = eager(*given, hidden=-1e4)
        right = eager(*(x.detach() for x in given[:3]), *given[3:], hidden=-torch.inf)
        return wrong + (right - wrong).detach()

    assert [n.cause.key for n in said_of(kernel, torch.float32)] == ["backward-mask"]


def test_statistics_that_leave_their_format_are_no_number_for_minus_infinity():
    def in_half(*given):
        first = given[0][..., :1] * given[1][:, :, :1, :1] * given[4]  # one score of each row
        far = (first.abs() > 40_000).to(given[0].dtype)
        return eager(*given, hidden=-torch.inf) * (1 - far)

    (told,) = said_of(in_half, torch.float16)
    assert told.cause.key == "mask-finite"
    known = Named(CAUSES["row-max"], "row_max=fp16", 2.0, "out", "sharp", 1.0)
    assert said_of(in_half, torch.float16, (known,)) == (known,)


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


@pytest.mark.parametrize("scaled_first", [True, False])
def test_products_beyond_float16_are_no_floor(scaled_first):
    """What is scaled before it is stored in float16 is beyond it only where scores are."""

    def run(trial):
        call, factor = trial.call, 64.0  # as of a base, or of codes
        product = call.query.float() @ call.key.float().mT * (call.scale if scaled_first else 1)
        stored = (product * factor).half().float() / factor
        scores = stored if scaled_first else stored * call.scale
        scores = call.sees.apply(scores, *(slice(0, n) for n in scores.shape[2:]), 1.0)
        return Result((scores.softmax(-1) @ call.value.float()).bfloat16())

    assert products_overflow(run, torch.bfloat16) != scaled_first
    told = floor_of(run, torch.bfloat16)
    assert told.cause == ("mask-finite" if scaled_first else "scores")
