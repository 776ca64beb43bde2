"""A training's run folder while it is written, and read again: run.json, metrics.jsonl,
batches.npy, checkpoints.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from halfulp.runs.folder import (
    TEMPORARY,
    line_text,
    read_array,
    regular,
    remove_temporaries,
    write_bytes,
    write_json,
    write_text,
)
from halfulp.runs.lock import LOCK, Lock
from halfulp.runs.record import closed, now
from halfulp.training.checkpoint import Checkpoint, prune, save_checkpoint
from halfulp.training.config import RunConfig
from halfulp.training.run_json import (
    config_from_dict,
    difference,
    new_record,
    read_record,
)

Row = dict[str, Any]
_LARGEST = 2**63  # of an integer in a line


class Journal:
    """Writes one run, which no other process can do then. A line of metrics can be read at once;
    `close` ends the record.
    """

    def __init__(
        self, folder: Path, lock: Lock, record: dict[str, Any], rows: Sequence[Row]
    ) -> None:
        self.folder, self.record, self._lock = folder, record, lock
        # the record first: a folder with lines and no record could be neither begun nor taken up
        write_json(folder / "run.json", record)
        write_text(folder / "metrics.jsonl", _lines(rows))
        # what a checkpoint says came before it, so that lines which were altered are noticed
        self._written = hashlib.sha256(_lines(rows).encode())
        self._metrics: TextIO = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    @classmethod
    def begin(
        cls,
        folder: Path,
        config: RunConfig,
        order: np.ndarray,
        source: dict[str, Any],
        command: str | None,
        start: int = 0,
    ) -> Journal:
        """Start a run in a new or empty folder, or in one where a run was killed before it had a
        record.

        Raises:
            ValueError: the folder holds something, its parent is not there, or another process
                writes it.
        """
        if folder.exists() and not _empty(folder):
            raise ValueError(
                f"out={str(folder)!r}: it is not empty; accepted is a new folder, or resume for its"
                " own run"
            )
        if not folder.resolve().parent.is_dir():
            raise ValueError(
                f"out={str(folder)!r}: there is no folder for it; accepted is a place in one"
            )
        folder.mkdir(exist_ok=True)
        lock = Lock(folder)
        try:
            remove_temporaries(folder)
            write_order(folder, order)
            record = new_record(config, source, order_digest(order), command, start)
            return cls(folder, lock, record, [])
        except BaseException:
            if not (folder / "run.json").exists():
                (folder / "batches.npy").unlink(missing_ok=True)
            lock.release()
            raise

    @classmethod
    def take_up(cls, folder: Path, lock: Lock, step: int, rows: Sequence[Row]) -> Journal:
        """Go on with a run after that step with its lines up to there: lines of later steps, whose
        state is lost, are made again, and what a killed process left half-written is removed.
        """
        record = read_record(folder)
        lost = lost_lines(config_from_dict(record["config"]), rows, record["start"], step)
        record |= {"status": "running", "reason": "", "ended": None}
        taken = {"step": step, "at": now()} | ({"lost lines": len(lost)} if lost else {})
        record["resumed"] = [*record["resumed"], taken]
        remove_temporaries(folder)
        remove_temporaries(folder / "checkpoints")
        return cls(folder, lock, record, rows)

    def row(self, row: Row) -> None:
        """Add one line of metrics."""
        self._metrics.write(_lines([row]))
        # for whoever follows the run; what a crash of the machine spares, a checkpoint sees to
        self._metrics.flush()
        self._written.update(_lines([row]).encode())

    def checkpoint(self, checkpoint: Checkpoint, keep: int | None) -> None:
        """Write a checkpoint after the lines that precede it, and remove those that are not
        kept.
        """
        # lines first: after a crash no checkpoint knows of lines that are not there
        os.fsync(self._metrics.fileno())
        owned = replace(checkpoint, run=self.record["seal"], lines=self._written.hexdigest())
        save_checkpoint(self.folder / "checkpoints", owned)
        prune(self.folder / "checkpoints", keep)

    def close(self, status: str, reason: str) -> None:
        """Say how the run ended."""
        try:
            self._metrics.close()
            self.record = closed(self.record, status, reason)
            write_json(self.folder / "run.json", self.record)
        finally:
            self._lock.release()

    @property
    def taken_up(self) -> bool:
        """Whether it goes on with an earlier process's run."""
        return bool(self.record["resumed"])

    def forget(self) -> None:
        """Leave the folder as empty as it was: the corrected command is to find it so."""
        try:
            self._metrics.close()
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
            for name in ("metrics.jsonl", "batches.npy", "run.json"):
                (self.folder / name).unlink(missing_ok=True)
        finally:
            self._lock.release()


