"""The thirty-second set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, tiles and sequences are here; precision and the backward pass in
thirtysecond_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.thirtysecond --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtysecond_kernel as ways
from benchmarks.unseen.attention import thirtysecond_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks, e4m3
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor

AGAIN = (
    "scale_of_the_key_eight_rows_above",  # ninth: scale_of_another_key_head
    "key_of_zeros_that_no_mask_hides",  # fourteenth: one_beside_shifted_exponentials
    "sinks_left_out_where_keys_go_round",  # others: sinks_not_used
    "bias_that_the_backward_pass_does_not_take",  # tenth: mask_not_passed_to_the_backward_pass
    "diagonal_on_the_first_tile_of_queries_alone",  # eighth: diagonal_on_the_last_block_alone
    "do_in_e4m3_by_one_scale",  # thirtieth: do_in_mxfp8_along_its_features
    "dv_in_a_buffer_of_its_own_type",  # others: gradients_added_up_in_their_own_type
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "causal-mask", "float16")
class chunks_of_a_prompt_see_all_of_its_length(ForwardAlone):
    """GeeeekExplorer/nano-vllm PR 213: a prompt is read in chunks, here of 64 tokens, and each is
    given the whole prompt's length in place of where it ends itself: the diagonal, which starts
    from the last key, lies as much further on.
    """

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def causal(self, i, j, back):
        end = ((i // 64 + 1) * 64).clamp_max(self.at.n)
        return j <= i + self.at.n - end


@fault(FAULTS, "causal-mask mask")
class blocks_of_slots_seen_as_their_first_page_is(ForwardAlone):
    """pytorch/pytorch issue 182593: the mask's blocks hold more slots of the cache than a page
    does, here four pages of 16: pages that lie together are all seen, masked or skipped as the
    first of them is, whichever tokens they hold.
    """

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    @staticmethod
    def order(pages: int) -> Tensor:
        """The page of the sequence that lies at every place of the cache."""
        return torch.arange(pages) * 7 % pages if pages % 7 else torch.arange(pages).flip(0)

    def causal(self, i, j, back):
        order = self.order(-(-self.at.nk // 16))
        place = order.argsort()[(j // 16).clamp_max(len(order) - 1)]
        first = order[place // 4 * 4] * 16
        whole, skipped = first + 15 <= i[0, 0], first > i[-1, 0]
        return whole | (~skipped & (j <= i))


@fault(FAULTS, "mask causal-mask", "float16")
class causal_where_a_mask_is_given(Kernel):
    """huggingface/transformers issue 39389 (Gemma 3): the mask that lets tokens of an image see
    each other never reaches the attention, which is causal in its place.
    """

    def hide(self, s, rows, cols, back):
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        i = torch.arange(rows.start, rows.stop)[:, None]
        seen = self.seen(rows, cols, back) & (torch.arange(cols.start, cols.stop) <= i)
        return s.masked_fill(~seen, -INF)


# --- tiles
@fault(FAULTS, "query-tail", "float16")
class first_query_taken_for_one_past_the_end(ForwardAlone):
    """ggml-org/llama.cpp PR 7904: whether a row lies inside is asked by `ic0 + j` in place of
    `ic0 + j < ne01`: the first query alone is taken to lie outside, and zeros are loaded for it.
    """

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part).clone()
        if name == "q" and part.start == 0:
            found[:, :, 0] = 0.0
        return found


@fault(FAULTS, "ragged layout")
class weights_of_the_last_tile_at_another_pitch(ForwardAlone):
    """sgl-project/sglang PR 24982 (AMX): weights are written in rows of a whole tile of keys, and
    the product with V reads rows of as many as are left, rounded up to 16.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        left = min(cols.stop, self.at.nk) - cols.start
        self.memory["pitch"] = -(-left // 16) * 16
        return super().online(m, l, acc, s, v, rows, cols)

    def add_values(self, acc, a, p, v):
        low, (high, wide) = self.at.low(p), (p.shape[-2], self.memory["pitch"])
        read = low.flatten(-2)[..., : high * wide].unflatten(-1, (high, wide))
        return acc * a + read @ v[:, :, :wide]


# --- sequences and keys
@fault(FAULTS, "other-data key-tail ragged")
class keys_begin_where_packed_queries_do(ForwardAlone):
    """vllm-project/vllm-omni PR 3525: one list of where sequences begin, made from the queries'
    length, is given for the keys too: of more keys than queries only as many are seen, and later
    sequences' begin among those of the ones before.
    """

    def moved(self, x: Tensor) -> Tensor:
        b, heads, nk, d = x.shape
        flat = x.transpose(0, 1).reshape(heads, b * nk, d)
        index = torch.arange(b)[:, None] * self.at.n + torch.arange(nk)
        return flat[:, index.clamp_max(b * nk - 1)].transpose(0, 1)

    def forward(self):
        kept = self.at.k, self.at.v
        self.at.k, self.at.v = map(self.moved, kept)
        found = super().forward()
        self.at.k, self.at.v = kept
        return found

    def inside(self, j, back):
        return super().inside(j, back) & (j < self.at.n)


@fault(FAULTS, "operand other-data scale")
class scale_of_the_key_eight_rows_above(ForwardAlone):
    """flashinfer-ai/flashinfer PR 3626, review: keys in E4M3 have a scale a token; a fragment holds
    rows r and r + 8, and both are multiplied by the scale of r.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "k":
            return found
        size = found.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
        row = torch.arange(found.shape[2])
        return e4m3(found / size) * size[:, :, row - row % 16 // 8 * 8]


@fault(FAULTS, "padding sinks unnormalized", "float16")
class key_of_zeros_that_no_mask_hides(Kernel):
    """pytorch/pytorch issue 27461 (`add_zero_attn`): a key and a value of zeros stand behind the
    others, and every query sees them, whatever the mask is.
    """

    def finish(self, m, l, acc, rows):
        new = m.clamp_min(0.0)
        a = torch.exp2(m - new)
        return super().finish(new, l * a + torch.exp2(-new), acc * a, rows)


@fault(FAULTS, "sinks")
class sinks_left_out_where_keys_go_round(Kernel):
    """NVIDIA/TransformerEngine PR 3551: where keys and values are passed on from rank to rank, the
    kernels of both passes are not told of the sinks, and take the softmax without them.
    """

    def begin(self, q, first=True):
        return super().begin(q, False)


# --- the softmax
@fault(FAULTS, "maximum non-finite", "float16")
class maximum_of_the_first_subgroups_alone(ForwardAlone):
    """ggml-org/llama.cpp PR 24451 (SYCL): of all subgroups' maxima as many are looked at as one has
    lanes, here a quarter of the keys': what is taken off is too small, and exponentials overflow.
    """

    def maximum(self, m, s):
        quarter = s[..., : s.shape[-1] // 4].amax(-1, keepdim=True)
        whole = torch.where(quarter == -INF, s.amax(-1, keepdim=True), quarter)
        return torch.maximum(m, whole)


@fault(FAULTS, "unnormalized maximum weights-disagree")
class last_tile_enters_the_sum_as_it_is(ForwardAlone):
    """tenstorrent/tt-metal issue 51278, item 12: in the loop for the denominator the last tile's
    scores are exponentiated as they are, without the maximum, which all other tiles are less.
    """

    def row(self, rows):
        self.memory["last"] = self.key_blocks(rows)[-1]
        return super().row(rows)

    def online(self, m, l, acc, s, v, rows, cols):
        new, total, acc = super().online(m, l, acc, s, v, rows, cols)
        if cols == self.memory["last"]:
            raw = torch.exp2(s).sum(-1, keepdim=True)
            total = l * torch.exp2(m - torch.where(new == -INF, 0.0, new)) + raw
        return new, total, acc


FAULTS += thirtysecond_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.FlatTiles, "bfloat16"), (ways.ThirteenParts, "float16"),
    (ways.FromTheMiddle, "bfloat16"), (ways.FinerQueriesBackward, "float16"),
    (ways.SumsAsProducts, "bfloat16"), (ways.KeyGradientsOfTwoHalves, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("rows_in_blocks_of_sixty", frozenset(), ways.rows_in_blocks_of_sixty, "bfloat16"),
    Fault("powers_of_two", frozenset(), ways.powers_of_two, "float16"),
]
