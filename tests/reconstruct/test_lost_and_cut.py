"""Keys, columns and numbers that a tiled kernel loses, and what they are told as."""

import pytest
import torch
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, load
from torch.nn import functional

from halfulp.reconstruct import reconstruct


class PagesInTheOtherOrder(Kernel):
    """Tiles of 40 keys that begin where the table of pages says, and go on in memory: some keys are
    read twice, and past the end zeros are, whose scores are the largest of rows that need none.
    """

    cols = 40

    def load_key(self, name, x, part):
        pages = -(-x.shape[2] // 64)
        whole = functional.pad(x, (0, 0, 0, pages * 64 - x.shape[2]))
        pool = whole.unflatten(2, (pages, 64)).flip(2).flatten(2, 3)
        at = (pages - 1 - part.start // 64) * 64 + part.start % 64
        return load(pool, slice(at, at + part.stop - part.start))


class MaximumForgotten(Kernel):
    def maximum(self, m, s):
        return torch.where(super().maximum(m, s) == -INF, -INF, 0.0)


class FirstColumnsOfLaterHeadsLost(Kernel):
    def backward(self):
        dq, dk, dv = super().backward()
        for grad in (dk, dv):
            grad[:, 1:, :, :24] = 0
        return dq, dk, dv


class LaterColumnsOfWiderValuesLost(Kernel):
    def backward(self):
        dq, dk, dv = super().backward()
        width = -(-dq.shape[-1] // 64) * 64
        return dq, dk, dv * (torch.arange(dv.shape[-1]) < width)


class MaximumInNats(Kernel):
    """Of which the logarithm of the sum is in base 2."""

    def finish(self, m, l, acc, rows):
        return super().finish(m, l, acc, rows)[0], m / LOG2_E + l.log2()


class RowsAtAnotherPitch(Kernel):
    """Rows of dQ are 8 numbers longer where they are read than where they are written."""

    def backward(self):
        dq, dk, dv = super().backward()
        flat, width = dq.flatten(), dq.shape[-1]
        rows = torch.arange(flat.numel() // width)[:, None]
        at = rows * (width + 8) + torch.arange(width)
        return flat[at % flat.numel()].view_as(dq), dk, dv


class CutOff(Kernel):
    def forward(self):
        at = self.at
        at.k, at.v = (x.clamp(-1.9, 1.9) for x in (at.k, at.v))
        return super().forward()


@pytest.mark.thorough(keep=0)
@pytest.mark.parametrize(
    ("kernel", "cause", "told"),
    [
        (PagesInTheOtherOrder, "other-data", "are read in the place of some"),
        (MaximumForgotten, "maximum", "and there alone"),
        (FirstColumnsOfLaterHeadsLost, "unwritten", "features 0-23 of"),
        (LaterColumnsOfWiderValuesLost, "unwritten", "features 64-79 of 80"),
        (MaximumInNats, "lse-other", "0.693 × the row's maximum + 1 × the logarithm"),
        (RowsAtAnotherPitch, "layout", "numbers stand in another's place"),
        (CutOff, "operand", "K, V are cut off beyond ±1.9"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_lost_is_told_as_what_it_is(kernel, cause, told):
    found = reconstruct(attention(kernel), dtype="float16")
    named = [n.cause.key for n in found.causes] + [p.cause for p in found.places]
    assert named[0] == cause
    texts = [n.text for n in found.causes] + [p.text for p in found.places]
    assert any(told in text for text in texts)
