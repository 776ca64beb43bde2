"""The likeliest cause names the ingredient that is coarse, and no other: recipes with one
ingredient planted.
"""

import pytest
import torch

from halfulp.attention import emulate
from halfulp.audit import Shape, audit
from halfulp.audit.diagnosis import diagnose
from halfulp.recipes import recipe_named

SMALL = Shape(batch=1, heads=16, n_query=160, n_key=160, head_dim=32)  # two tiles

DELTA = "δ = rowsum(dO ∘ O) from the rounded O"
ROW_SUM = "l is summed from the weights before rounding"
WEIGHTS = "other weights than the forward pass"
PLANTED = {
    "BF16_FLASH2": ("stock", DELTA),
    "BF16_FLASH2[row_sum_from=rounded]": ("stock", DELTA),
    "BF16_FLASH2[delta_from=residual]": ("stock", ROW_SUM),
    "BF16_FLASH2[delta_from=residual,row_sum_from=rounded]": ("stock", WEIGHTS),
    "BF16_HALFULP[delta_from=out,residual_bits=none]": ("stock", DELTA),
    "BF16_HALFULP[row_sum_from=exact]": ("defect", "weights and row sum disagree"),
    "BF16_HALFULP[backward_weights=lse]": ("stock", WEIGHTS),
    "BF16_HALFULP[backward_weights=maximum]": ("stock", WEIGHTS),
    "BF16_HALFULP[backward_weights=maximum,divisor_from=row_sum]": ("defect", WEIGHTS),
    "BF16_HALFULP[shift=maximum]": ("stock", WEIGHTS),
    # Between the others: told to be coarse, and no ingredient named alone.
    "BF16_HALFULP[residual_bits=3]": ("stock", "δ, l or the backward pass's weights"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_ingredient_is_named(name):
    recipe = recipe_named(name)

    def attention(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False):
        options = {
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "recipe": recipe,
        }
        return emulate(query, key, value, attn_mask, return_lse=True, **options)

    report = audit(attention, shapes=(SMALL,), explain=False)
    verdict, cause = PLANTED[name]
    assert report.verdict == verdict
    assert len(report.causes) == 1
    assert cause in report.causes[0].name


def test_nothing_found_has_no_cause():
    assert diagnose([], {}, accumulates=False) == ()


def test_a_causal_mask_that_is_off_by_one_is_called_that():
    """Whichever causal probes there are: which they are is a field of the probe."""

    def attention(query, key, value, *, is_causal, scale):
        mask = None
        if is_causal:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)
        return emulate(query, key, value, mask, scale=scale, recipe="BF16_FLASH2")

    report = audit(attention, shapes=(SMALL,), explain=False)
    assert report.verdict == "defect"
    assert report.causes[0].name == "the causal mask is wrong"
