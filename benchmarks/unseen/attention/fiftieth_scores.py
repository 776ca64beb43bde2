"""The fiftieth set's faults of windows, caches, scores and what is added to them (fiftieth.py has
the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftieth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, fp16
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

FAULTS: list[Fault] = []


# --- windows
@fault(FAULTS, "window")
class window_not_implemented(ForwardAlone):
    """ggml-org/llama.cpp issue 7709 (Phi-3): the model's layers have a window of 2047, which the
    program does not know: beyond it tokens see all that came before.
    """

    rows, cols = 32, 64

    def window(self, i, j, back):
        return (i >= 0) & (j >= 0)


@fault(FAULTS, "window", "float16")
class config_without_its_window(ForwardAlone):
    """huggingface/candle issue 3698 (Phi-3), the second of two: the configuration has no field for
    `sliding_window`, and the mask is the plain causal one.
    """

    rows, cols = 128, 128

    def window(self, i, j, back):
        return (i >= 0) & (j >= 0)


@fault(FAULTS, "window cache")
class past_keys_not_sliced(ForwardAlone):
    """EricLBuehler/mistral.rs issue 246 (PR 244): the cache is not sliced to the window; the mask
    knows the window among the new tokens, and is zero for all that are cached. Here 64 tokens are
    new at a time.
    """

    rows, cols = 64, 32

    def window(self, i, j, back):
        return super().window(i, j, back) | (j < i // 64 * 64)


@fault(FAULTS, "window", "float16")
class window_that_counts_the_query(ForwardAlone):
    """vllm-project/vllm PR 4380: for a window of 2047 flash attention sees 2048 keys, and the masks
    for SDPA and xformers 2047: one too few.
    """

    rows, cols = 96, 64

    def window(self, i, j, back):
        return super().window(i, j, back) & (j > i - self.at.window[0])


@fault(FAULTS, "window")
class cache_cut_to_the_last_window(ForwardAlone):
    """rasbt/LLMs-from-scratch issue 1008: the cache is cut to the window once the new tokens, here
    sixteen, are in it, and the earlier ones of those miss the keys that only they see.
    """

    rows, cols = 48, 48

    def window(self, i, j, back):
        last = (i // 16 * 16 + 16).clamp_max(self.at.n)
        kept = j >= last - (self.at.window[0] + 1)
        return super().window(i, j, back) & kept


@fault(FAULTS, "window mask causal-mask")
class mask_of_all_tokens_cut_from_its_front(EveryBlock, ForwardAlone):
    """PaddlePaddle/PaddleFormers PR 4536 (Llama 4), review: the mask of chunks is made for as many
    tokens as there ever were, the cache holds the latest ones only, and as many of the mask's
    columns as there are keys are taken from its front: what belongs to the present tokens is cut
    off. Hidden pairs have the least number; here 32 tokens are new at a time, and the window is the
    caller's.
    """

    rows, cols = 32, 32

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.window is None or at.window[0] < 0 or not at.causal:
            return super().hide(s, rows, cols, back)
        first = max(rows.start - at.window[0], 0)
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        here = self.inside(j, back) & (j >= first) & (j < rows.stop)
        column = j - first
        keep = self.causal(i, column, back) & self.window(i, column, back)
        s = super().hide(torch.where(keep, s, -1e30), rows, cols, back) if at.mask is not None \
            else torch.where(keep, s, -1e30)  # fmt: skip
        return s.masked_fill(~here, -INF)


@fault(FAULTS, "window mask")
class full_layers_never_found(Kernel):
    """nvidia-cosmos/cosmos-rl PR 171 (Qwen2.5-VL): whether a layer of the vision encoder sees all
    is looked up by its number, which is a string, among integers: all layers have windows, here of
    64 tokens.
    """

    rows, cols = 64, 96

    def seen(self, rows, cols, back):
        at, keep = self.at, super().seen(rows, cols, back)
        if at.causal or at.mask is not None or at.window is not None or at.n != at.nk:
            return keep
        i = torch.arange(rows.start, rows.stop)[:, None]
        return keep & (torch.arange(cols.start, cols.stop)[None] // 64 == i // 64)


# --- caches
@fault(FAULTS, "cache window")
class cache_rolled_a_step_too_soon(ForwardAlone):
    """huggingface/transformers issue 37574: the cache of a window is rolled as soon as its last
    slot is to be filled, and not once it is full: the oldest key is lost, and before the newest
    lies a slot of zeros, which is attended to till it has gone through the window.
    """

    rows, cols = 64, 64

    def hide(self, s, rows, cols, back):
        s, at = super().hide(s, rows, cols, back), self.at
        self.memory["zeros"] = torch.tensor(False)
        if at.window is None or at.window[0] < 1 or not at.causal:
            return s
        wide = at.window[0] + 1
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        zeros = (j == i - wide + 1) & (i >= wide - 1) & (i < 2 * wide - 2)
        self.memory["zeros"] = zeros
        return s.masked_fill(zeros, 0.0)

    def add_values(self, acc, a, p, v):
        return super().add_values(acc, a, p.masked_fill(self.memory["zeros"], 0.0), v)


@fault(FAULTS, "mask")
class bias_dropped_behind_a_cache(ForwardAlone):
    """NVIDIA/TensorRT-LLM PR 13919 (T5), review: where there is a cache, here where there are more
    keys than queries, attention is the plain one, which gets no bias of positions.
    """

    rows, cols = 16, 128

    def bias(self, s, mask, back):
        return s if self.at.nk > self.at.n else super().bias(s, mask, back)


# --- what is added to the scores
@fault(FAULTS, "mask")
class distances_both_ways_in_cross_attention(ways.DistanceInCrossAttention):
    """huggingface/transformers PR 8518 (T5): the decoder's attention to the encoder has a bias of
    relative positions, both ways, where T5 has none.
    """

    rows, cols = 64, 64


@fault(FAULTS, "mask", "float32")
class distances_backwards_in_cross_attention(ways.DistanceInCrossAttention):
    """guillaume-be/rust-bert PR 171 (T5): the decoder's cross attention has a bias of relative
    positions, here as the decoder's own attention has it.
    """

    rows, cols, both_ways = 32, 96, False


# --- scores
@fault(FAULTS, "scores non-finite", "float16")
class upcast_forgotten_in_slices(WholeRows, ForwardAlone):
    """huggingface/diffusers PR 1591 (Stable Diffusion 2): attention that is to be in fp32 is not
    where it is computed in slices of heads: scores come out of their product in half, as does the
    softmax.
    """

    rows = 96

    def scaled(self, s, rows, cols, back):
        return fp16(s * self.at.scale) * LOG2_E

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = torch.exp2(s - safe)
        l = l * torch.exp2(m - safe) + p.sum(-1, keepdim=True)
        p = fp16(p / torch.where(l == 0, 1.0, l))
        return new, l, (p @ v) * l


@fault(FAULTS, "scale", "float16")
class factor_of_the_layer_not_loaded(ScaleOfItsOwn):
    """stanford-crfm/mistral issue 83 (GPT-2): the model was trained with scores that are divided by
    the layer's number as well; what evaluates it loads the default class, whose scale is 1/√d.
    """

    rows, cols = 128, 64

    def own(self):
        return float(self.at.q.shape[-1] ** -0.5)


# --- sinks
@fault(FAULTS, "sinks", "float16")
class sinks_hard_coded_to_false(ForwardAlone):
    """vllm-project/vllm-metal issue 212 (gpt-oss): the paged kernel has code for sinks, its caller
    sets `use_sinks = false` and has no argument for them: it is the plain softmax.
    """

    rows, cols = 16, 32

    def begin(self, q, first=True):
        return super().begin(q, False)
