"""Mistakes around a kernel that is sound: what it rounds is read off what is right, and the mistake
explains all of the rest.
"""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from halfulp.audit import audit, diagnosis
from halfulp.reconstruct import reconstruct


def odd_heads_never_written(query, key, value, is_causal=False, scale=None):
    out = sdpa(query, key, value, is_causal=is_causal, scale=scale)
    return out * (torch.arange(out.shape[1]) % 2 == 0)[:, None, None]


def never_scaled(query, key, value, is_causal=False, scale=None):
    return sdpa(query, key, value, is_causal=is_causal, scale=1.0)


def scale_of_codes_twice(query, key, value, is_causal=False, scale=None):
    return sdpa(query, key, value, is_causal=is_causal, scale=scale) * 0.004


def query_of_the_row_before(query, key, value, is_causal=False, scale=None):
    return sdpa(query.roll(1, 2), key, value, is_causal=is_causal, scale=scale)


def lse_in_base_2(query, key, value, is_causal=False, scale=None):
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(query, key, value, 0.0, is_causal, scale=scale)
    return out, lse * math.log2(math.e)


class TwiceScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, scale):
        ctx.scale = scale
        return query.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


def dq_scaled_twice(query, key, value, is_causal=False, scale=None):
    scale = scale or query.shape[-1] ** -0.5
    query = TwiceScaled.apply(query, scale)
    return sdpa(query, key, value, is_causal=is_causal, scale=scale)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("kernel", "cause", "told"),
    [
        (odd_heads_never_written, "unwritten", "in heads of odd number alone"),
        (never_scaled, "scale", "scores are not scaled"),
        (scale_of_codes_twice, "value-factor", "O is 0.004"),
        (query_of_the_row_before, "other-data", "Q of each row is that of the row before"),
        (lse_in_base_2, "lse-other", "in what is returned alone"),
        (dq_scaled_twice, "grad-scale", "dQ has the scale twice"),
    ],
)
def test_a_mistake_around_a_sound_kernel_explains_every_result(kernel, cause, told):
    found = reconstruct(kernel)
    assert found.causes[0].cause.key == cause
    assert told in found.sentence
    assert all(e.share > 0.98 for e in found.explained)


def test_a_verdict_stands_where_the_search_for_a_cause_fails(monkeypatch):
    def fails(*_args, **_options):
        raise IndexError("list index out of range")

    monkeypatch.setattr(diagnosis, "of_kernel", fails)
    report = audit(never_scaled, only=("gaussian",))
    assert report.verdict == "defect"
    assert any("IndexError: list index out of range" in note for note in report.notes)
