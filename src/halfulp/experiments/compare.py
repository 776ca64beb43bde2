"""How far the weights of twin runs drift apart, put into context: Golden et al., arXiv 2405.02803,
section V.

Two runs that differ in one thing have checkpoints at the same steps. At each of them the weights
are compared by the largest difference of any weight and by the Wasserstein distance of their
distributions, for every tensor and for all of them together. What a difference means shows only
beside others: another initialization, another precision, the same run once more. Run folders are
read and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfulp.diff.weights_apart import Distance, Weights, distance, floating
from halfulp.experiments.compare_summary import Distances, Drift, DriftSummary, summarize
from halfulp.runs.results import Figure, Plain, Progress, Series, Table, no_progress
from halfulp.training.checkpoint import checkpoint_steps, load_weights
from halfulp.training.config import RunConfig
from halfulp.training.run_json import difference, read_config

REPEATED = "the same run repeated"
INITIALIZATION = "another initialization"
# What a run records and where it runs: no difference between twins.
_BESIDE = ("metrics_every", "measure_every", "checkpoint_every", "keep", "preset")


@dataclass(frozen=True)
class CompareResult(Plain):
    """Drifts of several pairs, what they come to over seeds, and how to measure them again."""

    BESIDE = ("summary", "figures", "tables")

    drifts: tuple[Drift, ...]
    command: str
    caption: str = ""

    @property
    def names(self) -> list[str]:
        """What was compared, in the order in which it was given."""
        return list(dict.fromkeys(drift.name for drift in self.drifts))

    def of(self, name: str) -> list[Drift]:
        """The drifts of one comparison, a seed each."""
        return [drift for drift in self.drifts if drift.name == name]

    @property
    def summary(self) -> list[DriftSummary]:
        """One line for every comparison, over its seeds."""
        return [summarize(name, self.of(name)) for name in self.names]

    @property
    def figures(self) -> list[Figure]:
        """Return Wasserstein distance and largest difference over steps, a line a comparison."""
        shown = (
            (
                "wasserstein",
                "Wasserstein distance of the weights",
                "mean distance, units of a weight",
            ),
            ("max_difference", "Largest difference of a weight", "units of a weight"),
        )
        seeds = max(len(self.of(name)) for name in self.names)
        caption = (
            f"{self.caption} {seeds} seed{'s' * (seeds > 1)}: the median, and the range where there"
            " are several."
        )
        return [
            Figure(
                title,
                "step",
                label,
                tuple(_series(name, self.of(name), field) for name in self.names),
                (caption + _unseen(self.drifts)).strip(),
                self.command,
                y_log=any(
                    0 < value < math.inf for drift in self.drifts for value in getattr(drift, field)
                ),
            )
            for field, title, label in shown
        ]

    @property
    def tables(self) -> list[Table]:
        """Return the summary, and the tensors of the first comparison that drifts, the farthest
        first.
        """
        found = [
            Table(
                "Weight drift",
                DriftSummary.COLUMNS,
                tuple(line.cells() for line in self.summary),
                "The largest difference of a weight and the Wasserstein distance of all weights at"
                " the last shared step, means over seeds; slope of that distance a step, with a 95"
                " % interval over seeds (Student's t, from 3 seeds); uneven: its rms distance from"
                " the line, as a share of its last value.",
                self.command,
            )
        ]
        drifting = next((drift for drift in self.drifts if drift.max_difference[-1] != 0), None)
        return found if drifting is None else [*found, _tensor_table(drifting, self.command)]


def compare_runs(
    runs: Sequence[Path],
    baseline: Path | None = None,
    *,
    command: str = "",
    progress: Progress | None = None,
) -> CompareResult:
    """Compare the weights of runs with those of a baseline.

    Runs that differ from the baseline in nothing but seeds, and have data of their own, are
    baselines too: every other run is compared with the baseline that shares its data seed, and its
    seed where there is one.

    Args:
        runs: run folders of trainings with checkpoints.
        baseline: the folder of the baseline; the first run if None.
        command: what repeats it, for the record.
        progress: called after every pair.

    Raises:
        ValueError: a folder is no training run, has no baseline, another model, or no checkpoint in
            common with it.
    """
    first = runs[0] if baseline is None and runs else baseline
    others = list(runs[1:] if baseline is None else runs)
    if first is None or not others:
        raise ValueError(f"runs={[str(run) for run in runs]}: accepted are two or more run folders")
    for other in others:
        if other.resolve() == first.resolve():
            raise ValueError(f"run={str(other)!r} is the baseline itself; accepted are other runs")
    pairs = _matched(first, others)
    drifts = []
    for i, (name, one, other) in enumerate(pairs):
        drifts.append(drift_between(one, other, name))
        (progress or no_progress)((i + 1) / len(pairs), f"{name}: {other.name}")
    return CompareResult(tuple(drifts), command)


def drift_between(baseline: Path, run: Path, name: str | None = None) -> Drift:
    """Return the drift of one pair of run folders, over all checkpoints that both have whole.

    Raises:
        ValueError: a folder is no training run, the models differ, or no checkpoint is common to
            both.
    """
    one, other = read_config(baseline), read_config(run)
    common = sorted(
        set(checkpoint_steps(baseline / "checkpoints")) & set(checkpoint_steps(run / "checkpoints"))
    )
    steps, whole = [], []
    tensors: dict[str, list[Distance]] = {}
    for step in common:
        before, after = _weights(baseline, step), _weights(run, step)
        if before is None or after is None:
            continue
        if {k: x.shape for k, x in before.items()} != {k: x.shape for k, x in after.items()}:
            raise ValueError(
                f"run={str(run)!r}: its model has other tensors; accepted are runs of one model"
            )
        steps.append(step)
        # not the sum of its tensors': transport may pair a weight of one with one of another
        whole.append(distance(before, after))
        for key in before:
            gap = distance({key: before[key]}, {key: after[key]})
            tensors.setdefault(key, []).append(gap)
    if not steps:
        raise ValueError(
            f"run={str(run)!r}: no checkpoint in common with {str(baseline)!r}; accepted is at"
            " least one"
        )
    return Drift(
        name or _label(one, other),
        one.seed_of_data,
        str(baseline),
        str(run),
        tuple(steps),
        *_columns(whole),
        {key: Distances(*_columns(found)) for key, found in tensors.items()},
    )


def _columns(found: Sequence[Distance]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(x.largest for x in found), tuple(x.wasserstein for x in found)


def _weights(folder: Path, step: int) -> Weights | None:
    """The model's weights after a step, or None, with a warning, where the file is torn."""
    try:
        return floating(load_weights(folder / "checkpoints" / f"step-{step}"))
    except ValueError as error:
        warnings.warn(f"skipped: {error}", stacklevel=2)
        return None


