"""The sixty-fourth set's faults of scales, caps, softmaxes and caches (sixtyfourth.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG001, ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtyfourth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import LOG2_E
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of

FAULTS: list[Fault] = []


# --- scales
@fault(FAULTS, "scale", "float16")
class divided_by_the_layer_and_multiplied_again(ways.TimesTheScale):
    """Oneflow-Inc/libai PR 54 (T5): scores ought to be divided by √d and by the layer's number;
    Megatron's scaled softmax multiplies by that number again, and so every layer has the first
    one's scale. Here it is the third layer.
    """

    rows, cols = 64, 32

    def times(self):
        return 3.0


@fault(FAULTS, "scale")
class root_of_the_inputs_width(ways.TimesTheScale):
    """bbruceyuan/LLMs-Zero-to-Hero PR 2: one head's scores are divided by √(hidden size), which is
    the width of its input, of all heads together, where it ought to be √(head size).
    """

    rows, cols = 96, 64

    def times(self):
        return float(self.at.q.shape[1] ** -0.5)


def weights_over_the_root_of_emb_size(query, key, value, *, is_causal=False, scale=None,
                                      attn_mask=None, window=None, softcap=0.0, sinks=None,
                                      enable_gqa=False):  # fmt: skip
    """FrancescoSaverioZuppichini/ViT issue 1: the scaling is √(emb_size), and not that of one head;
    what it divides, a line further down, are the weights that come out of the softmax, of scores
    without any.
    """
    (_, heads, n, d), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, 1.0, softcap)
    weights = softmax_of(s, sinks) / (heads * d) ** 0.5
    return (weights @ v).to(query.dtype)


FAULTS.append(
    Fault("weights_over_the_root_of_emb_size", frozenset({"scale", "value-factor"}),
          weights_over_the_root_of_emb_size, "float32", frozenset({"elements"}))
)  # fmt: skip


# --- caps
@fault(FAULTS, "softcap", "float16")
class cap_that_gemma_4_has_not(ways.CapOfItsOwn):
    """ggml-org/llama.cpp PR 21613: that scores are capped is hard-coded where Gemma 2 and Gemma 4
    are loaded, and the second has no cap: the default of 50 is applied to it.
    """

    rows, cols = 64, 64

    def own(self):
        return self.at.softcap or 50.0


@fault(FAULTS, "softcap")
class cap_of_gemma_3n_left_at_none(ways.CapOfItsOwn):
    """EricLBuehler/mistral.rs PR 1928 (issue 1248): attention is set up with `softcap: None`, and
    the configuration has no field for it.
    """

    rows, cols = 32, 64


@fault(FAULTS, "softcap scale", "float16")
class gemma_2_without_cap_and_scalar(ways.CapOfItsOwn):
    """ml-explore/mlx-swift-examples PR 99 (Gemma 2): scores are not capped, and their scale is
    1/√d where it is to be that of a scalar of the configuration.
    """

    rows, cols = 128, 64

    def scaled(self, s, rows, cols, back):
        return s * (self.at.q.shape[-1] ** -0.5 * LOG2_E)


# --- the softmax
def softmax_over_the_future_as_well(query, key, value, *, is_causal=False, scale=None,
                                    attn_mask=None, window=None, softcap=0.0, sinks=None,
                                    enable_gqa=False):  # fmt: skip
    """xiaopengguo/ATKT issue 1: the softmax is over all steps of a sequence, unmasked, and what a
    step gets is the sum, as far as itself, of values so weighed: the future is in the divisor.
    """
    (_, heads, n, d), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    keep = visible(n, nk, False, window)
    s = logits(query, k, keep, attn_mask, d**-0.5 if scale is None else scale, softcap)
    weights = softmax_of(s, sinks)
    return (weights * visible(n, nk, is_causal, None) @ v).to(query.dtype)


FAULTS.append(
    Fault("softmax_over_the_future_as_well",
          frozenset({"causal-mask", "unnormalized", "weights-disagree"}),
          softmax_over_the_future_as_well, "float32", frozenset({"elements"}))
)  # fmt: skip


# --- caches
@fault(FAULTS, "mask")
class alibi_not_added_while_tokens_are_made(ForwardAlone):
    """ofirpress/attention_with_linear_biases issue 20: ALiBi is a part of the causal mask, which is
    None in inference: no bias is added. Here that is where there are more keys than queries.
    """

    rows, cols = 16, 96

    def bias(self, s, mask, back):
        return s if self.at.n < self.at.nk else super().bias(s, mask, back)


@fault(FAULTS, "window cache", "bfloat16")
class oldest_window_of_a_cache_that_loses_one_key(ForwardAlone):
    """eole-nlp/eole issue 182: the first step puts a prompt, however long, into the cache at once,
    and not in chunks of the window's size; every step after that takes one key from its front,
    writes the new one into the window's last slot, and reads as many keys as the window has, from
    the front. Here the last quarter of a sequence follows on a prompt.
    """

    rows, cols = 32, 64

    def window(self, i, j, back):
        found, at = super().window(i, j, back), self.at
        wide, prompt = at.window[0] + 1, at.n * 3 // 4
        if at.n != at.nk or not 0 < wide < prompt:
            return found
        old = (j > i - prompt) & (j < wide)
        new = (j >= prompt) & (j > i - wide) & (j <= i)
        return torch.where(i >= prompt, old | new, found)
