"""The sixty-fifth set's faults of captured graphs, splits and the way back (sixtyfifth.py has the
others, and says what they are for).
"""

# ruff: noqa: D102, N801 - a fault is a class of its name

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtyfifth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows

FAULTS: list[Fault] = []


# --- graphs that are captured once and replayed
@fault(FAULTS, "other-data")
class graph_reads_where_the_metadata_lay(ways.Served):
    """sgl-project/sglang PR 27664: every replay makes a new object of the metadata, and what the
    graph captured goes on reading where the one of capture lay. What lies there is chosen: the
    table of the step before, when every request stood one row further down in the batch.
    """

    rows, cols = 16, 64

    def changed(self, x):
        return x.roll(1, 0) if self.decodes() else x


@fault(FAULTS, "cache", "float16")
class new_rows_in_the_slots_of_the_capture(ways.Served):
    """weicj/vLLM-2080Ti-Definitive PR 183: replays of FULL graphs use the metadata and the mapping
    of slots of capture, and not the live request's. Here the mapping alone is old, by a step of as
    many tokens: new rows overwrite those in front of them, and their own slots hold zeros.
    """

    rows, cols = 64, 64

    def changed(self, x):
        if not self.decodes():
            return x
        n, past = self.at.n, self.at.nk - self.at.n
        first, found = max(past - n, 0), x.clone()
        found[:, :, past:] = 0
        found[:, :, first : first + n] = x[:, :, past:]
        return found


@fault(FAULTS, "key-tail weights-disagree unnormalized", "float16")
class values_multiplied_up_to_the_captured_length(ForwardAlone, WholeRows):
    """ikawrakow/ik_llama.cpp PR 2096: whether a captured graph still fits is told by the shapes of
    results, and that of V times the softmax does not have the cache's length in it: the old length,
    padded to 32 here, stays in the kernel, whereas scores and softmax go on to the new one.
    """

    rows = 32

    def add_values(self, acc, a, p, v):
        n, nk = self.at.n, self.at.nk
        captured = (nk - 1) // 32 * 32 if n < nk else nk
        return acc * a + self.at.low(p[..., :captured]) @ v[:, :, :captured]


# --- splits
@fault(FAULTS, "split-merge", "float16")
class splits_as_long_as_all_up_to_them(ForwardAlone):
    """tile-ai/TileOPs PR 728, review: the kernel of a split asks how long that split is, and is
    handed the sums of all lengths up to it: each but the first goes on into those behind it, whose
    keys so count more than once. It ends with the cache here.
    """

    rows, cols, splits = 32, 16, 4

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        each = max(1, -(-len(every) // self.splits))
        outs, lses = [], []
        for number, first in enumerate(range(0, len(every), each)):
            state = self.begin(q, number == 0)
            for cols in every[first : first + (number + 1) * each]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
            m, l, acc = state
            outs.append(acc / torch.where(l == 0, 1.0, l))
            lses.append(m + l.log2())
        every_lse = torch.stack(lses)
        top = every_lse.amax(0)
        weights = torch.exp2(every_lse - torch.where(top == -INF, 0.0, top))
        total = weights.sum(0)
        acc = (weights * torch.stack(outs)).sum(0)
        return self.finish(top, total, acc, rows)


# --- the way back
@fault(FAULTS, "backward-mask")
class lengths_in_use_not_told_on_the_way_back(Kernel):
    """sgl-project/sgl-flash-attn PR 29 (flash-attention PR 2167): the backward kernel errs where
    lengths in use are given beside those of the buffers. Here a buffer of keys has 128 rows, or a
    multiple, and the backward pass goes on to its end, where its first rows lie once more.
    """

    rows, cols = 64, 128

    def inside(self, j, back):
        return j < (-(-self.at.nk // 128) * 128 if back else self.at.nk)

    def load_key(self, name, x, part):
        if not name.startswith("b_"):
            return super().load_key(name, x, part)
        return x[:, :, torch.arange(part.start, part.stop) % x.shape[2]]
