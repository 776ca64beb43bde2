"""The golden value against 60-digit arithmetic, and that nothing around it changes it."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfulp import emulate, golden
from halfulp.algorithms import golden as compute
from halfulp.calls import Result
from halfulp.recipes import FP64
from halfulp.testing import Inputs, common_key, gaussian

N, D = 4, 2
# what is added to or multiplied into the scores, by way of query and key; all exact in fp64
EXTREMES = {
    "plain": (1.0, 0.0),
    "scores near 3000": (1.0, 3000.0),
    "scores near -2500": (1.0, -2500.0),
    "lse below -88": (1.0, -95.0),
    "scores from -700 to 700": (256.0, 0.0),
    "tiny": (2.0**-40, 0.0),
}


def problem(scale: float, offset: float) -> Inputs:
    """Few-bit numbers, so that scores are exact in fp64; the third coordinate carries the
    offset.
    """
    generator = torch.Generator().manual_seed(7)
    q, k, v, do = (
        torch.randint(-12, 13, (1, 1, N, D), generator=generator).double() / 8 for _ in range(4)
    )
    one = torch.ones(1, 1, N, 1, dtype=torch.float64)
    query, key = torch.cat([q * scale, one * offset], -1), torch.cat([k, one], -1)
    return Inputs(query, key, v, grad_out=do)


def loss_by_mpmath(
    q: mpmath.matrix, k: mpmath.matrix, inputs: Inputs, v: mpmath.matrix, causal: bool
) -> mpmath.mpf:
    """Σ dO ∘ O by the definition."""
    total, do = mpmath.mpf(0), inputs.grad_out[0, 0]
    for i in range(N):
        keys = range(i + 1 if causal else N)
        scores = [mpmath.fsum(q[i, c] * k[j, c] for c in range(D + 1)) for j in keys]
        weights = [mpmath.exp(s) for s in scores]
        for c in range(D):
            o = mpmath.fsum(w * v[j, c] for w, j in zip(weights, keys, strict=True)) / mpmath.fsum(
                weights
            )
            total += o * mpmath.mpf(do[i, c].item())
    return total


def gradient_by_mpmath(inputs: Inputs, which: int, causal: bool) -> Tensor:
    """A central difference with a step of 1e-30 in 100 digits: independent of every formula for the
    gradient.
    """
    step = mpmath.mpf(10) ** -30
    operands = [mpmath.matrix(x[0, 0].tolist()) for x in inputs.operands]
    gradient = torch.zeros(list(inputs)[which].shape[-2:], dtype=torch.float64)
    for i in range(gradient.shape[0]):
        for c in range(gradient.shape[1]):
            sides = []
            for sign in (1, -1):
                moved = [m.copy() for m in operands]
                moved[which][i, c] += sign * step
                sides.append(loss_by_mpmath(moved[0], moved[1], inputs, moved[2], causal))
            gradient[i, c] = float((sides[0] - sides[1]) / (2 * step))
    return gradient


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("extreme", sorted(EXTREMES))
def test_gradients_and_values_against_mpmath(extreme: str, causal: bool) -> None:
    inputs = problem(*EXTREMES[extreme])
    g = golden(*inputs, is_causal=causal, scale=1.0)
    with mpmath.workdps(100):
        q, k, v = (mpmath.matrix(x[0, 0].tolist()) for x in inputs.operands)
        for i in range(N):
            keys = range(i + 1 if causal else N)
            weights = [
                mpmath.exp(mpmath.fsum(q[i, c] * k[j, c] for c in range(D + 1))) for j in keys
            ]
            total = mpmath.fsum(weights)
            assert g.lse is not None
            assert abs(g.lse[0, 0, i].item() - mpmath.log(total)) <= 4e-16 * max(
                1, abs(mpmath.log(total))
            )
            for c in range(D):
                exact = mpmath.fsum(w * v[j, c] for w, j in zip(weights, keys, strict=True)) / total
                assert abs(g.out[0, 0, i, c].item() - exact) <= 1e-15
        for which, computed in enumerate((g.grad_query, g.grad_key, g.grad_value)):
            expected = gradient_by_mpmath(inputs, which, causal)
            assert computed is not None
            error = (computed[0, 0] - expected).abs().max().item()
            assert error <= 2e-15 * max(
                1.0, inputs.query.abs().max().item(), expected.abs().max().item()
            )


def _same(a: Result, b: Result) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.given().values(), b.given().values(), strict=True)
    )


def test_nobodys_autocast_nor_grad_mode_reaches_it() -> None:
    inputs = gaussian(1, length=40, dim=16)
    expected = golden(*inputs, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _same(golden(*inputs, is_causal=True), expected)
    q, k, v = (x.clone().requires_grad_() for x in inputs.operands)
    recorded = golden(q, k, v, inputs.grad_out, is_causal=True)
    assert _same(recorded, expected)
    assert not recorded.out.requires_grad


def test_inputs_are_taken_as_they_are_in_any_dtype() -> None:
    inputs = gaussian(1, length=20, dim=16)
    expected = golden(*inputs)
    assert expected.out.dtype == torch.float64
    for dtype in (torch.bfloat16, torch.float64):
        assert _same(golden(*(x.to(dtype) for x in inputs)), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_of_rows_are_one_problem(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = gaussian(1, batch=2, heads=4, key_heads=2, length=50, key_length=37, dim=8)
    mask = (
        None
        if causal
        else torch.rand(2, 1, 50, 37, generator=torch.Generator().manual_seed(0)) > 0.4
    )
    whole = golden(*inputs, mask, is_causal=causal, enable_gqa=True)
    monkeypatch.setitem(compute.__globals__, "CHUNK_ELEMENTS", 37 * 3)
    for a, b in zip(
        golden(*inputs, mask, is_causal=causal, enable_gqa=True).given().values(),
        whole.given().values(),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-13)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation gave."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_n_alone(causal: bool) -> None:
    inputs = gaussian(1, heads=4, key_heads=2, length=2048, dim=8)
    with LargestTensor() as largest:
        golden(*inputs, is_causal=causal, enable_gqa=True)
    assert largest.elements <= 2**19
    with LargestTensor() as whole:
        emulate(
            *inputs.operands,
            is_causal=causal,
            enable_gqa=True,
            recipe=FP64.with_(algorithm="standard", block_query=None),
        )
    # what the measurement says of an implementation that holds all scores
    assert whole.elements == 4 * 2048**2


def test_without_grad_out_there_are_no_gradients() -> None:
    q, k, v, _ = gaussian(1, length=5, dim=4)
    g = golden(q, k, v)
    assert (g.grad_query, g.grad_key, g.grad_value) == (None, None, None)
    assert g.lse is not None


def test_rows_of_ds_sum_to_zero_under_cancellation() -> None:
    """Σ_j dK_j = α Σ_i (Σ_j dS_ij) q_i = 0, also where keys share a large component: δ is not read
    off a rounded O.
    """
    inputs = common_key(gaussian(4, length=64, dim=16), 64.0)
    g = golden(*inputs)
    assert g.grad_key is not None
    assert g.grad_key.sum(
        2
    ).abs().max().item() <= 1e-13 * g.grad_key.abs().sum().item() / math.sqrt(16)
