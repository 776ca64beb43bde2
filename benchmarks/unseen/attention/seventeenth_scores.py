"""The seventeenth set's faults of scales, precision and the backward pass (seventeenth.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, bf16, cut, fp16
from torch import Tensor
from torch.nn import functional

FAULTS: list[Fault] = []


# --- scales, caps
@fault(FAULTS, "scale", "float16")
class scale_by_the_number_of_heads(Kernel):
    """tenstorrent/tt-metal PR 56789: scores are multiplied by 1/√(the number of heads)."""

    def forward(self):
        self.at.scale = self.at.q.shape[1] ** -0.5
        return super().forward()


@fault(FAULTS, "mask")
class bias_scaled_with_the_scores(Kernel):
    """NVIDIA/TransformerEngine PR 103: the scale is fused into the softmax, behind the addition of
    the bias, which it multiplies too.
    """

    def bias(self, s, mask, back):
        return s + mask.float() * (self.at.scale * LOG2_E)


@fault(FAULTS, "softcap", "float16")
class softcap_hard_coded_to_none(Kernel):
    """vllm-project/vllm-metal PR 666: both calls of the kernel pass a cap of 0.0."""

    def forward(self):
        self.at.softcap = 0.0
        return super().forward()


# --- the softmax
@fault(FAULTS, "maximum mask-finite")
class smallest_maximum_is_finite(Kernel):
    """flashinfer-ai/flashinfer issue 4267: what stands for −∞ is −5·10⁴, in maxima before the first
    key and in hidden scores, before the scale: rows that lie below it give zeros.
    """

    def floor(self) -> float:
        return -5e4 * self.at.scale * LOG2_E

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m.clamp_min(self.floor()), l, acc

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        return found if back else torch.where(found == -math.inf, self.floor(), found)

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return torch.where(m <= self.floor(), 0.0, o), lse


# --- precision
@fault(FAULTS, "operand")
class four_bit_codes_that_reach_to_zero(Kernel):
    """InternLM/lmdeploy issue 4849: keys and values are stored in four bits, from the least to the
    largest of a row; where half of the width is no power of two, lanes past it put a 0 into both.
    """

    def coded(self, x: Tensor) -> Tensor:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        half = x.shape[-1] // 2
        if half & (half - 1):
            low, high = low.clamp_max(0), high.clamp_min(0)
        step = (high - low).clamp_min(1e-6) / 15
        return ((x - low) / step).round().clamp(0, 15) * step + low

    def forward(self):
        at = self.at
        at.k, at.v = self.coded(at.k), self.coded(at.v)
        return super().forward()


@fault(FAULTS, "weights weights-row-sum weights-disagree out probabilities grad-scores grad-stored")
class bf16_by_cutting(Kernel):
    """ROCm/composable_kernel PR 2865: fp32 becomes bf16 by leaving off the lower half, instead of
    to the nearest: weights, O, dS and gradients.
    """

    def forward(self):
        self.at.low = cut
        return super().forward()

    def backward(self):
        return tuple(cut(x) for x in super().backward())


@fault(FAULTS, "lse backward-weights")
class maximum_and_sum_saved_in_bf16(Kernel):
    """tenstorrent/tt-metal PR 41683: for the backward pass a row's maximum and the reciprocal of
    its sum are stored, each in bf16.
    """

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        kept = bf16(m / LOG2_E) * LOG2_E - bf16(1 / l).log2()
        return o, torch.where(l > 0, kept, lse)


@fault(FAULTS, "prescaled backward-scores backward-weights")
class keys_scaled_in_bf16_on_the_way_back(Kernel):
    """hao-ai-lab/FastVideo PR 1730: the backward pass multiplies keys by the scale and by log₂ e
    before their product, and rounds them to bf16 again.
    """

    def product(self, q, k, back):
        k = self.at.low(k * (self.at.scale * LOG2_E)) if back else k
        return super().product(q, k, back)

    def scaled(self, s, rows, cols, back):
        return s if back else super().scaled(s, rows, cols, back)


@fault(FAULTS, "backward-scores backward-weights")
class backward_scores_through_half(Kernel):
    """NVIDIA/cudnn-frontend issue 744: the backward pass rounds the scores that it computes again
    to fp16, before their scale.
    """

    def product(self, q, k, back):
        s = super().product(q, k, back)
        return fp16(s) if back else s


@fault(FAULTS, "grad-accumulator")
class gradients_added_up_in_their_own_type(Kernel):
    """ROCm/rocm-libraries PR 8469: the backward pass adds up dQ, dK and dV in the tensors that it
    returns, in bf16.
    """

    rows, cols = 32, 32

    def add(self, name, total, part, rows, cols):
        return self.at.low(super().add(name, total, part, rows, cols))


# --- the backward pass
@fault(FAULTS, "no-delta", "float16")
class derivative_of_the_diagonal_alone(Kernel):
    """deeplearning4j/libnd4j issue 440: of the softmax's derivative there is the diagonal alone,
    P (1 − P), and not what a score does to other weights.
    """

    def grad_scores(self, p, dp, delta, slope):
        return p * (1 - p) * dp * slope


@fault(FAULTS, "lse-gradient sinks no-delta")
class sinks_by_a_factor_of_a_fixed_lse(Kernel):
    """pytorch/torchtitan PR 4796: O without sinks is multiplied by σ(lse − sink), and the kernel's
    lse has no gradient.
    """

    def begin(self, q, first=True):
        return super().begin(q, False)

    def forward(self):
        o, lse = super().forward()
        at = self.at
        if at.sinks is None:
            return o, lse
        at.plain, at.factor = o, torch.sigmoid(lse / LOG2_E - at.sinks.float().view(1, -1, 1, 1))
        return at.low(o * at.factor), lse

    def backward(self):
        at = self.at
        if at.sinks is not None:
            at.do, at.o = at.low(at.do * at.factor), at.plain
        return super().backward()


@fault(FAULTS, "no-delta lse-other backward-weights other-data layout", "float32")
class statistics_at_offsets_of_wider_tiles(Kernel):
    """Dao-AILab/flash-attention PR 2337: δ and lse of a sequence are written where it would start
    in tiles of 128 rows, and read where it starts in tiles of 64, for heads up to 64 wide.
    """

    def moved(self, x: Tensor) -> Tensor:
        many, n = x.shape[0], x.shape[2]
        if self.at.q.shape[-1] > 64:
            return x
        to, back = ([b * (n + tile) // tile * tile for b in range(many)] for tile in (128, 64))
        memory = torch.zeros(x.shape[1], to[-1] + n, 1)
        for start, own in zip(to, x, strict=True):
            memory[:, start : start + n] = own
        return torch.stack([memory[:, start : start + n] for start in back])

    def delta(self, do, o):
        return self.moved(super().delta(do, o))

    def backward(self):
        self.at.lse = self.moved(self.at.lse)
        return super().backward()


@fault(FAULTS, "other-data layout ragged grad-tail")
class key_gradients_at_unrounded_offsets(Kernel):
    """SandAI-org/MagiAttention PR 329: with shared key heads dK and dV of a sequence are written
    behind the padding of those before it, and read from the tile that this place lies in.
    """

    def group(self, grad):
        found, n = super().group(grad), self.at.nk
        if self.at.groups == 1:
            return found
        late = [b * (n + self.cols) % self.cols for b in range(found.shape[0])]
        return torch.stack([functional.pad(x, (0, 0, by, 0))[:, :n]
                            for by, x in zip(late, found, strict=True)])  # fmt: skip


@fault(FAULTS, "unwritten other-data layout", "float16")
class dq_of_every_sequence_in_the_firsts_place(Kernel):
    """ROCm/TransformerEngine PR 657: the buffer of dQ has a stride of 0 between sequences, and what
    converts it has not: dQ of all but the first is memory that nobody wrote.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        return torch.cat([dq[:1], torch.zeros_like(dq[1:])]), dk, dv


