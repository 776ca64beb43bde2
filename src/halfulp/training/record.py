"""Run configurations as JSON and back; run.json, what it says of a run, and reading it again.

Reading never executes anything: a configuration is plain numbers and text, and an attention is
named, not stored.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from halfulp.runs.folder import read_json
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import RunConfig, WorkloadConfig


@lru_cache(maxsize=1)
def _converter() -> Any:
    from cattrs import Converter
    from cattrs.strategies import configure_tagged_union

    converter = Converter(forbid_extra_keys=True)
    configure_tagged_union(WorkloadConfig, converter, tag_name="kind")
    converter.register_unstructure_hook(
        AttentionPlan, lambda plan: [str(a) for a in plan.assignments]
    )
    converter.register_structure_hook(AttentionPlan, lambda texts, _: AttentionPlan.of(*texts))
    for kind in (int, float, str, bool):
        converter.register_structure_hook(kind, _exactly)
    return converter


def _exactly(value: Any, kind: type[Any]) -> Any:
    """The value itself if it is of that kind; an integer will do for a float. Nothing is cast."""
    if type(value) is kind or (kind is float and type(value) is int):
        return float(value) if kind is float else value
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


def read_record(folder: Path) -> dict[str, Any]:
    """Return the run.json of a training run.

    Raises:
        ValueError: the folder holds no training run.
    """
    record = read_json(folder / "run.json")
    if not isinstance(record, dict) or record.get("kind") != "train":
        raise ValueError(
            f"run={str(folder)!r}: there is no run.json of a training; accepted is a folder of"
            " `halfulp train`"
        )
    return record


def new_record(config: RunConfig, source: dict[str, Any], command: str | None) -> dict[str, Any]:
    """Return the run.json of a run that begins now; `source` says what its data are."""
    from halfulp import __version__
    from halfulp.runs.machine import describe_machine, describe_versions, git_revision

    return {
        "halfulp": __version__,
        "kind": "train",
        "status": "running",
        "reason": "",
        "config": config_as_dict(config),
        "seed": config.seed,
        "data": source,
        "command": command,
        "versions": describe_versions(),
        "git": git_revision(),
        "machine": describe_machine(),
        "started": now(),
        "resumed": [],
        "ended": None,
    }


def now() -> str:
    """Return the time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def difference(one: RunConfig, other: RunConfig) -> list[str]:
    """Return the fields in which two configurations differ, as "field: this → that"."""
    found = []
    for f in dataclasses.fields(RunConfig):
        before, after = getattr(one, f.name), getattr(other, f.name)
        if before != after:
            found.append(f"{f.name}: {before} → {after}")
    return found
