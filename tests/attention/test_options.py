"""What FlashAttention's users expect beyond SDPA: windows, softcap, sinks, packed sequences and
dropout.

Each is held, forward and backward, to a few lines of plain autograd in float64 that hold all scores
at once.
"""

import math

import pytest
import torch

import halfulp
from halfulp.formats.counter import keep_mask
from halfulp.recipes import KERNEL_RECIPES

EXACT = 1e-11
# B, H, N, D, N_k
SHAPES = [(1, 2, 9, 8, 12), (2, 1, 12, 4, 9), (1, 1, 150, 4, 270), (1, 1, 270, 4, 140)]


def leaves(b, h, n, d, m, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((b, h, n, d), (b, h, m, d), (b, h, m, d))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def plain(q, k, v, *, visible=None, softcap=0.0, sinks=None, keep=None, p=0.0, mask=None):
    """Attention with all scores at hand: (out, lse)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if mask is None else scores + mask
    scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    lse = torch.logsumexp(scores, -1)
    empty = (lse == -math.inf).unsqueeze(-1)
    probabilities = torch.exp(scores - lse.unsqueeze(-1).masked_fill(empty, 0))[..., : k.shape[2]]
    probabilities = probabilities.masked_fill(empty, 0)
    if keep is not None:
        probabilities = probabilities * keep / (1 - p)
    return probabilities @ v, lse


def assert_same(got, wanted, tensors):
    """Both results and all gradients of both."""
    (out, lse), (out_w, lse_w) = got, wanted
    torch.testing.assert_close(out, out_w, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(lse, lse_w, rtol=EXACT, atol=EXACT)
    generator = torch.Generator().manual_seed(5)
    seed = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    finite = lse_w.isfinite()
    row = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    grads = [
        torch.autograd.grad((o * seed).sum() + (x[finite] * row[finite]).sum(), tensors)
        for o, x in ((out, lse), (out_w, lse_w))
    ]
    for g, w in zip(*grads, strict=True):
        torch.testing.assert_close(g, w, rtol=EXACT, atol=EXACT)


def ours(*args, recipe="halfulp", **options):
    return halfulp.attention(*args, backend="torch", return_lse=True, recipe=recipe, **options)


def seen(n, m, left, right, offset=0):
    distance = torch.arange(m)[None, :] - torch.arange(n)[:, None] - offset
    visible = torch.ones(n, m, dtype=torch.bool)
    visible = visible & (distance >= -left) if left >= 0 else visible
    return visible & (distance <= right) if right >= 0 else visible


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [(3, 2), (0, 0), (-1, 1), (2, -1)])
def test_window(shape, window):
    tensors = leaves(*shape)
    n, m = shape[2], shape[4]
    assert_same(
        ours(*tensors, window=window), plain(*tensors, visible=seen(n, m, *window)), tensors
    )
    offset = m - n
    visible = seen(n, m, *window, offset) & seen(n, m, -1, 0, offset)
    got = ours(*tensors, window=window, is_causal=True, causal_offset=offset)
    assert_same(got, plain(*tensors, visible=visible), tensors)


def test_window_beyond_the_keys_sees_nothing():
    tensors = leaves(1, 1, 300, 4, 20)
    got = ours(*tensors, window=(3, 3))
    assert_same(got, plain(*tensors, visible=seen(300, 20, 3, 3)), tensors)
    assert (got[0][:, :, 24:] == 0).all()


@pytest.mark.parametrize("recipe", ["halfulp", "stock", "exact_delta"])
def test_softcap(recipe):
    tensors = leaves(*SHAPES[2])
    mask = leaves(1, 1, 150, 270, 1, seed=7)[0].detach()
    assert_same(ours(*tensors, softcap=0.7, recipe=recipe), plain(*tensors, softcap=0.7), tensors)
    got = ours(*tensors, mask, softcap=0.7, recipe=recipe)
    assert_same(got, plain(*tensors, softcap=0.7, mask=mask), tensors)


@pytest.mark.parametrize("recipe", ["halfulp", "stock", "exact_delta"])
@pytest.mark.parametrize("height", [0.0, 40.0, -40.0])
def test_sinks(recipe, height):
    tensors = leaves(2, 3, 140, 4, 150)
    sinks = (torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64) + height).requires_grad_()
    visible = seen(140, 150, 5, 0)
    visible[7] = False
    got = ours(*tensors, visible, sinks=sinks, recipe=recipe)
    assert_same(got, plain(*tensors, visible=visible, sinks=sinks), (*tensors, sinks))
    assert (got[0][:, :, 7] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_of_it_in_low_precision(dtype):
    """Errors stay near the format's own: two roundings of half an ulp, and what cancels."""
    exact = leaves(1, 2, 140, 16, 150)
    low = [x.detach().to(dtype).requires_grad_() for x in exact]
    exact = [x.detach().double().requires_grad_() for x in low]
    sinks, mask = torch.tensor([0.5, 1.5]), seen(140, 150, 40, 3)
    options = {"softcap": 2.0, "sinks": sinks}
    out, _ = ours(*low, mask, **options)
    wanted, _ = plain(*exact, visible=mask, softcap=2.0, sinks=sinks.double())
    grads = torch.autograd.grad(out.sum(), low)
    for g, w in zip(
        (out, *grads), (wanted, *torch.autograd.grad(wanted.sum(), exact)), strict=True
    ):
        assert (
            float((g.detach().double() - w.detach()).norm() / w.detach().norm())
            < 2 * torch.finfo(dtype).eps
        )


# Packed sequences.


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_are_sequences(is_causal):
    lengths, key_lengths = (3, 0, 140, 1), (5, 2, 140, 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(n), h, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for n, h in ((lengths, 4), (key_lengths, 2), (key_lengths, 2))
    )
    ends, key_ends = (
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for n in (lengths, key_lengths)
    )
    out, lse = halfulp.attention_varlen(
        q,
        k,
        v,
        ends,
        key_ends,
        is_causal=is_causal,
        window=(50, -1),
        return_lse=True,
        backend="torch",
    )
    assert out.shape == (144, 4, 4)
    parts, lses = [], []
    for n, m, a, b in zip(lengths, key_lengths, ends, key_ends, strict=False):
        rows = [x[i : i + c].transpose(0, 1)[None] for x, i, c in ((q, a, n), (k, b, m), (v, b, m))]
        rows[1:] = [x.repeat_interleave(2, 1) for x in rows[1:]]
        visible = seen(n, m, 50, 0 if is_causal else -1, m - n)
        part, part_lse = plain(*rows, visible=visible)
        parts.append(part[0].transpose(0, 1))
        lses.append(part_lse[0])
    assert_same((out, lse), (torch.cat(parts), torch.cat(lses, 1)), (q, k, v))


@pytest.mark.parametrize("ends", [[0], [0, 0]])
def test_no_sequences(ends):
    """Nothing, in the dtypes of something, and of no gradient: a share of a batch may be empty."""
    q, k = (torch.zeros(0, h, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2))
    out, lse = halfulp.attention_varlen(q, k, k, torch.tensor(ends), return_lse=True)
    assert (out.shape, out.dtype) == ((0, 4, 4), torch.float64)
    assert (lse.shape, lse.dtype) == ((4, 0), torch.float64)
    assert torch.autograd.grad(out.sum() + lse.sum(), q)[0].shape == q.shape
    with pytest.raises(ValueError, match="dropout_p"):
        halfulp.attention_varlen(q, k, k, torch.tensor(ends), dropout_p=2.0)


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([0, 3, 2, 5], "rise"),
        ([1, 5], "rise"),
        ([0, 4], "rise from 0 to 5"),
        ([[0, 5]], "one dimension"),
    ],
)
def test_bad_boundaries(ends, text):
    x = torch.zeros(5, 1, 4)
    with pytest.raises(ValueError, match=text):
        halfulp.attention_varlen(x, x, x, torch.tensor(ends))
    with pytest.raises(ValueError, match="accepted are cu_seqlens_q's 2 entries to 5"):
        halfulp.attention_varlen(x, x, x, torch.tensor([0, 5]), torch.tensor([0, 2, 5]))


