"""The seventy-third set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «attention keys and values swapped», «attention mask leaks future tokens», «attention
forgot to apply scale», «attention index overlaps wrong row», «attention heads mixed up reshape»,
«attention reads stale buffer», «attention truncates sequence length», «attention saturates fp8»,
«attention duplicates keys counted twice», «attention skips last block», «attention misses first
token», «attention attends to padding», «attention overwrites shared memory», «attention ignores
causal flag», «attention broadcasts mask incorrectly», «attention drops sink», «attention double
applies softcap or scale», «attention rounds probabilities bf16», «attention divides by zero row»,
«attention mismatched strides kv».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 238 results, of which each search gives twelve at most. 11 are faults
here. What was left: 183 are about something else, features, speed, builds, crashes (a name that the
flash path does not know, denoising-diffusion-pytorch PR 314, among them), questions, reports that
are mistaken or are said to be meant so (decision-transformer issue 30, point-e issue 75, SMDM issue
4, dFactory issue 21) or other operations; 18 tell no cause, most of them no text at all; 21 are
threads of earlier sets; 4 had come before; 1 cannot be written so that this function errs: weights
of queries and keys whose features are to be swapped alike (ollama PR 10716). The counts are by
hand.

Where a thread tells the cause in a line, how it comes about was read in the code of its repository:
Transformer-Neural-Network issue 8, global-self-attention-network issue 1 and Trans2Seg issue 4,
whose author sees no mistake where the code has one: queries are split by the same reshape, keys
are not. Transformer-Neural-Network issue 8, which nobody answers, is on what a pull request of an
earlier set mends. flashinfer PR 5071 is read as its review has it, of which the beginning alone was
seen, and PR 5283 as the summary tells it, that scales past the largest of e4m3 are now saturated.
global-self-attention-network has no softmax where it errs; here all keys stand on a grid, whose two
axes are mixed up for the values. What memory holds past the end, and numbers that no thread tells,
were chosen.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. All err more than 1.5 × their sound twin on an ordinary input (`python
-m benchmarks.unseen.draw attention.seventythird --check`) but those that STATED names, which need
the inputs that it says.
"""

# ruff: noqa: ARG001, ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventythird_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands
from torch import Tensor
from torch.nn import functional

