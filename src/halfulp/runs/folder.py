"""Run folders and files that are whole or not there: written under a temporary name, synced, then
renamed.

A reader, another process or a later run, never meets half a file, whenever the writer was stopped.
Temporary names are drawn at random and made with O_EXCL, so that nobody's file or link is written
through or removed. A run folder is known by its run.json. A new run is written beside the one that
it replaces and takes its place at the end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np

from halfulp.runs.lock import LOCK, Lock, is_held
from halfulp.runs.results import plain_data

# TokenError too: numpy reads a header with Python's tokenizer, which met a torn one (docs/log.md)
_NO_ARRAY = (OSError, ValueError, EOFError, OverflowError, TypeError, SyntaxError, TokenError)
TEMPORARY = ".halfulp-"
"""What every temporary file of ours is called by, before eight random characters."""


def write_text(path: Path, text: str) -> Path:
    """Write a text file, whole or not at all; its folder must be there."""
    # what no encoding has, such as half of a surrogate pair, is written as its escape
    return write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, data: bytes) -> Path:
    """Write a file, whole or not at all; its folder must be there."""
    with whole_file(path) as file:
        file.write(data)
    return path


@contextlib.contextmanager
def whole_file(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes its place, whole, when the block ends, and never if it
    raises. A device or a pipe is written to, since nothing may take its place. Without `sync` a
    crash of the machine may lose it: for what can be computed again.
    """
    if _is_stream(path):
        # a pipe that nobody reads is an error here, and not waited for without end
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(handle, True)
        with os.fdopen(handle, "wb") as stream:
            yield stream
        return
    # beside its place, since a rename is atomic inside of one file system alone
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)
    except OSError as error:
        error.filename = str(path)  # nobody has asked for that other name
        raise
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if sync:
                # before the rename: a crash could leave the new name on a file that is empty
                os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())  # a temporary file is for its owner alone
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def _is_stream(path: Path) -> bool:
    """Whether a path is a device, a pipe or a name of one, such as /dev/stdout."""
    return path.exists() and (path.parent == Path("/dev") or not (path.is_file() or path.is_dir()))


def write_json(path: Path, plain: Any) -> Path:
    """Write plain data as JSON, whole or not at all; numbers that are not finite become null."""
    return write_text(path, json_text(plain) + "\n")


def json_text(plain: Any) -> str:
    """Return plain data as JSON text; numbers that are not finite become null."""
    return json.dumps(plain_data(plain), indent=1, ensure_ascii=False, allow_nan=False)


def line_text(plain: Any) -> str:
    """Return plain data as one line of JSON; numbers that are not finite become null."""
    return json.dumps(plain_data(plain), ensure_ascii=False, allow_nan=False)


def read_json(path: Path) -> Any:
    """Return the data of a JSON file, or None where it is missing, torn or no regular file.

    NaN and infinities, which no writer of ours writes, count as torn.
    """
    try:
        return json.loads(regular(path).read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError):
        return None


def read_array(path: Path) -> np.ndarray:
    """Return the array of a .npy file, mapped from it and read-only; never an object's.

    Raises:
        ValueError: it is missing, torn, or no regular file; one line says why.
    """
    try:
        return np.lib.format.open_memmap(regular(path), mode="r")
    except _NO_ARRAY as error:
        raise ValueError(" ".join(str(error).split())) from None


