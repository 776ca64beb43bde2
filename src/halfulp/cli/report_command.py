"""`halfulp report`: a page of run folders that are there already; nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfulp import __version__
from halfulp.cli.shell import STDOUT, check_json, tell, typed_command

_FOLDERS = "folders of halfulp train, halfulp.watch, halfulp isolate or halfulp demo"


def report(runs: tuple[Path, ...], /, *, html: Path | None = None, json: Path | None = None) -> int:
    """Make one HTML page of run folders, pictures inline: halfulp report RUN RUN --html FILE

    Training runs come on the same axes, also while they train; a demo or an isolation has its own
    section.

    Args:
        runs: Folders of `halfulp train`, `halfulp.watch`, `halfulp isolate` or `halfulp demo`.
        html: File to write; report.html in the folder of a single run by default.
        json: File to write what the page shows of training runs to; - prints it, and writes no
            page unless --html asks for one.
    """
    from halfulp.report.run_page import run_page
    from halfulp.runs.folder import check_file, write_text

    if not runs:
        raise ValueError(
            "runs: none given; accepted are folders of halfulp train, halfulp.watch, halfulp"
            " isolate or demo"
        )
    aside = html is None and json == STDOUT  # the figures alone were asked for
    if html is None and len(runs) > 1 and not aside:
        raise ValueError("html is missing; accepted is a file for the page of several runs")
    kinds = {path: _kind(path) for path in dict.fromkeys(runs)}
    target = runs[0] / "report.html" if html is None else html
    check_file("html", None if aside else target)
    check_json(json)
    seen, curves = _trained([path for path, kind in kinds.items() if kind == "train"])
    sections: list[dict[str, Any]] = []
    for path, kind in kinds.items():
        if kind == "demo":
            sections += _demo(path)
        elif kind == "isolate":
            sections += _isolation(path)
        elif kind == "watch":
            sections += _watched(path)
    if not aside:
        titles = [path.resolve().name for path in kinds]
        meta = f"halfulp {__version__}"
        write_text(target, run_page(sections + curves, titles, typed_command(), meta))
    tell(seen, json, lambda: print(f"The page lies in {target}"))
    return 0


def _kind(path: Path) -> str:
    from halfulp.runs.folder import read_json

    record = read_json(path / "run.json")
    if not isinstance(record, dict) or record.get("kind") not in (
        "train",
        "watch",
        "isolate",
        "demo",
    ):
        raise ValueError(f"run={str(path)!r}: there is no run.json of one; accepted are {_FOLDERS}")
    return str(record["kind"])


def _trained(paths: list[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What training runs recorded, as plain data and as sections."""
    from halfulp.experiments.drawing import sheets_of
    from halfulp.experiments.overview import finding, overview, read_runs
    from halfulp.report.run_page import record_section, training_section

    if not paths:
        return {"figures": [], "tables": []}, []
    runs = read_runs(paths)
    seen = overview(runs, typed_command())
    sections = [training_section(seen, finding(runs), sheets_of(paths))]
    return seen, sections + [record_section(run.name, run.record) for run in runs]


def _watched(path: Path) -> list[dict[str, Any]]:
    from halfulp.experiments.watched import watched
    from halfulp.report.run_page import record_section, training_section
    from halfulp.runs.folder import read_json

    seen, finding = watched(path, typed_command())
    name = path.resolve().name
    section = training_section(seen, finding) | {"heading": f"Watched: {name}"}
    return [section, record_section(name, read_json(path / "run.json"))]


def _demo(path: Path) -> list[dict[str, Any]]:
    from halfulp.report.demo_page import demo_sections
    from halfulp.runs.folder import read_json

    run = read_json(path / "run.json")
    return demo_sections(run, [read_json(path / f"{act['name']}.json") for act in run["acts"]])


def _isolation(path: Path) -> list[dict[str, Any]]:
    from halfulp.report.isolation_page import isolation_sections
    from halfulp.runs.folder import read_json

    return isolation_sections(read_json(path / "isolation.json"))
