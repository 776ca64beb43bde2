"""The page of an experiment: all its figures and tables, none so crowded that two curves look
alike.
"""

from halfulp.report.pages import experiment_page, uncrowded
from tests.report.markup import Page, problems


def figure(*labels):
    lines = [
        {"label": name, "x": [1, 2], "y": [1.0, 2.0], "low": None, "high": None, "style": "line"}
        for name in labels
    ]
    base = {
        "title": "Deviation",
        "x_label": "N",
        "y_label": "max",
        "x_log": False,
        "y_log": False,
        "series": lines,
    }
    return base | {"caption": "two seeds", "command": "halfulp sweep order"}


TABLE = {
    "title": "T",
    "columns": ["a"],
    "rows": [["b"]],
    "caption": "two seeds",
    "command": "halfulp sweep order",
}


def test_a_shared_caption_leads_and_is_said_once():
    html = experiment_page("Sweep", [figure("a", "b")], [TABLE])
    assert problems(html) == []
    assert Page(html).text.count("two seeds") == 1


def test_other_captions_stay_where_they_are():
    text = Page(
        experiment_page("Sweep", [figure("a", "b")], [TABLE | {"caption": "three seeds"}])
    ).text
    assert "two seeds" in text
    assert "three seeds" in text


def test_a_crowded_figure_becomes_one_for_every_format():
    crowded = figure(
        *(f"{fmt}, {family}" for fmt in ("bf16", "fp16", "fp32") for family in ("a", "b", "c, d"))
    )
    parts = uncrowded(crowded)
    assert [part["title"] for part in parts] == [
        "Deviation, bf16",
        "Deviation, fp16",
        "Deviation, fp32",
    ]
    assert [[one["label"] for one in part["series"]] for part in parts] == [["a", "b", "c, d"]] * 3
    assert experiment_page("Sweep", [crowded], []).count("<svg") == 3


def test_other_figures_stay_whole():
    for whole in (figure("bf16, a", "fp16, a"), figure(*(f"curve {i}" for i in range(9)))):
        assert uncrowded(whole) == [whole]


def test_tables_alone_make_a_page():
    assert problems(experiment_page("Sweep", [], [TABLE])) == []
