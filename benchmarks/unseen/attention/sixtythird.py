"""The sixty-third set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests, about devices and ports: «vulkan flash attention wrong result», «metal attention
kernel incorrect output», «mps scaled_dot_product_attention wrong», «rocm flash attention wrong
result», «ck flash attention incorrect», «aiter attention accuracy wrong», «xpu sdpa incorrect
result», «ascend npu attention wrong mask», «tpu pallas flash attention wrong», «webgpu attention
incorrect», «sycl flash attention incorrect», «opencl attention wrong output», «cpu flash attention
avx wrong result», «arm neon attention kernel wrong», «hopper flash attention 3 incorrect output»,
«blackwell sm120 attention wrong output», «cutlass mla wrong output», «cudnn attention wrong
result», «onnxruntime attention incorrect result», «openvino attention wrong result».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 217 results, of which each search gives twelve at most. 13 are faults
here. What was left: 141 are about something else, features, speed, builds, crashes, questions or
other operations, among them those of webgpu, arm neon and sm120 altogether; 35 tell no cause that
could be read, of some of them no text at all; 14 are threads of earlier sets, one is of a set that
was written beside this one (pacman100/LLM-Workshop issue 1), and 10 were results before; vllm PR
17745 tells of what sglang PR 6101 does; 2 cannot be written so that this function errs: zeros that
a query of NaN is to have (lattice PR 794), and a result of another shape (text-generation-inference
PR 2361).

A result is an excerpt of its thread. Of those that may tell a cause elsewhere more was looked for
by further searches with their own words, of which nothing else was taken; where another thread
tells the cause it stands in parentheses. What sglang PR 7722's review says is taken at its word.
What memory holds is chosen where it is not told, as numbers are that no thread tells.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks and windows are here; what is never computed, scores, sums and
ends in sixtythird_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.sixtythird --check`) but those that STATED names, which
need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtythird_kernel as ways
from benchmarks.unseen.attention import sixtythird_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "masks_that_the_default_on_npus_drops",  # fifty-first: mask_of_ones_while_speech_is_made
    "later_keys_score_one_more",  # fiftieth: booleans_of_padding_added
    "biases_turned_into_booleans_and_over",  # thirteenth: bias_taken_for_a_boolean; thirty-fifth:
    # lowest_numbers_cast_to_true
    "windows_that_rocm_does_not_have_yet",  # fiftieth: window_not_implemented; others too
    "operation_that_the_backend_lacks",  # fifteenth: widths_whose_launch_fails, for all calls
    "product_of_scores_that_is_not_enqueued",  # as before, of the scores
    "queries_scored_against_values",  # forty-seventh: values_projected_as_keys
    "reciprocal_reprogrammed_at_every_step",  # twelfth: reciprocal_without_its_constants
    "lse_of_parts_without_their_maximum",  # eighth: merged_by_exp_of_lse; forty-first
    "remainder_of_the_keys_not_hidden",  # fifth: zeros_have_weight; others too
    "pages_that_the_table_lacks",  # as before, of whole blocks
)
STATED = {
    "queries_of_no_features_return_at_once": "queries and keys of no features, [B, H, N, 0]",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask")
class masks_that_the_default_on_npus_drops(ForwardAlone):
    """sgl-project/sglang PR 31948, review: on NPUs the attention of images goes to a backend that
    ignores `attention_mask`, whoever gives one.
    """

    rows, cols = 64, 128

    def hide(self, s, rows, cols, back):
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "causal-mask mask-finite")
class later_keys_score_one_more(EveryBlock, ForwardAlone):
    """sgl-project/sglang PR 7722, review: the causal mask holds the lowest number for float16, and
    1 for every other format: what is added to the scores of later keys.
    """

    rows, cols = 48, 64

    def causal(self, i, j, back):
        return (j >= 0) & (i >= 0)

    def scaled(self, s, rows, cols, back):
        s = super().scaled(s, rows, cols, back)
        later = torch.arange(cols.start, cols.stop) > torch.arange(rows.start, rows.stop)[:, None]
        return s + later * LOG2_E if self.at.causal else s


@fault(FAULTS, "mask")
class biases_turned_into_booleans_and_over(Kernel):
    """huggingface/diffusers PR 14396 (issue 14397): every mask is cast to booleans and inverted for
    the NPU's operator, which hides what is true: of a mask of floats what has 0 is hidden, all else
    is seen, and nothing is added.
    """

    rows, cols = 32, 64

    def bias(self, s, mask, back):
        return s.masked_fill(mask == 0, -INF)


# --- windows
@fault(FAULTS, "window", "float16")
class windows_that_rocm_does_not_have_yet(ForwardAlone):
    """pytorch/pytorch issue 154582: `_flash_attention_forward` takes a window on ROCm, where none
    is supported yet, and attends to everything.
    """

    rows, cols = 128, 64

    def window(self, i, j, back):
        return (j >= 0) & (i >= 0)


FAULTS += sixtythird_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.PairsOfBlocks, "bfloat16"), (ways.NaturalExponent, "float16"),
    (ways.MaximumFirst, "bfloat16"), (ways.BackInOneTile, "float16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("in_doubles", frozenset(), ways.in_doubles, "bfloat16"))
