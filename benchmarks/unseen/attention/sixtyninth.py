"""The sixty-ninth set of faults of attention: a sample of what public threads report of research
code and of reimplementations, as the searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «is this a bug in the attention implementation», «mistake in multi head attention
code», «question about attention scaling implementation differs from paper», «attention code does
not match paper equation», «softmax over wrong dimension attention», «view instead of transpose
heads attention bug», «forgot to divide by sqrt d_k», «mask applied after softmax attention», «wrong
mask shape self attention repository», «graph transformer attention bug», «time series transformer
attention mask bug informer», «protein language model attention bug», «alphafold attention bias
gating bug», «recommendation transformer attention mask bug», «pointer network attention mask bug»,
«decision transformer attention mask bug», «longformer attention wrong result», «bigbird sparse
attention bug», «linformer performer attention bug scale», «attention weights do not sum to one
bug».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 231 results, of which each search gives twelve at most. 19 threads are
faults here. What was left: 107 results are about something else, features, documentation, crashes
(among them vllm issue 11978, libai PR 20, BiLLM PR 12, sequence_labeling_tf PR 70, ComfyUI PR 6721
and vllm-ascend PR 6 of cosdt), other operations, positions, or what its own thread denies; 23 tell
no cause, many of them no text at all, and their change is not stored, is about something else or
does not say either; 42 are threads of earlier sets, or of others that were written beside this one;
31 are results once more; MatchZoo PR 613 is what PR 635 has again; 8 cannot be written so that this
function errs: additive scores (PaddlePaddle models PRs 1316, 1317, 1318), projections of a query,
of tokens or of parts of the input (comatch issue 2, fairseq issue 2923, neetcode issue 5130), and
weights that are only shown (transformers issue 5646 and PR 5659).

Many pull requests have no text. Of those whose repository is stored the change itself was read, and
of threads that point at a line the file: BreizhCrops issue 20, MatchZoo PR 635,
reading_comprehension_tf PRs 65 and 69, statistical-nlp-17 PR 6, GraphaRNA PR 10, xtuner PR 829,
torch-blocksparse PR 6, lightseq PR 462, deep-learning-notes PR 11, the code of allennlp (PR 3473),
Protenix, DCdetector, vllm-fork, SeekDeeper and Chinese-Text-Classification-Pytorch, and the chapter
that the book's issue 261 is about. reading_comprehension_tf PR 65 has two defects: its softmax went
over the queries as well, which PR 30 of an earlier set is about, and is left out here; xtuner PR
829 has others of parallel ranks. What memory holds is chosen where it is not told, as widths are
that no thread tells.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Scales and masks are here; softmaxes, operands and layouts in
sixtyninth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.sixtyninth --check`).
"""

# ruff: noqa: ARG001, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtyninth_kernel as ways
from benchmarks.unseen.attention import sixtyninth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated, softmax_of

