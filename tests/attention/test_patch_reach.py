"""Every function that `halfulp.patch()` stands in for, with the arguments its versions take."""

import functools
import inspect
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.attention import flex_attention as flex

import halfulp
from halfulp.attention.patch import patch

pytestmark = pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")


def inputs(*shape, seed=0, count=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(count)
    ]


def gradients(out, x):
    return torch.autograd.grad(out.float().square().sum(), x)


def same(ours, expected, x):
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(gradients(ours, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def backends(patched):
    return [(call.function, call.backend, count) for call, count in patched.calls.items()]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_multihead_attention_with_weights(average, masked):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    (x,) = inputs(2, 9, 16, count=1)
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1) if masked else None
    options = {"average_attn_weights": average, "attn_mask": mask, "is_causal": masked}
    expected, weights = layer(x, x, x, **options)
    with patch(backend="torch", recipe="stock") as patched:
        out, shown = layer(x, x, x, **options)
    torch.testing.assert_close(shown, weights)
    same(out, expected, [x, *layer.parameters()])
    assert backends(patched) == [("scaled_dot_product_attention", "torch", 1)]


def test_mask_and_causal_together():
    x = inputs(1, 2, 12, 8)
    seen = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) > 0.3
    seen.fill_diagonal_(True)
    both = seen & torch.ones(12, 12, dtype=torch.bool).tril()
    bias = torch.zeros(12, 12).masked_fill(~seen, -torch.inf)
    for mask in (seen, bias):
        with patch():
            out = functional.scaled_dot_product_attention(*x, mask, is_causal=True)
        same(out, functional.scaled_dot_product_attention(*x, both), x)


def packed(lengths):
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)])
def test_varlen_attn(window):
    q, k, v = inputs(20, 4, 8)
    ends = packed([5, 12, 3])
    expected, lse = halfulp.attention_varlen(
        q, k[:, :2], v[:, :2], ends, window=None if window == (-1, -1) else window, return_lse=True
    )
    with patch() as patched:
        out, more = varlen.varlen_attn(
            *(q, k[:, :2], v[:, :2], ends, ends, 12, 12),
            window_size=window,
            enable_gqa=True,
            return_aux=varlen.AuxRequest(lse=True),
        )
    assert torch.equal(out, expected)
    assert torch.equal(more, lse)
    assert backends(patched)[0][::2] == ("varlen_attn", 1)


def test_varlen_attn_of_a_paged_cache_is_stock():
    q, k, v = inputs(20, 4, 8, dtype=torch.bfloat16)
    ends = packed([20])
    with (
        patch() as patched,
        pytest.warns(RuntimeWarning, match="varlen_attn .*as stock .*seqused_k is given"),
        pytest.raises((RuntimeError, NotImplementedError)),  # on a CPU stock has none
    ):
        varlen.varlen_attn(q, k, v, ends, ends, 20, 20, seqused_k=torch.tensor([9]).int())
    assert backends(patched) == [("varlen_attn", "stock", 1)]


def documents(b, h, q, k):
    return (q // 7) == (k // 7)


MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 4),
    "prefix": lambda b, h, q, k: (q >= k) | (k < 5),
    "documents": lambda b, h, q, k: documents(b, h, q, k) & (q >= k),
    "of heads": lambda b, h, q, k: (q >= k) | (h == 1),
}
SLOPES = torch.tensor([0.5, 0.25], requires_grad=True)
MODIFICATIONS = {
    "none": None,
    "softcap": lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
    "alibi": lambda s, b, h, q, k: s - (q - k).abs() * SLOPES[h],
    "causal by score": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
}


