"""Formulas of a definition as syntax trees: which of them are steps, keys or functions of a value,
and how they are told.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

_LONGEST = 90  # letters of a formula that is told


def is_step(call: ast.Call) -> bool:
    """Whether a value passes the seam there."""
    return isinstance(call.func, ast.Name) and call.func.id == "step" and len(call.args) == 2


def is_key(node: ast.expr) -> bool:
    """Whether something is read by a name: an operand, an option."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def words_of(node: ast.AST) -> set[Any]:
    """Names and keys in a formula."""
    return {n.value if isinstance(n, ast.Constant) else n.id for n in ast.walk(node)
            if isinstance(n, ast.Constant | ast.Name)}  # fmt: skip


def of_one_value(node: ast.expr) -> tuple[str, ast.expr, Callable[..., ast.expr]] | None:
    """A function of one value, by method or not: its name, the value, and it of another value."""
    if isinstance(node, ast.Call) and is_step(node):
        inner = of_one_value(node.args[1])
        if inner is None:
            return None
        name, arg, made = inner
        return name, arg, lambda x, other="": ast.Call(node.func, [node.args[0], made(x, other)],
                                                       [])  # fmt: skip
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    func = node.func
    if isinstance(func.value, ast.Name) and func.value.id == "torch":
        if not node.args:
            return None

        def of(x: ast.expr, other: str = "") -> ast.expr:
            attr = ast.Attribute(func.value, other or func.attr, ast.Load())
            return ast.Call(attr, [x, *node.args[1:]], node.keywords)

        return func.attr, node.args[0], of

    def method(x: ast.expr, other: str = "") -> ast.expr:
        return ast.Call(ast.Attribute(x, other or func.attr, ast.Load()), node.args, node.keywords)

    return func.attr, func.value, method


class _Words(ast.NodeTransformer):
    """A formula without what programs need: steps, operands by key, where gradients end."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Of a step what it is a step of."""
        if is_step(node):
            return self.visit(node.args[1])  # type: ignore[no-any-return]
        self.generic_visit(node)
        func = node.func
        if isinstance(func, ast.Attribute):
            if func.attr in ("detach", "double", "to", "expand_as", "expand"):
                return func.value
            of_torch = isinstance(func.value, ast.Name) and func.value.id == "torch"
            args = node.args if of_torch else [func.value, *node.args[:1]]
            return ast.Call(ast.Name(func.attr), args, [])
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Of what has a key the key."""
        self.generic_visit(node)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return ast.Name(key) if isinstance(key, str) else node


def in_words(node: ast.AST) -> str:
    """A formula as it is told."""
    words = _Words().visit(ast.parse(ast.unparse(node), mode="eval"))
    text = ast.unparse(words)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]} …"
