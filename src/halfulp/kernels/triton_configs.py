"""Which tile sizes a Triton kernel runs with: a table, so that the same call runs the same code
everywhere and always.

Nothing is timed at run time. `benchmarks/triton_tune.py` times the candidates on the GPU at hand
and writes a table of this form, which `use` takes in place of the shipped one; that was chosen
without a GPU, by what compiles without spills and fits (`benchmarks/triton_compiled.json`).
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("forward", "query", "key")
TABLE = "triton_configs.json"


class Config(NamedTuple):
    """Tile sizes and schedule of one kernel."""

    block_m: int  # queries
    block_n: int  # keys
    warps: int
    stages: int  # of the software pipeline
    # tiles by tensor descriptors (TMA), where strides and addresses allow it
    descriptors: bool = False


_used: list[dict[str, Any]] = []  # the table that `use` was given, if any

WIDE = Config(32, 32, 4, 1)  # for fp32 operands, whose products run on the ordinary cores


@cache
def shipped_table() -> dict[str, Any]:
    """The table of the package: {capability: {padded dimension: {kind, "kind causal", "kind
    option(s)": config}}}.
    """
    text = resources.files("halfulp.kernels").joinpath(TABLE).read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def use(file: Path | None) -> None:
    """Take tile sizes from a table that `tune` wrote, in this process from now on; None: the
    shipped ones again.

    Raises ValueError for a file that holds no such table.
    """
    if file is None:
        _used.clear()
        return
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        for capability, rows in table.items():
            int(capability)
            for dim, row in rows.items():
                int(dim)
                for kind in (*KINDS, *row):
                    Config(**row[kind])
    except (TypeError, KeyError, ValueError, AttributeError) as problem:
        raise ValueError(
            f"file={str(file)!r}: no table of tile sizes, as tune() writes it: {problem!r}"
        ) from None
    _used[:] = [table]


def config_for(
    kind: str, capability: int, dim: int, causal: bool, itemsize: int = 2, *, options: int = 0
) -> Config:
    """The configuration of one kernel ("forward", "query" or "key").

    `capability` is 80, 89, 90, 100, 120, …, or 0 for AMD; one that the table lacks uses the next
    lower one. `dim` is the larger padded head dimension, `itemsize` the bytes of an operand,
    `options` how many of mask, softcap and dropout the call has: each takes registers, and one may
    leave room for larger tiles than more do. Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: accepted are {', '.join(map(repr, KINDS))}")
    if itemsize > 2:
        return WIDE
    table = _used[0] if _used else shipped_table()
    known = max((c for c in map(int, table) if c <= capability), default=min(map(int, table)))
    rows = table[str(known)]
    row = rows[str(min(d for d in map(int, rows) if d >= dim))]
    chosen = row.get(f"{kind} causal", row[kind]) if causal and not options else row[kind]
    if options:
        chosen = row.get(f"{kind} options", chosen)
    if options == 1:
        chosen = row.get(f"{kind} option", chosen)
    return Config(**chosen)
