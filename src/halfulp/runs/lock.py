"""One writer a folder: a lock that the system gives free when its process ends, however it ends.

The file says who holds it, for the reader of the message; whether it is held is flock's to say, so
that a file which a killed process left is no obstacle.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import stat
from datetime import UTC, datetime
from pathlib import Path

LOCK = ".lock"
_LINE = 300  # bytes of the owner's line that are shown
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # a link, a folder, a socket
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # a file system without them


class Lock:
    """Holds a folder until `release`, or until the process ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            ValueError: another process holds it, or its file is something else.
        """
        self._path = folder / LOCK
        self._handle: int | None = _taken(self._path, folder)
        with contextlib.suppress(OSError):  # the line is for readers; a full disk is no obstacle
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, _owner().encode(), 0)

    def release(self) -> None:
        """Give it free; nothing if that was done."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        with contextlib.suppress(OSError):
            self._path.unlink()  # while it is held: whoever opened it looks again
        os.close(handle)


def sweep_lock(folder: Path) -> None:
    """Remove the file of a lock that a killed process left, if nobody holds it."""
    if (folder / LOCK).exists():
        with contextlib.suppress(OSError, ValueError):
            Lock(folder).release()


def is_held(folder: Path) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        handle = _opened(folder / LOCK, create=False)
    except FileNotFoundError:
        return False
    try:
        return not _locked(handle)
    finally:
        os.close(handle)


def _taken(path: Path, folder: Path) -> int:
    while True:
        handle = _opened(path, create=True)
        if not _locked(handle):
            owner = os.pread(handle, _LINE, 0).decode(errors="replace").strip()
            os.close(handle)
            raise ValueError(
                f"out={str(folder)!r}: it is being written by {owner or 'another process'};"
                " accepted is a folder that nobody writes"
            )
        with contextlib.suppress(OSError):
            # a lock on a file that has no name any more keeps nobody out
            if os.path.samestat(os.fstat(handle), path.lstat()):
                return handle
        os.close(handle)  # its owner removed it between our opening and locking it


def _opened(path: Path, *, create: bool) -> int:
    # a link may lead to somebody's file, a pipe would be waited for, and a process that is started
    # meanwhile would hold the lock on
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT * create)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _strange(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _strange(path)
    return handle


def _strange(path: Path) -> ValueError:
    return ValueError(
        f"lock={str(path)!r}: it is a link, a folder or a pipe; accepted is the file of a run"
    )


def _locked(handle: int) -> bool:
    """Whether the lock could be had; True where the system has none."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        raise
    return True


def _owner() -> str:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return f"process {os.getpid()} on {platform.node()} since {since}\n"
