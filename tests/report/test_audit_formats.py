"""Audits for programs and for pull requests: JSON by its published schema, Markdown, JUnit."""

import json
from importlib.resources import files
from xml.etree import ElementTree

import jsonschema
import pytest

from halfulp.audit import Shape, against, audit
from halfulp.cli import main
from halfulp.report.audit_junit import audit_junit
from halfulp.report.audit_markdown import MOST_ROWS, audit_markdown, comparison_markdown, escaped
from tests.test_action import write_kernels

EVIL = "a|b`c*d_e[f](g)<script>\x1b[2J\n# h @everyone"
SCHEMA = json.loads(files("halfulp.report").joinpath("audit.schema.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def reports():
    """A defect that takes no masks, a function that fails, and a sound kernel."""

    def narrow(query, key, value, *, is_causal=False, scale=None):
        s = query @ key.mT * scale  # in bf16: what the reconstruction finds at once
        if is_causal:
            s = s.masked_fill(s.new_ones(s.shape[-2:]).tril() == 0, float("-inf"))
        return s.softmax(-1) @ value

    def failing(query, key, value, **options):
        raise RuntimeError(EVIL)

    shapes = [Shape(1, 2, 64, 64, 8)]
    found = [audit(f, shapes=shapes).as_dict() for f in (narrow, failing)]
    return [*found, audit("halfulp", shapes=shapes, explain=False).as_dict()]


@pytest.fixture(scope="module")
def comparison(reports):
    return against.compare(reports[2], reports[0] | {"target": EVIL}).as_dict()


def check(plain):
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(plain)))


def test_the_schema_is_one_and_what_is_written_keeps_it(reports, comparison):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    check(reports)
    check([reports[0] | {"against": comparison}])
    check({"comparisons": [comparison]})


def test_the_schema_knows_every_property_and_refuses_what_is_missing(reports):
    known = {name: SCHEMA["$defs"][name]["properties"] for name in ("audit", "row", "finding")}
    assert reports[0].keys() <= known["audit"].keys()
    assert reports[0]["cases"][0]["rows"][0].keys() <= known["row"].keys()
    assert reports[0]["findings"][0].keys() <= known["finding"].keys()
    small = reports[0] | {"cases": reports[0]["cases"][:1]}
    check([small])
    for name in SCHEMA["$defs"]["audit"]["required"]:
        with pytest.raises(jsonschema.ValidationError):
            check([{key: value for key, value in small.items() if key != name}])
    with pytest.raises(jsonschema.ValidationError):
        check([small | {"verdict": "fine"}])
    with pytest.raises(jsonschema.ValidationError):
        check([small | {"cause": small["cause"] | {"code": "X1"}}])


def test_markdown_says_the_verdict_first_and_at_most_ten_rows(reports, comparison):
    of_norms = [reports[0] | {"operation": "rms_norm", "verdict": "stock"}]
    assert "as good as the stock recipe, above the floor: " in audit_markdown(of_norms)
    text = audit_markdown([reports[0]])
    lines = text.splitlines()
    assert lines[0].startswith("### ✗ DEFECT: `")
    assert f"**Cause** {reports[0]['cause']['code']}: " in text
    rows = [line for line in lines if line.startswith("|")]
    assert 3 <= len(rows) <= MOST_ROWS + 2
    assert len({line.count("|") - line.count(r"\|") for line in rows}) == 1
    at = lines.index("<details>")
    assert lines[at + 1].startswith("<summary>smallest input: ")
    program = "\n".join(lines[lines.index("```python") + 1 : lines.index("```", at + 4)])
    assert program == reports[0]["script"].rstrip("\n")
    both = audit_markdown([reports[0]], [comparison])
    assert sum(line.startswith("|") for line in both.splitlines()) <= MOST_ROWS + 4
    assert "**✗ WORSE " in both
    assert comparison_markdown([comparison]).startswith("**✗ WORSE ")
    assert audit_markdown(reports).count("### ") == 3


def test_names_are_no_markup(reports):
    text = audit_markdown([reports[1] | {"target": EVIL}])
    assert "\x1b" not in text
    assert "<script>" not in text.partition("\n")[2]  # in the first line it stands in code
    assert "\n# h" not in text
    shown = escaped(EVIL)
    for sign in "|`*_[]#@<>":
        assert sign not in shown.replace(f"\\{sign}", "")
    assert text.startswith("### ! ERROR: ``a|b`c")  # a fence longer than what it holds
    odd = audit_markdown([reports[0] | {"script": "x = '```'\n"}])
    assert "\n````python\nx = '```'\n````\n" in odd


def test_junit_counts_what_it_holds(reports, comparison):
    text = audit_junit([*reports, reports[1] | {"target": EVIL}], [comparison])
    top = ElementTree.fromstring(text)
    suites = top.findall("testsuite")
    assert len(suites) == 5
    for suite in suites:
        assert int(suite.get("tests")) == len(suite.findall("testcase"))
        for kind, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert int(suite.get(name)) == len(suite.findall(f"testcase/{kind}"))
    defect, failed, sound, _, compared = suites
    assert int(defect.get("failures")) >= 2
    assert defect.find("properties/property[@name='verdict']").get("value") == "defect"
    assert defect.find("properties/property[@name='code']").get("value").startswith("HU")
    assert defect.find("testcase[@name='verdict']/failure").text.endswith("\n") is False
    assert int(failed.get("errors")) >= 1
    assert int(failed.get("failures")) == int(sound.get("failures")) == 0
    assert compared.find("testcase/failure") is not None
    figures = defect.findall("testcase/properties/property")
    assert any(figure.get("name") == "O error: times_stock" for figure in figures)


def test_the_command_writes_compares_and_exits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_kernels(tmp_path)
    small = ["--shapes", "1,4,64,8", "--in-process", "--forward"]
    assert main(["audit", "good.py:attention", *small, "--json", "good.json"]) == 0
    files = ["--markdown", "m.md", "--junit", "j.xml", "--json", "bad.json"]
    code = main(["audit", "bad.py:attention", *small, "--against", "good.json", *files])
    assert code == 5
    out = capsys.readouterr().out
    assert "✗ WORSE bad.py:attention against good.py:attention" in out
    (plain,) = json.loads((tmp_path / "bad.json").read_text())
    check([plain])
    assert plain["against"]["change"] == "worse"
    assert "WORSE" in (tmp_path / "m.md").read_text()
    ElementTree.parse(tmp_path / "j.xml")
    assert main(["audit", "good.json", "bad.json", "--markdown", "m.md"]) == 5
    assert (tmp_path / "m.md").read_text().startswith("**✗ WORSE")
    assert main(["audit", "bad.json", "good.json", "--json", "-"]) == 0
    capsys.readouterr()
    assert main(["audit", "good.json", "good.json"]) == 0
    assert "● SAME" in capsys.readouterr().out
    assert main(["audit", "good.json"]) == 2
    assert "accepted are two" in capsys.readouterr().err
    better = ["audit", "good.py:attention", *small, "--against", "bad.py:attention"]
    assert main(better) == 0
    assert "✓ BETTER" in capsys.readouterr().out
