"""Why the sum of δ_lp − δ_hp pushes: Qiu & Yao's account (A9 to A11) beside the curvature of the
loss (D9).

The two accounts differ in one thing that can be measured. If rounding leans against the gradient,
the sum is there to first order, with dO as it is at the exact O. If it is the curvature of the
loss, dO there has nothing to do with the error, and only dO at the rounded O has: errᵀ H err. So
every figure of e stands here with both, for the one-layer task as it fails by itself, and for a run
built from the paper's conditions (`mechanism`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from halfulp.experiments.compare_summary import Interval, interval_of
from halfulp.papers import figures_a as pictures
from halfulp.papers.claim import MANY_SEEDS, Claim, Lab, Mean, Measured, Rule, mean_of, spread
from halfulp.papers.claims.a_cause import INTERVAL, language, scale_of, traced
from halfulp.papers.claims.constructed import constructed, constructed_text, window
from halfulp.papers.constructed_run import VARIANTS, profile
from halfulp.papers.runs_a import TASK_STOCK, Plan, Snapshot, Traced

_SINCE = 600  # steps: the task is learned and its scores are on their way


def layer_traces(lab: Lab) -> list[Traced]:
    """The stock recipe on the one-layer task, measured every 10 steps up to 800."""
    stock = Plan((TASK_STOCK,), 0, 800, measure_every=10, at=(600, 700, 800))
    return traced(lab, {"stock": [replace(stock, seed=seed) for seed in MANY_SEEDS]})["stock"]


def _similar_terms(lab: Lab) -> Measured:
    """A9: cosines of the rank-1 terms over tokens and over steps, beside those of shuffled
    features.
    """
    reader, layers = language(lab, ("everywhere",))["everywhere"], layer_traces(lab)
    found: dict[str, dict[str, float]] = {}
    intervals: dict[str, Interval] = {}
    for name, runs, since in (
        ("task", layers, _SINCE),
        ("language", reader, reader[0].config.steps // 2),
    ):
        found[name] = {}
        for figure in ("terms_cosine", "terms_step_cosine", "direction_cosine"):
            for control in ("", "_shuffled"):
                means = [
                    statistics.mean(
                        h for heads in run.measured(figure + control, 0, since) for h in heads
                    )
                    for run in runs
                ]
                intervals[f"{name}, {figure}{control}"] = interval_of(means)
                found[name][figure + control] = statistics.mean(means)
    figures = {
        f"{name}, {figure}": value for name, by in found.items() for figure, value in by.items()
    }
    said = [
        f"{name}: tokens {by['terms_cosine']:.2f} ({by['terms_cosine_shuffled']:+.4f}), steps "
        f"{by['terms_step_cosine']:.2f} ({by['terms_step_cosine_shuffled']:.3f}), R over steps "
        f"{by['direction_cosine']:+.2f} ({by['direction_cosine_shuffled']:.3f})"
        for name, by in found.items()
    ]
    text = (
        f"mean cosine, shuffled control in brackets; one-layer task, {len(layers)} seeds, in which"
        " 8 of 32 coordinates of X are alike by construction; byte GPT, guilty layer"
        f" ({scale_of(lab).text}): {'; '.join(said)}"
    )
    drawn = (
        *pictures.similarity_maps(reader[0], 0, 0, lab.command("A9")),
        *pictures.raw_maps(reader[0], 0, 0, lab.command("A9")),
    )
    return Measured(figures, text, drawn, intervals)


def _positive_sums(lab: Lab) -> Measured:
    """A10: the signs of Σ(δ_lp − δ_hp) over steps, in three runs."""
    layers = layer_traces(lab)
    shares, tests = zip(
        *(_signs([h[0] for h in run.measured("delta_error", 0, _SINCE)]) for run in layers),
        strict=True,
    )
    readers = [
        _signs([sum(heads) for heads in run.measured("delta_error", 0)])
        for run in language(lab, ("everywhere",))["everywhere"]
    ]
    share, test = min(s for s, _ in readers), max(p for _, p in readers)
    built = constructed(lab)["described"]
    first = [
        _signs([y for s, y in zip(r.steps, r.first_order, strict=True) if 100 < s <= 600])
        for r in built
    ]
    figures = {
        "least positive": min(shares),
        "largest p": max(tests),
        "language positive": share,
        "language p": test,
        "constructed": min(s for s, _ in first),
    }
    text = (
        f"one-layer task, steps {_SINCE} to 800 every 10, {len(layers)} seeds: positive in"
        f" {min(shares):.0%} to {max(shares):.0%} of the steps (sign test p ≤ {max(tests):.0e});"
        f" byte GPT ({scale_of(lab).text}, every {INTERVAL} steps): {share:.0%} to"
        f" {max(s for s, _ in readers):.0%}, p from {min(p for _, p in readers):.1g} to {test:.1g};"
        f" constructed run: {min(s for s, _ in first):.0%} to {max(s for s, _ in first):.0%} (p ≤"
        f" {max(p for _, p in first):.0e})"
    )
    summed = pictures.cumulative_error(layers[0], 100, lab.command("A10"))
    shown = {
        name: runs[0]
        for name, runs in constructed(lab).items()
        if name in ("described", "softmax fix")
    }
    intervals = {
        "task, positive": interval_of(shares),
        "language, positive": interval_of([s for s, _ in readers]),
        "constructed, positive": interval_of([s for s, _ in first]),
    }
    drawn = (summed, pictures.constructed_error(shown, lab.command("A10")))
    return Measured(figures, text, drawn, intervals)


def _signs(values: Sequence[float]) -> tuple[float, float]:
    """The share above zero, and the two-sided p of the sign test."""
    from scipy.stats import binomtest

    positive = sum(x > 0 for x in values)
    return positive / len(values), float(binomtest(positive, len(values)).pvalue)


def _same_signs(lab: Lab) -> Measured:
    """A11: how often dO and O_lp − O_hp have one sign, with dO at the rounded O and at the exact
    one.
    """
    found: dict[str, list[float]] = {"rounded": [], "exact": []}
    for run in layer_traces(lab):
        shares = [sign_shares(snapshots[0]) for snapshots in run.calls.values()]
        for name, values in found.items():
            # steps of one run are not independent, so a seed is the sample that t counts
            values.append(statistics.mean(share[name] for share in shares))
    rounded, exact = (mean_of(torch.tensor(found[name])) for name in ("rounded", "exact"))
    runs = constructed(lab)
    built, fixed = (
        mean_of(torch.tensor([window(run, "agreement").value for run in runs[n]]))
        for n in ("described", "softmax fix")
    )
    figures = {
        "task": rounded.value,
        # against one half, which signs that know nothing of each other give
        "task, t": (rounded.value - 0.5) / rounded.error,
        "constructed": built.value,
        "constructed, t": (built.value - 0.5) / built.error,
    }
    text = (
        f"share of one sign; one-layer task, mean of steps 600, 700, 800 of {rounded.count} seeds:"
        f" {rounded}, but {exact} with dO as it is at the exact O (what only the former has is the"
        " curvature's doing). Constructed run, dO at the exact O, guilty features of sharp rows:"
        f" {built}; with the softmax fix {fixed}"
    )
    shown = profile(VARIANTS[0])
    command = lab.command("A11")
    drawn = (
        *pictures.feature_bars(shown, command),
        pictures.value_distribution(shown, command),
        pictures.running_error(shown, command),
        pictures.fix_losses(
            {n: runs[n] for n in ("described", "softmax fix", "no ties", "fp32")}, command
        ),
    )
    intervals = {
        "task": spread(rounded),
        "task, dO at the exact O": spread(exact),
        "constructed": spread(built),
        "constructed, softmax fix": spread(fixed),
    }
    return Measured(figures, text, drawn, intervals)


def sign_shares(snapshot: Snapshot) -> dict[str, float]:
    """Return how often dO · (O − O_hp) is positive where it is not 0, with dO at the rounded O and
    at the exact one.
    """
    error = snapshot.call.out.double() - snapshot.exact().out
    assert snapshot.call.grad_out is not None
    grads = {"rounded": snapshot.call.grad_out, "exact": snapshot.exact_grad}
    products = {name: grad.double() * error for name, grad in grads.items()}
    return {name: float((x[x != 0] > 0).double().mean()) for name, x in products.items()}


def _curvature(lab: Lab) -> Measured:
    """D9: first-order and second-order part of Σ(δ_lp − δ_hp), steps 600 to 800, with their t
    values.
    """
    names = {
        "e": "delta_error",
        "first order": "delta_error_first_order",
        "curvature": "delta_error_curvature",
    }
    parts: dict[str, list[Mean]] = {name: [] for name in names}
    positive = 1.0
    for run in layer_traces(lab):
        for name, figure in names.items():
            parts[name].append(
                mean_of(torch.tensor([h[0] for h in run.measured(figure, 0, _SINCE)]))
            )
        positive = min(
            positive, _signs([h[0] for h in run.measured(names["curvature"], 0, _SINCE)])[0]
        )
    # the worst seed of each, since the rule speaks of every seed
    share = min(c.value / e.value for c, e in zip(parts["curvature"], parts["e"], strict=True))
    leaning = max(
        abs(first.value) / e.value
        for first, e in zip(parts["first order"], parts["e"], strict=True)
    )
    built = constructed(lab)["described"]
    figures = {
        "share": share,
        "first order, share": leaning,
        "curvature, least t": min(m.t for m in parts["curvature"]),
        "positive": positive,
    }
    said = "; ".join(
        f"{name} {', '.join(f'{m.value:+.1e} (t {m.t:+.0f})' for m in means)}"
        for name, means in parts.items()
    )
    first, curved = ([window(run, part) for run in built] for part in ("first_order", "curvature"))
    text = (
        f"one-layer task, steps {_SINCE} to 800 every 10, by seed: {said}; curvature positive on"
        f" {positive:.0%} of the steps. Run constructed from the paper's conditions, steps 100 to"
        f" 600: first order {', '.join(f'{m.value:+.1e} (t {m.t:+.0f})' for m in first)}, curvature"
        f" {', '.join(f'{m.value:+.1e}' for m in curved)}. Its variants: {constructed_text(lab)}"
    )
    shares = {
        name: interval_of([m.value / e.value for m, e in zip(parts[name], parts["e"], strict=True)])
        for name in ("curvature", "first order")
    }
    return Measured(figures, text, (), {f"{n}, share of the sum": one for n, one in shares.items()})


CLAIMS = (
    Claim(
        "A9",
        "the rank-1 terms (PK)[T]ᵀX[T] are alike across tokens and steps",
        "fig. 4",
        _similar_terms,
        Rule(
            "in the one-layer task and in the byte GPT: mean cosine over 0.1 across tokens and"
            " across steps, each over 5 times its shuffled control",
            lambda f: all(
                f[f"{run}, {name}"] > max(0.1, 5 * abs(f[f"{run}, {name}_shuffled"]))
                for run in ("task", "language")
                for name in ("terms_cosine", "terms_step_cosine")
            ),
        ),
        setup="altered",
        seconds=15.0,
    ),
    Claim(
        "A10",
        "Σ_T (δ_lp − δ_hp)[T] is positive step after step; its cumulative sum grows",
        "fig. 5a",
        _positive_sums,
        Rule(
            "one-layer task, every seed, and the byte GPT: positive in at least 95 % of the"
            " measured steps, sign test p at most 1e-3",
            lambda f: (
                min(f["least positive"], f["language positive"]) >= 0.95
                and max(f["largest p"], f["language p"]) <= 1e-3
            ),
        ),
        setup="altered",
        history=(
            "2026-11-22: the language model counts too, on every seed; before, the one-layer task"
            f" alone; measured every {INTERVAL} steps in place of 50"
        ),
        seconds=15.0,
    ),
    Claim(
        "A11",
        "in the guilty features dO and O_lp − O_hp have the same sign",
        "fig. 5b, c: features 20 and 29",
        _same_signs,
        Rule(
            "in the one-layer task, dO as the run has it, and in the constructed run: of one sign"
            " in over 53 % of the entries, t over 5 with a seed a sample",
            lambda f: (
                min(f["task"], f["constructed"]) > 0.53
                and min(f["task, t"], f["constructed, t"]) > 5
            ),
        ),
        setup="reduced",
        history="2026-11-22, before a look: a seed is a sample; before, a seed and step each",
        seconds=15.0,
    ),
    Claim(
        "D9",
        "the sum of δ_lp − δ_hp is positive because of curvature, not because rounding leans",
        "",
        _curvature,
        Rule(
            "one-layer task, every seed: the curvature part is over 90 % of the sum, positive in at"
            " least 95 % of the steps with t over 10, and the first-order part, of either sign,"
            " under 10 %",
            lambda f: (
                f["share"] > 0.9
                and f["positive"] >= 0.95
                and f["curvature, least t"] > 10
                and f["first order, share"] < 0.1
            ),
        ),
        history=(
            "2026-11-22: an effect size in place of |t| < 4, which enough steps exceed for any"
            " effect, and which one seed did (t = −5)"
        ),
        seconds=10.0,
    ),
)
