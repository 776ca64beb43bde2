"""Mistakes in a tiled kernel that look like others: which of them it is."""

import pytest
import torch
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, attention, bf16, fp16

from halfulp.reconstruct import reconstruct


class OutThroughHalf(Kernel):
    def finish(self, m, l, acc, rows):
        return self.at.low(fp16(acc / torch.where(l == 0, 1.0, l))), m + l.log2()


class GradientsThroughHalf(Kernel):
    some = (0, 1, 2)

    def backward(self):
        return tuple(fp16(x) if i in self.some else x for i, x in enumerate(super().backward()))


class GradValueThroughHalf(GradientsThroughHalf):
    some = (2,)


class SmallTiles(Kernel):
    rows, cols = 32, 16


class RescaledOutInLow(SmallTiles):
    def add_values(self, acc, a, p, v):
        return super().add_values(acc, bf16(a), p, v)


class RescaledSumInLow(SmallTiles):
    def add_row(self, l, a, p):
        return super().add_row(l, bf16(a), p)


class RescaledInLow(RescaledOutInLow, RescaledSumInLow):
    pass


class LaterKeysUnscaled(Kernel):
    def scaled(self, s, rows, cols, back):
        return s * LOG2_E if cols.start > 0 else super().scaled(s, rows, cols, back)


class DeltaSummedInLow(Kernel):
    def delta(self, do, o):
        total = torch.zeros_like(do[..., :1])
        for i in range(0, do.shape[-1], 16):
            part = slice(i, i + 16)
            total = bf16(total + (do[..., part] * o[..., part]).sum(-1, keepdim=True))
        return total


class DeltaOfColumns(Kernel):
    def grad_scores(self, p, dp, delta, slope):
        return p * (dp - (p * dp).sum(-2, keepdim=True)) * slope


@pytest.mark.parametrize(
    ("kernel", "cause", "told"),
    [
        (OutThroughHalf, "out", "O passes through float16"),
        (GradientsThroughHalf, "grad-stored", "gradients pass through float16"),
        (GradValueThroughHalf, "grad-stored", "dV passes through float16"),
        (RescaledOutInLow, "rescale", "rescale_of=out"),
        (RescaledSumInLow, "rescale", "rescale_of=row_sum"),
        (RescaledInLow, "rescale", "rescale=bf16"),
    ],
)
def test_the_mistake_is_told_from_others_like_it(kernel, cause, told):
    found = reconstruct(attention(kernel))
    # what does no harm is named as well
    named = [(n.cause.key, n.text) for n in found.causes] or [
        (d.cause, d.text) for d in found.harmless if d.cause]  # fmt: skip
    assert any(told in text for key, text in named if key == cause)
    assert {key for key, _ in named} == {cause}


@pytest.mark.parametrize(
    ("kernel", "cause"),
    [
        (LaterKeysUnscaled, "scale"),
        (DeltaSummedInLow, "delta"),
        (DeltaOfColumns, "no-delta"),
    ],
)
def test_what_is_read_is_told_from_what_it_looks_like(kernel, cause):
    found = reconstruct(attention(kernel))
    named = [n.cause.key for n in found.causes] + [p.cause for p in found.places]
    assert named[0] == cause
