"""Inputs that expose what goes wrong in SwiGLU."""

from __future__ import annotations

from halfulp.operations.gated_probes import gated, plain
from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.random_tensors import with_

INDEPENDENT = ("T",)
PROBES = gated(
    Probe(
        "negative_gates",
        "a sigmoid that loses its tail",
        "1 + tanh, which cancels",
        with_(plain, gate=lambda x: -x.abs() * 4 - 4),
    ),
    -1.2785,
)
