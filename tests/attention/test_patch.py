"""`halfulp.patch()`: what it reaches, what it leaves alone, and that nothing of it remains."""

import contextvars
import importlib
import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.utils.checkpoint import checkpoint

import halfulp

FUNCTIONS = sys.modules[__name__]


def held():
    """PyTorch's function as other code holds it; locals are out of the patch's reach."""
    return functional.scaled_dot_product_attention


def inputs(seed=0, n=40):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, 2, n, 16, generator=generator).bfloat16().requires_grad_() for _ in range(3)
    ]


def both():
    """(ours, stock) on the same inputs: different bits."""
    x = inputs()
    with_lse = halfulp.attention(*x, is_causal=True, backend="torch")
    stock = held()(*x, is_causal=True)
    assert not torch.equal(with_lse, stock)
    return x, with_lse, stock


def patched():
    return halfulp.patch(backend="torch")


def test_attribute_and_name_are_reached_and_given_back():
    x, ours, stock = both()
    before = held()
    with patched():
        assert torch.equal(functional.scaled_dot_product_attention(*x, is_causal=True), ours)
        assert torch.equal(nn.functional.scaled_dot_product_attention(*x, None, 0.0, True), ours)
        assert torch.equal(by_name(*x, is_causal=True), ours)
        assert torch.equal(before(*x, is_causal=True), stock), "a local is out of reach"
    assert held() is before
    assert FUNCTIONS.by_name is before
    assert torch.equal(by_name(*x, is_causal=True), stock)


def test_given_back_after_an_exception():
    before = held()

    def fail():
        assert held() is not before
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), patched():
        fail()
    assert held() is before


def test_the_innermost_counts():
    x, ours, _ = both()
    before = held()
    stock = halfulp.attention(*x, is_causal=True, recipe="stock", backend="torch")
    with patched():
        with halfulp.patch(recipe="stock", backend="torch"):
            assert torch.equal(held()(*x, is_causal=True), stock)
        assert torch.equal(held()(*x, is_causal=True), ours)
    assert held() is before
    assert not torch.equal(ours, stock)


def test_a_backend_that_does_not_fit_raises():
    x = inputs()
    with halfulp.patch(backend="triton"), pytest.raises(ValueError, match="backend='triton'"):
        held()(*x)
    for wrong in ({"backend": "gpu"}, {"recipe": "fast"}):
        with pytest.raises(ValueError, match="accepted"), halfulp.patch(**wrong):
            pass
    assert held() is by_name


