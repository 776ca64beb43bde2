"""Calls drawn over what kernels branch on, for a kernel that errs on none of the panel's: every two
levels of any two factors meet in one of them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from halfulp.calls import Call, Sees
from halfulp.covering import covering_array
from halfulp.reconstruct.panel import Trial

_FACTORS: dict[str, tuple[Any, ...]] = {
    "keys": (7, 16, 40, 66, 130, 190),
    # as many as keys, decode, a draft, as many as heads, fewer, more
    "queries": ("as many", 1, 3, "heads", "fewer", "more"),
    "heads": ((1, 1), (2, 2), (3, 1), (4, 2), (6, 6)),
    "sequences": (1, 2, 5),
    "width": (16, 24, 48, 64, 80, 128),
    "values": ("as wide", "half", "wider"),
    "sees": ("all", "causal", "shared", "by head", "by sequence", "padding", "bias", "bias by head",
             "bias of keys"),
    "asks": ("nothing", "a cap", "a window", "sinks"),
    "scale": (0.0, 0.3),  # 0: the usual one
    "numbers": ("plain", "sharp", "zeros", "peaks"),
    "memory": ("contiguous", "transposed"),
}  # fmt: skip
_HIDES = ("shared", "by head", "by sequence", "padding")
_BIASES = ("bias", "bias by head", "bias of keys")
_PEAK = 100.0  # how far scores lie from 0: above where they are hidden, below where not


def _allowed(row: dict[str, Any]) -> bool:
    """Whether kernels take such a call, of what is drawn of it so far: no option under a mask, no
    window over other lengths, and what hides peaks.
    """
    peaks = row.get("numbers") == "peaks"
    masked = row.get("sees", "padding" if peaks else "all") in (*_HIDES, *_BIASES)
    if row.get("asks", "nothing") != "nothing" and masked:
        return False
    if row.get("asks") == "a window" and row.get("queries", "as many") != "as many":
        return False
    # a query that sees one key has no gradient but what rounding makes
    one = row.get("queries") == 1 or (row.get("queries"), row.get("heads")) == ("heads", (1, 1))
    if one and row.get("sees") == "causal":
        return False
    return not peaks or row.get("sees", "padding") == "padding"


@lru_cache(maxsize=4)
def drawn(dtype: torch.dtype, seed: int = 0) -> tuple[Trial, ...]:
    """The trials, the same bits on every machine; each is named by what is drawn of it."""
    rows = covering_array(_FACTORS, _allowed, seed)
    return tuple(_trial(row, number, dtype) for number, row in enumerate(rows))


def _trial(row: dict[str, Any], number: int, dtype: torch.dtype) -> Trial:
    g = torch.Generator().manual_seed(7 + number)
    (heads, key_heads), b, nk, d = row["heads"], row["sequences"], row["keys"], row["width"]
    named = {"as many": nk, "heads": heads, "fewer": max(1, nk // 2 - 1), "more": nk + 9}
    n = int(named.get(row["queries"], row["queries"]))
    dv = {"as wide": d, "half": d // 2, "wider": d * 3 // 2}[row["values"]]
    x = {
        "query": torch.randn(b, heads, n, d, generator=g),
        "key": torch.randn(b, key_heads, nk, d, generator=g),
        "value": torch.randn(b, key_heads, nk, dv, generator=g),
        "grad_out": torch.randn(b, heads, n, dv, generator=g),
    }
    scale = row["scale"] or 1 / math.sqrt(d)
    mask = _mask(row, (b, heads, n, nk), g)
    if row["numbers"] == "sharp":
        x["query"] *= 3.0
    elif row["numbers"] == "zeros":  # behind an end, as padding is
        for name in ("query", "key", "value"):
            x[name][-1:, :, x[name].shape[2] // 2 :] = 0.0
    elif row["numbers"] == "peaks":
        assert mask is not None  # as only padding has them
        x["query"][..., 0] = 8.0
        x["key"][..., 0] = torch.where(mask[:, :, 0], -1.0, 1.0) * _PEAK / 8.0 / scale
    if row["memory"] == "transposed":
        x = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in x.items()}
    asks = row["asks"]
    call = Call(
        query=x["query"].to(dtype),
        key=x["key"].to(dtype),
        value=x["value"].to(dtype),
        sees=Sees(
            causal=row["sees"] == "causal",
            window=(9, -1) if asks == "a window" else None,
            mask=mask,
        ),
        scale=scale,
        softcap=3.0 if asks == "a cap" else 0.0,
        sinks=torch.randn(heads, generator=g) * 2 if asks == "sinks" else None,
    )
    name = _name(row, n)
    return Trial(name, call, x["grad_out"].to(dtype), name)


def _mask(
    row: dict[str, Any], shape: tuple[int, int, int, int], g: torch.Generator
) -> Tensor | None:
    b, h, n, nk = shape
    of = {"shared": (1, 1, n), "by head": (1, h, n), "by sequence": (b, 1, n), "padding": (b, 1, 1),
          "bias": (1, 1, n), "bias by head": (b, h, n), "bias of keys": (b, 1, 1)}  # fmt: skip
    if row["sees"] not in of:
        return None
    drawn = torch.randn(*of[row["sees"]], nk, generator=g)
    if row["sees"] in _BIASES:
        return drawn
    seen = drawn > -0.3
    seen[..., 0] = True  # each row sees one at least
    return seen


def _name(row: dict[str, Any], queries: int) -> str:
    """In words, as a report names a call."""
    heads, key_heads = row["heads"]
    asked, b = "1 query" if queries == 1 else f"{queries} queries", row["sequences"]
    told = [f"{asked}, {row['keys']} keys, D = {row['width']}"]
    of = "1 head" if heads == 1 else f"{heads} heads on {key_heads}"
    told.append(f"{of} in {b} sequences" if b > 1 else of)
    told += [f"values {row['values']}"] if row["values"] != "as wide" else []
    sees = row["sees"] if row["sees"] in ("all", "causal", *_BIASES) else f"a mask, {row['sees']}"
    told += [sees] if sees != "all" else []
    told += [row["asks"]] if row["asks"] != "nothing" else []
    told += [f"scale {row['scale']}"] if row["scale"] else []
    told += [x for x in (row["numbers"], row["memory"]) if x not in ("plain", "contiguous")]
    return ", ".join(told)
