"""`torch.ops.halfulp.*` as PyTorch's machinery sees it, and the bits of the plain PyTorch
backend.
"""

import functools
import itertools

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import halfulp
from halfulp.algorithms import Problem
from halfulp.attention import emulate
from halfulp.calls import Call
from halfulp.formats import BF16, FP16
from halfulp.ops import attention_forward, tiled
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, KERNEL_RECIPES, Step, recipe_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LOW = (torch.bfloat16, torch.float16)


def leaves(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def attend(*args, **options):
    return halfulp.attention(*args, backend="torch", **options)


# The plain PyTorch backend.


@pytest.mark.parametrize(("recipe", "dtype"), list(itertools.product(KERNEL_RECIPES, DTYPES)))
def test_the_bits_of_the_emulation(recipe, dtype):
    """Out, lse and gradients of both, over several tiles, with grouped heads and a mask."""
    q, k, v = leaves((1, 4, 150, 16), (1, 2, 170, 16), (1, 2, 170, 24), dtype=dtype)
    mask = torch.rand(150, 170, generator=torch.Generator().manual_seed(1)) > 0.2
    mask[3] = False
    results = []
    for call in (
        functools.partial(attend, recipe=recipe),
        functools.partial(emulate, recipe=recipe_of(recipe, dtype)),
    ):
        out, lse = call(q, k, v, mask, enable_gqa=True, scale=0.3, return_lse=True)
        row = torch.linspace(-1, 1, 150).where(torch.arange(150) != 3, 0)
        seeds = (out.detach().flip(2), lse.new_ones(lse.shape) * row)
        results.append((out, lse, *torch.autograd.grad((out, lse), (q, k, v), seeds)))
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_recipes_are_the_named_ones():
    assert recipe_of("halfulp", torch.bfloat16) == BF16_HALFULP
    assert recipe_of("stock", torch.bfloat16) == BF16_FLASH2
    half = recipe_of("halfulp", torch.float16)
    assert half.with_(name="x") != BF16_HALFULP.with_(name="x")
    assert {getattr(half, step) for step in ("query", "out", "grad_scores", "weights_operand")} == {
        FP16
    }
    assert BF16 not in vars(half).values()


@pytest.mark.parametrize("dtype", LOW)
def test_eight_bits_keep_the_residual(dtype):
    """O plus its residual is eight bits nearer to O before rounding; what is saved unpacks to what
    the recipe says.
    """
    q, k, v = (
        x.detach() for x in leaves((1, 2, 60, 16), (1, 2, 70, 16), (1, 2, 70, 16), dtype=dtype)
    )
    v[..., 0], v[..., 1] = 1e-7, 0  # subnormal in float16
    call = Call(q, k, v, scale=0.25)
    saved = tiled.forward(call, "halfulp")
    exact = halfulp.golden(q, k, v, scale=0.25).out
    problem = Problem.read(call, Step(recipe_of("halfulp", dtype)))
    whole = tiled._unpacked(saved, problem).out_for_delta.double()
    assert saved.residual.dtype == torch.int8
    rounded, kept = (float((x.double() - exact)[..., 2:].norm()) for x in (saved.out, whole))
    assert kept < rounded  # the weights' own rounding remains
    seen = []
    emulate(
        q,
        k,
        v,
        scale=0.25,
        recipe=problem.recipe,
        observers=[lambda name, _, x: seen.append(x) if name == "residual" else 0],
    )
    assert torch.equal(whole, (saved.out.float() + seen[0]).double())


# Operators.

REPRESENTATIVE = {
    "causal bf16": (torch.bfloat16, {"is_causal": True}),
    "everything": (torch.float32, {"window": (9, -1), "softcap": 2.0, "dropout_p": 0.2}),
    "stock fp16": (torch.float16, {"recipe": "stock", "mask": True}),
}


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_opcheck(name):
    dtype, options = REPRESENTATIVE[name]
    q, k, v = leaves((2, 2, 9, 8), (2, 1, 12, 8), (2, 1, 12, 16), dtype=dtype)
    mask = leaves((9, 12))[0] if "mask" in options else None
    sinks = leaves((2,))[0] if "softcap" in options else None
    seed = torch.tensor(7) if "dropout_p" in options else None
    arguments = (
        q,
        k,
        v,
        mask,
        sinks,
        seed,
        options.get("is_causal", False),
        0.3,
        options.get("window"),
        options.get("softcap", 0.0),
        options.get("dropout_p", 0.0),
        0,
        options.get("recipe", "halfulp"),
        "torch",
        mask is not None,
    )
    torch.library.opcheck(attention_forward, arguments)
    outputs = [x.detach() for x in attention_forward(*arguments)]
    inputs = [x.detach() for x in (q, k, v)]
    optional = [x if x is None else x.detach() for x in arguments[3:6]]
    given = (outputs[0].flip(2), outputs[1].flip(2), *outputs, *inputs, *optional, *arguments[6:])
    backward = torch.ops.halfulp.attention_backward.default
    torch.library.opcheck(backward, given, test_utils=("test_schema", "test_faketensor"))


def test_compiles_whole_and_keeps_the_bits():
    q, k, v = leaves((2, 4, 140, 16), (2, 2, 150, 16), (2, 2, 150, 16), dtype=torch.bfloat16)

    def block(q, k, v):
        out, lse = attend(
            q * 2, k, v, is_causal=True, enable_gqa=True, return_lse=True, window=(60, 0)
        )
        return out.float().square().sum() + lse.sum()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), block(q, k, v))
    for got, expected in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v)),
        torch.autograd.grad(block(q, k, v), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(got, expected)
    longer = leaves((2, 4, 141, 16), (2, 2, 151, 16), (2, 2, 151, 16), dtype=torch.bfloat16)
    assert torch.equal(compiled(*longer), block(*longer)), "dynamic shapes"


def test_meta_tensors():
    q = torch.empty(2, 3, 5, 8, device="meta", dtype=torch.bfloat16)
    v = torch.empty(2, 3, 7, 4, device="meta", dtype=torch.bfloat16)
    out, lse = halfulp.attention(q, q.new_empty(2, 3, 7, 8), v, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == ((2, 3, 5, 4), torch.bfloat16, "meta")
    assert (lse.shape, lse.dtype) == ((2, 3, 5), torch.float32)


@pytest.mark.parametrize("dtype", LOW)
def test_autocast_casts_as_for_pytorch(dtype):
    q, k, v = leaves(*[(1, 2, 9, 8)] * 3)
    with torch.autocast("cpu", dtype=dtype):
        out = attend(q, k.to(dtype), v)
        stock = functional.scaled_dot_product_attention(q, k.to(dtype), v)
    assert out.dtype == stock.dtype == dtype
    assert torch.equal(out, attend(q.to(dtype), k.to(dtype), v.to(dtype)))
    grad = torch.autograd.grad(out.sum(), q)[0]
    assert grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype), torch.autocast("cpu", enabled=False):
        assert attend(q, k, v).dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):  # float64 is left alone, as there
        assert attend(*(x.double() for x in (q, k, v))).dtype == torch.float64
        for mixed in ((q.double(), k, v), (q, k, v.double())):
            with pytest.raises(ValueError, match="of dtype"):
                attend(*mixed)


