"""Operations by name: those of this package, and folders of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from halfulp.complaints import meant
from halfulp.operations.operation_data import Operation, whole

ATTENTION = "attention"
"""The operation that is audited where none is named; its calls have a room of their own
(`halfulp.calls`), so no folder stands for it.
"""

FILES = ("definition", "recipes", "probes", "targets")
_HERE = Path(__file__).parent


@lru_cache(maxsize=1)
def operation_names() -> tuple[str, ...]:
    """The operations that have a folder here."""
    return tuple(sorted(path.parent.name for path in _HERE.glob(f"*/{FILES[0]}.py")))


@lru_cache(maxsize=64)
def operation_named(name: str) -> Operation:
    """The operation of that name, or of the folder of that path.

    A folder of the user's is imported, which runs its four files. Raises ValueError, one line, for
    an unknown name and for a folder that is not whole.
    """
    known = operation_names()
    if name in known:
        files = {f: importlib.import_module(f"halfulp.operations.{name}.{f}") for f in FILES}
        return _assembled(name, name, files)
    if "/" in name or Path(name).is_dir():
        found = _assembled(Path(name).resolve().name, name, _files_of(Path(name)))
        _check_recipes(found)
        return found
    raise ValueError(
        f"op={name!r}: accepted are {', '.join([ATTENTION, *known])}, or a folder with"
        f" {', '.join(f'{f}.py' for f in FILES)}{meant(name, [ATTENTION, *known])}"
    )


def _files_of(folder: Path) -> dict[str, ModuleType]:
    if not folder.is_dir():
        near = meant(folder.name, [p.name for p in folder.parent.glob("*") if p.is_dir()])
        raise ValueError(f"op={str(folder)!r}: there is no such folder{near}")
    lacking = [f"{f}.py" for f in FILES if not (folder / f"{f}.py").is_file()]
    if lacking:
        raise ValueError(f"op={str(folder)!r}: has no {', '.join(lacking)}")
    path = folder.resolve()
    package = f"halfulp_operation_{path.name}_{abs(hash(path)):x}"
    parent = ModuleType(package)
    parent.__path__ = [str(path)]
    sys.modules[package] = parent
    files = {}
    for name in FILES:
        spec = importlib.util.spec_from_file_location(f"{package}.{name}", path / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            text = " ".join(str(error).split())
            raise ValueError(
                f"op={str(folder)!r}: {name}.py does not load: {type(error).__name__}: {text}"
            ) from error
        files[name] = module
    return files


def _assembled(name: str, folder: str, files: dict[str, ModuleType]) -> Operation:
    definition, recipes, probes, targets = (files[f] for f in FILES)

    def of(module: ModuleType, field: str) -> Any:
        if not hasattr(module, field):
            file = Path(str(module.__file__)).name
            raise ValueError(f"op={folder!r}: {file} defines no {field}")
        return getattr(module, field)

    operands, results = of(definition, "OPERANDS"), of(definition, "RESULTS")
    return Operation(
        name=name,
        folder=folder,
        description=(definition.__doc__ or "").strip().split("\n\n")[0].replace("\n", " "),
        signature=of(definition, "SIGNATURE"),
        operands=operands,
        results=results,
        sizes=of(definition, "SIZES"),
        options=getattr(definition, "OPTIONS", {}),
        define=of(definition, "define"),
        eager=getattr(definition, "EAGER", ()),
        related=getattr(definition, "RELATED", {}),
        arguments=getattr(definition, "arguments", partial(_in_order, operands)),
        read=getattr(definition, "read", partial(_whole, results)),
        stock=of(recipes, "STOCK"),
        floor=of(recipes, "FLOOR"),
        probes=of(probes, "PROBES"),
        independent=of(probes, "INDEPENDENT"),
        ties=getattr(probes, "TIES", True),
        targets=of(targets, "TARGETS"),
    )


def _check_recipes(operation: Operation) -> None:
    """Raise ValueError where a recipe rounds a step that the definition has on no probe."""
    # imported here, since calls are drawn of operations that are read
    from halfulp.operations.operation_calls import changed, drawn_calls

    steps: dict[str, None] = {}

    def seen(name: str, exact: Tensor) -> Tensor:
        if not name.startswith("result_"):
            steps[name.removeprefix("grad_")] = None
        return exact

    asked = {
        name.removeprefix("grad_") for r in (operation.stock, operation.floor) for name in r.steps
    }
    for probe in operation.probes if asked else ():
        sizes = operation.sizes[0].with_(**{**probe.sizes, "calls": 1})
        chance = torch.Generator().manual_seed(0)
        changed(drawn_calls(operation, probe.name, sizes, "float32", chance), seen)
        if asked <= steps.keys():
            return
    for recipe in (operation.stock, operation.floor):
        for name in recipe.steps:
            if name.removeprefix("grad_") not in steps:
                raise ValueError(
                    f"op={operation.folder!r}: recipe {recipe.name!r} of recipes.py rounds"
                    f" {name!r}, which is no step of define; accepted are"
                    f" {', '.join(sorted(steps))}{meant(name.removeprefix('grad_'), list(steps))}"
                )


def _in_order(operands: Any, x: Any, options: Any) -> Any:
    """Operands by place, options by name."""
    return tuple(x[operand.name] for operand in operands), dict(options)


def _whole(results: Any, returned: Any, *_: Any) -> Any:
    return whole(returned, results)
