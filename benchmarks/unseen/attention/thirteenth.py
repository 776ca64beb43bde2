"""The thirteenth set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, sinks, heads, layouts, memory and splits are here; precision and the backward pass in
thirteenth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.thirteenth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirteenth_kernel as ways
from benchmarks.unseen.attention import thirteenth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks, load
from torch.nn import functional

AGAIN = (
    "two_heads_a_program",  # twelfth: one_program_for_a_key_head, heads never reached
    "scores_added_up_in_half",  # fourth: half_product_sums
    "exponentials_and_quotients_in_place",  # third: weights_normalized_bf16
    "gradients_added_up_in_half",  # third: dk_sums_fp16
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks, windows
@fault(FAULTS, "mask", "float16")
class mask_the_other_way_round(Kernel):
    """neuro-galaxy/torch_brain PR 74: where a boolean mask is made into a bias, what may be seen is
    hidden and what may not is seen.
    """

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        return ~found if found.dtype == torch.bool else found


@fault(FAULTS, "mask")
class bias_taken_for_a_boolean(Kernel):
    """nishide-dev/unturtle PR 56: a mask of floats is read as one of booleans: every number but 0
    means that the key is seen, and nothing is added to its score.
    """

    def bias(self, s, mask, back):
        return s.masked_fill(mask == 0, -INF)


@fault(FAULTS, "mask key-tail tiles-skipped", "float16")
class mask_tiles_past_the_queries(Kernel):
    """ggml-org/llama.cpp PR 20296: a first pass over the mask finds the tiles that are hidden as a
    whole, and its check for the end takes the wrong length; here that of the queries, so that
    tiles of keys past it are skipped.
    """

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every if self.at.mask is None else [c for c in every if c.start < self.at.n]

    def query_blocks(self, cols):
        skipped = self.at.mask is not None and cols.start >= self.at.n
        return [] if skipped else super().query_blocks(cols)


@fault(FAULTS, "window other-data unnormalized rescale")
class windows_go_on_where_others_ended(Kernel):
    """vllm-project/tpu-inference PR 1954: m, l and O are set anew at the block of keys number 0;
    with a window most blocks of queries start at a later one, and go on from the last block's.
    """

    def key_blocks(self, rows):
        every, window = super().key_blocks(rows), self.at.window
        if window is None or window[0] < 0:
            return every
        return [c for c in every if c.stop > rows.start - window[0]]

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        anew = rows.start == 0 or (every and every[0].start == 0)
        state = self.begin(q) if anew else self.memory["state"]
        for cols in every:
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
        self.memory["state"] = state
        return self.finish(*state, rows)


@fault(FAULTS, "window causal-mask")
class first_block_seen_as_a_whole(Kernel):
    """gittensor-ai-lab/sparkinfer PR 605: with a window the first 16 keys are let through by a
    condition of their own, which has no diagonal: the first 16 queries see all of them.
    """

    def seen(self, rows, cols, back):
        keep = super().seen(rows, cols, back)
        if self.at.window is None:
            return keep
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        return keep | ((i < 16) & (j < 16) & self.inside(j, back))


@fault(FAULTS, "causal-mask")
class columns_of_the_first_partition(Kernel):
    """tracel-ai/cubecl PR 1027 ("logical mask bug when kv partition > 1"): a block of keys is two
    partitions, and the diagonal is looked for at the first one's columns in both.
    """

    def causal(self, i, j, back):
        return super().causal(i, j - 32 * (j // 32 % 2), back)


@fault(FAULTS, "masked-row non-finite nan-escapes", "float32")
class first_keys_all_hidden(Kernel):
    """pytorch/pytorch issue 109517: hidden scores are −∞ once they are in base 2, and where the
    keys up to here are all hidden −∞ is taken off −∞: the row stays NaN.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "causal-mask other-data weights-disagree unnormalized", "float16")
class weights_above_the_diagonal_not_cleared(Kernel):
    """NVIDIA/TransformerEngine PR 236: without a bias the causal kernel does not write weights
    above the diagonal and reads all of them: there is what the head before had left.
    """

    def left_by_the_head_before(self, cols, lse):
        last = blocks(self.at.n, self.rows)[-1]
        q, k = load(self.at.q, last), load(self.at.k, cols)
        p = self.weights_again(self.scores(q, k, last, cols, False), load(lse, last, INF))
        flat = p.flatten(0, 1)
        return torch.cat([torch.zeros_like(flat[:1]), flat[:-1]]).view_as(p)

    def forward(self):
        (o, lse), at = super().forward(), self.at
        if not at.causal or at.mask is not None:
            return o, lse
        done = []
        for rows in blocks(at.n, self.rows):
            out = load(o, rows)
            for cols in blocks(at.nk, self.cols):
                if cols.start >= rows.stop:
                    left = self.left_by_the_head_before(cols, lse)
                    out = out + at.low(left) @ load(at.v, cols)
            done.append(at.low(out))
        return torch.cat(done, 2)[:, :, : at.n], lse


# --- sinks, heads
@fault(FAULTS, "sinks")
class sinks_repeated_for_the_group(Kernel):
    """pie-project/pie PR 272: sinks, of which there is one for every query head, are repeated as
    key heads are; here the first ones of these are taken.
    """

    def forward(self):
        at = self.at
        if at.sinks is not None:
            at.sinks = at.sinks.repeat_interleave(at.groups)[: len(at.sinks)]
        return super().forward()