AGAIN = (
    "values_at_the_offsets_of_the_keys",  # eighth: tile_rows_by_the_others_strides
    "heads_merged_by_a_reshape_alone",  # seventeenth: out_reshaped_without_permuting
    "transposed_once_too_often_and_viewed",  # as before, by another way
    "batch_and_heads_taken_for_each_other",  # forty-seventh: heads_first_viewed_as_tokens_first
    "queries_of_classes_split_by_a_reshape",  # forty-sixth: heads_by_a_view_without_a_transposition
    "causal_flag_not_handed_to_the_factory",  # fifty-fifth: causal_skipped_without_another_mask
    "weights_of_an_older_maximum_clipped",  # forty-sixth: weights_past_the_largest_of_e4m3
    "scales_past_448_not_saturated",  # thirty-ninth: out_past_the_largest_e4m3, of O
    "padding_told_by_keys_that_are_zero",  # eighth: mask_not_read; others too
    "pages_laid_out_without_their_padding",  # twenty-fourth: pages_without_room_for_their_scales
)
STATED = {
    "values_at_the_offsets_of_the_keys": "keys and values of one shape, and of different strides",
    "scales_past_448_not_saturated": "queries, keys or values above 2784",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


def by_function(right: str, dtype: str):
    """Put a plain function into the set, with the keys of the causes that are right."""

    def put(fn):
        FAULTS.append(Fault(fn.__name__, frozenset(right.split()), fn, dtype,
                            frozenset({"elements"})))  # fmt: skip
        return fn

    return put


# --- strides and pages
@fault(FAULTS, "layout other-data", "float32")
class values_at_the_offsets_of_the_keys(OtherOperands):
    """flashinfer-ai/flashinfer PR 5071, review: where keys and values have as many features V's
    rows are read at the offsets of K's, whatever strides the two have; past the end of the memory
    it begins again here.
    """

    rows, cols = 64, 32

    def spread(self, x):
        self.memory.setdefault("given", []).append(x)
        return super().spread(x)

    def read(self, k, v):
        key, value = self.memory["given"][:2]
        if key.shape != value.shape or key.stride() == value.stride():
            return k, v
        room = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
        flat = value.as_strided((room,), (1,), value.storage_offset())
        place = torch.zeros((), dtype=torch.int64)
        for size, step in zip(key.shape, key.stride(), strict=True):
            place = place[..., None] + torch.arange(size) * step
        return k, super().spread(flat[place % room])


@fault(FAULTS, "layout cache other-data", "float16")
class pages_laid_out_without_their_padding(OtherOperands):
    """ovg-project/kvcached issue 399: pages are padded to the longest of all groups of layers, and
    views step from page to page by that; the allocator lays them out by their own length. Here a
    page has 16 rows, and 20 with its padding; past the end of the pool it begins again.
    """

    rows, cols, page, padded = 64, 64, 16, 20

    def read(self, k, v):
        return self.stepped(k), self.stepped(v)

    def stepped(self, x: Tensor) -> Tensor:
        b, nk = x.shape[0], x.shape[2]
        each = -(-nk // self.page)
        room = functional.pad(x, (0, 0, 0, each * self.page - nk))
        pool = room.transpose(1, 2).flatten(0, 1)
        row = torch.arange(b * each * self.page)
        at = (row // self.page * self.padded + row % self.page) % len(row)
        return pool[at].unflatten(0, (b, -1)).transpose(1, 2)[:, :, :nk]


# --- heads that are mixed up
@fault(FAULTS, "layout other-data", "float16")
class heads_merged_by_a_reshape_alone(Kernel):
    """ajhalthor/Transformer-Neural-Network issue 8: what comes out of the scaled dot product lies
    [B, heads, N, d] and is reshaped to [B, N, heads · d], where heads and tokens had to be permuted
    first.
    """

    rows, cols = 32, 128

    def forward(self):
        o, lse = super().forward()
        return ways.in_one_step(o, self.at.n), lse

    def backward(self):
        at = self.at
        at.do, at.o = (x.transpose(1, 2).reshape(x.shape) for x in (at.do, at.o))
        return super().backward()


@by_function("layout other-data", "float32")
def transposed_once_too_often_and_viewed(query, key, value, *, is_causal, scale, attn_mask=None,
                                         window=None, softcap=0.0, sinks=None,
                                         enable_gqa=False):  # fmt: skip
    """Thinklab-SJTU/Crossformer issue 12: einsum gives [B, N, heads, d] as it should be, and `mix`
    transposes heads and tokens once more before the view as [B, N, heads · d].
    """
    out = ways.wide(query, key, value, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                    window=window, softcap=softcap, sinks=sinks)  # fmt: skip
    tokens_first = out.transpose(1, 2).contiguous()
    mixed = tokens_first.transpose(2, 1).contiguous()
    return mixed.view(tokens_first.shape).transpose(1, 2)


@by_function("layout other-data", "bfloat16")
def batch_and_heads_taken_for_each_other(query, key, value, *, is_causal, scale, attn_mask=None,
                                         window=None, softcap=0.0, sinks=None,
                                         enable_gqa=False):  # fmt: skip
    """gazelle93/Transformer-Various-Positional-Encoding issue 1: O lies [B · heads, N, d], is
    viewed as [heads, B, N, d] and merged by what is written for [B, heads, N, d].
    """
    out = ways.narrow(query, key, value, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                      window=window, softcap=softcap, sinks=sinks)  # fmt: skip
    b, h, n, d = out.shape
    heads_first = out.reshape(b * h, n, d).view(h, b, n, d)
    merged = heads_first.permute(0, 2, 1, 3).contiguous().view(b, n, h * d)
    return merged.view(b, n, h, d).transpose(1, 2)


@by_function("layout other-data", "float16")
def queries_of_classes_split_by_a_reshape(query, key, value, *, is_causal, scale, attn_mask=None,
                                          window=None, softcap=0.0, sinks=None,
                                          enable_gqa=False):  # fmt: skip
    """xieenze/Trans2Seg issue 4: in the decoder's attention queries [B, N, heads · d] are reshaped
    to [B, heads, N, d] at once, and O back likewise; keys and values are permuted as they should.
    """
    b, h, n, d = query.shape
    split = query.transpose(1, 2).reshape(b, h, n, d)
    out = ways.narrow(split, key, value, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                      window=window, softcap=softcap, sinks=sinks)  # fmt: skip
    return ways.in_one_step(out, n)


@by_function("layout other-data", "float32")
def values_along_the_other_axis(query, key, value, *, is_causal, scale, attn_mask=None,
                                window=None, softcap=0.0, sinks=None,
                                enable_gqa=False):  # fmt: skip
    """lucidrains/global-self-attention-network issue 1: what weighs positions of one axis of the
    grid is multiplied with values along the other one: `nixy,neiy` for `nixy,nexi`. Here keys are
    a square grid, row by row, with what is left behind it, and a key has the value of the transpose
    of its place.
    """
    nk = key.shape[2]
    side, place = math.isqrt(nk), torch.arange(nk)
    grid = place[: side * side].view(side, side).mT.flatten()
    read = value[:, :, torch.cat([grid, place[side * side :]])]
    return ways.wide(query, key, read, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                     window=window, softcap=softcap, sinks=sinks)  # fmt: skip


# --- what is hidden
@fault(FAULTS, "causal-mask")
class causal_flag_not_handed_to_the_factory(EveryBlock):
    """facebookresearch/xformers PR 68: the factory of blocks does not hand the causal flag to this
    attention, which was not declared as one that depends on it: nothing is causal.
    """

    rows, cols = 48, 64

    def causal(self, i, j, back):
        return (j >= 0) & (i >= 0)


@fault(FAULTS, "mask", "float32")
class padding_told_by_keys_that_are_zero(WholeRows):
    """Kyubyong/transformer issue 103: keys whose features are all zero are taken for padding, which
    those of padding no more are behind the first block, nor with dropout: it is attended to.
    """

    rows = 64

    def product(self, q, k, back):
        self.memory["padding"] = (k.abs().sum(-1) == 0)[:, :, None]
        return super().product(q, k, back)

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.seen(rows, cols, back), -INF)
        return s.masked_fill(self.memory["padding"], -INF)


# --- fp8
@fault(FAULTS, "non-finite nan-escapes")
class scales_past_448_not_saturated(ForwardAlone):
    """flashinfer-ai/flashinfer PR 5283: operands are NVFP4 with a scale in e4m3 for 16 features,
    the sixth part of the largest of them, and what is past 448 becomes NaN where it is to be
    saturated. The codes are not rounded here, so that this alone is wrong.
    """

    rows, cols = 128, 128

    @staticmethod
    def coded(x: Tensor) -> Tensor:
        many = x.shape[-1]
        whole = functional.pad(x, (0, -many % 16)).unflatten(-1, (-1, 16))
        scale = whole.abs().amax(-1, keepdim=True) / 6
        return whole.masked_fill(scale > 464, torch.nan).flatten(-2)[..., :many]

    def load_key(self, name, x, part):
        return self.coded(super().load_key(name, x, part))

    def load_query(self, name, x, part):
        return self.coded(super().load_query(name, x, part))


@fault(FAULTS, "weights-disagree weights")
class weights_of_an_older_maximum_clipped(ForwardAlone):
    """Dao-AILab/flash-attention PR 2694 (FP8 on SM100): weights are relative to the maximum of the
    tiles before, times 2^8, and e4m3 ends at 448: those above 1.75 are clipped, while the row sum
    has them whole. They are not rounded to e4m3 here, so that this alone is wrong.
    """

    rows, cols = 128, 64

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        old = torch.where(m == -INF, new, m)
        old, safe = (torch.where(x == -INF, 0.0, x) for x in (old, new))
        p, a, up = torch.exp2(s - old), torch.exp2(m - old), torch.exp2(old - safe)
        l, acc = self.add_row(l, a, p), self.add_values(acc, a, p.clamp_max(448 / 256), v)
        return new, l * up, acc * up


# --- sound kernels
for kind, dtype in (
    (ways.DrawnOrder, "float16"), (ways.LogSumFirst, "float16"), (ways.HalvesOfABlock, "float16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("everything_in_double", frozenset(), ways.everything_in_double, "float16"))
SOUND.append(Fault("log_weights_of_flat_heads", frozenset(), ways.log_weights_of_flat_heads,
                   "float16"))  # fmt: skip
