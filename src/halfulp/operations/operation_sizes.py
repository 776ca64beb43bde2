"""How kernels of any operation are called beside its probes: every size that a tail can have, every
probe at such sizes, values that are no probe's, memory that is not dense, calls that are repeated.

One generator serves all operations: it knows the symbols of their shapes and no more. A case is one
call, judged by its elements alone, and goes by the name of its levels,
"sizes/gaussian/zeros/packed/expanded/twice", so that its name draws it again.
"""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from halfulp.formats import BlockFormat
from halfulp.operations.operation_data import Operation, OperationProbe, Sizes, Tensors
from halfulp.operations.reading import operation_named
from halfulp.operations.seam import STOCHASTIC, Steps, exactly

PREFIX = "sizes"
LENGTHS = (1, 2, 3, 7, 15, 17, 31, 33, 47, 63, 65, 77, 100, 127, 129, 250, 1000)
"""Ones, tails of 1 to 63 past blocks of 8 to 128, and more than blocks are long."""

LARGEST_WORK = 2**15  # elements of a call
BLOCK = 16  # from which on lengths that are all multiples are so because they must be
KINK = 1e-9  # by which a point is left to see whether its gradient jumps
FEWEST = 17  # along each symbol where chance or blocks round: fewer are exact by luck


def _first_zero(x: Tensor) -> Tensor:
    return torch.cat([x[:1] * 0, x[1:]])


def _powers(x: Tensor) -> Tensor:
    """Ties: as many as there are elements beyond a few powers of 2, of either sign."""
    return x.sign() * x.abs().log2().nan_to_num(neginf=-100.0).round().clamp_min(-100).exp2()


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": _first_zero,
    "ties": _powers,
    "offset": lambda x: x + 16.0,
    "large": lambda x: x * 4.0,
    "small": lambda x: x * 2.0**-12,
}
MANNERS = {
    "values": ("plain", *VALUES),
    "memory": ("contiguous", "transposed", "packed"),
    "grad_memory": ("contiguous", "transposed", "expanded"),
    "calls": ("once", "twice", "backward-twice", "filled"),
}
"""What a name holds after the probe; those of memory and calls are `halfulp.targets.manner`'s."""


def probe_of(operation: Operation, name: str) -> OperationProbe:
    """The probe of a case's name, one of the operation's or of these sizes, with the one value that
    a kernel takes of an option behind it: "gaussian/reduction='mean'"; raises ValueError for what
    is no such name.
    """
    before, slash, last = name.rpartition("/")
    option, equal, value = last.partition("=")
    if slash and equal:
        asked = probe_of(operation, before)
        if option not in operation.options:
            accepted = ", ".join(operation.options)
            raise ValueError(f"probe={name!r}: {option} is no option; accepted are {accepted}")
        return replace(asked, options={option: ast.literal_eval(value), **asked.options})
    if not name.startswith(f"{PREFIX}/"):
        return operation.probe(name)
    _, probe, *levels = name.split("/")
    known = zip(MANNERS.items(), levels, strict=False)
    if len(levels) != len(MANNERS) or any(level not in accepted for (_, accepted), level in known):
        accepted = "/".join("|".join(levels) for levels in MANNERS.values())
        raise ValueError(f"probe={name!r}: accepted is {PREFIX}/PROBE/{accepted}")
    of = operation.probe(probe)
    values, *manner = levels

    def draw(sizes: Sizes, generator: torch.Generator) -> Tensors:
        x = of.draw(sizes, generator)
        if values in VALUES:
            first = _main(operation)
            x[first] = VALUES[values](x[first])
        if manner[1] == "expanded":
            for result in operation.results:
                own = f"grad_{result.name}"
                if operation.differentiable and result.differentiable and result.shape:
                    shape = sizes.shape(result.shape)
                    grad = x[own] if own in x else torch.randn(shape, generator=generator)
                    x[own] = grad[:1].expand_as(grad).contiguous()
        return x

    return replace(of, name=name, draw=draw, sizes={}, manner="/".join(manner))


def _main(operation: Operation) -> str:
    """The first operand that is audited, whose values are changed."""
    names = [x.name for x in operation.operands if x.dtype == "audited"]
    return (names or [x.name for x in operation.operands if x.dtype == "float32"])[0]


@lru_cache(maxsize=128)
def size_rows(
    folder: str, seed: int, count: int, plain: bool = False
) -> tuple[tuple[str, Sizes], ...]:
    """The names and sizes of so many cases of an operation: every level of every factor about as
    often as any other, their pairs shuffled by the seed; `plain`: of the probes' own values alone.
    """
    return tuple(islice(_rows(operation_named(folder), seed, plain), count))


