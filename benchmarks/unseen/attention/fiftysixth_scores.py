"""The fifty-sixth set's faults of caches, heads, batches, factors and windows (fiftysixth.py has
the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftysixth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands
from torch.nn import functional

FAULTS: list[Fault] = []


# --- sequences and tokens exchanged
class _Wide(Kernel):
    rows, cols = 32, 64


class _Small(Kernel):
    rows, cols = 16, 16


def sequences_first_where_tokens_come_first(query, key, value, *, is_causal, scale, attn_mask=None,
                                            window=None, softcap=0.0, sinks=None):  # fmt: skip
    """kyegomez/movie-gen issue 8: `nn.MultiheadAttention` has tokens before sequences where
    nothing else is said, and is given sequences before tokens.
    """
    options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
               "softcap": softcap, "sinks": sinks}  # fmt: skip
    return ways.over_the_batch(Kernel, query, key, value, options)


def sequences_of_the_dual_path_attend_to_each_other(query, key, value, *, is_causal, scale,
                                                    attn_mask=None, window=None, softcap=0.0,
                                                    sinks=None):  # fmt: skip
    """asteroid-team/asteroid PR 381 (DPTNet; issue 380): x is [batch, seq_len, channels], and what
    attends takes it for [seq_len, batch, channels].
    """
    options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
               "softcap": softcap, "sinks": sinks}  # fmt: skip
    return ways.over_the_batch(_Wide, query, key, value, options)


def stripes_of_the_image_taken_for_tokens(query, key, value, *, is_causal, scale, attn_mask=None,
                                          window=None, softcap=0.0, sinks=None):  # fmt: skip
    """aipixel/AEMatter issue 3: stripes of the image are put in front, as sequences, and the module
    takes what is in front for the tokens: every stripe attends to the others.
    """
    options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
               "softcap": softcap, "sinks": sinks}  # fmt: skip
    return ways.over_the_batch(_Small, query, key, value, options)


for fn, dtype in (
    (sequences_first_where_tokens_come_first, "bfloat16"),
    (sequences_of_the_dual_path_attend_to_each_other, "float32"),
    (stripes_of_the_image_taken_for_tokens, "float16"),
):
    right = frozenset({"layout", "other-data"})
    FAULTS.append(Fault(fn.__name__, right, fn, dtype, frozenset({"elements"})))


# --- caches and heads
@fault(FAULTS, "cache other-data")
class slots_and_tables_of_zeros(OtherOperands):
    """vllm-project/vllm-omni PR 4178: how many compressed tokens are scheduled is not handed on,
    and the branch for dry runs writes zeros over the mapping of slots and the table of blocks: all
    tokens are stored in slot 0, and every page that is read is the first. What no token is stored
    in holds zeros here.
    """

    rows, cols, page = 64, 64, 16

    def read(self, k, v):
        return self.first_page(k), self.first_page(v)

    def first_page(self, x):
        found = torch.zeros_like(x)
        found[:, :, :: self.page] = x[-1:, :, -1:]
        return found


@fault(FAULTS, "cache key-tail", "float16")
class prefix_no_shorter_than_what_is_new(Kernel):
    """huggingface/optimum-habana PR 975: several new tokens, no more than are in the cache, are
    taken for the first ones, which the cache is filled with: attention gets the new keys alone,
    and the trained prefix is left out.
    """

    rows, cols = 32, 128

    def inside(self, j, back):
        at = self.at
        before = at.nk - at.n
        lost = before if 1 < at.n <= before else 0
        return super().inside(j, back) & (j >= lost)


@fault(FAULTS, "key-heads other-data", "float16")
class mapping_of_heads_repeated_as_a_whole(OtherOperands):
    """EricLBuehler/candle-vllm PR 52: without `repeat_kv` outputs are wrong where there are several
    key heads, and fewer than query heads; in decoding the mapping is 0, 1, 0, 1 in place of
    0, 0, 1, 1.
    """

    rows, cols = 16, 64

    def read(self, k, v):
        at, heads = self.at, torch.arange(k.shape[1])
        if at.n >= at.nk:
            return k, v
        own = heads % (k.shape[1] // at.groups) * at.groups
        return k[:, own], v[:, own]


# --- sums and factors
@fault(FAULTS, "unnormalized")
class normalizer_cumulated_over_heads(ForwardAlone):
    """fla-org/flash-linear-attention issue 850: what linear attention divides by is cumulated over
    the heads, where it is to be over the tokens: a row's sum is that of its own token's key in this
    and all heads before. Here the weights are exponentials.
    """

    rows, cols = 64, 64

    def finish(self, m, l, acc, rows):
        at = self.at
        if at.n != at.nk:
            return super().finish(m, l, acc, rows)
        s = torch.einsum("bhnd,bgnd->bhgn", load(at.q, rows), load(at.k, rows))
        top = torch.where(m == -INF, 0.0, m).mT
        p = torch.exp2(s * (at.scale * LOG2_E) - top)
        before = ways.below(s.shape[1])[..., None]
        return super().finish(m, (p * before).sum(2).unsqueeze(-1), acc, rows)


@fault(FAULTS, "scale value-factor", "float16")
class scales_of_the_cache_left_at_one(OtherOperands):
    """vllm-project/vllm PR 34863: keys and values are stored in FP8 with the checkpoint's scales,
    and the numbers that kernels multiply scores and O by stay 1. Codes are not rounded here, so
    that this alone is wrong.
    """

    rows, cols = 128, 64

    def read(self, k, v):
        return tuple(x / (x.abs().amax() / 448) for x in (k, v))


# --- windows and causal masks
@fault(FAULTS, "window")
class image_seen_past_the_window(ForwardAlone):
    """vllm-project/vllm PR 47217 (Gemma 4): in local layers tokens of an image see all of the
    image, and are to see what of it lies in the window. Tokens 64 to 159 are an image here; what
    is to be causal stays so.
    """

    rows, cols = 64, 32

    def window(self, i, j, back):
        one, two = ((x >= 64) & (x < 160) for x in (i, j))
        return super().window(i, j, back) | (one & two)


@fault(FAULTS, "causal-mask", "float16")
class causal_by_name_where_lengths_differ(EveryBlock, ForwardAlone):
    """rajveer43/VeloxQuant-MLX issue 370: caches that evict keys hand on "causal" for a mask, which
    is aligned to the last key, where queries and the keys that are left differ in number.
    """

    rows, cols = 32, 64

    def causal(self, i, j, back):
        return j <= i + self.at.nk - self.at.n


@fault(FAULTS, "causal-mask mask")
class text_encoder_of_another_library(EveryBlock):
    """mlfoundations/open_clip issue 445 (CoCa): the text encoder that comes from Hugging Face adds
    no causal mask, which the library's own adds: the decoder is told what it is to say.
    """

    rows, cols = 96, 64

    def causal(self, i, j, back):
        return (j >= 0) & (i >= 0)


@fault(FAULTS, "causal-mask mask", "float16")
class booleans_read_as_floats(EveryBlock):
    """EleutherAI/gpt-neox PR 139: sparse attention's mask has to be of floats, and is of booleans:
    four of them are one number, which hides where all four are False, and later tokens are seen.
    Past its end memory is not zero here.
    """

    rows, cols = 32, 32

    def forward(self):
        n = self.at.n
        flat = functional.pad(ways.below(n).flatten(), (0, -n * n % 4), value=True)
        read = flat.unflatten(0, (-1, 4)).any(-1)
        rest = torch.ones(n * n - len(read), dtype=torch.bool)
        self.read = torch.cat([read, rest]).view(n, n)
        return super().forward()

    def causal(self, i, j, back):
        n = self.at.n
        if n != self.at.nk:
            return super().causal(i, j, back)
        return self.read[i.clamp_max(n - 1), j.clamp_max(n - 1)]


@fault(FAULTS, "mask-finite causal-mask")
class future_at_minus_ten_thousand(EveryBlock, ForwardAlone):
    """ohdearquant/lattice PR 6, of several: in the branch of selected blocks later tokens get a
    score of −10 000, and not −∞, and are seen by rows that are far below that.
    """

    rows, cols = 64, 64

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        if not self.at.causal:
            return found
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        later = (j > i) & self.inside(j, back)
        return found.masked_fill(later, -1e4 * LOG2_E)
