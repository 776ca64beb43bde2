"""What only some calls show is told by what is wrong in them: options, groups, numbers of heads."""

import math

import pytest
import torch

from halfulp.algorithms import golden
from halfulp.calls import Result
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct import panel, reconstruct
from halfulp.reconstruct.call_causes import of_calls
from halfulp.reconstruct.call_options import groups
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.evidence import UNEXPLAINED, Observed
from halfulp.reconstruct.exact import scores_of
from halfulp.reconstruct.naming import Named
from halfulp.reconstruct.places import unexplained
from halfulp.reconstruct.regions import Region
from halfulp.reconstruct.scores_read import unit_scores
from halfulp.reconstruct.slip_kinds import Slip
from halfulp.reconstruct.suggested import exchanged
from halfulp.reconstruct.twists import results

TRIALS = {trial.name: trial for trial in panel.panel(torch.bfloat16)}


def plain(query, key, value, is_causal, scale, window=None, low=torch.bfloat16, hidden=0.0):
    """Attention in float32 whose weights alone are rounded."""
    share, n, n_key = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    i, j = torch.arange(n)[:, None], torch.arange(n_key)
    seen = (j <= i) if is_causal else torch.ones(n, n_key, dtype=torch.bool)
    if window is not None:
        left, right = (w if w >= 0 else n + n_key for w in window)
        seen = seen & (j >= i - left) & (j <= i + right)
    scores = (query.float() @ key.float().mT * scale + hidden).masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights.to(low).float() @ value.float()).to(query.dtype)


def window_begins_below_0(query, key, value, is_causal=False, scale=None, window=None):
    """Rows nearer to the first key than the window is wide see nothing."""
    out = plain(query, key, value, is_causal, scale, window)
    if window is None or window[0] < 0:
        return out
    return out * (torch.arange(out.shape[2]) >= window[0])[:, None]


