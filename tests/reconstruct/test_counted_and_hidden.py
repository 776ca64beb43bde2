"""Parts of the keys that count twice, tokens hidden by a mask that nobody asked for, and what is a
matter of groups, of options, of the scale: told apart from what looks the same.
"""

import math
from dataclasses import replace

import pytest
import torch

from halfulp.calls import EVERYTHING, Result
from halfulp.reconstruct import reconstruct
from halfulp.reconstruct.call_causes import of_calls, why_unwritten
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.emulating import Emulator
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.keys_read import exchanged_keys
from halfulp.reconstruct.naming import Named
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.regions import Region
from halfulp.reconstruct.silent_read import below_the_maximum, left_out
from halfulp.reconstruct.suggested import Fitted, factors
from halfulp.reconstruct.weights_read import compared, over_heads
from tests.reconstruct.exact_kernel import right

TRIALS = {t.name: t for rare in (False, True) for t in panel(torch.bfloat16, rarer=rare)}
PLAIN, WIDER = TRIALS["plain"], TRIALS["wider_values"]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def read_as(trial, factor, *, summed=True):
    """What weights say that are the exact ones times a factor, summed to 1 again or as they are."""
    weights = weights_of(trial.call, scores_of(trial.call)) * factor
    total = weights.sum(-1, keepdim=True).clamp_min(1e-300) if summed else 1.0
    return compared(trial, weights / total)


