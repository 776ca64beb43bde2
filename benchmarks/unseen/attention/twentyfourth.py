"""The twenty-fourth set of faults of attention, each as a public thread reports it, and sound
kernels: packed lengths, caches and their codes, windows, speculative decoding, training in 16 bits.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, lengths, caches and scales are here; precision and the backward pass in
twentyfourth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.twentyfourth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentyfourth_kernel as ways
from benchmarks.unseen.attention import twentyfourth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, e4m3, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch.nn import functional

AGAIN = (
    "layers_that_share_a_cache_at_scale_one",  # fourteenth: value_codes_without_their_scale
    "columns_past_the_querys_width_never_stored",  # fifth: value_as_wide_as_the_key
    "row_sum_and_output_grow_in_bf16",  # sixth: output_grows_in_fp16
    "query_scaled_and_rounded_to_bf16",  # eighteenth: scale_applied_to_the_query_first
    "everything_between_the_products_in_half",  # thirteenth: exponentials_and_quotients_in_place
    "product_in_half_until_the_softmax_is_done",  # sixth: scores_in_fp16
    "key_gradients_added_in_half_by_every_head",  # thirteenth: gradients_added_up_in_half
    "products_of_delta_in_bf16",  # eighth: delta_of_low_products
    "gradients_from_the_diagonal_on",  # eighth: backward_always_causal
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


def power_of_two_in(width: int) -> int:
    """The largest power of two that divides it."""
    return width & -width


# --- masks, windows
@fault(FAULTS, "mask", "float16")
class draft_mask_left_out_below_the_diagonal(ForwardAlone):
    """PaddlePaddle/FastDeploy PR 3514: tiles that lie wholly below the diagonal are not checked
    against a mask, as if it were causal: a tree of drafts hides pairs there as well.
    """

    rows, cols = 32, 32

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if cols.stop <= rows.start:
            self.at.mask = None
        s = super().hide(s, rows, cols, back)
        self.at.mask = mask
        return s


@fault(FAULTS, "causal-mask mask", "float16")
class few_queries_always_causal(ForwardAlone):
    """flashinfer-ai/flashinfer PR 4199: the layout for up to 32 rows, queries times the group, has
    the causal mask of drafts written into it, from the end of the keys; another is not looked at.
    """

    def seen(self, rows, cols, back):
        keep, at = super().seen(rows, cols, back), self.at
        if at.causal or at.n * at.groups > 32:
            return keep
        i = torch.arange(rows.start, rows.stop)[:, None]
        return keep & (torch.arange(cols.start, cols.stop)[None] <= i + at.nk - at.n)


@fault(FAULTS, "causal-mask")
class straddling_tiles_not_masked(ForwardAlone):
    """fla-org/flash-linear-attention PR 1105: whether a tile of keys belongs to what is past, and
    needs no causal mask, is decided by where it begins; it may end behind the first query.
    """

    rows, cols = 64, 48

    def seen(self, rows, cols, back):
        causal = self.at.causal
        self.at.causal = causal and cols.start >= rows.start
        keep = super().seen(rows, cols, back)
        self.at.causal = causal
        return keep


@fault(FAULTS, "window masked-row")
class keys_of_the_last_window_alone(ForwardAlone):
    """lablup/mlxcel PR 412: keys are cut down to the last window's though a prompt is longer: the
    first queries have none of them left, and their rows are NaN.
    """

    def window(self, i, j, back):
        return super().window(i, j, back) & (j >= self.at.nk - self.at.window[0] - 1)

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return (o if self.at.window is None else o.masked_fill(l == 0, torch.nan)), lse


# --- lengths
@fault(FAULTS, "key-tail query-tail ragged unwritten", "float16")
class odd_lengths_rounded_down(Kernel):
    """NVIDIA/TransformerEngine issue 1930: with two ranks a length of 7 is 7 // 2 · 2: the last key
    is not seen, and the last query has no result.
    """

    def inside(self, j, back):
        return j < self.at.nk // 2 * 2

    def forward(self):
        o, lse = super().forward()
        even = self.at.n // 2 * 2
        o[:, :, even:], lse[:, :, even:] = 0.0, INF
        return o, lse


@fault(FAULTS, "ragged key-tail query-tail unwritten", "float16")
class lengths_averaged_over_chunks(Kernel):
    """NVIDIA/TransformerEngine issue 3331: sequences are padded to eight chunks, and each of them
    is said to hold an eighth of the length: real keys at a chunk's end are dropped, and real rows
    are zero.
    """

    @staticmethod
    def counted(x, length):
        return x % -(-length // 8) < max(1, length // 8)

    def inside(self, j, back):
        return (j < self.at.nk) & self.counted(j, self.at.nk)

    def forward(self):
        o, lse = super().forward()
        lost = ~self.counted(torch.arange(self.at.n), self.at.n)
        o[:, :, lost], lse[:, :, lost] = 0.0, INF
        return o, lse


# --- caches
@fault(FAULTS, "layout other-data", "float16")
class pages_without_room_for_their_scales(ForwardAlone):
    """ovg-project/kvcached issue 424: a page holds a scale for each of its tokens, here 16, behind
    their features, and is taken to be as long as the features alone are.
    """

    def load_key(self, name, x, part):
        b, h, n, d = x.shape
        pages = functional.pad(x, (0, 0, 0, -n % 16)).reshape(b, h, -1, 16, d)
        scales = pages.abs().amax(-1) / 448
        memory = torch.cat([pages.flatten(3), scales], -1).flatten(2)
        return super().load_key(name, memory[:, :, : n * d].view(b, h, n, d), part)


@fault(FAULTS, "operand scale")
class tile_scales_of_keys_cut_to_powers_of_two(ForwardAlone):
    """vllm-project/vllm PR 54563: every tile of a cached key has a scale in fp32, largest / 448, of
    which the reader takes the exponent alone; tiles of 32 features here, not of 128.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "k":
            return found
        read = []
        for tile in found.split(32, -1):
            scale = tile.abs().amax(-1, keepdim=True).clamp_min(2.0**-60) / 448
            read.append(e4m3(tile / scale) * torch.exp2(scale.log2().floor()))
        return torch.cat(read, -1)


