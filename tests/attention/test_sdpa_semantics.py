"""`halfulp.attention` takes what PyTorch's function takes and means the same: held to its math
backend in float64.

The shapes are those of PyTorch's own samples for the operator (3 and 4 dimensions, broadcast ones,
masks) and those of its tests of fused kernels (masks that broadcast, grouped heads, strides,
lengths that are no multiple of anything).
"""

import math

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import halfulp
from halfulp import native
from halfulp.testing import gaussian, value_offset

EXACT = 1e-12  # float64 and another order of summing

# name: shapes of query, key, value, and arguments
CASES = {
    "three dimensions": ((4, 3, 8), (4, 6, 8), (4, 6, 8), {}),
    "three dimensions, causal": ((4, 3, 8), (4, 6, 8), (4, 6, 8), {"is_causal": True}),
    "four dimensions": ((4, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8), {}),
    "four dimensions, causal": ((4, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8), {"is_causal": True}),
    "fewer keys, causal": ((2, 2, 7, 8), (2, 2, 4, 8), (2, 2, 4, 8), {"is_causal": True}),
    "query without batch": ((4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8), {}),
    "keys without batch": ((3, 4, 5, 8), (4, 6, 8), (1, 4, 6, 8), {}),
    "value of another dimension": ((4, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 16), {}),
    "two dimensions": ((5, 8), (6, 8), (6, 4), {"scale": 0.3}),
    "five dimensions": ((2, 3, 2, 5, 8), (2, 1, 2, 6, 8), (1, 3, 2, 6, 8), {"is_causal": True}),
    "one query": ((1, 2, 1, 8), (1, 2, 9, 8), (1, 2, 9, 8), {}),
    "one key": ((1, 2, 9, 8), (1, 2, 1, 8), (1, 2, 1, 8), {}),
    "above a tile": ((1, 1, 131, 8), (1, 1, 257, 8), (1, 1, 257, 8), {"is_causal": True}),
    "wide heads": ((1, 1, 5, 256), (1, 1, 6, 256), (1, 1, 6, 256), {}),
    "grouped heads": (
        (2, 6, 5, 8),
        (2, 2, 7, 8),
        (2, 2, 7, 8),
        {"enable_gqa": True, "is_causal": True},
    ),
    "grouped heads, unlike": ((2, 6, 5, 8), (2, 3, 7, 8), (2, 1, 7, 8), {"enable_gqa": True}),
    "grouped heads, that share no divisor": (
        (2, 6, 5, 8),
        (2, 3, 7, 8),
        (2, 2, 7, 8),
        {"enable_gqa": True},
    ),
    "one key head, broadcast": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8), {}),
    "one query head, broadcast": ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {}),
    "no batch entry": ((0, 2, 5, 8), (0, 2, 6, 8), (0, 2, 6, 8), {}),
    "no query": ((2, 2, 0, 8), (2, 2, 6, 8), (2, 2, 6, 8), {}),
    "no key": ((2, 2, 5, 8), (2, 2, 0, 8), (2, 2, 0, 8), {}),
    "scale": ((2, 2, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), {"scale": 1.7}),
    "scale of zero": ((2, 2, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), {"scale": 0.0}),
    "negative scale": ((2, 2, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), {"scale": -0.5}),
}
MASKS = [(5, 7), (1, 7), (5, 1), (7,), (3, 1, 7), (2, 1, 5, 7), (2, 3, 5, 7), (1, 3, 1, 1)]


