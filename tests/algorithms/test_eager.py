"""BF16_AUTHORS and BF16_STANDARD bit by bit against what eager PyTorch does with bf16 tensors and
under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfulp.formats import BF16, FP32, custom
from halfulp.recipes import (
    BF16_AUTHORS,
    BF16_AUTHORS_STABILIZED,
    BF16_STANDARD,
    BF16_STANDARD_CPU,
    BF16_STANDARD_FP32,
    Recipe,
    uniform,
)
from halfulp.testing import Inputs, attend, gaussian

Product = Callable[[Tensor, Tensor], Tensor]
SHAPES = [(300, 64), (256, 32), (200, 48), (129, 16)]


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """bf16 operands, an fp32 sum, one rounding."""
    return (a.float() @ b.float()).bfloat16()


def torch_product(a: Tensor, b: Tensor) -> Tensor:
    """The library's own bf16 gemm, whose order of summation is its own business."""
    return a @ b


class AuthorsInEagerBf16:
    """The recipe of Qiu & Yao's official code, said again with bf16 tensors: no step, no fp32,
    nothing skipped.

    Hidden scores are the lowest bf16 number in the forward pass and −inf in the backward pass;
    every tile is visited.
    """

    LOWEST = torch.finfo(torch.bfloat16).min

    def __init__(
        self, inputs: Inputs, causal: bool, product: Product, factor: float | None, block: int = 128
    ) -> None:
        self.q, self.k, self.v, self.do = (x.bfloat16() for x in inputs)
        self.causal, self.product, self.factor, self.block = causal, product, factor, block
        self.alpha = self.q.shape[-1] ** -0.5

    def scores(self, i: slice, j: slice, hidden: float) -> Tensor:
        s = self.product(self.q[:, :, i], self.k[:, :, j].mT) * self.alpha
        if self.causal:
            n = self.q.shape[2]
            above = torch.ones(n, n, dtype=torch.bool).triu(1)[i, j]
            s = s.masked_fill(above, hidden)
        return s

    def tiles(self) -> list[slice]:
        n = self.q.shape[2]
        return [slice(a, min(a + self.block, n)) for a in range(0, n, self.block)]

    def maximum(self, s: Tensor) -> Tensor:
        top = s.amax(-1, keepdim=True)
        if self.factor is None:
            return top
        repeated = (s >= top - 1e-3).sum(-1, keepdim=True) > 1
        top = torch.where(repeated & (top > 0), self.factor * top, top)
        return torch.where(repeated & (top < 0), torch.zeros_like(top), top)

    def forward(self) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for i in self.tiles():
            rows = self.q[:, :, i, :1]
            m, l = torch.full_like(rows, self.LOWEST), torch.zeros_like(rows)
            o = torch.zeros_like(self.do[:, :, i])
            for j in self.tiles():
                s = self.scores(i, j, self.LOWEST)
                m_new = torch.maximum(m, self.maximum(s))
                p = torch.exp(s - m_new)
                decay = torch.exp(m - m_new)
                l = decay * l + p.sum(-1, keepdim=True).clamp(min=1e-10)
                o = o * decay + self.product(p, self.v[:, :, j])
                m = m_new
            outs.append(o / l)
            lses.append(torch.log(l) + m)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(x) for x in (self.q, self.k, self.v))
        delta = (self.do * out).sum(-1, keepdim=True)
        for i in self.tiles():
            for j in self.tiles():
                p = torch.exp(self.scores(i, j, -math.inf) - lse[:, :, i])
                dv[:, :, j] += self.product(p.mT, self.do[:, :, i])
                ds = (
                    p
                    * self.alpha
                    * (self.product(self.do[:, :, i], self.v[:, :, j].mT) - delta[:, :, i])
                )
                dq[:, :, i] += self.product(ds, self.k[:, :, j])
                dk[:, :, j] += self.product(ds.mT, self.q[:, :, i])
        return dq, dk, dv

    def all(self) -> dict[str, Tensor]:
        out, lse = self.forward()
        names = ("out", "lse", "grad_query", "grad_key", "grad_value")
        return dict(zip(names, (out, lse.squeeze(-1), *self.backward(out, lse)), strict=True))


def identical(
    recipe: Recipe, inputs: Inputs, expected: dict[str, Tensor], causal: bool
) -> dict[str, float]:
    """The fraction of bit-identical elements of every tensor."""
    emulated = vars(attend(recipe, inputs, is_causal=causal))
    return {
        name: (emulated[name] == e.float()).double().mean().item() for name, e in expected.items()
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "dim"), SHAPES)
def test_authors_bit_by_bit(length: int, dim: int, causal: bool) -> None:
    inputs = gaussian(length, length=length, dim=dim)
    expected = AuthorsInEagerBf16(inputs, causal, fp32_product, None).all()
    assert set(identical(BF16_AUTHORS, inputs, expected, causal).values()) == {1.0}
    with_library = AuthorsInEagerBf16(inputs, causal, torch_product, None).all()
    for name, share in identical(BF16_AUTHORS, inputs, with_library, causal).items():
        # Where the library's bf16 gemm sums in another order, a rare sum rounds the other way; O,
        # lse and dV follow.
        assert share == 1.0 if torch.equal(with_library[name], expected[name]) else share > 0.999, (
            name
        )


@pytest.mark.parametrize(("length", "dim"), SHAPES)
def test_authors_stabilized_bit_by_bit(length: int, dim: int) -> None:
    inputs = gaussian(length, length=length, dim=dim)
    expected = AuthorsInEagerBf16(inputs, False, fp32_product, 2.0).all()
    assert set(identical(BF16_AUTHORS_STABILIZED, inputs, expected, False).values()) == {1.0}
    # the factor 2 is seen in the bits
    assert identical(BF16_AUTHORS, inputs, expected, False)["out"] < 0.999


