"""The documents' Python runs as written, and the files and commands that they name exist."""

import re
from pathlib import Path

import pytest

import halfulp
from halfulp.audit import Shape
from halfulp.cli.entry import COMMANDS
from halfulp.runs.threads import one_thread

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/attention.md")
WITH_LINKS = (
    *DOCUMENTS,
    "docs/transformers.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "docs/log.md",
    "native/README.md",
)


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_python_runs_as_written(name, monkeypatch, capsys):
    """One after the other, in one namespace. Audits are of a small size, which changes what they
    find, not how.
    """
    if name != "README.md":
        pytest.importorskip("transformers")
        pytest.importorskip("diffusers")
    audit = halfulp.audit
    small = (Shape(1, 8, 96, 96, 32),)
    monkeypatch.setattr(halfulp, "audit", lambda target: audit(target, shapes=small))
    blocks = re.findall(r"^```python\n(.*?)^```", text(name), re.DOTALL | re.MULTILINE)
    assert blocks
    space = {"__name__": "document"}
    with one_thread():
        for block in blocks:
            exec(compile(block, name, "exec"), space)
    said = capsys.readouterr().out
    assert "cpu runs" in said or "torch runs" in said


@pytest.mark.parametrize("name", WITH_LINKS)
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#:]+)\)", text(name))
    missing = [link for link in links if not ((ROOT / name).parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("name", WITH_LINKS)
def test_commands_exist(name):
    named = set(re.findall(r"(?:`|^)halfulp (\w+)", text(name), re.MULTILINE))
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("name", WITH_LINKS)
def test_benchmarks_and_source_files_exist(name):
    for path in re.findall(r"`((?:benchmarks|tests|src|native|docs)/[\w./]+)`", text(name)):
        assert (ROOT / path).exists(), path


def test_the_readme_names_every_command():
    assert set(COMMANDS) <= set(re.findall(r"halfulp (\w+)", text("README.md")))
