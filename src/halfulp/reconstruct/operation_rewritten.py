"""The definition rewritten: its own source with one thing in it otherwise, as authors of kernels
get formulas wrong. A term or a factor is dropped or has the other sign, a constant or a size is
another, an option enters inside of a root and not outside, a sum is a mean or runs along the other
dimension, a function is its relative.

Nothing here knows an operation: what is changed is the syntax tree of its definition, of the
functions which that calls in the same package, and of the definition as eager code, whose gradient
is of what is changed. Mutants of programs are DeMillo, Lipton & Sayward 1978.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from halfulp.operations import PLACE, Define, OperationCalls, changed, first_calls
from halfulp.reconstruct.operation_formulas import (
    in_words,
    is_key,
    is_step,
    of_one_value,
    words_of,
)
from halfulp.reconstruct.operation_ways import TOLD, Way

_DEEPEST = 4  # functions that call each other
_RELATIVES = {
    "exp": ("exp2", "expm1"), "exp2": ("exp",), "log": ("log2", "log1p", "log10"),
    "sqrt": ("rsqrt", ""), "rsqrt": ("reciprocal", "sqrt"), "sigmoid": ("tanh", ""),
    "tanh": ("sigmoid", "erf"), "erf": ("tanh",), "cos": ("sin",), "sin": ("cos",),
    "mean": ("sum",), "sum": ("mean",), "amax": ("amin",), "square": ("abs", ""), "abs": ("",),
    "clamp_min": ("",), "clamp": ("",),
}  # fmt: skip
"""Functions and what is written in their place, "" for nothing."""

_ELEMENTWISE = ("exp", "sigmoid", "tanh", "erf", "erfc")
_OVER = ("mean", "sum", "amax", "amin", "var", "max")  # a dimension
_NUMBER = "_number_"  # in a definition with a constant that is looked for
_Made = Callable[[float], Define]
_Other = tuple[str | ast.expr, ast.expr]  # a cause, or what is dropped or stands elsewhere


def rewritten_ways(calls: OperationCalls) -> Iterator[Way]:
    """The definition with one thing in it otherwise, each that its source has."""
    for cause, text, made in _rewritten(calls):
        if _NUMBER not in text:
            yield Way(cause, text, define=made(1.0))


def scaled_definitions(calls: OperationCalls) -> Iterator[Callable[..., Way]]:
    """The same where a constant, or what a function is taken of, is so many times what it is."""
    for _, text, made in _rewritten(calls):
        if _NUMBER in text:
            yield partial(_of_number, text, made)


def _of_number(text: str, made: _Made, number: float, told: str = "") -> Way:
    return Way("factor", text.replace(_NUMBER, told or f"{number:.4g}"), define=made(number))


def _rewritten(calls: OperationCalls) -> Iterator[tuple[str, str, _Made]]:
    operation = calls.operation
    numbers = [name for name, value in operation.options.items() if isinstance(value, float)]
    options = {n: [m for m in numbers if n in numbers and m != n] for n in operation.options}
    told: set[str] = set()
    done: set[FunctionType] = set()
    for define in (operation.define, *operation.eager[:1]):
        functions = [f for f in dict.fromkeys(_called(define, _DEEPEST)) if f not in done]
        done.update(functions)
        for function in functions:
            names = _names_given(calls, define, function)
            for cause, text, code in _mutants(function, options, names):
                if text in told:
                    text += ", at another place"
                told.add(text)
                yield cause, text, partial(_defined, define, function, code)


def _names_given(calls: OperationCalls, define: Define, function: FunctionType) -> dict[str, str]:
    """The steps whose names a function is given, by parameter: what several definitions share."""
    signature, given = inspect.signature(function), {}
    if "step" not in signature.parameters or len(signature.parameters) < 4:
        return {}

    def spy(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        given.update({n: x for n, x in bound.items() if isinstance(x, str)})
        return function(*args, **kwargs)

    changed(first_calls(calls, 1), lambda _, x: x.detach(), _with(define, function, spy, _DEEPEST))
    return given


def _defined(define: Define, function: FunctionType, code: CodeType, number: float) -> Define:
    """The definition with other code in one function."""
    known = function.__globals__ | {_NUMBER: number}
    other = FunctionType(code, known, function.__name__, function.__defaults__)
    other.__kwdefaults__ = function.__kwdefaults__
    return _with(define, function, other, _DEEPEST)  # type: ignore[no-any-return]


def _called(value: Any, deep: int) -> Iterator[FunctionType]:
    """A function and those of its package that it calls."""
    if isinstance(value, partial):
        for part in (value.func, *value.keywords.values()):
            yield from _called(part, deep)
    elif isinstance(value, FunctionType) and deep:
        if value.__closure__ is None:
            yield value
        for _, part in (*_globals_of(value), *(value.__kwdefaults__ or {}).items(),
                        *enumerate(value.__defaults__ or ())):  # fmt: skip
            if not isinstance(part, ModuleType):
                yield from _called(part, deep - 1)
            else:
                for name in value.__code__.co_names:
                    yield from _called(getattr(part, name, None), deep - 1)


def _globals_of(function: FunctionType) -> list[tuple[str, Any]]:
    """What a function reads of its package."""
    own = function.__module__.rpartition(".")[0].removesuffix(".operations")
    found = [(n, function.__globals__.get(n)) for n in function.__code__.co_names]
    return [(n, x) for n, x in found if isinstance(x, FunctionType | ModuleType)
            and _module(x).startswith((own, "halfulp.operations"))]  # fmt: skip


def _module(x: FunctionType | ModuleType) -> str:
    return x.__name__ if isinstance(x, ModuleType) else x.__module__


def _with(value: Any, function: FunctionType, other: Callable[..., Any], deep: int) -> Any:
    """The same, but where it is, holds or calls a function, that calls another."""
    if value is function:
        return other
    again = partial(_with, function=function, other=other, deep=deep - 1)
    if isinstance(value, partial):
        return partial(again(value.func), *value.args,
                       **{n: again(x) for n, x in value.keywords.items()})  # fmt: skip
    if not isinstance(value, FunctionType) or not deep:
        return value
    read = {}
    for name, part in _globals_of(value):
        if isinstance(part, ModuleType):
            known = {n: getattr(part, n) for n in value.__code__.co_names if hasattr(part, n)}
            read[name] = SimpleNamespace(**{n: again(x) for n, x in known.items()})
        else:
            read[name] = again(part)
    defaults = tuple(again(x) for x in value.__defaults__ or ())
    found = FunctionType(value.__code__, value.__globals__ | read, value.__name__, defaults,
                         value.__closure__)  # fmt: skip
    found.__kwdefaults__ = {n: again(x) for n, x in (value.__kwdefaults__ or {}).items()}
    return found


def _mutants(
    function: FunctionType, options: dict[str, list[str]], names: dict[str, str]
) -> Iterator[tuple[str, str, CodeType]]:
    """Causes, words and code of a function with one expression in it otherwise."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # of what was not read from a file
        return
    body = tree.body[0]
    if not isinstance(body, ast.FunctionDef):
        return
    made: dict[str, list[ast.expr]] = {}
    for one in ast.walk(body):
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            made.setdefault(one.targets[0].id, []).append(one.value)
        # a loop's count, of which a kernel may have the first number alone
        elif isinstance(one, ast.For) and isinstance(one.iter, ast.Call) and one.iter.args[1:]:
            counts = one.target.elts[0] if isinstance(one.target, ast.Tuple) else None
            if isinstance(counts, ast.Name):
                made[counts.id] = [one.iter.args[1]]
    alike: dict[tuple[str, int], list[_Edit]] = {}
    for edit, number in _edits(body, made, names, options):
        if (code := _edited(tree, function.__name__, edit)) is not None:
            yield edit.cause(options), edit.text, code
        # what is wrong of one formula may be wrong of those like it
        of = ast.dump(edit.node) if isinstance(edit.node, ast.BinOp | ast.Name) else ""
        alike.setdefault((re.sub(r"Constant\(value='.*?'\)", "", of), number), []).append(edit)
    for (of, _), edits in alike.items():
        few = len({id(edit.node) for edit in edits}) == len(edits) > 1
        code = _edited(tree, function.__name__, *edits) if of and few else None
        if code is not None:
            where = ", ".join(dict.fromkeys(edit.where for edit in edits))
            told = in_words(edits[0].new), in_words(edits[0].node)
            text = f"{where}: {told[0]} stands in place of {told[1]}, and so in all formulas alike"
            yield edits[0].cause(options), text, code


