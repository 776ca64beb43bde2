"""The twelfth set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, heads, tails, memory and splits are here; scale, cap, sinks, precision and the
backward pass in twelfth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.twelfth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twelfth_kernel as ways
from benchmarks.unseen.attention import twelfth_scores
from benchmarks.unseen.attention.eighth_kernel import as_heads, fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, load
from torch.nn import functional

AGAIN = (
    "the_first_32_columns",  # tenth: the_first_64_features
    "splits_summed_in_16_bits",  # fifth: partial_results_bf16
    "packed_exponential",  # fourth: exp_half, of fp16
    "grad_scores_in_mxfp8",  # second: dS in e4m3
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask mask-finite")
class mask_of_booleans_added(Kernel):
    """huggingface/transformers PR 41443: the eager path adds a boolean mask to the scores: those
    that may be seen are larger by 1, and none is hidden.
    """

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s + self.given_mask(rows, cols).float() * LOG2_E
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask other-data", "float16")
class bias_of_the_first_row(Kernel):
    """Dao-AILab/flash-attention PR 540, comment: a bias goes by the key's number alone; every query
    has the first one's.
    """

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if found.dtype == torch.bool:
            return found
        first = super().given_mask(slice(0, rows.stop - rows.start), cols)
        return first[..., :1, :].expand_as(found)


@fault(FAULTS, "window query-tail")
class windows_begin_is_unsigned(Kernel):
    """microsoft/onnxruntime PR 29002 (positions): u32 − u32 wraps below 0; here where a window
    begins, so that rows nearer to the first key than the window is wide see nothing.
    """

    def window(self, i, j, back):
        keep, left = super().window(i, j, back), self.at.window[0]
        return keep & (i >= left) if left >= 0 else keep


@fault(FAULTS, "window", "float16")
class blocks_of_the_last_rows_window(Kernel):
    """vllm-project/vllm-xpu-kernels PR 383: the first block of keys is each subgroup's own and has
    to be one for all of them; here it is that of a tile's last row.
    """

    cols = 32

    def window(self, i, j, back):
        keep, left = super().window(i, j, back), self.at.window[0]
        if left < 0:
            return keep
        last = i // self.rows * self.rows + self.rows - 1
        return keep & (j >= (last - left).clamp_min(0) // self.cols * self.cols)


# --- heads, layouts
@fault(FAULTS, "unwritten")
class one_program_for_a_key_head(Kernel):
    """aws-neuron/nki-samples PR 109: the grid has a program for every key head, the kernel computes
    one query head in each; the others of a group are never reached.
    """

    def forward(self):
        o, lse = super().forward()
        own = (torch.arange(o.shape[1]) % self.at.groups == 0)[:, None, None]
        return torch.where(own, o, 0.0), torch.where(own, lse, INF)


@fault(FAULTS, "layout other-data")
class layout_told_by_divisibility(Kernel):
    """vllm-project/vllm PR 53681: which axis is the heads' is told by what is a multiple of 4:
    with four key heads K and V, [H, N, D] in memory, are read as [N, H, D].
    """

    def forward(self):
        at, groups = self.at, self.at.groups
        if at.k.shape[1] // groups % 4 == 0:
            at.k, at.v = (self.spread(as_heads(x[:, ::groups])) for x in (at.k, at.v))
        return super().forward()


@fault(FAULTS, "other-data", "float32")
class offsets_of_scores_wrap(Kernel):
    """NVIDIA/FasterTransformer PR 524 (softmax): offsets into the scores of all heads overflow
    their integer, and later rows read earlier ones; here the integer has 15 bits.
    """

    def forward(self):
        at = self.at
        full = at.q @ at.k.mT
        rows = torch.arange(full[..., 0].numel()) * at.nk % 2**15 // at.nk
        self.memory["full"] = full.flatten(0, 2)[rows].view(full.shape)
        return super().forward()

    def scaled(self, s, rows, cols, back):
        if not back:
            s = load(self.memory["full"], rows)[..., cols]
            s = functional.pad(s, (0, cols.stop - cols.start - s.shape[-1]))
        return super().scaled(s, rows, cols, back)


# --- ends, and what is never written
@fault(FAULTS, "key-tail ragged", "float32")
class keys_past_a_power_of_two(Kernel):
    """intel/torch-xpu-ops issue 4772 (softmax): rows just longer than a power of 2 are wrong, up to
    half as long again; here what lies past it is left out, from 64 on.
    """

    def inside(self, j, back):
        keep, nk = super().inside(j, back), self.at.nk
        low = 1 << max(0, (nk - 1).bit_length() - 1)
        return keep & (j < low) if low >= 64 and nk <= low + low // 2 else keep


@fault(FAULTS, "ragged padding unnormalized weights-disagree", "float32")
class idle_lanes_in_the_sum(Kernel):
    """uxlfoundation/oneDNN PR 2425 (softmax): a reduction goes over lanes that have no column as
    well, where columns do not fill their group; here these hold the last column's weight.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        self.memory["used"] = self.at.nk - cols.start
        return super().online(m, l, acc, s, v, rows, cols)

    def add_row(self, l, a, p):
        used = self.memory["used"]
        idle = -used % 16 if used < p.shape[-1] else 0
        own = super().add_row(l, a, p)
        return own + idle * p[..., used - 1 : used] if idle else own