# --- parts of the keys


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("counts", [(1, 2, 1, 1, 1, 2), (2, 1, 3, 1, 1, 2)])
def test_parts_that_count_twice_are_a_matter_of_their_merge(width, counts):
    rows = torch.arange(192)[:, None] // 64  # other parts in other rows, as where causal ones end
    at = (torch.arange(192) // width + rows) % len(counts)
    read = read_as(PLAIN, torch.tensor(counts, dtype=torch.float64)[at])
    assert (read.cause, "times" in read.text or "twice" in read.text) == ("split-merge", True)


def test_factors_that_are_no_counts_are_none():
    factor = normal(1, 2, 192, 6).exp().repeat_interleave(32, -1)
    read = read_as(PLAIN, factor)
    assert read.cause == "rescale", read.text
    assert "count" not in read.text


@pytest.mark.parametrize("runs", [1, 2])
def test_keys_read_twice_in_several_places_are_those_of_parts_that_overlap(runs):
    again = torch.ones(192, dtype=torch.float64)
    for start in (32, 96)[:runs]:
        again[start : start + 16] = 2
    assert read_as(PLAIN, again).cause == ("other-data" if runs == 1 else "split-merge")


def unrescaled(trial, width):
    """A factor of each part that later maxima should have changed, and did not."""
    tops = torch.stack([x.amax(-1) for x in torch.split(scores_of(trial.call), width, -1)], -1)
    running = tops.cummax(-1).values
    off = (running[..., -1:] - running).exp()
    return off.repeat_interleave(width, -1)[..., : trial.call.key.shape[2]]


@pytest.mark.parametrize("width", [16, 32, 64])
def test_sums_that_are_not_rescaled_are_told_whatever_thirds_of_the_keys_are_as_wide(width):
    """Of 130 keys a quarter is 33 and a half 65, nearly a tile."""
    read = read_as(WIDER, unrescaled(WIDER, width), summed=False)
    assert (read.cause, f" of {width} keys" in read.text) == ("rescale", True), read.text


# --- masks


def hidden_from(trial, lost):
    exact = weights_of(trial.call, scores_of(trial.call))
    kept = exact * ~lost
    return compared(trial, kept / kept.sum(-1, keepdim=True).clamp_min(1e-300))


def test_pairs_hidden_alike_in_every_head_are_a_mask_that_nobody_asked_for():
    i, j = torch.arange(192)[:, None], torch.arange(192)
    tree = (i >= 188) & (j >= 188) & (j <= i) & ((i - j) % 3 == 1)
    assert hidden_from(PLAIN, tree).cause == "causal-mask"
    exact = weights_of(PLAIN.call, scores_of(PLAIN.call))
    others = exact.roll(7, -2) * ~tree  # where the rest is wrong as well, nothing is hidden
    assert compared(PLAIN, others).cause != "causal-mask"


@pytest.mark.parametrize(
    "lost",
    [
        lambda i, j: (i >= 150) & (j >= 170),  # a corner: a tile that is not read
        lambda i, j: (j >= 170) & (i >= 0),  # whole keys
        lambda i, j: (
            (torch.rand(1, 2, 192, 192, generator=torch.Generator().manual_seed(1)) < 0.1)
            & (i >= 100)
        ),  # others in each head
    ],
)
def test_corners_ends_and_chance_are_no_mask(lost):
    i, j = torch.arange(192)[:, None], torch.arange(192)
    assert hidden_from(PLAIN, lost(i, j)).cause != "causal-mask"


@pytest.mark.parametrize(("late", "cause"), [(True, "window"), (False, "unwritten")])
def test_rows_whose_first_keys_are_hidden_are_a_matter_of_what_hides_them(late, cause):
    window = TRIALS["window"]

    def run(trial):
        """Rows are never written, whatever their scores, where something is hidden."""
        made, first = right(trial), scores_of(trial.call).isfinite().int().argmax(-1)
        gone = first > 40 if late else torch.arange(first.shape[-1]).expand_as(first) % 3 == 1
        gone = gone & (trial.call.sees.window is not None)
        return right(trial, out=made.out.masked_fill(gone[..., None], 0.0))

    emulator = Emulator({window: run(window), PLAIN: run(PLAIN)}, run)
    named = Named(CAUSES["unwritten"], "never written", 500.0, "out", "window", 1.0,
                  function=True, twists=("silent",))  # fmt: skip
    assert why_unwritten(named, emulator).cause.key == cause

    # not where rows are 0 in calls as well in which nothing is hidden
    def nothing(trial):
        return right(trial, out=right(trial).out * 0)

    both = Emulator({window: run(window), PLAIN: nothing(PLAIN)}, nothing)
    assert why_unwritten(named, both).cause.key == "unwritten"


# --- groups, options, the scale


@pytest.mark.parametrize(
    ("key", "tensor", "twist", "told"),
    [
        ("grad-scale", "grad_value", "dv-2", "group-sum"),
        ("grad-scale", "grad_query", "dq-2", "grad-scale"),
        ("other-data", "out", "slip-Slip(stage='key_value', mistake='head-1'", "key-heads"),
        ("other-data", "out", "heads-previous-key", "key-heads"),
        ("other-data", "out", "heads-batch-0-key", "other-data"),
    ],
)
def test_what_grouped_calls_alone_show(key, tensor, twist, told):
    trial = TRIALS["grouped"]
    emulator = Emulator({trial: right(trial)}, right)
    named = Named(CAUSES[key], "", 90.0, tensor, "grouped", 1.0, function=True, twists=(twist,))
    calls = Region("in calls grouped alone", {}, cause="key-heads")
    assert of_calls(named, calls, emulator).cause.key == told


def test_a_factor_of_all_gradients_in_grouped_calls_is_no_sum_of_a_group():
    trial = TRIALS["grouped"]
    exact = right(trial)
    twice = right(trial, **{n: getattr(exact, n) * 2 for n in (
        "grad_query", "grad_key", "grad_value")})  # fmt: skip
    named = Named(CAUSES["grad-scale"], "", 90.0, "grad_key", "grouped", 1.0, function=True)
    calls = Region("in calls grouped alone", {}, cause="key-heads")
    assert of_calls(named, calls, Emulator({trial: twice}, right)).cause.key == "grad-scale"


@pytest.mark.parametrize(("times", "cause"), [(None, "scale"), (0.6, "operand")])
def test_features_that_are_scaled_twice_are_told_from_other_factors(times, cause):
    call = PLAIN.call
    factor = torch.ones(64, dtype=torch.float64)
    factor[:32] = call.scale if times is None else times
    scores = (call.query.double() * factor) @ call.key.double().mT * call.scale
    assert compared(PLAIN, scores.softmax(-1)).cause == cause


def of(kernel, dtype="bfloat16"):
    found = reconstruct(kernel, dtype=dtype)
    return ([n.cause.key for n in found.causes] + [p.cause for p in found.places])[0]


def attention(query, key, value, *, is_causal, scale, softcap=0.0, longer=1.0, capped_top=True,
              values=1.0):  # fmt: skip
    n, n_key = query.shape[2], key.shape[2]
    whole = query.float() * longer @ key.float().mT * scale
    s = softcap * torch.tanh(whole / softcap) if softcap else whole
    hidden = torch.arange(n_key) > torch.arange(n)[:, None] if is_causal else torch.tensor(False)
    s, whole = (x.masked_fill(hidden, -math.inf) for x in (s, whole))
    top = (s if capped_top else whole).amax(-1, keepdim=True).detach()
    p = (s - top).exp()
    p = p.to(query.dtype).float()
    total = p.sum(-1, keepdim=True)
    return (p @ (value.float() * values) / total.where(total > 0, torch.tensor(1.0))).to(
        query.dtype
    )


def test_a_maximum_before_the_cap_leaves_nothing_of_scores_far_past_it():
    def kernel(query, key, value, *, is_causal, scale, softcap=0.0):
        return attention(query, key, value, is_causal=is_causal, scale=scale, softcap=softcap,
                         capped_top=False)  # fmt: skip

    assert of(kernel, "float16") == "maximum"


def test_queries_of_causal_calls_that_grow_with_their_place_are_scaled():
    def kernel(query, key, value, *, is_causal, scale):
        place = 1 + torch.arange(query.shape[2]).clamp_min(1).log() / 50
        return attention(query, key, value, is_causal=is_causal, scale=scale,
                         longer=place[:, None] if is_causal else 1.0)  # fmt: skip

    assert of(kernel) == "scale"


def test_scales_of_keys_and_values_that_are_not_undone_are_told():
    def kernel(query, key, value, *, is_causal, scale):
        most = (x.detach().abs().amax().float() / 448 for x in (key, value))
        of_keys, of_values = (torch.where(x > 0, x, 1.0) for x in most)
        return attention(query, key, value, is_causal=is_causal, scale=scale, longer=1 / of_keys,
                         values=1 / of_values)  # fmt: skip

    assert of(kernel, "float32") in ("scale", "value-factor")


def test_a_first_query_of_zeros_is_no_cap():
    def kernel(query, key, value, *, is_causal, scale):
        first = torch.arange(query.shape[2]) > 0
        return attention(query, key, value, is_causal=is_causal, scale=scale,
                         longer=first[:, None].float())  # fmt: skip

    assert of(kernel) == "query-tail"


@pytest.mark.parametrize("trial", [PLAIN, WIDER, TRIALS["causal"]])
def test_weights_that_are_right_are_named_nothing(trial):
    assert read_as(trial, 1.0, summed=False).cause == ""


# --- keys, heads and rows as a whole


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (lambda n: torch.arange(n).view(-1, 2, 8).transpose(1, 2).flatten(), "layout"),
        (lambda n: torch.arange(n).flip(0), "layout"),
        (lambda n: torch.arange(n), ""),
    ],
)
def test_keys_in_another_order_are_a_layout(order, told):
    exact = weights_of(PLAIN.call, scores_of(PLAIN.call))
    assert compared(PLAIN, exact[..., order(192)]).cause == told


