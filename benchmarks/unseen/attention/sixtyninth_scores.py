"""The sixty-ninth set's faults of softmaxes, operands and layouts (sixtyninth.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG001, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtyninth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from torch import Tensor

FAULTS: list[Fault] = []


def plain(right: str, dtype: str = "bfloat16"):
    """Put a function into the set, with the keys of the causes that are right."""

    def put(fn):
        keys = frozenset(right.split())
        FAULTS.append(Fault(fn.__name__, keys, fn, dtype, frozenset({"elements"})))
        return fn

    return put


# --- softmaxes
@plain("unnormalized other-data", "float32")
def features_weighed_against_each_other(query, key, value, *, is_causal, scale, attn_mask=None,
                                        window=None, softcap=0.0, sinks=None,
                                        enable_gqa=False):  # fmt: skip
    """adriangonz/statistical-nlp-17 PR 6: `'bte,bnke->bnke'` sums the products over the targets and
    not over the features, along which the softmax then goes: all targets have one result. Nothing
    is masked. Where values are wider than keys their weights begin again.
    """
    (b, heads, n, d), wide = query.shape, value.shape[-1]
    k, v = repeated(key, heads), repeated(value, heads)
    p = (query.float().sum(2, keepdim=True) * k * scale).softmax(-1)
    out = (p[..., torch.arange(wide) % d] * v).sum(2, keepdim=True)
    return out.expand(b, heads, n, wide).to(query.dtype)


@plain("unnormalized other-data", "float16")
def branches_softmaxed_over_the_batch(query, key, value, *, is_causal, scale, attn_mask=None,
                                      window=None, softcap=0.0, sinks=None,
                                      enable_gqa=False):  # fmt: skip
    """xmu-xiaoma666/External-Attention-pytorch issue 18 (selective kernels): of weights that lie
    [k, batch, channel] the softmax is over dimension 1, the batch, and not over the k that are
    added up.
    """
    s = ways.scores_of(query, key, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                       window=window, softcap=softcap)  # fmt: skip
    nothing = (s == -INF).all(0, keepdim=True)
    p = s.masked_fill(nothing, 0.0).softmax(0).masked_fill(nothing, 0.0)
    return (p @ repeated(value, query.shape[1])).to(query.dtype)


@plain("maximum non-finite")
def exponentials_over_their_sum_as_they_are(query, key, value, *, is_causal, scale, attn_mask=None,
                                            window=None, softcap=0.0, sinks=None,
                                            enable_gqa=False):  # fmt: skip
    """stevezheng23/reading_comprehension_tf PR 69: the softmax with a mask divides exp(s) by its
    sum and 10⁻³⁰, and takes no maximum off before: NaN where scores are large.
    """
    s = ways.scores_of(query, key, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                       window=window, softcap=softcap)  # fmt: skip
    p = torch.exp(s)
    total = p.sum(-1, keepdim=True) + 1e-30
    if sinks is not None:
        total = total + torch.exp(sinks.float().view(1, -1, 1, 1))
    return (p / total @ repeated(value, query.shape[1])).to(query.dtype)


@plain("exponential unnormalized", "float32")
def scores_divided_by_their_sum(query, key, value, *, is_causal, scale, attn_mask=None,
                                window=None, softcap=0.0, sinks=None,
                                enable_gqa=False):  # fmt: skip
    """ruvnet/agentic-flow issue 192: weights are what they are made of, divided by its sum, and no
    softmax: they sum to 1, and some are negative or more than 1.
    """
    s = ways.scores_of(query, key, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                       window=window, softcap=softcap)  # fmt: skip
    s = s.masked_fill(s == -INF, 0.0)
    total = s.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.float().view(1, -1, 1, 1)
    p = s / torch.where(total == 0, 1.0, total)
    return (p @ repeated(value, query.shape[1])).to(query.dtype)


# --- operands
@plain("other-data layout out-unexplained")
def weights_given_back_for_o(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                             softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Kamichanw/SeekDeeper issue 9: `y = att.transpose(1, 2)…view(…)` for y's: without
    the fused function `att` are the weights, and what they make of V is thrown away. Rows of the
    model's width are cut from the memory of the weights, as many as there are queries.
    """
    s = ways.scores_of(query, key, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                       window=window, softcap=softcap)  # fmt: skip
    (b, heads, n, _), wide = query.shape, value.shape[-1]
    held = softmax_of(s, sinks).transpose(1, 2).reshape(b, -1)
    size = n * heads * wide
    held = torch.nn.functional.pad(held, (0, max(0, size - held.shape[1])))[:, :size]
    out = held.view(b, n, heads, wide).transpose(1, 2)
    return (out + 0 * value.float().sum()).to(query.dtype)


