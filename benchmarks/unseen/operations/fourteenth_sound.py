"""Sound kernels of the fourteenth set of operations' faults, each written in a way of its own:
interleaved partial sums, rows about their first number, logarithms of probabilities, a few tokens
at a time, complex numbers, quotients by sign, even and odd columns, scales behind the products, a
table of codes, powers of the chosen alone.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Literal

import torch
from benchmarks.unseen.operations.eighth_steps import quantized, row_codes
from benchmarks.unseen.operations.second_kernels import by_rows, mean, passes
from torch import Tensor
from torch.nn import functional


def rms_of_interleaved_sums(input, normalized_shape, weight, eps):
    """Four partial sums, each of every fourth column; rows are divided by the root."""

    def total(x: Tensor) -> Tensor:
        fours = functional.pad(x, (0, -x.shape[1] % 4)).unflatten(1, (-1, 4)).sum(1)
        return (fours[:, :2] + fours[:, 2:]).sum(-1, keepdim=True)

    def forward(x, w):
        root = (total(x.square()) / x.shape[1] + eps).sqrt()
        return w * (x / root), (x, w, root)

    def backward(saved, dy):
        x, w, root = saved
        wdy = dy * w
        along = total(wdy * x) / (x.shape[1] * root * root)
        return (wdy - x * along) / root, torch.einsum("td,td->d", dy, x / root)

    return passes(forward, backward, input, weight)


def layer_norm_about_the_first(input, normalized_shape, weight, bias, eps):
    """Mean and mean square of a row less its first number, in fp64."""

    def forward(x, w, b):
        away = x.double() - x[:, :1].double()
        m = mean(away)
        r = (mean(away * away) - m * m + eps).rsqrt()
        normal = ((away - m) * r).float()
        return normal * w + b, (normal, w, r.float())

    def backward(saved, dy):
        normal, w, r = saved
        d = dy.shape[1]
        wdy = dy * w
        first, second = wdy.sum(-1, keepdim=True), (wdy * normal).sum(-1, keepdim=True)
        dx = r / d * (d * wdy - first - normal * second)
        ones = torch.ones(1, len(dy))
        return dx, (ones @ (dy * normal))[0], (ones @ dy)[0]

    return passes(forward, backward, input, weight, bias)


def softmax_by_one_logarithm(input, dim=-1):
    """e to a score less the logarithm of the sum of powers, in fp64; the gradient is the Jacobian's
    product, rows of which are built.
    """

    def forward(x):
        x = x.double()
        y = (x - torch.logsumexp(x, -1, keepdim=True)).exp().float()
        return y, y

    def backward(y, dy):
        inner = torch.bmm(y[:, None], dy[:, :, None])[:, 0]
        return (torch.addcmul(y * dy, y, inner, value=-1),)

    return passes(forward, backward, input)


def loss_of_log_probabilities(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    """The target is a distribution, and what is ignored has none."""
    kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
    hot = functional.one_hot(torch.where(kept, target, 0), v)
    wanted = ((1 - s) * hot + s / v) * kept[:, None]
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1

    def forward(x):
        logs = torch.log_softmax(x, -1)
        lse = (x[:, 0] - logs[:, 0]) * kept
        loss = lse_square_scale * lse.square() - torch.einsum("tv,tv->t", wanted, logs)
        return loss if reduction == "none" else loss.sum() / count, (logs, lse)

    def backward(saved, dy):
        logs, lse = saved
        own = kept + 2 * lse_square_scale * lse
        return ((logs.exp() * own[:, None] - wanted) * (dy / count).expand(len(logs))[:, None],)

    return passes(forward, backward, input)


def loss_of_five_tokens(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    """Five tokens at a time, from the last ones on, whose logits the backward pass has anew; those
    that are ignored have no turn.
    """
    kept, s, v = target != ignore_index, label_smoothing, len(weight)
    count = kept.sum().clamp_min(1) if reduction == "mean" else 1
    turns = kept.nonzero()[:, 0].flip(0).split(5) if kept.any() else ()

    def forward(x, w):
        loss = torch.zeros(len(x))
        for rows in turns:
            logs = torch.log_softmax(x[rows] @ w.T, -1)
            own = logs[torch.arange(len(rows)), target[rows]]
            loss[rows] = (s - 1) * own - s * logs.mean(-1)
        return loss if reduction == "none" else loss.sum() / count, (x, w)

    def backward(saved, dy):
        x, w = saved
        above = (dy / count).expand(len(x))
        dx, dw = torch.zeros_like(x), torch.zeros_like(w)
        for rows in turns:
            g = torch.softmax(x[rows] @ w.T, -1) - s / v
            g[torch.arange(len(rows)), target[rows]] -= 1 - s
            g = g * above[rows][:, None]
            dx[rows] = g @ w
            dw.addmm_(g.T, x[rows])
        return dx, dw

    return passes(forward, backward, input, weight)


def rope_of_complex_numbers(input, positions, *, base, interleaved=False):
    """A pair is a complex number, multiplied by one of absolute value 1, or by its conjugate."""
    half = input.shape[-1] // 2
    f = torch.exp(torch.arange(half).double() * (-math.log(base) / half))
    angle = torch.outer(positions.double(), f)
    unit = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)[:, None]

    def rotate(x: Tensor, unit: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * unit)
        return (turned if interleaved else turned.mT).flatten(-2)

    return passes(lambda x: (rotate(x, unit), ()),
                  lambda saved, dy: (rotate(dy, unit.conj()),), input)  # fmt: skip


def swiglu_by_sign(gate, up):
    """e to minus the gate's size, over 1 + that where the gate is below 0, else 1 over it."""

    def shares(g: Tensor) -> tuple[Tensor, Tensor]:
        e = torch.exp(-g.abs())
        large, small = 1 / (1 + e), e / (1 + e)
        return torch.where(g < 0, small, large), torch.where(g < 0, large, small)

    def forward(g, u):
        return u * g * shares(g)[0], (g, u)

    def backward(saved, dy):
        g, u = saved
        below, above = shares(g)
        return dy * u * torch.addcmul(below, g * below, above), dy * g * below

    return passes(forward, backward, gate, up)


