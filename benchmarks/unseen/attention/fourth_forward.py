"""Faults of the forward pass of the fourth set (fourth.py).

What authors of tiled kernels write: each fault has, set down before anything ran, the causes that
count as right and those that are only vague, and where it was seen; `second` is another fault that
is in the same kernel, both of which must be named.
"""

# ruff: noqa: ARG001, ARG005 - steps have the signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.fourth_kernel import (
    INF,
    LOG2_E,
    KeysOuter,
    Split,
    Tiled,
    Transposed,
    TwoPass,
    attention,
    bf16,
    e4m3,
    fp16,
    shifted,
    spans,
)
from torch import Tensor

FAULTS: list[Fault] = []
SOUND: list[Fault] = []


def fault(name, right, vague="", second="", dtype="bfloat16", style=Tiled, **steps):
    kernel = type(name, (style,), steps)()
    FAULTS.append(Fault(name, frozenset(right.split()), attention(kernel), dtype,
                        frozenset(vague.split()), frozenset(second.split())))  # fmt: skip


def sound(name, dtype="bfloat16", style=Tiled, **steps):
    SOUND.append(Fault(name, frozenset(), attention(type(name, (style,), steps)()), dtype))


# --- forward, rounding
def low_tile_sum(self, l, a, p, at):
    return l * a + p.to(torch.bfloat16).sum(-1, keepdim=True).float()


def early_cast(self, acc, l, at):
    return bf16(bf16(acc) / bf16(torch.where(l == 0, 1.0, l)))


def exp_half(self, x):
    return fp16(torch.exp2(fp16(x)))


def exp_cut_range(self, x):
    """A cubic on [0, 1) after a cast to int, which cuts toward zero where floor is meant."""
    x = x.clamp_min(-120)
    whole = x.to(torch.int32)
    f = x - whole
    cubic = 1.0 + f * (0.695146 + f * (0.227564 + f * 0.077119))
    return torch.where(x <= -120, 0.0, torch.ldexp(cubic, whole))


def product_chunks(fmt, width=16):
    def product(self, q, k, at):
        total = 0.0
        for part in spans(q.shape[-1], width):
            total = fmt(total + q[..., part] @ k[..., part].mT)
        return total * at["scale"]

    return product


def both_by_roots(self, q, k, at):
    root = math.sqrt(at["scale"])
    return at["low"](q * root) @ at["low"](k * root).mT


def by_head(fmt, most):
    def rounded(x):
        t = x.abs().amax((-1, -2), keepdim=True).clamp_min(1e-30) / most
        return fmt(x / t) * t

    return rounded


def int8_blocks(x: Tensor) -> Tensor:
    parts = [x[:, :, c] for c in spans(x.shape[2], 64)]
    return torch.cat([by_head(torch.round, 127)(part) for part in parts], 2)


def smoothed(self, q, k, v, at):
    """SageAttention: keys less their mean, then 8-bit integers a block."""
    mean = k.mean(2, keepdim=True)
    return int8_blocks(q), int8_blocks(k - mean) + mean, v


def skip_tiles(self, m, l, acc, s, v, at):
    """FlashAttention 4's threshold, in the wrong unit: what is below 2⁻⁴ is thought to vanish."""
    far = (s.amax(-1, keepdim=True) < m - 4) & (m > -INF)
    return Tiled.online(self, m, l, acc, s.masked_fill(far, -INF), v, at)


def half_rescaled(self, m, l, acc, s, v, at):
    """Small growth is not worth a rescale, but the weights take the new maximum."""
    new = torch.maximum(m, s.amax(-1, keepdim=True))
    safe = torch.where(new == -INF, 0.0, new)
    p, a = torch.exp2(s - safe), torch.exp2(m - safe)
    a = torch.where((m - safe > -1) & (m > -INF), 1.0, a)
    return new, self.add_row(l, a, p, at), self.add_values(acc, a, p, v, at)


fault("o_in_memory_bf16", "accumulator", "out rescale", style=KeysOuter,  # FlashAttention 1
      kept=lambda self, o, at: bf16(o))  # fmt: skip
fault("accumulator_shifted", "accumulator", "rescale weights",
      add_values=lambda self, acc, a, p, v, at: shifted(acc * a + bf16(p) @ v))  # fmt: skip
fault("tile_sum_bf16", "row-sum", "weights-row-sum weights-disagree", add_row=low_tile_sum)
fault("shifted_scores_bf16", "row-max scores", "exponential weights",
      shift=lambda self, s, m: bf16(s - m))  # fmt: skip
