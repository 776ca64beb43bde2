"""What shows from outside before a run fails: σ(W_Q) and activations that grow (A19), in which
layer of twelve (A26), and sinks with P̄ = 1 (A20).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from halfulp.experiments.compare_summary import geometric_interval, interval_of
from halfulp.experiments.failure import FailureRun
from halfulp.papers import figures_a as pictures
from halfulp.papers.claim import Claim, Lab, Measured, Rule
from halfulp.papers.claims.a_cause import (
    INTERVAL,
    STANDARD,
    language,
    scale_of,
    traced,
)
from halfulp.papers.runs_a import Plan, Snapshot, Traced, language_attention
from halfulp.watch.measures import UNIT_SCORE

_DEEP = 12  # layers, as the paper's model has


def _growth(lab: Lab) -> Measured:
    """A19: when σ(W_Q), σ(W_K) and the loss leave those of the twin."""
    runs = language(lab, ("everywhere", "nowhere"))
    pairs = list(zip(runs["everywhere"], runs["nowhere"], strict=True))
    sigma = [_language_growth(run, twin, "sigma_query") for run, twin in pairs]
    loss = [loss_rises(*run.loss(), twin.loss()[1]) for run, twin in pairs]
    together = [_language_growth(run, twin, "sigma_query_key") for run, twin in pairs]
    grown = [
        max(run.measured("query_rms")[-1]) / max(twin.measured("query_rms")[-1])
        for run, twin in pairs
    ]
    task = lab.trained(("torch:flash", "torch:fp32"))
    task_pairs = list(zip(task["torch:flash"], task["torch:fp32"], strict=True))
    keys = [_task_growth(run, twin, "sigma_key") for run, twin in task_pairs]
    queries = [_task_growth(run, twin, "sigma_query") for run, twin in task_pairs]
    products = [_task_growth(run, twin, "sigma_query_key") for run, twin in task_pairs]
    rises = [_task_rises(run) for run, _ in task_pairs]
    leads = {
        "σ(W_Q)": [_lead(a, b) for a, b in zip(sigma, loss, strict=True)],
        "σ(W_QW_Kᵀ)": [_lead(a, b) for a, b in zip(together, loss, strict=True)],
        "task, σ(W_K)": [_lead(a, b) for a, b in zip(keys, rises, strict=True)],
        "task, σ(W_QW_Kᵀ)": [_lead(a, b) for a, b in zip(products, rises, strict=True)],
    }
    figures = {
        "lead": min(leads["σ(W_Q)"]),
        "latest rise": max(loss),
        "activations": min(grown),
        "lead of the product": min(leads["σ(W_QW_Kᵀ)"]),
        "task lead of the product": min(leads["task, σ(W_QW_Kᵀ)"]),
    }
    text = (
        f"byte GPT, guilty layer ({scale_of(lab).text}, measured every {INTERVAL}): σ(W_Q) is twice"
        f" the twin's from step {_steps(sigma)}, σ(W_QW_Kᵀ) {_steps(together)}, the loss rises 0.2"
        f" nats above its lowest excess over the twin at step {_steps(loss)}; queries (rms) end at"
        f" {min(grown):.1f} to {max(grown):.1f} times the twin's. One-layer task, torch:flash,"
        f" {len(rises)} seeds: σ(W_QW_Kᵀ) is twice the fp32 twin's from step {_steps(products)},"
        f" σ(W_K) {_steps(keys)}, σ(W_Q) {_steps(queries)}, the loss three times its best from"
        f" {_steps(rises)}"
    )
    shown = {name: same[0] for name, same in runs.items()}
    intervals = {
        f"lead of {name}, steps": interval_of(values)
        for name, values in leads.items()
        if all(map(math.isfinite, values))
    }
    intervals["queries over the twin's"] = interval_of(grown)
    drawn = (pictures.layer_sigmas(shown, lab.command("A19")),)
    return Measured(figures, text, drawn, intervals)


def _lead(first: float, then: float) -> float:
    """Steps from one to the other; negative infinity where the first never came."""
    return -math.inf if math.isinf(first) else then - first


def _one_of_twelve(lab: Lab) -> Measured:
    """A26: σ(W_Q) of every one of twelve layers over the twin's, low precision in all of them."""
    bits, steps = (2, 1000) if lab.full else (1, 200)
    plan = Plan((STANDARD,), 0, steps, _DEEP, 2, 2 * INTERVAL)
    found = traced(
        lab,
        {
            name: [replace(plan, attention=(attention,), seed=seed) for seed in (0, 1, 2)]
            for name, attention in (("everywhere", language_attention(bits)), ("nowhere", STANDARD))
        },
    )
    pairs = list(zip(found["everywhere"], found["nowhere"], strict=True))
    grown = [
        [max(a.measured("sigma_query", n)[-1]) / max(b.measured("sigma_query", n)[-1])
         for n in range(_DEEP)]
        for a, b in pairs
    ]  # fmt: skip
    largest = [max(range(_DEEP), key=ratios.__getitem__) for ratios in grown]
    out = [max(ratios) / statistics.median(ratios) for ratios in grown]
    figures = {
        "seeds": float(len(pairs)),
        "layers": float(len(set(largest))),
        "stands out": min(out),
        "grown": min(map(max, grown)),
    }
    said = "; ".join(
        f"layer {n} × {max(ratios):.1f}, the median layer × {statistics.median(ratios):.1f}"
        for n, ratios in zip(largest, grown, strict=True)
    )
    text = (
        f"byte GPT of {_DEEP} layers, numbered from 0 (accelerated: O with {bits} mantissa"
        f" bit{'s' * (bits > 1)}; {steps} steps, {len(pairs)} seeds), largest σ(W_Q) of a layer's"
        f" heads over the twin's at the end, by seed: {said}"
    )
    intervals = {
        "largest over the median layer": geometric_interval(out),
        "largest over its twin": geometric_interval([max(ratios) for ratios in grown]),
    }
    shown = {name: same[0] for name, same in found.items()}
    drawn = pictures.layer_sigmas(shown, lab.command("A26"))
    return Measured(figures, text, (drawn,), intervals)


