"""The half of the forty-sixth set's faults that concern the scale, weights, layouts and what is
never written (fortysixth.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, e4m3
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.fortysixth_kernel import by_tokens
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands, RowAtOnce
from torch import Tensor

FAULTS: list[Fault] = []


# --- the scale
class DefaultScale(ScaleOfItsOwn):
    """Whatever scale is given, 1/√d is taken."""

    def own(self) -> float:
        return float(self.at.q.shape[-1] ** -0.5)


@fault(FAULTS, "scale")
class scale_of_the_graph_that_was_cached(DefaultScale):
    """pytorch/pytorch PR 184122 (MPS): a graph is cached under a key that lacks the scale, and a
    call with another scale runs the graph of the one before; here that had the default.
    """


@fault(FAULTS, "scale")
class scale_attribute_that_is_not_applied(DefaultScale):
    """tenstorrent/tt-metal issue 33304: whatever `scale` is given, results are those without it."""

    rows, cols = 32, 32


# --- weights
@fault(FAULTS, "weights-disagree weights rescale", "float16")
class weights_past_the_largest_of_e4m3(ForwardAlone):
    """Dao-AILab/flash-attention issue 2577 (FP8 on SM100): weights are 2^8 times what they are, and
    the maximum that they are relative to is kept until a score lies 2^4 past it: up to 2^12, where
    e4m3 ends at 448, while the row sum has them whole.
    """

    rows, cols = 64, 32

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, l * 256, acc

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        new = torch.where((new - m <= 4) & (m > -INF), m, new)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe + 8), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), acc * a + e4m3(p.clamp_max(448)) @ v

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse - 8


@fault(FAULTS, "window layout", "float16")
class values_of_a_window_from_the_left(ForwardAlone):
    """FluidInference/swift-parakeet-mlx PR 1: scores of a window lie in a band as wide as it, and
    where the sequence's start cuts the window off Q Kᵀ fills the band from the right end, while
    P V reads it from the left one: weights fall on later keys than theirs.
    """

    rows, cols = 48, 48

    def row(self, rows):
        if self.at.window is None or self.at.window[0] < 0:
            return super().row(rows)
        s, v = RowAtOnce.all_scores(self, rows)  # type: ignore[arg-type]
        m, l, _ = self.begin(self.load_query("q", self.at.q, rows))
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = torch.exp2(s - safe)
        l = self.add_row(l, torch.exp2(m - safe), p)
        late = (self.at.window[0] - torch.arange(rows.start, rows.stop)).clamp_min(0)
        key = torch.arange(p.shape[-1]) - late[:, None]
        p = p.gather(-1, key.clamp_min(0).expand_as(p)) * (key >= 0)
        return self.finish(new, l, self.at.low(p) @ v, rows)


# --- layouts and offsets
@fault(FAULTS, "layout other-data")
class heads_by_a_view_without_a_transposition(ForwardAlone):
    """onnx/onnx PR 7142, issue 7118: operands of three dimensions, [B, T, H D], are reshaped to
    [B, H, T, D] in one step, where [B, T, H, D] is to be transposed.
    """

    rows, cols = 64, 32

    def forward(self):
        at = self.at
        kept = at.q, at.k, at.v
        at.q = by_tokens(at.q)
        at.k, at.v = (self.spread(by_tokens(x[:, :: at.groups])) for x in kept[1:])
        found = super().forward()
        at.q, at.k, at.v = kept
        return found


@fault(FAULTS, "cache other-data layout")
class caches_of_sequences_wrap(OtherOperands):
    """Dao-AILab/flash-attention issue 772: where the cache holds 2^30 elements a sequence the
    offset of the fourth wraps at 2^32, and its new rows are written to where the first one's are;
    here the offset of the second does.
    """

    rows, cols = 64, 96

    def read(self, k, v):
        return self.wrapped(k), self.wrapped(v)

    @staticmethod
    def wrapped(x: Tensor) -> Tensor:
        return x[-1:].expand_as(x)


@fault(FAULTS, "key-heads", "float16")
class key_heads_in_turns(Kernel):
    """microsoft/onnxruntime PR 26057, which follows onnx PR 7274: K and V are tiled over the query
    heads of their groups, not each head repeated.
    """

    rows, cols = 32, 64

    def spread(self, x):
        return x.repeat(1, self.at.groups, 1, 1)

    def group(self, grad):
        return grad.unflatten(1, (self.at.groups, -1)).sum(1)


# --- what is never written
@fault(FAULTS, "unwritten query-tail")
class rows_past_the_plan_of_another_layer(ForwardAlone):
    """sgl-project/sglang PR 32062: attention is planned with the model's 48 query heads where the
    layer has 72: rows, which are a token's heads of one group and then the next token's, are
    planned for two thirds of the heads, and no program takes the later ones.
    """

    rows, cols = 96, 64

    def forward(self):
        o, lse = super().forward()
        share, n = self.at.groups, self.at.n
        if share == 1:
            return o, lse
        row = torch.arange(n) * share + torch.arange(share)[:, None]
        missed = (row >= n * (2 * share // 3))[..., None].repeat(o.shape[1] // share, 1, 1)
        return o.masked_fill(missed, 0.0), lse.masked_fill(missed, 0.0)


@fault(FAULTS, "unwritten key-tail")
class pages_of_the_prompt_not_listed(ForwardAlone):
    """vllm-project/vllm issue 7176, PR 7284: the prompt's list of pages is given as empty, by the
    wrong belief that a prompt does not read the cache: no key is there for any query, and O is 0.
    Prompts are the causal calls.
    """

    rows, cols = 64, 48

    def key_blocks(self, rows):
        return [] if self.at.causal else super().key_blocks(rows)
