"""What calls have in common, in words: where a fault shows that only some calls have."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfulp.reconstruct.panel import Trial

PAIR = 0.5  # calls, that two kinds at once cost more than one
FEW = 4  # calls that are right, at least
MIXED = 0.45  # of the calls that are wrong: so many others may be of their kind


def option_of(trials: Sequence[Trial]) -> str:
    """The cause that stands for an option which all of these calls ask for; empty without one."""
    shared = [k for k in _OPTIONS if trials and all(_told(t)[k][0] for t in trials)]
    return _told(trials[0])[shared[0]][1] if shared else ""


def _told(trial: Trial) -> dict[str, tuple[bool, str]]:
    """Whether a call is what words say, and what stands for a fault that only such calls show: what
    a caller asks for first, sizes after it, numbers last.
    """
    call, name = trial.call, trial.name
    (b, h, n, d), n_key = call.query.shape, call.key.shape[2]
    sees = call.sees
    far = name in ("sharp", "deep", "deep_ragged")
    additive, q = sees.added is not None, call.query
    transposed = not q.is_contiguous() and q.stride(-1) == 1
    return {
        "with sinks": (call.sinks is not None, "sinks"),
        "with a softcap": (bool(call.softcap), "softcap"),
        "with a window": (sees.window is not None, "window"),
        "with a mask": (sees.mask is not None, "mask"),
        "with an additive mask": (additive, "mask"),
        "with a boolean mask": (sees.mask is not None and not additive, "mask"),
        "grouped": (call.groups > 1, "key-heads"),
        "of several sequences": (b > 1, "other-data"),
        "causal": (sees.causal, "causal-mask"),
        "with more queries than keys": (n > n_key, "ragged"),
        "with other lengths of queries and keys": (n != n_key, "ragged"),
        "with other widths of keys and values": (d != call.value.shape[3], "ragged"),
        "whose features lie apart": (call.query.stride(-1) != 1, "layout"),
        "of operands that lie as [B, N, H, D]": (transposed, "layout"),
        "of values alone that lie so": (q.is_contiguous() != call.value.is_contiguous(), "layout"),
        "of lengths off 16": (n_key % 16 != 0, "ragged"),
        "of lengths off 64": (n_key % 64 != 0, "ragged"),
        "of lengths off 128": (n_key % 128 != 0, "ragged"),
        "with a D off 64": (d % 64 != 0, "ragged"),
        "with a D off 32": (d % 32 != 0, "ragged"),
        "with a D above 64": (d > 64, "ragged"),
        "whose scale is no power of two": (math.frexp(call.scale)[0] != 0.5, "prescaled"),
        "whose scale is the caller's": (abs(call.scale * math.sqrt(d) - 1) > 1e-6, "scale"),
        "with a D above 128": (d > 128, "ragged"),
        "whose key heads 4 divides": (call.key.shape[1] % 4 == 0, "other-data"),
        "of few queries": (n < 16, "query-tail"),
        "of more than 128 heads": (b * h > 128, "unwritten"),
        "of more than 64 keys": (n_key > 64, ""),
        "of more than 128 keys": (n_key > 128, ""),
        "of more than 192 keys": (n_key > 192, "accumulator"),
        "whose maximum grows": (name == "rising", "rescale"),
        "whose scores lie far from 0": (far, "row-max"),
        "whose maximum grows, or lies far from 0": (far or name == "rising", "rescale"),
        "of small values": (name == "small", "operand"),
        "of small queries or keys": (name in ("small_queries", "small_keys"), "operand"),
    }


def _kinds(trial: Trial) -> dict[str, bool]:
    return {told: holds for told, (holds, _) in _told(trial).items()}


_OPTIONS = ("with sinks", "with a softcap", "with a window", "with a mask")
_ASKED = (*_OPTIONS, "with an additive mask", "with a boolean mask")


def where(some: Sequence[Trial], others: Sequence[Trial]) -> str:
    """What calls have in common that others have not; their names where nothing tells."""
    with_it, without = [_kinds(t) for t in some], [_kinds(t) for t in others]
    for kind in with_it[0] if with_it else ():
        values = {k[kind] for k in with_it}
        if len(values) == 1 and not values & {k[kind] for k in without}:
            return f"in calls {kind}" if values.pop() else f"but not in calls {kind}"
    names = sorted(t.name for t in some)
    return f"on {', '.join(names)}" if names else "on calls of the audit's own"


def condition(some: Sequence[Trial], others: Sequence[Trial]) -> tuple[str, str]:
    """The kind of calls, or two kinds at once, that all of these are and few others: in words, and
    the cause that stands for it; empty where nothing tells them apart.
    """
    with_it, without = [_kinds(t) for t in some], [_kinds(t) for t in others]
    if not with_it or len(without) < FEW:  # what nearly all have, tells nothing
        return "", ""
    shared = [(k, x) for k, x in with_it[0].items() if all(w[k] == x for w in with_it)]
    best: tuple[float, str, str] = (max(PAIR + 0.1, MIXED * len(with_it)), "", "")
    for i, (kind, is_it) in enumerate(shared):
        if not is_it:
            continue
        left = [k for k in without if k[kind]]
        best = min(best, (len(left), f"calls {kind} alone", kind), key=lambda x: x[0])
        for j, (other, value) in enumerate(shared):
            if j > i or not value:
                also = sum(k[other] == value for k in left) + PAIR  # simpler ones first
                told = f"calls {kind} {'and ' if value else 'that are not '}{other} alone"
                # lengths and groups change nothing where nothing is hidden: the mask is at fault
                own = other if value and other == "causal" and kind not in _ASKED else kind
                best = min(best, (also, told, own), key=lambda x: x[0])
    if not best[2] and len(some) > 1 and (option := option_of(some)):
        kind = next(k for k, (_, cause) in _told(some[0]).items() if cause == option)
        return f"some calls {kind} alone", option  # not in all of these, and in no others
    return best[1], _told(some[0])[best[2]][1] if best[2] else ""
