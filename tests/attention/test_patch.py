"""`halfulp.patch()`: what it reaches, what it leaves alone, and that nothing of it remains."""

import contextvars
import functools
import importlib
import sys
import threading
import typing

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
                importlib.import_module("halfulp.attention.stand_ins"),
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


def entered(**options):
    with halfulp.patch(**options) as block:
        yield block


def run_stock(*x):
    return halfulp.attention(*x, is_causal=True, recipe="stock", backend="torch")


@pytest.mark.parametrize("first_in_a_thread", [False, True])
def test_generators_closed_out_of_order_leave_nothing_behind(first_in_a_thread):
    """Each closes its own block, whichever was entered last, and wherever it is closed."""
    x, ours, stock = both()
    before = held()
    outer = entered(backend="torch")
    inner = entered(recipe="stock", backend="torch")
    next(outer)
    next(inner)
    assert torch.equal(held()(*x, is_causal=True), run_stock(*x))
    if first_in_a_thread:
        thread = threading.Thread(target=outer.close)
        thread.start()
        thread.join(10)
    else:
        outer.close()
    assert torch.equal(held()(*x, is_causal=True), run_stock(*x)), "the inner one is still open"
    inner.close()
    assert held() is before
    with patched():
        assert torch.equal(held()(*x, is_causal=True), ours)
    assert torch.equal(held()(*x, is_causal=True), stock)


def test_a_later_watch_runs_what_ran_before():
    """Its taps have the functions replaced again, and no choice of a closed block comes back."""
    x, _, stock = both()
    outer, inner = entered(), entered(recipe="stock")
    next(outer)
    next(inner)
    outer.close()
    inner.close()

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

        def forward(self, q, k, v):
            return functional.scaled_dot_product_attention(q * self.by, k, v, is_causal=True)

    model = Attends()
    with halfulp.watch(model, every=1):
        out = model(*x)
        out.float().sum().backward()
    assert torch.equal(out, stock)


def test_it_says_what_it_caught():
    x, *_ = both()
    layer = nn.MultiheadAttention(8, 2)
    with halfulp.patch() as block:
        for _ in range(3):
            by_name(*x, is_causal=True)
        layer(*torch.randn(3, 5, 1, 8), need_weights=False)
    caught = {(call.function, call.site.split("/")[-1].split(":")[0]): n
              for call, n in block.calls.items()}  # fmt: skip
    assert caught == {
        ("scaled_dot_product_attention", "test_patch.py"): 3,
        ("scaled_dot_product_attention", "functional.py"): 1,
    }
    chosen = halfulp.explain_dispatch(*x, is_causal=True).backend
    assert {call.backend for call in block.calls} == {chosen}
    said = str(block)
    assert said.startswith("halfulp.patch(): 4 of 4 attention calls ran halfulp's")
    assert "3 × scaled_dot_product_attention by" in said
    assert "in test_it_says_what_it_caught" in said


def test_a_block_that_caught_nothing_warns_where_it_stands():
    with pytest.warns(RuntimeWarning, match="caught no attention call") as said, halfulp.patch():
        torch.ones(3).softmax(0)
    assert [warning.filename for warning in said] == [__file__]


def test_a_block_left_by_an_exception_warns_of_nothing_else():
    with pytest.raises(KeyError, match="planted"), halfulp.patch():
        raise KeyError("planted")


def test_compiled_code_does_not_count_as_nothing():
    x, ours, _ = both()
    torch._dynamo.reset()
    block = torch.compile(
        lambda *x: functional.scaled_dot_product_attention(*x, is_causal=True), backend="aot_eager"
    )
    for _ in range(2):  # the second time nothing is traced
        with patched() as caught:
            assert torch.equal(block(*x), ours)
        assert "compiled code, which is not counted" in str(caught)


def past(*x, attend=torch.nn.functional.scaled_dot_product_attention):
    return attend(*x)


def written_out(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(
    ("attend", "what"),
    [
        (past, "scaled_dot_product"),
        (written_out, r"a softmax over \(1, 2, 40, 40\)"),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, "aten"),
    ],
)
def test_strict_raises_where_attention_ran_past_it(attend, what):
    x = inputs()
    with (
        pytest.raises(ValueError, match=f"ran past halfulp.patch.*{what}"),
        halfulp.patch(strict=True),
    ):
        attend(*x)
    with pytest.warns(RuntimeWarning, match="caught no attention"), halfulp.patch():
        attend(*x)


def test_strict_lets_halfulp_pass():
    x, ours, _ = both()
    layer = nn.MultiheadAttention(16, 2)
    tokens = torch.randn(12, 2, 16)
    with halfulp.patch(strict=True, backend="torch") as block:
        assert torch.equal(by_name(*x, is_causal=True), ours)
        out, weights = layer(tokens, tokens, tokens)
        (out.sum() + weights.square().sum()).backward()
    assert sum(block.calls.values()) == 2
    for wrong in ({"strict": "no", "backend": "gpu"}, {"recipe": "fast"}):
        with pytest.raises(ValueError, match="accepted"), halfulp.patch(**wrong):
            pass


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kept", [checkpoint, functools.partial(checkpoint)])
def test_a_checkpoint_outside_of_the_block_recomputes_with_what_the_forward_used(reentrant, kept):
    """However the function is held: transformers keeps it in a partial."""
    x = inputs()

    def attends(*t):
        return held()(*t, is_causal=True)

    with patched():
        plain = torch.autograd.grad(attends(*x).float().square().sum(), x)
        out = kept(attends, *x, use_reentrant=reentrant)
    out.float().square().sum().backward()
    for a, b in zip(plain, x, strict=True):
        assert torch.equal(a, b.grad)


def test_the_module_is_there_beside_the_function():
    import halfulp.attention.patch
    import halfulp.attention.patch as module
    from halfulp.attention.patch import patch as function

    assert module is sys.modules["halfulp.attention.patch"] is halfulp.attention.patch
    assert function is halfulp.patch is module.patch
    assert typing.get_type_hints(halfulp.patch)["strict"] is bool
