"""How many planted faults the audit of operations catches, and how often it cries wolf, over many
seeds.

usage: python -m benchmarks.operation_rates [--seeds 20] [--first 0] [--op NAME ...] [--json FILE]

Every kernel of tests/operations/zoo_operations.py and every built-in target of an operation is
audited at every seed. A fault is caught when the verdict is `defect`; a kernel without one raises a
false alarm when it is. The exit code is 1 where a fault was missed or an alarm was false.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.operations.zoo_operations import EXPECTED_DEFECTS, KERNELS

from halfulp.audit import audit
from halfulp.operations import operation_named, operation_names


def audited(seed: int, wanted: list[str]) -> list[dict[str, Any]]:
    """The verdict on every kernel of these operations at one seed."""
    chosen = [(k.op, k.name, k.fn, k.faulty) for k in KERNELS if k.op in wanted]
    for op in wanted:
        for target in operation_named(op).targets:
            faulty = (op, target.name) in EXPECTED_DEFECTS
            chosen.append((op, f"built-in {target.name}", target.name, faulty))
    rows = []
    for op, name, fn, faulty in chosen:
        report = audit(fn, op=op, seed=seed, explain=False)
        rows.append(
            {
                "op": op,
                "kernel": name,
                "faulty": faulty,
                "seed": seed,
                "verdict": report.verdict,
                "reason": report.reason,
            }
        )
    return rows


def main() -> None:
    """Audit, count, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20, help="seeds of the probe inputs")
    parser.add_argument("--first", type=int, default=0, help="the first of these seeds")
    parser.add_argument("--op", action="append", help="one operation alone, and again for another")
    parser.add_argument("--json", type=Path, help="also write every verdict to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = options.op or operation_names()
    rows: list[dict[str, Any]] = []
    seeds = range(options.first, options.first + options.seeds)
    for seed in track(seeds, description="seeds", console=Console(stderr=True)):
        rows += audited(seed, wanted)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    table = Table("operation", "kernel", "planted", "alarms", "verdicts")
    missed = false = 0
    for op, name in dict.fromkeys((row["op"], row["kernel"]) for row in rows):
        own = [row for row in rows if (row["op"], row["kernel"]) == (op, name)]
        alarms = sum(row["verdict"] == "defect" for row in own)
        faulty = own[0]["faulty"]
        missed += faulty and alarms < len(own)
        false += not faulty and alarms > 0
        verdicts = ", ".join(sorted({row["verdict"] for row in own}))
        table.add_row(op, name, "fault" if faulty else "", f"{alarms} of {len(own)}", verdicts)
    console = Console()
    console.print(table)
    faults = {(row["op"], row["kernel"]) for row in rows if row["faulty"]}
    others = {(row["op"], row["kernel"]) for row in rows if not row["faulty"]}
    console.print(
        f"{options.seeds} seeds: of {len(faults)} faults {missed} missed on some seed; of"
        f" {len(others)} kernels without one {false} raised an alarm on some seed"
    )
    sys.exit(int(bool(missed or false)))


if __name__ == "__main__":
    main()
