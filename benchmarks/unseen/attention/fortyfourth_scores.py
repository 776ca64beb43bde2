"""The half of the forty-fourth set's faults that concern scores, splits, launches and the way back
(fortyfourth.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortyfourth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, load
from benchmarks.unseen.attention.fortyfirst_kernel import Cascade
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import RowAtOnce
from torch import Tensor

FAULTS: list[Fault] = []


# --- shared memory
@fault(FAULTS, "weights-disagree unnormalized")
class scores_past_the_room_for_them(RowAtOnce):
    """antirez/ds4 issue 803, PR 872: there is room for 512 scores, here 128, and nothing looks how
    many there are: later ones lie where the block's partial maxima and then its partial sums are
    put, and are those when they are read again.
    """

    rows, cols, room, threads = 16, 32, 128, 64

    @staticmethod
    def reduced(parts: Tensor, op) -> Tensor:
        """What a tree of one number a thread leaves behind; the first is the result."""
        wide = parts.shape[-1] // 2
        while wide:
            low = op(parts[..., :wide], parts[..., wide : 2 * wide])
            parts = torch.cat([low, parts[..., wide:]], -1)
            wide //= 2
        return parts

    def over(self, s: Tensor, parts: Tensor) -> Tensor:
        wide = min(max(s.shape[-1] - self.room, 0), self.threads)
        last = self.room + self.threads
        return torch.cat([s[..., : self.room], parts[..., :wide], s[..., last:]], -1)

    def row(self, rows):
        s, v = self.all_scores(rows)
        m, l, _ = self.begin(load(self.at.q, rows))
        lanes = range(self.threads)
        none = torch.full_like(s[..., : self.threads], -INF)
        whole = torch.cat([s, none], -1)
        tops = torch.stack([whole[..., t :: self.threads].amax(-1) for t in lanes], -1)
        tops = self.reduced(tops, torch.maximum)
        new = torch.maximum(m, tops[..., :1])
        safe = torch.where(new == -INF, 0.0, new)
        p = torch.exp2(self.over(s, tops) - safe)
        whole = torch.cat([p, none.fill_(0)], -1)
        sums = torch.stack([whole[..., t :: self.threads].sum(-1) for t in lanes], -1)
        sums = self.reduced(sums, torch.add)
        l = l * torch.exp2(m - safe) + sums[..., :1]
        return self.finish(new, l, self.at.low(self.over(p, sums)) @ v, rows)


# --- parts of the keys
@fault(FAULTS, "split-merge masked-row non-finite nan-escapes")
class splits_that_are_hidden_or_empty(ForwardAlone, Cascade):
    """ROCm/rocMLIR PR 2371: where all that a split has seen is hidden, −∞ is taken off −∞ in its
    softmax, and a split without keys divides 0 by 0.
    """

    rows, cols, parts = 64, 32, 3

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "split-merge", "float16")
class maxima_and_sums_that_no_thread_loads(ForwardAlone):
    """ggml-org/llama.cpp PR 13852: of the maxima and sums of the parts each thread of the kernel
    that merges loads one number, and there are as many threads as the head has features: with more
    parts than half of that the last ones' are what the shared memory held, here 0.
    """

    rows, cols = 48, 16

    def row(self, rows):
        q, states = self.load_query("q", self.at.q, rows), []
        for number, cols in enumerate(self.key_blocks(rows)):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            m, l, acc = self.begin(q, number == 0)
            states.append(self.online(m, l, acc, s, v, rows, cols))
        m, l, acc = (torch.stack(x) for x in zip(*states, strict=True))
        m[q.shape[-1] // 2 :], l[q.shape[-1] // 2 :] = 0, 0
        top = m.amax(0)
        w = torch.exp2(m - torch.where(top == -INF, 0.0, top))
        return self.finish(top, (w * l).sum(0), (w * acc).sum(0), rows)


# --- what is never written
@fault(FAULTS, "unwritten", "float16")
class window_that_was_not_launched(ways.NotLaunched):
    """gittensor-ai-lab/sparkinfer PR 724: the kernel for windows needs more shared memory than is
    there without asking, which is asked for on the first device alone; where its launch fails the
    caller hears that it succeeded, and takes what the buffer held.
    """

    def fails(self):
        return self.at.window is not None


@fault(FAULTS, "unwritten")
class four_heads_to_a_key_head_not_launched(ways.NotLaunched):
    """gittensor-ai-lab/sparkinfer PR 713: as in PR 724 the kernel for four query heads to a key
    head; here the buffer held numbers of another layer.
    """

    def fails(self):
        return self.at.groups == 4

    def held(self, o):
        chance = torch.Generator().manual_seed(713)
        return self.at.low(torch.randn(o.shape, generator=chance))


@fault(FAULTS, "unwritten unstable", "float32")
class tiles_that_no_program_draws(Kernel):
    """ROCm/aotriton PR 181: programs draw the numbers of tiles from a counter whose handing over is
    a race on one device: some tiles are drawn by none, and O and lse stay what they were, here 0.
    It is so for causal calls.
    """

    rows, cols = 32, 64

    def row(self, rows):
        o, lse = super().row(rows)
        missed = ways.late(o, 0.1) & torch.tensor(bool(self.at.causal))
        return o.masked_fill(missed, 0.0), lse.masked_fill(missed, 0.0)


# --- the way back
@fault(FAULTS, "unstable grad-tail", "float16")
class key_gradients_added_up_by_many_at_once(Kernel):
    """AI-Hypercomputer/maxdiffusion PR 487, review: dK and dV are added up over blocks of queries
    and over heads in one scratch, and the grid's dimensions are declared as ones that may go on at
    once: now and then what a block adds is lost.
    """

    rows, cols = 32, 64

    def add(self, name, total, part, rows, cols):
        if name == "dv_acc":
            self.memory["lost"] = ways.late(part, 0.1)
        if name != "dq_acc":
            part = part.masked_fill(self.memory["lost"], 0.0)
        return super().add(name, total, part, rows, cols)


@fault(FAULTS, "backward-mask")
class first_block_of_queries_without_keys(Kernel):
    """NVIDIA/cudnn-frontend PR 785 (sparse attention on SM90), the first of three: on the way back
    the first block of keys is gone through whatever their number, and for a query with none of them
    keys are gathered that nobody chose; here those of the block itself.
    """

    def hide(self, s, rows, cols, back):
        found, mask = super().hide(s, rows, cols, back), self.at.mask
        if not back or cols.start or mask is None or mask.dtype != torch.bool:
            return found
        full = mask.expand(*mask.shape[:-2], self.at.n, self.at.nk)
        none = ~load(full.any(-1, keepdim=True), rows, 1)
        return torch.where(none & self.seen(rows, cols, back), s, found)