def _steps(steps: Sequence[float]) -> str:
    if all(math.isinf(x) for x in steps):
        return "never"
    return f"{min(steps):g}" if min(steps) == max(steps) else f"{min(steps):g} to {max(steps):g}"


def _language_growth(run: Traced, twin: Traced, name: str) -> float:
    pairs = zip(run.measured_steps(), run.measured(name), twin.measured(name), strict=True)
    return next(
        (float(step) for step, mine, other in pairs if max(mine) > 2 * max(other)), math.inf
    )


def loss_rises(steps: Sequence[int], mine: Sequence[float], twin: Sequence[float]) -> float:
    """The step at which the loss, mean of 5 recorded steps, is 0.2 nats above its smallest excess
    over the twin's; infinite where that never happens.
    """
    excess = [a - b for a, b in zip(mine, twin, strict=True)]
    means = [statistics.mean(excess[i - 5 : i]) for i in range(5, len(excess) + 1)]
    rising = (step for i, step in enumerate(steps[4:]) if means[i] > 0.2 + min(means[: i + 1]))
    return float(next(rising, math.inf))


def _task_growth(run: FailureRun, twin: FailureRun, name: str) -> float:
    pairs = zip(run.steps, getattr(run, name), getattr(twin, name), strict=True)
    return next((float(step) for step, mine, other in pairs if mine > 2 * other), math.inf)


def _task_rises(run: FailureRun) -> float:
    rising = (s for i, s in enumerate(run.steps) if run.loss[i] > 3 * min(run.loss[: i + 1]))
    return float(next(rising, math.inf))


