"""What `halfulp reconstruct` prints: the sentence, how much is explained, how it was found, and
what is not explained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

BAR = 20


def print_reconstruction(found: Mapping[str, Any], to: Console) -> None:
    """Print a reconstruction's plain data."""
    to.print(Text.assemble((found["target"], "bold"), " ", found["text"]))
    to.print()
    to.print(_explained(found))
    if found["steps"]:
        to.print()
        to.print(_steps(found))
    to.print()
    for line in _lines(found):
        to.print(line)
    to.print(
        f"{found['tried']} candidates, {found['seconds']:.1f} s, {found['dtype']}"
        + ("" if found["complete"] else "; the effort was spent before all was tried"),
        style="dim",
    )


def print_operation(found: Mapping[str, Any], to: Console) -> None:
    """Print the plain data of another operation's."""
    to.print(Text.assemble((found["target"], "bold"), ": ", found["text"]))
    rivals = found["found"]["rivals"] if found["found"] else ()
    if rivals:
        table = Table("explains", "on other calls", "what it may do", box=None, pad_edge=False)
        for text, share, fits in rivals:
            table.add_row(f"{100 * share:.1f} %", f"{100 * fits:.1f} %", text)
        to.print()
        to.print(table)
    to.print()
    for name, share in found["recipes"].items():
        to.print(f"the recipe {name} explains {100 * max(0.0, share):.0f} % of all its error")
    to.print(f"{found['calls']} calls, {found['seconds']:.1f} s, {found['dtype']}", style="dim")


def _explained(found: Mapping[str, Any]) -> Table:
    names = ("result", "explained", "", "cosine", "as stock", "× stock", "× halfulp")
    table = Table(*names, box=None, pad_edge=False)
    for row in found["explained"]:
        share = row["explained"]
        bar = "█" * round(BAR * share) + "░" * (BAR - round(BAR * share))
        table.add_row(
            row["tensor"],
            f"{100 * share:.1f} %",
            bar,
            f"{row['cosine']:.3f} ± {row['standard_error']:.3f}",
            f"{row['stock_cosine']:.3f}",
            f"{row['times_stock']:.3g}",
            f"{row['times_halfulp']:.3g}",
        )
    return table


def _steps(found: Mapping[str, Any]) -> Table:
    table = Table(
        "search",
        "change",
        "unexplained",
        "",
        "sure",
        box=None,
        pad_edge=False,
        title_justify="left",
    )
    for step in found["steps"]:
        sigma = step["standard_errors"]
        table.add_row(
            step["stage"],
            step["change"],
            f"{100 * step['left_before']:.0f} %",
            f"→ {100 * step['left_after']:.0f} %",
            "" if sigma is None else f"{sigma:.0f} σ",
        )
        if step["as_likely"]:
            table.add_row("", f"as likely: {'; '.join(step['as_likely'])}", "", "", "")
    return table


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for cause in found["causes"]:
        lines.append(
            f"worse than stock: {cause['name']} ({cause['text']}): {cause['harm']:.2f} × the error"
            f" without it, of {cause['tensor']} on {cause['trial']}; the recipe explains"
            f" {100 * cause['explained']:.0f} % there"
        )
    if found["harmless"]:
        lines.append("otherwise than stock, no worse: " + "; ".join(found["harmless"]))
    if found["sums"]:
        told = "; ".join(f"{what} {how}" for what, how in found["sums"].items())
        lines.append(f"sums, as masks of huge values reveal them: {told}")
    if found["otherwise_than_halfulp"]:
        told = "; ".join(found["otherwise_than_halfulp"])
        lines.append(f"otherwise than halfulp's recipe: {told}")
    for place in found["unexplained"]:
        lines.append(
            f"unexplained: {place['tensor']}, {place['text']} (worst on {place['trial']}:"
            f" {100 * min(1.0, place['left']):.0f} % of an error {place['times']:.1f} × the"
            " recipe's)"
        )
    if found["nonfinite"]:
        told = ", ".join(f"{n} of {place}" for place, n in found["nonfinite"].items())
        lines.append(f"not finite where exact results are: {told} (left out of the search)")
    if found["unsteady"]:
        lines.append("the same call gives other bits when it is made again")
    if found["refused"]:
        lines.append("not taken by the kernel: " + ", ".join(found["refused"]))
    return lines
