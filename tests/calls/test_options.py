"""`attention`, `emulate` and `golden` take the same options and mean the same by them."""

import inspect
import itertools
import math

import pytest
import torch
from torch import Tensor

import halfulp
from halfulp.calls import Call, Dropout, Sees, check, draw_seed
from halfulp.formats.counter import keep_mask
from halfulp.recipes import FP64

SHAPE, LENGTHS = (2, 4), (11, 14)
OPTIONS = {
    "window": {"window": (3, 2)},
    "causal window": {"window": (4, -1), "is_causal": True, "causal_offset": 3},
    "offset": {"is_causal": True, "causal_offset": -4},  # rows that see nothing
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, -math.inf], dtype=torch.float64)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 2**64 + 9},
    "bool mask": {"attn_mask": torch.ones(11, 14).tril(2) > 0, "window": (6, 2)},
    "float mask": {"attn_mask": torch.linspace(-1, 1, 14, dtype=torch.float64).expand(2, 1, 1, 14)},
}
OPTIONS["all"] = {name: x for one in OPTIONS.values() for name, x in one.items()} | {
    "is_causal": False
}
ALGORITHMS = {
    "flash2": FP64.with_(block_query=4, block_key=5),
    "flash1": FP64.with_(algorithm="flash1", block_query=4, block_key=5),
    "standard": FP64.with_(
        algorithm="standard",
        block_query=4,
        block_key=None,
        backward_weights="maximum",
        delta_from="probabilities",
    ),
}


def drawn() -> list[Tensor]:
    """Query, key, value with two query heads to a key head, and the gradient of out."""
    draw = torch.Generator().manual_seed(3)
    n, n_k = LENGTHS
    shapes = ((4, n, 6), (2, n_k, 6), (2, n_k, 5), (4, n, 5))
    return [torch.randn(2, *s, generator=draw, dtype=torch.float64) for s in shapes]


def by_definition(q: Tensor, k: Tensor, v: Tensor, options: dict) -> Tensor:
    """Whole matrices and autograd: the plain meaning of every option."""
    (n, n_k), given = LENGTHS, {"window": None, "causal_offset": 0, "softcap": 0.0} | options
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    s = q @ k.mT / math.sqrt(6)
    if given["softcap"]:
        s = given["softcap"] * torch.tanh(s / given["softcap"])
    mask = options.get("attn_mask")
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    away = torch.arange(n_k) - torch.arange(n)[:, None] - given["causal_offset"]
    left, right = given["window"] or (-1, -1)
    dark = (away > 0) & bool(options.get("is_causal"))
    dark |= ((away < -left) & (left >= 0)) | ((away > right) & (right >= 0))
    s = s.masked_fill(dark, -math.inf)
    sinks = options.get("sinks")
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*SHAPE, n, 1)], -1)
    top = s.amax(-1, keepdim=True).detach()
    weights = (s - torch.where(top == -math.inf, 0, top)).exp()
    total = weights.sum(-1, keepdim=True)
    p = (weights / torch.where(total == 0, 1, total))[..., :n_k]
    if "dropout_p" in options:
        rows = torch.arange(2 * 4 * n).view(*SHAPE, n)
        seed, dropped = options["dropout_seed"], options["dropout_p"]
        p = p * keep_mask(seed, dropped, rows, torch.arange(n_k)) / (1 - dropped)
    return p @ v


@pytest.mark.parametrize("name", OPTIONS)
def test_golden_and_every_algorithm_are_the_definition(name):
    *operands, do = drawn()
    learned = {
        key: x.clone().requires_grad_()
        for key, x in OPTIONS[name].items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    options = OPTIONS[name] | learned
    leaves = [x.requires_grad_() for x in operands]
    every = [*leaves, *learned.values()]
    exact = by_definition(*leaves, options)
    wanted = [exact, *torch.autograd.grad(exact, every, do)]
    asked = options | {"enable_gqa": True}

    def close(found: list[Tensor], who: str) -> None:
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=f"{who}, {name}")

    golden = halfulp.golden(*operands, do, **asked)
    names = {"sinks": "grad_sinks", "attn_mask": "grad_mask"}
    close(
        [golden.out, golden.grad_query, golden.grad_key, golden.grad_value]
        + [getattr(golden, names[key]) for key in learned],
        "golden",
    )
    for who, recipe in ALGORITHMS.items():
        out = halfulp.emulate(*leaves, recipe=recipe, **asked)
        close([out, *torch.autograd.grad(out, every, do)], who)
    out = halfulp.attention(*leaves, **asked)
    close([out, *torch.autograd.grad(out, every, do)], "attention")


@pytest.mark.parametrize("recipe", ["halfulp", "stock", "published", "exact_delta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_kernels_name_is_the_same_bits_in_emulate(recipe, dtype):
    q, k, v, do = (x.to(dtype) for x in drawn())
    options = {"softcap": 2.0, "window": (5, -1), "dropout_p": 0.3, "enable_gqa": True}
    results = []
    for function in (
        lambda *x: halfulp.attention(*x, backend="torch", recipe=recipe, **options),
        lambda *x: halfulp.emulate(*x, recipe=recipe, **options),
    ):
        torch.manual_seed(7)  # both draw the seed from torch's CPU generator
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, do)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_the_three_functions_take_the_same_options():
    functions = (halfulp.attention, halfulp.emulate, halfulp.golden)
    shared = {
        "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "window", "softcap",
        "sinks", "causal_offset", "dropout_seed",
    }  # fmt: skip
    for function, other in itertools.permutations(functions, 2):
        taken = inspect.signature(function).parameters
        assert shared <= set(taken), function
        for name in shared:
            assert taken[name].default == inspect.signature(other).parameters[name].default


def test_a_seed_is_any_integer_and_one_that_is_drawn_is_known():
    q = drawn()[0]

    def dropped(**more) -> Tensor:
        return halfulp.attention(q, q, q, dropout_p=0.5, **more)

    assert torch.equal(dropped(dropout_seed=5), dropped(dropout_seed=5 - 2**64))
    assert not torch.equal(dropped(dropout_seed=5), dropped(dropout_seed=6))
    torch.manual_seed(3)
    number = int(draw_seed())
    torch.manual_seed(3)
    assert torch.equal(dropped(), dropped(dropout_seed=number))
    with pytest.raises(ValueError, match=r"dropout_seed=1\.5: accepted is an integer"):
        dropped(dropout_seed=1.5)


def test_a_call_is_flat_and_back_by_its_fields():
    q = torch.randn(1, 2, 5, 4)
    call = check(
        q, q, q, q[0, 0] @ q[0, 0].mT, 0.5, window=(1, 2), softcap=3.0, sinks=torch.ones(2),
        causal_offset=4, dropout_seed=8,
    )  # fmt: skip
    assert call.options(seeded=True) == {
        "is_causal": False, "scale": 0.5, "attn_mask": call.sees.mask, "window": (1, 2),
        "softcap": 3.0, "sinks": call.sinks, "dropout_p": 0.5, "causal_offset": 4,
        "dropout_seed": 8,
    }  # fmt: skip
    again = Call.of_flat(call.flat())
    assert again.dropout == Dropout(0.5, 8)
    assert again.sees == Sees(False, (1, 2), 4, call.sees.mask)

    assert (again.scale, again.softcap, again.bounds) == (0.5, 3.0, (3, 5))
