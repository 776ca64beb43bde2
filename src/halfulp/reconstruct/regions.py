"""In which heads, sequences, rows and calls a kernel errs, before it is asked what it does there:
heads that alone are wrong are asked for themselves, rows and calls that are right are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.calls import Call, Result
from halfulp.reconstruct import call_kinds
from halfulp.reconstruct.call_asked import holds
from halfulp.reconstruct.call_kinds import FEW
from halfulp.reconstruct.emulating import GRADIENTS, TENSORS, Emulator, Model
from halfulp.reconstruct.evidence import NOISE, SOUND, Observed
from halfulp.reconstruct.panel import Run, Trial
from halfulp.reconstruct.slip_kinds import END, Rows

Spots = tuple[tuple[int, int], ...]  # (sequence, head)
SOME = 6  # heads that are asked for themselves
RIGHT = 0.15  # share of a head's error that is left: up to there it is right,
WRONG = 0.3  # and from there on wrong
MORE = 1.5  # times the model's error, at least, where it is wrong
MOST_ROWS = 0.7  # of those that a rule says, which are wrong; others may be by chance, but for
FEW_ROWS = 0.04
CALLS = 3  # in which some heads are wrong and others right, at least
CROWD = 32  # heads, of which a few may err by chance


class _Heads(NamedTuple):
    """Numbers of sequences and heads, and how many there are."""

    b: Tensor
    h: Tensor
    batch: int
    heads: int


_RULES: tuple[tuple[str, Callable[[_Heads], Tensor]], ...] = (
    ("heads of odd number", lambda at: at.h % 2 == 1),
    ("heads of even number", lambda at: at.h % 2 == 0),
    ("the first head", lambda at: at.h == 0),
    ("the last head", lambda at: at.h == at.heads - 1),
    ("heads after the first", lambda at: at.h > 0),
    ("heads before the last", lambda at: at.h < at.heads - 1),
    ("the first sequence", lambda at: at.b == 0),
    ("sequences after the first", lambda at: at.b > 0),
    ("the last sequence", lambda at: at.b == at.batch - 1),
    ("sequences before the last", lambda at: at.b < at.batch - 1),
    ("sequences of odd number", lambda at: at.b % 2 == 1),
    ("the last head of the last sequence",
     lambda at: (at.b == at.batch - 1) & (at.h == at.heads - 1)),
)  # fmt: skip
"""Which heads alone may be wrong."""


PERIODS = (2, 4, 8, 16, 32, 64, 128)
_ENDS = ((-8, END), (-64, END), (0, 64), (64, END))
"""Rows from the first to before the last of two numbers that alone may be wrong."""


@dataclass(frozen=True)
class Region:
    """Where a kernel errs."""

    text: str  # "in heads of odd number"
    heads: Mapping[str, Spots]  # by trial, those that are wrong
    cause: str = ""  # that stands for it, where nothing more is known
    rows: tuple[Rows, ...] = ()  # other rows of the same calls are left out
    trials: frozenset[str] = frozenset()  # where these were found


def region_of(emulator: Emulator, model: Model) -> Region | None:
    """Heads that alone are wrong where others of the same call are right, or None."""
    marks = {name: found for name, trial in emulator.trials.items()
             if (found := _marked(emulator, model, trial)) is not None}  # fmt: skip
    mixed = {n: m for n, m in marks.items() if bool(m.any()) and not bool(m.all())}
    if len(mixed) < CALLS:
        return None
    for told, rule in _RULES:
        expected = {}
        for name, mark in marks.items():
            b, h = (torch.arange(n).view(shape) for n, shape in zip(
                mark.shape, ((-1, 1), (1, -1)), strict=True))  # fmt: skip
            expected[name] = rule(_Heads(b, h, *mark.shape)).expand(mark.shape)
        # what is wrong is where the rule says, in the calls that tell
        if all(bool((m & ~expected[n]).float().mean() < 1 / CROWD) for n, m in marks.items()) and (
            all(torch.equal(mark, expected[name]) for name, mark in mixed.items()
                if mark.numel() <= CROWD)):  # fmt: skip
            spots = {n: _spots(expected[n]) for n, m in marks.items() if bool(m.any())}
            return Region(f"in {told} alone", spots)
    return None


def calls_of(emulator: Emulator, model: Model) -> tuple[frozenset[str], Region | None]:
    """The calls that are wrong, where others are right, and what they have in common."""
    fits = emulator.fits(model, frozenset(TENSORS) - {"lse"})
    every = {trial for trial, _ in fits}
    own = {t: [f for (name, _), f in fits.items() if name == t] for t in every}
    wrong = {t for t, some in own.items() if any(f.left > WRONG and f.times > MORE for f in some)}
    right = {t for t, some in own.items() if all(f.left < RIGHT or f.times < SOUND for f in some)}
    wrong |= {trial for trial, _ in emulator.nonfinite}
    right -= wrong
    if wrong <= {"small"} or len(right) < FEW:  # what is small may round to 0
        return frozenset(every), None
    some, others = ([emulator.trials[t] for t in sorted(ts) if not t.startswith("probe ")]
                    for ts in (wrong, right))  # fmt: skip
    told, cause = call_kinds.condition(some, others)
    if not holds(emulator, model, told, frozenset(t.name for t in some)):
        return frozenset(wrong), Region(f"on {', '.join(sorted(wrong))}", {})
    told = f"in {told}" if told else call_kinds.where(some, others)
    return frozenset(wrong), Region(told, {}, cause)


def rows_of(emulator: Emulator, model: Model) -> tuple[Emulator, Region] | None:
    """Rows of queries, or of keys, that alone are wrong where others of the same results are right,
    and what is left where those are left out: results that sum over such rows are left out too.
    """
    marks = {key: found for key in emulator.observed
             if key[0] != "small" and key[1] != "lse"
             and (found := _rows(emulator, model, key)) is not None}  # fmt: skip
    for whose, own, sums in (("queries", ("out", "grad_query"), GRADIENTS[1:]),
                             ("keys", GRADIENTS[1:], ("grad_query",))):  # fmt: skip
        some = {k: m for k, m in marks.items() if k[1] in own}
        mixed = [k for k, (wrong, right) in some.items() if bool(wrong.any() and right.any())]
        others = [k for k, (wrong, _) in marks.items() if k[1] not in (*own, *sums)
                  and float(wrong.float().mean()) > FEW_ROWS]  # fmt: skip
        if len(mixed) < CALLS or len(others) * CALLS > len(mixed):
            continue
        for rule in _rules(whose, some.values()):
            fits = [_as_told(m, rule) for m in some.values()]
            if fits.count(True) >= CALLS and fits.count(False) * FEW <= fits.count(True):
                seen = {}
                for key, observed in emulator.observed.items():
                    n = observed.value.shape[2]
                    at = rule.at(torch.arange(n), n) if key[1] in own else torch.ones(n)
                    if key[1] not in sums and key[1] != "lse" and bool(at.any()):
                        seen[key] = at[:, None]
                shows = frozenset(k[0] for k, fits_ in zip(some, fits, strict=True) if fits_)
                return emulator.within(seen), Region(
                    f"in {rule.text} alone", {}, rows=(rule,), trials=shows
                )
    return None


def _rules(whose: str, marks: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Rows]:
    """Which rows may alone be wrong: of every so many those that are more often than not, and ends
    of the sequence.
    """
    every = [m for m in marks if bool(m[0].any())]
    for period in PERIODS:
        wrong, right = torch.zeros(period), torch.zeros(period)
        for mine, others in every:
            at = torch.arange(len(mine)) % period
            wrong.index_add_(0, at, mine.float())
            right.index_add_(0, at, others.float())
        some = (wrong > right).nonzero().flatten().tolist()
        if 0 < len(some) < period:
            yield Rows(whose, period, tuple(some))
    yield from (Rows(whose, 0, ends) for ends in _ENDS)


def _as_told(marks: tuple[Tensor, Tensor], rule: Rows) -> bool | None:
    """Whether wrong rows are where a rule says; None where few are wrong, and these there."""
    wrong, right = (m.float() for m in marks)
    at = rule.at(torch.arange(len(wrong)), len(wrong))
    if bool(at.all()):
        return None
    outside = float(wrong[~at].mean()) < FEW_ROWS
    if not bool(at.any()) or float(wrong[at].mean()) < MOST_ROWS:
        return None if outside else False
    return outside and float(right[~at].mean()) > MOST_ROWS


def _rows(emulator: Emulator, model: Model, key: tuple[str, str]) -> tuple[Tensor, Tensor] | None:
    """Which rows of a result are wrong, and which are right, over all heads."""
    observed, (name, tensor) = emulator.observed[key], key
    made = emulator.made(emulator.trials[name], model, tensor)
    if made is None or made.shape != observed.value.shape:
        return None
    error, rest, usual = _energies(observed, made, (0, 1, 3))
    floor = observed.floor / len(error)
    left = rest / (error + floor).clamp_min(1e-300)
    more = error > MORE**2 * (usual + NOISE * usual.mean()) + floor
    return (left > WRONG) & more, (left < RIGHT) | (error < SOUND**2 * usual + floor)


def _energies(observed: Observed, made: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Squares of a kernel's error, of what a model leaves of it, and of the model's own."""
    found = (observed.value - observed.exact, observed.value - made, made - observed.exact)
    return tuple(torch.where(observed.usable, x, 0.0).square().sum(dims) for x in found)


