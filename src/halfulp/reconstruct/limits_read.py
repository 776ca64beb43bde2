"""At which size operands are cut off, as by codes of a scale that is not of the largest number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from halfulp.calls import Call
from halfulp.reconstruct.emulating import Twist
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import Trial, simplicity

MOST = 0.5  # of an error, that operands which are cut off leave
LITTLE = 0.01  # of O: an error that what is cut off makes
TIMES = 1.05  # from one limit that is tried to the next
LEAST = 0.02  # of an operand's largest number
_NAMES = (("value",), ("key",), ("query",), ("key", "value"), ("query", "key"),
          ("query", "key", "value"))  # fmt: skip
_SHORT = {"query": "Q", "key": "K", "value": "V"}


def cut_off(outs: Mapping[str, Observed], trials: Mapping[str, Trial]) -> list[Twist]:
    """Operands of which no number is beyond a limit, each call's own, by O of calls of equal heads
    and no option; a limit that some operands have is looked for on the simplest call first.
    """
    plain = [n for n in sorted(outs, key=simplicity) if _is_plain(trials[n].call)]
    if not plain or outs[plain[0]].relative < LITTLE:
        return []
    found = {names: _limit(trials[plain[0]].call, outs[plain[0]], names) for names in _NAMES}
    names = min(found, key=lambda names: found[names][1])
    if found[names][1] > MOST:
        return []
    limits = {}
    for name, out in outs.items():
        limit, left = _limit(trials[name].call, out, names)
        if left < MOST:
            limits[name] = limit

    def turn(trial: Trial) -> Trial | None:
        limit = limits.get(trial.name.partition("/")[0])
        if limit is None:
            return None
        return replace(trial, call=_cut(trial.call, names, limit))

    whose = ", ".join(_SHORT[n] for n in names)
    told = ", ".join(f"{x:.3g} on {n}" for n, x in list(limits.items())[:4])
    return [Twist(f"cut-off-{whose}", f"{whose} are cut off beyond ±{told}", "operand", turn)]


def _is_plain(call: Call) -> bool:
    return call.sinks is None and not call.softcap and call.sees.mask is None


def _limit(call: Call, out: Observed, names: tuple[str, ...]) -> tuple[float, float]:
    """The limit that leaves least of O's error, and the share of it that it leaves."""
    largest = max(float(getattr(call, n).abs().max()) for n in names)
    best, size = (largest, 1.0), largest
    while size > LEAST * largest:
        size /= TIMES**4
        best = min(best, (size, _left(call, out, names, size)), key=lambda x: x[1])
    if best[1] > 2 * MOST:
        return best
    for step in range(-3, 4):
        size = best[0] * TIMES**step
        best = min(best, (size, _left(call, out, names, size)), key=lambda x: x[1])
    return best


def _left(call: Call, out: Observed, names: tuple[str, ...], limit: float) -> float:
    changed = _cut(call, names, limit)
    value = changed.value.double().repeat_interleave(call.groups, 1)
    made: Tensor = weights_of(changed, scores_of(changed)) @ value
    rest = torch.where(out.usable, out.value - made, 0.0)
    return float(rest.square().sum()) / max(out.total, 1e-300)


def _cut(call: Call, names: tuple[str, ...], limit: float) -> Call:
    return replace(call, **{n: getattr(call, n).clamp(-limit, limit) for n in names})
