"""The twenty-seventh set of faults of attention: a sample of what public threads report, as they
come, and sound kernels.

The other sets chose what was new; this one did not choose. Searches were fixed before any result
was seen, all in the corpus of issues and pull requests. The first list, as it was given: «attention
wrong results», «attention backward gradient mismatch», «flash attention NaN», «attention accuracy
bf16», «attention mask bug fix», «GQA wrong», «sliding window bug», «fp8 attention accuracy», «paged
attention incorrect», «lse incorrect», «attention sink», «softcap». It was gone through to its end,
142 results, and gave 7 faults: words as short as these find games, windows and typing errors.
Then a second list, the same subjects spelled out and three more, fixed before it was sent:
«attention kernel produces wrong results compared with reference, root cause and fix», «flash
attention backward kernel dq dk dv gradients incorrect fix», «attention kernel NaN output fully
masked rows softmax -inf fix», «attention kernel precision loss bf16 fp16 accumulation softmax
should be fp32», «causal mask wrong in attention kernel, off by one or wrong alignment», «GQA
attention kernel incorrect output wrong kv head index», «sliding window attention kernel bug
incorrect mask window size», «fp8 attention kernel accuracy bug descale wrong quantization of P»,
«paged attention / split-kv decode kernel incorrect results fix», «attention kernel logsumexp LSE
returned incorrectly fix», «attention sinks kernel incorrect result sink softmax denominator fix»,
«attention logit softcap bug wrong tanh kernel backward», «attention softmax scale wrong head_dim
padded kernel fix», «attention bias alibi kernel wrong gradient or wrong stride fix», «attention
kernel sequence length not multiple of block size wrong tail out of bounds». Of these the first
result of every search was taken, then the second of every one, and so on, until there were 32: the
fourth of the ninth. Nothing that could be written was left out. What could not: threads that are
about something else, have no text, or are features, build errors and questions; those that tell a
wrong result and no cause; a thread on the very defect of one that was taken (an issue and its
pull request are one); and one, vllm issue 56578, whose scores of 88 caps no ordinary input has. Of
a thread with several defects the first that an ordinary input shows is taken. Where the thread's
library lays the diagonal in the other corner than this function does, its mistake is mirrored.

What is right was set down before anything ran. `AGAIN` names every fault whose mistake an earlier
set has in some form, which is all but one, and says «same thread» where that came from it. Masks,
windows, heads, scales and memory are here; precision, what is not finite and the backward pass in
twentyseventh_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.twentyseventh --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentyseventh_kernel as ways
from benchmarks.unseen.attention import twentyseventh_scores
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, blocks
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor
from torch.nn import functional

AGAIN = (
    "backward_pass_sees_the_future",  # same thread, eighteenth: diagonal_not_masked_on_the_way_back
    "blocks_hidden_so_far_give_nan",  # thirteenth: first_keys_all_hidden
    "reference_by_einsum_in_bf16",  # same thread, fifth: einsum_in_bf16
    "row_sums_for_the_backward_pass_in_bf16",  # others: lse_in_the_operands_type
    "valid_positions_hidden",  # thirteenth: mask_the_other_way_round
    "one_accumulator_of_14_bits_for_all_keys",  # others: accumulator_of_22_bits
    "prefill_without_the_page_table",  # fifteenth: pages_read_in_the_pools_order
    "fallback_takes_infinity_off_infinity",  # thirteenth and others: first_keys_all_hidden
    "key_head_by_the_number_of_them",  # same thread, sixth: head_divided_by_key_heads
    "window_of_extend_one_key_longer",  # others: window_of_one_key_more
    "weights_of_e4m3_below_the_row_sums",  # same thread, twentieth; others too
    "page_offsets_wrap",  # twelfth: offsets_of_scores_wrap
    "lse_given_back_in_base_2",  # seventh: lse_in_nats_read_in_base_2
    "scale_of_the_width_padded_to_the_next_kernels",  # same thread, sixth; others too
    "exponential_that_only_keeps_the_order",  # others: exponential_in_steps_of_half
    "rows_of_nothing_divided_by_nothing",  # thirteenth and others: first_keys_all_hidden
    "softmax_sums_stick_in_bf16",  # same thread, twenty-fifth: exponentials_summed_in_their_own_…
    "diagonal_of_the_other_corner_in_the_definition",  # sixth: causal_from_the_end
    "query_heads_number_the_keys",  # same thread, ninth; others too
    "mask_of_mistral_one_key_wider",  # others: window_of_one_key_more
    "weights_of_e4m3_without_a_lift",  # twentieth and others, as above
    "sink_in_the_domain_of_unscaled_scores",  # same thread, sixth and fourteenth
    "past_the_end_lies_anything_on_the_way_back",  # same thread, fourteenth; others too
    "atoms_of_dv_by_the_width_of_keys",  # same thread, fifth: columns_of_dv_misplaced
    "softmax_gradients_sum_in_bf16",  # same thread, twenty-fifth: delta_summed_in_16_bits
    "sink_over_an_empty_rows_placeholder",  # same thread, nineteenth
    "scale_of_the_aligned_width",  # others: scale_of_the_padded_width
    "values_and_dv_by_the_strides_of_keys",  # same thread, thirteenth: dv_by_the_width_of_keys
    "diagonal_of_the_other_corner_in_the_example",  # same thread, fourteenth; others too
    "window_on_both_sides_of_the_query",  # others: window_as_far_ahead
    "rows_combined_a_token_apart",  # its issue, ninth: combined_rows_a_token_apart
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


class EveryBlock(Kernel):
    """All blocks are visited, whatever is hidden in them."""

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)


class OtherKeys(ForwardAlone):
    """The forward pass reads keys and values at wrong places."""

    def read(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self):
        kept = self.at.k, self.at.v
        self.at.k, self.at.v = (self.read(x) for x in kept)
        found = super().forward()
        self.at.k, self.at.v = kept
        return found


# --- masks
@fault(FAULTS, "mask")
class valid_positions_hidden(Kernel):
    """Tencent/TurboTransformers PR 95: a mask's 1 is a valid position, and the kernel hides it."""

    rows, cols = 32, 64

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        return ~found if found.dtype == torch.bool else found


