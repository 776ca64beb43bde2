"""The Triton backward kernels: row statistics, dQ (or the exact δ), dK and dV; switches as in the
forward kernel.

No atomics: a gradient element is summed by one program, in an order that the shape alone fixes, so
runs repeat bit for bit.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from halfulp.kernels.triton_arguments import Dropout, Matrix, Rows
from halfulp.kernels.triton_scores import (
    ADDITIVE,
    dropout_row,
    kept,
    key_range,
    mask_of,
    row_range,
    seen_products,
)
from halfulp.kernels.triton_tiles import (
    LOG2_E,
    binade,
    matrix_of,
    rounded,
    rounded_again,
    store_rows,
    tile_of,
)


@triton.jit
def rows_kernel(saved, Grad_out, Grad_lse, stats, strides, call, tiles, ROUNDED: tl.constexpr,
                RESIDUAL: tl.constexpr, FROM_OUT: tl.constexpr,
                HAS_GRAD_LSE: tl.constexpr):  # fmt: skip
    """What the backward pass needs of every row: its shift, δ − dLSE, and if ROUNDED what dS and dV
    multiply by. Grid: blocks · B · H.

    dS multiplies by 1 / `algorithms.backward.balance`, which its δ then has already; dV by 1 / l.
    """
    # what the forward pass kept of these rows
    blocks = tl.cdiv(call.N_q, tiles.BLOCK_M)
    head = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * tiles.BLOCK_M
    rows = start + tl.arange(0, tiles.BLOCK_M)
    inside = rows < call.N_q
    at = tl.cast(head, tl.int64) * call.N_q + rows
    m = tl.load(saved.row_max + at, mask=inside, other=0.0)
    l = tl.load(saved.row_sum + at, mask=inside, other=1.0)
    lse = tl.load(saved.lse + at, mask=inside, other=0.0)
    empty = m == float("-inf")

    # δ = rowsum(dO ∘ O), O with what its residual says was rounded away; or as it was summed over P
    delta = tl.zeros([tiles.BLOCK_M], tl.float32)
    if FROM_OUT:
        batch = tl.cast(head // call.heads, tl.int64)
        query_head = tl.cast(head % call.heads, tl.int64)
        Grad_out = matrix_of(Grad_out, strides.Grad_out, batch, query_head, call.N_q, tiles.D_v,
                             tiles.VALUE_DIM, tiles.BLOCK_M, False)  # fmt: skip
        do = tile_of(Grad_out, start, tiles.D_v, tiles.VALUE_DIM, tiles.BLOCK_M, True, False,
                     tiles.EMULATED).to(tl.float32)  # fmt: skip
        offset = tl.cast(head, tl.int64) * call.N_q * tiles.D_v
        Out = Matrix(saved.out + offset, tiles.D_v, call.N_q, saved.out)
        out = tile_of(Out, start, tiles.D_v, tiles.VALUE_DIM, tiles.BLOCK_M, True, False,
                      tiles.EMULATED).to(tl.float32)  # fmt: skip
        if RESIDUAL:
            IS_BF16: tl.constexpr = saved.out.dtype.element_ty == tl.bfloat16
            unit = (((111 if IS_BF16 else 108) + binade(out, IS_BF16)) << 23).to(
                tl.float32, bitcast=True
            )
            Residual = Matrix(saved.residual + offset, tiles.D_v, call.N_q, saved.residual)
            units = tile_of(Residual, start, tiles.D_v, tiles.VALUE_DIM, tiles.BLOCK_M, True, False,
                            False)  # fmt: skip
            out += units.to(tl.float32) * unit
        delta = tl.sum(do * out, 1)
    else:
        delta = tl.load(stats.delta + at, mask=inside, other=0.0)
    if HAS_GRAD_LSE:
        # The lse of an empty row is constant, and the gradient that reaches it may be infinite or
        # NaN.
        delta -= tl.where(empty, 0.0, tl.load(Grad_lse + at, mask=inside, other=0.0))

    # the shift of the scores, and what their weights are divided by where the shift is not lse
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
        tl.store(stats.inverse + at, inverse, mask=inside)
        tl.store(stats.inverse_value + at, 1.0 / exact, mask=inside)
    else:
        shift = m + tl.log2(l)
        shift = tl.where(shift == float("-inf"), 0.0, shift)
    tl.store(stats.shift + at, shift, mask=inside)
    tl.store(stats.delta + at, delta, mask=inside)


@triton.jit
def _stats_of(stats, at):
    """The rows' numbers from element `at` on."""
    return Rows(stats.shift + at, stats.inverse + at, stats.inverse_value + at, stats.delta + at)


