"""Figures: what is measured of one result on one case, an error per head beside the rounding noise
that is natural there.

A figure is a Euclidean norm over one head's elements of (result − golden). The slack added to both
sides of every comparison is a 1/128 of the unit roundoff times the root sum of squares of the terms
that make the tensor up, so that fp32 dust is never compared with zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from halfulp.audit.inputs import Inputs
from halfulp.audit.natural_noise import Noise, per_sample
from halfulp.audit.probes import Probe
from halfulp.calls import Result
from halfulp.formats import FORMAT_OF, FP32, Format
from halfulp.formats.general import power_of_two_below

GRADIENTS = ("grad_query", "grad_key", "grad_value")
SHORT = {"out": "O", "lse": "lse", "grad_query": "dQ", "grad_key": "dK", "grad_value": "dV"}


def short(tensor: str) -> str:
    """A tensor as findings name it: O, dQ, or of another operation output, dweight."""
    own = f"d{tensor.removeprefix('grad_')}" if tensor.startswith("grad_") else tensor
    return SHORT.get(tensor, own)


def unlike(got: float, exact: float) -> str:
    """A number and what it should be, to as many digits as tell them apart."""
    digits = next((n for n in range(3, 17) if f"{got:.{n}g}" != f"{exact:.{n}g}"), 17)
    return f"{got:.{digits}g}, expected {exact:.{digits}g}"


_SLACK = 2.0**-7
_TINY = FP32.min_normal
# a uniform error of ± u has 1/√3 of it; relative to numbers spread over a binade, where the mean of
# 1/x² is 1/2, that is 0.41
_ROUNDING = 0.4  # root mean square of a rounding to nearest, in unit roundoffs, over a binade


def place_of(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element that is counted through."""
    # torch.unravel_index imports sympy
    return tuple(map(int, np.unravel_index(flat, tuple(shape))))


