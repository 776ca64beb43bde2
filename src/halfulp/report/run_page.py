"""The page of run folders of any kind: what training runs recorded, isolations, demos, one section
after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfulp.report.html import page
from halfulp.report.pages import uncrowded

Section = dict[str, Any]


def run_page(
    sections: Sequence[Section], names: Sequence[str], command: str, version: str, tag: str = ""
) -> str:
    """Return one page of sections; `names` are the run folders', `tag` as `page` takes it."""
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    footer = f"Make this page again: {command}"
    return page(title, "", sections, meta=version, footer=footer, tag=tag)


def training_section(
    seen: Mapping[str, Any], finding: str, pictures: Sequence[Mapping[str, Any]] = ()
) -> Section:
    """Return the section of training runs: `seen` is {"figures", "tables"}, pictures blocks with a
    title.
    """
    figures = [part for figure in seen["figures"] for part in uncrowded(figure)]
    blocks: list[Mapping[str, Any]] = [{"kind": "figures", "figures": figures}] if figures else []
    blocks += [{"kind": "table", **table} for table in seen["tables"]]
    for picture in pictures:
        blocks += [{"kind": "heading", "text": picture["title"]}, picture]
    return {"heading": "Training", "finding": finding, "blocks": blocks}


def record_section(name: str, record: Mapping[str, Any]) -> Section:
    """Return what a run.json says of where and how a run was made."""
    machine = record["machine"]
    pairs = [
        ("command", record["command"] or "from Python"),
        ("started", record["started"]),
        ("ended", record["ended"] or f"not yet, or killed: {record['status']}"),
        (
            "taken up again",
            "; ".join(f"after step {r['step']} at {r['at']}" for r in record.get("resumed", ()))
            or "no",
        ),
        (
            "processor",
            f"{machine['processor']}, {machine['cores']} cores, {machine['vector_instructions']}",
        ),
        ("GPU", machine["gpu"] or "none"),
        (
            "versions",
            ", ".join(f"{package} {version}" for package, version in record["versions"].items()),
        ),
        ("revision", record["git"] or "not in a git repository"),
        ("configuration", ", ".join(f"{key}: {value}" for key, value in record["config"].items())),
    ]
    return {
        "heading": f"How {name} was made",
        "finding": "",
        "blocks": [{"kind": "facts", "pairs": pairs}],
    }
