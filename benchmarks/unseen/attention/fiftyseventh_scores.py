"""The half of the fifty-seventh set's faults that concern scores, scales, heads and the way back
(fiftyseventh.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyseventh_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, fp16
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor

FAULTS: list[Fault] = []


# --- the softmax
@ways.eager(FAULTS, "unnormalized other-data")
class softmax_across_the_heads_and_sequences(ways.Eager):
    """jadore801120/attention-is-all-you-need-pytorch issue 52: the softmax of scores
    [heads · B, N, Nk] has no dimension given and goes down the first one, where it is to go along
    the last: a pair's weights sum to 1 over heads and sequences. What all of these hide is 0 here.
    """

    def weights(self, s):
        every = s.flatten(0, 1)
        nothing = (every == -INF).all(0, keepdim=True)
        p = every.masked_fill(nothing, 0.0).softmax(0).masked_fill(nothing, 0.0)
        return p.view(s.shape)


# --- scales
@ways.eager(FAULTS, "scale", "float32")
class cached_scores_without_their_root(ways.Eager):
    """huggingface/blog PR 2893: the article on caches has 1/√d in its formula, and code without
    it.
    """

    def scaled(self, s):
        return s


@fault(FAULTS, "scale", "float16")
class divided_by_the_root_of_two(ScaleOfItsOwn):
    """deepjavalibrary/d2l-java PR 186: scores are divided by `Math.sqrt(2)`, not `Math.sqrt(d)`."""

    rows, cols = 64, 32

    def own(self):
        return 2**-0.5


@fault(FAULTS, "scale")
class temper_of_the_whole_model(ScaleOfItsOwn):
    """jadore801120/attention-is-all-you-need-pytorch issue 49: the temper of the scores is
    √`d_model`, of all heads together, where the paper says √`d_k`.
    """

    rows, cols = 96, 64

    def own(self):
        heads, d = self.at.q.shape[1], self.at.q.shape[3]
        return (heads * d) ** -0.5


@ways.eager(FAULTS, "scale value-factor", "float16")
class weights_scaled_and_not_the_scores(ways.Eager):
    """FrancescoSaverioZuppichini/ViT issue 2: `softmax(energy) * scaling`, where it is to be
    `softmax(energy * scaling)`.
    """

    def scaled(self, s):
        return s

    def weights(self, s):
        return super().weights(s) * self.at.scale


@fault(FAULTS, "products scores non-finite", "float16")
class products_in_half_before_a_late_scale(ForwardAlone):
    """microsoft/onnxruntime PR 24953 (WebGPU; PR 24723): Q Kᵀ is reckoned in fp16, four features
    after four, and multiplied by the scale, of 0.088, only then: sums overflow.
    """

    rows, cols = 64, 16

    def product(self, q, k, back):
        total = torch.zeros_like(q[..., :1] @ k[..., :1].mT)
        for a, b in zip(q.split(4, -1), k.split(4, -1), strict=True):
            total = fp16(total + fp16(a @ b.mT))
        return total


# --- heads
@ways.eager(FAULTS, "key-heads other-data")
class queries_of_a_group_summed(ways.Eager):
    """fkodom/grouped-query-attention-pytorch issue 5: it is the queries that are reduced to as many
    heads as keys have, where keys are to be expanded: scores are the sum over a group's queries,
    and its heads have one result.
    """

    def result(self) -> Tensor:
        heads, groups = self.q.shape[1], self.k.shape[1]
        share, at = heads // groups, self.at
        if share == 1:
            return super().result()
        self.q = self.q.float().unflatten(1, (groups, share)).sum(2).to(self.q.dtype)
        if at.sinks is not None:
            at.sinks = at.sinks[::share]
        if at.attn_mask is not None and at.attn_mask.shape[1] == heads:
            at.attn_mask = at.attn_mask[:, ::share]
        return super().result().repeat_interleave(share, 1)


# --- the way back
@fault(FAULTS, "unwritten grad-tail", "float32")
class gradient_of_the_context_not_passed_on(Kernel):
    """rsarxiv/seq2seq-attention issue 7: the decoder's gradient of the context, of which keys and
    values are made, is not passed into the encoder: dK and dV are zero.
    """

    rows, cols = 48, 96

    def backward(self):
        dq, dk, dv = super().backward()
        return dq, torch.zeros_like(dk), torch.zeros_like(dv)