def leaves(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def ours(*args, **options):
    return halfulp.attention(*args, **({"backend": "torch"} | options))


def math_backend(*args, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*args, **options)


def assert_same(tensors, options, learned=()):
    """Out and every gradient, against the math backend in float64."""
    results = []
    for function in (ours, math_backend):
        out = function(*tensors[:3], **options)
        seed = torch.randn(
            out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        results.append((out, *torch.autograd.grad(out, (*tensors[:3], *learned), seed)))
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", CASES)
def test_as_pytorch(name):
    *shapes, options = CASES[name]
    assert_same(leaves(*shapes), options)


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", ["bool", "additive", "learned"])
def test_masks_broadcast(shape, kind):
    tensors = leaves((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    (mask,) = leaves(shape, seed=3)
    if kind == "bool":
        assert_same(tensors, {"attn_mask": mask > -1})
    else:
        assert_same(
            tensors,
            {"attn_mask": mask if kind == "learned" else mask.detach()},
            [mask] * (kind == "learned"),
        )


def test_masks_of_more_dimensions():
    tensors = leaves((2, 3, 2, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 8))
    for shape in ((5, 7), (2, 5, 7), (3, 1, 5, 7), (2, 1, 2, 1, 7)):
        assert_same(tensors, {"attn_mask": leaves(shape, seed=3)[0] > 0})


@pytest.mark.parametrize(("queries", "keys"), [(0, 7), (5, 0)])
def test_masks_of_empty_problems(queries, keys):
    q, k = (x.detach() for x in leaves((2, 3, 2, queries, 8), (2, 3, 2, keys, 8)))
    mask = torch.ones(2, 1, 2, queries, keys, dtype=torch.bool)
    assert torch.equal(ours(q, k, k, mask), math_backend(q, k, k, mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("low", [-1e9, -1e30])
@pytest.mark.parametrize("backend", ["torch"] if native.missing() else ["torch", "cpu"])
def test_rows_of_very_low_masks_are_averages(dtype, low, backend):
    """Scores vanish beside such a mask, so that a row which has nothing else weighs all keys alike,
    as in PyTorch.
    """
    q, k, v = (x.detach().to(dtype) for x in leaves((1, 2, 5, 8), (1, 2, 140, 8), (1, 2, 140, 8)))
    mask = torch.zeros(5, 140, dtype=dtype)
    mask[2], mask[3, 100:] = low, low
    q.requires_grad_()
    out, lse = ours(q, k, v, mask, return_lse=True, backend=backend)
    torch.testing.assert_close(
        out, math_backend(q, k, v, mask), rtol=2 * torch.finfo(dtype).eps, atol=1e-2
    )
    torch.testing.assert_close(lse[:, :, 2], torch.full((1, 2), float(mask[2, 0])))
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(5, 9), (6, 6)])
def test_causal_biases(variant, lengths):
    q, k, v = leaves(
        (1, 2, lengths[0], 8), (1, 2, lengths[1], 8), (1, 2, lengths[1], 8), dtype=torch.float32
    )
    bias = variant(*lengths)
    expected = math_backend(q, k, v, attn_mask=torch.ones(lengths, dtype=torch.bool).tril(
        lengths[1] - lengths[0] if variant is causal_lower_right else 0
    ))  # fmt: skip
    torch.testing.assert_close(ours(q, k, v, attn_mask=bias), expected)


@pytest.mark.parametrize("additive", [False, True])
def test_rows_that_see_nothing_are_zero_with_zero_gradients(additive):
    q, k, v = leaves((1, 2, 5, 8), (1, 2, 140, 8), (1, 2, 140, 8))
    mask = torch.ones(5, 140, dtype=torch.bool)
    mask[2] = False
    mask[3, :129] = False  # the first tile of row 3 is hidden
    if additive:
        mask = torch.zeros(5, 140, dtype=torch.float64).masked_fill(~mask, -math.inf)
    assert_same((q, k, v), {"attn_mask": mask})
    out, lse = ours(q, k, v, mask, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out.sum() + lse[:, :, [0, 2]].sum(), (q, k, v))
    assert (out[:, :, 2] == 0).all()
    assert (lse[:, :, 2] == -math.inf).all()
    assert (dq[:, :, 2] == 0).all()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


def test_strides_do_not_matter():
    q, k, v = leaves((2, 5, 3, 8), (2, 7, 3, 8), (3, 7, 8, 2))
    views = q.transpose(1, 2), k.transpose(1, 2), v.permute(3, 0, 1, 2)
    plain = [x.detach().contiguous().requires_grad_() for x in views]
    assert torch.equal(ours(*views, is_causal=True), ours(*plain, is_causal=True))
    views = [torch.cat([x, x], -1)[..., :8] for x in plain]
    assert torch.equal(ours(*views), ours(*plain))
    expanded = plain[1][:, :1].expand(2, 3, 7, 8)
    assert torch.equal(
        ours(plain[0], expanded, expanded), ours(plain[0], *[expanded.contiguous()] * 2)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lse_and_its_gradient(dtype):
    q, k, v = leaves((1, 2, 150, 16), (1, 2, 170, 16), (1, 2, 170, 16))
    scores = (q @ k.mT / 4).masked_fill(~torch.ones(150, 170, dtype=torch.bool).tril(), -math.inf)
    expected = torch.logsumexp(scores, -1)
    weights = torch.linspace(-1, 1, 150, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k))
    low = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    _, lse = ours(*low, is_causal=True, return_lse=True)
    got = torch.autograd.grad((lse * weights).sum(), low[:2])
    assert lse.dtype == torch.float32
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), expected, rtol=tolerance, atol=tolerance)
    for g, w in zip(got, wanted, strict=True):
        assert float((g.double() - w).norm() / w.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0.0, 8.0])
def test_error_at_most_that_of_pytorch(dtype, offset):
    """FlashAttention's rule allows twice PyTorch's error; where V has an offset ours must be below
    a fifth of it.
    """
    inputs = gaussian(length=256, dim=64)
    inputs = value_offset(inputs, offset) if offset else inputs
    exact = halfulp.golden(*(x.double() for x in inputs), is_causal=True)
    wanted = (exact.out, exact.grad_query, exact.grad_key, exact.grad_value)
    errors = []
    for function in (ours, functional.scaled_dot_product_attention):
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs.operands)
        out = function(q, k, v, is_causal=True)
        got = (out, *torch.autograd.grad(out, (q, k, v), inputs.grad_out.to(dtype)))
        errors.append(
            [
                float((g.detach().double() - w).norm() / w.norm())
                for g, w in zip(got, wanted, strict=True)
            ]
        )
    for mine, stock in zip(*errors, strict=True):
        assert mine <= 2 * stock
    if offset and dtype == torch.bfloat16:
        assert errors[0][1] < errors[1][1] / 5


