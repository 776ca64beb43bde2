"""The page of a folder that `halfulp.watch` wrote, while it watches and afterwards."""

import json

import pytest
from tests.watch.gpt import BIASED_HEAD, GPT, biased, calls_biased, train

import halfulp
from halfulp.cli import main
from halfulp.experiments.watched import watched


def test_the_page_says_what_the_watcher_says(tmp_path, capsys, caplog):
    folder = tmp_path / "mine"
    watcher = halfulp.watch(GPT((None, calls_biased)), every=1, functions=(biased,), folder=folder)
    assert watched(folder, "")[1] == "0 measurements of 0 attention layers."
    train(watcher.model, 11)
    open_page, finding = watched(folder, "halfulp report")
    watcher.close()
    assert finding == "11 measurements of 2 attention layers, the last at step 11: one head alarms."
    tables = {table["title"]: table for table in open_page["tables"]}
    report = watcher.report()
    (alarm,) = tables["Alarms"]["rows"]
    assert alarm[:4] == ["biased", "blocks.1.attention", BIASED_HEAD, round(report.alarms[0].t, 1)]
    written = [
        dict(zip(tables["Heads"]["columns"], row, strict=True)) for row in tables["Heads"]["rows"]
    ]
    assert [row["δ leans"] for row in written] == pytest.approx(
        [row["leaning"] for row in report.rows]
    )
    names = {series["label"] for figure in open_page["figures"] for series in figure["series"]}
    assert f"blocks.1.attention, head {BIASED_HEAD}" in names
    assert main(["report", str(folder)]) == 0
    assert "one head alarms" in (folder / "report.html").read_text(encoding="utf-8")
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"] == "done"
    capsys.readouterr()