@fault(FAULTS, "unwritten ragged", "float16")
class the_first_32_columns(Kernel):
    """mni-ml/framework PR 38: a thread computes one column, and there are at most 32 of them; the
    other columns of O and of all gradients stay 0.
    """

    @staticmethod
    def written(x):
        return torch.where(torch.arange(x.shape[-1]) < 32, x, 0.0)

    def forward(self):
        o, lse = super().forward()
        self.at.whole = o
        return self.written(o), lse

    def delta(self, do, o):
        return super().delta(do, self.at.whole)

    def backward(self):
        return tuple(map(self.written, super().backward()))


# --- what another tile or thread left
@fault(FAULTS, "other-data unstable")
class values_of_the_stage_after(Kernel):
    """tile-ai/tilelang PR 2360, review: barriers count one thread, and all arrive, so that a stage
    is given back while it is in use: some of V is the next tile's.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "v" or part.stop >= self.at.nk:
            return found
        after = load(x, slice(part.stop, part.stop + self.cols))
        late = (torch.rand(self.cols // 8) < 0.3).repeat_interleave(8)
        return torch.where(late[:, None], after, found)


@fault(FAULTS, "other-data unstable")
class out_read_before_it_is_stored(Kernel):
    """tile-ai/TileOPs PR 1633: O goes through shared memory without a barrier, and some warps read
    what the tile before had left there.
    """

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        before, self.memory["o"] = self.memory.get("o", o), o
        late = (torch.rand(self.rows // 8) < 0.2).repeat_interleave(8)
        return torch.where(late[:, None], before, o), lse


@fault(FAULTS, "unstable maximum rescale other-data", "float32")
class maximum_of_the_peers_last_tile(Kernel):
    """NVIDIA/cudnn-frontend PR 569, review: two threads have half of a row's columns each and tell
    each other their maxima, in memory that is used again too soon: some read an older one, and
    the halves are taken relative to two maxima.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        halves = s.chunk(2, -1)
        own = [x.amax(-1, keepdim=True) for x in halves]
        older = self.memory.get(rows.start, own)
        self.memory[rows.start] = own
        late = (torch.rand(s.shape[-2] // 8) < 0.2).repeat_interleave(8)[:, None]
        peers = [torch.where(late, a, b) for a, b in zip(older[::-1], own[::-1], strict=True)]
        news = [torch.maximum(m, torch.maximum(a, b)) for a, b in zip(own, peers, strict=True)]
        safe = [torch.where(x == -INF, 0.0, x) for x in news]
        p = torch.cat([torch.exp2(x - y) for x, y in zip(halves, safe, strict=True)], -1)
        a = torch.exp2(m - safe[0])
        return news[0], self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "unstable group-sum", "float16")
class heads_of_a_group_overwrite(Kernel):
    """Dao-AILab/flash-attention PR 2158 ("GQA backward non deterministic"): heads of a group add to
    the same dK and dV in no order; here now and then what was there before is lost.
    """

    def group(self, grad):
        first, *others = grad.unflatten(1, (-1, self.at.groups)).unbind(2)
        total = first
        for own in others:
            late = (torch.rand(grad.shape[2]) < 0.1)[:, None]
            total = torch.where(late, own, total + own)
        return total


@fault(FAULTS, "unstable backward-weights backward-scores other-data")
class weights_over_scores_still_read(Kernel):
    """hao-ai-lab/FastVideo PR 1819, review: in the kernel of dK and dV weights are stored over the
    scores, which other warps have not all read: some columns are made of weights.
    """

    def again(self, rows, cols, which):
        self.memory["keys"] = which == "keys"
        return super().again(rows, cols, which)

    def weights_again(self, s, lse):
        p = super().weights_again(s, lse)
        if not self.memory["keys"]:
            return p
        wide = s.shape[-1] // 4
        over = s.clone()
        over[..., wide : 2 * wide] = p[..., 3 * wide :]
        late = (torch.rand(s.shape[-2] // 16) < 0.2).repeat_interleave(16)
        return torch.where(late[:, None], super().weights_again(over, lse), p)


# --- splits
@fault(FAULTS, "split-merge lse-other backward-weights")
class idle_splits_run_the_last_block(Parts):
    """vllm-project/FlashMLA PR 25: a split that has no block runs the last one again, whose result
    has to be thrown away; here it is merged.
    """

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        outs, lses = [], []
        for part in range(self.parts):
            m, l, acc = self.begin(q, part == 0)
            for cols in every[part :: self.parts] or every[-1:]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            outs.append(acc / torch.where(l == 0, 1.0, l))
            lses.append(m + l.log2())
        o, lse = self.merge(torch.stack(outs), torch.stack(lses))
        return self.at.low(o), lse


@fault(FAULTS, "accumulator split-merge out")
class splits_summed_in_16_bits(Parts):
    """vllm-project/tpu-inference PR 3212: what each part gives is multiplied by its weight, and
    added up, in the format of O.
    """

    def merge(self, outs, lses):
        low = self.at.low
        _, lse = super().merge(outs, lses)
        w = torch.exp2(lses - torch.where(lse == -INF, 0.0, lse))
        total = torch.zeros_like(outs[0])
        for own, part in zip(w, outs, strict=True):
            total = low(total + low(low(own) * low(part)))
        return total, lse


FAULTS += twelfth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.LanesReducedLast, "bfloat16"), (ways.ScaledInTheExponent, "bfloat16"),
    (ways.UnevenParts, "bfloat16"), (ways.GradientsByTree, "float32"),
    (ways.TransposedBackward, "float16"), (ways.InterleavedQueries, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [Fault("einsum_by_groups", frozenset(), ways.einsum_by_groups),
          Fault("tiles_by_autograd", frozenset(), ways.tiles_by_autograd, "float16")]  # fmt: skip
