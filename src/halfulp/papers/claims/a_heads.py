"""Which heads carry the failure (A6): twelve heads, those picked as the failure begins, and random
ones beside them.

Once a run has failed every head has run away with it, so the heads are picked at the onset: the
first measurement in which some σ(W_Q) is twice the twin's largest. As many heads as the paper
named, six of twelve; two random sets of six are the control, without which any six that calm a run
would look guilty.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from halfulp.experiments.compare_summary import interval_of
from halfulp.papers.claim import Claim, Lab, Measured, Rule, share_of
from halfulp.papers.claims.a_cause import (
    CRITERION,
    GROWTH,
    INTERVAL,
    ONE_CRITERION,
    SELDOM,
    STANDARD,
    Scale,
    excess,
    excesses,
    failed_share,
    sigma,
    stable_share,
    traced,
)
from halfulp.papers.figures_a import head_sigmas
from halfulp.papers.runs_a import Plan, Traced, language_attention

HEADS, WIDTH, PICKED, CONTROLS = 12, 96, 6, 2
ONSET = 2.0  # times the twin's largest σ(W_Q)


@dataclass(frozen=True)
class Picked:
    """The heads of one seed, from 0."""

    onset: int  # step; the last measurement where no head reaches `ONSET`
    outliers: tuple[int, ...]
    controls: tuple[tuple[int, ...], ...]


def pick_heads(run: Traced, twin: Traced, seed: int) -> Picked:
    """Return the six heads with the largest σ(W_Q) at the onset, and random sets of six."""
    mine, other = run.measured("sigma_query"), twin.measured("sigma_query")
    begun = [i for i in range(len(mine)) if max(mine[i]) > ONSET * max(other[i])]
    at = begun[0] if begun else len(mine) - 1
    order = sorted(range(HEADS), key=mine[at].__getitem__, reverse=True)
    outliers = tuple(sorted(order[:PICKED]))
    draw, controls = random.Random(seed), list[tuple[int, ...]]()
    while len(controls) < CONTROLS:
        heads = tuple(sorted(draw.sample(range(HEADS), PICKED)))
        # the picked heads are no control of themselves
        if heads != outliers and heads not in controls:
            controls.append(heads)
    return Picked(run.measured_steps()[at], outliers, tuple(controls))


def _heads(lab: Lab) -> Measured:
    """A6: fp32 O for the six heads picked at the onset, and for random sets of six."""
    scale = Scale(3, 2500, (0, 1, 2)) if lab.full else Scale(2, 800, (0, 1, 2))
    low, high = language_attention(scale.bits), language_attention(None)

    def plan(seed: int, *attention: str, every: int = INTERVAL) -> Plan:
        return Plan(attention, seed, scale.steps, 1, HEADS, every, width=WIDTH)

    def spare(seed: int, heads: Sequence[int]) -> Plan:
        return plan(seed, low, f"head {','.join(map(str, heads))}: {high}", every=SELDOM)

    made = {
        name: [plan(s, x) for s in scale.seeds] for name, x in (("low", low), ("twin", STANDARD))
    }
    runs, twins = traced(lab, made).values()
    picked = [pick_heads(*three) for three in zip(runs, twins, scale.seeds, strict=True)]
    sets = [[one.outliers for one in picked]]
    sets += [[one.controls[i] for one in picked] for i in range(CONTROLS)]
    spared = {str(i): list(map(spare, scale.seeds, same)) for i, same in enumerate(sets)}
    rescued, *controls = traced(lab, spared).values()
    count = len(scale.seeds)
    calm = [stable_share(same, twins) for same in controls]
    outliers = [_stands_out(run, one) for run, one in zip(runs, picked, strict=True)]
    figures = {
        "seeds": float(count),
        "all heads failed": failed_share(runs, twins),
        "outliers": min(sigma(run) / sigma(twin) for run, twin in zip(runs, twins, strict=True)),
        "picked in fp32 stable": stable_share(rescued, twins),
        "random in fp32 stable": statistics.mean(calm),
    }
    named = {"all heads low": runs, "picked in fp32": rescued}
    named |= {f"random {i + 1} in fp32": same for i, same in enumerate(controls)}
    said = "; ".join(
        f"seed {s}: heads {', '.join(map(str, one.outliers))} picked at step {one.onset}, loss"
        f" {excess(run, twin):+.2f} → {excess(saved, twin):+.2f} nats with their O in fp32,"
        f" {', '.join(f'{excess(same[i], twin):+.2f}' for same in controls)} with random ones"
        for i, (s, one, run, saved, twin) in enumerate(
            zip(scale.seeds, picked, runs, rescued, twins, strict=True)
        )
    )
    text = (
        f"one-layer byte GPT of {HEADS} heads, numbered from 0 ({scale.text}); σ(W_Q) of the picked"
        f" ones at the onset {min(outliers):.1f} to {max(outliers):.1f} times the others' (means),"
        f" at the end at least {figures['outliers']:.1f} times the twin's largest; above the twin:"
        f" {said}"
    )
    intervals = excesses(named, twins) | {
        "picked over other heads, σ(W_Q)": interval_of(outliers),
        "picked in fp32 stable": share_of(round(figures["picked in fp32 stable"] * count), count),
        "random in fp32 stable": share_of(round(sum(calm) * count), CONTROLS * count),
    }
    drawn = head_sigmas(runs[0], twins[0], picked[0].onset, lab.command("A6"))
    return Measured(figures, text, (drawn,), intervals)


def _stands_out(run: Traced, picked: Picked) -> float:
    """Mean σ(W_Q) of the picked heads over that of the others, at the onset."""
    sigmas = run.measured("sigma_query")[run.measured_steps().index(picked.onset)]
    others = [x for head, x in enumerate(sigmas) if head not in picked.outliers]
    return statistics.mean(sigmas[head] for head in picked.outliers) / statistics.mean(others)


CLAIMS = (
    Claim(
        "A6",
        "a few heads carry the failure: their σ(W_Q) are outliers, and fp32 O for them alone"
        " restores stability",
        "fig. 3: heads 1, 7, 8, 9, 11, 12",
        _heads,
        Rule(
            "at least 3 seeds: all heads in low precision fail, their largest σ(W_Q) is over"
            f" {GROWTH:g} times the twin's, and with fp32 O for the six heads with the largest"
            f" σ(W_Q) at the onset (σ {ONSET:g} times the twin's) every run is stable, but not with"
            f" fp32 O for every random set of six; {CRITERION}",
            lambda f: (
                f["seeds"] >= 3
                and f["all heads failed"] == 1
                and f["outliers"] > GROWTH
                and f["picked in fp32 stable"] == 1
                and f["random in fp32 stable"] < 1
            ),
        ),
        setup="altered",
        history=(
            f"{ONE_CRITERION}; the same day, before a look at substitutions: 12 heads in place of"
            " 4, O of 2 bits in place of 1, 3 seeds in place of one, heads picked at the onset in"
            " place of the end, random sets as control"
        ),
        seconds=110.0,
    ),
)
