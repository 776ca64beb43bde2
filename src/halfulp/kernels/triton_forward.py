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

import triton
import triton.language as tl

from halfulp.kernels.triton_scores import (
    ADDITIVE,
    NO_MASK,
    dropout_row,
    kept,
    key_range,
    seen_products,
)
from halfulp.kernels.triton_tiles import (
    LOG2_E,
    binade,
    descriptor,
    power_of_two,
    rounded,
    rows_of,
    store_rows,
)

MAXIMUM, INTEGER, STABILIZED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# of Qiu & Yao's shift for a repeated positive maximum; a negative one is shifted by 0
BETA = tl.constexpr(7.0)
# 1.5 · 2²³: adding and subtracting it rounds to the nearest even integer
TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def _forward_tiles(acc, m, l, l_rounded, q, K, V, K_tiles, V_tiles, k_n, v_n, rows, low, high, N_q, N_k, left, right,
                   scale, more, D: tl.constexpr, D_v: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHIFT: tl.constexpr, ROUNDED: tl.constexpr,
                   HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EDGE: tl.constexpr, MASK: tl.constexpr,
                   CAPPED: tl.constexpr, DROPPED: tl.constexpr, DESCRIPTORS: tl.constexpr,
                   EMULATED: tl.constexpr):  # fmt: skip
    """Online softmax over the key blocks from low to high; `more` is what options read, unpacked at
    once.
    """
    Mask, mask_m, mask_n, cap_scale, hashes, last_dropped = more
    factor = 1.0 if MASK == ADDITIVE else scale
    for start in tl.range(low, high, BLOCK_N):
        k = rows_of(K, K_tiles, start, k_n, N_k, D, HEAD_DIM, BLOCK_N, EDGE, DESCRIPTORS, EMULATED)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        columns = start + tl.arange(0, BLOCK_N)
        products, _ = seen_products(
            products, Mask + tl.cast(start, tl.int64) * mask_n, mask_m, mask_n, tl.arange(0, BLOCK_M)[:, None],
            tl.arange(0, BLOCK_N)[None, :], rows[:, None], columns[None, :], N_q, N_k, left, right, scale, cap_scale,
            HAS_LEFT, HAS_RIGHT, EDGE, EDGE, MASK, CAPPED)  # fmt: skip
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
        weights = tl.exp2(tl.fma(products, factor, -shift[:, None]))
        operand = rounded(weights, V.dtype.element_ty, EMULATED)
        rescale = power_of_two(before - shift) if SHIFT == INTEGER else tl.exp2(before - shift)
        if ROUNDED:
            # The tensor cores sum the rounded weights: no unpacking, and V = const gives O = const
            # bit for bit.
            ones = tl.full([BLOCK_N, 8], 1.0, operand.dtype)
            l_rounded = tl.dot(operand, ones, l_rounded * rescale[:, None], input_precision="ieee")
        l = l * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        if DROPPED:  # from the products alone: lse and l are those of all weights
            operand = tl.where(kept(hashes[:, None], columns[None, :], last_dropped), operand, 0.0)
        v = rows_of(
            V, V_tiles, start, v_n, N_k, D_v, VALUE_DIM, BLOCK_N, EDGE, DESCRIPTORS, EMULATED
        )
        acc = tl.dot(operand, v, acc, input_precision="ieee")
        m = m_new
    return acc, m, l, l_rounded


