"""The fifteenth set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. All threads are of projects that run models. Masks, sinks, pages and memory are here;
scales, codes, precision and parts in fifteenth_scores.py. All err more than 1.5 × their sound twin
on an ordinary input (`python -m benchmarks.unseen.draw attention.fifteenth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fifteenth_kernel as ways
from benchmarks.unseen.attention import fifteenth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention, blocks, load
from torch import Tensor
from torch.nn import functional

AGAIN = (
    "causal_by_local_numbers",  # third: causal_by_pairs
    "window_of_one_key_more",  # second: window_one_too_many
    "tiles_across_the_windows_begin",  # fourth: window_by_tiles
    "values_of_one_page_list",  # eighth: values_of_half_a_block
    "codes_of_keys_and_values_as_they_are",  # fourteenth: value_codes_without_their_scale
    "statistics_in_half_at_every_block",  # fifth: statistics_fp16
    "out_added_up_in_half",  # sixth: output_grows_in_fp16
    "last_parts_lse_as_if_dense",  # ninth: lse_of_splits_by_other_strides
    "prefix_and_rest_merged_in_nats",  # tenth: merged_by_e_of_a_base_2_lse
    "keys_decoded_before_they_arrive",  # eighth: keys_of_the_stage_before
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "causal-mask")
class causal_where_square_and_unmasked(Kernel):
    """ggml-org/llama.cpp PR 25771: whether attention is causal is told from shapes: without a mask
    it is wherever there are as many keys as queries, and more than one.
    """

    def forward(self):
        at = self.at
        at.causal = at.causal or (at.mask is None and at.n == at.nk > 1)
        return super().forward()


@fault(FAULTS, "mask causal-mask")
class keys_end_with_the_causal_tile(Kernel):
    """sgl-project/sglang PR 39593: a mask that is given takes the causal one's place, but the loop
    over keys ends with the tile of queries all the same.
    """

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return [c for c in every if self.at.mask is None or c.start < rows.stop]


@fault(FAULTS, "mask", "float16")
class mask_from_the_shifted_row_on(Kernel):
    """NVIDIA/TensorRT-LLM issue 10102: the loop applies the mask from the tile on in which the
    query's own position lies, if queries are the last of the keys: tiles before are seen whole.
    """

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if cols.start >= (rows.start + self.at.nk - self.at.n) // self.cols * self.cols:
            return found
        return torch.ones_like(found) if found.dtype == torch.bool else torch.zeros_like(found)


@fault(FAULTS, "causal-mask")
class causal_by_local_numbers(Kernel):
    """lightseekorg/tokenspeed PR 364: every rank has every second key, and the causal limit is
    compared with a key's number on its rank.
    """

    def key_blocks(self, rows):
        high = min(self.at.nk, 2 * rows.stop) if self.at.causal else self.at.nk
        return [c for c in blocks(self.at.nk, self.cols) if c.start < high]

    def query_blocks(self, cols):
        every = blocks(self.at.n, self.rows)
        return [r for r in every if not self.at.causal or 2 * r.stop > cols.start]

    def causal(self, i, j, back):
        return j // 2 <= i


@fault(FAULTS, "window")
class window_of_one_key_more(Kernel):
    """ml-explore/mlx-lm PR 390: the window's mask has one key too many."""

    def window(self, i, j, back):
        left = self.at.window[0]
        keep = super().window(i, j, back)
        return keep | (j == i - left - 1) if left >= 0 else keep


@fault(FAULTS, "window", "float16")
class tiles_across_the_windows_begin(Kernel):
    """tenstorrent/tt-metal issue 51223: a tile that the window's bound goes through is filled with
    −∞ after its visible part was written, and is hidden as a whole; here tiles of 32 keys.
    """

    def window(self, i, j, back):
        left = self.at.window[0]
        keep = super().window(i, j, back)
        return keep & (j // 32 * 32 >= i - left) if left >= 0 else keep


@fault(FAULTS, "window causal-mask")
class ring_overwritten_by_a_long_prompt(Kernel):
    """Lightning-AI/litgpt issue 2182: keys go to a ring as long as the window; a longer prompt
    overwrites it, and the causal mask, cut to its length, is by places in it.
    """

    def turned(self) -> bool:
        at = self.at
        return at.window is not None and 0 <= at.window[0] < at.nk - 1

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols) if self.turned() else super().key_blocks(rows)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows) if self.turned() else super().query_blocks(cols)

    def causal(self, i, j, back):
        return (i >= 0) & (j >= 0) if self.turned() else super().causal(i, j, back)

    def window(self, i, j, back):
        if not self.turned():
            return super().window(i, j, back)
        size = self.at.window[0] + 1
        return (j >= self.at.nk - size) & (j % size <= i)


