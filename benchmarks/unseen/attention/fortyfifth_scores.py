"""The half of the forty-fifth set's faults that concern operands, heads, scales, the softmax,
dropout, caches and what comes out (fortyfifth.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortyfifth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, bf16
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands
from torch import Tensor

FAULTS: list[Fault] = []


def whole(right: str, dtype: str = "bfloat16"):
    """Put a function of the operands and of all options into the set, by its name."""

    def put(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                 sinks=None):  # fmt: skip
            options: dict[str, Any] = {
                "is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
                "softcap": softcap, "sinks": sinks,
            }  # fmt: skip
            return own(query, key, value, options).to(query.dtype)

        FAULTS.append(
            Fault(own.__name__, frozenset(right.split()), call, dtype, frozenset({"elements"}))
        )
        return own

    return put


# --- operands and heads
@fault(FAULTS, "layout operand")
class bits_of_bf16_read_as_fp16(OtherOperands):
    """vllm-project/vllm PR 54338: with a cache in fp16 and a model in bf16 the bits of K and V are
    stored as they are, and taken for fp16 when they are read: 0.1621 is 1.536 then.
    """

    rows, cols = 64, 16

    def read(self, k, v):
        return self.taken(k), self.taken(v)

    @staticmethod
    def taken(x: Tensor) -> Tensor:
        return x.bfloat16().contiguous().view(torch.int16).view(torch.float16).float()


@fault(FAULTS, "key-heads", "float16")
class key_heads_tiled_by_the_operator(Kernel):
    """onnx/onnx PR 7274: the attention operator tiles key heads, 0 1 0 1, where each is to be
    repeated, 0 0 1 1.
    """

    rows, cols = 48, 96

    def spread(self, x):
        return x.repeat(1, self.at.groups, 1, 1)

    def group(self, grad):
        return grad.unflatten(1, (self.at.groups, -1)).sum(1)


# --- scales
@fault(FAULTS, "scale")
class scale_of_the_paper_never_passed(ScaleOfItsOwn):
    """charliezchen/scaling-matrix-preconditioning issue 2: logits are to be scaled by 1/d, and the
    model's `scale` is not passed to the attention layer, which takes 1/√d.
    """

    rows, cols = 80, 64

    def own(self):
        return float(self.at.q.shape[-1] ** -0.5)


@whole("scale", "float16")
def logits_of_the_points_not_scaled(query, key, value, options):
    """lucidrains/invariant-point-attention issue 1: logits are the sum of those of scalars and
    those of points, and the scale of the latter is left out; here points are the features of the
    later half.
    """
    first, last = query.float().chunk(2, -1)
    whole = torch.cat([first, last / options["scale"]], -1)
    s = ways.eager(whole, key, options)
    return softmax_of(s, options["sinks"]) @ repeated(value, query.shape[1])


# --- the softmax
@whole("unnormalized")
def softmax_over_the_sources(query, key, value, options):
    """stevezheng23/reading_comprehension_tf PR 30: the softmax is of the index of the sources,
    which are what looks, in place of that of the targets, which are looked at: weights of a key
    sum to 1, and those of a query do not. A sink is one more query here.
    """
    s = ways.eager(query, key, options)
    if options["sinks"] is not None:
        sink = options["sinks"].float().view(1, -1, 1, 1).expand(*s.shape[:2], 1, s.shape[3])
        s = torch.cat([s, sink], 2)
    p = softmax_of(s.mT, None).mT[:, :, : query.shape[2]]
    return p @ repeated(value, query.shape[1])


@whole("scores weights-normalized")
def softmax_in_the_models_bf16(query, key, value, options):
    """apple/axlearn PR 18: of a model in bf16 the softmax is of scores in bf16, and comes out in
    bf16; it has to be of fp32, as it is in JAX.
    """
    s = ways.eager(query, key, options).to(query.dtype).float()
    p = softmax_of(s, options["sinks"]).to(query.dtype).float()
    return p @ repeated(value, query.shape[1])


@fault(FAULTS, "scores row-max exponential row-sum weights-normalized")
class exported_softmax_at_its_inputs_precision(WholeRows, ForwardAlone):
    """NVIDIA/TransformerEngine PR 282: softmax reckons in fp32 whatever its input is, and what is
    exported of it, with scale and mask, is in the input's 16 bits throughout.
    """

    rows = 32

    def scaled(self, s, rows, cols, back):
        found = super().scaled(s, rows, cols, back)
        return found if back else self.at.low(found)

    def online(self, m, l, acc, s, v, rows, cols):
        low = self.at.low
        new = low(self.maximum(m, s))
        safe = torch.where(new == -INF, 0.0, new)
        p, a = low(torch.exp2(low(s - safe))), low(torch.exp2(low(m - safe)))
        l = low(self.add_row(l, a, p))
        share = low(p / torch.where(l == 0, 1.0, l))
        return new, torch.ones_like(l), share @ v


# --- dropout
@fault(FAULTS, "dropout unstable", "float16")
class flash_attention_drops_in_evaluation(ways.Dropped):
    """colehurwitz/IBL_MtM_model PR 13: flash attention gets the probability of training in
    evaluation as well, here 0.2.
    """

    rows, cols, chance = 64, 64, 0.2


@whole("dropout unstable")
def drop_rate_given_whatever_the_mode(query, key, value, options):
    """NVIDIA/torch-harmonics PR 221: SDPA gets `drop_rate` unconditionally, and does not know that
    the module is in evaluation; here 0.1.
    """
    p = softmax_of(ways.eager(query, key, options), options["sinks"])
    p = torch.dropout(p, 0.1, True).to(query.dtype).float()
    return p @ repeated(value, query.shape[1])


# --- caches and tables
@fault(FAULTS, "other-data", "float16")
class tables_of_zeros_where_nothing_was_hit(OtherOperands):
    """vllm-project/vllm PR 7018: where one sequence hits the prefix cache all are read from the
    cache, and the table of those that hit nothing is zeros: they read page 0 again and again. Here
    the first one has a hit, and its first page of 16 tokens is page 0.
    """

    rows, cols = 128, 16

    def read(self, k, v):
        return self.paged(k), self.paged(v)

    @staticmethod
    def paged(x: Tensor) -> Tensor:
        page = torch.arange(x.shape[2]) % min(16, x.shape[2])
        return torch.cat([x[:1], x[:1, :, page].expand(len(x) - 1, -1, -1, -1)])


@fault(FAULTS, "cache key-tail")
class history_that_no_one_kept(ForwardAlone):
    """fla-org/flash-linear-attention PR 599, review: `use_cache` is switched off in the layer, the
    cache goes back as it came, and the next step attends over an empty history: a token sees
    itself alone. Here the later half of a causal sequence is such steps.
    """

    rows, cols = 64, 64

    def causal(self, i, j, back):
        steps = i >= self.at.n - self.at.n // 2
        return (j == i) | (super().causal(i, j, back) & ~steps)


# --- what comes out
@fault(FAULTS, "out", "float16")
class out_in_bf16_whatever_the_query(ForwardAlone):
    """NVIDIA/recsys-examples PR 379, review: O is bf16 whatever the query's dtype is, and what
    calls it makes fp16 of that again.
    """

    rows, cols = 16, 64

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        return bf16(out), lse


@fault(FAULTS, "ragged query-tail", "float16")
class padded_in_front_and_cut_behind(ForwardAlone):
    """lucidrains/nystrom-attention issue 5: tokens are filled up in front to a multiple of the
    landmarks, here 64, and the result is cut to its length from the end: the first rows are those
    of padding, and the last queries' are lost. Padding is zeros, and its keys are hidden here.
    """

    rows, cols = 64, 64

    def forward(self):
        at = self.at
        o, lse = super().forward()
        many = min(-at.n % 64, at.n)
        free = not at.causal and at.mask is None and at.window is None
        mean = at.v.mean(2, keepdim=True) * free
        first = at.low(mean).expand(-1, -1, many, -1)
        return torch.cat([first, o[:, :, : at.n - many]], 2), lse
