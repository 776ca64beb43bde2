"""The forty-fourth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «triton flash attention boundary check missing wrong results», «cuda attention kernel
shared memory overlap wrong result», «attention kernel warp reduction wrong maximum or sum»,
«attention kernel persistent scheduler tile wrong output», «attention kernel pipeline stage race
wrong output», «attention TMA descriptor wrong stride output», «attention kernel int32 offset
overflow large tensor wrong», «attention block size larger than sequence wrong result», «attention
kernel block config or num_warps wrong result», «attention kernel autotune gives wrong result»,
«attention kernel vectorized load alignment wrong result», «attention kernel head dim tail features
wrong», «attention kernel batch stride wrong output», «attention kernel page size wrong result»,
«attention kernel bf16 conversion truncation rounding wrong», «attention kernel fp8 P scale wrong»,
«attention kernel softmax rescale skipped threshold wrong», «attention kernel split kv empty split
wrong result», «attention kernel dq accumulation postprocess wrong», «attention kernel GQA packing
wrong rows».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 225 results, of which each search gives twelve at most. 19 are faults
here. What was left: 158 are about something else, features, speed, builds, crashes, questions,
other operations (a softmax alone among them, cuda-kernels issue 1) or a result that had come
before; 21 tell no cause, many of them no text at all; 21 are threads of earlier sets; 6 cannot be
written so that this function errs: delta rules in place of a softmax (flash-linear-attention issue
1080 and PR 1082, TileOPs PR 1846), weights of projections read half a row off (1bit-MONSTER
issue 2451) or written over by the cache (vllm PR 2622), and ties that are rounded away from zero,
which no error tells from others (pypto-lib PR 279).

Where a thread tells the cause in a line, how it comes about was read in the public history of its
repository: kernl PR 108. TileOPs PR 1002 says that the first tile of queries is wrong for its
causal mask; that its only block is the one that is not masked is inferred. mlx-node PR 7 says that
bytes are read or no kernel is found; here they are. bd3lms issue 23 is taken at its word, and what
memory holds where a result is not written is chosen, as numbers are that no thread tells. Of a
thread with several defects one is taken.

What is right was set down before anything was measured by halfulp. `AGAIN` names every fault whose
mistake an earlier set has in some form. Races of stores, masks and layouts are here; scores,
splits, launches and the way back in fortyfourth_scores.py. All err more than 1.5 × their sound twin
on an ordinary input (`python -m benchmarks.unseen.draw attention.fortyfourth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortyfourth_kernel as ways
from benchmarks.unseen.attention import fortyfourth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands
from torch import Tensor
from torch.nn import functional

AGAIN = (
    "padding_that_lands_after_the_infinities",  # thirty-seventh: rest_of_the_last_block_not_masked,
    # which is no race; others too
    "update_read_before_it_is_stored",  # twelfth: out_read_before_it_is_stored; others too
    "first_tile_of_queries_sees_its_block_whole",  # eighth: diagonal_on_the_last_block_alone;
    # thirty-second, on the way back: diagonal_on_the_first_tile_of_queries_alone
    "zeros_past_the_end_of_calls_that_see_all",  # fifth: zeros_have_weight; others too
    "kernel_of_heads_of_one_width",  # tenth: the_first_64_features
    "values_by_the_strides_of_the_query",  # fourteenth: values_by_the_querys_stride
    "offsets_into_pages_wrap",  # eleventh: offsets_of_delta_wrap, which are those of O
    "rows_of_a_fused_projection_wrap",  # as before
    "splits_that_are_hidden_or_empty",  # eleventh: two_empty_parts; others too
    "maxima_and_sums_that_no_thread_loads",  # eighteenth: statistics_in_half_the_room
    "window_that_was_not_launched",  # fifteenth: widths_whose_launch_fails
    "four_heads_to_a_key_head_not_launched",  # as before
    "tiles_that_no_program_draws",  # fourth: persistent_without_loop, which is no race
    "key_gradients_added_up_by_many_at_once",  # thirty-seventh:
    # key_gradients_added_up_without_atomics; eighth: key_gradients_cleared_midway
    "first_block_of_queries_without_keys",  # tenth: mask_not_passed_to_the_backward_pass;
    # thirty-third: hidden_slots_of_a_list_lead_to_the_last_key
)
STATED: dict[str, str] = {}
"""Inputs on which alone a fault shows: none has such."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- races, and what lies over something else
@fault(FAULTS, "padding unstable", "float16")
class padding_that_lands_after_the_infinities(ForwardAlone):
    """hw-native-sys/simpler PR 140: one unit fills the last block of scores up with numbers that
    are not right, and another writes −∞ over them with no barrier between the two: where the first
    is the later one, in 6 % of the runs, what is past the last key keeps a weight. The numbers are
    the last key's scores here.
    """

    rows, cols = 16, 64

    def hide(self, s, rows, cols, back):
        s, nk = super().hide(s, rows, cols, back), self.at.nk
        if cols.stop <= nk:
            return s
        past = torch.arange(cols.start, cols.stop) >= nk
        last = s[..., nk - 1 - cols.start, None]
        return torch.where(past & ways.late(s, 0.06), last, s)


