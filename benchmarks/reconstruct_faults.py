"""How often `halfulp reconstruct` names the right cause of a fault it was not written against.

    python -m benchmarks.reconstruct_faults [--set first|second|…|table|wrapped]
        [--only NAME] [--part I/N] [--json FILE]

Every set was frozen before the search saw it (docs/unseen.md has its first figures, docs/log.md the
later ones), but for `table` and `wrapped`, which it was developed on; what counts as right is said
in `unseen.verdict`. Rates have 95 % intervals of Wilson.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path

import torch
from benchmarks.unseen import SETS as UNSEEN
from benchmarks.unseen import part_of, told, verdict

from halfulp.reconstruct import reconstruct

SETS = {
    **{x.removeprefix("attention."): f"unseen.{x}" for x in UNSEEN if x.startswith("attention.")},
    "table": "developed_table",
    "drawn": "drawn_faults",
    "wrapped": "wrapped_faults",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", default="first", choices=tuple(SETS))
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--part", default="1/1", help="one of N parts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels = importlib.import_module(f"benchmarks.{SETS[options.set]}")
    every = [*kernels.FAULTS, *kernels.SOUND]
    names = [fault.name for fault in every]
    if unknown := sorted(set(options.only or ()) - set(names)):
        parser.error(f"--only {unknown[0]}: accepted are {', '.join(names)}")
    rows = []
    asked = [fault for fault in every if not options.only or fault.name in options.only]
    for fault in part_of(asked, options.part):
        began = time.process_time()
        found = reconstruct(fault.fn, dtype=fault.dtype)
        how, named = verdict(found, fault)
        row = {"fault": fault.name, "dtype": fault.dtype, "verdict": how, "named": named,
               "right": sorted(fault.right), "seconds": time.process_time() - began,
               "text": found.sentence,
               "least": min((e.share for e in found.explained), default=0.0)}  # fmt: skip
        rows.append(row)
        print(f"{how:6} {fault.name:28} {', '.join(named) or 'nothing'} "
              f"({row['seconds']:.1f} s)", flush=True)  # fmt: skip
        if how != "right" or not fault.right:
            print(f"       {found.sentence}", flush=True)
            for n in found.causes:
                print(f"       {n.cause.key}: {n.text} × {n.harm:.2f}", flush=True)
    whole = [r["least"] > 0.95 for r in rows if r["right"]]
    print(f"faults of which every result is explained by 95 %: {sum(whole)} of {len(whole)}")
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        some = [r for r in rows if r["dtype"] == dtype and r["right"]]
        if some:
            print(told(some, f"faults in {dtype}"))
    for some, what in (([r for r in rows if r["right"]], "faults"),
                       ([r for r in rows if not r["right"]], "sound kernels")):  # fmt: skip
        if some:
            print(told(some, what))
    seconds = sorted(r["seconds"] for r in rows)
    print(f"processor time each: median {seconds[len(rows) // 2]:.1f} s, most {seconds[-1]:.1f} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