fault(
    "exp_half_packed", "exponential row-max", "weights scores", dtype="float16", exp2=exp_half
)  # ex2.approx.f16x2
fault("exp_cut_range", "exponential", "weights row-max", exp2=exp_cut_range)
fault("tiles_skipped_early", "tiles-skipped", "weights rescale", online=skip_tiles)  # FA 4
fault("rescale_skipped", "rescale", "unnormalized row-max split-merge", online=half_rescaled)
fault("weights_e4m3_times_256", "weights", "weights-row-sum weights-disagree", style=Transposed,
      weights=lambda self, p, at: e4m3(p * 256) / 256)  # fmt: skip
fault(
    "value_e4m3_a_head",
    "operand",
    "",
    operands=lambda self, q, k, v, at: (q, k, by_head(e4m3, 448)(v)),
)  # vLLM, kv_cache_dtype
fault("query_key_int8_smoothed", "operand", "scores products", operands=smoothed)  # SageAttention
fault(
    "early_cast", "out row-sum reciprocal accumulator", "", divide=early_cast
)  # Triton, tutorials
fault("both_prescaled_by_roots", "prescaled operand", "scores", product=both_by_roots)  # math
fault("scores_sum_bf16", "products scores", "operand", product=product_chunks(bf16))
fault(
    "weights_shifted",
    "weights",
    "weights-row-sum weights-disagree unnormalized",
    style=KeysOuter,
    weights=lambda self, p, at: shifted(p),
)  # packed by prmt, aiter PR 5151
fault(
    "softcap_low_tanh",
    "softcap scores",
    "exponential",
    cap=lambda self, s, at: at["cap"] * bf16(torch.tanh(s / at["cap"])) if at["cap"] else s,
)  # tanh.approx.bf16x2
fault("split_partials_bf16", "split-merge accumulator", "out rescale", style=Split,
      stored=lambda self, o, lse, at: (bf16(o), lse))  # fmt: skip
fault("split_lse_bf16", "split-merge lse", "rescale row-sum", style=Split,
      stored=lambda self, o, lse, at: (o, bf16(lse)))  # fmt: skip


def low_first_pass(self, q, k, v, rows, at):
    """The first of two passes sees scores in bf16, to read half as much."""

    class Low(Tiled):
        def scores(self, *given):
            return bf16(Tiled.scores(self, *given))

    return Low().rowwise(q, k, v, rows, at)


fault("first_pass_bf16", "row-sum weights-disagree scores unnormalized", "row-max lse",
      style=TwoPass, rowwise=low_first_pass)  # fmt: skip


# --- forward, structure


def short_diagonal(self, rows, nk, at):
    if not at["causal"]:
        return spans(nk, self.cols)
    return [slice(c.start, min(c.stop, rows.start + 48)) for c in spans(nk, self.cols)
            if c.start < min(rows.stop, rows.start + 48)]  # fmt: skip


def neighbor_tail(self, q, k, v, rows, at):
    """A last tile that is not masked reads on into the next head."""
    n, extra = k.shape[2], -k.shape[2] % 16
    if extra and not at["causal"] and at["mask"] is None and at["window"] is None:
        k, v = (torch.cat([x, x.flatten(0, 1).roll(-1, 0).view_as(x)[:, :, :extra]], 2)
                for x in (k, v))  # fmt: skip
        assert k.shape[2] == n + extra
    return Tiled.rowwise(self, q, k, v, rows, at)


def one_key_over(self, q, k, v, rows, at):
    if k.shape[2] % 64 and not at["causal"] and at["mask"] is None and at["window"] is None:
        k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (k, v))
    return Tiled.rowwise(self, q, k, v, rows, at)


def lower_power(self, acc, l, at):
    """Stored are as many features as the power of 2 below."""
    o = Tiled.divide(self, acc, l, at)
    return o * (torch.arange(o.shape[-1]) < 1 << (o.shape[-1].bit_length() - 1))


def heads_modulo(self, q, k, v, at):
    g, h = at["groups"], at["key_heads"]
    index = torch.arange(q.shape[1]) % h * g
    return q, k[:, index], v[:, index]


def stride_of_queries(self, q, k, v, at):
    """The batch's stride of K and V taken from Q."""
    if at["groups"] == 1:
        return q, k, v
    own = [x[:, :: at["groups"]] for x in (k, v)]
    wrong = [torch.stack([x.flatten(0, 1).roll(-b * q.shape[1], 0)[: x.shape[1]]
                          for b in range(len(x))]) for x in own]  # fmt: skip
    return q, *(x.repeat_interleave(at["groups"], 1) for x in wrong)


