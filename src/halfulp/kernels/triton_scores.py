"""What options do to a tile between product and exponential, and to the weights after it: softcap,
masks, dropout.

A tile is [queries, keys] in the forward pass and for dQ, [keys, queries] for dK and dV, so indices
come broadcast. Also here: which tiles are visible at all, so that the others are never loaded.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from halfulp.kernels.triton_tiles import LOG2_E

NO_MASK, BOOLEAN, ADDITIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tanh(x):
    """Within 2⁻²² of it everywhere: small ones need no more digits, since what counts is the error
    of c · tanh.

    From what every chip and the interpreter have, in steps that no compiler may contract: the same
    bits in all kernels.
    """
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def masked(
    products, Mask, row_stride, column_stride, rows, columns, inside, scale, MASK: tl.constexpr
):
    """Products, −inf where a boolean mask is 0; with an additive mask its sum with the scores, in
    base 2.

    `Mask` points at the tile; rows and columns count from there.
    """
    at = Mask + rows * row_stride + columns * column_stride
    if MASK == BOOLEAN:
        return tl.where(tl.load(at, mask=inside, other=0) != 0, products, float("-inf"))
    else:  # noqa: RET505 - both ends of one constant branch, or the compiler asks for one type
        return tl.fma(products, scale, tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2_E)


@triton.jit
def dropout_row(start, row):
    """The hash of rows that `kept` goes on from: `start` is that of the seed, a row (b·H + h)·N +
    i.
    """
    return _mixed(start.to(tl.uint32, bitcast=True) ^ row.to(tl.uint32))


@triton.jit
def kept(hashes, columns, last_dropped):
    """Whether dropout keeps a weight: `formats.counter.keep_mask`, bit for bit."""
    word = tl.mul(columns.to(tl.uint32), 0x9E3779B1, sanitize_overflow=False)
    return _mixed(hashes ^ word) > last_dropped.to(tl.uint32, bitcast=True)


@triton.jit
def _mixed(x):
    x = tl.mul(x ^ (x >> 16), 0x7FEB352D, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def hide(
    products, rows, columns, N_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """−inf where row i may not see column j; `rows` and `columns` broadcast to the tile."""
    visible = columns < N_k
    if HAS_RIGHT:
        visible &= columns <= rows + right
    if HAS_LEFT:
        visible &= columns >= rows - left
    return tl.where(visible, products, float("-inf"))


@triton.jit
def seen_products(products, Mask, mask_m, mask_n, row, column, rows, columns, N_q, N_k, left, right, scale, cap_scale,
                  HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EDGE: tl.constexpr, PARTIAL: tl.constexpr,
                  MASK: tl.constexpr, CAPPED: tl.constexpr):  # fmt: skip
    """Products q·k under softcap, mask and bounds, as the exponential takes them, and the softcap's
    slope.

    `Mask` points at the tile, where `row` and `column` count from 0; `PARTIAL`: the tile may reach
    beyond the last key.
    """
    slope = products
    if CAPPED:
        products = tanh(products * cap_scale)
        slope = 1.0 - products * products
    if MASK != NO_MASK:
        inside = rows < N_q
        if PARTIAL:
            inside &= columns < N_k
        products = masked(products, Mask, mask_m, mask_n, row, column, inside, scale, MASK)
    if EDGE:
        products = hide(products, rows, columns, N_k, left, right, HAS_LEFT, HAS_RIGHT)
    return products, slope


@triton.jit
def key_range(start, N_k, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
               HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Columns of one query block: [low, whole) and [rest, high) need a mask, [whole, rest) is
    visible to all rows.
    """
    low, whole, high, rest = 0, 0, N_k, N_k // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        high = tl.minimum(high, tl.maximum(start + BLOCK_M + right, 0))
        rest = tl.minimum(rest, tl.maximum(start + right + 1, 0) // BLOCK_N * BLOCK_N)
    if HAS_LEFT:
        low = tl.maximum(start - left, 0) // BLOCK_N * BLOCK_N
        whole = tl.maximum(
            low, tl.cdiv(tl.maximum(start + BLOCK_M - 1 - left, 0), BLOCK_N) * BLOCK_N
        )
        rest = tl.maximum(rest, whole)
    return low, whole, rest, high


@triton.jit
def row_range(start, N_q, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
               HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Rows [low, high) of one key block; without a left bound [whole, high) needs no mask: rows
    past N_q are 0.
    """
    low, whole, high, end = 0, 0, N_q, tl.cdiv(N_q, BLOCK_M) * BLOCK_M
    if HAS_RIGHT:
        low = tl.minimum(tl.maximum(start - right, 0) // BLOCK_M * BLOCK_M, end)
        whole = tl.minimum(
            tl.cdiv(tl.maximum(start + BLOCK_N - 1 - right, 0), BLOCK_M) * BLOCK_M, end
        )
        whole = tl.maximum(whole, low)
    if HAS_LEFT:
        high = tl.minimum(high, tl.maximum(start + BLOCK_N + left, 0))
    return low, whole, high
