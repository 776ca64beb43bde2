"""The forty-sixth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «memory efficient attention wrong gradient mask», «scaled_dot_product_attention CPU
wrong result», «scaled_dot_product_attention MPS wrong result», «scaled_dot_product_attention cuDNN
wrong result», «FlexAttention mask_mod score_mod wrong result», «NestedTensor attention wrong
result», «flash_attn_varlen wrong result», «flash_attn_with_kvcache wrong result», «FlashAttention-3
fp8 wrong result», «FlashMLA wrong result», «FlashInfer wrapper wrong output plan», «xformers block
diagonal mask wrong», «vLLM Triton unified attention wrong», «vLLM FlashInfer backend wrong output»,
«SGLang extend attention kernel wrong», «TensorRT attention plugin wrong output», «ONNX Attention
operator reference implementation wrong», «OpenVINO SDPA wrong accuracy», «MLX attention kernel
wrong», «CoreML or ANE attention wrong result».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 216 results, of which each search gives twelve at most. 14 are faults
here. What was left: 127 are about something else, features, speed, builds, crashes, shapes,
questions, other operations; 46 tell no cause, many of them no text at all; 19 are threads of
earlier sets, or the issue whose pull request is (pytorch 174861, mlx 3360, SKaiNET 860), or the
same report once more (ring-flash-attention issue 59 is flash-attention's 1391); 8 had come before,
or are on the defect of one that had (flash-attention PR 1192, SKaiNET PR 880); 2 cannot be written
so that this function errs: zeros where NaN comes in (pytorch issue 141128), and gradients of a
choice of keys (flash-sparse-attention PR 184).

Where a thread tells the cause in a line, or not itself, further searches found what it is: vllm
issue 7176 by its PR, sgl-kernel-xpu issue 196 by its PR, onnxruntime PR 26057 by the onnx PR that
it follows, TensorRT issue 2674 by issue 2541. What is inferred: that flash-attention issue 772 is
an offset of 32 bits; what FlashInfer leaves out where sglang PR 32062 plans for fewer heads; which
line vllm-project/flash-attention PR 18 changes; how the band of swift-parakeet-mlx PR 1 lies.
tt-metal issue 33304 is taken at its word. What a cached graph has of a call before is the default;
lengths, and what memory holds, are chosen where no thread tells them. Of a thread with several
defects one is taken.

What is right was set down before anything was measured by halfulp. `AGAIN` names every fault whose
mistake an earlier set has in some form. Masks and lengths are here; scales, weights, layouts and
what is not written in fortysixth_scores.py. All err more than 1.5 × their sound twin on an ordinary
input (`python -m benchmarks.unseen.draw attention.fortysixth --check`) but those that STATED names,
which need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortysixth_kernel as ways
from benchmarks.unseen.attention import fortysixth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import attention
from benchmarks.unseen.attention.fortyfirst_kernel import Cascade
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands
from torch import Tensor
from torch.nn import functional

AGAIN = (
    "causal_lost_with_the_move_to_a_device",  # eighteenth: causal_lost_where_no_kernel_fits; others
    "splits_by_the_length_of_another_call",  # thirty-ninth: chunks_of_the_captured_length
    "keys_past_the_plugins_128",  # thirty-sixth: plugin_of_at_most_128_keys, the same plugin
    "new_keys_that_no_length_counts",  # thirty-ninth: chunks_of_the_captured_length and others, by
    # which the last keys are missed
    "keys_past_the_end_that_the_mask_counts",  # fourth: padded_rows, on the way back; others too
    "scale_of_the_graph_that_was_cached",  # thirty-fifth: scale_lost_with_the_cached_model
    "scale_attribute_that_is_not_applied",  # thirty-seventh: scale_not_passed_on; others too
    "weights_past_the_largest_of_e4m3",  # sixth: fp8_weights_of_an_old_maximum
    "heads_by_a_view_without_a_transposition",  # sixteenth: permuted_tensors_read_in_order
    "caches_of_sequences_wrap",  # eleventh: offsets_of_delta_wrap; forty-fourth: of pages
    "key_heads_in_turns",  # fifth: heads_tiled; fortieth: key_heads_tiled_not_repeated
    "rows_past_the_plan_of_another_layer",  # eighteenth: heads_past_the_planned_number
)
STATED = {
    "scale_of_the_graph_that_was_cached": "a scale that is not 1/√d",
    "scale_attribute_that_is_not_applied": "a scale that is not 1/√d",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "causal-mask mask")
class causal_lost_with_the_move_to_a_device(EveryBlock):
    """facebookresearch/xformers issue 1185: `to` of a block-diagonal causal mask is its parent's,
    and gives a block-diagonal mask that is not causal.
    """

    rows, cols = 64, 32

    def causal(self, i, j, back):
        return (j >= 0) & (i >= 0)


# --- how many keys there are
@fault(FAULTS, "key-tail", "float16")
class splits_by_the_length_of_another_call(ForwardAlone, Cascade):
    """vllm-project/flash-attention PR 18: how many blocks of keys a split takes is reckoned from
    the longest length of the call that a graph was captured with, here 96, and not from the
    sequence's own: what lies behind the last split's blocks is missed.
    """

    rows, cols, parts, captured = 64, 32, 3, 96

    def key_blocks(self, rows):
        each = -(-self.captured // self.cols // self.parts)
        return super().key_blocks(rows)[: each * self.parts]


@fault(FAULTS, "key-tail")
class keys_past_the_plugins_128(ForwardAlone):
    """NVIDIA/TensorRT issue 2674, whose limit issue 2541 tells: the plugin for cross attention
    takes 128 keys at most, and what comes after those is not there.
    """

    rows, cols = 64, 128

    def key_blocks(self, rows):
        return super().key_blocks(rows)[:1]


@fault(FAULTS, "key-tail", "float16")
class new_keys_that_no_length_counts(ForwardAlone):
    """sgl-project/sgl-kernel-xpu issue 196, PR 191: where there is a cache and more than one query,
    the lengths of the new keys are not read: those of the cache alone are all that there is.
    """

    rows, cols = 32, 64

    def inside(self, j, back):
        cached = self.at.nk - self.at.n
        return super().inside(j, back) & (j < (cached if self.at.n > 1 and cached > 0 else j + 1))


@fault(FAULTS, "padding other-data ragged")
class keys_past_the_end_that_the_mask_counts(OtherOperands):
    """facebookresearch/xformers issue 1122: a block-diagonal mask that was made for more keys than
    K has is taken at its word, and rows behind K's end are read; here the mask has lengths of whole
    64s, and behind a sequence's tokens lie those of the next one.
    """

    rows, cols, whole = 64, 32, 64

    def read(self, k, v):
        return self.longer(k), self.longer(v)

    def longer(self, x: Tensor) -> Tensor:
        more = -x.shape[2] % self.whole
        if not more:
            return x
        behind = functional.pad(x, (0, 0, 0, max(more - x.shape[2], 0)))[:, :, :more]
        return torch.cat([x, torch.cat([behind[1:], torch.zeros_like(behind[:1])])], 2)


FAULTS += fortysixth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.FiveRanges, "bfloat16"), (ways.OutsideIn, "float16"),
    (ways.HalvesOfBlocks, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("queries_from_the_end", frozenset(), ways.queries_from_the_end, "float16"))
SOUND.append(Fault("halves_of_keys", frozenset(), ways.halves_of_keys, "bfloat16"))
