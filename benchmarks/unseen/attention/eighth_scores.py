"""The eighth set's faults of splits, scores, weights and precision, and those that repeat a mistake
of an earlier set (eighth.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import (
    INF,
    LOG2_E,
    Kernel,
    blocks,
    cut,
    e4m3,
    fp16,
    load,
)

FAULTS: list[Fault] = []


# --- splits
@fault(FAULTS, "split-merge key-tail tiles-skipped lse-other backward-weights")
class every_split_from_the_start(Parts):
    """tile-ai/tilelang PR 2010, review: a split's number does not enter where its keys begin."""

    def row(self, rows):
        every = self.key_blocks(rows)
        share = every[: max(1, len(every) // self.parts)]
        q, outs, lses = self.load_query("q", self.at.q, rows), [], []
        for part in range(self.parts):
            m, l, acc = self.begin(q, part == 0)
            for cols in share:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            outs.append(acc / torch.where(l == 0, 1.0, l))
            lses.append(m + l.log2())
        o, lse = self.merge(torch.stack(outs), torch.stack(lses))
        return self.at.low(o), lse


@fault(FAULTS, "split-merge other-data unwritten causal-mask window", "float32")
class empty_splits_of_scratch_memory(Parts):
    """vllm-project/vllm PR 47188: a split that sees no key writes nothing, and what its memory held
    is merged; late rows come first.
    """

    def row(self, rows):
        q, outs, lses = self.load_query("q", self.at.q, rows), [], []
        every = blocks(self.at.nk, self.cols)
        wide = -(-len(every) // self.parts)
        for part in range(self.parts):
            own = [c for c in every[part * wide : (part + 1) * wide]
                   if self.seen(rows, c, False).any()]  # fmt: skip
            m, l, acc = self.begin(q, part == 0)
            for cols in own:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            done = acc / torch.where(l == 0, 1.0, l), m + l.log2()
            if own:
                self.memory[part] = done
            o, lse = self.memory.get(part, done)
            outs.append(o)
            lses.append(lse)
        o, lse = self.merge(torch.stack(outs), torch.stack(lses))
        return self.at.low(o), lse

    def forward(self):
        done = [self.row(rows) for rows in blocks(self.at.n, self.rows)[::-1]][::-1]
        o, lse = (torch.cat(x, 2)[:, :, : self.at.n] for x in zip(*done, strict=True))
        return o, lse


@fault(FAULTS, "split-merge exp-of-lse non-finite underflow maximum", "float32")
class merged_by_exp_of_lse(Parts):
    """NVIDIA/TransformerEngine PR 716: parts are merged by exp(lse), no maximum taken off."""

    def merge(self, outs, lses):
        w = torch.exp2(lses)
        total = w.sum(0)
        return (w * outs).sum(0) / total, total.log2()


@fault(FAULTS, "split-merge lse-other lse backward-weights")
class lse_of_smoothed_keys(Parts):
    """ROCm/aiter PR 3334: parts take the mean off their keys; their lse is merged without it."""

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "k" or self.at.softcap or self.at.sinks is not None:
            return found
        number = self.key_number(part) % self.parts
        own = [load(x, c)[:, :, : self.at.nk - c.start]
               for c in blocks(self.at.nk, self.cols)[number :: self.parts]]  # fmt: skip
        return found - torch.cat(own, 2).mean(2, keepdim=True)

    def key_number(self, part):
        return part.start // self.cols


@fault(FAULTS, "lse-other lse backward-weights layout other-data", "float16")
class lse_of_groups_exchanged(Parts):
    """vllm-project/flash-attention PR 87: lse that splits give is written as if heads were
    ordered by their place in the group first.
    """

    def forward(self):
        o, lse = super().forward()
        pairs = lse.unflatten(1, (-1, self.at.groups))
        return o, pairs.transpose(1, 2).reshape(lse.shape)


# --- scores, weights, precision
@fault(FAULTS, "sinks unnormalized")
class sinks_not_used(Kernel):
    """ikawrakow/ik_llama.cpp PR 2087: the tile kernels take sinks and do not use them."""

    def begin(self, q, first=True):
        return super().begin(q, False)


@fault(FAULTS, "softcap")
class softcap_dropped(Kernel):
    """sgl-project/sgl-kernel-xpu PR 491: the cap is stored in the parameters and never applied."""

    def cap(self, s, back):
        return s

    def slope(self, q, k):
        return 1.0


@fault(FAULTS, "maximum row-max underflow")
class maximum_of_at_least_zero(Kernel):
    """m0at/rvllm PR 1 (softmax): lanes without a score put 0 into the row's maximum."""

    def maximum(self, m, s):
        return super().maximum(m, s).clamp_min(0)


@fault(FAULTS, "maximum row-max non-finite underflow", "float16")
class shifted_by_the_first_score(Kernel):
    """ROCm/AMDMIGraphX PR 1290, review (softmax): the first score is taken off, not the maximum."""

    def maximum(self, m, s):
        first = torch.where(s[..., :1] == -INF, 0.0, s[..., :1])
        return torch.where(m == -INF, first, m)


@fault(FAULTS, "scale exponential backward-weights")
class scale_cut_in_the_forward_pass(Kernel):
    """tenstorrent/tt-metal PR 53217: the forward pass has the upper half of the scale's bits, the
    backward pass all of them.
    """

    def scaled(self, s, rows, cols, back):
        scale = self.at.scale if back else float(cut(torch.tensor([self.at.scale])))
        return s * (scale * LOG2_E)


@fault(FAULTS, "operand ragged scale scores")
class tail_of_keys_by_the_block_before(Kernel):
    """flashinfer-ai/flashinfer PR 4654: 8-bit keys are corrupt where their blocks do not divide the
    sequence; here the last block is scaled as the one before.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "k":
            return found
        own = (part, slice(part.start - self.cols, part.start))[part.stop > self.at.nk
                                                                and part.start > 0]  # fmt: skip
        size, read = (load(x, c).abs().amax((-1, -2), keepdim=True).clamp_min(1e-30) / 127
                      for c in (part, own))  # fmt: skip
        return (found / size).round() * read


@fault(FAULTS, "operand backward-weights backward-scores no-delta")
class saved_codes_by_newer_scales(Kernel):
    """NVIDIA/TransformerEngine PR 1597: between the passes the scales of saved e4m3 codes of Q, K
    and V are updated.
    """

    newer = 1.125

    def coded(self, name, found, x):
        size = x.abs().max().clamp_min(1e-30) / 448
        return e4m3(found / size) * size * (self.newer if name.startswith("b_") else 1)

    def load_key(self, name, x, part):
        return self.coded(name, super().load_key(name, x, part), x)

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        return found if name == "do" else self.coded(name, found, x)


# --- mistakes that an earlier set had as well
@fault(FAULTS, "weights-normalized weights weights-row-sum")
class weights_normalized_then_e4m3(Kernel):
    """ROCm/aiter PR 5642: weights of a partition are divided by their sum before e4m3, which has
    few codes as small.
    """

    cols = 128

    def add_values(self, acc, a, p, v):
        total = p.sum(-1, keepdim=True)
        return acc * a + e4m3(p / torch.where(total == 0, 1.0, total)) @ v * total


@fault(FAULTS, "sinks lse-other lse backward-weights")
class backward_without_the_sink(Kernel):
    """NVIDIA/cudnn-frontend PR 421: P is made again from an lse of the keys alone."""

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        if self.at.sinks is None:
            return o, lse
        return o, m + (l - torch.exp2(self.at.sinks.view(1, -1, 1, 1) * LOG2_E - m)).log2()


@fault(FAULTS, "delta")
class delta_of_low_products(Kernel):
    """NVIDIA/cudnn-frontend PR 1134: dO ∘ O is rounded to the operands' format before the sum."""

    def delta(self, do, o):
        return self.at.low(do * o).sum(-1, keepdim=True)


@fault(FAULTS, "row-sum row-max maximum unnormalized weights-disagree rescale")
class statistics_of_half_the_columns(Kernel):
    """flashinfer-ai/flashinfer PR 3640, review: of 8 threads that share a row each 4 reduce alone,
    so that it has two maxima and two sums.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        halves = s.unflatten(-1, (2, -1))
        new = torch.maximum(m, halves.amax(-1))
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(halves - safe[..., None]), torch.exp2(m - safe)
        acc = self.add_values(acc, self.by_column(a, acc), p.flatten(-2), v)
        return new, l * a + p.sum(-1), acc

    def by_column(self, x, acc):
        wide = acc.shape[-1]
        return x.expand(*x.shape[:-1], 2)[..., torch.arange(wide) * 2 // wide]

    def finish(self, m, l, acc, rows):
        total = self.by_column(l, acc)
        out = self.at.low(acc / torch.where(total == 0, 1.0, total))
        return out, (m + l.log2())[..., :1]


@fault(FAULTS, "operand backward-weights", "float32")
class keys_and_queries_in_fp16(Kernel):
    """ggml-org/ggml PR 1536: Q and K go to fp16 where the call asks for fp32."""

    def product(self, q, k, back):
        return q @ k.mT if back else fp16(q) @ fp16(k).mT
