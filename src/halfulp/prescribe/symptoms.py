"""What is known of a run before anything is tried: where it failed, what `halfulp.watch` or its own
measurements alarmed about, what an isolation of it found.

Nothing here is a verdict. It decides from where remedies are tried, in which order, and which of
them have a place to go to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfulp.isolate.rule import Rule, Watcher
from halfulp.runs.folder import read_json
from halfulp.runs.snapshot import read_snapshot
from halfulp.training.checkpoint import checkpoint_steps
from halfulp.training.config import RunConfig
from halfulp.training.journal import Row, read_rows
from halfulp.watch.alarms import alarms
from halfulp.watch.troubles import CAUSES

ROUNDING = ("biased", "run-away")
"""Kinds of alarms about attention's rounding (`halfulp.watch.alarms`)."""
Place = tuple[int, int]


@dataclass(frozen=True)
class Symptoms:
    """What speaks for one cause or another."""

    said: tuple[str, ...] = ()  # in words, one a symptom
    kinds: tuple[str, ...] = ()  # ROUNDING, and of `halfulp.watch.troubles.CAUSES`
    layers: tuple[str, ...] = ()  # where attention leans: paths, or numbers in halfulp's models
    modules: tuple[str, ...] = ()  # where numbers first were not finite
    # of an isolation: "KIND in MODULE" in a user's model, layer and head in halfulp's
    sites: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    failed_at: int | None = None
    lowest_at: int | None = None  # the step at which its loss was lowest before

    def spoken_for(self, kinds: Sequence[str]) -> str:
        """Which symptom is of one of these kinds, in words; empty where none is."""
        return next((_named(kind) for kind in self.kinds if kind in kinds), "")


def of_snapshot(folder: Path) -> Symptoms:
    """Symptoms that a snapshot of `halfulp.watch` was made with; ValueError for a torn one."""
    snapshot = read_snapshot(folder)
    found = [one for one in snapshot.about.get("found", ()) if isinstance(one, Mapping)]
    kinds = tuple(dict.fromkeys(str(one.get("kind")) for one in found))
    named = tuple(dict.fromkeys(str(one["layer"]) for one in found if one.get("kind") in ROUNDING))
    broken = ("not_finite", "fp16_overflow")
    modules = [str(one["layer"]) for one in found if one.get("kind") in broken and one["layer"]]
    kind, _, where = snapshot.reason.partition(" ")
    reason = f"{CAUSES[kind].name} {where}".rstrip() if kind in CAUSES else snapshot.reason
    said = [f"snapshot of step {snapshot.step}: {reason}"]
    said += [str(one).partition(". ")[0] for one in snapshot.about.get("causes", ())]
    once = tuple(dict.fromkeys(said))
    return Symptoms(once, kinds, named, tuple(dict.fromkeys(modules)))


def of_run(folder: Path, config: RunConfig, rule: Rule, last: int) -> Symptoms:
    """Symptoms in the lines of a run folder up to a step, and in the isolation of it, if there is
    one in the folder or beside it.
    """
    rows = [row for row in read_rows(folder) if row["step"] <= last]
    watcher = Watcher(rule, config.steps)
    for row in rows:
        if watcher(row) is not None:
            break
    said: list[str] = []
    failed, lowest = None, None
    if watcher.failed is not None:
        failed = watcher.failed.failed_at
        losses = watcher.curves["loss"]
        # without NaN, which has no order
        known = [(x, s) for s, x in zip(losses.steps, losses.values, strict=True) if x == x]
        lowest = min(known)[1] if known else 0
        said.append(f"the recorded run failed: {watcher.failed.reason}")
    found = _leaning(rows)
    said += [str(alarm) for alarm in found]
    isolation = _isolation(folder)
    if isolation is not None:
        said.append(f"halfulp isolate: {isolation['verdict']}")
    plain = isolation or {}
    return Symptoms(
        tuple(said),
        tuple(dict.fromkeys(alarm.kind for alarm in found)),
        tuple(dict.fromkeys(str(alarm.layer) for alarm in found)),
        sites=tuple(map(str, plain.get("sites", ()))),
        places=tuple((int(i), int(j)) for i, j in plain.get("places", ())),
        failed_at=failed,
        lowest_at=lowest,
    )


def _leaning(rows: Sequence[Row]) -> list[Any]:
    """Alarms of the first measurements in which any head leans, as their last has them."""
    measured = [row for row in rows if "measure" in row]
    for n in range(len(measured) + 1):
        if found := alarms(measured[:n]):
            return found
    return []


def _isolation(folder: Path) -> dict[str, Any] | None:
    """The finished isolation of a run that found something."""
    for place in (folder, folder.with_name(f"{folder.name}-isolated")):
        plain = read_json(place / "isolation.json")
        if isinstance(plain, dict) and plain.get("found") and plain.get("status") == "done":
            return plain
    return None


def last_good(folder: Path, symptoms: Symptoms) -> int:
    """The last checkpoint at which the run was still well: not after the step of its lowest loss;
    0, the beginning, where there is none or the run has not failed.
    """
    if symptoms.lowest_at is None:
        return 0
    well = [s for s in checkpoint_steps(folder / "checkpoints") if s <= symptoms.lowest_at]
    return max(well, default=0)


def last_snapshot(folder: Path) -> Path | None:
    """The last snapshot in the folder of a watched training."""
    found = [path for path in (folder / "snapshots").glob("step-*") if path.is_dir()]
    steps = {path: re.match(r"step-(\d{1,18})", path.name) for path in found}
    return max(
        (path for path, match in steps.items() if match),
        key=lambda path: int(re.findall(r"\d+", path.name)[0]),
        default=None,
    )


def _named(kind: str) -> str:
    return CAUSES[kind].name if kind in CAUSES else f"{kind} attention"
