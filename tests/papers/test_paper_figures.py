"""The figures of both papers: each has a picture or a reason, files with its numbers, a page."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

import halfulp.papers
from halfulp.cli import main
from halfulp.papers.ledger import CLAIMS
from halfulp.papers.paper_figures import FIGURES, claims_of, drawn_figures
from halfulp.report.paper_page import csv_text

SOURCES = "".join(
    path.read_text(encoding="utf-8") for path in Path(halfulp.papers.__path__[0]).rglob("*.py")
)
LINE: dict[str, Any] = {
    "title": "",
    "x_label": "step",
    "y_label": "loss",
    "x_log": False,
    "y_log": False,
    "series": [
        {
            "label": "a, b",
            "x": [1, 2],
            "y": [0.5, None],
            "low": [0.25, 0.25],
            "high": [1.0, 1.0],
            "style": "line",
        }
    ],
    "caption": "",
    "command": "halfulp claims X",
}
MAP: dict[str, Any] = {
    "kind": "heat map",
    "title": "",
    "x_label": "feature",
    "y_label": "token",
    "values": [[0.5, None], [-1.0, 0.25]],
    "low": -1.0,
    "high": 1.0,
    "caption": "",
    "command": "halfulp claims X",
}


def verdicts(paper: str) -> list[dict[str, Any]]:
    """Of all claims that a paper's figures take, with a curve for each and one map."""
    made = []
    for name in claims_of(paper):  # type: ignore[arg-type]
        picks = [p for f in FIGURES if (f.paper, f.claim) == (paper, name) for p in f.picks]
        pictures = [LINE | {"title": f"Curve of Ō, σ {pick}"} for pick in picks]
        pictures += [] if made else [MAP | {"title": f"Map {picks[0]}"}]
        said = dict.fromkeys(("verdict", "measured", "estimates", "command"), f"{name} said")
        made.append(said | {"id": name, "pictures": pictures})
    return made


def test_every_figure_has_a_claim_with_that_picture_or_a_reason() -> None:
    known = {claim.id: claim for claim in CLAIMS}
    for figure in FIGURES:
        assert figure.shows
        assert figure.differs, figure.name
        assert bool(figure.claim) == bool(figure.picks)
        if figure.claim:
            assert known[figure.claim].measure is not None
            assert known[figure.claim].group == figure.paper
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    numbers = {p: [f.number for f in FIGURES if f.paper == p] for p in "AB"}
    for paper, last in (("A", 9), ("B", 8)):
        covered = {re.match(r"\d*", number)[0] for number in numbers[paper]}  # type: ignore[index]
        assert {str(i) for i in range(1, last + 1)} <= covered


def test_the_ledgers_pictures_are_named_after_figures_and_every_one_is_taken() -> None:
    picks = [pick for figure in FIGURES for pick in figure.picks]
    named = set(re.findall(r"\(after fig\. [^)]*\)", SOURCES))
    assert len(named) >= 12
    for title in named:
        assert any(pick in title for pick in picks), title
    for pick in picks:
        assert pick in SOURCES or pick in ("Largest difference", "Wasserstein distance"), pick


@pytest.mark.parametrize("paper", ["A", "B"])
def test_the_command_writes_three_files_a_picture_and_a_page(
    paper: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = verdicts(paper)
    (tmp_path / "claims.json").write_text(json.dumps(made), encoding="utf-8")
    out = tmp_path / "figures"
    arguments = ["--paper", paper, "--out", str(out), "--claims", str(tmp_path / "claims.json")]
    assert main(["figures", *arguments]) == 0
    said = capsys.readouterr().out
    drawn, others = drawn_figures(paper, made)  # type: ignore[arg-type]
    count = sum(len(figure["pictures"]) for figure in drawn)
    assert f"{count} pictures of {len(drawn)} figures" in said
    by_kind = {end: sorted(out.glob(f"*.{end}")) for end in ("svg", "png", "csv")}
    assert [len(paths) for paths in by_kind.values()] == [count] * 3
    assert all("curve-of-o-sigma" in path.name or "map" in path.name for path in by_kind["svg"])
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in by_kind["png"])
    page = (out / "index.html").read_text(encoding="utf-8")
    for figure in drawn:
        assert f"Figure {figure['number']}" in page
        assert f"{figure['claim']} said" in page
    for other in others:
        assert other.shows in page.replace("&#39;", "'")


def test_a_table_of_numbers_holds_every_point_and_cell() -> None:
    rows = list(csv.reader(csv_text(LINE).splitlines()))
    assert rows == [
        ["series", "step", "loss", "low", "high"],
        ["a, b", "1", "0.5", "0.25", "1.0"],
        ["a, b", "2", "", "0.25", "1.0"],
    ]
    cells = list(csv.reader(csv_text(MAP | {"title": "R"}).splitlines()))
    assert cells[0] == ["token", "feature", "R"]
    assert cells[1:] == [["0", "0", "0.5"], ["0", "1", ""], ["1", "0", "-1.0"], ["1", "1", "0.25"]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found[1:], "is missing"),
        (lambda found: [found[0] | {"pictures": []}, *found[1:]], "has no picture for figure"),
        (lambda found: {"claims": found}, "accepted is what halfulp claims --json FILE writes"),
        (lambda found: [{"id": "A1"}], "accepted is what halfulp claims --json FILE writes"),
    ],
)
def test_a_file_that_lacks_something_is_a_line(
    change: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "claims.json"
    path.write_text(json.dumps(change(verdicts("A"))), encoding="utf-8")
    arguments = ["--paper", "A", "--out", str(tmp_path / "out"), "--claims", str(path)]
    assert main(["figures", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
