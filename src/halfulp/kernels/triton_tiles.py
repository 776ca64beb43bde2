"""What all Triton kernels share: rounding, powers of two, tiles of operands read and written.

`EMULATED` is for Triton's interpreter, whose bf16 casts truncate and whose bf16 products multiply
bit patterns (measured in 3.6 and 3.9): there operands are fp32 values that fit bf16.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from halfulp.kernels.triton_arguments import Matrix

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """fp32 to the operand format, nearest even; in the interpreter the result stays in fp32."""
    if EMULATED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def rounded_again(x, DTYPE: tl.constexpr, PACKED: tl.constexpr, EMULATED: tl.constexpr):
    """`x` rounded to the operand format, in fp32.

    Left to the compiler, numbers are rounded one at a time by an instruction as slow as exp2;
    NVIDIA's packed one rounds two and runs where additions do. Elsewhere PACKED is False.
    """
    if PACKED and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2;"
            " shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    if PACKED and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{.reg .b32 both; .reg .f16 low, high; cvt.rn.f16x2.f32 both, $3, $2;"
            " mov.b32 {low, high}, both; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return rounded(x, DTYPE, EMULATED).to(tl.float32)


@triton.jit
def power_of_two(exponent):
    """2^exponent for an integer-valued fp32 exponent of at most 0; 0 below 2⁻¹²⁶. Exact on every
    chip.
    """
    whole = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def binade(out, IS_BF16: tl.constexpr):
    """The exponent e of |out| in [2^(e−1), 2^e), held where its residual's unit is a normal fp32
    number.
    """
    exponent = ((out.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 126
    return tl.maximum(exponent, -100 if IS_BF16 else -13)


@triton.jit
def matrix_of(X, strides, batch, head, N, D: tl.constexpr, PADDED: tl.constexpr,
              BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr):  # fmt: skip
    """One head of an operand, to be read in tiles of BLOCK rows."""
    start = X + (batch * strides.batch + head * strides.head)
    if DESCRIPTORS:
        tiles = tl.make_tensor_descriptor(
            start, shape=[N, D], strides=[strides.row, 1], block_shape=[BLOCK, PADDED]
        )
        return Matrix(start, strides.row, N, tiles)
    else:  # noqa: RET505 - both ends of one constant branch, or the compiler asks for one type
        return Matrix(start, strides.row, N, start)


@triton.jit
def tile_of(matrix, start, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
            EDGE: tl.constexpr, DESCRIPTORS: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """Rows start … start + BLOCK as an operand [BLOCK, PADDED]; 0 beyond the matrix's edges."""
    if DESCRIPTORS:
        tile = matrix.tiles.load([start, 0])
    else:
        row, column = tl.arange(0, BLOCK), tl.arange(0, PADDED)
        first = matrix.start + tl.cast(start, tl.int64) * matrix.stride
        at = first + row[:, None] * matrix.stride + column[None, :]
        if EDGE and D != PADDED:
            inside = (start + row[:, None] < matrix.N) & (column[None, :] < D)
            tile = tl.load(at, mask=inside, other=0.0)
        elif EDGE:
            tile = tl.load(at, mask=start + row[:, None] < matrix.N, other=0.0)
        elif D != PADDED:
            tile = tl.load(at, mask=column[None, :] < D, other=0.0)
        else:
            tile = tl.load(at)
    return tile.to(tl.float32) if EMULATED else tile


@triton.jit
def store_rows(Base, tile, start, N, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Rows start … of a contiguous [N, D]."""
    row, column = start + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    at = Base + tl.cast(start, tl.int64) * D + tl.arange(0, BLOCK)[:, None] * D + column[None, :]
    tl.store(at, tile.to(Base.dtype.element_ty), mask=(row[:, None] < N) & (column[None, :] < D))
