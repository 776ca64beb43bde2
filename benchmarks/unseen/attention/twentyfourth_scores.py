"""The twenty-fourth set's faults of precision and the backward pass (twentyfourth.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import (
    INF,
    LOG2_E,
    Kernel,
    bf16,
    blocks,
    e4m3,
    fp16,
    load,
)
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


def saturated(x):
    """Codes of e4m3, the largest ones in place of what exceeds them."""
    return e4m3(x.clamp(-448, 448))


# --- precision
@fault(FAULTS, "operand")
class codes_from_256_on_are_the_largest(ForwardAlone):
    """sgl-project/sglang PR 40581: the cast to e4m3 takes the last exponent for infinity's, and
    gives 448 for all from 256 on; the power of two that scales 32 numbers leaves their largest
    there.
    """

    def load_key(self, name, x, part):
        read = []
        for group in super().load_key(name, x, part).split(32, -1):
            top = group.abs().amax(-1, keepdim=True).clamp_min(2.0**-60)
            scale = torch.exp2((top / 448).log2().ceil())
            codes = e4m3(group / scale)
            codes = torch.where(codes.abs() >= 256, 448 * codes.sign(), codes)
            read.append(codes * scale)
        return torch.cat(read, -1)


@fault(FAULTS, "accumulator row-sum products")
class sums_of_blocks_through_e4m3(ForwardAlone):
    """vllm-project/vllm-gaudi PR 1419: what blocks of keys give, weights times values and sums of
    weights, is added up by a matrix product in FP8, which casts both.
    """

    def add_row(self, l, a, p):
        return l * a + saturated(p.sum(-1, keepdim=True))

    def add_values(self, acc, a, p, v):
        return acc * a + saturated(self.at.low(p) @ v)


@fault(FAULTS, "accumulator row-sum")
class row_sum_and_output_grow_in_bf16(ForwardAlone):
    """tenstorrent/tt-metal issue 57095: scores are in fp32, and the row sum, which is packed with
    O, in bf16 as O is, after every block of keys.
    """

    cols = 32

    def add_row(self, l, a, p):
        return bf16(super().add_row(l, a, p))

    def add_values(self, acc, a, p, v):
        return bf16(super().add_values(acc, a, p, v))


@fault(FAULTS, "prescaled operand")
class query_scaled_and_rounded_to_bf16(ForwardAlone):
    """antirez/h3.c issue 3: the query is scaled in fp32 and rounded to bf16 once more, though it
    lies in memory for floats and is multiplied in fp32.
    """

    def load_query(self, name, x, part):
        return bf16(super().load_query(name, x, part) * self.at.scale)

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


@fault(FAULTS, "scores weights-normalized weights", "float16")
class everything_between_the_products_in_half(ForwardAlone):
    """pytorch/TensorRT PR 4385: attention that has been taken apart: what lies between its two
    products is in fp16, scores and the weights that are divided.
    """

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        every = self.key_blocks(rows)
        m, l, acc = self.begin(q)
        found = []
        for cols in every:
            k = self.load_key("k", self.at.k, cols)
            found.append(fp16(self.scores(q, k, rows, cols, False) / LOG2_E) * LOG2_E)
        top = torch.cat([m, *found], -1).amax(-1, keepdim=True)
        safe = torch.where(top == -INF, 0.0, top)
        weights = [torch.exp2(s - safe) for s in found]
        l = l * torch.exp2(m - safe) + sum(p.sum(-1, keepdim=True) for p in weights)
        whole = torch.where(l == 0, 1.0, l)
        for p, cols in zip(weights, every, strict=True):
            acc = acc + fp16(p / whole) @ self.load_key("v", self.at.v, cols)
        return self.at.low(acc), top + l.log2()


@fault(FAULTS, "scores products non-finite", "float16")
class product_in_half_until_the_softmax_is_done(ForwardAlone):
    """pytorch/pytorch PR 165961: MPS casts Q Kᵀ back to fp16 before it is scaled, and goes on from
    there.
    """

    def product(self, q, k, back):
        return fp16(super().product(q, k, back))


# --- precision of gradients
@fault(FAULTS, "probabilities")
class weights_of_dv_in_e4m3_by_a_fixed_scale(Kernel):
    """facebookexperimental/triton PR 1628: on the way back the weights become codes of FP8 by one
    scale, 2⁻⁸, which spares the largest of every block.
    """

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dv = dv + (saturated(p * 256) / 256).mT @ do
            dk = dk + ds.mT @ q
        return dk * self.at.scale, dv


@fault(FAULTS, "grad-scores")
class ds_in_int8_by_tiles(Kernel):
    """thu-ml/SageAttention issues 184 and 229: products of the backward pass in INT8: a tile of dS
    has one scale, its largest / 127.
    """

    def seam(self, name, x, rows, cols=None):
        if name != "ds":
            return x
        scale = x.abs().amax((-1, -2), keepdim=True).clamp_min(2.0**-100) / 127
        return (x / scale).round() * scale


@fault(FAULTS, "grad-scores")
class ds_of_dq_in_e4m3_by_one_scale(Kernel):
    """facebookexperimental/triton PR 1668: for dQ, dS is quantized to MXFP8 by a scale that is the
    same for all of it, so that it need not be transposed.
    """

    def query_gradient(self, rows):
        dq = torch.zeros_like(load(self.at.q, rows))
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq = dq + (saturated(ds * 64) / 64) @ k
        return dq * self.at.scale


@fault(FAULTS, "grad-accumulator", "float16")
class key_gradients_added_in_half_by_every_head(Kernel):
    """uxlfoundation/oneDNN PR 5202: dK and dV of all heads of a group are added up in fp16, tile by
    tile.
    """

    rows = 32

    def add(self, name, total, part, rows, cols):
        return total + part if name == "dq_acc" else fp16(total + fp16(part))

    def group(self, grad):
        heads = fp16(grad).unflatten(1, (-1, self.at.groups))
        total = heads[:, :, 0]
        for each in range(1, self.at.groups):
            total = fp16(total + heads[:, :, each])
        return total


@fault(FAULTS, "delta")
class products_of_delta_in_bf16(Kernel):
    """NVIDIA/cudnn-frontend PR 877: O ∘ dO is multiplied in bf16, and summed in fp32."""

    def delta(self, do, o):
        return bf16(do * o).sum(-1, keepdim=True)


# --- the backward pass
@fault(FAULTS, "other-data lse-other no-delta backward-weights")
class statistics_of_the_next_tiles_first_step(Kernel):
    """pytorch/helion PR 3621: places of lse and δ begin anew with every tile of keys: after an odd
    number of steps the next tile's first ones come before half of the threads have read the last.
    """

    def key_gradients(self, cols):
        after = slice(cols.stop, cols.stop + self.cols)
        own, following = self.query_blocks(cols), []
        if after.start < self.at.nk:
            following = self.query_blocks(after)
        if len(own) % 2 == 0 or not following:
            return super().key_gradients(cols)
        at, half = self.at, self.rows // 2
        kept = at.lse, at.delta
        last, first = own[-1].start + half, following[0].start + half
        at.lse, at.delta = at.lse.clone(), at.delta.clone()
        for new, old in ((at.lse, kept[0]), (at.delta, kept[1])):
            place = new[:, :, last : last + half]
            place.copy_(load(old, slice(first, first + half))[:, :, : place.shape[2]])
        found = super().key_gradients(cols)
        at.lse, at.delta = kept
        return found


@fault(FAULTS, "other-data")
class ds_of_the_step_before_in_every_second_tile(Kernel):
    """pytorch/helion PR 3621: a phase is toggled once too seldom in every tile of keys; in the
    second the product for dK does not wait for dS, and takes the step's before.
    """

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        odd = cols.start // self.cols % 2
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            used = self.memory.get("ds", ds) if odd else ds
            self.memory["ds"] = ds
            dv = dv + self.at.low(p).mT @ do
            dk = dk + used.mT @ q
        return dk * self.at.scale, dv


@fault(FAULTS, "grad-tail", "float16")
class key_gradients_overwritten_by_later_queries(Kernel):
    """NVIDIA/cudnn-frontend issue 385: rows of keys that several tiles of queries see have the
    gradient of one of them: here of the last.
    """

    rows = 32

    def query_blocks(self, cols):
        return super().query_blocks(cols)[-1:]


@fault(FAULTS, "backward-mask", "float16")
class mask_of_the_pairs_first_query_on_the_way_back(Kernel):
    """NVIDIA/cudnn-frontend PR 388: a tile of the backward pass has two queries with 32 heads each,
    and loads the first one's keys for both: what is hidden from that is hidden from the other.
    """

    def causal(self, i, j, back):
        return super().causal(i // 2 * 2 if back else i, j, back)

    def window(self, i, j, back):
        return super().window(i // 2 * 2 if back else i, j, back)

    def backward(self):
        mask, n = self.at.mask, self.at.n
        if mask is not None:
            full = mask.expand(*mask.shape[:-2], n, self.at.nk)
            self.at.mask = full[..., torch.arange(n) // 2 * 2, :]
        return super().backward()


@fault(FAULTS, "backward-mask")
class chunks_in_another_order_on_the_way_back(Kernel):
    """NVIDIA/TransformerEngine PR 3221: how tokens lie on two ranks is looked up anew in the
    backward pass: the forward pass had them in order, and the causal mask is now that of chunks 0,
    3, 1 and 2.
    """

    @staticmethod
    def position(x, length):
        size = -(-length // 4)
        return torch.tensor([0, 3, 1, 2])[(x // size).clamp_max(3)] * size + x % size

    def causal(self, i, j, back):
        if not back:
            return super().causal(i, j, back)
        return self.position(j, self.at.nk) <= self.position(i, self.at.n)

    def key_blocks(self, rows):
        back = hasattr(self.at, "do")
        return blocks(self.at.nk, self.cols) if back else super().key_blocks(rows)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)


@fault(FAULTS, "grad-tail backward-mask")
class gradients_from_the_diagonal_on(Kernel):
    """triton-lang/triton PR 8565: the tutorial's loops of the backward pass begin, and end, where
    the diagonal is, also in a call that is not causal; nothing is masked there.
    """

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        if self.at.causal or not hasattr(self.at, "do"):
            return every
        return [c for c in every if c.start < rows.stop]

    def query_blocks(self, cols):
        return [r for r in super().query_blocks(cols) if r.stop > cols.start]


@fault(FAULTS, "unwritten ragged", "float16")
class dq_written_by_one_thread_a_feature(Kernel):
    """NVIDIA/cudnn-frontend PR 900: every thread writes one feature of dQ, and a block has fewer
    threads than a wide head has features: here 64; the others' stay 0.
    """

    def query_gradient(self, rows):
        dq = super().query_gradient(rows).clone()
        dq[..., 64:] = 0.0
        return dq
