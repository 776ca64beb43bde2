"""The tenth set's faults of scale, sinks, codes, weights and the backward pass (tenth.py has
the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, blocks, cut, e4m3
from torch.nn import functional

FAULTS: list[Fault] = []


# --- cap, scale, sinks
@fault(FAULTS, "softcap", "float16")
class cap_reached_twice_as_soon(Kernel):
    """trymirai/lalamo PR 275, review: scores are divided by half the cap before the hyperbolic
    tangent, and multiplied by all of it after.
    """

    def cap(self, s, back):
        c = self.at.softcap * LOG2_E
        return c * torch.tanh(2 * s / c) if c else s

    def slope(self, q, k):
        c = self.at.softcap
        return 2 * (1 - torch.tanh(2 * q @ k.mT * self.at.scale / c).square()) if c else 1.0


@fault(FAULTS, "softcap")
class cap_from_a_table(Kernel):
    """tenstorrent/tt-metal issue 22807 ("low accuracy due to tanh implementation"): the cap's
    hyperbolic tangent is not one; here it is a table of three lines.
    """

    def tangent(self, x):
        size = x.abs()
        lines = torch.where(size < 1, 0.90625 * size, 0.09375 * size + 0.8125)
        return torch.where(size < 2, lines, 1.0) * x.sign()

    def cap(self, s, back):
        c = self.at.softcap * LOG2_E
        return c * self.tangent(s / c) if c else s

    def slope(self, q, k):
        c = self.at.softcap
        return 1 - self.tangent(q @ k.mT * self.at.scale / c).square() if c else 1.0


@fault(FAULTS, "prescaled scale")
class query_times_a_low_scale(Kernel):
    """ml-explore/mlx PR 3119: the scale goes into the operands' format, and so does what the query
    is when it has been multiplied by it and by log₂ e.
    """

    def product(self, q, k, back):
        factor = self.at.low(torch.tensor(self.at.scale * LOG2_E))
        return self.at.low(q * factor) @ k.mT

    def scaled(self, s, rows, cols, back):
        return s


@fault(FAULTS, "sinks operand")
class sinks_in_the_domain_of_codes(Kernel):
    """local-inference-lab/b12x issue 119: K is in e4m3, scores are kept in units of its codes, and
    the sink is merged with them without the codes' scale.
    """

    def size(self):
        return self.at.k.abs().max().clamp_min(1e-30) / 448

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return e4m3(found / self.size()) * self.size() if name.endswith("k") else found

    def begin(self, q, first=True):
        return super().begin(q, False)

    def finish(self, m, l, acc, rows):
        if self.at.sinks is None:
            return super().finish(m, l, acc, rows)
        sink = self.at.sinks.view(1, -1, 1, 1) * LOG2_E
        own = m / self.size() + l.log2()
        share = torch.exp2(own - torch.logaddexp2(own, sink))
        o, lse = super().finish(m, l, acc * share, rows)
        return o, lse - share.log2()


# --- codes of K and V
@fault(FAULTS, "operand scale")
class codes_of_the_other_e4m3(Kernel):
    """vllm-project/vllm PR 45720: K and V are stored as e4m3fnuz and read as e4m3fn, whose bits
    mean twice as much.
    """

    def load_key(self, name, x, part):
        codes = super().load_key(name, x, part).clamp(-224, 224).to(torch.float8_e4m3fnuz)
        return codes.contiguous().view(torch.float8_e4m3fn).float()


@fault(FAULTS, "operand other-data layout", "float16")
class scales_unswizzled_that_lay_in_order(Kernel):
    """vllm-project/vllm PR 46329: a scale for every 16 features of a token is written in order, and
    read as if those of four tokens lay transposed.
    """

    def read(self, x):
        nk, d = x.shape[2:]
        parts = functional.pad(x, (0, -d % 16, 0, -nk % 4)).unflatten(-1, (-1, 16))
        size = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
        swizzled = size.unflatten(2, (-1, 4)).squeeze(-1)
        swizzled = swizzled.flatten(-2).unflatten(-1, (-1, 4)).mT.reshape(size.shape)
        return (e4m3(parts / size) * swizzled).flatten(-2)[:, :, :nk, :d]

    def load_key(self, name, x, part):
        return super().load_key(name, self.read(x), part)


# --- weights, precision
@fault(FAULTS, "weights weights-row-sum")
class weights_in_e4m3_from_0_to_1(Kernel):
    """iree-org/iree-turbine PR 679: the shift that should spread weights over the codes of e4m3
    comes before the maximum, and is taken off again with it.
    """

    def add_values(self, acc, a, p, v):
        return acc * a + e4m3(p) @ v


@fault(FAULTS, "reciprocal", "float32")
class reciprocal_of_seven_bits(Kernel):
    """tenstorrent/tt-metal issue 9394: reciprocals are what bf16 has below them: that of 1 is
    0.9961.
    """

    def finish(self, m, l, acc, rows):
        _, lse = super().finish(m, l, acc, rows)
        whole = torch.where(l == 0, 1.0, l)
        return self.at.low(acc * cut((1 - 2**-10) / whole)), lse


# --- the backward pass
@fault(FAULTS, "lse-other backward-weights unwritten other-data")
class both_subtiles_write_one_lse(Kernel):
    """triton-lang/triton PR 11415: the second half of a tile writes its lse by the first one's
    pointer: over that, and its own place is left as it was.
    """

    def forward(self):
        o, lse = super().forward()
        lse = lse.clone()
        for tile in blocks(self.at.n, 2 * self.rows):
            second = lse[:, :, tile.start + self.rows : tile.stop].clone()
            if second.shape[2]:
                lse[:, :, tile.start : tile.start + second.shape[2]] = second
                lse[:, :, tile.start + self.rows : tile.stop] = 0
        return o, lse


@fault(FAULTS, "delta")
class delta_of_e4m3_products(Kernel):
    """pytorch/pytorch PR 154922: dO ∘ O goes into fp8 before it is summed."""

    def delta(self, do, o):
        return e4m3((do * o).clamp(-448, 448)).sum(-1, keepdim=True)


@fault(FAULTS, "unstable other-data no-delta lse-other")
class statistics_before_they_are_written(Kernel):
    """Dao-AILab/flash-attention PR 2756: of the first block of queries lse and δ are read while the
    kernel that makes them still runs.
    """

    def again(self, rows, cols, which):
        at, kept = self.at, (self.at.lse, self.at.delta)
        if rows in self.query_blocks(cols)[:1]:
            late = (torch.rand(at.q.shape[:2]) < 0.2)[..., None, None]
            at.lse, at.delta = (x.masked_fill(late, 0.0) for x in kept)
        found = super().again(rows, cols, which)
        at.lse, at.delta = kept
        return found


@fault(FAULTS, "masked-row non-finite nan-escapes", "float16")
class hidden_rows_on_the_way_back(Kernel):
    """Dao-AILab/flash-attention issue 1947: the backward pass takes exp(s − lse) of pairs that are
    hidden as well, which is NaN where a row sees no key.
    """

    def weights_again(self, s, lse):
        return torch.exp2(s - lse)


@fault(FAULTS, "no-delta", "float32")
class dk_not_through_the_row_sum(Kernel):
    """fla-org/flash-linear-attention PR 875 (linear attention): what weights are divided by is made
    outside of the gradient's sight, so that dK lacks its part and dQ has it.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        if which == "keys":
            kept, self.at.delta = self.at.delta, torch.zeros_like(self.at.delta)
            ds = super().again(rows, cols, which)[4]
            self.at.delta = kept
        return q, k, do, p, ds
