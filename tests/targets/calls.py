"""Small attention calls for the tests of targets, and the check that a call that goes through is
right.
"""

import torch
from torch.nn import functional

from halfulp.attention import golden
from halfulp.targets import Outcome, Target, run_target

B, H, N, D = 1, 2, 21, 16
MODIFIES = "modifies its inputs"
FORWARD_ONLY = "not differentiable"


def tensors(dtype=torch.float32, heads=H, key_heads=H, n_query=N, n_key=N):
    g = torch.Generator().manual_seed(3)
    shapes = ((heads, n_query), (key_heads, n_key), (key_heads, n_key), (heads, n_query))
    return tuple(torch.randn(B, h, n, D, generator=g).to(dtype) for h, n in shapes)


def run(
    function, *, dtype=torch.float32, differentiate=True, is_causal=False, scale=None, **options
) -> Outcome:
    target = function if isinstance(function, Target) else Target.of(function)
    q, k, v, do = tensors(dtype)
    return run_target(
        target, q, k, v, do if differentiate else None, is_causal=is_causal, scale=scale, **options
    )


def plain(query, key, value, *, is_causal=False, scale=None):
    """Attention by the book."""
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale
    )


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# What every case that goes through must be: right. One tolerance a dtype, an order above what stock
# kernels measure.
LIMIT = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def check_right(target, dtype, limit=None, n_query=N, **options):
    x = tensors(dtype, key_heads=1 if options.get("enable_gqa") else H, n_query=n_query)
    options = {"is_causal": False, "scale": None} | options
    outcome = run_target(target, *x, **options)
    assert outcome.kind == "ok", outcome.refusal
    truth = golden(*x, **options)
    for name in ("out", "lse", "grad_query", "grad_key", "grad_value"):
        got = getattr(outcome.result, name)
        if got is not None:
            assert relative(got, getattr(truth, name)) < (limit or LIMIT[dtype]), name
            assert got.dtype == (dtype if name != "lse" else torch.float32)
    return outcome