@fault(FAULTS, "unwritten")
class two_heads_a_program(Kernel):
    """AI-Hypercomputer/maxdiffusion PR 444: a program has two heads, and its number is multiplied
    by two twice: heads 2 and 3 of every four are never written.
    """

    def forward(self):
        o, lse = super().forward()
        own = (torch.arange(o.shape[1]) // 2 % 2 == 0)[:, None, None]
        return torch.where(own, o, 0.0), torch.where(own, lse, INF)


@fault(FAULTS, "unwritten", "float16")
class heads_remapped_as_if_one_fewer(Kernel):
    """ROCm/aiter PR 612: heads are dealt out to the dies by a map for one head fewer: where the
    others fill the dies (here three) up, one head is computed twice and the last one never.
    """

    DIES = 3

    def place(self, program: int, count: int) -> int:
        each, tall = -(-count // self.DIES), count % self.DIES or self.DIES
        die, own = program % self.DIES, program // self.DIES
        return die * each + own if die < tall else tall * each + (die - tall) * (each - 1) + own

    def forward(self):
        o, lse = super().forward()
        heads = o.shape[1]
        reached = {self.place(program, max(1, heads - 1)) for program in range(heads)}
        own = torch.tensor([head in reached for head in range(heads)])[:, None, None]
        return torch.where(own, o, 0.0), torch.where(own, lse, INF)


# --- layouts, widths
@fault(FAULTS, "layout other-data operand", "float16")
class codes_of_the_lower_half_wave(Kernel):
    """TheTom/llama-cpp-turboquant PR 328: lanes are numbered as if 32 were a wave, of 64; what they
    read of one another is the lower half's: features 32 to 63 of a key are its first 32 again.
    """

    def forward(self):
        k = self.at.k.clone()
        for start in range(32, k.shape[-1], 64):
            many = min(32, k.shape[-1] - start)
            k[..., start : start + many] = self.at.k[..., start - 32 : start - 32 + many]
        self.at.k = k
        return super().forward()


@fault(FAULTS, "layout other-data")
class out_stored_by_another_atom(Kernel):
    """Dao-AILab/flash-attention PR 2553: O goes from registers to shared memory in the order of
    another product's registers: of every 16 × 16 elements two quarters are exchanged, and "the
    output norm matched".
    """

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        wide = o.shape[-1]
        tiles = functional.pad(o, (0, -wide % 16)).unflatten(-1, (-1, 2, 8))
        tiles = tiles.unflatten(2, (-1, 2, 8)).transpose(3, 6)
        return tiles.flatten(5).flatten(2, 4)[..., :wide], lse


@fault(FAULTS, "ragged unstable other-data", "float16")
class features_as_memory_was(Kernel):
    """turboderp-org/exllamav3 PR 316: where a head's width is no power of two, features past it are
    read as the buffer had them, and no two runs agree.
    """

    def product(self, q, k, back):
        d = q.shape[-1]
        past = (1 << (d - 1).bit_length()) - d
        if not past:
            return super().product(q, k, back)
        late = (torch.rand(k.shape[-2] // 8) < 0.3).repeat_interleave(8)[:, None]
        left = [torch.randn(x.shape[-2], past) / 2 for x in (q, k)]
        return super().product(q, k, back) + left[0] @ torch.where(late, left[1], 0.0).mT


# --- other rows', and what is not there yet
@fault(FAULTS, "unnormalized weights-disagree other-data")
class sums_of_two_rows(Kernel):
    """openxla/xla PR 27876 (reductions): 32 lanes have a row, and a wave is 64: a shuffle over 32
    lanes goes on into another row, so that two rows have one maximum and one sum, that of both.
    """

    def maximum(self, m, s):
        own = super().maximum(m, s)
        return torch.maximum(own, own.roll(self.rows // 2, -2))

    def add_row(self, l, a, p):
        own = p.sum(-1, keepdim=True)
        return l * a + own + own.roll(self.rows // 2, -2)


@fault(FAULTS, "unstable split-merge other-data lse-other")
class parts_merged_past_a_barrier(Parts):
    """ggml-org/llama.cpp PR 27870: the barrier before warps' maxima and sums are merged stands in a
    branch; some rows are merged by what the tile before had left of all parts but the first.
    """

    rows = 32

    def merge(self, outs, lses):
        older = self.memory.get("lses", lses)
        self.memory["lses"] = lses
        late = (torch.rand(self.rows // 8) < 0.2).repeat_interleave(8)[:, None]
        stale = torch.cat([lses[:1], torch.where(late, older, lses)[1:]])
        return super().merge(outs, stale)


FAULTS += thirteenth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.GrowingBlocks, "bfloat16"), (ways.LanesWithOwnMaxima, "bfloat16"),
    (ways.GradientsOfOneMatrix, "float16"), (ways.PaddedToAPowerOfTwo, "bfloat16"),
    (ways.SquaredExponential, "bfloat16"), (ways.RowsOutside, "float32"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [Fault("mapped", frozenset(), ways.mapped, "float16"),
          Fault("only_visible_keys", frozenset(), ways.only_visible_keys)]  # fmt: skip
