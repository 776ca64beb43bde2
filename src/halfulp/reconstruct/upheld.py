"""Which of the causes that a search names stand beside what was read of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from halfulp.operations import DTYPES
from halfulp.recipes import Recipe
from halfulp.reconstruct.call_causes import of_calls, why_unwritten
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.emulating import FORWARD, TENSORS, Emulator, Model
from halfulp.reconstruct.evidence import HARMFUL, UNEXPLAINED
from halfulp.reconstruct.exact import scores_of
from halfulp.reconstruct.naming import GROSS, PROVEN, Named
from halfulp.reconstruct.panel import Trial, panel
from halfulp.reconstruct.places import OF_CALLS, Place
from halfulp.reconstruct.regions import Region
from halfulp.reconstruct.result_read import STRUCTURE
from halfulp.reconstruct.silent_read import is_zero

AGAIN = 7919  # seed of the numbers that a cause must foretell
FORETOLD = 0.5  # of what it explains
FEW = 0.1  # of a result's numbers may be 0 where it is not
TILE = 128  # rows, at most
FAR = 20.0  # times its cap: less a score of so much all that is capped is as good as −∞
MILD = 3.0  # times a model's error: no other function is so near
ALL_BUT = 2.0**-6  # of a number: what is left where it is taken away from one that is rounded


def upheld(
    causes: Sequence[Named],
    places: Sequence[Place],
    emulator: Emulator,
    start: Model,
    model: Model,
    stock: Recipe,
    dtype: str,
    region: Region | None,
) -> list[Named]:
    """Those that are not told better by what was read, that hold for other numbers as well, and
    what they are in the region that they are of.
    """
    known = _known(emulator, start, model)
    gross = any(p.was_read and p.times > GROSS for p in places)  # beside which little is nothing
    causes = [n for n in causes if n.harm > MILD or not gross or _one_of_two(n, emulator, stock)]
    causes = [n if _elsewhere(n, emulator, start, model) else _or_zero(n, emulator, model)
              for n in causes if holds(n, places, known=n.tensor in known)]  # fmt: skip
    # what is small rounds to 0, by whatever makes it
    causes = [n for n in causes if not _all_there_is(n, causes, emulator)
              and not _more_elsewhere(n, places)
              and not (n.trial == "small" and _read_too(n, places))]  # fmt: skip
    usual = {n: _left_by(n, emulator, model, stock) for n in causes if n.function}
    causes = [n for n in causes if not _read_too(n, places) or (
        usual.get(n, True) and not _of_few(n, emulator, start, model))]  # fmt: skip
    if region is None or not (region.heads or region.rows):  # other numbers of the same calls
        fresh = {t.name: t for r in (False, True) for t in panel(DTYPES[dtype], AGAIN, rarer=r)}
        foretold = [n for n in causes if _predicts(emulator, model, n, fresh)]
        told = {p.tensor for p in places}
        causes = foretold or [_not_again(n) for n in causes if n.tensor not in told]
    causes = [why_unwritten(n, emulator) for n in causes]
    if region is not None and region.rows:
        causes = [_of_rows(n, region) for n in causes]
    if region is not None and region.cause in OF_CALLS:
        # and found by the search as well, of the same pass
        read = {(p.cause, p.tensor in FORWARD) for p in places if p.was_read}
        of = [n if (n.cause.key, n.tensor in FORWARD) in read else of_calls(n, region, emulator)
              for n in causes]  # fmt: skip
        # that only some calls have it says less than what was read of it
        causes = [n for n, before in zip(of, causes, strict=True) if n.cause == before.cause
                  or not any(p.tensor == n.tensor and p.was_read and p.cause in STRUCTURE
                             for p in places)]  # fmt: skip
    return causes


def _one_of_two(cause: Named, emulator: Emulator, stock: Recipe) -> bool:
    """Whether what a cause alone makes little of is gross and explained: both operands of a product
    are cut, and each makes half.
    """
    own, trials = frozenset({cause.tensor}), frozenset({cause.trial})
    (usual,) = emulator.fits(Model.of(stock), own, trials).values()
    whole = cause.cause.key == "operand" and cause.explained >= PROVEN
    return whole and usual.times > GROSS


def _elsewhere(cause: Named, emulator: Emulator, start: Model, model: Model) -> bool:
    """Whether a result that is 0 on the call which shows a cause most is explained on others, where
    few of its numbers are.
    """
    own = frozenset({cause.tensor})
    old, new = (emulator.fits(m, own) for m in (start, model))
    return any(
        fit.left > UNEXPLAINED > new[key].left
        and fit.times > HARMFUL
        and float((emulator.observed[key].value == 0).double().mean()) < FEW
        for key, fit in old.items()
    )


def _or_zero(cause: Named, emulator: Emulator, model: Model) -> Named:
    """What makes a whole result 0 is not told from one that is never written; what is all but 0 was
    written.
    """
    observed = emulator.observed[cause.trial, cause.tensor]
    if cause.trial == "small" or cause.cause.key in STRUCTURE - {"unwritten"}:
        return cause  # what is small may round to 0; what is hidden may be all there is
    if (cause.function or cause.twists) and is_zero(observed):
        if cause.tensor in FORWARD and _far_past_its_cap(cause.trial, emulator):
            text = "all weights round to 0 where scores lie far past their cap, and there alone"
            return replace(cause, cause=CAUSES["maximum"], text=f"{text}: the maximum is of those"
                           " before it")  # fmt: skip
        return replace(cause, cause=CAUSES["unwritten"])
    if not cause.function or cause.cause.key != "unwritten":
        return cause
    made = emulator.made(emulator.trials[cause.trial], model, cause.tensor)
    assert made is not None  # since it explains some
    near = made.view_as(observed.exact).abs() < ALL_BUT * observed.exact.abs()
    gone = near & observed.usable
    if bool((observed.value[gone] == 0).double().mean() > 0.5) or not bool(gone.any()):
        return cause
    key = "value-factor" if cause.tensor in FORWARD else "grad-scale"
    return replace(cause, cause=CAUSES[key], text=f"{cause.text}: all but 0, and not 0")


def _far_past_its_cap(trial: str, emulator: Emulator) -> bool:
    """Whether O is 0 where scores lie far past their cap, and in no other call with one."""
    zero = [emulator.trials[name].call for (name, tensor), observed in emulator.observed.items()
            if tensor == "out" and is_zero(observed)]  # fmt: skip
    far = [float(scores_of(replace(x, softcap=0.0)).amax()) > FAR * x.softcap
           for x in zero if x.softcap]  # fmt: skip
    return bool(emulator.trials[trial].call.softcap) and all(far)


_MORE = {"unwritten": {"layout", "non-finite", "key-tail"}, "key-tail": {"other-data"}}
"""What says more of a result, where it was read, than that numbers are missing."""


def _more_elsewhere(cause: Named, places: Sequence[Place]) -> bool:
    """Whether what is 0 in some calls is moved in others, which ends past what was written, or is
    no number there, or lacks keys; or keys that are left out have others in their place.
    """
    of = {p.cause for p in places if p.tensor == cause.tensor and p.was_read}
    return bool(of & _MORE.get(cause.cause.key, set()))


def _all_there_is(cause: Named, causes: Sequence[Named], emulator: Emulator) -> bool:
    """Whether what is not written is a last tile that others lack, which few rows fill."""
    tail = any(n.cause.key == "grad-tail" and n.function for n in causes)
    few = cause.trial in emulator.trials and emulator.trials[cause.trial].call.query.shape[2] < TILE
    return tail and few and cause.cause.key == "unwritten" and cause.tensor not in FORWARD


def _known(emulator: Emulator, start: Model, model: Model) -> set[str]:
    """The results that a model explains on a third of the calls, or more, of those where its start
    does not.
    """
    old, new = (emulator.fits(m, frozenset(TENSORS)) for m in (start, model))
    bad = [key for key, fit in old.items() if fit.left > UNEXPLAINED]
    done = [key[1] for key in bad if new[key].left < UNEXPLAINED]
    return {t for t in TENSORS if 3 * done.count(t) >= sum(key[1] == t for key in bad)}


def holds(cause: Named, places: Sequence[Place], *, known: bool) -> bool:
    """Whether a cause stands beside what was located: what is wrong first is wrong later as well,
    and what was read is surer than what explains a part, or a few of the calls (not `known`).
    """
    forward = cause.tensor in FORWARD
    own = [p for p in places if (p.tensor in FORWARD) == forward]
    # what is small may be another matter
    own = [p for p in own if p.trial != "small" or cause.trial == "small"]
    read = [p for p in own if p.tensor == cause.tensor and p.was_read]
    if cause.function and (
        (read and not known)
        or (cause.explained < PROVEN and any(p.cause in STRUCTURE for p in read))
    ):
        return False
    if any(p.tensor == cause.tensor and p.was_read and p.times > cause.harm for p in own):
        elsewhere = not any(cause.trial in p.trials for p in own)  # what only some calls show
        same = cause.cause.key in {p.cause for p in own}
        return cause.explained >= PROVEN and (same or elsewhere)
    # a little that is wrong in O makes nothing gross of a gradient
    gross = cause.harm > GROSS and cause.explained >= PROVEN
    first = [p for p in places if p.tensor in FORWARD and (p.times > MILD or not gross)]
    if not forward and first:
        return cause.explained >= PROVEN and not any(p.was_read for p in first)
    return cause.explained >= PROVEN or not any(p.was_read for p in own)


def _left_by(cause: Named, emulator: Emulator, model: Model, stock: Recipe) -> bool:
    """Whether what a mistake leaves where it shows most is no more than rounding makes."""
    own, trials = frozenset({cause.tensor}), frozenset({cause.trial})
    fit, usual = (next(iter(emulator.fits(m, own, trials).values())) for m in (
        model, Model.of(stock)))  # fmt: skip
    return fit.within_rounding(usual)


def _of_few(cause: Named, emulator: Emulator, start: Model, model: Model) -> bool:
    """Whether a mistake is one of the lesser part of the calls on which its result is wrong."""
    twists = [t for t in model.way(cause.tensor).twists if t.key in cause.twists]
    fits = emulator.fits(start, frozenset({cause.tensor}))
    bad = [emulator.trials[name] for (name, _), fit in fits.items() if fit.left > UNEXPLAINED]
    its = [t for t in bad if any(twist.turn(t) is not None for twist in twists)]
    return bool(twists) and 2 * len(its) < len(bad)


def _read_too(cause: Named, places: Sequence[Place]) -> bool:
    """Whether something was read of the result that a cause is of."""
    return any(p.tensor == cause.tensor and p.was_read and not p.cause.endswith("unexplained")
               for p in places)  # fmt: skip


def _predicts(emulator: Emulator, model: Model, cause: Named, fresh: Mapping[str, Trial]) -> bool:
    """Whether what explains a result explains it on other numbers as well."""
    trial = fresh.get(cause.trial)
    # a factor may be another with other numbers, as scales of codes are
    if trial is None or not cause.function or cause.cause.key == "value-factor":
        return True
    result = emulator.run(trial)
    if result is None:
        return True
    again = Emulator({trial: result}, emulator.run)
    fits = again.fits(model, frozenset({cause.tensor}))
    return all(1 - min(1.0, f.left) > FORETOLD * cause.explained for f in fits.values())


def _not_again(cause: Named) -> Named:
    """What explains all that was asked, and no other numbers of the same sizes."""
    return replace(cause, text=f"{cause.text}; not so with other numbers of these sizes, as if"
                   " something of earlier calls were kept")  # fmt: skip


def _of_rows(cause: Named, region: Region) -> Named:
    """Of a gradient of which some rows alone are 0 a part of the sequence is left out."""
    tail = cause.cause.key == "unwritten" and cause.tensor not in FORWARD
    key = "grad-tail" if tail else cause.cause.key
    return replace(cause, cause=CAUSES[key], text=f"{cause.text}, {region.text}")
