"""What two runs differ in, in words and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from halfulp.diff.paragraphs import chance_text, drawn, spread, wrapped
from halfulp.diff.two_runs import Drift, RunDifference
from halfulp.diff.wording import sections as sections_of_pass
from halfulp.diff.wording import text as difference_text
from halfulp.diff.wording import without_verdict
from halfulp.runs.results import Table

MODULES = 8
SHOWN = 6  # checkpoints


def text(found: RunDifference, width: int) -> str:
    """The report as text."""
    a, b = found.names
    differ = {
        "identical": "are identical",
        "beyond rounding": "differ by more than rounding",
        "within rounding": "differ within rounding",
        "unknown": "differ; whether by more than rounding is unknown",
    }[found.verdict]
    chance = "" if found.p is None else f", p = {chance_text(found.p)}"
    said = [wrapped(f"halfulp.diff: {a} and {b} {differ}{chance}: {found.why}.", width), ""]
    said += [_listed("Settings", found.settings, "none differs", width)]
    said += [_listed("Versions and machine", found.environments, "the same", width), ""]
    if found.curves:
        curves = _curves(found)
        said += [f"{drawn(curves, width)}\n\n{wrapped(curves.caption, width)}", ""]
    if found.drifts:
        said += [_drifts(found, width), ""]
    if found.same_weights is not None:
        said += [f"The same weights ({a}'s), each run's arithmetic:"]
        said += [difference_text(found.same_weights, width), ""]
    if found.own_weights is not None:
        said += ["Each run's own weights, the same batches:"]
        said += [without_verdict(found.own_weights, width), ""]
    said += [wrapped(note, width) for note in found.notes]
    return "\n".join(said).rstrip()


def _listed(what: str, changes: Sequence[str], none: str, width: int) -> str:
    return wrapped(f"{what}: {'; '.join(changes) or none}.", width)


def sections(found: RunDifference) -> dict[str, list[Table]]:
    """Everything that it has in tables, below their headings."""
    asked = [("settings", x) for x in found.settings]
    asked += [("versions and machine", x) for x in found.environments]
    shown = [Table("What differs", ("of", "change"), tuple(asked), "", ""), _curves(found)]
    if found.drifts:
        shown += [_weights(found, found.drifts), _modules(found.drifts[-1])]
    sides = {
        "The same weights, each run's arithmetic": found.same_weights,
        "Each run's own weights": found.own_weights,
    }
    passes = {
        heading: [table for tables in sections_of_pass(one).values() for table in tables]
        for heading, one in sides.items()
        if one is not None
    }
    return {"What both runs wrote down": shown} | passes


def _curves(found: RunDifference) -> Table:
    lines: list[tuple[str, ...]] = []
    for curve in found.curves:
        step, a, b = curve.last
        never = "never"
        lines.append((
            curve.name, str(curve.lines), never if curve.first is None else str(curve.first),
            never if curve.beyond is None else str(curve.beyond), str(step), _value(a), _value(b),
        ))  # fmt: skip
    legend = (
        "first bit: the first common line that is not the same to the bit; beyond rounding: the"
        f" first that differs by more than {found.tolerance:.1g} of itself, what roundings to"
        f" {found.formats} in one pass may make. Later steps part from rounding alone, too:"
        " training amplifies it."
    )
    columns = ("curve", "lines", "first bit", "beyond rounding", "last step", "A", "B")
    return Table("Curves", columns, tuple(lines), legend, "")


def _value(x: float) -> str:
    return "not finite" if not math.isfinite(x) else f"{x:.6g}"


def _drifts(found: RunDifference, width: int) -> str:
    said = [drawn(_weights(found, spread(found.drifts, SHOWN)), width)]
    modules = _modules(found.drifts[-1])
    if modules.rows:
        more = len(modules.rows) - MODULES
        said += ["", drawn(replace(modules, rows=modules.rows[:MODULES]), width)]
        said += (
            [f"and {more} modules that parted less; --json (to_json()) has all"] if more > 0 else []
        )
    return "\n".join(said)


def _weights(found: RunDifference, drifts: Sequence[Drift]) -> Table:
    ways = {
        str(x.step): (x.gap, _share(x.gap.norm / x.travelled) if x.travelled else "-")
        for x in drifts
    }
    rows = tuple(
        (label, f"{gap.norm:.3g}", way, f"{gap.largest:.3g}", f"{gap.wasserstein:.3g}")
        for label, (gap, way) in (ways | {k: (x, "") for k, x in found.beside.items()}).items()
    )
    columns = ("weights at step", "‖B − A‖", "of A's way", "largest", "Wasserstein")
    return Table("Weights", columns, rows, "", "")


def _modules(drift: Drift) -> Table:
    """Those that parted."""
    rows = tuple(
        (
            module.module,
            f"{module.gap:.3g}",
            "-" if module.travelled is None else f"{module.travelled:.3g}",
            "-" if module.share is None else _share(module.share),
        )
        for module in drift.modules
        if module.gap
    )
    columns = (f"module at step {drift.step}", "‖B − A‖", "A's way", "of A's way")
    return Table("Modules at the last common step", columns, rows, "", "")


def _share(x: float) -> str:
    return f"{x:.0%}" if x >= 0.1 else f"{x:.1e}"
