"""What a watcher writes down: run.json and metrics.jsonl in a folder of its own.

A disk that is full or a folder that is gone ends in one warning; it must not end a training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from halfulp.runs.folder import check_folder, line_text, write_json
from halfulp.runs.record import closed, new_record
from halfulp.runs.writers import Writer
from halfulp.watch.alarms import rule
from halfulp.watch.health import Step
from halfulp.watch.watching import LEVEL

LOG = logging.getLogger("halfulp.watch")


class Notebook:
    """A watcher's folder; without one, nothing is written."""

    def __init__(
        self, folder: str | Path | None, config: Mapping[str, Any], writers: Sequence[Writer] = ()
    ) -> None:
        self.folder = None if folder is None else _new_folder(Path(folder))
        self.matrices: list[str] = []
        self._writers = list(writers)
        self._begun = {} if folder is None else new_record("watch", config, "", rule=rule(LEVEL))

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a measurement; of its "weights" {matrix: {figure: number}} each figure as a list,
        in the order in which run.json names the matrices.
        """
        weights = row.get("weights", {})
        if weights:
            self.matrices = list(weights)
            figures = {
                f"weight_{name}": [[known[name] for known in weights.values()]]
                for name in next(iter(weights.values()))
            }
            row = {**row, "measure": {**row["measure"], **figures}}
        row = {name: value for name, value in row.items() if name != "weights"}
        self._pass_on(row)
        if self.folder is None:
            return
        try:
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(line_text(dict(row)) + "\n")
        except OSError as error:
            self._lost(error)

    def add_step(self, step: Step) -> None:
        """Write what a step showed beside its measurements."""
        known = {
            name: value
            for name, value in vars(step).items()
            if name in ("loss", "grad_norm", "learning_rate", "scale") and not math.isnan(value)
        }
        if known:
            self.add({"step": step.number, **known})

    def record(self, status: str, known: Mapping[str, Any]) -> None:
        """Write run.json: what is known of the run, and when and where it was made."""
        if self.folder is None:
            return
        now = {**self._begun, "matrices": self.matrices, **known}
        try:
            write_json(self.folder / "run.json", closed(now, status) if status == "done" else now)
        except OSError as error:
            self._lost(error)

    def close(self) -> None:
        """End the writers."""
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:  # another's, at the end of somebody's training
                LOG.warning("%s could not be closed: %s", type(writer).__name__, error)
        self._writers = []

    def _pass_on(self, row: Mapping[str, Any]) -> None:
        for writer in list(self._writers):
            try:
                writer.row(row)
            except Exception as error:  # a server that is gone must not end a training
                LOG.warning("%s gets no more: %s", type(writer).__name__, error)
                self._writers.remove(writer)

    def _lost(self, error: OSError) -> None:
        LOG.warning(
            "folder=%r is no longer written: %s; measuring goes on", str(self.folder), error
        )
        self.folder = None


def _new_folder(folder: Path) -> Path:
    """The folder, made where it is not there; raises ValueError for one that holds something."""
    folder.resolve().parent.mkdir(parents=True, exist_ok=True)
    check_folder("folder", folder)
    folder.mkdir(exist_ok=True)
    full = ValueError(f"folder={str(folder)!r} holds files; accepted is a new or empty folder")
    rank = _rank()
    if rank is not None:  # processes of one training: each has a folder of its own
        folder = folder / f"rank-{rank}"
        folder.mkdir(exist_ok=True)
    if any(folder.iterdir()):
        raise full
    try:  # of two processes that come at once the file system lets one through
        (folder / "metrics.jsonl").open("x").close()
    except FileExistsError:
        raise full from None
    return folder


def _rank() -> int | None:
    """This process's number where several train together."""
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if several and distributed.get_world_size() > 1 else None
