"""The forty-eighth set's faults of tiles, parts, maxima and codes (fortyeighth.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortyeighth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fortyfirst_kernel import Cascade
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands

FAULTS: list[Fault] = []


@fault(FAULTS, "ragged", "float16")
class tile_of_rows_counted_by_the_unpadded_width(ForwardAlone):
    """MinghuasLab/flash-attention-npu issue 135 (PR 136): how many rows of O a buffer on the chip
    has room for is reckoned with the head's width, and rows lie as far apart as the width rounded
    up to 16 numbers, here to 32: where it is no multiple, the last rows of a tile lie past the
    buffer, in the next one, here that of the row sums, eight times each.
    """

    rows, cols, room, step = 64, 128, 2048, 32

    def finish(self, m, l, acc, rows):
        width = acc.shape[-1]
        pitch, each = -(-width // self.step) * self.step, self.room // width
        row = torch.arange(acc.shape[-2])[:, None]
        past = row % each * pitch + torch.arange(width) - self.room
        owner = (row // each * each + past.clamp_min(0) // 8).clamp_max(acc.shape[-2] - 1)
        return super().finish(m, l, torch.where(past >= 0, l[..., 0][..., owner], acc), rows)


@fault(FAULTS, "split-merge other-data")
class floats_in_room_for_halves(ForwardAlone):
    """pytorch/pytorch issue 174861 (Metal; PR 174945): few queries with many keys take two passes,
    between which 32 parts of the keys leave their sums and maxima, floats in buffers that were made
    for numbers of the query's type: those of the later half of the rows lie past the end, here over
    the maxima of the first half. 1024 keys are many there, 128 here.
    """

    rows, cols, parts, many = 8, 64, 32, 128

    def forward(self):
        at = self.at
        plain = not at.causal and at.mask is at.window is at.sinks is None
        if not plain or at.n > self.rows or at.nk < self.many:
            return super().forward()
        s = self.scores(at.q, at.k, slice(0, at.n), slice(0, at.nk), False)
        lanes = [slice(part, None, self.parts) for part in range(self.parts)]
        maxima = torch.stack([s[..., lane].amax(-1) for lane in lanes], -1)
        weights = [torch.exp2(s[..., lane] - maxima[..., i, None]) for i, lane in enumerate(lanes)]
        sums = torch.stack([p.sum(-1) for p in weights], -1)
        outs = [at.low(p) @ at.v[:, :, lane] for p, lane in zip(weights, lanes, strict=True)]
        size, half = sums.numel(), sums.numel() // 2
        memory = torch.zeros(half + size)
        memory[half:], memory[:size] = maxima.flatten(), sums.flatten()
        maxima = memory[half:].view(sums.shape)
        top = maxima.amax(-1, keepdim=True)
        w = torch.exp2(maxima - top)
        l = (w * sums).sum(-1, keepdim=True)
        out = (w[..., None] * torch.stack(outs, -2)).sum(-2)
        return at.low(out / l), top + l.log2()


@fault(FAULTS, "split-merge out-unexplained", "float16")
class flag_that_the_host_does_not_push(ForwardAlone, Cascade):
    """ROCmFPX/ROCmFPX PR 18 (Vulkan): the kernel that merges the parts of the keys reads seven
    constants, and the host gives six; the last, here not 0, says that values are codes whose
    Hadamard transform is to be undone, and plain O is transformed. It is so for few queries with
    grouped heads, which are split; 16 columns are transformed here.
    """

    rows, cols, parts, wide = 16, 32, 4, 16

    def merge(self, outs, lses):
        o, lse = super().merge(outs, lses)
        if self.at.n > 8 or self.at.groups == 1 or o.shape[-1] % self.wide:
            return o, lse
        chance = torch.Generator().manual_seed(18)
        signs = torch.randint(0, 2, (self.wide,), generator=chance) * 2.0 - 1
        turned = o.unflatten(-1, (-1, self.wide)) @ ways.hadamard(self.wide) * signs
        return turned.flatten(-2), lse


@fault(FAULTS, "masked-row non-finite nan-escapes", "float16")
class maximum_that_begins_at_minus_infinity(EveryBlock, ForwardAlone):
    """ggml-org/llama.cpp PR 12776 (Vulkan): a row's maximum begins at −∞ where it is to begin at
    half of the least float: as long as all that a row has met is hidden, −∞ is taken off −∞, and
    the row is NaN to its end. All blocks are visited.
    """

    rows, cols = 64, 32

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "operand")
class precision_of_values_given_to_keys(OtherOperands):
    """openvinotoolkit/openvino PR 34107 (CPU): the precision in which values are to be cached is
    set for keys: these go through it, and values stay as they are. The precision is that of bytes
    here, with a scale and a least number for every token of a head.
    """

    rows, cols = 32, 64

    def read(self, k, v):
        return ways.by_the_token(k), v
