"""What all commands share: the program's name, the line that was typed, and JSON on standard
output.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

PROGRAM = "halfulp"
STDOUT = Path("-")
typed: list[str] = []
"""The arguments of the command that runs, as typed; `halfulp.cli.dispatch` sets them."""


def typed_command() -> str:
    """Return the command that runs as a shell takes it, for the page it writes."""
    return shlex.join([PROGRAM, *typed])


def print_json(plain: Any) -> None:
    """Print plain data as JSON."""
    from halfulp.runs.folder import json_text

    print(json_text(plain))
