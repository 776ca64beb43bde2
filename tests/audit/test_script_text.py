"""The program that shows a defect is made of names that somebody else chose; none of them is more
than text in it.
"""

from __future__ import annotations

import ast

import pytest

from halfulp.audit.inputs import Case
from halfulp.audit.probes import Shape
from halfulp.audit.shrink import script
from halfulp.audit.verdict import Finding

HOSTILE = [
    '"""\nimport os; os.abort()\n"""',
    "'''\nimport os\n'''",
    '\\"""; import os #',
    "a\\",
    "\N{LINE SEPARATOR}import os\r\nimport os",
    "\x00\x1b[2J\x9b\udc80",
    "{0}{target!r}%s$(id)`id`",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("where", ["target", "property", "figure", "file"])
def test_a_name_is_no_more_than_text(text: str, where: str) -> None:
    named = {"target": "kernel.py:f", "property": "dQ error", "figure": "1", "file": None}
    # no path holds NUL
    named[where] = text.replace("\0", "") if where == "file" else text
    case = Case("captured", Shape(), 3, "bfloat16", file=named["file"])
    finding = Finding(
        "defect", "error", str(named["property"]), "out", case, str(named["figure"]), 2.0
    )
    tree = ast.parse(script(str(named["target"]), finding, case))
    kinds = [type(statement) for statement in tree.body]
    assert kinds == [ast.Expr, ast.ImportFrom, ast.Assign, ast.Raise]
    assert isinstance(tree.body[0].value, ast.Constant)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called == {"Case", "Shape", "SystemExit", "reproduce"}
    if where != "file":
        assert text in ast.literal_eval(tree.body[0].value)