class _Edit(NamedTuple):
    """One expression in place of another, where it stands."""

    where: str
    of: str | ast.expr
    parent: ast.AST
    field: str
    child: Any
    at: int
    node: ast.AST
    new: ast.AST

    def cause(self, options: Collection[str]) -> str:
        """Its key."""
        if isinstance(self.of, str):
            return self.of
        return "option" if words_of(self.of) & set(options) else "term-missing"

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.where}: {in_words(self.new)} stands in place of {in_words(self.node)}"


def _edits(
    body: ast.FunctionDef,
    made: dict[str, list[ast.expr]],
    names: dict[str, str],
    options: dict[str, list[str]],
) -> Iterator[tuple[_Edit, int]]:
    """Every edit, and which of those of its expression it is."""
    for statement in ast.walk(body):
        if not isinstance(statement, ast.Assign | ast.AugAssign | ast.Return):
            continue
        where = _where(body, statement, names)
        for parent in ast.walk(statement):
            for field, child in ast.iter_fields(parent):
                for at, node in enumerate(child if isinstance(child, list) else [child]):
                    others = (*_others(node), *_instead(node, made), *_scaled(parent, node),
                              *_other_options(node, options))  # fmt: skip
                    for number, (of, new) in enumerate(others):
                        yield _Edit(where, of, parent, field, child, at, node, new), number