def _matched(first: Path, others: Sequence[Path]) -> list[tuple[str, Path, Path]]:
    """(what differs, baseline, run) of every run that is not itself a baseline."""
    kind = _kind(read_config(first))
    baselines: dict[int, list[Path]] = {read_config(first).seed_of_data: [first]}
    rest = []
    for run in others:
        config = read_config(run)
        # one baseline for a data seed; a second one is compared like any other
        if _kind(config) == kind and config.seed_of_data not in baselines:
            baselines[config.seed_of_data] = [run]
        else:
            rest.append(run)
    pairs = []
    for run in rest:
        config = read_config(run)
        if config.seed_of_data not in baselines:
            raise ValueError(
                f"run={str(run)!r}: its data seed is {config.seed_of_data}; accepted are data seeds"
                f" of a baseline: {', '.join(map(str, baselines))}"
            )
        (reference,) = baselines[config.seed_of_data]
        pairs.append((_label(read_config(reference), config), reference, run))
    if not pairs:
        raise ValueError(
            f"runs={[str(run) for run in others]}: all are baselines; accepted is at least one"
            " other run"
        )
    return pairs


def _kind(config: RunConfig) -> RunConfig:
    """The configuration without seeds and without what a run records."""
    plain: dict[str, Any] = {
        f.name: f.default
        for f in dataclasses.fields(RunConfig)
        if f.name in ("seed", "data_seed", *_BESIDE)
    }
    return dataclasses.replace(config, **plain)


def _label(one: RunConfig, other: RunConfig) -> str:
    """What two configurations differ in, in words."""
    changes = difference(_kind(one), _kind(other))
    if one.seed != other.seed:
        changes.append(INITIALIZATION)
    if one.seed_of_data != other.seed_of_data:
        changes.append("other data")
    return ", ".join(changes) or REPEATED


def _series(name: str, drifts: Sequence[Drift], field: str) -> Series:
    """The median over seeds at every step that all have, and the range if there are several."""
    steps = sorted(set.intersection(*(set(drift.steps) for drift in drifts)))
    columns = [
        [getattr(drift, field)[drift.steps.index(step)] for drift in drifts] for step in steps
    ]
    return Series.over(name, steps, columns)


def _unseen(drifts: Sequence[Drift]) -> str:
    zero = [
        name
        for name in dict.fromkeys(d.name for d in drifts)
        if _is_zero([d for d in drifts if d.name == name])
    ]
    return (
        f" Exactly 0 at every checkpoint, so not in the picture: {', '.join(zero)}." if zero else ""
    )


def _is_zero(drifts: Sequence[Drift]) -> bool:
    return all(value == 0 for drift in drifts for value in drift.max_difference)


def _tensor_table(drift: Drift, command: str) -> Table:
    last = [(n, x.max_difference[-1], x.wasserstein[-1]) for n, x in drift.tensors.items()]
    last.sort(key=lambda row: -row[2] if math.isfinite(row[2]) else -math.inf)
    caption = (
        f"{drift.name}, seed {drift.seed}, step {drift.steps[-1]}: the ten tensors farthest apart"
        f" of {len(last)}."
    )
    return Table(
        "Tensors", ("tensor", "largest", "Wasserstein"), tuple(last[:10]), caption, command
    )