@triton.jit(do_not_specialize=["dropout_start", "last_dropped"])
def forward_kernel(Q, K, V, Out, Residual, Lse, Row_max, Row_sum, Mask, Sinks,
                   q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, mask_b, mask_h, mask_m, mask_n, heads, groups, N_q, N_k,
                   left, right, scale, cap_scale, dropout_start, last_dropped, kept_scale,
                   D: tl.constexpr, D_v: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHIFT: tl.constexpr, ROUNDED: tl.constexpr,
                   RESIDUAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr,
                   CAPPED: tl.constexpr, DROPPED: tl.constexpr, SINKS: tl.constexpr, DESCRIPTORS: tl.constexpr,
                   EMULATED: tl.constexpr):  # fmt: skip
    """O, its residual, lse, the largest scores and l of one query block. Grid: blocks · B · H."""
    blocks = tl.cdiv(N_q, BLOCK_M)
    head = tl.program_id(0) // blocks
    # The last query block sees the most keys, so under a causal mask it goes first.
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    batch, query_head = tl.cast(head // heads, tl.int64), tl.cast(head % heads, tl.int64)
    K += batch * k_b + query_head // groups * k_h
    V += batch * v_b + query_head // groups * v_h
    rows = start + tl.arange(0, BLOCK_M)
    Q += batch * q_b + query_head * q_h
    q = rows_of(Q, Q, start, q_n, N_q, D, HEAD_DIM, BLOCK_M, True, False, EMULATED)
    K_tiles = descriptor(K, k_n, N_k, D, HEAD_DIM, BLOCK_N, DESCRIPTORS)
    V_tiles = descriptor(V, v_n, N_k, D_v, VALUE_DIM, BLOCK_N, DESCRIPTORS)

    acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    # eight equal columns, the least that tensor cores make
    l_rounded = tl.zeros([BLOCK_M, 8], tl.float32)
    # one more score in base 2, whose value is 0; its weight enters no product and stays as it is
    if SINKS:
        sink = tl.load(Sinks + query_head)
        sink_max = tl.ceil(sink) if SHIFT == INTEGER else sink
        sink_weight = tl.exp2(sink - tl.where(sink_max == float("-inf"), 0.0, sink_max))
        m, l, l_rounded = (
            tl.full([BLOCK_M], 0.0, tl.float32) + sink,
            l + sink_weight,
            l_rounded + sink_weight,
        )
    hashes = rows
    if DROPPED:
        hashes = dropout_row(dropout_start, tl.cast(head, tl.int64) * N_q + rows)
    if MASK != NO_MASK:
        Mask += batch * mask_b + query_head * mask_h + tl.cast(start, tl.int64) * mask_m
    more = (Mask, mask_m, mask_n, cap_scale, hashes, last_dropped)
    low, whole, rest, high = key_range(
        start, N_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    if HAS_LEFT:
        acc, m, l, l_rounded = _forward_tiles(
            acc, m, l, l_rounded, q, K, V, K_tiles, V_tiles, k_n, v_n, rows, low, tl.minimum(whole, high), N_q, N_k,
            left, right, scale, more, D, D_v, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, SHIFT, ROUNDED, HAS_LEFT,
            HAS_RIGHT, True, MASK, CAPPED, DROPPED, DESCRIPTORS, EMULATED)  # fmt: skip
    acc, m, l, l_rounded = _forward_tiles(
        acc, m, l, l_rounded, q, K, V, K_tiles, V_tiles, k_n, v_n, rows, whole, rest, N_q, N_k, left, right,
        scale, more, D, D_v, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, SHIFT, ROUNDED, HAS_LEFT, HAS_RIGHT, False, MASK,
        CAPPED, DROPPED, DESCRIPTORS, EMULATED)  # fmt: skip
    acc, m, l, l_rounded = _forward_tiles(
        acc, m, l, l_rounded, q, K, V, K_tiles, V_tiles, k_n, v_n, rows, rest, high, N_q, N_k, left, right,
        scale, more, D, D_v, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, SHIFT, ROUNDED, HAS_LEFT, HAS_RIGHT, True, MASK,
        CAPPED, DROPPED, DESCRIPTORS, EMULATED)  # fmt: skip

    lse = ((tl.ceil(m) if SHIFT == INTEGER else m) + tl.log2(l)) / LOG2_E
    if ROUNDED:
        l = tl.max(l_rounded, 1)
    # 0 / 1 in a row with nothing to attend to. A sum that underflowed elsewhere stays 0 and shows
    # as NaN.
    exact_out = acc / tl.where(m == float("-inf"), 1.0, l)[:, None]
    if DROPPED:
        exact_out *= kept_scale
    out = rounded(exact_out, Out.dtype.element_ty, EMULATED)
    offset = tl.cast(head, tl.int64) * N_q
    store_rows(Out + offset * D_v, out, start, N_q, D_v, VALUE_DIM, BLOCK_M)
    if RESIDUAL:
        IS_BF16: tl.constexpr = Out.dtype.element_ty == tl.bfloat16
        out32 = out.to(tl.float32)
        per_unit = (((143 if IS_BF16 else 146) - binade(out32, IS_BF16)) << 23).to(
            tl.float32, bitcast=True
        )
        units = ((exact_out - out32) * per_unit + TO_INTEGER) - TO_INTEGER
        units = tl.minimum(tl.maximum(units, -128.0), 127.0)
        store_rows(Residual + offset * D_v, units, start, N_q, D_v, VALUE_DIM, BLOCK_M)
    tl.store(Lse + offset + rows, lse, mask=rows < N_q)
    tl.store(Row_max + offset + rows, m, mask=rows < N_q)
    tl.store(Row_sum + offset + rows, l, mask=rows < N_q)