def _spots(mark: Tensor) -> Spots:
    return tuple((int(b), int(h)) for b, h in mark.nonzero().tolist())


def _marked(emulator: Emulator, model: Model, trial: Trial) -> Tensor | None:
    """Which heads of a trial are wrong, `[B, H]`; None where it does not tell right from wrong."""
    call, found = trial.call, None
    batch, heads = call.query.shape[:2]
    for (name, tensor), observed in emulator.observed.items():
        if name != trial.name or tensor == "lse":
            continue
        if call.groups > 1 and tensor in GRADIENTS[1:]:
            continue  # of heads that share one, whose error it is cannot be told
        made = emulator.made(trial, model, tensor)
        if made is None or made.shape != observed.value.shape:
            return None
        error, rest, usual = _energies(observed, made, (-1, -2))
        floor = observed.floor / (batch * heads)
        left = rest / (error + floor).clamp_min(1e-300)
        more = error > MORE**2 * (usual + NOISE * usual.mean()) + floor
        wrong, right = (left > WRONG) & more, left < RIGHT
        if not bool((wrong | right | ~more).all()):
            return None
        found = wrong if found is None else found | wrong
    return found


def restricted(emulator: Emulator, region: Region) -> Emulator:
    """The kernel asked in the wrong heads alone, on the calls that show it."""
    whole = {name: emulator.trials[name] for name in region.heads}
    slots = {name: _slots(whole[name].call, spots) for name, spots in region.heads.items()}
    run = _in_heads(emulator.run, whole, slots)
    observed = {}
    for name, trial in whole.items():
        asked = _cut(trial, slots[name])
        result = run(asked)
        if result is not None:
            observed[asked] = result
    return Emulator(observed, run)


