"""A training's run folder while it is written, and read again: run.json, metrics.jsonl,
batches.npy, checkpoints.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from halfulp.runs.folder import line_text, write_bytes, write_json, write_text
from halfulp.training.checkpoint import Checkpoint, checkpoints, prune, save_checkpoint
from halfulp.training.config import RunConfig
from halfulp.training.record import config_from_dict, difference, new_record, now, read_record

Row = dict[str, Any]


class Journal:
    """Writes one run. A line of metrics can be read at once; `close` ends the record."""

    def __init__(self, folder: Path, record: dict[str, Any], rows: Sequence[Row]) -> None:
        self.folder, self.record = folder, record
        write_json(folder / "run.json", record)
        write_text(folder / "metrics.jsonl", "".join(line_text(row) + "\n" for row in rows))
        self._metrics: TextIO = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    @classmethod
    def begin(
        cls,
        folder: Path,
        config: RunConfig,
        order: np.ndarray,
        source: dict[str, Any],
        command: str | None,
        again: bool = False,
    ) -> Journal:
        """Start a run in a new or empty folder, or `again` in one where a run was killed before it
        had a record.

        Raises:
            ValueError: the folder holds something, or its parent is not there.
        """
        if folder.exists() and (
            not folder.is_dir() or any(not (again and _early(p)) for p in folder.iterdir())
        ):
            raise ValueError(
                f"out={str(folder)!r}: it is not empty; accepted is a new folder, or resume for its"
                " own run"
            )
        if not folder.resolve().parent.is_dir():
            raise ValueError(
                f"out={str(folder)!r}: there is no folder for it; accepted is a place in one"
            )
        folder.mkdir(exist_ok=True)
        write_order(folder, order)
        return cls(folder, new_record(config, source, command), [])

    @classmethod
    def take_up(cls, folder: Path, step: int) -> Journal:
        """Go on with a run after that step: lines of later steps, whose state is lost, are made
        again.
        """
        record = read_record(folder)
        record |= {"status": "running", "reason": "", "ended": None}
        record["resumed"] = [*record["resumed"], {"step": step, "at": now()}]
        return cls(folder, record, [row for row in read_rows(folder) if row["step"] <= step])

    def row(self, row: Row) -> None:
        """Add one line of metrics."""
        self._metrics.write(line_text(row) + "\n")
        self._metrics.flush()

    def checkpoint(self, checkpoint: Checkpoint, keep: int | None) -> None:
        """Write a checkpoint after the lines that precede it, and remove those that are not
        kept.
        """
        os.fsync(self._metrics.fileno())
        save_checkpoint(self.folder / "checkpoints", checkpoint)
        prune(self.folder / "checkpoints", keep)

    def close(self, status: str, reason: str) -> None:
        """Say how the run ended."""
        self._metrics.close()
        self.record |= {"status": status, "reason": reason, "ended": now()}
        write_json(self.folder / "run.json", self.record)


def _early(path: Path) -> bool:
    """Whether a file is one that `begin` writes before run.json."""
    return path.name.startswith((".batches.npy.", ".run.json.")) or path.name == "batches.npy"


def recorded_state(
    folder: Path, config: RunConfig, source: dict[str, Any]
) -> tuple[np.ndarray, Checkpoint | None]:
    """Return the order of a run that is to go on, and its last whole checkpoint if it has one.

    Raises:
        ValueError: the folder holds no run, one of another configuration or of other data than are
            here now, or its recorded order is torn.
    """
    record = read_record(folder)
    recorded = config_from_dict(record["config"])
    if changes := difference(recorded, config):
        raise ValueError(
            f"out={str(folder)!r}: the run there has another configuration ({changes[0]}); accepted"
            " is its own"
        )
    if record["data"] != json.loads(json.dumps(source)):
        raise ValueError(
            f"out={str(folder)!r}: its data were {record['data']}; accepted is that and not"
            f" {source}"
        )
    return read_order(folder), next(checkpoints(folder / "checkpoints"), None)


def read_rows(folder: Path) -> list[Row]:
    """Return the lines of metrics.jsonl; a torn last line is left out with a warning, and so is any
    other.
    """
    try:
        lines = (
            (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("no step")
        except ValueError:
            warnings.warn(
                f"{folder / 'metrics.jsonl'}: line {number} is torn and was left out", stacklevel=2
            )
            continue
        rows.append(row)
    return rows


def write_order(folder: Path, order: np.ndarray) -> None:
    """Write batches.npy, int64 `[steps, batch]`, whole or not at all."""
    buffer = io.BytesIO()
    np.save(buffer, order, allow_pickle=False)
    write_bytes(folder / "batches.npy", buffer.getvalue())


def read_order(folder: Path) -> np.ndarray:
    """Return the recorded order of samples, int64 `[steps, batch]`, mapped from the file.

    Raises:
        ValueError: there is none, or it is torn.
    """
    path = folder / "batches.npy"
    try:
        order: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"batches={str(path)!r}: {' '.join(str(error).split())}; accepted is a whole .npy file"
        ) from None
    if order.ndim != 2 or order.dtype != np.int64:
        raise ValueError(
            f"batches={str(path)!r}: {order.dtype} {order.shape}; accepted is int64 [steps, batch]"
        )
    return order
