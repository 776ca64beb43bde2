"""What stops the failure: Ō alone in fp32 (A21), and the remedies in use that the paper names, QK
normalization (A22) and QK-clip (A23).

Ō = P̄V is rounded to bf16 in the authors' own code alone; a stock kernel accumulates it in fp32 and
rounds O once, and fails all the same, which stands beside the figures. The paper calls the remedies
unexplained and tries none of them; here they meet the run that fails without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from halfulp.papers.claim import Claim, Figures, Lab, Measured, Rule, share_of
from halfulp.papers.claims.a_cause import (
    CRITERION,
    SELDOM,
    STANDARD,
    excess,
    excesses,
    failed_share,
    language,
    said_above,
    scale_of,
    stable_share,
    traced,
)
from halfulp.papers.claims.constructed import constructed
from halfulp.papers.claims.fixes import describe, failures, survivors
from halfulp.papers.runs_a import Plan, Traced, language_attention

MOST_SCORE = 100.0  # τ of Kimi K2
_FIXED = "authors+Ō fp32"


def _accumulator(lab: Lab) -> Measured:
    """A21: Ō in fp32 in the paper's own recipe, on the one-layer task and the constructed run."""
    runs = lab.trained(("authors", _FIXED, "stock"))
    built = constructed(lab)
    outcomes = {name: [run.outcome for run in built[name]] for name in ("described", "Ō in fp32")}
    count = len(outcomes["described"])
    figures = survivors(runs) | {
        "task drifts": float(any(run.outcome == "drifting" for run in runs[_FIXED])),
        "constructed failed": outcomes["described"].count("failed") / count,
        "constructed, Ō in fp32 survived": outcomes["Ō in fp32"].count("survived") / count,
    }
    kept = {kind: outcomes["Ō in fp32"].count(kind) for kind in ("survived", "drifting", "failed")}
    text = (
        f"one-layer task: {describe(runs)}; constructed run, {count} seeds:"
        f" {figures['constructed failed']:.0%} failed with Ō in bf16, with Ō in fp32"
        f" {kept['survived']} survived, {kept['drifting']} drift, {kept['failed']} failed. The"
        " stock recipe has Ō in fp32 to begin with"
    )
    intervals = failures(runs) | {
        "constructed, Ō in fp32 survived": share_of(kept["survived"], count)
    }
    return Measured(figures, text, (), intervals)


def _remedied(lab: Lab, changes: Plan) -> tuple[list[Traced], list[Traced]]:
    """The failing language model and its twin with standard attention, both with a remedy."""
    scale = scale_of(lab)
    plan = replace(changes, steps=scale.steps, layers=2, measure_every=SELDOM)
    attentions = {"low": (language_attention(scale.bits),), "twin": (STANDARD,)}
    plans = {
        name: [replace(plan, attention=attention, seed=seed) for seed in scale.seeds]
        for name, attention in attentions.items()
    }
    low, twin = traced(lab, plans).values()
    return low, twin


def _normalized(lab: Lab) -> Measured:
    """A22: RMS norms of query and key, in the failing language model and in its twin."""
    return _remedy(lab, "QK-norm", Plan((), query_key_norm=True))


def _clipped(lab: Lab) -> Measured:
    """A23: QK-clip at τ = 100, in the failing language model and in its twin."""
    return _remedy(lab, "QK-clip", Plan((), most_score=MOST_SCORE))


def _remedy(lab: Lab, name: str, changes: Plan) -> Measured:
    runs = language(lab, ("nowhere", "everywhere"))
    low, twins = _remedied(lab, changes)
    plain = runs["nowhere"]
    figures = {
        "seeds": float(len(low)),
        "failed without": failed_share(runs["everywhere"], plain),
        "stable": stable_share(low, twins),
    }
    over = [excess(run, twin) for run, twin in zip(low, plain, strict=True)]
    largest = max(_largest_score(run) for run in low)
    text = (
        f"byte GPT ({scale_of(lab).text}), above a twin that has the remedy too: without {name}"
        f" {said_above(runs['everywhere'], plain)}; with it {said_above(low, twins)}, largest score"
        f" at the end {largest:.0f}; above the twin without the remedy {min(over):+.2f} to"
        f" {max(over):+.2f} nats"
    )
    intervals = excesses({"without": runs["everywhere"]}, plain) | excesses({"with": low}, twins)
    intervals["stable"] = share_of(round(figures["stable"] * len(low)), len(low))
    return Measured(figures, text, (), intervals)


def _largest_score(run: Traced) -> float:
    heads: Sequence[Sequence[float]] = run.measures[-1]["measure"]["max_score"]
    return max((max(layer) for layer in heads), default=math.nan)


def _holds(f: Figures) -> bool:
    return f["seeds"] >= 3 and f["failed without"] == 1 and f["stable"] == 1


_RULE = (
    "at least 3 seeds of the byte GPT: every run fails without the remedy, and with it every one is"
    f" stable, beside twins that have it too; {CRITERION}"
)

CLAIMS = (
    Claim(
        "A21",
        "Ō = P̄V alone in fp32 suffices",
        "section 3.3.2: that product alone in fp32 is enough for stability",
        _accumulator,
        Rule(
            "at least 3 seeds: one-layer task and constructed run fail in the paper's own recipe;"
            " with Ō alone in fp32 no run fails or drifts",
            lambda f: (
                f["seeds"] >= 3
                and f["authors failed"] == f["constructed failed"] == 1
                and f[f"{_FIXED} failed"] == f["task drifts"] == 0
                and f["constructed, Ō in fp32 survived"] == 1
            ),
        ),
        setup="reduced",
        history="2026-11-22: new, its rule set before running",
        seconds=30.0,
    ),
    Claim(
        "A22",
        "QK normalization, a remedy in use, stops the failure",
        "named as a remedy in use, not tried",
        _normalized,
        Rule(_RULE, _holds),
        setup="altered",
        history="2026-11-22: new, its rule set before running",
        seconds=30.0,
    ),
    Claim(
        "A23",
        "QK-clip, a remedy in use, stops the failure",
        "named as a remedy in use, not tried",
        _clipped,
        Rule(f"{_RULE}; τ = {MOST_SCORE:g}, Kimi K2's", _holds),
        setup="altered",
        history="2026-11-22: new, its rule set before running",
        seconds=30.0,
    ),
    Claim(
        "A24",
        "the failure is the same on other hardware",
        "NVIDIA A100, RTX 4090, Huawei Ascend 910B",
        without="needs a GPU",
    ),
)
