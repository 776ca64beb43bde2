"""The user's own kernels: "package.module:function" and "path/file.py:function", with every failure
one line.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from halfulp.complaints import meant
from halfulp.targets.calling import one_line
from halfulp.targets.target import Target


def load(name: str, form: str | None = None) -> Target:
    """The target of attention that is named "module:function" or "file.py:function"; raises
    ValueError as `load_function` does, and for what is no such function.
    """
    return Target.of(load_function(name)[0], name, form)


def load_function(name: str) -> tuple[Any, ModuleType]:
    """What "module:function" or "file.py:function" names (function may be dotted:
    "module:Class.method"), and the module it is in.

    Runs the module or file as an import does, with its folder (file) or the working folder (module)
    on the path meanwhile. Raises ValueError, one line, for a file, module or function that is not
    there, or whose import fails.
    """
    where, attribute = parted(name)
    module = _from_file(name, Path(where)) if _is_file(where) else _from_module(name, where)
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ValueError(
                f"target={name!r}: {where} has no {attribute!r}{_callables(module, part)}"
            ) from None
    return found, module


def parted(name: str) -> tuple[str, str]:
    """File or module, and function; raises ValueError where there is none or no such file, and
    loads nothing.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ValueError(f"target={name!r}: accepted are 'module:function' and 'file.py:function'")
    if _is_file(where) and not Path(where).is_file():
        raise ValueError(f"target={name!r}: there is no file {where}")
    return where, attribute


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _from_file(name: str, path: Path) -> ModuleType:
    # A module under a name of its own, known to sys.modules: dataclasses and Triton look their
    # source up there.
    # by the whole path, since two files of one name are two modules
    module_name = f"halfulp_target_{path.stem}_{abs(hash(path.resolve())):x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(
            f"target={name!r}: {path} is no Python file; accepted is a name ending in .py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with _on_path(path.resolve().parent):
            spec.loader.exec_module(module)
    # a script may ask the interpreter to exit as it is loaded, which is no reason to end here
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ValueError(
            f"target={name!r}: {path} does not load: {_at(error, path)}{one_line(error)}"
        ) from error
    return module


def _from_module(name: str, module: str) -> ModuleType:
    try:
        with _on_path(Path.cwd()):
            return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"target={name!r}: module {module} does not load: {one_line(error)}"
        ) from error


def _at(error: BaseException, path: Path) -> str:
    """ "line N: " of the user's file, where the failure passed through it."""
    path = path.resolve()
    own_syntax = (
        isinstance(error, SyntaxError)
        and error.filename is not None
        and Path(error.filename).resolve() == path
    )
    line = error.lineno if isinstance(error, SyntaxError) and own_syntax else None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).resolve() == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f"line {line}: "


def _callables(module: ModuleType, asked: str) -> str:
    own = [
        n
        for n, x in vars(module).items()
        if not n.startswith("_")
        and getattr(x, "__module__", None) == module.__name__
        and callable(x)
    ]
    return f"; it has {', '.join(own[:8])}{meant(asked, own)}" if own else ""


def in_file(name: str) -> str:
    """What may have been meant by a file named without its function; loads nothing."""
    path = Path(name if name.endswith(".py") else f"{name}.py")
    try:
        inside = ast.parse(path.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return ""
    functions = [x.name for x in inside if isinstance(x, ast.FunctionDef | ast.ClassDef)]
    own = [f"'{path}:{x}'" for x in functions if not x.startswith("_")]
    return f"; did you mean {' or '.join(own[:4])}?" if own else ""


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        # what was loaded may have changed the path itself
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)
