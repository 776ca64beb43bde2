"""The twenty-first set's faults of precision and the backward pass (twentyfirst.py has the others,
and says what they are for).
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
    cut,
    e4m3,
    fp16,
    load,
)
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "operand scores", "float32")
class half_whatever_precision_was_asked(ForwardAlone):
    """ggml-org/llama.cpp issue 28124: Vulkan's kernel looks at what the device is able to, and not
    at the precision that the graph asks for: Q, K and Q Kᵀ lie in fp16.
    """

    def load_query(self, name, x, part):
        return fp16(super().load_query(name, x, part))

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return fp16(found) if name == "k" else found

    def product(self, q, k, back):
        return fp16(super().product(q, k, back))


@fault(FAULTS, "exponential row-max weights", "float16")
class exponential_in_steps_of_half(ForwardAlone):
    """ggml-org/llama.cpp PR 22347: an fp16 version of 2ˣ, argument, polynomial and all."""

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        x = fp16(s - safe)
        whole = x.clamp_min(-60).floor()
        f, p = fp16(x.clamp_min(-60) - whole), torch.zeros_like(x)
        for c in (0.00961813, 0.05550411, 0.24022651, 0.69314718, 1.0):
            p = fp16(fp16(p * f) + c)
        p = torch.where(x == -INF, 0.0, fp16(p * torch.exp2(whole)))
        a = torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "operand weights", "float32")
class operands_packed_by_cutting(ForwardAlone):
    """sonos/tract PR 2461: the f32 product on AMX cuts both its operands to bf16 where it packs
    them.
    """

    def product(self, q, k, back):
        return cut(q) @ cut(k).mT

    def add_values(self, acc, a, p, v):
        return acc * a + cut(p) @ cut(v)


@fault(FAULTS, "scores", "float16")
class scores_stored_before_they_are_upcast(ForwardAlone):
    """tinygrad/tinygrad PR 7830: scores are scaled and stored in half, and the softmax casts them
    up.
    """

    def scaled(self, s, rows, cols, back):
        return fp16(s * self.at.scale) * LOG2_E


@fault(FAULTS, "exponential", "float32")
class exponential_of_the_special_function_unit(ForwardAlone):
    """ggml-org/llama.cpp PR 23339: __expf in place of expf, whose error is two units and one more
    for every unit that its argument is large.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        nats, units = (s - safe) / LOG2_E, 2.0**-23
        error = (2 + (1.173 * nats.abs()).floor()) * units
        p = torch.where(nats == -INF, 0.0, torch.exp(nats) * (1 - error.nan_to_num(posinf=0.0)))
        a = torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


# --- precision of gradients
@fault(FAULTS, "grad-stored")
class gradients_cut_where_they_are_scaled(Kernel):
    """ROCm/rocm-systems issue 10806: the instruction that multiplies a gradient by the scale and
    gives it back in bf16 cuts it, for dQ and dK.
    """

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        return cut(dk), dv

    def query_gradient(self, rows):
        return cut(super().query_gradient(rows))


@fault(FAULTS, "grad-accumulator grad-stored")
class partial_key_gradients_of_every_head_in_16_bits(Kernel):
    """NVIDIA/cudnn-frontend PR 557: every query head leaves its dK and dV in a workspace of the
    operands' type, and the group is added up from there.
    """

    def group(self, grad):
        return super().group(self.at.low(grad))


@fault(FAULTS, "grad-accumulator")
class dq_of_every_ring_step_in_bf16(Kernel):
    """tenstorrent/tt-metal PR 53216: gradients of a ring's steps come in bf16 and are added up in
    it: here dQ, a step for every 32 keys.
    """

    cols = 32

    def add(self, name, total, part, rows, cols):
        return bf16(total + bf16(part)) if name == "dq_acc" else total + part


@fault(FAULTS, "grad-scores")
class ds_by_the_scales_of_the_next_stage(Kernel):
    """NVIDIA/cudnn-frontend PR 1040: the stages of dS in fp8 have one place for their scales: codes
    of a tile are multiplied by the next tile's scale, for dK.
    """

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        tiles = [self.again(rows, cols, "keys") for rows in self.query_blocks(cols)]
        tops = [ds.abs().amax((-1, -2), keepdim=True).clamp_min(2.0**-100) for *_, ds in tiles]
        scales = [torch.exp2((top / 448).log2().ceil()) for top in tops]
        for stage, (q, _, do, p, ds) in enumerate(tiles):
            after = scales[min(stage + 1, len(tiles) - 1)]
            dv = dv + self.at.low(p).mT @ do
            dk = dk + (e4m3(ds / scales[stage]) * after).mT @ q
        return dk * self.at.scale, dv


