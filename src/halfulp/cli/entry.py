"""From the line that was typed to a command and its exit code; nothing heavy is imported until it
is needed.

Exit codes: 0 done; 1 an audited target has a defect; 2 a bad argument, or a target that could not
be audited or not wholly (a defect in another one outranks it); 3 something else went wrong, a full
disk or a bug of halfulp's; 130 interrupted. Whatever it is, it is one line on standard error, never
a traceback.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfulp.cli.audit_command import audit
from halfulp.cli.bench_command import bench
from halfulp.cli.doctor import doctor, version_text
from halfulp.cli.experiments import claims, demo, explain, ls, sweep
from halfulp.cli.lab import compare, isolate, tokens, train
from halfulp.cli.report_command import report
from halfulp.cli.shell import PROGRAM, patient_output, typed
from halfulp.cli.usage import unknown, usage_line
from halfulp.runs.parallel import WorkerKilledError

LAB = ("tyro", "rich", "matplotlib", "jinja2", "cattrs", "joblib", "scipy")
"""What the extra `lab` installs; held equal to pyproject.toml by test."""

FAILED = 3
"""The exit code of what is neither the argument's fault nor a verdict."""

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "audit": audit,
    "sweep": sweep,
    "claims": claims,
    "train": train,
    "tokens": tokens,
    "isolate": isolate,
    "compare": compare,
    "report": report,
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
        with patient_output():
            if arguments in (["--version"], ["-V"]):
                print(version_text())
                return 0
            return _dispatch(arguments)
    except (ValueError, WorkerKilledError) as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _fail(error)


def _dispatch(arguments: list[str]) -> int:
    if lacking := [name for name in LAB if find_spec(name) is None]:
        return _complain(
            f"the command line needs {', '.join(lacking)}, not installed here: pip install"
            " 'halfulp[lab]'"
        )
    if complaint := unknown(arguments, COMMANDS):
        return _complain(complaint)
    import tyro

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
                    tyro.conf.UseAppendAction,  # an option takes one value, and may be given again
                ),
            )
    except SystemExit as stop:
        return 0 if not stop.code else _complain(usage_line(said.getvalue()))
    return int(call())


def _later(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """The command as tyro reads it, but run only after parsing, whose messages are caught."""

    @functools.wraps(command)
    def bound(*args: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(command, *args, **options)

    return bound


def _fail(error: BaseException) -> int:
    """One line for what nobody foresaw, with the place in the source that raised it."""
    trace, where = error.__traceback__, ""
    while trace is not None:
        where = f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    expected = isinstance(error, (OSError, MemoryError))
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, OSError) and error.filename and error.strerror:
        said = f"{error.filename}: {error.strerror}"
    print(f"{PROGRAM}: {said}{'' if expected else where}", file=sys.stderr)
    return FAILED


def _complain(message: str) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return 2
