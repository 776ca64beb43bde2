"""Complaints about a command line, one line each: argument, value, what is accepted, and what was
probably meant.

Commands and options are checked here, against those that there are; what the parser says of the
rest, a box of text, becomes a line.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfulp.complaints import meant

# Colors, and the lines of the box, which are drawn with dashes where the terminal is not known to
# have Unicode.
_BOX = re.compile(r"\x1b\[[0-9;]*m|[│╭╮╰╯─|+]|-{3,}")


def unknown(arguments: Sequence[str], commands: Mapping[str, Callable[..., Any]]) -> str | None:
    """Say which command or option there is not, with the nearest that there is; None where all are
    known.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        return None
    name, *rest = arguments
    if name not in commands:
        accepted = f"accepted are the commands {', '.join(commands)}"
        hint = "" if name.startswith("-") else meant(name, commands)
        return f"{name!r} is not known; {accepted}{hint}"
    options = options_of(commands[name])
    for text in rest:
        if text == "--":
            break
        option = text.partition("=")[0].replace("_", "-")
        if re.match("--[a-z]", option) and option not in (*options, "--help"):
            return (
                f"{text!r} is not known; accepted by halfulp {name} are"
                f" {', '.join(options)}{meant(option, options)}"
            )
    return None


def usage_line(message: str) -> str:
    """Return one line for what tyro says of a bad command line; what is not recognized is kept,
    joined to a line.
    """
    text = re.sub(r"\s+", " ", _BOX.sub(" ", message)).strip()
    if found := re.search(
        r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?)\)\.", text
    ):
        value, argument, choices = found.groups()
        names = re.findall("'(.*?)'", choices)
        return (
            f"{_argument(argument)}={value!r}: accepted are {', '.join(names)}{meant(value, names)}"
        )
    if found := re.search(
        r"Error parsing (\S+): .*?(?:invalid literal for (int)|could not convert).*?: ('.*?')", text
    ):
        return (
            f"{_argument(found[1])}={found[3]}: accepted is"
            f" {'an integer' if found[2] else 'a number'}"
        )
    if found := re.search(r"Missing value for argument '(.*?)'", text):
        return f"{_argument(found[1])}: its value is missing; see --help"
    if found := re.search(
        r"Unrecognized (?:options|arguments): (.*?) (?:Available|Similar|For full|Perhaps)", text
    ):
        return f"{found[1]!r} is one argument too many; see --help"
    if found := re.search(r"Missing from (.*?): (\S+)", text):
        return f"{_argument(found[2].strip('[]').lower())} is missing; see {found[1]} --help"
    return text


def _argument(name: str) -> str:
    """The argument as the Python interface spells it."""
    return name.removeprefix("--").replace("-", "_")


def options_of(command: Callable[..., int]) -> list[str]:
    """The options of a command as they are typed, those that a class holds together as well."""
    names: list[str] = []
    for one in inspect.signature(command).parameters.values():
        if one.kind is one.KEYWORD_ONLY:
            held = one.default if dataclasses.is_dataclass(one.default) else None
            names += [one.name] if held is None else [f.name for f in dataclasses.fields(held)]
    return [f"--{name.replace('_', '-')}" for name in names]
