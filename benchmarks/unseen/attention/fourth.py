"""The fourth set of faults that `halfulp reconstruct` was not written against, and sound kernels:
those of the forward pass are in fourth_forward.py, here are the backward pass's, two at
once, and those of float16 and float32.
"""

# ruff: noqa: ARG001, ARG005 - steps have the signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.fourth_forward import (
    FAULTS,
    SOUND,
    by_head,
    fault,
    one_key_over,
    product_chunks,
    sound,
)
from benchmarks.unseen.attention.fourth_kernel import (
    INF,
    LOG2_E,
    KeysOuter,
    Split,
    Tiled,
    Transposed,
    TwoPass,
    bf16,
    e4m3,
    e5m2,
    fp16,
    shifted,
    spans,
    tf32,
)
from torch import Tensor

__all__ = ["FAULTS", "SOUND"]


# --- backward, rounding


def exp_of_lse(self, s, lse):
    lse = torch.where(lse == -INF, 0.0, lse)
    return torch.exp2(s) * torch.exp2(-lse)


def low_delta(self, do, o, at):
    return bf16(do * o).sum(-1, keepdim=True)


def exp_back_half(self, s, lse):
    return fp16(torch.exp2(fp16(s - torch.where(lse == -INF, 0.0, lse))))


def reused_low_weights(self, s, lse):
    return bf16(Tiled.weights_again(self, s, lse))


def dk_of_scaled_query(self, ds, q, at):
    return ds.mT @ bf16(q * (at["scale"] * LOG2_E)) / (at["scale"] * LOG2_E)


fault("delta_products_bf16", "delta", "no-delta grad-scores", style=Transposed, delta=low_delta)
fault(
    "difference_bf16",
    "delta grad-scores",
    "",
    grad_scores=lambda self, p, dp, d, slope, at: bf16(p * bf16(dp - d) * slope),
)  # flash-attention PR 2893
fault("ds_shifted", "grad-scores", "delta", grad_scores=lambda self, p, dp, d, slope, at: (
    shifted(p * (dp - d) * slope)))  # fmt: skip
fault("dv_weights_shifted", "probabilities", "grad-stored",
      value_part=lambda self, p, do, at: shifted(p).mT @ do)  # fmt: skip
fault("dq_atomics_bf16", "grad-accumulator", "grad-stored",
      add_query=lambda self, dq, part, at: bf16(dq + part),
      key_tiles_back=lambda self, nk: spans(nk, 64)[::-1])  # fmt: skip
fault("dk_dv_in_bf16", "grad-accumulator", "grad-stored", style=Transposed,
      add_key=lambda self, dk, part, at: bf16(dk + part))  # fmt: skip
fault("gradients_cast_before_scale", "grad-stored", "prescaled grad-scores",
      scaled=lambda self, dq, dk, at: tuple(bf16(g) * at["scale"] for g in (dq, dk)))  # fmt: skip
fault(
    "exp_of_lse_apart",
    "exp-of-lse non-finite backward-weights",
    "lse backward-scores",
    weights_again=exp_of_lse,
)  # pytorch issue 196678
fault("backward_exp_half", "backward-scores backward-weights exponential",
      "probabilities grad-scores lse", dtype="float16", weights_again=exp_back_half)  # fmt: skip
fault("backward_weights_reused_bf16", "probabilities grad-scores backward-weights",
      "backward-scores", weights_again=reused_low_weights)  # fmt: skip
fault("lse_base_2_bf16", "lse", "backward-weights backward-scores lse-other", style=TwoPass,
      lse=lambda self, m, l, at: bf16(m + l.log2()))  # fmt: skip
fault(
    "dk_of_prescaled_query",
    "prescaled operand",
    "grad-scores grad-stored",
    key_part=dk_of_scaled_query,
)  # Triton's older tutorial


# --- backward, structure
def no_diagonal(self, cols, n, at):
    return [r for r in spans(n, 64) if not at["causal"] or r.start >= cols.start + 64]


def padded_rows(self, kept, do):
    """Rows past the end are the next head's, and not masked."""
    dq, dk, dv = Tiled.backward(self, kept, do)
    q, k, v, o, lse, at = kept
    n = q.shape[2]
    if n % 64 == 0 or at["causal"] or at["mask"] is not None or at["window"] is not None:
        return dq, dk, dv
    over = min(-n % 64, n)
    q, do, o, lse = (x.flatten(0, 1).roll(-1, 0).view_as(x)[:, :, :over] for x in (q, do, o, lse))
    p = self.weights_again(self.product(q, k, at) * LOG2_E, lse)
    ds = bf16(p * (do @ v.mT - (do * o).sum(-1, keepdim=True)))
    return (dq, dk + self.group(ds.mT @ q * at["scale"], at), dv + self.group(bf16(p).mT @ do, at))


