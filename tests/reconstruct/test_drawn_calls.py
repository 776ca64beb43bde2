"""Calls that are drawn where the panel's show nothing."""

from itertools import combinations

import pytest
import torch

from halfulp.covering import covering_array
from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct import reconstruct
from halfulp.reconstruct.drawn_calls import _FACTORS, _allowed, drawn
from halfulp.reconstruct.emulating import TENSORS, Emulator, Model
from halfulp.reconstruct.exact import scores_of
from halfulp.reconstruct.places import FAR
from tests.reconstruct.exact_kernel import right


def test_every_two_levels_meet_that_may():
    rows = covering_array(_FACTORS, _allowed, 0)
    assert len(rows) == len(drawn(torch.bfloat16))
    for one, two in combinations(_FACTORS, 2):
        met = {(row[one], row[two]) for row in rows}
        may = {(a, b) for a in _FACTORS[one] for b in _FACTORS[two] if _allowed({one: a, two: b})}
        assert may <= met, (one, two)
        assert all(map(_allowed, rows))


def test_each_has_its_own_name_and_rows_that_see_something_but_where_queries_are_more():
    trials = drawn(torch.float16)
    assert len({t.name for t in trials}) == len(trials)
    assert not any("/" in t.name for t in trials)  # by which what is asked of a call is told
    for trial in trials:
        assert bool(scores_of(trial.call).isfinite().any(-1).all()), trial.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_stays_far_from_what_counts(dtype):
    if dtype != torch.bfloat16:  # drawn alike, but for the last bits
        a, b = (drawn(d) for d in (torch.bfloat16, dtype))
        assert [t.name for t in a] == [t.name for t in b]
        return
    emulator = Emulator({t: right(t) for t in drawn(dtype)}, right)
    fits = emulator.fits(Model.of(BF16_FLASH2), frozenset(TENSORS)).values()
    assert max(fit.times for fit in fits) < FAR / 4
    assert not emulator.nonfinite


def of_three(query, key, value, attn_mask=None, *, is_causal=False, scale=None):
    """Heads in another order where three queries have values that are half as wide as keys."""
    s = query.float() @ key.float().mT * scale
    later = torch.arange(s.shape[-1]) > torch.arange(s.shape[-2])[:, None]
    s = s.masked_fill(later, -torch.inf) if is_causal else s
    if attn_mask is not None:
        bias = (
            torch.where(attn_mask, 0.0, -torch.inf) if attn_mask.dtype == torch.bool else attn_mask
        )
        s = s + bias
    out = (s.softmax(-1).nan_to_num(0.0) @ value.float()).to(query.dtype)
    wrong = query.shape[2] == 3 and 2 * value.shape[3] == query.shape[3]
    return (out.roll(1, 1) if wrong else out).detach()


def test_what_no_call_of_the_panel_shows_is_named_by_drawn_ones():
    found = reconstruct(of_three)
    named = [(n.cause.key, n.trial) for n in found.causes]
    named += [(p.cause, p.trial) for p in found.places]
    (cause, trial), *_ = named
    assert cause in ("other-data", "layout", "key-heads"), found.sentence
    assert trial.startswith("3 queries")
    assert "values half" in trial


def with_other_widths(query, key, value, attn_mask=None, *, is_causal=False, scale=None):
    """Wrong where values are not as wide as keys, which the kernel it is nearest to has not."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale
    )
    return out.roll(1, 1) if value.shape[3] != query.shape[3] else out


def test_what_the_nearest_recipe_cannot_compute_is_held_against_stock():
    found = reconstruct(with_other_widths)
    (place, *_) = found.places
    assert place.cause in ("other-data", "layout"), found.sentence
