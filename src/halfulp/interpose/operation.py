"""One call of a torch operation, as a model makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

Leaf = TypeVar("Leaf")


@dataclass(frozen=True, eq=False)
class Operation:
    """What is called, and where."""

    kind: str  # of `kinds.KINDS`
    name: str  # "linear", "mul": one spelling for a function, its method and its operator
    path: str  # of the module whose forward calls it; "(model)" for the model's own, "" outside
    order: int  # among the calls of this name in this module and pass
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    recomputed: bool = False  # by a checkpoint, in a backward pass

    @property
    def place(self) -> str:
        """ "layers.0.mlp.up linear", or with a number where the module calls it again."""
        again = f" ({self.order + 1})" if self.order else ""
        return f"{self.path or '(outside)'} {self.name}{again}"

    @property
    def in_place(self) -> bool:
        """Whether it writes into an operand."""
        return writes(self.function, self.kwargs)

    def run(self) -> Any:
        """What the model's own function gives on these arguments."""
        return self.function(*self.args, **self.kwargs)

    def changed(self, change: Callable[[Any], Any]) -> Operation:
        """The same operation with `change(argument)` for every argument, in nested ones too."""
        args, kwargs = mapped((self.args, dict(self.kwargs)), change)
        return replace(self, args=args, kwargs=kwargs)

    def tensors(self) -> list[Tensor]:
        """Its operands of floating point, in their order."""
        return [x for x in leaves((self.args, self.kwargs)) if x.is_floating_point()]


def writes(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function writes into an operand: `add_`, `+=`, `x[i] =`, `out=`."""
    name = str(getattr(function, "__name__", ""))
    dunder = name.startswith("__") and name.endswith("__")
    if dunder:
        return name in ("__setitem__", "__set__") or (name[2] == "i" and name[3:] in _AFTER_I)
    return name.endswith("_") or kwargs.get("out") is not None or kwargs.get("inplace") is True


_IN_PLACE = "add sub mul truediv pow matmul floordiv mod and or xor"  # __iadd__, …
_AFTER_I = {f"{name}__" for name in _IN_PLACE.split()}


def leaves(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested arguments or results."""
    return every(tree, Tensor)


def every(tree: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """Everything of one kind in nested arguments or results."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from every(item, kind)


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same arguments or results, every leaf changed."""
    if not isinstance(tree, (tuple, list, dict)):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(item, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(item, change) for item in tree))
    made = [mapped(item, change) for item in tree]
    if all(a is b for a, b in zip(made, tree, strict=True)):
        return tree
    if isinstance(tree, list):
        return made
    return type(tree)(made) if hasattr(tree, "n_fields") else tuple(made)  # torch.return_types
