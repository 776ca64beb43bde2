"""Rotary embeddings and gated units with one planted fault each, and some without one that are
written differently.
"""

import math

import torch

from tests.operations.hand_written import OperationKernel, by_hand, cut, low


def rope(fault=""):
    """The rotary embedding whose two passes are written out."""

    def kernel(input, positions, *, base, interleaved):
        half = input.shape[-1] // 2
        base = 10000.0 if fault == "base_fixed" else base
        interleaved = False if fault == "halves_always" else interleaved
        width = half if fault == "half_exponent" else 2 * half
        power = base ** (-2.0 * torch.arange(half).float() / width)
        power = low(power) if fault == "frequencies_low" else power
        at = positions.float()
        at = low(at) if fault == "positions_low" else at
        at = torch.arange(len(positions)).float() if fault == "positions_ignored" else at
        angle = at[:, None] * power
        angle = low(angle) if fault == "angles_low" else angle
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def turned(x, back):
            rows = x.float()
            sine = -sin if back else sin
            if interleaved:
                first, second = rows[..., 0::2], rows[..., 1::2]
            else:
                first, second = rows[..., :half], rows[..., half:]
            a, b = first * cos - second * sine, second * cos + first * sine
            if interleaved:
                return torch.stack([a, b], -1).flatten(-2)
            out = torch.cat([a, b], -1)
            if fault == "tail_dropped":
                out = torch.cat([out[..., : half // 16 * 16], rows[..., half // 16 * 16 :]], -1)
            return out

        def forward(x):
            out = turned(x, False)
            return (cut(out) if fault == "out_cut" else out.to(x.dtype)), None

        def backward(_, grad):
            return (turned(grad, fault != "same_turn_back").to(grad.dtype),)

        return by_hand(forward, backward, input)

    return kernel


def rope_in_double(input, positions, *, base, interleaved):
    """Angles and products in fp64."""
    half = input.shape[-1] // 2
    angle = positions[:, None].double() * base ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    rows = input.double()
    pairs = rows.unflatten(-1, (half, 2)) if interleaved else rows.unflatten(-1, (2, half)).mT
    first, second = pairs.unbind(-1)
    found = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return (found if interleaved else found.mT).flatten(-2).to(input.dtype)


def rope_from_table(input, positions, *, base, interleaved):
    """From a table of cosines in fp32 that is as long as the sequence."""
    half = input.shape[-1] // 2
    steps = torch.arange(int(positions.max()) + 1).float()
    angle = torch.outer(steps, 1.0 / base ** (torch.arange(0, 2 * half, 2).float() / (2 * half)))
    cos, sin = (table[positions][:, None] for table in (angle.cos(), angle.sin()))
    rows = input.float()
    out = torch.empty_like(rows)
    own = slice(0, None, 2) if interleaved else slice(0, half)
    other = slice(1, None, 2) if interleaved else slice(half, None)
    out[..., own] = rows[..., own] * cos - rows[..., other] * sin
    out[..., other] = rows[..., other] * cos + rows[..., own] * sin
    return out.to(input.dtype)


def _silu(x, fault):
    """The activation and its slope."""
    sigmoid = 1 / (1 + (-x).exp()) if fault != "tail_lost" else low(torch.sigmoid(x) + 1) - 1
    if fault == "sigmoid_low":
        sigmoid = low(sigmoid)
    if fault == "exp_overflows":
        e = x.exp()
        sigmoid = e / (1 + e)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


def _gelu(x, fault, approximate):
    tanh = approximate == "tanh" or fault == "tanh_always"
    tanh = False if fault == "erf_always" else tanh
    if tanh:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        t = torch.tanh(low(inner) if fault == "inner_low" else inner)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope
    if fault == "tail_lost":
        below = 0.5 * (low(torch.erf(x / math.sqrt(2))) + 1)
    else:
        below = 0.5 * torch.erfc(-x / math.sqrt(2))
    if fault == "sigmoid_form":
        below = torch.sigmoid(1.702 * x)
    return x * below, below + x * (-0.5 * x * x).exp() / math.sqrt(2 * math.pi)


def gated(fault="", gelu=False):
    """A gated unit whose two passes are written out."""

    def kernel(gate, up, **options):
        def parts(x):
            x = x.float()
            return _gelu(x, fault, options["approximate"]) if gelu else _silu(x, fault)

        def forward(x, y):
            activated, _ = parts(x)
            if fault == "tail_dropped":
                activated[..., x.shape[-1] // 32 * 32 :] = 0
            if fault == "clamped":
                activated = activated.clamp(-10, 10)
            out = activated * y.float()
            return (cut(out) if fault == "out_cut" else out.to(x.dtype)), (x, y)

        def backward(saved, grad):
            x, y = saved
            dy = grad.float()
            activated, slope = parts(x)
            slope = slope.clamp_min(0) if fault == "slope_positive" else slope
            if fault == "activation_as_slope":
                slope = torch.sigmoid(x.float())
            if fault == "saved_low":
                activated = (low(activated * 8).to(torch.float8_e4m3fn)).float() / 8
            grad_gate, grad_up = dy * y.float() * slope, dy * activated
            if fault == "swapped_gradients":
                grad_gate, grad_up = grad_up, grad_gate
            return grad_gate.to(x.dtype), grad_up.to(y.dtype)

        return by_hand(forward, backward, gate, up)

    return kernel


def swiglu_in_double(gate, up):
    """In fp64."""
    return (torch.nn.functional.silu(gate.double()) * up.double()).to(gate.dtype)


def swiglu_by_tanh(gate, up):
    """The sigmoid by tanh, in fp64."""
    x = gate.double()
    return (x * 0.5 * (1 + torch.tanh(0.5 * x)) * up.double()).to(gate.dtype)


def geglu_in_double(gate, up, *, approximate):
    """In fp64."""
    act = torch.nn.functional.gelu(gate.double(), approximate=approximate)
    return (act * up.double()).to(gate.dtype)


def geglu_by_erfc(gate, up):
    """By erfc, without an option."""
    x = gate.float()
    return (0.5 * x * torch.erfc(-x * 2**-0.5) * up.float()).to(gate.dtype)


ROPE_FAULTS = (
    "base_fixed",
    "halves_always",
    "half_exponent",
    "frequencies_low",
    "positions_low",
    "positions_ignored",
    "angles_low",
    "tail_dropped",
    "out_cut",
    "same_turn_back",
)
GATED_FAULTS = (
    "tail_lost",
    "tail_dropped",
    "clamped",
    "out_cut",
    "slope_positive",
    "activation_as_slope",
    "saved_low",
    "swapped_gradients",
)
SILU_FAULTS = (*GATED_FAULTS, "sigmoid_low", "exp_overflows")
GELU_FAULTS = (*GATED_FAULTS, "tanh_always", "erf_always", "inner_low", "sigmoid_form")
ELEMENTWISE = (
    *(OperationKernel("rope", fault, rope(fault)) for fault in ROPE_FAULTS),
    *(OperationKernel("swiglu", fault, gated(fault)) for fault in SILU_FAULTS),
    *(OperationKernel("geglu", fault, gated(fault, gelu=True)) for fault in GELU_FAULTS),
    OperationKernel("rope", "by_hand", rope(), faulty=False),
    OperationKernel("rope", "in_double", rope_in_double, faulty=False),
    OperationKernel("rope", "from_table", rope_from_table, faulty=False),
    OperationKernel("swiglu", "by_hand", gated(), faulty=False),
    OperationKernel("swiglu", "in_double", swiglu_in_double, faulty=False),
    OperationKernel("swiglu", "by_tanh", swiglu_by_tanh, faulty=False),
    OperationKernel("geglu", "by_hand", gated(gelu=True), faulty=False),
    OperationKernel("geglu", "in_double", geglu_in_double, faulty=False),
    OperationKernel("geglu", "by_erfc", geglu_by_erfc, faulty=False),
)
