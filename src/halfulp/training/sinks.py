"""The line of a run on the terminal; TensorBoard and Weights & Biases are `runs.writers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfulp.runs.progress import progress_line


class ConsoleSink:
    """A line on standard error with step, loss, tokens a second and the time left; a plain
    line now and then where that is no terminal.
    """

    def __init__(self, steps: int, title: str, console: Any = None) -> None:
        from rich.console import Console

        self._bar = progress_line(console or Console(stderr=True), counted=True)
        self._task = self._bar.add_task("", total=steps, title=title)
        self._bar.start()

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a line of metrics."""
        if "loss" in row:
            said = f"loss {row['loss']:.4g}  {_rate(row['tokens_per_second'])} tokens/s"
            self._bar.update(self._task, completed=row["step"], description=said)

    def close(self) -> None:
        """Take the line away."""
        self._bar.stop()


def _rate(number: float) -> str:
    """Three digits: 87.2, 1.23k, 4.5M."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"
