"""Run folders and files that are whole or not there: written under a temporary name, synced, then
renamed.

A reader, another process or a later run, never meets half a file, whenever the writer was stopped.
A run folder is known by its run.json. A new run is written beside the one that it replaces and
takes its place at the end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> Path:
    """Write a text file, whole or not at all; its folder must be there."""
    return write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> Path:
    """Write a file, whole or not at all; its folder must be there."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())  # a temporary file is for its owner alone
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path


def write_json(path: Path, plain: Any) -> Path:
    """Write plain data as JSON, whole or not at all; numbers that are not finite become null."""
    return write_text(path, json_text(plain) + "\n")


def json_text(plain: Any) -> str:
    """Return plain data as JSON text; numbers that are not finite become null."""
    return json.dumps(_finite(plain), indent=1, ensure_ascii=False, allow_nan=False)


def line_text(plain: Any) -> str:
    """Return plain data as one line of JSON; numbers that are not finite become null."""
    return json.dumps(_finite(plain), ensure_ascii=False, allow_nan=False)


def read_json(path: Path) -> Any:
    """Return the data of a JSON file, or None where it is missing or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def is_run_folder(folder: Path) -> bool:
    """Whether a folder holds a run: a run.json that names the version of halfulp that wrote it."""
    record = read_json(folder / "run.json")
    return isinstance(record, dict) and "halfulp" in record


def open_run(out: Path) -> Path:
    """Return a new, empty folder beside `out` to write a run into; `close_run` puts it in its
    place.

    Raises:
        ValueError: `out` or the folder beside it holds something else than a run, or cannot be
            written.
    """
    check_folder("out", out)
    beside = _beside(out, "partial")
    for folder in (out, beside):
        if folder.exists() and any(folder.iterdir()) and not is_run_folder(folder):
            raise ValueError(
                f"out={str(out)!r}: {str(folder)!r} holds other files; accepted is a new or empty"
                " folder"
            )
    if beside.exists():
        shutil.rmtree(beside)
    beside.mkdir()
    return beside


def close_run(beside: Path, out: Path) -> Path:
    """Put the folder of `open_run` into its place; a run that was there is removed after that."""
    old = _beside(out, "replaced")
    if old.exists():
        shutil.rmtree(old)
    if out.exists():
        out.rename(old)
    beside.rename(out)
    sync_folder(out.resolve().parent)
    if old.exists():
        shutil.rmtree(old)
    return out


def _beside(out: Path, suffix: str) -> Path:
    whole = out.resolve()
    return whole.with_name(f"{whole.name}.{suffix}")


def check_file(argument: str, path: Path | None) -> None:
    """Raise ValueError, before the work, for a file that could not be written after it; None is no
    file.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{argument}={str(path)!r} is a folder; accepted is a file")
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
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
