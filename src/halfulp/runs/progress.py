"""One line on a terminal that says how far something is, whatever the terminal's width."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_ROOMY = 80
"""From so many columns on there is a long bar and the time that has passed."""


def progress_line(console: Console, *, counted: bool) -> Progress:
    """Return rich's progress on one line of that console, taken away at the end; its tasks need the
    field `title`.

    Args:
        console: where; nothing is shown where it is no terminal.
        counted: show "3/40" of the total instead of a percentage.
    """
    from rich.progress import (
        BarColumn,
        Progress,
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
    shown = console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=not shown, expand=True)
