"""What an operation's target is held against on a case, and what is measured of it.

The same figures as attention's, a sample being one independently drawn call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfulp.audit.figures import (
    Figure,
    Lean,
    Measured,
    Peak,
    error_in_ulps,
    lean_along,
    plain_figure,
    short,
)
from halfulp.audit.part_leans import Directions, directions, part_leans
from halfulp.formats import FORMAT_OF, FP32, Format
from halfulp.operations import (
    DTYPES,
    OperationCalls,
    OperationProbe,
    OperationResult,
    Tensors,
    defined,
    disturbed,
    emulated,
)

# small enough for errors to be of first order, and far above the 2⁻⁵³ of fp64
_DISTURBED_BY = 2.0**-20
_TIMES = 2  # how often the definition is disturbed
# with the usual slack an update that is never applied hid behind storing the weight (docs/log.md)
_WIDER = 2.0**-5  # of that, where the result is kept in fp32 beside 16-bit operands
_FLUSHED = 6.0  # times its error counts a 0 where the exact value is another
_DUST = 2.0**-7  # of a unit roundoff: what fp32 in any order may make


@dataclass(frozen=True)
class OperationStandard:
    """What is exact on one case, and what rounding makes of it: kept on disk."""

    truth: Tensors  # fp64, `[calls, ...]`
    noise: dict[str, Tensor]  # root mean square an element, every step rounded by 1, by row
    stock: Measured
    floor: Measured
    along: Directions  # what leans are looked for along


class Measures:
    """What a target is held against on one case: the figures of two recipes."""

    standard: Any  # what rounding makes of the case

    @property
    def stock(self) -> Measured:
        """The stock recipe's."""
        found: Measured = self.standard.stock
        return found

    @property
    def floor(self) -> Measured:
        """The floor's."""
        found: Measured = self.standard.floor
        return found


@dataclass(frozen=True)
class OperationReferences(Measures):
    """One case's calls and what is known of them."""

    inputs: OperationCalls
    probe: OperationProbe
    standard: OperationStandard

    @property
    def truth(self) -> Tensors:
        """The definition in fp64, `[calls, ...]`."""
        return self.standard.truth

    def measure(self, result: OperationResult) -> Measured:
        """What is measured of a target's result on this case."""
        of = self.standard
        return _measured(result.tensors, self.inputs, self.truth, of.noise, of.along)


def operation_standard(calls: OperationCalls) -> OperationStandard:
    """The definition, natural noise, stock and floor of some calls."""
    truth = defined(calls)
    noise, along = _natural_noise(calls, truth), directions(calls, truth)
    stock, floor = (
        _measured(emulated(calls, recipe), calls, truth, noise, along)
        for recipe in (calls.operation.stock, calls.operation.floor)
    )
    return OperationStandard(truth, noise, stock, floor, along)


def _rows(name: str, calls: OperationCalls, x: Tensor) -> int:
    """How many dimensions after the first count rows that are held to their own size."""
    # without rows of their own, small ones could be anything beside large neighbors (docs/log.md)
    own = {r.name: r.rows for r in calls.operation.results}.get(name)
    return max(0, x.ndim - 2) if own is None else own