@dataclass(frozen=True)
class Peak:
    """The largest error of one element, per head `[S]`: a mean over heads cannot see it.

    Of other operations than attention, per call, and in units of what may be made in its row.
    """

    error: Tensor
    own: Tensor  # what rounding the largest element of the head, or by nature, may make
    at: Tensor  # where in the head, counted through
    got: Tensor  # there
    exact: Tensor
    shape: tuple[int, ...]  # of the tensor: [B, H, N, D], or [calls, ...]

    def place(self, sample: int) -> tuple[int, ...]:
        """(b, h, i, d) of the largest error of one head."""
        flat = sample * (math.prod(self.shape) // self.at.numel()) + int(self.at[sample])
        return place_of(flat, self.shape)


@dataclass(frozen=True)
class Figure:
    """One measured error per head, `[S]` each: the error's norm, the slack, and the norm of the
    golden value (0 where it vanishes).
    """

    name: str  # e.g. "dQ error"
    tensor: str  # which result it was read from: out, lse, grad_query, ...
    error: Tensor
    slack: Tensor
    own: Tensor  # the error that rounding the result itself may make: no reference is held below it
    # the error that rounding O may make through δ: the stock recipe is not held below it
    through_delta: Tensor
    size: Tensor  # the larger of the golden value's norm and the natural noise of a rounding of 1

    peak: Peak | None = None  # the largest errors of single elements; None of a sum

    @property
    def relative(self) -> float:
        """Relative L2 error, pooled over heads; against the size of the terms where the golden
        value vanishes by cancellation.
        """
        return float(
            self.error.square().sum().sqrt() / self.size.square().sum().sqrt().clamp_min(1e-300)
        )


@dataclass(frozen=True)
class Lean:
    """How far a result leans, per head `[S]`, in unit roundoffs: its projection on the golden
    value, (result − golden)·golden / golden².
    """

    tensor: str
    lean: Tensor
    along: str = ""  # a step and a part of the result, where it is not golden itself

    @property
    def name(self) -> str:
        """As findings call it."""
        return f"{short(self.tensor)} leans" + (f" along {self.along}" if self.along else "")


@dataclass(frozen=True)
class Measured:
    """Everything measured of one result on one case."""

    figures: tuple[Figure, ...]
    leans: tuple[Lean, ...]
    nonfinite: dict[str, int] = field(
        default_factory=dict
    )  # tensor → elements that are NaN or Inf where golden is finite
    ulps: dict[str, tuple[float, float, float]] = field(
        default_factory=dict
    )  # tensor → mean and largest |error|, mean signed error, in ulps
    # tensor → how many times its worst element is beyond a target's `rounding_bound`, in words too;
    # no tensor of calls that have none
    beyond: dict[str, tuple[float, str]] = field(default_factory=dict)

    def inside(self, tensor: str) -> bool:
        """Whether every element is proven to be off by no more than rounding can do."""
        return self.beyond.get(tensor, (math.inf, ""))[0] <= 1


def measure(
    result: Result,
    truth: Result,
    noise: Noise,
    x: Inputs,
    probe: Probe | None,
    *,
    in_ulps: bool = True,
) -> Measured:
    """Measure one result `[B, H, N, D]` against golden, `in_ulps` as well or not. Tensors that hold
    NaN or Inf where golden is finite are counted, not measured.
    """
    fmt = FORMAT_OF[x.query.dtype]
    alone = probe is not None and probe.elements_only  # what nobody looks at is not computed
    figures: list[Figure] = []
    leans: list[Lean] = []
    nonfinite: dict[str, int] = {}
    ulps: dict[str, tuple[float, float, float]] = {}
    for name in ("out", "lse", *GRADIENTS):
        got, exact = getattr(result, name), getattr(truth, name)
        if got is None or exact is None:
            continue
        if name == "lse":
            got = got.double()
            # −inf is right for rows that see no key, and only there; +inf and NaN never are
            wrong = (
                got.isnan() | (got == torch.inf) | ((got == -torch.inf) != (exact == -torch.inf))
            )
            if wrong.any():
                nonfinite[name] = int(wrong.sum())
            else:
                figures.append(_lse_figure(got, exact, fmt))
            continue
        seen = _compared(got, exact, fmt, leans=not alone)
        if seen.bad:
            nonfinite[name] = seen.bad
            continue
        own = getattr(noise, name)
        # what rounding the result itself, and for dQ and dK rounding O, may do
        allowed = (seen.size, getattr(noise.delta, name, torch.zeros_like(seen.size)))
        label, terms = f"{SHORT[name]} error", exact.shape[2] * exact.shape[3]
        figure = plain_figure(
            label, name, seen.error, seen.size, terms, own, allowed, fmt.unit_roundoff
        )
        # one element's share: a feature that all keys have in common gets nearly all of δ's error
        most = getattr(noise.delta, f"most_{name}", torch.zeros_like(seen.size))
        figures.append(
            replace(figure, peak=_peak(got, exact, seen, fmt.unit_roundoff, figure, most))
        )
        if alone:
            continue
        leans.append(Lean(name, _lean(seen.along, seen.size, own, fmt)))
        if in_ulps:
            off = got.double().sub_(exact)
            if not bool((seen.largest <= fmt.max).all()):  # beyond there is no ulp to be off by
                off.masked_fill_(~(exact.abs() <= fmt.max), 0.0)
            ulps[name] = error_in_ulps(off, exact, fmt)
    if not alone:
        figures += _sums(result, truth, noise, x, fmt, probe, nonfinite)
    if probe is not None and probe.judged_by is not None:
        figures = [
            replace(f, slack=f.slack * probe.slack) for f in figures if f.name == probe.judged_by
        ]
        leans = []
    return Measured(tuple(figures), tuple(leans), nonfinite, ulps)


@dataclass(frozen=True)
class _Compared:
    """One tensor of a result against golden, per head `[S]`."""

    bad: int  # elements that are not finite where golden is; then nothing else counts
    error: Tensor
    size: Tensor
    largest: Tensor  # of golden's finite elements
    peak: Tensor
    at: Tensor
    along: Tensor  # the error's projection on golden, not divided


_AT_ONCE = 2**15
"""Elements that are compared at once: what stays in a core's cache takes a quarter of the time."""


def _slabs(samples: int, terms: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE // max(1, terms))
    return (slice(start, start + step) for start in range(0, samples, step))


def _compared(got: Tensor, exact: Tensor, fmt: Format, leans: bool) -> _Compared:
    got, exact = (x.flatten(2).flatten(0, 1) for x in (got, exact))
    bad, parts = 0, []
    for slab in _slabs(*exact.shape):
        truth = exact[slab]
        off, size = got[slab].double().sub_(truth), truth.abs()
        largest = size.amax(1)
        if not bool((largest <= fmt.max).all()):  # golden is infinite, NaN, or overflows
            off.masked_fill_(~(size <= fmt.max), 0.0)
            largest = size.nan_to_num_(0.0, 0.0).amax(1)
        error = torch.linalg.vector_norm(off, dim=1)
        # one look for all: an element that is not finite makes its norm, and the sum of norms, so
        if not math.isfinite(error.sum()):
            bad += int((~off.isfinite()).sum())
        along = (off * truth).sum(1) if leans else error
        size = torch.linalg.vector_norm(truth, dim=1)
        parts.append((error, size, largest, *off.abs_().max(1), along))
    return _Compared(bad, *map(torch.cat, zip(*parts, strict=True)))


def _norm(x: Tensor) -> Tensor:
    """`[B, H, ...]` → `[B·H]` Euclidean norms."""
    norm: Tensor = torch.linalg.vector_norm(x.flatten(2), dim=-1)
    return norm.flatten()


def plain_figure(
    name: str,
    tensor: str,
    error: Tensor,
    size: Tensor,
    terms: float,
    noise: Tensor,
    allowed: tuple[Tensor, Tensor],
    u: float,
) -> Figure:
    """Of norms of the error and of golden `[S]` over so many `terms`; `allowed` is (own, through
    δ), in unit roundoffs `u` as `noise` is.
    """
    slack = noise * (u * _SLACK) + _TINY * terms**0.5
    own, through_delta = (_ROUNDING * u * x for x in allowed)
    return Figure(name, tensor, error, slack, own, through_delta, torch.maximum(size, noise))


def _lse_figure(got: Tensor, exact: Tensor, fmt: Format) -> Figure:
    """The error of lse, whose slack is four unit roundoffs (absolute): as much relative error in
    every weight as their own rounding may make.
    """
    finite = exact.isfinite()
    difference = torch.where(finite, got - exact, 0.0).unsqueeze(-1)
    slack = torch.full(
        (difference.shape[0] * difference.shape[1],),
        4 * fmt.unit_roundoff,
        dtype=torch.float64,
        device=got.device,
    )
    size = _norm(torch.where(finite, exact, 0.0).unsqueeze(-1))
    slack = slack * difference.shape[2] ** 0.5
    return Figure(
        "lse error",
        "lse",
        _norm(difference),
        slack,
        torch.zeros_like(slack),
        torch.zeros_like(slack),
        size,
    )


def _peak(
    got: Tensor, exact: Tensor, seen: _Compared, u: float, figure: Figure, most: Tensor
) -> Peak:
    there, expected = (
        x.flatten(2).flatten(0, 1).gather(1, seen.at[:, None])[:, 0].double() for x in (got, exact)
    )
    own = torch.stack([u * seen.largest, figure.slack, _ROUNDING * u * most]).amax(0)
    return Peak(seen.peak, own, seen.at, there, expected, tuple(exact.shape))


def excess(got: Figure, stock: Figure) -> Tensor:
    """By how much the largest error of an element is beyond the stock recipe's largest, or what
    rounding makes there by nature, per head `[S]`; both figures have their peaks.
    """
    assert got.peak is not None
    assert stock.peak is not None
    return got.peak.error / torch.maximum(stock.peak.error, got.peak.own)


def lean_along(difference: Tensor, exact: Tensor, noise: Tensor, fmt: Format) -> Tensor:
    """Per sample of `[S, 1, ...]`, the projection of the error on golden over golden, in unit
    roundoffs.
    """
    return _lean((difference * exact).flatten(1).sum(1), _norm(exact), noise, fmt)


def _lean(along: Tensor, size: Tensor, noise: Tensor, fmt: Format) -> Tensor:
    """0 where the golden value is itself no larger than rounding noise: there is nothing to lean
    along.
    """
    there = size > noise * fmt.unit_roundoff
    return torch.where(there, along / size.square().clamp_min(1e-300), 0.0) / fmt.unit_roundoff


def error_in_ulps(difference: Tensor, exact: Tensor, fmt: Format) -> tuple[float, float, float]:
    """Mean |error|, largest |error| and mean error along the golden value's sign, in ulps of it; of
    1/16 of the tensor's RMS where it is smaller.
    """
    least = float(torch.linalg.vector_norm(exact)) / exact.numel() ** 0.5 / 16
    least, most = max(least, fmt.min_normal), 2.0**fmt.max_exponent
    parts = []
    slabs = (torch.split(x.flatten(), _AT_ONCE) for x in (difference, exact))
    for off, truth in zip(*slabs, strict=True):
        # an ulp is 2^-mantissa_bits of this
        steps = power_of_two_below(truth.abs().clamp_min_(least)).clamp_(max=most)
        steps = torch.div(off, steps, out=steps)
        signed = torch.dot(steps, truth.sign())
        parts += [steps.abs_().sum(), steps.max(), signed]
    found = torch.stack(parts).view(-1, 3) * 2.0**fmt.mantissa_bits
    total, largest, signed = found[:, 0].sum(), found[:, 1].max(), found[:, 2].sum()
    return float(total) / exact.numel(), float(largest), float(signed) / exact.numel()


def _sums(
    result: Result,
    truth: Result,
    noise: Noise,
    x: Inputs,
    fmt: Format,
    probe: Probe | None,
    bad: dict[str, int],
) -> list[Figure]:
    """The invariants that one call shows: Σ_j dV_j = Σ_i dO_i, Σ_j dK_j = 0, and Σ_j dS_ij = 0 row
    by row where keys share a feature.
    """
    found: list[Figure] = []
    groups = x.query.shape[1] // x.key.shape[1]
    given = per_sample(x.grad_out.double().square().sum((-2, -1)).sqrt(), groups > 1, groups)
    zero = torch.zeros_like(given)
    # rows whose weights sum to 1
    # a mask may leave a row nothing, a sink takes weight, and dropout's is 1 in the mean alone
    whole = x.sees.mask is None and x.sinks is None and x.dropout is None
    allowed = {"grad_value": (given, zero), "grad_key": (zero, noise.delta.key_sum)}
    for name, label in (("grad_value", "Σ dV = Σ dO"), ("grad_key", "Σ dK = 0")):
        got, exact = getattr(result, name), getattr(truth, name)
        if got is None or exact is None or name in bad or not whole:
            continue
        error, size = (_norm(t.sum(2, keepdim=True)) for t in (got.double().sub_(exact), exact))
        scale, terms, u = getattr(noise, name), exact.shape[3], fmt.unit_roundoff
        found.append(plain_figure(label, name, error, size, terms, scale, allowed[name], u))
    if (
        probe is not None
        and probe.shared_feature
        and result.grad_query is not None
        and "grad_query" not in bad
    ):
        # keys share feature 0 = c: of dQ that is α c Σ_j dS_ij, 0 but for the row's error of δ
        along = result.grad_query[..., :1].double() / (x.scale * probe.shared_feature)
        error, scale = _norm(along), noise.row_sums
        label = "row sums of dS (δ's error)"
        found.append(
            plain_figure(
                label, "grad_query", error, torch.zeros_like(error), along.shape[2], scale,
                (torch.zeros_like(scale), noise.delta.row_sums), fmt.unit_roundoff,
            )
        )  # fmt: skip
    return found
