"""One evaluation of a definition, kept operation by operation, so that it is made again from the
steps on that are changed: a search computes one call in hundreds of ways, and most change little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfulp.calls import gradients_of
from halfulp.operations.operation_calls import OperationCalls, evaluated, given_to
from halfulp.operations.operation_data import Tensors
from halfulp.operations.seam import Change, Steps


class _Value(NamedTuple):
    """A tensor of the evaluation, by its number."""

    number: int


class _Node(NamedTuple):
    """What gave some of its values: an operator, or a step by its name."""

    of: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    read: frozenset[int]
    written: tuple[int, ...]


class Slope(NamedTuple):
    """A step that was met, or what is given, and how results change with it."""

    name: str
    given: bool
    before: Tensor  # what went in
    after: Tensor  # what became of it
    along: list[Tensor | None]  # None: nothing asked for hangs on it


_FLAT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("round", "floor", "ceil", "trunc", "sign", "sgn", "frac")
)
"""Operators whose slope is 0, or 1, between jumps that are all they do."""
_EQUAL = frozenset(
    (torch.ops.aten.isnan.default, torch.ops.aten.eq.Scalar, torch.ops.aten.ne.Scalar,
     torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor)
)  # fmt: skip
"""Comparisons that a small change of numbers does not change, as derivatives make them."""


class UnlikeError(Exception):
    """What is changed has other operations; it is evaluated anew."""


@dataclass
class _One:
    """One call's."""

    nodes: list[_Node] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    given: dict[str, int] = field(default_factory=dict)  # operands and gradients that arrive
    results: dict[str, int] = field(default_factory=dict)
    below: dict[Any, list[_Node]] = field(default_factory=dict)

    def again(
        self, given: Tensors, change: Change, names: Collection[str], only: frozenset[str]
    ) -> Tensors:
        """Those of these results that are others with these operands in place of its own, and a
        change of these steps.
        """
        new: dict[int, Tensor] = {self.given[n]: self._like(self.given[n], x)
                                  for n, x in given.items() if n in self.given}  # fmt: skip

        for node in self._towards(frozenset((*names, *new)), only):
            if type(node.of) is str:
                if node.of in names or not new.keys().isdisjoint(node.read):
                    (at,) = node.written
                    value = self._like(at, change(node.of, self._filled(node.args[0], new)))
                    if not torch.equal(value, self.values[at]):
                        new[at] = value
            elif not new.keys().isdisjoint(node.read):
                new.update(self._made(node, new))
        return {n: new[at] for n, at in self.results.items() if at in new and n in only}

    def _made(self, node: _Node, new: dict[int, Tensor]) -> dict[int, Tensor]:
        """What an operator gives with these values in place of its own."""
        options = {name: self._filled(x, new) for name, x in node.options.items()}
        found = node.of(*(self._filled(x, new) for x in node.args), **options)
        made = (found,) if type(found) is Tensor else found
        return dict(zip(node.written, made, strict=True))

    def _filled(self, x: Any, new: dict[int, Tensor]) -> Any:
        if type(x) is _Value:
            number = x.number
            return new[number] if number in new else self.values[number]
        return [self._filled(each, new) for each in x] if type(x) is list else x

    def _like(self, number: int, value: Tensor) -> Tensor:
        own = self.values[number]
        if value.shape != own.shape or value.dtype != own.dtype:
            raise UnlikeError
        return value

    def slopes(self, along: Sequence[Tensors]) -> list[Slope]:
        """How inner products of results with each of these change with the steps and what is given.
        `UnlikeError` where an operator has no slope, as a comparison has none.
        """
        new: dict[int, Tensor] = {}
        found: list[Slope] = []
        leaves: list[Tensor] = []
        for name, at in self.given.items():
            if (x := self.values[at]).is_floating_point():
                new[at] = x.clone().requires_grad_()
                leaves.append(new[at])
                found.append(Slope(name, True, x, x, []))
        for node in self.nodes:
            if type(node.of) is str:
                (at,), read = node.written, node.args[0]
                before, after = self._filled(read, {}), self.values[at]
                leaves.append(torch.zeros_like(after).requires_grad_())
                # as if nothing were rounded there
                new[at] = self._filled(read, new) + (after - before) + leaves[-1]
                found.append(Slope(node.of, False, before, after, []))
            elif not new.keys().isdisjoint(node.read):
                if node.of in _EQUAL:
                    continue
                written = [self.values[n] for n in node.written]
                if node.of in _FLAT or not all(x.is_floating_point() for x in written):
                    raise UnlikeError
                new.update(self._made(node, new))
        for each in along:
            outs = {n: new[at] for n, at in self.results.items() if n in each and at in new}
            grads = gradients_of([*outs.values()], [each[n] for n in outs], leaves, keep_graph=True)
            for slope, grad in zip(found, grads, strict=True):
                slope.along.append(grad)
        return found

    def reached(self, name: str, given: bool) -> Iterator[str]:
        """The results that are made of a step, or of what is given."""
        of = self.given[name] if given else name
        written = {of, *(n for node in self._below(frozenset([of])) for n in node.written)}
        yield from (result for result, at in self.results.items() if at in written)

    def _towards(self, changed: frozenset[object], results: frozenset[str]) -> list[_Node]:
        """What may become another by a change of these steps and values, and reaches results."""
        if (key := (changed, results)) not in self.below:
            wanted = {at for name, at in self.results.items() if name in results}
            found = []
            for node in reversed(self._below(changed)):
                if not wanted.isdisjoint(node.written):
                    wanted |= node.read
                    found.append(node)
            self.below[key] = found[::-1]
        return self.below[key]

    def _below(self, changed: frozenset[object]) -> list[_Node]:
        """What may become another by a change of these steps and values."""
        if changed not in self.below:
            reached = {x for x in changed if type(x) is int}
            found = []
            for node in self.nodes:
                if node.of in changed or not reached.isdisjoint(node.read):
                    reached.update(node.written)
                    found.append(node)
            self.below[changed] = found
        return self.below[changed]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every operator and step; `UnlikeError` where these may hang on numbers."""

    def __init__(self, change: Change) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.one, self.change, self.stepping = _One(), change, False
        self.numbers: dict[tuple[Any, ...], int] = {}  # where a tensor lies: autograd has its own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper that keeps the compiler out of it would import the compiler first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.stepping:
            self._keep(func, args, kwargs or {}, found)
        return found

    def step(self, name: str, exact: Tensor) -> Tensor:
        """A step, or its gradient: what becomes of it lies elsewhere than what went in."""
        self.stepping = True
        value = self.change(name, exact.detach())
        value = value.clone() if value.data_ptr() == exact.data_ptr() else value
        self.stepping = False
        self._node(name, [exact], {}, [value])
        return value

    def number(self, x: Tensor, made: bool = False) -> int:
        """Of a tensor; one that is not known was there before."""
        where = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        if where not in self.numbers or (made and not x.numel()):
            self.numbers[where] = len(self.one.values)
            self.one.values.append(x.detach())  # kept, so that no other comes to lie there
        return self.numbers[where]

    def _keep(self, func: Any, args: Any, options: dict[str, Any], found: Any) -> None:
        made = found if isinstance(found, (list, tuple)) else (found,)
        numbers = any(not isinstance(x, Tensor) for x in made)
        if numbers or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise UnlikeError
        self._node(func, args, options, made)

    def _node(self, of: Any, args: Any, options: dict[str, Any], made: Any) -> None:
        read: set[int] = set()

        def told(x: Any) -> Any:
            if isinstance(x, Tensor):
                read.add(number := self.number(x))
                return _Value(number)
            return [told(each) for each in x] if isinstance(x, (list, tuple)) else x

        args, options = tuple(map(told, args)), {name: told(x) for name, x in options.items()}
        known = len(self.one.values)
        written = tuple(self.number(x, made=True) for x in made)
        if any(n >= known for n in written):  # another name of what there is is nothing new
            self.one.nodes.append(_Node(of, args, options, frozenset(read), written))


class Recorded:
    """The results of some calls in one arithmetic, to be made again with some of it changed.

    Raises `UnlikeError` where a definition's operations hang on numbers.
    """

    def __init__(self, calls: OperationCalls, change: Change, compute: torch.dtype) -> None:
        self.calls, self.ones = calls, list[_One]()
        parts: dict[str, list[Tensor]] = {}
        for number in range(calls.count):
            recorder = _Recorder(change)
            given = given_to(calls, number, compute)
            recorder.one.given = {name: recorder.number(x) for name, x in given.items()}
            with recorder:
                found = evaluated(calls, Steps(recorder.step), given)
            recorder.one.results = {name: recorder.number(x) for name, x in found.items()}
            self.ones.append(recorder.one)
            for name, x in found.items():
                parts.setdefault(name, []).append(x)
        self.found = {name: torch.stack(x) for name, x in parts.items()}

    def again(
        self,
        calls: OperationCalls,
        change: Change,
        names: Collection[str],
        only: Collection[str] | None = None,
    ) -> Tensors:
        """The results of these calls, which differ in operands at most, with a change of these
        steps: all, or these `only`.
        """
        results = frozenset(self.found if only is None else only)
        others = {n: x for now, own in ((calls.operands, self.calls.operands),
                                        (calls.grads, self.calls.grads))
                  for n, x in now.items() if x is not own[n]}  # fmt: skip
        parts: dict[str, list[Tensor]] = {}
        for number, one in enumerate(self.ones):
            given = {n: x[number].to(one.values[one.given[n]].dtype) for n, x in others.items()}
            for name, x in one.again(given, change, names, results).items():
                parts.setdefault(name, list(self.found[name]))[number] = x
        found = {name: x for name, x in self.found.items() if name in results}
        return found | {name: torch.stack(x) for name, x in parts.items()}

    def reached(self, name: str, *, given: bool) -> set[str]:
        """The results that are made of a step, or of what is given."""
        return {result for one in self.ones for result in one.reached(name, given)}

    def slopes(self, along: Sequence[Tensors]) -> list[Slope]:
        """How inner products of results with each of these change with every step and what is
        given, of all the calls. `UnlikeError` where an operator has no slope.
        """
        found = []
        for number, one in enumerate(self.ones):
            of = [{n: x[number] for n, x in each.items()} for each in along]
            with torch.enable_grad():
                found += one.slopes([{n: x.to(one.values[one.results[n]].dtype)
                                      for n, x in each.items()} for each in of])  # fmt: skip
        return found
