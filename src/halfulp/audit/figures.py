"""Figures: what is measured of one result on one case, an error per head beside the rounding noise that is natural
there.

A figure is a Euclidean norm over one head's elements of (result − golden). The slack added to both sides of every
comparison is a 1/128 of the unit roundoff times the root sum of squares of the terms that make the tensor up, so that
fp32 dust is never compared with zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfulp.algorithms import AttentionResult, Mask
from halfulp.audit.inputs import Inputs
from halfulp.audit.probes import Probe
from halfulp.formats import BF16, FP16, FP32, Format, ulp

FORMAT_OF: dict[torch.dtype, Format] = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
GRADIENTS = ("grad_query", "grad_key", "grad_value")
SHORT = {"out": "O", "lse": "lse", "grad_query": "dQ", "grad_key": "dK", "grad_value": "dV"}
_SLACK = 2.0**-7
_TINY = FP32.min_normal


@dataclass(frozen=True)
class Noise:
    """Per head `[S]`, the root sum of squares of the terms of each tensor: the error of rounding every term by 1 is
    about this.
    """

    out: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    row_sums: Tensor  # of dS, over rows


def natural_noise(x: Inputs) -> Noise:
    """The noise scales of one case in fp64: Σ P²v², and with w = P(|dP| + |δ|): Σ w²k², Σ w²q², Σ P²dO², Σ w² over
    all pairs.
    """
    groups = x.query.shape[1] // x.key.shape[1]
    q, do = x.query.double(), x.grad_out.double()
    k, v = (t.double().repeat_interleave(groups, dim=1) for t in (x.key, x.value))
    mask, cols = Mask(x.is_causal, x.attn_mask), slice(0, k.shape[2])
    squares = {name: t.square().sum(-1) for name, t in (("q", q), ("k", k), ("v", v), ("do", do))}
    totals = {
        name: torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device) for name in Noise.__dataclass_fields__
    }
    step = max(1, 2**23 // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        rows = slice(start, min(start + step, q.shape[2]))
        scores = mask.apply(q[:, :, rows] @ k.mT * x.scale, rows, cols, 1.0)
        p = torch.softmax(scores, -1).nan_to_num_(0.0)
        dp = do[:, :, rows] @ v.mT
        w2 = (p * (dp.abs() + (p * dp).sum(-1, keepdim=True).abs())).square_()
        p2 = p.square_()
        totals["out"] += (p2 @ squares["v"].unsqueeze(-1)).sum((-2, -1))
        totals["grad_value"] += (p2.sum(-1) * squares["do"][:, :, rows]).sum(-1)
        totals["grad_query"] += (w2 @ squares["k"].unsqueeze(-1)).sum((-2, -1)) * x.scale**2
        totals["grad_key"] += (w2.sum(-1) * squares["q"][:, :, rows]).sum(-1) * x.scale**2
        totals["row_sums"] += w2.sum((-2, -1))
    return Noise(**{name: _per_sample(total.sqrt(), name, groups) for name, total in totals.items()})


def _per_sample(x: Tensor, name: str, groups: int) -> Tensor:
    """One number a sample: `[B·H]`, or `[B·H_k]` for dK and dV."""
    if name in ("grad_key", "grad_value") and groups > 1:
        x = x.reshape(x.shape[0], -1, groups).square().sum(-1).sqrt()
    return x.flatten()


@dataclass(frozen=True)
class Figure:
    """One measured error per head, `[S]` each: the error's norm, the slack, and the norm of the golden value (0
    where it vanishes).
    """

    name: str  # e.g. "dQ error"
    tensor: str  # which result it was read from: out, lse, grad_query, ...
    error: Tensor
    slack: Tensor
    size: Tensor  # the larger of the golden value's norm and the natural noise of a rounding of 1

    @property
    def relative(self) -> float:
        """Relative L2 error, pooled over heads; against the size of the terms where the golden value vanishes by
        cancellation.
        """
        return float(self.error.square().sum().sqrt() / self.size.square().sum().sqrt().clamp_min(1e-300))


@dataclass(frozen=True)
class Lean:
    """How far a result leans, per head `[S]`, in unit roundoffs: its projection on the golden value, (result −
    golden)·golden / golden².
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


