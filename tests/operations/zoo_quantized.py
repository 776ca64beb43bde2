"""Linear layers of quantized operands with one planted fault each, for every family of formats, and
some without one that are written differently.
"""

import torch

from halfulp.formats import round_to
from halfulp.operations.quantized_linear.recipes import FORMATS
from tests.operations.hand_written import OperationKernel, by_hand, summed_low
from tests.operations.zoo_quantizers import nearest, numbers

FAMILIES = {
    "fp8": ("fp8_tensor", "fp8_row", "fp8_block"),
    "mx": ("mxfp8", "mxfp4"),
    "nvfp4": ("nvfp4",),
}


def sums(a, b, fault):
    """a bᵀ of dequantized operands, with the fault of its accumulator."""
    if fault == "accumulated_bf16":
        return summed_low((a[:, None] * b[None]).unflatten(-1, (-1, 1)).sum(-1), 2)
    pieces = zip(a.split(32, 1), b.split(32, 1), strict=True)
    if fault == "accumulated_14_bits":  # as H100's tensor cores: 32 terms at a time, cut
        total = torch.zeros(len(a), len(b))
        for x, y in pieces:
            total = round_to(total + x @ y.mT, "e8m13", rounding="toward_zero")
        return total
    if fault == "accumulated_fp16":
        total = torch.zeros(len(a), len(b))
        for x, y in pieces:
            total = (total + x @ y.mT).half().float()
        return total
    return a @ b.mT


