"""Fields of a run's configuration as text, for the command line: `optimizer.learning_rate=3e-4`,
`workload.layers=2`.

Every field of `RunConfig` can be set by its dotted name, and what a value may be is read from the
field's type.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from halfulp.complaints import meant
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import RunConfig
from halfulp.training.operations import OperationPlan

PLANS = (AttentionPlan, OperationPlan)
"""What is written as a text, and not field by field."""


def with_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Return the configuration with all of "field=value" applied at once; None is written none, a
    pair 0.9,0.95.

    Raises:
        ValueError: a field or a value is not known, or the fields do not go together; one line says
            what is accepted.
    """
    changes: dict[str, Any] = {}
    for text in settings:
        name, equals, value = (piece.strip() for piece in text.partition("="))
        if not equals or not name:
            raise ValueError(
                f"set={text!r}: accepted is field=value, such as optimizer.learning_rate=3e-4"
            )
        _add(changes, config, name.split("."), value, name)
    changed: RunConfig = _replaced(config, changes)
    return changed


def settable(config: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all fields that `with_settings` takes for this configuration."""
    found = []
    for f in fields(config):
        inner = getattr(config, f.name)
        if is_dataclass(inner) and not isinstance(inner, PLANS):
            found += settable(inner, f"{prefix}{f.name}.")
        else:
            found.append(f"{prefix}{f.name}")
    return found


def _add(changes: dict[str, Any], part: Any, path: list[str], text: str, whole: str) -> None:
    """Put the value of one field into the tree of changes."""
    name, *rest = path
    known = [f.name for f in fields(part)]
    if name not in known:
        raise ValueError(
            f"set={whole!r}: {name!r} is no field of {type(part).__name__}; accepted:"
            f" {', '.join(known)}{meant(name, known)}"
        )
    inner = getattr(part, name)
    nested = is_dataclass(inner) and not isinstance(inner, PLANS)
    if nested != bool(rest):
        accepted = f"{whole}.{fields(inner)[0].name} and so on" if nested else name
        raise ValueError(f"set={whole!r}: accepted is {accepted}")
    if nested:
        _add(changes.setdefault(name, {}), inner, rest, text, whole)
    else:
        changes[name] = _value(whole, get_type_hints(type(part))[name], text)


def _replaced(part: Any, changes: dict[str, Any]) -> Any:
    values = {
        name: _replaced(getattr(part, name), value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return replace(part, **values)


def _value(name: str, hint: Any, text: str) -> Any:
    """The value of a field of that type."""
    if hint in PLANS:
        return hint.of(*(part.strip() for part in text.split(";") if part.strip()))
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if type(None) in options and text.lower() == "none":
        return None
    kind = next(option for option in options if option is not type(None))
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(f"{name}={text!r}: accepted are {', '.join(get_args(kind))}")
        return text
    if get_origin(kind) is tuple:
        parts, kinds = text.split(","), get_args(kind)
        if len(parts) != len(kinds):
            raise ValueError(
                f"{name}={text!r}: accepted are {len(kinds)} values with a comma between them"
            )
        return tuple(
            _value(name, inner, part.strip()) for part, inner in zip(parts, kinds, strict=True)
        )
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name}={text!r}: accepted are true and false")
        return text.lower() == "true"
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        accepted = "an integer" if kind is int else "a number"
        or_none = ", or none" if type(None) in options else ""
        raise ValueError(f"{name}={text!r}: accepted is {accepted}{or_none}") from None
