"""The Triton backward kernels: row statistics, dQ (or the exact δ), dK and dV; switches as in the
forward kernel.

No atomics: a gradient element is summed by one program, in an order that the shape alone fixes, so
runs repeat bit for bit.
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
    row_range,
    seen_products,
)
from halfulp.kernels.triton_tiles import (
    LOG2_E,
    binade,
    descriptor,
    rounded,
    rounded_again,
    rows_of,
    store_rows,
)


@triton.jit
def rows_kernel(Out, Residual, Grad_out, Grad_lse, Lse, Row_max, Row_sum, Shift, Inverse, Inverse_value, Delta,
                do_b, do_h, do_n, heads, N_q, D_v: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
                ROUNDED: tl.constexpr, RESIDUAL: tl.constexpr, FROM_OUT: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
                EMULATED: tl.constexpr):  # fmt: skip
    """What the backward pass needs of every row: its shift, δ − dLSE, and if ROUNDED what dS and dV
    multiply by.

    dS multiplies by 1 / `algorithms.backward.balance`, which its δ then has already; dV by 1 / l.
    """
    blocks = tl.cdiv(N_q, BLOCK_M)
    head = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    inside = rows < N_q
    at = tl.cast(head, tl.int64) * N_q + rows
    m = tl.load(Row_max + at, mask=inside, other=0.0)
    l = tl.load(Row_sum + at, mask=inside, other=1.0)
    lse = tl.load(Lse + at, mask=inside, other=0.0)
    empty = m == float("-inf")
    delta = tl.zeros([BLOCK_M], tl.float32)
    if FROM_OUT:
        batch, query_head = tl.cast(head // heads, tl.int64), tl.cast(head % heads, tl.int64)
        Grad_out += batch * do_b + query_head * do_h
        offset = tl.cast(head, tl.int64) * N_q * D_v
        do = rows_of(
            Grad_out, Out, start, do_n, N_q, D_v, VALUE_DIM, BLOCK_M, True, False, EMULATED
        ).to(tl.float32)
        out = rows_of(
            Out + offset, Out, start, D_v, N_q, D_v, VALUE_DIM, BLOCK_M, True, False, EMULATED
        )
        out = out.to(tl.float32)
        if RESIDUAL:
            IS_BF16: tl.constexpr = Out.dtype.element_ty == tl.bfloat16
            unit = (((111 if IS_BF16 else 108) + binade(out, IS_BF16)) << 23).to(
                tl.float32, bitcast=True
            )
            units = rows_of(
                Residual + offset, Out, start, D_v, N_q, D_v, VALUE_DIM, BLOCK_M, True, False, False
            )
            out += units.to(tl.float32) * unit
        delta = tl.sum(do * out, 1)
    else:
        delta = tl.load(Delta + at, mask=inside, other=0.0)
    if HAS_GRAD_LSE:
        # The lse of an empty row is constant, and the gradient that reaches it may be infinite or
        # NaN.
        delta -= tl.where(empty, 0.0, tl.load(Grad_lse + at, mask=inside, other=0.0))
    if ROUNDED:
        shift = tl.where(empty, 0.0, tl.ceil(m))
        l = tl.where(empty, 1.0, l)
        exact = l
        if RESIDUAL:
            exact = tl.where(empty, 1.0, tl.exp2(lse * LOG2_E - shift))
            share = exact / tl.where(empty, 1.0, tl.exp2(m - shift)) - 1.0
            l = exact + tl.minimum(tl.maximum(share, 0.0), 1.0) * (l - exact)
        inverse = 1.0 / l
        delta *= inverse
        tl.store(Inverse + at, inverse, mask=inside)
        tl.store(Inverse_value + at, 1.0 / exact, mask=inside)
    else:
        shift = m + tl.log2(l)
        shift = tl.where(shift == float("-inf"), 0.0, shift)
    tl.store(Shift + at, shift, mask=inside)
    tl.store(Delta + at, delta, mask=inside)


@triton.jit
def _row_values(Values, start, N_q, BLOCK_M: tl.constexpr):
    rows = start + tl.arange(0, BLOCK_M)
    return tl.load(Values + rows, mask=rows < N_q, other=0.0)


@triton.jit
def _grad_scores(weights, grad_weights, inverse, delta, slope, DTYPE: tl.constexpr, ROUNDED: tl.constexpr,
                 CAPPED: tl.constexpr, PACKED: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """dS = P ∘ (dP − δ) as an operand; if ROUNDED, with the forward pass's rounded weights and l
    inside one fma.
    """
    if ROUNDED:
        weights = rounded_again(weights, DTYPE, PACKED, EMULATED)
        centered = tl.fma(grad_weights, inverse, -delta)
    else:
        centered = grad_weights - delta
    if CAPPED:
        centered *= slope
    return rounded(weights * centered, DTYPE, EMULATED)


@triton.jit
def _query_tiles(dq, delta_sum, q, do, K, V, K_tiles, V_tiles, k_n, v_n, shift, inverse, delta, rows, low, high, N_q,
                 N_k, left, right, scale, more, D: tl.constexpr, D_v: tl.constexpr, HEAD_DIM: tl.constexpr,
                 VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr,
                 HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EDGE: tl.constexpr, MASK: tl.constexpr,
                 CAPPED: tl.constexpr, DROPPED: tl.constexpr, SUM_DELTA: tl.constexpr, DESCRIPTORS: tl.constexpr,
                 PACKED: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """dQ, or Σ dP ∘ P if SUM_DELTA, over the key blocks from low to high; `more` is what options
    read.
    """
    Mask, mask_m, mask_n, cap_scale, hashes, last_dropped, kept_scale = more
    factor = 1.0 if MASK == ADDITIVE else scale
    for start in tl.range(low, high, BLOCK_N):
        k = rows_of(K, K_tiles, start, k_n, N_k, D, HEAD_DIM, BLOCK_N, EDGE, DESCRIPTORS, EMULATED)
        v = rows_of(
            V, V_tiles, start, v_n, N_k, D_v, VALUE_DIM, BLOCK_N, EDGE, DESCRIPTORS, EMULATED
        )
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        grad_weights = tl.dot(do, tl.trans(v), input_precision="ieee")
        columns = start + tl.arange(0, BLOCK_N)
        products, slope = seen_products(
            products, Mask + tl.cast(start, tl.int64) * mask_n, mask_m, mask_n, tl.arange(0, BLOCK_M)[:, None],
            tl.arange(0, BLOCK_N)[None, :], rows[:, None], columns[None, :], N_q, N_k, left, right, scale, cap_scale,
            HAS_LEFT, HAS_RIGHT, EDGE, EDGE, MASK, CAPPED)  # fmt: skip
        if DROPPED:
            keep = kept(hashes[:, None], columns[None, :], last_dropped)
            grad_weights = tl.where(keep, grad_weights, 0.0) * kept_scale
        weights = tl.exp2(tl.fma(products, factor, -shift[:, None]))
        if SUM_DELTA:
            delta_sum += tl.sum(grad_weights * weights, 1)
        else:
            ds = _grad_scores(weights, grad_weights, inverse[:, None], delta[:, None], slope, K.dtype.element_ty,
                              ROUNDED, CAPPED, PACKED, EMULATED)  # fmt: skip
            dq = tl.dot(ds, k, dq, input_precision="ieee")
    return dq, delta_sum


@triton.jit(do_not_specialize=["dropout_start", "last_dropped"])
def query_kernel(Q, K, V, Grad_out, Shift, Inverse, Delta, Grad_query, Mask,
                 q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, mask_b, mask_h, mask_m, mask_n, heads,
                 groups, N_q, N_k, left, right, scale, alpha, cap_scale, dropout_start, last_dropped, kept_scale,
                 D: tl.constexpr, D_v: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr, SUM_DELTA: tl.constexpr,
                 HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, CAPPED: tl.constexpr,
                 DROPPED: tl.constexpr, DESCRIPTORS: tl.constexpr, PACKED: tl.constexpr,
                 EMULATED: tl.constexpr):  # fmt: skip
    """dQ of one query block; if SUM_DELTA, its δ = rowsum(dP ∘ P) instead. Grid: blocks · B · H."""
    blocks = tl.cdiv(N_q, BLOCK_M)
    head = tl.program_id(0) // blocks
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    batch, query_head = tl.cast(head // heads, tl.int64), tl.cast(head % heads, tl.int64)
    Q += batch * q_b + query_head * q_h
    Grad_out += batch * do_b + query_head * do_h
    K += batch * k_b + query_head // groups * k_h
    V += batch * v_b + query_head // groups * v_h
    offset = tl.cast(head, tl.int64) * N_q
    rows = start + tl.arange(0, BLOCK_M)
    q = rows_of(Q, Q, start, q_n, N_q, D, HEAD_DIM, BLOCK_M, True, False, EMULATED)
    do = rows_of(Grad_out, Q, start, do_n, N_q, D_v, VALUE_DIM, BLOCK_M, True, False, EMULATED)
    K_tiles = descriptor(K, k_n, N_k, D, HEAD_DIM, BLOCK_N, DESCRIPTORS)
    V_tiles = descriptor(V, v_n, N_k, D_v, VALUE_DIM, BLOCK_N, DESCRIPTORS)
    shift = _row_values(Shift + offset, start, N_q, BLOCK_M)
    inverse, delta = shift, shift
    if ROUNDED:
        inverse = _row_values(Inverse + offset, start, N_q, BLOCK_M)
    if not SUM_DELTA:
        delta = _row_values(Delta + offset, start, N_q, BLOCK_M)

    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    delta_sum = tl.zeros([BLOCK_M], tl.float32)
    low, whole, rest, high = key_range(
        start, N_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    hashes = rows
    if DROPPED:
        hashes = dropout_row(dropout_start, tl.cast(head, tl.int64) * N_q + rows)
    if MASK != NO_MASK:
        Mask += batch * mask_b + query_head * mask_h + tl.cast(start, tl.int64) * mask_m
    more = (Mask, mask_m, mask_n, cap_scale, hashes, last_dropped, kept_scale)
    if HAS_LEFT:
        dq, delta_sum = _query_tiles(
            dq, delta_sum, q, do, K, V, K_tiles, V_tiles, k_n, v_n, shift, inverse, delta, rows, low,
            tl.minimum(whole, high), N_q, N_k, left, right, scale, more, D, D_v, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N,
            ROUNDED, HAS_LEFT, HAS_RIGHT, True, MASK, CAPPED, DROPPED, SUM_DELTA, DESCRIPTORS, PACKED,
            EMULATED)  # fmt: skip
    dq, delta_sum = _query_tiles(
        dq, delta_sum, q, do, K, V, K_tiles, V_tiles, k_n, v_n, shift, inverse, delta, rows, whole, rest, N_q, N_k,
        left, right, scale, more, D, D_v, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, ROUNDED, HAS_LEFT, HAS_RIGHT, False,
        MASK, CAPPED, DROPPED, SUM_DELTA, DESCRIPTORS, PACKED, EMULATED)  # fmt: skip
    dq, delta_sum = _query_tiles(
        dq, delta_sum, q, do, K, V, K_tiles, V_tiles, k_n, v_n, shift, inverse, delta, rows, rest, high, N_q, N_k,
        left, right, scale, more, D, D_v, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, ROUNDED, HAS_LEFT, HAS_RIGHT, True,
        MASK, CAPPED, DROPPED, SUM_DELTA, DESCRIPTORS, PACKED, EMULATED)  # fmt: skip
    if SUM_DELTA:
        tl.store(Delta + offset + rows, delta_sum, mask=rows < N_q)
    else:
        dq = rounded(dq * alpha, Grad_query.dtype.element_ty, EMULATED)
        store_rows(Grad_query + offset * D, dq, start, N_q, D, HEAD_DIM, BLOCK_M)


@triton.jit
def _key_tiles(dk, dv, k, v, Q, Grad_out, Q_tiles, Grad_tiles, q_n, do_n, Shift, Inverse, Inverse_value, Delta,
               columns, low, high, N_q, N_k, left, right, scale, more, D: tl.constexpr, D_v: tl.constexpr,
               HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               ROUNDED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EDGE: tl.constexpr,
               MASK: tl.constexpr, CAPPED: tl.constexpr, DROPPED: tl.constexpr, DESCRIPTORS: tl.constexpr,
               PACKED: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """dK and dV over the query blocks from low to high; tiles are [keys, queries]."""
    Mask, mask_m, mask_n, cap_scale, first_row, dropout_start, last_dropped, kept_scale = more
    factor = 1.0 if MASK == ADDITIVE else scale
    DTYPE: tl.constexpr = Q.dtype.element_ty
    for start in tl.range(low, high, BLOCK_M):
        q = rows_of(Q, Q_tiles, start, q_n, N_q, D, HEAD_DIM, BLOCK_M, True, DESCRIPTORS, EMULATED)
        do = rows_of(
            Grad_out,
            Grad_tiles,
            start,
            do_n,
            N_q,
            D_v,
            VALUE_DIM,
            BLOCK_M,
            True,
            DESCRIPTORS,
            EMULATED,
        )
        shift = _row_values(Shift, start, N_q, BLOCK_M)
        delta = _row_values(Delta, start, N_q, BLOCK_M)
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
        rows = start + tl.arange(0, BLOCK_M)
        products, slope = seen_products(
            products, Mask + tl.cast(start, tl.int64) * mask_m, mask_m, mask_n, tl.arange(0, BLOCK_M)[None, :],
            tl.arange(0, BLOCK_N)[:, None], rows[None, :], columns[:, None], N_q, N_k, left, right, scale, cap_scale,
            HAS_LEFT, HAS_RIGHT, EDGE, True, MASK, CAPPED)  # fmt: skip
        weights = tl.exp2(tl.fma(products, factor, -shift[None, :]))
        inverse, for_value = shift, weights
        if ROUNDED:
            # bf16(bf16(w) / l) would round twice, alike in all of a diffuse row: dV takes the
            # weights before rounding.
            inverse = _row_values(Inverse, start, N_q, BLOCK_M)
            for_value = weights * _row_values(Inverse_value, start, N_q, BLOCK_M)[None, :]
        for_value = rounded(for_value, DTYPE, EMULATED)
        if DROPPED:
            keep = kept(
                dropout_row(dropout_start, first_row + rows)[None, :],
                columns[:, None],
                last_dropped,
            )
            for_value = tl.where(keep, for_value, 0.0)
        dv = tl.dot(for_value, do, dv, input_precision="ieee")
        grad_weights = tl.dot(v, tl.trans(do), input_precision="ieee")
        if DROPPED:
            grad_weights = tl.where(keep, grad_weights, 0.0) * kept_scale
        ds = _grad_scores(weights, grad_weights, inverse[None, :], delta[None, :], slope, DTYPE, ROUNDED, CAPPED,
                          PACKED, EMULATED)  # fmt: skip
        dk = tl.dot(ds, q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["dropout_start", "last_dropped"])
def key_kernel(Q, K, V, Grad_out, Shift, Inverse, Inverse_value, Delta, Grad_key, Grad_value, Mask,
               q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, mask_b, mask_h, mask_m, mask_n, heads,
               groups, N_q, N_k, left, right, scale, alpha, cap_scale, dropout_start, last_dropped, kept_scale,
               D: tl.constexpr, D_v: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr, HAS_LEFT: tl.constexpr,
               HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, CAPPED: tl.constexpr, DROPPED: tl.constexpr,
               DESCRIPTORS: tl.constexpr, PACKED: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """dK and dV of one key block, summed over the query heads that share it. Grid: blocks · B ·
    H_k.
    """
    blocks = tl.cdiv(N_k, BLOCK_N)
    key_head = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK_N
    key_heads = heads // groups
    batch, own = tl.cast(key_head // key_heads, tl.int64), tl.cast(key_head % key_heads, tl.int64)
    columns = start + tl.arange(0, BLOCK_N)
    K += batch * k_b + own * k_h
    V += batch * v_b + own * v_h
    k = rows_of(K, K, start, k_n, N_k, D, HEAD_DIM, BLOCK_N, True, False, EMULATED)
    v = rows_of(V, V, start, v_n, N_k, D_v, VALUE_DIM, BLOCK_N, True, False, EMULATED)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)
    low, whole, high = row_range(start, N_q, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    for group in range(groups):
        query_head = own * groups + group
        Q_head = Q + batch * q_b + query_head * q_h
        Grad_head = Grad_out + batch * do_b + query_head * do_h
        Q_tiles = descriptor(Q_head, q_n, N_q, D, HEAD_DIM, BLOCK_M, DESCRIPTORS)
        Grad_tiles = descriptor(Grad_head, do_n, N_q, D_v, VALUE_DIM, BLOCK_M, DESCRIPTORS)
        at = (batch * heads + query_head) * N_q
        Mask_head = Mask
        if MASK != NO_MASK:
            Mask_head += batch * mask_b + query_head * mask_h + tl.cast(start, tl.int64) * mask_n
        more = (Mask_head, mask_m, mask_n, cap_scale, at, dropout_start, last_dropped, kept_scale)
        # Wide heads and windows leave no registers for a second loop: there the mask stays on in
        # every tile.
        split: tl.constexpr = HAS_RIGHT and not HAS_LEFT and HEAD_DIM + VALUE_DIM < 256
        if split:
            dk, dv = _key_tiles(
                dk, dv, k, v, Q_head, Grad_head, Q_tiles, Grad_tiles, q_n, do_n, Shift + at, Inverse + at,
                Inverse_value + at, Delta + at, columns, low, whole, N_q, N_k, left, right, scale, more, D, D_v,
                HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, ROUNDED, HAS_LEFT, HAS_RIGHT, True, MASK, CAPPED, DROPPED,
                DESCRIPTORS, PACKED, EMULATED)  # fmt: skip
        first = low
        if split:
            first = whole
        dk, dv = _key_tiles(
            dk, dv, k, v, Q_head, Grad_head, Q_tiles, Grad_tiles, q_n, do_n, Shift + at, Inverse + at,
            Inverse_value + at, Delta + at, columns, first, high, N_q, N_k, left, right, scale, more, D, D_v,
            HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, ROUNDED, HAS_LEFT, HAS_RIGHT,
            (HAS_LEFT or HAS_RIGHT) and not split, MASK, CAPPED, DROPPED, DESCRIPTORS, PACKED, EMULATED)  # fmt: skip
    offset = tl.cast(key_head, tl.int64) * N_k
    if DROPPED:
        dv *= kept_scale
    dk, dv = (
        rounded(dk * alpha, K.dtype.element_ty, EMULATED),
        rounded(dv, V.dtype.element_ty, EMULATED),
    )
    store_rows(Grad_key + offset * D, dk, start, N_k, D, HEAD_DIM, BLOCK_N)
    store_rows(Grad_value + offset * D_v, dv, start, N_k, D_v, VALUE_DIM, BLOCK_N)
