"""The sixteenth set's faults of precision and of the backward pass (sixteenth.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks, cut, fp16, load
from torch import Tensor

FAULTS: list[Fault] = []


def tf32(x: Tensor) -> Tensor:
    """Ten bits of mantissa, rounded to nearest, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


# --- precision
@fault(FAULTS, "weights weights-disagree out grad-scores probabilities grad-stored")
class conversions_by_cutting(Kernel):
    """ROCm/flash-attention PR 78: fp32 becomes bf16 by cutting its lower half off, wherever the
    kernels convert.
    """

    def forward(self):
        self.at.low = cut
        return super().forward()

    def backward(self):
        return tuple(cut(grad) for grad in super().backward())


@fault(FAULTS, "operand weights products probabilities grad-scores", "float32")
class products_in_tf32_by_default(Kernel):
    """triton-lang/triton issue 1671: fp32 operands go through tf32, as the products allow it by
    default.
    """

    def load_key(self, name, x, part):
        return tf32(load(x, part))

    def load_query(self, name, x, part):
        return tf32(load(x, part))

    def add_values(self, acc, a, p, v):
        return acc * a + tf32(p) @ v

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, tf32(p), tf32(ds)


@fault(FAULTS, "backward-scores backward-weights")
class scores_again_through_fp16(Kernel):
    """NVIDIA/cudnn-frontend issue 744: the backward pass recomputes scores with a rounding to fp16,
    before the scale.
    """

    def product(self, q, k, back):
        s = super().product(q, k, back)
        return fp16(s) if back else s


