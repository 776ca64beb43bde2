"""run.json: what every run folder says of its run, put together here and nowhere else, and checked
here when it is read again.

What a run goes by is sealed by a SHA-256, so that a byte that was altered is an error and not
another result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any

from halfulp.runs.folder import line_text, read_json
from halfulp.runs.machine import describe_machine, describe_versions, git_revision

NAMED = {
    "train": "a training",
    "watch": "a watched training",
    "isolate": "an isolation",
    "prescribe": "a prescription",
    "demo": "a demo",
}
_TYPES: dict[str, tuple[type, ...]] = {
    "halfulp": (str,),
    "kind": (str,),
    "status": (str,),
    "reason": (str,),
    "config": (dict,),
    "command": (str, NoneType),
    "versions": (dict,),
    "git": (str, NoneType),
    "machine": (dict,),
    "started": (str,),
    "ended": (str, NoneType),
}
"""Of the fields that all kinds share."""


SEALED = ("config", "data", "batches")
"""What a run goes by: fields that may not change while it lives."""


def new_record(
    kind: str, config: Mapping[str, Any], command: str | None, **more: Any
) -> dict[str, Any]:
    """Return the record of a run that begins now.

    Args:
        kind: of `NAMED`.
        config: what it was asked for, as plain data.
        command: what repeats it; None from Python.
        **more: fields that the kind has besides; those that `SEALED` names are sealed with the
            configuration.
    """
    from halfulp import __version__

    record = {
        "halfulp": __version__,
        "kind": kind,
        "status": "running",
        "reason": "",
        "config": config,
        "command": command,
        "versions": describe_versions(),
        "git": git_revision(),
        "machine": describe_machine(),
        "started": now(),
        "ended": None,
        **more,
    }
    return record | {"seal": _seal(record)}


def read_record(folder: Path, *kinds: str) -> dict[str, Any]:
    """Return the run.json of a run of one of these kinds.

    Raises:
        ValueError: there is none, it is of another kind, a field is not what it was, or is not
            there.
    """
    record = read_json(folder / "run.json")
    if not isinstance(record, dict) or record.get("kind") not in kinds:
        named = " or ".join(NAMED[kind] for kind in kinds)
        below = sorted(str(found.parent) for found in folder.glob("*/run.json"))[:4]
        lacking = "it is a file"
        if not folder.is_file():
            no = "run.json, or it is torn" if folder.exists() else "such folder"
            lacking = f"there is no {no}"
        raise ValueError(
            f"run={str(folder)!r}: {lacking}; accepted is the folder of {named}"
            + (f", such as {', '.join(below)}" if below else "")
        )
    for name, types in _TYPES.items():
        if name not in record or not isinstance(record[name], types):
            raise altered(folder, name)
    if record.get("seal") != _seal(record):
        raise altered(folder, "what is sealed (config, data or batches)")
    return record


def altered(folder: Path, what: str) -> ValueError:
    """What is raised for a run.json of which a field is not what a run writes."""
    return ValueError(
        f"run={str(folder)!r}: in its run.json, {what} is missing or was altered; accepted is what"
        " the run wrote"
    )


def closed(record: Mapping[str, Any], status: str, reason: str = "") -> dict[str, Any]:
    """Return the record of a run that ends now."""
    return {**record, "status": status, "reason": reason, "ended": now()}


def now() -> str:
    """Return the time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _seal(record: Mapping[str, Any]) -> str:
    """Of the sealed fields, as JSON reads them."""
    # through JSON: a record that begins has tuples where one that was read has lists
    plain = json.loads(line_text({name: record[name] for name in SEALED if name in record}))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
