"""The line of progress fits the terminal, and shows nothing where there is none."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from halfulp.runs.progress import progress_line


def shown(width: int, *, counted: bool) -> list[str]:
    """Return the lines of the last picture drawn."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    progress = progress_line(console, counted=counted)
    progress.add_task("recipe:BF16_HALFULP on value_constant", title="audit sdpa", total=40)
    console.file = io.StringIO()
    console.print(progress.get_renderable())
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    return text.splitlines()


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("width", [40, 50, 79, 80, 120])
def test_it_is_one_line_of_the_terminals_width(width: int, counted: bool) -> None:
    (line,) = shown(width, counted=counted)
    assert cell_len(line) <= width
    assert "audit sdpa" in line
    assert ("0/40" if counted else "0%") in line
    assert "left" in line
    if width == 120:
        assert "value_constant" in line


def test_nothing_is_shown_where_nobody_watches() -> None:
    console = Console(file=io.StringIO(), width=80)
    with progress_line(console, counted=True) as progress:
        progress.update(progress.add_task("", title="x", total=2), completed=1)
    assert console.file.getvalue() == ""
