"""What `halfulp reconstruct` prints: the sentence, how much is explained, how it was found, and
what is not explained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfulp.report.terminal import print_table

BAR = 20


def print_reconstruction(found: Mapping[str, Any], to: Console) -> None:
    """Print a reconstruction's plain data."""
    to.print(Text.assemble((found["target"], "bold"), " ", found["text"]))
    to.print()
    print_table(_explained(found), to)
    steps = _steps(found)
    if steps["rows"]:
        to.print()
        print_table(steps, to)
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


def _explained(found: Mapping[str, Any]) -> dict[str, Any]:
    names = ("result", "explained", "", "cosine", "as stock", "× stock", "× halfulp")
    rows = []
    for row in found["explained"]:
        share = row["explained"]
        full = round(BAR * share)
        cosine = f"{row['cosine']:.3f} ± {row['standard_error']:.3f}"
        figures = (f"{row['times_stock']:.3g}", f"{row['times_halfulp']:.3g}")
        bar = "█" * full + "░" * (BAR - full)
        rows.append((row["tensor"], f"{100 * share:.1f} %", bar, cosine,
                     f"{row['stock_cosine']:.3f}", *figures))  # fmt: skip
    return {"title": None, "columns": names, "rows": rows}


def _steps(found: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of the search that changed what is left, in whole percents."""
    rows = []
    for step in found["steps"]:
        before, after = (f"{100 * step[f'left_{when}']:.0f} %" for when in ("before", "after"))
        if before == after:
            continue
        sigma = step["standard_errors"]
        sure = "" if sigma is None else f"{sigma:.0f} σ"
        rivals = "; ".join(step["as_likely"])
        change = f"{step['change']} (as likely: {rivals})" if rivals else step["change"]
        rows.append((step["stage"], change, f"{before} → {after}", sure))
    return {"title": None, "columns": ("search", "change", "unexplained", "sure"), "rows": rows}


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f"called as {found['form']}"] if found["form"] else []
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