@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0, 0), (0, 1, None, None), (None, 2, 0, 1), (0, 0, 0, None)]
)
def test_vmap(in_dims):
    sizes = [(2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), (2, 1, 5, 7)]
    shapes = [s if d is None else (*s[:d], 3, *s[d:]) for s, d in zip(sizes, in_dims, strict=True)]
    tensors = leaves(*shapes)

    def loss(q, k, v, mask):
        return attend(q, k, v, mask).square().sum()

    each = [
        [x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True)]
        for i in range(3)
    ]
    out = torch.func.vmap(attend, in_dims)(*tensors)
    torch.testing.assert_close(out, torch.stack([attend(*x) for x in each]), rtol=1e-5, atol=1e-6)
    grads = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), in_dims)(*tensors)
    expected = [torch.autograd.grad(loss(*x), x[:3]) for x in each]
    for got, wanted in zip(grads, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-5, atol=1e-6)


# the compiler does it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.skipif(
    torch.__version__.startswith("2.8."),
    reason="PyTorch 2.8 cannot compile torch.func's gradient of an autograd.Function",
)
def test_vmap_and_gradients_compile():
    q = leaves((3, 1, 2, 5, 8))[0].detach()

    def loss(q):
        return attend(q, q, q, is_causal=True).square().sum()

    for function, x in ((torch.func.vmap(loss), q), (torch.func.grad(loss), q[0])):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), function(x))


def test_vmap_over_nothing():
    q = torch.zeros(0, 2, 2, 5, 8)
    assert torch.func.vmap(attend)(q, q, q).shape == q.shape


def test_vmap_of_sinks_and_dropout():
    q, sinks = leaves((3, 2, 2, 5, 8), (3, 2))
    out = torch.func.vmap(lambda q, s: attend(q, q, q, sinks=s))(q, sinks)
    each = torch.stack([attend(x, x, x, sinks=s) for x, s in zip(q, sinks, strict=True)])
    torch.testing.assert_close(out, each, rtol=1e-5, atol=1e-6)
    same = q[:1].expand_as(q)
    for randomness, alike in (("same", True), ("different", False)):
        out = torch.func.vmap(lambda q: attend(q, q, q, None, 0.5), randomness=randomness)(same)
        assert torch.equal(out[0], out[1]) == alike


def test_gradients_once_and_not_twice():
    tensors = leaves(*[(1, 2, 5, 8)] * 3)
    (first,) = torch.autograd.grad(attend(*tensors).square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(first.sum(), tensors[:1])
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.func.grad(
            lambda q: torch.func.grad(lambda q: attend(q, *tensors[1:]).sum())(q).sum()
        )(tensors[0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_recomputes_the_same(use_reentrant):
    tensors = leaves(*[(1, 2, 40, 8)] * 3, dtype=torch.bfloat16)
    results = []
    for kept in (True, False):
        torch.manual_seed(3)
        call = functools.partial(attend, dropout_p=0.4)
        out = call(*tensors) if kept else checkpoint(call, *tensors, use_reentrant=use_reentrant)
        results.append(
            (out, *torch.autograd.grad(out.float().square().sum(), tensors))
            if kept or not use_reentrant
            else (out, *_backward(out, tensors))
        )
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def _backward(out, tensors):
    """Reentrant checkpoints know `backward()` alone."""
    out.float().square().sum().backward()
    return [x.grad for x in tensors]


def test_gradcheck():
    tensors = [
        x.detach().double().requires_grad_()
        for x in leaves((1, 2, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2), (4, 5), (2,))
    ]

    def call(q, k, v, mask, sinks):
        return attend(q, k, v, mask, enable_gqa=True, sinks=sinks, softcap=1.5, return_lse=True)

    torch.autograd.gradcheck(call, tensors)
