"""Whose data a head, or a row, is computed from: the kernel is asked again with that of others
turned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.algorithms import golden
from halfulp.reconstruct.emulating import GRADIENTS
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.panel import Run, Trial

HALF = 0.5  # of an error, that what others' data changes must be, and
SHARED = 0.1  # of a result


class Others(NamedTuple):
    """What follows the data of others: heads or rows, and whether beside their own."""

    told: str
    beside: bool

    @property
    def text(self) -> str:
        """In words."""
        own = "as they follow their own" if self.beside else "whose own data stay"
        return f"{self.told} follow what others are given, {own}"


def reads_others(run: Run, trial: Trial, tensor: str, observed: Observed) -> Others | None:
    """Whether what a kernel gives in one head, or row, follows what only others are given: the
    others' data change their sign, so that largest numbers and scales stay. A call of one sequence
    is asked with another one behind it as well.
    """
    return _of_others(run, trial, tensor, observed) or _of_a_second(run, trial, tensor)


def _of_a_second(run: Run, trial: Trial, tensor: str) -> Others | None:
    """The same of a sequence alone, which has none of whose data it could be, where one follows."""
    if len(trial.call.key) > 1:
        return None
    call = trial.call
    query, key, value, do = (torch.cat([x, x.roll(1, 2)]) for x in (
        call.query, call.key, call.value, trial.grad_out))  # fmt: skip
    mask = call.sees.mask
    if mask is not None and mask.ndim == 4:
        mask = mask.expand(2, *mask.shape[1:])
    both = replace(call, query=query, key=key, value=value, sees=replace(call.sees, mask=mask),
                   shape=None)  # fmt: skip
    two = replace(trial, name=f"{trial.name}/two", call=both, grad_out=do)
    result = run(two)
    got = None if result is None else getattr(result, tensor)
    if got is None:
        return None
    return _of_others(run, two, tensor, Observed.of(got, getattr(golden(both, do), tensor)))


def _of_others(run: Run, trial: Trial, tensor: str, observed: Observed) -> Others | None:
    call = trial.call
    # some that are those of no period: a tile's rows may follow those of another
    some = torch.rand(call.query.shape[2], generator=torch.Generator().manual_seed(1)) < 0.5
    asked: list[tuple[str, Tensor, Trial, Tensor | None]] = []
    for at in (0, -1):  # what goes on from head to head does not reach the first
        own = torch.zeros(call.key.shape[:2], dtype=torch.bool)
        own[at, at] = True
        mine = own.repeat_interleave(call.groups, 1)
        kept = (own if tensor in GRADIENTS[1:] else mine)[..., None, None]
        if own.numel() > 1:
            theirs = own if tensor == "out" else None
            asked.append(("heads", kept, _negated(trial, keys=~own), theirs))
            if tensor in GRADIENTS:  # K and V turned leave another's Q and dO as they were
                asked.append(("heads", kept, _negated(trial, queries=~mine[..., None]), None))
    if tensor in ("out", "grad_query"):
        asked.append(("rows", some[:, None], _negated(trial, queries=~some), None))
    for told, where, other, theirs in asked:
        moved = _moved(run, other, tensor, observed, where)
        if moved is None:
            continue
        error, size = (float(torch.where(observed.usable & where, x, 0.0).square().sum()) for x in (
            observed.value - observed.exact, observed.exact))  # fmt: skip
        # a scale of codes that all heads share moves what is rounded, and no more
        if float(moved.sum()) > max(HALF * error, SHARED**2 * size, 4 * observed.floor):
            again = None
            if theirs is not None:
                again = _moved(run, _negated(trial, keys=theirs), tensor, observed, where)
            return Others(told, again is not None and _of_own(moved, again))
    return None


def _of_own(moved: Tensor, mine: Tensor) -> bool:
    """Whether heads that others' data move are moved by their own too, `[B, H]` squares."""
    heads = moved > HALF * moved.max()
    return bool((mine[heads] > SHARED**2 * moved[heads]).all())


def _negated(trial: Trial, *, keys: Tensor | None = None, queries: Tensor | None = None) -> Trial:
    """The trial with K and V of some key heads, or Q and dO of some rows, of the other sign."""
    call = trial.call
    if keys is not None:
        where = keys[..., None, None]
        key, value = (torch.where(where, -x, x) for x in (call.key, call.value))
        return replace(trial, name=f"{trial.name}/other heads",
                       call=replace(call, key=key, value=value))  # fmt: skip
    assert queries is not None
    q, do = (torch.where(queries[..., None], -x, x) for x in (call.query, trial.grad_out))
    return replace(trial, name=f"{trial.name}/other rows", call=replace(call, query=q), grad_out=do)


def _moved(run: Run, asked: Trial, tensor: str, observed: Observed, where: Tensor) -> Tensor | None:
    """The squares by which a result differs from the observed one, `[B, H]`, where it counts."""
    result = run(asked)
    got = None if result is None else getattr(result, tensor)
    if got is None:
        return None
    got = got.unsqueeze(-1) if got.ndim == 3 else got  # lse, one number a row
    moved = torch.where(observed.usable & where, got.double() - observed.value, 0.0)
    return moved.square().sum((-1, -2))
