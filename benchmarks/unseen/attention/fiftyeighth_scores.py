"""The fifty-eighth set's faults of scales, sums, rows of nothing, ends and caches (fiftyeighth.py
has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyeighth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands
from torch import Tensor

FAULTS: list[Fault] = []


# --- scales and sums
@fault(FAULTS, "scale")
class configured_scale_not_considered(ScaleOfItsOwn):
    """NVIDIA/Megatron-LM PR 3698: `config.softmax_scale` is ignored, among others in latent
    attention, which makes its own of 1/√d; where YaRN's factor is 1 it is that.
    """

    rows, cols = 64, 128

    def own(self):
        return float(self.at.q.shape[-1] ** -0.5)


@fault(FAULTS, "unnormalized rescale weights-disagree", "float16")
class first_sum_added_behind_the_loop(ForwardAlone):
    """flagos-ai/FlagTree issue 1250: a pass of the compiler makes of l = l · α + Σ p, which begins
    at 1, a sum that begins at 0, and adds the 1 behind the loop, without the factors that it should
    have had; with no sink the first of them is 0. Of causal calls with V = 1 the first rows are
    1/2, 2/3, 3/4.
    """

    rows, cols = 128, 64

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, torch.zeros_like(l), acc

    def finish(self, m, l, acc, rows):
        return super().finish(m, l + 1, acc, rows)


@fault(FAULTS, "other-data layout", "float16")
class offset_of_a_row_of_scores_wraps(ways.WholeMatrix):
    """modelscope/dash-infer PR 11: the offset `k` of a row in the scores of the whole batch is an
    int in the softmax, and overflows for long sequences: here at 15 bits, and where scores are read
    alone, so that later rows have the softmax of earlier ones.
    """

    def changed(self, s):
        nk, rows = s.shape[-1], s.numel() // s.shape[-1]
        first = torch.arange(rows)[:, None] * nk % 2**15
        place = (first + torch.arange(nk)).clamp_max(s.numel() - 1)
        return s.contiguous().view(-1)[place].view(s.shape)


# --- rows that may see nothing
@fault(FAULTS, "masked-row non-finite nan-escapes", "float32")
class sequences_of_length_zero(ForwardAlone, WholeRows):
    """pytorch/pytorch issue 81077: the fast path of MultiheadAttention gives NaN where a sequence
    of a nested tensor has length zero: all its keys are hidden.
    """

    rows = 64

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "mask-finite mask", "float16")
class blind_row_is_the_mean_of_the_values(EveryBlock, ForwardAlone):
    """microsoft/onnxruntime PR 28958, the second of its two: hidden scores are the least finite
    number, and a query that may attend to no key has the mean of V, where it is to have zeros.
    """

    rows, cols = 64, 64

    def hide(self, s, rows, cols, back):
        s, j = super().hide(s, rows, cols, back), torch.arange(cols.start, cols.stop)
        least = torch.full_like(s, torch.finfo(torch.float32).min)
        return torch.where((s == -INF) & self.inside(j, back), least, s)


@fault(FAULTS, "unwritten", "bfloat16")
class tokens_without_blocks_are_passed_over(ways.NothingSeen):
    """vllm-project/vllm-ascend PR 12833, review: where a token has no valid block `continue` passes
    the whole task over, and O and lse, which nobody clears, stay what the memory held; here numbers
    of something else.
    """

    rows, cols = 16, 128

    def held(self, o):
        chance = torch.Generator().manual_seed(12833)
        return self.at.low(torch.randn(o.shape, generator=chance))


@fault(FAULTS, "masked-row non-finite nan-escapes")
class multiplied_by_one_over_no_sum(ForwardAlone):
    """UbiquitousLearning/mllm PR 520, review: a query with an empty range of keys never enters the
    loop, its sum stays 0, and O is multiplied by 1 over that.
    """

    rows, cols = 8, 32

    def finish(self, m, l, acc, rows):
        return super().finish(m, torch.ones_like(l), acc * (1 / l), rows)


@fault(FAULTS, "unwritten masked-row non-finite nan-escapes")
class no_keys_and_an_empty_tensor(ways.NothingSeen):
    """ROCm/aiter PR 1442: the kernel writes nothing for a sequence that has no keys, and O is
    `torch::empty`, here NaN.
    """

    rows, cols = 128, 64

    def blind(self):
        return super().blind().all(2, keepdim=True)

    def held(self, o):
        return torch.full_like(o, torch.nan)


# --- what lies past the end
@fault(FAULTS, "nan-escapes non-finite padding ragged", "float16")
class short_sequences_in_a_tile_of_garbage(ForwardAlone):
    """woct0rdho/SageAttention PR 98: with fewer keys than a tile of 64 what is past their end is
    not loaded, and not cleared; it holds NaN, which a weight of 0 does not hide. With more keys it
    holds rows of the tile before. The codes are not rounded here, so that this alone is wrong.
    """

    rows, cols = 128, 64

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name == "v" and self.at.nk < self.cols:
            found[:, :, self.at.nk :] = torch.nan
        return found


@fault(FAULTS, "nan-escapes non-finite padding ragged", "float16")
class nan_and_minus_infinity(EveryBlock, ForwardAlone):
    """deepbeepmeep/Wan2GP PR 1628: decoding reads all of the blocks of the cache, of which the last
    one's end was never written, and adds −∞ to hide it: NaN + (−∞) is NaN. Which layer's memory
    holds NaN is chance; here it is that of every second key head.
    """

    rows, cols = 64, 16

    def product(self, q, k, back):
        s, (n, nk) = super().product(q, k, back), (self.at.n, self.at.nk)
        past = k.shape[2] - (nk - 1) % self.cols - 1
        if n < nk and past and self.memory["start"] + self.cols > nk:
            s[:, ::2, :, -past:] = torch.nan
        return s

    def load_key(self, name, x, part):
        self.memory["start"] = part.start
        return super().load_key(name, x, part)

    def hide(self, s, rows, cols, back):
        hidden = super().hide(torch.zeros_like(s), rows, cols, back)
        return s + hidden


@fault(FAULTS, "padding ragged other-data")
class listed_rows_past_the_tokens(OtherOperands):
    """hw-native-sys/pypto-lib PR 494, review: rows are gathered by a list whose every number that
    is not negative is trusted, the ones past the number of tokens as well; here a list ends with a
    whole block of 32, and what follows in memory are another head's rows.
    """

    rows, cols = 16, 32

    def read(self, k, v):
        many = -(-k.shape[2] // 32) * 32
        return self.gathered(k, many), self.gathered(v, many)

    @staticmethod
    def gathered(x: Tensor, many: int) -> Tensor:
        b, h, nk, _ = x.shape
        place = torch.arange(b * h).view(b, h, 1) * nk + torch.arange(many)
        return x.flatten(0, 2)[place.clamp_max(b * h * nk - 1)]


# --- caches
@fault(FAULTS, "window cache causal-mask other-data")
class ring_shorter_than_the_prompt(OtherOperands):
    """Lightning-AI/litgpt PR 2215: the cache of a window is a ring, a longer prompt writes over
    what it has just put there, and the mask is the global triangle cut to as many columns: early
    queries see later keys.
    """

    rows, cols = 64, 64

    def forward(self):
        at = self.at
        wide = at.window[0] + 1 if at.window is not None else 0
        kept = at.window
        self.memory["wide"] = wide if at.causal and at.n == at.nk and 0 < wide < at.nk else 0
        at.window = None if self.memory["wide"] else kept
        found = super().forward()
        at.window = kept
        return found

    def read(self, k, v):
        wide, nk = self.memory["wide"], k.shape[2]
        if not wide:
            return k, v
        slot = torch.arange(wide)
        last = slot + (nk - 1 - slot) // wide * wide
        return k[:, :, last], v[:, :, last]


@fault(FAULTS, "cache other-data layout", "float16")
class prefix_hit_without_the_block_table(OtherOperands):
    """tanishqkumar/ssd PR 22 (issue 23): where a prefix is in the cache, which is where there are
    fewer queries than keys, the whole pool stands in for the keys, and the kernel is not told of
    the table: it reads the pool as if sequences lay in it one after the other. Pages have 16 rows.
    """

    rows, cols, page = 128, 64, 16

    def read(self, k, v):
        if self.at.n >= k.shape[2]:
            return k, v
        return self.in_a_row(k), self.in_a_row(v)

    def in_a_row(self, x: Tensor) -> Tensor:
        (b, h, nk, d), each = x.shape, -(-x.shape[2] // self.page)
        table = torch.randperm(b * each, generator=torch.Generator().manual_seed(22))
        room = x.new_zeros(b, h, each * self.page, d)
        room[:, :, :nk] = x
        pages = room.unflatten(2, (each, self.page)).transpose(1, 2).flatten(0, 1)
        pool = torch.empty_like(pages)
        pool[table] = pages
        rows = pool.transpose(1, 2).flatten(0, 1)[: b * nk]
        return rows.unflatten(0, (b, nk)).transpose(1, 2)
