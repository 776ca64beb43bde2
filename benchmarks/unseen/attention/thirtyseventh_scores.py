"""The thirty-seventh set's faults of precision, of the softmax, of what is not finite, of races,
and of the backward pass (thirtyseventh.py has the others, and says how all were found).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, fp16, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "scores prescaled", "float16")
class product_of_the_scaled_query_in_half(ForwardAlone):
    """pytorch/pytorch PR 60940: the query is divided by √d in half precision, and its product with
    K is a half as well, which overflows where scores are large and is coarse everywhere.
    """

    def product(self, q, k, back):
        return fp16(fp16(q * self.at.scale) @ k.mT)

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


@fault(FAULTS, "scores products", "float16")
class scores_summed_in_half(ForwardAlone):
    """PaddlePaddle/Paddle PR 71919: in fp16 the block attention's Q Kᵀ is accumulated in fp16,
    which overflows; here eight features at a time.
    """

    def product(self, q, k, back):
        total = torch.zeros(1)
        for one, two in zip(q.split(8, -1), k.split(8, -1), strict=True):
            total = fp16(total + one @ two.mT)
        return total


@fault(FAULTS, "prescaled")
class query_times_log2_e_before_the_product(Kernel):
    """fla-org/flash-linear-attention PR 361, comment: 1/ln 2 is multiplied, with the scale, into
    the query before the product, not into the scores: the query is rounded again.
    """

    def product(self, q, k, back):
        return self.at.low(q * (self.at.scale * LOG2_E)) @ k.mT

    def scaled(self, s, rows, cols, back):
        return s


@fault(FAULTS, "scale", "float16")
class scale_in_half(Kernel):
    """microsoft/onnxruntime PR 8477: the factor of the product Q Kᵀ is a half, as the operands
    are, where the product itself is made in fp32.
    """

    rows, cols = 32, 64

    def forward(self):
        self.at.scale = float(torch.tensor(self.at.scale).half())
        return super().forward()


# --- the softmax
def softmax_along(dims):
    """The softmax is along other dimensions of [B, H, N, Nk] than the last."""

    def call(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
             sinks=None):  # fmt: skip  # noqa: ARG001
        share, n, nk = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        k, v = (x.float().repeat_interleave(share, 1) for x in (key, value))
        s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
        hidden = s == -INF
        if dims:
            empty = hidden.all(2, keepdim=True)
            empty = empty.all(0, keepdim=True) if 0 in dims else empty
            s = s.masked_fill(empty, 0.0)
            p = torch.exp(s - torch.logsumexp(s, dims, keepdim=True)).masked_fill(empty, 0.0)
        else:
            p = s.masked_fill(hidden, 0.0).unsqueeze(2).softmax(2).squeeze(2)
            p = p.masked_fill(hidden, 0.0)
        return (p @ v).to(query.dtype)

    return call


FAULTS += [
    # gjylt/DoubleAttentionNet issue 3: the softmax of the attention maps is over channels, which
    # stand for the queries, not over the positions that are then summed over.
    Fault("softmax_over_the_maps", frozenset({"unnormalized"}), softmax_along((2,)),
          "bfloat16", frozenset({"elements"})),
    # PetrochukM/PyTorch-NLP issue 2: the softmax is along dimension 0 of [batch · queries, keys].
    Fault("softmax_over_batch_and_queries", frozenset({"unnormalized", "other-data"}),
          softmax_along((0, 2)), "float32", frozenset({"elements"})),
    # phanideepgampa/stacked-capsule-networks PR 5: the softmax is along a dimension that has one
    # element: every weight is 1.
    Fault("softmax_over_one_element", frozenset({"unnormalized"}), softmax_along(()),
          "bfloat16", frozenset({"elements"})),
]  # fmt: skip


class EmptyTileIsZero(ForwardAlone):
    """A row that has seen nothing yet gets the maximum 0, and keeps it; from the last keys on."""

    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]

    def maximum(self, m, s):
        new = super().maximum(m, s)
        return torch.where(new == -INF, 0.0, new)


@fault(FAULTS, "maximum", "float16")
class zero_of_a_masked_tile_stays_the_maximum(EmptyTileIsZero):
    """Dao-AILab/flash-attention PR 2083 and issue 2082: where the first tile, which is the last
    one, is all masked, the row's maximum is set to 0 against NaN and stored so; scores below 0
    never bring it down, and their weights vanish.
    """

    rows, cols = 128, 32


@fault(FAULTS, "maximum", "float16")
class clamp_of_an_empty_row_is_kept(EmptyTileIsZero):
    """chiendb97/oasr PR 101: what is put in place of an empty row's maximum, so that −∞ − −∞ is no
    NaN, enters the running maximum, which is no longer the row's.
    """

    rows, cols = 64, 16


@fault(FAULTS, "maximum non-finite", "float16")
class exponentials_of_the_scores_themselves(ForwardAlone):
    """prescient-design/e3tools PR 3: the softmax in attention overflows, as one does whose maximum
    is not taken off.
    """

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return torch.zeros_like(m), l * torch.exp2(torch.where(m == -INF, 0.0, m)), acc

    def maximum(self, m, s):
        return m


# --- what lies past the end
@fault(FAULTS, "nan-escapes non-finite ragged")
class rows_past_the_allocation(ForwardAlone):
    """NVIDIA/cudnn-frontend PR 861: the view of K and V is rounded up to whole blocks, so that what
    lies behind them in memory is loaded: it may be NaN, and 0 · NaN enters O.
    """

    def load_key(self, name, x, part):
        return load(x, part, math.nan)


# --- races
@fault(FAULTS, "rescale unnormalized unstable")
class statistics_read_before_they_are_stored(ForwardAlone):
    """1bit-MONSTER/1bit-MONSTER issue 368: one warp stores m and l, and all read them without a
    barrier: three of four have those of the tile before.
    """

    cols = 32

    def row(self, rows):
        self.memory.pop("state", None)
        return super().row(rows)

    def online(self, m, l, acc, s, v, rows, cols):
        before, self.memory["state"] = self.memory.get("state"), (m, l)
        if before is not None:
            late = (torch.arange(m.shape[2]) % 4 > 0)[:, None]
            m, l = (torch.where(late & (y > -INF), y, x)
                    for x, y in zip((m, l), before, strict=True))  # fmt: skip
        return super().online(m, l, acc, s, v, rows, cols)


@fault(FAULTS, "unstable other-data")
class query_cleared_while_it_is_read(ForwardAlone):
    """tile-ai/tilelang issue 2699: the pass that places barriers does not see the bulk store that
    clears shared memory: some threads read their part of Q when it is zero already.
    """

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        late = torch.rand(found.shape[2], found.shape[3] // 8) < 0.05
        return found.masked_fill(late.repeat_interleave(8, -1), 0.0)


@fault(FAULTS, "unstable other-data non-finite", "float16")
class tile_decoded_without_a_barrier(ForwardAlone):
    """ashalliants/ninfer-3090 PR 43: a thread waits for its own copies and then decodes what all of
    them copied: some rows of the tile of K are still the tile before's.
    """

    cols = 32

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "k" or part.start < self.cols:
            return found
        before = load(x, slice(part.start - self.cols, part.start))
        late = (torch.rand(self.cols // 4) < 0.25).repeat_interleave(4)[:, None]
        return torch.where(late, before, found)


@fault(FAULTS, "unstable grad-tail")
class key_gradients_added_up_without_atomics(Kernel):
    """speedinghzl/CCNet issue 62: the backward pass adds to gradients from several threads without
    atomicAdd: of two sums that meet one is lost.
    """

    rows, cols = 32, 64

    def add(self, name, total, part, rows, cols):
        found = super().add(name, total, part, rows, cols)
        if name not in ("dk_acc", "dv_acc"):
            return found
        lost = torch.rand(total.shape[2]) < 0.1
        return torch.where(lost[:, None], total, found)
