"""How a command ends that does not end well: in one line on standard error, with an exit code that
says whose fault it is, and never in a traceback unless HALFULP_TRACEBACK is set.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfulp.cli.shell import PROGRAM, complain
from halfulp.report.text import visible
from halfulp.runs.parallel import WorkerKilledError

BAD_ARGUMENT, MACHINE, UNFORESEEN, WORSE, INTERRUPTED = 2, 3, 4, 5, 130
"""The machine: file, disk or memory. Unforeseen: a bug, in halfulp or in code that was named.
Worse: than what an audit was compared with.
"""
TRACEBACK = "HALFULP_TRACEBACK"
_NO_MEMORY = re.compile("can't allocate memory|out of memory|not enough memory", re.IGNORECASE)


def ended(error: BaseException) -> int:
    """Say in one line what ended a command, and return the exit code."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    said, notes = _words(error), "".join(getattr(error, "__notes__", ()))
    if isinstance(error, KeyboardInterrupt):
        complain(f"interrupted{notes}")
        return INTERRUPTED
    if isinstance(error, (ValueError, WorkerKilledError)):
        complain(f"{said}{notes}")
        return BAD_ARGUMENT
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename is not None else ""
        complain(f"{named}{error.strerror or said}{notes}")
        return MACHINE
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(said)
    ):
        complain(f"not enough memory{': ' * bool(said)}{said}{notes}")
        return MACHINE
    if isinstance(error, SystemExit):  # not the parser's, which is caught where it is raised
        complain("the code that ran asked the interpreter to exit; nothing was finished")
    else:
        kind, way = type(error).__name__, f"{TRACEBACK}=1 shows the way"
        complain(f"unforeseen {kind}: {said}{_place(error)}{notes}; {way}")
    return UNFORESEEN


@contextmanager
def warnings_in_lines() -> Iterator[None]:
    """Print warnings as a command prints everything: in a line, and shown."""
    import warnings

    before = warnings.formatwarning
    warnings.formatwarning = _warning_line
    try:
        yield
    finally:
        warnings.formatwarning = before


def _words(error: BaseException) -> str:
    """What an exception says, also where saying it raises."""
    try:
        return str(error)
    except Exception:
        return "it cannot say"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _warning_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,  # noqa: ARG001 - warnings passes it, and where it arose is in what it says
    lineno: int,  # noqa: ARG001
    line: str | None = None,  # noqa: ARG001
) -> str:
    """A warning's text, and whose it is if it is not ours."""
    whose = "" if category is UserWarning else f"{category.__name__}: "
    return f"{PROGRAM}: {whose}{visible(' '.join(str(message).split()))}\n"
