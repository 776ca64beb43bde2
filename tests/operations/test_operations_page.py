"""docs/operations.md is enough to add an operation, and says what there is."""

import re
from pathlib import Path

import pytest
import torch

from halfulp.audit import audit
from halfulp.operations import operation_named, operation_names

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.fixture
def softplus(tmp_path, monkeypatch):
    """The folder that the page describes, made of its own blocks."""
    blocks = re.findall(
        r"^`softplus/(\w+\.py)`[^\n]*\n(?:[^\n]+\n)*\n```python\n(.*?)^```", PAGE, re.S | re.M
    )
    assert [name for name, _ in blocks] == [
        "definition.py",
        "recipes.py",
        "probes.py",
        "targets.py",
    ]
    folder = tmp_path / "softplus"
    folder.mkdir()
    for name, text in blocks:
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return folder


def test_softplus_is_added_from_the_page_alone(softplus):
    assert audit("torch", op="./softplus").verdict == "sound"
    assert audit("recipe:floor", op="./softplus").verdict == "sound"

    def loses_the_tail(input):
        return torch.log(1 + input.exp())

    report = audit(loses_the_tail, op="./softplus")
    assert report.verdict == "defect"
    assert {f.case.probe for f in report.findings if f.case} >= {"negative", "large"}
    overflows = audit(loses_the_tail, op="./softplus", only=["large"])
    assert "is not finite in" in overflows.reason
    assert "spread as" not in overflows.reason, "NaN has no size that another value would make"


def test_softplus_runs_in_a_process_of_its_own(softplus):
    assert audit("torch", op="./softplus", isolate=True).verdict == "sound"


def test_a_folder_that_is_not_whole_is_said(softplus):
    (softplus / "recipes.py").write_text("STOCK = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"recipes\.py defines no FLOOR"):
        operation_named(str(softplus))
    (softplus / "recipes.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"recipes\.py does not load: ModuleNotFoundError"):
        operation_named(str(softplus))


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("definition", '"T D")', '"T X")', r"shape='T X': 'X' is no symbol; accepted are T, D"),
        ("definition", '"output": rows', '"out": rows', r"define gives out; expected output too"),
        (
            "probes",
            '{"input": torch',
            '{"inp": torch',
            r"draws no input; expected input of \[24, 64",
        ),
        ("probes", '"T D"', '"T"', r"draws input of \[24\]; expected input of \[24, 64\], T D"),
    ],
)
def test_files_that_do_not_fit_together_are_said(softplus, file, old, new, says):
    path = softplus / f"{file}.py"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        audit("torch", op=str(softplus), explain=False)


def test_every_operation_and_probe_is_on_the_page():
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in PAGE.splitlines()]
    for name in operation_names():
        operation = operation_named(name)
        targets = ", ".join(f"`{target.name}`" for target in operation.targets)
        assert [f"`{name}`", f"`{operation.signature}`", operation.stock.name, targets] in rows
        for probe in operation.probes:
            assert [name, probe.name, probe.exposes, probe.source] in rows, probe.name