def _edited(tree: ast.Module, name: str, *edits: _Edit) -> CodeType | None:
    """A function's code with these in it."""
    for edit in edits:
        # of what is new alone: a walk through the whole tree takes longer than its compilation
        new = ast.fix_missing_locations(edit.new)
        _put(edit.parent, edit.field, edit.child, edit.at, new)
    code = _compiled(tree, name)
    for edit in edits:
        _put(edit.parent, edit.field, edit.child, edit.at, edit.node)
    return code


def _instead(node: Any, made: dict[str, list[ast.expr]]) -> Iterator[_Other]:
    """In place of a name what it is made of: a row before it is centered, a moment before it is
    updated; of its square, both times.
    """
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        for part in _made_of(node, made):
            yield "term-missing", part
    elif isinstance(node, ast.BinOp) and ast.dump(node.left) == ast.dump(node.right):
        for part in _made_of(node.left, made):
            yield "term-missing", ast.BinOp(part, node.op, part)


def _made_of(node: ast.expr, made: dict[str, list[ast.expr]]) -> Iterator[ast.expr]:
    """Names and keys in what a name stands for, and in what these stand for that are its value."""
    values = made.get(node.id, []) if isinstance(node, ast.Name) else []
    if len(values) != 1:
        return
    for part in ast.walk(values[0]):
        known = isinstance(part, ast.Name) and part.id in made
        if known or (isinstance(part, ast.Subscript) and is_key(part.slice)):
            yield part  # type: ignore[misc]
    value = values[0]
    if isinstance(value, ast.Call) and is_step(value) and isinstance(value.args[1], ast.Name):
        yield from _made_of(value.args[1], made)


