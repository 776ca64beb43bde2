"""An audit in front of a reader: the verdict, why, every probe and relation, on the terminal and on
a page.
"""

import copy
import io

import pytest
from rich.console import Console

from halfulp.report.audit_page import audit_page, audit_section, verdicts
from halfulp.report.audit_summary import (
    facts,
    false_alarms,
    not_run,
    probe_rows,
    relation_rows,
    worst_ratios,
)
from halfulp.report.audit_table import print_audit, print_summary
from tests.report.markup import Page, problems

EVIL = "<script>alert(1)</script>[red]"


def row(name, stock, floor, relative=2e-3):
    return {
        "property": name, "relative": relative, "samples": 16, "stock": 1e-3, "floor": 1e-3,
        "times_stock": stock, "times_stock_lower": stock - 0.1, "times_stock_upper": stock + 0.1,
        "times_floor": floor, "times_floor_lower": floor - 0.1, "times_floor_upper": floor + 0.1,
    }  # fmt: skip


def case(probe, *rows, status="ok", reason=None, shape="(4, 4, 256, 64)", file=None):
    return {
        "probe": probe, "shape": shape, "seed": 0, "file": file, "exposes": f"what {probe} exposes",
        "source": "a paper", "status": status, "reason": reason, "rows": list(rows),
        "leans": {}, "ulps": {}, "nonfinite": {},
    }  # fmt: skip


def finding(
    grade,
    kind,
    name,
    probe,
    ratio=2.0,
    figure="2.0e-03 relative, 2 × the stock recipe",
    shape="(4, 4, 256, 64)",
):
    where = {"probe": probe, "shape": shape, "seed": 0, "file": None}
    return {
        "grade": grade,
        "kind": kind,
        "property": name,
        "tensor": "grad_key",
        "case": where,
        "figure": figure,
        "ratio": ratio,
    }


def relation(name, tensor, identical, confined=True):
    plain = {"invariant": name, "tensor": tensor, "identical": identical, "confined": confined}
    return plain | {"times_floor": 0.7}


def report(**changes):
    base = {
        "target": "my.py:attention",
        "dtype": "bfloat16",
        "device": "cpu",
        "depth": "quick",
        "forward": False,
        "missing": [],
        "left_out": [],
        "verdict": "sound",
        "reason": "no property fails in 700 tests",
        "findings": [],
        "causes": [],
        "cause": None,
        "cases": [],
        "relations": [],
        "fingerprint": None,
        "growth": {},
        "drift": 0.51,
        "tests": 700,
        "family_level": 0.01,
        "smallest": None,
        "script": None,
        "notes": [],
        "differentiable": True,
        "seconds": 12.3,
        "versions": {"torch": "2"},
    }
    return base | changes


SOUND = report(cases=[case("gaussian", row("O error", 0.8, 0.9), row("dK error", 1.0, 1.1))])
DEFECT = report(
    target="bad",
    verdict="defect",
    reason="gradients are accumulated in low precision; dK error on rising: 2 × the stock recipe",
    causes=[
        {
            "name": "gradients are accumulated",
            "resembles": "a public bug",
            "effect": "long contexts train on noise.",
        },
        {"name": "another cause", "resembles": "another bug", "effect": "more."},
    ],
    findings=[
        finding("defect", "error", "dK error", "rising"),
        finding("defect", "non-finite", "dQ not finite", "masked_rows", ratio=None),
        finding(
            "defect",
            "relation",
            "same call twice: dK",
            "free_feature",
            figure="two calls differ by 3 ×",
        ),
        finding("stock", "error", "dQ error", "sink", ratio=6.0),
        finding("stock", "error", "Σ dK = 0", "rising", ratio=9.0),
    ],
    cases=[
        case("gaussian", row("dK error", 1.1, 1.2)),
        case("sink", row("dQ error", 1.0, 6.0), row("O error", 1.2, 1.3)),
        case("rising", row("dK error", 2.0, 2.0), row("Σ dK = 0", 1.0, 9.0)),
        case("masked_rows", row("O error", 1.0, 1.0)),
        case("gqa", status="unsupported", reason="does not take enable_gqa"),
        case("wider_values", status="error", reason="raises RuntimeError: no"),
        case("odd_lengths", status="unsupported", reason="does not take enable_gqa"),
    ],
    relations=[
        relation("same call twice", "out", 1.0),
        relation("same call twice", "grad_key", 0.9),
        relation("permuted keys", "out", 0.99999),
        relation("batch position", "out", 1.0),
    ],
    fingerprint={
        "recipe": "BF16_FLASH2",
        "choices": {},
        "identical": {},
        "text": "behaves like BF16_FLASH2",
    },
    growth={"dK": 0.31, "O": 0.02},
    smallest={"probe": "rising", "shape": "(1, 1, 12, 8)", "seed": 0},
    script="raise SystemExit(1)\n",
    notes=["modifies its inputs"],
)
STOCK = report(
    target="stock one",
    verdict="stock",
    reason="known bias",
    cases=[case("sink", row("dQ error", 1.0, 6.0))],
    findings=[finding("stock", "error", "dQ error", "sink", ratio=6.0)],
    causes=[
        {"name": "δ from the rounded O", "resembles": "FlashAttention-2", "effect": "it adds up."}
    ],
)
ERROR = report(
    target="broken", verdict="error", reason="raises RuntimeError: no kernel", drift=None
)