AGAIN = (
    "logits_scaled_again_by_the_efficient_path",  # fifteenth: default_scale_on_top_of_the_given_one
    "root_of_the_input_over_the_heads",  # fifty-fifth: sixty_four_where_heads_have_sixteen; others
    "root_of_a_heads_width_for_the_models",  # thirty-seventh: scale_of_the_models_width, inverse
    "mask_of_any_word_of_the_query",  # eighth: mask_not_read; others too
    "attention_layers_without_masked_softmax",  # fifty-eighth: padding_that_scores_zero
    "ones_block_where_they_were_to_allow",  # forty-eighth: true_selects_minus_infinity; others too
    "rows_up_to_a_length_marked",  # fifty-ninth: rows_of_the_batch_marked_for_columns, the same
    "mask_loaded_past_the_row_of_blocks",  # fifty-eighth: nan_and_minus_infinity, of keys
    "branches_softmaxed_over_the_batch",  # forty-third: gates_normalized_over_the_batch
    "exponentials_over_their_sum_as_they_are",  # forty-seventh: exponentials_without_their_maximum
    "every_head_of_unprojected_vectors",  # forty-seventh: values_projected_as_keys, in part
    "batch_first_into_an_encoder_of_tokens_first",  # fifty-sixth:
    # sequences_of_the_dual_path_attend_to_each_other
    "heads_by_a_view_of_batch_times_heads",  # seventeenth: heads_split_without_transposing
    "transpose_removed_by_mistake",  # fifty-fourth: heads_first_for_a_function_of_tokens_first
    "heads_and_tokens_exchanged_in_the_transform",  # seventeenth: out_reshaped_without_permuting
)
STATED: dict[str, str] = {}
"""Inputs on which alone a fault shows: none."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- scales
@fault(FAULTS, "scale")
class logits_scaled_again_by_the_efficient_path(ScaleOfItsOwn):
    """bytedance/Protenix issue 159: `scaled_dot_product_attention` scales the logits, and the other
    path of the same function does not, to which queries come scaled; `scale=1.0` was the remedy.
    """

    rows, cols = 64, 32

    def own(self):
        return float(self.at.scale * self.at.q.shape[-1] ** -0.5)


@fault(FAULTS, "scale", "float32")
class root_of_the_input_over_the_heads(WholeRows, ScaleOfItsOwn):
    """allenai/allennlp PR 3473: the scale is the root of `input_dim // num_heads`, where the paper
    has that of a head's keys, `attention_dim // num_heads`; here the input has 512 features.
    """

    rows = 64

    def own(self):
        return float((512 // self.at.q.shape[1]) ** -0.5)


@fault(FAULTS, "scale", "float16")
class root_of_a_heads_width_for_the_models(ScaleOfItsOwn):
    """DAMO-DI-ML/KDD2023-DCdetector issue 10: the paper divides by the root of d_model, and the
    code by that of d_model / H.
    """

    rows, cols = 128, 48

    def own(self):
        return float(self.at.scale * self.at.q.shape[1] ** 0.5)


# --- masks
@fault(FAULTS, "mask")
class mask_of_any_word_of_the_query(ways.OtherMask):
    """NTMC-Community/MatchZoo PR 635 (PR 613 has the same for two models): the mask is
    `K.any(…, axis=-1, keepdims=True)` of [B, L], whether any word is none of padding, and hides
    nothing.
    """

    rows, cols = 32, 64

    def changed(self, mask):
        at = self.at
        return mask.expand(*mask.shape[:-2], at.n, at.nk).any(-1, keepdim=True)


def attention_layers_without_masked_softmax(query, key, value, *, is_causal, scale, attn_mask=None,
                                            window=None, softcap=0.0, sinks=None,
                                            enable_gqa=False):  # fmt: skip
    """stevezheng23/reading_comprehension_tf PR 65: data are multiplied by their masks, and the
    softmax has none: keys of padding score 0 and have weights, their values are 0.
    """
    hides = attn_mask is not None and attn_mask.dtype == torch.bool
    s = ways.scores_of(query, key, is_causal=is_causal, scale=scale, window=window,
                       attn_mask=None if hides else attn_mask, softcap=softcap)  # fmt: skip
    if hides:
        s = torch.where(attn_mask | (s == -INF), s, 0.0)
    p = softmax_of(s, sinks)
    p = p * attn_mask if hides else p
    return (p @ repeated(value, query.shape[1])).to(query.dtype)


FAULTS.append(
    Fault("attention_layers_without_masked_softmax", frozenset({"mask", "unnormalized"}),
          attention_layers_without_masked_softmax, "float32", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "mask")
class ones_block_where_they_were_to_allow(ways.OtherMask):
    """mjustynaPhD/GraphaRNA PR 10: nodes of one structure are marked with 1 and all others with 0,
    and where it is boolean 1 blocks. A batch of a single structure, where all may see all, was an
    exception, and right.
    """

    rows, cols = 96, 32

    def changed(self, mask):
        return mask if bool(mask.all()) else ~mask


@fault(FAULTS, "mask", "float16")
class rows_up_to_a_length_marked(ways.OtherMask):
    """InternLM/xtuner PR 829: `attention_mask[:i] = True`, for every length i, marks the first i
    sequences of the batch, and is to mark the first i tokens of one.
    """

    rows, cols = 64, 64

    def changed(self, mask):
        marked = torch.zeros(mask.shape[0], dtype=torch.bool)
        for length in mask.flatten(1, 2).any(1).sum(-1).tolist():
            marked[:length] = True
        return marked.view(-1, 1, 1, 1)


@fault(FAULTS, "nan-escapes non-finite mask", "float16")
class mask_loaded_past_the_row_of_blocks(Kernel):
    """ptillet/torch-blocksparse PR 6: the softmax has a power of two of lanes, and those past a
    row's last block load the mask all the same, from past its end, and add it to a score of −∞. For
    most rows the next ones lie there, which does no harm; behind the mask's last row lies NaN here.
    """

    rows, cols = 64, 16

    def hide(self, s, rows, cols, back):
        s, at = super().hide(s, rows, cols, back), self.at
        lanes = 1 << (at.nk - 1).bit_length()
        if back or at.mask is None or lanes == at.nk:
            return s
        row = torch.arange(rows.start, rows.stop)[:, None]
        return s.masked_fill(row * at.nk + lanes > at.n * at.nk, torch.nan)


FAULTS += sixtyninth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.EveryThirdBlock, "float16"), (ways.MaximumFirst, "float16"),
    (ways.MeanAsItRuns, "float32"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
for one, dtype in (
    (ways.chunks_against_one_maximum, "bfloat16"), (ways.keys_from_the_last, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(one.__name__, frozenset(), one, dtype))
