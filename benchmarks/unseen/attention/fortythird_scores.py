"""The forty-third set's faults of scales, softmaxes, sums and what is not finite (fortythird.py has
the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortythird_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, blocks, fp16
from benchmarks.unseen.attention.fortieth_kernel import WholeRows
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- the softmax
FAULTS += [
    # ssw-nlp-study-group/nlp_study PR 2: the softmax goes along axis 1, which is the batch, where
    # the letters whose weights it is to make lie along axis 0.
    Fault("softmax_along_the_batch", frozenset({"unnormalized", "other-data"}),
          ways.softmax_over(0), "bfloat16", frozenset({"elements"})),
    # therne/dmn-tensorflow issue 6: the gates of each fact are a softmax over the batch, and not
    # over the facts.
    Fault("gates_normalized_over_the_batch", frozenset({"unnormalized", "other-data"}),
          ways.softmax_over(0), "float32", frozenset({"elements"})),
    # FudanNLP/fastNLP issue 254: `Softmax(dim=2)` is right of three dimensions; of four it goes
    # over the queries.
    Fault("third_dimension_of_four", frozenset({"unnormalized"}),
          ways.softmax_over(2), "float16", frozenset({"elements"})),
    # localminimum/R-net issue 8: scores get one more dimension before the softmax, which goes over
    # that one: every weight is 1.
    Fault("softmax_after_expand_dims", frozenset({"unnormalized"}),
          ways.softmax_over(None), "bfloat16", frozenset({"elements"})),
]  # fmt: skip


@fault(FAULTS, "exponential", "bfloat16")
class exponential_pinned_to_the_approximate_one(ForwardAlone):
    """tenstorrent/tt-metal issue 51927: the decode kernel calls the approximate exponential
    whatever it is asked for, A · max(x, L) + (B − C) read as a number's bits: off by up to 6 %
    from one power of two to the next.
    """

    rows, cols = 32, 64

    def rough(self, x):
        bits = (x.clamp_min(-126) + (127 - 0.0579)) * 2**23
        found = bits.to(torch.int32).view(torch.float32)
        return torch.where(x < -125, 0.0, found)

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = self.rough((s - safe).contiguous()), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


# --- scales
@fault(FAULTS, "scale", "float16")
class scores_divided_by_the_scale(ScaleOfItsOwn):
    """esceptico/perceiver-io PR 10 (issue 9): the scale is d^−½ already, and Q Kᵀ is divided by it:
    scores are multiplied by √d.
    """

    rows, cols = 64, 32

    def own(self):
        return float(1 / self.at.scale)


@fault(FAULTS, "scale")
class root_of_the_whole_embedding(ScaleOfItsOwn):
    """aladdinpersson/Machine-Learning-Collection issue 65: scores are divided by the root of the
    embedding's size, of all heads together, and not of one head's.
    """

    rows, cols = 32, 96

    def own(self):
        return float((self.at.q.shape[1] * self.at.q.shape[-1]) ** -0.5)


# --- sums
@fault(FAULTS, "accumulator products non-finite", "float16")
class values_accumulated_in_half(ForwardAlone):
    """thu-ml/SageAttention issue 93: with `pv_accum` fp16 the product of weights and values is
    accumulated in fp16 (here after every sixteen keys), and overflows where values are large.
    """

    rows, cols = 128, 64

    def add_values(self, acc, a, p, v):
        acc, p, v = fp16(acc * a), fp16(p), fp16(v)
        for part in blocks(p.shape[-1], 16):
            acc = fp16(acc + p[..., part] @ v[:, :, part])
        return acc


# --- keys that are added, or left out
@fault(FAULTS, "padding ragged", "float16")
class zeros_up_to_256_keys(ForwardAlone):
    """leejet/stable-diffusion.cpp PR 736 (issue 756, PR 774): keys and values are padded with zeros
    to a multiple of 256, which no mask hides where there is none: they keep their weight.
    """

    rows, cols = 64, 64

    def whole(self):
        return -(-self.at.nk // 256) * 256

    def key_blocks(self, rows):
        return blocks(self.whole(), self.cols)

    def inside(self, j, back):
        return j < self.whole()


# --- what is not finite
@fault(FAULTS, "masked-row non-finite nan-escapes")
class nan_of_a_hidden_row_in_all_gradients(WholeRows):
    """pytorch/pytorch issue 41508: the softmax of a row that two masks together hide is NaN, which
    is not looked for before the product with V; on the way back 0 · NaN spoils what all rows have
    in common.
    """

    rows = 48


@fault(FAULTS, "non-finite nan-escapes mask", "float16")
class fake_keys_in_place_of_a_mask(ForwardAlone):
    """NVIDIA/kvpress PR 283 (issues 250 and 268): keys that no query is to see are overwritten by
    one that all queries point away from, −10⁵ y / |y|², which is ±∞ in fp16 where |y| is small:
    ∞ − ∞ in its scores.
    """

    rows, cols = 64, 64

    @staticmethod
    def away_from(x):
        """A normal that all queries are on one side of, and whether it was found."""
        y = x.mean(-2)
        for _ in range(1000):
            wrong = (x @ y[..., None] <= 0).float()
            if not wrong.any():
                break
            y = y + (x * wrong).sum(-2) / wrong.sum(-2).clamp_min(1)
        return y, ~(x @ y[..., None] <= 0).any(-2)[..., 0]

    def forward(self):
        at, kept = self.at, (self.at.k, self.at.mask)
        if at.mask is not None and at.mask.dtype == torch.bool:
            full = at.mask.expand(*at.q.shape[:2], at.n, at.nk)
            hidden = (~full.any(-2)).unflatten(1, (-1, at.groups)).all(2)
            if hidden.any():
                y, found = self.away_from(at.q.unflatten(1, (-1, at.groups)).flatten(2, 3))
                fake = at.low(-1e5 * y / y.square().sum(-1, keepdim=True))
                replaced = self.spread(hidden & found[..., None])
                at.k = torch.where(replaced[..., None], self.spread(fake)[:, :, None], at.k)
                at.mask = full | replaced[:, :, None]
        done = super().forward()
        at.k, at.mask = kept
        return done
