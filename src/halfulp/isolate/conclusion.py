"""From rungs to a sentence: what is to blame, where, on how many seeds, and what saves the run.

Nothing is said here that a run did not show. A cause is named after the operation whose replacement
alone saved the run; where only several together do, all of them are named. It holds on a seed if
every rung that it rests on came out as it says on that seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfulp.isolate.climb import ORIGINAL, TWIN, Rung
from halfulp.isolate.questions import HALFULP, TILING, Investigation
from halfulp.isolate.result import Isolation, Rescue, Seeds
from halfulp.isolate.rule import Curve, read_curves
from halfulp.isolate.rung import RungRun
from halfulp.isolate.substitutions import OPERATIONS, Place, places_text
from halfulp.runs.results import Figure, Series
from halfulp.training.journal import Row, read_rows
from halfulp.training.run_json import config_as_dict

_MOST_POINTS = 200  # of a curve


def conclude(found: Investigation, status: str, command: str) -> Isolation:
    """Return what an investigation found so far."""
    ladder, settings = found.ladder, found.ladder.settings
    rescues = _rescues(found)
    seeds = _seeds(found, rescues[0] if rescues else None)
    where = _places(found)
    # all heads are no place: nothing was narrowed down
    known = bool(rescues) or 0 < len(where) < len(found.cells)
    return Isolation(
        run=str(settings.source) if settings.source else settings.config.preset or "configuration",
        config=config_as_dict(settings.config),
        rule=settings.rule.text(settings.horizon),
        seeds=settings.seeds,
        failing=tuple(found.failing),
        horizon=settings.horizon,
        start=settings.start,
        status=status,
        found=known and seeds.held > 0,
        verdict=_verdict(found, rescues, seeds, where),
        confidence=seeds,
        places=where,
        rescues=tuple(rescues),
        fix=_fix(found, rescues),
        bits=tuple(found.varied),
        rungs=tuple(ladder.rungs.values()),
        notes=tuple(found.notes),
        not_tested=tuple(found.not_tested),
        figures=tuple(_figures(found, rescues, command)),
        seconds=round(ladder.seconds, 1),
        steps=ladder.steps,
        command=command,
    )


def _rescues(found: Investigation) -> list[Rescue]:
    """The minimal sets: those that hold on most seeds first, then the smaller, then the earlier."""
    rescues = []
    whole = found.ladder.rungs.get(TILING)
    if whole is not None and found.main in whole.runs and whole.runs[found.main].survived:
        # searched=1: the seed that led there is no evidence, how sure it is comes from the others
        tiles = Seeds(*whole.held(found.failing), searched=1)
        rescues.append(Rescue(TILING, (TILING,), whole.change, ("the tiling",), False, tiles))
    for chosen in found.rescues:
        rung = found.rescue_rung(chosen)
        ordered = [one for one in OPERATIONS if one in chosen]
        rescues.append(
            Rescue(
                rung=rung.name,
                operations=tuple(one.name for one in ordered),
                change=rung.change,
                blames=tuple(dict.fromkeys(one.blames for one in ordered)),
                repair=all(one.repair for one in ordered),
                seeds=Seeds(*rung.held(found.failing), searched=1),
            )
        )
    return sorted(
        rescues, key=lambda one: (-one.seeds.held / max(one.seeds.tried, 1), len(one.operations))
    )


def _places(found: Investigation) -> tuple[Place, ...]:
    """The heads that carry the failure, or whole layers where heads were not told apart."""
    if found.place_sets:
        return tuple(sorted(frozenset[Place]().union(*found.place_sets)))
    layers = frozenset[int]().union(*found.layer_sets)
    return tuple(sorted(place for place in found.cells if place[0] in layers))


def _seeds(found: Investigation, rescue: Rescue | None) -> Seeds:
    """Of the seeds with every rung that the verdict rests on: where all came out as it says."""
    survive = [*found.cleared, *([rescue.rung] if rescue else [])] or [TWIN]
    held = tried = searched = 0
    for seed in found.failing:
        saved = [found.ladder.rungs[name].runs.get(seed) for name in survive]
        failed = [found.ladder.rungs[name].runs.get(seed) for name in found.confirmed]
        if None not in (*saved, *failed):
            holds = all(run is not None and run.survived for run in saved) and not any(
                run is not None and run.survived for run in failed
            )
            tried += 1
            held += holds
            searched += holds and seed == found.main
    return Seeds(held, tried, searched)


def _verdict(
    found: Investigation, rescues: Sequence[Rescue], seeds: Seeds, where: Sequence[Place]
) -> str:
    if not found.failing:
        return no_failure(found)
    place = places_text(where, found.heads_a_layer) if 0 < len(where) < len(found.cells) else ""
    if not rescues:
        what = f"attention in low precision{', ' + place if place else ''}"
        if seeds.tried and not seeds.held:
            return unheld(what, seeds)
        which = "not known, the budget was spent" if _cut(found) else "not found"
        return f"{_capital(what)}; which operation is {which}; {seeds.text()}."
    first = rescues[0]
    together = " together with " if len(first.operations) > 1 else ""
    what = together.join(first.blames) if together else first.blames[0]
    what += f", {place}" if place else ""
    if seeds.tried and not seeds.held:
        return unheld(what, seeds)
    said = f"{_capital(what)}; {seeds.text()}."
    return f"{said} {alone_text(found, rescues)}"


def unheld(what: str, seeds: Seeds) -> str:
    """What is said of a place or a cause that no seed bears out."""
    return (
        f"Not found: the search ended at {what}, which holds on {seeds.text()}. A run that any"
        " change takes elsewhere, as at too high a learning rate, ends so; `halfulp prescribe`"
        " tries lower ones."
    )


def alone_text(found: Investigation, rescues: Sequence[Rescue]) -> str:
    """Which changes save the run alone, and how many do not."""
    singles = [one for one in rescues if len(one.operations) == 1]
    saving = {one.operations[0] for one in singles}
    others = [one for one in found.tried_alone() if one.name not in saving]
    where = f"tried on seed {found.main}"
    if not singles:
        return f"No single change saves the run ({len(others)} {where})."
    each = "; ".join(f"{one.change} ({one.seeds.held} of {one.seeds.tried})" for one in singles)
    alone = "This change alone saves" if len(singles) == 1 else "Each of these alone saves"
    said = f"{alone} the run: {each}."
    if len(others) > 1:
        return f"{said} None of the {len(others)} other single changes does ({where})."
    return f"{said} The one other single change does not ({where})." if others else said


def _cut(found: Investigation) -> bool:
    """Whether the budget ended before all that may be replaced was."""
    return ("(d) operations", found.budget_text()) in found.not_tested


def no_failure(found: Investigation) -> str:
    """Why there is no cause to look for."""
    rungs, seeds = found.ladder.rungs, found.ladder.settings.seeds
    original, twin = (rungs[name].runs if name in rungs else {} for name in (ORIGINAL, TWIN))
    bad = [seed for seed in seeds if seed in original and not original[seed].survived]
    if len(original) < len(seeds) or len(twin) < len(seeds):
        return "Not known: the budget was spent before the run and its fp32 twin were made."
    if not bad:
        return f"The run does not fail: it survives on {len(original)} of {len(original)} seeds."
    return f"{found.not_the_cause} the run fails too ({len(bad)} of {len(seeds)} seeds)."


def _fix(found: Investigation, rescues: Sequence[Rescue]) -> str:
    """The smallest set of affordable changes that survives, and what became of halfulp's recipe."""
    parts = []
    repairs = [one for one in rescues if one.repair]
    if repairs:
        best = repairs[0]
        several = len(best.operations) > 1
        least = f"; on seed {found.main} none of them can be left out" if several else ""
        parts.append(
            f"{'All of these together: ' * several}{_capital(best.change)}. The run survives on"
            f" {best.seeds.held} of {best.seeds.tried} seeds{least}."
        )
    elif rescues:
        parts.append(
            "The budget was spent before the search for one that a kernel can afford was over."
            if _cut(found)
            else "None that a kernel can afford was found; what saves the run: "
            f"{rescues[0].change}."
        )
    rung = found.ladder.rungs.get(HALFULP)
    if rung is not None and rung.runs:
        held, tried = rung.held(found.failing)
        parts.append(
            f"halfulp's own recipe (attention BF16_HALFULP) survives on {held} of {tried} seeds."
        )
    return " ".join(parts)


