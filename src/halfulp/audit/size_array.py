"""The cases beside the probes: a covering array over what kernels branch on, at small sizes.

Every pair of levels occurs in some case: sizes and their tails, head dimensions, groups, batches,
what rows see, options, how scores lie, strides and storage offsets, the strides of dO, how often
the kernel is called. Too few heads for a test of means: a case is judged by its elements alone,
none of which may be farther off than rounding can make it. A case is named by all of its levels but
the sizes, "sizes/causal/sinks/rising/packed/expanded/twice", so that its name draws it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from halfulp.audit import draws
from halfulp.audit.draws import Draw, Shape
from halfulp.covering import covering_array
from halfulp.targets.form import BHND, Form
from halfulp.targets.manner import CALLS, GRAD_MEMORY, MEMORY

PREFIX = "sizes"
CAUSAL = ("causal", "causal-end")
MASKS = ("masked", "biased")
SEES = ("full", *CAUSAL, *MASKS)
"""What rows see: all keys, those up to their own, the same counted from the end, those that a mask
shows, all with a bias.
"""

ASKS = ("no-option", "sinks", "softcap", "window")
"""Options; no window where queries are not as many as keys, for kernels begin it at either end."""

SCORES = ("plain", "sharp", "rising", "late", "negative", "abyss")
"""How scores lie; late: those of the first tile lie 88 and more below the rest; abyss: all are
one number, the lowest that fp16 holds with room to spare, where kernels have a finite one for −∞.
"""

FACTORS: dict[str, tuple[Any, ...]] = {
    # at the borders of tiles of 16 to 128 keys, short of them and past them
    "n_key": (1, 3, 17, 31, 64, 65, 77, 128, 140, 200, 257, 300, 385, 4200),
    # as many as keys, decode, a short chunk, fewer, more, a long one
    "n_query": ("same", 1, 7, "fewer", "more", 4200),
    "head_dim": (8, 16, 40, 64, 80, 96, 128, 256),
    "value_dim": ("same", "half", "wider"),
    "heads": ((1, 1), (2, 2), (3, 3), (5, 1), (6, 2), (8, 2)),
    # 34 sequences of 4 heads and more are over 130 tiles, of which a persistent kernel has fewer
    "batch": (1, 2, 3, 34),
    "sees": SEES,
    "asks": ASKS,
    "scores": SCORES,
    "memory": MEMORY,
    "grad_memory": GRAD_MEMORY,
    "calls": CALLS,
}

_MOST_SCORES, _MOST_OPERANDS = 260_000, 700_000
_PADDED = 2  # sequences, of which all queries share a row of the mask


_NAMED = ("sees", "asks", "scores", "memory", "grad_memory", "calls")


def size_cases(seed: int = 0) -> tuple[tuple[str, Shape], ...]:
    """Name and size of every case of the array, about 120."""
    return tuple((_name(row), _shape(row)) for row in _rows(seed))


def without(
    name: str, shape: Shape, accepts: frozenset[str], form: Form = BHND
) -> tuple[str, Shape]:
    """The case for a target that takes no groups of heads, no offset of the diagonal or no mask:
    without, so that it still covers its other pairs; at a size and with a diagonal that its form
    can hold.
    """
    if "enable_gqa" not in accepts and shape.kv_heads is not None:
        shape = replace(shape, kv_heads=None)
    shape = held(form, shape)
    if "causal_offset" not in accepts:
        name = name.replace("/causal-end/", "/causal/")
    if "attn_mask" not in accepts:
        name = name.replace("/masked/", "/full/").replace("/biased/", "/full/")
    for asked in ASKS[1:]:
        if asked not in accepts or (asked == "window" and shape.n_query != shape.n_key):
            name = name.replace(f"/{asked}/", "/no-option/")
    if form.ends and shape.n_query != shape.n_key:
        more = shape.n_query > shape.n_key  # rows that see nothing are a probe's
        name = name.replace("/causal/", "/full/" if more else "/causal-end/")
    if form.decodes:
        name = name.replace("/causal/", "/full/").replace("/causal-end/", "/full/")
    return name, shape


def held(form: Form, shape: Shape) -> Shape:
    """The nearest size that a form can hold."""
    packed = form.of("qkv") is not None
    if form.decodes:
        # one row a head: more heads instead, of which each is a sample
        batch = shape.batch * 4 if 1 < shape.batch < 8 else shape.batch
        shape = replace(shape, n_query=1, batch=batch)
    elif (packed or form.of("cu_seqlens")) and shape.n_query != shape.n_key:
        most = max(shape.n_query, shape.n_key)
        fits = shape.batch * shape.heads * most * most <= _MOST_SCORES
        n = most if fits else min(shape.n_query, shape.n_key)
        shape = replace(shape, n_query=n, n_key=n)
    if packed or form.of("kv"):
        shape = replace(shape, value_dim=None)
    if form.appends:
        shape = replace(shape, n_query=min(shape.n_query, shape.n_key))
    return replace(shape, kv_heads=None) if packed else shape


def levels_of(name: str) -> dict[str, str]:
    """The levels that a case's name holds; ValueError where it is no such name."""
    known = {level: FACTORS[level] for level in _NAMED}
    prefix, *levels = name.split("/")
    if prefix != PREFIX or len(levels) != len(known):
        raise ValueError(f"probe={name!r}: accepted is {PREFIX}/{'/'.join(known).upper()}")
    for (factor, accepted), level in zip(known.items(), levels, strict=True):
        if level not in accepted:
            raise ValueError(
                f"probe={name!r}: {factor} {level!r}; accepted are {', '.join(accepted)}"
            )
    return dict(zip(known, levels, strict=True))


