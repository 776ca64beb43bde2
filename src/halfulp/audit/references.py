"""What a target is held against on a case: the golden value, the stock recipe emulated, and the
floor of the format, each measured once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from torch import Tensor

from halfulp import recipes
from halfulp.attention import emulate, golden
from halfulp.audit import kept
from halfulp.audit.figures import Measured, measure
from halfulp.audit.inputs import Case, Inputs, in_parts
from halfulp.audit.natural_noise import Noise, natural_noise
from halfulp.audit.operation_figures import (
    Measures,
    OperationReferences,
    OperationStandard,
    operation_standard,
)
from halfulp.audit.probes import Probe, probe_named
from halfulp.audit.rounding_bound import beyond_rounding
from halfulp.calls import Result, gradients_of
from halfulp.operations import ATTENTION, OperationCalls, probe_of
from halfulp.recipes import Recipe

T = TypeVar("T")

STOCK: dict[str, Recipe] = {
    "bfloat16": recipes.BF16_FLASH2,
    "float16": recipes.FP16_FLASH2,
    "float32": recipes.FP32,
}
FLOOR: dict[str, Recipe] = {
    "bfloat16": recipes.BF16_FLOOR,
    "float16": recipes.FP16_FLOOR,
    "float32": recipes.FP32,
}


@dataclass(frozen=True)
class Exact:
    """One case's inputs and their golden result: what takes memory."""

    inputs: Inputs
    truth: Result

    @cached_property
    def bytes(self) -> int:
        """Of memory."""
        held = (*vars(self.inputs).values(), *vars(self.truth).values(), self.inputs.sees.mask)
        return sum(x.numel() * x.element_size() for x in held if isinstance(x, Tensor))


@dataclass(frozen=True)
class Standard:
    """What rounding makes of one case, a few numbers a head: kept on disk."""

    noise: Noise
    stock: Measured
    floor: Measured


@dataclass(frozen=True)
class References(Measures):
    """One case and what is known of it; its tensors are drawn and computed again when they are
    asked for and memory was short since.
    """

    case: Case
    standard: Standard

    @property
    def probe(self) -> Probe | None:
        """The case's probe; None for captured tensors."""
        return None if self.case.file else probe_named(self.case.probe)

    @property
    def inputs(self) -> Inputs:
        """The case's tensors."""
        return _exact(self.case).inputs

    @property
    def truth(self) -> Result:
        """Their golden result."""
        return _exact(self.case).truth

    def measure(self, result: Result) -> Measured:
        """What is measured of a target's result on this case."""
        probe = self.probe
        in_ulps = probe is None or not probe.elements_only
        found = measure(
            result, self.truth, self.standard.noise, self.inputs, probe, in_ulps=in_ulps
        )
        return replace(found, beyond=beyond_rounding(result, self.truth, self.inputs))


MOST_HELD = 2**29
"""Bytes of inputs and golden results that a process holds; the newest is held whatever its size."""

_held: dict[Case, Exact] = {}  # the one asked for last at the end


def _exact(case: Case) -> Exact:
    # taken out and put in again at the end: a dictionary's order is then that of the last use
    found = _held.pop(case, None)
    if found is None:
        # short ones are made again in every process: to read them takes as long (docs/log.md)
        x = case.inputs()
        found = Exact(x, _truth(case, x))
    _held[case] = found
    # without a bound --full took 10 GB (docs/log.md)
    total = sum(exact.bytes for exact in _held.values())
    for other in list(_held)[:-1]:
        if total <= MOST_HELD:
            break
        total -= _held.pop(other).bytes
    return found


_LONG, _MOST_KEPT = 200, 2**20
"""Keys from which on a golden result takes far longer to compute (N²) than to read (N), and
elements of a query up to which it is kept: 240 MB a plan.
"""


def _truth(case: Case, x: Inputs) -> Result:
    """The golden result. Of long calls in 16 bits it is kept on disk, in fp32, whose rounding is at
    most 2⁻¹³ of that of such a result.
    """
    if case.dtype == "float32" or x.key.shape[2] < _LONG or x.query.numel() >= _MOST_KEPT:
        return golden(*x, **x.options(seeded=True))

    def computed() -> Result:
        return golden(*x, **x.options(seeded=True)).map(Tensor.float)

    return _kept(case, Result, computed).map(Tensor.double)


_MOST_SCORES = 2**24
"""Of one emulation: recipes without tiles hold several matrices of this many numbers."""

_CACHED_SCORES = 2**18
"""Of one that is no single call of the library: its fp64 matrices pass through the cache often."""


def emulated(x: Inputs, recipe: Recipe) -> Result:
    """The recipe's out, lse and gradients on given inputs, emulated; long ones a key head at a
    time, those in fp64 by two, with the same bits.
    """
    scores = x.query.shape[:3].numel() * x.key.shape[2]
    if scores <= (_CACHED_SCORES if recipe.compute == "float64" else _MOST_SCORES):
        return _emulated(x, recipe)
    heads = 1 if scores > _MOST_SCORES else 2
    return Result(**in_parts(x, heads, lambda part, _: _emulated(part, recipe).given()))


def _emulated(x: Inputs, recipe: Recipe) -> Result:
    q, k, v = (t.detach().requires_grad_() for t in x.operands)
    out, lse = emulate(q, k, v, recipe=recipe, return_lse=True, **x.options(seeded=True))
    grads = gradients_of([out], [x.grad_out], (q, k, v))
    return Result(out.detach(), lse.detach(), *grads)


@lru_cache(maxsize=1024)
def references(case: Case) -> Any:
    """`References` of a case; their figures are kept in this process and on disk, so that auditing
    many targets, today or tomorrow, pays for them once; `OperationReferences` of another
    operation's.
    """
    if case.operation == ATTENTION:
        return References(case, _kept(case, Standard, lambda: _standard(case)))
    calls: OperationCalls = case.inputs()
    standard = _kept(case, OperationStandard, lambda: operation_standard(calls))
    return OperationReferences(calls, probe_of(calls.operation, case.probe), standard)


def _kept(case: Case, kind: type[T], computed: Callable[[], T]) -> T:
    """As it is on disk; else computed, and kept there."""
    found = kept.read(case, kind)
    if found is None:
        found = computed()
        kept.write(case, found)
    return found


def _standard(case: Case) -> Standard:
    x, truth = _exact(case).inputs, _exact(case).truth
    probe = None if case.file else probe_named(case.probe)
    noise = natural_noise(x, truth.out)

    def measured(recipe: Recipe) -> Measured:
        return measure(emulated(x, recipe), truth, noise, x, probe, in_ulps=False)

    stock = measured(STOCK[case.dtype])
    # in float32 stock and floor are one recipe; single elements are held to the stock recipe alone
    alike = FLOOR[case.dtype] is STOCK[case.dtype] or (probe is not None and probe.elements_only)
    return Standard(noise, stock, stock if alike else measured(FLOOR[case.dtype]))
