"""A run folder may name code, but naming is not running: only what the user named is imported.

A plan that was read from a folder may say "file.py:function" or "module:function", and so does a
run of the user's own model. Whoever sent the folder wrote that, so going on with its run waits for
the user's word, and looking at it does without.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from halfulp.targets import is_code
from halfulp.training.config import RunConfig, UserModel
from halfulp.training.user_model import absolute


def named_code(config: RunConfig) -> list[str]:
    """Return what names a module or file in a configuration: its model, attention, operations."""
    model = [config.workload.make] if isinstance(config.workload, UserModel) else []
    choices = [a.attention for a in config.attention.assignments]
    choices += [a.into for a in config.operations.assignments]
    return model + list(dict.fromkeys(filter(is_code, choices)))


def trusted(config: RunConfig, folder: Path, trust: bool, workload: str | None = None) -> RunConfig:
    """Return the configuration that a folder holds with the code that the user named in the place
    of its own.

    Args:
        config: as the folder has it.
        folder: for the message.
        trust: whether all code that the folder names may run.
        workload: the user's own word for the function that makes the model.

    Raises:
        ValueError: the folder names code that the user neither trusts nor names.
    """
    named = named_code(config)
    if isinstance(config.workload, UserModel):
        if workload is not None:
            given = replace(config.workload, make=absolute(workload))
            if given != config.workload:
                raise ValueError(
                    f"workload={workload!r}: {str(folder)!r} is a run of the function"
                    f" {config.workload.function!r}; accepted is one of that name, in any file"
                )
            config = replace(config, workload=given)
            named = named[1:]
    elif workload is not None:
        raise ValueError(
            f"workload={workload!r}: accepted for a run of a model of your own; that of"
            f" {str(folder)!r} is {type(config.workload).__name__}"
        )
    if not trust and named:
        own = isinstance(config.workload, UserModel) and workload is None
        instead = f", or --workload {named[0]} for the model" if own else ""
        raise ValueError(
            f"run={str(folder)!r}: its run.json names code, {', '.join(map(repr, named))}, which"
            f" would be run; accepted with --trust (trust=True){instead}"
        )
    return config
