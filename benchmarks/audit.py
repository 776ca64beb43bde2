"""What a quick audit costs in processor time on one core, with the references of its inputs on disk
and without, and what --full holds in memory.

usage: python -m benchmarks.audit [--target sdpa:math] [--op attention …] [--rounds 3] [--memory]

Fresh processes, with and without the cache by turns, so that a busy spell of the machine falls on
both; their ratio is what a change is judged by, since processor time too grows on a busy machine,
and `import torch`, which is in both, what machines are compared by.
The target is PyTorch's; what its own passes cost is told beside the rest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

SECONDS, SMALL_SECONDS, GIGABYTES = 5.0, 2.0, 4.0
"""The goals: processor seconds with the references on disk of attention and of another operation,
the kernel's own not counted, and peak memory of --full.
"""


_TIMED = """
import contextlib, io, sys, time
from halfulp.targets import calling, operation_calling
spent = [0.0]
def timed(function):
    def call(*args, **options):
        before = time.process_time()
        try:
            return function(*args, **options)
        finally:
            spent[0] += time.process_time() - before
    return call
for module in (calling, operation_calling):
    module.attempted = timed(module.attempted)
    module.gradients_of = timed(module.gradients_of)
from halfulp.cli.entry import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(time.process_time() - spent[0], spent[0])
"""


def audit_seconds(target: str, op: str, cache: str) -> tuple[float, float]:
    """Processor seconds of one quick audit in a fresh process: all but the kernel's own passes,
    `import torch` included, and those.
    """
    own, kernel = map(
        float, _told(_TIMED, "audit", target, "--op", op, "--in-process", cache=cache)
    )
    return own, kernel


def import_seconds() -> float:
    """Processor seconds of `import torch` in a fresh process."""
    return float(_told("import time, torch; print(time.process_time())")[0])


def _told(code: str, *arguments: str, cache: str = "off") -> list[str]:
    settings = os.environ | {"HALFULP_CACHE": cache, "OMP_NUM_THREADS": "1"}
    # a quarter of a second: pip compiles what it installs, and Python what it imports, unless this
    # forbids it
    settings.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()


def full_gigabytes(target: str) -> float:
    """Peak memory of a full audit's lengths in a fresh process, nothing on disk."""
    code = (
        "import resource, torch; from halfulp.audit import audit; torch.set_num_threads(1);"
        f" audit({target!r}, depth='full', only=['gaussian'], explain=False);"
        " print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)"
    )
    settings = os.environ | {"HALFULP_CACHE": "off", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    """Measure and print, beside the goals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="sdpa:math", help="a kernel that costs little")
    parser.add_argument("--op", nargs="+", default=["attention"], help="what it computes")
    parser.add_argument("--rounds", type=int, default=3, help="audits of each kind")
    parser.add_argument("--memory", action="store_true", help="also --full's peak memory")
    options = parser.parse_args()
    for op in options.op:
        _measure(options.target, op, options.rounds)
    if options.memory:
        held = full_gigabytes(options.target)
        print(f"--full: {held:.1f} GB at its peak (goal {GIGABYTES:g})")


def _measure(target: str, op: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as cache:
        audit_seconds(target, op, cache)  # fills it
        runs = [
            (*audit_seconds(target, op, cache), *audit_seconds(target, op, "off"), import_seconds())
            for _ in range(rounds)
        ]
    warm, kernel, cold, _, loaded = map(statistics.median, zip(*runs, strict=True))
    beyond = [warm - loaded for warm, *_, loaded in runs]
    ratio = statistics.median(warm / cold for warm, _, cold, *_ in runs)
    goal = SECONDS if op == "attention" else SMALL_SECONDS
    print(f"quick audit of {target}, {op}, and {kernel:.1f} s of the kernel's own passes:")
    print(f"{warm:.2f} s with references on disk (goal {goal:g}), of which")
    print(f"{loaded:.2f} s is import torch; {statistics.median(beyond):.2f} beyond it,"
          f" {min(beyond):.2f} to {max(beyond):.2f}")  # fmt: skip
    print(f"{cold:.2f} s without; ratio {ratio:.2f} (medians of {rounds} rounds)", flush=True)


if __name__ == "__main__":
    main()