Q = torch.zeros(2, 4, 5, 8)
REFUSED = [
    ({"query": Q[0, 0, 0]}, "query of shape (8,)"),
    ({"query": Q.int()}, "query of dtype torch.int32"),
    ({"key": Q.double()}, "key of dtype torch.float64"),
    ({"key": torch.zeros(2, 4, 5, 9)}, "key of head dimension 9"),
    ({"value": torch.zeros(2, 4, 6, 8)}, "value of length 6"),
    ({"key": torch.zeros(2, 2, 5, 8)}, "key of 2 heads"),
    ({"key": torch.zeros(2, 3, 5, 8), "enable_gqa": True}, "key of 3 heads"),
    ({"key": torch.zeros(3, 4, 5, 8)}, "leading dimensions"),
    ({"attn_mask": torch.zeros(4, 5)}, "attn_mask of shape (4, 5)"),
    ({"attn_mask": torch.zeros(5, 5, dtype=torch.int32)}, "attn_mask of dtype"),
    ({"attn_mask": torch.zeros(5, 5), "is_causal": True}, "is_causal=True"),
    ({"dropout_p": 1.5}, "dropout_p=1.5"),
    ({"scale": math.nan}, "scale=nan"),
    ({"window": (-2, 0)}, "window=(-2, 0)"),
    ({"softcap": -1.0}, "softcap=-1.0"),
    ({"sinks": torch.zeros(3)}, "sinks of shape (3,)"),
    ({"sinks": torch.zeros(4, device="meta")}, "sinks on meta"),
    ({"attn_mask": torch.zeros(5, 5, device="meta")}, "attn_mask on meta"),
    ({"recipe": "BF16_HALFULP"}, "recipe='BF16_HALFULP': it is 'halfulp' for inputs of torch.bf"),
    ({"recipe": "BF16_FLASH1"}, "recipe='BF16_FLASH1': no kernel rounds like it"),
    ({"recipe": "no such"}, "recipe='no such': accepted are halfulp, stock"),
    ({"backend": "cuda"}, "backend='cuda'"),
    ({"query": torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged)}, "query is nested"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text for _, text in REFUSED])
@pytest.mark.parametrize("function", [halfulp.attention, halfulp.explain_dispatch])
def test_bad_input_is_one_line(function, changes, text):
    with pytest.raises(ValueError, match=r"accepted|broadcast") as raised:
        function(**({"query": Q, "key": Q, "value": Q} | changes))
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
