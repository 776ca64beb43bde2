"""Where figures go besides a run's folder: TensorBoard, Weights & Biases.

The libraries belong to the extras `tensorboard` and `wandb`; nothing is imported or written before
the first line. Figures reach them under the names that metrics.jsonl uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol


class Writer(Protocol):
    """Takes lines of metrics and measurements."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Pass on {"step", ...}."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoardSink:
    """Scalars in an event file, which `tensorboard --logdir` shows while the run lives."""

    def __init__(self, folder: str | Path, config: Mapping[str, Any] | None = None) -> None:
        """Raise ValueError where TensorBoard is not installed."""
        _need("tensorboard")
        self._folder, self._config = folder, dict(config or {})
        self._writer: Any = None

    def row(self, row: Mapping[str, Any]) -> None:
        """Add a line of metrics or a measurement."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=10)
            lines = [f"    {name}: {value}" for name, value in self._config.items()]
            if lines:  # indented, which is code in its Markdown
                self._writer.add_text("config", "\n".join(lines))
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Write what is left and end."""
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """A run at Weights & Biases; its login, and whether it works offline, are settings of that
    library.
    """

    def __init__(
        self,
        project: str,
        config: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        """Raise ValueError where wandb is not installed; `folder` gives the run its name and holds
        what it writes.
        """
        _need("wandb")
        self._options: dict[str, Any] = {"project": project, "config": dict(config or {})}
        if folder is not None:
            self._options |= {"name": Path(folder).resolve().name, "dir": str(folder)}
        self._run: Any = None

    def row(self, row: Mapping[str, Any]) -> None:
        """Log a line of metrics or a measurement."""
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._options)
        self._run.log(dict(scalars(row)), step=row["step"])

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise ValueError(
            f"{package}: accepted where it is installed; pip install 'halfulp[{package}]'"
        )


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line by name: metrics as they are, measurements as measure/layer
    0/head 1.
    """
    for name, value in row.items():
        if name == "measure":
            for measure, nested in value.items():
                yield from _leaves(measure, nested, ("layer", "head"))
        elif name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


def _leaves(name: str, value: Any, levels: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    if isinstance(value, (list, tuple)):
        level, *rest = levels or ("index",)
        for i, item in enumerate(value):
            yield from _leaves(f"{name}/{level} {i}", item, tuple(rest))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)
    elif value is None:
        yield name, math.nan  # what was not finite
