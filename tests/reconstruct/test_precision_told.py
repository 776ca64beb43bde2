"""What pure roundings are told as: another function of S − m than the exponential is read off, a
coarse cap, a rounded bias and packed operands are told, and what is summed otherwise is none.
"""

from dataclasses import replace

import pytest
import torch

from halfulp.calls import Result, Sees
from halfulp.formats import BF16, FP16, TF32, round_to
from halfulp.recipes import BF16_FLASH2, FP32
from halfulp.reconstruct import CAUSES, call_options, space
from halfulp.reconstruct.emulating import Emulator, Model, Way
from halfulp.reconstruct.evidence import UNEXPLAINED
from halfulp.reconstruct.exact import scores_of
from halfulp.reconstruct.exponential_read import cap_of, exponential_of
from halfulp.reconstruct.first_said import first_said
from halfulp.reconstruct.found import Reconstruction
from halfulp.reconstruct.naming import Named, differences
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.places import unexplained

LOW = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: None}
CUT = BF16.with_(rounding="toward_zero")


def with_exponential(exponential, dtype, before=lambda s: s, backward=False):
    """A kernel whose weights are this function of S − m, rounded to its own format before both
    products; with `backward` its forward pass is exact.
    """

    def run(trial):
        call = trial.call
        scores = before(scores_of(call))
        shifted = (scores - scores.amax(-1, keepdim=True)).float()
        weights, exact = exponential(shifted), shifted.exp()
        row_sum = exact.sum(-1, keepdim=True)
        stored = [x if LOW[dtype] is None else round_to(x, LOW[dtype]) for x in (weights, exact)]
        made = stored[1] if backward else stored[0]
        value = call.value.float().repeat_interleave(call.groups, 1)
        out = (made @ value / row_sum).to(dtype)
        grad = (stored[0] / row_sum).mT @ trial.grad_out.float()
        return Result(out, grad_query=call.query, grad_key=call.key, grad_value=grad.to(dtype))

    return run


def in_lines(x):
    """Of 2^x, between multiples of 1/8."""
    y = x * 1.4426950408889634
    whole = (y * 8).floor() / 8
    return torch.exp2(whole) * (1 + (y - whole) * 8 * (2 ** (1 / 8) - 1))


def by_polynomial(x):
    y = x * 1.4426950408889634
    part = y - y.floor()
    return torch.exp2(y.floor()) * (1 + part * (0.6 + part * 0.4))


def of_the_unit(x):
    """As CUDA's fast one: two units off, and one more for every unit of its argument."""
    return x.exp() * (1 - (2 + (1.17 * x.abs()).floor()) * 2.0**-23)


def rounded(fmt):
    return lambda x: round_to(x.exp(), fmt)


def of_rounded(fmt):
    return lambda x: round_to(x, fmt).exp()


@pytest.mark.parametrize(
    ("dtype", "exponential", "cause"),
    [
        (torch.float32, in_lines, "exponential"),
        (torch.float16, in_lines, "exponential"),
        (torch.bfloat16, by_polynomial, "exponential"),
        (torch.float32, of_the_unit, "exponential"),
        (torch.float32, rounded(CUT), "weights"),
        (torch.float32, rounded(TF32), "weights"),
        (torch.float16, of_rounded(FP16), "row-max"),
        (torch.bfloat16, of_rounded(BF16), "row-max"),
        (torch.float32, of_rounded(TF32), "row-max"),
    ],
)
def test_other_functions_than_the_exponential_are_read_off(dtype, exponential, cause):
    told = exponential_of(with_exponential(exponential, dtype), dtype)
    assert told is not None
    assert told.cause == cause


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("exponential", "before"),
    [
        (torch.exp, lambda s: s),
        (lambda x: torch.exp2(x * 1.4426950408889634), lambda s: s),  # whose argument is rounded
        (torch.exp, lambda s: s * 1.01),  # another scale
        (torch.exp, lambda s: round_to(s, BF16)),  # scores, and no matter of S − m
        (lambda x: x.exp() * (1 + 0.01 * (torch.arange(x.shape[-1]) % 2)), lambda s: s),  # of keys
        (lambda x: x.exp() * 0.99, lambda s: s),  # which all weights share
    ],
)
def test_what_is_no_function_of_the_distance_to_the_maximum_is_no_exponential(
    dtype, exponential, before
):
    assert exponential_of(with_exponential(exponential, dtype, before), dtype) is None


def test_products_that_are_rounded_are_no_matter_of_what_is_left_of_the_maximum():
    def run(trial):
        query, key = trial.call.query, trial.call.key
        products = round_to(query[:, :, :, None].float() * key[:, :, None].float(), FP16).sum(-1)
        scores = products * trial.call.scale
        weights = (scores - scores.amax(-1, keepdim=True)).softmax(-1)
        return Result((weights @ trial.call.value.float()).half())

    assert exponential_of(run, torch.float16) is None


def test_parts_that_are_merged_have_the_maximum_each():
    def run(trial):
        scores, value = scores_of(trial.call), trial.call.value.float()
        exact = scores - scores.amax(-1, keepdim=True)
        made = torch.empty_like(exact)
        for part in (slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16)):
            top = scores[..., part].amax(-1, keepdim=True)
            factor = (top - scores.amax(-1, keepdim=True)).exp()
            made[..., part] = in_lines((scores[..., part] - top).float()) * factor
        return Result((made / made.sum(-1, keepdim=True)).float() @ value)

    told = exponential_of(run, torch.float32)
    assert told is not None
    assert told.cause == "exponential"


