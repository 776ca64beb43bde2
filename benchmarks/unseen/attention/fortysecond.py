"""The forty-second set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «diffusers attention processor wrong result mask or scale», «timm vision transformer
attention fused path mismatch», «fairseq or espnet multihead attention mask wrong», «open_clip or
CLIP text attention causal mask wrong», «unsloth or peft attention gradient or padding wrong»,
«axolotl sample packing flash attention cross contamination wrong», «trl padding free attention mask
wrong loss», «lit-gpt or nanoGPT attention mask or cache wrong», «exllama or AutoGPTQ fused
attention wrong output», «text-generation-inference paged attention wrong output», «lmdeploy
turbomind attention wrong output kernel», «mlc-llm attention kernel wrong output», «ollama flash
attention quantized kv cache wrong output», «whisper.cpp or bark.cpp attention wrong result»,
«stable-diffusion.cpp attention wrong result», «burn or luminal attention wrong result», «keras
MultiHeadAttention mask or softmax wrong», «PaddlePaddle flash attention wrong result», «MindSpore
or Ascend attention wrong precision», «Intel extension or Habana attention wrong result fix».

Their 227 results were gone through to the end, the first of every search, then the second of every
one, and so on: they gave 17 faults, and so the set has no more; where a search names projects most
of its results have little to do with attention. What was left: 159 are about something else,
features, builds, crashes, documentation or questions; 40 tell no cause, many of them no text at
all; 9 are threads of earlier sets; 2 cannot be written, since queries and keys are turned by wrong
positions before attention begins (AutoGPTQ PR 227, unsloth PR 4100). Much of what is here is a
mask that is missing, as models' code has it: such repeats were taken, each as its thread tells it.

HiDream-I1 issue 67 asks why the mask is applied as it is, and tells the mistake in doing so. DiffMS
PR 26 has no text but its title, and names issue 25, which tells the cause. mlc-llm PR 2644 tells
the cause in a line; what lies behind a page was inferred from how pages are laid out there. Which
formats ik_llama.cpp issue 363 is about was read in that repository, its PR 364 tells the rest. Of a
thread with several defects one is taken: sglang PR 14364 misses the padding's mask as well, pytorch
issue 27968 shows dropped weights. Where a thread's mask has the documents of a packed row, it is a
boolean mask here, or a batch that is packed. Numbers that no thread tells were chosen.

What is right was set down before anything ran. `AGAIN` names every fault whose mistake an earlier
set has in some form. Masks that are not read, and causal ones, are here; what hides by numbers,
rows of nothing, the cache and codes in fortysecond_scores.py. All err more than 1.5 × their sound
twin on an ordinary input (`python -m benchmarks.unseen.draw attention.fortysecond --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortysecond_kernel as ways
from benchmarks.unseen.attention import fortysecond_scores
from benchmarks.unseen.attention.eighth_kernel import fault, visible
from benchmarks.unseen.attention.fifth_kernel import INF, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "clip_text_attends_both_ways",  # fifth: causal_ignored_where_it_divides; others too
    "segments_lost_in_a_batch_of_several",  # eighth: mask_not_read; others too
    "documents_seen_through_a_mask_of_ones",  # fortyfirst: documents_packed_without_a_mask
    "left_padding_never_told",  # eighth: mask_not_read; others too
    "padding_left_out_of_the_loss_alone",  # as before
    "energies_of_padding_not_filled",  # as before
    "triangle_kept_where_it_hides",  # twenty-seventh: valid_positions_hidden, of a given mask
    "look_ahead_mask_read_as_what_to_see",  # as before; fortyfirst: mask_that_says_what_to_hide
    "no_mask_made_behind_a_cache",  # fortyfirst: extend_always_causal_on_cpu; others too
    "causal_kernel_behind_a_cache",  # as before
    "truth_added_to_the_scores",  # thirty-seventh: boolean_mask_filled_with_infinity
    "keys_multiplied_by_their_mask",  # twenty-sixth: hidden_scores_multiplied_to_zero; others
    "padded_peaks_keep_a_score_of_zero",  # as before
    "two_least_numbers_added",  # thirty-eighth: least_half_added_to_the_scores
    "sequence_of_padding_alone",  # thirteenth and others: first_keys_all_hidden
    "codes_of_queries_read_as_another_format",  # fortyfirst: scores_stored_as_wide_as_the_head, as
    # for a pitch that is another where it is read
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks that are not read
@fault(FAULTS, "mask", "float16")
class segments_lost_in_a_batch_of_several(ways.MaskNotRead):
    """axolotl-ai-cloud/axolotl issue 1375: for a batch of more than one the ends of the samples
    that are packed into a row have a dimension too many, and are thrown away: each attends to all
    that come before it.
    """

    rows, cols = 64, 32

    def reads(self):
        return self.at.q.shape[0] == 1


def documents_seen_through_a_mask_of_ones(query, key, value, *, is_causal, scale, attn_mask=None,
                                          window=None, softcap=0.0, sinks=None):  # fmt: skip
    """axolotl-ai-cloud/axolotl PR 3796: `sdpa` and `eager` keep the mask of a packed row, whose
    numbers of documents are cast to booleans that are all true: they attend across each other.
    """
    options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
               "softcap": softcap, "sinks": sinks}  # fmt: skip
    (b, _, n, _), nk = query.shape, key.shape[2]
    if not is_causal or attn_mask is not None or n != nk or b == 1:
        return ways.sound(query, key, value, **options)
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    packed = options | {"attn_mask": torch.ones(1, 1, b * n, b * n, dtype=torch.bool)}
    return ways.sound(q, k, v, **packed)[0].unflatten(1, (b, n)).transpose(0, 1)


FAULTS.append(
    Fault("documents_seen_through_a_mask_of_ones", frozenset({"mask", "other-data"}),
          documents_seen_through_a_mask_of_ones, "float16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "mask")
class left_padding_never_told(ways.MaskNotRead):
    """unslothai/unsloth PR 3176 (GRPO): the mask of prompts that are padded on their left is not
    passed on, and tokens attend to the padding in front of them.
    """

    rows, cols = 96, 64


@fault(FAULTS, "mask", "float16")
class padding_left_out_of_the_loss_alone(ways.MaskNotRead):
    """jingyaogong/minimind-v issue 76: no mask is set for attention, and padding is left out of the
    loss alone.
    """

    rows, cols = 32, 128


@fault(FAULTS, "mask")
class energies_of_padding_not_filled(ways.MaskNotRead, ForwardAlone):
    """espnet/espnet PR 397: energies of padding are not filled before the softmax, and its states,
    which a layer's bias has made other than zero, have weights.
    """

    rows, cols = 80, 48


# --- causal where it should not be, and the other way round
@fault(FAULTS, "causal-mask mask")
class clip_text_attends_both_ways(EveryBlock):
    """sgl-project/sglang PR 14364: CLIP's text encoder is causal, and its attention is made with
    `causal=False`.
    """

    rows, cols = 48, 48

    def causal(self, i, j, back):
        return (j >= 0) & (i >= 0)


def triangle_kept_where_it_hides(query, key, value, *, is_causal, scale, attn_mask=None,
                                 window=None, softcap=0.0, sinks=None):  # fmt: skip
    """vithursant/nanoGPT_mlx issue 6: `where(mask == 0, att, -1e9)` of a lower triangle keeps the
    scores of later keys, and hides a query's own and all before it.
    """
    n, nk = query.shape[2], key.shape[2]
    s = ways.capped(query, key, scale, softcap)
    if is_causal:
        s = torch.where(visible(n, nk, True, None), -1e9, s)
    s = s.masked_fill(~visible(n, nk, False, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if hides else s + attn_mask.float()
    return (softmax_of(s, sinks) @ repeated(value, query.shape[1])).to(query.dtype)


def look_ahead_mask_read_as_what_to_see(query, key, value, *, is_causal, scale, attn_mask=None,
                                        window=None, softcap=0.0, sinks=None):  # fmt: skip
    """tensorflow/text PR 894: the tutorial's masks say what not to attend to, and Keras' layer, put
    in its place, takes them for what to attend to: every later token, and none before.
    """
    n, nk = query.shape[2], key.shape[2]
    s = ways.capped(query, key, scale, softcap).masked_fill(~visible(n, nk, False, window), -INF)
    ahead = ~visible(n, nk, True, None) if is_causal else torch.ones(n, nk, dtype=torch.bool)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        ahead = ahead & ~attn_mask
    elif attn_mask is not None:
        s = s + attn_mask.float()
    s = s - 1e9 * (~ahead).float()
    return (softmax_of(s, sinks) @ repeated(value, query.shape[1])).to(query.dtype)


for turned in (triangle_kept_where_it_hides, look_ahead_mask_read_as_what_to_see):
    FAULTS.append(
        Fault(turned.__name__, frozenset({"causal-mask", "mask"}), turned, "bfloat16",
              frozenset({"elements"}))
    )  # fmt: skip


@fault(FAULTS, "causal-mask mask", "float16")
class no_mask_made_behind_a_cache(EveryBlock):
    """huggingface/transformers issue 31943 (GPT-NeoX, GPT-2; PR 31944): where no mask is given none
    is made for queries behind a cache, and what SDPA takes for causal begins at the first key.
    """

    rows, cols = 64, 64

    def seen(self, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        below = torch.arange(cols.start, cols.stop)[None] <= i
        made = self.at.mask is not None or self.at.n in (1, self.at.nk)
        return super().seen(rows, cols, back) & (below | made)


@fault(FAULTS, "causal-mask mask")
class causal_kernel_behind_a_cache(EveryBlock, ForwardAlone):
    """EleutherAI/gpt-neox PR 1178: with keys from a cache FlashAttention is still called as causal,
    and a query sees the cache's first keys alone.
    """

    rows, cols = 16, 64

    def seen(self, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        below = torch.arange(cols.start, cols.stop)[None] <= i
        return super().seen(rows, cols, back) & (below | (self.at.n >= self.at.nk))


FAULTS += fortysecond_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.KeysOutside, "bfloat16"), (ways.SubTiles, "float16"),
    (ways.NaturalExponentials, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("heads_filled_up", frozenset(), ways.heads_filled_up, "bfloat16"))
SOUND.append(Fault("weights_by_lse", frozenset(), ways.weights_by_lse, "float16"))
