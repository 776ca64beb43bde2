"""The forty-first set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «chunked local attention wrong mask bug», «block sparse attention kernel wrong result
fix», «prefix-LM or bidirectional attention mask wrong result», «document mask packing
cross-contamination attention bug», «differential or gated attention wrong output numerics»,
«attention temperature tuning or qk norm scale wrong bug», «attention head dim 256 wrong result
kernel», «attention head dim 96 or 192 wrong gradient padding», «value head dim different from query
head dim attention wrong», «tensor parallel kv heads replicated attention wrong result», «context
parallel zigzag attention wrong result or gradient», «ulysses sequence parallel attention mismatch
loss bug», «int4 or int8 kv cache attention accuracy bug dequant», «speculative decoding multi-token
query attention wrong mask», «encoder-decoder cross attention mask wrong kernel», «attention with
relative bias gradient wrong dbias or dq», «quantized attention SageAttention wrong result black
output fix», «deterministic backward attention different gradient bug», «bf16 attention rounding
error training instability fix kernel», «attention merge states lse infinite NaN fix».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were 28 faults: the tenth of the third, 182 results. What was left: 99 are about
something else, features, builds, crashes, questions or a result that had come before; 28 tell no
cause, many of them no text at all; 16 are threads of earlier sets; 2 are on the very defect of one
that was taken; 9 cannot be written so that this function errs: delta rules in place of a softmax
(flash-linear-attention issues 389 and 104), masks of whole heads (transformers issue 10540 and PRs
10605 and 10461), other tensors overwritten by the cache (vllm PR 2622), the last bits of sums in
another order (flash-attention PR 1766), and keys that are there as often as there are ranks, which
changes no softmax (vllm-omni PRs 6930, for its rotations as well, and 1233).

Where a thread tells the cause in a line, how it comes about was read in the public history of its
repository: flash-attention PR 60, FasterTransformer PR 324, vllm-ascend PR 3366, lucebox PR 348,
fast-transformers issue 37; ComfyUI_IPAdapter_plus PR 784 says "near-zero", and its code makes keys
of zeros. A pull request without a text tells none, whatever its change is. Of a thread with several
defects one is taken. What models do before attention is taken for done where the thread is about
it: queries and keys come normalized. Numbers that no thread tells were chosen.

What is right was set down before anything ran. `AGAIN` names every fault whose mistake an earlier
set has in some form. Masks, heads and layouts are here; scales, factors, merges and what is not
finite in fortyfirst_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.fortyfirst --check`) but those that STATED names,
which need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortyfirst_kernel as ways
from benchmarks.unseen.attention import fortyfirst_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands

AGAIN = (
    "documents_packed_without_a_mask",  # thirty-eighth: jagged_rows_see_other_sequences
    "zeros_in_place_of_the_mask",  # eighth: mask_not_read; others too
    "mask_read_before_it_is_copied",  # fifteenth: keys_decoded_before_they_arrive, which are keys
    "mask_that_says_what_to_hide",  # twenty-seventh: valid_positions_hidden
    "image_spans_under_the_causal_triangle",  # thirty-sixth: custom_mask_replaced_by_the_causal_one
    "fused_kernel_knows_causal_alone",  # eleventh: always_causal_and_not_scaled; others too
    "window_of_causal_calls_left_open",  # fifth: causal_ignored_where_it_divides; others too
    "causal_for_a_batch_of_one",  # thirty-fifth: encoder_made_causal_as_well; others too
    "extend_always_causal_on_cpu",  # as before
    "fragment_of_another_layout",  # thirty-fourth: scores_in_the_lanes_of_other_keys
    "scores_stored_as_wide_as_the_head",  # another issue on that kernel, twenty-sixth:
    # wide_rows_read_at_the_pitch_of_narrow_ones
    "copies_of_heads_sent_as_heads",  # fifth and others: heads paired with other key heads
    "scale_made_and_never_applied",  # thirty-seventh: scale_missing; others too
    "scale_put_into_the_query_upside_down",  # ninth: divided_by_the_scale
    "scale_that_the_fused_runner_is_not_given",  # thirty-seventh: scale_not_passed_on; others too
    "root_of_a_root_undoes_the_scale",  # fifteenth: default_scale_on_top_of_the_given_one
    "scale_not_handed_to_the_dispatched_attention",  # thirty-seventh: scale_not_passed_on; others
    "gate_of_zeros_on_what_comes_out",  # twenty-fifth: factor_of_values_never_read
    "windows_that_hold_padding_alone",  # thirteenth and others: first_keys_all_hidden
    "union_of_empty_states",  # eleventh: two_empty_parts
    "plus_infinity_where_no_key_is_attended",  # twentieth: lse_of_nothing_is_plus_infinity
    "merged_by_exponentials_of_lse",  # eighth: merged_by_exp_of_lse
)
STATED = {
    "scale_put_into_the_query_upside_down": "a scale that is not 1/√d",
    "scale_that_the_fused_runner_is_not_given": "a scale that is not 1/√d",
    "scale_not_handed_to_the_dispatched_attention": "a scale that is not 1/√d",
    "codes_by_the_scale_of_nothing": "a block of keys or queries that is all zeros",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks that are given
def documents_packed_without_a_mask(query, key, value, *, is_causal, scale, attn_mask=None,
                                    window=None, softcap=0.0, sinks=None):  # fmt: skip
    """DeepOpt-com/WrinkleFree-Monorepo issue 53: documents are packed into one causal sequence,
    positions alone begin again at each of them, and tokens attend to the documents before theirs.
    """
    options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
               "softcap": softcap, "sinks": sinks}  # fmt: skip
    (b, _, n, _), nk = query.shape, key.shape[2]
    if not is_causal or attn_mask is not None or n != nk:
        return ways.sound(query, key, value, **options)
    packed = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    return ways.sound(*packed, **options)[0].unflatten(1, (b, n)).transpose(0, 1)


FAULTS.append(
    Fault("documents_packed_without_a_mask", frozenset({"mask", "other-data"}),
          documents_packed_without_a_mask, "bfloat16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "mask", "float16")
class zeros_in_place_of_the_mask(EveryBlock):
    """WhereIsAI/BiLLM issue 6: a layer that is to see both ways gets zeros of the mask's shape, and
    padding is no longer hidden in it either.
    """

    rows, cols = 64, 32

    def hide(self, s, rows, cols, back):
        if self.at.mask is None:
            return super().hide(s, rows, cols, back)
        j = torch.arange(cols.start, cols.stop)
        return s.masked_fill(~self.inside(j, back), -INF)


@fault(FAULTS, "mask")
class padding_attends_to_padding(Kernel):
    """Biohub/esm issue 299, PR 300: `seq_id[i] == seq_id[j]` is the mask, where both are to be
    tokens: queries of padding, which see nothing, attend to the keys of padding.
    """

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool and at.n == at.nk:
            full = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk)
            token = full.any(-1)
            at.mask = full | ~(token[..., None] | token[..., None, :])
        return super().forward()


@fault(FAULTS, "mask other-data")
class mask_of_sequences_laid_over_heads(Kernel):
    """sooftware/attentions issue 4: queries, keys and values lie heads before sequences, and the
    mask is repeated sequences before heads: a head gets another sequence's.
    """

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool:
            b, heads = at.q.shape[:2]
            full = at.mask.expand(b, heads, at.n, at.nk).flatten(0, 1)
            at.mask = full.unflatten(0, (heads, b)).transpose(0, 1)
        return super().forward()


@fault(FAULTS, "mask unstable", "float16")
class mask_read_before_it_is_copied(ForwardAlone):
    """HKUSTDial/flash-sparse-attention PR 144: no wait and no barrier stand between the copy of a
    tile of the mask and its use: rows of it now and then are the tile's before.
    """

    rows, cols = 64, 64

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        before = self.memory.get("tile", torch.zeros_like(found))
        self.memory["tile"] = found
        late = torch.rand(found.shape[-2], 1) < 0.05
        return torch.where(late, before, found)


@fault(FAULTS, "mask", "float16")
class mask_that_says_what_to_hide(Kernel):
    """InseeFrLab/torchTextClassifiers PR 92: SDPA gets the mask of what it is not to see."""

    rows, cols = 96, 32

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        return ~found if found.dtype == torch.bool else found


@fault(FAULTS, "mask causal-mask")
class image_spans_under_the_causal_triangle(EveryBlock, ForwardAlone):
    """vllm-project/vllm-gaudi PR 1797 (Gemma 4): tokens of an image are to see each other both
    ways, and prefill has the causal triangle alone; here where a mask is given.
    """

    rows, cols = 64, 48

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool or at.n != at.nk:
            return super().hide(s, rows, cols, back)
        i = torch.arange(rows.start, rows.stop)[:, None]
        below = torch.arange(cols.start, cols.stop)[None] <= i
        return s.masked_fill(~(self.seen(rows, cols, back) & below), -INF)


# --- causal where it is not asked for, and not where it is
@fault(FAULTS, "causal-mask mask", "float16")
class fused_kernel_knows_causal_alone(EveryBlock, ForwardAlone):
    """NVIDIA/TensorRT-LLM issue 1384 (ChatGLM2): the mask's type is set to bidirectional, and the
    fused kernel of the context is causal all the same.
    """

    rows, cols = 128, 64

    def seen(self, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        below = torch.arange(cols.start, cols.stop)[None] <= i
        return super().seen(rows, cols, back) & (below | (self.at.n != self.at.nk))


@fault(FAULTS, "causal-mask mask")
class window_of_causal_calls_left_open(ForwardAlone):
    """vllm-project/flash-attention PR 60 (PR 39): the sparse kernel's default window is (−1, −1),
    and what is to be causal is not, in the blocks that are visited.
    """

    rows, cols = 64, 64

    def causal(self, i, j, back):
        return (j >= 0) & (i >= 0)


@fault(FAULTS, "causal-mask mask")
class causal_for_a_batch_of_one(EveryBlock):
    """McGill-NLP/llm2vec issue 74: for a batch of one no mask is made, and where there is none
    attention is causal.
    """

    def seen(self, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        below = torch.arange(cols.start, cols.stop)[None] <= i
        made = self.at.q.shape[0] > 1 or self.at.mask is not None
        return super().seen(rows, cols, back) & (below | made)


@fault(FAULTS, "causal-mask mask")
class extend_always_causal_on_cpu(EveryBlock, ForwardAlone):
    """sgl-project/sglang PR 35434: the CPU's kernel for new tokens is causal among them, which
    encoders are not.
    """

    rows, cols = 32, 128

    def seen(self, rows, cols, back):
        before = self.at.nk - self.at.n
        i = torch.arange(rows.start, rows.stop)[:, None]
        below = torch.arange(cols.start, cols.stop)[None] <= i + before
        return super().seen(rows, cols, back) & (below | self.at.causal)


# --- heads and layouts
@fault(FAULTS, "layout other-data rescale")
class fragment_of_another_layout(ForwardAlone):
    """Luce-Org/lucebox PR 348: what of a 16 × 16 tile a lane's eight accumulators are is assumed:
    rows 2q and 2q + 1, where they are q and q + 8; so are scores read, masked and stored as
    weights, and O rescaled.
    """

    def product(self, q, k, back):
        s = super().product(q, k, back)
        tiles = s.unflatten(-2, (-1, 16)).unflatten(-1, (-1, 16))
        i, j = torch.arange(16)[:, None], torch.arange(16)
        read = tiles.movedim(-3, -2)[..., i // 2 + j // 8 * 8, j % 8 + i % 2 * 8]
        return read.movedim(-2, -3).flatten(-2).flatten(-3, -2)

    def add_values(self, acc, a, p, v):
        i, j = torch.arange(acc.shape[-2])[:, None], torch.arange(acc.shape[-1])
        factor = a[..., 0][..., i // 16 * 16 + i % 8 * 2 + j % 16 // 8]
        return acc * factor + self.at.low(p) @ v


@fault(FAULTS, "layout other-data", "float16")
class scores_stored_as_wide_as_the_head(ForwardAlone):
    """gittensor-ai-lab/sparkinfer issue 330: 128 is written down for the head's width; the first
    place where that shows is a tile of scores, whose rows are stored a head's width apart and read
    128, here 32, apart.
    """

    rows, cols = 16, 32

    def product(self, q, k, back):
        s = super().product(q, k, back)
        width = q.shape[-1]
        if width <= 32:
            return s
        row, col = torch.arange(16)[:, None], torch.arange(32)
        room = s.new_zeros(*s.shape[:2], 16 * width)
        room[..., row * width + col] = s
        return room[..., row * 32 + col]


@fault(FAULTS, "key-heads other-data", "float16")
class copies_of_heads_sent_as_heads(OtherOperands):
    """vllm-project/vllm-ascend PR 3366: with more ranks than key heads these have copies, and what
    is sent to the decoder is placed by the rank's number, which counts the copies: two heads get
    the first's keys and values.
    """

    def read(self, k, v):
        head = torch.arange(k.shape[1])
        own = head // self.at.groups // 2 * self.at.groups + head % self.at.groups
        return k[:, own], v[:, own]


def heads_of_all_ranks_in_one(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                              softcap=0.0, sinks=None):  # fmt: skip
    """vllm-project/vllm PR 39707 (Param2MoE): what a rank has of Q, K and V is viewed with the
    number of heads of all ranks, here two: pairs of tokens are one with twice as many heads.
    """
    options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
               "softcap": softcap}  # fmt: skip
    if attn_mask is not None or query.shape[2] % 2 or key.shape[2] % 2:
        return ways.sound(query, key, value, sinks=sinks, **options)
    parts = (ways.parity_as_heads(x) for x in (query, key, value))
    sinks = None if sinks is None else sinks.repeat(2)
    return ways.heads_as_parity(ways.sound(*parts, sinks=sinks, **options))


FAULTS.append(
    Fault("heads_of_all_ranks_in_one", frozenset({"layout", "other-data"}),
          heads_of_all_ranks_in_one, "bfloat16", frozenset({"elements"}))
)  # fmt: skip

FAULTS += fortyfirst_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.MaximaFirst, "bfloat16"), (ways.ShuffledBlocks, "float16"),
    (ways.WholeBackward, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("in_double", frozenset(), ways.in_double, "float16"))
SOUND.append(Fault("keys_from_the_end", frozenset(), ways.keys_from_the_end, "bfloat16"))
