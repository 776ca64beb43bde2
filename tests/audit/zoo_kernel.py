"""A tiled flash attention from the textbook (Dao 2023, Algorithms 1 and 2), with a place for a
fault at every step.

It shares no code with the package: kernels built on it are what the audit is tested on, so they
must not be made of what tests them. Internals are fp32; operands of products and results are
rounded to the input's dtype, as stock kernels do. The faults are those of bf16 kernels: with fp32
inputs "the input's dtype" rounds nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

INF = math.inf
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@dataclass(frozen=True)
class Low:
    """The input's dtype as a place to round to; values stay in fp32."""

    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()

    def cut(self, x: Tensor) -> Tensor:
        """Rounded toward zero."""
        bits = DROPPED_BITS[self.dtype]
        return ((x.contiguous().view(torch.int32) >> bits) << bits).view(torch.float32)


def keep_bits(x: Tensor, mantissa_bits: int) -> Tensor:
    """fp32 rounded to nearest even with that many explicit mantissa bits."""
    drop = 23 - mantissa_bits
    bits = x.contiguous().view(torch.int32)
    half = ((bits >> drop) & 1) + (1 << (drop - 1)) - 1
    return (((bits + half) >> drop) << drop).view(torch.float32)


def zero_if(condition: Tensor, x: Tensor) -> Tensor:
    return torch.where(condition, torch.zeros_like(x), x)


def finite(shift: Tensor) -> Tensor:
    """What a row is shifted by: 0 for one with nothing to attend to."""
    return zero_if(shift == -INF, shift)


# The textbook's steps, one function each; a faulty kernel replaces one.


def product(q: Tensor, k: Tensor, alpha: float, low: Low) -> Tensor:
    return q @ k.mT * alpha


def row_maximum(s: Tensor, m: Tensor) -> Tensor:
    return torch.maximum(m, s.amax(-1, keepdim=True))


def exponential(x: Tensor) -> Tensor:
    return torch.exp(x)


def rounded(p: Tensor, low: Low) -> Tensor:
    return low(p)


def add_row_sum(l: Tensor, rescale: Tensor, p: Tensor, tied: Tensor, low: Low) -> Tensor:
    return l * rescale + p.sum(-1, keepdim=True)


def add_out(acc: Tensor, rescale: Tensor, pv: Tensor, jump: Tensor, low: Low) -> Tensor:
    return acc * rescale + pv


def divide(acc: Tensor, l: Tensor, low: Low) -> Tensor:
    return acc / torch.where(l == 0, torch.ones_like(l), l)


def log_sum(m: Tensor, l: Tensor, low: Low) -> Tensor:
    return m + torch.log(l)


