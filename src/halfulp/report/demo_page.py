"""The demo's page, from its run folder's plain data: one section an act, then what it ran on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from halfulp.report.audit_page import audit_section
from halfulp.report.audit_summary import MEANING, why, worst_ratios
from halfulp.report.html import Block, page
from halfulp.report.panels import draw_panels
from halfulp.report.run_page import made_on
from halfulp.report.tables import sign_of, table_block
from halfulp.report.text import duration_text, times_text

Act = Mapping[str, Any]

TITLE = "Low-precision attention on this machine"
LEAD = (
    "A training run that attention in bfloat16 can ruin, what exactly goes wrong in it, and an"
    " audit of every attention kernel found here: is it sound, as good as the stock kernels, or"
    " defective?"
)


def demo_files(run: Mapping[str, Any], acts: Sequence[Act]) -> dict[str, str]:
    """Return what a demo's run folder shows, by file name: the page first, then a picture of the
    failing run.
    """
    files = {"report.html": demo_page(run, acts)}
    if acts and acts[0].get("figures"):
        files["failure.svg"] = draw_panels(acts[0]["figures"][:2])
    return files


def demo_page(run: Mapping[str, Any], acts: Sequence[Act]) -> str:
    """Return the page of a demo; `run` is its run.json and `acts` the acts that were finished."""
    footer = f"Repeat everything on this page: {run['command']}"
    return page(TITLE, LEAD, demo_sections(run, acts), meta=_meta(run), footer=footer)


def demo_sections(run: Mapping[str, Any], acts: Sequence[Act]) -> list[dict[str, Any]]:
    """Return the sections of a demo's page."""
    sections = [_section(act) for act in acts]
    if run["status"] != "done":
        finding = (
            f"This run was {run['status']} after {len(acts)} of its acts; the rest was not"
            " measured."
        )
        sections.append({"heading": "Not finished", "finding": finding, "blocks": []})
    return [*sections, _where(run, acts)]


def page_summary(acts: Sequence[Act], size: int) -> str:
    """Return what the page holds, in one sentence; `size` in bytes."""
    figures = sum(len(act.get("figures", ())) for act in acts)
    audits = sum(len(act.get("audits", ())) for act in acts)
    return (
        f"One page of {figures} figures and {audits} audits, {size / 1024:.0f} KiB, that opens"
        " without a network."
    )


def _section(act: Act) -> dict[str, Any]:
    blocks: list[Block] = [{"kind": "text", "text": text} for text in act.get("text", ())]
    if act.get("figures"):
        blocks.append({"kind": "figures", "figures": act["figures"]})
    blocks += [{"kind": "table", **table} for table in act.get("tables", ())]
    for code in act.get("code", ()):
        blocks += [{"kind": "code", **code}, {"kind": "command", "command": code["command"]}]
    if "audits" in act:
        blocks += _audits(act)
    heading = f"{act['number']}. {act['title']}"
    return {"heading": heading, "finding": act["finding"], "blocks": blocks}


def _audits(act: Act) -> list[Block]:
    """Kernels before recipes, the worst first."""
    order = ("defect", *(verdict for verdict in MEANING if verdict != "defect"))
    audits = sorted(
        act["audits"], key=lambda r: (r["target"].startswith("recipe:"), order.index(r["verdict"]))
    )
    rows: list[tuple[object, ...]] = []
    for report in audits:
        ratios = [times_text(ratio) for ratio in (*worst_ratios(report), *_on_activations(report))]
        target = {"text": report["target"], "to": _summary(report)}
        rows.append((target, report["verdict"], *ratios, why(report)))
    blank = (None, None, None, None)
    rows += [(name, "skipped", *blank, reason) for name, reason in act["skipped"].items()]
    columns = ("target", "verdict", "× stock", "× floor", "real: × stock", "real: × floor", "why")
    caption = (
        "The largest error over the probe inputs, and over the real activations alone, as a"
        " multiple of the stock recipe's and of the floor's."
    )
    table = table_block("Verdicts", columns, rows, caption, act["command"])
    return [table, *(_folded(report) for report in audits)]


def _on_activations(report: Mapping[str, Any]) -> tuple[float | None, float | None]:
    cases = [case for case in report["cases"] if case["probe"] == "captured"]
    return worst_ratios({"cases": cases})


def _folded(report: Mapping[str, Any]) -> Block:
    section = audit_section(report)
    text: list[Block] = [{"kind": "text", "text": section["finding"]}]
    return {"kind": "details", "summary": _summary(report), "blocks": text + section["blocks"]}


def _summary(report: Mapping[str, Any]) -> str:
    return f"{sign_of(report['verdict'])} {report['target']}: {report['verdict']}"


def _where(run: Mapping[str, Any], acts: Sequence[Act]) -> dict[str, Any]:
    machine, config = run["machine"], run["config"]
    memory = f"{machine['memory'] / 2**30:.0f} GiB" if machine["memory"] else "unknown"
    made = made_on(run)
    pairs = [
        ("processor", made["processor"]),
        ("memory", memory),
        ("GPU", made["GPU"]),
        ("system", f"{machine['system']}, {machine['architecture']}"),
        ("versions", made["versions"]),
        ("revision", made["revision"]),
        (
            "settings",
            (
                f"{config['seeds']} seeds, {config['steps']} steps, {config['workers']} processes"
                " of one thread"
            ),
        ),
        (
            "time",
            ", ".join(f"act {act['number']}: {duration_text(act['seconds'])}" for act in acts),
        ),
        (
            "data",
            (
                "run.json, failure.json, failure.svg, cause.json, audit.json, runs/, isolation/,"
                " tensors/"
                " beside this page"
            ),
        ),
    ]
    return {"heading": "Where this was measured", "blocks": [{"kind": "facts", "pairs": pairs}]}


def _meta(run: Mapping[str, Any]) -> str:
    started = datetime.fromisoformat(run["started"])
    parts = [
        f"halfulp {run['halfulp']}",
        f"torch {run['versions']['torch']}",
        f"{started:%d %B %Y, %H:%M} UTC",
    ]
    if run["ended"]:
        seconds = (datetime.fromisoformat(run["ended"]) - started).total_seconds()
        parts.append(f"took {duration_text(seconds)}")
    return " · ".join(parts)
