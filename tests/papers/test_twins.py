"""Twin runs: each pair differs in what it names, the repeated run drifts by 0, drawings come with
names.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tests.planted_drift import BASE, drift, planted_run

from halfulp.cli import main
from halfulp.experiments.compare import (
    INITIALIZATION,
    REPEATED,
    CompareResult,
    compare_runs,
)
from halfulp.experiments.drawing import contact_sheet, draw_run, sheet_block, sheets_of
from halfulp.papers.claim import Lab
from halfulp.papers.ledger import run_claims
from halfulp.papers.twins import (
    FLASH,
    KINDS,
    OTHER_WEIGHTS,
    PAIRS,
    DriftResult,
    measure_drift,
    small_language,
    small_pictures,
)
from halfulp.report.compare_page import compare_page
from halfulp.report.html import page
from halfulp.report.ledger_page import ledger_page
from halfulp.training.config import Optimizer, Pictures, RunConfig
from halfulp.training.run_json import difference

# --- twin runs

SMALL = RunConfig(
    Pictures(layers=1, heads=2, width=16, size=8, patch=4, count=8, data="shapes", name_length=12),
    optimizer=Optimizer(learning_rate=1e-3),
    steps=6,
    batch=4,
)


def test_every_pair_differs_in_the_thing_it_names() -> None:
    for pair in PAIRS:
        one, other = (
            KINDS[kind](dataclasses.replace(SMALL, seed=3, data_seed=3))
            for kind in (pair.baseline, pair.run)
        )
        fields = {change.partition(":")[0] for change in difference(one, other)}
        expected = {
            REPEATED: set(),
            INITIALIZATION: {"seed"},
            "bf16 against fp32": {"attention", "autocast"},
            "fp16 against fp32": {"attention", "autocast"},
        }.get(pair.name, {"attention"})
        assert fields == expected, pair.name
        assert one.data_seed == other.data_seed == 3
        assert pair.baseline != pair.run, "a run is not compared with itself"
    assert KINDS["weights"](dataclasses.replace(SMALL, seed=3)).seed == 3 + OTHER_WEIGHTS


def test_real_twins_drift_the_repeated_run_does_not_and_finished_runs_are_not_made_again(
    tmp_path: Path,
) -> None:
    wanted = [FLASH, REPEATED, INITIALIZATION]
    result = measure_drift(SMALL, (0, 1), tmp_path / "runs", pairs=wanted, checkpoints=3, workers=1)
    compared = result.compared
    assert compared.names == wanted
    assert all(drift.steps == (2, 4, 6) for drift in compared.drifts)
    assert all(value == 0 for drift in compared.of(REPEATED) for value in drift.max_difference)
    assert all(value > 0 for drift in compared.of(FLASH) for value in drift.max_difference)
    assert min(d.max_difference[0] for d in compared.of(INITIALIZATION)) > 0.1
    assert max(d.max_difference[0] for d in compared.of(FLASH)) < 0.01
    written = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()
    }
    again = measure_drift(SMALL, (0, 1), tmp_path / "runs", pairs=wanted, checkpoints=3, workers=1)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert again.compared == compared
    with pytest.raises(ValueError, match="pairs='nonsense'"):
        measure_drift(SMALL, pairs=["nonsense"])


def test_the_small_workloads_fit_their_models() -> None:
    assert small_pictures(7).steps == small_language(7).steps == 7
    assert small_pictures().workload.data != "auto"  # type: ignore[union-attr]


# --- what is shown


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("twins")
    measure_drift(SMALL, (0,), root, pairs=[FLASH], checkpoints=2, workers=1)
    return root


def test_a_run_is_drawn_on_a_sheet_with_its_names(trained: Path) -> None:
    import io

    from PIL import Image

    drawn = draw_run(trained / "flash-0")
    assert drawn.names == ("red circle", *drawn.names[1:])
    assert drawn.drawn.shape == drawn.originals.shape == (8, 8, 8, 3)
    with Image.open(io.BytesIO(contact_sheet(drawn))) as sheet:
        assert sheet.format == "PNG"
        pixels = np.asarray(sheet.convert("RGB"))
    # the first pair: drawing and original, each pixel 12 × 12
    assert np.array_equal(pixels[12:102:12, 12:102:12], drawn.drawn[0])
    assert np.array_equal(pixels[12:102:12, 114:210:12], drawn.originals[0])
    (one,) = draw_run(trained / "flash-0", ["Red Circle"]).names
    assert one == "red circle"
    with pytest.raises(ValueError, match="names='cat': accepted are names of shapes"):
        draw_run(trained / "flash-0", ["cat"])


def test_a_page_shows_drift_and_drawings(trained: Path) -> None:
    runs = [trained / "baseline-0", trained / "flash-0"]
    text = compare_page(compare_runs(runs, command="halfulp compare x").as_dict(), sheets_of(runs))
    assert text.count('<img src="data:image/png;base64,') == 2
    assert "red circle" in text
    assert "Repeat everything on this page: halfulp compare x" in text
    outside = sheet_block(draw_run(runs[0], ["red circle"])) | {
        "source": "https://example.org/x.png"
    }
    with pytest.raises(ValueError, match="accepted is data:image/png"):
        page("x", "", [{"heading": "x", "blocks": [outside]}])


def test_the_ledgers_page_takes_drawings_and_figures_together(trained: Path) -> None:
    figure = CompareResult((drift(0, (1.0, 2.0)),), "command").figures[0].as_dict()
    drawing = sheet_block(draw_run(trained / "baseline-0", ["red circle"]))
    verdict = dict.fromkeys(
        (
            *("id", "verdict", "statement", "paper", "measured", "estimates", "rule", "history"),
            *("source", "command"),
        ),
        "not yet",
    )
    text = ledger_page(
        [verdict | {"pictures": (figure, drawing)}, verdict | {"pictures": (drawing,)}], "command"
    )
    assert text.count("<img") == 2
    assert text.count("<svg") == 1


def test_only_text_to_image_runs_with_checkpoints_draw(trained: Path, tmp_path: Path) -> None:
    plain = planted_run(tmp_path / "plain", BASE)
    assert sheets_of([plain]) == []
    with pytest.raises(ValueError, match="it is no text-to-image training"):
        draw_run(plain)


def test_the_command_compares(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(trained / "baseline-0"), str(trained / "flash-0")]
    assert main(["compare", *runs, "--json", "-"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["drifts"][0]["steps"] == [3, 6]
    assert (
        main(["compare", runs[1], "--baseline", runs[0], "--html", str(tmp_path / "page.html")])
        == 0
    )
    assert "Weight drift" in capsys.readouterr().out
    assert "<img" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main(["compare", runs[0]]) == 2
    assert "accepted are two or more run folders" in capsys.readouterr().err


# --- the claims that are judged from twin runs


def planted_lab(
    slopes: dict[str, float], wobble: dict[str, float], seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
) -> Lab:
    """A laboratory whose twin runs drift along lines of these slopes, up and down by a wobble."""
    drifts = []
    for name, slope in slopes.items():
        for seed in seeds:
            line = [slope * (step + 0.1 * seed) for step in range(1, 7)]
            values = tuple(x + wobble.get(name, 0.0) * (-1) ** i for i, x in enumerate(line))
            drifts.append(drift(seed, values, name))
    return Lab(seeds=seeds, kept={"drift": DriftResult(CompareResult(tuple(drifts), "command"))})


AS_IN_THE_PAPER = {
    FLASH: 1.0,
    INITIALIZATION: 1.5,
    "bf16 against fp32": 3.0,
    "fp16 against fp32": 4.0,
    REPEATED: 0.0,
}
UNEVEN = {INITIALIZATION: 0.1, "fp16 against fp32": 0.5}


@pytest.mark.parametrize(
    ("changed", "wobble", "held"),
    [
        ({}, UNEVEN, {"B7", "B8a", "B8b", "B8c"}),
        # farther than another initialization, and 1.5 times below bf16
        ({FLASH: 2.0}, UNEVEN, {"B7", "B8b"}),
        ({FLASH: -1.0}, UNEVEN, {"B8b"}),
        ({"fp16 against fp32": 1.2}, UNEVEN, {"B7", "B8a"}),
        ({"bf16 against fp32": 8.0}, UNEVEN, {"B7", "B8a", "B8b"}),
        ({REPEATED: 1e-9}, UNEVEN, {"B8a", "B8b", "B8c"}),
        # low precision is not the more variable one
        (
            {},
            {INITIALIZATION: 0.5, "fp16 against fp32": 0.1},
            {"B7", "B8a", "B8c"},
        ),
    ],
)
def test_drift_claims_follow_planted_drifts(
    changed: dict[str, float], wobble: dict[str, float], held: set[str]
) -> None:
    found = run_claims(["B7", "B8"], lab=planted_lab(AS_IN_THE_PAPER | changed, wobble))
    assert {v.claim.id for v in found if v.verdict != "not reproduced"} == held
    json.dumps([v.as_dict() for v in found], allow_nan=False)


def test_a_slope_that_cannot_be_told_from_zero_is_not_compared() -> None:
    lab = planted_lab(AS_IN_THE_PAPER, UNEVEN)
    drifts = lab.kept["drift"].compared.drifts
    turned = [
        dataclasses.replace(one, wasserstein=one.wasserstein[::-1])
        if (one.name, one.seed % 2) == (INITIALIZATION, 0)
        else one
        for one in drifts
    ]
    lab.kept["drift"] = DriftResult(CompareResult(tuple(turned), "command"))
    plain, other = (run_claims(["B8a"], lab=x)[0] for x in (planted_lab(AS_IN_THE_PAPER, {}), lab))
    assert "flash's is steeper by -0.05" in plain.measured.text
    assert "cannot be told from 0" in other.measured.text


def test_two_seeds_are_not_enough_for_a_drift_claim() -> None:
    found = run_claims(["B7", "B8"], lab=planted_lab(AS_IN_THE_PAPER, UNEVEN, (0, 1)))
    assert [v.verdict for v in found] == ["not reproduced"] * 4