def regular(path: Path) -> Path:
    """Return the path of a regular file, or raise OSError: a FIFO would be waited for without
    end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path


def is_run_folder(folder: Path, kind: str) -> bool:
    """Whether a folder holds a run of that kind, by its run.json."""
    record = read_json(folder / "run.json")
    return isinstance(record, dict) and "halfulp" in record and record.get("kind") == kind


class NewRun:
    """A run that is being written beside the place it will have.

    Attributes:
        folder: new and empty at first; where to write.
    """

    def __init__(self, out: Path, kind: str) -> None:
        """Make the folder, and clear away what runs that were killed left for the same place.

        Raises:
            ValueError: `out` holds something else than a run of that kind, or cannot be written.
        """
        check_folder("out", out)
        # resolved: where `out` is a link, what it points to is replaced and the link stays
        self._out, self._kind, self._place = out, kind, out.resolve()
        self._check()
        _recover(self._place, kind)
        prefix = f"{self._place.name}.partial-"
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._place.parent))
        except OSError as error:  # nobody asked for that name
            raise OSError(error.errno, error.strerror, str(out)) from None
        self._lock: Lock | None = Lock(self.folder)
        self.folder.chmod(0o777 & ~_umask())

    def keep(self) -> Path:
        """Leave the folder where it is, for the reader; it is not cleared away later."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        return self.folder

    def finish(self) -> Path:
        """Put the folder into its place; a run that was there is removed after that.

        Raises:
            ValueError: something else came to stand there meanwhile; the run stays beside it.
        """
        self._check(f"; the new run lies in {str(self.folder)!r}")
        self.keep()
        old = None
        if self._place.exists():
            old = Path(
                tempfile.mkdtemp(prefix=f".{self._place.name}.replaced-", dir=self._place.parent)
            )
            # aside, since no folder is renamed onto one that holds something; a run that is killed
            # here is put back by `_recover`
            self._place.rename(old)  # an empty folder of our own may be renamed onto
        self.folder.rename(self._place)
        sync_folder(self._place.parent)
        if old is not None:
            shutil.rmtree(old)
        return self._out

    def _check(self, lost: str = "") -> None:
        place = self._place
        if place.exists() and any(place.iterdir()) and not is_run_folder(place, self._kind):
            raise ValueError(
                f"out={str(self._out)!r} holds other files than a {self._kind}'s; accepted is a"
                f" new or empty folder{lost}"
            )


def _recover(place: Path, kind: str) -> None:
    """Put back a run that was moved aside when its replacement was killed, and remove folders that
    a killed writer left; nothing that is not certainly ours is touched.
    """
    killed = []  # a partial folder without a lock was left for the reader
    # eight characters, as tempfile draws them
    ours = re.compile(rf"(\.?){re.escape(place.name)}\.(partial|replaced)-[a-z0-9_]{{8}}")
    for path in place.parent.iterdir():
        match = ours.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        if match[1] and match[2] == "replaced":
            if not any(path.iterdir()):
                path.rmdir()
            elif not is_run_folder(path, kind):
                continue
            elif place.exists():
                shutil.rmtree(path)
            else:
                path.rename(place)
        elif not match[1] and match[2] == "partial" and (path / LOCK).is_file():
            killed.append(path)
    for path in killed:
        if not is_held(path):
            shutil.rmtree(path)


def new_folder(parent: Path) -> Path:
    """Make a folder under a temporary name."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
    except OSError as error:
        error.filename = str(parent)
        raise
    folder.chmod(0o777 & ~_umask())  # a temporary folder is for its owner alone
    return folder


def remove_temporaries(folder: Path) -> None:
    """Remove what a killed writer left of files in a folder that only we write."""
    if not folder.is_symlink():
        for path in folder.glob(f"{TEMPORARY}*"):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link but not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_file(argument: str, path: Path | None) -> None:
    """Raise ValueError, before the work, for a file that could not be written after it; None is no
    file.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{argument}={str(path)!r} is a folder; accepted is a file")
    if _is_stream(path):
        return
    _check_writable(argument, path, path.parent)


def check_folder(argument: str, path: Path | None) -> None:
    """Raise ValueError, before the work, for a folder that is not there and could not be made; None
    is no folder.
    """
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"{argument}={str(path)!r} is a file; accepted is a folder")
    _check_writable(argument, path, path if path.exists() else path.resolve().parent)


def _check_writable(argument: str, path: Path, folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"{argument}={str(path)!r}: there is no folder {str(folder)!r}; accepted is a place"
            " in one"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"{argument}={str(path)!r}: nothing may be written to {str(folder)!r}; accepted is"
            " where it may"
        )


def sync_file(path: Path) -> None:
    """Make what was written to a file durable."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename inside the folder durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    # the system tells the mask to nobody who does not set it
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} in JSON")
