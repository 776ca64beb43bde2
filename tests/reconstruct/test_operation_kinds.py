"""Kinds of mistakes of operations: scales of other blocks, formulas that are wrong alike, what is
read in another layout or summed over all rows, results that are next to nothing.
"""

from typing import Literal

import pytest
import torch
from torch.nn import functional

from halfulp.operations import OperationResult, drawn_calls, operation_named
from halfulp.reconstruct.operation_asked import reconstruct_operation
from halfulp.reconstruct.operation_called import trial
from halfulp.reconstruct.operation_codes import codes_asked
from halfulp.reconstruct.operation_scales import scales_read
from halfulp.targets import run_operation, target_of

GENERATOR = torch.Generator()


def same(scale):
    return scale


def product(a, b, of_a=same, of_b=same, read=same):
    """a bᵀ in MXFP8, by other scales, or with the codes of a taken for others."""
    blocks = [functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)) for x in (a, b)]
    power = [torch.frexp(x.abs().amax(-1, keepdim=True))[1] - 9 for x in blocks]
    codes = [torch.ldexp(x, -p).clamp(-448, 448) for x, p in zip(blocks, power, strict=True)]
    codes = [x.to(torch.float8_e4m3fn).float() for x in codes]
    codes[0] = read(codes[0])
    scales = [torch.ldexp(torch.ones(p.shape), p)[..., 0] for p in power]
    scales = of_a(scales[0]), of_b(scales[1])
    x, y = ((c * s[..., None]).flatten(1) for c, s in zip(codes, scales, strict=True))
    return x @ y.T


def linear(of_input=same, of_weight=same, of_gradient=same, read=same):
    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return product(x.float(), w.float(), of_input, of_weight).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            (x, w), dy = (t.float() for t in ctx.saved_tensors), grad.float()
            back = product(dy, w.T, of_gradient), product(dy.T, x.T, read=read)
            return tuple(t.to(grad.dtype) for t in back)

    def kernel(input, weight, *, format: Literal["mxfp8"]):
        return Products.apply(input, weight)

    return kernel


def asked(op, kernel, probe="ranges_mxfp8"):
    """A call with blocks of all sizes, and what makes it."""
    operation, target = operation_named(op), target_of(kernel, op)

    def run(calls):
        result = run_operation(target, calls).result
        return OperationResult(result.tensors)

    sizes = operation.sizes[0].with_(calls=1, T=80, K=80, N=80)
    return drawn_calls(operation, probe, sizes, "bfloat16", GENERATOR.manual_seed(0)), run


def read_off(kernel):
    """What is said of scales."""
    calls, run = asked("quantized_linear", kernel)
    return scales_read(run, trial(run, calls, ("output", "grad_input", "grad_weight")))


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (linear(lambda s: s.roll(-1, 0)), "input are those of what lies 1 along T after"),
        (linear(of_weight=lambda s: s.roll(-1, 1)), "weight are those of what lies 1 along blocks"),
        (linear(lambda s: s[:1].expand_as(s)), "those of what lies at 0 along T"),
        (linear(lambda s: s[torch.arange(len(s)) // 16 * 16]), "at the first of every 16 along T"),
        (linear(of_weight=lambda s: s.T.reshape(s.shape)), "weight are those of other blocks: N 1"),
        (linear(lambda s: s * s), "multiplied by those of the same block"),
        (linear(lambda s: torch.ones_like(s)), "not read: 1 stands for all"),
        (linear(lambda s: s.log2() + 127), "taken for other numbers: 2^-22 for 105.1"),
        (linear(lambda s: s.amax(1, keepdim=True).expand_as(s)), "largest of input's row"),
        (linear(of_gradient=lambda s: s.flip(0)), "grad_output are those of other blocks: T 0"),
    ],
)
def test_scales_of_other_blocks_are_read_off(kernel, told):
    assert told in read_off(kernel).text


def test_right_scales_are_not_accused():
    assert read_off(linear()) is None
    assert read_off("dequantized") is None
    assert read_off("recipe:stock") is None


def as_e5m2(codes):
    return codes.to(torch.float8_e4m3fn).view(torch.float8_e5m2).float()


def without_the_lowest_bit(codes):
    return torch.where(codes.abs() < 2**-6, (codes * 2**6).round() * 2**-6, codes)


def a_half(codes):
    return codes / 2


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (as_e5m2, "codes of grad_output are taken for others: "),
        (without_the_lowest_bit, "…, below the smallest normal one alone"),
        (a_half, None),  # a factor is no other code
        (same, None),
    ],
)
def test_codes_that_are_taken_for_others_are_read_off(read, told):
    calls, run = asked("quantized_linear", linear(read=read))
    one = trial(run, calls, ("output", "grad_input", "grad_weight"))
    said = codes_asked(run, one)
    assert (said[0], told in said[1]) == ("block-codes", True) if told else said is None
    if read is as_e5m2:  # 2 is 01000000 in E4M3, and in E5M2 as well
        assert " 2 for " not in said[1]


