"""The half of the forty-seventh set's faults that concern scales, the softmax and the way back
(fortyseventh.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.fortythird_kernel import softmax_over
from torch import Tensor

FAULTS: list[Fault] = []


# --- scales
@fault(FAULTS, "scale")
class divided_by_the_width_and_not_its_root(ScaleOfItsOwn):
    """delzac/cntkx issue 10: Q Kᵀ is divided by the number of features, without a root."""

    rows, cols = 32, 64

    def own(self):
        return 1 / self.at.q.shape[-1]


@fault(FAULTS, "scale", "float16")
class root_of_the_features_of_all_heads(ScaleOfItsOwn):
    """omihub777/ViT-CIFAR PR 11: scores are divided by the root of the features of all heads
    together.
    """

    rows, cols = 64, 32

    def own(self):
        return float(self.at.scale / math.sqrt(self.at.q.shape[1]))


@fault(FAULTS, "scale")
class product_that_is_not_scaled(ScaleOfItsOwn):
    """broadinstitute/CellCap issue 35: the softmax is of the products themselves, which the root of
    their width is to divide.
    """

    rows, cols = 48, 48

    def own(self):
        return 1.0


@fault(FAULTS, "scale", "float16")
class scale_that_is_not_implemented(ScaleOfItsOwn):
    """ethen8181/machine-learning issue 13: the product of query and key is not scaled."""

    rows, cols = 96, 32

    def own(self):
        return 1.0


@fault(FAULTS, "scale", "float32")
class temperature_that_begins_at_e(ScaleOfItsOwn):
    """lucidrains/BS-RoFormer issue 28: what is learned is the temperature's logarithm, and it
    begins at 1 instead of 0: scores are multiplied by e.
    """

    rows, cols = 64, 64

    def own(self):
        return float(self.at.scale * math.e)


@fault(FAULTS, "scale")
class root_of_the_models_width_on_one_backend(ScaleOfItsOwn):
    """LeelaChessZero/lc0 PR 1808: the BLAS and the ONNX backend divide scores by the root of the
    model's width, where it is to be that of a head's depth.
    """

    rows, cols = 32, 128

    def own(self):
        return float((self.at.q.shape[1] * self.at.q.shape[-1]) ** -0.5)


@fault(FAULTS, "scale", "float16")
class scale_lost_where_there_is_no_bias(ScaleOfItsOwn):
    """NVIDIA/OpenSeq2Seq PR 76: without a bias an `else` sets the softmax's input to the products
    again, as they were before the scale.
    """

    rows, cols = 64, 48

    def own(self):
        at = self.at
        biased = at.mask is not None or at.causal or at.window is not None
        return at.scale if biased else 1.0


# --- the softmax
FAULTS += [
    # nerminnuraydogan/vision-transformer issue 1: of (batch, queries, keys) the softmax is along
    # dimension 1.
    Fault("softmax_down_the_queries", frozenset({"unnormalized"}), softmax_over(2), "bfloat16",
          frozenset({"elements"})),
]  # fmt: skip


@fault(FAULTS, "maximum non-finite", "float16")
class exponentials_without_their_maximum(Kernel):
    """JuliaGraphs/GraphNeuralNetworks.jl issue 246: exponentials of the scores are divided by their
    sum, and no maximum is taken off: they overflow at scores of some 90, and vanish likewise.
    """

    rows, cols = 64, 64

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return torch.zeros_like(m), l * torch.exp2(torch.where(m == -INF, 0.0, m)), acc

    def maximum(self, m, s):
        return m


# --- the way back
@fault(FAULTS, "grad-scale", "float16")
class first_store_of_dq_scaled_alone(Kernel):
    """Dao-AILab/flash-attention PR 259 (PR 260): a tile of dQ leaves in more than one store where a
    head is 128 wide, here more than 32, and the first one alone is multiplied by the scale.
    """

    rows, cols = 64, 32

    def query_gradient(self, rows):
        dq: Tensor = super().query_gradient(rows)
        first = self.rows if dq.shape[-1] <= 32 else self.rows // 2
        return torch.cat([dq[:, :, :first], dq[:, :, first:] / self.at.scale], 2)
