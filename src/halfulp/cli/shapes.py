"""How sizes are written on the command line, the same for every command: B,H,N,D."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """What "B,H/K,NxM,D,causal" says."""

    batch: int
    heads: int
    key_heads: int
    n_query: int
    n_key: int
    head_dim: int
    causal: bool


def parse_sizes(text: str) -> Sizes:
    """Return the sizes that "B,H,N,D" names, where H may be "H/K" for K key heads, N may be "NxM"
    for M keys, and ",causal" may follow.

    Raises:
        ValueError: it is written differently, a number is not positive, or K does not divide H.
    """
    plain = re.sub(r"[ ()]", "", text)
    match = re.fullmatch(r"(\d+),(\d+)(?:/(\d+))?,(\d+)(?:x(\d+))?,(\d+)(,causal)?", plain)
    if match is None or any(int(part) < 1 for part in match.groups()[:6] if part is not None):
        raise ValueError(
            f"shapes={text!r}: accepted is B,H,N,D in positive integers, such as 4,4,256,64; H/K"
            " for K key heads, NxM for M keys, ,causal behind it; --shapes again for another"
        )
    batch, heads, queries, dim = (int(match[i]) for i in (1, 2, 4, 6))
    key_heads, keys = int(match[3] or heads), int(match[5] or queries)
    if heads % key_heads:
        raise ValueError(
            f"shapes={text!r}: accepted are key heads that divide the {heads} query heads"
        )
    return Sizes(batch, heads, key_heads, queries, keys, dim, match[7] is not None)
