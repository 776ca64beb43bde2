"""The second set of faults that `halfulp reconstruct` was not written against, with sound kernels.

One attention, computed densely in fp32 and written without a look at the first set's: operands of
products and results are rounded as stock kernels do, and a method a step is overridden. Faults are
modelled on public reports where one is named; a split-KV decode kernel has some of its own.
"""

# ruff: noqa: ARG001, ARG002, ARG005, D102 - the names of faults say what they are

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.unseen import Fault
from torch import Tensor

INF, LOG2_E = math.inf, math.log2(math.e)


def to(fmt: torch.dtype):
    return lambda x: x.to(fmt).float()


bf16, fp16, e4m3, e5m2 = map(
    to, (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
)


def tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return (((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) << 13).view(torch.float32)


def seen(shape: tuple[int, int], causal: bool, window: Any, offset: int = 0) -> Tensor:
    i, j = torch.arange(shape[0])[:, None] + offset, torch.arange(shape[1])[None]
    keep = torch.ones(shape, dtype=torch.bool)
    if causal:
        keep = keep & (j <= i)
    if window is not None:
        if window[0] >= 0:
            keep = keep & (j >= i - window[0])
        if window[1] >= 0:
            keep = keep & (j <= i + window[1])
    return keep


class Dense:
    """Attention over whole rows."""

    # --- forward
    def window(self, window: Any) -> Any:
        return window

    def visible(self, n: int, nk: int, causal: bool, window: Any) -> Tensor:
        return seen((n, nk), causal, self.window(window))

    def mask(self, mask: Tensor) -> Tensor:
        return mask

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def product(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return q @ k.mT * scale

    def cap(self, s: Tensor, c: float) -> Tensor:
        return c * torch.tanh(s / c) if c else s

    def hide(self, s: Tensor, at: dict[str, Any]) -> Tensor:
        s = s.masked_fill(~self.visible(*s.shape[-2:], at["causal"], at["window"]), -INF)
        if at["mask"] is None:
            return s
        mask = self.mask(at["mask"])
        return s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else s + mask.float()

    def scores(self, q: Tensor, k: Tensor, at: dict[str, Any]) -> Tensor:
        return self.hide(self.cap(self.product(q, k, at["scale"]), at["cap"]), at)

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def sink(self, sinks: Tensor, m: Tensor) -> Tensor:
        return torch.exp(sinks.view(1, -1, 1, 1) - m)

    def weights(self, p: Tensor, low: Any) -> Tensor:
        return low(p)

    def row_sum(self, p: Tensor) -> Tensor:
        return p.sum(-1, keepdim=True)

    def sum_values(self, p: Tensor, v: Tensor, low: Any) -> Tensor:
        return self.weights(p, low) @ v

    def out(self, o: Tensor, low: Any) -> Tensor:
        return low(o)

    def lse(self, m: Tensor, l: Tensor, at: dict[str, Any]) -> Tensor:
        return m + l.log()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: dict[str, Any]) -> tuple[Tensor, Tensor]:
        s = self.scores(q, k, at)
        m = s.amax(-1, keepdim=True)
        if at["sinks"] is not None:
            m = torch.maximum(m, at["sinks"].view(1, -1, 1, 1))
        m = torch.where(m == -INF, 0.0, m)
        p = self.exp(s - m)
        l = self.row_sum(p)
        if at["sinks"] is not None:
            l = l + self.sink(at["sinks"], m)
        o = self.sum_values(p, v, at["low"]) / torch.where(l == 0, 1.0, l)
        return self.out(o, at["low"]), self.lse(m, l, at)

    # --- backward
    def scores_again(self, q: Tensor, k: Tensor, at: dict[str, Any]) -> Tensor:
        return self.scores(q, k, at)

    def delta(self, do: Tensor, o: Tensor) -> Tensor:
        return (do * o).sum(-1, keepdim=True)

    def grad_out(self, do: Tensor) -> Tensor:
        return do

    def grad_weights(self, do: Tensor, v: Tensor) -> Tensor:
        return do @ v.mT

    def slope(self, q: Tensor, k: Tensor, at: dict[str, Any]) -> Tensor | float:
        c = at["cap"]
        return 1 - torch.tanh(self.product(q, k, at["scale"]) / c).square() if c else 1.0

    def grad_scores(self, p: Tensor, dp: Tensor, delta: Tensor, slope: Any, low: Any) -> Tensor:
        return low(p * (dp - delta) * slope)

    def grad_query(self, ds: Tensor, k: Tensor, scale: float) -> Tensor:
        return ds @ k * scale

    def grad_key(self, ds: Tensor, q: Tensor, scale: float) -> Tensor:
        return ds.mT @ q * scale

    def grad_value(self, p: Tensor, do: Tensor, low: Any) -> Tensor:
        return low(p).mT @ do

    def group(self, grad: Tensor, groups: int, low: Any) -> Tensor:
        return grad.unflatten(1, (-1, groups)).sum(2)

    group_value = group

    def backward(self, kept: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, o, lse, at = kept
        do, scale = self.grad_out(do), at["scale"]
        p = torch.exp(self.scores_again(q, k, at) - torch.where(lse == -INF, 0.0, lse))
        ds = self.grad_scores(
            p, self.grad_weights(do, v), self.delta(do, o), self.slope(q, k, at), at["low"]
        )
        return (
            self.grad_query(ds, k, scale),
            self.group(self.grad_key(ds, q, scale), at["groups"], at["low"]),
            self.group_value(self.grad_value(p, do, at["low"]), at["groups"], at["low"]),
        )


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, kernel, at):
        groups = query.shape[1] // key.shape[1]
        at = at | {"groups": groups, "low": to(query.dtype)}
        q, k, v = query.float(), *(x.float().repeat_interleave(groups, 1) for x in (key, value))
        q, k, v = kernel.operands(q, k, v)
        o, lse = kernel.forward(q, k, v, at)
        ctx.kept, ctx.kernel, ctx.dtype = (q, k, v, o, lse, at), kernel, query.dtype
        return o.to(query.dtype)

    @staticmethod
    def backward(ctx, grad):
        grads = ctx.kernel.backward(ctx.kept, grad.float())
        return (*(g.to(ctx.dtype) for g in grads), None, None)


def attention(kernel: Dense):
    def call(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
             window=None, softcap=0.0, sinks=None):  # fmt: skip
        at = {"causal": is_causal, "scale": scale, "mask": attn_mask, "window": window,
              "cap": softcap, "sinks": sinks}  # fmt: skip
        return _Apply.apply(query, key, value, kernel, at)

    return call


FAULTS: list[Fault] = []
SOUND: list[Fault] = []


def fault(name: str, *right: str, dtype: str = "bfloat16", **steps: Any) -> None:
    kernel = type(name, (Dense,), steps)()
    FAULTS.append(Fault(name, frozenset(right), attention(kernel), dtype))


def tiles(n: int, width: int):
    return [slice(i, min(i + width, n)) for i in range(0, n, width)]


# windows, caps, sinks
fault("window_one_too_many", "window", window=lambda self, w: w and (w[0] + 1, w[1]))  # tf 39408
fault("window_exclusive", "window", window=lambda self, w: w and (w[0] - 1, w[1]))
fault("window_forward_only", "window", "backward-mask",
      scores_again=lambda self, q, k, at: self.scores(q, k, at | {"window": None}))  # fmt: skip
fault("softcap_without_slope", "softcap", slope=lambda self, q, k, at: 1.0)  # flash-attn 1065
fault("softcap_rational_tanh", "softcap",
      cap=lambda self, s, c: (lambda x: c * x / (1 + x.abs()))(s / c) if c else s)  # fmt: skip
fault("softcap_hides_finitely", "softcap", "causal-mask", "mask-finite",
      scores=lambda self, q, k, at: self.cap(
          self.hide(self.product(q, k, at["scale"]), at), at["cap"]))  # fmt: skip
fault("sink_counted_twice", "sinks",  # rocm 12227
      sink=lambda self, sinks, m: 2 * torch.exp(sinks.view(1, -1, 1, 1) - m))  # fmt: skip
fault("sink_other_scale", "sinks",
      sink=lambda self, sinks, m: torch.exp(sinks.view(1, -1, 1, 1) * 0.125 - m))  # fmt: skip
fault("sink_misses_lse", "sinks", "lse-other", "lse",
      lse=lambda self, m, l, at: m + (
          l - (0 if at["sinks"] is None else self.sink(at["sinks"], m))).log())  # fmt: skip


# masks, tails, lengths
def _shifted_rows(self, mask):
    return mask.roll(1, -2)


def _own_tail(self, n, nk, causal, window):
    keep = seen((n, nk), causal, window)
    if causal and n % 64:
        keep[n // 64 * 64 :, nk // 64 * 64 :] = False
    return keep


def _tail_twice(self, s, at):
    s = Dense.hide(self, s, at)
    over = -s.shape[-1] % 32  # the last tile is moved back to fit
    if over and s.shape[-1] > 32:
        s[..., s.shape[-1] // 32 * 32 - over : s.shape[-1] // 32 * 32] += math.log(2.0)
    return s


def _stale_page(self, q, k, v):
    k, v = k.clone(), v.clone()
    if k.shape[2] % 16:
        k[:, :, k.shape[2] // 16 * 16 :], v[:, :, v.shape[2] // 16 * 16 :] = 0, 0
    return q, k, v


def _bottom_right(self, n, nk, causal, window):
    return seen((n, nk), causal, window, nk - n)


fault("mask_row_off_by_one", "mask", mask=_shifted_rows)
fault("mask_key_off_by_one", "mask", mask=lambda self, mask: mask.roll(1, -1))
fault("diagonal_tail_skipped", "causal-mask", "key-tail", "query-tail", visible=_own_tail)
fault("tail_keys_twice", "key-tail", "ragged", "padding", hide=_tail_twice)
fault("last_page_stale", "key-tail", "padding", "ragged", operands=_stale_page)
fault("aligned_bottom_right", "causal-mask", visible=_bottom_right)


# whose data, which layout
def _first_value(self, q, k, v):
    return q, k, v[:1].expand_as(v)


def _upper_heads(self, o, low):
    o = low(o)
    half = o.shape[1] // 2
    return torch.cat([o[:, :half], o[:, :half], o[:, 2 * half :]], 1) if half else o


def _swapped_octets(self, o, low):
    o = low(o)
    return o.unflatten(-1, (-1, 2, 8)).flip(-2).flatten(-3) if o.shape[-1] % 16 == 0 else o


def _shifted_columns(self, p, do, low):
    dv = Dense.grad_value(self, p, do, low)
    return torch.cat([dv[..., :-16], dv[..., -16:].roll(8, -1)], -1)


fault("value_of_first_sequence", "other-data", operands=_first_value)
fault("combine_writes_lower_heads", "other-data", out=_upper_heads)  # FlagGems 5235
fault("out_octets_swapped", "layout", "ragged", out=_swapped_octets)  # flash-attention 2553
fault("dv_columns_shifted", "layout", "ragged", grad_value=_shifted_columns)  # 2552


# forward arithmetic
def _schraudolph(self, x):
    y = (x.clamp_min(-80) * (2**23 * LOG2_E) + (127 * 2**23 - 366393)).to(torch.int32)
    return torch.where(x == -INF, 0.0, y.view(torch.float32))


def _int8(x: Tensor, dim: int) -> Tensor:
    step = x.abs().amax(dim, keepdim=True).clamp_min(1e-30) / 127
    return (x / step).round() * step


def _drawn(self, p, low):
    g = torch.Generator().manual_seed(0)
    bits = p.contiguous().view(torch.int32)
    noise = torch.randint(0, 2**16, p.shape, generator=g, dtype=torch.int32)
    return (((bits + noise) >> 16) << 16).view(torch.float32)


def _online(self, p, v, low, width=32, l_to=None, factor_to=None):
    """Sums of tiles; p came over one maximum, so that only what is rounded differs."""
    acc = 0.0
    for cols in tiles(p.shape[-1], width):
        acc = l_to(acc + low(p[..., cols]) @ v[:, :, cols])
    return acc


def _tiled_sum(self, p):
    l = 0.0
    for cols in tiles(p.shape[-1], 32):
        l = bf16(l + p[..., cols].sum(-1, keepdim=True))
    return l


fault("q_prescaled_log2e", "prescaled", "operand", "scores",  # ninetoothed 203
      product=lambda self, q, k, scale: bf16(q * (scale * LOG2_E)) @ k.mT / LOG2_E)  # fmt: skip
fault("exp_schraudolph", "exponential", exp=_schraudolph)
fault("weights_int8", "weights", weights=lambda self, p, low: (p * 127).round() / 127)
fault("weights_drawn", "weights", weights=_drawn)
fault("weights_below_thousandth", "weights", "tiles-skipped",
      weights=lambda self, p, low: low(p.masked_fill(p < 1e-3, 0.0)))  # fmt: skip
fault("key_int8_a_token", "operand", "scores",
      operands=lambda self, q, k, v: (q, _int8(k, -1), v))  # fmt: skip
fault("value_int8_a_channel", "operand", operands=lambda self, q, k, v: (q, k, _int8(v, -2)))
fault("row_sum_tiles_bf16", "row-sum", row_sum=_tiled_sum)
fault("out_fp8_a_row", "out",
      out=lambda self, o, low: (lambda t: low(e4m3(o / t) * t))(
          o.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448))  # fmt: skip
fault("weights_out_of_row", "weights-disagree", "unnormalized", "row-sum", "rescale",
      weights=lambda self, p, low: low(p * 0.99))  # fmt: skip


# backward
def _stale_delta(self, do, o):
    d = (do * o).sum(-1, keepdim=True)
    return d * (torch.arange(d.shape[2]) % 128 < 64)[:, None]


def _add(parts, rounding):
    total = 0.0
    for part in parts:
        total = rounding(total + part)
    return total


def _dk_atomic(self, ds, q, scale):
    return _add((ds[:, :, r].mT @ q[:, :, r] * scale for r in tiles(q.shape[2], 16)), bf16)


def _dq_atomic(self, ds, k, scale):
    return _add((ds[..., c] @ k[:, :, c] * scale for c in tiles(k.shape[2], 32)), fp16)


def _dq_without_last(self, ds, k, scale):
    n = k.shape[2]
    last = (n - 1) // 64 * 64 if n > 64 else n
    return ds[..., :last] @ k[:, :, :last] * scale


def _group_low(self, grad, groups, low):
    return _add(low(grad).unflatten(1, (-1, groups)).unbind(2), low)


def _scaled_e4m3(self, p, dp, delta, slope, low):
    ds = p * (dp - delta) * slope
    t = ds.abs().amax().clamp_min(1e-30) / 448
    return e4m3(ds / t) * t


fault("delta_of_stale_rows", "no-delta", "delta", delta=_stale_delta)  # flash-attention 2481
fault("dp_of_few_features", "ragged", "grad-scores", "delta", "no-delta",  # nsa-triton 27
      grad_weights=lambda self, do, v: do[..., : v.shape[3] * 3 // 4] @ v[
          ..., : v.shape[3] * 3 // 4].mT)  # fmt: skip
fault("dk_group_of_first", "group-sum", "key-heads",
      group=lambda self, grad, groups, low: grad[:, ::groups])  # fmt: skip
fault("group_sum_bf16", "group-sum", "grad-accumulator", "grad-stored", group=_group_low,
      group_value=_group_low)  # fmt: skip
fault("dk_atomic_bf16", "grad-accumulator", grad_key=_dk_atomic)
fault("dq_atomic_fp16", "grad-accumulator", grad_query=_dq_atomic)
fault("dq_without_last_block", "grad-tail", grad_query=_dq_without_last)
fault("ds_e4m3_a_tensor", "grad-scores", grad_scores=_scaled_e4m3)
fault("backward_scores_bf16", "backward-scores",
      scores_again=lambda self, q, k, at: bf16(self.scores(q, k, at)))  # fmt: skip
fault("backward_scale_a_hair", "backward-scores", "scale",
      scores_again=lambda self, q, k, at: self.scores(q, k, at | {"scale": float(
          torch.tensor(at["scale"] * LOG2_E).bfloat16()) / LOG2_E}))  # fmt: skip
fault("lse_of_scaled_max", "lse-other", "lse",  # Dynamic Mask Attention 106
      lse=lambda self, m, l, at: m * at["scale"] + l.log())  # fmt: skip
fault("delta_from_fp8_out", "delta", delta=lambda self, do, o: (do * e4m3(o)).sum(-1, keepdim=True))
fault("grad_out_e5m2", "operand", "grad-scores", grad_out=lambda self, do: e5m2(do))

# float16
half = {"dtype": "float16"}
fault("half_scores_unscaled", "scores", **half,
      product=lambda self, q, k, scale: fp16(q @ k.mT) * scale)  # fmt: skip
fault("half_accumulator", "accumulator", **half,
      sum_values=lambda self, p, v, low: _online(self, p, v, low, 64, fp16))  # fmt: skip
fault("half_lse_bf16", "lse", **half, lse=lambda self, m, l, at: bf16(m + l.log()))
fault("half_weights_bf16", "weights", **half, weights=lambda self, p, low: bf16(p))
fault("half_ds_bf16", "grad-scores", **half,
      grad_scores=lambda self, p, dp, d, s, low: bf16(p * (dp - d) * s))  # fmt: skip
fault("half_tail_of_32", "key-tail", "ragged", **half,
      visible=lambda self, n, nk, causal, window: seen((n, nk), causal, window) & (
          torch.arange(nk) < (nk // 32 * 32 if nk > 32 else nk)))  # fmt: skip

# float32
single = {"dtype": "float32"}
fault("single_products_tf32", "operand", "scores", **single,
      product=lambda self, q, k, scale: tf32(q) @ tf32(k).mT * scale)  # fmt: skip
fault("single_weights_bf16", "weights", **single, weights=lambda self, p, low: bf16(p))
fault("single_out_bf16", "out", **single, out=lambda self, o, low: bf16(o))
fault("single_lse_fp16", "lse", **single, lse=lambda self, m, l, at: fp16(m + l.log()))
fault("single_exp_12_bits", "exponential", "weights", **single,
      exp=lambda self, x: torch.exp(x) * (
          1 + 2**-12 * torch.sin(40 * x.clamp_min(-80))))  # fmt: skip
fault("single_causal_next", "causal-mask", **single,
      visible=lambda self, n, nk, causal, window: seen((n, nk), causal, window, 1))  # fmt: skip


# decode: the keys in splits that are merged, forward only
def decode(name: str, *right: str, merge: Any = None, cut: Any = None) -> None:
    def call(query, key, value, *, is_causal, scale, enable_gqa=False):
        groups, n, nk = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        with torch.no_grad():
            q = query.float()
            k, v = (x.float().repeat_interleave(groups, 1) for x in (key, value))
            s = (q @ k.mT * scale).masked_fill(~seen((n, nk), is_causal, None), -INF)
            parts = []
            for cols in (cut or tiles)(nk, 96):
                m = s[..., cols].amax(-1, keepdim=True)
                p = torch.exp(s[..., cols] - torch.where(m == -INF, 0.0, m))
                l = p.sum(-1, keepdim=True)
                o = bf16(p) @ v[:, :, cols] / torch.where(l == 0, 1.0, l)
                parts.append((o, m + l.log()))
            return (merge or merged)(parts).to(query.dtype)

    (FAULTS if right else SOUND).append(Fault(name, frozenset(right), call))


def merged(parts):
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    return (torch.softmax(lses, 0) * outs).sum(0)


decode("decode_splits")
decode("decode_merge_base", "split-merge", merge=lambda parts: merged(
    [(o, lse * LOG2_E) for o, lse in parts]))  # fmt: skip
decode("decode_partials_fp16_lse", "split-merge", "lse", "rescale", merge=lambda parts: merged(
    [(o, bf16(lse)) for o, lse in parts]))  # fmt: skip
decode("decode_partials_fp8", "split-merge", "accumulator", "out", merge=lambda parts: merged(
    [(e4m3(o), lse) for o, lse in parts]))  # fmt: skip
decode("decode_last_split_lost", "key-tail", "ragged",
       cut=lambda n, width: tiles(n, width)[: max(1, n // width)])  # fmt: skip

# sound ones
SOUND += [
    Fault("dense_bf16", frozenset(), attention(Dense())),
    Fault("dense_fp16", frozenset(), attention(Dense()), "float16"),
    Fault("dense_fp32", frozenset(), attention(Dense()), "float32"),
    Fault("dense_base_2", frozenset(), attention(type("Two", (Dense,), {
        "exp": lambda self, x: torch.exp2(x * LOG2_E)})())),
    Fault("dense_shift_8", frozenset(), attention(type("Eight", (Dense,), {
        "exp": lambda self, x: torch.exp(x - 8) * math.exp(8)})())),
    *(Fault(name, frozenset(), name, dtype) for name, dtype in (
        ("sdpa:flash", "float16"), ("sdpa:flash", "float32"), ("sdpa:math", "float32"),
        ("recipe:BF16_FLASH2[block_key=32,block_query=64]", "bfloat16"),
        ("recipe:FP16_FLASH2[block_key=96]", "float16"), ("recipe:BF16_HALFULP", "bfloat16"))),
]  # fmt: skip
