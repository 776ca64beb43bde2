"""NF4's round trip (QLoRA, arXiv 2305.14314, equation 4): the nearest of 16 quantiles of a normal
distribution, times the largest magnitude of each block of 64.
"""

import torch

from halfulp.operations import Operand, Output, Sizes

SIGNATURE = "nf4(input)"
OPERANDS = (Operand("input", "T D", differentiable=False),)
RESULTS = (Output("output", "T D", differentiable=False),)
SIZES = (Sizes.given(T=16, D=128), Sizes.given(T=16, D=512))
OPTIONS = {}

# bitsandbytes' create_normal_map: 8 values above 0, 7 below, the outermost probability 0.9677083.
_OUTER = 0.9677083
_ABOVE = torch.special.ndtri(torch.linspace(_OUTER, 0.5, 9, dtype=torch.float64))[:-1]
_BELOW = -torch.special.ndtri(torch.linspace(_OUTER, 0.5, 8, dtype=torch.float64))[:-1]
CODES = torch.cat([_BELOW, torch.zeros(1, dtype=torch.float64), _ABOVE.flip(0)]) / _ABOVE[0]


def define(step, x, _):
    blocks = x["input"].double().unflatten(-1, (-1, 64))
    largest = blocks.abs().amax(-1, keepdim=True)
    share = blocks / largest.clamp_min(torch.finfo(torch.float64).tiny)
    code = (share[..., None] - CODES).abs().argmin(-1)
    found = (CODES[code] * largest).flatten(-2)
    return {"output": step("values", found.to(x["input"].dtype))}


def arguments(x, _):
    return (x["input"],), {}
