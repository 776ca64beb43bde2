"""The twenty-second set's faults of precision and the backward pass (twentysecond.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, e4m3, fp16, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor
from torch.nn import functional

FAULTS: list[Fault] = []


def e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, ½, 1, 1½, 2, 3, 4 and 6, with its sign."""
    a = x.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return ((a / step).round() * step).clamp_max(6) * x.sign()


# --- precision
@fault(FAULTS, "operand")
class codes_by_a_finer_scale_than_is_stored(ForwardAlone):
    """kekzl/imp PR 250: MXFP4 codes of 32 features are made with amax / 6 as it is, and the scale
    that is stored beside them is a power of two; here those of keys and values.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        width = found.shape[-1]
        groups = functional.pad(found, (0, -width % 32)).unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100) / 6
        stored = torch.exp2(scale.log2().round())
        return (e2m1(groups / scale) * stored).flatten(-2)[..., :width]


@fault(FAULTS, "products scores non-finite", "float16")
class dot_products_added_up_in_half(ForwardAlone):
    """ggml-org/llama.cpp PR 20589: the product of a query and a key is added up in fp16, from the
    first feature to the last.
    """

    def product(self, q, k, back):
        total = torch.zeros(())
        for f in range(q.shape[-1]):
            total = fp16(total + q[..., f, None] * k[..., None, :, f])
        return total


@fault(FAULTS, "weights exponential row-max row-sum", "float16")
class weights_an_eighth_in_half(ForwardAlone):
    """ggml-org/llama.cpp PR 17746: ln 8 is added to the maximum, so that sums of fp16 weights do
    not overflow, and what is below 2⁻¹¹ of the largest is flushed to zero.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = fp16(torch.exp2(fp16(s - safe - 3)))
        p = torch.where(p < 2.0**-14, 0.0, p)
        a = torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, l / 8, acc


@fault(FAULTS, "unnormalized reciprocal row-sum", "float32")
class a_millionth_in_the_row_sum(ForwardAlone):
    """vllm-project/vllm issue 2481: O is multiplied by 1 / (l + 10⁻⁶)."""

    def finish(self, m, l, acc, rows):
        _, lse = super().finish(m, l, acc, rows)
        return self.at.low(acc * (1 / (l + 1e-6))), lse


@fault(FAULTS, "operand")
class int8_codes_with_the_mean_of_keys(ForwardAlone):
    """Comfy-Org/ComfyUI PR 16035: SageAttention with smooth_k=False: INT8 codes of queries, one
    scale for 32 rows, and of keys, one for 64, whose mean over the sequence is still in them.
    """

    rows, cols = 32, 64

    @staticmethod
    def coded(x: Tensor) -> Tensor:
        scale = x.abs().amax((-1, -2), keepdim=True).clamp_min(2.0**-100) / 127
        return (x / scale).round() * scale

    def load_query(self, name, x, part):
        return self.coded(super().load_query(name, x, part))

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return self.coded(found) if name == "k" else found


@fault(FAULTS, "reciprocal out", "float32")
class output_divided_in_half(ForwardAlone):
    """ggml-org/llama.cpp PR 16540: at the end sums of fp16 are multiplied by the inverse of the
    row sum in fp16.
    """

    def finish(self, m, l, acc, rows):
        _, lse = super().finish(m, l, acc, rows)
        return self.at.low(fp16(fp16(acc) * fp16(1 / torch.where(l == 0, 1.0, l)))), lse


# --- precision of gradients
@fault(FAULTS, "grad-stored grad-accumulator")
class gradients_grow_in_the_operands_fp8(Kernel):
    """ROCm/aiter PR 2276: where operands are fp8 so are the tensors of dQ, dK and dV, which parts
    are added to: they ought to be fp32.
    """

    def add(self, name, total, part, rows, cols):
        return e4m3((total + part).clamp(-448, 448))


@fault(FAULTS, "delta")
class delta_of_products_in_16_bits(Kernel):
    """NVIDIA/cudnn-frontend PR 877: products of O and dO are rounded to their type, and then added
    up in fp32.
    """

    def delta(self, do, o):
        return self.at.low(do * o).sum(-1, keepdim=True)


@fault(FAULTS, "operand probabilities grad-scores")
class queries_and_do_by_one_scale_for_32_rows(Kernel):
    """NVIDIA/cudnn-frontend PR 1123: for dK = dSᵀ Q and dV = Pᵀ dO all four are E4M3, with a power
    of two as the scale of 32 rows.
    """

    @staticmethod
    def mx(x: Tensor) -> Tensor:
        tall = x.unflatten(-2, (-1, 32))
        top = tall.abs().amax(-2, keepdim=True).clamp_min(2.0**-100)
        scale = torch.exp2(top.log2().floor() - 8)
        return (e4m3((tall / scale).clamp(-448, 448)) * scale).flatten(-3, -2)

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dv = dv + self.mx(p).mT @ self.mx(do)
            dk = dk + self.mx(ds).mT @ self.mx(q)
        return dk * self.at.scale, dv


@fault(FAULTS, "grad-accumulator grad-stored")
class partial_key_gradients_of_query_chunks(Kernel):
    """NVIDIA/cudnn-frontend PR 905, review: dK and dV of every chunk of queries, here of 64, are
    stored in the operands' 16 bits, and added up from there.
    """

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dv = dv + self.at.low(self.at.low(p).mT @ do)
            dk = dk + self.at.low(ds.mT @ q * self.at.scale)
        return self.at.low(dk), self.at.low(dv)


