"""Mistakes that look alike, each told from the other by what only one of them does."""

import math
from dataclasses import replace

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.calls import Call, Result, Sees
from halfulp.formats import BF16
from halfulp.recipes import BF16_FLASH2, FP16_FLASH2, FP32, TORCH_CPU_FLASH, Shift
from halfulp.reconstruct import panel, reconstruct, suggested
from halfulp.reconstruct.call_asked import holds, whole
from halfulp.reconstruct.dataflow import grad_scores, grad_scores_of
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.evidence import Fit, Observed
from halfulp.reconstruct.exact import row_maximum, scores_of, weights_of
from halfulp.reconstruct.exponential_read import exponential_of
from halfulp.reconstruct.naming import differences, named
from halfulp.reconstruct.others_read import reads_others
from halfulp.reconstruct.parts_read import merged
from halfulp.reconstruct.places import unexplained
from halfulp.reconstruct.result_read import result_read
from halfulp.reconstruct.sums_read import of_division, value_rows
from halfulp.reconstruct.weights_read import compared

TRIALS = {trial.name: trial for trial in panel.panel(torch.bfloat16)}
STOCK = Model.of(BF16_FLASH2)


def given(change, *names):
    """Kernels of exact weights, changed, on some calls."""

    def run(trial):
        call = trial.call
        value = call.value.double().repeat_interleave(call.groups, 1)
        weights = change(trial, weights_of(call, scores_of(call)))
        return Result((weights @ value).to(call.query.dtype))

    return Emulator({TRIALS[name]: run(TRIALS[name]) for name in names}, run)


def without_maximum(trial, weights):
    """A maximum that is taken off the last 16 keys alone."""
    late = torch.arange(weights.shape[-1]) >= weights.shape[-1] - 16
    top = row_maximum(trial.call).unsqueeze(-1)
    wrong = weights * torch.where(late, (-top).exp(), 1.0)
    return wrong / wrong.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (without_maximum, "maximum"),
        (lambda _, p: p * torch.where(torch.arange(192) >= 176, 0.1, 1.0), "key-tail"),
        (lambda _, p: p.clamp_max(0.05), "weights"),
    ],
)
def test_weights_off_at_some_keys_say_by_what(change, cause):
    trial = TRIALS["plain"]
    read = compared(trial, change(trial, weights_of(trial.call, scores_of(trial.call))))
    assert read.cause == cause, read.text


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda s: s * 1.003, "backward-scores"),
        (lambda s: s + 0.003 * torch.linspace(-1, 1, 192)[:, None], "lse"),
    ],
)
def test_a_scale_of_the_backward_pass_is_told_from_its_lse(change, cause):
    scores = scores_of(TRIALS["causal"].call)
    weights = (change(scores) - scores.logsumexp(-1, keepdim=True)).exp()
    assert compared(TRIALS["causal"], weights, backward=True).cause == cause


def test_pairs_lost_nowhere_in_particular_are_the_small_ones():
    trial = TRIALS["plain"]
    weights = weights_of(trial.call, scores_of(trial.call))
    draw = torch.rand(weights.shape, generator=torch.Generator().manual_seed(0))
    lost = weights < draw.double().square() * 0.02
    assert compared(trial, weights.masked_fill(lost, 0)).cause == "weights"


def heads_lost(trial, weights):
    gone = torch.arange(weights.shape[1]) % trial.call.groups == 0
    return weights.masked_fill(gone[:, None, None], 0.0)


def test_heads_that_a_sum_over_their_group_lacks_are_told():
    trial = TRIALS["grouped"]
    weights = heads_lost(trial, weights_of(trial.call, scores_of(trial.call)))
    assert compared(trial, weights, backward=True).cause == "group-sum"