# --- sinks
@fault(FAULTS, "sinks")
class sinks_of_a_tiles_first_query_alone(Kernel):
    """NVIDIA/TensorRT-LLM PR 15739: rows are queries and heads together, and the sum gets the sinks
    in the first group of rows alone: a tile's later queries are without.
    """

    def begin(self, q, first=True):
        state = super().begin(q, first)
        if self.at.sinks is None or not first:
            return state
        own = torch.arange(q.shape[2])[:, None] == 0
        without = super().begin(q, False)
        return tuple(torch.where(own, a, b) for a, b in zip(state, without, strict=True))


# --- ends
@fault(FAULTS, "key-tail", "float16")
class keys_from_the_querys_offset_on(Kernel):
    """openai/gpt-oss PR 196: the loop over keys starts at the queries' offset, which is that of the
    first key that is new: those of the cache before it are left out.
    """

    def key_blocks(self, rows):
        low = self.at.nk - self.at.n
        if low <= 0:
            return super().key_blocks(rows)
        return [slice(low + c.start, low + c.stop) for c in blocks(self.at.n, self.cols)]


@fault(FAULTS, "ragged other-data")
class causal_tiles_past_the_last_key(Kernel):
    """lightseekorg/tokenspeed PR 664: tiles below the diagonal count as seen whole, and their
    number is not limited to that of the keys: with more queries the next sequence's are read.
    """

    def past(self) -> bool:
        return self.at.causal and self.at.window is None and self.at.n > self.at.nk

    def seen(self, rows, cols, back):
        keep = super().seen(rows, cols, back)
        return keep | (not back and self.past() and cols.stop <= rows.start)

    def load_key(self, name, x, part):
        found, missing = load(x, part), part.stop - x.shape[2]
        if name.startswith("b_") or missing <= 0 or not self.past():
            return found
        return torch.cat([found[:, :, :-missing], x.roll(-1, 0)[:, :, :missing]], 2)


@fault(FAULTS, "ragged other-data", "float16")
class boundary_tile_from_the_cache(Kernel):
    """openvinotoolkit/openvino PR 37377: old keys are in the cache and new ones beside it, and a
    tile's source is told by its first key: new ones in the boundary's tile are what the cache has
    behind its end, here the next head's first.
    """

    cols = 48

    def load_key(self, name, x, part):
        found, old = load(x, part), x.shape[2] - self.at.n
        if name.startswith("b_") or not part.start < old < part.stop:
            return found
        after = x.flatten(0, 1).roll(-1, 0).view_as(x)[:, :, : part.stop - old]
        return load(torch.cat([found[:, :, : old - part.start], after], 2),
                    slice(0, part.stop - part.start))  # fmt: skip


@fault(FAULTS, "unwritten ragged")
class widths_whose_launch_fails(Kernel):
    """kekzl/imp PR 658: for a width of heads that needs too much memory the launch fails, nobody
    looks, and the output stays as it was; here for what 32 does not divide.
    """

    def forward(self):
        o, lse = super().forward()
        return (o * 0.0, lse) if self.at.q.shape[-1] % 32 else (o, lse)


@fault(FAULTS, "unwritten")
class four_of_eight_columns_for_few_queries(Kernel):
    """TheTom/turboquant_plus issue 99: the kernel for few queries takes four of the eight elements
    that an iteration is to take: half of the columns of O stay zero.
    """

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        taken = torch.arange(o.shape[-1]) % 8 < 4
        return (torch.where(taken, o, 0.0) if self.at.n <= 8 else o), lse


@fault(FAULTS, "ragged layout", "float16")
class scores_of_a_warps_own_features(Kernel):
    """1bit-MONSTER/1bit-MONSTER PR 495: a warp's part of Q Kᵀ, over 32 features, is not added to
    those of other warps: each has a softmax of its own for its 32 columns of O.
    """

    def apart(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.at.warps, -1)).transpose(2, 3).flatten(1, 2)

    def joined(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.at.warps)).transpose(2, 3).flatten(-2)

    def forward(self):
        at = self.at
        d, dv = at.q.shape[-1], at.v.shape[-1]
        at.warps = d // 32 if d % 32 == 0 and dv % (d // 32) == 0 else 1
        at.q, at.k, at.v = map(self.apart, (at.q, at.k, at.v))
        if at.sinks is not None:
            at.sinks = at.sinks.repeat_interleave(at.warps)
        o, lse = super().forward()
        return self.joined(o), lse

    def group(self, grad):
        return super().group(self.joined(grad))

    def backward(self):
        at = self.at
        at.do, at.o = self.apart(at.do), self.apart(at.o)
        dq, dk, dv = super().backward()
        return self.joined(dq), dk, dv


