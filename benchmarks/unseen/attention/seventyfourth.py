"""The seventy-fourth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «encoder decoder cross attention cache wrong», «bert self attention mask additive
bug», «gpt2 attention reorder upcast bug», «llama attention mask static cache bug», «qwen2 vl
attention varlen bug», «gemma2 attention cap sliding bug», «deepseek mla absorb attention bug»,
«mixtral attention window bug», «roberta longformer global attention bug», «t5 relative bias cache
bug», «opt galactica attention mask bug», «esm attention mask bug», «transformer xl attention mask
memory bug», «xlnet two stream attention bug», «conformer relative attention bug», «q-former
perceiver resampler attention mask bug», «lora training attention mask packing bug», «rlhf logprob
attention mask left pad bug», «speculative draft model attention mask bug», «onnx export attention
mask wrong».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 238 results, of which each search gives twelve at most. 22 are faults
here. What was left: 114 are about something else, features, speed, builds, crashes, questions
or other operations (weights that are only shown, transformers issue 5646, PR 5659, and positions,
OpenRLHF issue 217, among them); 31 had come before; 21 are threads of earlier sets;
47 tell no cause, most of them no text at all; 2 tell of a mistake that another thread here has
(transformers PR 30414, longformer issue 254); of 1 it is disputed whether it is one (mobius PR
340). The counts are by hand.

Where a thread does not tell enough it was looked up further: of dllm issue 15 PR 3 of the same
repository, which has its title alone; transformers PR 13573 in its description; transformers issue
47651 in pytorch issue 191937 and others, which tell when it errs and not why, so that it was left.
sglang PR 1106, apex PR 924, verl PR 1411, transformers issues 9588 and 35749, ComfyUI PR 6721,
Otter PR 29, BiLLM PR 12 and TransformerLens PR 390 were asked for as well, and are no clearer.
FasterTransformer issue 270 guesses, and is taken at its word; how its cache lies is chosen.
Where SDPA is told of no mask, transformers PR 30437 is taken for the zeros that it attends to, PR
46914 for the diagonal of flash attention. What lies in caches, windows and lengths that no thread
tells were chosen. Of a thread with several defects one is taken.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks are here; windows, scores, rows of nothing and caches in
seventyfourth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.seventyfourth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventyfourth_kernel as ways
from benchmarks.unseen.attention import seventyfourth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of

AGAIN = (
    "draft_columns_of_ones_and_zeros",  # forty-fifth: mask_of_ones_and_zeros_added; others too
    "llada_without_its_mask",  # eighth: mask_not_read; others too
    "batches_generated_without_their_mask",  # fifty-eighth: padding_attended_to_in_translation
    "logprobs_without_the_mask_of_padding",  # as before
    "forced_layers_drop_the_mask",  # eighth: mask_not_read; others too
    "mask_kept_only_if_it_hides_nothing",  # as before
    "packed_lengths_that_sum_their_numbers",  # eighth: mask_not_read, and sequences run together
    "mask_of_a_sequence_for_a_key_head",  # tenth: masks_of_sequences_by_heads; others too
    "first_memory_is_never_seen",  # fortieth: window_of_cudnn_one_key_short
    "window_a_key_wider_than_that_of_gemma",  # fifteenth: window_of_one_key_more; others too
    "window_that_the_config_switches_off",  # thirty-eighth: every_layer_has_a_window
    "scores_in_half_before_and_behind_their_scale",  # fortieth: products_before_their_scale_in_half
    "diagonal_nine_tokens_back",  # seventh: diagonal_hidden, by a token alone
    "exported_rows_of_padding_are_nan",  # fortieth: softmax_of_rows_that_are_all_masked
    "zeros_of_the_static_cache_attended_to",  # thirty-sixth: placeholders_of_the_static_cache
    "flash_from_the_end_of_the_static_cache",  # fortieth: diagonal_moved_by_the_keys_in_excess
    "memory_begins_where_it_ends",  # thirty-sixth: cached_prefix_not_attended
    "encoder_cut_to_the_decoders_window",  # twenty-fourth: keys_of_the_last_window_alone
    "mask_cut_at_the_other_end_than_the_encoder",  # fiftieth: mask_of_all_tokens_cut_from_its_front
)
STATED: dict[str, str] = {}
"""Inputs on which alone a fault shows: none has such."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks that do not arrive
@fault(FAULTS, "mask")
class llada_without_its_mask(ways.MaskDropped):
    """ZHZisZZ/dllm issue 15 (PR 3): LLaDA's own code takes a mask and does nothing with it."""

    rows, cols = 64, 48

    def dropped(self, mask):
        return True


@fault(FAULTS, "mask", "float16")
class batches_generated_without_their_mask(ForwardAlone):
    """mrflogs/LoRA-Pro PR 8: a batch is generated without the attention mask, and what pads its
    shorter sequences is attended to.
    """

    rows, cols = 32, 128

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool or at.q.shape[0] == 1:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask")
class logprobs_without_the_mask_of_padding(ways.MaskDropped):
    """StarsfieldAI/R1-V PR 32: `_get_per_token_logps` hands the model no attention mask, which a
    batch of more than one sequence needs.
    """

    rows, cols = 128, 64

    def dropped(self, mask):
        return mask.dtype == torch.bool and self.at.q.shape[0] > 1


