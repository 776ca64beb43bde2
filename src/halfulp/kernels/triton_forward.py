"""The Triton forward kernel, every recipe and option a switch.

Recipes share one source so that their speed and accuracy compare like with like: `SHIFT` and
`ROUNDED` are compile-time constants, and what a recipe or a call does not use is not compiled.

Every score enters as fma(x, scale, −shift): one rounding and the same bits in all kernels, which is
what lets the backward pass of "halfulp" speak of the same rounded weights as the forward pass. x is
a product q·k and `scale` that of base-2 scores; under a softcap x is tanh(S / c) and `scale` c ·
log2 e; with an additive mask x is the score itself.

Shapes: M rows of queries, N columns of keys; HEAD_DIM and VALUE_DIM are D and D_v padded to powers
of two. Key j is visible to query i if i − left ≤ j ≤ i + right. The scale must be positive: the row
maximum is taken before it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from halfulp.kernels.triton_arguments import Dropout
from halfulp.kernels.triton_scores import (
    ADDITIVE,
    dropout_row,
    kept,
    key_range,
    mask_of,
    seen_products,
)
from halfulp.kernels.triton_tiles import (
    LOG2_E,
    binade,
    matrix_of,
    power_of_two,
    rounded,
    store_rows,
    tile_of,
)

MAXIMUM, INTEGER, STABILIZED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# of Qiu & Yao's shift for a repeated positive maximum; a negative one is shifted by 0
BETA = tl.constexpr(7.0)
# 1.5 · 2²³: adding and subtracting it rounds to the nearest even integer
TO_INTEGER = tl.constexpr(12582912.0)


class Sums(NamedTuple):
    """What a query block has summed over the keys so far."""

    acc: Any  # P̂ V, not yet divided by l
    m: Any  # the largest score
    l: Any  # the sum of the weights
    l_rounded: Any  # of the rounded weights, in eight equal columns


@triton.jit
def _forward_tiles(sums, q, K, V, rows, low, high, mask, hashes, dropout, call, switches, tiles,
                   SHIFT: tl.constexpr, ROUNDED: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """Online softmax over the key blocks from low to high; `mask` starts at the block's rows."""
    acc, m, l, l_rounded = sums
    DTYPE: tl.constexpr = V.start.dtype.element_ty
    factor = 1.0 if switches.MASK == ADDITIVE else call.scale
    for start in tl.range(low, high, tiles.BLOCK_N):
        # S = Q Kᵀ under softcap, mask and bounds
        k = tile_of(K, start, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_N, EDGE, tiles.DESCRIPTORS,
                    tiles.EMULATED)  # fmt: skip
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        columns = start + tl.arange(0, tiles.BLOCK_N)
        at = mask.start + tl.cast(start, tl.int64) * mask.column
        row, column = tl.arange(0, tiles.BLOCK_M)[:, None], tl.arange(0, tiles.BLOCK_N)[None, :]
        products, _ = seen_products(products, at, mask, row, column, rows[:, None],
                                    columns[None, :], call, switches, EDGE, EDGE)  # fmt: skip

        # the running maximum, and what the recipe shifts by for it
        largest = tl.max(products, 1)
        top = largest * factor
        if SHIFT == STABILIZED:
            repeated = (tl.sum((products >= largest[:, None]).to(tl.int32), 1) > 1) & (
                largest > float("-inf")
            )
            top = tl.where(repeated, tl.where(top > 0, top * BETA, 0.0), top)
        m_new = tl.maximum(m, top)
        before, shift = m, m_new
        if SHIFT == INTEGER:  # every rescale is then a power of two, which commutes with rounding
            before, shift = tl.ceil(m), tl.ceil(m_new)
        shift = tl.where(m_new == float("-inf"), 0.0, shift)

        # P = 2^(S − shift), and P̂ as the tensor cores take it
        weights = tl.exp2(tl.fma(products, factor, -shift[:, None]))
        operand = rounded(weights, DTYPE, tiles.EMULATED)

        # what was summed so far, at the new shift, and the new sums
        rescale = power_of_two(before - shift) if SHIFT == INTEGER else tl.exp2(before - shift)
        if ROUNDED:
            # The tensor cores sum the rounded weights: no unpacking, and V = const gives O = const
            # bit for bit.
            ones = tl.full([tiles.BLOCK_N, 8], 1.0, operand.dtype)
            l_rounded = tl.dot(operand, ones, l_rounded * rescale[:, None], input_precision="ieee")
        l = l * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]

        # + P̂ V of the weights that dropout keeps
        if switches.DROPPED:  # from the products alone: lse and l are those of all weights
            operand = tl.where(kept(hashes[:, None], columns[None, :], dropout.last), operand, 0.0)
        v = tile_of(V, start, tiles.D_v, tiles.VALUE_DIM, tiles.BLOCK_N, EDGE, tiles.DESCRIPTORS,
                    tiles.EMULATED)  # fmt: skip
        acc = tl.dot(operand, v, acc, input_precision="ieee")
        m = m_new
    return Sums(acc, m, l, l_rounded)