def diagonal_of_the_other_corner_in_the_definition(
    query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0, sinks=None
):
    """onnx/onnx PR 8068: where keys are not as many as queries, the operator's definition lays the
    diagonal in the wrong corner; mirrored.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    keep = visible(n, nk, False, window)
    if is_causal:
        keep = keep & (torch.arange(nk)[None] <= torch.arange(n)[:, None] + nk - n)
    s = logits(query, k, keep, attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)], -1)
    nothing = (s == -INF).all(-1, keepdim=True)
    p = s.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return (p[..., :nk] @ v).to(query.dtype)


FAULTS.append(
    Fault("diagonal_of_the_other_corner_in_the_definition", frozenset({"causal-mask"}),
          diagonal_of_the_other_corner_in_the_definition, "float32", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "causal-mask", "float16")
class diagonal_of_the_other_corner_in_the_example(EveryBlock, ForwardAlone):
    """NVIDIA/cutlass issue 2336: the kernel of Blackwell's forward pass lays the diagonal in the
    wrong corner where queries are not as many as keys; mirrored.
    """

    rows, cols = 128, 128

    def causal(self, i, j, back):
        return j <= i + self.at.nk - self.at.n


# --- windows
@fault(FAULTS, "window")
class window_of_extend_one_key_longer(ForwardAlone):
    """sgl-project/sglang PR 34273: in the kernel that extends a cache a query attends to one key
    more than the window has.
    """

    def window(self, i, j, back):
        return (j >= i - self.at.window[0] - 1) & (j <= i)


@fault(FAULTS, "window", "float16")
class mask_of_mistral_one_key_wider(Kernel):
    """huggingface/transformers PR 26792, review: the mask's diagonal is one too low, and Mistral's
    window a key too wide.
    """

    rows, cols = 48, 48

    def window(self, i, j, back):
        left, right = self.at.window
        return (j > i - left - 2) & (j <= i + max(right, 0))


@fault(FAULTS, "window causal-mask")
class window_on_both_sides_of_the_query(EveryBlock, ForwardAlone):
    """ModelTC/LightLLM PR 1311: a sliding layer's window is as long ahead of a query as behind it,
    and takes the place of the causal mask.
    """

    def window(self, i, j, back):
        left = self.at.window[0]
        return (j >= i - left) & (j <= i + left)

    def causal(self, i, j, back):
        return super().causal(i, j, back) | (self.at.window is not None)


# --- heads
@fault(FAULTS, "key-heads other-data")
class key_head_by_the_number_of_them(Kernel):
    """PSAL-POSTECH/ONNXim PR 34: a group's first query head is divided by the number of key heads,
    not by the group's: without groups every head has key head 0.
    """

    def key_head(self, head: int, shared: int) -> int:
        groups = int(self.at.groups)
        return min(head // groups * groups // shared, shared - 1)

    def spread(self, x):
        shared = x.shape[1]
        heads = range(shared * self.at.groups)
        return x[:, [self.key_head(head, shared) for head in heads]]

    def group(self, grad):
        shared = grad.shape[1] // self.at.groups
        total = torch.zeros_like(grad[:, :shared])
        for head in range(grad.shape[1]):
            total[:, self.key_head(head, shared)] += grad[:, head]
        return total


@fault(FAULTS, "key-heads other-data", "float16")
class query_heads_number_the_keys(OtherKeys):
    """LMCache/LMCache PR 3092, review: the query's head is the key's, whatever the group: tokens
    lie before heads, and a head that is not there is one of the next token's.
    """

    def read(self, x):
        own = x[:, :: self.at.groups].transpose(1, 2)
        shared, heads = own.shape[2], x.shape[1]
        flat = own.flatten(0, 2)
        first = torch.arange(len(flat) // shared)[:, None] * shared
        at = (first + torch.arange(heads)).clamp_max(len(flat) - 1)
        return flat[at].unflatten(0, own.shape[:2]).transpose(1, 2)


# --- scales
class ScaleOfAWidth(Kernel):
    """The scale is made of a width that is not the head's."""

    def width(self, d: int) -> int:
        raise NotImplementedError

    def times(self) -> float:
        d = int(self.at.q.shape[-1])
        return float((d / self.width(d)) ** 0.5)

    def scaled(self, s, rows, cols, back):
        return super().scaled(s, rows, cols, back) * self.times()

    def backward(self):
        dq, dk, dv = super().backward()
        return dq * self.times(), dk * self.times(), dv

    def slope(self, q, k):
        return super().slope(q * self.times(), k)


