"""What the Triton kernels are given, bundled: Triton takes named tuples apart at launch and shows
them to the kernel by name.

Fields in capitals are `tl.constexpr`s: a kernel is compiled for each of their values. They live in
bundles of their own, since a bundle that a kernel makes or assigns holds run-time values only.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Axes(NamedTuple):
    """Strides of a tensor [B, H, N, D], whose last is 1, or of a mask [B, H, N, N_k], 0 where it is
    broadcast.
    """

    batch: Any
    head: Any
    row: Any
    column: Any = None


class Strides(NamedTuple):
    """How the tensors of a call lie; None: there is none."""

    Q: Axes
    K: Axes
    V: Axes
    Grad_out: Axes | None
    mask: Axes


class Matrix(NamedTuple):
    """One head of an operand, [N, D]: pointer, row stride and number of rows.

    `tiles` is its tensor descriptor where tiles are read by descriptors, else the pointer again.
    """

    start: Any
    stride: Any
    N: Any
    tiles: Any


class MaskPart(NamedTuple):
    """A mask from some element on."""

    start: Any
    row: Any
    column: Any


class Kept(NamedTuple):
    """What the forward pass keeps: `calls.Saved` as pointers."""

    out: Any
    residual: Any
    lse: Any
    row_max: Any
    row_sum: Any


class Rows(NamedTuple):
    """What the backward pass knows of every row, fp32 [B, H, N]: scores are shifted by `shift`, dS
    is P̂ (dP · inverse − δ), dV multiplies by `inverse_value`.
    """

    shift: Any
    inverse: Any
    inverse_value: Any
    delta: Any


class Numbers(NamedTuple):
    """Sizes and factors of a call."""

    heads: Any
    groups: Any  # query heads to a key head
    N_q: Any
    N_k: Any
    left: Any  # query i sees keys i − left ≤ j ≤ i + right
    right: Any
    scale: Any  # of base-2 scores, or of the softcap's tanh
    alpha: Any  # of the products in natural scores, so of dQ and dK
    cap_scale: Any  # of the products inside that tanh


class Dropout(NamedTuple):
    """What dropout needs to know a weight by its place: see `triton_scores.kept`."""

    start: Any  # the hash of the seed
    first_row: Any  # of the head, among the rows of all heads
    last: Any  # the last number that drops
    scale: Any  # of the weights that are kept


class Switches(NamedTuple):
    """What a call asks for."""

    HAS_LEFT: Any
    HAS_RIGHT: Any
    MASK: Any  # NO_MASK, BOOLEAN or ADDITIVE
    CAPPED: Any
    DROPPED: Any


class Tiles(NamedTuple):
    """How it is cut: M rows of queries, N columns of keys; widths padded to powers of two."""

    D: Any
    D_v: Any
    HEAD_DIM: Any  # D padded
    VALUE_DIM: Any  # D_v padded
    BLOCK_M: Any
    BLOCK_N: Any
    DESCRIPTORS: Any  # tiles by tensor descriptors
    EMULATED: Any  # Triton's interpreter with bf16
