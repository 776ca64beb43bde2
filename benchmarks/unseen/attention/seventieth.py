"""The seventieth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «native sparse attention wrong result», «deepseek sparse attention indexer wrong
topk», «mla prefill wrong output head dim 192 128», «qwen3 next gated attention wrong», «gemma 3
sliding window attention wrong», «gpt-oss attention sinks kernel wrong», «llama 4 chunked attention
bug», «olmo attention bug», «phi-3 sliding window bug», «mistral sliding window attention cache
bug», «falcon multi query attention bug», «mpt alibi attention bug», «bloom alibi attention wrong»,
«chatglm attention mask bug», «gpt-j gpt-neo attention scale bug», «cohere command attention bug»,
«differential attention bug», «flash attention 4 wrong result», «gluon or tilelang attention wrong
result», «mirage or thunderkittens attention wrong result».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 229 results, of which each search gives twelve at most. 13 are faults
here. What was left: 121 are about something else, features, speed, builds, crashes, questions or
other operations, those of the last search about cats and games; 64 tell no cause, or none in what
could be read of them, many of them no text at all and some found by five searches; 28 are threads
of earlier sets; mlx-lm PR 1552 is the fix of its issue 1443; 2 cannot be written so that this
function errs: an indexer without its rotary positions (d9d PR 38), and weights that are for looking
at alone (DIFFormer issue 9).

The search returns parts of a thread. To read further, these found threads were looked for once or
twice more: xformers issue 1124, native-sparse-attention issue 20, d9d PR 38, SpargeAttn issue 47,
maxtext PR 2933, sglang PR 1746 and 4823, lmdeploy PR 1761, sgl-kernel-npu PR 502, transformers PR
37329 and issue 37351, ProLong issue 3, TransformerLens PR 434, PaddleNLP PR 6362, kernels issue
101, flash-attention-npu issue 216, tilelang issue 545, Qwen3-VL issue 1463, examples PR 247, vggt
PR 145, mlx-swift-lm issue 130, rocm-libraries PR 10901, nki-samples PR 106, vllm PR 68,
TensorRT-Model-Connect PR 1304, vllm-ascend (cosdt) PR 6, llm-foundry issue 1289 and BiLLM PR 12.
Of mlx-swift-lm issue 130 this led to a comment in its PR 99; rocm-libraries PR 10901 could not be
read to its end.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Sizes that no thread tells are chosen. All err more than 1.5 × their
sound twin on an ordinary input (`python -m benchmarks.unseen.draw attention.seventieth --check`)
but those that STATED names, which need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventieth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands

AGAIN = (
    "alibi_that_is_not_assigned",  # fiftieth: bias_dropped_behind_a_cache; others too
    "alibi_for_other_models_classes",  # as before
    "lengths_of_the_captured_graph",  # thirty-ninth: chunks_of_the_captured_length
    "backend_set_up_without_the_window",  # thirty-eighth: window_that_gemma_3_was_missing; others
    "blocks_of_global_layers_given_back",  # thirty-eighth: every_layer_has_a_window
    "mask_cut_beside_the_window",  # forty-fifth: mask_cut_in_place_of_a_window
    "window_lost_where_a_mask_is_given",  # fiftieth: config_without_its_window; others too
    "scaled_by_the_library_as_well",  # fifteenth: default_scale_on_top_of_the_given_one
    "keys_without_their_multiplier",  # forty-first: scale_not_handed_to_the_dispatched_attention
    "sinks_of_the_other_architecture_alone",  # thirty-eighth: sinks_never_bound; others too
    "sink_in_every_simdgroup",  # fourth: sink_a_split
)
STATED = {
    "mask_cut_beside_the_window": "a boolean mask and a window",
    "window_lost_where_a_mask_is_given": "a mask and a window",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks and lists of keys
@fault(FAULTS, "mask")
class alibi_that_is_not_assigned(ways.NoBias):
    """mosaicml/examples PR 247: what is to become the bias of the attention is computed and not
    assigned, so that ALiBi is not in it.
    """

    rows, cols = 64, 32


@fault(FAULTS, "mask", "float16")
class alibi_for_other_models_classes(ways.NoBias):
    """mosaicml/llm-foundry issue 1289: ALiBi is asked for as an algorithm, which knows the classes
    of BERT, GPT-2 and RoBERTa and has no effect on MPT, whose own flag stays false.
    """

    rows, cols = 128, 64


@fault(FAULTS, "mask window other-data", "float16")
class first_of_the_list_is_the_first_key(WholeRows, ForwardAlone):
    """hw-native-sys/pypto-lib PR 158, review: of the list of the keys that a query may see the
    first number is not read: the sequence's first key stands for it.
    """

    rows = 32

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        seen = found > -INF
        first = seen.int().argmax(-1, keepdim=True)
        moved = seen.any(-1, keepdim=True) & (first > 0)
        there = torch.arange(s.shape[-1])
        found = found.masked_fill(moved & (there == first), -INF)
        return torch.where(moved & (there == 0), s, found)


@fault(FAULTS, "key-tail mask")
class first_keys_fall_out_of_the_best(ForwardAlone):
    """ml-explore/mlx-lm issue 1443 (PR 1552): once a query sees more keys than the indexer keeps,
    here 96, the sequence's first ones, here four, are not among those that it chooses. The others
    that it leaves out are the model's own, and are not left out here.
    """

    rows, cols, kept = 48, 64, 96

    def hide(self, s, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)
        seen = i + 1 if self.at.causal else torch.full_like(i, self.at.nk)
        return super().hide(s, rows, cols, back).masked_fill((j < 4) & (seen > self.kept), -INF)


@fault(FAULTS, "key-tail", "float16")
class lengths_of_the_captured_graph(OtherOperands):
    """vllm-project/vllm PR 28739 (Llama 4): chunked local attention is replayed as a CUDA graph,
    though what it is told of lengths and blocks is made anew each step, and is that of the capture
    then. Here with few queries, and the capture's keys are the next lower power of two.
    """

    rows, cols = 16, 64

    def read(self, k, v):
        n, nk = self.at.n, k.shape[2]
        if n * 4 > nk:
            return k, v
        captured = 1 << ((nk - 1).bit_length() - 1)
        return k[:, :, :captured], v[:, :, :captured]


# --- windows
@fault(FAULTS, "window", "float16")
class backend_set_up_without_the_window(ForwardAlone):
    """sgl-project/sglang PR 4823 (Gemma 3): layers have a window, and the model lacks the method
    by which the backend asks for its size, so that it is set up without one.
    """

    rows, cols = 64, 16

    def window(self, i, j, back):
        return (j >= 0) & (i >= 0)


@fault(FAULTS, "window key-tail")
class blocks_of_global_layers_given_back(ForwardAlone):
    """InternLM/lmdeploy PR 3772 (Gemma 3): not every layer has the window, and blocks that fall out
    of it, here of 16 tokens and 96 tokens before the new ones, are given back all the same: layers
    without a window have lost those keys.
    """

    rows, cols, behind = 32, 32, 96

    def inside(self, j, back):
        keep, at = super().inside(j, back), self.at
        if at.window is not None or at.n >= at.nk:
            return keep
        return keep & (j >= (at.nk - at.n - self.behind) // 16 * 16)


@fault(FAULTS, "mask", "float16")
class mask_cut_beside_the_window(ForwardAlone):
    """huggingface/transformers PR 34093: flash attention is told of the window, and the mask is cut
    to its last columns, as many as the window has, besides; they are those of the first keys then,
    as keys and values are not cut, and the others have none.
    """

    rows, cols = 64, 64

    def forward(self):
        at, kept = self.at, self.at.mask
        if kept is not None and kept.dtype == torch.bool and at.window is not None:
            wide = at.window[0] + 1
            full = kept.expand(*kept.shape[:-2], at.n, at.nk)
            cut = torch.zeros_like(full)
            if 0 < wide < at.nk:
                cut[..., :wide] = full[..., at.nk - wide :]
                at.mask = cut
        found = super().forward()
        at.mask = kept
        return found


@fault(FAULTS, "window")
class window_lost_where_a_mask_is_given(Kernel):
    """axolotl-ai-cloud/axolotl PR 2449 (Gemma 3, packed): windows do not work with flash attention
    unless the mask is dropped.
    """

    rows, cols = 32, 64

    def window(self, i, j, back):
        if self.at.mask is None:
            return super().window(i, j, back)
        return (j >= 0) & (i >= 0)


# --- scales
@fault(FAULTS, "scale", "float32")
class scaled_by_the_library_as_well(ways.OwnScale, WholeRows):
    """huggingface/transformers issue 20828 (GPT-Neo): the model does not divide by √d, and in Flax
    the library's function for the weights does so by itself: 1/√d comes on top of the scale.
    """

    rows = 64

    def own(self):
        return float(self.at.scale * self.at.q.shape[-1] ** -0.5)


@fault(FAULTS, "scale")
class keys_without_their_multiplier(ways.OwnScale):
    """ml-explore/mlx-lm PR 1622 (Falcon-H1): the multiplier of keys, 0.031, is put into a weight
    of another name than theirs, and is lost: scores are 32 times too large.
    """

    rows, cols = 96, 32

    def own(self):
        return float(self.at.scale / 0.031)


# --- sinks
@fault(FAULTS, "sinks", "float16")
class sinks_of_the_other_architecture_alone(ForwardAlone):
    """ROCm/rocm-libraries PR 10901, review: what says that there are sinks is shared with gfx942,
    whose kernel takes the call, and has neither the parameter nor a place for them.
    """

    rows, cols = 64, 128

    def begin(self, q, first=True):
        return super().begin(q, False)


@fault(FAULTS, "sinks")
class sink_in_every_simdgroup(ForwardAlone):
    """ekryski/mlx-swift-lm issue 130 (GPT-OSS; its PR 99): the second pass, which puts the blocks
    together, folds the sink in, and its softmax across blocks is not reduced rightly across
    simdgroups. How is chosen: each of four has the sink in its own sum.
    """

    rows, cols = 16, 16

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        whole = self.begin(q, False)
        for group in range(4):
            state = self.begin(q)
            for cols in every[group::4]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
            whole = ways.together(whole, state)
        return self.finish(*whole, rows)


# --- sound kernels
for kind, dtype in ((ways.SuperBlocks, "float16"), (ways.ColumnsOfValues, "float16")):
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("keys_by_stride", frozenset(), ways.keys_by_stride, "float16"))
SOUND.append(Fault("weights_from_lse", frozenset(), ways.weights_from_lse, "float16"))
SOUND.append(Fault("query_by_query", frozenset(), ways.query_by_query, "bfloat16"))