def halves(trial, weights):
    """Two halves, each normalized by itself, and merged alike."""
    n = weights.shape[-1]
    first = torch.arange(n) < -(-n // 2)
    return sum(x / x.sum(-1, keepdim=True) / 2 for x in (weights * first, weights * ~first))


def half(_, weights):
    n = weights.shape[-1]
    return weights * (torch.arange(n) < -(-n // 2))


@pytest.mark.parametrize(("change", "parted"), [(halves, True), (half, False)])
def test_keys_left_out_are_not_parts_merged(change, parted):
    assert (merged(given(change, "plain", "ragged", "scaled", "wide")) is not None) == parted


@pytest.mark.parametrize(("bits", "divides"), [(7, True), (24, False)])
def test_a_coarse_reciprocal_is_told_from_a_coarse_sum(bits, divides):
    def run(trial):
        scores = scores_of(trial.call)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        fraction, power = torch.frexp(1 / weights.sum(-1, keepdim=True))
        inverse = torch.ldexp((fraction * 2**bits).floor() / 2**bits, power)
        rows = weights.bfloat16().double() if not divides else weights
        value = trial.call.value.double().repeat_interleave(trial.call.groups, 1)
        return Result((rows @ value * inverse).to(trial.call.query.dtype))

    assert of_division(run, TRIALS["plain"]) == divides


@pytest.mark.parametrize("low", [True, False])
def test_a_scale_that_is_rounded_is_another_factor_for_each(low):
    def scale(trial):
        exact = trial.call.scale / math.log(2)
        rounded = float(torch.tensor(exact).bfloat16()) if low else exact * 1.002
        return replace(trial.call, scale=rounded * math.log(2))

    def run(trial):
        return Result(golden(scale(trial), trial.grad_out).out.to(torch.bfloat16))

    names = ("plain", "wide", "scaled", "ragged")
    outs = {n: Observed.of(run(TRIALS[n]).out, golden(TRIALS[n].call).out) for n in names}
    emulator = Emulator({TRIALS[n]: run(TRIALS[n]) for n in names}, run)
    found = suggested.scales_of_their_own(emulator, outs)
    assert [t.cause for t in found] == (["scale"] if low else [])
    for twist in found:
        turned = twist.turn(TRIALS["wide"]).call.scale
        assert turned == pytest.approx(scale(TRIALS["wide"]).scale, rel=5e-4)


@pytest.mark.parametrize("of_sizes", [True, False])
def test_calls_of_sizes_alone_are_asked_at_others(of_sizes):
    def wrong(trial, weights):
        tail = weights.shape[-1] % 64 if of_sizes else 16
        return weights * (torch.arange(weights.shape[-1]) < weights.shape[-1] - tail)

    emulator = given(wrong, "ragged")
    told = "calls of lengths off 64 alone"
    assert holds(emulator, STOCK, told, frozenset({"ragged"})) == of_sizes
    assert holds(emulator, STOCK, "calls causal alone", frozenset({"ragged"}))


def test_what_goes_along_with_a_mistake_leaves_more_than_rounding():
    trial = TRIALS["plain"]
    exact = golden(trial.call).out
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0)) * 2e-3
    observed = Observed.of(exact * 0.5 + noise, exact)
    stock = observed.against(exact + noise)
    assert observed.against(exact * 0.5).within_rounding(stock)
    assert not observed.against(exact * 0.6).within_rounding(stock)


def test_a_call_of_whole_sizes_has_its_numbers():
    trial = whole(TRIALS["ragged"])
    assert trial.call.query.shape[2:] == trial.call.value.shape[2:] == (128, 64)
    scores, own = scores_of(trial.call), scores_of(TRIALS["ragged"].call)
    assert torch.equal(scores[..., :93, :93], own[..., :93, :93])


def with_values(change):
    """A sound kernel that takes changed values."""

    def run(trial):
        call = trial.call
        value = change(call.value.double()).repeat_interleave(call.groups, 1)
        weights = weights_of(call, scores_of(call))
        return Result((weights @ value).to(call.query.dtype))

    return run


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda v: v, ""),
        (lambda v: torch.where(torch.arange(v.shape[2])[:, None] % 2 == 1, v.flip(-1), v),
         "layout"),
        (lambda v: torch.where(torch.arange(v.shape[2])[:, None] % 2 == 1, v * v, v),
         "other-data"),
        (lambda v: v * (1 + 2.0**-8), ""),
    ],
)  # fmt: skip
def test_values_of_one_key_tell_their_order_from_other_numbers(change, cause):
    said, key = value_rows(with_values(change), TRIALS["plain"])
    assert key == cause, said


@pytest.mark.parametrize(("exact_keys", "cause"), [(0, "exponential"), (6, "exponential"),
                                                   (16, None)])  # fmt: skip
