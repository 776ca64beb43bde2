"""halfulp finds, explains and fixes the rounding errors that break low-precision transformer
training.

The names below are the public surface; everything heavy (the command line, plots, other libraries'
kernels) is imported when called.
"""

from halfulp.attention import (
    attention,
    attention_varlen,
    emulate,
    explain_dispatch,
    golden,
    patch,
    register_transformers,
)
from halfulp.audit import AuditReport, audit
from halfulp.formats import Format, round_to
from halfulp.recipes import Recipe, Step
from halfulp.watch import watch

__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "Format",
    "Recipe",
    "Step",
    "__version__",
    "attention",
    "attention_varlen",
    "audit",
    "emulate",
    "explain_dispatch",
    "golden",
    "patch",
    "register_transformers",
    "round_to",
    "watch",
]
