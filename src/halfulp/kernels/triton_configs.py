"""Which tile sizes a Triton kernel runs with: a table, so that the same call runs the same code everywhere and always.

Nothing is timed at run time. `tune` of `triton_tune` times the candidates on the GPU at hand and writes a table of this
form; the one shipped here was chosen without a GPU, by what compiles without spills and fits (`triton_compiled.json`).
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

KINDS = ("forward", "query", "key")
TABLE = "triton_configs.json"


class Config(NamedTuple):
    """Tile sizes and schedule of one kernel."""

    block_m: int  # queries
    block_n: int  # keys
    warps: int
    stages: int  # of the software pipeline
    descriptors: bool = False  # tiles by tensor descriptors (TMA), where strides and addresses allow it


WIDE = Config(32, 32, 4, 1)  # for fp32 operands, whose products run on the ordinary cores


@cache
def shipped_table() -> dict[str, Any]:
    """The table of the package: {capability: {padded head dimension: {kind or "kind causal": config}}}."""
    text = resources.files("halfulp.kernels").joinpath(TABLE).read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def config_for(kind: str, capability: int, dim: int, causal: bool, itemsize: int = 2) -> Config:
    """The configuration of one kernel ("forward", "query" or "key").

    `capability` is 80, 89, 90, 100, 120, …, or 0 for AMD; one that the table lacks uses the next lower one. `dim` is
    the larger padded head dimension, `itemsize` the bytes of an operand. Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: accepted are {', '.join(map(repr, KINDS))}")
    if itemsize > 2:
        return WIDE
    table = shipped_table()
    known = max((c for c in map(int, table) if c <= capability), default=min(map(int, table)))
    rows = table[str(known)]
    row = rows[str(min(d for d in map(int, rows) if d >= dim))]
    chosen = row.get(f"{kind} causal", row[kind]) if causal else row[kind]
    return Config(**chosen)
