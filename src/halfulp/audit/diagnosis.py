"""What findings most likely mean: the public bug they resemble, and what they do to training, in
one sentence each.

The rules read findings only, never the target. They are tried in order, from the telling to the
general, and the first that fits names the cause; the last ones fit anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfulp.audit.probes import PROBES, probes_with
from halfulp.audit.verdict import Finding
from halfulp.reconstruct import CAUSES, Cause

BACKWARD = {"grad_query", "grad_key", "grad_value"}
LEVELS, RAGGED = probes_with("level"), probes_with("ragged")
PLAIN, FEW_KEYS = probes_with("plain"), probes_with("few keys")
CAUSAL = {probe.name for probe in PROBES if probe.is_causal}
_AS_STOCK = 0.5  # times the stock recipe's error: as large as that
OUTGROWS = 0.15  # exponent of N by which an error outgrows the stock recipe's


@dataclass(frozen=True)
class Evidence:
    """Defect findings, arranged for the rules."""

    findings: tuple[Finding, ...]
    growth: dict[str, float]  # tensor → exponent by which its error outgrows the stock recipe's
    accumulates: bool  # the fingerprint found rounded gradient accumulators
    # probes whose rows of dS do not sum to 0, findings of any grade
    uneven: frozenset[str] = frozenset()

    def probes(self, kind: str | None = None, tensor: str | None = None) -> set[str]:
        """Probes with a finding of that kind and tensor; relations between calls have none."""
        return {
            f.case.probe
            for f in self.findings
            if f.case is not None
            and f.kind != "relation"
            and kind in (None, f.kind)
            and tensor in (None, f.tensor)
        }

    def worst(self, tensor: str, probes: set[str]) -> float:
        """The largest error on those probes, in units of its limit's reference; 0 where none
        fails.
        """
        found = (f for f in self.findings if f.tensor == tensor and f.kind == "error")
        return max(
            (f.ratio for f in found if f.case is not None and f.case.probe in probes), default=0.0
        )

    @property
    def tensors(self) -> set[str]:
        """Tensors with a finding."""
        return {f.tensor for f in self.findings}

    @property
    def forward_clean(self) -> bool:
        """Only gradients fail."""
        return bool(self.tensors & BACKWARD) and not self.tensors & {"out", "lse"}

    def only(self, allowed: set[str]) -> bool:
        """Some probe fails, and none outside `allowed`."""
        return bool(self.probes()) and self.probes() <= allowed

    def property_starts(self, text: str) -> bool:
        """Whether a failing property's name starts so."""
        return any(f.property.startswith(text) for f in self.findings)


def _underflows(e: Evidence) -> bool:
    broken = e.probes("non-finite", "out")
    return "ties_many" in broken or ("ties_negative" in broken and "deep_negative" not in broken)


def _exp_of_lse(e: Evidence) -> bool:
    return bool(e.probes("non-finite") & {"lse_below_88", "deep_negative"}) and not e.probes(
        "non-finite", "out"
    )


def _maximum_untracked(e: Evidence) -> bool:
    failing, broken = e.probes(tensor="out"), e.probes("non-finite")
    below_zero = LEVELS - {"very_large"}
    return bool(broken & LEVELS and failing & LEVELS) or (bool(failing) and failing <= below_zero)


def _accumulates(e: Evidence) -> bool:
    outgrows = max((e.growth.get(tensor, 0.0) for tensor in BACKWARD), default=0.0) > OUTGROWS
    return e.forward_clean and (e.accumulates or outgrows)


def _truncates(e: Evidence) -> bool:
    return len(e.probes("lean", "out") & PLAIN) >= 2 or len(e.probes("lean") & PLAIN) >= 3


def _loses_small_weights(e: Evidence) -> bool:
    return "diffuse" in e.probes("lean", "out") and "hot_token" not in e.probes(tensor="out")


def _coarse_scores_backward(e: Evidence) -> bool:
    # dV depends on P alone, so it tells a wrong P from a wrong δ; coarse scores hurt far more where
    # they are large.
    large = e.worst("grad_value", {"deep_negative", "very_large", "odd_scale"})
    return e.forward_clean and large > 2 * e.worst("grad_value", {"gaussian", "diffuse"})


def _causal(e: Evidence) -> bool:
    return e.only({"odd_lengths_causal"}) or (e.only(CAUSAL) and "gaussian_causal" in e.probes())


def _coarse_scores(e: Evidence) -> bool:
    failing = e.probes(tensor="out")
    return bool(failing & {"deep_negative", "very_large"}) and "diffuse" not in failing


def _weights_miscounted(e: Evidence) -> bool:
    # Where few keys carry a row, their rounding does not average out between the row sum and P̄ V.
    leaning = e.probes("lean", "out")
    few = bool(leaning & FEW_KEYS) and not e.probes(tensor="out") & PLAIN
    return few or bool(e.probes(tensor="out") & {"value_constant", "value_offset"})


def _delta_as_stock(e: Evidence) -> bool:
    # Rows of one sign read δ from the rounded O as large as the stock recipe's, l before rounding a
    # tenth of it. Who rounds O for δ hides what l is summed from.
    found = [f for f in e.findings if f.case is not None and f.case.probe == "value_one_sign"]
    return any(
        (f.times_stock or 0.0) > _AS_STOCK for f in found if f.property.startswith("row sums")
    )


