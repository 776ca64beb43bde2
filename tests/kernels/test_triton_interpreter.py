"""Runs `triton_interpreted*.py` in a process of their own: the interpreter must not leak into other
tests.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_kernel_against_the_emulator() -> None:
    files = sorted(map(str, Path(__file__).parent.glob("triton_interpreted*.py")))
    assert len(files) == 2
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout
    assert "skipped" not in done.stdout
