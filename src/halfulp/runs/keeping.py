"""What a command measures, kept job by job, so that one that was cut off goes on when it is called
again.

A result lies in the cache (`halfulp.runs.cache`) under the digest of all that determines it: the
function and what it is called with, every source file of this package and its native library, the
versions of what is installed, and the processor, or the kind of cluster that it went to. So what
other code measured, or another machine, is never found. Nothing is kept but inside of `keeping`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

from halfulp.runs import cache
from halfulp.runs.lock import Lock, is_held
from halfulp.runs.machine import (
    bits_of_machine,
    bits_of_process,
    describe_versions,
    source_digest,
)
from halfulp.runs.values import decoded, encoded

T = TypeVar("T")
_FORGOTTEN = 30 * 86400  # seconds
_HERE = ("", "loky", "threading")  # backends whose jobs run on this machine


@dataclass(frozen=True)
class Slot:
    """Where one result is kept, for every process that reaches the folder."""

    name: str
    top: Path

    def keep(self, value: Any) -> None:
        """Keep it, if it is plain data and tensors and the disk lets us."""
        tensors: dict[str, Tensor] = {}
        when = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(TypeError):
            plain = {"value": encoded(value, tensors), "when": when}
            cache.write(self.name, plain, tensors, self.top)

    def read(self, kind: type[T]) -> tuple[T, str] | None:
        """What is kept and when it was measured; None where nothing of this form is."""
        plain, tensors = cache.read(self.name, self.top) or (None, {})
        if not isinstance(plain, dict):
            return None
        value = decoded(kind, plain.get("value"), tensors)
        return None if value is None else (value, str(plain.get("when")))

    def holds(self) -> bool:
        """Whether something whole is kept."""
        return cache.read(self.name, self.top) is not None


@dataclass
class Keeping:
    """By what a command keeps results, and how much it took of an earlier call."""

    fresh: bool = False  # nothing is taken, all is kept
    backend: str | None = None  # of joblib: where jobs go
    counts: dict[str, list[int]] = field(default_factory=dict)  # {what: [taken, asked for]}

    def said(self) -> str:
        """What was taken, in words; empty where nothing was."""
        return ", ".join(f"{n} of {of} {what}" for what, (n, of) in self.counts.items() if n)

    def slot(self, *parts: Any) -> Slot | None:
        """Where the result is kept that these parts determine here; None where one of them is no
        plain data.
        """
        top, tensors = cache.folder(), dict[str, Tensor]()
        with suppress(TypeError):
            text = json.dumps(encoded(parts, tensors))
            where = (self.backend or "").partition(":")[0]
            # which machine of a cluster a job will go to is not known before it is there
            machine = bits_of_machine() if where in _HERE else (where,)
            made_by = (describe_versions(), source_digest(), *bits_of_process())
            if top is not None and not tensors:
                return Slot(cache.name_of("job", text, *machine, *made_by), top.absolute())
        return None

    def take(self, slot: Slot | None, kind: type[T]) -> tuple[T, str] | None:
        """What is kept there and when it was measured; None where nothing of this form is, or where
        nothing is wanted.
        """
        return None if slot is None or self.fresh else slot.read(kind)

    def before(
        self, function: Callable[[Any], T], jobs: Sequence[Any], what: str
    ) -> tuple[list[Slot | None], dict[int, T]]:
        """Where a function's results are kept, job by job, and those that are there, by number.

        Not kept is what is called with more than plain data, such as a folder to write to, or
        returns nothing.
        """
        try:
            kind = get_type_hints(function).get("return", type(None))
        except NameError:  # of the type checker's alone
            kind = type(None)
        if kind is type(None):
            return [None for _ in jobs], {}
        named = (function.__module__, function.__qualname__)
        slots = [self.slot(*named, type(job).__qualname__, job) for job in jobs]
        found = {n: one for n, slot in enumerate(slots) if (one := self.take(slot, kind))}
        known = self.counts.get(what, [0, 0])
        self.counts[what] = [known[0] + len(found), known[1] + len(jobs)]
        return slots, {n: value for n, (value, _) in found.items()}


_keeping: ContextVar[Keeping | None] = ContextVar("_keeping", default=None)


@contextmanager
def keeping(*, fresh: bool = False, backend: str | None = None) -> Iterator[Keeping]:
    """Keep results of jobs, and take those that are there unless `fresh`, until the block ends; for
    jobs that go to a backend of joblib.
    """
    made = Keeping(fresh, backend)
    token = _keeping.set(made)
    try:
        yield made
    finally:
        _keeping.reset(token)


def now_keeping() -> Keeping | None:
    """By what results are kept now, in this thread; None where none are."""
    return None if cache.folder() is None else _keeping.get()


@contextmanager
def unfinished_folder(*parts: Any) -> Iterator[Path]:
    """A folder for work that these parts determine, which is there again for the next call if this
    one is cut off; gone when the block ends well, and temporary where nothing is kept, or where
    another process works there.
    """
    kept = now_keeping()
    slot = None if kept is None else kept.slot(*parts)
    with ExitStack() as stack:
        if kept is None or slot is None:
            yield Path(stack.enter_context(TemporaryDirectory()))
            return
        folder = slot.top / "unfinished" / slot.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(Lock(folder).release)
        except (OSError, ValueError):
            yield Path(stack.enter_context(TemporaryDirectory()))
            return
        for old in folder.iterdir() if kept.fresh else _forgotten(folder.parent):
            if old.is_dir():
                rmtree(old, ignore_errors=True)
        yield folder
        # not in a `finally`: what is cut off is for the next call
        rmtree(folder, ignore_errors=True)


def _forgotten(top: Path) -> list[Path]:
    """Unfinished work that nobody has gone on with for a long time, perhaps of older code."""
    oldest = time.time() - _FORGOTTEN
    return [one for one in top.iterdir() if one.stat().st_mtime < oldest and not is_held(one)]
