"""What a quick audit costs in processor time on one core, with the references of its inputs on disk
and without, and what --full holds in memory.

usage: python -m benchmarks.audit [--target sdpa:math] [--rounds 3] [--memory]

Fresh processes, with and without the cache by turns, so that a busy spell of the machine falls on
both; their ratio is what a change is judged by, since processor time too grows on a busy machine.
The target is PyTorch's: what a kernel itself costs comes on top.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

SECONDS, GIGABYTES = 5.0, 4.0
"""The goals: processor seconds with the references on disk, and peak memory of --full."""


def audit_seconds(target: str, cache: str) -> float:
    """Processor seconds of one quick audit in a fresh process, `import torch` included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "halfulp", "audit", target, "--in-process"]
    settings = os.environ | {"HALFULP_CACHE": cache, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=settings, stdout=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
    parser.add_argument("--rounds", type=int, default=3, help="audits of each kind")
    parser.add_argument("--memory", action="store_true", help="also --full's peak memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        audit_seconds(options.target, cache)  # fills it
        pairs = [
            (audit_seconds(options.target, cache), audit_seconds(options.target, "off"))
            for _ in range(options.rounds)
        ]
    warm, cold = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(w / c for w, c in pairs)
    print(
        f"quick audit of {options.target}: {warm:.1f} s with references on disk (goal {SECONDS:g})"
    )
    print(f"{cold:.1f} s without; ratio {ratio:.2f} (median of {options.rounds} pairs)")
    if options.memory:
        held = full_gigabytes(options.target)
        print(f"--full: {held:.1f} GB at its peak (goal {GIGABYTES:g})")


if __name__ == "__main__":
    main()
