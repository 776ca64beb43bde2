"""Faulty kernels of the tenth set of operations' faults: linear layers, quantizers, routers,
optimizers, embeddings and sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

from typing import Any, Literal

import torch
from benchmarks.unseen.operations.eighth_steps import quantized, row_codes
from benchmarks.unseen.operations.fifth_steps import codes_of_128, e5m2, mx_codes, step_of_adamw
from benchmarks.unseen.operations.ninth_steps import nvfp4_codes
from benchmarks.unseen.operations.second_kernels import bf16, e4m3, passes, power_of_two
from torch import Tensor
from torch.nn import functional


# --- linear
def regions_of_m_rows(a: Tensor, b: Tensor) -> Tensor:
    """K in two parts, whose results lie one behind the other in a workspace, M rows each; tiles of
    16 rows are written whole, so that what the first part has beyond M lies on the second.
    """
    m, half = len(a), -(-a.shape[1] // 2)
    first, second = a[:, :half] @ b[:half], a[:, half:] @ b[half:]
    second[: -m % 16] = 0
    return first + second


def tail_rows_not_zeroed(a: Tensor, b: Tensor) -> Tensor:
    """Parts of K are added to tiles of 48 rows, of which ⌊48 / 32⌋ · 32 are set to zero before;
    in the others lies the first part of the tile, from an earlier turn.
    """
    found, row = a @ b, torch.arange(len(a))
    stale = (row % 48 >= 32)[:, None] * found[(row - row % 48 + row % 16).clamp_max(len(a) - 1)]
    return found + stale


def fractals_of_the_tail(a: Tensor, b: Tensor) -> Tensor:
    """Tiles of 128 of K: where there is more than one, the last is read in whole sixteens."""
    k = a.shape[1]
    if k > 128:
        k -= k % 128 % 16
    return a[:, :k] @ b[:k]


# --- quantized_linear
def mx_values(codes: Tensor, exponent: Tensor, columns: int) -> Tensor:
    scale = torch.ldexp(torch.ones(exponent.shape), exponent)
    return (codes * scale[..., None]).flatten(1)[:, :columns]


def mx_back(x: Tensor) -> Tensor:
    return mx_values(*mx_codes(x))


def scales_switched(input, weight, *, format: Literal["mxfp8"]):
    """The library takes the scales of one operand for those of the other."""

    def forward(x, w):
        (a, ea, columns), (b, eb, _) = mx_codes(x), mx_codes(w)
        of_a, of_b = eb[torch.arange(len(a)) % len(b)], ea[torch.arange(len(b)) % len(a)]
        return mx_values(a, of_a, columns) @ mx_values(b, of_b, columns).T

    return quantized(forward, mx_back)(input, weight)


def first_row_s_scale(input, weight, *, format: Literal["fp8_row"]):
    """The scales of all rows are passed, and a scalar is read at their address."""

    def forward(x, w):
        (a, sa), (b, sb) = row_codes(x), row_codes(w)
        return a @ b.T * (sa[0] * sb[0])

    def back(x):
        codes, scale = row_codes(x)
        return codes * scale

    return quantized(forward, back)(input, weight)


def e5m2_read_as_e4m3(input, weight, *, format: Literal["mxfp8"]):
    """Gradients are quantized to E5M2, and their bytes are taken for E4M3's."""

    def gradient(x):
        blocks = functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
        most = blocks.abs().amax(-1)
        exponent = torch.where(most == 0, 0, torch.frexp(most)[1] - 16)
        scaled = e5m2(torch.ldexp(blocks, -exponent[..., None]).clamp(-57344, 57344))
        read = scaled.to(torch.float8_e5m2).view(torch.float8_e4m3fn).float()
        return mx_values(read, exponent, x.shape[1])

    def backward(saved, dy):
        x, w = saved
        return gradient(dy) @ mx_back(w.T).T, gradient(dy.T) @ mx_back(x.T).T

    return passes(lambda x, w: (mx_back(x) @ mx_back(w).T, (x, w)), backward, input, weight)


