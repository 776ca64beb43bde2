"""The public door: arguments as in PyTorch, gradients through both results, errors in one line, use
in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfulp import emulate, golden
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, FP32, FP64, RECIPES, Recipe
from halfulp.testing import (
    assert_within_budget,
    attend,
    budget,
    errors,
    from_scores,
    gaussian,
)

DOUBLE = {"dtype": torch.float64}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_arguments_mean_what_they_mean_in_pytorch(causal: bool, scale: float | None) -> None:
    q, k, v, _ = gaussian(
        1, heads=4, key_heads=2, length=33, key_length=45, dim=16, value_dim=8, **DOUBLE
    )
    options = {"is_causal": causal, "scale": scale, "enable_gqa": True}
    expected = functional.scaled_dot_product_attention(q, k, v, **options)
    assert (emulate(q, k, v, recipe=FP64, **options) - expected).abs().max() <= 1e-14
    assert (golden(q, k, v, **options).out - expected).abs().max() <= 1e-14


@pytest.mark.parametrize(
    "shape", [(33, 45), (1, 45), (33, 1), (4, 33, 45), (1, 1, 1, 45), (2, 4, 33, 45), (2, 1, 33, 1)]
)
def test_masks_broadcast_as_in_pytorch(shape: tuple[int, ...]) -> None:
    q, k, v, _ = gaussian(1, batch=2, heads=4, length=33, key_length=45, dim=16, **DOUBLE)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for mask in (numbers, numbers > -0.7):
        if mask.dtype == torch.bool:
            mask[..., 0] = True  # no row fully masked: PyTorch has its own answer there
        expected = functional.scaled_dot_product_attention(q, k, v, mask)
        assert (emulate(q, k, v, mask, recipe=FP64) - expected).abs().max() <= 1e-14
        assert (golden(q, k, v, attn_mask=mask).out - expected).abs().max() <= 1e-14


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_leading_dimensions_may_be_left_out(leading: tuple[int, ...]) -> None:
    q, k, v, _ = gaussian(2, batch=2, heads=3, length=9, dim=8)
    index = (0,) * (2 - len(leading))
    out, lse = emulate(q, k, v, recipe="FP32", return_lse=True)
    few = [x[index] for x in (q, k, v)]
    out_few, lse_few = emulate(*few, recipe="FP32", return_lse=True)
    assert out_few.shape == (*leading, 9, 8)
    assert torch.equal(out_few, out[index])
    assert torch.equal(lse_few, lse[index])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_near_the_truth(name: str) -> None:
    """Forward and backward of every built-in recipe, odd lengths, causal: as wrong as its formats
    are coarse.
    """
    inputs = gaussian(3, length=75, dim=32)
    allowed = 0.1 if "FP8" in name else 3e-2 if "AUTHORS" in name or "PAPER" in name else 1e-2
    if name.startswith("FP"):
        allowed = {"FP64": 1e-7, "FP32": 1e-6}.get(name, allowed)
    for tensor, error in budget(inputs, RECIPES[name], is_causal=True).items():
        assert error < allowed, tensor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_go_in_and_come_out(dtype: torch.dtype) -> None:
    result = attend(BF16_HALFULP, gaussian(4, length=20, dim=8, dtype=dtype))
    assert result.lse is not None
    assert result.lse.dtype == torch.float32
    assert {
        x.dtype
        for x in (result.out, result.grad_query, result.grad_key, result.grad_value)
        if x is not None
    } == {dtype}
    wide = attend(BF16_HALFULP, gaussian(4, length=20, dim=8))
    if dtype != torch.float16:  # fp16 lacks the range of small bf16 gradients
        assert all(
            torch.equal(a.double(), b.double())
            for a, b in zip(result.given().values(), wide.given().values(), strict=True)
        )


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    "recipe", [FP64, FP64.with_(algorithm="flash1"), FP64.with_(algorithm="standard", base="2")]
)
@pytest.mark.parametrize("kind", ["causal", "bool", "additive"])
def test_gradcheck_of_out_and_lse(recipe: Recipe, kind: str) -> None:
    q, k, v, _ = gaussian(
        5, heads=4, key_heads=2, length=5, key_length=6, dim=3, value_dim=2, **DOUBLE
    )
    mask = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    attn_mask = {"causal": None, "bool": mask > -1, "additive": mask}[kind]

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        tiled = recipe.with_(block_query=2, block_key=4)
        options: dict[str, Any] = {
            "is_causal": kind == "causal",
            "enable_gqa": True,
            "recipe": tiled,
        }
        return emulate(q, k, v, attn_mask, return_lse=True, **options)

    assert torch.autograd.gradcheck(function, tuple(x.clone().requires_grad_() for x in (q, k, v)))


@pytest.mark.parametrize(
    "name", ["FP32", "BF16_FLASH2", "BF16_HALFULP", "BF16_STANDARD", "BF16_FLASH1"]
)
def test_a_loss_on_lse_alone(name: str) -> None:
    """The z-loss of language models: Σ lse², no gradient of out at all."""
    q, k, v, _ = gaussian(6, length=40, dim=16)
    results = []
    for recipe in (FP64, RECIPES[name]):
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        emulate(*leaves, is_causal=True, recipe=recipe, return_lse=True)[
            1
        ].double().square().sum().backward()
        results.append([x.grad for x in leaves])
    for exact, rounded in zip(*results, strict=True):
        assert exact is not None
        assert rounded is not None
        assert (rounded - exact).norm() <= 1e-2 * exact.norm()
    assert results[1][2] is None or not results[1][2].any()  # V has no part in lse


def test_a_gradient_of_lse_that_is_infinite_on_masked_rows_does_no_harm() -> None:
    q, k, v, _ = gaussian(6, length=4, dim=4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    leaves = [x.requires_grad_() for x in (q, k, v)]
    emulate(*leaves, mask, recipe=BF16_FLASH2, return_lse=True)[1].square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)
    assert not q.grad[:, :, 2].any()  # type: ignore[index]


def test_gradients_are_computed_once_only() -> None:
    q, k, v, _ = gaussian(6, length=4, dim=4)
    (grad,) = torch.autograd.grad(
        emulate(q.requires_grad_(), k, v).square().sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        grad.sum().backward()


class Attention(nn.Module):
    """A causal self-attention layer on top of any attention function."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.Parameter(
            torch.randn(4, 16, 16, generator=generator, dtype=torch.float64) / 4
        )
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ w.T).unflatten(-1, (2, 8)).transpose(1, 2) for w in self.weights[:3])
        return self.attention(q, k, v).transpose(1, 2).flatten(-2) @ self.weights[3].T