def dense(query, key, value, modification, mask):
    """FlexAttention's definition, in matrix products."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    places = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    if modification is not None:
        scores = modification(scores, *places)
    if mask is not None:
        scores = scores.masked_fill(~mask(*places), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("modification", MODIFICATIONS)
def test_flex_attention(mask, modification):
    x = inputs(1, 2, 20, 8)
    mask_mod, score_mod = MASKS.get(mask), MODIFICATIONS[modification]
    blocks = mask_mod and flex.create_block_mask(mask_mod, 1, 2, 20, 20, "cpu", BLOCK_SIZE=8)
    if mask_mod is None and score_mod is None:
        pytest.skip("is scaled_dot_product_attention")
    expected, lse = dense(*x, score_mod, mask_mod)
    learned = [*x, SLOPES] if modification == "alibi" else x
    with patch(backend="torch" if modification == "alibi" else None) as patched:
        out, more = flex.flex_attention(*x, score_mod, blocks, return_aux=flex.AuxRequest(lse=True))
        again = flex.flex_attention(*x, score_mod, blocks)
    same(out, expected, learned)
    torch.testing.assert_close(more.lse, lse)
    assert torch.equal(out, again)
    assert sum(patched.calls.values()) == 2


def test_the_plain_diagonals_are_recognized(monkeypatch):
    """They need no mask of N² numbers."""
    seen = []
    module = sys.modules["halfulp.attention.flex_attention"]
    real = module.attention
    monkeypatch.setattr(
        module, "attention", lambda *a, **o: seen.append((a[3], a[5], o["window"])) or real(*a, **o)
    )
    x = inputs(1, 2, 20, 8)
    with patch():
        for name in ("causal", "window"):
            blocks = flex.create_block_mask(MASKS[name], None, None, 20, 20, "cpu", BLOCK_SIZE=8)
            flex.flex_attention(*x, block_mask=blocks)
    assert seen == [(None, True, None), (None, False, (4, 0))]


def test_blocks_without_a_function_are_a_mask_too():
    x = inputs(1, 1, 16, 8)
    counts, which = torch.tensor([[[1, 1]]]).int(), torch.tensor([[[[1, 0], [0, 1]]]]).int()
    blocks = flex.BlockMask.from_kv_blocks(counts, which, BLOCK_SIZE=8)
    with patch():
        out = flex.flex_attention(*x, block_mask=blocks)
    swapped = torch.block_diag(torch.ones(8, 8), torch.ones(8, 8)).bool().flip(0)
    same(out, functional.scaled_dot_product_attention(*x, swapped), x)


def test_a_score_modification_that_is_not_known_is_stock(monkeypatch):
    x = [t.detach() for t in inputs(1, 2, 20, 8)]
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    square = lambda s, b, h, q, k: s * s  # noqa: E731
    expected = flex.flex_attention(*x, square)
    with patch() as patched:
        with pytest.warns(RuntimeWarning, match="score_mod that neither"):
            first = flex.flex_attention(*x, square)
        again = flex.flex_attention(*x, square)  # one warning for one reason
    assert torch.equal(first, expected)
    assert torch.equal(again, expected)
    assert backends(patched) == [("flex_attention", "stock", 1)] * 2  # from two lines


def test_jagged_tensors():
    lengths = (5, 12, 3)
    parts = [inputs(n, 2, 8, seed=n) for n in lengths]
    nested = [
        torch.nested.nested_tensor(
            [part[i].detach() for part in parts], layout=torch.jagged, requires_grad=True
        )
        for i in range(3)
    ]
    q, k, v = (x.transpose(1, 2) for x in nested)
    with patch() as patched:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert sum(patched.calls.values()) == 1
    assert "stock" not in str(patched)
    grads = torch.autograd.grad(out.values().square().sum(), nested)
    for i, part in enumerate(parts):
        wanted = halfulp.attention(*(x.transpose(0, 1) for x in part), is_causal=True)
        torch.testing.assert_close(out.unbind()[i], wanted)
        for grad, w in zip(grads, gradients(wanted, part), strict=True):
            torch.testing.assert_close(grad.unbind()[i], w)


def test_what_cannot_be_taken_runs_as_stock_and_says_so():
    x = inputs(1, 2, 12, 8)
    expected = functional.scaled_dot_product_attention(*x)

    def asks(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v)

    with patch() as patched, pytest.warns(RuntimeWarning, match="as in symbolic tracing"):
        traced = torch.fx.symbolic_trace(asks)
    torch.testing.assert_close(traced(*x), expected)
    strided = [torch.nested.nested_tensor([t.detach()[0], t.detach()[0, :, :5]]) for t in x]
    with patch(), pytest.warns(RuntimeWarning, match="nested tensor that is not jagged"):
        out = functional.scaled_dot_product_attention(*strided)
    torch.testing.assert_close(out[0], expected[0].detach())
    assert backends(patched) == [("scaled_dot_product_attention", "stock", 1)]


def test_double_backward_where_only_the_math_kernel_is_allowed():
    x = inputs(1, 2, 12, 8)
    with (
        patch() as patched,
        sdpa_kernel(SDPBackend.MATH),
        pytest.warns(RuntimeWarning, match="only PyTorch's math kernel"),
    ):
        out = functional.scaled_dot_product_attention(*x)
    first = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert all(g.isfinite().all() for g in gradients(first[0], x))
    assert backends(patched) == [("scaled_dot_product_attention", "stock", 1)]


def flash_2():
    """The functions of flash_attn 2.8, their signatures."""

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
                        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                        return_attn_probs=False):  # fmt: skip
        return "stock"

    def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False,
                                  window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                  deterministic=False, return_attn_probs=False):  # fmt: skip
        return "stock"

    def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False,
                                 window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                 deterministic=False, return_attn_probs=False):  # fmt: skip
        return "stock"

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               dropout_p=0.0, softmax_scale=None, causal=False,
                               window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                               deterministic=False, return_attn_probs=False,
                               block_table=None):  # fmt: skip
        return "stock"

    def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0,
                                         softmax_scale=None, causal=False, window_size=(-1, -1),
                                         softcap=0.0, alibi_slopes=None, deterministic=False,
                                         return_attn_probs=False):  # fmt: skip
        return "stock"

    def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                        max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                                        causal=False, window_size=(-1, -1), softcap=0.0,
                                        alibi_slopes=None, deterministic=False,
                                        return_attn_probs=False):  # fmt: skip
        return "stock"

    return locals()


def flash_3():
    """Those of flash_attn_interface, in FlashAttention's folder hopper."""

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None,
                        k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
                        softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                        return_attn_probs=False):  # fmt: skip
        return "stock"

    def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None,
                                  k_descale=None, v_descale=None, window_size=(-1, -1),
                                  attention_chunk=0, softcap=0.0, deterministic=False,
                                  num_heads_q=None, sm_margin=0,
                                  return_attn_probs=False):  # fmt: skip
        return "stock"

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               seqused_q=None, seqused_k=None, softmax_scale=None, causal=False,
                               qv=None, q_descale=None, k_descale=None, v_descale=None,
                               window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                               pack_gqa=None, deterministic=False, sm_margin=0,
                               return_attn_probs=False):  # fmt: skip
        return "stock"

    return locals()


