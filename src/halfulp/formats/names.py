"""Formats by name, for the command line and for files; code imports the constants."""

from __future__ import annotations

import re
from typing import Final

from halfulp.complaints import meant
from halfulp.formats.blocks import BLOCK_FORMATS, BlockFormat
from halfulp.formats.format import SCALAR_FORMATS, Format, custom

FORMATS: Final[tuple[Format | BlockFormat, ...]] = (*SCALAR_FORMATS, *BLOCK_FORMATS)

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


def parse_format(name: str) -> Format | BlockFormat:
    """Return the built-in format of that name (any case), or the IEEE-style format "eXmY" of any
    width.

    "e4m3" alone is refused: to most of the field it is OCP's format with 448 as its largest number,
    by the IEEE rule it ends at 240.

    Raises:
        ValueError: the name is neither; one line says what was probably meant and what is accepted.
    """
    lowered = name.strip().lower()
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
        ours = ELSEWHERE.get(lowered.removeprefix("torch.").replace("float", "fp"), ())
        said = f"; did you mean {' or '.join(map(repr, ours))}?" if ours else meant(lowered, names)
        raise ValueError(
            f"format={name!r} is not known; accepted: {', '.join(names)}, or eXmY such as"
            f" e5m10{said}"
        )
    return custom(int(widths[1]), int(widths[2]))