def bytes_of_a_transpose(input, weight, *, format: Literal["fp8_block"]):
    """The weight's codes are transposed in tiles of bytes for dX: in a quarter of the columns each
    pair of rows comes out exchanged.
    """

    def product(x, sx, y, sy):
        return torch.einsum("tkc,tk,nkc,nk->tn", x, sx, y, sy)

    def exchanged(codes: Tensor) -> Tensor:
        rows = torch.arange(len(codes))
        other = torch.where(rows ^ 1 < len(codes), rows ^ 1, rows)
        quarter = torch.arange(codes.shape[2]) % 64 < 16
        return torch.where(quarter, codes[other], codes)

    def backward(saved, dy):
        x, w = saved
        y, sy = codes_of_128(w.T, True)
        dx = product(*codes_of_128(dy, False), exchanged(y), sy)
        return dx, product(*codes_of_128(dy.T, False), *codes_of_128(x.T, False))

    def forward(x, w):
        return product(*codes_of_128(x, False), *codes_of_128(w, True)), (x, w)

    return passes(forward, backward, input, weight)


def tensor_back(x: Tensor) -> Tensor:
    most = x.abs().amax()
    scale = torch.where(most == 0, 1.0, most / 448)
    return e4m3(x / scale) * scale


def stale_tokens_in_dw(input, weight, *, format: Literal["fp8_tensor"]):
    """dW sums over whole tiles of 32 tokens: beyond the last token lie those of the first tile."""

    def filled(x: Tensor) -> Tensor:
        count = -len(x) % 32
        stale = x[len(x) % 32 : 32] if len(x) >= 32 and count else x[:0]
        return torch.cat([x, stale])

    def backward(saved, dy):
        x, w = (tensor_back(each) for each in saved)
        dy = tensor_back(dy)
        return dy @ w, filled(dy).T @ filled(x)

    def forward(x, w):
        return tensor_back(x) @ tensor_back(w).T, (x, w)

    return passes(forward, backward, input, weight)


# --- quantize
def exponent_of_a_sixth(amax: Tensor, most: int) -> Tensor:
    """2 to the floor of log2 of amax / 6, for two less than that of amax."""
    return power_of_two(amax / 6, 0)


def subnormals_in_sixty_fourths(input, *, format: Literal["mxfp8_e4m3"]):
    """Below 2⁻⁶ a number's mantissa is counted in 2⁻⁶, and read in 2⁻⁹."""
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, power_of_two(amax, 8))
    y = (x / scale).clamp(-448, 448)
    small = (y * 2.0**6).round() * 2.0**-9
    return (torch.where(y.abs() < 2.0**-6, small, e4m3(y)) * scale).flatten(-2)


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def bits_not_cleared(input, *, format: Literal["nvfp4"]):
    """A thread packs 8 codes in 4 bytes, two in each: the byte that it packs them in still has the
    bits of those before.
    """
    codes, scale, whole = nvfp4_codes(input.float())
    number = (codes[..., None].abs() == FP4).int().argmax(-1) + 8 * torch.signbit(codes).int()
    nibbles = number.unflatten(-1, (2, 4, 2))
    for byte in range(1, 4):
        nibbles[..., byte, :] |= nibbles[..., byte - 1, :]
    number = nibbles.flatten(-3)
    read = torch.where(number >= 8, -1.0, 1.0) * FP4[number % 8]
    return (read * scale[..., None] * whole).flatten(1)[:, : input.shape[1]]


# --- stochastic_round
def sticky_for_the_rest(input):
    """Of what is cut off two digits are kept, and whether anything is left: up with so many
    eighths.
    """
    number = input.contiguous().view(torch.int32)
    cut = number & 0xFFFF
    eighths = (cut >> 14 << 1) | (cut & 0x3FFF > 0).int()
    up = torch.randint(0, 8, number.shape, dtype=torch.int32) < eighths
    return ((number & -65536) + (up.int() << 16)).view(torch.float32).to(torch.bfloat16)


# --- router
def router(listed: Any = None, written: Any = None):
    """`listed(experts)` are the experts among which is chosen, `written(w)` the weights."""

    def kernel(logits, k, *, renormalize=True):
        def forward(z):
            names = listed(z.shape[1]) if listed else torch.arange(z.shape[1])
            index = names[z[:, names].topk(k, -1).indices]
            p = torch.softmax(z, -1)
            picked = p.gather(1, index)
            total = picked.sum(-1, keepdim=True) if renormalize else torch.ones(len(z), 1)
            w = picked / total
            out = written(w) if written else w
            return (out.to(logits.dtype), index), (p, index, w, total)

        def backward(saved, dy):
            p, index, w, total = saved
            if renormalize:
                dy = (dy - (dy * w).sum(-1, keepdim=True)) / total
            dp = torch.zeros_like(p).scatter_add_(1, index, dy)
            return (p * (dp - (dp * p).sum(-1, keepdim=True)),)

        return passes(forward, backward, logits)

    return kernel