@pytest.mark.parametrize("name", ["dequantized", "recipe:stock", "recipe:floor"])
@pytest.mark.parametrize(
    "probe", ["ranges_fp8_row", "ranges_mxfp8", "ranges_nvfp4", "ranges_mxfp4"]
)
def test_codes_that_are_right_are_not_accused(name, probe):
    calls, run = asked("quantized_linear", name, probe)
    assert codes_asked(run, trial(run, calls, ("output", "grad_input", "grad_weight"))) is None


def of_the_first_numbers(input, weight, *, format: Literal["fp8_row"]):
    def quantized(x):
        scale = x[:, :64].abs().amax(-1, keepdim=True).clamp_min(1e-9) / 448
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    exact, low = input.float() @ weight.float().T, quantized(input.float()) @ quantized(
        weight.float()).T  # fmt: skip
    return (exact + (low - exact).detach()).to(input.dtype)


def scaled_down(input, *, format: Literal["mxfp8_e4m3"]):
    blocks = input.float().unflatten(-1, (-1, 32))
    power = torch.frexp(blocks.abs().amax(-1, keepdim=True))[1] - 9
    codes = torch.ldexp(blocks, -power).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return torch.ldexp(codes, power - 112).flatten(-2)


def over_all_rows(input, dim):
    terms = (input.float() - input.float().amax(-1, keepdim=True)).exp()
    return (terms / terms.sum()).to(input.dtype)


def angles(input, positions, base):
    half = input.shape[-1] // 2
    return positions[:, None] * base ** (torch.arange(half) * (-1.0 / half))


def in_order(input, positions, base, interleaved):
    angle = angles(input, positions, base)[:, None]
    return turned(input, angle.cos(), angle.sin(), interleaved)


def in_turns(input, positions, *, base, interleaved=False):
    angle = angles(input, positions, base)
    table = torch.stack([angle.cos(), angle.sin()], -1).flatten(-2)[:, None]
    return turned(input, *table.chunk(2, -1), interleaved)


def turned(input, cos, sin, interleaved):
    x = input.float()
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    found = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return found.to(input.dtype)


def corrections_inverted(param, grads, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps,
                         weight_decay):  # fmt: skip
    p, m, v = param.float(), exp_avg, exp_avg_sq
    for number, grad in enumerate(grads.float(), step):
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
        size = (v / (1 + beta2**number)).sqrt() + eps
        p = p * (1 - lr * weight_decay) - lr * (m / (1 + beta1**number)) / size
    return p.to(param.dtype), m, v


def decay_lost(param, grads, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps,
               weight_decay):  # fmt: skip
    """The decayed weight is rounded to bf16, which gives it back; steps are rounded at random."""
    p, m, v = param.float(), exp_avg, exp_avg_sq
    for number, grad in enumerate(grads.float(), step):
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
        size = (v / (1 - beta2**number)).sqrt() + eps
        p = (p * (1 - lr * weight_decay)).bfloat16() - lr * (m / (1 - beta1**number)) / size
        noise = torch.randint(0, 2**16, p.shape, dtype=torch.int32)
        p = ((p.view(torch.int32) + noise) & -65536).view(torch.float32)
    return p.to(param.dtype), m, v


def cast_anew(input, normalized_shape, weight, eps):
    """Autograd rounds what reaches `input` from either use."""
    inverse = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + eps)
    return (input.float() * inverse * weight.float()).to(input.dtype)


def one_added(gate, up):
    return (functional.silu(gate.float()) * (up.float() + 1)).to(gate.dtype)


def one_maximum(input, dim):
    terms = (input.float() - input.float().max()).exp()
    return (terms / terms.sum(dim, keepdim=True)).to(input.dtype)


def no_maximum(input, dim):
    terms = input.float().exp()
    return (terms / terms.sum(dim, keepdim=True)).to(input.dtype)


def low_positions(input, positions, *, base, interleaved=False):
    return in_order(input, positions.bfloat16().float(), base, interleaved)


