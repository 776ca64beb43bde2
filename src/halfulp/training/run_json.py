"""Run configurations as JSON and back, and what a training's run.json holds besides.

Reading never executes anything: a configuration is plain numbers and text, and an attention is
named, not stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from halfulp.runs import record as runs
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import RunConfig, WorkloadConfig
from halfulp.training.operations import OperationPlan

_MOST = 2**63  # what an integer of a configuration may not reach


@lru_cache(maxsize=1)
def _converter() -> Any:
    from cattrs import Converter
    from cattrs.strategies import configure_tagged_union

    converter = Converter(forbid_extra_keys=True)
    configure_tagged_union(WorkloadConfig, converter, tag_name="kind")
    for plans in (AttentionPlan, OperationPlan):
        converter.register_unstructure_hook(plans, lambda plan: [str(a) for a in plan.assignments])
        converter.register_structure_hook(plans, lambda texts, plan: plan.of(*texts))
    for kind in (int, float, str, bool):
        converter.register_structure_hook(kind, _exactly)
    return converter


def _exactly(value: Any, kind: type[Any]) -> Any:
    """The value itself if it is of that kind; an integer will do for a float. Nothing is cast."""
    if type(value) is int and kind in (int, float) and abs(value) >= _MOST:
        raise TypeError(f"an integer of {value.bit_length()} bits: accepted are 63 bits")
    if type(value) is kind or (kind is float and type(value) is int):
        found = float(value) if kind is float else value
        if kind is not float or math.isfinite(found):
            return found
    raise TypeError(f"{value!r}: accepted is {kind.__name__}")


def config_as_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as JSON has it; `config_from_dict` reads it back."""
    plain: dict[str, Any] = _converter().unstructure(config)
    return plain


def config_from_dict(plain: Any) -> RunConfig:
    """Return the configuration that `config_as_dict` wrote.

    Raises:
        ValueError: a field is missing, unknown or of another type; one line names it.
    """
    from cattrs import transform_error

    try:
        return _converter().structure(plain, RunConfig)  # type: ignore[no-any-return]
    except Exception as error:
        reasons = transform_error(error, path="config", format_exception=_reason)
        raise ValueError(
            f"config: {'; '.join(reasons)}; accepted is what a run.json holds"
        ) from None


def _reason(error: BaseException, kind: type[Any] | None) -> str:
    """Our own checks say it best; cattrs knows the rest."""
    from cattrs.v import format_exception

    own = isinstance(error, (ValueError, TypeError)) and "accepted" in str(error)
    return str(error) if own else str(format_exception(error, kind))


def new_record(
    config: RunConfig, source: dict[str, Any], batches: str, command: str | None, start: int = 0
) -> dict[str, Any]:
    """Return the run.json of a training that begins now.

    Args:
        config: what is trained.
        source: what its data are.
        batches: SHA-256 of the order of samples.
        command: what repeats it; None from Python.
        start: the step that it starts after, another run's.
    """
    return runs.new_record(
        "train",
        config_as_dict(config),
        command,
        data=source,
        batches=batches,
        seed=config.seed,
        start=start,
        resumed=[],
    )


def read_record(folder: Path) -> dict[str, Any]:
    """Return the run.json of a training run.

    Raises:
        ValueError: the folder holds no training run, or its record was altered.
    """
    record = runs.read_record(folder, "train")
    if not isinstance(record.get("data"), dict) or not isinstance(record.get("batches"), str):
        raise runs.altered(folder, "data or batches")
    if type(record.get("start")) is not int:
        raise runs.altered(folder, "start")
    taken = record.get("resumed")
    if not isinstance(taken, list) or not all(
        isinstance(one, dict) and {"step", "at"} <= one.keys() for one in taken
    ):
        raise runs.altered(folder, "resumed")
    return record


def read_config(folder: Path) -> RunConfig:
    """Return the configuration of a training run; raises ValueError as `read_record` and
    `config_from_dict`.
    """
    return config_from_dict(read_record(folder)["config"])


def difference(one: RunConfig, other: RunConfig) -> list[str]:
    """Return the fields in which two configurations differ, as "field: this → that"; those of
    workload and optimizer one by one, as "optimizer.clip: …".
    """
    return list(_differing(one, other, ""))


def _differing(one: Any, other: Any, prefix: str) -> Iterator[str]:
    for f in dataclasses.fields(one):
        # where a file lies is no part of what a run is, but which function of it
        name = f.name if f.compare else "function"
        before, after = getattr(one, name), getattr(other, name)
        if before == after:
            continue
        if f.name in ("workload", "optimizer") and type(before) is type(after):
            yield from _differing(before, after, f"{f.name}.")
        else:
            yield f"{prefix}{name}: {before} → {after}"
