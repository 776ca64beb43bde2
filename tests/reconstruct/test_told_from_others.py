"""Mistakes in a tiled kernel that look like others: which of them it is."""

import pytest
import torch
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention, fp16

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


@pytest.mark.parametrize(
    ("kernel", "cause", "told"),
    [
        (OutThroughHalf, "out", "O passes through float16"),
        (GradientsThroughHalf, "grad-stored", "gradients pass through float16"),
        (GradValueThroughHalf, "grad-stored", "dV passes through float16"),
    ],
)
def test_the_mistake_is_told_from_others_like_it(kernel, cause, told):
    found = reconstruct(attention(kernel))
    assert found.causes[0].cause.key == cause
    assert told in found.causes[0].text