def test_an_exponential_that_some_keys_have_otherwise_is_found(exact_keys, cause):
    def run(trial):
        call = trial.call
        scores = scores_of(call)
        below = (scores - scores.amax(-1, keepdim=True)) / math.log(2)
        part = below - below.floor()
        other = (1.01 + part * (0.65 + part * 0.34)) * torch.exp2(below.floor())
        some = torch.arange(scores.shape[-1]) % 16 >= exact_keys
        weights = torch.where(some, other, torch.exp2(below))
        weights = weights / weights.sum(-1, keepdim=True)
        value = call.value.double().repeat_interleave(call.groups, 1)
        return Result((weights @ value).to(call.query.dtype))

    told = exponential_of(run, torch.float16)
    assert (told.cause if told else None) == cause


def test_a_gradient_that_goes_on_from_the_sequence_before_follows_it():
    def run(trial):
        result = golden(trial.call, trial.grad_out)
        return Result(result.out, grad_query=result.grad_query.cumsum(0),
                      grad_key=result.grad_key, grad_value=result.grad_value)  # fmt: skip

    trial = TRIALS["grouped"]
    exact = golden(trial.call, trial.grad_out).grad_query
    observed = Observed.of(run(trial).grad_query, exact)
    others = reads_others(run, trial, "grad_query", observed)
    assert others is not None
    assert others.told == "heads"


@pytest.mark.parametrize(("both", "cause"), [(True, "other-data"), (False, "other-data"),
                                             (None, "key-tail")])  # fmt: skip
def test_keys_that_are_read_in_others_place_are_told_from_lost_ones(both, cause):
    trial = TRIALS["plain"]
    call = trial.call
    scores = scores_of(call)
    if both:  # K and V of the block before, in the place of the last one
        scores[..., -16:] = scores[..., -32:-16]
    weights = weights_of(call, scores)
    if both is not None:
        weights[..., -32:-16] += weights[..., -16:]
    weights[..., -16:] = 0
    read = compared(trial, weights)
    assert read.cause == cause, read.text
    assert ("keys 160-175 are read in their place" in read.text) == (cause == "other-data")


def test_rows_that_lack_every_other_key_have_no_other_in_its_place():
    trial = TRIALS["plain"]
    weights = weights_of(trial.call, scores_of(trial.call)) * (torch.arange(192) % 32 < 16)
    read = compared(trial, weights / weights.sum(-1, keepdim=True))
    assert read.cause == "key-tail", read.text


@pytest.mark.parametrize(("by_weight", "cause"), [(True, "tiles-skipped"), (False, "split-merge")])
def test_tiles_that_rows_lose_by_their_weight_are_told_from_those_of_whole_heads(by_weight, cause):
    trial = TRIALS["plain"]
    weights = weights_of(trial.call, scores_of(trial.call)).unflatten(-1, (3, 64))
    tops = weights.amax(-1, keepdim=True)
    lost = tops == tops.amin(-2, keepdim=True)
    if not by_weight:  # head 1 lacks the second tile, whatever it weighs
        tile = torch.arange(2)[:, None, None, None] * torch.arange(3)[:, None]
        lost = (tile == 1).expand_as(tops)
    made = weights.masked_fill(lost, 0).flatten(-2)
    assert compared(trial, made / made.sum(-1, keepdim=True)).cause == cause


@pytest.mark.parametrize(("last", "size", "cause"), [
    (True, 2.0**-7, "row-max"), (False, 2.0**-7, "accumulator"), (False, 1.0, "rescale"),
])  # fmt: skip
def test_factors_of_tiles_are_told_by_their_size_and_the_last_one(last, size, cause):
    trial = TRIALS["plain"]
    weights = weights_of(trial.call, scores_of(trial.call)).unflatten(-1, (3, 64))
    draw = torch.Generator().manual_seed(0)
    factor = size * torch.randn(*weights.shape[:-1], 1, generator=draw, dtype=torch.float64)
    if not last:
        factor[..., -1, :] = 0
    assert compared(trial, (weights * factor.exp()).flatten(-2)).cause == cause