def not_corrected(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
    p, g = param.float() * (1 - lr * weight_decay), grad.float()
    m, v = beta1 * exp_avg + (1 - beta1) * g, beta2 * exp_avg_sq + (1 - beta2) * g * g
    return (p - lr * m / (v.sqrt() + eps)).to(param.dtype), m, v


def root_of_a_correction(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps,
                         weight_decay):  # fmt: skip
    p, g = param.float() * (1 - lr * weight_decay), grad.float()
    m, v = beta1 * exp_avg + (1 - beta1) * g, beta2 * exp_avg_sq + (1 - beta2) * g * g
    size = (v / (1 - beta2**step)).sqrt() + eps
    return (p - lr * m / (1 - beta1**step) ** 0.5 / size).to(param.dtype), m, v


def slope_lost(gate, up, *, approximate="none"):
    """What is multiplied in tanh's form lacks the gate itself."""
    g = gate.float()
    inner = (2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)
    below = (1 + torch.tanh(inner)) / 2
    active = functional.gelu(g) if approximate == "none" else below
    return (active * up.float()).to(gate.dtype)


def subnormals_of_another_unit(input, *, format: Literal["mxfp8_e4m3"]):
    blocks = input.float().unflatten(-1, (-1, 32))
    power = torch.frexp(blocks.abs().amax(-1, keepdim=True))[1] - 9
    y = torch.ldexp(blocks, -power).clamp(-448, 448)
    codes = y.to(torch.float8_e4m3fn).float()
    codes = torch.where(y.abs() < 2**-6, (y * 2**6).round() * 2**-9, codes)
    return torch.ldexp(codes, power).flatten(-2)


def by_the_ceiling(input, *, format: Literal["mxfp8_e4m3"]):
    """Scales are four times what they should be, or eight times above three quarters."""
    blocks = input.float().unflatten(-1, (-1, 32))
    fraction, power = torch.frexp(blocks.abs().amax(-1, keepdim=True))
    power = power - 7 + (fraction > 0.75).int()
    codes = torch.ldexp(blocks, -power).to(torch.float8_e4m3fn).float()
    return torch.ldexp(codes, power).flatten(-2)


def by_a_finer_scale(input, *, format: Literal["mxfp8_e4m3"]):
    """What is rounded is divided by a scale that is no power of two; the stored one is."""
    blocks = input.float().unflatten(-1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * (448 / most.clamp_min(1e-30))).to(torch.float8_e4m3fn).float()
    return torch.ldexp(codes, torch.frexp(most)[1] - 9).flatten(-2)


def not_decoupled(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
    p, g = param.float(), grad.float() + weight_decay * param.float()
    m, v = beta1 * exp_avg + (1 - beta1) * g, beta2 * exp_avg_sq + (1 - beta2) * g * g
    size = (v / (1 - beta2**step)).sqrt() + eps
    return (p - lr * m / (1 - beta1**step) / size).to(param.dtype), m, v


def z_of_lse(input, target, *, ignore_index, reduction, label_smoothing, lse_square_scale):
    logits, seen = input.float(), target != ignore_index
    loss = functional.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    ) + torch.where(seen, lse_square_scale * logits.logsumexp(-1), 0.0)
    total = loss.sum() / (seen.sum() if reduction == "mean" else 1)
    return loss if reduction == "none" else total


class ScaledByOnes(torch.autograd.Function):
    """RMSNorm whose gradient of weights is summed in bf16, by 32 rows."""

    @staticmethod
    def forward(ctx, x, w, eps):
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        return functional.rms_norm(x.float(), x.shape[-1:], w.float(), eps).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, w = (t.float() for t in ctx.saved_tensors)
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        scaled, of = x * inverse, grad.float() * w
        total = torch.zeros_like(w, dtype=grad.dtype)
        for part in (grad.float() * scaled).split(32):
            total = total + part.sum(0).to(grad.dtype)
        back = inverse * (of - scaled * (of * scaled).mean(-1, keepdim=True))
        return back.to(grad.dtype), total, None


def by_rows(input, normalized_shape, weight, eps):
    return ScaledByOnes.apply(input, weight, eps)


def padding_too(input, weight, padding_idx):
    """Rows of padding get a gradient, and gradients of one number are summed in bf16."""
    return functional.embedding(input, weight)


def to_nearest(param, grads, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
    """Moments in fp32, weights rounded to the nearest after every step."""
    x, m, v = param.float(), exp_avg, exp_avg_sq
    for number, grad in enumerate(grads.float(), step):
        m, v = torch.lerp(m, grad, 1 - beta1), torch.lerp(v, grad.square(), 1 - beta2)
        size = (v / (1 - beta2**number)).sqrt() + eps
        moved = x * (1 - lr * weight_decay) - lr * m / (1 - beta1**number) / size
        x = moved.bfloat16().float()
    return x.bfloat16(), m, v


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("op", "kernel", "cause", "told"),
    [
        # first, since eager code, which rounds moments too, explains it as well, and random
        # numbers that are not there explain anything
        ("adamw_low", to_nearest, "statistic-low", " is rounded to bf16"),
        ("softmax", one_maximum, "maximum", "max(input) stands in place of max(input, -1)"),
        ("softmax", no_maximum, "maximum", "no maximum is subtracted"),
        # what else explains every call as well is less natural
        ("rope", low_positions, "statistic-low", "positions is rounded to bf16"),
        ("adamw_step", not_corrected, "option", "1 stands in place of 1 - beta1 ** step, and so"),
        ("adamw_step", root_of_a_correction, "option", "(1 - beta1 ** step) ** 0.5 stands in"),
        ("geglu", slope_lost, "term-missing", "of gate * below, only where approximate is 'tanh'"),
        ("quantize", subnormals_of_another_unit, "block-codes", "below the smallest normal one"),
        ("quantize", by_the_ceiling, "block-scale", "scales are "),
        ("quantize", by_a_finer_scale, "block-scale", "times the scale of their codes"),
        ("adamw_step", not_decoupled, "option", "is added to grad, as Adam has it"),
        ("cross_entropy", z_of_lse, "term-missing", "lse stands in place of its square"),
        ("rms_norm", by_rows, "grad-sum-low", "sums of 32 terms of the gradient of weights are"),
        ("embedding", padding_too, "grad-sum-low", "; padding_idx is taken as None"),
        ("rms_norm", cast_anew, "grad-sum-low", "cast up anew"),
        ("swiglu", one_added, "term-missing", "up has 1 added to it"),
        ("quantized_linear", of_the_first_numbers, "block-scale", "of the first 64 numbers"),
        ("quantize", scaled_down, "factor", "output is 2^-112 times"),
        ("softmax", over_all_rows, "neighbor", "sum(weights) stands in place of"),
        ("rope", in_turns, "exchanged", "cos and sin lie in turns, and are read as halves"),
        ("adamw_low", corrections_inverted, "factor", "and so in all formulas alike"),
        ("adamw_low", decay_lost, "option", "weight_decay is taken as 0.0 instead of 0.1"),
    ],
)
def test_kinds_of_mistakes_are_named(op, kernel, cause, told):
    found = reconstruct_operation(kernel, op).found
    assert (found.cause, told in found.text) == (cause, True), found


def cut(x):
    return (x.contiguous().view(torch.int32) & -8192).view(torch.float32)


class CutToTf32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(cut(x), cut(w))
        return cut(x) @ cut(w).T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return cut(grad) @ w, cut(grad).T @ x


def test_operands_that_are_cut_are_no_factor():
    found = reconstruct_operation(lambda input, weight: CutToTf32.apply(input, weight), "linear",
                                  dtype="float32").found  # fmt: skip
    assert (found.cause, found.text) == ("coarser", "what is read is cut to tf32")


@pytest.mark.thorough(keep=0)
def test_results_without_a_number_tell_of_no_cause():
    """Lanes that see no element: NaN in every row, as many mistakes make it."""

    def kernel(input, dim):
        rows = input.float()
        return (rows.softmax(-1) + (torch.nan if rows.shape[1] % 64 else 0.0)).to(input.dtype)

    found = reconstruct_operation(kernel, "softmax").found
    assert found.cause == "operation-place"
    assert "not finite" in found.text


def half_of_the_tokens(input, normalized_shape, weight, bias, eps):
    """Gradients of weight and bias are summed over the first half alone, exactly."""
    half = input.shape[0] // 2
    rest = functional.layer_norm(
        input[half:].float(), normalized_shape, weight.detach().float(), bias.detach().float(), eps
    )
    first = functional.layer_norm(
        input[:half].float(), normalized_shape, weight.float(), bias.float(), eps
    )
    return torch.cat([first, rest]).to(input.dtype)


@pytest.mark.parametrize(("kernel", "is_noise"), [("torch", True), (half_of_the_tokens, False)])
def test_where_sums_cancel_a_large_error_may_be_a_rounding_and_no_missing_terms(kernel, is_noise):
    operation, target = operation_named("layer_norm"), target_of(kernel, "layer_norm")
    sizes = operation.sizes[0].with_(calls=1, T=512, D=32)
    calls = drawn_calls(operation, "opposed_tokens", sizes, "bfloat16", GENERATOR.manual_seed(0))

    def run(calls):
        return run_operation(target, calls).result

    one = trial(run, calls, ("grad_bias", "grad_weight"))
    assert one.relative > 0.5
    assert one.is_noise == is_noise