def in_groups(x, name, weight):
    """A matrix as [groups, numbers that share a scale], and the way back."""
    rows, columns = x.shape
    fmt = FORMATS[name]
    wide = columns if fmt.block_size is None else fmt.block_size
    high = 1
    if name == "fp8_tensor":
        high = rows
    if name == "fp8_block" and weight:
        high = 128
    padded = torch.nn.functional.pad(x, (0, -columns % wide, 0, -rows % high))
    shape = (padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    groups = padded.view(shape).transpose(1, 2)

    def back(y):
        whole = y.view(groups.shape).transpose(1, 2).reshape(padded.shape)
        return whole[:rows, :columns]

    return groups.flatten(2), back


def scales(groups, name, fault, state):
    """One scale a group, [.., .., 1]."""
    fmt, largest = FORMATS[name], groups.abs().amax(-1, keepdim=True)
    if fault == "scale_of_neighbor":
        largest = largest.roll(1, 1 if largest.shape[1] > 1 else 0)
    if fault == "scale_of_all":
        largest = largest.amax().expand(largest.shape)
    if fault == "stale_scale":
        key = (name, state["role"], groups.shape)
        stale = state.get(key, largest)
        state[key] = largest
        largest = stale
    if name in ("mxfp8", "mxfp4"):
        power = torch.frexp(largest)[1].double() - 1 - fmt.element.max_exponent
        power = power + {"scale_down": -1, "scale_two_up": 2}.get(fault, 0)
        return torch.exp2(power.clamp(-127, 127))
    if name == "nvfp4":
        whole = (groups.abs().amax().float() / (448 * 6)).double()
        whole = torch.ones_like(whole) if fault in ("no_tensor_scale", "fixed_scale") else whole
        if fault == "scale_power_of_two":
            return torch.exp2((largest / 6).log2().floor().clamp_min(-127))
        scale = nearest(largest / (6 * torch.where(whole == 0, 1.0, whole)), numbers(fmt.scale))
        return scale * whole
    if fault == "fixed_scale":
        return torch.ones_like(largest)
    return (largest / 448).float().double()


def quantized(x, name, fault, weight=False, state=None):
    """What the codes of a matrix stand for, by tables of all codes, in fp64."""
    groups, back = in_groups(x.double(), name, weight)
    scale = scales(groups, name, fault, state)
    codes = numbers(FORMATS[name].element)
    if fault == "no_subnormals":
        codes = codes[(codes == 0) | (codes >= FORMATS[name].element.min_normal)]
    if fault == "saturates_at_240":
        codes = codes[codes <= 240]
    scaled = (groups / scale).abs()
    if fault != "zero_groups_nan":
        scaled = scaled.nan_to_num(0.0, torch.inf)
    found = nearest(scaled, codes, "cut" if fault == "cut" else "")
    found = torch.where(scaled.isnan(), torch.nan, found)
    if fault == "fnuz_codes":  # of the other bias
        scale = scale / 2
    scale = scale.roll(1, 0) if fault == "scales_of_other_row" else scale
    return back(found * groups.sign() * scale).float()


def linear(fault="", family=""):
    """The three products by hand; the fault is in one family of formats."""
    state = {}

    def kernel(input, weight, *, format):
        own = fault if not family or format in FAMILIES[family] else ""

        def q(x, role):
            state["role"] = role
            x = x.contiguous()
            if own == "tail_dropped":
                x[:, x.shape[1] // 16 * 16 :] = 0
            if own == "gradient_not_scaled" and role == "gradient":
                return round_to(x, FORMATS[format].element)
            return quantized(x, format, own, role == "weight", state)

        def forward(x, w):
            x, w = x.float(), w.float()
            return sums(q(x.clone(), "input"), q(w.clone(), "weight"), own).to(input.dtype), (x, w)

        def backward(saved, grad):
            (x, w), dy = saved, grad.float()
            grad_input = sums(q(dy.clone(), "gradient"), q(w.mT.clone(), "weight"), own)
            grad_weight = sums(q(dy.mT.clone(), "gradient"), q(x.mT.clone(), "input"), own)
            if own == "weight_gradient_fp8":
                grad_weight = grad_weight.to(torch.float8_e5m2)
            return grad_input.to(input.dtype), grad_weight.to(weight.dtype)

        return by_hand(forward, backward, input, weight)

    return kernel


def product_of(quantizer, product):
    """A kernel of a quantizer and a product."""

    def kernel(input, weight, *, format):
        def forward(x, w):
            x, w = x.double(), w.double()
            out = product(quantizer(x, format, False), quantizer(w, format, True))
            return out.to(input.dtype), (x, w)

        def backward(saved, grad):
            (x, w), dy = saved, grad.double()
            down, across = dy.mT.contiguous(), x.mT.contiguous()
            grad_input = product(
                quantizer(dy, format, False), quantizer(w.mT.contiguous(), format, True)
            )
            grad_weight = product(quantizer(down, format, False), quantizer(across, format, False))
            return grad_input.to(input.dtype), grad_weight.to(weight.dtype)

        return by_hand(forward, backward, input, weight)

    return kernel


def scales_rounded_up(x, name, weight):
    """Powers of two at or above what the largest needs, so that nothing saturates."""
    groups, back = in_groups(x, name, weight)
    element = FORMATS[name].element
    if name == "nvfp4":
        return quantized(x, name, "", weight)
    needed = groups.abs().amax(-1, keepdim=True) / element.max
    scale = torch.exp2(needed.log2().ceil().clamp(-127, 127))
    return back(round_to(groups / scale, element) * scale).float()


def split_sums(a, b):
    """Two halves in fp32, and a sum of theirs."""
    half = a.shape[1] // 2
    first, second = a[:, :half] @ b[:, :half].mT, a[:, half:] @ b[:, half:].mT
    return first.float() + second.float()


EVERY = (
    "cut",
    "tail_dropped",
    "accumulated_bf16",
    "accumulated_14_bits",
    "accumulated_fp16",
    "weight_gradient_fp8",
    "gradient_not_scaled",
    "no_subnormals",
    "stale_scale",
)
FAULTS = {
    "fp8": (
        *EVERY,
        "fixed_scale",
        "scales_of_other_row",
        "saturates_at_240",
        "fnuz_codes",
        "zero_groups_nan",
    ),
    "mx": (*EVERY, "scale_of_neighbor", "scale_of_all", "scale_down", "scale_two_up"),
    "nvfp4": (
        *EVERY,
        "scale_of_neighbor",
        "scale_of_all",
        "no_tensor_scale",
        "scale_power_of_two",
        "zero_groups_nan",
    ),
}
QUANTIZED = (
    *(
        OperationKernel("quantized_linear", f"{fault}_{family}", linear(fault, family))
        for family, faults in FAULTS.items()
        for fault in faults
    ),
    OperationKernel("quantized_linear", "by_tables", linear(), faulty=False),
    OperationKernel(
        "quantized_linear",
        "scales_rounded_up",
        product_of(scales_rounded_up, lambda a, b: a @ b.mT),
        faulty=False,
    ),
    OperationKernel(
        "quantized_linear",
        "split_sums",
        product_of(lambda x, name, weight: quantized(x, name, "", weight), split_sums),
        faulty=False,
    ),
)
