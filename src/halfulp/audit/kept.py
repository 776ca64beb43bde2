"""What an audit holds a target against, in the cache on disk: dataclasses as plain data beside
their tensors, under a name that says everything their bits depend on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from halfulp import __version__, native
from halfulp.audit.inputs import Case
from halfulp.operations import ATTENTION, operation_names
from halfulp.runs import cache
from halfulp.runs.machine import bits_of_machine, bits_of_process, source_digest
from halfulp.runs.values import decoded, encoded

_MADE_BY = (
    "formats", "recipes", "calls", "algorithms", "attention", "operations", "audit",
    "runs/values.py",
)  # fmt: skip
"""The sources that decide a reference's bits; the rest of the package may change without a word."""

T = TypeVar("T")


def name_of(case: Case, kind: type[Any]) -> str:
    """The name of what is kept of a case: its type, the case, the sources, the native library,
    torch, the processor, and the settings of this process that change a sum.
    """
    file = None
    if case.file is not None:
        # by what it holds: a file of the same name may be another's tomorrow
        file = hashlib.sha256(Path(case.file).read_bytes()).hexdigest()
    named = dataclasses.replace(case, file=None)
    settings = (torch.get_num_threads(), *bits_of_process())
    return cache.name_of("references", kind.__name__, named, file, *_made_by(), settings)


def _made_by() -> tuple[str, ...]:
    library = "none" if native.missing() else native.best_isa()
    versions = __version__, torch.__version__, library, source_digest(*_MADE_BY)
    return (*versions, *bits_of_machine())


def _lasts(case: Case) -> bool:
    """Whether it is kept: not of an operation in a user's folder, whose files are nobody's."""
    ours = case.operation == ATTENTION or case.operation in operation_names()
    return ours and cache.folder() is not None


def read(case: Case, kind: type[T]) -> T | None:
    """What was kept of a case, None where nothing is that has this form."""
    found = cache.read(name_of(case, kind)) if _lasts(case) else None
    if found is None:
        return None
    try:
        plain, shapes = found[0]["value"], found[0]["shapes"]
        tensors: dict[str, Tensor] = {}
        for dtype, whole in found[1].items():
            own = shapes[dtype]
            parts = torch.split(whole, [math.prod(shape) for shape in own.values()])
            for (name, shape), x in zip(own.items(), parts, strict=True):
                tensors[name] = x if len(shape) == 1 else x.view(shape)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        return None
    return decoded(kind, plain, tensors)


def write(case: Case, value: Any) -> None:
    """Keep a dataclass of tensors, numbers, texts, tuples, dictionaries and dataclasses."""
    if _lasts(case):
        tensors: dict[str, Tensor] = {}
        plain = encoded(value, tensors)
        # one tensor a dtype, since a file of a hundred takes longer to read than to compute
        shapes: dict[str, dict[str, list[int]]] = {}
        for name, x in tensors.items():
            shapes.setdefault(str(x.dtype), {})[name] = [*x.shape]
        whole = {d: torch.cat([tensors[n].flatten() for n in own]) for d, own in shapes.items()}
        cache.write(name_of(case, type(value)), {"value": plain, "shapes": shapes}, whole)
