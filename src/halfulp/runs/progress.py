"""One line on a terminal that says how far something is, whatever the terminal's width; a plain one
now and then where standard error is a file, such as a batch job's log.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_ROOMY = 80
"""From so many columns on there is a long bar and the time that has passed."""

EVERY = 30.0
"""Seconds between two plain lines; what ends sooner prints none."""


def progress_line(console: Console, *, counted: bool) -> Progress:
    """Return rich's progress on one line of that console, taken away at the end; its tasks need the
    field `title`.

    Args:
        console: where; where it is no terminal, a plain line of every so many seconds.
        counted: show "3/40" of the total instead of a percentage.
    """
    from rich.progress import (
        BarColumn,
        Progress,
        TaskID,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    roomy = console.width >= _ROOMY
    rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # what is worked on gives way first
    count = TextColumn("{task.completed:.0f}/{task.total:.0f}") if counted else TaskProgressColumn()
    columns = [
        TextColumn("{task.fields[title]}", style="bold", markup=False),
        BarColumn(bar_width=24 if roomy else 8),
        count,
        *([TimeElapsedColumn()] if roomy else []),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.description}", style="dim", markup=False, table_column=rest),
    ]
    if console.is_terminal:
        return Progress(*columns, console=console, transient=True, expand=True)
    began = said = time.monotonic()

    class Lines(Progress):
        """Draws nothing, and prints where it is."""

        def update(self, task_id: TaskID, **changes: Any) -> None:
            nonlocal said
            super().update(task_id, **changes)
            if (now := time.monotonic()) < said + EVERY:
                return
            said, task = now, self._tasks[task_id]
            done = (
                f"{task.completed:.0f}/{task.total:.0f}" if counted else f"{task.percentage:.0f}%"
            )
            rest = f", {task.description}" if task.description else ""
            line = f"{task.fields['title']}: {done} after {now - began:.0f} s{rest}"
            print(line, file=console.file, flush=True)

    return Lines(*columns, console=console, disable=True)