def _slots(call: Call, spots: Spots) -> Spots:
    """At most one of the heads that share a key head, or a sink."""
    kept: dict[tuple[int, int], tuple[int, int]] = {}
    for b, h in spots:
        kept.setdefault((0 if call.sinks is not None else b, h // call.groups), (b, h))
    return tuple(kept.values())[:SOME]


def _cut(trial: Trial, slots: Spots) -> Trial:
    """Some heads of a trial as those of one sequence."""
    call = trial.call
    b, h = torch.tensor(slots).T
    mask = call.sees.mask
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        mask = mask.expand(*call.query.shape[:2], *mask.shape[2:])[b, h][None]
    some = replace(
        call,
        query=call.query[b, h][None],
        key=call.key[b, h // call.groups][None],
        value=call.value[b, h // call.groups][None],
        sees=replace(call.sees, mask=mask),
        sinks=None if call.sinks is None else call.sinks[h],
        shape=None,
    )
    return replace(trial, call=some, grad_out=trial.grad_out[b, h][None])


def _in_heads(run: Run, whole: Mapping[str, Trial], slots: Mapping[str, Spots]) -> Run:
    """A kernel's results in some heads, for calls of those alone: the others are what they are in
    the whole call.
    """

    def asked(trial: Trial) -> Result | None:
        base = trial.name.partition("/")[0]
        if base not in slots or trial.call.query.shape[:2] != (1, len(slots[base])):
            return None
        call, like = trial.call, whole[base]
        groups = like.call.groups
        b, h = torch.tensor(slots[base]).T

        def put(x: Tensor, old: Tensor, heads: Tensor) -> Tensor:
            same = x.shape[2:] == old.shape[2:]
            other = old if same else -x[:, :1].roll(1, 2).expand(*old.shape[:2], *x.shape[2:])
            other = other.to(x.dtype).clone()
            other[b, heads] = x[0]
            return other

        query = put(call.query, like.call.query, h)
        key, value = (put(x, old, h // groups) for x, old in (
            (call.key, like.call.key), (call.value, like.call.value)))  # fmt: skip
        grad_out = put(trial.grad_out, like.grad_out, h)
        if groups > 1:  # the others of a group add to dK and dV as well
            mine = torch.zeros(query.shape[:2], dtype=torch.bool)
            mine[b, h] = True
            grad_out = grad_out * mine[..., None, None]
        mask, sinks = call.sees.mask, call.sinks
        if mask is not None:
            filled = mask[:, :1].expand(*query.shape[:2], *mask.shape[2:]).clone()
            filled[b, h] = mask.expand(1, len(b), *mask.shape[2:])[0]
            mask = filled
        if sinks is not None and like.call.sinks is not None:
            filled = like.call.sinks.clone()
            filled[h] = sinks
            sinks = filled
        sees = replace(call.sees, mask=mask)
        full = replace(call, query=query, key=key, value=value, sees=sees, sinks=sinks)
        result = run(replace(trial, call=full, grad_out=grad_out))
        if result is None:
            return None
        given = {n: x for n, x in result.given().items() if n in TENSORS}
        return Result(**{n: x[b, h // groups if n in GRADIENTS[1:] else h][None]
                         for n, x in given.items()})  # fmt: skip

    return asked
