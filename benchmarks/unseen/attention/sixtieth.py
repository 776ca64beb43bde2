"""The sixtieth set of faults of attention: a sample of what public threads report, as the searches
return them, and sound kernels.

Twenty searches, symptoms as users tell them, were fixed by the task before any result was seen, all
in the corpus of issues and pull requests: «attention output does not match huggingface reference»,
«logits differ flash attention vs eager», «generation repeats tokens after long context attention
bug», «garbage output with long prompt attention kernel fix», «loss diverges after switching
attention implementation», «loss nan with flash attention padding», «different results batch size 1
vs batch attention», «left padding wrong output attention mask», «accuracy drop after attention
kernel upgrade», «outputs change when cache enabled attention», «gradient mismatch attention
backward test fails», «attention wrong after certain sequence length», «gibberish output fp16
attention overflow», «inf in attention scores fp16 fix», «nan attention all masked row», «wrong
results on second call attention», «results non deterministic attention wrong», «attention wrong
with grouped query heads repeat kv», «wrong result non contiguous query key value», «attention mask
ignored by backend».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 234 results, of which each search gives twelve at most. 15 are faults
here; eight of the searches gave neither one of these nor a thread of earlier sets. What was left:
164 are about something else, features, speed, builds, crashes, questions, other operations or a
result that had come before; 28 tell no cause, or no mistake (Qwen3 issue 874), many of them no text
at all; 23 are threads of earlier sets, and one is a thread that another writer had just taken
(MatchZoo-py PR 81); 2 are on the very defect of another thread (diffusers PR 12892, transformers PR
495); one cannot be written so that this function errs, for its dropout (nki-samples PR 81).

Where a thread tells the cause in a line, how it comes about was read in the public history of its
repository (AnglE PR 89, eole PR 149) or in the thread that it names: llama.cpp PR 5574 is the fix
of issue 5571, vllm-ascend PR 11887 the backport of PR 11886, imp PR 673 says how the kernel of
issue 1676 adds up. ParlAI issue 2586 says that fp16 overflows, and not where: it is the scores
here. Of RL-Kernel PR 188 the rows without a key are here, which its review finds. Numbers that no
thread tells, and what memory holds, were chosen.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks and caches are here; what is not finite and precision in
sixtieth_scores.py. All err more than 1.5 × their sound twin on an ordinary input (`python -m
benchmarks.unseen.draw attention.sixtieth --check`).
"""

# ruff: noqa: ARG001, D102, N801 - a fault is a class of its name, whose steps have the signatures
# of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtieth_kernel as ways
from benchmarks.unseen.attention import sixtieth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands
from torch import Tensor

