"""The sixty-fifth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests, about serving: «paged attention wrong block table», «paged attention wrong result
page size», «chunked prefill wrong attention output», «prefix caching wrong output attention»,
«speculative decoding tree mask attention wrong», «cascade attention wrong result», «merge attention
states lse wrong», «split kv decode wrong result», «flash decoding wrong reduction», «decode
attention num_splits incorrect», «cuda graph attention stale metadata wrong output», «kv cache
eviction wrong attention», «kv cache layout HND NHD wrong attention», «mla decode wrong output»,
«batch decode wrapper wrong output», «ragged prefill wrong output», «varlen attention wrong last
sequence», «attention backend seq_lens wrong padding», «cross layer kv sharing wrong attention»,
«beam search kv cache reorder attention wrong».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 218 results, of which each search gives twelve at most. 10 are faults
here. What was left: 162 are about something else, features, speed, builds, crashes, questions or
other operations; 24 tell no cause, many of them no text at all; 14 are threads of earlier sets; 6
are pull requests that fix what an issue tells that is in an earlier set (transformers PRs 46615,
46639, 46672 and 46735, VeloxQuant-MLX PR 392) or here (keys_values PR 142); 2 cannot be written so
that this function errs: positions of rotations (transformers issue 43082) and rows of padding,
which are cut off (sglang PR 15574).

Threads whose first excerpt breaks off were looked for once more by their own words. llama.cpp issue
3802 breaks off where it begins to tell what follows; axolotl PR 131 tells by the issue that it
fixes, sgl-flash-attn PR 29 by the pull request that it takes over. keys_values issue 140 first
suspects how its ring is written, and ends with which tokens are evicted. What memory holds is
chosen where it is not told, as numbers are that no thread tells; so is which of a call's keys a
cache holds already: all but the last, as many as there are queries, where queries are fewer.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks, layouts and caches are here; captured graphs, splits and the
way back in sixtyfifth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.sixtyfifth --check`) but the one that STATED names,
which needs the input that it says.
"""

# ruff: noqa: D102, N801 - a fault is a class of its name

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtyfifth_kernel as ways
from benchmarks.unseen.attention import sixtyfifth_scores
from benchmarks.unseen.attention.eighth_kernel import as_heads, fault, permuted
from benchmarks.unseen.attention.fifth_kernel import INF, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch.nn import functional

AGAIN = (
    "documents_of_a_row_not_parted",  # forty-ninth: packed_responses_under_a_mask_of_ones
    "first_tokens_evicted_first",  # twenty-eighth and fiftieth: first, or oldest, keys are lost
    "cache_of_heads_first_read_tokens_first",  # seventeenth: heads_split_without_transposing
    "values_by_the_strides_of_the_keys",  # nineteenth: query_as_if_it_lay_in_order, of queries
    "rows_of_the_other_beam_not_removed",  # thirty-ninth: hypotheses_with_the_cache_of_others
    "graph_reads_where_the_metadata_lay",  # thirty-ninth: cache_of_the_beams_of_before; others too
    "new_rows_in_the_slots_of_the_capture",  # thirty-ninth: all_keys_in_slot_zero, other slots
    "values_multiplied_up_to_the_captured_length",  # eighth: values_of_half_a_block; others too
    "splits_as_long_as_all_up_to_them",  # eighth: every_split_from_the_start, keys counted again
    "lengths_in_use_not_told_on_the_way_back",  # 27th: past_the_end_lies_anything_on_the_way_back
)
STATED = {
    "values_by_the_strides_of_the_keys": "K and V of which one has tokens before heads in memory",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- what may be seen
@fault(FAULTS, "mask")
class documents_of_a_row_not_parted(EveryBlock):
    """axolotl-ai-cloud/axolotl PR 131 (issue 128): sequences are concatenated into one row, whose
    mask of attention is ones for all of them: each attends to those before it. Keys that no query
    may see are padding, which is masked.
    """

    rows, cols = 64, 96

    def given_mask(self, rows, cols):
        at = self.at
        if at.mask.dtype != torch.bool:
            return super().given_mask(rows, cols)
        real = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk).any(-2, keepdim=True)
        real = functional.pad(real, (0, self.cols), value=False)[..., cols]
        return real.expand(*real.shape[:-2], rows.stop - rows.start, -1)