def test_a_sum_in_halves_whose_rescales_round_weights_too_is_the_sum():
    def half(x):
        return x.half().float()

    def run(trial):
        call = trial.call
        scores, value = scores_of(call).float(), call.value.float()
        m, l, acc = (torch.full((*scores.shape[:3], 1), x) for x in (-math.inf, 0.0, 0.0))
        for s, v in zip(scores.split(64, -1), value.split(64, 2), strict=True):
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, a = (s - new).exp(), (m - new).exp()
            m, l, acc = new, l * a + p.sum(-1, keepdim=True), half(acc * a)
            for part in range(0, s.shape[-1], 4):
                some = slice(part, part + 4)
                acc = half(acc + half(half(p[..., some]) @ v[:, :, some]))
        return Result((acc / l).half())

    trials = {t.name: t for t in panel.panel(torch.float16)}
    emulator = Emulator({trials["plain"]: run(trials["plain"])}, run)
    read = result_read(emulator, Model.of(FP16_FLASH2), trials["plain"], "out")
    assert read.cause == "accumulator", read.text
    assert "where all weights are alike" in read.text


@pytest.mark.parametrize(("in_place", "cause"), [(False, "other-data"), (True, "key-heads")])
def test_keys_of_the_next_head_beside_its_own_are_no_pairing_of_heads(in_place, cause):
    def run(trial):
        call = trial.call
        key, value = (x.repeat_interleave(call.groups, 1) for x in (call.key, call.value))
        by = -1 if call.groups > 1 or not in_place else 0
        after = (x.roll(by, 1) for x in (key, value))
        key, value = (
            other if in_place else torch.cat([x, other[:, :, :20]], 2)
            for x, other in zip((key, value), after, strict=True)
        )
        scores = call.query.double() @ key.double().mT * call.scale
        return Result((scores.softmax(-1) @ value.double()).to(call.query.dtype))

    (place,) = unexplained(Emulator({TRIALS["decode"]: run(TRIALS["decode"])}, run), STOCK, 0.3)
    assert place.cause == cause, place.text


def test_rows_of_the_next_head_past_the_end_are_others_data_in_dk():
    def run(trial):
        call = trial.call
        result = golden(call, trial.grad_out)
        query, do = (x[:, :, :32].roll(-1, 1) for x in (call.query, trial.grad_out))
        lse = scores_of(call).logsumexp(-1, keepdim=True)[:, :, :32].roll(-1, 1)
        weights = (query.double() @ call.key.double().mT * call.scale - lse).exp()
        inner = weights * (do.double() @ call.value.double().mT)
        more = inner.mT @ query.double() * call.scale
        return replace(result, grad_key=result.grad_key + more)

    trial = TRIALS["wide"]
    observed = Observed.of(run(trial).grad_key, golden(trial.call, trial.grad_out).grad_key)
    others = reads_others(run, trial, "grad_key", observed)
    assert others is not None
    assert others.told == "heads"


@pytest.mark.parametrize(("several", "cause"), [(True, "other-data"), (False, "key-heads")])
def test_a_first_sequence_that_is_right_pairs_heads_rightly(several, cause):
    """In grouped calls alone K lacks a half, of sequences after the first, or of all."""

    def run(trial):
        call = trial.call
        if call.groups > 1:
            gone = torch.arange(len(call.key))[:, None, None, None] >= int(several)
            call = replace(call, key=torch.where(gone, call.key.relu(), call.key))
        return Result(golden(call).out.to(call.query.dtype))

    names = ("grouped", "decode", "plain", "wide", "masked", "biased", "ragged", "scaled")
    emulator = Emulator({TRIALS[name]: run(TRIALS[name]) for name in names}, run)
    (place,) = unexplained(emulator, Model.of(FP32.with_(out=BF16)), 0.3)
    assert place.cause == cause, place.text


def test_queries_that_are_counted_twice_are_no_matter_of_lse():
    def run(trial):
        result = golden(trial.call, trial.grad_out)
        twice = trial.grad_out.clone()
        twice[:, :, 32:64] *= 2
        dv = golden(trial.call, twice).grad_value
        return Result(*(x.bfloat16() for x in (
            result.out, result.lse, result.grad_query, result.grad_key, dv)))  # fmt: skip

    emulator = Emulator({TRIALS["wide"]: run(TRIALS["wide"])}, run)
    read = result_read(emulator, STOCK, TRIALS["wide"], "grad_value")
    assert "counted twice" in read.text
    assert not read.cause


