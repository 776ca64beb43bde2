"""A run folder may name code, but naming is not running: only what the user named is imported.

A plan that was read from a folder may say "file.py:function" or "module:function". Whoever sent the
folder wrote that, so going on with its run waits for the user's word, and looking at it does
without.
"""

from __future__ import annotations

from pathlib import Path

from halfulp.targets import is_code
from halfulp.training.attention import AttentionPlan


def named_code(plan: AttentionPlan) -> list[str]:
    """Return the choices of a plan that name a module or file."""
    return [a.attention for a in plan.assignments if is_code(a.attention)]


def check_trust(plan: AttentionPlan, folder: Path, trust: bool) -> None:
    """Raise ValueError for a plan from a folder that names code, unless the user trusts it."""
    if not trust and (named := named_code(plan)):
        raise ValueError(
            f"run={str(folder)!r}: its run.json names code, {', '.join(map(repr, named))}, which"
            " would be run; accepted with --trust (trust=True)"
        )
