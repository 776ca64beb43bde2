"""Quantizers that every machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.formats import FORMATS, BlockFormat, Format, round_to
from halfulp.operations.operation_data import BuiltIn

_KNOWN = {f.name: f for f in FORMATS if isinstance(f, BlockFormat)}


def halfulp(input: Tensor, *, format: str) -> Tensor:
    """halfulp.round_to."""
    return round_to(input.float(), format)


def by_mantissa(input: Tensor, *, format: str) -> Tensor:
    """Each element's last bit from its exponent, in fp64."""
    known = _KNOWN[format]
    x = torch.stack(torch.split(input.double(), known.block_size or input.shape[-1], -1), -2)
    largest = x.abs().amax(-1, keepdim=True)
    if known.tensor_scale:
        whole = (input.abs().amax().float() / (known.scale.max * known.element.max)).double()
        share = largest / (known.element.max * torch.where(whole == 0, 1.0, whole))
        scale = _nearest(share, known.scale) * whole
    else:
        exponent = torch.frexp(largest)[1] - 1 - known.element.max_exponent
        scale = torch.exp2(exponent.double().clamp(-127, 127))
    found = _nearest(torch.where(scale > 0, x / scale, 0.0), known.element) * scale
    return found.flatten(-2).float()


def _nearest(x: Tensor, fmt: Format) -> Tensor:
    exponent = torch.frexp(x)[1].double() - 1
    least = torch.tensor(fmt.min_normal).double().log2()
    step = torch.exp2(torch.maximum(exponent, least) - fmt.mantissa_bits)
    return ((x / step).round() * step).clamp(-fmt.max, fmt.max)


TARGETS = (
    BuiltIn("halfulp", "halfulp.round_to", halfulp),
    BuiltIn("by_mantissa", "each element's last bit from its exponent, in fp64", by_mantissa),
)