def measure(result: AttentionResult, truth: AttentionResult, noise: Noise, x: Inputs, probe: Probe | None) -> Measured:
    """Measure one result `[B, H, N, D]` against golden. Tensors that hold NaN or Inf where golden is finite are
    counted, not measured.
    """
    fmt = FORMAT_OF[x.query.dtype]
    figures: list[Figure] = []
    leans: list[Lean] = []
    nonfinite: dict[str, int] = {}
    ulps: dict[str, tuple[float, float, float]] = {}
    for name in ("out", "lse", *GRADIENTS):
        got, exact = getattr(result, name), getattr(truth, name)
        if got is None or exact is None:
            continue
        got = got.double()
        representable = exact.isfinite() & (exact.abs() <= fmt.max)
        bad = int((~got.isfinite() & representable).sum())
        if name == "lse":
            bad = int((got.isnan() | (got == torch.inf) | ((got == -torch.inf) != (exact == -torch.inf))).sum())
        if bad:
            nonfinite[name] = bad
            continue
        if name == "lse":
            figures.append(_lse_figure(got, exact, fmt))
            continue
        difference = torch.where(representable, got - exact, 0.0)
        figures.append(_figure(f"{SHORT[name]} error", name, difference, exact, getattr(noise, name), fmt))
        leans.append(Lean(name, _lean(difference, exact, getattr(noise, name), fmt)))
        ulps[name] = _in_ulps(difference, exact, fmt)
    figures += _sums(result, truth, noise, x, fmt, probe, nonfinite)
    return Measured(tuple(figures), tuple(leans), nonfinite, ulps)


def _norm(x: Tensor) -> Tensor:
    """`[B, H, ...]` → `[B·H]` Euclidean norms."""
    return x.flatten(2).square().sum(-1).sqrt().flatten()


def _figure(name: str, tensor: str, difference: Tensor, exact: Tensor, noise: Tensor, fmt: Format) -> Figure:
    slack = noise * (fmt.unit_roundoff * _SLACK) + _TINY * (difference.numel() / noise.numel()) ** 0.5
    return Figure(name, tensor, _norm(difference), slack, torch.maximum(_norm(exact), noise))


def _lse_figure(got: Tensor, exact: Tensor, fmt: Format) -> Figure:
    """The error of lse, whose slack is four unit roundoffs (absolute): as much relative error in every weight as
    their own rounding may make.
    """
    finite = exact.isfinite()
    difference = torch.where(finite, got - exact, 0.0).unsqueeze(-1)
    slack = torch.full(
        (difference.shape[0] * difference.shape[1],), 4 * fmt.unit_roundoff, dtype=torch.float64, device=got.device
    )
    size = _norm(torch.where(finite, exact, 0.0).unsqueeze(-1))
    return Figure("lse error", "lse", _norm(difference), slack * difference.shape[2] ** 0.5, size)


def _lean(difference: Tensor, exact: Tensor, noise: Tensor, fmt: Format) -> Tensor:
    """0 where the golden value is itself no larger than rounding noise: there is nothing to lean along."""
    power = exact.flatten(2).square().sum(-1).flatten()
    along = (difference * exact).flatten(2).sum(-1).flatten()
    return (
        torch.where(power > (noise * fmt.unit_roundoff).square(), along / power.clamp_min(1e-300), 0.0)
        / fmt.unit_roundoff
    )


def _in_ulps(difference: Tensor, exact: Tensor, fmt: Format) -> tuple[float, float, float]:
    """Mean |error|, largest |error| and mean error along the golden value's sign, in ulps of it; of 1/16 of the
    tensor's RMS where it is smaller.
    """
    rms = exact.square().mean().sqrt()
    steps = difference / ulp(exact.abs().clamp_min(rms / 16), fmt).double()
    return float(steps.abs().mean()), float(steps.abs().max()), float((steps * exact.sign()).mean())


def _sums(
    result: AttentionResult,
    truth: AttentionResult,
    noise: Noise,
    x: Inputs,
    fmt: Format,
    probe: Probe | None,
    bad: dict[str, int],
) -> list[Figure]:
    """The invariants that one call shows: Σ_j dV_j = Σ_i dO_i, Σ_j dK_j = 0, and Σ_j dS_ij = 0 row by row where
    keys share a feature.
    """
    found: list[Figure] = []
    for name, label in (("grad_value", "Σ dV = Σ dO"), ("grad_key", "Σ dK = 0")):
        got, exact = getattr(result, name), getattr(truth, name)
        if got is None or exact is None or name in bad or x.attn_mask is not None:
            continue
        difference = (got.double() - exact).sum(2, keepdim=True)
        found.append(_figure(label, name, difference, exact.sum(2, keepdim=True), getattr(noise, name), fmt))
    if probe is not None and probe.shared_feature and result.grad_query is not None and "grad_query" not in bad:
        along = result.grad_query[..., :1].double() / (x.scale * probe.shared_feature)
        found.append(
            _figure("row sums of dS (δ's error)", "grad_query", along, torch.zeros_like(along), noise.row_sums, fmt)
        )
    return found