@fault(FAULTS, "mask", "float32")
class forced_layers_drop_the_mask(ways.MaskDropped):
    """The-School-of-AI/LLM PR 516, its bug 4: `force()`, by which reversible layers call their
    attention, drops the attention mask.
    """

    rows, cols = 16, 32

    def dropped(self, mask):
        return True


@fault(FAULTS, "mask", "float16")
class mask_kept_only_if_it_hides_nothing(ways.MaskDropped):
    """huggingface/transformers PR 28937, review: for flash attention the mask is handed on if 0.0
    is *not* in it, and is None otherwise.
    """

    rows, cols = 64, 64

    def dropped(self, mask):
        return mask.dtype == torch.bool and not bool(mask.all())


# --- masks that arrive as others
@fault(FAULTS, "mask")
class draft_columns_of_ones_and_zeros(Kernel):
    """vllm-project/speculators PR 897: to an additive mask of 0 and −∞ columns are appended for the
    draft's tokens that have 1 on their diagonal and 0 elsewhere: all of them are seen, and their
    own get 1 added. The draft's are the last quarter of the keys here.
    """

    rows, cols = 32, 64

    def hide(self, s, rows, cols, back):
        at, hidden = self.at, super().hide(s, rows, cols, back)
        if at.mask is None or at.mask.dtype != torch.bool:
            return hidden
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)
        wide = at.nk // 4
        drafts = (j >= at.nk - wide) & (j < at.nk)
        own = (i % wide == j - (at.nk - wide)).float() * LOG2_E
        plain = s.masked_fill(~self.seen(rows, cols, back), -INF) + own
        return torch.where(drafts, plain, hidden)


@fault(FAULTS, "mask")
class global_tokens_made_local(Kernel):
    """allenai/longformer issue 28 (issue 254): BART's `invert_mask` makes a truth value of a mask
    whose 2 stands for global attention, which is thus never turned on: tokens that all see, and
    those that see all, see and are seen as far as the window goes, 24 tokens here.
    """

    rows, cols = 48, 48

    def forward(self):
        at, mask = self.at, self.at.mask
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.expand(*mask.shape[:-2], at.n, at.nk)
            all_over = mask.all(-2, keepdim=True) | mask.all(-1, keepdim=True)
            near = (torch.arange(at.n)[:, None] - torch.arange(at.nk)).abs() <= 24
            at.mask = mask & (near | ~all_over)
        return super().forward()


@fault(FAULTS, "mask other-data", "float16")
class mask_of_a_sequence_for_a_key_head(Kernel):
    """ml-explore/mlx-lm PR 1903: scores are [B, key heads, repeats, L, S] and the mask is
    [B, 1, L, S], which broadcasts as [1, B, 1, L, S] does: with as many sequences as key heads
    nothing is raised, and a head has the mask of the sequence of its number.
    """

    rows, cols = 64, 32

    def forward(self):
        at = self.at
        shared = at.q.shape[1] // at.groups
        if at.mask is not None and at.mask.ndim == 4:
            b, heads = at.mask.shape[:2]
            if heads == 1 and b == shared == at.q.shape[0]:
                at.mask = at.mask.transpose(0, 1).repeat_interleave(at.groups, 1)
        return super().forward()


def packed_lengths_that_sum_their_numbers(query, key, value, *, is_causal, scale, attn_mask=None,
                                          window=None, softcap=0.0, sinks=None,
                                          enable_gqa=False):  # fmt: skip # noqa: ARG001
    """MeetKai/functionary issue 195: a mask that numbers packed sequences, 1 1 1 2 2 3, comes to
    the model's `_get_unpad_data`, which sums it for the length of a row: the sequences of a row are
    one, and its end lies in the next row. Where a token does not see the one before it a sequence
    begins here.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    fits = attn_mask is not None and attn_mask.dtype == torch.bool and n == nk
    if not fits or attn_mask.ndim != 4 or attn_mask.shape[0] != b:
        return attention(Kernel)(query, key, value, is_causal=is_causal, scale=scale,
                                 attn_mask=attn_mask, window=window, softcap=softcap,
                                 sinks=sinks)  # fmt: skip
    seen = ways.lengths_of_numbers(attn_mask.expand(b, -1, n, nk)[:, 0])
    q, k, v = (repeated(x, heads).transpose(0, 1).flatten(1, 2) for x in (query, key, value))
    s = q @ k.mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    if is_causal:
        seen = seen & torch.ones_like(seen).tril()
    p = softmax_of(s.masked_fill(~seen, -INF)[None], sinks)[0]
    o = p.to(value.dtype).float() @ v
    return o.unflatten(1, (b, n)).transpose(0, 1).to(query.dtype)


FAULTS.append(Fault("packed_lengths_that_sum_their_numbers", frozenset({"mask", "other-data"}),
                    packed_lengths_that_sum_their_numbers, "bfloat16",
                    frozenset({"elements"})))  # fmt: skip
FAULTS += seventyfourth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.BitsReversed, "float16"), (ways.NaturalExponentials, "float16"),
    (ways.OneTileBack, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("one_batch_of_matrices", frozenset(), ways.one_batch_of_matrices, "float16"))
SOUND.append(Fault("halves_of_halves", frozenset(), ways.halves_of_halves, "float16"))