@pytest.mark.parametrize(
    "step",
    [
        "shifted_scores",
        "max_change",
        "rescale",
        "rescaled",
        "accumulator",
        "log_row_sum",
        "delta_products",
        "grad_block",
    ],
)
def test_one_rounding_left_out_is_seen(step: str) -> None:
    """A planted fault per rounding that is easy to forget."""
    inputs = gaussian(1, length=300, dim=32)
    # Maxima that start near 0, in a fine binade, and grow from tile to tile.
    inputs.query.mul_(0.125)[..., 0] = 5.65625
    inputs.key[..., 0] = torch.arange(300) // 32 * 0.5 - 0.5
    expected = AuthorsInEagerBf16(inputs, False, fp32_product, None, block=32).all()
    right = BF16_AUTHORS.with_(block_query=32, block_key=32)
    assert min(identical(right, inputs, expected, False).values()) == 1.0
    wrong = right.with_(**{step: FP32})
    assert min(identical(wrong, inputs, expected, False).values()) < 1.0


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_1_bit_by_bit(causal: bool) -> None:
    """Every tensor bf16, every step one rounded operation: Dao et al. 2022, Algorithm 1, lines 10
    to 13.
    """
    inputs, block = gaussian(1, length=200, dim=32), 48
    q, k, v, _ = (x.bfloat16() for x in inputs)
    m, l = torch.full_like(q[..., :1], -math.inf), torch.zeros_like(q[..., :1])
    o = torch.zeros_like(q)
    above = (
        torch.ones(200, 200, dtype=torch.bool).triu(1)
        if causal
        else torch.zeros(200, 200, dtype=torch.bool)
    )
    for j in range(0, 200, block):
        s = (fp32_product(q, k[:, :, j : j + block].mT) * 32**-0.5).masked_fill(
            above[:, j : j + block], -math.inf
        )
        m_tile = s.amax(-1, keepdim=True)
        seen = m_tile > -math.inf
        p = torch.where(seen, torch.exp(s - m_tile), 0.0)
        m_new = torch.maximum(m, m_tile)
        old, new = torch.exp(m - m_new), torch.exp(m_tile - m_new)
        l_old = l * old
        l_new = l_old + p.sum(-1, keepdim=True) * new
        o_new = (l_old * o + new * fp32_product(p, v[:, :, j : j + block])) / l_new
        m, l, o = (torch.where(seen, a, b) for a, b in ((m_new, m), (l_new, l), (o_new, o)))
    recipe = uniform(BF16, "flash1", block_query=64, block_key=block)
    assert torch.equal(attend(recipe, inputs, is_causal=causal).out, o.float())


def test_p_of_the_backward_pass_is_p_of_the_forward_pass() -> None:
    """Where P is recomputed from m and l, its weights are rounded as the forward pass rounded
    them.
    """
    recipe = uniform(BF16, "standard", block_query=None, block_key=None, weights=custom(8, 2))
    exact: dict[str, Tensor] = {}
    attend(
        recipe,
        gaussian(1, length=40, dim=16),
        observers=[lambda name, x, _: exact.update({name: x})],
    )
    assert torch.equal(exact["probabilities"], exact["weights_operand"])


def autocast_standard(recipe: Recipe, inputs: Inputs, causal: bool) -> dict[str, Tensor]:
    """`softmax(q @ k.mT * scale) @ v` under CPU autocast, or as autocast on a GPU has it, with the
    softmax in fp32; or with scores in fp32 as well.
    """
    softmax_dtype = None if recipe is BF16_STANDARD_CPU else torch.float32
    q, k, v = (x.bfloat16().requires_grad_() for x in inputs.operands)
    wide = torch.float32 if recipe is BF16_STANDARD_FP32 else torch.bfloat16
    scores = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf
        )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.softmax(scores, -1, dtype=softmax_dtype) @ v
    out.backward(inputs.grad_out.bfloat16())
    grads = {"grad_query": q.grad, "grad_key": k.grad, "grad_value": v.grad}
    return {"out": out.detach()} | {name: g for name, g in grads.items() if g is not None}


@pytest.mark.parametrize(
    "recipe", [BF16_STANDARD, BF16_STANDARD_CPU, BF16_STANDARD_FP32], ids=lambda r: r.name
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "dim"), SHAPES)
def test_standard_is_what_autocast_does(
    recipe: Recipe, length: int, dim: int, causal: bool
) -> None:
    """All but a few elements: the library's bf16 gemm and its softmax sum in another order than
    fp32 gemm and sum.
    """
    inputs = gaussian(length, length=length, dim=dim)
    share = identical(recipe, inputs, autocast_standard(recipe, inputs, causal), causal)
    print(recipe.name, length, dim, causal, {name: f"{100 * s:.3f} %" for name, s in share.items()})
    assert min(share.values()) > 0.995


@pytest.mark.parametrize(
    "step", ["product", "scores", "grad_probabilities", "scaled_grad_scores", "weights_operand"]
)
def test_another_standard_recipe_has_other_bits(step: str) -> None:
    inputs = gaussian(1, length=200, dim=48)  # 48: multiplying by 1/√d rounds
    expected = autocast_standard(BF16_STANDARD, inputs, False)
    wrong = BF16_STANDARD.with_(**{step: FP32})
    assert min(identical(wrong, inputs, expected, False).values()) < 0.95
