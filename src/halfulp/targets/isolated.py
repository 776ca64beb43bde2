"""A target in a process of its own: whatever it does there, the auditor gets one line.

A kernel may end its process, hang, take all memory, print, or replace what the auditor computes
with. In a process of its own it can do so to itself alone; results come back as safetensors, which
run nothing, and are held to the shapes and dtypes that the call can give.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfulp.operations import ATTENTION, OperationCalls
from halfulp.runs.threads import threads_outside
from halfulp.targets.calling import short
from halfulp.targets.dialect import is_code, resolve
from halfulp.targets.form import Form
from halfulp.targets.loading import parted
from halfulp.targets.messages import outcome_of, outcome_of_operation, receive, send
from halfulp.targets.served import serve
from halfulp.targets.target import Outcome, Target

MOST_ENDS = 3
"""How often a target's process is started again before it is given up."""

# importing torch alone takes 1.5 to 2.6 s (docs/log.md); what a user's module does as it is loaded,
# such as compiling kernels, is given time too
_START_SECONDS = 120.0

# Not the way of multiprocessing, which runs the caller's script again.
_PROGRAM = """
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given.pop("path")
from halfulp.targets.served import serve
sys.stdout.reconfigure(line_buffering=True)
serve(**given)
"""
_NO_MEMORY = re.compile(
    "allocate memory|out of memory|not enough memory|MemoryError", re.IGNORECASE
)


@dataclass(frozen=True)
class CallLimits:
    """What one call may take."""

    seconds: float = 120.0
    gigabytes: float = 8.0  # beyond what the process has when it starts; not bound on a GPU
    # whether it may start as a copy of this one, which saves loading torch twice: of a process that
    # has loaded and changed nothing of a user's, as the command line's
    copied: bool = False


class EndedError(Exception):
    """A target's process is gone; the message says why."""


@contextlib.contextmanager
def isolated(
    name: str,
    device: str = "cpu",
    limits: CallLimits | None = None,
    operation: str = ATTENTION,
    form: str | None = None,
) -> Iterator[Target]:
    """The target of that name, operation and form, whose calls are made in a process of its own.

    A user's own module or file is loaded there and nowhere else. Raises ValueError as `resolve`
    does, and for limits that are not positive; a process that ends while it loads the target gives
    a target whose every call is an error.
    """
    limits = limits or CallLimits()
    for what, number in (("seconds", limits.seconds), ("gigabytes", limits.gigabytes)):
        if not number > 0:
            raise ValueError(f"{what}={number}: accepted is a positive number")
    with tempfile.TemporaryDirectory(prefix="halfulp-") as folder:
        process = _Process(name, device, limits, Path(folder) / "said", operation, form)
        try:
            again = partial(isolated, name, device, limits, operation, form)
            target = process.target()
            yield replace(target, named=(target.call, again))
        finally:
            process.stop()


