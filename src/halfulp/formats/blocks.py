"""Block-scaled formats: small numbers that share a scale.

A four-bit number has a range of twelve to one; what makes it usable is a scale per block of
neighbors along the last dimension. The OCP microscaling formats take a power of two from the
largest exponent in the block; NVFP4 takes an 8-bit float from the largest magnitude and a float32
scale for the tensor.

Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6; NVIDIA, "Pretraining
Large Language Models with NVFP4" (2025), appendix on quantization.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.formats.format import E2M1, E2M3, E3M2, OCP_E4M3, OCP_E5M2, Format, Rounding
from halfulp.formats.general import power_of_two_below, round_general

# The scale of the MX formats: an exponent without sign or fraction. Its code 0 is 2**-127 and not
# zero, which `Format` does not say; the exponent is clamped here instead of being rounded to this
# format.
E8M0: Final = Format("e8m0", 8, 0, specials="nan_only", overflow="saturate")
_E8M0_EXPONENT: Final = 127

# Numbers worked on together on the CPU: a few float64 copies of them fit into the second-level
# cache.
_CHUNK: Final = 2**14


@dataclass(frozen=True)
class BlockFormat:
    """A format whose elements share a scale per block along the last dimension; a last block may be
    short.

    The value of an element is element * block scale (* tensor scale), exactly, brought to the
    container's dtype. A block that holds a NaN or an infinity becomes NaN as a whole, for its scale
    does; with a tensor scale, the tensor.
    """

    name: str  # how it is printed and parsed
    element: Format  # what each number is rounded to after the scale is taken out; it saturates
    # neighbors along the last dimension that share a scale; None: all of them
    block_size: int | None
    scale: Format  # format of the scale of a block: E8M0 (powers of two) or a float
    # a float32 scale for the whole tensor, so that the block scales use their range
    tensor_scale: bool = False

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(
                f"block_size={self.block_size} is not accepted; accepted: a positive integer, or"
                " None for the whole last dimension"
            )
        if self.element.overflow != "saturate":
            raise ValueError(
                f"element={self.element} must saturate; accepted: a format with overflow='saturate'"
            )

    @property
    def bits(self) -> int:
        """Width of an element, its share of the scales left out."""
        return self.element.bits

    def holds(self, dtype: torch.dtype) -> bool:  # noqa: ARG002 (the question asked of every format)
        """Return False: no dtype passes unchanged, since the values depend on the neighbors."""
        return False

    def __str__(self) -> str:
        return self.name


MXFP8_E4M3: Final = BlockFormat("mxfp8_e4m3", OCP_E4M3, 32, E8M0)
MXFP8_E5M2: Final = BlockFormat("mxfp8_e5m2", OCP_E5M2.with_(overflow="saturate"), 32, E8M0)
MXFP6_E3M2: Final = BlockFormat("mxfp6_e3m2", E3M2, 32, E8M0)
MXFP6_E2M3: Final = BlockFormat("mxfp6_e2m3", E2M3, 32, E8M0)
MXFP4: Final = BlockFormat("mxfp4", E2M1, 32, E8M0)
NVFP4: Final = BlockFormat("nvfp4", E2M1, 16, OCP_E4M3, tensor_scale=True)

BLOCK_FORMATS: Final = (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, NVFP4)


def round_blocks(x: Tensor, fmt: BlockFormat, rounding: Rounding, seed: int, offset: int) -> Tensor:
    """Return x [..., N] (float32 or float64, detached) rounded to fmt, a new tensor of the same
    shape and dtype.
    """
    if x.numel() == 0:
        return x.clone()
    length = x.shape[-1] if x.dim() else 1
    if fmt.block_size is not None and length % fmt.block_size == 0:
        # no row ends inside a block, so any number of blocks can be worked on together
        length = fmt.block_size
    rows = x.reshape(-1, length).contiguous()  # a transposed x may be viewed as rows, too
    tensor_scale = _tensor_scale(x, fmt) if fmt.tensor_scale else None
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    count = max(_CHUNK // length, 1) if x.device.type == "cpu" else len(rows)
    for part, y in zip(torch.split(rows, count), torch.split(out, count), strict=True):
        y.copy_(_round_rows(part.double(), fmt, tensor_scale, rounding, seed, offset))
        offset += part.numel()
    return out.view(x.shape)


def _round_rows(
    x: Tensor,
    fmt: BlockFormat,
    tensor_scale: Tensor | None,
    rounding: Rounding,
    seed: int,
    offset: int,
) -> Tensor:
    """Return float64 x [rows, N] rounded; in float64 the product of an element and its scales is
    exact.
    """
    length = x.shape[-1]
    size = fmt.block_size or length
    missing = -length % size
    blocks = (functional.pad(x, (0, missing)) if missing else x).view(len(x), -1, size)
    scale = _block_scale(blocks.abs().amax(-1, keepdim=True), fmt, tensor_scale)
    scaled = _quotient(blocks, scale)
    if rounding in ("up", "down"):  # which see the sign of a number whose quotient underflows
        scaled = torch.where(scaled == 0, blocks, scaled)
    scaled = scaled.flatten(1)
    if not missing:
        element = round_general(scaled, fmt.element, rounding, seed, offset)
        return element.view(blocks.shape).mul_(scale).view(x.shape)
    # The padding is cut off before rounding, so that position i means element i of x.
    element = round_general(scaled[:, :length].contiguous(), fmt.element, rounding, seed, offset)
    return element.mul_(scale.expand(blocks.shape).flatten(1)[:, :length])


def _tensor_scale(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Return the tensor's scale as float64: the float32 that brings the largest block scale to its
    format's max.
    """
    # An infinite scale makes every block's a zero, and their product NaN.
    return (x.abs().amax().float() / (fmt.scale.max * fmt.element.max)).double()


def _block_scale(largest: Tensor, fmt: BlockFormat, tensor_scale: Tensor | None) -> Tensor:
    """Return the scale of every block, the tensor's included, from the largest magnitude in each;
    both float64.
    """
    if fmt.scale.mantissa_bits == 0:
        # the largest magnitude's power of two over the element's own largest one (MX, section 6)
        below = power_of_two_below(largest) * 2.0**-fmt.element.max_exponent
        scale = below.clamp(2.0**-_E8M0_EXPONENT, 2.0**_E8M0_EXPONENT)
        return scale.masked_fill(~largest.isfinite(), torch.nan)
    if tensor_scale is None:
        tensor_scale = torch.ones((), dtype=largest.dtype, device=largest.device)
    ratio = _quotient(
        largest.masked_fill(largest.isinf(), torch.nan), fmt.element.max * tensor_scale
    )
    return round_general(ratio, fmt.scale, "nearest_even", 0, 0) * tensor_scale


def _quotient(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return numbers / scale, both float64, a zero where the scale is zero.

    Rounding the quotient, which is rounded itself, is safe: with a scale of at most 28 bits, scale
    times any number or midpoint of the element format is a float64, and a float64 beside it has a
    quotient that stays beside.
    """
    return numbers / torch.where(scale == 0, torch.inf, scale)
