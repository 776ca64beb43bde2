"""`halfulp report`: a page of run folders that are there already; nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from halfulp import __version__
from halfulp.cli.shell import STDOUT, check_files, say, tell, typed_command

_FOLDERS = "folders of halfulp train, halfulp.watch, halfulp isolate, prescribe or demo"


def report(
    runs: tuple[Path, ...],
    /,
    *,
    html: Path | None = None,
    trust: bool = False,
    json: Path | None = None,
) -> int:
    """Make one HTML page of run folders, pictures inline: halfulp report RUN RUN --html FILE

    Training runs come on the same axes, also while they train; a demo, an isolation or a
    prescription has its own section.

    Args:
        runs: Folders of `halfulp train`, `halfulp.watch`, `halfulp isolate`, `halfulp prescribe`
            or `halfulp demo`.
        html: File to write; report.html in the folder of a single run by default.
        trust: Draw a text-to-image run's pictures with the code that its folder names as its
            attention, instead of in fp32. Without it nothing that a folder names is run.
        json: File to write what the page shows of training runs to; - prints it, and writes no
            page unless --html asks for one.
    """
    from halfulp.report.run_page import run_page

    if not runs:
        raise ValueError(f"runs: none given; accepted are {_FOLDERS}")
    aside = html is None and json == STDOUT  # the figures alone were asked for
    if html is None and len(runs) > 1 and not aside:
        raise ValueError("html is missing; accepted is a file for the page of several runs")
    kinds = {path: _kind(path) for path in dict.fromkeys(runs)}
    target = runs[0] / "report.html" if html is None else html
    check_files(json, html=None if aside else target)
    with _plain_data(runs):
        trained = [path for path, kind in kinds.items() if kind == "train"]
        seen, curves = _trained(trained, trust)
        sections: list[dict[str, Any]] = []
        for path, kind in kinds.items():
            sections += _OF_KIND[kind](path) if kind != "train" else []
        titles = [path.resolve().name for path in kinds]
        meta = f"halfulp {__version__}"
        page = "" if aside else run_page(sections + curves, titles, typed_command(), meta)
    show = partial(say, f"The page lies in {target}")
    tell(seen, json, show, None if aside else target, lambda: page)
    return 0


def sections_of(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The kind of a run folder and the sections of its page; nothing that it names is run.

    Raises:
        ValueError: it is no run folder, or a file in it is not as halfulp writes it.
    """
    with _plain_data([path]):
        kind = _kind(path)
        return kind, _trained([path], False)[1] if kind == "train" else _OF_KIND[kind](path)


@contextmanager
def _plain_data(runs: Sequence[Path]) -> Iterator[None]:
    """Whatever a page of plain data fails with, the data are not what a run writes."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        named = ", ".join(map(str, runs))
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"runs={named!r}: a file there is not as halfulp writes it ({said}); accepted are"
            f" whole {_FOLDERS}"
        ) from error


def _kind(path: Path) -> str:
    from halfulp.runs.record import read_record

    return str(read_record(path, "train", *_OF_KIND)["kind"])


def _trained(paths: list[Path], trust: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What training runs recorded, as plain data and as sections."""
    from halfulp.experiments.drawing import sheets_of
    from halfulp.experiments.overview import finding, overview, read_runs
    from halfulp.report.run_page import record_section, training_section

    if not paths:
        return {"figures": [], "tables": []}, []
    runs = read_runs(paths)
    seen = overview(runs, typed_command())
    sections = [training_section(seen, finding(runs), sheets_of(paths, trust=trust))]
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


def _tried(file: str, path: Path) -> list[dict[str, Any]]:
    from halfulp.report.trial_page import trial_sections
    from halfulp.runs.folder import read_json

    return trial_sections(read_json(path / file))


_OF_KIND: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "demo": _demo,
    "isolate": partial(_tried, "isolation.json"),
    "prescribe": partial(_tried, "prescription.json"),
    "watch": _watched,
}
