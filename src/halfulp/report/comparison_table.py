"""Two audits beside each other on the terminal: what is worse first, then what is better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from halfulp.report.text import times_text

if TYPE_CHECKING:
    from rich.console import Console

Comparison = Mapping[str, Any]
"""A comparison's plain data: `halfulp.audit.against.Comparison.as_dict()`."""

_SIGNS = {"worse": "✗", "same": "●", "better": "✓"}
_STYLES = {"worse": "red", "same": "", "better": "green"}
MOST_ROWS = 20


def summary_line(comparison: Comparison) -> str:
    """Return what became of a target in one line."""
    change = comparison["change"]
    before, after = comparison["verdicts"]
    count = {
        name: sum(pair["change"] == name for pair in comparison["pairs"])
        for name in ("worse", "same", "better")
    }
    figures = ", ".join(f"{number} {name}" for name, number in count.items())
    verdicts = after if before == after else f"{before} → {after}"
    return (
        f"{_SIGNS[change]} {change.upper()} {comparison['after']} against {comparison['before']}"
        f" ({verdicts}): {figures} of {len(comparison['pairs'])} figures"
    )


def beside_figures(comparison: Comparison, most: int = 3) -> list[str]:
    """Return what else is worse than figures, and what only one of the two has."""
    beyond = [text for text in comparison["worse"] if not _is_of_a_pair(text, comparison)]
    more = [f"and {len(beyond) - most} more that no figure shows"] if len(beyond) > most else []
    return [*(f"worse: {text}" for text in beyond[:most]), *more, *comparison["unpaired"]]


def _is_of_a_pair(text: str, comparison: Comparison) -> bool:
    worse = (pair for pair in comparison["pairs"] if pair["change"] == "worse")
    return any(text.startswith(f"{pair['property']} on {pair['case']}: ") for pair in worse)


def change_rows(comparison: Comparison, most: int) -> list[list[str]]:
    """Return rows of the figures that changed, the worst first: sign, figure, case, ratio and its
    bounds.
    """
    changed = [pair for pair in comparison["pairs"] if pair["change"] != "same"]
    return [
        [
            _SIGNS[pair["change"]],
            pair["property"],
            pair["case"],
            *(times_text(pair[name]) for name in ("times", "at_least", "at_most")),
        ]
        for pair in changed[:most]
    ]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print one comparison."""
    from rich.table import Table
    from rich.text import Text

    style = f"bold {_STYLES[comparison['change']]}".strip()
    console.print(Text(summary_line(comparison), style=style))
    for text in beside_figures(comparison):
        console.print(Text(f"  {text}", style="dim"))
    rows = change_rows(comparison, MOST_ROWS)
    if not rows:
        return
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("", "figure"):
        table.add_column(name, no_wrap=True)
    table.add_column("on", overflow="fold", ratio=1)
    for name in ("now / before", "at least", "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    console.print(table)
    left = sum(pair["change"] != "same" for pair in comparison["pairs"]) - len(rows)
    if left > 0:
        console.print(Text(f"  and {left} more that changed", style="dim"))
    level = 100 * comparison["family_level"]
    console.print(
        Text(
            "  heads paired on identical inputs; chance that anything is called changed which is"
            f" not: at most {level:g} %",
            style="dim",
        )
    )