def _rows(operation: Operation, seed: int, plain: bool) -> Iterator[tuple[str, Sizes]]:
    chance = random.Random(f"{operation.name} {seed}")
    formats = (*operation.stock.steps.values(), *operation.floor.steps.values())
    chance_rounds = any(f == STOCHASTIC or isinstance(f, BlockFormat) for f in formats)
    least = FEWEST if chance_rounds else 1
    every = [dict(sizes.of) for sizes in operation.sizes]
    independent = operation.independent if least == 1 else every[0]
    fixed = {symbol for symbol in every[0] if len({sizes[symbol] for sizes in every}) == 1}
    factors: dict[str, list[Any]] = {
        symbol: _lengths([sizes[symbol] for sizes in every], least + (symbol not in independent))
        for symbol in every[0]
        if symbol not in fixed
    }
    factors["probe"] = list(operation.probes)
    factors |= {name: list(levels) for name, levels in MANNERS.items()}
    if not operation.ties:  # whose probes keep their numbers apart at their own sizes
        factors |= {"probe": list(operation.probes[:1]), "values": ["plain", "large", "small"]}
    if plain:
        factors["values"] = ["plain"]
    if not operation.differentiable:
        factors |= {"grad_memory": ["contiguous"]}
        factors["calls"].remove("backward-twice")
    decks: dict[str, list[Any]] = {name: [] for name in factors}
    for _ in range(1000):
        row = {}
        for name, levels in factors.items():
            if not decks[name]:
                decks[name] = chance.sample(levels, len(levels))
            row[name] = decks[name].pop()
        probe = row["probe"]
        # other values are of plain inputs: two extremes at once are nobody's
        probe = operation.probes[0] if row["values"] != "plain" else probe
        own = {symbol: probe.sizes.get(symbol, every[0][symbol]) for symbol in fixed}
        sizes = Sizes(1, tuple((own | {s: row.get(s) for s in every[0] if s not in fixed}).items()))
        sizes = _affordable(sizes, {s: factors[s] for s in every[0] if s not in fixed})
        manner = (row[name] for name in MANNERS)
        name = "/".join((PREFIX, probe.name, *manner))
        if _fits(operation, probe, sizes) and _is_smooth(operation, name, sizes):
            yield name, sizes


def _lengths(own: list[int], least: int) -> list[int]:
    """Lengths up to four times the operation's own, whole blocks where those are."""
    block = math.gcd(*own)
    block = block if block >= BLOCK else 1
    lengths = (-(-n // block) * block for n in LENGTHS)
    return list(dict.fromkeys(n for n in lengths if least <= n <= 4 * max(own)))


def _affordable(sizes: Sizes, levels: dict[str, list[int]]) -> Sizes:
    """With the longest symbol shortened until a call is small."""
    while sizes.work > LARGEST_WORK:
        symbol = max(levels, key=lambda s: sizes[s])
        shorter = [n for n in levels[symbol] if n < sizes[symbol]]
        if not shorter:
            break
        sizes = sizes.with_(**{symbol: shorter[-1]})
    return sizes


def _fits(operation: Operation, probe: OperationProbe, sizes: Sizes) -> bool:
    """Whether the operation exists at that size: half of a pair is not turned, nor two experts
    chosen of one.
    """
    try:
        x = probe.draw(sizes, torch.Generator().manual_seed(0))
        with torch.no_grad():
            found = operation.define(Steps(exactly), x, {**operation.options, **probe.options})
    except (RuntimeError, ValueError, LookupError):
        return False
    shapes = {o.name: o.shape for o in operation.operands} | {
        r.name: r.shape for r in operation.results
    }
    return all(tuple(t.shape) == sizes.shape(shapes[n]) for n, t in (x | found).items()
               if n in shapes)  # fmt: skip


def _is_smooth(operation: Operation, name: str, sizes: Sizes) -> bool:
    """Whether the definition has a gradient where many elements are 0 or alike: at a kink, such as
    |x| has at 0, kernels may give either side's.
    """
    probe = probe_of(operation, name)
    leaves = [x.name for x in operation.differentiable]
    if not leaves or not {"zeros", "ties"} & set(name.split("/")):
        return True

    def slopes(by: float) -> list[Tensor]:
        x = probe.draw(sizes, torch.Generator().manual_seed(0))
        x = {n: t.double() + by if t.is_floating_point() else t for n, t in x.items()}
        own = [x[n].requires_grad_() for n in leaves]
        found = operation.define(Steps(exactly), x, {**operation.options, **probe.options})
        results = [(t + 1).square().sum() for t in found.values() if t.requires_grad]
        total = torch.stack(results).sum()
        return [g for g in torch.autograd.grad(total, own, allow_unused=True) if g is not None]

    return all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()), equal_nan=True)
        for a, b in zip(slopes(0.0), slopes(KINK), strict=True)
    )
