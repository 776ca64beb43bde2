"""The Triton kernels: one forward, four backward (row statistics, exact δ, dQ, dK and dV), every recipe a switch.

Recipes share one source so that their speed and accuracy compare like with like: `SHIFT` and `ROUNDED` are compile-time
constants, and what a recipe does not use is not compiled. No atomics: a gradient element is summed by one program, in
an order that the shape alone fixes, so runs repeat bit for bit.

Every score enters as fma(qk, scale, −shift): one rounding and the same bits in all kernels, which is what lets the
backward pass of "halfulp" speak of the same rounded weights as the forward pass. `EMULATED` is for Triton's
interpreter, whose bf16 casts truncate and whose bf16 products multiply bit patterns (measured in 3.6 and 3.9): there
operands are fp32 values that fit bf16.

Shapes: M rows of queries, N columns of keys; HEAD_DIM and VALUE_DIM are D and D_v padded to powers of two. Key j is
visible to query i if i − left ≤ j ≤ i + right. The scale must be positive: the row maximum is taken before it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

MAXIMUM, INTEGER, STABILIZED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BETA = tl.constexpr(7.0)  # of Qiu & Yao's shift for a repeated positive maximum; a negative one is shifted by 0
LOG2_E = tl.constexpr(1.4426950408889634)
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding and subtracting it rounds to the nearest even integer


@triton.jit
def _round(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """fp32 to the operand format, nearest even; in the interpreter the result stays in fp32."""
    if EMULATED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _round_again(x, DTYPE: tl.constexpr, PACKED: tl.constexpr, EMULATED: tl.constexpr):
    """`x` rounded to the operand format, in fp32.

    Left to the compiler, numbers are rounded one at a time by an instruction as slow as exp2; NVIDIA's packed one
    rounds two and runs where additions do. Elsewhere PACKED is False.
    """
    if PACKED and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    if PACKED and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{.reg .b32 both; .reg .f16 low, high; cvt.rn.f16x2.f32 both, $3, $2; mov.b32 {low, high}, both;"
            " cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return _round(x, DTYPE, EMULATED).to(tl.float32)


@triton.jit
def _operand(x, EMULATED: tl.constexpr):
    return x.to(tl.float32) if EMULATED else x


@triton.jit
def _power_of_two(exponent):
    """2^exponent for an integer-valued fp32 exponent of at most 0; 0 below 2⁻¹²⁶. Exact on every chip."""
    whole = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _binade(out, IS_BF16: tl.constexpr):
    """The exponent e of |out| in [2^(e−1), 2^e), held where its residual's unit is a normal fp32 number."""
    exponent = ((out.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 126
    return tl.maximum(exponent, -100 if IS_BF16 else -13)


@triton.jit
def _rows_of(Base, Descriptor, start, stride, N, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
             MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """Rows start … start + BLOCK of one head's [N, D], as an operand [BLOCK, PADDED]; 0 beyond its edges."""
    if DESCRIPTORS:
        tile = Descriptor.load([start, 0])
    else:
        row, column = tl.arange(0, BLOCK), tl.arange(0, PADDED)
        at = Base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
        if MASKED and D != PADDED:
            tile = tl.load(at, mask=(start + row[:, None] < N) & (column[None, :] < D), other=0.0)
        elif MASKED:
            tile = tl.load(at, mask=start + row[:, None] < N, other=0.0)
        elif D != PADDED:
            tile = tl.load(at, mask=column[None, :] < D, other=0.0)
        else:
            tile = tl.load(at)
    return _operand(tile, EMULATED)


@triton.jit
def _descriptor(Base, stride, N, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr):
    if DESCRIPTORS:
        return tl.make_tensor_descriptor(Base, shape=[N, D], strides=[stride, 1], block_shape=[BLOCK, PADDED])
    else:  # noqa: RET505 - both ends of one constant branch, or the compiler asks for one type
        return Base


@triton.jit
def _store(Base, tile, start, N, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Rows start … of a contiguous [N, D]."""
    row, column = start + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    at = Base + tl.cast(start, tl.int64) * D + tl.arange(0, BLOCK)[:, None] * D + column[None, :]
    tl.store(at, tile.to(Base.dtype.element_ty), mask=(row[:, None] < N) & (column[None, :] < D))


@triton.jit
def _hide(products, rows, columns, N_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """−inf where row i may not see column j; `rows` and `columns` broadcast to the tile."""
    visible = columns < N_k
    if HAS_RIGHT:
        visible &= columns <= rows + right
    if HAS_LEFT:
        visible &= columns >= rows - left
    return tl.where(visible, products, float("-inf"))


@triton.jit
def _key_range(start, N_k, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
               HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Columns of one query block: [low, whole) and [rest, high) need a mask, [whole, rest) is visible to all rows."""
    low, whole, high, rest = 0, 0, N_k, N_k // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        high = tl.minimum(high, tl.maximum(start + BLOCK_M + right, 0))
        rest = tl.minimum(rest, tl.maximum(start + right + 1, 0) // BLOCK_N * BLOCK_N)
    if HAS_LEFT:
        low = tl.maximum(start - left, 0) // BLOCK_N * BLOCK_N
        whole = tl.maximum(low, tl.cdiv(tl.maximum(start + BLOCK_M - 1 - left, 0), BLOCK_N) * BLOCK_N)
        rest = tl.maximum(rest, whole)
    return low, whole, rest, high


@triton.jit
def _row_range(start, N_q, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
               HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Rows [low, high) of one key block; without a left bound [whole, high) needs no mask: rows past N_q are 0."""
    low, whole, high, end = 0, 0, N_q, tl.cdiv(N_q, BLOCK_M) * BLOCK_M
    if HAS_RIGHT:
        low = tl.minimum(tl.maximum(start - right, 0) // BLOCK_M * BLOCK_M, end)
        whole = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N - 1 - right, 0), BLOCK_M) * BLOCK_M, end)
        whole = tl.maximum(whole, low)
    if HAS_LEFT:
        high = tl.minimum(high, tl.maximum(start + BLOCK_N + left, 0))
    return low, whole, high


@triton.jit
def _forward_tiles(acc, m, l, l_rounded, q, K, V, K_tiles, V_tiles, k_n, v_n, rows, low, high, N_k, left, right, scale,
                   D: tl.constexpr, D_v: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                   BLOCK_N: tl.constexpr, SHIFT: tl.constexpr, ROUNDED: tl.constexpr, HAS_LEFT: tl.constexpr,
                   HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
                   EMULATED: tl.constexpr):  # fmt: skip
    """Online softmax over the key blocks from low to high."""
    for start in tl.range(low, high, BLOCK_N):
        k = _rows_of(K, K_tiles, start, k_n, N_k, D, HEAD_DIM, BLOCK_N, MASKED, DESCRIPTORS, EMULATED)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)
            products = _hide(products, rows[:, None], columns[None, :], N_k, left, right, HAS_LEFT, HAS_RIGHT)
        largest = tl.max(products, 1)
        top = largest * scale
        if SHIFT == INTEGER:
            top = tl.ceil(top)  # every rescale is then a power of two, which commutes with rounding
        elif SHIFT == STABILIZED:
            repeated = (tl.sum((products >= largest[:, None]).to(tl.int32), 1) > 1) & (largest > float("-inf"))
            top = tl.where(repeated, tl.where(top > 0, top * BETA, 0.0), top)
        m_new = tl.maximum(m, top)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(tl.fma(products, scale, -shift[:, None]))
        operand = _round(weights, V.dtype.element_ty, EMULATED)
        rescale = _power_of_two(m - shift) if SHIFT == INTEGER else tl.exp2(m - shift)
        if ROUNDED:
            # The tensor cores sum the rounded weights: no unpacking, and V = const gives O = const bit for bit.
            ones = tl.full([BLOCK_N, 8], 1.0, operand.dtype)
            l_rounded = tl.dot(operand, ones, l_rounded * rescale[:, None], input_precision="ieee")
        l = l * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        v = _rows_of(V, V_tiles, start, v_n, N_k, D_v, VALUE_DIM, BLOCK_N, MASKED, DESCRIPTORS, EMULATED)
        acc = tl.dot(operand, v, acc, input_precision="ieee")
        m = m_new
    return acc, m, l, l_rounded


@triton.jit
def forward_kernel(Q, K, V, Out, Residual, Lse, Row_max, Row_sum,
                   q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, heads, groups, N_q, N_k, left, right, scale,
                   D: tl.constexpr, D_v: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHIFT: tl.constexpr, ROUNDED: tl.constexpr,
                   RESIDUAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                   DESCRIPTORS: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """O, its residual, lse, m and l of one query block; `scale` is that of base-2 scores. Grid: blocks · B · H."""
    blocks = tl.cdiv(N_q, BLOCK_M)
    head = tl.program_id(0) // blocks
    # The last query block sees the most keys, so under a causal mask it goes first.
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    batch, query_head = tl.cast(head // heads, tl.int64), tl.cast(head % heads, tl.int64)
    K += batch * k_b + query_head // groups * k_h
    V += batch * v_b + query_head // groups * v_h
    rows = start + tl.arange(0, BLOCK_M)
    Q += batch * q_b + query_head * q_h
    q = _rows_of(Q, Q, start, q_n, N_q, D, HEAD_DIM, BLOCK_M, True, False, EMULATED)
    K_tiles = _descriptor(K, k_n, N_k, D, HEAD_DIM, BLOCK_N, DESCRIPTORS)
    V_tiles = _descriptor(V, v_n, N_k, D_v, VALUE_DIM, BLOCK_N, DESCRIPTORS)

    acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    l_rounded = tl.zeros([BLOCK_M, 8], tl.float32)  # eight equal columns, the least that tensor cores make
    low, whole, rest, high = _key_range(start, N_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    if HAS_LEFT:
        acc, m, l, l_rounded = _forward_tiles(
            acc, m, l, l_rounded, q, K, V, K_tiles, V_tiles, k_n, v_n, rows, low, tl.minimum(whole, high), N_k, left,
            right, scale, D, D_v, HEAD_DIM, VALUE_DIM, BLOCK_N, SHIFT, ROUNDED, HAS_LEFT, HAS_RIGHT, True, DESCRIPTORS,
            EMULATED)  # fmt: skip
    acc, m, l, l_rounded = _forward_tiles(
        acc, m, l, l_rounded, q, K, V, K_tiles, V_tiles, k_n, v_n, rows, whole, rest, N_k, left, right, scale, D, D_v,
        HEAD_DIM, VALUE_DIM, BLOCK_N, SHIFT, ROUNDED, HAS_LEFT, HAS_RIGHT, False, DESCRIPTORS, EMULATED)  # fmt: skip
    acc, m, l, l_rounded = _forward_tiles(
        acc, m, l, l_rounded, q, K, V, K_tiles, V_tiles, k_n, v_n, rows, rest, high, N_k, left, right, scale, D, D_v,
        HEAD_DIM, VALUE_DIM, BLOCK_N, SHIFT, ROUNDED, HAS_LEFT, HAS_RIGHT, True, DESCRIPTORS, EMULATED)  # fmt: skip

    lse = (m + tl.log2(l)) / LOG2_E
    if ROUNDED:
        l = tl.max(l_rounded, 1)
    # 0 / 1 in a row with nothing to attend to. A sum that underflowed elsewhere stays 0 and shows as NaN.
    exact_out = acc / tl.where(m == float("-inf"), 1.0, l)[:, None]
    out = _round(exact_out, Out.dtype.element_ty, EMULATED)
    offset = tl.cast(head, tl.int64) * N_q
    _store(Out + offset * D_v, out, start, N_q, D_v, VALUE_DIM, BLOCK_M)
    if RESIDUAL:
        IS_BF16: tl.constexpr = Out.dtype.element_ty == tl.bfloat16
        out32 = out.to(tl.float32)
        per_unit = (((143 if IS_BF16 else 146) - _binade(out32, IS_BF16)) << 23).to(tl.float32, bitcast=True)
        units = ((exact_out - out32) * per_unit + TO_INTEGER) - TO_INTEGER
        units = tl.minimum(tl.maximum(units, -128.0), 127.0)
        _store(Residual + offset * D_v, units, start, N_q, D_v, VALUE_DIM, BLOCK_M)
    tl.store(Lse + offset + rows, lse, mask=rows < N_q)
    tl.store(Row_max + offset + rows, m, mask=rows < N_q)
    tl.store(Row_sum + offset + rows, l, mask=rows < N_q)


@triton.jit
def rows_kernel(Out, Residual, Grad_out, Grad_lse, Lse, Row_max, Row_sum, Shift, Inverse, Inverse_value, Delta,
                do_b, do_h, do_n, heads, N_q, D_v: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
                ROUNDED: tl.constexpr, RESIDUAL: tl.constexpr, FROM_OUT: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
                EMULATED: tl.constexpr):  # fmt: skip
    """What the backward pass needs of every row: its shift, 1 / l (twice if ROUNDED), δ − dLSE (over l if ROUNDED)."""
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
        do = _rows_of(Grad_out, Out, start, do_n, N_q, D_v, VALUE_DIM, BLOCK_M, True, False, EMULATED).to(tl.float32)
        out = _rows_of(Out + offset, Out, start, D_v, N_q, D_v, VALUE_DIM, BLOCK_M, True, False, EMULATED)
        out = out.to(tl.float32)
        if RESIDUAL:
            IS_BF16: tl.constexpr = Out.dtype.element_ty == tl.bfloat16
            unit = (((111 if IS_BF16 else 108) + _binade(out, IS_BF16)) << 23).to(tl.float32, bitcast=True)
            units = _rows_of(Residual + offset, Out, start, D_v, N_q, D_v, VALUE_DIM, BLOCK_M, True, False, False)
            out += units.to(tl.float32) * unit
        delta = tl.sum(do * out, 1)
    else:
        delta = tl.load(Delta + at, mask=inside, other=0.0)
    if HAS_GRAD_LSE:
        # The lse of an empty row is constant, and the gradient that reaches it may be infinite or NaN.
        delta -= tl.where(empty, 0.0, tl.load(Grad_lse + at, mask=inside, other=0.0))
    if ROUNDED:
        shift = tl.where(empty, 0.0, m)
        inverse = 1.0 / tl.where(empty, 1.0, l)
        delta *= inverse
        tl.store(Inverse + at, inverse, mask=inside)
        exact = tl.exp2(lse * LOG2_E - shift)
        tl.store(Inverse_value + at, 1.0 / tl.where(empty, 1.0, exact), mask=inside)
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
def _grad_scores(weights, grad_weights, inverse, delta, DTYPE: tl.constexpr, ROUNDED: tl.constexpr,
                 PACKED: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """dS = P ∘ (dP − δ) as an operand; if ROUNDED, with the forward pass's rounded weights and l inside one fma."""
    if ROUNDED:
        same = _round_again(weights, DTYPE, PACKED, EMULATED)
        return _round(same * tl.fma(grad_weights, inverse, -delta), DTYPE, EMULATED)
    return _round(weights * (grad_weights - delta), DTYPE, EMULATED)


@triton.jit
def _query_tiles(dq, delta_sum, q, do, K, V, K_tiles, V_tiles, k_n, v_n, shift, inverse, delta, rows, low, high, N_k,
                 left, right, scale, D: tl.constexpr, D_v: tl.constexpr, HEAD_DIM: tl.constexpr,
                 VALUE_DIM: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr, HAS_LEFT: tl.constexpr,
                 HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr, SUM_DELTA: tl.constexpr, DESCRIPTORS: tl.constexpr,
                 PACKED: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """dQ, or Σ dP ∘ P if SUM_DELTA, over the key blocks from low to high."""
    for start in tl.range(low, high, BLOCK_N):
        k = _rows_of(K, K_tiles, start, k_n, N_k, D, HEAD_DIM, BLOCK_N, MASKED, DESCRIPTORS, EMULATED)
        v = _rows_of(V, V_tiles, start, v_n, N_k, D_v, VALUE_DIM, BLOCK_N, MASKED, DESCRIPTORS, EMULATED)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        grad_weights = tl.dot(do, tl.trans(v), input_precision="ieee")
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)
            products = _hide(products, rows[:, None], columns[None, :], N_k, left, right, HAS_LEFT, HAS_RIGHT)
        weights = tl.exp2(tl.fma(products, scale, -shift[:, None]))
        if SUM_DELTA:
            delta_sum += tl.sum(grad_weights * weights, 1)
        else:
            ds = _grad_scores(
                weights, grad_weights, inverse[:, None], delta[:, None], K.dtype.element_ty, ROUNDED, PACKED, EMULATED
            )
            dq = tl.dot(ds, k, dq, input_precision="ieee")
    return dq, delta_sum


@triton.jit
def query_kernel(Q, K, V, Grad_out, Shift, Inverse, Delta, Grad_query,
                 q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, heads, groups, N_q, N_k, left, right,
                 scale, alpha, D: tl.constexpr, D_v: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr, SUM_DELTA: tl.constexpr,
                 HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, DESCRIPTORS: tl.constexpr, PACKED: tl.constexpr,
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
    q = _rows_of(Q, Q, start, q_n, N_q, D, HEAD_DIM, BLOCK_M, True, False, EMULATED)
    do = _rows_of(Grad_out, Q, start, do_n, N_q, D_v, VALUE_DIM, BLOCK_M, True, False, EMULATED)
    K_tiles = _descriptor(K, k_n, N_k, D, HEAD_DIM, BLOCK_N, DESCRIPTORS)
    V_tiles = _descriptor(V, v_n, N_k, D_v, VALUE_DIM, BLOCK_N, DESCRIPTORS)
    shift = _row_values(Shift + offset, start, N_q, BLOCK_M)
    inverse, delta = shift, shift
    if ROUNDED:
        inverse = _row_values(Inverse + offset, start, N_q, BLOCK_M)
    if not SUM_DELTA:
        delta = _row_values(Delta + offset, start, N_q, BLOCK_M)

    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    delta_sum = tl.zeros([BLOCK_M], tl.float32)
    low, whole, rest, high = _key_range(start, N_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    if HAS_LEFT:
        dq, delta_sum = _query_tiles(
            dq, delta_sum, q, do, K, V, K_tiles, V_tiles, k_n, v_n, shift, inverse, delta, rows, low,
            tl.minimum(whole, high), N_k, left, right, scale, D, D_v, HEAD_DIM, VALUE_DIM, BLOCK_N, ROUNDED, HAS_LEFT,
            HAS_RIGHT, True, SUM_DELTA, DESCRIPTORS, PACKED, EMULATED)  # fmt: skip
    dq, delta_sum = _query_tiles(
        dq, delta_sum, q, do, K, V, K_tiles, V_tiles, k_n, v_n, shift, inverse, delta, rows, whole, rest, N_k, left,
        right, scale, D, D_v, HEAD_DIM, VALUE_DIM, BLOCK_N, ROUNDED, HAS_LEFT, HAS_RIGHT, False, SUM_DELTA,
        DESCRIPTORS, PACKED, EMULATED)  # fmt: skip
    dq, delta_sum = _query_tiles(
        dq, delta_sum, q, do, K, V, K_tiles, V_tiles, k_n, v_n, shift, inverse, delta, rows, rest, high, N_k, left,
        right, scale, D, D_v, HEAD_DIM, VALUE_DIM, BLOCK_N, ROUNDED, HAS_LEFT, HAS_RIGHT, True, SUM_DELTA,
        DESCRIPTORS, PACKED, EMULATED)  # fmt: skip
    if SUM_DELTA:
        tl.store(Delta + offset + rows, delta_sum, mask=rows < N_q)
    else:
        dq = _round(dq * alpha, Grad_query.dtype.element_ty, EMULATED)
        _store(Grad_query + offset * D, dq, start, N_q, D, HEAD_DIM, BLOCK_M)


@triton.jit
def _key_tiles(dk, dv, k, v, Q, Grad_out, Q_tiles, Grad_tiles, q_n, do_n, Shift, Inverse, Inverse_value, Delta,
               columns, low, high, N_q, N_k, left, right, scale, D: tl.constexpr, D_v: tl.constexpr,
               HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, ROUNDED: tl.constexpr,
               HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
               PACKED: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """dK and dV over the query blocks from low to high; tiles are [keys, queries]."""
    DTYPE: tl.constexpr = Q.dtype.element_ty
    for start in tl.range(low, high, BLOCK_M):
        q = _rows_of(Q, Q_tiles, start, q_n, N_q, D, HEAD_DIM, BLOCK_M, True, DESCRIPTORS, EMULATED)
        do = _rows_of(Grad_out, Grad_tiles, start, do_n, N_q, D_v, VALUE_DIM, BLOCK_M, True, DESCRIPTORS, EMULATED)
        shift = _row_values(Shift, start, N_q, BLOCK_M)
        delta = _row_values(Delta, start, N_q, BLOCK_M)
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
        if MASKED:
            rows = start + tl.arange(0, BLOCK_M)
            products = _hide(products, rows[None, :], columns[:, None], N_k, left, right, HAS_LEFT, HAS_RIGHT)
        weights = tl.exp2(tl.fma(products, scale, -shift[None, :]))
        inverse, for_value = shift, weights
        if ROUNDED:
            # bf16(bf16(w) / l) would round twice, alike in all of a diffuse row: dV takes the weights before rounding.
            inverse = _row_values(Inverse, start, N_q, BLOCK_M)
            for_value = weights * _row_values(Inverse_value, start, N_q, BLOCK_M)[None, :]
        dv = tl.dot(_round(for_value, DTYPE, EMULATED), do, dv, input_precision="ieee")
        grad_weights = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = _grad_scores(weights, grad_weights, inverse[None, :], delta[None, :], DTYPE, ROUNDED, PACKED, EMULATED)
        dk = tl.dot(ds, q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def key_kernel(Q, K, V, Grad_out, Shift, Inverse, Inverse_value, Delta, Grad_key, Grad_value,
               q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, heads, groups, N_q, N_k, left, right,
               scale, alpha, D: tl.constexpr, D_v: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr, HAS_LEFT: tl.constexpr,
               HAS_RIGHT: tl.constexpr, DESCRIPTORS: tl.constexpr, PACKED: tl.constexpr,
               EMULATED: tl.constexpr):  # fmt: skip
    """dK and dV of one key block, summed over the query heads that share it. Grid: blocks · B · H_k."""
    blocks = tl.cdiv(N_k, BLOCK_N)
    key_head = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK_N
    key_heads = heads // groups
    batch, own = tl.cast(key_head // key_heads, tl.int64), tl.cast(key_head % key_heads, tl.int64)
    columns = start + tl.arange(0, BLOCK_N)
    K += batch * k_b + own * k_h
    V += batch * v_b + own * v_h
    k = _rows_of(K, K, start, k_n, N_k, D, HEAD_DIM, BLOCK_N, True, False, EMULATED)
    v = _rows_of(V, V, start, v_n, N_k, D_v, VALUE_DIM, BLOCK_N, True, False, EMULATED)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)
    low, whole, high = _row_range(start, N_q, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    for group in range(groups):
        query_head = own * groups + group
        Q_head = Q + batch * q_b + query_head * q_h
        Grad_head = Grad_out + batch * do_b + query_head * do_h
        Q_tiles = _descriptor(Q_head, q_n, N_q, D, HEAD_DIM, BLOCK_M, DESCRIPTORS)
        Grad_tiles = _descriptor(Grad_head, do_n, N_q, D_v, VALUE_DIM, BLOCK_M, DESCRIPTORS)
        at = (batch * heads + query_head) * N_q
        # Wide heads and windows leave no registers for a second loop: there the mask stays on in every tile.
        split: tl.constexpr = HAS_RIGHT and not HAS_LEFT and HEAD_DIM + VALUE_DIM < 256
        if split:
            dk, dv = _key_tiles(
                dk, dv, k, v, Q_head, Grad_head, Q_tiles, Grad_tiles, q_n, do_n, Shift + at, Inverse + at,
                Inverse_value + at, Delta + at, columns, low, whole, N_q, N_k, left, right, scale, D, D_v, HEAD_DIM,
                VALUE_DIM, BLOCK_M, ROUNDED, HAS_LEFT, HAS_RIGHT, True, DESCRIPTORS, PACKED, EMULATED)  # fmt: skip
        first = low
        if split:
            first = whole
        dk, dv = _key_tiles(
            dk, dv, k, v, Q_head, Grad_head, Q_tiles, Grad_tiles, q_n, do_n, Shift + at, Inverse + at,
            Inverse_value + at, Delta + at, columns, first, high, N_q, N_k, left, right, scale, D, D_v, HEAD_DIM,
            VALUE_DIM, BLOCK_M, ROUNDED, HAS_LEFT, HAS_RIGHT, (HAS_LEFT or HAS_RIGHT) and not split, DESCRIPTORS,
            PACKED, EMULATED)  # fmt: skip
    offset = tl.cast(key_head, tl.int64) * N_k
    dk, dv = _round(dk * alpha, K.dtype.element_ty, EMULATED), _round(dv, V.dtype.element_ty, EMULATED)
    _store(Grad_key + offset * D, dk, start, N_k, D, HEAD_DIM, BLOCK_N)
    _store(Grad_value + offset * D_v, dv, start, N_k, D_v, VALUE_DIM, BLOCK_N)
