"""From the line that was typed to a command and its exit code; nothing heavy is imported until it
is needed.

Exit codes: 0 done; 1 an audited target has a defect; 2 a bad argument, or a target that could not
be audited or not wholly (a defect in another one outranks it); 3 the machine: a file, a disk or
memory; 4 what nobody foresaw, in halfulp or in code that was named; 5 an audited target is worse
than what it was compared with; 130 interrupted. Whatever it
is, it is one line on standard error, never a traceback, unless HALFULP_TRACEBACK is set.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from halfulp.cli.audit_command import audit
from halfulp.cli.bench_command import bench
from halfulp.cli.diff_command import diff, record
from halfulp.cli.doctor import doctor, version_text
from halfulp.cli.ending import BAD_ARGUMENT, ended, warnings_in_lines
from halfulp.cli.experiments import claims, demo, explain, ls, sweep
from halfulp.cli.figures_command import figures
from halfulp.cli.lab import compare, isolate, tokens, train
from halfulp.cli.prescribe_command import prescribe
from halfulp.cli.reconstruct_command import reconstruct
from halfulp.cli.report_command import report
from halfulp.cli.serve_command import serve
from halfulp.cli.shell import PROGRAM, complain, patient_output, say, typed
from halfulp.cli.usage import unknown, usage_line

LAB = ("tyro", "rich", "matplotlib", "jinja2", "cattrs", "joblib", "scipy")
"""What the extra `lab` installs; held equal to pyproject.toml by test."""

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "audit": audit,
    "reconstruct": reconstruct,
    "sweep": sweep,
    "claims": claims,
    "figures": figures,
    "train": train,
    "tokens": tokens,
    "isolate": isolate,
    "prescribe": prescribe,
    "compare": compare,
    "diff": diff,
    "record": record,
    "report": report,
    "serve": serve,
    "explain": explain,
    "bench": bench,
    "ls": ls,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks δ shows a ? for it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with patient_output(), warnings_in_lines(), _terminated_as_interrupted():
            if arguments in (["--version"], ["-V"]):
                say(version_text())
                return 0
            return _dispatch(arguments)
    except BaseException as error:
        return ended(error)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does: workers would outlive a parent that just dies."""
    if threading.current_thread() is not threading.main_thread():  # where no handler may be set
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _dispatch(arguments: list[str]) -> int:
    if lacking := [name for name in LAB if find_spec(name) is None]:
        return _refuse(
            f"the command line needs {', '.join(lacking)}, not installed here: pip install"
            " 'halfulp[lab]'"
        )
    if complaint := unknown(arguments, COMMANDS):
        return _refuse(complaint)
    import tyro

    if arguments[:1] in (["audit"], ["reconstruct"]):
        # A kernel's threads that spin while they wait for each other, as OpenMP's do by default,
        # take minutes for seconds where other programs want the cores. Read when torch is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    typed[:] = arguments
    if arguments[:1] == ["explain"] and "--" in arguments:  # options may follow the numbers
        arguments.remove("--")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            call = tyro.extras.subcommand_cli_from_dict(
                {name: _later(command) for name, command in COMMANDS.items()},
                prog=PROGRAM,
                description=(
                    "Finds, explains and fixes the rounding errors that break low-precision"
                    " training. halfulp --version prints the versions that a bug report needs."
                ),
                args=arguments or ["--help"],
                config=(
                    tyro.conf.FlagCreatePairsOff,
                    tyro.conf.DisallowNone,
                    tyro.conf.PositionalMetavarFromFieldName,
                    tyro.conf.OmitArgPrefixes,  # a class holds options together
                    tyro.conf.UseAppendAction,  # an option takes one value, and may be given again
                ),
            )
    except SystemExit as stop:
        return 0 if not stop.code else _refuse(usage_line(said.getvalue()))
    return int(call())


def _later(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """The command as tyro reads it, but run only after parsing, whose messages are caught."""
    # Tyro would begin a line of its box wherever one of the docstring begins.
    command.__doc__ = re.sub(r"(?<=\S)\n {4}(?: {8})?(?=\S)", " ", command.__doc__ or "")

    @functools.wraps(command)
    def bound(*args: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(command, *args, **options)

    return bound


def _refuse(said: str) -> int:
    complain(said)
    return BAD_ARGUMENT
