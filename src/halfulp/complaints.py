"""How a complaint ends, and how many that are alike become one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"\d+")
_DTYPES = {"bfloat16": "bf16", "half": "fp16", "float": "fp32", "double": "fp64"}
_DTYPES |= {f"{kind}{bits}": f"fp{bits}" for kind in ("float", "f") for bits in (16, 32, 64)}


def short_dtype(name: object) -> str:
    """Return "bf16" or "fp16" for whatever torch, numpy and people call them; others in small
    letters.
    """
    lowered = str(name).strip().lower().removeprefix("torch.")
    return _DTYPES.get(lowered, lowered)


def meant(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" with the nearest of the known names, however they are
    capitalized and whichever of a dtype's names is theirs, or nothing where none is near.
    """
    lowered = {one.lower(): one for one in known}
    same = [one for one in lowered if short_dtype(one) == short_dtype(name)]
    close = same or difflib.get_close_matches(name.lower(), lowered, n=1)
    return f"; did you mean {lowered[close[0]]!r}?" if close and name != lowered[close[0]] else ""


def alike(reasons: Sequence[str]) -> list[str]:
    """Return in place of each reason the first that differs from it in numbers alone, as sizes in
    what torch raises, with how many such there are.
    """
    kinds: dict[str, dict[str, None]] = {}
    for reason in reasons:
        kinds.setdefault(_NUMBER.sub("#", reason), {})[reason] = None
    said = {}
    for kind, (first, *others) in kinds.items():
        said[kind] = f"{first} (and {len(others)} with other numbers)" if others else first
    return [said[_NUMBER.sub("#", reason)] for reason in reasons]