def printed(*reports, script=None, summary=False, width=100):
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    for one in reports:
        print_audit(one, console, script=script)
    if summary:
        print_summary(reports, console)
    return out.getvalue()


def test_rows_are_the_failing_figures_first():
    rows = probe_rows(DEFECT)
    assert [(r.grade, r.probe, r.figure) for r in rows] == [
        ("defect", "masked_rows", "dQ not finite"),
        ("defect", "rising", "dK error"),
        ("stock", "sink", "dQ error"),
        ("sound", "gaussian", "dK error"),
    ]
    assert (rows[1].times_stock, rows[1].stock_at_least, rows[1].times_floor) == (2.0, 1.9, 2.0)
    assert rows[0].times_stock is None


def test_a_finding_of_another_size_does_not_stain_a_case():
    other = copy.deepcopy(DEFECT)
    for found in other["findings"]:
        found["case"]["shape"] = "(1, 1, 8, 8)"
    assert {r.grade for r in probe_rows(other)} == {"sound"}


def test_a_sound_case_shows_what_is_farthest_above_the_floor():
    (only,) = probe_rows(SOUND)
    assert (only.figure, only.times_floor) == ("dK error", 1.1)


def test_relations_are_broken_or_hold_to_the_bit_or_to_rounding():
    assert [(r.relation, r.outcome) for r in relation_rows(DEFECT)] == [
        ("same call twice", "beyond rounding"),
        ("permuted keys", "within rounding"),
        ("batch position", "bitwise equal"),
    ]
    broken, rounding, _ = relation_rows(DEFECT)
    assert "two calls differ by 3 ×" in broken.detail
    assert rounding.detail == "O 0.70 × the floor (> 99.9 % same bits)"


def test_what_was_not_run_is_told_once_a_reason():
    assert not_run(DEFECT) == [
        ("does not take enable_gqa", "gqa, odd_lengths"),
        ("raises RuntimeError: no", "wider_values"),
    ]


def test_facts_name_causes_growth_and_notes():
    found = dict(facts(DEFECT))
    assert found["resembles"] == "a public bug"
    assert found["also"] == "another cause; another bug"
    assert found["in training"] == "long contexts train on noise."
    assert "dK as N^0.31" in found["growth"]
    assert "O as" not in found["growth"]
    assert found["notes"] == "modifies its inputs"
    assert found["smallest input"] == "rising (1, 1, 12, 8), seed 0"
    assert dict(facts(SOUND)) == {
        "drift": "summed error of O grows as n^0.51 (0.5 random walk, 1 drift)"
    }


def test_ratios_are_the_largest_and_missing_where_nothing_was_measured():
    assert worst_ratios(DEFECT) == (2.0, 9.0)
    assert worst_ratios(ERROR) == (None, None)


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (SOUND, "✓ SOUND  my.py:attention"),
        (STOCK, "● STOCK  stock one"),
        (DEFECT, "✗ DEFECT  bad"),
        (ERROR, "! ERROR  broken"),
    ],
)
def test_the_verdict_comes_first_and_reads_without_color(one, line):
    text = printed(one)
    assert text.startswith(line)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_defect_says_everything_a_reader_needs():
    text = " ".join(printed(DEFECT, script="repro/bad.py").split())
    for part in (
        "dK error on rising",
        "a public bug",
        "long contexts train on noise",
        "behaves like BF16_FLASH2",
        "repro/bad.py",
        "✗ rising",
        "● sink",
        "✓ gaussian",
        "same call twice beyond rounding",
        "does not take enable_gqa",
        "modifies its inputs",
        "700 tests; chance of any false alarm over all of them: at most 1 %",
    ):
        assert part in text, part


@pytest.mark.parametrize("width", [56, 60, 75, 76, 80, 89, 90, 100])
def test_no_figure_is_cut_however_narrow_the_terminal(width):
    text = printed(DEFECT, STOCK, summary=True, width=width)
    assert "…" not in text
    probes, summary = text.split("2 targets")
    assert {"2.00", "6.00"} <= set(probes.split())
    assert {"2.00", "6.00", "9.00"} <= set(summary.split())
    assert all(len(line) <= width for line in text.splitlines())