@fault(FAULTS, "grad-scores prescaled")
class ds_rounded_before_and_after_the_scale(Kernel):
    """NVIDIA/cudnn-frontend PR 1046: dS is narrowed, multiplied by the scale, and narrowed again,
    before the products with it.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, p, self.at.low(ds * self.at.scale) / self.at.scale


@fault(FAULTS, "max-gradient")
class gradient_through_the_maximum(Kernel):
    """jax-ml/jax PR 2260: differentiation goes through the row maximum that is taken off, and what
    ought to cancel there, the row sum of the rounded dS, goes to the largest score.
    """

    def grad_scores(self, p, dp, delta, slope):
        low = self.at.low
        every, ds = p, low(p * (dp - delta))
        if self.at.sinks is not None:
            sink = torch.exp2(self.at.sinks.view(1, -1, 1, 1) * LOG2_E - self.at.lse)
            every, ds = torch.cat([p, sink], -1), torch.cat([ds, low(-sink * delta)], -1)
        top = (every == every.amax(-1, keepdim=True)).float()
        ds = ds - ds.sum(-1, keepdim=True) * top / top.sum(-1, keepdim=True)
        return ds[..., : p.shape[-1]] * slope

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        q, k, do, p, ds = self.again(slice(0, at.n), slice(0, at.nk), "both")
        dk, dv = ds.mT @ q * at.scale, at.low(p).mT @ do
        return ds @ k * at.scale, self.group(dk), self.group(dv)


# --- what the backward pass starts from
@fault(FAULTS, "lse-other backward-weights")
class lse_of_the_weights(Kernel):
    """pytorch/pytorch PR 124097: lse for the backward pass is taken after the softmax, of the
    weights, in the place of the scores.
    """

    def forward(self):
        at, (out, lse) = self.at, super().forward()
        s = self.scores(at.q, at.k, slice(0, at.n), slice(0, at.nk), False)
        p = self.weights_again(s, lse)
        return out, torch.logsumexp(p, -1, keepdim=True) * LOG2_E


@fault(FAULTS, "no-delta lse-other backward-weights other-data")
class statistics_at_larger_tiles_offsets(Kernel):
    """Dao-AILab/flash-attention PR 2337: the preprocessing kernel finds a sequence's padded offset
    by tiles of 128 rows, and the main one, which reads δ and lse there, by tiles of 64.
    """

    def read(self, x, fill):
        b, heads, n, _ = x.shape
        whole = load(x, slice(0, -(-n // 128) * 128), fill)
        buffer = torch.zeros(heads, b * (n + 256), 1)
        for i in range(b):
            at = i * (n + 128) // 128 * 128
            buffer[:, at : at + whole.shape[2]] = whole[i]
        return torch.stack([buffer[:, at : at + n] for at in
                            (i * (n + 64) // 64 * 64 for i in range(b))])  # fmt: skip

    def delta(self, do, o):
        self.at.lse = self.read(self.at.lse, INF)
        return self.read(super().delta(do, o), 0.0)


@fault(FAULTS, "exp-of-lse non-finite nan-escapes ragged", "float16")
class lse_of_the_last_row_past_the_end(Kernel):
    """NVIDIA/cudnn-frontend issue 1072: if lse is far below zero dK and dV are NaN, where queries
    do not fill a tile; here rows past the end, of zeros, have the last row's lse.
    """

    rows = 80

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols).clone()
        found[..., max(0, self.at.n - rows.start) :, :] = found.dtype == torch.bool
        return found

    def backward(self):
        at = self.at
        last = at.lse[:, :, -1:].expand(-1, -1, -at.n % self.rows, -1)
        at.lse = torch.cat([at.lse, last], 2)
        return super().backward()


@fault(FAULTS, "no-delta lse-gradient")
class each_ring_steps_own_out(Kernel):
    """tenstorrent/tt-metal issue 53205: each step of the ring's backward pass, here one of two,
    takes δ from its own keys' O, and the gradient by way of lse is dropped.
    """

    def delta(self, do, o):
        at, n, self.each = self.at, slice(0, self.at.n), []
        self.half = -(-at.nk // (2 * self.cols)) * self.cols
        for cols in (slice(0, self.half), slice(self.half, max(at.nk, self.half + 1))):
            s = self.scores(at.q, load(at.k, cols), n, cols, True)
            p = torch.softmax(s / LOG2_E, -1).nan_to_num(0)
            self.each.append((do * (p @ load(at.v, cols))).sum(-1, keepdim=True))
        return self.each[0]

    def again(self, rows, cols, which):
        self.at.delta = self.each[int(cols.start >= self.half)]
        return super().again(rows, cols, which)


# --- pairs that the backward pass sees
@fault(FAULTS, "backward-mask causal-mask")
class diagonal_from_the_bits_of_another_layout(Kernel):
    """Dao-AILab/flash-attention issue 1915: on the way back the diagonal's tiles are masked by
    bits, whose number is told for two columns of every eight, where a thread has all of them.
    """

    def causal(self, i, j, back):
        if not back:
            return super().causal(i, j, back)
        start = j // self.cols * self.cols
        limit = i + 1 - start
        bits = limit // 8 * 2 + (limit % 8).clamp_max(2)
        return (limit >= self.cols) | ((limit > 0) & (j - start < bits))


@fault(FAULTS, "window backward-mask causal-mask")
class windows_gradients_of_all_pairs(Kernel):
    """meta-pytorch/MSLK PR 263: the backward pass is causal only if there is no window, and knows
    of no window.
    """

    def backward(self):
        if self.at.window is not None:
            self.at.causal, self.at.window = False, None
        return super().backward()


@fault(FAULTS, "grad-tail backward-mask causal-mask", "float16")
class dq_without_the_end_of_the_diagonal(Kernel):
    """jax-ml/jax PR 25647: for blocks of unlike sizes the causal bound of the backward pass is
    wrong; here dQ's loop over keys ends with the block where that of the queries begins.
    """

    cols = 32

    def query_gradient(self, rows):
        dq = torch.zeros_like(load(self.at.q, rows))
        for cols in self.key_blocks(rows):
            if self.at.causal and cols.start > rows.start:
                break
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq = dq + ds @ k
        return dq * self.at.scale


@fault(FAULTS, "backward-mask grad-tail ragged padding")
class keys_end_where_queries_do_in_dq(Kernel):
    """hao-ai-lab/FastVideo PR 925: the kernel of dQ hides what lies past a block of keys by the
    size of the block of queries.
    """

    size = None

    def again(self, rows, cols, which):
        self.size = min(self.at.n - rows.start, self.rows) if which == "queries" else None
        return super().again(rows, cols, which)

    def inside(self, j, back):
        if not back or self.size is None:
            return super().inside(j, back)
        return j % self.cols < self.size


@fault(FAULTS, "grad-tail unwritten query-tail")
class query_blocks_by_a_stale_factor(Kernel):
    """Dao-AILab/flash-attention PR 2645: the backward pass goes by a list of blocks of 128 queries,
    two tiles each, and the kernel in the cache was compiled for one tile a block.
    """

    def query_blocks(self, cols):
        every = blocks(self.at.n, 2 * self.rows)
        every = [r for r in every if not self.at.causal or r.stop > cols.start]
        return [slice(r.start // 2, r.start // 2 + self.rows) for r in every]

    def query_gradient(self, rows):
        dq = torch.zeros_like(load(self.at.q, rows))
        for cols in self.key_blocks(rows):
            if rows in self.query_blocks(cols):
                _, k, _, _, ds = self.again(rows, cols, "queries")
                dq = dq + ds @ k
        return dq * self.at.scale


# --- buffers, registers
@fault(FAULTS, "grad-tail")
class ds_always_in_the_first_stage(Kernel):
    """NVIDIA/cudnn-frontend PR 395: dS is stored in the first of two stages, always, and read from
    both in turn; the second is as it was, here of zeros.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        queries = which == "queries"
        every = self.key_blocks(rows) if queries else self.query_blocks(cols)
        stage = every.index(cols if queries else rows) % 2
        return q, k, do, p, torch.zeros_like(ds) if stage else ds


