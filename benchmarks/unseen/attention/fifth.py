"""The fifth set of faults that `halfulp reconstruct` was not written against, and sound kernels.

Half are faults as public threads and commits tell them, each named with its thread; the other half
was drawn from a grid by a seed (fifth_grid.py). The causes that are right were set down
before anything ran.
"""

# ruff: noqa: ARG002, ARG005, D101, D102, N801 - a fault is a class of its name, whose steps have
# the signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fifth_grid
from benchmarks.unseen.attention.fifth_kernel import (
    INF,
    LOG2_E,
    Kernel,
    attention,
    bf16,
    blocks,
    fp16,
    load,
)

FAULTS: list[Fault] = []
SOUND: list[Fault] = []


def fault(right: str, vague: str = "", dtype: str = "bfloat16"):
    def put(kind: type[Kernel]) -> type[Kernel]:
        FAULTS.append(Fault(kind.__name__, frozenset(right.split()), attention(kind), dtype,
                            frozenset(vague.split()) | {"elements"}))  # fmt: skip
        return kind

    return put


def sound(kind: type[Kernel], dtype: str = "bfloat16", name: str = "") -> type[Kernel]:
    SOUND.append(Fault(name or kind.__name__, frozenset(), attention(kind), dtype))
    return kind


# --- heads and sequences
@fault("group-sum grad-tail")
class first_head_of_the_group(Kernel):
    """levanter PR 449: K and V are shared by heads, their gradients are not summed over these."""

    def group(self, grad):
        return grad.unflatten(1, (-1, self.at.groups))[:, :, 0]


@fault("group-sum key-heads other-data")
class groups_split_by_the_share(Kernel):
    """native-sparse-attention-triton issue 27: dK and dV take a head's index modulo the share."""

    def group(self, grad):
        total = torch.zeros_like(grad[:, :: self.at.groups])
        for head in range(grad.shape[1]):
            own = head % self.at.groups if self.at.groups > 1 else head
            total[:, own % total.shape[1]] += grad[:, head]
        return total


@fault("key-heads")
class heads_tiled(Kernel):
    """jax-js PR 180: key heads are tiled over the query heads where they are repeated."""

    def spread(self, x):
        return x.repeat(1, self.at.groups, 1, 1)


