"""Whose data a head, or a row, is computed from: the kernel is asked again with that of others
turned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.algorithms import golden
from halfulp.algorithms.backward import sum_groups
from halfulp.calls import Call
from halfulp.reconstruct.dataflow import grad_scores_of
from halfulp.reconstruct.emulating import GRADIENTS, SHORT
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import Run, Trial
from halfulp.reconstruct.ranges import ranges

HALF = 0.5  # of an error, that what others' data changes, or others' rows hold, must be,
PART = 0.25  # of it, where one's own changes as much, and
SHARED = 0.1  # of a result
ALIKE = 0.98  # the cosine of a row or a feature with the one that it is


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


def of_memory(run: Run, trial: Trial, tensor: str, observed: Observed) -> tuple[str, str]:
    """Whether a result is right where the same numbers lie in memory as their dimensions do: whose
    strides are not read, in words, with the cause.
    """
    call, do = trial.call, trial.grad_out
    dense = replace(call, **{name: getattr(call, name).contiguous()
                             for name in ("query", "key", "value")})  # fmt: skip
    for told, asked in (
        ("dO", replace(trial, grad_out=do.contiguous())),
        ("Q, K and V", replace(trial, call=dense)),
        ("all operands", replace(trial, call=dense, grad_out=do.contiguous())),
    ):
        if asked.manner == trial.manner:
            continue
        result = run(replace(asked, name=f"{trial.name}/dense"))
        got = None if result is None else getattr(result, tensor)
        if got is None:
            continue
        got = got.unsqueeze(-1) if got.ndim == 3 else got
        rest = torch.where(observed.usable, got.double() - observed.exact, 0.0)
        if float(rest.square().sum()) < SHARED**2 * observed.total:
            order = "where its memory is in another order than its dimensions"
            return f"{told} is misread {order}, and there alone", "layout"
    return "", ""


def of_other_operands(trial: Trial, tensor: str, observed: Observed) -> tuple[str, str]:
    """Features of a gradient that are made of another operand, dO in place of Q or V in place of K,
    or rows that are those of dK in dV, or of dV in dK: in words, with the cause.
    """
    if tensor not in GRADIENTS:
        return "", ""
    call, do = trial.call, trial.grad_out.double()
    p, ds = weights_of(call, scores_of(call)), grad_scores_of(trial) * call.scale
    value = call.value.double().repeat_interleave(call.groups, 1)
    query, by_key = call.query.double(), tensor != "grad_query"
    products = {"grad_query": ("V in place of K", ds, value), "grad_key": ("dO in place of Q",
                ds.mT, do), "grad_value": ("Q in place of dO", p.mT, query)}  # fmt: skip
    told, left, operand = products[tensor]
    other = sum_groups(left @ operand, call.groups if by_key else 1)
    wide = min(other.shape[-1], observed.exact.shape[-1])
    features, _ = _those(observed, other, lambda x: x[..., :wide].flatten(0, 2), same=True)
    if len(features):
        return f"features {ranges(features)} are made of {told}", "other-data"
    if not by_key or call.query.shape[3] != call.value.shape[3]:
        return "", ""
    whose, of = ("dV", p.mT @ do) if tensor == "grad_key" else ("dK", ds.mT @ query)
    rows, at = _those(
        observed, sum_groups(of, call.groups), lambda x: x.mT.flatten(0, 2), same=False
    )
    told = f"rows {ranges(rows)} are {ranges(at)} of {whose}"
    return (told, "other-data") if len(rows) else ("", "")


def of_no_value(run: Run, trial: Trial, tensor: str, observed: Observed) -> tuple[str, str]:
    """Whether rows of O that hold its error stay what they are where V changes its sign: they are
    not written, and have what lay in their memory, or, where they see something and follow Q, are
    made of what is no V of their own; in words, with the cause.
    """
    if tensor != "out":
        return "", ""
    call, same = trial.call, observed.usable & (observed.value != 0).any(-1, keepdim=True)

    def stays(turned: Call) -> Tensor:
        result = run(replace(trial, name=f"{trial.name}/turned", call=turned))
        if result is None:
            return torch.zeros_like(same)
        # a row that has a NaN in it is not written either where the rest of it stays
        same_as = (result.out.double() == observed.value) | ~observed.usable
        return same_as.all(-1, keepdim=True)

    same = same & stays(replace(call, value=-call.value))
    error = (observed.value - observed.exact).square()
    if float(error[same].sum()) <= (1 - SHARED) * float(error[observed.usable].sum()):
        return "", ""
    if bool(scores_of(call).isneginf().all(-1)[..., None].expand_as(same)[same].all()):
        return "rows that see nothing hold what is of no V: they are not written", "unwritten"
    if bool(stays(replace(call, query=-call.query))[same.any(-1, keepdim=True)].all()):
        return "O is the same whatever Q and V are: it is not written", "unwritten"
    some = same.any(-1).flatten(0, 1).any(0)
    if bool(some.all()):
        return "O follows Q, and no V of its own", "other-data"
    rows = ranges(some.nonzero().flatten())
    return f"rows {rows} of O follow Q, and no V of their own", "other-data"


def of_no_grad_out(run: Run, trial: Trial, tensor: str, observed: Observed) -> tuple[str, str]:
    """Whether a gradient stays as it is where dO changes its sign, which no gradient of dO does, as
    another number is, or the square of one: in words, with the cause.
    """
    if tensor not in GRADIENTS or not bool(observed.value.any()):
        return "", ""
    turned = replace(trial, name=f"{trial.name}/dO turned", grad_out=-trial.grad_out)
    moved = _moved(run, turned, tensor, observed, observed.usable)
    if moved is None or float(moved.sum()) > SHARED**2 * float(observed.value.square().sum()):
        return "", ""
    doubled = replace(trial, name=f"{trial.name}/dO doubled", grad_out=2 * trial.grad_out)
    moved = _moved(run, doubled, tensor, observed, observed.usable)
    if moved is not None and float(moved.sum()) > float(observed.value.square().sum()):
        told = f"{SHORT[tensor]} grows as the square of dO does"
        if tensor == "grad_value":
            return f"{told}: what follows dO stands in the place of P", "other-data"
        return f"{told}: dP enters it twice", "no-delta"
    told = f"{SHORT[tensor]} is the same whatever dO is: something else is taken for it"
    return told, "other-data"


def among_more(run: Run, trial: Trial, tensor: str, gone: Tensor) -> bool:
    """Whether heads `[B, H]` of which a result is 0 are others' where as many sequences again lie
    behind those of the call: what they are read from lies beyond its end.
    """
    more = _and_again(trial)
    result = run(more)
    got = None if result is None else getattr(result, tensor)
    if got is None or got.ndim != 4:
        return False
    exact = getattr(golden(more.call, more.grad_out), tensor)
    got, exact = (x.double().flatten(2) for x in (got, exact))
    got, exact = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-300) for x in (got, exact))
    alike = got.flatten(0, 1) @ exact.flatten(0, 1).T
    alike.fill_diagonal_(0.0)  # which are written there are no others'
    return bool((alike[: gone.numel()][gone.flatten()].amax(-1) > ALIKE).any())


def _and_again(trial: Trial) -> Trial:
    """The call with as many sequences again behind its own, whose rows are those before."""
    call, batch = trial.call, len(trial.call.query)
    query, key, value, do = (torch.cat([x, x.roll(1, 2)]) for x in (
        call.query, call.key, call.value, trial.grad_out))  # fmt: skip
    mask = call.sees.mask
    if mask is not None and mask.ndim == 4:
        mask = mask.expand(batch, *mask.shape[1:]).repeat(2, 1, 1, 1)
    both = replace(call, query=query, key=key, value=value, sees=replace(call.sees, mask=mask),
                   shape=None)  # fmt: skip
    return replace(trial, name=f"{trial.name}/two", call=both, grad_out=do)


def _those(observed: Observed, other: Tensor, columns: Callable[[Tensor], Tensor], *,
           same: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Which columns of a result are not its own but others', of the `same` number or of any, and
    which these are; none where they do not hold its error.
    """
    got, exact, theirs = (columns(x) for x in (observed.value, observed.exact, other))
    off = (got - exact).square().sum(0)
    got, exact, theirs = (x / x.norm(dim=0).clamp_min(1e-300) for x in (got, exact, theirs))
    alike = theirs.mT @ got
    best, at = (alike.diagonal(), torch.arange(len(alike))) if same else alike.max(0)
    some = (best > ALIKE) & ((exact * got).sum(0) < ALIKE)
    held = float(off[some].sum()) > HALF * float(off.sum())
    some = some & held
    return some.nonzero().flatten(), at[some].sort().values


def _of_a_second(run: Run, trial: Trial, tensor: str) -> Others | None:
    """The same of a sequence alone, which has none of whose data it could be, where one follows."""
    if len(trial.call.key) > 1:
        return None
    two = _and_again(trial)
    result = run(two)
    got = None if result is None else getattr(result, tensor)
    if got is None:
        return None
    exact = getattr(golden(two.call, two.grad_out), tensor)
    return _of_others(run, two, tensor, Observed.of(got, exact))


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
            # K and V turned leave another's Q and dO as they were
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
        if float(moved.sum()) > max(PART * error, SHARED**2 * size, 4 * observed.floor):
            again = None
            if theirs is not None:
                again = _moved(run, _negated(trial, keys=theirs), tensor, observed, where)
            beside = again is not None and _of_own(moved, again)
            if beside or float(moved.sum()) > HALF * error:
                return Others(told, beside)
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