def wrapped_in_whole_eights(experts: int) -> Tensor:
    """Blocks of 8 experts, whose numbers beyond the last begin anew: those are listed twice."""
    return torch.arange(-(-experts // 8) * 8) % experts


def first_slot_s(w: Tensor) -> Tensor:
    """Weights are read by token, not by token and slot."""
    return w[:, :1].expand_as(w).contiguous()


# --- optimizers
def moments_already_updated(param, grad, exp_avg, exp_avg_sq, *, lr, weight_decay, **options):
    """Moments are stored first; the step's expression, with them in it, reads what was stored."""
    betas = {name: options[name] for name in ("beta1", "beta2", "eps")}
    g, step = grad.float(), options["step"]
    _, m, v = step_of_adamw(param, g, exp_avg, exp_avg_sq, step=step, lr=lr,
                            weight_decay=weight_decay, **betas)  # fmt: skip
    moved, _, _ = step_of_adamw(param, g, m, v, step=step, lr=lr, weight_decay=weight_decay,
                                **betas)  # fmt: skip
    return param * (1 - lr * weight_decay) - moved, m, v


def eps_in_half(param, grad, exp_avg, exp_avg_sq, *, eps, lr, weight_decay, **options):
    """1e-8 is 0 in fp16."""
    low = float(torch.tensor(eps, dtype=torch.float16))
    moved, m, v = step_of_adamw(param, grad.float(), exp_avg, exp_avg_sq, eps=low, lr=lr,
                                weight_decay=weight_decay, **options)  # fmt: skip
    return param * (1 - lr * weight_decay) - moved, m, v


def second_moment_in_half(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps,
                          weight_decay):  # fmt: skip
    """Squares below 6e-8 are 0 there, and small ones have few digits."""
    g = grad.float()
    m = beta1 * exp_avg + (1 - beta1) * g
    v = (beta2 * exp_avg_sq + (1 - beta2) * g * g).half().float()
    size = (v / (1 - beta2**step)).sqrt() + eps
    return param * (1 - lr * weight_decay) - lr * (m / (1 - beta1**step)) / size, m, v


def compensation_added(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """What is kept is rounded − exact, and is added to the rounded weight before a step."""
    p, m, v = param.float(), exp_avg, exp_avg_sq
    kept = torch.zeros_like(p)
    for number, g in enumerate(grads.float(), step):
        moved, m, v = step_of_adamw(p, g, m, v, step=number, **options)
        exact = (p + kept) * (1 - options["lr"] * options["weight_decay"]) - moved
        p = exact.to(param.dtype).float()
        kept = p - exact
    return p.to(param.dtype), m, v


def cut_at_every_step(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """The weight is stored by its upper 16 bits."""
    p, m, v = param.float(), exp_avg, exp_avg_sq
    for number, g in enumerate(grads.float(), step):
        moved, m, v = step_of_adamw(p, g, m, v, step=number, **options)
        new = (p * (1 - options["lr"] * options["weight_decay"]) - moved).contiguous()
        p = (new.view(torch.int32) & -65536).view(torch.float32)
    return p.to(param.dtype), m, v


# --- embedding, sum
def embedding(read: Any = None, order: Any = None):
    """`read(index, rows)` are the indices as they are read, `order(index)` the tokens that the
    gradient has, in their order.
    """

    def kernel(input, weight, padding_idx=None):
        index = read(input, len(weight)) if read else input

        def backward(shape, dy):
            tokens = order(index) if order else torch.arange(len(index))
            dw = torch.zeros(shape).index_add_(0, index[tokens], dy[tokens])
            if padding_idx is not None:
                dw[padding_idx] = 0
            return (dw,)

        return passes(lambda w: (w[index], w.shape), backward, weight)

    return kernel


def in_bf16(index: Tensor, rows: int) -> Tensor:
    """Indices have passed through the table's format: beyond 256 every second one is another."""
    return bf16(index).long().clamp_max(rows - 1)


def last_of_the_sorted_dropped(index: Tensor) -> Tensor:
    """Tokens in the order of their indices, and one too few."""
    return torch.argsort(index, stable=True)[:-1]


def sixteen_partial_sums(x: Tensor) -> Tensor:
    """Blocks of 8 rows, and a second launch with as many threads as a block is wide, 16."""
    partial = functional.pad(x, (0, 0, 0, -len(x) % 8)).unflatten(0, (-1, 8)).sum(1)
    return partial[:16].sum(0)


def second_pass_of_the_input(x: Tensor) -> Tensor:
    """The second launch adds up as many numbers as there were blocks of 4, of the input again."""
    return x[: -(-len(x) // 4)].sum(0)