@fault("causal-mask mask key-heads backward-mask")
class packed_rows_in_the_mask(Kernel):
    """flash-attention PR 2528: row numbers divided by the heads of a group that is not packed."""

    def causal(self, i, j, back):
        return j <= (i if back else i // self.at.groups)


@fault("unwritten other-data split-merge")
class combine_into_the_first_sequence(Kernel):
    """vllm/flash-attention PR 176: a stride of 0 merges every sequence's splits onto the first."""

    def forward(self):
        o, lse = super().forward()
        return torch.cat([o[-1:], torch.zeros_like(o[1:])]), lse


@fault("no-delta delta other-data")
class delta_at_another_tile(Kernel):
    """flash-attention PR 2337: δ of later sequences is read at offsets of 128-row tiles."""

    def delta(self, do, o):
        right = super().delta(do, o)
        moved = torch.cat([right[:, :, 64:], torch.zeros_like(right[:, :, :64])], 2)
        return torch.cat([right[:1], moved[1:, :, : right.shape[2]]])


@fault("lse lse-other backward-weights other-data")
class statistics_as_if_dense(Kernel):
    """TransformerEngine issue 3249: saved statistics are read as if no head had an offset."""

    def backward(self):
        self.at.lse = self.at.lse[:, :1].expand_as(self.at.lse)
        return super().backward()


# --- ends of sequences
class ZeroPadded(Kernel):
    """What lies past the end is not hidden."""

    def inside(self, j, back):
        return j < INF


@fault("padding key-tail ragged")
class zeros_have_weight(ZeroPadded):
    """flashinfer PR 5090: keys past the end are zeros, and exp(0) = 1 enters the row sum."""

    rows, cols = 64, 64


@fault("padding softcap ragged key-tail")
class capped_padding(Kernel):
    """llama.cpp PR 29034: −inf past the end goes through the soft cap and comes back as −cap."""

    def scores(self, q, k, rows, cols, back):
        if not self.at.softcap or back:
            return super().scores(q, k, rows, cols, back)
        past = torch.arange(cols.start, cols.stop)[None] >= self.at.nk
        s = self.scaled(self.product(q, k, back), rows, cols, back).masked_fill(past, -INF)
        s = self.cap(s, back)
        return torch.where(past, s, self.hide(s, rows, cols, back))


@fault("ragged key-tail padding other-data unnormalized")
class last_block_moved_back(ZeroPadded):
    """jax issue 27224: the last slice starts earlier so that it fits, and keys count twice."""

    def load_key(self, name, x, part):
        first = max(0, min(part.start, x.shape[2] - (part.stop - part.start)))
        return load(x, slice(first, first + part.stop - part.start))

    def inside(self, j, back):
        wide = self.cols
        return j < (-(-self.at.nk // wide) * wide if self.at.nk >= wide else self.at.nk)


@fault("ragged key-tail padding other-data nan-escapes")
class rows_of_the_next_head(ZeroPadded):
    """triton issue 2626: without a bound the last tile goes on into the next head's keys."""

    def load_key(self, name, x, part):
        following = torch.cat([x, x.roll(-1, 1)], 2)
        return load(following, part)


@fault("key-tail ragged padding tiles-skipped", dtype="float16")
class keys_as_many_as_queries(Kernel):
    """SageAttention issue 26: K is quantized with the number of queries; what is past it is 0."""

    def load_key(self, name, x, part):
        part_of = load(x, part)
        if name not in ("k", "b_k"):
            return part_of
        here = torch.arange(part.start, part.stop).view(1, 1, -1, 1)
        return torch.where(here < self.at.n, part_of, 0.0)


@fault("backward-mask grad-tail ragged padding key-tail")
class padding_in_the_backward_pass(ZeroPadded):
    """FastVideo PR 925: the backward pass takes another block size and sees stale rows as keys."""

    def load_key(self, name, x, part):
        found = load(x, part)
        past = torch.arange(part.start, part.stop).view(1, 1, -1, 1) >= self.at.nk
        before = load(x, slice(max(0, part.start - self.cols), part.stop - self.cols))
        stale = name.startswith("b_") and part.start > 0
        return torch.where(past, before, found) if stale else found

    def inside(self, j, back):
        return j < INF if back else j < self.at.nk


@fault("ragged no-delta delta grad-scores backward-mask")
class value_as_wide_as_the_key(Kernel):
    """native-sparse-attention-triton issue 27: dQ reads V and dO in as many features as K has."""

    def again(self, rows, cols, which):
        if which == "queries":
            whole = self.at.v
            wide = min(self.at.q.shape[-1], 64)
            self.at.v = torch.cat([whole[..., :wide], torch.zeros_like(whole[..., wide:])], -1)
            found = super().again(rows, cols, which)
            self.at.v = whole
            return found
        return super().again(rows, cols, which)


@fault("other-data layout grad-stored ragged")
class columns_of_dv_misplaced(Kernel):
    """flash-attention issue 2552: dV is stored in steps that do not divide its width."""

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        half = dv.shape[-1] // 2
        if half % 32 and half > 8:
            dv = torch.cat([dv[..., :half], dv[..., half:].roll(8, -1)], -1)
        return dk, dv


@fault("causal-mask query-tail unwritten tiles-skipped key-tail")
class rows_before_the_first_key(Kernel):
    """flash-attention issue 1778: the diagonal is counted from the end, and no block is left."""

    def key_blocks(self, rows):
        high = rows.stop + min(0, self.at.nk - self.at.n) if self.at.causal else self.at.nk
        return [c for c in blocks(self.at.nk, self.cols) if c.start < min(high, self.at.nk)]


# --- masks
@fault("window")
class one_key_more(Kernel):
    """vllm issue 3385, transformers issue 29623: a window of w keys is taken for w + 1."""

    def window(self, i, j, back):
        left, right = self.at.window
        keep = j >= i - left - 1 if left >= 0 else j >= 0
        return keep & (j <= i + right) if right >= 0 else keep & (i >= 0)


@fault("backward-mask window backward-weights")
class no_window_in_the_backward_pass(Kernel):
    """MSLK PR 263: `is_causal=causal and window is None` on the way back."""

    def window(self, i, j, back):
        return (j >= 0) & (i >= 0) if back else super().window(i, j, back)


@fault("causal-mask", dtype="float32")
class causal_ignored_where_it_divides(Kernel):
    """triton-msl PR 7: where tiles divide the sequence, the mask is dropped."""

    def causal(self, i, j, back):
        divides = self.at.n % 64 == 0 and self.at.nk % 64 == 0
        return (j >= 0) & (i >= 0) if divides else j <= i

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)


@fault("mask scale")
class bias_in_another_base(Kernel):
    """segment-anything-fast PR 71: scores are in base 2, the bias that is added is not."""

    def bias(self, s, mask, back):
        return s + mask.float()


# --- scores
@fault("scale")
class scale_grows_with_the_tiles(Kernel):
    """FlagGems PR 424: `qk_scale *= log2(e)` stands inside the loop."""

    def scaled(self, s, rows, cols, back):
        done = 0 if back else cols.start // self.cols
        return s * (self.at.scale * LOG2_E ** (1 + done))


@fault("grad-scale")
class dq_times_ln_2(Kernel):
    """fbtriton PR 1621: dQ is multiplied by ln 2 where the scale should be."""

    def query_gradient(self, rows):
        return super().query_gradient(rows) * (math.log(2) / self.at.scale)


@fault("row-sum row-max", "rescale", "float16")
class statistics_fp16(Kernel):
    """llama.cpp PR 24389: m, l and the sum of a block are kept in fp16."""

    def online(self, m, l, acc, s, v, rows, cols):
        new = fp16(self.maximum(m, s))
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe), torch.exp2(m - safe)
        return new, fp16(l * a + fp16(p.sum(-1, keepdim=True))), self.add_values(acc, a, p, v)


@fault("products scores accumulator")
class einsum_in_bf16(Kernel):
    """aiter PR 705: an einsum of two bf16 tensors gives bf16, in both products of the forward."""

    def product(self, q, k, back):
        return q @ k.mT if back else bf16(q @ k.mT)

    def add_values(self, acc, a, p, v):
        return acc * a + bf16(self.at.low(p) @ v)


# --- splits and rings
class Parts(Kernel):
    """Keys in parts, each with its own O and lse, which are merged."""

    parts = 3

    def stored(self, o, l):
        return o

    def merge(self, outs, lses):
        m = lses.amax(0)
        w = torch.exp2(lses - torch.where(m == -INF, 0.0, m))
        total = w.sum(0)
        return (w * outs).sum(0) / torch.where(total == 0, 1.0, total), m + total.log2()

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        outs, lses = [], []
        for part in range(self.parts):
            m, l, acc = self.begin(q, part == 0)
            for cols in every[part :: self.parts]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            outs.append(self.stored(acc / torch.where(l == 0, 1.0, l), l))
            lses.append(m + l.log2())
        o, lse = self.merge(torch.stack(outs), torch.stack(lses))
        return self.at.low(o), lse


@fault("accumulator split-merge out")
class partial_results_bf16(Parts):
    """vllm-xpu-kernels PR 204: what each split gives is divided, rounded, multiplied back."""

    def stored(self, o, l):
        return bf16(o)


@fault("grad-tail other-data backward-scores backward-weights backward-mask", dtype="float16")
class ring_of_stale_keys(Kernel):
    """diffusers issue 14265: each step of the ring's backward pass takes the first rank's K, V."""

    def load_key(self, name, x, part):
        half = -(-self.at.nk // 128) * 64
        if name.startswith("b_") and part.start >= half:
            return load(x, slice(part.start - half, part.stop - half))
        return load(x, part)


@fault("backward-weights lse lse-other split-merge delta no-delta")
class ring_with_its_own_lse(Kernel):
    """tt-metal PR 53216: a step of the ring takes its own lse where all keys' belongs."""

    def again(self, rows, cols, which):
        half = -(-self.at.nk // 128) * 64
        if "own" not in self.memory:
            whole = self.at.nk
            parts = []
            for first, last in ((0, half), (half, whole)):
                s = torch.full_like(self.at.q[..., :1], -INF)
                for c in blocks(whole, self.cols):
                    if first <= c.start < last:
                        every = slice(0, self.at.n)
                        part = self.scores(self.at.q, load(self.at.k, c), every, c, True)
                        s = torch.logaddexp2(s, torch.logsumexp(
                            part / LOG2_E, -1, keepdim=True) * LOG2_E)  # fmt: skip
                parts.append(s)
            self.memory["own"] = parts
        kept, self.at.lse = self.at.lse, self.memory["own"][int(cols.start >= half)]
        found = super().again(rows, cols, which)
        self.at.lse = kept
        return found


@fault("grad-accumulator")
class dq_in_bf16_at_every_hop(Kernel):
    """flash-attention PR 2723: a ring that takes dQ back from bf16 and rounds it at every hop."""

    def add(self, name, total, part, rows, cols):
        hop = name == "dq_acc" and (cols.start // self.cols) % 2
        return bf16(total + part) if hop else total + part


@fault("grad-accumulator unstable")
class atomics_in_bf16(Kernel):
    """Cornstarch PR 66: atomic additions into a bf16 buffer, in whatever order blocks end."""

    def query_gradient(self, rows):
        dq = torch.zeros_like(load(self.at.q, rows))
        every = self.key_blocks(rows)
        for step in torch.randperm(len(every)):
            cols = every[step]
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq = bf16(dq + ds @ k)
        return dq * self.at.scale


# --- the backward pass's preparation
@fault("no-delta delta grad-tail")
class delta_before_do_is_there(Kernel):
    """flash-attention PR 2481: δ is computed while the last rows of dO are still being written."""

    def delta(self, do, o):
        last = max(0, self.at.n - 16)
        return torch.cat([do[:, :, :last], torch.zeros_like(do[:, :, last:])], 2).mul(o).sum(
            -1, keepdim=True)  # fmt: skip


FAULTS += fifth_grid.FAULTS


# --- sound kernels, written otherwise
sound(Kernel, name="by_tiles")
sound(Kernel, "float16", "by_tiles_fp16")
sound(Kernel, "float32", "by_tiles_fp32")


@sound
class wide_tiles(Kernel):
    rows, cols = 128, 128


@sound
class narrow_tiles(Kernel):
    rows, cols = 16, 48


@sound
class last_key_first(Kernel):
    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]


@sound
class in_parts(Parts):
    pass


sound(Parts, "float16", "in_parts_fp16")


@sound
class scale_in_the_query(Kernel):
    """The scale is multiplied into the query in fp32, where nothing is rounded to bf16."""

    def product(self, q, k, back):
        return (q * (self.at.scale * LOG2_E)) @ k.mT

    def scaled(self, s, rows, cols, back):
        return s


@sound
class delta_from_products(Kernel):
    """δ = Σ dP ∘ P, in fp32."""

    def backward(self):
        at, every = self.at, slice(0, self.at.n)
        at.delta, sums = torch.zeros_like(at.lse), torch.zeros_like(at.lse)
        for cols in blocks(at.nk, self.cols):
            s = self.scores(at.q, load(at.k, cols), every, cols, True)
            dp = at.do @ load(at.v, cols).mT
            sums = sums + (self.weights_again(s, at.lse) * dp).sum(-1, keepdim=True)
        self.delta = lambda do, o: sums
        return super().backward()


@sound
class values_in_two_halves(Kernel):
    """P V is summed over half of a block at a time."""

    def add_values(self, acc, a, p, v):
        half = self.cols // 2
        low = self.at.low(p)
        return acc * a + low[..., :half] @ v[:, :, :half] + low[..., half:] @ v[:, :, half:]


@sound
class materialized(Kernel):
    """All keys at once: no rescale at all."""

    def key_blocks(self, rows):
        return [slice(0, self.at.nk)]