def _empty(folder: Path) -> bool:
    """Whether a folder holds nothing but what `begin` writes before run.json, and its lock, which
    only a killed process leaves.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    early = {name for name in names if name.startswith(TEMPORARY)} | {"batches.npy", LOCK}
    return not names or (LOCK in names and names <= early)


def recorded_order(folder: Path, config: RunConfig, source: dict[str, Any]) -> np.ndarray:
    """Return the order of samples of a run that is to go on.

    Raises:
        ValueError: the folder holds no run, one of another configuration or of other data than are
            here now, or its recorded order is torn or altered.
    """
    record = read_record(folder)
    recorded = config_from_dict(record["config"])
    if changes := difference(recorded, config):
        raise ValueError(
            f"out={str(folder)!r}: the run there has another configuration ({changes[0]}); accepted"
            " is its own"
        )
    # through JSON, as the record has been, which makes lists of tuples
    if record["data"] != json.loads(json.dumps(source)):
        raise ValueError(
            f"out={str(folder)!r}: its data were {record['data']}; accepted is that and not"
            f" {source}"
        )
    order = read_order(folder)
    if order_digest(order) != record["batches"]:
        raise ValueError(
            f"batches={str(folder / 'batches.npy')!r}: its SHA-256 is another than the run"
            " recorded; accepted is the order that it wrote"
        )
    return order


def read_rows(folder: Path) -> list[Row]:
    """Return the lines of metrics.jsonl; a torn last line is left out with a warning, and so is any
    other, and one that no run writes.
    """
    path = folder / "metrics.jsonl"
    try:
        # a line may be torn in the middle of a character
        lines = regular(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows, torn = [], []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if _is_row(row):
            rows.append(row)
        else:
            torn.append(number)
    if torn:
        said = (
            f"line {torn[0]} is torn and was left out"
            if len(torn) == 1
            else f"{len(torn)} lines, the first of them {torn[0]}, are torn and were left out"
        )
        warnings.warn(f"{path}: {said}", stacklevel=2)
    return rows


def lost_lines(config: RunConfig, rows: Iterable[Row], start: int, last: int) -> list[int]:
    """Return the steps after `start` and up to `last` whose line of metrics is not there."""
    there = {row["step"] for row in rows if "loss" in row}
    every = config.metrics_every
    due = range(every * (start // every + 1), min(last, config.steps) + 1, every)
    return [step for step in due if step not in there]


def warn_of_lines(
    folder: Path, config: RunConfig, rows: Sequence[Row], last: int, written: str = ""
) -> None:
    """Warn where lines of metrics up to a step that the run is known to have reached are not
    there, or are not those whose SHA-256 a checkpoint of that step has.
    """
    known = [row for row in rows if row["step"] <= last]
    if written and written != hashlib.sha256(_lines(known).encode()).hexdigest():
        warnings.warn(
            f"{folder / 'metrics.jsonl'}: its lines up to step {last} are not those that the run"
            " wrote: missing, more or altered",
            stacklevel=2,
        )
    if lost := lost_lines(config, rows, read_record(folder)["start"], last):
        warnings.warn(
            f"{folder / 'metrics.jsonl'}: {len(lost)} of the lines up to step {last} are missing,"
            f" the first of them that of step {lost[0]}",
            stacklevel=2,
        )


def _lines(rows: Iterable[Row]) -> str:
    return "".join(line_text(row) + "\n" for row in rows)


def _is_row(row: Any) -> bool:
    """Whether a line is one that a run writes: numbers by name, and what is measured by layer and
    head.
    """
    # type() and not isinstance: True is an int, and no step
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return False
    measure = row.get("measure", {})
    return (
        isinstance(measure, dict)
        and all(map(_is_measured, measure.values()))
        and all(_is_number(value) for name, value in row.items() if name != "measure")
    )


def _is_measured(value: Any) -> bool:
    layers = value if isinstance(value, list) else [[value]]
    return all(isinstance(heads, list) and all(map(_is_number, heads)) for heads in layers)


def _is_number(value: Any) -> bool:
    """A number as JSON has it; None stands for one that was not finite."""
    if type(value) is float:
        return math.isfinite(value)
    return value is None or (type(value) is int and abs(value) < _LARGEST)


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
        order = read_array(path)
    except ValueError as error:
        raise ValueError(f"batches={str(path)!r}: {error}; accepted is a whole .npy file") from None
    if order.ndim != 2 or order.dtype != np.int64:
        raise ValueError(
            f"batches={str(path)!r}: {order.dtype} {order.shape}; accepted is int64 [steps, batch]"
        )
    return order


def order_digest(order: np.ndarray) -> str:
    """Return the SHA-256 of an order of samples."""
    # of one byte order, so that a run can move to another machine
    return hashlib.sha256(np.ascontiguousarray(order, dtype="<i8").data).hexdigest()
