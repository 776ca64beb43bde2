"""Audits as JUnit's XML, which continuous integration shows: a suite a target, a test a probe and a
relation, figures as properties.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from halfulp.report.audit_summary import HOLDS, Report, findings_of, meaning, relation_rows
from halfulp.report.comparison_table import Comparison, summary_line
from halfulp.report.text import number_text, visible


def audit_junit(reports: Sequence[Report], comparisons: Sequence[Comparison] = ()) -> str:
    """Return one document of all audits; a defect is a failure, what could not be called an error,
    what a target declares not to take is skipped.
    """
    top = ElementTree.Element("testsuites", name="halfulp audit")
    for report in reports:
        top.append(_suite(report))
    for comparison in comparisons:
        top.append(_compared(comparison))
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _suite(report: Report) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=_text(report["target"]))
    cause = report["cause"] or {}
    _properties(
        suite,
        {
            "verdict": report["verdict"],
            "reason": report["reason"],
            "cause": cause.get("name"),
            "code": cause.get("code"),
            "dtype": report["dtype"],
            "depth": report["depth"],
            "tests": report["tests"],
            "family_level": report["family_level"],
        },
    )
    for case in report["cases"]:
        suite.append(_case(report, case))
    for row in relation_rows(report):
        test = _test(report, f"relation: {row.relation}", 0.0)
        if row.outcome == HOLDS[0]:
            _add(test, "failure", row.detail)
        suite.append(test)
    whole = _test(report, "verdict", report["seconds"])
    if report["verdict"] not in ("sound", "stock", "forward sound", "forward stock"):
        kind = "failure" if report["verdict"] == "defect" else "error"
        _add(whole, kind, f"{meaning(report)}: {report['reason']}", report["script"])
    elif report["verdict"].startswith("forward") and not report["forward"]:
        _add(whole, "error", f"{meaning(report)}: {report['reason']}")
    suite.append(whole)
    return _counted(suite, report["seconds"])


def _case(report: Report, case: Mapping[str, Any]) -> ElementTree.Element:
    test = _test(report, f"{case['probe']} {case['shape']}, seed {case['seed']}", 0.0)
    figures: dict[str, Any] = {}
    for row in case["rows"]:
        for name in ("relative", "times_stock", "times_stock_lower", "times_floor"):
            value = row[name]
            figures[f"{row['property']}: {name}"] = None if value is None else number_text(value)
    _properties(test, figures)
    if case["status"] == "unsupported":
        _add(test, "skipped", case["reason"])
    elif case["status"] != "ok":
        _add(test, "error", case["reason"])
    worse = (finding for finding in findings_of(report, case) if finding["grade"] == "defect")
    # JUnit knows one failure a test; the worst comes first
    for finding in itertools.islice(worse, 1):
        _add(test, "failure", f"{finding['property']}: {finding['figure']}")
    return test


def _compared(comparison: Comparison) -> ElementTree.Element:
    name = f"{comparison['after']} against {comparison['before']}"
    suite = ElementTree.Element("testsuite", name=_text(name))
    test = ElementTree.SubElement(
        suite, "testcase", classname=_text(name), name="no figure is worse", time="0"
    )
    if comparison["worse"]:
        _add(test, "failure", summary_line(comparison), "\n".join(comparison["worse"]))
    return _counted(suite, 0.0)


def _counted(suite: ElementTree.Element, seconds: float) -> ElementTree.Element:
    suite.set("tests", str(len(suite.findall("testcase"))))
    for kind, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{kind}"))))
    suite.set("time", f"{seconds:.3f}")
    return suite


def _test(report: Report, name: str, seconds: float) -> ElementTree.Element:
    named = {"classname": _text(report["target"]), "name": _text(name), "time": f"{seconds:.3f}"}
    return ElementTree.Element("testcase", named)


def _properties(element: ElementTree.Element, values: Mapping[str, Any]) -> None:
    known = {name: value for name, value in values.items() if value is not None}
    if known:
        held = ElementTree.SubElement(element, "properties")
        for name, value in known.items():
            ElementTree.SubElement(held, "property", name=_text(name), value=_text(value))


def _add(test: ElementTree.Element, kind: str, message: Any, text: str | None = None) -> None:
    element = ElementTree.SubElement(test, kind, message=_text(message))
    if text is not None:
        element.text = "\n".join(_text(line) for line in text.splitlines())


def _text(value: Any) -> str:
    """Text that XML can hold."""
    return visible(str(value)).replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")