AGAIN = (
    "dispatched_by_the_arguments_it_names",  # eighth: mask_not_read; others too
    "patched_for_packed_rows_alone",  # as before
    "flash_path_of_several_padded_prompts",  # fifty-eighth: padding_attended_to_in_translation
    "mask_padded_with_ones",  # thirty-sixth: padding_marked_as_valid; others too
    "mask_padded_as_token_ids_are",  # as before
    "triangle_and_no_mask_of_left_padding",  # forty-second: left_padding_never_told; others too
    "chunks_forwarded_into_slots_in_use",  # thirty-seventh: tile_decoded_without_a_barrier
    "copies_of_key_heads_counted_as_heads",  # forty-first: copies_of_heads_sent_as_heads
    "padding_blocks_that_hide_themselves",  # forty-second: sequence_of_padding_alone; others too
    "reference_without_a_guard",  # as before
    "rows_of_k_past_the_end_not_cleared",  # fifty-eighth: nan_and_minus_infinity; others too
    "scores_of_many_candidates_in_half",  # twenty-fifth: products_past_the_largest_half; others too
    "never_is_no_off_switch_above_the_threshold",  # thirty-seventh: scores_summed_in_half
)
STATED: dict[str, str] = {}
"""Inputs on which alone a fault shows: none has such."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
def dispatched_by_the_arguments_it_names(query, key, value, *, is_causal, scale, attn_mask=None,
                                         enable_gqa=False, window=None, softcap=0.0,
                                         sinks=None):  # fmt: skip
    """huggingface/diffusers issue 12605: a backend is handed those arguments alone that its
    signature has; one that has no `attn_mask` sees all, and nothing says so.
    """
    return ways.halves_by_sigmoid(query, key, value, is_causal=is_causal, scale=scale,
                                  window=window, softcap=softcap, sinks=sinks)  # fmt: skip


FAULTS.append(
    Fault("dispatched_by_the_arguments_it_names", frozenset({"mask"}),
          dispatched_by_the_arguments_it_names, "bfloat16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "mask", "float16")
class patched_for_packed_rows_alone(Kernel):
    """pacman100/LLM-Workshop issue 1: the patch that puts flash attention into StarCoder does not
    look at `attention_mask`: it is meant for packed rows, and with padding it is wrong.
    """

    rows, cols = 128, 32

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask")
class flash_path_of_several_padded_prompts(ForwardAlone, ways.OtherTruth):
    """eole-nlp/eole PR 149: the decoder's self-attention takes flash attention, which has no mask
    of padding; of a single sequence there is none, of several there is.
    """

    rows, cols = 64, 96

    def read(self, mask):
        at = self.at
        padded = at.q.shape[0] > 1 and at.n <= at.nk
        return torch.ones_like(mask) if padded else mask


@fault(FAULTS, "mask", "float32")
class mask_padded_with_ones(ways.OtherTruth):
    """JoakimEdin/medical-coding-reproducibility issue 13: the function that makes a batch of
    sequences fills `attention_mask` up with the number of padding's token, which is 1: what lies
    behind a sequence is seen.
    """

    rows, cols = 32, 64

    def read(self, mask):
        return mask | ways.behind(mask)


@fault(FAULTS, "mask", "float16")
class mask_padded_as_token_ids_are(ways.OtherTruth):
    """SeanLee97/AnglE PR 89: the masks of a batch are padded by the tokenizer as if they were ids
    of tokens, on its side and with the id of its padding, and that is true where it is not 0.
    """

    rows, cols = 96, 64

    def read(self, mask):
        return mask | ways.in_front(mask) | ways.behind(mask)


@fault(FAULTS, "mask")
class triangle_and_no_mask_of_left_padding(ways.OtherTruth, WholeRows):
    """Lightning-AI/lit-llama issue 77: sequences are padded on the left, the triangle is the only
    mask, and what a sequence says attends to the padding in front of it.
    """

    rows = 48

    def read(self, mask):
        return mask | ways.in_front(mask)


# --- what is in the cache, and in the slots of memory
@fault(FAULTS, "unstable other-data")
class chunks_forwarded_into_slots_in_use(ForwardAlone):
    """tenstorrent/tt-metal issue 52284: without a mask and where nothing is causal each core passes
    its chunks of K and V on to its neighbor, at the place where it has them itself; there are two
    slots, and where the two are not in step a chunk that is still needed is overwritten, by the
    one that has its slot next.
    """

    rows, cols = 64, 32

    def load_key(self, name, x, part):
        at, later = self.at, slice(part.start + 2 * self.cols, part.stop + 2 * self.cols)
        chained = not at.causal and at.mask is None and later.start < at.nk
        if chained and float(torch.rand(())) < 0.15:
            return super().load_key(name, x, later)
        return super().load_key(name, x, part)


@fault(FAULTS, "cache other-data", "float16")
class last_token_of_what_was_edited(OtherOperands):
    """lmstudio-ai/lmstudio-bug-tracker issue 595: what the cache keeps of a message that has been
    edited is one token too long: the first row behind what both have in common is still the old
    one's. Its numbers are chosen.
    """

    rows, cols = 16, 64

    def read(self, k, v):
        return self.kept(k, 595), self.kept(v, 596)

    def kept(self, x: Tensor, seed: int) -> Tensor:
        first = x.shape[2] - self.at.n
        if first <= 0:
            return x
        b, heads, _, d = x.shape
        chance = torch.Generator().manual_seed(seed)
        old = torch.randn(b, heads // self.at.groups, d, generator=chance)
        found = x.clone()
        found[:, :, first] = self.at.low(self.spread(old))
        return found


@fault(FAULTS, "key-heads other-data cache")
class copies_of_key_heads_counted_as_heads(OtherOperands):
    """vllm-project/vllm-ascend PR 11886, its first form: how many key heads there are is reckoned
    as a rank's own times the ranks, which counts copies where there are more ranks than heads: of
    eight heads on sixteen ranks the decoder fetches the h-th from rank h, which has the h/2-th.
    What is fetched is what came before the call's own tokens.
    """

    rows, cols = 32, 128

    def read(self, k, v):
        return self.fetched(k), self.fetched(v)

    def fetched(self, x: Tensor) -> Tensor:
        before, groups = max(x.shape[2] - self.at.n, 0), self.at.groups
        held = torch.arange(x.shape[1]) // groups // 2 * groups
        return torch.cat([x[:, held, :before], x[:, :, before:]], 2)


FAULTS += sixtieth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.TripletsOfBlocks, "float16"), (ways.ScaleOnBothSides, "bfloat16"),
    (ways.ValuesBeforeKeys, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("sums_in_double", frozenset(), ways.sums_in_double, "float16"))
SOUND.append(Fault("halves_by_sigmoid", frozenset(), ways.halves_by_sigmoid, "bfloat16"))
