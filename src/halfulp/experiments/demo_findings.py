"""What the demo's measurements say, one sentence an act: computed from the figures, worded by their
outcome.

Nothing here knows what is expected. Where a kernel does not fail on some machine, the sentence says
that it did not.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from halfulp.audit.report import Verdict
from halfulp.experiments.failure import FailureRun, final_loss

OUTCOMES = ("survived", "drifting", "failed")
_VERBS = {"survived": "survive", "drifting": "drift", "failed": "fail"}


def worst_outcome(runs: Sequence[FailureRun]) -> str:
    """Return the worst outcome of an attention's runs over its seeds."""
    return max((run.outcome for run in runs), key=OUTCOMES.index)


def failure_finding(runs: Mapping[str, Sequence[FailureRun]], suspect: str) -> str:
    """Return what became of the suspect kernel's training and of the others'; `runs` by name, every
    seed of each.
    """
    mine = runs[suspect]
    failed = [run for run in mine if run.outcome == "failed"]
    others = grouped({name: worst_outcome(same) for name, same in runs.items() if name != suspect})
    if not failed:
        return f"{suspect} did not ruin this training on any of {_seeds(len(mine))}; {others}."
    share = (
        f"on all of {_seeds(len(mine))}"
        if len(failed) == len(mine)
        else f"on {len(failed)} of {_seeds(len(mine))}"
    )
    score = statistics.median(run.mean_score[-1] for run in failed)
    return (
        f"{suspect} ruins the training {share}: {_what_happens(failed)}, while the mean score runs"
        f" to {score:+.0f}; on the same data, {others}."
    )


def _what_happens(failed: Sequence[FailureRun]) -> str:
    broke = [run.broke_at for run in failed if run.broke_at is not None]
    if broke:
        return f"its loss is no number any more after {min(broke)} steps"
    best, end = (
        statistics.median(values) for values in zip(*map(_best_and_end, failed), strict=True)
    )
    return f"its loss climbs {end / best:.0f}-fold from its lowest, to {short(end)}"


def short(value: float) -> str:
    """Return two digits and a power of ten without its zeros: 1.6e-3."""
    return re.sub(r"e([+-])0*(\d)", r"e\1\2", f"{value:.1e}").replace("e+", "e")


def _best_and_end(run: FailureRun) -> tuple[float, float]:
    tenth = max(1, len(run.loss) // 10)
    parts = [statistics.median(run.loss[i : i + tenth]) for i in range(0, len(run.loss), tenth)]
    return min(parts), final_loss(run)


def grouped(outcomes: Mapping[str, str]) -> str:
    """Return names by outcome: "a and b survive, c fails"."""
    parts = []
    for outcome in OUTCOMES:
        names = [name for name, found in outcomes.items() if found == outcome]
        if names:
            parts.append(f"{_list(names)} {_VERBS[outcome]}{'s' if len(names) == 1 else ''}")
    return ", ".join(parts)


def audit_finding(audits: Sequence[Mapping[str, Any]], skipped: Mapping[str, str]) -> str:
    """Return how many kernels, and how many recipes, got which verdict."""
    kernels = [audit for audit in audits if not audit["target"].startswith("recipe:")]
    recipes = [audit for audit in audits if audit["target"].startswith("recipe:")]
    counted = ((kernels, "kernel", "found here"), (recipes, "recipe", "emulated"))
    parts = [
        f"of {len(a)} {noun}{'s' * (len(a) != 1)} {where}, {_verdicts(a)}"
        for a, noun, where in counted
        if a
    ]
    missing = (
        f"; {len(skipped)} more {'was' if len(skipped) == 1 else 'were'} skipped" if skipped else ""
    )
    text = f"{'; '.join(parts)}{missing}."
    return text[0].upper() + text[1:]


def _verdicts(audits: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for verdict in get_args(Verdict):
        same = [
            str(audit["target"]).removeprefix("recipe:")
            for audit in audits
            if audit["verdict"] == verdict
        ]
        if same:
            be, have = ("is", "has") if len(same) == 1 else ("are", "have")
            words = {
                "defect": f"{have} a defect",
                "error": "could not be audited",
                "incomplete": "could not be audited wholly",
            }
            parts.append(f"{len(same)} {words.get(verdict, f'{be} {verdict}')} ({', '.join(same)})")
    return ", ".join(parts)


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"
