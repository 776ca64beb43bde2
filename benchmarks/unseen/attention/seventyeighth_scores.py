"""The seventy-eighth set's faults of what a cache holds (seventyeighth.py has the others, and says
what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventyeighth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands
from torch import Tensor
from torch.nn import functional

FAULTS: list[Fault] = []


@fault(FAULTS, "cache other-data", "float16")
class pointer_of_the_cache_goes_on(EveryBlock, OtherOperands):
    """rasbt/LLMs-from-scratch PR 925: the place to write to in the cache is not reset between
    prompts, so that the next one is written behind what is left of the last, and sees it. Here the
    sequences of a batch follow on each other, and 16 keys are left.
    """

    rows, cols, left = 64, 48, 16

    def read(self, k, v):
        return tuple(torch.cat([x.roll(1, 0)[:, :, -self.left :], x], 2) for x in (k, v))

    def causal(self, i, j, back):
        return j <= i + self.left

    def window(self, i, j, back):
        return super().window(i + self.left, j, back)

    def given_mask(self, rows, cols):
        at, kept = self.at, self.at.mask
        full = kept.expand(*kept.shape[:-2], at.n, self.memory["keys"])
        value = kept.dtype == torch.bool
        full = functional.pad(full, (self.left, 0), value=value)[..., rows, cols]
        high, wide = rows.stop - rows.start, cols.stop - cols.start
        return functional.pad(full, (0, wide - full.shape[-1], 0, high - full.shape[-2]))

    def hide(self, s, rows, cols, back):
        s = super().hide(s, rows, cols, back)
        first = (torch.arange(s.shape[0]) == 0)[:, None, None, None]
        return s.masked_fill(first & (torch.arange(cols.start, cols.stop) < self.left), -torch.inf)


@fault(FAULTS, "padding cache", "float32")
class rejected_tail_set_to_zero(ways.Appended):
    """Blaizzy/mlx-vlm issue 1962 (PR 2113): where sequences of a batch accept different numbers of
    drafts, K and V of what the shorter ones rejected are set to zero and stay in the cache: e⁰ for
    each of them enters the row's sum. Here four in every second sequence; a causal call is the
    prompt, before any draft.
    """

    rows, cols = 32, 64

    def behind(self, x):
        return torch.zeros_like(x[:, :, :4])

    def shown(self, i):
        return self.odd() & (not self.at.causal)


@fault(FAULTS, "cache key-tail")
class stale_position_of_a_slot(OtherOperands):
    """tenstorrent/tt-inference-server PR 4557: on a hit of the cache the position that the slot had
    in its previous use stays: new tokens are written from there on, over what was cached, and what
    is cached behind them is not seen. Here it is half of the right one.
    """

    rows, cols = 96, 64

    def read(self, k, v):
        prefix = k.shape[2] - self.at.n
        if prefix <= 0:
            return k, v
        return tuple(torch.cat([x[:, :, : prefix // 2], x[:, :, prefix:]], 2) for x in (k, v))


@fault(FAULTS, "cache key-tail", "float32")
class cache_that_nobody_begins(EveryBlock, ForwardAlone):
    """jingtian11/EasyOffer issue 2: the cache is set only where there was one before, so there
    never is one: each new token sees itself alone. Of a causal call the first half is the prompt;
    where there are fewer queries than keys, the queries are what is new.
    """

    rows, cols = 48, 32

    def seen(self, rows, cols, back):
        keep, at = super().seen(rows, cols, back), self.at
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        if at.causal and at.n == at.nk:
            return keep & ((i < at.n // 2) | (i == j))
        return keep & (j >= at.nk - at.n)


@fault(FAULTS, "other-data cache", "float16")
class one_cache_for_all_methods(OtherOperands):
    """pytorch/executorch PR 18864: the cache is shared by all methods, whatever they compute, so
    that each reads what the last one wrote. The methods are the sequences of a batch here.
    """

    rows, cols = 128, 64

    def read(self, k, v):
        return tuple(x[-1:].expand_as(x) for x in (k, v))


@fault(FAULTS, "cache window other-data")
class ring_that_trim_does_not_shrink(ways.Appended):
    """ml-explore/mlx-lm PR 1486: `trim` of a rotating cache moves its offset back, and does not
    shrink its buffer: once the window is crossed, rejected drafts stay among the keys. Here five,
    whose numbers are chosen: the next head's first.
    """

    rows, cols = 64, 96

    def behind(self, x):
        return x.roll(-1, 1)[:, :, :5]

    def shown(self, i):
        window = self.at.window
        return i > window[0] if window is not None and window[0] >= 0 else i < 0


@fault(FAULTS, "cache padding", "float16")
class drafts_past_the_block_not_written(OtherOperands):
    """RBLN-SW/vllm-rbln PR 604: the kernel writes new tokens into one block of the cache alone;
    drafts that cross its end are not written. Blocks have 64 rows here, and hold zeros before.
    """

    rows, cols, block = 32, 32, 64

    def read(self, k, v):
        nk = k.shape[2]
        prefix = nk - self.at.n
        if prefix <= 0:
            return k, v
        written = torch.arange(nk)[:, None] < (prefix // self.block + 1) * self.block
        return k * written, v * written


@fault(FAULTS, "cache other-data", "float32")
class slots_past_what_was_retrieved(OtherOperands):
    """LMCache/LMCache PR 2984, review: the slot mapping is cut to the cached tokens, those of the
    layers are not, and a whole chunk is put where they say: what is behind the cached tokens is
    written over. Chunks have 48 tokens here, and their end holds the next sequence's.
    """

    rows, cols, chunk = 64, 128, 48

    def read(self, k, v):
        nk = k.shape[2]
        prefix = nk - self.at.n
        if prefix <= 0:
            return k, v
        j = torch.arange(nk)[:, None]
        over = (j >= prefix) & (j < -(-prefix // self.chunk) * self.chunk)
        return tuple(torch.where(over, x.roll(-1, 0), x) for x in (k, v))


@fault(FAULTS, "cache other-data")
class rejected_drafts_in_the_tail(ways.Appended):
    """Blaizzy/mlx-vlm PR 1155: the offset moves on by the whole block of drafts in all sequences;
    those that accept fewer keep what they rejected as their last keys. Here six in every second
    sequence, with numbers that are chosen; a causal call is the prompt.
    """

    rows, cols = 128, 32

    def behind(self, x):
        b, h, _, d = x.shape
        return torch.randn(b, h, 6, d, generator=torch.Generator().manual_seed(1155))

    def shown(self, i):
        return self.odd() & (not self.at.causal)


@fault(FAULTS, "other-data cache", "float32")
class blocks_whose_hashes_collide(OtherOperands):
    """openvinotoolkit/openvino.genai issue 3722: blocks of the prefix cache are known by a hash
    alone, and of two with the same one the first is taken. Here the third block of 16 is the first
    of the sequence before.
    """

    rows, cols = 48, 64

    def read(self, k, v):
        return self.taken(k), self.taken(v)

    @staticmethod
    def taken(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, :, 32:48] = x.roll(1, 0)[:, :, :16][:, :, : x[:, :, 32:48].shape[2]]
        return x