@fault(FAULTS, "scale value-factor")
class scales_of_the_first_sequence_reset_to_one(ForwardAlone):
    """vllm-project/vllm PR 51091: int8 codes of a token and head have a scale beside them; a layer
    that shares the cache sets those to 1 after the first sequence's were written.
    """

    def load_key(self, name, x, part):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
        codes, read = (x / scale).round(), scale.clone()
        read[0] = 1.0
        return super().load_key(name, codes * read, part)


@fault(FAULTS, "scale value-factor")
class layers_that_share_a_cache_at_scale_one(ForwardAlone):
    """vllm-project/vllm PR 55559: a layer that reads another's cache has no scales of its own in
    the checkpoint and takes 1: keys lie there as k / 0.2 and values as v / 3.
    """

    def load_key(self, name, x, part):
        return super().load_key(name, e4m3(x / (0.2 if name == "k" else 3.0)), part)


@fault(FAULTS, "scale value-factor ragged")
class norm_of_the_transform_by_the_whole_width(ForwardAlone):
    """vllm-project/vllm PR 56198: where the width is no power of two the Hadamard transform is one
    of its blocks, and the norm that is divided by for keys, and for O, remains the width.
    """

    def scaled(self, s, rows, cols, back):
        width = self.at.q.shape[-1]
        return super().scaled(s, rows, cols, back) * (power_of_two_in(width) / width)

    def finish(self, m, l, acc, rows):
        width = acc.shape[-1]
        return super().finish(m, l, acc * (power_of_two_in(width) / width), rows)


# --- the softmax, what is stored
@fault(FAULTS, "maximum underflow non-finite", "float16")
class scores_less_a_constant(ForwardAlone):
    """pytorch/executorch PR 22133: parts of the keys are added up without rescaling, as weights of
    all of them are e^(score − 5), whatever the scores are.
    """

    shift = 5.0 * LOG2_E

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        sink = torch.exp2(m - self.shift) * l if self.at.sinks is not None and first else l
        return torch.full_like(m, self.shift), sink, acc

    def maximum(self, m, s):
        return m


@fault(FAULTS, "other-data unwritten", "float16")
class out_overwritten_by_the_next_query(ForwardAlone):
    """Dao-AILab/flash-attention PR 2754: O is staged where Q lies, whose place is given back before
    the tile has been stored: its first rows, here 16, are the next tile's queries.
    """

    def forward(self):
        o, lse = super().forward()
        o, width = o.clone(), min(o.shape[-1], self.at.q.shape[-1])
        for start in range(0, self.at.n - self.rows, self.rows):
            after = load(self.at.q, slice(start + self.rows, start + self.rows + 16))
            o[:, :, start : start + 16, :width] = self.at.low(after)[..., :width]
        return o, lse


@fault(FAULTS, "unwritten ragged", "float16")
class columns_past_the_querys_width_never_stored(ForwardAlone):
    """NVIDIA/cudnn-frontend PR 682: the store of O is limited to the width of queries and keys;
    where values are wider, the columns after it stay as they were, here 0.
    """

    def forward(self):
        o, lse = super().forward()
        o = o.clone()
        o[..., self.at.q.shape[-1] :] = 0.0
        return o, lse


FAULTS += twentyfourth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.SinkAtTheEnd, "bfloat16"), (ways.ContiguousParts, "float16"),
    (ways.TwoPasses, "bfloat16"), (ways.RescaledByTiles, "float32"),
    (ways.PagesByATable, "float16"), (ways.SmoothedKeys, "bfloat16"),
    (ways.GradientsInParts, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND.append(Fault("sequences_packed", frozenset(), ways.sequences_packed, "float16"))