def layout_by_the_number_of_heads(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    if key.shape[1] % 4 == 0:
        b, h, n, d = key.shape
        key, value = (x.reshape(b, n, h, d).transpose(1, 2) for x in (key, value))
    return plain(query, key, value, is_causal, scale)


def halved_in_groups(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    value = value * 0.5 if key.shape[1] < query.shape[1] else value
    return plain(query, key, value, is_causal, scale)


def through_halves(query, key, value, is_causal=False, scale=None):
    halves = (x.half() for x in (query, key, value))
    return plain(*halves, is_causal, scale, low=torch.float16).to(query.dtype)


def values_by_the_querys_width(query, key, value, is_causal=False, scale=None):
    n, wide = value.shape[2:]
    places = torch.arange(n)[:, None] * query.shape[-1] + torch.arange(wide)
    memory = torch.nn.functional.pad(value.flatten(2), (0, n * query.shape[-1]))
    return plain(query, key, memory[:, :, places], is_causal, scale)


def summed_without_a_tail(query, key, value, is_causal=False, scale=None):
    """Keys past the first 64 have weight, and where they fill no block no part in the sum."""
    out = plain(query, key, value, is_causal, scale)
    if is_causal or key.shape[2] % 64 == 0:
        return out
    weights = (query.float() @ key.float().mT * scale).softmax(-1)
    return (out.float() / weights[..., :64].sum(-1, keepdim=True)).to(query.dtype)


def zeros_in_the_sum(query, key, value, is_causal=False, scale=None):
    """Keys that fill up the last block of 64 have no weight in O, and a part in the sum."""
    out = plain(query, key, value, is_causal, scale)
    scores = query.float() @ key.float().mT * scale
    if is_causal:
        return out
    filled = torch.nn.functional.pad(scores, (0, -key.shape[2] % 64))
    share = (scores.logsumexp(-1, keepdim=True) - filled.logsumexp(-1, keepdim=True)).exp()
    return (out.float() * share).to(query.dtype)


def masked(query, key, value, is_causal, scale, mask):
    """Attention with a mask; rows that see nothing are 0."""
    hidden, seen = 0.0 if mask is None else mask, torch.ones(1, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        seen = mask.any(-1, keepdim=True)
        hidden = torch.zeros(mask.shape).masked_fill(~mask & seen, -math.inf)
    return plain(query, key, value, is_causal, scale, hidden=hidden) * seen


def no_mask_for_few_queries(query, key, value, is_causal=False, scale=None, attn_mask=None):
    return masked(query, key, value, is_causal, scale, None if query.shape[2] < 8 else attn_mask)


def causal_in_chunks(query, key, value, is_causal=False, scale=None):
    if not is_causal:
        return plain(query, key, value, is_causal, scale)
    i, j = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    hidden = torch.zeros(len(i), len(j)).masked_fill(j // 64 != i // 64, -math.inf)
    return plain(query, key, value, is_causal, scale, hidden=hidden)


def tiles_judged_by_their_first_row(query, key, value, is_causal=False, scale=None,
                                    attn_mask=None):  # fmt: skip
    """Rows of a tile of 32 see nothing where its first one sees nothing."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        first = attn_mask.any(-1, keepdim=True)[..., ::32, :].repeat_interleave(32, -2)
        attn_mask = attn_mask & first[..., : attn_mask.shape[-2], :]
    return masked(query, key, value, is_causal, scale, attn_mask)


def mask_of_first_rows(query, key, value, is_causal=False, scale=None, attn_mask=None):
    """One row of a mask stands for a block of 32 queries."""
    if attn_mask is not None and attn_mask.shape[-2] > 1:
        first = attn_mask[..., ::32, :].repeat_interleave(32, -2)
        attn_mask = first[..., : attn_mask.shape[-2], :]
    return masked(query, key, value, is_causal, scale, attn_mask)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("kernel", "cause", "told"),
    [
        (no_mask_for_few_queries, "mask", ""),
        (causal_in_chunks, "causal-mask", "before its own block of 64"),
        (tiles_judged_by_their_first_row, "mask", "in calls with a boolean mask alone"),
        (mask_of_first_rows, "mask", "that of the first query of each block of 32"),
        (values_by_the_querys_width, "layout", "rows of V are read as far apart as Q's"),
        (summed_without_a_tail, "ragged", "by the l of the first 64 keys alone"),
        (zeros_in_the_sum, "padding", ""),
        (window_begins_below_0, "window", "in calls with a window alone"),
        (layout_by_the_number_of_heads, "layout", "is read as [B, N, H, D]"),
        (halved_in_groups, "value-factor", "0.5 × what it should be, in calls grouped alone"),
        (through_halves, "operand", "pass through float16"),
    ],
)
def test_what_some_calls_alone_show_is_named_by_what_it_is(kernel, cause, told):
    found = reconstruct(kernel)
    assert found.causes[0].cause.key == cause, found.sentence
    assert told in found.causes[0].text


@pytest.mark.parametrize(("capped", "cause"), [(True, "softcap"), (False, "products")])
def test_a_coarse_cap_is_told_from_a_coarse_sum(capped, cause):
    def run(trial):
        call = trial.call
        scores = scores_of(call)
        one = any(bool(((x != 0).sum(-1) <= 1).all()) for x in (call.query, call.key))
        if call.softcap if capped else not one:
            scores = (scores * 16).round() / 16
        weights = scores.softmax(-1)
        value = call.value.double().repeat_interleave(call.groups, 1)
        return Result((weights @ value).to(call.query.dtype))

    assert unit_scores(run, TRIALS["softcap"]).cause == cause


@pytest.mark.parametrize("low", [True, False])
def test_gradients_of_a_group_that_are_rounded_before_they_are_added_are_foretold(low):
    trial = TRIALS["grouped"]
    twist = next(t for t in groups() if t.key.endswith("low") == low)
    turned = twist.turn(trial)
    each = golden(turned.call, trial.grad_out)
    rounded = {n: getattr(each, n).bfloat16().float() for n in ("grad_key", "grad_value")}
    added = twist.back(trial, rounded)
    for name, made in added.items():
        assert made.shape == trial.call.key.shape
        total = torch.zeros_like(made)
        for x in rounded[name].unflatten(1, (2, 3)).unbind(2):
            total = (total + x).bfloat16().float() if low else total + x
        assert torch.equal(made, total.bfloat16().float())
    assert twist.turn(TRIALS["plain"]) is None


def test_a_maximum_that_lse_has_scaled_twice_is_a_candidate():
    trial = TRIALS["softcap"]
    scores = scores_of(trial.call)
    twist = next(t for t in results() if t.key == "lse-scaled")
    (lse,) = twist.back(trial, {"lse": scores.logsumexp(-1)}).values()
    top = scores.amax(-1)
    assert torch.allclose(lse, scores.logsumexp(-1) + top * (trial.call.scale - 1))


@pytest.mark.parametrize("parts", [(), ("last rows",)])
def test_a_sum_that_keeps_what_it_was_lacks_a_part(parts):
    assert Slip("dv_sum", "stale", parts).cause == "grad-tail"
    assert Slip("dq_sum", "factor", ("first keys",), 2.0).cause == "grad-tail"
    assert Slip("dq_sum", "factor", parts, 0.998).cause == "grad-accumulator"
    assert Slip("rescale_sum", "stale", parts).cause == "rescale"
    assert Slip("rescale_out", "gone", parts).cause == "rescale"


def test_an_operand_that_is_held_within_a_limit_is_an_operand():
    assert Slip("query", "within", factor=2.0).cause == "operand"
    assert Slip("scores", "within", factor=2.0).cause == "softcap"


def mask_kept_by_its_shape():
    """A kernel that keeps the first mask of a shape that it is given, of one head."""
    kept = {}

    def attention(query, key, value, is_causal=False, scale=None, attn_mask=None):
        mask = attn_mask
        if mask is not None:
            mask = kept.setdefault((mask.shape[-2:], mask.dtype), mask[:1, :1])
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        return plain(query, key, value, is_causal, scale, hidden=0.0 if mask is None else mask)

    return attention


@pytest.mark.thorough(keep=0)
def test_what_explains_these_numbers_and_no_others_is_still_said():
    found = reconstruct(mask_kept_by_its_shape())
    assert found.causes[0].cause.key == "mask", found.sentence
    assert "something of earlier calls were kept" in found.causes[0].text


def of_another_lse(trial):
    """Gradients whose weights are taken from the lse of the group's number."""
    call = trial.call
    key, value = (x.double().repeat_interleave(call.groups, 1) for x in (call.key, call.value))
    scores, do = scores_of(call), trial.grad_out.double()
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp() @ value
    weights = (scores - lse[:, torch.arange(lse.shape[1]) // call.groups]).exp()
    inner = weights * (do @ value.mT - (do * out).sum(-1, keepdim=True)) * call.scale
    dk, dv = (x.unflatten(1, (-1, call.groups)).sum(2) for x in (
        inner.mT @ call.query.double(), weights.mT @ do))  # fmt: skip
    found = (out, None, inner @ key, dk, dv)
    return Result(*(x if x is None else x.bfloat16() for x in found))


def test_an_lse_of_another_head_is_no_sum_over_groups():
    emulator = Emulator({TRIALS["grouped"]: of_another_lse(TRIALS["grouped"])}, of_another_lse)
    found = {p.tensor: p.cause for p in unexplained(emulator, Model.of(BF16_FLASH2), UNEXPLAINED)}
    assert found == dict.fromkeys(("grad_query", "grad_key", "grad_value"), "lse-other")


@pytest.mark.parametrize("turned", [True, False])
def test_rows_that_lie_in_another_order_among_all_heads_are_a_layout(turned):
    exact = golden(TRIALS["decode"].call).out
    b, h, n, d = exact.shape
    out = exact.reshape(b, n, h, d).roll(1, 2).transpose(1, 2) if turned else exact
    said, cause = exchanged(Observed.of(out, exact))
    assert cause == ("layout" if turned else ""), said


def test_rows_that_see_nothing_and_have_anothers_are_no_layout():
    exact = torch.randn(2, 2, 40, 16, generator=torch.Generator().manual_seed(0)).double()
    exact[:, :, ::13] = 0
    out = exact.clone()
    out[:, :, ::13] = exact.roll(1, 2)[:, :, ::13]
    said, cause = exchanged(Observed.of(out, exact))
    assert cause == "other-data"
    assert "which should be 0" in said


@pytest.mark.parametrize(
    ("key", "region", "told"),
    [
        ("rescale", "ragged", "rescale"),
        ("rescale", "mask", "mask"),
        ("row-max", "ragged", "ragged"),
    ],
)
def test_a_sum_that_is_not_rescaled_is_no_matter_of_sizes(key, region, told):
    cause = Named(CAUSES[key], "left out", 100.0, "out", "ragged", 0.99, function=True)
    of = of_calls(cause, Region("in some calls", {}, region), Emulator({}, lambda _: None))
    assert of.cause.key == told
