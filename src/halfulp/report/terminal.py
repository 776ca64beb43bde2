"""The terminal: tables of plain data."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halfulp.report.text import cell_text, duration_text, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.containers import Lines

WIDTH = 100
_WHOLE = 24  # characters of a cell that stay on one line
_GAP = 2  # between columns


def console(*, stderr: bool = False) -> Console:
    """Return the console of standard output, or of standard error: as wide as the terminal, or 100
    columns in a pipe, without color there.

    Nobody's text has a meaning in it: brackets, colons and control characters are shown.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Shown(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            """Every text that is printed, tables and bars included, comes through here."""
            for segment in super().render(renderable, options):
                shown = visible(segment.text)
                yield segment if segment.control else Segment(shown, segment.style)

    watched = (sys.stderr if stderr else sys.stdout).isatty()
    return Shown(
        stderr=stderr,
        width=None if watched else WIDTH,
        highlight=False,
        soft_wrap=False,
        markup=False,
        emoji=False,
    )


def print_table(table: Mapping[str, Any], to: Console) -> None:
    """Print a table's plain data: {"title", "columns", "rows", "caption"}.

    No figure is cut: long text wraps, and columns that do not fit beside each other follow below,
    after the first column once more.
    """
    from rich.table import Table
    from rich.text import Text

    class Path(Text):
        def wrap(self, console: Console, width: int, **options: Any) -> Lines:
            """A word too long for a line breaks after the last slash that fits on it."""
            last = rf"(?=\S{{{width + 1},}})\S{{1,{max(1, width - 1)}}}/"
            broken = re.sub(last, "\\g<0>\n", self.plain)
            return Text(broken).wrap(console, width, **options)

    texts = [[cell_text(cell) for cell in row] for row in table["rows"]]
    lengths = [
        max([len(str(name)), *(len(row[i]) for row in texts)])
        for i, name in enumerate(table["columns"])
    ]
    widths = [min(length, _WHOLE) for length in lengths]
    title = table["title"]
    for part in _parts(widths, to.width):
        grid = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        # else two columns of which both wrap
        fits = sum(widths[i] + _GAP for i in part) - _GAP <= to.width
        for i in part:
            cells = [row[i] for row in table["rows"]]
            number = all(isinstance(cell, (int, float)) or cell is None for cell in cells)
            whole = fits and lengths[i] <= _WHOLE
            grid.add_column(
                str(table["columns"][i]),
                justify="right" if number else "left",
                no_wrap=whole,
                overflow="fold",
                min_width=widths[i] if fits else None,
            )
        for row in texts:
            grid.add_row(*(Path(row[i]) for i in part))
        to.print(grid)
        title = None
    if table.get("caption"):
        to.print(Text(str(table["caption"]), style="dim"))


def print_tables(tables: Sequence[Mapping[str, Any]]) -> None:
    """Print tables to standard output; each as `print_table`."""
    for table in tables:
        print_table(table, console())


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns that fit beside each other in so many characters, each part opening with the first
    column.
    """
    parts = [[0]]
    for i in range(1, len(widths)):
        if len(parts[-1]) > 1 and sum(widths[j] + _GAP for j in parts[-1]) + widths[i] > room:
            parts.append([0])
        parts[-1].append(i)
    return parts


def print_act(act: Mapping[str, Any]) -> None:
    """Print what an act of the demo found: {"number", "title", "seconds", "finding"}."""
    from rich.padding import Padding
    from rich.text import Text

    to = console()
    line = Text(f"{act['number']} {act['title']}", style="bold")
    to.print(line.append(f"  {duration_text(act['seconds'])}", style="dim"))
    to.print(Padding(Text(act["finding"]), (0, 0, 0, 2)))
