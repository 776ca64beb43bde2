"""Many sequences in one call of the native library have the bits of as many calls; the gradient of
a mask is that of plain autograd.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import halfulp
from halfulp import native, ops
from halfulp.kernels import cpu_packed as packed

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def packed_and_apart(monkeypatch, x, ends, leaves, **options):
    """Out, lse and gradients of both ways, the same numbers drawn for dropout."""
    found = []
    for together in (True, False):
        with monkeypatch.context() as patch:
            if not together:
                patch.setattr(ops.packed, "takes", lambda *given: False)
            torch.manual_seed(3)
            out, lse = halfulp.attention_varlen(*x, *ends, return_lse=True, **options)
            generator = torch.Generator().manual_seed(8)
            seeds = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in (out, lse)]
            seeds[1][lse == -torch.inf] = 0
            found.append([out, lse, *torch.autograd.grad((out, lse), leaves, seeds)])
    return found


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=2, max_size=6),
    heads=st.sampled_from([(4, 2), (8, 8), (1, 1)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    recipe=st.sampled_from(["halfulp", "stock", "exact_delta"]),
    causal=st.booleans(),
    with_sinks=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.2]),
    window=st.sampled_from([None, (20, 3)]),
    threads=st.integers(1, 3),
)
def test_the_bits_of_as_many_calls(
    lengths, heads, dtype, recipe, causal, with_sinks, dropout_p, window, threads
):
    h, hk = heads
    # queries without keys are another backend's where each is a call
    lengths = [(0, 0), (9, 5), (0, 4), *((n, max(m, 1)) for n, m in lengths)]
    total, keys = (sum(pair[i] for pair in lengths) for i in (0, 1))
    generator = torch.Generator().manual_seed(total)
    x = [
        torch.randn(n, heads, d, generator=generator).to(dtype).requires_grad_()
        for n, heads, d in ((total, h, 24), (keys, hk, 24), (keys, hk, 40))
    ]
    sinks = torch.linspace(-1, 1, h).requires_grad_() if with_sinks else None
    ends = [torch.tensor([0, *(p[i] for p in lengths)]).cumsum(0) for i in (0, 1)]
    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as monkeypatch:
        one, other = packed_and_apart(
            monkeypatch, x, ends, [*x, sinks] if with_sinks else x,
            recipe=recipe, is_causal=causal, sinks=sinks, dropout_p=dropout_p, window=window,
            softcap=3.0 if window else 0.0,
        )  # fmt: skip
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    for name, found, expected in zip(names, one, other, strict=False):
        assert torch.equal(found, expected), name


def test_thousands_of_sequences_are_one_call(monkeypatch):
    calls = []
    forward = packed.forward
    monkeypatch.setattr(packed, "forward", lambda *given: calls.append(1) or forward(*given))
    x = torch.randn(6000, 2, 8, generator=torch.Generator().manual_seed(1))
    ends = torch.arange(0, 6001, 3)
    out = halfulp.attention_varlen(x, x, x, ends, is_causal=True)
    assert len(calls) == 1
    alone = halfulp.attention(*3 * [x[2997:3000].transpose(0, 1)[None]], is_causal=True)
    assert torch.equal(out[2997:3000].transpose(0, 1)[None], alone)
    with torch.autocast("cpu", torch.bfloat16):
        assert halfulp.attention_varlen(x[:6], x[:6], x[:6], ends[:3]).dtype == torch.bfloat16
    assert len(calls) == 1


def test_packed_once_differentiable_and_lengths_that_lie():
    x = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = halfulp.attention_varlen(x, x, x, torch.tensor([0, 5, 8]))
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), x)
    q = x.detach().transpose(0, 1)[None]
    call = halfulp.calls.Call(q, q, q)
    right = torch.tensor([0, 5, 8])
    for wrong in ([0, 9, 8], [0, 5, 9], [1, 5, 8], [0, 5, 5], [0], [0, 8]):
        with pytest.raises(ValueError, match="accepted are"):
            packed.forward(call, "halfulp", packed.Lengths(torch.tensor(wrong), right))
    with pytest.raises(ValueError, match="int64"):
        packed.forward(call, "halfulp", packed.Lengths(right.int(), right))


MASKS = [(2, 4, 70, 130), (4, 70, 130), (70, 130), (2, 1, 1, 130), (1, 4, 70, 1), (130,), (1, 1)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_mask(shape, dtype):
    generator = torch.Generator().manual_seed(len(shape))
    q, k, v, do = (
        torch.randn(2, h, n, 24, generator=generator).to(dtype)
        for h, n in ((4, 70), (2, 130), (2, 130), (4, 70))
    )
    mask = torch.randn(shape, generator=generator)
    if shape[-1] == 130:
        mask[..., 3] = -torch.inf
    results = {}
    options = {"softcap": 2.0, "sinks": torch.linspace(-1, 1, 4), "enable_gqa": True}
    for name, backend, kind in (
        ("cpu", "cpu", dtype), ("torch", "torch", dtype), ("exact", "torch", torch.float64),
    ):  # fmt: skip
        given = mask.detach().clone().requires_grad_()
        x = [t.to(kind) for t in (q, k, v)]
        out = halfulp.attention(*x, given, backend=backend, **options)
        results[name] = torch.autograd.grad(out, given, do.to(kind))[0].double()
    off, allowed = ((results[x] - results["exact"]).norm() for x in ("cpu", "torch"))
    assert results["cpu"].shape == shape
    # A sum of many terms that cancel errs by its terms' roundings, and where all of them share one
    # number its error is that of luck.
    terms = mask.double().expand(2, 4, 70, 130).clone().requires_grad_()
    out = halfulp.attention(*(t.double() for t in (q, k, v)), terms, backend="torch", **options)
    (terms,) = torch.autograd.grad(out, terms, do.double())
    own = 2.0**-20 if dtype == torch.float32 else 0
    assert off <= 1.2 * allowed + own * terms.norm()
    assert results["exact"].norm() > 0
    assert halfulp.explain_dispatch(q, k, v, given, enable_gqa=True).backend == "cpu"


def test_the_gradient_of_a_mask_depends_on_neither_threads_nor_passes():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 8, 700, 8, generator=generator)  # dS of 47 MB: of one batch of heads a pass
    mask = torch.randn(700, 700, generator=generator).requires_grad_()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        out = halfulp.attention(q, q, q, mask, is_causal=False)
        found.append(torch.autograd.grad(out.square().sum(), mask)[0])
    assert torch.equal(*found)
    apart = sum(
        torch.autograd.grad(halfulp.attention(*3 * [x[None]], mask).square().sum(), mask)[
            0
        ].double()
        for x in q
    )
    torch.testing.assert_close(found[0].double(), apart, rtol=1e-5, atol=1e-6)
