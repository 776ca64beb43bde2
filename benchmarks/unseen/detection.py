"""How many faults that the audit was not written against it catches, and how many sound kernels it
accuses: the default quick audit, once each, at one seed.

usage: python -m benchmarks.unseen.detection [--set NAME] [--part I/N] [--only NAME ...]
       [--seed 0] [--json FILE]

A fault is caught when the verdict is `defect`; a kernel without one is accused when it is. --part
divides the set over processes of one thread each. Rates have 95 % intervals of Wilson.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path

import torch
from benchmarks.unseen import SETS, part_of, wilson

from halfulp.audit import audit


def main() -> None:
    """Audit, count, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", default="attention.fourth", choices=SETS)
    parser.add_argument("--part", default="1/1", help="one of N parts")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels = importlib.import_module(f"benchmarks.unseen.{options.set}")
    asked = [(f, True) for f in kernels.FAULTS] + [(f, False) for f in kernels.SOUND]
    asked = [x for x in asked if not options.only or x[0].name in options.only]
    rows = []
    for kernel, faulty in part_of(asked, options.part):
        began = time.process_time()
        row = {
            "kernel": kernel.name,
            "faulty": faulty,
            "op": getattr(kernel, "op", "attention"),
            "dtype": kernel.dtype,
        }
        try:
            report = audit(kernel.fn, op=row["op"], dtype=row["dtype"], seed=options.seed,
                           explain=False)  # fmt: skip
            row |= {"verdict": report.verdict, "reason": report.reason}
        except Exception as error:
            row |= {"verdict": "error", "reason": repr(error)[:500]}
        row["seconds"] = time.process_time() - began
        rows.append(row)
        print(f"{'fault' if faulty else 'sound'} {row['op']:20} {kernel.name:32} "
              f"{row['verdict']:14} {row['seconds']:5.1f} s  {row['reason'][:150]}",
              flush=True)  # fmt: skip
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for faulty, what in ((True, "faults caught"), (False, "sound kernels accused")):
        own = [row for row in rows if row["faulty"] is faulty]
        if own:
            found = sum(row["verdict"] == "defect" for row in own)
            low, high = wilson(found, len(own))
            print(f"{what}: {found} of {len(own)} ({100 * low:.0f} to {100 * high:.0f} %)")


if __name__ == "__main__":
    main()