@fault(FAULTS, "scale ragged")
class scale_of_the_width_padded_to_the_next_kernels(ScaleOfAWidth):
    """intel/ipex-llm PR 12619: heads are padded to the next width that there is a kernel for, which
    makes the scale itself of what it is given; here 64, 96 and 128.
    """

    def width(self, d):
        return next((x for x in (64, 96, 128) if d <= x), d)


@fault(FAULTS, "scale ragged", "float16")
class scale_of_the_aligned_width(ScaleOfAWidth):
    """bytedance-iaas/sglang PR 485, review: without a scale the one of the aligned width is taken,
    here a multiple of 64.
    """

    rows, cols = 64, 32

    def width(self, d):
        return -(-d // 64) * 64


# --- sinks
@fault(FAULTS, "sinks", "float16")
class sink_in_the_domain_of_unscaled_scores(ForwardAlone):
    """ROCm/rocm-libraries PR 12229: one of two pipelines begins with the sink where the maximum is
    of scores before the scale: it is multiplied by that as they are.
    """

    cols = 32

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return (m, l, acc) if self.at.sinks is None or not first else (m * self.at.scale, l, acc)


@fault(FAULTS, "sinks non-finite maximum")
class sink_over_an_empty_rows_placeholder(ForwardAlone):
    """NVIDIA/TensorRT-LLM PR 19220: the block that adds the sink takes off its own maximum, which
    for a row that sees nothing there is −100000; infinity, merged at weight 0, is NaN.
    """

    rows, cols = 64, 32

    def row(self, rows):
        if self.at.sinks is None:
            return super().row(rows)
        q, states, every = self.load_query("q", self.at.q, rows), [], self.key_blocks(rows)
        for cols in every:
            m, l, acc = self.begin(q, False)
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            m, l, acc = self.online(m.fill_(-1e5), l, acc, s, v, rows, cols)
            if cols == every[-1]:
                l = l + torch.exp2(self.at.sinks.view(1, -1, 1, 1) * LOG2_E - m)
            states.append((m, l, acc))
        top = torch.stack([x[0] for x in states]).amax(0)
        l, acc = (sum(x[i] * torch.exp2(x[0] - top) for x in states) for i in (1, 2))
        return self.finish(top, l, acc, rows)


# --- pages, splits, memory
@fault(FAULTS, "other-data layout")
class prefill_without_the_page_table(OtherKeys):
    """golang-design/accel issue 10: with more than one query the table of pages is accepted and
    not read: K and V are what lies in the pool in its order; pages, here of 32 keys, were dealt out
    from its end.
    """

    def read(self, x):
        nk = x.shape[2]
        pages = functional.pad(x, (0, 0, 0, -nk % 32)).unflatten(2, (-1, 32))
        return pages.flip(0, 2).flatten(2, 3)[:, :, :nk]


@fault(FAULTS, "other-data", "float16")
class page_offsets_wrap(OtherKeys):
    """lightseekorg/tokenspeed PR 522: a page's number times its size overflows 32 bits, and later
    pages are read elsewhere; here pages of 16 keys and 15 bits.
    """

    def read(self, x):
        nk, d = x.shape[2:]
        pages = functional.pad(x, (0, 0, 0, -nk % 16)).unflatten(2, (-1, 16))
        flat, size = pages.flatten(), 16 * d
        begin = torch.arange(len(flat) // size) * size % (1 << 15)
        at = (begin[:, None] + torch.arange(size)).clamp_max(len(flat) - 1)
        return flat[at].view(pages.shape).flatten(2, 3)[:, :, :nk]


@fault(FAULTS, "other-data")
class tiles_planned_for_sequences_not_split(ForwardAlone):
    """pie-project/pie PR 410: keys are not split, and the plan still has a tile for every 64 of
    them: as many blocks as there are sequences take the first tiles, which are the first's.
    """

    def forward(self):
        o, lse = super().forward()
        tiles = -(-self.at.nk // 64)
        whose = torch.arange(len(o)) // tiles
        return o[whose], lse[whose]


@fault(FAULTS, "layout unwritten other-data", "float16")
class rows_combined_a_token_apart(Parts):
    """flagos-ai/FlagGems PR 5236: what merges the splits begins a tile of four rows where they are
    packed, and goes on by a token's stride: O, tokens before heads, has rows in wrong places and
    rows that nobody writes.
    """

    parts = 2

    def forward(self):
        o, lse = super().forward()
        b, heads, n, d = o.shape
        row = torch.arange(b * heads * n)
        at = row // 4 * 4 + row % 4 * heads
        inside = at < len(row)
        flat = torch.zeros(len(row), d)
        flat[at[inside]] = o.reshape(-1, d)[inside]
        return flat.view(b, n, heads, d).transpose(1, 2), lse

    def backward(self):
        sound = Kernel(**vars(self.at))
        sound.at.o, sound.at.lse = sound.forward()
        return sound.backward()


FAULTS += twentyseventh_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.LongKeyTiles, "float16"), (ways.Serpentine, "bfloat16"), (ways.RunsOfKeys, "bfloat16"),
    (ways.TileByItsOwnMaximum, "float16"), (ways.SumAsAColumn, "bfloat16"),
    (ways.KeysInsideForEveryGradient, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("running_mean", frozenset(), ways.running_mean, "bfloat16"),
    Fault("features_first", frozenset(), ways.features_first, "float32"),
]
