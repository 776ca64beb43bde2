"""The thirty-third set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, layouts and sums are here; precision and the backward pass in thirtythird_scores.py.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.thirtythird --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtythird_kernel as ways
from benchmarks.unseen.attention import thirtythird_scores
from benchmarks.unseen.attention.eighth_kernel import as_heads, fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "mask_of_one_head_by_the_number_of_all",  # others: masks_of_sequences_by_heads
    "out_by_heads_where_tokens_come_first",  # others: out_reshaped_without_permuting
    "weights_in_e5m2",  # first: weights_e5m2
    "halves_below_the_normal_ones_are_zero",  # fourth: half_ds_flushed
    "weights_of_dv_in_int8_by_tiles",  # others: weights_of_dv_in_e4m3_by_a_fixed_scale
    "products_of_do_and_out_in_bf16",  # others: products_of_delta_in_bf16
    "tails_of_dk_and_dv_over_the_next_head",  # others: tail_of_dv_over_the_next_head
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask", "float16")
class mask_of_the_first_step_alone(ForwardAlone):
    """OpenNMT/OpenNMT-py PR 2532: the mask that hides padding is applied in the first step of
    decoding, and in none that follows: here to the first query.
    """

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        later = torch.arange(rows.start, rows.stop)[:, None] > 0
        seen = self.seen(rows, cols, back) & (later | self.given_mask(rows, cols))
        return s.masked_fill(~seen, -INF)


@fault(FAULTS, "mask other-data")
class mask_of_one_head_by_the_number_of_all(Kernel):
    """pytorch/pytorch PR 184180 (MPS): of a mask with one head for all, where a sequence's begins
    is counted by sequences and heads; past the last is the last.
    """

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        many, one = found.shape[:2]
        if one > 1 or many == 1:
            return found
        heads = self.at.q.shape[1]
        own = torch.arange(many * heads).clamp_max(many - 1)
        return found[own, 0].unflatten(0, (many, heads))


@fault(FAULTS, "window")
class window_counted_from_the_first_block_kept(ForwardAlone):
    """vllm-project/vllm PR 2231: a window's last blocks of the cache are kept, and as many tokens
    as the window has are read from where the first of them begins: where the last block is nearly
    full, the newest are not among them.
    """

    def window(self, i, j, back):
        wide = self.at.window[0] + 1
        first = (i // 16 - -(-wide // 16) + 1).clamp_min(0) * 16
        return torch.where(i < wide, j <= i, (j >= first) & (j < first + wide))


@fault(FAULTS, "cache padding", "float16")
class last_key_twice_in_the_cache(ForwardAlone):
    """vllm-project/semantic-router PR 3460: all tokens are read into the cache, and the first step
    of decoding adds the last of them again: it stands there twice, and both are seen.
    """

    def hide(self, s, rows, cols, back):
        s = super().hide(s, rows, cols, back)
        return s + (torch.arange(cols.start, cols.stop) == self.at.nk - 1).float()


# --- layouts
@fault(FAULTS, "other-data layout")
class rows_of_two_warpgroups_exchanged(ForwardAlone):
    """tile-ai/tilelang issue 2522: where more than one warpgroup shares a tile's rows, blocks of
    rows in its middle are stored in each other's place; here 32 of 128.
    """

    rows = 128

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        one, two, three, four = out.chunk(4, 2)
        return torch.cat([one, three, two, four], 2), lse


@fault(FAULTS, "layout other-data", "float16")
class out_by_heads_where_tokens_come_first(ForwardAlone):
    """ggml-org/llama.cpp PR 25025, comment: the last kernel writes O a head after the other, and it
    is read as a token after the other, with all its heads.
    """

    def forward(self):
        o, lse = super().forward()
        return as_heads(o), lse


# --- scores and sums
@fault(FAULTS, "softcap")
class cap_of_scores_divided_by_the_layer(ForwardAlone):
    """NVIDIA/TransformerEngine PR 3391: scores are divided by the layer's number, which the softmax
    multiplies by later; the cap in between has to be divided as well, and here, in the third layer,
    is not.
    """

    def cap(self, s, back):
        return 3 * super().cap(s / 3, back)


@fault(FAULTS, "scale operand", "float16")
class scales_of_queries_under_the_padding_of_codes(ForwardAlone):
    """ggml-org/llama.cpp PR 28358: with 64 features, half of the lanes write zeros for codes that
    there are not, where the scales of the query's codes lie.
    """

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        return found * 0.0 if name == "q" and x.shape[-1] == 64 else found


@fault(FAULTS, "unnormalized padding weights-disagree")
class sums_past_the_end_of_the_tile_before(ForwardAlone):
    """FluxML/NNkernels.jl PR 16: one loop of the softmax does not ask where the keys end: past them
    it adds up what the tile before has left there.
    """

    def row(self, rows):
        self.memory.pop("before", None)
        return super().row(rows)

    def online(self, m, l, acc, s, v, rows, cols):
        new, l, acc = super().online(m, l, acc, s, v, rows, cols)
        past, before = cols.stop - self.at.nk, self.memory.get("before")
        self.memory["before"] = s
        if past > 0 and before is not None:
            safe = torch.where(new == -INF, 0.0, new)
            l = l + torch.exp2(before[..., -past:] - safe).sum(-1, keepdim=True)
        return new, l, acc


@fault(FAULTS, "unnormalized", "float16")
class softmax_over_all_but_the_batch(ForwardAlone):
    """nntrainer/nntrainer PR 1602: the softmax flattens what it is given, so that one sum is taken
    over all heads, queries and keys of a sequence.
    """

    def forward(self):
        o, lse = super().forward()
        whole = torch.logsumexp(lse / LOG2_E, (1, 2), keepdim=True) * LOG2_E
        return o * torch.exp2(lse - whole), lse


FAULTS += thirtythird_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.SlimTiles, "bfloat16"), (ways.SevenParts, "float16"), (ways.LastKeysFirst, "bfloat16"),
    (ways.OtherTilesBackward, "float16"), (ways.RaisedMaximum, "bfloat16"),
    (ways.KeyGradientsThenQueries, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("key_chunks_by_autograd", frozenset(), ways.key_chunks_by_autograd, "bfloat16"),
    Fault("heads_last", frozenset(), ways.heads_last, "float16"),
]