# Dropout.


def drawn_seed(state):
    torch.manual_seed(state)
    return int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))


@pytest.mark.parametrize("recipe", ["halfulp", "exact_delta"])
def test_dropout_drops_the_same_in_both_passes(recipe):
    b, h, n, m, p = 2, 2, 150, 140, 0.3
    tensors = leaves(b, h, n, 4, m)
    seed = drawn_seed(11)
    rows = torch.arange(b * h * n).view(b, h, n)
    keep = keep_mask(seed, p, rows, torch.arange(m))
    torch.manual_seed(11)
    got = ours(*tensors, None, p, recipe=recipe)
    assert_same(got, plain(*tensors, keep=keep, p=p), tensors)
    assert not torch.equal(got[0], ours(*tensors, None, p)[0]), "another call draws another mask"


def test_dropout_of_everything_and_of_nothing():
    tensors = leaves(1, 2, 9, 4, 9)
    out, _ = ours(*tensors, None, 1.0)
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), tensors))
    before = torch.get_rng_state()
    ours(*tensors, None, 0.0)
    halfulp.explain_dispatch(*tensors, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before), "no random number is drawn without dropout"


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropped_weights_are_independent_and_as_many_as_asked_for(p):
    """Shares of kept weights, and of pairs kept together, within 4.5 standard errors of
    independence.
    """
    keep = keep_mask(2**40 + 17, p, torch.arange(1000).view(10, 100), torch.arange(1000)).double()
    assert keep.shape == (10, 100, 1000)
    assert abs(float(keep.mean()) - (1 - p)) < 4.5 * math.sqrt(p * (1 - p) / keep.numel())
    for dim, error in ((-1, 1000), (-2, 100)):
        spread = float((keep.mean(dim) - (1 - p)).square().mean()) * error / (p * (1 - p))
        assert abs(spread - 1) < 4.5 * math.sqrt(2 / (keep.numel() / error))
    flat = keep.view(1000, 1000) - (1 - p)
    for left, right in (
        (flat[:, 1:], flat[:, :-1]),
        (flat[1:], flat[:-1]),
        (flat[1:, 1:], flat[:-1, :-1]),
    ):
        correlation = float((left * right).mean()) / (p * (1 - p))
        assert abs(correlation) < 4.5 / math.sqrt(left.numel())
    other = (
        keep_mask(2**40 + 18, p, torch.arange(1000).view(10, 100), torch.arange(1000))
        .double()
        .view(1000, 1000)
    )
    correlation = float((flat * (other - (1 - p))).mean()) / (p * (1 - p))
    assert abs(correlation) < 4.5 / math.sqrt(flat.numel())


