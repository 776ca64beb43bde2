"""The fifty-third set's faults of scores, sums and what is not finite (fiftythird.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftythird_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- scores
@fault(FAULTS, "softcap mask")
class changes_of_the_scores_not_passed_on(Kernel):
    """pytorch/torchtitan PR 3789: FlexAttention's wrapper takes `score_mod`, and does not pass it
    to the function: what changes scores is lost, here the cap and a bias; what hides pairs is not,
    as it is in the block mask.
    """

    rows, cols = 128, 64

    def forward(self):
        self.at.softcap = 0.0
        return super().forward()

    def bias(self, s, mask, back):
        return s.masked_fill(mask == -INF, -INF)


@fault(FAULTS, "operand", "float16")
class queries_and_keys_in_int8_by_block(ForwardAlone):
    """Comfy-Org/ComfyUI PR 15298: SageAttention has queries and keys in eight bits, by one scale
    for 32 queries and one for 64 keys, which channels with outliers corrupt, as a partial rotary
    embedding makes them. Keys are not made smooth before that here.
    """

    rows, cols = 128, 64

    def load_query(self, name, x, part):
        return ways.in_int8(super().load_query(name, x, part), 32)

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return ways.in_int8(found, 64) if name == "k" else found


# --- maxima and sums
@fault(FAULTS, "maximum mask-finite")
class row_below_the_sentinel_gives_zeros(ForwardAlone):
    """flashinfer-ai/flashinfer issue 4451: maxima begin at −5·10⁴ and not at −∞, and hidden scores
    are that, before the scale; a row whose scores, of one key or more, lie below it keeps it for
    its maximum, and is taken for a row without keys: zeros, and an lse of about −5·10⁴.
    """

    rows, cols = 64, 128

    def sentinel(self) -> float:
        return -5e4 * LOG2_E * (1.0 if self.at.softcap else self.at.scale)

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        if self.at.sinks is not None:
            return m, l, acc
        return torch.full_like(m, self.sentinel()), l + 1, acc

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        return torch.where(found == -INF, self.sentinel(), found)

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        none = m <= self.sentinel()
        return o.masked_fill(none, 0.0), torch.where(none, -5e4 + l.log2(), lse)


@fault(FAULTS, "unnormalized non-finite nan-escapes", "float32")
class row_sum_without_the_blocks_own(ForwardAlone):
    """PaddleJitLab/CUDATutorial issue 69: the row sum is what it was, rescaled, without the block's
    own sum, which seems to make no difference: it is 0 throughout, O is divided by it block by
    block as in FlashAttention-1, and the comparison's `fmaxf` takes NaN for no difference.
    """

    rows, cols = 32, 32

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe), torch.exp2(m - safe)
        total = l * a
        return new, total, self.add_values(acc * l, a, p, v) / total

    def finish(self, m, l, acc, rows):
        return self.at.low(acc), m + l.log2()


# --- what is not finite
@fault(FAULTS, "masked-row non-finite nan-escapes")
class request_without_keys_divided_by_nothing(ForwardAlone):
    """flashinfer-ai/flashinfer PR 363: for a request whose cache is empty decoding gives something
    else than prefill, which gives zeros: sums begin at 0, nothing is added, and O is divided.
    """

    rows, cols = 16, 32

    def finish(self, m, l, acc, rows):
        return self.at.low(acc / l), m + l.log2()


@fault(FAULTS, "non-finite nan-escapes ragged", "float16")
class values_past_the_end_as_memory_was(ForwardAlone):
    """flashinfer-ai/flashinfer issue 1046 (PR 1029): rows past the last key are not cleared in the
    shared memory that values are copied to, and what they held before, NaN of an operation that has
    nothing to do with it, is multiplied by weights of 0. There are two buffers, and from the third
    block on they hold values of the blocks before, which do no harm.
    """

    rows, cols, buffers = 64, 128, 2

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "v" or part.stop <= self.at.nk or part.start >= self.buffers * self.cols:
            return found
        past = torch.arange(part.start, part.stop) >= self.at.nk
        return found.masked_fill(past[:, None], math.nan)
