"""The process in which somebody's kernel runs: it loads the kernel by its name and calls it as it
is asked to, until nobody asks any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from halfulp.operations import ATTENTION, OperationCalls, operation_named
from halfulp.targets.calling import one_line, run_target
from halfulp.targets.dialect import resolve
from halfulp.targets.form import Form
from halfulp.targets.messages import RESULTS, receive, send
from halfulp.targets.operation_calling import run_operation
from halfulp.targets.target import Outcome, Target

_MOST_WRITTEN = 2**30  # bytes of any file, so that endless output ends
_MOST_GIVEN = 2**36


def serve(
    handle: int,
    name: str,
    device: str,
    threads: int,
    gigabytes: float,
    operation: str,
    form: str | None = None,
) -> None:
    """Tell what the target is, then answer calls, over the connection of that number."""
    connection: Connection = Connection(handle)
    # in a session of its own this process would outlive an auditor that is killed
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if device == "cpu":  # a GPU's driver reserves more than there is
        _limit(gigabytes)
    torch.set_num_threads(threads)
    try:
        target = resolve(name, operation=operation, form=form)
    except ValueError as error:
        send(connection, {"error": str(error)}, {})
        return
    known: dict[str, Any] = {
        "accepts": sorted(target.accepts),
        "description": target.description,
        "missing": target.missing,
        "form": None if target.form is None else str(target.form),
    }
    send(connection, known, {})
    with contextlib.suppress(EOFError):
        while True:
            _answer(connection, target, device)


def _answer(connection: Connection, target: Target, device: str) -> None:
    plain, tensors = receive(connection, _MOST_GIVEN)
    given: dict[str, Any] = {name: x.to(device) for name, x in tensors.items()}
    torch.set_rng_state(given.pop("generator").cpu())
    options: dict[str, Any] = {}
    for name, x in plain["options"].items():
        options[name] = tuple(x) if isinstance(x, list) else x
    try:
        if target.operation == ATTENTION:
            now = replace(target, form=Form.parse(options.pop("form")))
            outcome = run_target(now, **given, **options)
        else:
            parts: dict[str, dict[str, Any]] = {"operand": {}, "grad": {}}
            for name, x in given.items():
                part, _, own = name.partition("/")
                parts[part][own] = x
            operation, drawn = operation_named(target.operation), (parts["operand"], parts["grad"])
            calls = OperationCalls(operation, plain["dtype"], *drawn, options)
            outcome = run_operation(target, calls, forward=plain["forward"])
    except KeyboardInterrupt as error:  # the kernel's own: nobody else can interrupt this process
        outcome = Outcome(None, f"raises {one_line(error)}", "error")
    found = {} if outcome.result is None else outcome.result.given()
    if target.operation == ATTENTION:
        found = {name: x for name, x in found.items() if name in RESULTS}
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # of kernels that print from C
    answer = {"kind": outcome.kind, "refusal": outcome.refusal, "notes": list(outcome.notes)}
    send(connection, answer, found)


def _end_with(parent: int) -> None:
    """End this process when the auditor has ended, even while a kernel hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _limit(gigabytes: float) -> None:
    """Bound the memory and the files of this process, as far as the system can."""
    try:
        import resource
    except ImportError:  # not a system that has limits
        return
    used = 0
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        # the limit counts what importing torch has taken, which is no kernel's
        used = sum(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    most = used + int(gigabytes * 2**30)
    # this limit holds torch's allocator too (docs/log.md)
    for what, limit in ((resource.RLIMIT_DATA, most), (resource.RLIMIT_FSIZE, _MOST_WRITTEN)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (limit, resource.getrlimit(what)[1]))