def _figures(found: Investigation, rescues: Sequence[Rescue], command: str) -> Iterable[Figure]:
    """Loss and mean score of the run, its twin and what saves it; time to failure over bits."""
    if found.main is None:
        return
    exact = found.ladder.rungs[TWIN].change if TWIN in found.ladder.rungs else ""
    named = {ORIGINAL: "as it is", TWIN: exact.removesuffix(" everywhere"), HALFULP: "halfulp"}
    named |= {
        one.rung: one.change for one in [*rescues[:1], *(one for one in rescues if one.repair)][:2]
    }
    curves = {
        label: read_curves(_until_failed(found, name))
        for name, label in named.items()
        if name in found.ladder.rungs and found.main in found.ladder.rungs[name].runs
    }
    caption = f"Seed {found.main}; a run ends where the rule calls it failed."
    for figure, title, log in (("loss", "Loss", True), ("mean_score", "Mean score", False)):
        series = [_series(label, one[figure]) for label, one in curves.items() if figure in one]
        if series:
            y_label = "loss" if log else "natural units"
            yield Figure(title, "step", y_label, tuple(series), caption, command, y_log=log)
    failed = [
        (one.bits, run.failed_at)
        for one in sorted(found.varied, key=lambda one: one.bits)
        if (run := _run(found, found.ladder.rungs.get(one.rung))) is not None
        and run.failed_at is not None
    ]
    if len(failed) > 1:
        bits, steps = zip(*failed, strict=True)
        line = Series(
            found.varied[0].step, tuple(bits), tuple(float(step) for step in steps), style="points"
        )
        title = f"Time to failure over mantissa bits of {found.varied[0].step}"
        yield Figure(
            title,
            "mantissa bits",
            "steps",
            (line,),
            f"{caption} Runs that did not fail are left out.",
            command,
        )


def _until_failed(found: Investigation, name: str) -> list[Row]:
    """The lines of a rung's run; a recorded one may go on after it has failed, or further."""
    assert found.main is not None
    end = found.ladder.rungs[name].runs[found.main].failed_at or found.ladder.settings.horizon
    rows = read_rows(found.ladder.folder(name, found.main))
    return [row for row in rows if row["step"] <= end]


def _run(found: Investigation, rung: Rung | None) -> RungRun | None:
    return None if rung is None or found.main is None else rung.runs.get(found.main)


def _series(label: str, curve: Curve) -> Series:
    # rounded up, so that no curve has more points than that
    every = -(-len(curve.steps) // _MOST_POINTS)
    return Series(label, tuple(curve.steps[::every]), tuple(curve.values[::every]))


def _capital(text: str) -> str:
    """The text with a capital, unless it begins with a symbol, such as δ or l."""
    return text[0].upper() + text[1:] if text[:2].isascii() and text[:2].isalpha() else text