def test_keys_of_which_some_are_copies_are_in_no_other_order():
    exact = weights_of(PLAIN.call, scores_of(PLAIN.call))
    assert exchanged_keys(exact[..., torch.arange(192) // 2 * 2], exact) == ""


@pytest.mark.parametrize("dim", [0, 1, 3])
def test_a_softmax_over_heads_or_sequences_is_told_from_one_over_keys(dim):
    trial = TRIALS["sequences_causal"]

    def run(asked):
        weights = scores_of(asked.call).softmax(dim).nan_to_num(0.0)
        return Result((weights @ asked.call.value.double()).to(torch.bfloat16))

    assert over_heads(run, replace(trial, call=replace(trial.call, sees=EVERYTHING))) == (dim < 3)


@pytest.mark.parametrize(
    ("gone", "cause"),
    [
        (lambda b, h, j: j >= 40, "key-tail"),
        (lambda b, h, j: (j >= 40) & (h == 0), "tiles-skipped"),
        (lambda b, h, j: (j >= 40) & (j < 60), "tiles-skipped"),
    ],
)
def test_keys_whose_dv_is_0_are_those_at_the_end_or_chosen_ones(gone, cause):
    made = right(PLAIN)
    _, heads, n, _ = made.grad_value.shape
    b, h, j = (torch.arange(x).view(shape) for x, shape in (
        (1, (-1, 1, 1)), (heads, (1, -1, 1)), (n, (1, 1, -1))))  # fmt: skip
    zero = gone(b, h, j).expand(1, heads, n)[..., None]
    emulator = Emulator(
        {PLAIN: right(PLAIN, grad_value=made.grad_value.masked_fill(zero, 0))}, right
    )
    assert [t.cause for t in left_out(emulator)] == [cause]


@pytest.mark.parametrize(
    ("of_heads", "cause"), [((0.0, 1.0), "unwritten"), ((0.4, 1.7), "value-factor")]
)
def test_heads_that_are_0_are_not_written_and_no_factors(of_heads, cause):
    names = ("plain", "sharp", "rising", "ragged", "causal")
    heads = torch.tensor(of_heads, dtype=torch.float64).view(1, -1, 1, 1)
    # one factor of a whole call fits other numbers in each
    fitted = {n: Fitted(0.4 + 0.1 * i, 1e-3, 0.4, heads, 0.99, 0.99) for i, n in enumerate(names)}
    assert {t.cause for t in factors("out", fitted, {n: TRIALS[n] for n in names})} == {cause}


def test_rows_are_0_where_the_maximum_is_that_of_hidden_scores():
    def maximum_of_all(trial):
        every = scores_of(replace(trial.call, sees=EVERYTHING)).amax(-1)
        below = every - scores_of(trial.call).amax(-1) > 80
        made = right(trial)
        return right(trial, out=made.out.masked_fill(below[..., None], 0.0))

    def some_rows(trial):
        at = torch.arange(trial.call.query.shape[2]) % 3 == 1
        return right(trial, out=right(trial).out.masked_fill(at[:, None], 0.0))

    peaks = TRIALS["hidden_peaks"]
    assert below_the_maximum(Emulator({peaks: maximum_of_all(peaks), PLAIN: right(PLAIN)}, right))
    assert not below_the_maximum(Emulator({PLAIN: some_rows(PLAIN)}, some_rows))
    both = {peaks: maximum_of_all(peaks), PLAIN: some_rows(PLAIN)}
    assert not below_the_maximum(Emulator(both, some_rows))


@pytest.mark.parametrize("of_options", [True, False])
def test_ends_that_are_wrong_under_an_option_alone_are_the_options(of_options):
    """The last tile is not capped, or is never written in any call."""

    def kernel(query, key, value, *, is_causal, scale, softcap=0.0):
        out = attention(query, key, value, is_causal=is_causal, scale=scale, softcap=softcap)
        last = torch.arange(query.shape[2]) >= query.shape[2] // 16 * 16
        if not of_options:
            return out * ~last[:, None]
        plain = attention(query, key, value, is_causal=is_causal, scale=scale)
        return torch.where(last[:, None], plain, out)

    assert (of(kernel) == "softcap") == of_options


@pytest.mark.parametrize(("of_scores", "told"), [(True, True), (False, False)])
def test_rows_that_are_there_where_scores_are_higher_are_lost_to_a_maximum(of_scores, told):
    """What lies where a maximum is read, or rows that nobody writes."""

    def run(trial):
        made, n = right(trial), trial.call.query.shape[2]
        held = torch.where(torch.arange(n) % 3 == 1, 120.0, -100.0)
        top = scores_of(trial.call).amax(-1) if of_scores else torch.zeros(n)
        return right(trial, out=made.out.masked_fill((held - top > 90)[..., None], 0.0))

    trials = (PLAIN, TRIALS["rising"])
    assert below_the_maximum(Emulator({t: run(t) for t in trials}, run)) == told


def test_values_that_alone_lie_otherwise_are_a_layout():
    def kernel(query, key, value, *, is_causal, scale):
        if value.is_contiguous() != key.is_contiguous():
            b, h, n, d = value.shape
            value = value.transpose(1, 2).reshape(b, h, n, d)
        return attention(query, key, value, is_causal=is_causal, scale=scale)

    assert of(kernel) == "layout"


def test_features_that_attend_to_features_and_operands_in_anothers_place():
    def channels(query, key, value, *, is_causal, scale):
        if is_causal or query.shape != key.shape or key.shape != value.shape:
            return attention(query, key, value, is_causal=is_causal, scale=scale)
        turned = (x.mT for x in (query, key, value))
        return attention(*turned, is_causal=False, scale=scale).mT

    def values_for_keys(query, key, value, *, is_causal, scale):
        key = value if key.shape == value.shape else key
        return attention(query, key, value, is_causal=is_causal, scale=scale)

    assert of(channels) == "layout"
    assert of(values_for_keys) == "other-data"


def test_an_exponential_without_its_maximum_is_told_from_rows_that_see_nothing():
    def unstable(query, key, value, *, is_causal, scale, attn_mask=None):
        s = query.float() @ key.float().mT * scale
        hidden = torch.arange(s.shape[-1]) > torch.arange(s.shape[-2])[:, None]
        s = s.masked_fill(hidden, -math.inf) if is_causal else s
        boolean = attn_mask is not None and attn_mask.dtype == torch.bool
        s = s if attn_mask is None else (
            s.masked_fill(~attn_mask, -math.inf) if boolean else s + attn_mask)  # fmt: skip
        p = s.exp()
        return (p / p.sum(-1, keepdim=True) @ value.float()).to(query.dtype)

    def blind(query, key, value, *, is_causal, scale, attn_mask=None):
        out = attention(query, key, value, is_causal=is_causal, scale=scale)
        if attn_mask is None:
            return out
        boolean = attn_mask.dtype == torch.bool
        s = query.float() @ key.float().mT * scale
        s = s.masked_fill(~attn_mask, -math.inf) if boolean else s + attn_mask
        return (s.softmax(-1) @ value.float()).to(query.dtype)

    assert of(unstable, "float32") in ("maximum", "non-finite")
    assert of(blind, "float32") == "masked-row"
