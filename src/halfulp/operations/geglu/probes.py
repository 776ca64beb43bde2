"""Inputs that expose what goes wrong in GeGLU."""

from __future__ import annotations

from halfulp.operations.gated_probes import gated, plain
from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.random_tensors import with_

INDEPENDENT = ("T",)
PROBES = gated(
    Probe(
        "negative_gates",
        "1 + erf that loses its tail by cancellation",
        "jax PR 40128 (rounded before a cancelling sum)",
        with_(plain, gate=lambda x: -x.abs() * 0.5 - 2),
    ),
    -0.7518,
    Probe(
        "tanh",
        "the other formula of gelu",
        "Gemma, gelu_pytorch_tanh",
        plain,
        options={"approximate": "tanh"},
    ),
    Probe(
        "tanh_tail",
        "the other formula of gelu, where the two differ",
        "Gemma, gelu_pytorch_tanh",
        with_(plain, gate=lambda x: -x.abs() * 0.5 - 3),
        options={"approximate": "tanh"},
    ),
    Probe(
        "tanh_far",
        "a tanh by exponentials that overflow",
        "executorch issue 22323 (NaN beyond the range of exp)",
        with_(plain, gate=lambda x: x * 40),
        options={"approximate": "tanh"},
    ),
)
