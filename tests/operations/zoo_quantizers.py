"""Quantizers and stochastic rounding with one planted fault each, and some without one that are
written differently.
"""

import torch

from halfulp.formats import FORMATS, BlockFormat, round_to
from tests.operations.hand_written import OperationKernel

KNOWN = {f.name: f for f in FORMATS if isinstance(f, BlockFormat)}


def numbers(fmt):
    """The numbers of a format that are not negative, in order, each by its code."""
    steps = 2**fmt.mantissa_bits
    found = [code * fmt.min_normal / steps for code in range(steps)]
    binade = 0
    while found[-1] < fmt.max:
        found += [fmt.min_normal * 2**binade * (1 + code / steps) for code in range(steps)]
        binade += 1
    return torch.tensor([number for number in found if number <= fmt.max], dtype=torch.float64)


def nearest(x, codes, fault=""):
    """The nearest number, of two the one with the even code."""
    above = torch.searchsorted(codes, x.contiguous()).clamp(1, len(codes) - 1)
    low, high = codes[above - 1], codes[above]
    up = (x - low > high - x) | ((x - low == high - x) & (above % 2 == 0))
    if fault == "ties_up":
        up = x - low >= high - x
    if fault == "cut":
        up = x >= high
    return torch.where(up, high, low)


def quantizer(fault=""):
    """A quantizer that looks its codes up in a table of all."""

    def kernel(input, *, format):
        fmt = KNOWN[format]
        if fault == "other_element" and format.startswith("mxfp8"):
            fmt = KNOWN["mxfp8_e5m2" if format == "mxfp8_e4m3" else "mxfp8_e4m3"]
        size = 16 if fault == "blocks_of_16" else fmt.block_size
        x = torch.stack(input.double().split(size, -1), -2)
        largest = x.abs().amax(-1, keepdim=True)
        if fault == "scale_of_row":
            largest = largest.amax(-2, keepdim=True).expand(largest.shape)
        if fault == "scale_of_neighbor":
            largest = largest.roll(1, -2)
        if fmt.tensor_scale:
            whole = (input.abs().amax().float() / (fmt.scale.max * fmt.element.max)).double()
            whole = 1.0 if fault == "no_tensor_scale" else whole
            scale = nearest(largest / (fmt.element.max * whole), numbers(fmt.scale)) * whole
        else:
            exponent = torch.frexp(largest)[1].double() - 1 - fmt.element.max_exponent
            exponent = exponent + {"scale_up": 1, "scale_down": -1}.get(fault, 0)
            scale = torch.exp2(exponent.clamp(-127, 127))
        codes = numbers(fmt.element)
        if fault == "no_subnormals":
            codes = codes[(codes == 0) | (codes >= fmt.element.min_normal)]
        scaled = x.abs() / scale
        if fault != "zero_blocks_nan":
            scaled = scaled.nan_to_num(0.0)
        found = nearest(scaled, codes, fault) * x.sign() * scale
        if fault == "zero_blocks_nan":
            found = torch.where(largest == 0, torch.nan, found)
        return found.flatten(-2).float()

    return kernel


def in_double(input, *, format):
    """halfulp's rounding, of fp64."""
    return round_to(input.double(), format).float()


def by_distance(input, *, format):
    """The least distance to any number, of two the one with the even code."""
    fmt = KNOWN[format]
    if fmt.tensor_scale:
        return quantizer()(input, format=format)
    x = torch.stack(input.double().split(fmt.block_size, -1), -2)
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.exp2((largest.log2().floor() - fmt.element.max_exponent).clamp(-127, 127))
    codes = numbers(fmt.element)
    off = (x.abs() / scale)[..., None] - codes
    odd = torch.arange(len(codes)) % 2
    return (codes[(off.abs() + odd * 1e-12).argmin(-1)] * x.sign() * scale).flatten(-2).float()


def by_reciprocal(input, *, format):
    """NVFP4 as torchao computes it: all in fp32, numbers times the reciprocal of both scales."""
    fmt = KNOWN[format]
    if not fmt.tensor_scale:
        return in_double(input, format=format)
    x = torch.stack(input.float().split(fmt.block_size, -1), -2)
    whole = input.abs().amax().float() / (fmt.scale.max * fmt.element.max)
    share = x.abs().amax(-1, keepdim=True) / fmt.element.max / whole
    scale = nearest(share.double(), numbers(fmt.scale)).float()
    scaled = (x * (1 / whole / scale)).nan_to_num(0.0)
    found = nearest(scaled.abs().double(), numbers(fmt.element)).float() * x.sign() * whole * scale
    return found.flatten(-2)


