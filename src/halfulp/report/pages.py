"""The page of one experiment: its figures, its tables and the commands that repeat them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfulp.report.html import page
from halfulp.report.svg import COLORS


def experiment_page(
    title: str,
    figures: Sequence[Mapping[str, Any]],
    tables: Sequence[Mapping[str, Any]],
    *,
    meta: str = "",
) -> str:
    """Return a page of figures and tables in their plain form (`experiments.results`)."""
    captions = list(
        dict.fromkeys(str(part["caption"]) for part in (*figures, *tables) if part["caption"])
    )
    lead = captions[0] if len(captions) == 1 else ""
    said = {"caption": ""} if lead else {}
    blocks = figure_blocks([{**figure, **said} for figure in figures])
    blocks += [{"kind": "table", **table, **said} for table in tables]
    return page(title, lead, [{"heading": "Figures and tables", "blocks": blocks}], meta=meta)


def figure_blocks(figures: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the block of figures and heat maps, each `uncrowded`; none where there are none."""
    shown = [part for figure in figures for part in uncrowded(figure)]
    return [{"kind": "figures", "figures": shown}] if shown else []


def picture_blocks(pictures: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks of pictures, each below its title."""
    return [
        block
        for picture in pictures
        for block in ({"kind": "heading", "text": picture["title"]}, dict(picture))
    ]


def uncrowded(figure: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the figure, or one for every format where it has more curves than there are colors.

    Curves are named "format, rest"; a figure of which that is not true stays whole, and so does a
    heat map.
    """
    series = figure.get("series", ())
    if len(series) <= len(COLORS) or not all(", " in one["label"] for one in series):
        return [figure]
    parts: dict[str, list[dict[str, Any]]] = {}
    for one in series:
        name, _, rest = one["label"].partition(", ")
        parts.setdefault(name, []).append({**one, "label": rest})
    return [
        {**figure, "title": f"{figure['title']}, {name}", "series": same}
        for name, same in parts.items()
    ]
