"""The float32 arithmetic that torch leaves open on a CPU, fixed to the bit so that one recipe means
one result.

torch's exponential, sums and gemms differ with the machine, the number of threads and the place in
a tensor. Here float32 tensors on a CPU get

- e^x, 2^x and their logarithms: float64's, rounded once,
- sums of a row: element j to lane j mod 16, lanes in increasing order, then the tree i + 8, i + 4,
  i + 2, i + 1,
- products: one accumulator for each element, k in increasing order, fused multiply-add,

from the native library, or without it from torch operations that have those bits (products in
native order excepted: see `matmul`). On other devices, and in float64, all three are torch's own.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from halfulp.native import BEST_ISA, CMatrix, function, missing

_LANES = 16
# of mantissa bits and the bits of a residual, so that the unit and its inverse are normal numbers
LARGEST_UNIT = 24


def compiled(*tensors: Tensor) -> bool:
    """Whether the native library computes with these."""
    return all(
        type(x) is Tensor and x.dtype is torch.float32 and x.device.type == "cpu" for x in tensors
    ) and (missing() is None)


def exponential(x: Tensor, base2: bool, out: Tensor | None = None) -> Tensor:
    """e^x, or 2^x, elementwise, into `out` if given, which may be x."""
    if compiled(x):
        x = x.contiguous()
        y = torch.empty_like(x) if out is None or not out.is_contiguous() else out
        call = function("halfulp_exp", "iiippl")
        call(BEST_ISA, torch.get_num_threads(), base2, x.data_ptr(), y.data_ptr(), x.numel())
    else:
        of_torch = torch.exp2 if base2 else torch.exp
        # in fp64 first: the last bit of a float32 exp differs between vector libraries
        y = of_torch(x.double()).to(x.dtype) if fixed(x) else of_torch(x, out=out)
    return y if out is None or y is out else out.copy_(y)


@lru_cache(maxsize=16)
def _coefficients(degree: int) -> tuple[float, ...]:
    """Of the polynomial through 2^f at the Chebyshev-Lobatto points of [0, 1], lowest first."""
    points = [0.5 - 0.5 * math.cos(math.pi * i / degree) for i in range(degree + 1)]
    x = torch.tensor(points, dtype=torch.float64)
    matrix = x[:, None] ** torch.arange(degree + 1)
    found: list[float] = torch.linalg.solve(matrix, torch.exp2(x)).tolist()
    return tuple(found)


def polynomial_exponential(x: Tensor, base2: bool, degree: int) -> Tensor:
    """e^x, or 2^x, as 2ⁿ times a polynomial on [0, 1], in x's dtype; degree 1 is Schraudolph's
    (1999), 3 what FlashAttention-4 has on its multipliers.
    """
    y = x if base2 else x * math.log2(math.e)
    lowest = -126.0 if x.dtype == torch.float32 else -1022.0
    n = y.floor()
    # −inf − (−inf) is NaN, where the weight of a hidden key must become 0
    f = torch.where(y == -math.inf, 0.0, y - n)
    total = torch.zeros_like(y)
    for c in reversed(_coefficients(degree)):
        total = total * f + c
    scaled = torch.ldexp(total, n.clamp(lowest, 1023.0))
    return torch.where(n < lowest, torch.zeros_like(y), scaled)


def logarithm(x: Tensor, base2: bool) -> Tensor:
    """The natural logarithm, or that in base 2, elementwise."""
    of_torch = torch.log2 if base2 else torch.log
    return of_torch(x.double()).to(x.dtype) if fixed(x) else of_torch(x)


def row_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, which stays with a length of 1."""
    if not fixed(x):
        return x.sum(-1, keepdim=True)
    n = x.shape[-1]
    if compiled(x) and x.numel() > 0:
        x = x.contiguous()
        sums = x.new_empty(*x.shape[:-1], 1)
        call = function("halfulp_row_sum", "iippll")
        call(BEST_ISA, torch.get_num_threads(), x.data_ptr(), sums.data_ptr(), sums.numel(), n)
        return sums
    # the order of the native library's lanes, so that both have the same bits
    padded = functional.pad(x, (0, -n % _LANES if n else _LANES))
    lanes = padded[..., :_LANES]
    for j in range(_LANES, n, _LANES):
        lanes = lanes + padded[..., j : j + _LANES]
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes


def fixed_point(exact: Tensor, out: Tensor, mantissa_bits: int, bits: int, lowest: int) -> Tensor:
    """exact − out rounded to `bits` bits, in units of 2^−bits ulp of out; the library must be
    there.

    `mantissa_bits` are those of out's format, and together with `bits` at most `LARGEST_UNIT`; out
    below 2^lowest share one unit.
    """
    exact, out = exact.contiguous(), out.contiguous()
    residual = torch.empty_like(exact)
    pointers = (x.data_ptr() for x in (exact, out, residual))
    call = function("halfulp_residual", "iipppliii")
    call(BEST_ISA, torch.get_num_threads(), *pointers, exact.numel(), mantissa_bits, bits, lowest)
    return residual


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left [..., M, K] @ right [..., K, N]`, float32 on a CPU; the library must be there."""
    lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # torch's imports sympy
    (m, k), n = left.shape[-2:], right.shape[-1]
    out = left.new_empty(*lead, m, n)
    if out.numel() == 0:
        return out
    # broadcast dimensions get a stride of 0, which the library reads in place
    held = [x.expand(*lead, *x.shape[-2:]) for x in (left, right)]
    # a copy only where strides demand it
    held = [x if x.ndim <= 3 else x.flatten(0, -3) for x in held]
    matrices = [
        CMatrix(x.data_ptr(), x.stride(0) if x.ndim == 3 else 0, x.stride(-2), x.stride(-1))
        for x in held
    ]
    sizes, pointers = (
        (out.numel() // (m * n), m, n, k),
        (*map(ctypes.addressof, matrices), out.data_ptr()),
    )
    call = function("halfulp_product", "iillllppp", ctypes.c_int32)
    if call(BEST_ISA, torch.get_num_threads(), *sizes, *pointers):
        raise MemoryError(
            f"no memory for a product of {tuple(left.shape)} and {tuple(right.shape)}"
        )
    return out


def sum_to_odd(total: Tensor, term: Tensor) -> Tensor:
    """total + term in float64, rounded to odd: rounding that to a narrower format is rounding the
    sum itself, once.
    """
    # Knuth's two-sum: `lost` is exactly what the addition rounds away, whichever term is larger
    near = total + term
    other = near - total
    lost = (total - (near - other)) + (term - other)
    bits = near.view(torch.int64)
    # A sum that is not exact becomes the neighbor, on the side of what was lost, whose last bit is
    # odd.
    inexact = (lost != 0) & near.isfinite() & (bits & 1 == 0)
    outward = (lost > 0) == (near > 0)
    return torch.where(inexact, bits + torch.where(outward, 1, -1), bits).view(torch.float64)


def fixed(x: Tensor) -> bool:
    """Whether the bits are laid down for such a tensor."""
    return x.dtype is torch.float32 and x.device.type == "cpu"