def test_dropout_masks_are_fixed_for_all_time():
    """Checkpoints and other kernels rely on the very bits; the hash written again, in Python's
    integers.
    """

    def mix(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    seed, p, rows = -12345678901234567, 0.25, [0, 1, 77, 2**32 + 5]
    start = mix(mix(seed % 2**32) ^ ((seed >> 32) % 2**32))
    expected = [
        [
            mix(mix(start ^ (r % 2**32)) ^ (c * 0x9E3779B1 % 2**32)) >= int(p * 2**32)
            for c in range(50)
        ]
        for r in rows
    ]
    assert keep_mask(seed, p, torch.tensor(rows), torch.arange(50)).tolist() == expected


@pytest.mark.parametrize("recipe", KERNEL_RECIPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lse_of_values_without_features(recipe, dtype):
    """lse and its gradients are of queries and keys: values that have no width change nothing."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 3, n, 8, generator=generator).to(dtype).requires_grad_() for n in (5, 7))
    out, lse = halfulp.attention(
        q, k, torch.empty(2, 3, 7, 0, dtype=dtype), recipe=recipe, return_lse=True
    )
    true = (q.double() @ k.double().mT * 8**-0.5).logsumexp(-1)
    weights = torch.linspace(-1, 1, 30).view(2, 3, 5)
    unit = max(torch.finfo(dtype).eps, 2.0**-23)
    assert out.shape == (2, 3, 5, 0)
    assert (lse - true).abs().max() < 2.0**-20
    for found, expected in zip(
        torch.autograd.grad(lse, (q, k), weights.to(lse.dtype)),
        torch.autograd.grad(true, (q, k), weights.double()),
        strict=True,
    ):
        assert (found - expected).norm() <= 2 * unit * expected.norm()
