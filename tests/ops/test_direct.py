"""The short way past PyTorch's dispatcher: the bits of the operator's way, and taken by nobody who
would miss something on it.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfulp
from halfulp import native, ops
from halfulp.calls import check
from halfulp.ops import direct

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (5, 3), "causal_offset": 4, "scale": 0.3},
    "softcap": {"softcap": 2.0, "enable_gqa": True},
    "stock": {"recipe": "stock", "backend": "cpu"},
}


def leaves(dtype=torch.bfloat16, heads=4, key_heads=4, n=37, nk=50, dv=24):
    generator = torch.Generator().manual_seed(n)
    shapes = ((2, heads, n, 40), (2, key_heads, nk, 40), (2, key_heads, nk, dv))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


@pytest.fixture
def taken(monkeypatch):
    """How often the short way was taken."""
    count = []
    attend = direct.attend

    def counted(*given):
        done = attend(*given)
        if done is not None and done is not False:
            count.append(1)
        return done

    monkeypatch.setattr(direct, "attend", counted)
    return count


def results(q, k, v, call):
    out, lse = call()
    generator = torch.Generator().manual_seed(9)
    seeds = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, lse)]
    asked = ([out], [lse], [out, lse])
    given = (seeds[:1], seeds[1:], seeds)
    grads = [
        torch.autograd.grad(*x, retain_graph=True)
        for x in zip(asked, 3 * [(q, k, v)], given, strict=True)
    ]
    return [out, lse, *(g for some in grads for g in some)]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bits_of_the_operator(name, dtype, taken):
    options = OPTIONS[name]
    q, k, v = leaves(dtype, key_heads=2 if "enable_gqa" in options else 4)
    shape = {x: y for x, y in options.items() if x not in ("recipe", "backend")}
    recipe, backend = options.get("recipe", "halfulp"), options.get("backend")
    expected = results(q, k, v, lambda: ops.attend(check(q, k, v, **shape), recipe, backend))
    for _ in range(3):
        found = results(q, k, v, lambda: halfulp.attention(q, k, v, return_lse=True, **options))
        assert all(map(torch.equal, found, expected))
        with torch.no_grad():
            assert torch.equal(halfulp.attention(q, k, v, **options), expected[0])
    assert len(taken) >= 4


def test_a_transposed_layout_and_an_expanded_gradient(taken):
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in leaves())
    q.requires_grad_()
    found = []
    for _ in range(3):
        halfulp.attention(q, k, v).sum().backward()
        found.append(q.grad)
        q.grad = None
    assert len(taken) >= 2
    assert torch.equal(found[0], found[2])
    found = halfulp.attention(q.transpose(2, 3).contiguous().transpose(2, 3), k, v)
    assert torch.equal(found, halfulp.attention(q, k, v))  # its rows are copied: never prepared


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), str(function)]
        return function(*args, **(kwargs or {}))


def test_who_watches_sees_the_operator(taken):
    q, k, v = (x.detach() for x in leaves())
    expected = halfulp.attention(q, k, v)
    taken.clear()
    with Seen() as seen:
        assert torch.equal(halfulp.attention(q, k, v), expected)
    assert "halfulp.attention_forward.default" in seen.names
    with torch.autocast("cpu", torch.bfloat16):
        assert halfulp.attention(q.float(), k.float(), v.float()).dtype == torch.bfloat16
    compiled = torch.compile(halfulp.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)
    assert torch.equal(torch.vmap(halfulp.attention)(q[None], k[None], v[None])[0], expected)
    with torch.profiler.profile() as profile:
        halfulp.attention(q, k, v)
    assert any(event.key == "halfulp::attention_forward" for event in profile.key_averages())
    assert not taken
    halfulp.attention(q, k, v)
    assert taken


def test_what_is_watched_in_the_backward_pass_alone():
    q, k, v = leaves()
    halfulp.attention(q, k, v)
    out = halfulp.attention(q, k, v)
    seeds = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    alone = [torch.autograd.grad(out, (q, k, v), seed, retain_graph=True) for seed in seeds]
    with Seen() as seen:
        found = torch.autograd.grad(out, (q, k, v), seeds[0], retain_graph=True)
    assert "halfulp.attention_backward.default" in seen.names
    assert all(map(torch.equal, found, alone[0]))
    batched = torch.autograd.grad(out, (q, k, v), seeds, is_grads_batched=True, retain_graph=True)
    for i, some in enumerate(alone):
        assert all(torch.equal(x[i], y) for x, y in zip(batched, some, strict=True))
    first = torch.autograd.grad(out, (q, k, v), seeds[0], create_graph=True)
    assert all(map(torch.equal, first, alone[0]))
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(first[0].float().sum(), q)


def test_tensors_of_the_same_shape_that_hold_their_numbers_otherwise(taken):
    x = torch.randn(1, 2, 6, 8, 2, generator=torch.Generator().manual_seed(0))
    negative = torch.view_as_complex(x).conj().imag
    assert negative.is_neg()
    copy = torch.empty_strided(negative.shape, negative.stride()).copy_(negative)
    for _ in range(3):
        assert torch.equal(halfulp.attention(copy, copy, copy),
                           halfulp.attention(negative, negative, negative))  # fmt: skip
    for wrong in (1, "yes", 2.0):
        with pytest.raises(ValueError, match="is_causal="):
            halfulp.attention(copy, copy, copy, is_causal=wrong)


def test_threads_share_what_is_prepared():
    calls = [[x.detach() + i for x in leaves(torch.float32, n=90)] for i in range(8)]
    alone = [halfulp.attention(*x) for x in calls]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            found = list(pool.map(lambda x: halfulp.attention(*x), calls * 4))
            assert all(torch.equal(x, y) for x, y in zip(found, alone * 4, strict=True))


def test_what_is_prepared_is_bounded(monkeypatch):
    monkeypatch.setattr(direct, "_MOST", 3)
    known, learn = [], direct._learn
    monkeypatch.setattr(direct, "_learn", lambda *given: known.append(learn(*given)))
    for n in range(1, 9):
        q = torch.ones(1, 1, n, 4)
        assert torch.equal(halfulp.attention(q, q, q), halfulp.attention(q, q, q))
    assert len(known) == 8
    assert all(1 <= x <= 3 for x in known)


def test_what_hooks_give_back_is_looked_at_again():
    q, k, v = leaves(torch.float32)
    halfulp.attention(q, k, v)
    out = halfulp.attention(q, k, v)
    seed = torch.ones_like(out)
    expected = torch.autograd.grad(out, (q, k, v), seed)

    def wider(x):  # the same numbers, held otherwise
        if x.dtype == torch.uint8:
            return x
        return torch.stack([x, x], -1)[..., 0].detach()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, wider):
        found = torch.autograd.grad(halfulp.attention(q, k, v), (q, k, v), seed)
    assert all(map(torch.equal, found, expected))
    for wrong in ((q, k), (q, k, k[:, :, :7])):
        with pytest.raises((ValueError, TypeError)):
            halfulp.attention(*wrong)
