"""Kernels of operations in both passes, written by hand, as the second set of unseen faults has
them: every intermediate passes a seam under its name.

A seam is `at(name, value) -> value`; `plain` leaves everything as it is. What an author may have
replaced altogether (a sum, a choice, a scale) is a keyword of the kernel's maker.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Seam = Callable[[str, Tensor], Tensor]


def plain(name: str, x: Tensor) -> Tensor:
    return x


def to(fmt: torch.dtype):
    return lambda x: x.to(fmt).float()


bf16, e4m3 = map(to, (torch.bfloat16, torch.float8_e4m3fn))


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, *tensors):
        out, ctx.saved = forward(*(x.float() if x.is_floating_point() else x for x in tensors))
        ctx.own, ctx.dtypes = backward, [x.dtype for x in tensors]
        if isinstance(out, tuple):  # a router's: weights, indices
            ctx.mark_non_differentiable(out[1])
            return out
        return out.to(tensors[0].dtype)

    @staticmethod
    def backward(ctx, *grads):
        found = ctx.own(ctx.saved, grads[0].float())
        pairs = zip(found, ctx.dtypes, strict=True)
        return None, None, *(None if g is None else g.to(dtype) for g, dtype in pairs)


def passes(forward: Any, backward: Any, *tensors: Tensor) -> Any:
    """forward(*tensors) -> out, saved; backward(saved, grad) -> a gradient a tensor; in fp32."""
    return _Passes.apply(forward, backward, *tensors)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def added(rounding: Any, width: int):
    """A sum over the first dimension that is rounded after every `width` terms."""

    def total(x: Tensor) -> Tensor:
        found = torch.zeros_like(x[0])
        for part in x.split(width):
            found = rounding(found + part.sum(0))
        return found

    return total


def over_rows(x: Tensor) -> Tensor:
    return x.sum(0)


# --- norms
def rms_norm(at: Seam = plain, *, own: Any = None, total: Any = over_rows, back: Any = None):
    def kernel(input, normalized_shape, weight, eps):
        def forward(x, w):
            squares = at("mean_square", mean(at("squares", x * x)))
            r = at("inverse_rms", torch.rsqrt(squares + eps))
            normal = at("normalized", own(x, r) if own else x * r)
            return at("output", normal * w), (x, w, r)

        def backward(saved, dy):
            x, w, r = saved
            r = back(r) if back else r
            dy, normal = at("grad_output", dy), at("b_normalized", x * r)
            wdy = at("grad_normalized", dy * w)
            inner = at("inner", mean(at("inner_terms", wdy * normal)))
            dx = at("grad_input", r * (wdy - normal * inner))
            return dx, at("grad_weight", total(at("weight_terms", dy * normal)))

        return passes(forward, backward, input, weight)

    return kernel


def layer_norm(at: Seam = plain, *, spread: Any = None, total: Any = over_rows, dx: Any = None):
    def kernel(input, normalized_shape, weight, bias, eps):
        def forward(x, w, b):
            m = at("mean", mean(x))
            c = at("centered", x - m)
            v = at("variance", spread(x) if spread else mean(at("squares", c * c)))
            r = at("inverse_deviation", torch.rsqrt(v + eps))
            normal = at("normalized", c * r)
            return at("output", normal * w + b), (normal, w, r)

        def backward(saved, dy):
            normal, w, r = saved
            dy = at("grad_output", dy)
            wdy = at("grad_normalized", dy * w)
            first, inner = at("grad_mean", mean(wdy)), at("inner", mean(wdy * normal))
            found = dx(wdy, normal, r) if dx else r * (wdy - first - normal * inner)
            return (at("grad_input", found), at("grad_weight", total(dy * normal)),
                    at("grad_bias", total(dy)))  # fmt: skip

        return passes(forward, backward, input, weight, bias)

    return kernel


# --- softmax and losses
def softmax(at: Seam = plain, *, maximum: Any = None, row_sum: Any = None):
    def kernel(input, dim=-1):
        def forward(x):
            m = at("maximum", maximum(x) if maximum else x.amax(-1, keepdim=True))
            terms = at("terms", at("shifted", x - m).exp())
            l = row_sum(terms, m) if row_sum else terms.sum(-1, keepdim=True)
            w = at("weights", terms / at("row_sum", l))
            return w, w

        def backward(w, dy):
            dy = at("grad_output", dy)
            inner = at("inner", at("inner_terms", dy * w).sum(-1, keepdim=True))
            return (at("grad_input", w * (dy - inner)),)

        return passes(forward, backward, input)

    return kernel


def cross_entropy(at: Seam = plain, *, row_sum: Any = None, count: Any = None,
                  hidden: Any = None):  # fmt: skip
    def kernel(input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0,
               lse_square_scale=0.0):  # fmt: skip
        kept = target != (hidden if hidden is not None else ignore_index)
        index = torch.where(kept, target, 0)[:, None].clamp(0, input.shape[1] - 1)
        share, penalty = label_smoothing, lse_square_scale
        tokens = count(kept, target) if count else kept.sum()
        size = tokens if reduction == "mean" else 1

        def forward(x):
            m = at("maximum", x.amax(-1, keepdim=True))
            terms = at("terms", at("shifted", x - m).exp())
            l = at("row_sum", row_sum(terms, m) if row_sum else terms.sum(-1, keepdim=True))
            lse = at("lse", m + l.log())
            own = at("own", x.gather(1, index))
            others = lse - mean(x)
            loss = (1 - share) * (lse - own) + share * others + penalty * lse * lse
            loss = at("loss", torch.where(kept, loss[:, 0], 0.0))
            return loss if reduction == "none" else loss.sum() / size, (x, lse)

        def backward(saved, dy):
            x, lse = saved
            p = at("probabilities", (x - lse).exp())
            hot = torch.zeros_like(p).scatter_(1, index, 1.0)
            g = (1 - share) * (p - hot) + share * (p - 1 / p.shape[1]) + 2 * penalty * lse * p
            g = at("unit_gradient", torch.where(kept[:, None], g, 0.0))
            return (at("grad_input", g * (dy / size).expand(len(g))[:, None]),)

        return passes(forward, backward, input)

    return kernel


def linear_cross_entropy(at: Seam = plain, *, loss: Any = None, width: int = 8, low: Any = None,
                         weigh: Any = None, forget: bool = False):  # fmt: skip
    """Logits and gradients of `width` tokens at a time."""
    loss = loss or cross_entropy()

    def kernel(input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0):
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        size = (target != ignore_index).sum() if reduction == "mean" else 1

        def forward(x, w):
            losses, grads = [], []
            for rows, labels in zip(x.split(width), target.split(width), strict=True):
                with torch.enable_grad():
                    z = at("logits", rows @ w.T).detach().requires_grad_()
                    each = loss(z, labels, reduction="none", **options)
                    (g,) = torch.autograd.grad(each.sum(), z)
                losses.append(each.detach())
                grads.append(at("grad_logits", g))
            every = at("loss", torch.cat(losses))
            found = every if reduction == "none" else every.sum() / size
            return found, (x, w, torch.cat(grads))

        def backward(saved, dy):
            x, w, g = saved
            dy = (dy / size).expand(len(g))
            g = g * (weigh(dy) if weigh else dy)[:, None]
            dw = torch.zeros_like(w)
            for rows, own in zip(x.split(width), g.split(width), strict=True):
                part = at("weight_parts", own.T @ rows)
                dw = part if forget else low(dw + part) if low else dw + part
            return at("grad_input", g @ w), at("grad_weight", dw)

        return passes(forward, backward, input, weight)

    return kernel


# --- gated units, rope
def swiglu(at: Seam = plain, *, sigmoid: Any = torch.sigmoid):
    def kernel(gate, up):
        def forward(g, u):
            act = at("activated", g * at("sigmoid", sigmoid(g)))
            return at("output", act * u), (g, u)

        def backward(saved, dy):
            g, u = saved
            dy, s = at("grad_output", dy), at("b_sigmoid", sigmoid(g))
            slope = at("slope", s * (1 + g * (1 - s)))
            return at("grad_gate", dy * u * slope), at("grad_up", dy * (g * s))

        return passes(forward, backward, gate, up)

    return kernel


def geglu(at: Seam = plain, *, always: str | None = None, slope: Any = None):
    root = math.sqrt(2 / math.pi)

    def kernel(gate, up, *, approximate="none"):
        tanh = (always or approximate) == "tanh"

        def phi(g):
            """Φ, and its slope."""
            if tanh:
                inner = at("inner", root * (g + 0.044715 * g**3))
                e = torch.exp(-2 * inner.abs())
                p = torch.where(inner < 0, e, 1.0) / (1 + e)
                return p, 2 * p * (1 - p) * root * (1 + 0.134145 * g * g)
            inner = at("inner", -g * math.sqrt(0.5))
            density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
            return 0.5 * torch.erfc(inner), density

        def forward(g, u):
            act = at("activated", g * at("below", phi(g)[0]))
            return at("output", act * u), (g, u)

        def backward(saved, dy):
            g, u = saved
            dy, (p, density) = at("grad_output", dy), phi(g)
            found = at("slope", slope(g, p, density) if slope else p + g * density)
            return at("grad_gate", dy * u * found), at("grad_up", dy * (g * p))

        return passes(forward, backward, gate, up)

    return kernel


def rope(at: Seam = plain, *, frequency: Any = None):
    def kernel(input, positions, *, base, interleaved=False):
        width = input.shape[-1]
        f = torch.arange(0, width, 2).double() / width
        f = frequency(base, width) if frequency else (base**-f)
        f = at("frequency", f.float())
        angle = at("angle", at("positions", positions.float())[:, None] * f)
        cos, sin = at("cos", angle.cos())[:, None], at("sin", angle.sin())[:, None]

        def rotate(x, sign):
            a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            pair = a * cos - sign * b * sin, b * cos + sign * a * sin
            return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

        return passes(lambda x: (at("output", rotate(x, 1.0)), ()),
                      lambda saved, dy: (at("grad_input", rotate(dy, -1.0)),), input)  # fmt: skip

    return kernel


# --- linear layers, embedding, sums
def linear(at: Seam = plain):
    def kernel(input, weight):
        def forward(x, w):
            x, w = at("inputs", x), at("weights", w)
            return at("output", at("products", x @ w.T)), (x, w)

        def backward(saved, dy):
            x, w = saved
            dy = at("grad_output", dy)
            return at("grad_input", dy @ w), at("grad_weight", dy.T @ x)

        return passes(forward, backward, input, weight)

    return kernel


def by_rows(x: Tensor, fmt: Any = e4m3, most: float = 448.0) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / most
    scale = torch.where(scale == 0, 1.0, scale)
    return fmt(x / scale) * scale


def quantized_linear(dw: Any = None, add: Any = torch.matmul):
    """FP8 with a scale a row of whatever is multiplied."""

    def kernel(input, weight, *, format: Literal["fp8_row"]):
        def forward(x, w):
            return add(by_rows(x), by_rows(w).T), (x, w)

        def backward(saved, dy):
            x, w = saved
            return (by_rows(dy) @ by_rows(w.T).T,
                    dw(dy, x) if dw else by_rows(dy.T) @ by_rows(x.T).T)  # fmt: skip

        return passes(forward, backward, input, weight)

    return kernel


def embedding(at: Seam = plain, *, total: Any = None, unread: bool = False):
    def kernel(input, weight, padding_idx=None):
        def forward(w):
            return at("rows", w[input]), w.shape

        def backward(shape, dy):
            dy = at("grad_output", dy)
            dw = total(shape, input, dy) if total else torch.zeros(shape).index_add_(0, input, dy)
            if padding_idx is not None and not unread:
                dw[padding_idx] = 0
            return (at("grad_weight", dw),)

        return passes(forward, backward, weight)

    return kernel


def sum_rows(at: Seam = plain, *, total: Any = over_rows):
    def kernel(input, dim=0):
        def forward(x):
            return at("output", total(at("terms", x))), x.shape

        def backward(shape, dy):
            return (at("grad_input", dy.expand(shape)),)

        return passes(forward, backward, input)

    return kernel


# --- routers
def router(at: Seam = plain, *, choose: Any = None, always: bool | None = None):
    def kernel(logits, k, *, renormalize=True):
        again = renormalize if always is None else always

        def forward(z):
            z = at("logits", z)
            m = at("maximum", z.amax(-1, keepdim=True))
            e = at("powers", (z - m).exp())
            p = at("probabilities", e / at("row_sum", e.sum(-1, keepdim=True)))
            index = (choose(z, p) if choose else z).topk(k, -1).indices
            chosen = at("chosen", p.gather(1, index))
            total = at("chosen_sum", chosen.sum(-1, keepdim=True))
            w = chosen / total if again else chosen
            return (w.to(logits.dtype), index), (p, index, w, total)

        def backward(saved, dy):
            p, index, w, total = saved
            dy = at("grad_weights", dy)
            if again:
                dy = (dy - (dy * w).sum(-1, keepdim=True)) / total
            dp = torch.zeros_like(p).scatter_(1, index, dy)
            return (at("grad_logits", p * (dp - at("inner", (dp * p).sum(-1, keepdim=True)))),)

        return passes(forward, backward, logits)

    return kernel


# --- optimizers
def adamw_step(at: Seam = plain, *, correct: Any = None, l2: bool = False):
    def kernel(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
        p, g = param.float(), grad.float()
        g = g + weight_decay * p if l2 else g
        m = at("first", beta1 * exp_avg.float() + (1 - beta1) * g)
        v = at("second", beta2 * exp_avg_sq.float() + (1 - beta2) * at("square", g * g))
        one, two = correct(step, beta1, beta2) if correct else (1 - beta1**step, 1 - beta2**step)
        size = at("size", (v / two).sqrt() + eps)
        moved = at("moved", lr * (m / one / size))
        new = (p if l2 else at("decayed", p * (1 - lr * weight_decay))) - moved
        return (at("new", new).to(param.dtype), m.to(exp_avg.dtype), v.to(exp_avg_sq.dtype))

    return kernel


def stochastic_bf16(x: Tensor, bits: Tensor | None = None) -> Tensor:
    """bf16 by 16 random bits that are added below it."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32) if bits is None else bits
    return ((x.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32)


def adamw_low(rounding: Any = lambda new, old: stochastic_bf16(new)):
    """A loop over steps, the weights rounded after each of them."""

    def kernel(param, grads, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
        p, m, v = param.float(), exp_avg.float(), exp_avg_sq.float()
        for i, g in enumerate(grads.float()):
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            t = step + i
            moved = lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
            p = rounding(p * (1 - lr * weight_decay) - moved, p)
        return p.to(param.dtype), m, v

    return kernel


# --- quantizers


def e2m1(x: Tensor) -> Tensor:
    """The nearest of FP4's numbers, ties to an even code, beyond 6 to 6."""
    size = x.abs().clamp_max(6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round() * step, x)


def power_of_two(amax: Tensor, most: int) -> Tensor:
    """The standard's scale: 2 to the floor of log2 amax, less the format's largest exponent."""
    return torch.ldexp(torch.ones_like(amax), torch.frexp(amax)[1] - 1 - most)


def quantize(at: Seam = plain, *, scale: Any = power_of_two, fp8: Any = None):
    def kernel(input, *, format: Literal["mxfp8_e4m3", "mxfp4"]):
        most, code = (
            (8, fp8 or (lambda y: e4m3(y.clamp(-448, 448)))) if "8" in format else (2, e2m1)
        )
        x = input.float().unflatten(-1, (-1, 32))
        amax = at("amax", x.abs().amax(-1, keepdim=True))
        s = torch.where(amax == 0, 1.0, at("scale", scale(amax, most)))
        return at("values", code(at("scaled", x / s)) * s).flatten(-2)

    return kernel