def test_one_of_the_backward_pass_alone_is_told_there():
    run = with_exponential(in_lines, torch.float32, backward=True)
    assert exponential_of(run, torch.float32) is None
    told = exponential_of(run, torch.float32, backward=True)
    assert told is not None
    assert told.cause == "exponential"


@pytest.mark.parametrize(("explained", "first"), [(0.6, "exponential"), (0.95, "weights")])
def test_it_stands_before_what_explains_a_part_and_behind_what_is_proven(explained, first):
    run = with_exponential(in_lines, torch.float32)
    trial = panel(torch.float32)[0]
    other = Named(CAUSES["weights"], "", 2.0, "out", trial.name, explained)
    found = first_said(
        Reconstruction(
            target="", dtype="float32", model=Model.of(FP32), stock=FP32, recipe=FP32,
            explained=(), causes=(other,), ingredients=(), harmless=(), beside=(), places=(),
            steps=(), nonfinite={}, refused=(), unsteady=False, tried=0, seconds=0.0,
            complete=True,
        ),
        Emulator({trial: run(trial)}, run), {},
    )  # fmt: skip
    assert found.causes[0].cause.key == first


def test_the_base_of_an_exponential_is_no_fault_by_itself():
    other = BF16_FLASH2.with_(base="2", shifted_scores=FP16)
    told = {d.field: d.cause for d in differences(Model.of(other), BF16_FLASH2)}
    assert told == {"base": "", "shifted_scores": "row-max"}


@pytest.mark.parametrize(("fmt", "unit"), [("bfloat16", 1.0), ("bfloat16", 1.4426950408889634)])
def test_a_bias_that_is_rounded_is_among_what_is_tried(fmt, unit):
    (trial,) = (t for t in panel(torch.bfloat16) if t.name == "biased")
    mask = (trial.call.sees.mask * 0.37 * unit).to(getattr(torch, fmt)).float() / unit
    exact, turned = (replace(trial, call=replace(trial.call, sees=Sees(mask=x)))
                     for x in (trial.call.sees.mask * 0.37, mask))  # fmt: skip
    made = Emulator({}).tensors(turned, Way(BF16_FLASH2), None)["out"].bfloat16()
    emulator = Emulator({exact: Result(made)})
    every = call_options.operands(torch.bfloat16)
    models = [space.twisted(t, space.EVERY)(Model.of(BF16_FLASH2)) for t in every
              if t.cause == "mask"]  # fmt: skip
    left = [emulator.fits(m, frozenset({"out"}))["biased", "out"].left for m in models]
    plain = emulator.fits(Model.of(BF16_FLASH2), frozenset({"out"}))["biased", "out"].left
    assert min(left) < 1e-3
    assert plain > 0.3


@pytest.mark.parametrize(("capped_alone", "cause"), [(True, "softcap"), (False, None)])
def test_a_cap_that_is_coarse_is_told_from_an_exponential_that_is(capped_alone, cause):
    def run(trial):
        call = trial.call
        scores, weights = scores_of(call), torch.exp
        if call.softcap:  # the cap, in straight lines
            tangent = scores / call.softcap
            scores = call.softcap * (256 * tangent).round() / 256
        if not capped_alone:
            scores, weights = scores_of(call), in_lines
        weights = weights((scores - scores.amax(-1, keepdim=True)).float())
        value = call.value.float().repeat_interleave(call.groups, 1)
        return Result((weights / weights.sum(-1, keepdim=True) @ value).half())

    told = cap_of(run, torch.float16, 5.0)
    assert (told.cause if told else None) == cause


def test_calls_that_err_as_stock_does_show_no_place():
    (plain, capped) = (t for t in panel(torch.bfloat16) if t.name in ("plain", "softcap"))
    way = Way(BF16_FLASH2.with_(block_key=32, row_sum_from="rounded"))
    results = {t: Emulator({}).tensors(t, way, None)["out"] for t in (plain, capped)}
    results[capped] = (results[capped] * 1.01).bfloat16()
    emulator = Emulator({t: Result(out) for t, out in results.items()})
    (place,) = unexplained(emulator, Model.of(BF16_FLASH2), UNEXPLAINED)
    assert place.trials == {"softcap"}


@pytest.mark.parametrize("fields", [("value", "weights_operand"), ("query", "key")])
def test_operands_of_one_product_that_are_packed_by_cutting_are_among_what_is_tried(fields):
    packed = FP32.with_(**dict.fromkeys(fields, CUT))
    emulator = Emulator({t: Result(Emulator({}).tensors(t, Way(packed), None)["out"])
                         for t in panel(torch.float32)[-2:-1]})  # fmt: skip
    models = [m for text, change in space.forward_changes(torch.float32)
              if "bf16/toward_zero" in text and (m := change(Model.of(FP32)))]  # fmt: skip
    left = [next(iter(emulator.fits(m, frozenset({"out"})).values())).left for m in models]
    assert min(left) < 1e-3