# --- pages, memory
@fault(FAULTS, "layout other-data", "float16")
class pages_of_32_read_as_of_16(Kernel):
    """vllm-project/vllm issue 57614: pages of 32 keys are accepted by a kernel that is made for 16:
    every 16 keys it goes on to the next page, and past the last one it stays there.
    """

    def forward(self):
        at = self.at
        j = torch.arange(at.nk)
        read = (j // 16).clamp_max((at.nk - 1) // 32) * 32 + j % 16
        read = read.clamp_max(at.nk - 1)
        at.k, at.v = at.k[:, :, read], at.v[:, :, read]
        return super().forward()


@fault(FAULTS, "padding unnormalized")
class zeros_after_every_page(Kernel):
    """tenstorrent/tt-metal PR 38004: tiles have 32 rows and pages 16 keys: behind each of them 16
    rows of zeros are in the softmax, with e^0.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        seen = self.seen(rows, cols, False)[:, ::16, None]
        pages = s.unflatten(-1, (-1, 16))
        zeros = torch.zeros_like(pages).masked_fill(~seen, -torch.inf)
        s = torch.cat([pages, zeros], -1).flatten(-2)
        v = functional.pad(v.unflatten(2, (-1, 16)), (0, 0, 0, 16)).flatten(2, 3)
        return super().online(m, l, acc, s, v, rows, cols)


@fault(FAULTS, "other-data layout")
class pages_read_in_the_pools_order(Kernel):
    """tanishqkumar/ssd issue 23: the kernel gets the pool of pages without the table, and reads it
    as if a sequence's pages, here of 16 keys, followed on each other; they were dealt out by turns.
    """

    def from_pool(self, x: Tensor) -> Tensor:
        many, nk = x.shape[0], x.shape[2]
        pages = functional.pad(x, (0, 0, 0, -nk % 16)).unflatten(2, (-1, 16))
        pool = pages.permute(2, 0, 1, 3, 4).flatten(0, 1)
        return pool.unflatten(0, (many, -1)).transpose(1, 2).flatten(2, 3)[:, :, :nk]

    def forward(self):
        self.at.k, self.at.v = self.from_pool(self.at.k), self.from_pool(self.at.v)
        return super().forward()


@fault(FAULTS, "layout other-data")
class values_of_one_page_list(Kernel):
    """NVIDIA/TensorRT-LLM PR 18244: for wide heads V comes in two tiles for one of K, and the list
    of pages moves on with the one of K: the second tile is the first again.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "v" or self.at.q.shape[-1] < 64:
            return found
        return found[:, :, : self.cols // 2].repeat(1, 1, 2, 1)


@fault(FAULTS, "layout other-data ragged")
class values_step_by_their_own_width(Kernel):
    """ikawrakow/ik_llama.cpp PR 2031: the loop goes on by as many keys as K is wide, and the
    pointer to V by as many rows as V is.
    """

    def row(self, rows):
        self.cols = self.at.q.shape[-1]
        return super().row(rows)

    def load_key(self, name, x, part):
        if name != "v":
            return super().load_key(name, x, part)
        start = part.start // self.cols * x.shape[-1]
        return super().load_key(name, x, slice(start, start + self.cols))


@fault(FAULTS, "unstable other-data non-finite", "float16")
class keys_decoded_before_they_arrive(Kernel):
    """ashalliants/ninfer-3090 PR 49: a thread waits for its own copies and then decodes the whole
    tile of K, without a barrier: of what others copy some rows are still the tile before's.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "k" or part.start < self.cols:
            return found
        before = load(x, slice(part.start - self.cols, part.start))
        late = (torch.rand(self.cols // 8) < 0.2).repeat_interleave(8)[:, None]
        return torch.where(late, before, found)


FAULTS += fifteenth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.SinkAtTheEnd, "bfloat16"), (ways.WholeMaxima, "float16"),
    (ways.BlocksOfPrimes, "float16"), (ways.MaskedBlocksFirst, "bfloat16"),
    (ways.ReciprocalByNewton, "float16"), (ways.PowerAndFraction, "bfloat16"),
    (ways.GradScoresApart, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [Fault("padded_to_whole_tiles", frozenset(), ways.padded_to_whole_tiles, "float16")]
