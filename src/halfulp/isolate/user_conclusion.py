"""From the rungs of a user's model to a sentence: which module and operation carry the failure, on
how many seeds, and the line that puts them into fp32.
"""

from __future__ import annotations

from dataclasses import replace

from halfulp.isolate.conclusion import alone_text, conclude, no_failure, unheld
from halfulp.isolate.result import Isolation
from halfulp.isolate.user_questions import UserInvestigation
from halfulp.training.optimizer_arithmetic import OPTIMIZER


def conclude_user(found: UserInvestigation, status: str, command: str) -> Isolation:
    """Return what an investigation of a user's model found so far."""
    plain = conclude(found, status, command)
    known = bool(found.failing) and (found.told_apart or bool(found.place_sets))
    return replace(
        plain,
        found=known and plain.confidence.held > 0,
        verdict=_verdict(found, plain, known),
        fix=_fix(found, known and plain.confidence.held > 0),
        sites=_sites(found) if known else (),
    )


def _sites(found: UserInvestigation) -> tuple[str, ...]:
    if found.sites == found.layout.steps:
        return (OPTIMIZER,)
    return tuple(f"{kind} in {path or '(outside)'}" for path, kind in found.sites)


def _verdict(found: UserInvestigation, plain: Isolation, known: bool) -> str:
    if not found.failing:
        return no_failure(found)
    if not known:
        return (
            "Rounding is the cause, since the run survives with everything in fp32; where is not"
            f" told apart; {plain.confidence.text()}."
        )
    where = found.where()
    if plain.confidence.tried and not plain.confidence.held:
        return unheld(where, plain.confidence)
    said = f"{where[0].upper()}{where[1:]}; {plain.confidence.text()}."
    return f"{said} {alone_text(found, plain.rescues)}" if plain.rescues else said


def _fix(found: UserInvestigation, known: bool) -> str:
    if not known or not found.cleared:
        return ""
    rung = found.ladder.rungs[found.cleared[-1]]
    held, tried = rung.held(found.failing)
    return (
        f"{rung.change}: the run survives on {held} of {tried} seeds;"
        f" halfulp train … {found.line()}"
    )