@fault(FAULTS, "unstable other-data")
class update_read_before_it_is_stored(ForwardAlone):
    """hw-native-sys/simpler PR 620: the kernels of paged attention end before their last store has
    drained, and the next one reads what the memory held: now and then the update of O begins with
    the O of the block before, here in the later half of a tile's rows.
    """

    rows, cols = 16, 32

    def online(self, m, l, acc, s, v, rows, cols):
        before = self.memory.get("acc", acc)
        self.memory["acc"] = acc
        lower = torch.arange(acc.shape[-2])[:, None] >= self.rows // 2
        stale = lower & ways.late(acc, 0.06) & torch.tensor(cols.start > 0)
        acc = torch.where(stale, before, acc)
        return super().online(m, l, acc, s, v, rows, cols)


@fault(FAULTS, "other-data")
class second_slot_over_the_output(ForwardAlone):
    """hw-native-sys/simpler PR 1898: the queue of scores lies on the chip, where its second slot
    begins at O's buffer: the scores of every other block of keys are put over O.
    """

    rows, cols = 16, 64

    def product(self, q, k, back):
        self.memory["scores"] = super().product(q, k, back)
        return self.memory["scores"]

    def online(self, m, l, acc, s, v, rows, cols):
        if cols.start // self.cols % 2:
            slot, room = self.memory["scores"].flatten(-2), acc.flatten(-2)
            wide = min(slot.shape[-1], room.shape[-1])
            room = torch.cat([slot[..., :wide], room[..., wide:]], -1)
            acc = room.view(acc.shape)
        return super().online(m, l, acc, s, v, rows, cols)


# --- masks
@fault(FAULTS, "causal-mask mask", "float16")
class first_tile_of_queries_sees_its_block_whole(ForwardAlone):
    """tile-ai/TileOPs PR 1002, review: the persistent causal kernel is wrong in the first tile of
    queries, whose only block of keys, that of the diagonal, is not masked.
    """

    rows, cols = 128, 128

    def causal(self, i, j, back):
        return (j <= i) | (i < self.rows)


@fault(FAULTS, "padding ragged")
class zeros_past_the_end_of_calls_that_see_all(ForwardAlone):
    """tile-ai/TileOPs PR 871, review: the causal mask is the only one, and without it the rows of
    zeros that fill up the last block of keys keep their weight.
    """

    rows, cols = 128, 128

    def inside(self, j, back):
        return super().inside(j, back) | torch.tensor(not self.at.causal)


@fault(FAULTS, "mask")
class mask_in_blocks_of_its_default_size(ForwardAlone):
    """kuleshov-group/bd3lms issue 23: `create_block_mask` is not told the size of the blocks, and
    takes 128, here 32: a block that has a pair that may be seen is seen whole.
    """

    rows, cols = 64, 96

    def forward(self):
        at, wide = self.at, 32
        if at.mask is not None and at.mask.dtype == torch.bool:
            full = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk)
            full = functional.pad(full, (0, -at.nk % wide, 0, -at.n % wide))
            some = full.unflatten(-1, (-1, wide)).any(-1).unflatten(-2, (-1, wide)).any(-2)
            whole = some.repeat_interleave(wide, -1).repeat_interleave(wide, -2)
            at.mask = whole[..., : at.n, : at.nk]
        return super().forward()


