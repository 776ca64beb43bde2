"""Claims A7, A8 and C1: the identities that lead from δ's error to the weights' gradient, and
FlashAttention-1.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfulp import emulate
from halfulp.formats import BF16, Format, custom
from halfulp.recipes import FP64, Recipe, uniform
from halfulp.testing import gaussian

DIM, WIDTH, LENGTH = 16, 24, 48
ALPHA = DIM**-0.5


def run(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
    """dQ and δ of one recipe."""
    delta: dict[str, Tensor] = {}
    q = q.clone().requires_grad_()
    out = emulate(
        q, k, v, recipe=recipe, observers=[lambda name, _, rounded: delta.update({name: rounded})]
    )
    out.backward(do)
    assert q.grad is not None
    return q.grad, delta["delta"]


@pytest.mark.parametrize("fmt", [BF16, custom(8, 2)], ids=str)
def test_a7_and_a8(fmt: Format) -> None:
    """dQ_hp − dQ_lp = α diag(δ_lp − δ_hp) (P K), and dW_Q likewise through X; only O differs
    between the two runs.
    """
    g = torch.Generator().manual_seed(0)
    x, w_q, w_k = (
        torch.randn(s, generator=g, dtype=torch.float64)
        for s in ((LENGTH, WIDTH), (DIM, WIDTH), (DIM, WIDTH))
    )
    v, do = (torch.randn(1, 1, LENGTH, DIM, generator=g, dtype=torch.float64) for _ in range(2))
    q, k = (x @ w_q.T)[None, None] / 3, (x @ w_k.T)[None, None] / 3
    dq_lp, delta_lp = run(FP64.with_(out=fmt), q, k, v, do)
    dq_hp, delta_hp = run(FP64, q, k, v, do)
    pk = torch.softmax(ALPHA * q @ k.mT, -1) @ k
    difference, predicted = dq_hp - dq_lp, ALPHA * (delta_lp - delta_hp) * pk
    assert difference.abs().max() > 1e-4  # there is something to explain
    assert (difference - predicted).abs().max() <= 1e-14 * dq_hp.abs().max()
    by_token = ALPHA * (delta_lp - delta_hp)[0, 0]
    weight_difference = (difference[0, 0]).T @ x
    rounding = 1e-15 * (dq_hp[0, 0].abs().T @ x.abs()).max()
    assert (weight_difference - (by_token * pk[0, 0]).T @ x).abs().max() <= rounding
    wrong = ALPHA * (delta_hp - delta_lp) * pk  # the sign is part of the claim
    assert (difference - wrong).abs().max() > difference.abs().max()


def test_c1_flash_attention_1_is_the_same_function_rounded_differently() -> None:
    """Equal in fp64; with Ō in bf16, renormalizing in every step costs accuracy that grows with the
    number of steps.
    """
    q, k, v, _ = gaussian(3, heads=4, length=256, dim=32, dtype=torch.float64)
    blocks = {"block_query": 64, "block_key": 16}
    exact = emulate(q, k, v, recipe=FP64.with_(algorithm="standard"))
    for algorithm in ("flash1", "flash2"):
        assert (
            emulate(q, k, v, recipe=FP64.with_(algorithm=algorithm, **blocks)) - exact
        ).abs().max() <= 1e-14
    error = {
        (algorithm, block): _relative(emulate(q, k, v, recipe=_coarse(algorithm, block)), exact)
        for algorithm in ("flash1", "flash2")
        for block in (16, 256)
    }
    assert error["flash1", 256] == pytest.approx(error["flash2", 256], rel=0.02)
    assert error["flash1", 16] > 1.1 * error["flash1", 256]
    assert error["flash1", 16] != error["flash2", 16]


def _coarse(algorithm: str, block_key: int) -> Recipe:
    return uniform(BF16, algorithm, block_query=64, block_key=block_key)  # type: ignore[arg-type]


def _relative(actual: Tensor, exact: Tensor) -> float:
    return ((actual - exact).norm() / exact.norm()).item()