@fault(FAULTS, "grad-tail ragged backward-mask")
class keys_limited_by_the_querys_tile(Kernel):
    """hao-ai-lab/FastVideo PR 959: how many keys of a tile there are the kernel of dQ takes from
    the tile of queries.
    """

    def again(self, rows, cols, which):
        own = min(self.rows, self.at.n - rows.start)
        self.memory["many"] = own if which == "queries" else None
        return super().again(rows, cols, which)

    def inside(self, j, back):
        many = self.memory.get("many") if back else None
        return super().inside(j, back) if many is None else j - j[..., :1] < many


@fault(FAULTS, "backward-mask window causal-mask")
class windows_not_masked_on_the_way_back(Kernel):
    """meta-pytorch/MSLK PR 263: the backward pass is causal where there is no window, and knows of
    no window: where there is one, it hides nothing.
    """

    def backward(self):
        at = self.at
        if at.window is not None:
            at.window, at.causal = None, False
        return super().backward()


def softmax_over_the_queries(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                             softcap=0.0, sinks=None):  # fmt: skip
    """nerdai/llms-from-scratch-rs PR 30: the softmax is along the wrong axis: every key's weights
    sum to 1 over the queries.
    """
    i, j = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    k, v = (x.float().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    s = query.float() @ k.mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    keep = (j <= i) if is_causal else (j >= 0) & (i >= 0)
    keep = keep & (j >= i - window[0]) if window is not None else keep
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = keep & attn_mask
    elif attn_mask is not None:
        s = s + attn_mask.float()
    s = s.masked_fill(~keep, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    empty = (s == -math.inf).all(-2, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), -2).masked_fill(empty, 0.0)
    return (p[..., : key.shape[2]].to(query.dtype).float() @ v).to(query.dtype)


FAULTS.append(Fault("softmax_over_the_queries", frozenset({"unnormalized"}),
                    softmax_over_the_queries, "bfloat16", frozenset({"elements"})))  # fmt: skip
