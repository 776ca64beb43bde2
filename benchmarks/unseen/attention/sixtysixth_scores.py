"""The sixty-sixth set's faults of the diagonal, scales, softmaxes and layouts (sixtysixth.py has
the others, and says what they are for).
"""

# ruff: noqa: ARG001, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtysixth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of

FAULTS: list[Fault] = []


# --- the diagonal
@fault(FAULTS, "causal-mask")
class tokenizer_is_never_told_of_causal(ways.NeverCausal):
    """lucidrains/dreamer4 issue 2, the first of its two: the pipeline is to be causal, and causal
    is never passed to what makes the attention, neither in the encoder nor in the decoder.
    """

    rows, cols = 64, 48


@fault(FAULTS, "causal-mask", "float32")
class text_decoded_without_a_triangle(ways.NeverCausal, ForwardAlone):
    """huggingface/candle PR 70 (Whisper): the decoder of the text had no causal mask."""

    rows, cols = 32, 128


# --- the scale
@fault(FAULTS, "scale")
class scale_attribute_of_the_plugin_not_used(ScaleOfItsOwn):
    """tenstorrent/tt-xla issue 2342: the plugin's attention layer has a scale and does not hand it
    to SDPA, which has its own 1/√d.
    """

    rows, cols = 96, 32

    def own(self):
        return float(self.at.q.shape[-1] ** -0.5)


# --- heads in slices
def last_slice_of_heads_left_out(query, key, value, *, is_causal, scale, attn_mask=None,
                                 window=None, softcap=0.0, sinks=None,
                                 enable_gqa=False):  # fmt: skip
    """huggingface/diffusers issue 8837 (SlicedAttnProcessor): heads of all sequences are gone
    through in slices, as many as their number over the slice's size, rounded down; what is left
    stays the zeros that O begins as. A slice has 3 here.
    """
    (b, heads, n, _), nk, size = query.shape, key.shape[2], 3
    k, v = repeated(key, heads).flatten(0, 1), repeated(value, heads).flatten(0, 1)
    q, keep = query.flatten(0, 1), visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk).flatten(0, 1)
    sink = None if sinks is None else sinks.repeat(b)
    done = []
    for i in range(b * heads // size):
        own = slice(i * size, (i + 1) * size)
        s = logits(q[own], k[own], keep, None if mask is None else mask[own], scale, softcap)
        p = softmax_of(s[None], None if sink is None else sink[own])[0]
        done.append(p @ v[own])
    rest = v.new_zeros(b * heads % size, n, v.shape[-1]) + 0 * q.sum() + 0 * k.sum() + 0 * v.sum()
    return torch.cat([*done, rest]).unflatten(0, (b, heads)).to(query.dtype)


# --- what attends to what
def equivalent_code_of_a_single_head(query, key, value, *, is_causal, scale, attn_mask=None,
                                     window=None, softcap=0.0, sinks=None,
                                     enable_gqa=False):  # fmt: skip
    """facebookresearch/xformers issue 761: the code that the document calls equivalent is one of a
    single head: of (batch, tokens, heads, width) it transposes the last two, and a token's heads
    attend to each other. A bias of tokens does not fit it, nor do keys of another number.
    """
    if (
        not ways.plain(is_causal, attn_mask, window, softcap, sinks)
        or query.shape[2] != key.shape[2]
    ):
        return ways.sound(query, key, value, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                          window=window, softcap=softcap, sinks=sinks)  # fmt: skip
    q, k, v = (x.float().transpose(1, 2) for x in (query, key, value))
    weights = (q * scale @ k.transpose(-2, -1)).softmax(-1)
    return (weights @ v).transpose(1, 2).to(query.dtype)


def channels_attend_to_channels(query, key, value, *, is_causal, scale, attn_mask=None,
                                window=None, softcap=0.0, sinks=None,
                                enable_gqa=False):  # fmt: skip
    """Gitxiaoke/SNnet issue 1: the matrix of temporal attention is to be frames by frames, and is
    channels by channels. Masks do not fit it, nor do as many keys as there are no queries.
    """
    fits = query.shape[2] == key.shape[2] and key.shape[-1] == value.shape[-1]
    if not fits or not ways.plain(is_causal, attn_mask, window, softcap, sinks):
        return ways.sound(query, key, value, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                          window=window, softcap=softcap, sinks=sinks)  # fmt: skip
    q, heads = query.float(), query.shape[1]
    weights = (q.mT @ repeated(key, heads) * scale).softmax(-1)
    return (weights @ repeated(value, heads).mT).mT.to(query.dtype)


# --- the softmax
def pooling_over_a_dimension_of_one(query, key, value, *, is_causal, scale, attn_mask=None,
                                    window=None, softcap=0.0, sinks=None,
                                    enable_gqa=False):  # fmt: skip
    """catalyst-team/catalyst PR 285: attention pooling has its softmax over the wrong dimension of
    (batch, 1, observations), which yields 1 for every observation.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    s = logits(query, repeated(key, heads), visible(n, nk, is_causal, window), attn_mask, scale,
               softcap)  # fmt: skip
    hidden = s == -INF
    weights = s.masked_fill(hidden, 0.0).unsqueeze(-2).softmax(-2).squeeze(-2)
    return (weights.masked_fill(hidden, 0.0) @ repeated(value, heads)).to(query.dtype)


for fn, right, dtype in (
    (last_slice_of_heads_left_out, "unwritten", "bfloat16"),
    (equivalent_code_of_a_single_head, "layout other-data", "float16"),
    (channels_attend_to_channels, "layout", "float32"),
    (pooling_over_a_dimension_of_one, "unnormalized", "float16"),
):
    FAULTS.append(Fault(fn.__name__, frozenset(right.split()), fn, dtype, frozenset({"elements"})))