def stochastic(fault=""):
    """Stochastic rounding to bf16 by random bits."""

    def kernel(input):
        shape, most = input.shape, 2**16
        if fault == "a_number_a_row":
            shape = (len(input), 1)
        if fault == "a_number_a_column":
            shape = (1, input.shape[1])
        if fault == "one_number":
            shape = (1, 1)
        own = torch.Generator().manual_seed(0) if fault == "same_every_call" else None
        noise = torch.randint(0, most, shape, dtype=torch.int32, generator=own)
        if fault == "zero_seed":
            noise = noise * 0
        if fault == "half_the_range":
            noise = noise // 2
        if fault == "two_bits":
            noise = noise // 2**14 * 2**14
        if fault == "three_bits":
            noise = noise // 2**13 * 2**13
        if fault == "nearest":
            noise = noise * 0 + 2**15
        if fault == "four_bits":
            noise = noise // 2**12 * 2**12
        if fault == "sum_of_two":
            noise = (noise + torch.randint(0, most, shape, dtype=torch.int32)) // 2
        if fault == "after_nearest":
            input = input.bfloat16().float()
        bits = input.contiguous().view(torch.int32)
        if fault == "up_by_sign":
            noise = torch.where(bits < 0, most - 1 - noise // 2, noise // 2)
        if fault == "positions_repeat":
            noise = noise[:, : input.shape[1] // 8].repeat(1, 8)[:, : input.shape[1]]
            noise = noise[:1].expand(len(input), -1)
        return ((bits + noise) & -most).view(torch.float32).bfloat16()

    return kernel


def by_chance(input):
    """Up with the probability of what is cut off, in fp64."""
    below = (input.view(torch.int32) & -65536).view(torch.float32)
    above = ((input.view(torch.int32) & -65536) + 65536).view(torch.float32)
    part = (input.double() - below) / (above.double() - below)
    return torch.where(torch.rand(part.shape, dtype=torch.float64) < part, above, below).bfloat16()


def dithered(input):
    """A uniform number of one step added, then cut toward zero."""
    step = torch.exp2(torch.frexp(input)[1].double() - 8)
    moved = input.double().abs() + torch.rand(input.shape, dtype=torch.float64) * step
    return ((moved / step).floor() * step * input.sign()).bfloat16()


def by_a_given_seed(input, seed=0):
    """Random numbers that are the caller's to change."""
    noise = torch.randint(0, 2**16, input.shape, dtype=torch.int32,
                          generator=torch.Generator().manual_seed(seed))  # fmt: skip
    return ((input.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16()


QUANTIZER_FAULTS = (
    "other_element",
    "blocks_of_16",
    "scale_of_row",
    "scale_of_neighbor",
    "no_tensor_scale",
    "scale_up",
    "scale_down",
    "no_subnormals",
    "zero_blocks_nan",
    "ties_up",
    "cut",
)
STOCHASTIC_FAULTS = (
    "a_number_a_row",
    "a_number_a_column",
    "one_number",
    "zero_seed",
    "half_the_range",
    "two_bits",
    "three_bits",
    "nearest",
    "sum_of_two",
    "after_nearest",
    "up_by_sign",
    "positions_repeat",
    "same_every_call",
    "four_bits",
)
QUANTIZERS = (
    *(OperationKernel("quantize", fault, quantizer(fault)) for fault in QUANTIZER_FAULTS),
    *(OperationKernel("stochastic_round", fault, stochastic(fault)) for fault in STOCHASTIC_FAULTS),
    OperationKernel("quantize", "by_table", quantizer(), faulty=False),
    OperationKernel("quantize", "in_double", in_double, faulty=False),
    OperationKernel("quantize", "by_distance", by_distance, faulty=False),
    OperationKernel("quantize", "by_reciprocal", by_reciprocal, faulty=False),
    OperationKernel("stochastic_round", "by_bits", stochastic(), faulty=False),
    OperationKernel("stochastic_round", "by_chance", by_chance, faulty=False),
    OperationKernel("stochastic_round", "dithered", dithered, faulty=False),
    OperationKernel("stochastic_round", "by_a_given_seed", by_a_given_seed, faulty=False),
)
