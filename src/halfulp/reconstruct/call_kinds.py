"""What calls have in common, in words: where a fault shows that only some calls have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from halfulp.reconstruct.panel import Trial

PAIR = 0.5  # calls, that two kinds at once cost more than one
FEW = 4  # calls that are right, at least
MIXED = 0.45  # of the calls that are wrong: so many others may be of their kind


def option_of(trials: Sequence[Trial]) -> str:
    """The cause that stands for an option which all of these calls ask for; empty without one."""
    asked = {
        "sinks": [t.call.sinks is not None for t in trials],
        "softcap": [bool(t.call.softcap) for t in trials],
        "window": [t.call.sees.window is not None for t in trials],
        "mask": [t.call.sees.mask is not None for t in trials],
    }
    return next((name for name, every in asked.items() if every and all(every)), "")


def _kinds(trial: Trial) -> dict[str, bool]:
    """What a call is, in words: what a caller asks for first, sizes after it, numbers last."""
    call = trial.call
    (b, h, n, d), n_key = call.query.shape, call.key.shape[2]
    return {
        "with sinks": call.sinks is not None,
        "with a softcap": bool(call.softcap),
        "with a window": call.sees.window is not None,
        "with a mask": call.sees.mask is not None,
        "with an additive mask": call.sees.mask is not None and call.sees.mask.dtype != torch.bool,
        "grouped": call.groups > 1,
        "of several sequences": b > 1,
        "causal": call.sees.causal,
        "with more queries than keys": n > n_key,
        "with other lengths of queries and keys": n != n_key,
        "with other widths of keys and values": d != call.value.shape[3],
        "of operands that lie as [B, N, H, D]": not call.query.is_contiguous(),
        "of lengths off 16": n_key % 16 != 0,
        "of lengths off 64": n_key % 64 != 0,
        "of lengths off 128": n_key % 128 != 0,
        "with a D off 64": d % 64 != 0,
        "with a D above 64": d > 64,
        "whose scale is no power of two": math.frexp(call.scale)[0] != 0.5,
        "whose scale is the caller's": abs(call.scale * math.sqrt(d) - 1) > 1e-6,
        "of few queries": n < 16,
        "of more than 128 heads": b * h > 128,
        "of more than 64 keys": n_key > 64,
        "of more than 128 keys": n_key > 128,
        "of more than 192 keys": n_key > 192,
        "whose maximum grows": trial.name == "rising",
        "whose scores lie far from 0": trial.name in ("sharp", "deep"),
        "whose maximum grows, or lies far from 0": trial.name in ("rising", "sharp", "deep"),
        "of small values": trial.name == "small",
    }


_CAUSES = {
    "with sinks": "sinks", "with a softcap": "softcap", "with a window": "window",
    "with a mask": "mask", "with an additive mask": "mask",
    "grouped": "key-heads", "of several sequences": "other-data",
    "with more queries than keys": "ragged", "of operands that lie as [B, N, H, D]": "layout",
    "with other widths of keys and values": "ragged",
    "causal": "causal-mask", "with other lengths of queries and keys": "ragged",
    "of lengths off 16": "ragged", "of lengths off 64": "ragged", "of lengths off 128": "ragged",
    "with a D off 64": "ragged", "with a D above 64": "ragged",
    "whose scale is no power of two": "prescaled", "whose scale is the caller's": "scale",
    "of few queries": "query-tail", "of more than 128 heads": "unwritten",
    "of more than 192 keys": "accumulator", "whose maximum grows": "rescale",
    "whose scores lie far from 0": "row-max", "whose maximum grows, or lies far from 0": "rescale",
    "of small values": "operand",
}  # fmt: skip
"""What stands for a fault that only such calls show."""


_TOLD_FIRST = ("with sinks", "with a softcap", "with a window", "with a mask",
               "with an additive mask")  # fmt: skip


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
                own = other if value and other == "causal" and kind not in _TOLD_FIRST else kind
                best = min(best, (also, told, own), key=lambda x: x[0])
    return best[1], _CAUSES.get(best[2], "")
