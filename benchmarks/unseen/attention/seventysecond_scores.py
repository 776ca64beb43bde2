"""The seventy-second set's faults of scales, splits, layouts and caches (seventysecond.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG001, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventysecond_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault, permuted
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands
from torch import Tensor

FAULTS: list[Fault] = []


# --- scales
@fault(FAULTS, "scale", "float32")
class largest_less_the_attention(WholeRows, ways.OwnScale):
    """Andy-zhujunwen/danet-pytorch issue 6: the softmax is of the largest score of a row less the
    score, which reverses the weights: what is most alike weighs least.
    """

    rows = 64

    def own(self):
        return -self.at.scale


@fault(FAULTS, "layout other-data scale")
class hidden_units_by_the_number_of_heads(ForwardAlone):
    """InternLM/lmdeploy PR 2761 (Mistral Nemo): the size of a head is the hidden size divided by
    the number of heads, which is 5/4 of what it is, 160 for 128. Here a head begins that many
    features behind the one before, from the first again past the last, and the scale is of it.
    """

    rows, cols = 64, 64

    def forward(self):
        at = self.at
        kept = at.q, at.k, at.v, at.scale
        at.q = self.by_size(at.q)
        at.k, at.v = (self.spread(self.by_size(x[:, :: at.groups])) for x in kept[1:3])
        at.scale = float(at.scale * (4 / 5) ** 0.5)
        found = super().forward()
        at.q, at.k, at.v, at.scale = kept
        return found

    @staticmethod
    def by_size(x: Tensor) -> Tensor:
        b, h, t, d = x.shape
        place = torch.arange(h)[:, None] * (d * 5 // 4) + torch.arange(d)
        tokens = x.transpose(1, 2).reshape(b, t, h * d)
        return tokens[:, :, place % (h * d)].transpose(1, 2)


# --- splits
@fault(FAULTS, "unwritten split-merge", "float16")
class first_split_exits_without_a_history(ForwardAlone):
    """InternLM/lmdeploy PR 788: a split whose keys begin where they end exits early. So does the
    first one of a token that has no history, which should have stored what the token's own key
    gives; the buffers of partial results are zeros here.
    """

    rows, cols = 16, 64

    def forward(self):
        o, lse = super().forward()
        if self.at.causal:
            first = torch.arange(self.at.n)[:, None] == 0
            o = o.masked_fill(first, 0.0)
        return o, lse


# --- layouts
def inputs_that_are_not_contiguous_and_a_mask(query, key, value, *, is_causal, scale,
                                              attn_mask=None, enable_gqa=False, window=None,
                                              softcap=0.0, sinks=None):  # fmt: skip
    """huggingface/transformers PR 27973 (pytorch issue 112577): with a mask of one's own the
    memory-efficient kernel of torch 2.1.2 takes inputs for contiguous that are not; heads that lie
    behind tokens in memory are read as if they lay before them.
    """
    if attn_mask is not None:
        query, key, value = (as_stored(x) for x in (query, key, value))
    return ways.sound(query, key, value, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                      window=window, softcap=softcap, sinks=sinks)  # fmt: skip


def as_stored(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape) if permuted(x) else x


FAULTS.append(
    Fault("inputs_that_are_not_contiguous_and_a_mask", frozenset({"layout", "other-data"}),
          inputs_that_are_not_contiguous_and_a_mask, "float16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "other-data layout")
class keys_begin_by_lengths_with_the_prefix(EveryBlock, OtherOperands):
    """ModelTC/LightLLM PR 995: `cu_seqlens_k` counts what is in the cache as well, here 16 tokens a
    sequence, and the keys that are handed over are the new ones alone: sequences behind the first
    begin too late, all have as many keys too many, and the diagonal stands as much further right.
    Past the last row the last one is read again here.
    """

    rows, cols, cached = 128, 64, 16

    def more(self) -> int:
        return self.memory.get("more", 0)

    def read(self, k, v):
        self.memory["more"] = self.cached if self.at.n == k.shape[2] else 0
        return self.packed(k), self.packed(v)

    def packed(self, x: Tensor) -> Tensor:
        b, _, nk, _ = x.shape
        wide = nk + self.more()
        place = torch.arange(b)[:, None] * wide + torch.arange(wide)
        rows = x.transpose(1, 2).flatten(0, 1)[place.clamp_max(b * nk - 1)]
        return rows.transpose(1, 2)

    def causal(self, i, j, back):
        return super().causal(i + (0 if back else self.more()), j, back)


# --- caches
@fault(FAULTS, "cache other-data", "float16")
class indices_begin_where_the_queries_do(OtherOperands):
    """ModelTC/LightLLM PR 966: the numbers of a sequence's cache rows are put into the list that
    the kernel reads from where its new tokens begin in the batch, and not from where the keys that
    are before it end. With a prefix in the cache, which is where there are fewer queries than keys,
    sequences write over each other, the later ones over the earlier ones here; what nobody writes
    is row 0.
    """

    rows, cols = 32, 64

    def read(self, k, v):
        if self.at.n >= k.shape[2]:
            return k, v
        return self.listed(k), self.listed(v)

    def listed(self, x: Tensor) -> Tensor:
        (b, _, nk, _), n = x.shape, self.at.n
        place = torch.arange(b * nk)
        writer = (place // n).clamp_max(b - 1)
        token = place - writer * n
        row = torch.where(token < nk, writer * nk + token, 0)
        pool = x.transpose(1, 2).flatten(0, 1)
        return pool[row].unflatten(0, (b, nk)).transpose(1, 2)


@fault(FAULTS, "cache window", "float16")
class a_whole_chunk_trimmed_from_the_front(ForwardAlone):
    """ml-explore/mlx-lm PR 108 (Llama 4): where the cache of a local layer has as many keys as a
    chunk or more, a whole chunk is cut off its front, where what is more than a chunk should be;
    here tokens come one by one, and a chunk is the window with the token itself.
    """

    rows, cols = 64, 32

    def window(self, i, j, back):
        keep, left = super().window(i, j, back), self.at.window[0]
        return keep & (j >= i - i % (left + 1)) if left >= 0 else keep


@fault(FAULTS, "cache unwritten")
class prefill_told_of_no_pages(ForwardAlone):
    """dphnAI/sonar PR 657: what says where a sequence's pages begin and end is zeros in every
    prefill, which is to be so in the run that measures memory alone: several queries have no keys,
    and O is 0.
    """

    rows, cols = 64, 128

    def forward(self):
        o, lse = super().forward()
        return (torch.zeros_like(o) if self.at.n > 1 else o), lse