# --- layouts and offsets
@fault(FAULTS, "layout ragged")
class kernel_of_heads_of_one_width(ForwardAlone):
    """ROCm/aiter PR 2273: the kernel in assembly knows heads of 128 features alone, here 64, and is
    called for others: its rows are that far apart, in what it reads and in what it writes.
    """

    rows, cols, wide = 64, 32, 64

    def read(self, x: Tensor) -> Tensor:
        b, h, n, d = x.shape
        at = torch.arange(b * h).view(b, h, 1, 1) * (n * d) + torch.arange(self.wide)
        at = at + torch.arange(n)[:, None] * self.wide
        return x.contiguous().view(-1)[at.clamp_max(x.numel() - 1)]

    def forward(self):
        at = self.at
        kept = at.q, at.k, at.v
        at.q, at.k, at.v = map(self.read, kept)
        o, lse = super().forward()
        at.q, at.k, at.v = kept
        room = at.n * at.v.shape[-1]
        o = o.flatten(2)[..., :room]
        return functional.pad(o, (0, room - o.shape[-1])).unflatten(2, (at.n, -1)), lse


@fault(FAULTS, "layout", "float16")
class values_by_the_strides_of_the_query(ForwardAlone):
    """ELS-RD/kernl PR 108: rows and columns of V are found by the query's strides."""

    rows, cols = 128, 64

    def spread(self, x):
        self.memory["last"] = x
        return super().spread(x)

    def forward(self):
        at, x = self.at, self.memory["last"]
        strides = (*x.stride()[:2], *at.q.stride()[2:])
        place = torch.zeros(1, dtype=torch.long)
        for size, stride in zip(x.shape, strides, strict=True):
            place = place[..., None] + torch.arange(size) * stride
        many = 1 + sum(
            (size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)
        )
        room = x.as_strided((many,), (1,))
        kept, at.v = at.v, super().spread(room[place[0].clamp_max(many - 1)])
        found = super().forward()
        at.v = kept
        return found


@fault(FAULTS, "other-data layout")
class offsets_into_pages_wrap(OtherOperands):
    """vllm-project/vllm issue 50427: K and V lie side by side in one pool, and offsets into it are
    integers of 32 bits, here 15: later tokens are read where earlier ones lie.
    """

    rows, cols = 64, 32

    def read(self, k, v):
        wide = k.shape[1] // self.at.groups * (k.shape[-1] + v.shape[-1])
        return self.wrapped(k, wide), self.wrapped(v, wide)

    @staticmethod
    def wrapped(x: Tensor, wide: int) -> Tensor:
        pool = x.transpose(1, 2).flatten(0, 1)
        at = torch.arange(len(pool)) * wide % 2**15 // wide
        return pool[at].unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


@fault(FAULTS, "layout other-data", "float16")
class rows_of_a_fused_projection_wrap(ForwardAlone):
    """thu-ml/SageAttention issue 386: Q, K and V are views of one projection, and the kernels that
    quantize Q and K reckon a row's offset, which is three times as far, in 32 bits, here 15. The
    codes are not rounded here, so that this alone is wrong.
    """

    rows, cols = 128, 64

    def forward(self):
        at = self.at
        if not at.q.shape == at.k.shape == at.v.shape or at.groups > 1:
            return super().forward()
        (b, h, n, d), kept = at.q.shape, (at.q, at.k)
        fused = torch.stack([x.transpose(1, 2) for x in (at.q, at.k, at.v)], 2).flatten()
        place = torch.arange(b * n).view(b, 1, n, 1) * (3 * h * d)
        place = place + torch.arange(h).view(1, h, 1, 1) * d + torch.arange(d)
        at.q, at.k = (fused[place % 2**15 + which * h * d] for which in (0, 1))
        found = super().forward()
        at.q, at.k = kept
        return found


@fault(FAULTS, "layout other-data", "float16")
class numbers_taken_for_bytes(OtherOperands):
    """mlx-node/mlx-node PR 7, review: with a cache in e4m3 the kernel that fills it is the one for
    bytes, and takes the bytes of K and V in fp16 for the codes: a row is the half of two.
    """

    rows, cols = 32, 64

    def read(self, k, v):
        return self.codes(k), self.codes(v)

    def codes(self, x: Tensor) -> Tensor:
        share = self.at.groups
        own = x[:, ::share].transpose(1, 2).contiguous()
        code = own.half().view(torch.uint8).flatten()[: own.numel()].view(torch.float8_e4m3fn)
        read = code.float().nan_to_num(0).view(own.shape)
        return read.transpose(1, 2).repeat_interleave(share, 1)


FAULTS += fortyfourth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.TwoRanges, "bfloat16"), (ways.ThirdsBackwards, "float16"),
    (ways.LanesOfFour, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("queries_44_at_a_time", frozenset(), ways.queries_44_at_a_time, "float16"))
SOUND.append(Fault("a_key_head_at_a_time", frozenset(), ways.a_key_head_at_a_time, "bfloat16"))