class _Process:
    """A target's process, started again after it ends."""

    def __init__(
        self,
        name: str,
        device: str,
        limits: CallLimits,
        said: Path,
        operation: str,
        form: str | None,
    ) -> None:
        self.name, self.device, self.limits, self.said = name, device, limits, said
        self.operation, self.form = operation, form
        self.ends: list[str] = []  # why it ended, each time
        self.late = False  # whether this process was killed for taking too long
        self.process: subprocess.Popen[bytes] | BaseProcess | None = None
        self.connection: Connection | None = None
        self.known: dict[str, Any] | None = None  # what it said about the target

    def target(self) -> Target:
        """What is known of the target; for a name of the user's, from the process."""
        if not is_code(self.name):
            target = resolve(self.name, operation=self.operation, form=self.form)
            self._start()  # it loads while the auditor prepares
            return _elsewhere(target, self)
        parted(self.name)
        try:
            self._start()
            self._greet()
        except EndedError as error:
            self.ends = [f"{error} while it is loaded{self._last_words(0)}"] * MOST_ENDS
            lost = Target(self.name, _never, frozenset(), str(error), operation=self.operation)
            return _elsewhere(lost, self)
        assert self.known is not None
        accepts = frozenset(self.known["accepts"])
        text = str(self.known["description"])
        form = None if self.known["form"] is None else Form.parse(str(self.known["form"]))
        described = Target(self.name, _never, accepts, text, form=form, operation=self.operation)
        return _elsewhere(described, self)

    def call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_out: Tensor | None,
        options: dict[str, Any],
    ) -> Outcome:
        """One call of attention, in the process that is there or in a new one."""
        given = {"query": query, "key": key, "value": value}
        given |= {} if grad_out is None else {"grad_out": grad_out}
        given |= {name: x for name, x in options.items() if isinstance(x, Tensor)}
        plain = {name: x for name, x in options.items() if not isinstance(x, Tensor)}
        return self._called(
            given, {"options": plain}, lambda *told: outcome_of(told[0], told[1], given)
        )

    def call_operation(self, calls: OperationCalls, forward: bool) -> Outcome:
        """The same of several calls of another operation."""
        given = {f"operand/{name}": x for name, x in calls.operands.items()}
        given |= {f"grad/{name}": x for name, x in calls.grads.items()}
        plain = {"options": dict(calls.options), "dtype": calls.dtype, "forward": forward}
        return self._called(
            given, plain, lambda *told: outcome_of_operation(told[0], told[1], calls)
        )

    def _called(
        self,
        given: dict[str, Tensor],
        plain: dict[str, Any],
        read: Callable[[dict[str, Any], dict[str, Tensor]], Outcome],
    ) -> Outcome:
        if len(self.ends) >= MOST_ENDS:
            return Outcome(None, f"is not called any more: it {self.ends[-1]}", "error")
        before = self._printed()
        try:
            self._start()
            self._greet()
            outcome = self._short_of_memory(read(*self._ask(given, plain)))
        except EndedError as error:
            self.ends.append(str(error))
            if self.late:  # a second one would take as long
                self.ends += [str(error)] * MOST_ENDS
            return Outcome(None, str(error) + self._last_words(before), "error")
        except ValueError as error:
            # what is left in the pipe would be read as the next call's answer
            self.stop()
            return Outcome(None, f"answers what is no result: {short(str(error))}", "error")
        if self._printed() > before:
            outcome = Outcome(
                outcome.result,
                outcome.refusal,
                outcome.kind,
                (*outcome.notes, f"prints: {self._first_line(before)}"),
            )
        return outcome

    def _short_of_memory(self, outcome: Outcome) -> Outcome:
        """An outcome that says whose limit it was where memory ran out: no form would help."""
        if outcome.refusal is None or not _NO_MEMORY.search(outcome.refusal):
            return outcome
        told = (
            f"takes more memory than there is, or than --call-gigabytes {self.limits.gigabytes:g}"
        )
        return replace(outcome, refusal=f"{told} allows: {outcome.refusal}")

    def _ask(
        self, given: dict[str, Tensor], plain: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        size = sum(x.numel() * x.element_size() for x in given.values())
        told = given | {"generator": torch.get_rng_state()}  # a kernel with dropout draws from it
        with self._watched(self.limits.seconds) as connection:
            send(connection, plain, told)
            # bounded, so that an answer cannot fill this process's memory
            return receive(connection, 4 * size + 2**20)

    def _greet(self) -> None:
        """Hear what the process says of the target, once a process."""
        if self.known is not None:
            return
        with self._watched(_START_SECONDS) as connection:
            known, _ = receive(connection, 2**20)
        if "error" in known:
            raise ValueError(short(str(known["error"]), 1000))
        if known.get("missing") is not None:
            raise ValueError(f"target={self.name!r}: {short(str(known['missing']))}")
        self.known = known

    @contextlib.contextmanager
    def _watched(self, seconds: float) -> Iterator[Connection]:
        """The connection, cut off after so many seconds; raises EndedError where the process is
        gone.
        """
        assert self.connection is not None
        # nothing interrupts a read that waits; the end of the process ends it
        timer = threading.Timer(seconds, self._end_late)
        timer.start()
        try:
            yield self.connection
        except (EOFError, OSError):
            reason = f"takes longer than {seconds:g} s" if self.late else self._exit_reason()
            self.stop()
            raise EndedError(reason) from None
        finally:
            timer.cancel()

    def _exit_reason(self) -> str:
        code = self._exit_code(10)
        if code is None:
            return "closes its connection"
        if code >= 0:
            return f"ends its process (exit code {code})"
        name = signal.Signals(-code).name
        told = {
            "SIGKILL": "is killed, perhaps for want of memory",
            "SIGSEGV": "crashes: segmentation fault",
            "SIGABRT": "crashes: abort",
            "SIGXFSZ": "is killed: it writes more than a file may hold",
        }
        return f"{told.get(name, 'crashes')} ({name})"

    def _exit_code(self, seconds: float | None) -> int | None:
        """What the process ends with; None where it does not in so many seconds."""
        if isinstance(self.process, BaseProcess):
            self.process.join(seconds)
            return self.process.exitcode
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _start(self) -> None:
        if self.process is not None:
            return
        self.late, self.known = False, None
        self.said.touch()
        self.connection, theirs = Pipe()
        arguments = {
            "path": sys.path,
            "handle": theirs.fileno(),
            "name": self.name,
            "operation": self.operation,
            "form": self.form,
            "device": self.device,
            "threads": threads_outside(),
            "gigabytes": self.limits.gigabytes,
        }
        # a file and not a pipe, at whose end a kernel that prints much would wait for a reader
        program = [sys.executable, "-c", _PROGRAM, json.dumps(arguments)]
        with self.said.open("ab") as said:
            # importing torch and this package again takes 3 s of processor time (docs/log.md)
            if self.limits.copied and self.device == "cpu" and _has_one_thread():
                given = (program, arguments, self.connection, said.fileno())
                self.process = get_context("fork").Process(target=_copy, args=given)
                with warnings.catch_warnings():
                    # Python counts numpy's threads, which end themselves before a fork
                    warnings.simplefilter("ignore", DeprecationWarning)
                    self.process.start()
            else:
                self.process = subprocess.Popen(
                    program,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # so that what the kernel starts ends with it
                )
        # while this end is open here too, the connection does not end with the process
        theirs.close()

    def _end_late(self) -> None:
        self.late = True
        self._kill()

    def _kill(self) -> None:
        """End the process and what it has started."""
        assert self.process is not None
        assert self.process.pid is not None
        # a copy that has just begun leads no group yet
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End the process, if there is one."""
        if self.process is None:
            return
        self._kill()
        self._exit_code(None)
        assert self.connection is not None
        self.connection.close()
        self.process = self.connection = self.known = None

    def _printed(self) -> int:
        return self.said.stat().st_size if self.said.exists() else 0

    def _first_line(self, start: int) -> str:
        with self.said.open("rb") as file:
            file.seek(start)
            text = file.read(2000).decode(errors="replace")
        return short(text)

    def _last_words(self, start: int) -> str:
        """What a process printed before it ended, if anything."""
        return f"; it prints: {self._first_line(start)}" if self._printed() > start else ""


_TASKS = Path("/proc/self/task")
_at_rest = len(list(_TASKS.glob("*")))  # threads of libraries, of which each ends its own at a fork


def _has_one_thread() -> bool:
    """Whether a copy of this process would be whole: of several threads it has the one that made
    it, and all their locks.
    """
    # of a process that has computed in parallel, a copy hung for ever in libgomp (docs/log.md)
    global _at_rest
    tasks, known = len(list(_TASKS.glob("*"))), _at_rest
    _at_rest = 1  # from the first fork on
    return threading.active_count() == 1 and 1 <= tasks <= known


def _copy(program: list[str], arguments: dict[str, Any], theirs: Connection, said: int) -> None:
    """What a copy of this process does: it serves, or begins anew where it cannot."""
    # a group of its own, as `start_new_session` gives: `_kill` ends what the kernel has started
    os.setsid()
    # the auditor's end, which came along with the fork: open here, the connection would outlive it
    theirs.close()
    for number in (1, 2):
        os.dup2(said, number)
    # line by line: a kernel that ends the process at once leaves what it printed
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    try:
        # torch refuses gradients in a copy of a process that has computed some
        torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        # Python's descriptors close at an exec unless they are told not to
        os.set_inheritable(arguments["handle"], True)
        os.execv(program[0], program)
    serve(**{name: x for name, x in arguments.items() if name != "path"})


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a target in a process of its own is never called in this one")


def _elsewhere(target: Target, process: _Process) -> Target:
    call = process.call if target.operation == ATTENTION else process.call_operation
    return replace(target, call=_never, layer=None, function=None, elsewhere=call)