def test_color_marks_the_verdict_on_a_terminal():
    out = io.StringIO()
    print_audit(DEFECT, Console(file=out, width=100, force_terminal=True, color_system="standard"))
    assert "\x1b[1;31m✗ DEFECT" in out.getvalue()


def test_the_summary_has_a_line_a_target():
    text = printed(SOUND, STOCK, DEFECT, ERROR, summary=True).split("4 targets")[1]
    lines = text.splitlines()
    assert any(
        "bad" in line and "✗ defect" in line and "2.00" in line and "9.00" in line for line in lines
    )
    assert any(
        "broken" in line and "! error" in line and "raises RuntimeError" in line for line in lines
    )
    assert any("stock one" in line and "δ from the rounded O" in line for line in lines)


def test_names_are_no_markup():
    hostile = report(
        target=EVIL, reason=EVIL, cases=[case("[bold]x", row("[red]y", 1.0, 1.0), shape="[x]")]
    )
    text = printed(hostile, hostile, summary=True)
    assert EVIL in text
    assert "[bold]x" in text
    assert "[red]y" in text


def test_pages_are_well_formed_and_escape_everything():
    hostile = copy.deepcopy(DEFECT) | {
        "target": EVIL,
        "reason": EVIL,
        "notes": [EVIL],
        "script": EVIL,
    }
    hostile["cases"][0] |= {"probe": EVIL, "exposes": EVIL, "shape": EVIL}
    hostile["causes"][0] = {"name": EVIL, "resembles": EVIL, "effect": EVIL}
    hostile["fingerprint"]["text"] = EVIL
    hostile["relations"][0] |= {"invariant": EVIL}
    for reports in ([hostile], [SOUND, STOCK, hostile, ERROR]):
        html = audit_page(reports, EVIL, meta=EVIL)
        assert problems(html) == []
        assert Page(html).tags.count("script") == 1


def test_the_page_of_several_counts_the_verdicts():
    reports = [SOUND, STOCK, DEFECT, ERROR]
    assert verdicts(reports) == "Of 4 targets: 1 sound, 1 stock, 1 defect, 1 error."
    html = audit_page(reports, "halfulp audit a b")
    assert "halfulp audit a b" in html
    assert Page(html).tags.count("details") == 3, (
        "tables are folded where there are several targets"
    )
    assert "details" not in Page(audit_page([DEFECT], "x")).tags


def test_the_section_shows_the_program():
    codes = [block["text"] for block in audit_section(DEFECT)["blocks"] if block["kind"] == "code"]
    assert codes == [DEFECT["script"]]


def test_the_false_alarm_rate_is_told():
    assert "at most 1 %" in false_alarms(SOUND)


def test_of_the_cases_over_sizes_the_worst_is_shown_and_how_far_it_is_off():
    names = [
        f"sizes/full/no-option/plain/{place}/packed/once" for place in ("first", "second", "third")
    ]
    elements = [
        finding("defect", "element", "dK element", name, ratio)
        for name, ratio in zip(names, (14.1, 120.6, 23.2), strict=True)
    ]
    cases = [case("gaussian", row("dK error", 1.0, 1.0)), *map(case, names)]
    shown = probe_rows({"cases": cases, "findings": elements})
    assert [row.probe for row in shown] == ["sizes", "gaussian"]
    levels = "full, no-option, plain, second, packed, once"
    assert shown[0].figure == f"dK element 121 × rounding ({levels})"

    elements[2]["kind"], elements[2]["ratio"] = "non-finite", None  # as JSON keeps infinity
    assert "third" in probe_rows({"cases": cases, "findings": elements})[0].figure


def test_an_element_beside_a_mean_says_how_far_it_is_off():
    found = [
        finding("defect", "error", "dK error", "gaussian", 7.6),
        finding("defect", "element", "dK element", "gaussian", 45.2),
        finding("defect", "lean", "dK leans", "gaussian", 3.0),
    ]
    rows = probe_rows({"cases": [case("gaussian", row("dK error", 7.6, 16.5))], "findings": found})
    assert rows[0].said == "dK error; dK element 45.20 × rounding; dK leans"


def test_a_lean_in_many_parts_is_said_once():
    parts = ["the last block of D", "odd places of T", "the first half of T"]
    names = [f"output leans along its own size, in {part}" for part in parts]
    found = [finding("defect", "lean", name, "large") for name in [*names, "dinput leans"]]
    rows = probe_rows({"cases": [case("large")], "findings": found})
    assert rows[0].said == "output leans along its own size, in 3 parts; dinput leans"
    (alone,) = probe_rows({"cases": [case("large")], "findings": found[:1]})
    assert alone.said == "output leans along its own size, in the last block of D"