def train(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], *, autocast: bool = False
) -> list[float]:
    """The losses of 12 steps of Adam."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(3, 12, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    model = Attention(attention)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_follows_the_definition() -> None:
    sdpa = train(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    mine = train(
        lambda q, k, v: emulate(
            q, k, v, is_causal=True, recipe=FP64.with_(block_query=5, block_key=4)
        )
    )
    assert mine == pytest.approx(sdpa, abs=1e-10)
    assert mine[-1] < 0.9 * mine[0]
    bf16 = train(lambda q, k, v: emulate(q, k, v, is_causal=True, recipe=BF16_HALFULP))
    assert bf16 != mine
    assert bf16 == pytest.approx(mine, rel=2e-2)


@pytest.mark.parametrize("name", RECIPES)
def test_autocast_changes_nothing(name: str) -> None:
    """A recipe is a statement about arithmetic; somebody's autocast must not add to it, forward or
    backward.
    """
    inputs = gaussian(7, length=40, dim=16)
    expected = attend(RECIPES[name], inputs, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = attend(RECIPES[name], inputs, is_causal=True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(actual.given().values(), expected.given().values(), strict=True)
    )


def test_a_model_trains_the_same_under_autocast_where_everything_else_is_out_of_its_reach() -> None:
    """float64 is not autocast, so only the emulated attention could differ."""
    attention = lambda q, k, v: emulate(q, k, v, is_causal=True, recipe=BF16_FLASH2)  # noqa: E731
    assert train(attention, autocast=True) == train(attention)


def test_inputs_are_left_as_they_were() -> None:
    inputs = gaussian(8, length=40, dim=16)
    copies = inputs.map(Tensor.clone)
    mask = torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) > 0.3
    kept = mask.clone()
    for recipe in RECIPES.values():
        q, k, v = (x.detach().requires_grad_() for x in inputs.operands)
        emulate(q, k, v, mask, recipe=recipe).backward(inputs.grad_out)
        golden(*inputs, mask)
        assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))
        assert torch.equal(mask, kept)


def test_a_nan_stays_in_its_row_and_infinite_scores_are_not_numbers() -> None:
    q, k, v, _ = gaussian(9, heads=1, length=20, dim=8)
    q[0, 0, 7, 3] = math.nan
    for name in ("BF16_STANDARD", "BF16_FLASH1", "BF16_FLASH2", "BF16_HALFULP"):
        out = emulate(q, k, v, recipe=RECIPES[name].with_(block_query=8, block_key=8))
        assert out.isnan().all(-1)[0, 0].nonzero().flatten().tolist() == [7]


def test_sixteen_bit_inputs_beyond_their_format() -> None:
    """1e5 is infinity in fp16: the recipe rounds what it reads, and the row says so."""
    inputs = from_scores(torch.tensor([[1e5, 0.0], [1.0, 2.0]]), torch.ones(2, 2))
    out = emulate(*inputs.operands, scale=1.0, recipe="FP16_FLASH2")[0, 0]
    assert out.isnan().all(-1).tolist() == [True, False]


Q = torch.zeros(2, 4, 5, 8)
BAD: list[tuple[str, dict[str, Any]]] = [
    (r"query of dtype torch\.int64: accepted are float64", {"query": Q.long()}),
    (r"key of dtype torch\.complex64: accepted are float64", {"key": Q.to(torch.complex64)}),
    (r"query of shape \(8,\): accepted are 2 dimensions or more", {"query": Q[0, 0, 0]}),
    (r"key of shape \(8,\): accepted are 2 dimensions or more", {"key": Q[0, 0, 0]}),
    (
        r"value of shape \(2, 4, 5, 0\): accepted are dimensions of at least 1",
        {"value": Q[..., :0]},
    ),
    (r"key of head dimension 7: accepted is query's, 8", {"key": Q[..., :7]}),
    (r"value of length 4: accepted is key's, 5", {"value": Q[:, :, :4]}),
    (
        r"key of 2 heads: accepted are query's 4, 1, or a divisor of it with enable_gqa",
        {"key": Q[:, :2], "value": Q[:, :2]},
    ),
    (
        r"key of 3 heads: accepted are query's 4",
        {"key": Q[:, :3], "value": Q[:, :3], "enable_gqa": True},
    ),
    (r"scale=inf: accepted is a finite number, or None", {"scale": math.inf}),
    (
        r"attn_mask of shape \(5, 6\): accepted is what broadcasts to \(2, 4, 5, 5\)",
        {"attn_mask": torch.zeros(5, 6)},
    ),
    (r"attn_mask of shape \(1, 1, 1, 1, 1\): accepted", {"attn_mask": torch.zeros(1, 1, 1, 1, 1)}),
    (
        r"attn_mask of dtype torch\.int64: accepted are bool and floating point",
        {"attn_mask": torch.zeros(5, 5).long()},
    ),
    (
        r"is_causal=True: accepted is False where attn_mask is given",
        {"is_causal": True, "attn_mask": torch.zeros(5, 5)},
    ),
    (r"key on meta: accepted is query's device, cpu", {"key": Q.to("meta")}),
]


@pytest.mark.parametrize("function", [emulate, golden], ids=["emulate", "golden"])
@pytest.mark.parametrize(("message", "arguments"), BAD)
def test_errors_name_argument_value_and_what_is_accepted(
    message: str, arguments: dict[str, Any], function: Callable[..., Any]
) -> None:
    if function is golden and "query of shape (8,)" in message.replace("\\", ""):
        message = r"query of shape \(8,\): accepted are 4 dimensions"
    with pytest.raises(ValueError, match=message) as caught:
        function(**{"query": Q, "key": Q, "value": Q} | arguments)
    assert "\n" not in str(caught.value)


def test_errors_of_one_door_alone() -> None:
    with pytest.raises(ValueError, match=r"recipe='BF61': accepted are halfulp, .*FP64"):
        emulate(Q, Q, Q, recipe="BF61")
    with pytest.raises(ValueError, match=r"query of shape \(4, 5, 8\): accepted are 4 dimensions"):
        golden(Q[0], Q[0], Q[0])
    with pytest.raises(ValueError, match=r"key of shape \(1, 4, 5, 8\): accepted is \(2,"):
        golden(Q, Q[:1], Q)
    with pytest.raises(
        ValueError, match=r"grad_out of shape \(2, 4, 5\): accepted is out's shape \(2, 4, 5, 8\)"
    ):
        golden(Q, Q, Q, Q[..., 0])


def test_the_error_budget_lets_equals_pass_and_worse_fail() -> None:
    """The helper that other kernels are judged with: planted faults of 1e-2 that `allclose` would
    let through.
    """
    inputs = gaussian(10, length=96, dim=32, is_causal=True)
    other_blocks = attend(BF16_FLASH2.with_(block_query=16, block_key=32), inputs)
    assert_within_budget(other_blocks, inputs, BF16_FLASH2)
    exact = golden(*inputs, **inputs.options())
    assert max(errors(exact, exact).values()) == 0
    assert_within_budget(exact, inputs, BF16_FLASH2)
    for name in exact.given():
        faulty = type(exact)(**vars(exact) | {name: getattr(exact, name) * 1.004})
        with pytest.raises(AssertionError, match=f"{name}: relative error"):
            assert_within_budget(faulty, inputs, BF16_FLASH2)
    with pytest.raises(AssertionError, match="grad_key"):
        assert_within_budget(
            type(exact)(exact.out, grad_key=exact.grad_key * math.nan),  # type: ignore[operator]
            inputs,
            FP32,
        )


def test_kernels_without_gradient_or_lse_are_attended_too() -> None:
    inputs = gaussian(11, length=16, dim=8)
    with torch.no_grad():
        result = attend(functional.scaled_dot_product_attention, inputs, is_causal=True)
    assert (result.lse, result.grad_query) == (None, None)
    full = attend(functional.scaled_dot_product_attention, inputs, is_causal=True)
    assert set(errors(full, golden(*inputs, is_causal=True))) == {
        "out",
        "grad_query",
        "grad_key",
        "grad_value",
    }
    assert_within_budget(full, inputs, FP32, is_causal=True)
