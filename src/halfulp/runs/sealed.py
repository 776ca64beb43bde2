"""Folders of tensors: safetensors files and one JSON file that holds the SHA-256 of each and is
sealed itself.

A folder is written under a temporary name, synced and renamed: it is whole or not there. Reading
executes nothing, and a byte that was altered is an error and not another result.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfulp.runs.folder import (
    line_text,
    new_folder,
    read_json,
    regular,
    remove_temporaries,
    sync_file,
    sync_folder,
    write_json,
)

if TYPE_CHECKING:
    from torch import Tensor

TORN = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
"""What reading a file that was torn or made up by somebody may raise, beside safetensors' own."""


def save_sealed(
    final: Path, name: str, plain: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor]]
) -> Path:
    """Write a folder, whole or not at all; one that is there already is replaced.

    Args:
        final: the folder; its parent must be there.
        name: of the JSON file.
        plain: what it says; "sha256" and "seal" are added.
        files: tensors by file name and name, on the CPU, that share no memory.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = new_folder(final.parent)
    try:
        for file, tensors in files.items():
            save_file({key: x.contiguous() for key, x in tensors.items()}, partial / file)
            sync_file(partial / file)
        # digests of what lies on the disk, not of what was handed to the writer
        said = {**plain, "sha256": {file: _digest(partial / file) for file in files}}
        write_json(partial / name, said | {"seal": _seal(said)})
        if final.exists() or final.is_symlink():
            # aside, since no folder can be renamed onto one that holds something
            final.rename(new_folder(final.parent) / final.name)
        partial.rename(final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, SafetensorError):  # how its writer says what the system said
            raise OSError(errno.EIO, " ".join(str(error).split()), str(final)) from None
        raise
    # what was put aside goes when the new folder stands, and what killed writers left with it
    remove_temporaries(final.parent)
    sync_folder(final.parent)
    return final


def load_sealed(folder: Path, name: str) -> dict[str, Any]:
    """Return what the JSON file of a folder says; raises ValueError where it is missing, torn or
    altered.
    """
    plain = read_json(folder / name)
    if not isinstance(plain, dict):
        raise ValueError(f"{name} is missing or torn")
    seal = plain.pop("seal", None)
    if seal != _seal(plain):
        raise ValueError(f"{name} was altered")
    return plain


def load_tensors(folder: Path, plain: Mapping[str, Any], file: str) -> dict[str, Tensor]:
    """Return the tensors of a file, held against the SHA-256 that `load_sealed` gave.

    Raises:
        ValueError: it was altered. And what `TORN` names, or SafetensorError.
    """
    from safetensors.torch import load_file

    if _digest(regular(folder / file)) != plain["sha256"][file]:
        raise ValueError(f"{file} was altered: its SHA-256 is another")
    return load_file(folder / file)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(line_text(plain).encode(errors="backslashreplace")).hexdigest()
