"""Whether calls of a kind alone are wrong, asked of the kernel: the same call without what is of
that kind has to be right.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.reconstruct.emulating import TENSORS, Emulator, Model
from halfulp.reconstruct.evidence import HARMFUL, UNEXPLAINED
from halfulp.reconstruct.panel import Trial, simplicity

WHOLE = 128  # rows: a multiple of every usual block
WIDE = 64  # features likewise
GROUPED = "calls grouped"  # how words begin of calls that share key heads
_SIZES = (" off ", "other lengths", "other widths", "more queries")


def holds(emulator: Emulator, model: Model, told: str, wrong: frozenset[str]) -> bool:
    """Whether calls of sizes that alone are wrong, as `told`, are right at sizes that fill whole
    blocks, and grouped ones where each head has a key head of its own; True where the kind is no
    matter of these or the kernel gives nothing there.
    """
    if told.startswith(GROUPED):
        return _right(emulator, model, ungrouped(emulator.trials[min(wrong, key=simplicity)]))
    asked = [t for t in wrong if (sees := emulator.trials[t].call.sees).mask is None
             and sees.window is None]  # fmt: skip
    if not asked or not any(kind in told for kind in _SIZES):
        return True
    return _right(emulator, model, whole(emulator.trials[min(asked, key=simplicity)]))


def _right(emulator: Emulator, model: Model, trial: Trial) -> bool:
    result = emulator.run(trial)
    if result is None:
        return True
    fits = Emulator({trial: result}, emulator.run).fits(model, frozenset(TENSORS)).values()
    return not any(fit.left > UNEXPLAINED and fit.times > HARMFUL**2 for fit in fits)


def ungrouped(trial: Trial) -> Trial:
    """A call of the same numbers whose key heads are as many as its query heads."""
    call = trial.call
    key, value = (x.repeat_interleave(call.groups, 1) for x in (call.key, call.value))
    return replace(trial, name=f"{trial.name}/ungrouped", call=replace(call, key=key, value=value))


def whole(trial: Trial) -> Trial:
    """A call of the same numbers whose sizes are multiples of every usual block: its rows again and
    again, its features filled up with zeros.
    """
    call = trial.call
    width = -(-max(call.query.shape[3], call.value.shape[3]) // WIDE) * WIDE

    def filled(x: Tensor) -> Tensor:
        rows = x[:, :, torch.arange(WHOLE) % x.shape[2]]
        return functional.pad(rows, (0, width - x.shape[3]))

    changed = replace(call, query=filled(call.query), key=filled(call.key),
                      value=filled(call.value), shape=None)  # fmt: skip
    return replace(trial, name=f"{trial.name}/whole", call=changed, grad_out=filled(trial.grad_out))
