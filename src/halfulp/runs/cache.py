"""What was computed once and is expensive, kept on disk in the user's cache folder.

An entry's name is the SHA-256 of everything that it depends on, so that it never grows stale: what
depends on something else has another name. Entries are safetensors files, bytes that run nothing,
with a digest of their own; a torn or foreign one counts as not there and is computed again. The
folder may be deleted at any time, and several processes may use it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from halfulp.runs.folder import TEMPORARY, whole_file

VARIABLE = "HALFULP_CACHE"
"""Moves the folder, or forbids it with `off`."""

MOST_BYTES = 512 * 2**20
"""What all entries together may take; beyond it those go that were not read for longest."""

# the digest stands inside of what it is the digest of: it is taken with zeros in its place
_FIELD, _UNKNOWN = b'"sha256":"%b"', b"0" * 64
# bytes that are written between two looks through all entries, on average
_BETWEEN = 2**22


def folder() -> Path | None:
    """Where entries lie, None where HALFULP_CACHE is `off` or there is no home."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen:
        return None if chosen.lower() == "off" else Path(chosen)
    if sys.platform == "darwin":
        base = Path("~/Library/Caches")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with contextlib.suppress(RuntimeError):  # a user without a home
        return base.expanduser() / "halfulp"
    return None


def name_of(*parts: Any) -> str:
    """The name of what depends on exactly these parts: plain data whose repr says all of it."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()


def read(name: str, top: Path | None = None) -> tuple[Any, dict[str, Tensor]] | None:
    """The plain data and tensors of an entry; None where there is none, or none that is whole.
    `top` is another process's folder.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = _path(name, top)
    if path is None:
        return None
    try:
        data = path.read_bytes()
        tensors = load(data)
        # a safetensors file: the length of its header in 8 bytes, the header in JSON, the tensors
        told = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        digest = str(told["sha256"]).encode()
        # in pieces, since every copy of a large entry takes as long as its digest
        field, whole = _FIELD % digest, memoryview(data)
        start = data.index(field)
        pieces = (whole[:start], _FIELD % _UNKNOWN, whole[start + len(field) :])
        if _digest(name, *pieces) != digest:
            return None
        plain = json.loads(told["plain"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # read just now
    return plain, tensors


def write(name: str, plain: Any, tensors: Mapping[str, Tensor], top: Path | None = None) -> None:
    """Keep an entry, if the disk lets us: it is never an error that it does not."""
    from safetensors.torch import save

    path = _path(name, top)
    if path is None:
        return
    data = save(dict(tensors), {"plain": json.dumps(plain), "sha256": _UNKNOWN.decode()})
    data = data.replace(_FIELD % _UNKNOWN, _FIELD % _digest(name, data), 1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # whole, so that no reader meets half of it; not synced, since a crash costs one computation
        with whole_file(path, sync=False) as file:
            file.write(data)
        # a digest's end is as good as chance, and needs no count that processes would share
        if int(name[-6:], 16) * _BETWEEN < len(data) * 16**6:
            _evict(path)


def _path(name: str, top: Path | None = None) -> Path | None:
    top = top or folder()
    return None if top is None else top / name[0] / f"{name[1:]}.safetensors"


def _digest(name: str, *pieces: bytes | memoryview) -> bytes:
    """Of an entry's name and bytes, its own digest not known yet."""
    # with the name, so that an entry under another's name counts as torn
    found = hashlib.sha256(name.encode())
    for piece in pieces:
        found.update(piece)
    return found.hexdigest().encode()


def _evict(newest: Path) -> None:
    """Delete what was read least lately until all entries keep `MOST_BYTES`; a file that a stopped
    writer left goes like any other. What another process deletes first is gone as well.
    """
    found = []
    for shelf in newest.parents[1].iterdir():
        with contextlib.suppress(OSError), os.scandir(shelf) as entries:
            for entry in entries:
                if entry.name.endswith(".safetensors") or entry.name.startswith(TEMPORARY):
                    with contextlib.suppress(OSError):
                        stat = entry.stat(follow_symlinks=False)
                        found.append((stat.st_mtime, stat.st_size, entry.path))
    held = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if held <= MOST_BYTES:
            break
        if path != str(newest):
            Path(path).unlink(missing_ok=True)
            held -= size