# --- the backward pass
@fault(FAULTS, "lse-other layout other-data backward-weights unwritten", "float16")
class lse_of_four_lanes_one_row_apart(Kernel):
    """AMD-Ecosystem/flashinfer PR 42: of 16 rows, four lanes have four each, and write their lse
    at the lane's number plus j, not at four times that: rows after the seventh are never written.
    """

    def forward(self):
        o, lse = super().forward()
        high = -(-self.at.n // 16) * 16
        found = load(lse, slice(0, high)).unflatten(2, (-1, 4, 4))
        written = torch.zeros_like(found).flatten(3, 4)
        for lane in range(4):
            written[:, :, :, lane : lane + 4] = found[:, :, :, lane]
        return o, written.flatten(2, 3)[:, :, : self.at.n]


@fault(FAULTS, "exp-of-lse padding backward-mask non-finite nan-escapes")
class empty_slots_not_hidden_on_the_way_back(Kernel):
    """NVIDIA/cudnn-frontend PR 1048: slots without a key hold zeros, and the backward pass hides
    none of them: 2 to the power of −lse is ∞ where lse is far below zero, and dS is NaN.
    """

    cols = 48

    def inside(self, j, back):
        return (j >= 0) if back else super().inside(j, back)

    def hide(self, s, rows, cols, back):
        self.memory["back"] = back
        return super().hide(s, rows, cols, back)

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if not self.memory["back"]:
            return found
        empty = torch.arange(cols.start, cols.stop) >= self.at.nk
        return found | empty if found.dtype == torch.bool else found


@fault(FAULTS, "other-data grad-tail")
class first_do_after_skipped_tiles(Kernel):
    """PaddlePaddle/Paddle PR 74122: after tiles of queries that are skipped, nothing waits for the
    copy of dO of the first one: what lies there is the tile before.
    """

    def key_gradients(self, cols):
        first = self.query_blocks(cols)[:1]
        self.memory["stale"] = first[0].start if first and first[0].start else None
        found = super().key_gradients(cols)
        self.memory["stale"] = None
        return found

    def load_query(self, name, x, part):
        if name == "do" and part.start == self.memory.get("stale"):
            part = slice(part.start - self.rows, part.start)
        return super().load_query(name, x, part)


@fault(FAULTS, "grad-tail")
class steps_of_whole_tiles_of_queries(Kernel):
    """flagos-ai/FlagGems PR 3607: how many steps dK and dV need is a division without remainder:
    the last tile of queries, where it is not full, is left out.
    """

    def query_blocks(self, cols):
        return [rows for rows in super().query_blocks(cols) if rows.stop <= self.at.n]


@fault(FAULTS, "lse-other backward-weights")
class sum_in_nats_and_maximum_in_bits(Kernel):
    """HKUSTDial/flash-sparse-attention PR 228: ln 2 is written as log₂ 2, which is 1: to a maximum
    in bits the natural logarithm of the sum is added.
    """

    def finish(self, m, l, acc, rows):
        o, _ = super().finish(m, l, acc, rows)
        return o, m + l.log2() * math.log(2)


@fault(FAULTS, "backward-scores backward-weights other-data")
class scale_of_key_heads_read_by_query_heads(Kernel):
    """ROCm/aiter PR 1942, review: scales of the query's fp8 codes are one for every key head, and
    the backward pass reads them by the number of the query head; codes are left out here.
    """

    def backward(self):
        at = self.at
        b, heads, n, d = at.q.shape
        grouped = at.q.reshape(b, heads // at.groups, at.groups * n, d)
        scales = grouped.abs().amax((-1, -2)).flatten()
        index = torch.arange(b)[:, None] * (heads // at.groups) + torch.arange(heads)
        own = scales.view(b, -1).repeat_interleave(at.groups, 1)
        self.memory["factor"] = (scales[index % len(scales)] / own)[..., None, None]
        return super().backward()

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        return found * self.memory["factor"] if name == "b_q" else found


@fault(FAULTS, "grad-tail unwritten")
class slots_behind_the_window_compared_with_keys(Kernel):
    """NVIDIA/cudnn-frontend PR 298: gradients of keys wait in slots behind those of a window, here
    of 32, and a slot is stored where its number is below that of the keys: the last 32 are not.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        late = torch.arange(self.at.nk)[:, None] + 32 >= self.at.nk
        return dq, dk.masked_fill(late, 0.0), dv.masked_fill(late, 0.0)


@fault(FAULTS, "other-data")
class sums_begin_where_the_head_before_ended(Kernel):
    """NVIDIA/cudnn-frontend PR 333, review: dK and dV are added to a workspace that nobody clears;
    here what lies there is of the head before, which comes first.
    """

    def group(self, grad):
        return super().group(grad + functional.pad(grad, (0, 0, 0, 0, 1, 0))[:, :-1])


@fault(FAULTS, "layout unwritten", "float16")
class pairs_of_dq_added_side_by_side(Kernel):
    """tile-ai/tilelang issue 1366: dQ lies in tiles of 8 × 8, a tile's even features before the odd
    ones; pairs of neighbours are added at once to where the first of them lies, so that an odd one
    goes to the next pair's even one.
    """

    def query_gradient(self, rows):
        dq = super().query_gradient(rows).unflatten(2, (-1, 8)).unflatten(-1, (-1, 4, 2))
        even, odd = (x.transpose(3, 4).flatten(4, 5) for x in dq.unbind(-1))
        lies = functional.pad(even, (0, 32)) + functional.pad(odd, (1, 31))
        apart = lies.unflatten(-1, (2, 8, 4)).movedim(4, -1)
        return apart.transpose(3, 4).flatten(4, 6).flatten(2, 3)
