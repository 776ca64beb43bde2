"""What calls have in common, in words: where a fault shows that only some calls have."""

from __future__ import annotations

from collections.abc import Sequence

from halfulp.reconstruct.panel import Trial


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
    call = trial.call
    n, n_key = call.query.shape[2], call.key.shape[2]
    return {
        "with a mask": call.sees.mask is not None,
        "with a window": call.sees.window is not None,
        "with a softcap": bool(call.softcap),
        "with sinks": call.sinks is not None,
        "causal": call.sees.causal,
        "grouped": call.groups > 1,
        "of several sequences": call.query.shape[0] > 1,
        "with other lengths of queries and keys": n != n_key,
        "of lengths off 16": n_key % 16 != 0,
        "of lengths off 64": n_key % 64 != 0,
        "of lengths off 128": n_key % 128 != 0,
        "of more than 128 keys": n_key > 128,
        "with a D off 64": call.query.shape[3] % 64 != 0,
        "with a D above 64": call.query.shape[3] > 64,
        "whose maximum grows": trial.name == "rising",
    }


def where(some: Sequence[Trial], others: Sequence[Trial]) -> str:
    """What calls have in common that others have not; their names where nothing tells."""
    with_it, without = [_kinds(t) for t in some], [_kinds(t) for t in others]
    for kind in with_it[0]:
        values = {k[kind] for k in with_it}
        if len(values) == 1 and not values & {k[kind] for k in without}:
            return f"in calls {kind}" if values.pop() else f"but not in calls {kind}"
    return f"on {', '.join(sorted(t.name for t in some))}"