@plain("other-data")
def every_head_of_unprojected_vectors(query, key, value, *, is_causal, scale, attn_mask=None,
                                      window=None, softcap=0.0, sinks=None,
                                      enable_gqa=False):  # fmt: skip
    """fchollet/deep-learning-with-python-notebooks issue 261: each head projects query, key and
    value, and then scores `target` with `source` and weighs `source`, as they came: all heads are
    the same, here the first one, and weigh keys. Where widths differ they weigh its values.
    """
    k = key[:, :1].expand_as(key)
    v = k if value.shape[-1] == key.shape[-1] else value[:, :1].expand_as(value)
    out = ways.eager(query[:, :1].expand_as(query), k, v, is_causal=is_causal, scale=scale,
                     attn_mask=attn_mask, window=window, softcap=softcap, sinks=sinks)  # fmt: skip
    return out + 0 * value.float().sum()


@plain("other-data", "float16")
def input_viewed_in_place_of_its_projections(query, key, value, *, is_causal, scale,
                                             attn_mask=None, window=None, softcap=0.0, sinks=None,
                                             enable_gqa=False):  # fmt: skip
    """datawhalechina/deep-learning-notes PR 11: heads are views of `query`, `key` and `value`, and
    not of `q`, `k` and `v`, their projections. In self-attention all three are the same then, here
    what is Q; where numbers of tokens or widths differ they cannot be, and nothing is wrong here.
    """
    k, v = key, value
    if query.shape[2:] == key.shape[2:] == value.shape[2:]:
        k = v = query[:, : key.shape[1]]
    out = ways.eager(query, k, v, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                     window=window, softcap=softcap, sinks=sinks)  # fmt: skip
    return out + 0 * (key.float().sum() + value.float().sum())


# --- layouts
@plain("layout other-data", "float32")
def batch_first_into_an_encoder_of_tokens_first(query, key, value, *, is_causal, scale,
                                                attn_mask=None, window=None, softcap=0.0,
                                                sinks=None, enable_gqa=False):  # fmt: skip
    """dl4sits/BreizhCrops issue 20 (commit 796a923c, which it names): x, [N, T, D], goes into an
    encoder that takes [T, N, D]: series attend to each other, step by step. Masks and windows do
    not fit then, and calls that have any are right.
    """
    given = query, key, value
    other = query.shape[2] != key.shape[2] or attn_mask is not None or window is not None
    if not other:
        given = tuple(x.transpose(0, 2) for x in given)
    out = ways.eager(*given, is_causal=is_causal, scale=scale, attn_mask=attn_mask, window=window,
                     softcap=softcap, sinks=sinks)  # fmt: skip
    return out if other else out.transpose(0, 2)


@plain("layout other-data", "float16")
def heads_by_a_view_of_batch_times_heads(query, key, value, *, is_causal, scale, attn_mask=None,
                                         window=None, softcap=0.0, sinks=None,
                                         enable_gqa=False):  # fmt: skip
    """649453932/Chinese-Text-Classification-Pytorch issue 10: the view behind attention, [heads ·
    batch, T, d] as [batch, T, heads · d], puts all into another order; the code has the same view
    in front of it, so that a head is a stretch of the text.
    """

    def viewed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape)

    out = ways.eager(*map(viewed, (query, key, value)), is_causal=is_causal, scale=scale,
                     attn_mask=attn_mask, window=window, softcap=softcap, sinks=sinks)  # fmt: skip
    b, heads, n, wide = out.shape
    return out.contiguous().view(b, n, heads, wide).transpose(1, 2)


@plain("layout other-data")
def transpose_removed_by_mistake(query, key, value, *, is_causal, scale, attn_mask=None,
                                 window=None, softcap=0.0, sinks=None,
                                 enable_gqa=False):  # fmt: skip
    """HabanaAI/vllm-fork PR 1218: a commit removed the transpositions in front of the attention of
    images and behind it, and [B, T, H, D] goes in as it is: heads of a token attend to each other.
    Such attention has neither masks, windows nor sinks, and as many keys as queries.
    """
    options = {"is_causal": is_causal, "scale": scale, "softcap": softcap}
    other = attn_mask is not None or window is not None or sinks is not None
    if other or query.shape[2] != key.shape[2]:
        return ways.eager(query, key, value, attn_mask=attn_mask, window=window, sinks=sinks,
                          **options)  # fmt: skip
    k, v = (repeated(x, query.shape[1]).transpose(1, 2) for x in (key, value))
    return ways.eager(query.transpose(1, 2), k, v, **options).transpose(1, 2)


@fault(FAULTS, "layout")
class heads_and_tokens_exchanged_in_the_transform(ForwardAlone):
    """bytedance/lightseq PR 462: the operation that brings O from heads first to tokens first is
    told of [batch, tokens, heads], the numbers of the other order. What it is told on the way back
    is right.
    """

    rows, cols = 48, 64

    def forward(self):
        o, lse = super().forward()
        b, heads, n, wide = o.shape
        moved = o.contiguous().view(b, n, heads, wide).transpose(1, 2).contiguous()
        return moved.view(b, n, heads, wide).transpose(1, 2), lse
