"""The page of a comparison of twin runs: how far weights drift apart, and what text-to-image runs
draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfulp.report.html import page
from halfulp.report.pages import figure_blocks, picture_blocks
from halfulp.report.text import cell_text

TITLE = "Weight drift of twin runs"
LEAD = (
    "Runs that share their data and differ in one thing, compared at every checkpoint. A drift"
    " means little by itself: beside another initialization or another precision it shows whether"
    " it is large."
)


def compare_page(
    compared: Mapping[str, Any],
    pictures: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the page of `halfulp.experiments.compare` in its plain form.

    Args:
        compared: {"summary", "figures", "tables", "command"}.
        pictures: blocks of kind "picture", each with a "title".
    """
    blocks = figure_blocks(compared["figures"])
    blocks += [{"kind": "table", **table} for table in compared["tables"]]
    sections = [{"heading": "Drift", "finding": finding(compared["summary"]), "blocks": blocks}]
    if pictures:
        shown = picture_blocks(pictures)
        sections.append({"heading": "What the models draw", "blocks": shown})
    return page(
        TITLE, LEAD, sections, footer=f"Repeat everything on this page: {compared['command']}"
    )


def finding(summary: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence: what does not drift at all, what drifts least and most."""
    still = [line["name"] for line in summary if line["max_difference"] == 0]
    moved = [line for line in summary if line["max_difference"] != 0]
    parts = [f"Not one bit apart: {'; '.join(still)}."] if still else []
    broken = [line["name"] for line in moved if line["wasserstein"] is None]
    if broken:
        parts.append(f"No longer finite: {'; '.join(broken)}.")
    known = sorted(
        (line for line in moved if line["wasserstein"] is not None),
        key=lambda line: line["wasserstein"],
    )
    if known:
        parts.append(f"Farthest apart at step {known[-1]['steps']}: {_said(known[-1])}.")
    if len(known) > 1:
        parts.append(f"Least: {_said(known[0])}.")
    return " ".join(parts)


def _said(line: Mapping[str, Any]) -> str:
    return f"{line['name']}, Wasserstein distance {cell_text(float(line['wasserstein']))}"
