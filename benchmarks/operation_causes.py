"""How often the audit names the right cause of an operation's fault, or its place.

    python -m benchmarks.operation_causes [--set MODULE] [--op NAME ...] [--only NAME ...]
        [--part I/N] [--json FILE]

Without --set the faults of the zoo, tests/operations/; what is right for each of them is
`zoo_causes.RIGHT`. A set is a module with `FAULTS`, a tuple of `unseen.OperationFault`:
`--set benchmarks.unseen.operations.first`. What counts as right is said in
`unseen.operation_verdict`. Faults that the audit does not see are counted apart. Rates have 95 %
intervals of Wilson.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.unseen import OperationFault, operation_verdict, part_of, told

from halfulp.audit import audit


def judged(fault: OperationFault) -> dict[str, Any]:
    """What the audit says of one fault, and whether that is right."""
    began = time.process_time()
    report = audit(fault.fn, op=fault.op, dtype=fault.dtype)
    said = [(c.key, text) for c, text in zip(report.causes, report.evidence, strict=True)]
    seen = report.verdict == "defect"
    how = operation_verdict(said, fault) if seen else "not seen"
    seconds = time.process_time() - began
    return {"op": fault.op, "fault": fault.name, "verdict": how, "said": said, "seconds": seconds,
            "what": sorted(fault.what), "where": fault.where}  # fmt: skip


def main() -> None:
    """Audit, judge, count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", default="benchmarks.zoo_causes", help="a module with FAULTS")
    parser.add_argument("--op", nargs="*", help="operations; all where not given")
    parser.add_argument("--only", nargs="*", help="faults by name")
    parser.add_argument("--part", default="1/1", help="one of N parts")
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    asked = [
        fault
        for fault in importlib.import_module(options.set).FAULTS
        if not (options.only and fault.name not in options.only)
        and not (options.op and fault.op not in options.op)
    ]
    for fault in part_of(asked, options.part):
        rows.append(row := judged(fault))
        told_first = "; ".join(f"{key}: {text}" for key, text in row["said"]) or "nothing"
        print(f"{row['verdict']:8} {fault.op} {fault.name} ({row['seconds']:.1f} s)", flush=True)
        print(f"         {told_first}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    seen = [row for row in rows if row["verdict"] != "not seen"]
    for op in dict.fromkeys(row["op"] for row in seen):
        print(told([row for row in seen if row["op"] == op], op))
    if seen:
        print(told(seen, "all"))
        seconds = sorted(row["seconds"] for row in seen)
        print(
            f"processor time each: median {seconds[len(seen) // 2]:.1f} s, most {seconds[-1]:.1f} s"
        )
    print(f"not seen by the audit: {len(rows) - len(seen)} of {len(rows)}")


if __name__ == "__main__":
    main()