def probabilities(s: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(s - finite(lse))


def delta_from_out(do: Tensor, out: Tensor, exact_out: Tensor, low: Low) -> Tensor:
    return (do * out).sum(-1, keepdim=True)


def grad_scores(p: Tensor, dp: Tensor, delta: Tensor, low: Low) -> Tensor:
    return low(p * (dp - delta))


def add_grad(name: str, total: Tensor, block: Tensor, low: Low) -> Tensor:
    return total + block


def visible(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


@dataclass(frozen=True)
class Plan:
    """Every step of one kernel; the defaults are the textbook's."""

    block_query: int = 64
    block_key: int = 64
    reverse_keys: bool = False
    queries_outside: bool = False  # the backward pass's loops
    repeat_heads: Literal["interleave", "tile"] = "interleave"
    alpha: Callable[[float, int, Low], float] = lambda alpha, width, low: alpha
    read_value: Callable[[Tensor], Tensor] = lambda v: v
    pads_keys: bool = False  # to a whole tile, with zeros that are not hidden
    keys_visited: Callable[[int, int], int] = lambda n, block: n
    scores: Callable[[Tensor, Tensor, float, Low], Tensor] = product
    hidden: float = -INF
    visible: Callable[[Tensor, Tensor], Tensor] = visible
    mask_head: Callable[[Tensor], Tensor] = lambda mask: mask
    first_max: float = -INF
    row_max: Callable[[Tensor, Tensor], Tensor] = row_maximum
    exponential: Callable[[Tensor], Tensor] = exponential
    skips_tile: Callable[[Tensor, Tensor], Tensor] | None = (
        None  # (tile's maximum, m) -> rows for which the tile is left out
    )
    weights_operand: Callable[[Tensor, Low], Tensor] = rounded
    row_sum: Callable[..., Tensor] = add_row_sum
    accumulate: Callable[..., Tensor] = add_out
    divide: Callable[[Tensor, Tensor, Low], Tensor] = divide
    store: Callable[[Tensor, Low], Tensor] = rounded
    lse: Callable[[Tensor, Tensor, Low], Tensor] = log_sum
    # in the backward pass; None: as forward
    scores_again: Callable[[Tensor, Tensor, float, Low], Tensor] | None = None
    probabilities: Callable[[Tensor, Tensor], Tensor] = probabilities
    probabilities_operand: Callable[[Tensor, Low], Tensor] = rounded
    delta: Callable[[Tensor, Tensor, Tensor, Low], Tensor] = delta_from_out
    delta_again: bool = False  # δ = rowsum(dP ∘ P) by one more pass
    grad_scores: Callable[[Tensor, Tensor, Tensor, Low], Tensor] = grad_scores
    queries_visited: Callable[[int, int], int] = lambda n, block: n  # by dK and dV
    add_grad: Callable[[str, Tensor, Tensor, Low], Tensor] = add_grad
    returns_lse: bool = False


@dataclass(frozen=True)
class _Call:
    """The tensors of one call in fp32, `[B, H, N, D]`, key and value heads repeated."""

    plan: Plan
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    alpha: float
    low: Low
    groups: int

    def hide(self, s: Tensor, rows: slice, cols: slice) -> Tensor:
        if self.is_causal:
            i = torch.arange(rows.start, rows.start + s.shape[-2])[:, None]
            j = torch.arange(cols.start, cols.start + s.shape[-1])[None, :]
            s = s.masked_fill(~self.plan.visible(i, j), self.plan.hidden)
        if self.mask is not None:
            mask = self.plan.mask_head(self.mask)[..., rows, cols]
            s = (
                s.masked_fill(~mask, self.plan.hidden)
                if mask.dtype == torch.bool
                else s + mask.float()
            )
        return s

    def tiles(self, n: int, block: int) -> list[slice]:
        return [slice(i, min(i + block, n)) for i in range(0, n, block)]

    def out_of_sight(self, rows: slice, cols: slice) -> bool:
        i, j = (
            torch.arange(rows.start, rows.stop)[:, None],
            torch.arange(cols.start, cols.stop)[None, :],
        )
        return self.is_causal and not bool(self.plan.visible(i, j).any())


def forward(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """(O before rounding, lse, row maximum) by the online softmax."""
    plan, low, k, v = call.plan, call.low, call.key, call.plan.read_value(call.value)
    n_keys = plan.keys_visited(k.shape[2], plan.block_key)
    if plan.pads_keys and not call.is_causal and call.mask is None:
        missing = -n_keys % plan.block_key
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (k, v))
        n_keys += missing
    columns = call.tiles(n_keys, plan.block_key)
    parts = []
    for rows in call.tiles(call.query.shape[2], plan.block_query):
        q = call.query[:, :, rows]
        m = q.new_full((*q.shape[:3], 1), plan.first_max)
        l, acc = torch.zeros_like(m), q.new_zeros(*q.shape[:3], v.shape[3])
        for cols in reversed(columns) if plan.reverse_keys else columns:
            if call.out_of_sight(rows, cols):
                continue
            s = call.hide(plan.scores(q, k[:, :, cols], call.alpha, low), rows, cols)
            if plan.skips_tile is not None:
                s = s.masked_fill(plan.skips_tile(s.amax(-1, keepdim=True), m), -INF)
            m_new = plan.row_max(s, m)
            p = plan.exponential(s - finite(m_new))
            rescale = plan.exponential(m - finite(m_new))
            tied = (s.amax(-1, keepdim=True) == m) & (m > -INF)
            l = plan.row_sum(l, rescale, p, tied, low)
            pv = plan.weights_operand(p, low) @ v[:, :, cols]
            acc = plan.accumulate(acc, rescale, pv, m_new - m, low)
            m = m_new
        parts.append((plan.divide(acc, l, low), plan.lse(m, l, low), m))
    out, lse, m = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
    return out, lse, m


def backward(
    call: _Call, out: Tensor, exact_out: Tensor, lse: Tensor, do: Tensor
) -> dict[str, Tensor]:
    """dQ, dK, dV in fp32, heads still repeated, from O as stored and lse as kept."""
    plan, low, q, k = call.plan, call.low, call.query, call.key
    v = plan.read_value(call.value)
    scores = plan.scores_again or plan.scores
    rows_tiles = call.tiles(q.shape[2], plan.block_query)
    cols_tiles = call.tiles(plan.keys_visited(k.shape[2], plan.block_key), plan.block_key)
    pairs = [(rows, cols) for cols in cols_tiles for rows in rows_tiles]
    if plan.queries_outside:
        pairs = [(rows, cols) for rows in rows_tiles for cols in cols_tiles]
    pairs = [pair for pair in pairs if not call.out_of_sight(*pair)]

    def weights(rows: slice, cols: slice) -> Tensor:
        s = call.hide(scores(q[:, :, rows], k[:, :, cols], call.alpha, low), rows, cols)
        return plan.probabilities(s, lse[:, :, rows])

    delta = plan.delta(do, out, exact_out, low)
    if plan.delta_again:
        delta = torch.zeros_like(delta)
        for rows, cols in pairs:
            dp = do[:, :, rows] @ v[:, :, cols].mT
            delta[:, :, rows] += (dp * weights(rows, cols)).sum(-1, keepdim=True)
    grads = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    last_query = plan.queries_visited(q.shape[2], plan.block_query)

    def add(name: str, where: slice, block: Tensor) -> None:
        grads[name][:, :, where] = plan.add_grad(name, grads[name][:, :, where], block, low)

    for rows, cols in pairs:
        p = weights(rows, cols)
        ds = plan.grad_scores(p, do[:, :, rows] @ v[:, :, cols].mT, delta[:, :, rows], low)
        add("dq", rows, ds @ k[:, :, cols] * call.alpha)
        if rows.start < last_query:
            add("dv", cols, plan.probabilities_operand(p, low).mT @ do[:, :, rows])
            add("dk", cols, ds.mT @ q[:, :, rows] * call.alpha)
    return grads


class Tiled(torch.autograd.Function):
    """A plan's forward pass tied to its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, settings: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        call = prepared(query, key, value, *settings)
        exact, lse, _ = forward(call)
        out = call.plan.store(exact, call.low)
        ctx.call, ctx.kept = call, (out, exact, lse)
        given = lse.squeeze(-1)
        ctx.mark_non_differentiable(given)
        return out.to(query.dtype), given

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        grads = backward(call, *ctx.kept, grad_out.float())
        whole = (
            grads["dq"],
            *(ungroup(call.plan, grads[name], call.groups) for name in ("dk", "dv")),
        )
        return (*(x.to(call.low.dtype) for x in whole), None)


def prepared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    is_causal: bool,
    scale: float | None,
    mask: Tensor | None,
) -> _Call:
    groups, width, low = query.shape[1] // key.shape[1], query.shape[3], Low(query.dtype)
    k, v = key.float(), value.float()
    if groups > 1 and plan.repeat_heads == "interleave":
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    elif groups > 1:
        k, v = (x.repeat(1, groups, 1, 1) for x in (k, v))
    alpha = plan.alpha(width**-0.5 if scale is None else scale, width, low)
    full = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
    return _Call(plan, query.float(), k, v, full, is_causal, alpha, low, groups)


def ungroup(plan: Plan, grad: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return grad
    if plan.repeat_heads == "interleave":
        return grad.unflatten(1, (-1, groups)).sum(2)
    return grad.unflatten(1, (groups, -1)).sum(1)


# f(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False)
Attention = Callable[..., Any]


def kernel(name: str, plan: Plan) -> Attention:
    """The plan as a function that can be audited."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        out, lse = Tiled.apply(query, key, value, (plan, is_causal, scale, attn_mask))
        return (out, lse) if plan.returns_lse else out

    attention.__name__ = attention.__qualname__ = name
    return attention


@dataclass(frozen=True)
class ZooKernel:
    """One kernel of the zoo: faulty, or sound or stock and written differently."""

    name: str
    fn: Attention = field(repr=False)
    fault: str = ""  # one sentence; empty for kernels without one
    direction: Literal["forward", "backward", "both", ""] = ""  # the pass that holds the fault
    resembles: str = ""  # the public bug or the paper
    allclose: bool = (
        # whether out and gradients pass torch.allclose(rtol=atol=1e-2) against fp32 on Gaussian
        # input
        True
    )
    # makes inputs that show the fault
    shows_on: Callable[..., Any] | None = field(default=None, repr=False)
    expected: Literal["sound", "stock", "defect"] = "defect"
    plan: Plan | None = field(default=None, repr=False)  # for kernels that are a plan


TEXTBOOK_PLAN = Plan()
TEXTBOOK = kernel("textbook", TEXTBOOK_PLAN)
"""The unfaulted twin of every faulty kernel."""