def geglu_of_two_quotients(gate, up, *, approximate="none"):
    """1 / (1 + e^∓2z) in fp64, whose product is the slope of tanh; or the normal distribution."""

    def parts(g: Tensor) -> tuple[Tensor, Tensor]:
        if approximate == "tanh":
            twice = math.sqrt(8 / math.pi) * (g + 0.044715 * g**3)
            below, above = 1 / (1 + torch.exp(-twice)), 1 / (1 + torch.exp(twice))
            return below, below * above * math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * g * g)
        return torch.special.ndtr(g), torch.exp(-0.5 * g.square()) / math.sqrt(2 * math.pi)

    def forward(g, u):
        below, density = parts(g.double())
        return (u * (g * below)).float(), (g, u, below, density)

    def backward(saved, dy):
        g, u, below, density = saved
        return (dy * u * torch.addcmul(below, g.double(), density)).float(), (
            dy * (g * below)
        ).float()

    return passes(forward, backward, gate, up)


def linear_of_even_and_odd(input, weight):
    """What is summed over is split in the even and the odd, and each in the same way once more."""

    def product(a: Tensor, b: Tensor, depth: int = 2) -> Tensor:
        if not depth or a.shape[1] < 2:
            return a @ b
        return sum(product(a[:, i::2], b[i::2], depth - 1) for i in (0, 1))

    return passes(
        lambda x, w: (product(x, w.T), (x, w)),
        lambda saved, dy: (product(dy, saved[1]), product(dy.T, saved[0])),
        input,
        weight,
    )


def fp8_scaled_behind_the_products(input, weight, *, format: Literal["fp8_row"]):
    """Tiles of 48 of K of the codes, and the scales' products once behind their sum."""

    def forward(x, w):
        (a, sa), (b, sb) = row_codes(x), row_codes(w)
        total = torch.zeros(len(x), len(w))
        for left, right in zip(a.split(48, 1), b.split(48, 1), strict=True):
            total.addmm_(left, right.T)
        return total * torch.outer(sa[:, 0], sb[:, 0])

    return quantized(forward, by_rows)(input, weight)


def mxfp4_from_a_table(input, *, format: Literal["mxfp4"]):
    """Where a number's size lies among the middles of codes: those of which the upper code is even
    go up themselves.
    """
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    middles = (sizes[1:] + sizes[:-1]) / 2
    up = torch.arange(7) % 2 == 1
    middles = torch.where(up, torch.nextafter(middles, torch.zeros(())), middles)
    x = input.float().unflatten(-1, (-1, 32))
    most = x.abs().amax(-1, keepdim=True)
    exponent = torch.where(most == 0, 0, torch.frexp(most)[1] - 3)
    number = torch.bucketize(torch.ldexp(x, -exponent).abs(), middles)
    return torch.ldexp(torch.copysign(sizes[number], x), exponent).flatten(-2)


def router_of_the_chosen(logits, k, *, renormalize=True):
    """Powers of the chosen logits less the logarithm of their own sum, or of that of all."""

    def forward(z):
        best, index = z.topk(k, -1)
        w = (best - (best if renormalize else z).logsumexp(-1, keepdim=True)).exp()
        return (w.to(logits.dtype), index), (z, index, w)

    def backward(saved, dy):
        z, index, w = saved
        terms = w * dy
        inner = terms.sum(-1, keepdim=True)
        if renormalize:
            return (torch.zeros_like(z).scatter(1, index, terms - w * inner),)
        return ((-inner * torch.softmax(z, -1)).scatter_add(1, index, terms),)

    return passes(forward, backward, logits)
