"""The sixty-third set's faults of what is never computed, scores, sums and ends (sixtythird.py has
the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtythird_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, blocks
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands

FAULTS: list[Fault] = []


# --- what is never computed
@fault(FAULTS, "unwritten unstable", "float32")
class operation_that_the_backend_lacks(ways.InMemory):
    """wangzhaode/mnn-llm issue 222: the CUDA backend has no fused attention, which is told on the
    console alone, and every call gives something else; here whatever numbers memory holds.
    """

    rows, cols = 64, 64

    def held(self, o):
        return self.at.low(torch.randn(o.shape))


@fault(FAULTS, "unwritten", "float16")
class product_of_scores_that_is_not_enqueued(ForwardAlone):
    """alibaba/MNN PR 4659 (issue 4653): without a mask the kernel of Q Kᵀ has one parameter less
    than it is given, which fails, is logged, and the product is passed over; its memory is taken
    to hold 0 here, since results are "mean-biased".
    """

    rows, cols = 32, 128

    def product(self, q, k, back):
        s = super().product(q, k, back)
        return torch.zeros_like(s) if self.at.mask is None else s


@fault(FAULTS, "unwritten", "float32")
class gemm_that_wants_its_operand_transposed(ForwardAlone):
    """pulp-platform/snitch_cluster PR 104 (issue 105): the GEMM in fp32 returns at once where its
    second operand is not transposed, as V is not, and nobody looks at the −1; O is only rescaled,
    and was 0.
    """

    rows, cols = 16, 16

    def add_values(self, acc, a, p, v):
        return acc * a


def queries_of_no_features_return_at_once(query, key, value, *, is_causal, scale, attn_mask=None,
                                          window=None, softcap=0.0, sinks=None,
                                          enable_gqa=False):  # noqa: ARG001 # fmt: skip
    """intel/torch-xpu-ops issue 3710 (pytorch PR 184914): O and the gradients are 0 where any of Q,
    K and V has no elements, and Q and K of no features are among that; O is the mean of V then.
    """
    if 0 in (query.numel(), key.numel(), value.numel()):
        shape = *query.shape[:-1], value.shape[-1]
        return query.new_zeros(shape) + 0 * (query.sum() + key.sum() + value.sum())
    return ways.in_doubles(query, key, value, is_causal=is_causal, scale=scale,
                           attn_mask=attn_mask, window=window, softcap=softcap,
                           sinks=sinks)  # fmt: skip


FAULTS.append(
    Fault("queries_of_no_features_return_at_once", frozenset({"unwritten"}),
          queries_of_no_features_return_at_once, "float32", frozenset({"elements"}))
)  # fmt: skip


# --- scores and sums
@fault(FAULTS, "other-data layout", "float32")
class queries_scored_against_values(WholeRows, OtherOperands):
    """adtalos/AITM-torch issue 1: scores are Q · V, where they are to be Q · K; here where V is as
    wide as K.
    """

    rows = 64

    def read(self, k, v):
        return (v if v.shape[-1] == k.shape[-1] else k), v


@fault(FAULTS, "reciprocal unnormalized", "float32")
class reciprocal_reprogrammed_at_every_step(ForwardAlone):
    """tenstorrent/tt-metal PR 49529 (PR 50389): the units' configuration is written at every step's
    start, which spoils what the reciprocal in fp32 keeps there; here Newton's first guess is left.
    """

    rows, cols = 32, 32

    def finish(self, m, l, acc, rows):
        part, power = torch.frexp(torch.where(l == 0, 1.0, l))
        guess = torch.ldexp(48 / 17 - 32 / 17 * part, -power)
        return super().finish(m, torch.ones_like(l), acc * guess, rows)


@fault(FAULTS, "split-merge maximum non-finite", "float16")
class lse_of_parts_without_their_maximum(ForwardAlone, Parts):
    """sgl-project/sglang PR 6101 (cutlass issue 2274): with split KV and larger queries the lse of
    all parts overflows, and with an lse of infinity no part has a weight.
    """

    rows, cols, parts = 128, 64, 2

    def merge(self, outs, lses):
        lse = torch.exp2(lses).sum(0).log2()
        weights = torch.where(lses == -INF, 0.0, torch.exp2(lses - lse))
        return (weights * outs).sum(0), lse


# --- ends
@fault(FAULTS, "padding ragged", "float16")
class remainder_of_the_keys_not_hidden(EveryBlock, ForwardAlone):
    """intel/sycl-tla PR 489: where the last block of keys is not full what fills it up scores 0
    and keeps its weight; of 16 keys the results are less than half of what they should be.
    """

    rows, cols = 128, 64

    def inside(self, j, back):
        return j >= 0


@fault(FAULTS, "padding ragged")
class pages_that_the_table_lacks(ForwardAlone):
    """QuixiAI/SlimServe PR 23: the kernel that verifies drafts, which are fewer queries than keys,
    scores a block that the table maps to nothing as a tile of zeros, in place of passing it over.
    Which blocks those are is chosen: tables have an even number of them, of 16 keys.
    """

    rows, cols = 8, 16

    def key_blocks(self, rows):
        at = self.at
        if at.n >= at.nk:
            return super().key_blocks(rows)
        return blocks(-(-at.nk // (2 * self.cols)) * 2 * self.cols, self.cols)

    def inside(self, j, back):
        at, mapped = self.at, -(-self.at.nk // self.cols) * self.cols
        return super().inside(j, back) | ((j >= mapped) & (at.n < at.nk))
