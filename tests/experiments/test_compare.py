"""Weight drift: planted drifts are read off run folders to the digit, twins are matched, the repeated run gives 0."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import linregress, ttest_1samp, wasserstein_distance

from halfulp.cli import main
from halfulp.experiments.compare import (
    INITIALIZATION,
    REPEATED,
    CompareResult,
    Drift,
    compare_runs,
    drift_between,
    wasserstein,
)
from halfulp.experiments.compare_summary import interval_of, slope_of, slope_ratio, summarize, unevenness_of
from halfulp.experiments.drawing import contact_sheet, draw_run, sheet_block, sheets_of
from halfulp.experiments.twins import FLASH, KINDS, OTHER_WEIGHTS, PAIRS, measure_drift, small_language, small_pictures
from halfulp.report.compare_page import compare_page
from halfulp.report.html import page
from halfulp.report.ledger import ledger_page
from halfulp.runs.folder import write_json
from halfulp.training.attention import AttentionPlan
from halfulp.training.checkpoint import Checkpoint, save_checkpoint
from halfulp.training.config import LayerTask, Optimizer, Pictures, RunConfig
from halfulp.training.record import difference, new_record

BASE = RunConfig(LayerTask(), AttentionPlan.of("torch:math"), steps=30, data_seed=0)
STEPS = (10, 20, 30)
Change = Callable[[int, str, torch.Tensor], torch.Tensor]


def planted_run(folder: Path, config: RunConfig, change: Change = lambda step, name, x: x) -> Path:
    """A run folder whose weights at every step are those of the data seed, changed by `change`."""
    folder.mkdir()
    write_json(folder / "run.json", new_record(config, {}, None))
    data_seed = config.seed if config.data_seed is None else config.data_seed
    for step in STEPS:
        generator = torch.Generator().manual_seed(100 * data_seed + step)
        shapes = {"a": (6, 5), "b": (7,)}
        model = {name: change(step, name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
        save_checkpoint(folder / "checkpoints", Checkpoint(step, model, {}, {}))
    return folder


def flash(**changes: object) -> RunConfig:
    return dataclasses.replace(BASE, attention=AttentionPlan.of("torch:flash"), **changes)  # type: ignore[arg-type]


# --- the distance

numbers = st.lists(st.floats(-100, 100, width=32), min_size=5, max_size=5)


@given(numbers, numbers)
def test_the_distance_is_the_cheapest_of_all_transports(one: list[float], other: list[float]) -> None:
    a, b = np.array(one, np.float32), np.array(other, np.float32)
    cheapest = min(
        sum(abs(float(x) - float(y)) for x, y in zip(a, chosen, strict=True)) / 5
        for chosen in itertools.permutations(b)
    )
    assert wasserstein(a, b) == pytest.approx(cheapest, rel=1e-6, abs=1e-12)


def test_the_distance_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    for scale, size in ((1.0, 1000), (1e-6, 333), (1e5, 17)):
        a, b = (rng.standard_normal((2, size)) * scale).astype(np.float32)
        assert wasserstein(a, b) == pytest.approx(wasserstein_distance(a, b), rel=1e-6)
    x = rng.standard_normal((20, 3))
    assert wasserstein(x, x[::-1]) == 0  # the same numbers in another order
    assert wasserstein(x, x + 2) == pytest.approx(2)
    with pytest.raises(ValueError, match="other of 59 values: accepted are as many as the first has, 60"):
        wasserstein(x, x.ravel()[1:])


# --- drifts of one pair


def test_a_planted_drift_is_read_to_the_digit(tmp_path: Path) -> None:
    """Every weight of one tensor moves by a quarter a step; a shift is its own transport."""
    base = planted_run(tmp_path / "base", BASE)
    moved = planted_run(tmp_path / "moved", flash(), lambda step, name, x: x + 0.25 * step * (name == "b"))
    found = drift_between(base, moved)
    assert found.name == "attention: torch:math → torch:flash"
    assert found.steps == STEPS
    assert found.max_difference == pytest.approx([2.5, 5.0, 7.5], rel=1e-6)
    assert found.tensors["b"][1] == pytest.approx([2.5, 5.0, 7.5], rel=1e-6)
    assert found.tensors["a"] == ((0.0,) * 3, (0.0,) * 3)
    assert found.wasserstein == pytest.approx([x * 7 / 37 for x in (2.5, 5.0, 7.5)], rel=1e-5)
    assert found.slope == pytest.approx(0.25 * 7 / 37, rel=1e-5)


def test_weights_in_another_order_differ_and_keep_their_distribution(tmp_path: Path) -> None:
    base = planted_run(tmp_path / "base", BASE)
    turned = planted_run(tmp_path / "turned", BASE, lambda step, name, x: x.flip(0))
    found = drift_between(base, turned)
    assert min(found.max_difference) > 0.1
    assert found.wasserstein == (0.0,) * 3


def test_the_same_run_repeated_differs_by_exactly_nothing(tmp_path: Path) -> None:
    base, again = (planted_run(tmp_path / name, BASE) for name in ("base", "again"))
    (found,) = compare_runs([base, again]).drifts
    assert found.name == REPEATED
    assert found.max_difference == found.wasserstein == (0.0,) * 3

    # one bit of one weight of the last checkpoint is seen
    def last(step: int, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(x, x + torch.eye(7)[3]) if (step, name) == (30, "b") else x

    other = planted_run(tmp_path / "other", BASE, last)
    (seen,) = compare_runs([base, other]).drifts
    assert seen.max_difference[:2] == (0.0, 0.0)
    assert 0 < seen.max_difference[2] < 1e-6


def test_numbers_that_are_not_finite_are_not_hidden(tmp_path: Path) -> None:
    base = planted_run(tmp_path / "base", BASE)
    broken = planted_run(tmp_path / "broken", flash(), lambda step, name, x: x / (step != 30) if name == "a" else x)
    result = compare_runs([base, broken])
    assert not math.isfinite(result.drifts[0].max_difference[-1])
    plain = result.as_dict()
    assert plain["drifts"][0]["max_difference"][-1] is None
    json.dumps(plain, allow_nan=False)
    assert "No longer finite" in compare_page(plain)


def test_a_torn_checkpoint_is_skipped_with_a_warning(tmp_path: Path) -> None:
    base, moved = planted_run(tmp_path / "base", BASE), planted_run(tmp_path / "moved", flash())
    torn = moved / "checkpoints" / "step-20" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:40])
    with pytest.warns(UserWarning, match=r"skipped: .*step-20"):
        assert drift_between(base, moved).steps == (10, 30)


# --- which run belongs to which


def test_runs_of_several_seeds_find_their_own_baselines(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1, 2):
        seeded = {"seed": seed, "data_seed": seed}
        runs.append(planted_run(tmp_path / f"base-{seed}", dataclasses.replace(BASE, **seeded)))
    for seed in (2, 0, 1):
        shift = 0.01 * (seed + 1)
        config = flash(seed=seed, data_seed=seed)
        runs.append(planted_run(tmp_path / f"flash-{seed}", config, lambda step, name, x, by=shift: x + by * step))  # type: ignore[misc]
    runs.append(planted_run(tmp_path / "weights", dataclasses.replace(BASE, seed=1000)))
    runs.append(planted_run(tmp_path / "both", flash(seed=1000), lambda step, name, x: x + 1))
    result = compare_runs(runs)
    name = "attention: torch:math → torch:flash"
    assert result.names == [name, INITIALIZATION, f"{name}, {INITIALIZATION}"]
    assert {drift.seed: round(drift.max_difference[0], 4) for drift in result.of(name)} == {0: 0.1, 1: 0.2, 2: 0.3}
    (line, *_) = result.summary()
    assert line.seeds == 3
    assert line.slope.value == pytest.approx(0.02, rel=1e-4)
    assert line.slope.low < 0.02 < line.slope.high
    plain = result.as_dict()
    assert plain["figures"][0]["series"][0]["low"] is not None
    assert [row[0] for row in plain["tables"][0]["rows"]] == result.names


def test_another_baseline_may_be_named_and_what_a_run_records_makes_no_difference(tmp_path: Path) -> None:
    base = planted_run(tmp_path / "base", BASE)
    moved = planted_run(tmp_path / "moved", flash(keep=None, checkpoint_every=10, metrics_every=3, preset="x"))
    assert compare_runs([moved], base).names == ["attention: torch:math → torch:flash"]
    assert compare_runs([base], moved).names == ["attention: torch:flash → torch:math"]


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path: Path) -> None:
    base = planted_run(tmp_path / "base", BASE)
    other_data = planted_run(tmp_path / "data", flash(data_seed=7))
    wide = planted_run(tmp_path / "wide", flash(), lambda step, name, x: torch.cat((x, x)))
    late = planted_run(tmp_path / "late", flash())
    for step in STEPS:
        (late / "checkpoints" / f"step-{step}").rename(late / "checkpoints" / f"step-{step + 1}")
    for runs, said in (
        ([base, other_data], "its data seed is 7; accepted are data seeds of a baseline: 0"),
        ([base, wide], "its model has other tensors"),
        ([base, late], "no checkpoint in common"),
        ([base], "accepted are two or more run folders"),
        ([base, tmp_path], "there is no run.json of a training"),
        ([base, planted_run(tmp_path / "seed", dataclasses.replace(BASE, data_seed=5))], "all are baselines"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            compare_runs(runs)
        assert "\n" not in str(error.value)


# --- over seeds


def drift(seed: int, values: tuple[float, ...], name: str = "x") -> Drift:
    return Drift(name, seed, "", "", tuple(range(10, 10 * len(values) + 1, 10)), values, values, {})


def test_slope_and_unevenness_are_those_of_the_least_squares_line() -> None:
    x, y = (10, 20, 30, 40), (1.0, 4.0, 3.0, 8.0)
    line = linregress(x, y)
    assert slope_of(x, y) == pytest.approx(line.slope)
    residual = np.array(y) - line.intercept - line.slope * np.array(x)
    assert unevenness_of(x, y) == pytest.approx(np.sqrt((residual**2).sum() / 2) / 8)
    assert unevenness_of(x, (1.0, 2.0, 3.0, 4.0)) == pytest.approx(0, abs=1e-12)
    assert math.isnan(slope_of((10,), (1.0,)))
    assert math.isnan(unevenness_of(x, (0.0,) * 4))


def test_the_interval_is_students_and_needs_three_seeds() -> None:
    values = [1.0, 2.0, 4.0, 4.5]
    found = interval_of(values)
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert math.isnan(interval_of(values[:2]).low)
    assert str(interval_of([2.0])) == "2 (n = 1)"


def test_ratios_are_matched_by_seed_and_geometric() -> None:
    flat = [drift(seed, (1.0 * k, 2.0 * k)) for seed, k in ((0, 1), (1, 10), (2, 100))]
    steep = [drift(seed, (3.0 * k, 6.0 * k)) for seed, k in ((2, 100), (0, 1), (1, 10))]
    found = slope_ratio(steep, flat)
    assert (found.value, found.low, found.high, found.count) == pytest.approx((3, 3, 3, 3))
    falling = slope_ratio([drift(0, (3.0, 1.0))], flat)
    assert found.count == 3
    assert falling.value == pytest.approx(-2)
    assert math.isnan(falling.low)
    assert slope_ratio([drift(9, (1.0, 2.0))], flat).count == 0


def test_a_summary_speaks_of_the_last_step_that_all_seeds_have() -> None:
    found = summarize("x", [drift(0, (1.0, 2.0, 9.0)), drift(1, (3.0, 4.0))])
    assert (found.steps, found.wasserstein, found.seeds) == (20, 3.0, 2)


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
            KINDS[kind](dataclasses.replace(SMALL, seed=3, data_seed=3)) for kind in (pair.baseline, pair.run)
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
    assert KINDS["weights"](dataclasses.replace(SMALL, seed=3)).seed == 3 + OTHER_WEIGHTS


def test_real_twins_drift_the_repeated_run_does_not_and_finished_runs_are_not_made_again(tmp_path: Path) -> None:
    wanted = [FLASH, REPEATED, INITIALIZATION]
    result = measure_drift(SMALL, (0, 1, 2), tmp_path / "runs", pairs=wanted, checkpoints=3, workers=1)
    compared = result.compared
    assert compared.names == wanted
    assert all(drift.steps == (2, 4, 6) for drift in compared.drifts)
    assert all(value == 0 for drift in compared.of(REPEATED) for value in drift.max_difference)
    assert all(value > 0 for drift in compared.of(FLASH) for value in drift.max_difference)
    assert min(d.max_difference[0] for d in compared.of(INITIALIZATION)) > 0.1
    assert max(d.max_difference[0] for d in compared.of(FLASH)) < 0.01
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    again = measure_drift(SMALL, (0, 1, 2), tmp_path / "runs", pairs=wanted, checkpoints=3, workers=1)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert again.compared == compared
    assert [row[0] for row in result.ratio_table().rows] == [INITIALIZATION]
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
    assert text.count("<img src='data:image/png;base64,") == 2
    assert "red circle" in text
    assert "Repeat everything on this page: halfulp compare x" in text
    outside = sheet_block(draw_run(runs[0], ["red circle"])) | {"source": "https://example.org/x.png"}
    with pytest.raises(ValueError, match="accepted is data:image/png"):
        page("x", "", [{"heading": "x", "blocks": [outside]}])


def test_the_ledgers_page_takes_drawings_and_figures_together(trained: Path) -> None:
    figure = CompareResult((drift(0, (1.0, 2.0)),), "command").figures()[0].as_dict()
    drawing = sheet_block(draw_run(trained / "baseline-0", ["red circle"]))
    verdict = dict.fromkeys(("id", "verdict", "statement", "paper", "measured", "rule", "command"), "not yet")
    text = ledger_page([verdict | {"pictures": (figure, drawing)}, verdict | {"pictures": (drawing,)}], "command")
    assert text.count("<img") == 2
    assert text.count("<svg") == 1


def test_only_text_to_image_runs_with_checkpoints_draw(trained: Path, tmp_path: Path) -> None:
    plain = planted_run(tmp_path / "plain", BASE)
    assert sheets_of([plain]) == []
    with pytest.raises(ValueError, match="it is no text-to-image training"):
        draw_run(plain)


def test_the_command_compares(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(trained / "baseline-0"), str(trained / "flash-0")]
    assert main(["compare", *runs, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["drifts"][0]["steps"] == [3, 6]
    assert main(["compare", runs[1], "--baseline", runs[0], "--html", str(tmp_path / "page.html")]) == 0
    assert "Weight drift" in capsys.readouterr().out
    assert "<img" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main(["compare", runs[0]]) == 2
    assert "accepted are two or more run folders" in capsys.readouterr().err


def test_a_result_names_what_it_compares_in_order() -> None:
    result = CompareResult((drift(0, (0.0, 0.0), "still"), drift(0, (1.0, 2.0), "moving")), "command")
    assert result.names == ["still", "moving"]
    assert "not in the picture: still" in result.figures()[0].caption
    assert "Not one bit apart: still. Farthest apart at step 20: moving, Wasserstein distance 2." in compare_page(result.as_dict())
