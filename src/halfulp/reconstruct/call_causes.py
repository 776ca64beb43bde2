"""What a cause is that only calls with an option, or of some sizes, show."""

from __future__ import annotations

from dataclasses import replace

from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.dataflow import SLIGHT
from halfulp.reconstruct.emulating import FORWARD, GRADIENTS, Emulator
from halfulp.reconstruct.exact import scores_of
from halfulp.reconstruct.naming import PROVEN, Named
from halfulp.reconstruct.part_ratios import hides
from halfulp.reconstruct.places import FORMULAS, IN_GRADIENTS, OF_CALLS
from halfulp.reconstruct.regions import Region
from halfulp.reconstruct.result_read import STRUCTURE
from halfulp.reconstruct.silent_read import below_the_maximum, is_zero

_HIDE = {"causal-mask", "window", "mask"}
_LEFT_OUT = {"tiles-skipped", "key-tail"}  # keys, which a mask hides where it alone shows that
_OF_SOME_KEYS = ("unnormalized-first", "unnormalized-last")
"""How keys of twists begin that divide by the row sum of some keys alone."""
_LOST = "scale-gone", "slip-Slip(stage='product', mistake='gone'"
"""The same of scores that are as good as 0, or left out."""
_PAIRED, _BATCH = "heads-", "heads-batch"
"""The same of those that pair query heads with other key heads, and of other sequences."""
_KEYS = ("key", "value", "key_value")
_OTHER_HEADS = tuple(f"slip-Slip(stage='{of}', mistake='head" for of in _KEYS)
"""The same of some of them."""


def of_calls(cause: Named, region: Region, emulator: Emulator) -> Named:
    """What is gross in calls with an option alone is a matter of the option; so are rows that are
    0 and have no gradient, as those are that see nothing, or that are 0 as their first keys are
    hidden; and a whole result that is 0.
    """
    pairs = any(t.startswith(_OTHER_HEADS) for t in cause.twists) or any(
        t.startswith(_PAIRED) and not t.startswith(_BATCH) for t in cause.twists)  # fmt: skip
    if pairs and region.cause == "key-heads":  # right where each head has its own
        return replace(cause, cause=CAUSES["key-heads"], text=f"{cause.text}, {region.text}")
    of_groups = cause.cause.key == "grad-scale" and region.cause == "key-heads"
    dq = emulator.observed.get((cause.trial, "grad_query"))  # of which nothing is summed
    if of_groups and cause.tensor in GRADIENTS[1:] and dq is not None and dq.relative < SLIGHT:
        return replace(cause, cause=CAUSES["group-sum"], text=f"{cause.text}, {region.text}")
    told = {*STRUCTURE, *OF_CALLS, "mask-finite"}
    silent = _see_nothing(emulator, cause) or _begin_late(emulator, cause.trial)
    shows = emulator.observed.get((cause.trial, cause.tensor))  # None of what was merely told
    silent = silent or (shows is not None and is_zero(shows))
    hide = _HIDE | {"unwritten"} if silent else _HIDE
    hide = hide | _LEFT_OUT if region.cause == "mask" else hide
    hidden = {cause.cause.key, region.cause} <= hide
    if not cause.function or (cause.cause.key in told and cause.explained >= PROVEN and not hidden):
        return cause
    # scores that are lost are so beside the number that hides what they have been taken for
    lost = any(t.startswith(_LOST) for t in cause.twists) and region.cause in _HIDE
    if not lost and cause.explained >= PROVEN and cause.cause.key in FORMULAS.get(region.cause, ()):
        return replace(cause, text=f"{cause.text}, {region.text}")
    text = f"{cause.text}, {region.text}: {cause.cause.name}"
    key = region.cause
    # a row sum has too much where blocks are not full, unless it is of some keys alone
    if (key, cause.cause.key) == ("ragged", "unnormalized") and not any(
        t.startswith(_OF_SOME_KEYS) for t in cause.twists):  # fmt: skip
        key = "padding"
    key = key if cause.tensor in FORWARD else IN_GRADIENTS.get(key, key)
    return replace(cause, cause=CAUSES[key], text=text)


def why_unwritten(cause: Named, emulator: Emulator) -> Named:
    """What is taken for never written is a matter of the row maximum, where rows of O are 0 that
    score far below it; or of what hides pairs, where rows are 0 in calls alone whose first keys
    that hides for these rows, so many and more.
    """
    if cause.cause.key != "unwritten" or cause.tensor != "out":
        return cause
    if below_the_maximum(emulator):
        return replace(cause, cause=CAUSES["maximum"], text=f"{cause.text}: those that score far"
                       " below what is hidden, or other rows")  # fmt: skip
    some = [name for (name, tensor), o in emulator.observed.items()
            if tensor == "out" and name != "small" and bool(o.gone.any())]  # fmt: skip
    of = {hides(emulator.trials[name].call) for name in some}
    if len(of) != 1 or not all(of) or not all(_begin_late(emulator, name) for name in some):
        return cause
    return replace(cause, cause=CAUSES[of.pop()], text=f"{cause.text}: those whose first keys are"
                   " hidden")  # fmt: skip


def _see_nothing(emulator: Emulator, cause: Named) -> bool:
    """Whether rows of O that are 0, on the call that shows a cause, have a dQ of 0 as well: as rows
    have that see nothing, and not those that are never written.
    """
    out, grad = (emulator.observed.get((cause.trial, name)) for name in ("out", "grad_query"))
    if out is None or grad is None:
        return False
    zero = out.gone
    return bool((grad.exact[zero] != 0).any()) and bool((grad.value[zero] == 0).all())


def _begin_late(emulator: Emulator, trial: str) -> bool:
    """Whether rows of O that are 0, on a call, are those whose first keys are hidden, so many and
    more: where a tile is skipped, none after it is read.
    """
    out = emulator.observed.get((trial, "out"))
    if out is None:
        return False
    seen = scores_of(emulator.trials[trial].call).isfinite()
    zero, sees = (out.value == 0).all(-1), seen.any(-1)
    first = seen.int().argmax(-1)  # the first key that a row sees
    late, early = first[zero & sees], first[~zero & sees]
    return bool(len(late)) and bool(len(early)) and int(late.min()) > int(early.max())
