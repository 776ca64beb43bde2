"""The browser that several tests of pages share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    browsers = pytest.importorskip("tests.report.test_browser")
    with browsers.sync_api.sync_playwright() as playwright:
        # without its sandbox, which a container does not let it have
        started = playwright.chromium.launch(executable_path=browsers.FOUND, args=["--no-sandbox"])
        yield started
        started.close()
