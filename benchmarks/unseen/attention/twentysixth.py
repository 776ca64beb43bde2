"""The twenty-sixth set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, scales, tiles and layouts are here; precision and the backward pass in
twentysixth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.twentysixth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentysixth_kernel as ways
from benchmarks.unseen.attention import twentysixth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "queries_and_keys_multiplied_into_half",  # twenty-second: dot_products_added_up_in_half
    "dq_added_to_one_bf16_image",  # nineteenth: dq_added_up_in_16_bits
    "causal_whatever_is_asked_on_the_way_back",  # eighth: backward_always_causal
    "hidden_rows_are_no_numbers_on_the_way_back",  # others: rows without a key, in both passes
    "statistics_read_as_if_packed",  # twentieth: lse_taken_for_packed
    "calls_with_sinks_not_causal_on_the_way_back",  # twentieth: right_edge_dropped_where_sinks_are
    "workspace_too_small_for_head_major_statistics",  # nineteenth: workspace_of_one_head
    "ds_of_dk_not_transposed_within_its_blocks",  # twentieth: dSᵀ of dK in another order
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask-finite mask")
class exponents_held_at_minus_eighty(ForwardAlone):
    """ggml-org/llama.cpp PR 24941: no exponent is let below −80, so that a row of −∞ alone is not
    NaN: it becomes the mean of all values, in place of nothing.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        x = (s - new).nan_to_num(nan=-INF, neginf=-INF).clamp_min(-80 * LOG2_E)
        p = torch.exp2(x) * self.inside(torch.arange(cols.start, cols.stop), False)
        a = torch.where(new == -INF, 1.0, torch.exp2(m - new))
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "mask")
class hidden_scores_multiplied_to_zero(Kernel):
    """georg-wolflein/good-features PR 1: scores are multiplied by the mask of ones and zeros before
    the softmax, to which a score of 0 is as good as any.
    """

    def hide(self, s, rows, cols, back):
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s * self.given_mask(rows, cols)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        if self.at.mask is not None and self.at.mask.dtype == torch.bool:
            ds = ds * self.given_mask(rows, cols)
        return q, k, do, p, ds


@fault(FAULTS, "causal-mask", "float16")
class later_tokens_of_the_chunk_once_64_are_cached(ForwardAlone):
    """tenstorrent/tt-metal issue 48899: tokens of a chunk, here of 32, see those after them in it
    as soon as as many as one block of keys, 64, lie before.
    """

    def causal(self, i, j, back):
        return super().causal(i, j, back) | ((i >= 64) & (j <= i // 32 * 32 + 31))


@fault(FAULTS, "padding ragged")
class last_tile_of_an_odd_number_not_filled_up(ForwardAlone):
    """hw-native-sys/simpler PR 1817, review: scores lie in two slots by turns, and the second one's
    place is reckoned by another pitch where the last page is filled up with −∞: it goes elsewhere.
    """

    def inside(self, j, back):
        return super().inside(j, back) | (j // self.cols % 2 == 1)


# --- scales
@fault(FAULTS, "scale value-factor", "float16")
class scaled_after_the_softmax(Kernel):
    """FrancescoSaverioZuppichini/ViT issue 6: `softmax(energy) * scaling`: weights are multiplied
    by the scale, and scores are not.
    """

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E

    def slope(self, q, k):
        return super().slope(q / self.at.scale, k)

    def finish(self, m, l, acc, rows):
        return super().finish(m, l, acc * self.at.scale, rows)

    def backward(self):
        at = self.at
        at.do, at.o = at.do * at.scale, at.o / at.scale
        dq, dk, dv = super().backward()
        return dq / at.scale, dk / at.scale, dv


# --- layouts
@fault(FAULTS, "ragged layout other-data unwritten", "float16")
class wide_rows_read_at_the_pitch_of_narrow_ones(ForwardAlone):
    """gittensor-ai-lab/sparkinfer issue 425: a tile of O is stored with rows as wide as the head,
    and read with the pitch of a narrower one, here 64 features; features past those are none's.
    """

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        if out.shape[-1] <= 64:
            return out, lse
        found = torch.arange(out.shape[2])[:, None] * 64 + torch.arange(64)
        narrow = torch.zeros_like(out)
        narrow[..., :64] = out.flatten(-2)[..., found]
        return narrow, lse


@fault(FAULTS, "layout other-data")
class heads_split_every_64_columns(ForwardAlone):
    """tenstorrent/tt-metal issue 57366: queries, keys and values are split into heads of 64
    columns, however wide a head is.
    """

    @staticmethod
    def split(x):
        b, heads, n, d = x.shape
        flat = x.transpose(1, 2).reshape(b, -1)
        head, token = torch.arange(heads).view(-1, 1, 1), torch.arange(n).view(1, -1, 1)
        found = token * (heads * d) + head * 64 + torch.arange(d)
        return flat[:, found.clamp_max(flat.shape[1] - 1)]

    def forward(self):
        at = self.at
        kept = at.q, at.k, at.v
        at.q = self.split(at.q)
        at.k, at.v = (self.spread(self.split(x[:, :: at.groups])) for x in kept[1:])
        found = super().forward()
        at.q, at.k, at.v = kept
        return found


FAULTS += twentysixth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.WideTiles, "bfloat16"), (ways.SevenParts, "float16"), (ways.FromTheDiagonal, "bfloat16"),
    (ways.LazyMaximum, "bfloat16"), (ways.QueryGradientsOfPairs, "float16"),
    (ways.InNats, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("rows_of_both_ends", frozenset(), ways.rows_of_both_ends, "bfloat16"),
    Fault("chunks_of_a_running_sum", frozenset(), ways.chunks_of_a_running_sum, "float16"),
]
