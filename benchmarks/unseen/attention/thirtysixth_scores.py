"""The thirty-sixth set's faults of precision, codes, what is not finite, splits and the backward
pass (thirtysixth.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtysixth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, cut, e4m3, fp16, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "operand weights", "float32")
class dot_of_the_tutorial_in_tf32(Kernel):
    """alexdremov/kernels issue 1: Triton's tutorial takes what `tl.dot` does by itself, and that is
    TF32 where tensors are fp32.
    """

    def load_key(self, name, x, part):
        return cut(super().load_key(name, x, part), 13)

    def load_query(self, name, x, part):
        return cut(super().load_query(name, x, part), 13)

    def add_values(self, acc, a, p, v):
        return acc * a + cut(p, 13) @ v

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, cut(p, 13), cut(ds, 13)


@fault(FAULTS, "weights-normalized weights products")
class logits_cast_before_their_dot_with_v(ways.RowAtOnce):
    """vllm-project/vllm PR 2368: weights, which are normalized already, are cast to the operands'
    type, and so is each of their products with V before these are added up.
    """

    rows = 16

    def row(self, rows):
        low = self.at.low
        s, v = self.all_scores(rows)
        m, l, _ = self.begin(self.load_query("q", self.at.q, rows))
        top = torch.maximum(m, s.amax(-1, keepdim=True))
        safe = torch.where(top == -INF, 0.0, top)
        p = torch.exp2(s - safe)
        l = l * torch.exp2(m - safe) + p.sum(-1, keepdim=True)
        p = low(p / torch.where(l == 0, 1.0, l))
        out = torch.stack([low(p[:, :, i, :, None] * v).sum(-2) for i in range(p.shape[2])], 2)
        return low(out), safe + l.log2()


@fault(FAULTS, "products scores row-sum accumulator", "float16")
class reductions_in_the_models_type(ForwardAlone):
    """emmtrix/emx-onnx-cgen PR 742: Q Kᵀ, the sum of the softmax and the sum with V are added up in
    the model's own type, one number after another.
    """

    rows, cols = 128, 64

    def product(self, q, k, back):
        low, found = self.at.low, torch.zeros(())
        for x in range(q.shape[-1]):
            found = low(found + low(q[..., x, None] * k[..., None, :, x]))
        return found

    def scaled(self, s, rows, cols, back):
        return self.at.low(s * self.at.scale) * LOG2_E

    def add_row(self, l, a, p):
        low = self.at.low
        l = low(l * a)
        for x in range(p.shape[-1]):
            l = low(l + low(p[..., x, None]))
        return l

    def add_values(self, acc, a, p, v):
        low = self.at.low
        acc, p = low(acc * a), low(p)
        for x in range(p.shape[-1]):
            acc = low(acc + low(p[..., x, None] * v[..., x, None, :]))
        return acc


@fault(FAULTS, "products non-finite", "float16")
class multiplied_in_fp16_then_cast(ForwardAlone):
    """apache/tvm PR 16667: operands are multiplied in fp16, and only what comes out is cast to fp32
    and added up, in Q Kᵀ and in P V; large ones overflow.
    """

    rows, cols = 32, 64

    def product(self, q, k, back):
        return fp16(q[..., :, None, :] * k[..., None, :, :]).sum(-1)

    def add_values(self, acc, a, p, v):
        p = self.at.low(p)
        each = [fp16(p[..., x, None] * v[..., x, None, :]) for x in range(p.shape[-1])]
        return acc * a + torch.stack(each).sum(0)


# --- codes and their scales
@fault(FAULTS, "operand", "float16")
class calibrated_scales_silently_one(ForwardAlone):
    """sgl-project/sglang PR 20705: scales of an FP8 cache are loaded into a field that backends do
    not read: keys and values become e4m3 by a scale of 1.
    """

    def load_key(self, name, x, part):
        return load(e4m3(x.clamp(-448, 448)), part)


@fault(FAULTS, "scale value-factor operand")
class float_scales_never_set(ForwardAlone):
    """vllm-project/vllm PR 39418: `_k_scale` and `_v_scale` are set, by which the cache is written,
    and their floats, by which FlashInfer reads it, remain 1; here they are ¼ and ⅛.
    """

    def load_key(self, name, x, part):
        return load(e4m3(x / (0.25 if name == "k" else 0.125)), part)


@fault(FAULTS, "scale value-factor operand", "float16")
class host_scales_of_before_the_refit(ForwardAlone):
    """ai-dynamo/modelexpress PR 783: a refit replaces the scales of keys and values on the device,
    and those on the host, which attention takes, are of before; here ⅛ more and less.
    """

    def load_key(self, name, x, part):
        scale = x.abs().amax().clamp_min(2.0**-20) / 448
        stale = scale * (1.125 if name == "k" else 0.875)
        return load(e4m3((x / scale).clamp(-448, 448)) * stale, part)


# --- rows that see nothing
def softmax_of_padded_rows(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                           softcap=0.0, sinks=None):  # fmt: skip
    """allenai/OLMo issue 322: rows of padding, which may attend to nothing, are softmaxes of −∞
    alone, and NaN forwards and backwards.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1)], -1)
    return (s.softmax(-1)[..., :nk] @ v).to(query.dtype)


FAULTS.append(
    Fault("softmax_of_padded_rows", frozenset({"masked-row", "non-finite", "nan-escapes"}),
          softmax_of_padded_rows, "bfloat16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "masked-row non-finite nan-escapes")
class fallback_without_a_finite_maximum(ways.RowAtOnce):
    """ml-explore/mlx PR 2608: where all of a row's keys are masked the fallback takes −∞ off −∞;
    the fused kernel does not.
    """

    def row(self, rows):
        s, v = self.all_scores(rows)
        m, l, acc = self.begin(self.load_query("q", self.at.q, rows))
        top = torch.maximum(m, s.amax(-1, keepdim=True))
        p = torch.exp2(s - top)
        l = l * torch.exp2(m - top) + p.sum(-1, keepdim=True)
        return self.finish(top, l, acc + self.at.low(p) @ v, rows)


@fault(FAULTS, "masked-row non-finite nan-escapes", "float16")
class padding_of_length_zero_over_zero(ForwardAlone):
    """HabanaAI/vllm-fork PR 318: a sample of padding has length 0 and sees nothing, and prompt
    attention divides 0 by 0.
    """

    rows, cols = 32, 32

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        return out.masked_fill(l == 0, torch.nan), lse


# --- splits
@fault(FAULTS, "unstable split-merge")
class combined_in_a_race(ForwardAlone, Parts):
    """ROCm/FlyDSL PR 776: the reduction that combines partitions across workgroups has a race: it
    now and then gives something else for the same partial results, with ten times the error.
    """

    parts = 3

    def merge(self, outs, lses):
        late = torch.rand(outs.shape[1:3]) < 0.04
        before = self.memory.get("outs", torch.zeros_like(outs))
        self.memory["outs"] = outs
        read = outs.clone()
        read[-1] = torch.where(late[..., None, None], before[-1], outs[-1])
        return super().merge(read, lses)


# --- the backward pass
@fault(FAULTS, "unwritten grad-scale", "float16")
class gradient_of_dropout_times_its_chance(Kernel):
    """NVIDIA/apex PR 816: on the way back weights' gradients are multiplied by the chance p of
    dropout in place of 1 / (1 − p): where p is 0 nothing is left of dQ and dK.
    """

    chance = 0.0

    def grad_scores(self, p, dp, delta, slope):
        return super().grad_scores(p, dp * self.chance, delta * self.chance, slope)