@fault(FAULTS, "other-data layout", "float16")
class dv_in_the_registers_of_dks_operand(Kernel):
    """ROCm/rocm-libraries PR 5915: two registers of the query, as dK's operand, hold a value of dV
    too: four of its features are dO's.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        if which == "keys":
            q = torch.cat([q[..., :8], do[..., 8:12], q[..., 12:]], -1)
        return q, k, do, p, ds


@fault(FAULTS, "grad-tail grad-accumulator", "float16")
class sums_lost_to_scratch_registers(Kernel):
    """ROCm/rocm-libraries PR 5991: registers of some columns of dK and dV serve as scratch in the
    loop, which breaks what is carried from one block of queries to the next.
    """

    def add(self, name, total, part, rows, cols):
        found = super().add(name, total, part, rows, cols)
        if name != "dq_acc":
            found[..., 16:24] = part[..., 16:24]
        return found


@fault(FAULTS, "other-data layout grad-tail", "float16")
class dv_staged_in_half_its_room(Kernel):
    """tile-ai/tilelang PR 930: the buffer where dV is staged has as many rows as a block of queries
    has, here half of its own; the others lie where dK is staged before they are stored.
    """

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        room = dv[0, 0].numel() // 2
        over = dk.flatten(2)[..., :room]
        staged = torch.cat([dv.flatten(2)[..., :room], over], -1)
        rest = dv.flatten(2)[..., staged.shape[-1] :]
        return dk, torch.cat([staged, rest], -1).view_as(dv)


@fault(FAULTS, "unstable group-sum")
class group_added_up_in_a_race(Kernel):
    """tile-ai/tilelang PR 1100: gradients of the heads of a group are added to memory with no order
    between reads and writes: some of them are lost, sixteen rows at a time.
    """

    def group(self, grad):
        each = grad.unflatten(1, (-1, self.at.groups)).unbind(2)
        total = each[0]
        for more in each[1:]:
            lost = torch.rand(-(-grad.shape[2] // 16)) < 0.2
            lost = lost.repeat_interleave(16)[: grad.shape[2], None]
            total = torch.where(lost, total, total + more)
        return total
