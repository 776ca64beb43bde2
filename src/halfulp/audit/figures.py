"""Figures: what is measured of one result on one case, an error per head beside the rounding noise
that is natural there.

A figure is a Euclidean norm over one head's elements of (result − golden). The slack added to both
sides of every comparison is a 1/128 of the unit roundoff times the root sum of squares of the terms
that make the tensor up, so that fp32 dust is never compared with zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from halfulp.audit.inputs import Inputs
from halfulp.audit.probes import Probe
from halfulp.calls import Result
from halfulp.formats import BF16, FP16, FP32, Format, ulp

FORMAT_OF: dict[torch.dtype, Format] = {
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float32: FP32,
}
GRADIENTS = ("grad_query", "grad_key", "grad_value")
SHORT = {"out": "O", "lse": "lse", "grad_query": "dQ", "grad_key": "dK", "grad_value": "dV"}


def short(tensor: str) -> str:
    """A tensor as findings name it: O, dQ, or of another operation output, dweight."""
    own = f"d{tensor.removeprefix('grad_')}" if tensor.startswith("grad_") else tensor
    return SHORT.get(tensor, own)


_SLACK = 2.0**-7
_TINY = FP32.min_normal
_ROUNDING = 0.4  # root mean square of a rounding to nearest, in unit roundoffs, over a binade


@dataclass(frozen=True)
class Delta:
    """The error that rounding O by 1 (relative) leaves in gradients through δ, per head `[S]`."""

    grad_query: Tensor
    grad_key: Tensor
    row_sums: Tensor
    key_sum: Tensor  # of Σ_j dK_j


@dataclass(frozen=True)
class Noise:
    """Per head `[S]`, the root sum of squares of the terms of each tensor: the error of rounding
    every term by 1 is about this.
    """

    out: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    row_sums: Tensor  # of dS, over rows
    delta: Delta  # what rounding O to nearest makes of δ, in the same tensors


def natural_noise(x: Inputs, out: Tensor) -> Noise:
    """The noise scales of one case in fp64, from its golden out: root sums over all pairs.

    With w = P(|dP| + |δ|): Σ P²v², Σ w²k², Σ w²q², Σ P²dO², Σ w². With e² = Σ_d (dO O)² a row, what
    O's rounding makes of δ: Σ e²(PK)², Σ e²P²q², Σ e², Σ e²q².
    """
    groups = x.query.shape[1] // x.key.shape[1]
    q, do = x.query.double(), x.grad_out.double()
    k, v = (t.double().repeat_interleave(groups, dim=1) for t in (x.key, x.value))
    cols = slice(0, k.shape[2])
    q2, k2, v2, do2 = (t.square().sum(-1) for t in (q, k, v, do))
    e2 = (do * out).square().sum(-1)
    total: dict[str, Tensor] = {}
    step = max(1, 2**23 // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        rows = slice(start, min(start + step, q.shape[2]))
        p, kept, slope = _weights(x, q[:, :, rows] @ k.mT * x.scale, rows, cols)
        dp = do[:, :, rows] @ v.mT
        dp = dp if kept is None else dp * kept
        w = p * (dp.abs() + (p * dp).sum(-1, keepdim=True).abs())
        w2 = (w if slope is None else w * slope).square_()
        of_value = None if kept is None else (p * kept).square_()
        p = p if slope is None else p * slope
        attended = (p @ k).square().sum(-1)
        p2 = p.square_()
        of_value = p2 if of_value is None else of_value
        p2_rows, w2_rows, e2_rows, q2_rows = p2.sum(-1), w2.sum(-1), e2[:, :, rows], q2[:, :, rows]
        parts = {
            "out": (of_value @ v2.unsqueeze(-1)).squeeze(-1),
            "grad_value": of_value.sum(-1) * do2[:, :, rows],
            "grad_query": (w2 @ k2.unsqueeze(-1)).squeeze(-1) * x.scale**2,
            "grad_key": w2_rows * q2_rows * x.scale**2,
            "row_sums": w2_rows,
            "delta grad_query": e2_rows * attended * x.scale**2,
            "delta grad_key": e2_rows * p2_rows * q2_rows * x.scale**2,
            "delta row_sums": e2_rows,
            "delta key_sum": e2_rows * q2_rows * x.scale**2,
        }
        for name, part in parts.items():
            total[name] = total.get(name, 0.0) + part.sum(-1)
    keyed = ("grad_key", "grad_value", "delta grad_key", "delta key_sum")
    roots = {n: _per_sample(t.sqrt(), n in keyed and groups > 1, groups) for n, t in total.items()}
    of_delta = {
        n.removeprefix("delta "): roots.pop(n) for n in list(roots) if n.startswith("delta ")
    }
    return Noise(**roots, delta=Delta(**of_delta))


def _weights(
    x: Inputs, scores: Tensor, rows: slice, cols: slice
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """P of some rows of a call, what dropout multiplies it by, and the slope of its softcap."""
    kept = slope = None
    if x.softcap:
        t = torch.tanh(scores / x.softcap)
        scores, slope = t * x.softcap, 1 - t * t
    scores = x.sees.apply(scores, rows, cols, 1.0)
    if x.sinks is not None:
        sink = x.sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    p = torch.softmax(scores, -1).nan_to_num_(0.0)[..., : cols.stop]
    if x.dropout is not None:
        batch, heads, queries = x.query.shape[:3]
        numbers = torch.arange(batch * heads, device=p.device).view(batch, heads)
        kept = x.dropout.keep(numbers, rows, cols, queries).double() * x.dropout.scale
    return p, kept, slope


def _per_sample(x: Tensor, grouped: bool, groups: int) -> Tensor:
    """One number a sample: `[B·H]`, or `[B·H_k]` where query heads share a key head."""
    return (x.reshape(x.shape[0], -1, groups).square().sum(-1).sqrt() if grouped else x).flatten()


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
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), self.shape))


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
        got = got.double()
        representable = exact.abs() <= fmt.max  # neither NaN nor infinite
        # a sum is finite where its terms are, and takes one pass
        bad = 0 if math.isfinite(got.sum()) else int((~got.isfinite() & representable).sum())
        if name == "lse":
            bad = int(
                (
                    got.isnan()
                    | (got == torch.inf)
                    | ((got == -torch.inf) != (exact == -torch.inf))
                ).sum()
            )
        if bad:
            nonfinite[name] = bad
            continue
        if name == "lse":
            figures.append(_lse_figure(got, exact, fmt))
            continue
        difference = got - exact
        if not representable.all():
            difference = torch.where(representable, difference, 0.0)
        allowed = _allowed(name, exact, noise)
        label = f"{SHORT[name]} error"
        figures.append(
            plain_figure(
                label, name, difference, exact, getattr(noise, name), allowed, fmt.unit_roundoff
            )
        )
        peak = _peak(got, difference, exact, fmt.unit_roundoff, figures[-1])
        figures[-1] = replace(figures[-1], peak=peak)
        if alone:
            continue
        leans.append(Lean(name, lean_along(difference, exact, getattr(noise, name), fmt)))
        if in_ulps:
            ulps[name] = error_in_ulps(difference, exact, fmt)
    if not alone:
        figures += _sums(result, truth, noise, x, fmt, probe, nonfinite)
    if probe is not None and probe.judged_by is not None:
        figures = [
            replace(f, slack=f.slack * probe.slack) for f in figures if f.name == probe.judged_by
        ]
        leans = []
    return Measured(tuple(figures), tuple(leans), nonfinite, ulps)


def _norm(x: Tensor) -> Tensor:
    """`[B, H, ...]` → `[B·H]` Euclidean norms."""
    return x.flatten(2).square().sum(-1).sqrt().flatten()


def plain_figure(
    name: str,
    tensor: str,
    difference: Tensor,
    exact: Tensor,
    noise: Tensor,
    allowed: tuple[Tensor, Tensor],
    u: float,
) -> Figure:
    """`allowed` is (own, through δ), in unit roundoffs `u` as `noise` is."""
    slack = noise * (u * _SLACK) + _TINY * (difference.numel() / noise.numel()) ** 0.5
    own, through_delta = (_ROUNDING * u * x for x in allowed)
    return Figure(
        name,
        tensor,
        _norm(difference),
        slack,
        own,
        through_delta,
        torch.maximum(_norm(exact), noise),
    )


def _allowed(name: str, exact: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """What rounding the result itself, and for dQ and dK rounding O, may do."""
    own = _norm(exact)
    return own, getattr(noise.delta, name, torch.zeros_like(own))


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


def _peak(got: Tensor, difference: Tensor, exact: Tensor, u: float, figure: Figure) -> Peak:
    error, at = difference.abs().flatten(2).flatten(0, 1).max(-1)
    there, expected = (
        x.flatten(2).flatten(0, 1).gather(1, at[:, None])[:, 0] for x in (got, exact)
    )
    largest = exact.abs().flatten(2).amax(-1).flatten()
    if not math.isfinite(largest.sum()):
        largest = torch.where(exact.isfinite(), exact, 0.0).abs().flatten(2).amax(-1).flatten()
    natural = figure.through_delta / (difference.shape[2] * difference.shape[3]) ** 0.5
    own = torch.stack([u * largest, figure.slack, natural]).amax(0)
    return Peak(error, own, at, there, expected, tuple(difference.shape))


def excess(got: Figure, stock: Figure) -> Tensor:
    """By how much the largest error of an element is beyond the stock recipe's largest, or what
    rounding makes there by nature, per head `[S]`; both figures have their peaks.
    """
    assert got.peak is not None
    assert stock.peak is not None
    return got.peak.error / torch.maximum(stock.peak.error, got.peak.own)


def lean_along(difference: Tensor, exact: Tensor, noise: Tensor, fmt: Format) -> Tensor:
    """0 where the golden value is itself no larger than rounding noise: there is nothing to lean
    along.
    """
    power = exact.flatten(2).square().sum(-1).flatten()
    along = (difference * exact).flatten(2).sum(-1).flatten()
    return (
        torch.where(
            power > (noise * fmt.unit_roundoff).square(), along / power.clamp_min(1e-300), 0.0
        )
        / fmt.unit_roundoff
    )


def error_in_ulps(difference: Tensor, exact: Tensor, fmt: Format) -> tuple[float, float, float]:
    """Mean |error|, largest |error| and mean error along the golden value's sign, in ulps of it; of
    1/16 of the tensor's RMS where it is smaller.
    """
    rms = exact.square().mean().sqrt()
    steps = difference / ulp(exact.abs().clamp_min(rms / 16), fmt).double()
    return float(steps.abs().mean()), float(steps.abs().max()), float((steps * exact.sign()).mean())


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
    given = _per_sample(x.grad_out.double().square().sum((-2, -1)).sqrt(), groups > 1, groups)
    zero = torch.zeros_like(given)
    # rows whose weights sum to 1
    whole = x.sees.mask is None and x.sinks is None and x.dropout is None
    allowed = {"grad_value": (given, zero), "grad_key": (zero, noise.delta.key_sum)}
    for name, label in (("grad_value", "Σ dV = Σ dO"), ("grad_key", "Σ dK = 0")):
        got, exact = getattr(result, name), getattr(truth, name)
        if got is None or exact is None or name in bad or not whole:
            continue
        difference, of_exact = (
            (got.double() - exact).sum(2, keepdim=True),
            exact.sum(2, keepdim=True),
        )
        scale = getattr(noise, name)
        found.append(
            plain_figure(label, name, difference, of_exact, scale, allowed[name], fmt.unit_roundoff)
        )
    if (
        probe is not None
        and probe.shared_feature
        and result.grad_query is not None
        and "grad_query" not in bad
    ):
        along = result.grad_query[..., :1].double() / (x.scale * probe.shared_feature)
        label, nothing = "row sums of dS (δ's error)", torch.zeros_like(along)
        through_delta = (torch.zeros_like(noise.row_sums), noise.delta.row_sums)
        found.append(
            plain_figure(
                label,
                "grad_query",
                along,
                nothing,
                noise.row_sums,
                through_delta,
                fmt.unit_roundoff,
            )
        )
    return found
