"""The fifty-third set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «triton fused attention kernel incorrect result», «CUTLASS CuTe FMHA example wrong
result», «TileLang attention example incorrect», «composable kernel fmha wrong result»,
«ThunderKittens attention incorrect», «flashinfer prefill decode kernel incorrect output»,
«FlexAttention wrong output mask_mod score_mod», «NATTEN neighborhood attention incorrect»,
«sageattention wrong output quality», «flash linear attention softmax attention kernel wrong»,
«xformers bias attention wrong offset», «Liger or Unsloth attention patch incorrect»,
«TransformerEngine fused attention wrong result», «Megatron core attention mask wrong», «SGLang
triton attention backend wrong», «vLLM attention backend incorrect output», «TensorRT-LLM attention
wrong output», «lmdeploy turbomind attention wrong», «exllama or llama.cpp flash attention wrong
output», «HIP aiter attention asm kernel wrong result».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 218 results, of which each search gives twelve at most. 10 are faults
here. What was left: 145 are about something else, features, builds, crashes, questions, other
operations (linear attention among them), animals, or a mask's documentation; 49 tell no cause that
could be found, many of them no text at all; 12 are threads of earlier sets, or, vllm PR 7284, named
in one; 2 cannot be written so that this function errs (pytorch issue 150321 and PR 150331, where
what is read past a buffer's end is hidden).

Where an excerpt tells half, more of the thread was searched for by its words: triton issue 3052
says that `ravel` was repaired and that a transpose was put before it, and the order is that of its
kernel; vllm issue 41472, that slots of a hybrid cache are not contiguous; flashinfer issue 1046,
that its PR 1029, which clears what is copied, takes the NaN away. How a request without keys comes
out in flashinfer PR 363 is inferred from its code, whose sums begin at 1 today. SageAttention issue
392 is taken at a comment's word, that keys and values are read at an address that is not renewed;
CUDATutorial issue 69 is about a line that its author tried. What memory holds where nothing was
written is chosen, as numbers are that no thread tells.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Layouts and tails are here; scores, sums and what is not finite in
fiftythird_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.fiftythird --check`).
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

from typing import ClassVar

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftythird_kernel as ways
from benchmarks.unseen.attention import fiftythird_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands
from torch import Tensor
from torch.nn import functional

AGAIN = (
    "zeros_past_the_end_of_a_block",  # forty-fourth: zeros_past_the_end_of_calls_that_see_all
    "decode_reads_pages_side_by_side",  # fifteenth: pages_read_in_the_pools_order
    "changes_of_the_scores_not_passed_on",  # seventeenth: softcap_hard_coded_to_none; eighth:
    # mask_not_read
    "queries_and_keys_in_int8_by_block",  # thirty-fourth: queries_and_keys_in_int8_by_thread
    "row_below_the_sentinel_gives_zeros",  # seventeenth: smallest_maximum_is_finite
    "request_without_keys_divided_by_nothing",  # nineteenth: empty_rows_divided_by_their_sum
    "values_past_the_end_as_memory_was",  # twenty-second: values_of_freed_pages_are_not_numbers
)
STATED: dict[str, str] = {}
"""Inputs on which alone a fault shows: none has such."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


@fault(FAULTS, "padding ragged", "float16")
class zeros_past_the_end_of_a_block(Kernel):
    """tile-ai/tilelang issue 1213: 296 tokens are no whole number of blocks, what lies past the
    end is loaded as 0, and nothing but the causal mask hides it: keys of zeros keep their weight,
    in the forward pass and on the way back.
    """

    rows, cols = 64, 64

    def inside(self, j, back):
        return super().inside(j, back) | torch.tensor(not self.at.causal)


@fault(FAULTS, "layout mask causal-mask ragged", "float16")
class sub_blocks_raveled_the_other_way(ForwardAlone):
    """triton-lang/triton issue 3052: a block of keys is four of the cache's, whose rows' offsets
    are laid out as [16, 4]; `ravel` went down the columns before it was repaired, and goes along
    the rows since: keys and values come in turn from each of the four, and are hidden as if in
    order.
    """

    rows, cols, parts = 32, 64, 4

    def load_key(self, name, x, part):
        found, j = super().load_key(name, x, part), torch.arange(self.cols)
        return found[:, :, j % self.parts * (self.cols // self.parts) + j // self.parts]


@fault(FAULTS, "layout other-data cache")
class decode_reads_pages_side_by_side(OtherOperands):
    """vllm-project/vllm issue 41472 (LFM2 on ROCm): a hybrid model's pool holds pages of keys and
    of states in turn, and the kernel that decodes takes pages for contiguous: every other one that
    it reads is a state. Prefill is right; here what has four times as many keys as queries decodes.
    """

    rows, cols, page = 16, 64, 16

    def read(self, k, v):
        decodes = 4 * self.at.n <= self.at.nk
        return (self.pages(k), self.pages(v)) if decodes else (k, v)

    def pages(self, x: Tensor) -> Tensor:
        n, share = x.shape[2], self.at.groups
        whole = functional.pad(x, (0, 0, 0, -n % self.page)).unflatten(2, (-1, self.page))
        states = torch.randn(whole[:, ::share].shape, generator=torch.Generator().manual_seed(41))
        states = self.at.low(states).repeat_interleave(share, 1)
        pool = torch.stack([whole, states], 3).flatten(2, 3)
        return pool[:, :, : whole.shape[2]].flatten(2, 3)[:, :, :n]


@fault(FAULTS, "other-data unstable", "float16")
class keys_at_the_address_of_the_capture(OtherOperands):
    """thu-ml/SageAttention issue 392: a captured graph that is replayed with other inputs reads
    keys and values where they were at capture, and they are not renewed: right for the inputs that
    it was captured with, and 90 % off, without NaN, for others. Here a graph is captured for every
    shape, and codes are not rounded, so that this alone is wrong.
    """

    rows, cols = 128, 64
    captured: ClassVar[dict[tuple[int, ...], tuple[Tensor, Tensor]]] = {}

    def read(self, k, v):
        shape = (*self.at.q.shape, *k.shape, *v.shape)
        return self.captured.setdefault(shape, (k.detach(), v.detach()))


FAULTS += fiftythird_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.EvenAndOddFeatures, "bfloat16"), (ways.DiagonalFirst, "float16"),
    (ways.HalfTilesTogether, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(
    Fault("sink_is_a_key_without_value", frozenset(), ways.sink_is_a_key_without_value, "float16")
)
SOUND.append(Fault("by_hand", frozenset(), ways.by_hand, "bfloat16"))
