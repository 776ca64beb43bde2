"""`halfulp figures`: the figures of a paper, measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from halfulp import __version__
from halfulp.cli.shell import check_files, progress_bar, say, tell

_NEEDED = ("id", "verdict", "measured", "estimates", "command", "pictures")


def figures(
    *,
    paper: Literal["A", "B"],
    out: Path,
    claims: Path | None = None,
    all: bool = False,
    workers: int | None = None,
    fresh: bool = False,
    json: Path | None = None,
) -> int:
    """Draw a paper's figures from runs made here: halfulp figures --paper A --out DIR

    Every figure of the paper that has a number here becomes an SVG, a PNG and a CSV in DIR, and
    DIR/index.html shows them all, with what the paper's shows and what differs in the set-up.

    Args:
        paper: A, Qiu & Yao (arXiv 2510.04212), or B, Golden et al. (arXiv 2405.02803).
        out: Folder to write; files of the same names are replaced.
        claims: File of verdicts that `halfulp claims` wrote (its option json), whose pictures are
            drawn without measuring again. Without it the claims behind the figures are measured, in
            some minutes on four idle cores.
        all: Measure at the larger scale that the ledger has: more seeds, steps and sizes.
        workers: Processes of one thread each; one for each core, at most four, by default.
        fresh: Measure again what an earlier call of the same code on this machine has measured.
        json: File to write the figures' data to; - prints it.
    """
    from halfulp.papers.paper_figures import PAPERS, claims_of, drawn_figures
    from halfulp.report.paper_page import figure_files, paper_page
    from halfulp.runs.folder import check_folder, write_bytes, write_text

    if claims is not None and all:
        raise ValueError("all with claims: accepted is one of them; a file of claims has its scale")
    check_folder("out", out)
    check_files(json)
    ids = claims_of(paper)
    measured = _measured(ids, all, workers, fresh) if claims is None else _read(claims)
    drawn, others = drawn_figures(paper, measured)
    files = figure_files(drawn)
    rows = [(one.number, one.shows, one.differs) for one in others]
    page = paper_page(PAPERS[paper], drawn, rows, meta=f"halfulp {__version__}")
    out.mkdir(exist_ok=True)
    for name, data in files.items():
        write_bytes(out / name, data)
    write_text(out / "index.html", page)
    said = f"{len(files) // 3} pictures of {len(drawn)} figures and index.html lie in {out}"
    if earlier := [str(one["id"]) for one in measured if one.get("kept")]:
        said += f"; of {', '.join(earlier)} an earlier call has measured some or all"
    tell(drawn, json, lambda: say(said))
    return 0


def _measured(
    ids: list[str], whole: bool, workers: int | None, fresh: bool
) -> list[dict[str, Any]]:
    from halfulp.cli.experiments import laboratory
    from halfulp.papers.ledger import run_claims
    from halfulp.runs.keeping import keeping

    with progress_bar("figures") as progress, keeping(fresh=fresh):
        lab = laboratory(whole=whole, workers=workers)
        return [verdict.as_dict() for verdict in run_claims(ids, progress, lab=lab)]


def _read(path: Path) -> list[dict[str, Any]]:
    """Verdicts from a file.

    Raises:
        ValueError: it is no file of verdicts.
    """
    from halfulp.runs.folder import read_json

    found = read_json(path)
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and one.keys() >= set(_NEEDED) for one in found
    ):
        what = "it holds no verdicts" if path.exists() else "there is no such file"
        raise ValueError(
            f"claims={str(path)!r}: {what}; accepted is what halfulp claims --json FILE writes"
        )
    return found
