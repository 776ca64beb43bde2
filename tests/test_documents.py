"""The documents' Python runs as written and prints what they quote, and the files and commands that
they name exist.
"""

import re
from pathlib import Path

import pytest

from halfulp.cli.entry import COMMANDS
from halfulp.papers.ledger import CLAIMS
from halfulp.runs.threads import one_thread
from tests.quotations import Page, pages

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/attention.md")
WITH_LINKS = (
    *DOCUMENTS,
    "docs/transformers.md",
    "docs/operations.md",
    "docs/reconstruct.md",
    "docs/unseen.md",
    "docs/your_model.md",
    "docs/clusters.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "docs/log.md",
    "native/README.md",
)


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", pages())
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_python_runs_as_written_and_prints_what_is_quoted(name, monkeypatch, caplog):
    """What holds a page is said in tests/quotations.py."""
    for package in ("transformers", "diffusers"):
        if re.search(rf"^(from|import) {package}\b", text(name), re.MULTILINE):
            pytest.importorskip(package)
    monkeypatch.setenv("COLUMNS", "120")
    with one_thread():
        page = Page(text(name)).read()
    assert not page.wrong, "\n".join(page.wrong)
    if name in DOCUMENTS:
        assert "cpu runs" in page.printed_by_all or "torch runs" in page.printed_by_all
    for step in re.findall(r"logged at step (\d+)", text(name)):  # another machine's is near
        logged = re.search(r"step (\d+), ", caplog.text)
        assert logged, caplog.text
        assert abs(int(logged[1]) - int(step)) <= 100


PRINTS = "```python\nprint('1.5 b')\n```\n"
ABOVE, ASIDE = (
    f"<!-- output of the program above{aside} -->\n" for aside in ("", ", numbers aside")
)
LISTED = "<!-- output of: halfulp ls formats -->\n"
WORDS = "<!-- in the words of: src/halfulp/isolate/result.py -->\n"


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("```python\nprint('a b c')  # prints a ... c\n```\n", 0),
        ("```python\nprint('a b c')  # prints a ... d\n```\n", 1),
        (f"{PRINTS}{ABOVE}```\n1.5 b\n```\n", 0),
        (f"{PRINTS}{ABOVE}```\n1.6 b\n```\n", 1),
        (f"{PRINTS}{ASIDE}> 1.6\n> b\n", 0),
        (f"{PRINTS}{ASIDE}> 1.6\n> c\n", 1),
        ("```\nsomething\n```\n", 1),
        ("> something\n", 1),
        ("<!-- not output -->\n```\nsomething\n```\n", 0),
        ("<!-- not run: no GPU -->\n```python\nraise ValueError\n```\n", 0),
        (f"{LISTED}```\n...bf16 ...\n```\n", 0),
        (f"{LISTED}```\nbf61\n```\n", 1),
        (f"{WORDS}> 7 of 9 ...: found on one, confirmed on 8\n", 0),
        (f"{WORDS}> found on one, confirmed by 8\n", 1),
        ('It says "No head alarms" then.\n', 0),
        ('It says "No head leans".\n', 1),
    ],
)
def test_a_quotation_that_nothing_prints_is_found(page, wrong):
    """Planted: each of the ways to quote, true and false."""
    assert len(Page(page).read().wrong) == wrong


def test_what_differs_is_filled_in():
    page = "```python\nprint('new')\n```\n\n<!-- output of the program above -->\n> old\n\nend\n"
    assert Page(page).read().rewritten() == page.replace("old", "new")


def test_counts_of_claims_are_the_ledgers():
    of_papers, own = re.search(
        r"the papers' (\d+) claims and (\d+) of our own", text("README.md")
    ).groups()
    sources = [claim.source for claim in CLAIMS]
    assert (int(of_papers), int(own)) == (sources.count("papers"), sources.count("halfulp"))


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
