"""Run folders on one page: what is drawn is what was recorded, also of a run that still trains or
was killed.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.report.markup import Page, problems

from halfulp import cli
from halfulp.experiments.overview import finding, measured_by_head, overview, read_runs
from halfulp.runs.threads import one_thread
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, Optimizer, RunConfig
from halfulp.training.loop import train

CONFIG = RunConfig(
    Language(layers=2, heads=2, width=16, context=12),
    AttentionPlan.of("BF16_FLASH2"),
    Optimizer(1e-2, clip=1.0),
    steps=40,
    batch=2,
    metrics_every=5,
    measure_every=10,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    with one_thread():
        train(CONFIG, out / "flash")
        train(
            replace(CONFIG, attention=AttentionPlan.of("torch:fp32"), measure_every=0), out / "fp32"
        )
    return out / "flash", out / "fp32"


def recorded(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def figure(seen, title):
    return next(one for one in seen["figures"] if one["title"] == title)


def test_curves_are_the_recorded_numbers(folders) -> None:
    seen = overview(read_runs(folders), "halfulp report")
    loss = figure(seen, "Training loss")
    assert [one["label"] for one in loss["series"]] == ["flash", "fp32"]
    for one, folder in zip(loss["series"], folders, strict=True):
        rows = [row for row in recorded(folder) if "loss" in row]
        assert (one["x"], one["y"]) == (
            [row["step"] for row in rows],
            [row["loss"] for row in rows],
        )
    measured = [row["measure"]["sigma_query"] for row in recorded(folders[0]) if "measure" in row]
    largest = figure(seen, "Largest singular value of W_Q")["series"]
    assert [one["label"] for one in largest] == ["flash"]
    assert largest[0]["y"] == [max(max(heads) for heads in layers) for layers in measured]


def test_one_run_is_drawn_head_by_head(folders) -> None:
    heads = figure(overview(read_runs(folders[:1]), ""), "Largest score")["series"]
    assert [one["label"] for one in heads] == [
        f"layer {i}, head {j}" for i in (0, 1) for j in (0, 1)
    ]
    measured = [
        row["measure"]["max_score"][1][0] for row in recorded(folders[0]) if "measure" in row
    ]
    assert heads[2]["y"] == measured


def test_many_heads_become_a_band_a_layer(folders, tmp_path) -> None:
    wide = replace(CONFIG, workload=Language(layers=2, heads=8, width=16, context=12), steps=20)
    with one_thread():
        train(wide, tmp_path / "wide")
    layers = figure(overview(read_runs([tmp_path / "wide"]), ""), "Largest score")["series"]
    assert [one["label"] for one in layers] == ["layer 0", "layer 1"]
    first = next(
        row["measure"]["max_score"][0] for row in recorded(tmp_path / "wide") if "measure" in row
    )
    assert (layers[0]["low"][0], layers[0]["high"][0]) == (min(first), max(first))


def test_what_differs_is_named(folders) -> None:
    runs = read_runs(folders)
    differences = overview(runs, "")["tables"][2]
    assert differences["rows"] == [
        ["fp32", "attention: BF16_FLASH2 → torch:fp32; measure_every: 10 → 0"]
    ]
    assert finding(runs).startswith("flash survived (median loss")


def test_a_run_that_was_killed_can_be_read(folders, tmp_path) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    record = json.loads((folders[0] / "run.json").read_text())
    (killed / "run.json").write_text(json.dumps(record | {"status": "running", "ended": None}))
    assert finding(read_runs([killed])) == "killed has not recorded a step yet."
    lines = (folders[0] / "metrics.jsonl").read_text().splitlines()
    (killed / "metrics.jsonl").write_text("\n".join([*lines[:3], lines[3][:20]]))
    with pytest.warns(UserWarning, match="line 4 is torn"):
        runs = read_runs([killed])
    assert overview(runs, "")["tables"][0]["rows"][0][3:5] == ["10 of 40", "running"]


def test_runs_of_one_name_are_told_apart(folders, tmp_path) -> None:
    (tmp_path / "other" / "flash").mkdir(parents=True)
    (tmp_path / "other" / "flash" / "run.json").write_text((folders[0] / "run.json").read_text())
    names = [run.name for run in read_runs([folders[0], tmp_path / "other" / "flash"])]
    assert names == [f"{folders[0].parent.name}/flash", "other/flash"]


def test_the_page_of_several_runs(folders, tmp_path, capsys) -> None:
    assert cli.main(["report", *map(str, folders), "--html", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert problems(html) == []
    text = " ".join(Page(html).text.split())
    assert finding(read_runs(folders)) in text
    assert "measure_every: 10 → 0" in text
    assert str(tmp_path / "page.html") in capsys.readouterr().out


def test_the_page_of_one_run_lies_in_its_folder_and_json_has_its_figures(folders, capsys) -> None:
    assert cli.main(["report", str(folders[1])]) == 0
    assert (folders[1] / "report.html").exists()
    capsys.readouterr()
    assert cli.main(["report", str(folders[1]), "--json", "-"]) == 0
    assert (
        figure(json.loads(capsys.readouterr().out), "Training loss")["series"][0]["label"] == "fp32"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "none given"),
        (["nowhere"], "there is no such folder"),
        (["FLASH", "FP32"], "html is missing"),
        (["FLASH", "--html", "nowhere/page.html"], "there is no folder"),
    ],
)
def test_what_cannot_be_reported_is_said_in_a_line(
    folders, tmp_path, monkeypatch, capsys, arguments, said
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"FLASH": str(folders[0]), "FP32": str(folders[1])}
    assert cli.main(["report", *(named.get(word, word) for word in arguments)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_of_twelve_layers_the_worst_are_drawn_each_in_a_color_of_its_own():
    from halfulp.report.svg import COLORS

    guilty = {9: 40.0, 11: -60.0, 2: 7.0}
    rows = [
        {
            "step": step,
            "measure": {
                "delta_error_in_gradient_steps_t": [
                    [0.1 * layer, guilty.get(layer, 0.2)] for layer in range(12)
                ]
            },
        }
        for step in (10, 20)
    ]
    (figure,) = measured_by_head(rows, "", names=[f"blocks.{i}" for i in range(12)])
    labels = [series.label for series in figure.series]
    assert len(labels) == len(COLORS)
    assert {"blocks.2", "blocks.9", "blocks.11"} <= set(labels)
    assert labels == sorted(labels, key=lambda label: int(label.split(".")[1]))
    assert "Of 12 layers the 7" in figure.caption
