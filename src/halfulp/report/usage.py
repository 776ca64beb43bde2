"""Complaints about a command line: the parser's box of text becomes one line: argument, value, what
is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Colors, and the lines of the box, which are drawn with dashes where the terminal is not known to
# have Unicode.
_BOX = re.compile(r"\x1b\[[0-9;]*m|[│╭╮╰╯─|+]|-{3,}")


def usage_line(message: str, commands: Iterable[str]) -> str:
    """Return one line for what tyro says of a bad command line; what is not recognized is kept,
    joined to a line.
    """
    text = re.sub(r"\s+", " ", _BOX.sub(" ", message)).strip()
    if found := re.search(
        r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?)\)\.", text
    ):
        value, argument, choices = found.groups()
        names = ", ".join(re.findall("'(.*?)'", choices))
        return f"{_argument(argument)}={value!r}: accepted are {names}"
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
        r"Unrecognized (?:options|arguments): (.*?) (Available|Similar|For full|Perhaps)", text
    ):
        accepted = (
            f"the commands {', '.join(commands)}"
            if "Available subcommands" in text
            else "the options of --help"
        )
        return f"{found[1]!r} is not known; accepted are {accepted}"
    if found := re.search(r"Missing from (.*?): (\S+)", text):
        return f"{_argument(found[2].strip('[]').lower())} is missing; see {found[1]} --help"
    return text


def _argument(name: str) -> str:
    """The argument as the Python interface spells it."""
    return name.removeprefix("--").replace("-", "_")
