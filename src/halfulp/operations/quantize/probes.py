"""Inputs that expose what goes wrong in a quantizer."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import Draw, Sizes, Tensors
from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.random_tensors import normal_rows, with_

INDEPENDENT = ()  # the scale of a tensor hangs on all of it

MX = "OCP Microscaling Formats 1.0"
FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4")


def _ranges(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Blocks of all sizes side by side."""
    x = normal_rows(sizes, g)
    blocks = torch.arange(sizes["D"]) // 16
    x["input"] *= torch.exp2((blocks * 7 % 19 - 9).float())
    return x


def _outlier(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = normal_rows(sizes, g)
    x["input"][:, 5 % sizes["D"]] *= 400.0
    return x


def _ties(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Numbers halfway between codes; the largest of each block is 6."""
    x = {"input": torch.randint(-24, 25, (sizes["T"], sizes["D"]), generator=g) / 4.0}
    x["input"][:, ::16] = 6.0
    return x


def _zero_blocks(sizes: Sizes, g: torch.Generator) -> Tensors:
    x = normal_rows(sizes, g)
    x["input"][:, :32] = 0.0
    return x


def _untied(draw: Draw) -> Draw:
    """The largest number of all is 131 × 2^e, and no other is. NVFP4's scales are quotients by the
    largest, and one by a prime is not halfway between two codes, where fp32 formulas that are all
    correct part: they did in 124 of 40,960 blocks of bf16 numbers.
    """

    def drawn(sizes: Sizes, g: torch.Generator) -> Tensors:
        numbers = draw(sizes, g)["input"].bfloat16().float()
        of_prime = torch.frexp(numbers)[0].abs() == 131 / 256
        numbers = torch.where(of_prime, numbers * (130 / 131), numbers)
        most = numbers.view(-1)[numbers.abs().argmax()]
        most.copy_(most.sign() * 131 * torch.exp2((most.abs() / 131).log2().ceil()))
        return {"input": numbers}

    return drawn


PROBES = (
    *(
        Probe(
            f"gaussian_{f}",
            f"codes of {f}",
            MX,
            _untied(normal_rows) if f == "nvfp4" else normal_rows,
            options={"format": f},
        )
        for f in FORMATS
    ),
    *(
        Probe(
            f"ranges_{f}",
            "a scale of another block, or of the whole row",
            "DeepGEMM 189 (10 × the error by the layout of scales)",
            _untied(_ranges) if f == "nvfp4" else _ranges,
            options={"format": f},
        )
        for f in ("mxfp8_e4m3", "mxfp4", "nvfp4")
    ),
    Probe(
        "outlier",
        "one number that sets its block's scale",
        MX,
        _outlier,
        options={"format": "mxfp4"},
    ),
    Probe("ties", "numbers halfway between two codes", MX, _ties, options={"format": "mxfp4"}),
    Probe("zero_blocks", "blocks of zeros", MX, _zero_blocks, options={"format": "mxfp4"}),
    Probe(
        "zero_blocks_nvfp4",
        "blocks of zeros",
        "torchao PR 4798",
        _untied(_zero_blocks),
        options={"format": "nvfp4"},
    ),
    Probe(
        "tiny",
        "scales that underflow",
        "TransformerEngine PR 3281 (finite output, zero gradients)",
        with_(normal_rows, input=lambda x: x * 1e-3),
        options={"format": "mxfp4"},
    ),
)
