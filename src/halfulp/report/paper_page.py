"""The figures of a paper as files and as a page, from plain data: SVG, PNG and CSV of each."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from halfulp.report.heatmap import picture_files
from halfulp.report.html import page
from halfulp.report.pages import figure_blocks, uncrowded
from halfulp.report.tables import table_block

Drawn = Mapping[str, Any]
"""{"name", "number", "paper", "differs", "claim", "verdict", "measured", "estimates", "command",
"pictures"}: a figure of a paper and the pictures that stand for it.
"""

_GREEK = str.maketrans({"σ": "sigma", "δ": "delta"})


def figure_files(figures: Sequence[Drawn]) -> dict[str, bytes]:
    """Return the content of every file by its name, which says figure and title: three for each
    picture.

    Raises:
        ValueError: a picture cannot be drawn.
    """
    files: dict[str, bytes] = {}
    for figure in figures:
        for picture in (part for one in figure["pictures"] for part in uncrowded(one)):
            # ASCII, since LaTeX and archives take no other names
            title = re.sub(r"\(.*?\)", "", str(picture["title"])).translate(_GREEK)
            plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
            words = re.findall(r"[^\W_]+", plain.lower())
            stem = "-".join([str(figure["name"]), *words])
            if f"{stem}.svg" in files:
                stem = f"{stem}-{len(files) // 3 + 1}"
            svg, png = picture_files(picture)
            files |= {
                f"{stem}.svg": svg.encode(),
                f"{stem}.png": png,
                f"{stem}.csv": csv_text(picture).encode(),
            }
    return files


def csv_text(picture: Mapping[str, Any]) -> str:
    """Return the numbers of a figure, a line for every point of every series, or of a heat map, a
    line for every cell; a number that is missing is left empty.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if picture.get("kind") == "heat map":
        writer.writerow((picture["y_label"], picture["x_label"], picture["title"]))
        writer.writerows(
            (row, column, value)
            for row, values in enumerate(picture["values"])
            for column, value in enumerate(values)
        )
        return text.getvalue()
    names = picture["x_label"] or "x", picture["y_label"]
    writer.writerow(("series", *names, "low", "high"))
    for one in picture["series"]:
        missing = [None] * len(one["x"])
        low, high = (missing if one[end] is None else one[end] for end in ("low", "high"))
        rows = zip(one["x"], one["y"], low, high, strict=True)
        writer.writerows((one["label"], *row) for row in rows)
    return text.getvalue()


def paper_page(
    title: str,
    figures: Sequence[Drawn],
    others: Sequence[tuple[str, str, str]],
    *,
    meta: str = "",
) -> str:
    """Return the page: every figure with the paper's beside what was measured here.

    Args:
        title: of the paper.
        figures: that are drawn.
        others: figures that are not: number, what the paper's shows, and why.
        meta: a small line below the lead.
    """
    sections: list[dict[str, Any]] = []
    for figure in figures:
        pairs = [
            ("in the paper", figure["paper"]),
            ("measured here", figure["measured"]),
            ("95 % intervals", figure["estimates"]),
            ("what differs", figure["differs"]),
            ("verdict", f"{figure['claim']}: {figure['verdict']}"),
            ("repeat", figure["command"]),
        ]
        shown = figure_blocks(figure["pictures"])
        sections.append(
            {
                "heading": f"Figure {figure['number']}",
                "finding": f"The paper: {figure['paper']}.",
                "blocks": [*shown, {"kind": "facts", "pairs": [p for p in pairs[1:] if p[1]]}],
            }
        )
    if others:
        table = table_block("", ("figure", "in the paper", "why not"), others)
        sections.append({"heading": "Not drawn", "blocks": [table]})
    lead = (
        "Every figure of the paper that has a number here, drawn from runs of this package, with"
        " what the paper shows and what is otherwise in the set-up."
    )
    return page(title, lead, sections, meta=meta)