def flash_4():
    """Those of flash_attn.cute."""

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None),
                        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                        deterministic=False, mask_mod=None, return_lse=False):  # fmt: skip
        return "stock"

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
                               seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                               page_table=None, softmax_scale=None, causal=False,
                               window_size=(None, None), learnable_sink=None, softcap=0.0,
                               num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
                               mask_mod=None, aux_tensors=None, return_lse=False):  # fmt: skip
        return "stock"

    return locals()


VERSIONS = {"flash_attn": flash_2, "flash_attn_interface": flash_3, "flash_attn.cute": flash_4}


@pytest.fixture
def flash_attn(monkeypatch):
    """Modules in the place of the packages, whose kernels need a GPU, and one that holds one."""
    modules = {}
    for name, functions in VERSIONS.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(functions())
        monkeypatch.setitem(sys.modules, name, modules[name])
    user = types.ModuleType("a_user_of_flash_attn")
    user.attend = modules["flash_attn"].flash_attn_func
    monkeypatch.setitem(sys.modules, "a_user_of_flash_attn", user)
    return modules | {"user": user}


def test_flash_attn_of_every_version(flash_attn):
    """Its layout `[B, N, H, D]`, its causal mask at the bottom right, its windows; stock again
    afterwards.
    """
    q, k, v = (x.transpose(1, 2) for x in inputs(1, 2, 40, 16))
    q, k, v = q[:, :30], k[:, :, :1], v[:, :, :1]  # grouped without being told
    near = torch.ones(30, 40, dtype=torch.bool)
    near = near.tril(10) & near.triu(10 - 5)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    expected, lse = halfulp.attention(*turned, near, enable_gqa=True, return_lse=True)
    expected = expected.transpose(1, 2)
    asked = {"causal": True, "window_size": (5, 0)}
    ends, key_ends = torch.tensor([0, 30]), torch.tensor([0, 40])
    two, three, four = (flash_attn[name] for name in VERSIONS)
    with patch() as patched:
        results = [
            flash_attn["user"].attend(q, k, v, **asked),
            two.flash_attn_func(q, k, v, return_attn_probs=True, **asked)[0],
            two.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **asked),
            three.flash_attn_func(q, k, v, **asked),
            three.flash_attn_func(q, k, v, return_attn_probs=True, **asked)[0],
            four.flash_attn_func(q, k, v, **asked)[0],
        ]
        sequences = (q[0], k[0], v[0])
        results += [
            two.flash_attn_varlen_func(*sequences, ends, key_ends, 30, 40, **asked)[None],
            three.flash_attn_varlen_func(*sequences, ends, key_ends, 30, 40, **asked)[None],
            four.flash_attn_varlen_func(*sequences, ends, key_ends, **asked)[0][None],
            two.flash_attn_varlen_kvpacked_func(
                q[0], torch.stack([k[0], v[0]], 1), ends, key_ends, 30, 40, **asked
            )[None],
        ]
        shown = three.flash_attn_func(q, k, v, return_attn_probs=True, **asked)[1]
        hidden = four.flash_attn_func(q, k, v, **asked)[1]
        given = four.flash_attn_func(q, k, v, return_lse=True, **asked)[1]
    for got in results:
        torch.testing.assert_close(got, expected)
    for got in (shown, given):
        torch.testing.assert_close(got, lse)
    assert hidden is None
    assert sum(patched.calls.values()) == len(results) + 3
    assert two.flash_attn_func(q, k, v) == flash_attn["user"].attend(q, k, v) == "stock"