@fault(FAULTS, "key-tail window")
class first_tokens_evicted_first(ForwardAlone):
    """awslabs/keys_values issue 140 (PRs 142 and 144): a cache that is full evicts the first tokens
    of all, which is where a prompt is longer than the cache, here one of 96, filled by chunks of 32
    tokens: no query has them among its keys, as much weight as they have.
    """

    rows, cols, room, chunk = 32, 32, 96, 32

    def causal(self, i, j, back):
        return super().causal(i, j, back) & self.kept(j, (i // self.chunk + 1) * self.chunk)

    def inside(self, j, back):
        found = super().inside(j, back)
        return found if self.at.causal else found & self.kept(j, self.at.nk)

    def kept(self, j, end):
        return j >= torch.as_tensor(end).clamp_max(self.at.nk) - self.room


# --- layouts
@fault(FAULTS, "layout", "float32")
class cache_of_heads_first_read_tokens_first(ways.Served):
    """vllm-project/vllm PR 42740: the CPU's backend has pages of [heads, rows, d], does not say so,
    and the cache's manager takes the default, [rows, heads, d]. Pages have 16 rows here.
    """

    rows, cols, page = 32, 64, 16

    def changed(self, x):
        nk = x.shape[2]
        whole = functional.pad(x, (0, 0, 0, -nk % self.page))
        pages = whole.unflatten(2, (-1, self.page)).transpose(1, 2).contiguous()
        b, many, heads, rows, d = pages.shape
        other = pages.view(b, many, rows, heads, d).permute(0, 3, 1, 2, 4)
        return other.flatten(2, 3)[:, :, :nk]


@fault(FAULTS, "layout")
class values_by_the_strides_of_the_keys(ways.Served):
    """vllm-project/vllm-xpu-kernels PR 449, review: K and V may come in two layouts, one of them
    heads first and the other tokens first, and later kernels take the key's for both.
    """

    rows, cols = 128, 64

    def spread(self, x):
        self.memory.setdefault("tokens_first", []).append(permuted(x))
        return super().spread(x)

    def read(self, k, v):
        of_keys, of_values = self.memory["tokens_first"][:2]
        if of_keys == of_values:
            return k, v
        own = self.own(v)
        if of_keys:
            other = as_heads(own)
        else:
            b, heads, nk, d = own.shape
            other = own.transpose(1, 2).contiguous().view(b, heads, nk, d)
        return k, other.repeat_interleave(self.at.groups, 1)


# --- caches
@fault(FAULTS, "other-data cache", "float16")
class rows_of_the_other_beam_not_removed(EveryBlock, ways.Served):
    """ggml-org/llama.cpp issue 3802: beams that begin alike and part, here in the middle, go into
    one cache one after the other, and what the one has stored behind their common part is still
    there when the other's turn comes, at the same places.
    """

    rows, cols = 64, 64

    def read(self, k, v):
        self.memory["more"] = k.shape[2] - k.shape[2] // 2
        return tuple(torch.cat([x, x.roll(1, 0)[:, :, x.shape[2] // 2 :]], 2) for x in (k, v))

    def place(self, j):
        """Where in its beam a row of the cache stands."""
        keys = self.memory.get("keys", self.at.nk)
        return torch.where(j < keys, j, j - self.memory.get("more", 0))

    def causal(self, i, j, back):
        return super().causal(i, self.place(j), back)

    def window(self, i, j, back):
        return super().window(i, self.place(j), back)

    def given_mask(self, rows, cols):
        mask, at, more = self.at.mask, self.at, self.memory["more"]
        full = mask.expand(*mask.shape[:-2], at.n, self.memory["keys"])
        full = torch.cat([full, full[..., -more:]], -1)[..., rows, cols]
        missing = (0, cols.stop - cols.start - full.shape[-1],
                   0, rows.stop - rows.start - full.shape[-2])  # fmt: skip
        return functional.pad(full, missing, value=False if mask.dtype == torch.bool else 0.0)

    def hide(self, s, rows, cols, back):
        s = super().hide(s, rows, cols, back)
        first = torch.arange(s.shape[0])[:, None, None, None] == 0
        others = torch.arange(cols.start, cols.stop) >= self.memory["keys"]
        return s.masked_fill(first & others, -INF)


FAULTS += sixtyfifth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.Paged, "bfloat16"), (ways.KeysOutside, "float16"), (ways.MaximumFirst, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(
    Fault("exponentials_of_log_softmax", frozenset(), ways.exponentials_of_log_softmax, "float16")
)
SOUND.append(
    Fault("heads_of_all_sequences_in_a_row", frozenset(), ways.heads_of_all_sequences_in_a_row,
          "bfloat16")
)  # fmt: skip
