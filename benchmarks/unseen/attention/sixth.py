"""The sixth set of faults that `halfulp reconstruct` was not written against, and sound kernels.

Half are faults as public threads tell them, none of which an earlier set used, each named with its
thread; the other half was drawn from a grid by a seed (sixth_grid.py). The causes that are
right were set down before anything ran. All err more than 1.5 × their sound twin on an ordinary
input (`python -m benchmarks.unseen.draw attention.sixth --check`).
"""

# ruff: noqa: ARG002, D101, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixth_grid
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import (
    INF,
    LOG2_E,
    Kernel,
    attention,
    blocks,
    e4m3,
    fp16,
    load,
)
from benchmarks.unseen.attention.sixth_kernel import Divided, Kept, as_tokens, dense

FAULTS: list[Fault] = []
SOUND: list[Fault] = []


def fault(right: str, dtype: str = "bfloat16"):
    def put(kind: type[Kernel]) -> type[Kernel]:
        FAULTS.append(Fault(kind.__name__, frozenset(right.split()), attention(kind), dtype,
                            frozenset({"elements"})))  # fmt: skip
        return kind

    return put


def sound(kind: type[Kernel], dtype: str = "bfloat16", name: str = "") -> type[Kernel]:
    SOUND.append(Fault(name or kind.__name__, frozenset(), attention(kind), dtype))
    return kind


def rows_from(x: torch.Tensor, other: torch.Tensor | None, first: int = 16) -> torch.Tensor:
    """The first rows of x, the others of what another tile left."""
    if other is None or other.shape != x.shape:
        return x
    return torch.cat([x[:, :, :first], other[:, :, first:]], 2)


