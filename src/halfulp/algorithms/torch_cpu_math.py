"""The elementary operations of torch's AVX-512 CPU kernels: exponentials, logarithm, sums and fused
multiply-add.

Two of the four functions exist in torch's Python interface only inside other operations; those are
called, so that the very machine code of the kernels runs. The other two are rebuilt from exactly
rounded operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.algorithms.arithmetic import sum_to_odd

LANES = 16  # fp32 numbers in a vector register

# Cubic of the fast exponential, from ATen/cpu/vec/vec512/vec512_float.h, as float32 numbers.
_C0, _C1, _C2, _C3 = torch.tensor(
    [0.00010703434948458272, 0.30354260500649682, -0.22433836478672356, -0.079204240219773236]
).tolist()
_LOG2_E, _LN_MIN = (
    torch.tensor([0x3FB8AA3B, 0xC2AEAC50 - 2**32], dtype=torch.int32).view(torch.float32).tolist()
)


def fast_exp(x: Tensor) -> Tensor:
    """exp of float32 numbers ≤ 0 with a relative error of 1e-4: `fexp_u20`, the exponential of the
    weights.

    The bits of 2^s are put together as an integer, 2²³ (s − r(f) + 127), with r a cubic of the
    fraction f. Its fused multiply-adds are done in float64: exact for the product, and no fraction
    meets double rounding in the sum. Source: Malossi et al., "Fast Exponential Computation on SIMD
    Architectures" (2015).
    """
    s = x * _LOG2_E
    f = s.sub(s.floor()).double()
    wide = f.mul(_C3).add_(_C2)
    r = wide.float()
    for coefficient in (_C1, _C0):
        r.copy_(wide.copy_(r).mul_(f).add_(coefficient))
    bits = wide.copy_(s.sub_(r)).mul_(2.0**23).add_(127 * 2.0**23).float().to(torch.int32)
    weights: Tensor = bits.masked_fill_(x < _LN_MIN, 0).view(torch.float32)
    return weights


def weights_exp(x: Tensor) -> Tensor:
    """The exponential of the forward pass's weights: `fast_exp` on whole vectors of the last
    dimension.

    The columns that are left go one by one through the C library's exp of float64 numbers.
    """
    whole = x.shape[-1] // LANES * LANES
    if whole == x.shape[-1]:
        return fast_exp(x)
    return torch.cat([fast_exp(x[..., :whole]), x[..., whole:].double().exp().float()], dim=-1)


def scalar_exp(x: Tensor) -> Tensor:
    """The C library's expf, of float32 numbers ≤ 0.

    The derivative of ELU is exp below 0, and over memory with gaps torch computes it number by
    number.
    """
    spaced = x.new_empty(*x.shape, 2)[..., 0]
    spaced.copy_(x)
    return _elu_derivative(spaced)


def vector_exp(x: Tensor) -> Tensor:
    """Sleef's expf16_u10, the exponential of torch's vectorized loops, of float32 numbers.

    The derivative of ELU is exp below 0, and over whole vectors torch computes it with this
    function. Call it with one torch thread: where the work is cut, the ends are not whole vectors.
    """
    padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % (2 * LANES)))
    result = _elu_derivative(padded)
    if bool((padded > 0).any()):
        # above 0 ELU's derivative is 1: −x with an input scale of −1 is exp(x) in the branch below
        # 0, and the two minus signs in front of it cancel
        mirrored = torch.ops.aten.elu_backward(
            padded.new_tensor(-1.0), 1.0, 1.0, -1.0, False, -padded
        )
        result = torch.where(padded > 0, mirrored, result)
    return result[: x.numel()].view(x.shape)


def _elu_derivative(x: Tensor) -> Tensor:
    derivative: Tensor = torch.ops.aten.elu_backward(x.new_ones(()), 1.0, 1.0, 1.0, False, x)
    return derivative


def scalar_log(x: Tensor) -> Tensor:
    """The C library's logf: torch computes x log y number by number."""
    return torch.xlogy(x.new_ones(()), x)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c of float32 tensors with a single rounding."""
    # the product of two fp32 numbers has no error in fp64, and a sum rounded to odd may be rounded
    # once more (Boldo & Melquiond 2008)
    return sum_to_odd(a.double() * b.double(), c.double()).float()


def lane_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept, in the order of the forward pass's row sum.

    Vectors of sixteen columns go to two vectors of running sums by turns; these are added, then
    halved until one number is left; the columns beyond the last vector follow one by one.
    """
    whole = x.shape[-1] // LANES * LANES
    total = _halved(_two_running_sums(x[..., :whole])) if whole else x.new_zeros(*x.shape[:-1], 1)
    for j in range(whole, x.shape[-1]):
        total = total + x[..., j : j + 1]
    return total


def reduced_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept, in the order of `vec::map2_reduce_all` on bf16 operands:
    that of δ.
    """
    if x.shape[-1] <= LANES:
        return _one_by_one(x)
    lanes = _two_running_sums(torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES)))
    return _halved(lanes) if x.shape[-1] >= 2 * LANES else _one_by_one(lanes)


def vector_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of fp32 tensors holding bf16 values, where one of them is a vector: four
    interleaved running sums.

    They are added as (0 + 2) + (1 + 3), and the terms beyond a multiple of four follow one by one.
    """
    terms = left[..., :, None, :] * right.mT[..., None, :, :]
    whole = terms.shape[-1] // 4 * 4
    total = terms.new_zeros(*terms.shape[:-1], 1)
    if whole:
        fours = terms[..., :whole].view(*terms.shape[:-1], -1, 4)
        running = fours[..., 0, :].clone()
        for i in range(1, fours.shape[-2]):
            running += fours[..., i, :]
        total = _halved(running)
    for j in range(whole, terms.shape[-1]):
        total = total + terms[..., j : j + 1]
    return total[..., 0]


def row_product(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """total + left @ right of fp32 tensors holding bf16 values, left one row: right's rows added
    four at a time.

    A group joins as (0 + 2) + (1 + 3), and the rows beyond a multiple of four one by one, the last
    first.
    """
    terms = left.mT * right
    whole = terms.shape[-2] // 4 * 4
    fours = terms[..., :whole, :].view(*terms.shape[:-2], -1, 4, terms.shape[-1])
    groups = (fours[..., 0, :] + fours[..., 2, :]) + (fours[..., 1, :] + fours[..., 3, :])
    for i in range(groups.shape[-2]):
        total = total + groups[..., i : i + 1, :]
    for j in reversed(range(whole, terms.shape[-2])):
        total = total + terms[..., j : j + 1, :]
    return total


def _two_running_sums(x: Tensor) -> Tensor:
    """Sixteen lanes: the vectors of even place summed in turn, plus those of odd place."""
    vectors = x.view(*x.shape[:-1], x.shape[-1] // LANES, LANES)
    running = vectors[..., :2, :].clone()
    for i in range(2, vectors.shape[-2]):
        running[..., i % 2, :] += vectors[..., i, :]
    return running.sum(-2)


def _one_by_one(x: Tensor) -> Tensor:
    total = x[..., :1]
    for j in range(1, x.shape[-1]):
        total = total + x[..., j : j + 1]
    return total


def _halved(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x
