"""Formats by name, for the command line and for files; code imports the constants."""

from __future__ import annotations

import re
from typing import Final

from halfulp.formats.blocks import BLOCK_FORMATS, BlockFormat
from halfulp.formats.format import SCALAR_FORMATS, Format, custom

FORMATS: Final[tuple[Format | BlockFormat, ...]] = (*SCALAR_FORMATS, *BLOCK_FORMATS)


def parse_format(name: str) -> Format | BlockFormat:
    """Return the built-in format of that name (any case), or the IEEE-style format "eXmY" of any
    width.

    Raises:
        ValueError: the name is neither; one line lists what is accepted.
    """
    lowered = name.strip().lower()
    for fmt in FORMATS:
        if fmt.name == lowered:
            return fmt
    widths = re.fullmatch(r"e(\d{1,2})m(\d{1,2})", lowered)
    if widths is None:
        accepted = ", ".join(fmt.name for fmt in FORMATS)
        raise ValueError(
            f"format={name!r} is not known; accepted: {accepted}, or eXmY such as e5m10"
        )
    return custom(int(widths[1]), int(widths[2]))