# --- heads and memory
@fault("key-heads other-data layout")
class head_divided_by_key_heads(Kernel):
    """ONNXim PR 34: `kv_head = first_head_of_the_group / key_heads`, where the share divides."""

    def spread(self, x):
        own = [min(i * self.at.groups // x.shape[1], x.shape[1] - 1) for i in range(x.shape[1])]
        return super().spread(x[:, own])


@fault("unwritten other-data key-heads layout")
class heads_by_the_share_alone(Kernel):
    """HipKittens PR 22: block i computes head (i % g) g + i / g, which g alone does not cover."""

    def written(self, x):
        heads, g = x.shape[1], self.at.groups
        done = {i % g * g + i // g for i in range(heads)} if g > 1 else set(range(heads))
        return x * torch.tensor([float(i in done) for i in range(heads)]).view(1, -1, 1, 1)

    def forward(self):
        o, lse = super().forward()
        return self.written(o), lse

    def backward(self):
        dq, dk, dv = super().backward()
        return self.written(dq), dk, dv


@fault("group-sum key-heads layout other-data unwritten grad-tail")
class dk_at_query_heads(Kernel):
    """flash-linear-attention PR 384, review: dK is stored by strides of all query heads."""

    def group(self, grad):
        right, heads = super().group(grad), grad.shape[1] // self.at.groups
        if "dk" in self.memory or self.at.groups == 1:
            return right
        self.memory["dk"] = True
        flat = grad.transpose(1, 2).flatten(1, 2)[:, : heads * grad.shape[2]]
        return flat.unflatten(1, (-1, heads)).transpose(1, 2)


@fault("layout other-data backward-scores backward-weights backward-mask no-delta")
class keys_transposed_twice(Kernel):
    """diffusers issue 14338: the backward pass transposes the saved K and V once more."""

    def load_key(self, name, x, part):
        return super().load_key(name, as_tokens(x) if name.startswith("b_") else x, part)


@fault("no-delta delta layout other-data")
class delta_by_dense_rows(Kernel):
    """FlagAttention PR 1: δ is stored as if O were [B, H, T, D], which it is not."""

    def delta(self, do, o):
        return as_tokens(super().delta(do, o))


def read_as_dense(query, key, value, **options):
    """pytorch issue 181133: on MPS permuted q, k and v are read without their strides."""
    return attention(Kernel)(dense(query), dense(key), dense(value), **options)


FAULTS.append(Fault("read_as_dense", frozenset({"layout", "other-data"}), read_as_dense))


@fault("other-data layout grad-tail unwritten ragged")
class dq_read_at_other_tiles(Kernel):
    """flash-attention PR 2333: offsets of later sequences by tiles of 64 and of 128 rows."""

    def backward(self):
        dq, dk, dv = super().backward()
        n = self.at.n
        kept, read = (-(-n // wide) * wide for wide in (64, 128))
        flat = torch.cat([load(x[None], slice(0, kept))[0] for x in dq], 1)
        return torch.stack([load(flat[None], slice(b * read, b * read + n))[0]
                            for b in range(len(dq))]), dk, dv  # fmt: skip


@fault("scale ragged")
class scale_of_the_padded_width(Kernel):
    """ipex-llm PR 12619: the scale is that of the head's width after padding."""

    def forward(self):
        wide = self.at.q.shape[-1]
        self.at.scale *= math.sqrt(wide / 2 ** math.ceil(math.log2(wide)))
        return super().forward()


# --- masks
class EveryBlock(Kernel):
    """No block is left out for the diagonal."""

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)


@fault("window causal-mask mask")
class window_on_the_other_side(EveryBlock):
    """transformers PR 41228: the window's diagonal is added, so that later keys are seen."""

    def seen(self, rows, cols, back):
        if not self.at.causal or self.at.window is None:
            return super().seen(rows, cols, back)
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        return ((j <= i) | (j > i + self.at.window[0])) & (j < self.at.nk)


@fault("window", "float16")
class window_not_passed_on(Kept):
    """keras-hub issue 2186: the window's mask is made after the branch to the fused kernel."""

    def window(self, i, j, back):
        return (j >= 0) & (i >= 0)


@fault("window causal-mask key-tail ragged tiles-skipped mask")
class one_partition_too_few(Kernel):
    """openvino PR 38034: ⌈w / 16⌉ blocks are visited, of ⌈w / 16⌉ + 1 where it is not aligned."""

    def window(self, i, j, back):
        left = self.at.window[0]
        last = (i - left).clamp_min(0) // 16 * 16 + -(-(left + 1) // 16) * 16
        keep = super().window(i, j, back)
        return keep & (j < last) if left >= 0 and self.at.causal else keep


@fault("causal-mask mask", "float16")
class causal_from_the_end(EveryBlock):
    """mlx issue 2835: the diagonal ends in the last key where it has to begin at the first."""

    def causal(self, i, j, back):
        return j <= i + self.at.nk - self.at.n


@fault("mask other-data")
class mask_of_the_first_sequence(Kept):
    """cubek PR 414: a mask's first dimension is taken for broadcast."""

    def given_mask(self, rows, cols):
        if self.at.mask.ndim == 4:
            self.at.mask = self.at.mask[:1]
        return super().given_mask(rows, cols)


@fault("mask layout ragged")
class bias_by_padded_rows(Kernel):
    """onnxruntime PR 29247: a row of the bias is taken to be as long as the padded keys."""

    def given_mask(self, rows, cols):
        n, nk = self.at.n, self.at.nk
        if self.at.mask.dtype == torch.bool or "dense" in self.at.__dict__:
            return super().given_mask(rows, cols)
        flat = self.at.mask.expand(*self.at.mask.shape[:-2], n, nk).flatten(-2)
        at = torch.arange(n)[:, None] * (-(-nk // 64) * 64) + torch.arange(nk)
        self.at.mask, self.at.dense = flat[..., at.clamp_max(n * nk - 1)], True
        return super().given_mask(rows, cols)


@fault("mask-finite mask masked-row", "float32")
class minus_ten_thousand(Kept):
    """lattice issue 361: hidden keys score −10000, which rows far below zero exceed."""

    def hide(self, s, rows, cols, back):
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.given_mask(rows, cols), -10_000.0 * LOG2_E)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


# --- ends
@fault("key-tail tiles-skipped ragged")
class at_most_512_keys(Kernel):
    """nntrainer PR 3812, review: the loop over keys ends at 512."""

    def key_blocks(self, rows):
        return [c for c in super().key_blocks(rows) if c.start < 512]


@fault("ragged key-tail padding other-data nan-escapes")
class few_queries_read_past_the_end(Kernel):
    """pytorch PR 169222: up to 8 queries take blocks of 32 keys without a bound."""

    cols = 32

    def load_key(self, name, x, part):
        following = torch.cat([x, x.roll(-1, 1)], 2)
        past = self.at.n <= 8 and not name.startswith("b_")
        return load(following if past else x, part)

    def inside(self, j, back):
        end = -(-self.at.nk // 32) * 32 if self.at.n <= 8 and not back else self.at.nk
        return j < end


# --- scores and weights
@fault("softcap")
class capped_by_itself(Kernel):
    """flash-attention PR 2402: s tanh(s) in the place of c tanh(s), s being divided by c."""

    def cap(self, s, back):
        c = self.at.softcap * LOG2_E
        return s * torch.tanh(s / c) if c else s


@fault("sinks")
class sink_in_another_base(Kernel):
    """rocm-libraries PR 12229, second commit: the sink is seeded without log2 e."""

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return (m / LOG2_E if self.at.sinks is not None and first else m), l, acc


class OwnExponential(Kernel):
    """2^x = 2^⌊x⌋ `fraction`(x − ⌊x⌋) in the forward pass."""

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        x, a = (s - safe).clamp_min(-200), torch.exp2(m - safe)
        p = torch.exp2(x.floor()) * self.fraction(x - x.floor())
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault("exponential backward-weights weights")
class exponential_of_degree_one(OwnExponential):
    """TIRx-kernels PR 210: 2^f is a line, 3 % off, in the forward pass."""

    def fraction(self, f):
        return (1 + f) * 0.9707


@fault("row-sum", "float16")
class row_sum_grows_in_fp16(Kernel):
    """tract PR 2586: exponentials are summed in fp16, one vector after the other."""

    def add_row(self, l, a, p):
        l = fp16(l * a)
        for part in p.split(8, -1):
            l = fp16(l + fp16(part.sum(-1, keepdim=True)))
        return l


@fault("accumulator", "float16")
class output_grows_in_fp16(Divided):
    """llama.cpp PR 13975: O is accumulated in fp16."""

    def add_values(self, acc, a, p, v):
        return fp16(acc * a + self.at.low(p) @ v)


@fault("scores products non-finite", "float16")
class scores_in_fp16(Kernel):
    """llama.cpp PR 6646: K Q is kept in fp16 before it is scaled."""

    def product(self, q, k, back):
        return q @ k.mT if back else fp16(q @ k.mT)


@fault("scale operand prescaled")
class query_without_its_scale(Kernel):
    """vllm PR 42080: queries are quantized to fp8, and no score is multiplied by their scale."""

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        return e4m3(found / (self.at.q.abs().max() / 448)) if name in ("q", "b_q") else found


@fault("weights weights-disagree weights-row-sum rescale")
class fp8_weights_of_an_old_maximum(Kernel):
    """flash-attention issue 2131: weights in e4m3 relative to a maximum up to 2^8 too small."""

    def maximum(self, m, s):
        new = super().maximum(m, s)
        return torch.where(new - m > 8, new, m)

    def add_values(self, acc, a, p, v):
        return acc * a + e4m3(p) @ v


@fault("operand products scores", "float32")
class tf32_everywhere(Kernel):
    """triton issue 1671: `allow_tf32` in a kernel of fp32: operands have 10 bits."""

    def tf32(self, x):
        return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)

    def load_key(self, name, x, part):
        return self.tf32(super().load_key(name, x, part))

    def load_query(self, name, x, part):
        return self.tf32(super().load_query(name, x, part))

    def add_values(self, acc, a, p, v):
        return acc * a + self.tf32(p) @ v

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, self.tf32(p), self.tf32(ds)


# --- what another warp left
@fault("weights-disagree other-data unnormalized unstable")
class weights_of_the_tile_before(Kernel):
    """FlashMLA-ETAP PR 3: P V reads rows that other warps have not stored yet."""

    def add_values(self, acc, a, p, v):
        before, self.memory["p"] = self.memory.get("p"), p
        return super().add_values(acc, a, rows_from(p, before), v)


@fault("rescale row-sum unnormalized tiles-skipped other-data accumulator unstable")
class statistics_of_the_tile_before(Kernel):
    """1bit-MONSTER issue 465: m and l are read by all warps before the first has stored them."""

    def online(self, m, l, acc, s, v, rows, cols):
        before = self.memory.get("state") if cols.start else None
        self.memory["state"] = m, l
        if before is not None:
            m, l = (rows_from(x, y) for x, y in zip((m, l), before, strict=True))
        return super().online(m, l, acc, s, v, rows, cols)


@fault("lse-other lse backward-weights split-merge")
class lse_of_the_last_split(Parts):
    """flashinfer PR 58: the lse that is stored is that of one split, not of all keys."""

    def merge(self, outs, lses):
        o, _ = super().merge(outs, lses)
        last = lses[0]
        for one in lses[1:]:
            last = torch.where(one == -INF, last, one)
        return o, last


@fault("grad-accumulator", "float16")
class key_gradients_in_16_bits_per_rank(Kernel):
    """TransformerEngine PR 821: dK and dV go from rank to rank in 16 bits."""

    def add(self, name, total, part, rows, cols):
        hop = name != "dq_acc" and rows.start // self.rows % 2
        return fp16(total + part) if hop else total + part


FAULTS += sixth_grid.FAULTS


# --- sound kernels, written otherwise
for dtype in ("bfloat16", "float16", "float32"):
    sound(Divided, dtype, f"divided_{dtype}")
    sound(Kept, dtype, f"kept_{dtype}")


@sound
class divided_from_the_end(Divided):
    rows, cols = 48, 32

    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]


@sound
class rescaled_when_it_must_be(Kernel):
    """FlashAttention-4: the maximum stays while scores exceed it by less than 2^8."""

    def maximum(self, m, s):
        new = super().maximum(m, s)
        return torch.where(new - m > 8, new, m)


@sound
class exponential_by_a_polynomial(OwnExponential):
    """2^f by nine terms of its series."""

    def fraction(self, f):
        p = torch.ones_like(f)
        for i in range(9, 0, -1):
            p = 1 + p * f * math.log(2) / i
        return p


@sound
class maximum_first(Kernel):
    """Two passes over the keys: no rescale."""

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        before = m
        for cols in self.key_blocks(rows):
            s = self.scores(q, load(self.at.k, cols), rows, cols, False)
            m = self.maximum(m, s)
        l = l * torch.exp2(before - torch.where(m == -INF, 0.0, m))
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            m, l, acc = self.online(m, l, acc, s, v, rows, cols)
        return self.finish(m, l, acc, rows)


@sound
class atomics_in_fp32(Kernel):
    """dQ is added up in whatever order tiles end, in fp32."""

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return [every[i] for i in torch.randperm(len(every))] if "do" in self.at.__dict__ else every


def in_any_memory(query, key, value, **options):
    """Whatever strides come in, tokens before heads in between."""
    moved = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    return attention(Kernel)(*moved, **options)


SOUND.append(Fault("in_any_memory", frozenset(), in_any_memory))
