"""Numbers as people read them, the same on the terminal and on a page."""

from __future__ import annotations

import math
import re

FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""What HTML and SVG may not hold: control characters, and halves of surrogate pairs."""
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal obeys instead of showing it: control characters, those that turn the direction
of text, and halves of surrogate pairs, which no encoding has.
"""


MEASURELESS = 1e9
"""Errors, and multiples of them, above which what they are held against is 0, or all but 0."""


def visible(text: object) -> str:
    """Return any text as a terminal may be given it: what is in `HIDDEN` as its escape, ESC as
    \\x1b.
    """
    return HIDDEN.sub(lambda found: ascii(found[0])[1:-1], str(text))


def cell_text(value: object) -> str:
    """Return a table's cell: three digits of a number, a dash where there is none."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number_text(value)
    return str(value)


def number_text(value: float) -> str:
    """Return three significant digits; very large and very small numbers with a power of ten."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "NaN"
    if value == 0:
        return "0"
    if 1e-2 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return power_text(value)


def power_text(value: float | None) -> str:
    """Return two digits and a power of ten, for columns of small errors."""
    if value is None:
        return "–"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def relative_text(error: float | None) -> str:
    """Return a relative error as `power_text` does; ∞ where what it is relative to is 0."""
    return "∞" if error is not None and error > MEASURELESS else power_text(error)


def tick_text(value: float, digits: int = 3) -> str:
    """Return the shortest text of up to so many digits, for the ticks of an axis."""
    return re.sub(
        r"e([+-])0?(\d)", lambda match: f"e{match[1].strip('+')}{match[2]}", f"{value:.{digits}g}"
    )


def times_text(ratio: float | None) -> str:
    """Return a ratio with two decimals, or three digits where it is large; one to nothing is ∞."""
    if ratio is not None and ratio > MEASURELESS:
        return "∞"
    return "–" if ratio is None else f"{ratio:.2f}" if abs(ratio) < 99.5 else number_text(ratio)


def at_least_text(ratio: float | None, least: float | None) -> str:
    """Return a ratio and, in brackets, what it is at least: 1.80 (≥ 1.72)."""
    return times_text(ratio) + ("" if least is None else f" (≥ {times_text(least)})")


def percent_text(fraction: float) -> str:
    """Return a share in percent; never 100 where it is less."""
    return "> 99.9 %" if 0.999 < fraction < 1 else f"{100 * fraction:.3g} %"


def duration_text(seconds: float) -> str:
    """Return seconds below two minutes, minutes and seconds above."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
