"""Formats by name, for the command line and for files; code imports the constants."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import torch

from halfulp.complaints import meant, short_dtype
from halfulp.formats.blocks import BLOCK_FORMATS, BlockFormat
from halfulp.formats.format import BF16, FP16, FP32, SCALAR_FORMATS, Format, custom

FORMATS: Final[tuple[Format | BlockFormat, ...]] = (*SCALAR_FORMATS, *BLOCK_FORMATS)

FORMAT_OF: Final = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
"""Of the dtypes that kernels are given and return."""

# What PyTorch, ml_dtypes and papers call small formats, "float" read as "fp".
ELSEWHERE: Final = {
    "fp8": ("ocp_e4m3", "ocp_e5m2"),
    "e4m3fn": ("ocp_e4m3",),
    "fp8_e4m3": ("ocp_e4m3", "ieee_e4m3"),
    "fp8_e4m3fn": ("ocp_e4m3",),
    "fp8_e5m2": ("ocp_e5m2",),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e5m2"),
    "mxfp6": ("mxfp6_e3m2", "mxfp6_e2m3"),
    "fp6": ("e3m2", "e2m3"),
    "fp4": ("e2m1", "mxfp4", "nvfp4"),
    "fp4_e2m1fn": ("e2m1",),
}


def dtype_named(given: str | torch.dtype, accepted: Iterable[str], argument: str = "dtype") -> str:
    """Return which of the accepted names is that of a dtype, given as torch has it or by any name
    of it: torch.bfloat16, "torch.bfloat16", "bfloat16", "bf16"; "half", "f16", "fp16".

    Raises:
        ValueError: none of them is; one line names the argument and what is accepted.
    """
    accepted = tuple(accepted)
    for name in accepted:
        if isinstance(given, (str, torch.dtype)) and short_dtype(name) == short_dtype(given):
            return name
    told = meant(str(given), accepted)
    raise ValueError(f"{argument}={given!r}: accepted are {', '.join(accepted)}{told}")


def parse_format(name: str | torch.dtype) -> Format | BlockFormat:
    """Return the built-in format of that name (any case), or the IEEE-style format "eXmY" of any
    width. A dtype of torch, or what torch calls one, is its format.

    "e4m3" alone is refused: to most of the field it is OCP's format with 448 as its largest number,
    by the IEEE rule it ends at 240.

    Raises:
        ValueError: the name is neither; one line says what was probably meant and what is accepted.
    """
    lowered = short_dtype(name)
    for fmt in FORMATS:
        if fmt.name == lowered:
            return fmt
    widths = re.fullmatch(r"e(\d{1,2})m(\d{1,2})", lowered)
    if lowered == "e4m3":
        raise ValueError(
            f"format={name!r} is two formats: accepted are ocp_e4m3 (largest 448, no infinities;"
            " what float8_e4m3fn is) and ieee_e4m3 (largest 240)"
        )
    if widths is None:
        names = [fmt.name for fmt in FORMATS]
        ours = ELSEWHERE.get(lowered.replace("float", "fp"), ())
        if len(ours) == 1:
            return parse_format(ours[0])
        said = f"; did you mean {' or '.join(map(repr, ours))}?" if ours else meant(lowered, names)
        raise ValueError(
            f"format={name!r} is not known; accepted: {', '.join(names)}, or eXmY such as"
            f" e5m10{said}"
        )
    return custom(int(widths[1]), int(widths[2]))
