"""Recipes as one line of text, for the command line and for run folders: a name, then what is
changed in brackets.

`BF16_FLASH2[delta_from=residual,residual=bf16,shift=integer,base=2]` is the stock recipe with four
fields replaced. Formats are written as `halfulp ls formats` has them or as eXmY, with a rounding
mode after a slash where it is not the format's own (`out=bf16/stochastic`); fields of the shift and
of the matmul have a dot (`shift.beta=7`, `matmul.order=sequential`).
"""

from __future__ import annotations

import re
import types
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from halfulp.complaints import meant
from halfulp.formats import BlockFormat, Format, parse_format
from halfulp.recipes.named import RECIPES
from halfulp.recipes.recipe import Matmul, Recipe, Shift

_PARTS: dict[str, type] = {"shift": Shift, "matmul": Matmul}
_LEADING = {"shift": "kind", "matmul": "order"}  # what a part without a dot sets
_HINTS: dict[type, dict[str, Any]] = {
    kind: get_type_hints(kind) for kind in (Recipe, Shift, Matmul)
}


# A search asks for the same few texts thousands of times, and for each compares a recipe with all
# that have a name; recipes and formats are values.
@lru_cache(maxsize=4096)
def recipe_named(text: str) -> Recipe:
    """Return the built-in recipe of that name (any case), with the changes that follow in brackets,
    if any.

    Raises:
        ValueError: the name, a field or a value is not known; one line says what is accepted.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\[(.*)\])?\s*", text, re.DOTALL)
    base = RECIPES.get(match[1].upper()) if match else None
    if match is None or base is None:
        raise ValueError(
            f"recipe={text!r}: accepted are {', '.join(RECIPES)}, each with [field=value,…] if"
            f" wanted{meant(text.partition('[')[0], RECIPES)}"
        )
    if not (match[2] or "").strip():
        return base
    changes: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for item in match[2].split(","):
        field, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals:
            raise ValueError(
                f"recipe={text!r}: {item.strip()!r} is no change; accepted is field=value"
            )
        part, dot, inner = field.partition(".")
        if part in _PARTS:
            inner = inner if dot else _LEADING[part]
            parts.setdefault(part, {})[inner] = _read(_PARTS[part], inner, value)
        else:
            changes[field] = _read(Recipe, field, value)
    for part, values in parts.items():
        changes[part] = replace(getattr(base, part), **values)
    changed = base.with_(**changes)
    return changed if "name" in changes else changed.with_(name=recipe_text(changed))


@lru_cache(maxsize=4096)
def recipe_text(recipe: Recipe) -> str:
    """Return the text that `recipe_named` reads back as the same recipe but for its name.

    The built-in with the fewest fields to change comes first, in brackets what differs from it.

    Raises:
        ValueError: a format of the recipe has no text form (a custom overflow rule, for instance).
    """
    base = min(RECIPES.values(), key=lambda known: len(_differences(known, recipe)))
    changes = _differences(base, recipe)
    if not changes:
        return base.name
    return f"{base.name}[{','.join(changes)}]"


def _differences(base: Any, other: Any, prefix: str = "") -> list[str]:
    found = []
    for f in fields(other):
        before, after = getattr(base, f.name), getattr(other, f.name)
        if before == after or (not prefix and f.name == "name"):
            continue
        if f.name in _PARTS and not prefix:
            found += _differences(before, after, f"{f.name}.")
        else:
            found.append(f"{prefix}{f.name}={_write(after)}")
    return found


def _write(value: Any) -> str:
    if isinstance(value, (Format, BlockFormat)):
        return _format_text(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


@lru_cache(maxsize=1024)
def _format_text(fmt: Format | BlockFormat) -> str:
    """The name that `parse_format` knows, with the rounding mode if that is another."""
    spellings = [fmt.name]
    if isinstance(fmt, Format):
        spellings.append(f"e{fmt.exponent_bits}m{fmt.mantissa_bits}")
    for spelling in spellings:
        try:
            known = parse_format(spelling)
        except ValueError:
            continue
        if isinstance(known, Format) and isinstance(fmt, Format):
            rounding = fmt.rounding
            if known.with_(rounding=rounding, name=fmt.name) == fmt:
                return spelling if known.rounding == rounding else f"{spelling}/{rounding}"
        elif known == fmt:
            return spelling
    raise ValueError(
        f"format={fmt.name!r} has no text form; accepted are the names of `halfulp ls formats` and"
        " eXmY"
    )


def _read(kind: type, field: str, text: str) -> Any:
    hints = _HINTS[kind]
    if field not in hints:
        raise ValueError(
            f"{field}={text!r}: not a field of a recipe; accepted are {', '.join(hints)}"
            f"{meant(field, hints)}"
        )
    return _value(field, hints[field], text)


def _value(field: str, hint: Any, text: str) -> Any:
    """The value of a field of that type; choices are checked by the recipe itself."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if type(None) in options and text.lower() == "none":
        return None
    if Format in options:
        name, slash, rounding = text.partition("/")
        fmt = parse_format(name)
        if not slash:
            return fmt
        if not isinstance(fmt, Format):
            raise ValueError(
                f"{field}={text!r}: a block format takes no rounding mode; accepted is {name}"
            )
        return fmt.with_(rounding=rounding)
    if bool in options:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{field}={text!r}: accepted are true and false")
        return text.lower() == "true"
    if get_origin(hint) is Literal or str in options:
        return text
    number = int if int in options else float
    try:
        return number(text)
    except ValueError:
        raise ValueError(
            f"{field}={text!r}: accepted is {'an integer' if number is int else 'a number'}"
        ) from None
