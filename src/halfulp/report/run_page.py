"""The page of run folders of any kind: what training runs recorded, isolations, demos, one section
after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfulp.report.html import page
from halfulp.report.pages import figure_blocks, picture_blocks

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
    blocks = [*figure_blocks(seen["figures"]), *({"kind": "table", **t} for t in seen["tables"])]
    blocks += picture_blocks(pictures)
    return {"heading": "Training", "finding": finding, "blocks": blocks}


def record_section(name: str, record: Mapping[str, Any]) -> Section:
    """Return what a run.json says of where and how a run was made."""
    config = dict(record["config"])
    made = config.get("workload")
    if isinstance(made, Mapping) and "make" in made:  # the rest of it says nothing of a user's own
        config["optimizer"] = f"as {made['make']} makes it, clip: {config['optimizer']['clip']}"
    pairs = [
        ("command", record["command"] or "from Python"),
        ("started", record["started"]),
        ("ended", record["ended"] or f"not yet, or killed: {record['status']}"),
        (
            "taken up again",
            "; ".join(f"after step {r['step']} at {r['at']}" for r in record.get("resumed", ()))
            or "no",
        ),
        *made_on(record).items(),
        ("configuration", ", ".join(f"{key}: {value}" for key, value in config.items())),
    ]
    return {"heading": f"How {name} was made", "blocks": [{"kind": "facts", "pairs": pairs}]}


def made_on(record: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run.json says of processor, GPU, versions and revision, in words."""
    machine = record["machine"]
    cores = f"{machine['cores']} cores, {machine['vector_instructions']}"
    return {
        "processor": f"{machine['processor']}, {cores}",
        "GPU": machine["gpu"] or "none",
        "versions": ", ".join(f"{package} {v}" for package, v in record["versions"].items()),
        "revision": record["git"] or "not in a git repository",
    }
