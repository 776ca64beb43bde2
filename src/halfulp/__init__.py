"""halfulp finds, explains and fixes the rounding errors that break low-precision transformer
training.

The names below are the public surface. Each is imported when it is first asked for, torch with the
first of them, so that `halfulp --help` is there at once.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfulp.attention import (
        attention,
        attention_varlen,
        emulate,
        explain_dispatch,
        golden,
        register_transformers,
    )
    from halfulp.attention.patch import patch
    from halfulp.audit import AuditReport, audit
    from halfulp.diff import Setting, diff
    from halfulp.formats import Format, round_to
    from halfulp.recipes import Recipe, Step
    from halfulp.runs.snapshot import Snapshot, read_snapshot
    from halfulp.training.adjusted import adjust
    from halfulp.training.operations import planned
    from halfulp.watch import watch

__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "Format",
    "Recipe",
    "Setting",
    "Snapshot",
    "Step",
    "__version__",
    "adjust",
    "attention",
    "attention_varlen",
    "audit",
    "diff",
    "emulate",
    "explain_dispatch",
    "golden",
    "patch",
    "planned",
    "read_snapshot",
    "register_transformers",
    "round_to",
    "watch",
]

_ROOMS = {
    "attention": (
        "attention",
        "attention_varlen",
        "emulate",
        "explain_dispatch",
        "golden",
        "patch",
        "register_transformers",
    ),
    "audit": ("audit", "AuditReport"),
    "diff": ("diff", "Setting"),
    "formats": ("Format", "round_to"),
    "recipes": ("Recipe", "Step"),
    "runs.snapshot": ("Snapshot", "read_snapshot"),
    "training.adjusted": ("adjust",),
    "training.operations": ("planned",),
    "watch": ("watch",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}


class _Face(ModuleType):
    """`halfulp.audit` is the function, also after the package of that name was imported."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'halfulp' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"halfulp.{_HOME[name]}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):  # what importing a package does
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Face
