"""Peak memory of the golden value, forward and gradients, at long sequences: it must grow with N,
not with N².

Every case runs in a fresh process, which reports the largest resident set it ever had (torch itself
included) and what it had before the call. Run from the repository root:

    python benchmarks/golden_memory.py [--length N] [--dim D] [--causal] [--threads N] [--json FILE]

The target: under 2 GiB at N = 16384, d = 64, where one fp64 score matrix alone would take 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

TARGET_GIB = 2.0
CASES = {"one head": (1, 1), "4 query heads on 1 key head": (4, 1)}


def gib() -> float:
    """The largest resident set of this process so far."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / 2**20 if sys.platform != "darwin" else kib / 2**30


def child(case: str, length: int, dim: int, causal: bool, threads: int) -> dict[str, float]:
    """Run one case in this process."""
    import torch

    from halfulp import golden

    torch.set_num_threads(threads)
    heads, key_heads = CASES[case]
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(1, h, length, dim, generator=generator)
        for h in (heads, key_heads, key_heads, heads)
    )
    before, start = gib(), time.perf_counter()
    result = golden(q, k, v, do, is_causal=causal, enable_gqa=True)
    assert result.grad_key is not None
    assert result.grad_key.isfinite().all()
    return {"before_gib": before, "peak_gib": gib(), "seconds": time.perf_counter() - start}


def main() -> None:
    """Measure every case in a process of its own and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--length", type=int, default=16384, help="queries and keys (default: 16384)"
    )
    parser.add_argument("--dim", type=int, default=64, help="head dimension (default: 64)")
    parser.add_argument("--causal", action="store_true", help="causal attention")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--child", choices=list(CASES), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    for name in ("length", "dim", "threads"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} {getattr(chosen, name)}: accepted is an integer of at least 1")
    if chosen.child:
        print(
            json.dumps(
                child(chosen.child, chosen.length, chosen.dim, chosen.causal, chosen.threads)
            )
        )
        return
    figures = {}
    for case in CASES:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", case]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures[case] = json.loads(done.stdout)
    kind = "causal" if chosen.causal else "full"
    print(f"N = {chosen.length}, d = {chosen.dim}, {kind}, forward and gradients in fp64")
    for case, row in figures.items():
        verdict = "met" if row["peak_gib"] < TARGET_GIB else "missed"
        peak = f"peak {row['peak_gib']:.2f} GiB (before the call {row['before_gib']:.2f})"
        print(f"{case:28} {peak}, {row['seconds']:.0f} s")
        if chosen.length == 16384:
            print(f"{'':28} target: under {TARGET_GIB:.0f} GiB: {verdict}")
    if chosen.json:
        settings = {"length": chosen.length, "dim": chosen.dim, "causal": chosen.causal}
        chosen.json.write_text(json.dumps(settings | {"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