def test_other_threads_keep_the_stock_function():
    """A thread that did not enter sees PyTorch's kernel while another is inside, and both leave in
    any order.
    """
    x, ours, stock = both()
    before, seen = held(), {}
    inside, looked, leave = threading.Event(), threading.Event(), threading.Event()

    def enters():
        with patched():
            inside.set()
            looked.wait(10)
            seen["entered"] = held()(*x, is_causal=True)
        leave.set()

    def looks():
        inside.wait(10)
        seen["outside"] = held()(*x, is_causal=True)
        bias = causal_lower_right(40, 40)
        seen["bias"] = held()(*x, bias)
        with halfulp.patch(recipe="stock", backend="torch"):
            looked.set()
            leave.wait(10)
            seen["own"] = held()(*x, is_causal=True)

    threads = [threading.Thread(target=f) for f in (enters, looks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert torch.equal(seen["entered"], ours)
    assert torch.equal(seen["outside"], stock)
    assert torch.equal(seen["bias"], stock)
    assert torch.equal(
        seen["own"], halfulp.attention(*x, is_causal=True, recipe="stock", backend="torch")
    )
    assert held() is before


def test_threads_of_the_backward_pass_follow():
    """On a GPU a checkpoint is recomputed in a thread of autograd's; here a hook asks from such a
    place.
    """
    x, ours, stock = both()
    seen = []

    class Recomputes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return q.clone()

        @staticmethod
        def backward(ctx, grad):
            context = threading.Thread(target=lambda: None)
            context.start()
            context.join()
            empty = __import__("contextvars").Context()  # what a new thread starts from
            seen.append(empty.run(lambda: held()(*[t.detach() for t in x], is_causal=True)))
            return grad

    with patched():
        Recomputes.apply(x[0]).sum().backward()
    assert torch.equal(seen[0], ours.detach())
    assert torch.equal(held()(*x, is_causal=True), stock)


def test_a_generator_that_is_closed_elsewhere_gives_it_back():
    """Its context variable belongs to another context; the stock function is back all the same."""

    def entered():
        with patched():
            yield

    before, block = held(), entered()
    contextvars.copy_context().run(next, block)
    assert held() is not before
    block.close()
    assert held() is before


def test_checkpoints_inside_recompute_with_it():
    x = inputs()
    with patched():
        plain = torch.autograd.grad(held()(*x, is_causal=True).float().square().sum(), x)
        out = checkpoint(lambda *t: held()(*t, is_causal=True), *x, use_reentrant=False)
        again = torch.autograd.grad(out.float().square().sum(), x)
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention_and_transformer_layers(training):
    """Also in inference, where PyTorch would take its fused C++ path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).train(training)
    x = torch.randn(2, 9, 16)
    calls = []

    def count(*args, **options):
        calls.append(args[0].shape)
        return halfulp.attention(*args, **options, backend="torch")

    fused = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        expected = layer(x)
        with pytest.MonkeyPatch.context() as planted, patched():
            planted.setattr(
                importlib.import_module("halfulp.attention.patch"),
                "attention",
                lambda *a, recipe, backend: count(*a),
            )
            out = layer(x)
    assert calls == [(2, 2, 9, 8)]
    torch.testing.assert_close(out, expected)
    assert torch.backends.mha.get_fastpath_enabled() == fused


def test_compiles_inside():
    x, ours, _ = both()

    def block(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with patched():
        assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(*x), ours)


def test_compiled_code_follows():
    """Compiled before a block, in it, in one inside that asks for another recipe, and called after
    all of them.
    """
    x, ours, stock = both()
    torch._dynamo.reset()
    block = torch.compile(
        lambda *x: functional.scaled_dot_product_attention(*x, is_causal=True), backend="aot_eager"
    )
    flash = halfulp.attention(*x, is_causal=True, recipe="stock", backend="torch")
    assert torch.equal(block(*x), stock)
    for _ in range(2):
        with patched():
            assert torch.equal(block(*x), ours)
            with halfulp.patch(recipe="stock", backend="torch"):
                assert torch.equal(block(*x), flash)
            assert torch.equal(block(*x), ours)
        with halfulp.patch(recipe="stock", backend="torch"):
            assert torch.equal(block(*x), flash)
        assert torch.equal(block(*x), stock)


@pytest.fixture
def flash_attn(monkeypatch):
    """A module in the place of the package flash_attn, whose kernels need a GPU."""
    module = types.ModuleType("flash_attn")
    module.flash_attn_func = lambda *args, **options: "stock"
    module.flash_attn_varlen_func = lambda *args, **options: "stock varlen"
    user = types.ModuleType("a_user_of_flash_attn")
    user.attend = module.flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "a_user_of_flash_attn", user)
    return module, user


def test_flash_attn(flash_attn):
    """Its layout `[B, N, H, D]`, its causal mask at the bottom right, its windows; stock again
    afterwards.
    """
    module, user = flash_attn
    q, k, v = (x.transpose(1, 2) for x in inputs())
    k, v = k[:, :, :1], v[:, :, :1]  # grouped without being told
    visible = torch.ones(30, 40, dtype=torch.bool).tril(10) & torch.ones(
        30, 40, dtype=torch.bool
    ).triu(10 - 5)
    expected = halfulp.attention(
        q[:, :30].transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        visible,
        enable_gqa=True,
        backend="torch",
    ).transpose(1, 2)
    with patched():
        out = user.attend(q[:, :30], k, v, causal=True, window_size=(5, 0))
        with_lse = module.flash_attn_func(
            q[:, :30], k, v, causal=True, window_size=(5, 0), return_attn_probs=True
        )
        ends, key_ends = torch.tensor([0, 30]), torch.tensor([0, 40])
        packed = module.flash_attn_varlen_func(
            q[0, :30], k[0], v[0], ends, key_ends, 30, 40, causal=True, window_size=(5, 0)
        )
        with pytest.raises(ValueError, match="alibi_slopes is given"):
            module.flash_attn_func(q, k, v, alibi_slopes=torch.ones(2))
    for got in (out, with_lse[0], packed[None]):
        assert torch.equal(got, expected)
    assert with_lse[1].shape == (1, 2, 30)
    assert module.flash_attn_func(q, k, v) == user.attend(q, k, v) == "stock"
    assert module.flash_attn_varlen_func() == "stock varlen"
