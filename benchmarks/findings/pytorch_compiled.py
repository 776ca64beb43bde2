"""PyTorch's functions through torch.compile on a CPU.

Needs a C++ compiler.
`halfulp audit --op rms_norm benchmarks/findings/pytorch_compiled.py:rms_norm`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.operations import operation_named

AUDITED = {
    "rms_norm": "rms_norm",
    "llama_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "softmax": "softmax",
    "cross_entropy": "cross_entropy",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "rope": "rope",
    "sum_rows": "sum",
    "embedding": "embedding",
    "logsumexp": "benchmarks/findings/logsumexp",
}


def _of(operation: str, name: str) -> object:
    return next(t.function for t in operation_named(operation).targets if t.name == name)


def _compiled(function: object) -> object:
    return torch.compile(function, dynamic=True)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


rms_norm = _compiled(functional.rms_norm)
llama_norm = _compiled(_of("rms_norm", "llama"))
layer_norm = _compiled(functional.layer_norm)
softmax = _compiled(functional.softmax)
cross_entropy = _compiled(functional.cross_entropy)
swiglu = _compiled(_gated)
geglu = _compiled(_of("geglu", "torch"))
rope = _compiled(_of("rope", "transformers"))
sum_rows = _compiled(torch.sum)
embedding = _compiled(functional.embedding)
logsumexp = _compiled(torch.logsumexp)