def dq_of_last(self, dq, part, at):
    return part


def padded_lse(self, kept, do):
    """lse was written with rows padded to 32 and is read without."""
    q, k, v, o, lse, at = kept
    n = lse.shape[2]
    wide = torch.nn.functional.pad(lse, (0, 0, 0, -n % 32)).reshape(-1)
    return Tiled.backward(self, (q, k, v, o, wide[: lse.numel()].view_as(lse), at), do)


def first_delta(self, do, o, at):
    d = Tiled.delta(self, do, o, at)
    return d[:, :: at["groups"]].repeat_interleave(at["groups"], 1)


def by_heads_modulo(self, grad, at):
    return grad.unflatten(1, (at["groups"], -1)).sum(1)


def other_order(self, kept, do):
    dq, dk, dv = Tiled.backward(self, kept, do)
    b, h, n, d = dq.shape
    return dq.transpose(1, 2).reshape(b, h, n, d), dk, dv


def window_back(self, q, k, rows, cols, at):
    if at["window"] is not None and at["window"][0] > 0:
        at = at | {"window": (at["window"][0] - 1, at["window"][1])}
    return Tiled.scores(self, q, k, rows, cols, at)


def slope_scaled(self, q, k, at):
    c = at["cap"]
    if not c:
        return 1.0
    capped = c * torch.tanh(q @ k.mT * at["scale"] / c)
    return 1 - capped.square()


fault("backward_without_diagonal", "backward-mask grad-tail causal-mask", "",
      query_tiles_of=no_diagonal)  # fmt: skip
fault("backward_rows_past_end", "grad-tail ragged padding query-tail other-data",
      "group-sum lse", backward=padded_rows)  # fmt: skip
fault("dq_of_last_tile", "grad-tail", "other-data", add_query=dq_of_last)  # atomics left out
fault("lse_read_unpadded", "lse-other lse ragged other-data", "backward-scores backward-weights",
      backward=padded_lse)  # fmt: skip
fault(
    "delta_of_first_in_group", "delta no-delta key-heads other-data", "group-sum", delta=first_delta
)  # packed groups
fault("groups_modulo_in_backward", "group-sum key-heads", "other-data", group=by_heads_modulo)
fault("dq_in_other_layout", "layout other-data", "", backward=other_order)
fault("window_smaller_in_backward", "window backward-mask", "", scores_again=window_back)
fault("softcap_slope_of_scaled", "softcap", "grad-scores", slope=slope_scaled)
fault("dq_without_ln2", "grad-scale", "backward-scores",  # Triton's tutorial: dq *= LN2
      scaled=lambda self, dq, dk, at: (dq * at["scale"] * LOG2_E, dk * at["scale"]))  # fmt: skip
fault("delta_unscaled", "no-delta delta grad-scale", "grad-scores",
      grad_scores=lambda self, p, dp, d, slope, at: bf16(
          p * (dp * at["scale"] - d) * slope) / at["scale"])  # fmt: skip

# --- two at once
fault("two_accumulator_and_lse", "accumulator", "", "lse",
      add_values=lambda self, acc, a, p, v, at: bf16(acc * a + bf16(p) @ v),
      lse=lambda self, m, l, at: bf16(m + l.log2()))  # fmt: skip
fault("two_shifted", "weights", "weights-row-sum weights-disagree", "grad-scores",
      weights=lambda self, p, at: shifted(p),
      grad_scores=lambda self, p, dp, d, slope, at: shifted(p * (dp - d) * slope))  # fmt: skip
fault("two_ragged_and_accumulator", "padding ragged key-tail", "", "accumulator",
      rowwise=one_key_over,
      add_values=lambda self, acc, a, p, v, at: bf16(acc * a + bf16(p) @ v))  # fmt: skip
fault("two_group_and_delta", "group-sum key-heads", "", "delta", group=by_heads_modulo,
      delta=low_delta)  # fmt: skip
fault("two_exp_and_reciprocal", "exponential row-max", "weights", "reciprocal out",
      exp2=lambda self, x: bf16(torch.exp2(bf16(x))),  # ex2.approx.bf16x2
      divide=lambda self, acc, l, at: bf16(
          acc * bf16(1 / torch.where(l == 0, 1.0, l))))  # fmt: skip
