"""What the kernel's results say without a search, and what stands before all that one finds: equal
calls that differ, parts of the keys merged with other weights, rows that lack their maximum or lie
below what stands for −∞, another exponential, bits of another format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from halfulp.calls import Result
from halfulp.operations import DTYPES
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.emulating import GRADIENTS, SHORT, TENSORS, Emulator, Model
from halfulp.reconstruct.evidence import UNEXPLAINED
from halfulp.reconstruct.exponential_read import exponential_of
from halfulp.reconstruct.floor_read import LARGEST, OVERFLOW, floor_of, leaks, products_overflow
from halfulp.reconstruct.found import WELL, Reconstruction
from halfulp.reconstruct.naming import PROVEN, Named
from halfulp.reconstruct.panel import Run, Trial
from halfulp.reconstruct.parts_read import merged
from halfulp.reconstruct.result_read import STRUCTURE
from halfulp.reconstruct.suggested import vanished

SEED = 7919  # of a second call's random numbers
_SURER = (STRUCTURE - {"unwritten", "elements"}) | {
    "maximum", "mask", "window", "sinks", "softcap", "scale", "dropout", "reciprocal",
}  # fmt: skip
"""What is read, or explains O, and no weights of parts replace, which fit anything."""
_OF_FLOORS = {"mask-finite", "masked-row"}
"""What rows show that see nothing, or little, where a finite number hides."""
_STATISTICS = {"row-max", "row-sum", "lse", "accumulator"}
"""Of a row, and in coarse formats not finite where scores are large."""
_LARGER = {"sinks", "padding", "unnormalized"}
"""What a row sum has too much."""
_AFTER_SUMS = {"out", "reciprocal"}
"""What is wrong with O once it is summed."""
SAME = 1e-3  # of an error, that is left of it where bits are another format's
EVERY_SO_MANY = 2  # of the trials one is asked again
RANDOM = 3.0  # times stock's error: what two equal calls differ by is no rounding at random


def first_said(
    found: Reconstruction, emulator: Emulator, moved: Mapping[tuple[str, str], float]
) -> Reconstruction:
    """The reconstruction with these causes before its own; equal calls differ by `moved`."""
    found = _without_weights(found, emulator)
    if told := vanished(emulator, _of_larger_sums(found, emulator)):
        over = products_overflow(emulator.run, DTYPES[found.dtype])
        found = _without_rows(found, *(("scores", OVERFLOW) if over else ("maximum", told)))
    else:
        found = _with_floor(_with_exponential(found, emulator), emulator)
    found = _with_other_bits(_with_parts(found, emulator), emulator)
    return _with_unstable(found, emulator, moved)


def _of_larger_sums(found: Reconstruction, emulator: Emulator) -> set[str]:
    """The calls whose O is explained by a row sum that has more in it, beside which rows far below
    it are 0, and none is no number.
    """
    if not any(t.cause in _LARGER for t in found.model.forward.twists):
        return set()
    fits = emulator.fits(found.model, frozenset({"out"}))
    return {trial for (trial, tensor), fit in fits.items()
            if fit.left < UNEXPLAINED and (trial, tensor) not in emulator.nonfinite}  # fmt: skip


def _without_weights(found: Reconstruction, emulator: Emulator) -> Reconstruction:
    """Where rows have another's lse on some calls, gradients that are all 0 in the same heads were
    written on the others: of an lse that lies beyond the end there is no weight left.
    """
    if not any(p.cause == "lse-other" and p.was_read for p in found.places):
        return found
    causes = [n for n in found.causes
              if n.cause.key not in ("unwritten", "grad-tail")
              or not _no_weights(emulator, n.trial)]  # fmt: skip
    return replace(found, causes=tuple(causes))


def _no_weights(emulator: Emulator, trial: str) -> bool:
    """Whether all three gradients are 0 in the same heads, and these alone."""
    some = [emulator.observed.get((trial, name)) for name in GRADIENTS]
    zero = [(o.value == 0).all(-1).all(-1) & (o.exact != 0).any(-1).any(-1) for o in some if o]
    if len(zero) < len(some):
        return False
    b, key_heads = zero[1].shape
    zero[0] = zero[0].view(b, key_heads, -1).all(-1)
    return bool(zero[0].any()) and all(torch.equal(zero[0], one) for one in zero[1:])


def _with_silent_rows(found: Reconstruction, emulator: Emulator) -> Reconstruction:
    """Where a finite number would hide what a mask does, and yet hides it where it scores farther
    above the rest, or does not where it scores less so: what is hidden altogether, a row or a key,
    is not hidden.
    """
    dtype = DTYPES[found.dtype]
    numbers = [t.number for t in found.model.forward.twists if t.number is not None]
    number = min((abs(x) for x in numbers if abs(x) < LARGEST), default=0.0)
    under = {n for n in found.causes
             if n.cause.key == "mask-finite" and n.trial in emulator.trials
             and emulator.trials[n.trial].call.sees.mask is not None}  # fmt: skip
    if not number or not under:
        return found
    far, near = (leaks(emulator.run, dtype, above) for above in (2 * LARGEST, number / 2))
    if far is None or (far and not near):
        return found
    told = "rows that are to see nothing see everything, or keys are seen that no row is to see"
    return replace(found, causes=tuple(
        replace(n, cause=CAUSES["mask"], text=told) if n in under else n
        for n in found.causes))  # fmt: skip


def _with_floor(found: Reconstruction, emulator: Emulator) -> Reconstruction:
    """Asked of scores further below 0 than any trial's, where nothing read says more than masks of
    finite numbers do.
    """
    read = [p.cause for p in found.places if p.was_read]
    known = [n.cause.key for n in found.causes if n.function]
    if not {*read, *known} <= _OF_FLOORS:
        return found
    told = floor_of(emulator.run, DTYPES[found.dtype])
    if told is None:
        return _with_silent_rows(found, emulator)
    if told.gone and _STATISTICS & {*read, *(n.cause.key for n in found.causes)}:
        return found
    first = Named(CAUSES[told.cause], told.text, math.inf, told.tensor, "", 1.0, located=True,
                  function=True)  # fmt: skip
    causes = [n for n in found.causes if n.cause.key not in _OF_FLOORS]
    return replace(found, causes=(first, *causes))


def _with_exponential(found: Reconstruction, emulator: Emulator) -> Reconstruction:
    """Another function of S − m than the exponential, as it is read off, stands before what
    explains a part of what it makes; in the backward pass where the forward pass has it not.
    """
    told = {n.tensor for n in found.causes} | {p.tensor for p in found.places}
    exact = found.dtype == "float32"  # where the order of sums may hide it
    if (not told and not exact) or any(n.explained >= PROVEN for n in found.causes[:1]):
        return found
    if any(p.tensor == "out" and p.cause in _AFTER_SUMS for p in found.places):
        return found  # which weights are read through
    dtype = DTYPES[found.dtype]
    tensor, read = "out", exponential_of(emulator.run, dtype)
    if read is None and told & set(GRADIENTS):
        tensor, read = "grad_value", exponential_of(emulator.run, dtype, backward=True)
    if read is None or any(n.cause.key == read.cause for n in found.causes[:1]):
        return found
    fits = emulator.fits(Model.of(found.stock), frozenset({tensor}))
    trial, times = max(((t, fit.times) for (t, _), fit in fits.items()), key=lambda x: x[1])
    first = Named(CAUSES[read.cause], read.text, times, tensor, trial, 1.0, located=True)
    return replace(found, causes=(first, *found.causes))


def called_twice(run: Run, observed: Mapping[Trial, Result]) -> dict[tuple[str, str], float]:
    """The squared difference of two equal calls' results, where they differ in any bit; between
    them random numbers are drawn, as between any two.
    """
    found = {}
    for number, trial in enumerate(list(observed)[::EVERY_SO_MANY]):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED + number)
            again = run(trial)
        for name, x in observed[trial].given().items():
            other = None if again is None else getattr(again, name)
            if other is None or other.shape != x.shape:
                found[trial.name, name] = math.inf
            elif not torch.equal(x.nan_to_num(), other.nan_to_num()):
                both = x.isfinite() & other.isfinite()
                moved = torch.where(both, x.double() - other.double(), 0.0).square().sum()
                found[trial.name, name] = float(moved)
    return found


def _without_rows(found: Reconstruction, key: str, told: str) -> Reconstruction:
    """Results that are 0, or not finite, where scores are large were not left unwritten."""
    gone = {"unwritten", "non-finite", "grad-tail"}
    causes = [n for n in found.causes if n.cause.key not in gone]
    first = Named(CAUSES[key], told, math.inf, "out", "", 1.0, located=True, function=True)
    places = tuple(p for p in found.places if p.cause not in gone)
    return replace(found, causes=(first, *causes), places=places)


def _with_parts(found: Reconstruction, emulator: Emulator) -> Reconstruction:
    """Wrong weights of parts stand before what else makes O err, if nothing explains it."""
    told = [(n.cause.key, n.explained >= PROVEN) for n in found.causes]
    told += [(p.cause, p.was_read or p.trials_alone) for p in found.places]
    sure = told and told[0][1] and told[0][0] in _SURER
    sure = sure or (bool(told) and any(
        e.tensor == "out" and e.share >= WELL for e in found.explained))  # fmt: skip
    if sure or (parts := merged(emulator)) is None:
        return found
    trial, text = parts
    times = emulator.fits(Model.of(found.stock), frozenset({"out"}))[trial, "out"].times
    first = Named(CAUSES["split-merge"], text, times, "out", trial, 1.0, located=True,
                  function=True)  # fmt: skip
    return replace(found, causes=(first, *found.causes))


_OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


def _with_other_bits(found: Reconstruction, emulator: Emulator) -> Reconstruction:
    """A result of 16 bits that is right when they are read as those of the other format."""
    own = DTYPES[found.dtype]
    for (trial, tensor), seen in emulator.observed.items():
        if own not in _OTHER or tensor == "lse" or trial == "small":
            continue
        right = seen.value.to(own).contiguous().view(_OTHER[own]).double()
        off, left = (float((x - seen.exact).square().sum()) for x in (seen.value, right))
        if left < SAME * min(off, float(seen.exact.square().sum())):
            names = [str(x).removeprefix("torch.") for x in (_OTHER[own], own)]
            text = f"{SHORT[tensor]} holds the bits of {names[0]} in a buffer of {names[1]}"
            causes = [n for n in found.causes if n.tensor != tensor]
            first = Named(CAUSES["layout"], text, math.inf, tensor, trial, 1 - left / off,
                          located=True, function=True)  # fmt: skip
            return replace(found, causes=(first, *causes))
    return found


def _with_unstable(
    found: Reconstruction, emulator: Emulator, moved: Mapping[tuple[str, str], float]
) -> Reconstruction:
    """What makes equal calls differ by more than rounding stands first, but for weights that are
    dropped at random, which is what differs.
    """
    if any(p.cause == "dropout" for p in found.places):
        return found
    usual = emulator.fits(Model.of(found.stock), frozenset(TENSORS))
    times = {key: math.sqrt(much / (float(fit.other.sum()) + fit.floor or 1e-300))
             for key, much in moved.items() if (fit := usual.get(key)) is not None}  # fmt: skip
    some = {key: x for key, x in times.items() if x > RANDOM}
    if not some:
        return found
    trial, tensor = min(some, key=lambda key: list(TENSORS).index(key[1]))
    whose = ", ".join(SHORT[t] for t in TENSORS if any(key[1] == t for key in some))
    told = f"two equal calls differ by {some[trial, tensor]:.3g} × what rounding makes, in {whose}"
    first = Named(CAUSES["unstable"], told, some[trial, tensor], tensor, trial, 1.0, located=True)
    return replace(found, causes=(first, *found.causes))