@triton.jit
def _row_values(values, start, N_q, BLOCK_M: tl.constexpr):
    rows = start + tl.arange(0, BLOCK_M)
    return tl.load(values + rows, mask=rows < N_q, other=0.0)


@triton.jit
def _grad_scores(weights, grad_weights, inverse, delta, slope, CAPPED: tl.constexpr,
                 DTYPE: tl.constexpr, ROUNDED: tl.constexpr, PACKED: tl.constexpr,
                 EMULATED: tl.constexpr):  # fmt: skip
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
def _query_tiles(dq, delta_sum, q, do, K, V, own, rows, low, high, mask, hashes, dropout, call,
                 switches, tiles, ROUNDED: tl.constexpr, SUM_DELTA: tl.constexpr,
                 PACKED: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """dQ, or Σ dP ∘ P if SUM_DELTA, over the key blocks from low to high.

    `own` holds the rows' numbers, `mask` starts at the block's rows.
    """
    DTYPE: tl.constexpr = K.start.dtype.element_ty
    factor = 1.0 if switches.MASK == ADDITIVE else call.scale
    for start in tl.range(low, high, tiles.BLOCK_N):
        # S = Q Kᵀ under softcap, mask and bounds, and dP = dO Vᵀ
        k = tile_of(K, start, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_N, EDGE, tiles.DESCRIPTORS,
                    tiles.EMULATED)  # fmt: skip
        v = tile_of(V, start, tiles.D_v, tiles.VALUE_DIM, tiles.BLOCK_N, EDGE, tiles.DESCRIPTORS,
                    tiles.EMULATED)  # fmt: skip
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        grad_weights = tl.dot(do, tl.trans(v), input_precision="ieee")
        columns = start + tl.arange(0, tiles.BLOCK_N)
        at = mask.start + tl.cast(start, tl.int64) * mask.column
        i, j = tl.arange(0, tiles.BLOCK_M)[:, None], tl.arange(0, tiles.BLOCK_N)[None, :]
        products, slope = seen_products(products, at, mask, i, j, rows[:, None], columns[None, :],
                                        call, switches, EDGE, EDGE)  # fmt: skip

        # a dropped weight's gradient is 0, a kept one's scaled as the weight was
        if switches.DROPPED:
            keep = kept(hashes[:, None], columns[None, :], dropout.last)
            grad_weights = tl.where(keep, grad_weights, 0.0) * dropout.scale

        # P = 2^(S − shift), and δ += rowsum(dP ∘ P) or dQ += dS K
        weights = tl.exp2(tl.fma(products, factor, -own.shift[:, None]))
        if SUM_DELTA:
            delta_sum += tl.sum(grad_weights * weights, 1)
        else:
            ds = _grad_scores(weights, grad_weights, own.inverse[:, None], own.delta[:, None],
                              slope, switches.CAPPED, DTYPE, ROUNDED, PACKED,
                              tiles.EMULATED)  # fmt: skip
            dq = tl.dot(ds, k, dq, input_precision="ieee")
    return dq, delta_sum


@triton.jit(do_not_specialize=["dropout_start", "last_dropped"])
def query_kernel(Q, K, V, Grad_out, stats, Grad_query, Mask, strides, call, dropout_start,
                 last_dropped, kept_scale, switches, tiles, ROUNDED: tl.constexpr,
                 SUM_DELTA: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """dQ of one query block; if SUM_DELTA, its δ = rowsum(dP ∘ P) instead. Grid: blocks · B · H."""
    # which block of which head, the longest first as in the forward pass
    blocks = tl.cdiv(call.N_q, tiles.BLOCK_M)
    head = tl.program_id(0) // blocks
    start = (blocks - 1 - tl.program_id(0) % blocks) * tiles.BLOCK_M
    batch = tl.cast(head // call.heads, tl.int64)
    query_head = tl.cast(head % call.heads, tl.int64)
    key_head = query_head // call.groups
    Q = matrix_of(Q, strides.Q, batch, query_head, call.N_q, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_M,
                  False)  # fmt: skip
    Grad_out = matrix_of(Grad_out, strides.Grad_out, batch, query_head, call.N_q, tiles.D_v,
                         tiles.VALUE_DIM, tiles.BLOCK_M, False)  # fmt: skip
    K = matrix_of(K, strides.K, batch, key_head, call.N_k, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_N,
                  tiles.DESCRIPTORS)  # fmt: skip
    V = matrix_of(V, strides.V, batch, key_head, call.N_k, tiles.D_v, tiles.VALUE_DIM,
                  tiles.BLOCK_N, tiles.DESCRIPTORS)  # fmt: skip

    # its Q and dO, and the rows' numbers
    offset = tl.cast(head, tl.int64) * call.N_q
    rows = start + tl.arange(0, tiles.BLOCK_M)
    q = tile_of(Q, start, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_M, True, False, tiles.EMULATED)
    do = tile_of(Grad_out, start, tiles.D_v, tiles.VALUE_DIM, tiles.BLOCK_M, True, False,
                 tiles.EMULATED)  # fmt: skip
    shift = _row_values(stats.shift + offset, start, call.N_q, tiles.BLOCK_M)
    inverse, delta = shift, shift
    if ROUNDED:
        inverse = _row_values(stats.inverse + offset, start, call.N_q, tiles.BLOCK_M)
    if not SUM_DELTA:
        delta = _row_values(stats.delta + offset, start, call.N_q, tiles.BLOCK_M)
    own = Rows(shift, inverse, inverse, delta)

    # all keys that the block may see; those that each of its rows sees need no bounds
    dq = tl.zeros([tiles.BLOCK_M, tiles.HEAD_DIM], tl.float32)
    delta_sum = tl.zeros([tiles.BLOCK_M], tl.float32)
    low, whole, rest, high = key_range(start, call, switches, tiles)
    hashes = rows
    dropout = Dropout(dropout_start, offset, last_dropped, kept_scale)
    if switches.DROPPED:
        hashes = dropout_row(dropout.start, dropout.first_row + rows)
    mask = mask_of(Mask, strides.mask, batch, query_head, start, strides.mask.row, switches.MASK)
    if switches.HAS_LEFT:
        dq, delta_sum = _query_tiles(
            dq, delta_sum, q, do, K, V, own, rows, low, tl.minimum(whole, high), mask, hashes,
            dropout, call, switches, tiles, ROUNDED, SUM_DELTA, PACKED, EDGE=True)  # fmt: skip
    dq, delta_sum = _query_tiles(
        dq, delta_sum, q, do, K, V, own, rows, whole, rest, mask, hashes,
        dropout, call, switches, tiles, ROUNDED, SUM_DELTA, PACKED, EDGE=False)  # fmt: skip
    dq, delta_sum = _query_tiles(
        dq, delta_sum, q, do, K, V, own, rows, rest, high, mask, hashes,
        dropout, call, switches, tiles, ROUNDED, SUM_DELTA, PACKED, EDGE=True)  # fmt: skip

    # dQ = scale · dS K, rounded once
    if SUM_DELTA:
        tl.store(stats.delta + offset + rows, delta_sum, mask=rows < call.N_q)
    else:
        dq = rounded(dq * call.alpha, Grad_query.dtype.element_ty, tiles.EMULATED)
        store_rows(Grad_query + offset * tiles.D, dq, start, call.N_q, tiles.D, tiles.HEAD_DIM,
                   tiles.BLOCK_M)  # fmt: skip


@triton.jit
def _key_tiles(dk, dv, k, v, Q, Grad_out, stats, columns, low, high, mask, dropout, call, switches,
               tiles, ROUNDED: tl.constexpr, PACKED: tl.constexpr,
               EDGE: tl.constexpr):  # fmt: skip
    """dK and dV over the query blocks from low to high; tiles are [keys, queries].

    `mask` starts at the block's columns.
    """
    DTYPE: tl.constexpr = Q.start.dtype.element_ty
    factor = 1.0 if switches.MASK == ADDITIVE else call.scale
    for start in tl.range(low, high, tiles.BLOCK_M):
        q = tile_of(Q, start, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_M, True, tiles.DESCRIPTORS,
                    tiles.EMULATED)  # fmt: skip
        do = tile_of(Grad_out, start, tiles.D_v, tiles.VALUE_DIM, tiles.BLOCK_M, True,
                     tiles.DESCRIPTORS, tiles.EMULATED)  # fmt: skip
        shift = _row_values(stats.shift, start, call.N_q, tiles.BLOCK_M)
        delta = _row_values(stats.delta, start, call.N_q, tiles.BLOCK_M)

        # Sᵀ = K Qᵀ under softcap, mask and bounds
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
        rows = start + tl.arange(0, tiles.BLOCK_M)
        at = mask.start + tl.cast(start, tl.int64) * mask.row
        i, j = tl.arange(0, tiles.BLOCK_M)[None, :], tl.arange(0, tiles.BLOCK_N)[:, None]
        products, slope = seen_products(products, at, mask, i, j, rows[None, :], columns[:, None],
                                        call, switches, EDGE, True)  # fmt: skip

        # P = 2^(S − shift), and dV += P̂ᵀ dO of the weights that dropout keeps
        weights = tl.exp2(tl.fma(products, factor, -shift[None, :]))
        inverse, for_value = shift, weights
        if ROUNDED:
            # bf16(bf16(w) / l) would round twice, alike in all of a diffuse row: dV takes the
            # weights before rounding.
            inverse = _row_values(stats.inverse, start, call.N_q, tiles.BLOCK_M)
            inverse_value = _row_values(stats.inverse_value, start, call.N_q, tiles.BLOCK_M)
            for_value = weights * inverse_value[None, :]
        for_value = rounded(for_value, DTYPE, tiles.EMULATED)
        if switches.DROPPED:
            hashes = dropout_row(dropout.start, dropout.first_row + rows)
            keep = kept(hashes[None, :], columns[:, None], dropout.last)
            for_value = tl.where(keep, for_value, 0.0)
        dv = tl.dot(for_value, do, dv, input_precision="ieee")

        # dP = V dOᵀ, dS, and dK += dSᵀ Q
        grad_weights = tl.dot(v, tl.trans(do), input_precision="ieee")
        if switches.DROPPED:
            grad_weights = tl.where(keep, grad_weights, 0.0) * dropout.scale
        ds = _grad_scores(weights, grad_weights, inverse[None, :], delta[None, :], slope,
                          switches.CAPPED, DTYPE, ROUNDED, PACKED, tiles.EMULATED)  # fmt: skip
        dk = tl.dot(ds, q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["dropout_start", "last_dropped"])
def key_kernel(Q, K, V, Grad_out, stats, Grad_key, Grad_value, Mask, strides, call, dropout_start,
               last_dropped, kept_scale, switches, tiles, ROUNDED: tl.constexpr,
               PACKED: tl.constexpr):  # fmt: skip
    """dK and dV of one key block, summed over the query heads that share it. Grid: blocks · B ·
    H_k.
    """
    # which block of which key head, and its K and V
    blocks = tl.cdiv(call.N_k, tiles.BLOCK_N)
    head = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * tiles.BLOCK_N
    key_heads = call.heads // call.groups
    batch = tl.cast(head // key_heads, tl.int64)
    key_head = tl.cast(head % key_heads, tl.int64)
    columns = start + tl.arange(0, tiles.BLOCK_N)
    K = matrix_of(
        K, strides.K, batch, key_head, call.N_k, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_N, False
    )
    V = matrix_of(
        V, strides.V, batch, key_head, call.N_k, tiles.D_v, tiles.VALUE_DIM, tiles.BLOCK_N, False
    )
    k = tile_of(K, start, tiles.D, tiles.HEAD_DIM, tiles.BLOCK_N, True, False, tiles.EMULATED)
    v = tile_of(V, start, tiles.D_v, tiles.VALUE_DIM, tiles.BLOCK_N, True, False, tiles.EMULATED)
    dk = tl.zeros([tiles.BLOCK_N, tiles.HEAD_DIM], tl.float32)
    dv = tl.zeros([tiles.BLOCK_N, tiles.VALUE_DIM], tl.float32)

    # all queries that may see the block, head by head; those that see all of it need no bounds
    low, whole, high = row_range(start, call, switches, tiles)
    # Wide heads and windows leave no registers for a second loop: there the mask stays on in every
    # tile.
    split: tl.constexpr = (
        switches.HAS_RIGHT and not switches.HAS_LEFT and tiles.HEAD_DIM + tiles.VALUE_DIM < 256
    )
    bounded: tl.constexpr = (switches.HAS_LEFT or switches.HAS_RIGHT) and not split
    for group in range(call.groups):
        query_head = key_head * call.groups + group
        Q_head = matrix_of(Q, strides.Q, batch, query_head, call.N_q, tiles.D, tiles.HEAD_DIM,
                           tiles.BLOCK_M, tiles.DESCRIPTORS)  # fmt: skip
        Grad_head = matrix_of(Grad_out, strides.Grad_out, batch, query_head, call.N_q, tiles.D_v,
                              tiles.VALUE_DIM, tiles.BLOCK_M, tiles.DESCRIPTORS)  # fmt: skip
        first_row = (batch * call.heads + query_head) * call.N_q
        head_stats = _stats_of(stats, first_row)
        dropout = Dropout(dropout_start, first_row, last_dropped, kept_scale)
        mask = mask_of(Mask, strides.mask, batch, query_head, start, strides.mask.column,
                       switches.MASK)  # fmt: skip
        first = low
        if split:
            first = whole
            dk, dv = _key_tiles(
                dk, dv, k, v, Q_head, Grad_head, head_stats, columns, low, whole, mask, dropout,
                call, switches, tiles, ROUNDED, PACKED, EDGE=True)  # fmt: skip
        dk, dv = _key_tiles(
            dk, dv, k, v, Q_head, Grad_head, head_stats, columns, first, high, mask, dropout,
            call, switches, tiles, ROUNDED, PACKED, EDGE=bounded)  # fmt: skip

    # dK = scale · dSᵀ Q and dV, each rounded once
    offset = tl.cast(head, tl.int64) * call.N_k
    if switches.DROPPED:
        dv *= kept_scale
    dk = rounded(dk * call.alpha, Grad_key.dtype.element_ty, tiles.EMULATED)
    dv = rounded(dv, Grad_value.dtype.element_ty, tiles.EMULATED)
    store_rows(Grad_key + offset * tiles.D, dk, start, call.N_k, tiles.D, tiles.HEAD_DIM,
               tiles.BLOCK_N)  # fmt: skip
    store_rows(Grad_value + offset * tiles.D_v, dv, start, call.N_k, tiles.D_v, tiles.VALUE_DIM,
               tiles.BLOCK_N)  # fmt: skip
