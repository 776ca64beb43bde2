"""Commands in forks of this process, which itself never trains: what an attack is made of, and how
a command may end.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfulp import cli
from halfulp.training import loop  # noqa: F401 - imported once, here, and not in every fork

SECONDS = 120  # after which an attempt counts as waiting without end
SMALL = ["--set", "workload.batch=2", "--set", "workload.tokens=8", "--set", "workload.width=8"]
SMALL += ["--set", "workload.constant=2", "--steps", "12", "--set", "metrics_every=2"]
SMALL += ["--set", "checkpoint_every=4", "--set", "keep=none", "--attention", "torch:math"]
PICTURES = ["--steps", "2", "--set", "workload.width=16", "--set", "workload.layers=1"]
PICTURES += ["--set", "batch=2", "--set", "workload.count=4", "--data", "shapes"]
KERNEL = "from pathlib import Path\nPath(__file__).with_suffix('.ran').write_text('ran')\n"
HOSTILE = (
    "<script>alert(1)</script>",
    "</title><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)",
    '" autofocus onfocus="alert(1)',
    "]]><svg onload=alert(1)>",
    "</style><script>",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% for x in y %}",
    "\x1b[2J\x1b]0;title\x07\x1b[31m",
    "\x9b31m\x9d0;x\x9c",
    "[red]bold[/red][link=http://x]y[/link] [/]",
    "\u202etxt.exe\u2066\u2069",
    "\udc80\ud800",
    '"""\nimport os; os.abort()\n"""',
    "'''\nimport os\n'''\\",
    "$(id)`id`; rm -rf ~\r\n",
    "\x00\x01\x08\x7f",
    "&lt;script&gt;&#60;b&#62;",
    "<!-- --!><b>",
    "é\u0301" * 30 + "\u2028\u2029",
)
"""Texts that a page, a terminal or a program could obey."""


@dataclass(frozen=True)
class Ended:
    """What became of a fork."""

    code: int  # exit code, or minus the signal that ended it
    out: str
    err: str


def forked(function: Callable[[], int], folder: Path) -> tuple[int, Path]:
    """Start a function in a fork with its output in files of a folder; return its pid and them."""
    files = Path(tempfile.mkdtemp(dir=folder))
    pid = os.fork()
    if pid:
        return pid, files
    try:
        for number in (1, 2):
            os.dup2(os.open(files / str(number), os.O_WRONLY | os.O_CREAT), number)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", errors="replace") for n in (1, 2))
        signal.alarm(SECONDS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = function()
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def awaited(pid: int, files: Path) -> Ended:
    """What became of a fork, when it has ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = [(files / n).read_text(errors="replace") for n in "12"]
    shutil.rmtree(files)
    return Ended(code, *texts)


def run(arguments: Sequence[object], folder: Path) -> Ended:
    """A command of halfulp's in a fork."""
    return awaited(*forked(lambda: cli.main([str(a) for a in arguments]), folder))


def state_of(folder: Path) -> str:
    """A hash of the last weights and of all lines of metrics, but for what a clock says."""
    last = folder / "checkpoints" / "step-12" / "model.safetensors"
    lines = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        lines.append({k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")})
    return hashlib.sha256(last.read_bytes() + json.dumps(lines).encode()).hexdigest()


def same(folder: Path, expected: str) -> bool:
    """Whether a run ended as the one that nothing happened to."""
    try:
        return state_of(folder) == expected
    except (OSError, ValueError):
        return False


def bad_end(ended: Ended) -> bool:
    """Whether a command ended otherwise than in lines of its own with a code that says whose fault
    it is.
    """
    lines = ended.err.splitlines()
    clean = all(line.startswith("halfulp: ") for line in lines)
    return ended.code not in (0, 1, 2, 3) or not clean or "Traceback" in ended.out
