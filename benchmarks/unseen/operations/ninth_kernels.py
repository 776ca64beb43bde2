"""Faulty kernels of the ninth set of operations' faults, as ninth.py names them: norms, losses,
rotary embeddings and gated units here, what sums, quantizes and steps in ninth_steps.py.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen.operations.second_kernels import mean, passes
from torch import Tensor
from torch.nn import functional


# --- norms
def rms_norm(squares: Any = None, store: Any = None, read: Any = None):
    """`squares(x)` are a row's squares summed, of every lane that uses them; `store(y, x, r)` is
    what is left of results; `read(x, dy)` what the backward pass takes for rows.
    """

    def kernel(input, normalized_shape, weight, eps):
        def forward(x, w):
            total = squares(x) if squares else (x * x).sum(-1, keepdim=True)
            r = torch.rsqrt(total / x.shape[1] + eps)
            y = x * r * w
            return store(y, x, r) if store else y, (x, w, r)

        def backward(saved, dy):
            x, w, r = saved
            wdy, rows = dy * w, read(x, dy) if read else x
            normal = rows * r
            return r * (wdy - normal * mean(wdy * normal)), (dy * x * r).sum(0)

        return passes(forward, backward, input, weight)

    return kernel


def shuffled_down(x: Tensor) -> Tensor:
    """32 lanes add up by shuffles downward, and each goes on with its own sum: lane 0's is whole,
    and a lane that reaches beyond the warp adds what it has itself.
    """
    lanes = functional.pad(x * x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).sum(1)
    for offset in (16, 8, 4, 2, 1):
        other = torch.arange(32) + offset
        lanes = lanes + lanes[:, torch.where(other < 32, other, torch.arange(32))]
    return lanes[:, torch.arange(x.shape[1]) % 32]


def vectors_beyond_the_row(y: Tensor, x: Tensor, r: Tensor) -> Tensor:
    """Rows are stored in vectors of 8: the last one's rest, for which no weight is read, lies on
    the columns that the next row begins with.
    """
    rest = -y.shape[1] % 8
    out = y.clone()
    out[1:, :rest] = 0
    return out


def gradient_read_for_rows(x: Tensor, dy: Tensor) -> Tensor:
    """The buffer of rows was given to the gradient."""
    return dy


def layer_norm(spread: Any = None, sums: Any = None, eps_of: Any = None):
    """`spread(v)` is a variance with eps as it is kept, `sums(x)` the sum of a gradient's rows,
    `eps_of(eps)` what eps is.
    """

    def kernel(input, normalized_shape, weight, bias, eps):
        eps = eps_of(eps) if eps_of else eps

        def forward(x, w, b):
            c = x - mean(x)
            v = mean(c * c) + eps
            r = torch.rsqrt(spread(v) if spread else v)
            return c * r * w + b, (c * r, w, r)

        def backward(saved, dy):
            normal, w, r = saved
            wdy = dy * w
            dx = r * (wdy - mean(wdy) - normal * mean(wdy * normal))
            total = sums or (lambda rows: rows.sum(0))
            return dx, total(dy * normal), total(dy)

        return passes(forward, backward, input, weight, bias)

    return kernel


def zero(eps: float) -> float:
    return 0.0


def as_fp16(v: Tensor) -> Tensor:
    return v.half().float()


def blocks_of_the_floor(rows: Tensor) -> Tensor:
    """A partial sum for each of ⌊T / 16⌋ blocks of rows; the last block's lies beyond them."""
    return torch.stack([block.sum(0) for block in rows[: len(rows) // 16 * 16].split(16)]).sum(0)


# --- softmax
def softmax(fill: float = -math.inf, gradient: Any = None):
    """Rows in whole tiles of 32, filled up with `fill`; `gradient(dx, dy)` is what is stored."""

    def kernel(input, dim=-1):
        def forward(x):
            tiles = functional.pad(x, (0, -x.shape[1] % 32), value=fill)
            powers = (tiles - tiles.amax(-1, keepdim=True)).exp()
            y = (powers / powers.sum(-1, keepdim=True))[:, : x.shape[1]]
            return y, y

        def backward(y, dy):
            dx = y * (dy - (y * dy).sum(-1, keepdim=True))
            return (gradient(dx, dy) if gradient else dx,)

        return passes(forward, backward, input)

    return kernel


def multiplied_again(dx: Tensor, dy: Tensor) -> Tensor:
    """The engine multiplies what is a whole gradient already."""
    return dx * dy


def twice(dx: Tensor, dy: Tensor) -> Tensor:
    return 2 * dx


# --- losses
def entropy(own_of: Any = None, masked: Any = None):
    """`own_of(x, g, index)` is what is read for the label's logit, where g has been stored;
    `masked(kept, s)` which tokens count.
    """

    def kernel(
        input,
        target,
        *,
        ignore_index=-100,
        reduction="none",
        label_smoothing=0.0,
        lse_square_scale=0.0,
    ):
        kept, s, v = target != ignore_index, label_smoothing, input.shape[1]
        index = torch.where(kept, target, 0)[:, None]
        count = kept.sum().clamp_min(1) if reduction == "mean" else 1
        counted = masked(kept, s) if masked else kept

        def forward(x):
            lse = x.logsumexp(-1, keepdim=True)
            g = (x - lse).exp() * (1 + 2 * lse_square_scale * lse) - s / v
            g = g.scatter_add_(1, index, torch.full_like(lse, s - 1)) * counted[:, None]
            own = own_of(x, g, index) if own_of else x.gather(1, index)
            loss = (1 - s) * (lse - own) + lse_square_scale * lse * lse
            loss = (loss + s * mean(lse - x))[:, 0] * counted
            return loss if reduction == "none" else loss.sum() / count, g

        def backward(g, dy):
            return (g * (counted * dy / count)[:, None],)

        return passes(forward, backward, input)

    return kernel


def own_after_the_gradient(x: Tensor, g: Tensor, index: Tensor) -> Tensor:
    """Gradients are stored where logits were, and no barrier stands before the label's is read."""
    return g.gather(1, index)


def inverted_where_smoothed(kept: Tensor, s: float) -> Tensor:
    """Of smoothed distributions those of ignored tokens are left, and all others set to zero."""
    return ~kept if s else kept


def loss_of_linear(ignored: Any = None, slope: Any = None):
    """Logits 32 columns at a time. `ignored(own)` is the logit that a token without a label has,
    `slope(p)` what of probabilities the gradient is made of.
    """

    def kernel(input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0):
        kept, s = target != ignore_index, label_smoothing
        count = kept.sum().clamp_min(1) if reduction == "mean" else 1

        def forward(x, w):
            m, total = torch.full((len(x),), -math.inf), torch.zeros(len(x))
            own, every = torch.zeros(len(x)), torch.zeros(len(x))
            for start in range(0, len(w), 32):
                z = x @ w[start : start + 32].T
                new = torch.maximum(m, z.amax(-1))
                total = total * (m - new).exp() + (z - new[:, None]).exp().sum(-1)
                m, every = new, every + z.sum(-1)
                here = kept & (target >= start) & (target < start + z.shape[1])
                own[here] = z[here, target[here] - start]
            lse = m + total.log()
            if ignored:
                loss = lse - torch.where(kept, own, ignored(own))
            else:
                loss = torch.where(kept, lse - own, 0.0)
            loss = loss + torch.where(kept, s * (own - every / len(w)), 0.0)
            return loss if reduction == "none" else loss.sum() / count, (x, w, lse)

        def backward(saved, dy):
            x, w, lse = saved
            p = (x @ w.T - lse[:, None]).exp()
            g = (slope(p) if slope else p) - s / len(w)
            index = torch.where(kept, target, 0)[:, None]
            g.scatter_add_(1, index, torch.full_like(g[:, :1], s - 1))
            g = g * (kept * dy / count)[:, None]
            return g @ w, g.T @ x

        return passes(forward, backward, input, weight)

    return kernel


def of_the_token_before(own: Tensor) -> Tensor:
    """Where no chunk has the label, the memory is as the token before left it."""
    return own.roll(1)


def small_ones_filtered(p: Tensor) -> Tensor:
    """Probabilities below 2⁻¹² are taken for nothing."""
    return torch.where(p < 2.0**-12, 0.0, p)


# --- rope
def rotary(frequency: Any = None, tables: Any = None, in_place: bool = False):
    """`frequency(base, width)` in fp64; `tables(angle)` are cosines and sines; with `in_place` the
    second of a pair reads what the first has become.
    """

    def kernel(input, positions, *, base, interleaved=False):
        width = input.shape[-1]
        usual = base ** -(torch.arange(0, width, 2).double() / width)
        angle = positions.double()[:, None] * (frequency(base, width) if frequency else usual)
        cos, sin = tables(angle) if tables else (angle.cos().float(), angle.sin().float())
        cos, sin = cos[:, None], sin[:, None]

        def rotate(x, sign):
            a, b = x.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(
                -1 if interleaved else -2
            )
            first = a * cos - sign * b * sin
            second = b * cos + sign * (first if in_place else a) * sin
            return torch.stack([first, second], -1 if interleaved else -2).flatten(-2)

        return passes(lambda x: (rotate(x, 1.0), ()), lambda saved, dy: (rotate(dy, -1.0),), input)

    return kernel


def half_a_step_on(base: float, width: int) -> Tensor:
    """(2 k − 1) / d, k counted from 1."""
    return base ** -((torch.arange(0, width, 2).double() + 1) / width)


def ones_beyond_the_table(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Tables of whole vectors of 16 pairs; what is missing is filled with ones in both."""
    cos, sin = angle.cos().float(), angle.sin().float()
    whole = max(angle.shape[1] // 16 * 16, 1)
    cos[:, whole:] = 1
    sin[:, whole:] = 1
    return cos, sin


def fast_sines(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Of an angle in fp32, turned into turns of 2π with 21 binary places, no more reduced."""
    turns = ((angle.float() * (0.5 / math.pi)) * 2.0**21).floor() * 2.0**-21
    turns = (turns - turns.floor()).double() * 2 * math.pi
    return turns.cos().float(), turns.sin().float()


# --- gated units
def swiglu(sigmoid: Any = torch.sigmoid, slope: Any = None):
    """`slope(g, s)` is silu's of a gate and its sigmoid."""

    def kernel(gate, up):
        def forward(g, u):
            return g * sigmoid(g) * u, (g, u)

        def backward(saved, dy):
            g, u = saved
            s = sigmoid(g)
            own = slope(g, s) if slope else s * (1 + g * (1 - s))
            return dy * u * own, dy * (g * s)

        return passes(forward, backward, gate, up)

    return kernel


def half_added_last(g: Tensor) -> Tensor:
    """An odd function of fp32, and one half."""
    return 0.5 * torch.tanh(0.5 * g) + 0.5


def difference_for_the_product(g: Tensor, s: Tensor) -> Tensor:
    """s − (1 − s) is taken for the sigmoid's slope."""
    return s + g * (s - (1 - s))


def pairs_of_both_halves(gate, up):
    """Gates and ups lie one behind the other in a row, and are read in turns."""
    both = torch.cat([gate.float(), up.float()], -1)
    g, u = both[..., ::2], both[..., 1::2]
    return (functional.silu(g) * u).to(gate.dtype)


def geglu(tanh_act: Any = None, slope_at: Any = None):
    """`tanh_act(g, below)` is the activation by the tanh formula; the slope is that at
    `slope_at(activated)`.
    """
    root = math.sqrt(2 / math.pi)

    def kernel(gate, up, *, approximate="none"):
        def phi(g):
            if approximate == "tanh":
                inner = root * g * (1 + 0.044715 * g * g)
                below, above = torch.sigmoid(2 * inner), torch.sigmoid(-2 * inner)
                return below, 2 * below * above * root * (1 + 0.134145 * g * g)
            density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
            return 0.5 * torch.erfc(-g * math.sqrt(0.5)), density

        def forward(g, u):
            below = phi(g)[0]
            act = tanh_act(below) if tanh_act and approximate == "tanh" else g * below
            return act * u, (g, u)

        def backward(saved, dy):
            g, u = saved
            below, density = phi(g)
            if tanh_act and approximate == "tanh":
                return dy * u * density, dy * below
            act = g * below
            if slope_at:
                at = slope_at(act)
                below, density = phi(at)
                return dy * u * (below + at * density), dy * act
            return dy * u * (below + g * density), dy * act

        return passes(forward, backward, gate, up)

    return kernel


def without_the_input(below: Tensor) -> Tensor:
    """0.5 (1 + tanh), and no gate times it."""
    return below


def the_activated(act: Tensor) -> Tensor:
    """What was kept is the activated gate, and no other."""
    return act
