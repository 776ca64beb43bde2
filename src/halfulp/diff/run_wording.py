"""What two runs differ in, in words and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfulp.diff.paragraphs import chance_text, spread, table, wrapped
from halfulp.diff.two_runs import RunDifference
from halfulp.diff.wording import text as difference_text
from halfulp.diff.wording import without_verdict

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
        said += [_curves(found, width), ""]
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


def _curves(found: RunDifference, width: int) -> str:
    lines = [["curve", "lines", "first bit", "beyond rounding", "last step", "A", "B"]]
    for curve in found.curves:
        step, a, b = curve.last
        never = "never"
        lines.append([
            curve.name, str(curve.lines), never if curve.first is None else str(curve.first),
            never if curve.beyond is None else str(curve.beyond), str(step), _value(a), _value(b),
        ])  # fmt: skip
    legend = (
        "first bit: the first common line that is not the same to the bit; beyond rounding: the"
        f" first that differs by more than {found.tolerance:.1g} of itself, what roundings to"
        f" {found.formats} in one pass may make. Later steps part from rounding alone, too:"
        " training amplifies it."
    )
    return f"{table(lines, width)}\n\n{wrapped(legend, width)}"


def _value(x: float) -> str:
    return "not finite" if not math.isfinite(x) else f"{x:.6g}"


def _drifts(found: RunDifference, width: int) -> str:
    lines = [["weights at step", "‖B − A‖", "of A's way", "largest", "Wasserstein"]]
    for drift in spread(found.drifts, SHOWN):
        gap = drift.gap
        way = "-" if not drift.travelled else _share(gap.norm / drift.travelled)
        lines.append([
            str(drift.step), f"{gap.norm:.3g}", way, f"{gap.largest:.3g}", f"{gap.wasserstein:.3g}"
        ])  # fmt: skip
    for label, gap in found.beside.items():
        lines.append([
            label, f"{gap.norm:.3g}", "", f"{gap.largest:.3g}", f"{gap.wasserstein:.3g}"
        ])  # fmt: skip
    last = found.drifts[-1]
    said = [table(lines, width)]
    parting = [module for module in last.modules if module.gap]
    if parting:
        rows = [[f"module at step {last.step}", "‖B − A‖", "A's way", "of A's way"]]
        for module in parting[:MODULES]:
            way = "-" if module.travelled is None else f"{module.travelled:.3g}"
            share = "-" if module.share is None else _share(module.share)
            rows.append([module.module, f"{module.gap:.3g}", way, share])
        more = len(parting) - MODULES
        said += ["", table(rows, width)]
        said += [f"and {more} modules that parted less; to_json() has all"] if more > 0 else []
    return "\n".join(said)


def _share(x: float) -> str:
    return f"{x:.0%}" if x >= 0.1 else f"{x:.1e}"