def is_abyss(name: str) -> bool:
    """Whether a case's scores lie far from 0, where float32's lse is rounded by more than 16 bits
    are.
    """
    return name.startswith(f"{PREFIX}/") and levels_of(name)["scores"] == "abyss"


def options_of(levels: Mapping[str, str], shape: Shape) -> dict[str, Any]:
    """What the call asks for beside causality."""
    asked: dict[str, Any] = {}
    if levels["sees"] == "causal-end":
        asked["causal_offset"] = max(0, shape.n_key - shape.n_query)
    if levels["asks"] == "softcap":
        asked["softcap"] = 8.0
    if levels["asks"] == "window":
        asked["window"] = (21, 5 if levels["sees"] == "full" else -1)
    return asked


def draw_of(levels: Mapping[str, str]) -> Draw:
    """What draws the case's tensors."""

    def draw(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
        x = _SCORES[levels["scores"]](shape, g)
        if levels["grad_memory"] == "expanded":
            x["grad_out"] = x["grad_out"][:, :, :1].expand_as(x["grad_out"]).contiguous()
        if levels["sees"] in MASKS:
            x["attn_mask"] = _MASKS[levels["sees"]](shape, g)
        return x | ({"sinks": draws.drawn_sinks(shape, g)} if levels["asks"] == "sinks" else {})

    return draw


def _masked(shape: Shape, g: torch.Generator) -> Tensor:
    """Seven keys in ten, none in three tiles in ten; each row sees one at least. Of two sequences
    one row for all of their queries, as padding is told.
    """
    if shape.batch == _PADDED:
        keep = torch.rand(shape.batch, 1, 1, shape.n_key, generator=g) > 0.3
        return keep | (torch.arange(shape.n_key) == shape.n_key // 2)
    rows, cols = torch.arange(shape.n_query)[:, None], torch.arange(shape.n_key)[None]
    keep = torch.rand(shape.batch, 1, shape.n_query, shape.n_key, generator=g) > 0.3
    tiles = torch.rand(shape.n_query // 32 + 1, shape.n_key // 32 + 1, generator=g) > 0.3
    return keep & tiles[rows // 32, cols // 32] | (cols == rows % shape.n_key)


def _biased(shape: Shape, g: torch.Generator) -> Tensor:
    """Of each head its own, or of each sequence where keys are odd in number, or where these are
    two one row for all queries; in numbers that every format holds: kernels may keep it in theirs.
    """
    of = (shape.batch, 1) if shape.n_key % 2 or shape.batch == _PADDED else (1, shape.heads)
    rows = 1 if shape.batch == _PADDED else shape.n_query
    x = torch.randn(*of, rows, shape.n_key, generator=g)
    return (x * 16).round().clamp(-64, 64) / 8


_MASKS = {"masked": _masked, "biased": _biased}


def _late(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """The keys of the first tile, as wide as there is room for, score 100 below the others."""
    x = draws.gaussian(shape, g)
    tile = min(64, shape.n_key // 2)
    x["query"][..., 0] = 4.0
    x["key"][..., 0] = 0.0
    # e⁻⁸⁸ is below all normal float32: what the first tile has summed must vanish when rescaled
    x["key"][:, :, :tile, 0] = -100.0 * math.sqrt(shape.head_dim) / 4.0
    return x


def _abyss(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Scores of −61440 at a scale of 1, alike however they are rounded."""
    x = draws.gaussian(shape, g)
    for name, number in (("query", 256.0), ("key", -240.0)):
        x[name].zero_()[..., 0] = number
    return x


_SCORES: dict[str, Draw] = {
    "plain": draws.gaussian,
    "sharp": draws.scaled(q=3.0, k=2.0),
    "rising": draws.rising,
    "late": _late,
    "negative": draws.level(-30.0),
    "abyss": _abyss,
}


def _name(row: Mapping[str, Any]) -> str:
    return "/".join((PREFIX, *(row[factor] for factor in _NAMED)))


def _shape(row: Mapping[str, Any]) -> Shape:
    heads, kv_heads = row["heads"]
    width = row["head_dim"]
    value_dim = {"same": None, "half": width // 2, "wider": width * 3 // 2}[row["value_dim"]]
    return Shape(
        row["batch"],
        heads,
        _queries(row),
        row["n_key"],
        width,
        None if kv_heads == heads else kv_heads,
        value_dim,
    )


def _queries(row: Mapping[str, Any]) -> int:
    keys, asked = row["n_key"], row["n_query"]
    named = {"same": keys, "fewer": max(1, keys - keys // 3 - 2), "more": keys + 37}
    return int(named.get(asked, asked))


@lru_cache(maxsize=4)
def _rows(seed: int) -> tuple[dict[str, Any], ...]:
    return tuple(covering_array(FACTORS, _allowed, seed))


_FAR = ("late", "negative", "abyss")
_CHEAPEST = {"n_key": 1, "n_query": 1, "head_dim": 8, "value_dim": "same", "heads": (1, 1)}


def _allowed(row: dict[str, Any]) -> bool:
    """Whether it is cheap enough, what is not chosen yet taken at its cheapest."""
    whole = {"batch": 1, "sees": "full", "asks": "no-option", "scores": "plain", **_CHEAPEST, **row}
    if whole["asks"] == "window":
        whole = {**whole, "n_query": "same"}
        if row.get("n_query", "same") != "same":
            return False
    if whole["asks"] != "no-option" and whole["sees"] in MASKS:
        return False  # which kernels refuse by right
    if whole["scores"] == "abyss" and whole["sees"] == "biased":
        return False  # scores so far from 0 leave no bits for a bias in 16 bits
    if row.get("n_key") == 1 and (whole["asks"] == "softcap" or whole["sees"] in MASKS):
        return False  # dS of a single key is 0, and so is the error of its emulation with these
    if whole["asks"] in ("sinks", "softcap") and whole["scores"] in _FAR:
        return False  # what the sink leaves, or the cap's slope there, is below all float32
    queries, keys, wide = _queries(whole), whole["n_key"], whole["head_dim"]
    if whole["sees"] == "causal-end" and queries > keys:
        return "n_query" not in row or "n_key" not in row  # rows that see nothing are a probe's
    calls = whole["batch"] * whole["heads"][0]
    operands = calls * max(queries, keys) * max(wide, 16)
    return bool(calls * queries * keys <= _MOST_SCORES and operands <= _MOST_OPERANDS)
