"""Inputs that expose what goes wrong in stochastic rounding: one number in every place, so that
means tell whether it is rounded without bias and each element for itself.
"""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import Draw, Sizes, Tensors
from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.random_tensors import normal_rows

INDEPENDENT = ()

_SEED = "Primus-Turbo PR 365 (a zero seed defeats stochastic rounding)"
_BIAS = "Connolly, Higham & Mary 2021"


def _at(part: float, sign: float = 1.0) -> Draw:
    """1 and so many parts of the step to the next number of bf16, times a power of two a call."""

    def draw(sizes: Sizes, g: torch.Generator) -> Tensors:
        power = int(torch.randint(-3, 4, (), generator=g))
        number = sign * (1 + part * 2.0**-7) * 2.0**power
        return {"input": torch.full(sizes.shape("T D"), number)}

    return draw


PROBES = (
    Probe("gaussian", "errors beyond the next number", _BIAS, normal_rows),
    Probe("quarter", "a probability that is off", _BIAS, _at(0.25)),
    Probe("half", "numbers that elements share", _SEED, _at(0.5)),
    Probe("three_quarters", "a probability that is off", _BIAS, _at(0.75)),
    Probe("eighth", "random numbers of two bits", _BIAS, _at(0.125)),
    Probe("uneven", "random numbers of three bits or fewer", _BIAS, _at(0.62)),
    # just below and above 1 / 16, which four bits tell as 0 or 1 / 16, or as 2 / 16
    *(
        Probe(
            name,
            "random numbers of four bits",
            "graphcore-research/gfloat PR 36",
            _at(part),
            sizes={"D": 256},
        )
        for name, part in (("few_bits", 0.06), ("few_bits_up", 0.07))
    ),
    Probe("negative", "a direction that hangs on the sign", _BIAS, _at(0.25, -1.0)),
    Probe("exact", "numbers that need no rounding", _BIAS, _at(0.0)),
)
