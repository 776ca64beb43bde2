"""What passes through the seam of a definition."""

import pytest
import torch

from halfulp.formats import parse_format, round_to
from halfulp.operations import Rounding


def bits(x):
    return x.view({torch.float32: torch.int32, torch.float64: torch.int64}[x.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "nvfp4"])
def test_blocks_that_were_rounded_before_are_rounded_to_the_same_bits(name, dtype):
    """Of numbers that differ in one, in the sign of a zero, in their order, in their strides."""
    fmt, chance = parse_format(name), torch.Generator().manual_seed(0)
    x = torch.randn(6, 64, generator=chance).to(dtype)
    x[1, 3], x[5] = 0.0, torch.nan
    other = x.clone()
    other[2, 7] *= 2
    negative = x.clone()
    negative[1, 3] = -0.0
    change = Rounding("", {"blocks": fmt}).change("bfloat16")
    for one in (x, other, negative, x, x.flip(0), x.T.contiguous().T, x.to(torch.float64), x):
        found = change("blocks", one)
        assert torch.equal(bits(found), bits(round_to(one, fmt)))
        found.zero_()  # what is kept is nobody else's
