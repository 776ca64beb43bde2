"""What every test needs: one torch thread a process, the same hypothesis examples, and imports seen
from outside.
"""

import atexit
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from halfulp import native

# The same examples every time, on a slow machine too, and nothing kept between runs: a failure is
# the code's.
settings.register_profile("halfulp", derandomize=True, deadline=None, database=None)
settings.load_profile("halfulp")


# One torch thread a process, also of those that tests start: the same bits under any number of
# workers, and no two workers on one core. A test that needs more sets them itself; the next one
# starts from one again.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


# What audits are held against is computed once a test run, by whichever process comes first, and
# nothing of the user's is read or written.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["HALFULP_CACHE"] = _cache = tempfile.mkdtemp(prefix="halfulp-cache-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="every case of tests that run long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is `thorough` the first cases alone, where not all of them are asked for."""
    if config.getoption("--thorough"):
        return
    seen: Counter[str] = Counter()
    left = []
    for item in items:
        if (mark := item.get_closest_marker("thorough")) is not None:
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > mark.kwargs["keep"]:
                left.append(item)
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough(keep): so many of its cases run by default")
    if native.missing():  # said once a process, whichever test comes first
        config.addinivalue_line(
            "filterwarnings", "ignore:halfulp.attention runs in plain PyTorch:RuntimeWarning"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What imports and collection make stays to the end: looking through millions of objects for
    garbage while they grow, and once more at each full collection later, finds none.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits without the growing lengths, which cost a second: for what the probes tell alone."""
    from halfulp.audit import planning
    from halfulp.audit import run as audit_run

    def short(*asked: Any) -> planning.Plan:
        return replace(planning.plan(*asked), lengths=())

    monkeypatch.setattr(audit_run, "plan", short)


@functools.cache
def _added_modules(package: str, folder: Path | None) -> frozenset[str]:
    code = (
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        f"from {package} import *\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    environment = os.environ | ({"PYTHONPATH": str(folder)} if folder else {})
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return frozenset(json.loads(done.stdout))


@pytest.fixture
def added_modules() -> Callable[..., frozenset[str]]:
    """Tell which modules `from package import *` adds to `import torch`'s, in a fresh process."""

    def added(package: str, folder: Path | None = None) -> frozenset[str]:
        return _added_modules(package, folder)

    return added