def test_keys_of_the_middle_that_dq_lacks_are_no_matter_of_its_sum():
    def run(trial):
        result = golden(trial.call, trial.grad_out)
        call = trial.call
        p = weights_of(call, scores_of(call))
        dp = trial.grad_out.double() @ call.value.double().mT
        inner = p * (dp - (p * dp).sum(-1, keepdim=True))
        inner[..., 64:128] = 0
        dq = (inner @ call.key.double() * call.scale).bfloat16()
        return Result(result.out, grad_query=dq, grad_key=result.grad_key,
                      grad_value=result.grad_value)  # fmt: skip

    said = grad_scores(run, TRIALS["plain"], "grad_query")
    assert said.cause == "grad-tail", said.text


@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        # tiles on the diagonal, of 64
        ("causal", lambda ds, i, j: ds.masked_fill(i // 64 == j // 64, 0), "grad-tail"),
        ("causal", lambda ds, i, j: torch.where(j == i + 1, 0.05, ds), "backward-mask"),
    ],
)
def test_pairs_that_dq_alone_lacks_or_should_not_have_are_told(name, change, cause):
    def run(trial):
        result = golden(trial.call, trial.grad_out)
        call = trial.call
        i, j = (torch.arange(x.shape[2]) for x in (call.query, call.key))
        inner = change(grad_scores_of(trial), i[:, None], j)
        dq = (inner @ call.key.double() * call.scale).bfloat16()
        return Result(result.out, grad_query=dq, grad_key=result.grad_key,
                      grad_value=result.grad_value)  # fmt: skip

    said = grad_scores(run, TRIALS[name], "grad_query")
    assert said.cause == cause, said.text


@pytest.mark.parametrize(("kind", "cause"), [("vector", "operand"), ("columns", "scores")])
def test_other_scores_are_no_matter_of_sums(kind, cause):
    """K with another vector added in each block; scales of queries that are taken by column."""
    trial = TRIALS["plain"]
    call = trial.call
    scores = scores_of(call)
    if kind == "vector":
        key = call.key.double().unflatten(2, (3, 64))
        moved = call.query.double() @ key.mean(3, keepdim=True).expand_as(key).flatten(2, 3).mT
        scores = scores - moved * call.scale
    else:
        unit = call.query.double().abs().amax(-1, keepdim=True)
        scores = scores / unit * unit.mT
    read = compared(trial, weights_of(call, scores))
    assert read.cause == cause, read.text


def test_the_lse_of_parts_that_is_rounded_is_told_from_a_maximum_that_is():
    trial = TRIALS["plain"]
    scores = scores_of(trial.call).unflatten(-1, (3, 64))
    lse = scores.logsumexp(-1, keepdim=True)
    low = lse.bfloat16().double()
    weights = (scores - lse + low).flatten(-2).exp() / low.exp().sum(-2)
    read = compared(trial, weights)
    assert read.cause == "split-merge", read.text
    assert "the lse of each to bf16" in read.text


@pytest.mark.parametrize(("keys", "cause"), [((95, 96), "other-data"), ((190, 192), "key-tail")])
def test_keys_of_the_middle_that_are_read_twice_are_others_data(keys, cause):
    trial = TRIALS["plain"]
    weights = weights_of(trial.call, scores_of(trial.call))
    weights[..., slice(*keys)] *= 2
    read = compared(trial, weights / weights.sum(-1, keepdim=True))
    assert read.cause == cause, read.text


def test_heads_that_are_0_are_never_written_rather_than_multiplied():
    def run(trial):
        call = trial.call
        last = torch.arange(call.query.shape[1]) % call.groups == call.groups - 1
        gone = last[:, None, None]
        return Result(golden(call).out.masked_fill(gone, 0).to(call.query.dtype))

    names = ("grouped", "decode")
    emulator = Emulator({TRIALS[name]: run(TRIALS[name]) for name in names}, run)
    outs = {name: emulator.observed[name, "out"] for name in names}
    fitted = {n: suggested.factor_of(o, o.exact) for n, o in outs.items()}
    found = suggested.factors("out", fitted, {n: TRIALS[n] for n in names})
    assert found[0].cause == "unwritten", found[0].text