@triton.jit(do_not_specialize=["dropout_start", "last_dropped"])
def forward_kernel(Q, K, V, saved, Mask, Sinks, strides, call, dropout_start, last_dropped,
                   kept_scale, switches, tiles, SHIFT: tl.constexpr, ROUNDED: tl.constexpr,
                   RESIDUAL: tl.constexpr, SINKS: tl.constexpr):  # fmt: skip
    """O, its residual, lse, the largest scores and l of one query block. Grid: blocks · B · H."""
    # which block of which head
    blocks = tl.cdiv(call.N_q, tiles.BLOCK_M)
    head = tl.program_id(0) // blocks
    # The last query block sees the most keys, so under a causal mask it goes first.
    start = (blocks - 1 - tl.program_id(0) % blocks) * tiles.BLOCK_M
    batch = tl.cast(head // call.heads, tl.int64)
    query_head = tl.cast(head % call.heads, tl.int64)
    key_head = query_head // call.groups
    K = matrix_of(K, strides.K, batch, key_head, call.N_k, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_N,
                  tiles.DESCRIPTORS)  # fmt: skip
    V = matrix_of(V, strides.V, batch, key_head, call.N_k, tiles.D_v, tiles.VALUE_DIM,
                  tiles.BLOCK_N, tiles.DESCRIPTORS)  # fmt: skip
    rows = start + tl.arange(0, tiles.BLOCK_M)
    Q = matrix_of(Q, strides.Q, batch, query_head, call.N_q, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_M,
                  False)  # fmt: skip
    q = tile_of(Q, start, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_M, True, False, tiles.EMULATED)

    # nothing summed yet, or the sink
    acc = tl.zeros([tiles.BLOCK_M, tiles.VALUE_DIM], tl.float32)
    m = tl.full([tiles.BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([tiles.BLOCK_M], tl.float32)
    # eight equal columns, the least that tensor cores make
    l_rounded = tl.zeros([tiles.BLOCK_M, 8], tl.float32)
    # one more score in base 2, whose value is 0; its weight enters no product and stays as it is
    if SINKS:
        sink = tl.load(Sinks + query_head)
        sink_max = tl.ceil(sink) if SHIFT == INTEGER else sink
        sink_weight = tl.exp2(sink - tl.where(sink_max == float("-inf"), 0.0, sink_max))
        m = tl.full([tiles.BLOCK_M], 0.0, tl.float32) + sink
        l, l_rounded = l + sink_weight, l_rounded + sink_weight
    sums = Sums(acc, m, l, l_rounded)

    # all keys that the block may see; those that each of its rows sees need no bounds
    hashes = rows
    dropout = Dropout(dropout_start, tl.cast(head, tl.int64) * call.N_q, last_dropped, kept_scale)
    if switches.DROPPED:
        hashes = dropout_row(dropout.start, dropout.first_row + rows)
    mask = mask_of(Mask, strides.mask, batch, query_head, start, strides.mask.row, switches.MASK)
    low, whole, rest, high = key_range(start, call, switches, tiles)
    if switches.HAS_LEFT:
        sums = _forward_tiles(
            sums, q, K, V, rows, low, tl.minimum(whole, high), mask, hashes, dropout,
            call, switches, tiles, SHIFT, ROUNDED, EDGE=True)  # fmt: skip
    sums = _forward_tiles(
        sums, q, K, V, rows, whole, rest, mask, hashes, dropout, call,
        switches, tiles, SHIFT, ROUNDED, EDGE=False)  # fmt: skip
    sums = _forward_tiles(
        sums, q, K, V, rows, rest, high, mask, hashes, dropout, call,
        switches, tiles, SHIFT, ROUNDED, EDGE=True)  # fmt: skip
    acc, m, l, l_rounded = sums

    # lse = shift + log l, of the weights before they are rounded
    lse = ((tl.ceil(m) if SHIFT == INTEGER else m) + tl.log2(l)) / LOG2_E
    if ROUNDED:
        l = tl.max(l_rounded, 1)

    # O = P̂ V / l. 0 / 1 in a row with nothing to attend to; a sum that underflowed elsewhere stays
    # 0 and shows as NaN.
    exact_out = acc / tl.where(m == float("-inf"), 1.0, l)[:, None]
    if switches.DROPPED:
        exact_out *= dropout.scale
    out = rounded(exact_out, saved.out.dtype.element_ty, tiles.EMULATED)
    offset = tl.cast(head, tl.int64) * call.N_q
    store_rows(saved.out + offset * tiles.D_v, out, start, call.N_q, tiles.D_v, tiles.VALUE_DIM,
               tiles.BLOCK_M)  # fmt: skip

    # what rounding took from O, in units of 2⁻⁸ ulp
    if RESIDUAL:
        IS_BF16: tl.constexpr = saved.out.dtype.element_ty == tl.bfloat16
        out32 = out.to(tl.float32)
        per_unit = (((143 if IS_BF16 else 146) - binade(out32, IS_BF16)) << 23).to(
            tl.float32, bitcast=True
        )
        units = ((exact_out - out32) * per_unit + TO_INTEGER) - TO_INTEGER
        units = tl.minimum(tl.maximum(units, -128.0), 127.0)
        store_rows(saved.residual + offset * tiles.D_v, units, start, call.N_q, tiles.D_v,
                   tiles.VALUE_DIM, tiles.BLOCK_M)  # fmt: skip
    tl.store(saved.lse + offset + rows, lse, mask=rows < call.N_q)
    tl.store(saved.row_max + offset + rows, m, mask=rows < call.N_q)
    tl.store(saved.row_sum + offset + rows, l, mask=rows < call.N_q)