# --- the backward pass
@fault(FAULTS, "unwritten lse-other backward-weights", "float16")
class lse_never_stored(Kernel):
    """NVIDIA/cutlass issue 2343: the forward kernel takes a pointer for lse, and uses it nowhere:
    the backward pass reads zeros.
    """

    def forward(self):
        o, lse = super().forward()
        return o, torch.zeros_like(lse)


@fault(FAULTS, "backward-scores backward-weights unwritten")
class keys_never_loaded_on_the_way_back(Kernel):
    """NVIDIA/cudnn-frontend PR 351: rows of keys and values are loaded below a limit that nobody
    passes on, and that is 0: the backward pass has zeros for both.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return torch.zeros_like(found) if name.startswith("b_") else found


@fault(FAULTS, "ragged other-data layout", "float16")
class dq_spills_past_its_width(Kernel):
    """fla-org/flash-linear-attention PR 846: dQ is added to memory as wide as its tile, a power of
    two: what is past the width, of the following key's features, goes to the next query.
    """

    def query_gradient(self, rows):
        at, width = self.at, self.at.q.shape[-1]
        over = (1 << (width - 1).bit_length()) - width
        dq, spill = torch.zeros_like(load(at.q, rows)), torch.zeros(())
        after = torch.cat([at.k[:, :, 1:], torch.zeros_like(at.k[:, :, :1])], 2)[..., :over]
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq, spill = dq + ds @ k, spill + ds @ load(after, cols)
        self.memory.setdefault("spills", []).append(spill * at.scale)
        return dq * at.scale

    def backward(self):
        dq, dk, dv = super().backward()
        spill = torch.cat(self.memory["spills"], 2)[:, :, : self.at.n - 1]
        dq[:, :, 1:, : spill.shape[-1]] += spill
        return dq, dk, dv


@fault(FAULTS, "backward-scores mask backward-mask")
class bias_scaled_on_the_way_back(Kernel):
    """ELS-RD/kernl issue 93: the backward pass adds the bias to Q Kᵀ before it multiplies by the
    scale.
    """

    def bias(self, s, mask, back):
        return s + mask.float() * (LOG2_E * (self.at.scale if back else 1.0))


@fault(FAULTS, "backward-scores backward-weights other-data")
class scores_where_the_next_dp_is_written(Kernel):
    """NVIDIA/cudnn-frontend PR 1040: in the kernel of dQ, dP of an odd tile lies where the scores
    of the even one before it do, which may still be read.
    """

    def query_gradient(self, rows):
        self.memory["next"] = dict(zip(
            (c.start for c in self.key_blocks(rows)[::2]), self.key_blocks(rows)[1::2],
            strict=False))  # fmt: skip
        found = super().query_gradient(rows)
        self.memory["next"] = {}
        return found

    def scores(self, q, k, rows, cols, back):
        after = self.memory.get("next", {}).get(cols.start) if back else None
        if after is None:
            return super().scores(q, k, rows, cols, back)
        dp = load(self.at.do, rows) @ load(self.at.v, after).mT
        return self.hide(dp, rows, cols, back)


@fault(FAULTS, "grad-tail backward-mask", "float16")
class dq_up_to_the_tiles_first_query(Kernel):
    """jax-ml/jax-triton PR 177: the loop of dQ ends with the block of keys that the tile's first
    query sees last; tiles of queries are longer.
    """

    rows, cols = 64, 32

    def query_gradient(self, rows):
        self.memory["last"] = rows.start // self.cols + 1
        found = super().query_gradient(rows)
        del self.memory["last"]
        return found

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[: self.memory.get("last", len(every))] if self.at.causal else every


@fault(FAULTS, "backward-scores grad-scale scale")
class default_scale_after_padding_on_the_way_back(Kernel):
    """NVIDIA/cudnn-frontend PR 493: where no scale is given the backward pass makes it of the
    operands' width, once they are padded to 64 or 128.
    """

    def backward(self):
        self.at.scale = (64 if self.at.q.shape[-1] <= 64 else 128) ** -0.5
        return super().backward()


@fault(FAULTS, "lse-other layout other-data backward-weights", "float16")
class lse_by_sequences_read_by_heads(Kernel):
    """pytorch/pytorch PR 187899: AOTriton's lse lies by sequences and heads, and the caller's by
    heads and tokens of all sequences: without padding it again the backward pass reads others'.
    """

    def backward(self):
        b, heads, n, _ = self.at.lse.shape
        self.at.lse = self.at.lse.contiguous().view(heads, b, n, 1).transpose(0, 1)
        return super().backward()
