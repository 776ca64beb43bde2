"""An operation as data: what it takes and gives, its definition, how it is rounded, the inputs that
expose its failures, and who computes it on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from halfulp.operations.seam import Rounding

Tensors = dict[str, Tensor]
"""Operands, results or gradients by name; a gradient is "grad_" and the operand's name."""

Options = Mapping[str, Any]
Kind = Literal["audited", "float32", "int64", "float"]
"""A dtype: "audited" is the audit's own, "float" that or float32."""


class Seam(Protocol):
    """The seam of a definition: `step("name", value)` gives the value as it is rounded there, and
    its gradient as it is rounded on the way back.
    """

    def __call__(self, name: str, exact: Tensor) -> Tensor:
        """The value as it is rounded at the step of that name."""
        ...


@dataclass(frozen=True)
class Sizes:
    """The size of a case: how many calls, each drawn independently, and what each symbol of the
    operation's shapes stands for.
    """

    calls: int
    of: tuple[tuple[str, int], ...]

    unit: ClassVar[str] = "calls"

    @classmethod
    def given(cls, calls: int = 8, **symbols: int) -> Sizes:
        """`Sizes.given(T=24, D=256)`: eight calls of that size."""
        return cls(calls, tuple(symbols.items()))

    def __getitem__(self, symbol: str) -> int:
        return dict(self.of)[symbol]

    def with_(self, **symbols: int) -> Sizes:
        """The same with other numbers for these symbols, `calls` among them."""
        calls = symbols.pop("calls", self.calls)
        known = dict(self.of)
        assert not symbols.keys() - known.keys(), symbols
        return Sizes(calls, tuple((known | symbols).items()))

    @property
    def work(self) -> int:
        """The number of elements."""
        return self.calls * math.prod(n for _, n in self.of)

    def shape(self, symbols: str) -> tuple[int, ...]:
        """`"T D"` → (24, 256); a number stands for itself. Raises ValueError for anything else."""
        known = dict(self.of)
        for one in symbols.split():
            if one not in known and not one.isdecimal():
                raise ValueError(
                    f"shape={symbols!r}: {one!r} is no symbol; accepted are {', '.join(known)}, as"
                    " SIZES gives them, and numbers"
                )
        return tuple(known[s] if s in known else int(s) for s in symbols.split())

    def __str__(self) -> str:
        return f"{self.calls} × ({', '.join(f'{symbol} {n}' for symbol, n in self.of)})"


@dataclass(frozen=True)
class Operand:
    """One argument that is a tensor."""

    name: str
    shape: str  # symbols of `Sizes`, blanks between: "T D"
    dtype: Kind = "audited"
    differentiable: bool = True


@dataclass(frozen=True)
class Output:
    """One result."""

    name: str
    shape: str  # "" for one number
    # what a target must return it in; a definition gives any
    dtype: Kind = "audited"
    differentiable: bool = True
    # how many dimensions count its rows, each held to its own size; None: all but the last
    rows: int | None = None


Define = Callable[[Seam, Tensors, Options], Tensors]
Draw = Callable[[Sizes, torch.Generator], Tensors]


@dataclass(frozen=True)
class OperationProbe:
    """A named family of inputs, built to expose one failure."""

    name: str
    exposes: str  # the failure it is built for
    source: str  # the paper or public bug it comes from
    # operands of one call in float32, and "grad_" and a result's name where that gradient is not
    # to be standard normal
    draw: Draw
    options: Mapping[str, Any] = field(default_factory=dict)  # unlike the operation's own
    # the sizes that this probe wants, where they are not the case's
    sizes: Mapping[str, int] = field(default_factory=dict)
    manner: str = ""  # in which memory and how often a kernel is called; "": dense, and once


@dataclass(frozen=True)
class BuiltIn:
    """A target that every machine has."""

    name: str
    description: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Operation:
    """What an audit needs to know of an operation; each field is a name in one of its four
    files.
    """

    name: str
    folder: str  # where it was read from, which is what another process reads it from
    description: str  # the first line of its definition's docstring
    # definition.py
    signature: str
    operands: tuple[Operand, ...]
    results: tuple[Output, ...]
    sizes: tuple[Sizes, ...]  # of a quick audit the first, of a full one all
    options: Mapping[str, Any]
    # (step, operands, options) -> results, in whatever dtype the operands are
    define: Define
    # the same as eager code writes it, where autograd's own gradient is another arithmetic
    eager: tuple[Define, ...]
    # what kernels are known to compute in its place, by what is told of it: the key of its
    # cause, and the definition
    related: Mapping[str, tuple[str, Define]]
    # what a target is called with: (operands, options) -> (args, keywords); operands in their order
    # and options by name where definition.py says nothing else
    arguments: Callable[[Tensors, Options], tuple[tuple[Any, ...], dict[str, Any]]]
    # results by name of what a target returned
    read: Callable[[Any, Tensors, Options], Tensors]
    # recipes.py
    stock: Rounding
    floor: Rounding
    # probes.py
    probes: tuple[OperationProbe, ...]
    # symbols whose order means nothing: "T" where rows are independent of each other
    independent: tuple[str, ...]
    ties: bool  # whether equal inputs have one answer: not where either of two may be chosen
    # targets.py
    targets: tuple[BuiltIn, ...]

    @property
    def differentiable(self) -> tuple[Operand, ...]:
        """The operands that have a gradient."""
        return tuple(x for x in self.operands if x.differentiable)

    @property
    def shapes_of_results(self) -> dict[str, str]:
        """The symbols of results and gradients."""
        found = {r.name: r.shape for r in self.results}
        return found | {f"grad_{o.name}": o.shape for o in self.operands}

    @property
    def shapes_of_operands(self) -> dict[str, str]:
        """The symbols of operands and of gradients that arrive."""
        found = {o.name: o.shape for o in self.operands}
        return found | {f"grad_{r.name}": r.shape for r in self.results}

    def probe(self, name: str) -> OperationProbe:
        """The probe of that name; raises ValueError with the accepted names."""
        for probe in self.probes:
            if probe.name == name:
                return probe
        known = ", ".join(probe.name for probe in self.probes)
        raise ValueError(f"probe={name!r}: of {self.name} accepted are {known}")


def whole(returned: Any, results: tuple[Output, ...]) -> Tensors:
    """Results by name of a tensor, or of a tuple in the order of the results.

    Raises ValueError, in words that follow "returns", for anything else.
    """
    given = returned if isinstance(returned, tuple | list) else (returned,)
    names = [result.name for result in results]
    if len(given) < len(names) or not all(isinstance(x, Tensor) for x in given[: len(names)]):
        kinds = ", ".join(type(x).__name__ for x in given)
        raise ValueError(f"({kinds}): expected {', '.join(names)}")
    return dict(zip(names, given, strict=False))