def _by_row(name: str, calls: OperationCalls, x: Tensor) -> Tensor:
    """`[calls, ...]` as `[calls, rows, elements of a row]`."""
    dims = 1 + _rows(name, calls, x)
    return x.reshape(x.shape[0], -1, max(1, x[0].numel() // max(1, x.shape[1:dims].numel())))


def _natural_noise(calls: OperationCalls, truth: Tensors) -> Tensors:
    """`[calls, rows, 1]` by tensor: the error that rounding every step and the result by 1 makes,
    from a definition whose every step is off by a small random part of itself.
    """
    generator = torch.Generator().manual_seed(0)
    power: Tensors = {}
    for _ in range(_TIMES):
        other = defined(calls, disturbed(generator, _DISTURBED_BY))
        for name, exact in truth.items():
            if not exact.is_floating_point():
                continue
            off = _by_row(name, calls, (other[name] - exact).nan_to_num(0.0, 0.0, 0.0))
            mean = off.square().mean(-1, keepdim=True) / (_DISTURBED_BY**2 * _TIMES)
            power[name] = power.get(name, torch.zeros(())) + mean
    found = {}
    for name, total in power.items():
        exact = _by_row(name, calls, torch.where(truth[name].isfinite(), truth[name], 0.0))
        found[name] = (total + exact.square().mean(-1, keepdim=True)).sqrt()
    return found


def _measured(
    tensors: Tensors, calls: OperationCalls, truth: Tensors, noise: Tensors, along: Directions
) -> Measured:
    dtypes = {name: kinds[0] for name, (_, kinds) in calls.expected().items()}
    figures: list[Figure] = []
    leans: list[Lean] = []
    nonfinite: dict[str, int] = {}
    ulps: dict[str, tuple[float, float, float]] = {}
    for name, exact in truth.items():
        got = tensors.get(name)
        if got is None or name not in noise:
            continue
        fmt = FORMAT_OF[dtypes[name]]
        got = got.double()
        difference = got - exact
        if not _is_plain(difference, exact, fmt):
            representable = exact.isfinite() & (exact.abs() <= fmt.max)
            bad = int((~got.isfinite() & representable).sum())
            if bad:
                nonfinite[name] = bad
                continue
            difference = torch.where(representable, difference, 0.0)
            exact = torch.where(exact.isfinite(), exact, 0.0)
        off, size = (_by_row(name, calls, t).unsqueeze(1) for t in (difference, exact))
        dust = noise[name] * _WIDER if is_wider(dtypes[name], calls) else noise[name]
        natural = (dust.square().sum((1, 2)) * size.shape[-1]).sqrt()
        own = size.flatten(2).square().sum(-1).sqrt().flatten()
        # `plain_figure` counts in the audited format's roundoffs, the result may have its own
        allowed = (own * (fmt.unit_roundoff / _unit(calls)), torch.zeros_like(own))
        error, terms = off.flatten(2).square().sum(-1).sqrt().flatten(), off[0].numel()
        figure = plain_figure(
            f"{short(name)} error", name, error, own, terms, natural, allowed, _unit(calls)
        )
        peak = _peak(off, size, dust, fmt.unit_roundoff, _unit(calls), got, exact)
        figures.append(replace(figure, peak=peak))
        # a result that is kept in fp32 leans by the roundings of its 16-bit operands
        coarser = max(fmt, FORMAT_OF[DTYPES[calls.dtype]], key=lambda f: f.unit_roundoff)
        leans.append(Lean(name, lean_along(off, size, natural, coarser)))
        if name in along:
            of_rows = noise[name].square()
            weight = torch.where(of_rows > 0, 1 / of_rows, 0.0).nan_to_num_(0.0, 0.0, 0.0)
            wide = weight.expand_as(off[:, 0]).reshape(difference.shape)
            symbols, unit = _symbols(name, calls), coarser.unit_roundoff
            onto = {"": exact, **along[name]}
            leans += part_leans(name, difference, onto, wide, symbols, unit)
        ulps[name] = error_in_ulps(difference, exact, fmt)
    return Measured(tuple(figures), tuple(leans), nonfinite, ulps)


def _is_plain(difference: Tensor, exact: Tensor, fmt: Format) -> bool:
    """Whether all numbers are some that the format has, as nearly everywhere: to look at each would
    take longer than to measure it.
    """
    if not exact.numel():
        return True
    least, most = exact.aminmax()
    within = max(-float(least), float(most)) <= fmt.max  # not where one is NaN
    return within and math.isfinite(float(difference.sum()))


def _symbols(name: str, calls: OperationCalls) -> list[str]:
    of = calls.operation
    shapes = {f"grad_{n}": shape for n, shape in of.shapes_of_operands.items()}
    return (shapes | of.shapes_of_results)[name].split()


def is_wider(dtype: torch.dtype, calls: OperationCalls) -> bool:
    """Whether a result has more digits than the audited dtype."""
    return FORMAT_OF[dtype].unit_roundoff < _unit(calls)


def _unit(calls: OperationCalls) -> float:
    """The unit roundoff of the audited dtype."""
    return FORMAT_OF[DTYPES[calls.dtype]].unit_roundoff


def _peak(
    off: Tensor,
    size: Tensor,
    noise: Tensor,
    of_result: float,
    unit: float,
    got: Tensor,
    exact: Tensor,
) -> Peak:
    """The largest error of an element in units of what rounding its row's largest may make."""
    largest = size.abs().amax(-1, keepdim=True) * of_result
    allowed = torch.maximum(largest, noise.unsqueeze(1) * (unit * _DUST)) + FP32.min_normal
    beyond = off.abs() / allowed
    if not float(got.abs().amin()):
        # rounding makes small numbers of small numbers; a 0 has been flushed
        beyond *= torch.where((got.reshape(off.shape) == 0) & (off != 0), _FLUSHED, 1.0)
    error, at = beyond.flatten(1).max(-1)
    there, expected = (x.flatten(1).gather(1, at[:, None])[:, 0] for x in (got, exact))
    return Peak(error, torch.ones_like(error), at, there, expected, tuple(got.shape))
