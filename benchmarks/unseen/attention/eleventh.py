"""The eleventh set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, heads, layouts, tails and splits are here; scale, sinks, codes, weights and the
backward pass in eleventh_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.eleventh --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import eleventh_kernel as ways
from benchmarks.unseen.attention import eleventh_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, blocks
from torch.nn import functional

AGAIN = (
    "whole_blocks_of_keys_in_dq",  # second: dq_without_last_block
    "a_block_past_an_odd_count",  # fourth: one_zero_key_over
    "weights_of_the_maximum_not_taken",  # fourth: rescale_skipped
    "values_added_four_keys_at_a_time",  # sixth: output_grows_in_fp16
    "row_summed_in_16_bits",  # second: row_sum_tiles_bf16
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "backward-mask causal-mask")
class backward_diagonal_from_the_end(Kernel):
    """xlite-dev/ffpa-attn PR 300: the two passes count the diagonal from two ends, which differ
    where there are not as many queries as keys; here it is the backward pass that is wrong.
    """

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)

    def causal(self, i, j, back):
        return j <= (i + self.at.nk - self.at.n if back else i)


@fault(FAULTS, "backward-mask grad-tail")
class whole_blocks_of_keys_in_dq(Kernel):
    """jax-ml/jax PR 25647 ("fixes the backwards pass for non-default block sizes, and a bug when
    causal=True"): here dQ goes over as many blocks of keys as end at or before the diagonal.
    """

    cols = 48

    def query_gradient(self, rows):
        self.memory["own"] = True
        found = super().query_gradient(rows)
        self.memory["own"] = False
        return found

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        short = self.memory.get("own") and self.at.causal
        return every[: max(1, rows.stop // self.cols)] if short else every


class always_causal_and_not_scaled(Kernel):
    """google/torchax issue 39: a call of attention goes to a kernel that is told causal=True and
    no scale, whatever was asked for.
    """

    def forward(self):
        self.at.causal, self.at.scale = True, 1.0
        return super().forward()


FAULTS.append(
    Fault("always_causal_and_not_scaled", frozenset({"scale"}),
          attention(always_causal_and_not_scaled), "bfloat16", frozenset({"elements"}),
          frozenset({"causal-mask", "mask"}))
)  # fmt: skip


@fault(FAULTS, "key-tail tiles-skipped")
class sixteen_of_every_32_keys(Kernel):
    """microsoft/onnxruntime PR 28520: the loop steps by 32 keys, and scores are written down for
    16 of them.
    """

    def inside(self, j, back):
        return super().inside(j, back) & (j % 32 < 16)


# --- heads, layouts
@fault(FAULTS, "layout other-data", "float16")
class rows_of_a_group_by_the_pitch_of_tokens(Kernel):
    """lvyufeng/PocketLLM PR 240: heads of a group are rows of one tile, which is read by the pitch
    of tokens: row r is the group's first head, r tokens further on.
    """

    def forward(self):
        q, n = self.at.q, self.at.n
        first = q[:, :: self.at.groups]
        after = [functional.pad(first, (0, 0, 0, r))[:, :, r : r + n]
                 for r in range(self.at.groups)]  # fmt: skip
        self.at.q = torch.stack(after, 2).flatten(1, 2)
        return super().forward()


@fault(FAULTS, "layout other-data")
class flat_rows_of_values_transposed(Kernel):
    """triton-lang/triton issue 11440: V lies as [B, H, D, N], and is read at the column where a
    head would begin if it lay as [B, H, N, D].
    """

    def forward(self):
        v = self.at.v[:, :: self.at.groups]
        b, heads, nk, d = v.shape
        flat = v.mT.reshape(b * heads * d, nk)
        read = torch.stack([flat[head : head + d].mT for head in range(b * heads)])
        self.at.v = self.spread(read.view(b, heads, nk, d))
        return super().forward()


@fault(FAULTS, "layout", "float16")
class written_in_order_and_read_swizzled(Kernel):
    """thecodacus/llama.cpp PR 12: tiles of K and V are written row after row into shared memory,
    and read as if groups of eight columns were exchanged by the row's number.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        n, d = found.shape[2:]
        if d % 32:
            return found
        number, wide = torch.arange(d // 8), (d // 8) & -(d // 8)
        at = number ^ (torch.arange(n) % wide)[:, None]
        eights = found.unflatten(-1, (-1, 8))
        return eights.gather(-2, at[:, :, None].expand_as(eights)).flatten(-2)


@fault(FAULTS, "key-heads other-data group-sum")
class every_head_alone_on_the_way_back(Kernel):
    """ooples/AiDotNet.Tensors PR 633, review: the backward pass is not told how many heads share a
    key head: each reads and writes K and V at its own number.
    """

    def backward(self):
        at = self.at
        for name in "kv":
            flat = getattr(at, name)[:, :: at.groups].flatten(0, 1)
            number = torch.arange(at.q.shape[0] * at.q.shape[1]) % len(flat)
            setattr(at, name, flat[number].unflatten(0, at.q.shape[:2]))
        return super().backward()

    def group(self, grad):
        shared = grad.shape[1] // self.at.groups
        return grad.flatten(0, 1)[: grad.shape[0] * shared].unflatten(0, (-1, shared))


# --- ends, and what is never written
@fault(FAULTS, "unwritten query-tail", "float16")
class few_queries_of_which_one_is_written(Kernel):
    """huggingface/candle PR 3479: up to eight queries go to a kernel that writes one row a head."""

    def forward(self):
        o, lse = super().forward()
        written = (torch.arange(self.at.n)[:, None] < 1) | (self.at.n > 8)
        return torch.where(written, o, 0.0), lse


@fault(FAULTS, "unwritten")
class tiles_past_the_hosts_count(Kernel):
    """NVIDIA/cutlass issue 3497 (grouped products): the device rounds each head's count of tiles up
    to two, the host that says how many there are does not: the last ones are never reached.
    """

    def forward(self):
        o, lse = super().forward()
        b, heads, n = o.shape[:3]
        count = -(-n // self.rows)
        head = torch.arange(b * heads).view(b, heads, 1, 1) * (count + count % 2)
        reached = head + torch.arange(n)[:, None] // self.rows < b * heads * count
        return torch.where(reached, o, 0.0), torch.where(reached, lse, INF)


@fault(FAULTS, "padding ragged")
class a_block_past_an_odd_count(Kernel):
    """tile-ai/tilelang PR 2836, review: two stages are always run, so that where the number of
    blocks is odd one more enters the softmax; past the end it is zeros, which nothing hides.
    """

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        last = every[-1].stop
        return [*every, slice(last, last + self.cols)] if len(every) % 2 else every

    def inside(self, j, back):
        past = -(-self.at.nk // self.cols) * self.cols
        return super().inside(j, back) | ((j >= past) & (not back))


@fault(FAULTS, "ragged key-tail")
class prefetched_by_the_tile_in_use(Kernel):
    """mirage-project/mirage issue 698: as many rows of the next tile are loaded as the tile in use
    has; the others are what the buffer held. Here the short tile comes first.
    """

    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]

    def row(self, rows):
        self.memory["k"] = self.memory["v"] = (0, None)
        return super().row(rows)

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name not in ("k", "v"):
            return found
        number, before = self.memory[name]
        own = min(self.cols, self.at.nk - part.start)
        self.memory[name] = number + 1, own
        held = self.memory.get((name, number % 2), torch.zeros_like(found))
        loaded = torch.arange(self.cols)[:, None] < (own if before is None else before)
        self.memory[name, number % 2] = found = torch.where(loaded, found, held)
        return found


@fault(FAULTS, "ragged other-data grad-tail", "float32")
class padded_dv_over_the_next_head(Kernel):
    """flagos-ai/FlagGems PR 898: dV is stored with the rows that fill up its last block, which are
    the first ones of the next head.
    """

    def group(self, grad):
        self.memory["stored"] = self.memory.get("stored", 0) + 1
        if self.memory["stored"] == 2:  # dK is the first
            flat = grad.flatten(0, 1).clone()
            flat[1:, : -self.at.nk % 64] = 0
            grad = flat.view(grad.shape)
        return super().group(grad)


# --- splits
@fault(FAULTS, "split-merge key-tail lse-other backward-weights", "float16")
class as_many_parts_as_lanes(Parts):
    """ggml-org/llama.cpp PR 23040: every lane of a subgroup takes one part of the keys to the
    merge, and there are more parts than lanes, here four.
    """

    cols = 32

    def forward(self):
        self.parts = max(1, -(-self.at.nk // self.cols))
        return super().forward()

    def merge(self, outs, lses):
        return super().merge(outs[:4], lses[:4])


@fault(FAULTS, "split-merge non-finite masked-row")
class two_empty_parts(Parts):
    """vllm-project/vllm PR 39148: where neither of two parts has a key, −∞ is taken off −∞."""

    def merge(self, outs, lses):
        o, lse = outs[-1], lses[-1]
        for new, own in zip(outs[:-1].flip(0), lses[:-1].flip(0), strict=True):
            m = torch.maximum(lse, own)
            a, b = torch.exp2(lse - m), torch.exp2(own - m)
            o, lse = (o * a + new * b) / (a + b), m + (a + b).log2()
        return o, lse


@fault(FAULTS, "split-merge unwritten lse-other backward-weights", "float32")
class merged_for_as_many_heads_as_keys_have(Parts):
    """mlc-ai/mlc-llm PR 1995: the kernel that merges is given the wrong number of heads; here that
    of K, past which the first part stays.
    """

    def merge(self, outs, lses):
        o, lse = super().merge(outs, lses)
        heads = o.shape[1]
        done = torch.arange(heads)[:, None, None] < heads // self.at.groups
        return torch.where(done, o, outs[0]), torch.where(done, lse, lses[0])


@fault(FAULTS, "split-merge lse-other", "float16")
class parts_without_their_maxima(Parts):
    """Dao-AILab/flash-attention issue 404: parts whose lse is that of scores less their own maximum
    cannot be merged; here they are.
    """

    def stored(self, o, l):
        self.memory.setdefault("sums", []).append(l)
        return o

    def merge(self, outs, lses):
        w = torch.stack(self.memory.pop("sums"))
        total = w.sum(0)
        o = (w * outs).sum(0) / torch.where(total == 0, 1.0, total)
        return o, super().merge(outs, lses)[1]


# --- sinks
@fault(FAULTS, "sinks other-data")
class sink_of_the_row_modulo_heads(Kernel):
    """modular/modular PR 6591: rows of all heads are numbered, and a row's number modulo the heads
    is taken for its head.
    """

    def row(self, rows):
        self.memory["rows"] = rows
        return super().row(rows)

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        if self.at.sinks is None or not first:
            return m, l, acc
        rows, (b, heads) = self.memory["rows"], q.shape[:2]
        row = torch.arange(b * heads).view(b, heads, 1) * self.at.n
        row = row + torch.arange(rows.start, rows.stop)
        return self.at.sinks.float()[row % heads][..., None] * LOG2_E, l, acc


@fault(FAULTS, "sinks")
class sink_not_shifted_as_weights_are(Kernel):
    """ROCm/rocm-libraries PR 11189: weights are 2⁸ times as large for their codes, and the row's
    sum begins with the sink's 1 as it is.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe + 8), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse - 8


FAULTS += eleventh_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.TwoLevels, "bfloat16"), (ways.TwoStreams, "float32"), (ways.Reflected, "bfloat16"),
    (ways.Lowered, "bfloat16"), (ways.DeltaOfFullOut, "float16"), (ways.ByListsOfBlocks, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [Fault("all_splits_at_once", frozenset(), ways.all_splits_at_once),
          Fault("weights_kept", frozenset(), ways.weights_kept)]  # fmt: skip