def test_flash_attn_packed_whole(flash_attn):
    qkv = inputs(2, 12, 3, 4, 8, count=1)[0]
    expected = halfulp.attention(*(x.transpose(1, 2) for x in qkv.unbind(2)), is_causal=True)
    expected = expected.transpose(1, 2)
    ends = packed([12, 12])
    two, three = flash_attn["flash_attn"], flash_attn["flash_attn_interface"]
    grouped = torch.cat([qkv[:, :, 0], qkv[:, :, 1, :2], qkv[:, :, 2, :2]], 2)
    with patch():
        assert torch.equal(two.flash_attn_qkvpacked_func(qkv, causal=True), expected)
        assert torch.equal(three.flash_attn_qkvpacked_func(qkv, causal=True), expected)
        out = two.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), ends, 12, causal=True)
        torch.testing.assert_close(out, expected.flatten(0, 1))
        out = three.flash_attn_qkvpacked_func(grouped, causal=True, num_heads_q=4)
    q, k, v = grouped.split([4, 2, 2], 2)
    wanted = halfulp.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert torch.equal(out, wanted.transpose(1, 2))


def test_what_flash_attn_takes_and_halfulp_does_not_is_stock(flash_attn):
    q, k, v = inputs(1, 12, 2, 8)
    two, three, four = (flash_attn[name] for name in VERSIONS)
    with patch() as patched, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert two.flash_attn_func(q, k, v, alibi_slopes=torch.ones(2)) == "stock"
        assert three.flash_attn_func(q, k, v, attention_chunk=4) == "stock"
        assert four.flash_attn_func(q, k, v, mask_mod=print) == "stock"
    told = [str(warning.message) for warning in said]
    assert [name for name in ("alibi_slopes", "attention_chunk", "mask_mod") if name in str(told)]
    assert len(told) == 3
    assert all("test_patch_reach.py" in text for text in told)
    assert {call.backend for call in patched.calls} == {"stock"}
    with pytest.raises(ValueError, match="alibi_slopes is given"), patch(strict=True):
        two.flash_attn_func(q, k, v, alibi_slopes=torch.ones(2))


class Holds:
    """As torchtitan holds it: compiled, on a class, before any block."""

    attend = torch.compile(flex.flex_attention, backend="aot_eager")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_functions_of_python_are_reached_whoever_holds_them():
    """The code of the function is another while a block is open."""
    x = [t.detach() for t in inputs(1, 2, 20, 8)]
    blocks = flex.create_block_mask(MASKS["causal"], None, None, 20, 20, "cpu", BLOCK_SIZE=8)
    signature = inspect.signature(flex.flex_attention)
    code = flex.flex_attention.__code__
    expected = Holds.attend(*x, block_mask=blocks)
    part = functools.partial(flex.flex_attention, block_mask=blocks)
    ours = halfulp.attention(*x, is_causal=True)
    assert not torch.equal(ours, expected)
    with patch() as patched:
        assert torch.equal(Holds.attend(*x, block_mask=blocks), ours)
        assert torch.equal(part(*x), ours)
        assert inspect.signature(flex.flex_attention) == signature
    assert sum(patched.calls.values()) == 2
    assert torch.equal(Holds.attend(*x, block_mask=blocks), expected)
    assert flex.flex_attention.__code__ is code
    assert not [name for name in vars(flex) if "halfulp" in name]


def test_a_distributed_tensor(tmp_path):
    """Split over batch and heads part by part, over the sequence as stock."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = inputs(2, 4, 12, 8)
        expected = halfulp.attention(*x, is_causal=True)
        wanted = gradients(expected, x)
        for placement in (Shard(0), Shard(1), Replicate()):
            split = [distribute_tensor(t, mesh, [placement]) for t in x]
            with patch(strict=True):
                out = functional.scaled_dot_product_attention(*split, is_causal=True)
            assert out.placements == (placement,)
            assert torch.equal(out.full_tensor(), expected)
            grads = torch.autograd.grad(out.full_tensor().square().sum(), split)
            for a, b in zip(grads, wanted, strict=True):
                torch.testing.assert_close(a.full_tensor(), b)
        split = [distribute_tensor(t.detach(), mesh, [Shard(2)]) for t in x]
        # without its fused kernel, whose split PyTorch works out for twelve seconds
        plain = sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])
        with plain, patch(), pytest.warns(RuntimeWarning, match="as in context parallelism"):
            functional.scaled_dot_product_attention(*split)
    finally:
        distributed.destroy_process_group()