def _other_options(node: Any, options: dict[str, list[str]]) -> Iterator[_Other]:
    """One option in place of another, here alone."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        for other in options.get(str(node.slice.value), ()):
            yield node, ast.Subscript(node.value, ast.Constant(other), node.ctx)


def _scaled(parent: ast.AST, node: Any) -> Iterator[_Other]:
    """A constant that is fitted, and a function of so many times its argument."""
    number = ast.Name(_NUMBER, ast.Load())
    if isinstance(node, ast.Constant) and isinstance(node.value, float):
        if isinstance(parent, ast.BinOp):
            yield "factor", ast.BinOp(number, ast.Mult(), node)
    elif (found := of_one_value(node)) is not None and found[0] in _ELEMENTWISE:
        yield "factor", found[2](ast.BinOp(number, ast.Mult(), found[1]))


def _put(parent: ast.AST, field: str, child: Any, at: int, node: ast.AST) -> None:
    if isinstance(child, list):
        child[at] = node
    else:
        setattr(parent, field, node)


def _compiled(tree: ast.Module, name: str) -> CodeType | None:
    flags = __future__.annotations.compiler_flag
    whole = compile(tree, "<rewritten>", "exec", flags, True)
    codes = [c for c in whole.co_consts if isinstance(c, CodeType) and c.co_name == name]
    return codes[0] if codes and not codes[0].co_freevars else None


def _where(body: ast.FunctionDef, statement: ast.stmt, given: dict[str, str]) -> str:
    """The steps of a statement, or of the next that reads what it assigns; else its name."""
    own = _steps_of(statement, given)
    names = {n.id: "" for n in ast.walk(statement)
             if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}  # fmt: skip
    for later in body.body:
        read = {n.id for n in ast.walk(later) if isinstance(n, ast.Name)}
        if not own and later.lineno > statement.lineno and names.keys() & read:
            own = _steps_of(later, given)
    return ", ".join(dict.fromkeys([*names, *own[:TOLD]])) or "the result"


def _steps_of(node: ast.AST, given: dict[str, str]) -> list[str]:
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and is_step(n)]
    names = [x.value if isinstance(x, ast.Constant) else given.get(ast.unparse(x), "")
             for x in (call.args[0] for call in calls)]  # fmt: skip
    return list(dict.fromkeys(str(n).lstrip(PLACE) for n in names if n))


def _others(node: Any) -> Iterator[_Other]:
    """What may stand in place of an expression, and the cause that that is."""
    if isinstance(node, ast.BinOp):
        yield from _of_sides(node)
        yield from _of_numbers(node)
        yield from _moved_in(node)
    elif isinstance(node, ast.Call) and not is_step(node):
        yield from _of_call(node)
    elif isinstance(node, ast.Attribute) and node.attr == "values":  # of max along a dimension
        yield from (other for other in _of_call(node.value) if other[0] == "maximum")


def _of_sides(node: ast.BinOp) -> Iterator[_Other]:
    """A side dropped, or the other operator."""
    a, op, b = node.left, node.op, node.right
    if isinstance(op, ast.Add | ast.Sub):
        yield b, a
        yield a, b if isinstance(op, ast.Add) else ast.UnaryOp(ast.USub(), b)
        yield "factor", ast.BinOp(a, ast.Sub() if isinstance(op, ast.Add) else ast.Add(), b)
        if isinstance(a, ast.Constant) and isinstance(op, ast.Sub):
            yield a, b
    elif isinstance(op, ast.Mult | ast.Div):
        yield b, a
        if isinstance(op, ast.Mult):
            yield a, b
        # no number of times what it should be: the square of b, or its root
        yield b, ast.BinOp(a, ast.Div() if isinstance(op, ast.Mult) else ast.Mult(), b)
        if isinstance(b, ast.BinOp):
            yield b, ast.BinOp(a, op, ast.BinOp(b, ast.Pow(), ast.Constant(0.5)))
    elif isinstance(op, ast.Pow):
        yield b, a
    if isinstance(op, ast.Sub | ast.Div | ast.Pow):
        yield "exchanged", ast.BinOp(b, op, a)
    inner = a.args[1] if isinstance(a, ast.Call) and is_step(a) else a
    if isinstance(inner, ast.BinOp):
        p, own, q = inner.left, inner.op, inner.right
        sums, products = ((ast.Add, ast.Sub), (ast.Mult, ast.Div))
        if isinstance(own, sums) and isinstance(op, products):  # (p + q) b
            yield q, ast.BinOp(ast.BinOp(p, op, b), own, q)
            yield p, ast.BinOp(p, own, ast.BinOp(q, op, b))
        elif isinstance(own, products) and isinstance(op, sums):  # p q + b
            yield b, ast.BinOp(ast.BinOp(p, op, b), own, q)
    match op, b:
        case ast.Mult(), ast.BinOp(left, (ast.Add() | ast.Sub()) as own, right):  # a (p + q)
            yield right, ast.BinOp(ast.BinOp(a, op, left), own, right)
            yield left, ast.BinOp(left, own, ast.BinOp(a, op, right))


def _of_numbers(node: ast.BinOp) -> Iterator[_Other]:
    """Another constant or size on one of the sides."""
    for side, own in (("left", node.left), ("right", node.right)):
        others: list[ast.expr] = []
        if isinstance(own, ast.Constant) and isinstance(own.value, int | float):
            n = own.value
            near = (n + 1, n - 1) if isinstance(n, int) else ()
            others = [ast.Constant(x) for x in dict.fromkeys((1, *near, 2 * n, n / 2, n * n))
                      if x not in (0, n)]  # fmt: skip
        elif _is_size(own):
            others = [ast.BinOp(own, op, ast.Constant(by)) for by in (1, 2)
                      for op in (ast.Add(), ast.Sub())]  # fmt: skip
            others += [ast.BinOp(own, op, ast.Constant(2)) for op in (ast.Mult(), ast.Div())]
        for other in others:
            sides = {"left": node.left, "right": node.right, side: other}
            yield "factor", ast.BinOp(sides["left"], node.op, sides["right"])


def _is_size(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.startswith("len(") or (".shape[" in text and isinstance(node, ast.Subscript))


def _moved_in(node: ast.BinOp) -> Iterator[_Other]:
    """f(p) + q as f(p + q), and f(p) · q as f(p · q)."""
    for side, other in (("left", node.right), ("right", node.left)):
        if (found := of_one_value(getattr(node, side))) is not None:
            name, arg, make = found
            inner = (arg, other) if side == "left" else (other, arg)
            if name in _RELATIVES and name not in _OVER:
                yield other, make(ast.BinOp(inner[0], node.op, inner[1]))
            rooted = name == "sqrt" and side == "left" and isinstance(arg, ast.BinOp)
            if rooted and isinstance(arg, ast.BinOp) and isinstance(arg.op, ast.Mult | ast.Div):
                # √(p / q) + c as √((p + c) / q) and (√p + c) / √q
                whole = ast.BinOp(arg.left, node.op, other)
                yield other, make(ast.BinOp(whole, arg.op, arg.right))
                whole = ast.BinOp(make(arg.left), node.op, other)
                root = ast.BinOp(arg.right, ast.Pow(), ast.Constant(0.5))
                yield other, ast.BinOp(whole, arg.op, root)


def _of_call(node: ast.expr) -> Iterator[_Other]:
    found = of_one_value(node)
    if found is None or not isinstance(node, ast.Call):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "where":
            yield "term-missing", node.args[1]
        return
    name, arg, make = found
    for other in _RELATIVES.get(name, ()):
        cause = "factor" if {name, other} == {"mean", "sum"} else "term-missing"
        yield cause, make(arg, other) if other else arg
    if name == "arange":
        yield "factor", ast.BinOp(node, ast.Add(), ast.Constant(1))
    if name in _RELATIVES and isinstance(arg, ast.BinOp) and name not in _OVER:  # f(p + q)
        outside = ast.BinOp(make(arg.left), arg.op, arg.right)
        yield arg.right, outside
        if name in ("sqrt", "rsqrt"):  # the root forgotten, or the square written for it
            yield "term-missing", ast.BinOp(node, ast.Pow(), ast.Constant(4))
        if name == "rsqrt":  # 1 / (√p + q)
            root = ast.BinOp(make(arg.left, "sqrt"), arg.op, arg.right)
            yield arg.right, make(root, "reciprocal")
        if isinstance(arg.op, ast.Add | ast.Mult):
            yield arg.left, ast.BinOp(arg.left, arg.op, make(arg.right))
    if name in _OVER and isinstance(node.func, ast.Attribute) and node.args:
        yield "maximum" if "max" in name else "neighbor", ast.Call(node.func, [], [])
        for own, dim in (("-1", 0), ("0", -1)):
            if ast.unparse(node.args[0]) == own:
                rest = [ast.Constant(dim), *node.args[1:]]
                yield "term-missing", ast.Call(node.func, rest, node.keywords)
