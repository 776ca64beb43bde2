"""The ledger as a document: every claim with its verdict, interval, rule, and the rule's history.

`halfulp claims --json claims.json && python -m benchmarks.ledger_table claims.json` prints what
docs/ledger.md holds; a test keeps its claims, rules and histories equal to the code's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfulp.report.ledger_page import counts

HEAD = """# The claims ledger

Every claim of Qiu & Yao (A, arXiv 2510.04212), Golden et al. (B, arXiv 2405.02803),
FlashAttention-1 (C) and this project (D), with a verdict that is computed from fresh measurements
by the rule below the table; none is typed in. `halfulp claims` measures all of them again,
`halfulp claims A6` one, `halfulp figures --paper A --out DIR` draws the figures of a paper. At
reduced scale means smaller than the paper's set-up, with altered arithmetic coarser: an O of 1 or 2
mantissa bits.

Measured on {machine}. {counts}.

| id | claim | in the paper | verdict | 95 % interval (n) |
|---|---|---|---|---|
"""
MOST = 2  # intervals of a claim in the table


def ledger_document(verdicts: Sequence[Mapping[str, Any]], machine: str) -> str:
    """Return the document of verdicts in their JSON form."""
    said = counts(verdicts)
    lines = [HEAD.format(machine=machine, counts=said[:1].upper() + said[1:])]
    for one in verdicts:
        cells = (one["id"], one["statement"], one["paper"], one["verdict"], _estimates(one))
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |\n")
    lines.append("\n## Rules and what was changed in them\n\n")
    for one in verdicts:
        if one["rule"]:
            history = one["history"] or "nothing was changed in it"
            lines.append(
                f"- **{one['id']}**: {one['rule']}. *{history[:1].upper()}{history[1:]}.*\n"
            )
    return "".join(lines)


def _estimates(verdict: Mapping[str, Any]) -> str:
    shown = verdict["estimates"].split("; ")
    more = len(shown) - MOST
    return "; ".join(shown[:MOST]) + (f"; {more} more" if more > 0 else "")


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|")


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(ledger_document(found, sys.argv[2] if len(sys.argv) > 2 else "this machine"), end="")
