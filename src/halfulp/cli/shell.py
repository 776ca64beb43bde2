"""What all commands share: the program's name, the line that was typed, JSON for programs, the door
to the terminal, which shows what a text would have the terminal do, and an output that nobody has
to read to its end.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, cast

from halfulp.report.text import HIDDEN, visible
from halfulp.runs.results import Progress

PROGRAM = "halfulp"
STDOUT = Path("-")
typed: list[str] = []
"""The arguments of the command that runs, as typed; `halfulp.cli.entry` sets them."""


def load(*modules: str) -> None:
    """Import modules that bring torch, a million objects of which none is garbage: looking for it
    meanwhile, and in them ever after, costs an audit half a second.
    """
    gc.disable()
    try:
        for module in modules:
            import_module(module)
        gc.freeze()
    finally:
        gc.enable()


def typed_command() -> str:
    """Return the command that runs as a shell takes it, for the page it writes."""
    return shlex.join([PROGRAM, *typed])


def check_files(json: Path | None, **files: Path | None) -> None:
    """Raise ValueError, before the work, for --json or another file, by its option, that could not
    be written after it.
    """
    from halfulp.runs.folder import check_file

    for name, file in files.items():
        check_file(name, file)
    check_file("json", None if json == STDOUT else json)


def say(text: object) -> None:
    """Print a text to standard output, at once, since a log may be read while a command runs."""
    print(visible(text), flush=True)


def complain(text: object) -> None:
    """Print a text to standard error in one line, under the program's name."""
    print(f"{PROGRAM}: {visible(' '.join(str(text).split()))}", file=sys.stderr)


def tell(
    plain: Any,
    json: Path | None,
    show: Callable[[], object],
    page: Path | None = None,
    draw: Callable[[], str] = str,
) -> None:
    """Show the result, and write it to `json` too; with - it is printed as JSON instead. If there
    is to be a page, what `draw` gives is written to it first.
    """
    from halfulp.runs.folder import json_text, write_json, write_text

    def told() -> None:
        if json == STDOUT:
            print(HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text(plain)))
            return
        show()
        if json is not None:
            write_json(json, plain)

    write_each(lambda: None if page is None else write_text(page, draw()), told)


def write_each(*writes: Callable[[], object]) -> None:
    """Write every file, also where another one cannot be written; then raise the first error."""
    errors = []
    for write in writes:
        try:
            write()
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


@contextmanager
def going_on() -> Iterator[None]:
    """Say of what was cut off in the block that the same command goes on."""
    from halfulp.runs.parallel import WorkerKilledError

    try:
        yield
    except (WorkerKilledError, KeyboardInterrupt) as error:
        error.add_note("; the same command goes on where this one ended")
        raise


class _Outlet:
    """Standard output for as long as it can be written. After that the command goes on, to its
    files and its exit code, and what it prints goes nowhere.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        with self._going_on():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._going_on():
            self._stream.flush()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # a reader such as head has seen enough
                self.failure = OSError(error.errno, error.strerror, "standard output")
            # else the interpreter tries once more at its end, and exits with 120
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def patient_output() -> Iterator[None]:
    """Let the block print where nobody reads to the end; raises OSError at its end where standard
    output could not be written for another reason, such as a full device.
    """
    outlet = _Outlet(sys.stdout)
    try:
        with redirect_stdout(cast(TextIO, outlet)):
            yield
    finally:
        outlet.flush()
    if outlet.failure is not None:
        raise outlet.failure


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Show on standard error how far the block is; a plain line now and then where that is no
    terminal.

    The block gets a function of the fraction done, 0 to 1, and of what is being worked on.
    """
    from halfulp.report.terminal import console
    from halfulp.runs.progress import progress_line

    with progress_line(console(stderr=True), counted=False) as bar:
        task = bar.add_task("", total=1.0, title=what)
        yield lambda fraction, message: bar.update(task, completed=fraction, description=message)
