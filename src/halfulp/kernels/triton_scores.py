"""What options do to a tile between product and exponential, and to the weights after it: softcap,
masks, dropout.

A tile is [queries, keys] in the forward pass and for dQ, [keys, queries] for dK and dV, so indices
come broadcast. Also here: which tiles are visible at all, so that the others are never loaded.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core  # Triton 3.5 shows mul there alone

from halfulp.kernels.triton_arguments import MaskPart
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
def mask_of(Mask, strides, batch, head, first, stride, MASK: tl.constexpr):
    """The mask of one head from a row or a column on, `stride` apart; never read if there is
    none.
    """
    if MASK != NO_MASK:
        Mask += batch * strides.batch + head * strides.head + tl.cast(first, tl.int64) * stride
    return MaskPart(Mask, strides.row, strides.column)


@triton.jit
def masked(products, at, mask, row, column, inside, scale, MASK: tl.constexpr):
    """Products, −inf where a boolean mask is 0; with an additive mask its sum with the scores, in
    base 2.

    `at` points at the tile; `row` and `column` count from there.
    """
    place = at + row * mask.row + column * mask.column
    if MASK == BOOLEAN:
        return tl.where(tl.load(place, mask=inside, other=0) != 0, products, float("-inf"))
    else:  # noqa: RET505 - both ends of one constant branch, or the compiler asks for one type
        scores = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        return tl.fma(products, scale, scores * LOG2_E)


@triton.jit
def dropout_row(start, row):
    """The hash of rows that `kept` goes on from: `start` is that of the seed, a row (b·H + h)·N +
    i.
    """
    return _mixed(start.to(tl.uint32, bitcast=True) ^ row.to(tl.uint32))


@triton.jit
def kept(hashes, columns, last_dropped):
    """Whether dropout keeps a weight: `formats.counter.keep_mask`, bit for bit."""
    word = core.mul(columns.to(tl.uint32), 0x9E3779B1, sanitize_overflow=False)
    return _mixed(hashes ^ word) > last_dropped.to(tl.uint32, bitcast=True)


@triton.jit
def _mixed(x):
    x = core.mul(x ^ (x >> 16), 0x7FEB352D, sanitize_overflow=False)
    x = core.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def hide(products, rows, columns, call, switches):
    """−inf where row i may not see column j; `rows` and `columns` broadcast to the tile."""
    visible = columns < call.N_k
    if switches.HAS_RIGHT:
        visible &= columns <= rows + call.right
    if switches.HAS_LEFT:
        visible &= columns >= rows - call.left
    return tl.where(visible, products, float("-inf"))


@triton.jit
def seen_products(products, at, mask, row, column, rows, columns, call, switches,
                  EDGE: tl.constexpr, PARTIAL: tl.constexpr):  # fmt: skip
    """Products q·k under softcap, mask and bounds, as the exponential takes them, and the softcap's
    slope.

    `at` points at the mask's tile, where `row` and `column` count from 0; `EDGE`: the tile may hold
    pairs that are not seen; `PARTIAL`: it may reach beyond the last key.
    """
    slope = products
    if switches.CAPPED:
        products = tanh(products * call.cap_scale)
        slope = 1.0 - products * products
    if switches.MASK != NO_MASK:
        inside = rows < call.N_q
        if PARTIAL:
            inside &= columns < call.N_k
        products = masked(products, at, mask, row, column, inside, call.scale, switches.MASK)
    if EDGE:
        products = hide(products, rows, columns, call, switches)
    return products, slope


@triton.jit
def key_range(start, call, switches, tiles):
    """Columns of one query block: [low, whole) and [rest, high) need a mask, [whole, rest) is
    visible to all rows.
    """
    low, whole = 0, 0
    high, rest = call.N_k, call.N_k // tiles.BLOCK_N * tiles.BLOCK_N
    if switches.HAS_RIGHT:
        high = tl.minimum(high, tl.maximum(start + tiles.BLOCK_M + call.right, 0))
        seen_by_all = tl.maximum(start + call.right + 1, 0)
        rest = tl.minimum(rest, seen_by_all // tiles.BLOCK_N * tiles.BLOCK_N)
    if switches.HAS_LEFT:
        low = tl.maximum(start - call.left, 0) // tiles.BLOCK_N * tiles.BLOCK_N
        last = tl.maximum(start + tiles.BLOCK_M - 1 - call.left, 0)
        whole = tl.maximum(low, tl.cdiv(last, tiles.BLOCK_N) * tiles.BLOCK_N)
        rest = tl.maximum(rest, whole)
    return low, whole, rest, high


@triton.jit
def row_range(start, call, switches, tiles):
    """Rows [low, high) of one key block; without a left bound [whole, high) needs no mask: rows
    past N_q are 0.
    """
    end = tl.cdiv(call.N_q, tiles.BLOCK_M) * tiles.BLOCK_M
    low, whole, high = 0, 0, call.N_q
    if switches.HAS_RIGHT:
        low = tl.maximum(start - call.right, 0) // tiles.BLOCK_M * tiles.BLOCK_M
        low = tl.minimum(low, end)
        last = tl.maximum(start + tiles.BLOCK_N - 1 - call.right, 0)
        whole = tl.minimum(tl.cdiv(last, tiles.BLOCK_M) * tiles.BLOCK_M, end)
        whole = tl.maximum(whole, low)
    if switches.HAS_LEFT:
        high = tl.minimum(high, tl.maximum(start + tiles.BLOCK_N + call.left, 0))
    return low, whole, high