def _sinks(lab: Lab) -> Measured:
    """A20: keys that take much of the weight are the keys with P̄ = 1, in a model whose attention
    is sound.
    """
    runs = language(lab, ("nowhere",))["nowhere"]
    by_seed = [
        [head for one in run.calls[run.config.steps].values() for head in sink_figures(one)]
        for run in runs
    ]
    heads = [head for same in by_seed for head in same]
    least, ratio = min(h[0] for h in heads), min(h[2] for h in heads)
    most = max(h[1] for h in heads)
    figures = {"least correlation": least, "largest p": most, "least ratio": ratio}
    said = ", ".join(f"{h[0]:.2f} (× {h[2]:.0f}, mass {h[3]:.2f})" for h in heads)
    text = (
        f"byte GPT with standard attention, {scale_of(lab).steps} steps, {len(runs)} seeds:"
        " Spearman correlation over keys of the weight a key gets and its rate of P̄ = 1, and that"
        f" rate at the heaviest key of a sequence against the average key, head by head: {said}; p"
        f" ≤ {most:.0e}"
    )
    intervals = {
        "least correlation of a seed": interval_of([min(h[0] for h in same) for same in by_seed]),
        "least ratio of a seed": interval_of([min(h[2] for h in same) for same in by_seed]),
    }
    return Measured(figures, text, (), intervals)


def sink_figures(snapshot: Snapshot) -> list[tuple[float, float, float, float]]:
    """Per head: correlation of a key's weight with its rate of P̄ = 1, its p, the heaviest key's
    rate over the mean rate, and its weight. The first 8 rows, which see few keys, and keys seen by
    fewer than 16 rows are left out.
    """
    from scipy.stats import spearmanr

    exact = snapshot.exact()
    n = exact.weights.shape[-1]
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    seen[:8] = False
    counts = seen.sum(0)
    keys = counts >= 16
    # scores so near to the largest that their P̄ is rounded to 1
    units = ((exact.scores >= exact.row_max + UNIT_SCORE) & seen).sum(2) / counts.clamp_min(1)
    mass = (exact.weights * seen).sum(2) / counts.clamp_min(1)
    figures = []
    for head in range(mass.shape[1]):
        m, u = mass[:, head, keys], units[:, head, keys]
        heaviest = m.argmax(-1, keepdim=True)
        ratio = float(u.gather(-1, heaviest).mean() / u.mean())
        weight = float(m.gather(-1, heaviest).mean())
        if m.min() == m.max() or u.min() == u.max():  # no ranks to compare
            figures.append((0.0, 1.0, ratio, weight))
            continue
        found = spearmanr(m.flatten(), u.flatten())
        figures.append((float(found.statistic), float(found.pvalue), ratio, weight))
    return figures


CLAIMS = (
    Claim(
        "A19",
        "σ(W_Q) of the failing layer grows before the loss does; activations grow",
        "fig. 9",
        _growth,
        Rule(
            "byte GPT, every seed: the loss rises by 0.2 nats against the twin's, σ(W_Q) is twice"
            f" the twin's at least a measuring interval ({INTERVAL} steps) before, and queries end"
            " over 2 times as large",
            lambda f: (
                math.isfinite(f["latest rise"]) and f["lead"] >= INTERVAL and f["activations"] > 2
            ),
        ),
        history=(
            "2026-11-22: the loss has to rise, and the lead to be seen by the interval; before, a"
            " loss that never rose had an infinite lead; the same day, measured every"
            f" {INTERVAL} steps in place of 50 and on 5 seeds, σ(W_QW_Kᵀ) beside"
        ),
        setup="altered",
        seconds=10.0,
    ),
    Claim(
        "A26",
        "with low precision everywhere σ(W_Q) of a single layer of twelve runs away",
        "fig. 9: layer 2",
        _one_of_twelve,
        Rule(
            "at least 3 seeds: on each the same layer's σ(W_Q) has grown most against the twin's,"
            " to over 2 times it, and over 2 times as far as in the median layer",
            lambda f: (
                f["seeds"] >= 3 and f["layers"] == 1 and f["grown"] > 2 and f["stands out"] > 2
            ),
        ),
        setup="altered",
        history="2026-11-22: new, its rule set before running",
        seconds=60.0,
    ),
    Claim(
        "A20",
        "attention sinks make P̄ = 1 likely",
        "discussion, no figure",
        _sinks,
        Rule(
            "every head: rank correlation of a key's weight with its rate of P̄ = 1 over 0.3 with p"
            " under 1e-6, and the heaviest key's rate over 2 times the mean rate",
            lambda f: (
                f["least correlation"] > 0.3 and f["largest p"] < 1e-6 and f["least ratio"] > 2
            ),
        ),
        setup="reduced",
        seconds=5.0,
    ),
)
