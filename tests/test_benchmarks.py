"""Every command under benchmarks/ can still be started: what it imports of halfulp is there."""

import importlib
from pathlib import Path

import pytest

OTHERS = {"triton", "pychop", "qtorch", "jax", "transformers"}
"""Packages that a benchmark compares with and that nothing else needs."""

NAMES = sorted(path.stem for path in Path("benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_imported(name):
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OTHERS:
            raise
        pytest.skip(f"needs {error.name}")
