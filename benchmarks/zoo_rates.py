"""How many planted faults the audit catches, and how often it cries wolf, over many seeds.

usage: python -m benchmarks.zoo_rates [--seeds 20] [--length 256] [--processes 2] [--json FILE]

Every kernel of the defect zoo (tests/audit/zoo.py) is audited at every seed, with the quick plan
or, to be faster, the same plan at another length. A fault is caught when the verdict is `defect`; a
sound or stock kernel raises a false alarm when it is.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.audit.zoo import FAULTY, SOUND

from halfulp.audit import Shape, audit


def audit_zoo(seed: int, length: int) -> list[dict[str, object]]:
    """The verdict on every kernel at one seed; references are computed once for all of them."""
    torch.set_num_threads(1)
    shapes = () if length == Shape().n_key else (replace(Shape(), n_query=length, n_key=length),)
    rows: list[dict[str, object]] = []
    for kernel in (*FAULTY, *SOUND):
        report = audit(kernel.fn, seed=seed, shapes=shapes, explain=False)
        cause = report.cause.name if report.cause else ""
        faulty = kernel in FAULTY
        rows.append(
            {
                "kernel": kernel.name,
                "faulty": faulty,
                "seed": seed,
                "verdict": report.verdict,
                "cause": cause,
                "reason": report.reason,
                "tests": report.tests,
            }
        )
    return rows


def main() -> None:
    """Audit, count, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20, help="seeds of the probe inputs")
    parser.add_argument(
        "--length", type=int, default=Shape().n_key, help="tokens of the probe inputs"
    )
    parser.add_argument("--processes", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--json", type=Path, help="also write every verdict to this file")
    options = parser.parse_args()
    start = time.perf_counter()
    rows: list[dict[str, object]] = []
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        results = pool.map(audit_zoo, range(options.seeds), [options.length] * options.seeds)
        for part in track(
            results, total=options.seeds, description="seeds", console=Console(stderr=True)
        ):
            rows += part
            if options.json:  # after every seed, so that an interrupted run leaves what it has
                options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    table = Table("kernel", "planted", "alarms", "verdicts", "likeliest cause named")
    for name in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == name]
        alarms = sum(row["verdict"] == "defect" for row in own)
        verdicts = ", ".join(sorted({str(row["verdict"]) for row in own}))
        causes = [str(row["cause"]) for row in own if row["verdict"] == "defect"]
        cause = max(set(causes), key=causes.count) if causes else ""
        table.add_row(
            str(name),
            "fault" if own[0]["faulty"] else "",
            f"{alarms} of {len(own)}",
            verdicts,
            cause,
        )
    console = Console(width=150)
    console.print(table)
    for faulty, what in (
        (True, "faults caught"),
        (False, "false alarms on sound and stock kernels"),
    ):
        own = [row for row in rows if row["faulty"] is faulty]
        alarms = sum(row["verdict"] == "defect" for row in own)
        console.print(
            f"{what}: {alarms} of {len(own)} audits ({alarms / max(1, len(own)):.1%}),"
            f" {options.seeds} seeds"
        )
    console.print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
