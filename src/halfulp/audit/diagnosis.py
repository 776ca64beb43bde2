"""What a set of findings most likely means: the public bug it resembles, and what it does to training, in one sentence each.

The rules read findings only. They are tried in order, from the telling to the general; the first that fits names the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfulp.audit.verdict import Finding

BACKWARD = {"grad_query", "grad_key", "grad_value"}


@dataclass(frozen=True)
class Evidence:
    """Defect findings, arranged for the rules."""

    findings: tuple[Finding, ...]
    growth: dict[str, float]  # tensor → exponent by which its error outgrows the stock recipe's
    accumulates: bool  # the fingerprint found rounded gradient accumulators

    def probes(self, kind: str | None = None, tensor: str | None = None) -> set[str]:
        """Probes with a finding of that kind and tensor."""
        chosen = (
            f for f in self.findings if f.case is not None and kind in (None, f.kind) and tensor in (None, f.tensor)
        )
        return {f.case.probe for f in chosen if f.case is not None}

    @property
    def tensors(self) -> set[str]:
        """Tensors with a finding."""
        return {f.tensor for f in self.findings}

    @property
    def properties(self) -> set[str]:
        """Failing properties."""
        return {f.property for f in self.findings}


@dataclass(frozen=True)
class Cause:
    """A likely cause, the public case it resembles, and its effect on training."""

    name: str
    resembles: str
    effect: str
    fits: Callable[[Evidence], bool]


_NAN = "one such row turns every weight of the model into NaN within a step."
_DELTA = "the gradient of W_Q carries an error along the direction that all keys share; it adds up step after step until the scores run away."
_GRADIENT = "the gradient is noisier than the format requires, and the error does not average out where inputs repeat."
_FORWARD = "activations carry an error that the next layers and the gradient inherit in every step."


def _only(e: Evidence, *allowed: str) -> bool:
    return bool(e.findings) and e.probes() <= set(allowed) and any(f.case is not None for f in e.findings)


def _forward_clean(e: Evidence) -> bool:
    return bool(e.tensors & BACKWARD) and not e.tensors & {"out", "lse"}


_LEVELS = {"all_negative", "deep_negative", "lse_below_88", "very_large", "ties_negative"}
_RAGGED = ("odd_lengths", "odd_lengths_causal", "cross", "wider_values")

CAUSES: tuple[Cause, ...] = (
    Cause("underflow of a shifted row: l = 0 where the maximum is repeated", "the published stabilized softmax (claims D1, D2)", _NAN,
          lambda e: bool(e.probes("non-finite", "out")) and all(p.startswith("ties") for p in e.probes("non-finite", "out"))),
    Cause("exp(−lse) overflows or underflows in the backward pass", "pytorch issue 196678 (NaN dQ where LSE < −88.7)", _NAN,
          lambda e: bool(e.probes("non-finite") & {"lse_below_88", "deep_negative"}) and not e.probes("non-finite", "out")),
    Cause("rows that may attend to nothing become NaN", "pytorch, fully masked rows", _NAN,
          lambda e: e.probes("non-finite") == {"masked_rows"}),
    Cause("the row maximum is not tracked: weights overflow or vanish", "flash-attention issue 2082 (row max stuck at 0)", _NAN,
          lambda e: bool(e.probes(tensor="out") & _LEVELS) and bool(e.probes("non-finite") & _LEVELS)),
    Cause("NaN or Inf escapes from its row or head", "flashinfer PR 4267 (finite −inf)", _NAN,
          lambda e: any(f.property.startswith("NaN confined") for f in e.findings)),
    Cause("results differ from call to call by more than rounding", "a race between thread blocks",
          "two runs of the same job part ways, and no failure can be replayed.",
          lambda e: any(f.property.startswith("same call twice") for f in e.findings)),
    Cause("gradients are accumulated in low precision across blocks", "PyTorch's CPU flash kernel (dQ, dK, dV summed in bf16)",
          "the longer the context, the larger the gradient's error; long sequences train on noise that short ones do not show.",
          lambda e: e.accumulates or (_forward_clean(e) and max((e.growth.get(t, 0.0) for t in BACKWARD), default=0.0) > 0.15)),
    Cause("query heads are paired with the wrong key heads", "grouped-query attention", _FORWARD, lambda e: _only(e, "gqa")),
    Cause("the last, ragged tile is wrong", "kernels tested at multiples of the block only", _FORWARD, lambda e: _only(e, *_RAGGED)),
    Cause("the causal mask is wrong", "off by one on the diagonal",
          "tokens see the future or miss the present: the loss looks too good or learning stalls.",
          lambda e: bool(e.probes()) and e.probes() <= {"gaussian_causal", "sink", "lse_below_88", "gqa", "odd_lengths_causal"}),
    Cause("masks are applied wrongly", "pytorch, fully masked rows", _FORWARD, lambda e: _only(e, "masked_rows", "additive_mask")),
    Cause("rounding by truncation, or a factor that is off", "aiter PR 5151 (truncation for nearest-even: within 1 ulp, always the same sign)",
          "every layer shrinks its signal by the same factor; the loss of 36 layers adds up to several percent.",
          lambda e: len({p for p in e.probes("lean") if p.startswith(("gaussian", "diffuse", "odd", "cross"))}) >= 2),
    Cause("small weights are lost from the numerator only", "flashinfer PR 5020 (fp8 weights without pre-scale)",
          "diffuse attention fades: heads that average over many tokens go silent.",
          lambda e: "diffuse" in e.probes(tensor="out") and "hot_token" not in e.probes(tensor="out")),
    Cause("scores are recomputed more coarsely in the backward pass", "cudnn-frontend 744 (scores recomputed in fp16), FastVideo PR 1730", _GRADIENT,
          lambda e: _forward_clean(e) and bool(e.probes() & (_LEVELS | {"sharp", "odd_scale"})) and "diffuse" not in e.probes()),
    Cause("scores are rounded to the input's format", "eager attention in bf16; Qiu & Yao's official code", _FORWARD,
          lambda e: bool(e.probes(tensor="out") & {"deep_negative", "very_large"}) and "diffuse" not in e.probes(tensor="out")),
    Cause("weights and row sum disagree", "flash-attention PR 2721 (l and P̄ disagree)", _FORWARD,
          lambda e: bool(e.probes(tensor="out") & {"value_constant", "value_offset"})),
    Cause("δ, or the difference dP − δ, is too coarse", "flash-attention PR 2893 (dS product in bf16), jax PR 40128", _DELTA,
          lambda e: any(p.startswith("row sums") for p in e.properties) or "Σ dK = 0" in e.properties or e.tensors <= {"grad_query", "grad_key"}),
    Cause("P's rows do not sum to 1 in the backward pass", "triton PR 3408 (row sums too coarse for reuse in backward)", _GRADIENT,
          lambda e: "Σ dV = Σ dO" in e.properties or e.tensors == {"grad_value"}),
    Cause("the gradient is less exact than the stock recipe's", "no public case known", _GRADIENT, _forward_clean),
    Cause("the output is less exact than the stock recipe's", "no public case known", _FORWARD, lambda e: bool(e.findings)),
)  # fmt: skip

STOCK_CAUSE = Cause("δ = rowsum(dO ∘ O) from the rounded O, or l from the weights before rounding", "FlashAttention-2 as everyone ships it (Qiu & Yao)",
                    _DELTA, lambda e: bool(e.findings))  # fmt: skip


def diagnose(findings: Sequence[Finding], growth: dict[str, float], accumulates: bool) -> tuple[Cause, ...]:
    """The likeliest causes of the defects: of what is not finite, and of the rest; of the stock findings where there is no defect."""
    defects = tuple(f for f in findings if f.grade == "defect")
    if not defects:
        return (STOCK_CAUSE,) if findings else ()
    broken = tuple(f for f in defects if f.kind == "non-finite" or f.ratio == float("inf"))
    causes = []
    for group in (broken, tuple(f for f in defects if f not in broken and not _same_place(f, broken))):
        if group:
            evidence = Evidence(group, growth, accumulates)
            causes.append(next(cause for cause in CAUSES if cause.fits(evidence)))
    return tuple(dict.fromkeys(causes))


def _same_place(finding: Finding, broken: tuple[Finding, ...]) -> bool:
    """Errors on a probe that also gave NaN have the NaN's cause."""
    return finding.case is not None and any(b.case is not None and b.case.probe == finding.case.probe for b in broken)
