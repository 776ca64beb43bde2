"""The files that an audit writes, checked before the work and written as it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfulp import __version__
from halfulp.cli.shell import STDOUT, check_files, typed_command, write_each


@dataclass(frozen=True)
class AuditFiles:
    """Where to write what.

    Args:
        json: File to write every measured figure to; - prints them instead of the tables.
        html: File to write a page to.
        markdown: File to write a summary for a pull request to.
        junit: File to write JUnit's XML to.
        repro: Folder to write a program to for every defect: the smallest input that shows it.
    """

    json: Path | None = None
    html: Path | None = None
    markdown: Path | None = None
    junit: Path | None = None
    repro: Path | None = None

    def check(self) -> None:
        """Raise ValueError for a file that could not be written."""
        from halfulp.runs.folder import check_folder

        check_files(self.json, html=self.html, markdown=self.markdown, junit=self.junit)
        check_folder("repro", self.repro)

    def write(self, plain: Sequence[dict[str, Any]], comparisons: Sequence[dict[str, Any]]) -> None:
        """Write every file but the JSON, which `shell.tell` writes or prints."""
        from halfulp.report.audit_junit import audit_junit
        from halfulp.report.audit_markdown import audit_markdown, comparison_markdown
        from halfulp.runs.folder import write_text

        def markdown() -> None:
            if self.markdown is not None and (plain or comparisons):
                alone = comparison_markdown(comparisons)
                text = audit_markdown(plain, comparisons) if plain else alone
                write_text(self.markdown, text)

        def junit() -> None:
            if self.junit is not None and (plain or comparisons):
                write_text(self.junit, audit_junit(plain, comparisons))

        write_each(lambda: self._page(plain), markdown, junit)

    def write_so_far(
        self, plain: Sequence[dict[str, Any]], comparisons: Sequence[dict[str, Any]]
    ) -> None:
        """Write what is done so far; where that cannot be, the last time says so."""
        from halfulp.runs.folder import write_json

        json = None if self.json == STDOUT else self.json
        with suppress(OSError):
            write_each(
                lambda: None if json is None else write_json(json, plain),
                lambda: self.write(plain, comparisons),
            )

    def _page(self, plain: Sequence[dict[str, Any]]) -> None:
        from halfulp.report.audit_page import audit_page
        from halfulp.runs.folder import write_text

        if self.html is None or not plain:
            return
        versions = ", ".join(f"{name} {version}" for name, version in plain[0]["versions"].items())
        page = audit_page(plain, typed_command(), meta=f"halfulp {__version__}, {versions}")
        write_text(self.html, page)
