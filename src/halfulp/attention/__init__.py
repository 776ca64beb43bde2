"""Attention to use, and attention to study: `attention` with the repaired arithmetic, `emulate`
with any, `golden`.

`patch` and `register_transformers` bring the first into code that calls somebody else's.
"""

import sys

from halfulp.attention.attend import attention, explain_dispatch
from halfulp.attention.emulated import emulate, golden
from halfulp.attention.open_blocks import Patched
from halfulp.attention.patch import patch
from halfulp.attention.transformers import register_transformers
from halfulp.attention.varlen import attention_varlen

__all__ = [
    "Patched",
    "attention",
    "attention_varlen",
    "emulate",
    "explain_dispatch",
    "golden",
    "patch",
    "register_transformers",
]

# `import halfulp.attention.patch as …` looks for the module on what `halfulp.attention` is, the
# function.
for _name, _module in list(sys.modules.items()):
    if _name.rpartition(".")[0] == __name__:
        setattr(attention, _name.rpartition(".")[2], _module)