def test_a_rounding_that_one_call_alone_shows_a_little_is_none():
    """A maximum that stays at the sink rounds other weights than the largest."""

    def run(trial):
        call = trial.call
        scores = scores_of(call).float()
        top = scores.amax(-1, keepdim=True) - 0.4  # rounds otherwise, and no worse
        if call.sinks is not None:
            sink = call.sinks.view(1, -1, 1, 1).expand_as(top)
            scores, top = torch.cat([scores, sink], -1), torch.maximum(sink, top - 5)
        weights = (scores - top).exp()
        value = call.value.float().repeat_interleave(call.groups, 1)
        value = torch.nn.functional.pad(value, (0, 0, 0, weights.shape[-1] - value.shape[2]))
        out = weights.bfloat16().float() @ value / weights.sum(-1, keepdim=True)
        return Result(out.nan_to_num(0.0).bfloat16())

    some = {t.name: t for t in (*TRIALS.values(), *panel.panel(torch.bfloat16, rarer=True))}
    names = ("plain", "causal", "wide", "scaled", "ragged", "sinks_window")
    emulator = Emulator({some[name]: run(some[name]) for name in names}, run)
    fits = emulator.fits(STOCK, frozenset({"out"}))
    assert 1.25 < fits["sinks_window", "out"].times < 1.5
    assert not unexplained(emulator, STOCK, 0.3)


def test_an_additive_mask_leaves_the_future_hidden_in_every_recipe():
    rarer = {t.name: t for t in panel.panel(torch.bfloat16, rarer=True)}
    trial = rarer["causal_biased"]
    exact = golden(trial.call, trial.grad_out)
    emulator = Emulator({trial: exact})
    for recipe in (TORCH_CPU_FLASH, BF16_FLASH2):
        way = Model.of(recipe).forward
        made = emulator.tensors(trial, way, None) | emulator.tensors(trial, way, way)
        for name in ("out", "grad_query", "grad_key", "grad_value"):
            off = (made[name].double() - getattr(exact, name)).norm()
            assert off < 0.02 * getattr(exact, name).norm(), (recipe.name, name)


@pytest.mark.parametrize(("left", "count"), [(0.3, 0), (0.05, 1)])
def test_a_little_harm_of_one_call_is_a_cause_where_it_is_proven(left, count):
    stock = BF16_FLASH2
    rounded = Model.of(stock.with_(accumulator=BF16))

    class Two:
        """Of two calls one errs 1.3 times as much with the rounding."""

        trials = {"one": None, "other": None}  # noqa: RUF012 - an emulator has them so

        def fits(self, model, _):
            def fit(more, rest):
                own, one = (torch.full((1,), x, dtype=torch.float64) for x in (more**2, 1.0))
                share = rest if model == rounded else 1.0
                return Fit(share * own, own, own if model == rounded else one, 0.0)

            return {("one", "out"): fit(1.3, left), ("other", "out"): fit(1.0, 0.01)}

    found, harmless = named(Two(), rounded, stock)
    assert len(found) == count
    assert bool(harmless) != bool(found)


@pytest.mark.thorough(keep=0)
def test_a_factor_that_a_twist_has_in_calls_of_another_width_is_no_one_number():
    """dQ has the scale twice in grouped calls, which are of two widths: one slip fits one alone."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value, causal, scale):
            call = Call(query, key, value, sees=Sees(causal=causal), scale=scale)
            ctx.call = call
            return golden(call).out.to(query.dtype)

        @staticmethod
        def backward(ctx, grad):
            call = ctx.call
            dq, dk, dv = (
                getattr(golden(call, grad), name)
                for name in ("grad_query", "grad_key", "grad_value")
            )
            dq = dq * call.scale if call.groups > 1 else dq
            return *(x.to(grad.dtype) for x in (dq, dk, dv)), None, None

    def attention(query, key, value, is_causal=False, scale=None, enable_gqa=False):
        return Twice.apply(query, key, value, is_causal, scale)

    found = reconstruct(attention)
    assert found.causes[0].cause.key == "grad-scale", found.sentence
    assert "twice, in calls grouped alone" in found.causes[0].text


def test_a_maximum_that_is_rounded_up_is_no_fault():
    rounded = Model.of(FP16_FLASH2.with_(base="2", shift=Shift("integer")))
    causes = {d.field: d.cause for d in differences(rounded, FP16_FLASH2)}
    assert not causes["shift"]
