"""The ledger: every claim of the papers, what was measured here, and a verdict computed by a stated
rule.

The claims stand in the files by topic in `claims/`; this file puts them in order and runs
them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from halfulp.papers.claim import Claim, Lab, Measured, Verdict, judge_claim
from halfulp.papers.claims import (
    a_cause,
    a_growth,
    a_heads,
    a_mechanism,
    a_rounding,
    b_deviation,
    b_training,
    carries,
    delta_mean,
    fixes,
    identities,
    loss_spike,
    optimizers,
    remedies,
    weak_points,
)
from halfulp.runs.keeping import keeping, now_keeping
from halfulp.runs.results import Progress, no_progress, part_of
from halfulp.runs.threads import one_thread

_TOPICS = (
    b_training,
    identities,
    a_rounding,
    carries,
    b_deviation,
    weak_points,
    fixes,
    a_cause,
    a_heads,
    remedies,
    optimizers,
    a_mechanism,
    a_growth,
    delta_mean,
    loss_spike,
)


def _order(claim: Claim) -> tuple[str, int, str]:
    return claim.group, int(re.sub(r"\D", "", claim.id)), claim.id


CLAIMS: tuple[Claim, ...] = tuple(
    sorted((claim for topic in _TOPICS for claim in topic.CLAIMS), key=_order)
)
"""Every claim of the ledger, A1 to D13."""


def run_claims(
    ids: Iterable[str] | None = None, progress: Progress | None = None, *, lab: Lab | None = None
) -> list[Verdict]:
    """Measure claims and judge them, in the ledger's order. Inside of
    `halfulp.runs.keeping.keeping` what an earlier call measured is taken from it, and said so.

    Args:
        ids: which, such as "A13" (any case); all if None. All together take a few minutes on two
            cores.
        progress: called with the fraction done and what is being measured.
        lab: shared training runs and sweeps, the number of worker processes and seeds; a fresh one
            if None.

    Raises:
        ValueError: an id is not in the ledger.
    """
    chosen = CLAIMS if ids is None else selected(ids)
    lab = Lab() if lab is None else lab
    report = progress or no_progress
    total = sum(_cost(claim) for claim in chosen) or 1.0
    done = 0.0
    verdicts = []
    for claim in chosen:
        start, done = done, done + _cost(claim)
        lab.report = part_of(report, start / total, done / total, claim.id)
        verdicts.append(_run(claim, lab))
        report(min(done / total, 1.0), f"{claim.id}: {verdicts[-1].verdict}")
    return verdicts


def selected(ids: Iterable[str]) -> tuple[Claim, ...]:
    """Return the claims with these ids, in the ledger's order; raises ValueError for one that is
    not there.
    """
    known = [claim.id for claim in CLAIMS]
    wanted = set[str]()
    for given in ids:
        # "a5" means both halves, A5a and A5b
        asked = re.compile(re.escape(given.strip()) + "[a-z]?", re.IGNORECASE)
        found = {identifier for identifier in known if asked.fullmatch(identifier)}
        if not found:
            raise ValueError(f"claim={given!r}: accepted are {', '.join(known)}")
        wanted |= found
    return tuple(claim for claim in CLAIMS if claim.id in wanted)


@dataclass(frozen=True)
class _Done:
    """A claim that was measured, in so many seconds."""

    measured: Measured
    seconds: float


def _run(claim: Claim, lab: Lab) -> Verdict:
    command = lab.command(claim.id)
    if claim.measure is None:
        return Verdict(claim, Measured({}, ""), claim.without, command, 0.0)
    done, kept = _measured(claim, claim.measure, lab)
    found = done.measured
    assert found.intervals or found.exact, claim.id
    return Verdict(claim, found, judge_claim(claim, found), command, done.seconds, kept)


def _measured(claim: Claim, measure: Callable[[Lab], Measured], lab: Lab) -> tuple[_Done, str]:
    """What a claim comes to, and what of it an earlier call has measured, in words."""
    outer = None if claim.timed else now_keeping()
    if outer is None:
        return _timed(measure, lab), ""
    slot = outer.slot("claim", claim.id, lab.seeds, lab.steps, lab.full)
    if found := outer.take(slot, _Done):
        return found[0], f"all, measured at {found[1]}"
    # one more, which counts this claim's runs alone
    with keeping(fresh=outer.fresh, backend=outer.backend) as inner:
        done = _timed(measure, lab)
    if slot is not None:
        slot.keep(done)
    return done, inner.said()


def _timed(measure: Callable[[Lab], Measured], lab: Lab) -> _Done:
    began = time.perf_counter()
    with one_thread():
        return _Done(measure(lab), time.perf_counter() - began)


def _cost(claim: Claim) -> float:
    return claim.seconds if claim.measure is not None else 0.0
