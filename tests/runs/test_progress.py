"""The line of progress fits the terminal, and is plain lines where there is none."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from halfulp.runs import progress as progress_module
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


def test_where_no_terminal_is_a_plain_line_comes_after_half_a_minute(monkeypatch) -> None:
    clock = iter([0.0, 1.0, 31.0, 40.0, 62.0])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), width=40)
    lines = progress_line(console, counted=True)
    task = lines.add_task("", total=8, title="train my.py:make")
    for number in range(1, 5):
        lines.update(task, completed=number, description="loss 2.5")
    assert console.file.getvalue().splitlines() == [
        "train my.py:make: 2/8 after 31 s, loss 2.5",
        "train my.py:make: 4/8 after 62 s, loss 2.5",
    ]
