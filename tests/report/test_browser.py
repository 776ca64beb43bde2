"""Pages as a browser shows them, on a phone, a tablet, a desk and on paper: nothing is clipped or
runs off, and axe-core finds nothing to complain about.

It takes a Chromium (Debian: apt-get install chromium); without one these tests are skipped.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.every_page import every_page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((path for name in BROWSERS if (path := shutil.which(name))), None)
if FOUND is None:
    pytest.skip(
        f"no browser: none of {', '.join(BROWSERS)} is on the PATH (apt-get install chromium)",
        allow_module_level=True,
    )

NAMES = ("demo", "audit", "audits", "run", "compare", "isolation", "ledger", "experiment")
WIDTHS = (390, 768, 1200)
PAPER = 688  # CSS pixels of an A4 sheet between its margins

FAULTS = """
() => {
  const faults = [];
  const wide = document.documentElement.scrollWidth - window.innerWidth;
  if (wide > 0) faults.push(`the page is ${wide} pixels too wide`);
  const named = (node) => `<${node.localName}> ${node.textContent.trim().slice(0, 40)}`;
  for (const node of document.querySelectorAll("body *")) {
    if (!node.checkVisibility({ contentVisibilityAuto: true })) continue;
    if (node.closest("svg, script")) continue;
    const box = node.getBoundingClientRect();
    if (!box.width || node.closest("pre") !== null && node.localName !== "pre") continue;
    if (box.right > window.innerWidth + 1 || box.left < -1) faults.push(`${named(node)} is off`);
    const style = getComputedStyle(node);
    const hides = style.overflowX !== "visible" && node.scrollWidth > node.clientWidth + 1;
    if (hides && !(node.localName === "pre" && node.tabIndex === 0)) {
      faults.push(`${named(node)} is cut or scrolls`);
    }
  }
  for (const svg of document.querySelectorAll("svg")) {
    if (!svg.checkVisibility({ contentVisibilityAuto: true })) continue;
    const frame = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (box.right > frame.right + 1 || box.left < frame.left - 1 || box.top < frame.top - 1 ||
          box.bottom > frame.bottom + 1) {
        faults.push(`“${text.textContent}” is cut in ${svg.getAttribute("aria-label")}`);
      }
    }
  }
  const levels = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].map(
    (heading) => Number(heading.localName[1]),
  );
  if (levels.filter((level) => level === 1).length !== 1) faults.push("not one h1");
  levels.forEach((level, i) => {
    if (i && level > levels[i - 1] + 1) faults.push(`h${level} after h${levels[i - 1]}`);
  });
  let before = null;
  for (const node of document.querySelectorAll("header > *, section > *, footer > *")) {
    const box = node.getBoundingClientRect();
    if (box.height && before && box.top < before.bottom - 1) faults.push(`${named(node)}: order`);
    if (box.height) before = box;
  }
  return faults;
}
"""

LEAD = "document.querySelector('.finding').style.cssText"
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    pages = every_page()
    assert tuple(pages) == NAMES
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@pytest.fixture
def opened(browser: Any, files: dict[str, Path]) -> Iterator[Open]:
    """Opens a page in a window of its own; an error or a refusal in its console fails the test."""
    contexts, said = [], []

    def opens(name: str, width: int = 1200, fragment: str = "", **options: Any) -> Any:
        size = {"width": width, "height": 900}
        contexts.append(browser.new_context(viewport=size, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda asked: said.extend(fetched(asked.url)))
        page.goto(files[name].as_uri() + fragment)
        return page

    yield opens
    for context in contexts:
        context.close()
    assert said == []


def fetched(address: str) -> list[str]:
    """The address of what is fetched; none where it is the page itself or lies in it."""
    return [] if address.startswith(("file:", "data:")) else [address]


def open_all(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_cut_or_runs_off(opened: Open, name: str) -> None:
    page = opened(name)
    for unfolded in (False, True):
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(FAULTS) == [], (width, unfolded)
        open_all(page)


@pytest.mark.parametrize("name", NAMES)
def test_on_paper_everything_is_there(opened: Open, name: str) -> None:
    page = opened(name, PAPER, java_script_enabled=False)
    page.emulate_media(media="print")
    assert page.evaluate(FAULTS) == []
    hidden = page.evaluate(
        "[...document.querySelectorAll('main *:not(svg *)')].filter((node) =>"
        " node.textContent.trim() && !node.checkVisibility({contentVisibilityAuto: true}))"
        ".map((node) => node.outerHTML.slice(0, 60))"
    )
    assert hidden == []


@pytest.mark.parametrize("name", NAMES)
def test_axe_finds_nothing(opened: Open, name: str) -> None:
    page = opened(name, color_scheme="light")
    open_all(page)
    # with what passes, each of thousands of nodes would be described
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    found = axe.Axe().run(page, options=options).response["violations"]
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 900})
    options["runOnly"] = ["color-contrast", "link-in-text-block"]
    found += axe.Axe().run(page, options=options).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("document.querySelector('p').style.minWidth = '3000px'", "too wide"),
        (f"{LEAD} = 'width: 9rem; overflow: auto; white-space: nowrap'", "cut"),
        ("document.querySelector('svg text').setAttribute('x', '2000')", "is cut in"),
        ("document.querySelector('h2').outerHTML = '<h4>x</h4>'", "h4 after h1"),
        ("document.querySelector('section').append(document.createElement('h1'))", "not one h1"),
        (f"{LEAD} = 'position: relative; top: -400px'", "order"),
    ],
)
def test_a_planted_fault_is_seen(opened: Open, fault: str, says: str) -> None:
    page = opened("isolation")
    page.evaluate(fault)
    assert any(says in one for one in page.evaluate(FAULTS))


def test_figures_stand_side_by_side_on_a_tablet(opened: Open) -> None:
    tops = "[...document.querySelectorAll('.figures figure')].map(f => f.offsetTop)"
    beside = [len(set(opened("run", width).evaluate(tops)[:2])) for width in WIDTHS]
    assert beside == [2, 1, 1]


def test_a_verdict_leads_to_its_details(opened: Open) -> None:
    page = opened("demo", 390)
    details = page.locator("details", has_text="sdpa:flash").first
    assert details.get_attribute("open") is None
    page.locator("table a", has_text="sdpa:flash").first.click()
    page.wait_for_function("document.querySelector('details:target').open")
    assert details.get_attribute("open") is not None
    name = details.get_attribute("id")
    assert opened("demo", 390, f"#{name}").locator("details:target[open]").count() == 1


def natural(name: str) -> list[object]:
    """What a name is sorted by: its numbers as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def rows_of(page: Any) -> list[str]:
    """The names of the rows that are shown, from top to bottom."""
    return page.evaluate(
        "[...document.querySelectorAll('[data-tools] tbody tr:not([hidden]) th')]"
        ".map((head) => [...head.childNodes].filter((node) => node.localName !== 'small')"
        ".map((node) => node.textContent).join(''))"
    )


def test_a_long_table_can_be_sorted_and_filtered(opened: Open) -> None:
    page = opened("audit")
    written = rows_of(page)
    assert len(written) == 30
    page.get_by_role("button", name="probe", exact=True).click()
    assert rows_of(page) == sorted(written, key=natural)
    ratio = page.get_by_role("button", name="× stock", exact=True)
    ratio.click()
    assert rows_of(page)[-1] == "masked_rows", "what has no number comes last"
    ratio.click()
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("× stock")
    ratio.click()
    assert rows_of(page) == written
    page.get_by_role("button", name="✗ defect").click()
    assert sorted(rows_of(page)) == ["masked_rows", "rising"]
    assert page.locator("output").first.inner_text() == "2 of 30 rows"
    page.get_by_role("button", name="✗ defect").click()
    page.get_by_role("searchbox").fill("NUMBER_7")
    assert rows_of(page) == ["probe_number_7_of_thirty"]


def test_without_a_script_every_row_is_there_and_no_dead_control(opened: Open) -> None:
    page = opened("audit", java_script_enabled=False)
    assert page.locator("tbody tr:visible").count() >= 30
    assert page.locator("button, input, select").count() == 0