def few_programs(self, q, k, v, at):
    """A persistent grid of 132 programs whose loop was forgotten."""
    o, lse = Tiled.forward(self, q, k, v, at)
    tiles = o.shape[0] * o.shape[1] * -(-o.shape[2] // 64)
    if tiles > 132:
        flat = torch.arange(o.shape[0] * o.shape[1]).view(*o.shape[:2], 1, 1)
        tile = flat * -(-o.shape[2] // 64) + torch.arange(o.shape[2])[:, None] // 64
        o = torch.where(tile < 132, o, 0.0)
    return o, lse


def window_by_tiles(self, i, j, at):
    if at["window"] is None or at["window"][0] < 0:
        return Tiled.visible(self, i, j, at)
    first = -(-(i - at["window"][0]).clamp_min(0) // 16) * 16
    return Tiled.visible(self, i, j, at) & ((j >= first) | (j >= i))


def sum_goes_on(self, q, k, v, at):
    """A persistent program that resets O and the maximum, and not the row sum."""
    out, lse, carried = [], [], 0.0
    for number, rows in enumerate(self.query_tiles(q.shape[2])):
        m, l, acc = self.rowwise(q, k, v, rows, at)
        width = l.shape[2]
        l = l + (carried[:, :, :width] if number % 2 else 0.0)
        carried = torch.nn.functional.pad(l, (0, 0, 0, 64 - width))
        out.append(self.divide(acc, l, at))
        lse.append(self.lse(m, l, at))
    return torch.cat(out, 2), torch.cat(lse, 2)


def empty_split(self, outs, lses, at):
    return Split.merge(self, outs, torch.where(lses == -INF, 0.0, lses), at)


def ring(self, outs, lses, at):
    """Ring attention's merge, with O kept in bf16 between the steps."""
    o, lse = bf16(outs[0]), lses[0]
    for new, other in zip(outs[1:], lses[1:], strict=True):
        part = torch.sigmoid((torch.where(other == -INF, -1e4, other) - lse) / LOG2_E)
        o, lse = bf16(o - part * (o - new)), torch.logaddexp2(lse, other)
    return o, lse


def sink_a_split(self, q, k, v, cols, at):
    rows = slice(0, q.shape[2])
    m, l, acc = self.start(q, at)
    s = self.scores(q, k[:, :, cols], rows, cols, at)
    m, l, acc = self.online(m, l, acc, s, v[:, :, cols], at)
    return acc / torch.where(l == 0, 1.0, l), self.lse(m, l, at)


def scale_of_width(self, q, k, at):
    return q @ k.mT / math.sqrt(1 << (q.shape[-1] - 1).bit_length())


fault("diagonal_tile_short", "causal-mask", "tiles-skipped", key_tiles=short_diagonal)
fault("tail_of_next_head", "other-data ragged padding key-tail", "", rowwise=neighbor_tail)
fault("one_zero_key_over", "padding ragged key-tail", "sinks", rowwise=one_key_over)
fault("odd_width_unwritten", "ragged unwritten", "layout", divide=lower_power)
fault("key_heads_modulo", "key-heads", "other-data", operands=heads_modulo,
      group=lambda self, grad, at: grad.unflatten(1, (at["groups"], -1)).sum(1))  # fmt: skip
fault("batch_stride_of_queries", "other-data key-heads layout", "", operands=stride_of_queries)
fault("persistent_without_loop", "unwritten query-tail", "ragged other-data", forward=few_programs)
fault("window_by_tiles", "window", "tiles-skipped", visible=window_by_tiles)
fault("row_sum_goes_on", "unnormalized row-sum", "other-data rescale", forward=sum_goes_on)
fault(
    "empty_split_of_lse_0",
    "split-merge causal-mask unnormalized",
    "rescale",
    style=Split,
    merge=empty_split,
)  # flash-decoding, causal
fault("ring_of_bf16", "accumulator split-merge", "rescale out", style=Split, merge=ring)
fault("sink_in_every_split", "sinks", "split-merge row-sum", style=Split, part=sink_a_split)
fault("bias_without_log2e", "mask", "scale",
      bias=lambda self, s, mask, at: s + mask.float())  # fmt: skip
fault("scale_of_padded_width", "scale ragged", "", product=scale_of_width)
fault("hidden_at_minus_64", "mask-finite causal-mask", "mask key-tail",
      hide=lambda self, s, rows, cols, at: Tiled.hide(self, s, rows, cols, at).clamp_min(-64.0)
)  # fmt: skip