def _other_weights_backward(e: Evidence) -> bool:
    # Where two keys carry a row, dS is what forward and backward pass disagree on; δ's rounding
    # shows on more probes.
    return (
        e.forward_clean
        and e.tensors <= {"grad_query", "grad_key"}
        and e.uneven == {"two_live_keys"}
    )


def _delta(e: Evidence) -> bool:
    sums = e.property_starts("row sums") or e.property_starts("Σ dK")
    return e.forward_clean and "grad_value" not in e.tensors and sums


def _only_dq_and_dk(e: Evidence) -> bool:
    return e.forward_clean and e.tensors <= {"grad_query", "grad_key"}


def _rows_do_not_sum(e: Evidence) -> bool:
    return e.forward_clean and e.property_starts("Σ dV")


OTHER_WEIGHTS = CAUSES["backward-weights"]

Rule = tuple[Callable[[Evidence], bool], Cause]

RULES: tuple[Rule, ...] = (
    (
        _underflows,
        CAUSES["underflow"],
    ),
    (
        _exp_of_lse,
        CAUSES["exp-of-lse"],
    ),
    (
        lambda e: e.probes("non-finite") == {"masked_rows"},
        CAUSES["masked-row"],
    ),
    (
        _maximum_untracked,
        CAUSES["maximum"],
    ),
    (
        lambda e: e.property_starts("NaN confined"),
        CAUSES["nan-escapes"],
    ),
    (
        lambda e: e.property_starts("same call twice"),
        CAUSES["unstable"],
    ),
    (
        _coarse_scores_backward,
        CAUSES["backward-scores"],
    ),
    (_other_weights_backward, OTHER_WEIGHTS),
    (
        _delta,
        CAUSES["delta"],
    ),
    (
        lambda e: e.tensors == {"grad_value"},
        CAUSES["probabilities"],
    ),
    (
        _accumulates,
        CAUSES["grad-accumulator"],
    ),
    (
        lambda e: e.only({"gqa"}),
        CAUSES["key-heads"],
    ),
    (
        _causal,
        CAUSES["causal-mask"],
    ),
    (
        lambda e: e.only(RAGGED),
        CAUSES["ragged"],
    ),
    (
        lambda e: e.only({"masked_rows", "additive_mask"}),
        CAUSES["mask"],
    ),
    (
        _truncates,
        CAUSES["out"],
    ),
    (
        _loses_small_weights,
        CAUSES["weights"],
    ),
    (
        _coarse_scores,
        CAUSES["scores"],
    ),
    (
        _weights_miscounted,
        CAUSES["weights-disagree"],
    ),
    (
        _rows_do_not_sum,
        CAUSES["probabilities"],
    ),
    (
        _only_dq_and_dk,
        CAUSES["grad-scores"],
    ),
    (
        lambda e: e.forward_clean,
        CAUSES["gradient-unexplained"],
    ),
    (
        lambda e: bool(e.findings),
        CAUSES["out-unexplained"],
    ),
)

STOCK_RULES: tuple[Rule, ...] = (
    (_delta_as_stock, CAUSES["delta-from-out"]),
    (
        lambda e: "value_constant" in e.probes("error"),
        CAUSES["weights-row-sum"],
    ),
    (lambda e: e.probes() == {"two_live_keys"}, OTHER_WEIGHTS),
    (
        lambda e: bool(e.findings),
        CAUSES["stock"],
    ),
)


WRONG_ELEMENTS = CAUSES["elements"]


def diagnose(
    findings: Sequence[Finding], growth: dict[str, float], accumulates: bool
) -> tuple[Cause, ...]:
    """The likeliest causes: of what is not finite, then of the other defects; of stock findings
    where nothing is worse.

    `growth` and `accumulates` are the audit's exponents and its fingerprint's word on the gradient
    accumulators.
    """
    defects = tuple(f for f in findings if f.grade == "defect" and f.kind != "element")
    if not defects and any(f.kind == "element" for f in findings):
        return (WRONG_ELEMENTS,)
    if not defects:
        evidence = Evidence(tuple(findings), growth, accumulates)
        return tuple(cause for fits, cause in STOCK_RULES if fits(evidence))[:1]
    broken = tuple(f for f in defects if f.kind == "non-finite" or f.ratio == float("inf"))
    rest = tuple(f for f in defects if f not in broken and not _same_place(f, broken))
    uneven = frozenset(
        f.case.probe for f in findings if f.case is not None and f.property.startswith("row sums")
    )
    causes = []
    for group in (broken, rest):
        if group:
            evidence = Evidence(group, growth, accumulates, uneven)
            causes.append(next(cause for fits, cause in RULES if fits(evidence)))
    return tuple(dict.fromkeys(causes))


def _same_place(finding: Finding, broken: tuple[Finding, ...]) -> bool:
    """Errors on a probe that also gave NaN have the NaN's cause."""
    return finding.case is not None and any(
        b.case is not None and b.case.probe == finding.case.probe for b in broken
    )