fault("two_window_and_dq", "window backward-mask", "", "grad-accumulator",
      scores_again=window_back, add_query=lambda self, dq, part, at: bf16(dq + part))  # fmt: skip
fault("two_key_and_dk", "operand", "scores", "grad-accumulator",
      operands=lambda self, q, k, v, at: (q, by_head(e4m3, 448)(k), v),
      add_key=lambda self, dk, part, at: bf16(dk + part))  # fmt: skip


# --- float16
def flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 2**-14, 0.0, fp16(x))


half = {"dtype": "float16"}
fault("half_ds_flushed", "grad-scores", "grad-stored", **half, style=Transposed,
      grad_scores=lambda self, p, dp, d, slope, at: flushed(p * (dp - d) * slope))  # fmt: skip
fault("half_product_sums", "products scores", "operand", **half, product=product_chunks(fp16))
fault("half_key_tail_padded", "padding ragged key-tail", "sinks", **half, rowwise=one_key_over)
fault("half_two_sums_and_ds", "row-sum", "", "grad-scores", **half,
      add_row=lambda self, l, a, p, at: fp16(l * a + fp16(p.sum(-1, keepdim=True))),
      grad_scores=lambda self, p, dp, d, slope, at: e5m2(p * (dp - d) * slope))  # fmt: skip


# --- float32
def short_log2e(self, q, k, at):
    return q @ k.mT * at["scale"] * (1.4427 / LOG2_E)


single = {"dtype": "float32"}
fault("single_log2e_of_five_digits", "scale exponential", "scores", **single, product=short_log2e)
fault("single_values_tf32", "operand weights products", "", **single,
      weights=lambda self, p, at: tf32(p),
      operands=lambda self, q, k, v, at: (q, k, tf32(v)))  # fmt: skip
fault("single_dk_tf32", "grad-scores operand products", "", **single,
      key_part=lambda self, ds, q, at: tf32(ds).mT @ tf32(q))  # fmt: skip
fault("single_weights_shifted_tf32", "weights", "operand products", **single,
      weights=lambda self, p, at: (p.contiguous().view(torch.int32) & -8192).view(torch.float32)
)  # fmt: skip
fault("single_delta_bf16", "delta", "no-delta", **single,
      delta=lambda self, do, o, at: bf16(Tiled.delta(self, do, o, at)))  # fmt: skip


# --- sound
def exp_of_degree_6(self, x):
    whole = x.clamp_min(-126).floor()
    f = (x.clamp_min(-126) - whole) * math.log(2.0)
    series = 1 + f * (1 + f / 2 * (1 + f / 3 * (1 + f / 4 * (1 + f / 5 * (1 + f / 6)))))
    return torch.where(x < -126, 0.0, torch.ldexp(series, whole.int()))


def late_rescale(self, m, l, acc, s, v, at):
    """The maximum is only moved where it grew by 2⁸: as FlashAttention 4."""
    new = torch.maximum(m, s.amax(-1, keepdim=True))
    new = torch.where((m > -INF) & (new - m < 8), m, new)
    safe = torch.where(new == -INF, 0.0, new)
    p, a = torch.exp2(s - safe), torch.exp2(m - safe)
    return new, self.add_row(l, a, p, at), self.add_values(acc, a, p, v, at)


def checkpointed(query, key, value, *, is_causal, scale):
    """Chunks of queries, each differentiated by recomputation; weights kept in fp32."""

    def chunk(q, k, v, start):
        s = q.float() @ k.float().mT * scale
        if is_causal:
            i, j = torch.arange(start, start + q.shape[2])[:, None], torch.arange(k.shape[2])
            s = s.masked_fill(j > i, -INF)
        return (torch.softmax(s, -1) @ v.float()).to(q.dtype)

    run = torch.utils.checkpoint.checkpoint
    parts = [run(chunk, query[:, :, r], key, value, r.start, use_reentrant=False)
             for r in spans(query.shape[2], 64)]  # fmt: skip
    return torch.cat(parts, 2)


sound("tiled")
sound("tiled_32_by_96", rows=32, cols=96)
sound("keys_outer", style=KeysOuter)
sound("splits", style=Split)
sound("two_pass", style=TwoPass)
sound("transposed", style=Transposed)
sound("late_rescale", online=late_rescale)
sound("exp_of_degree_6", exp2=exp_of_degree_6)
sound("backward_from_last_key", key_tiles_back=lambda self, nk: spans(nk, 64)[::-1])
sound("half_tiled", dtype="float16")
sound("single_transposed", dtype="float32", style=Transposed)
SOUND.append(Fault("checkpointed", frozenset(), checkpointed))
