"""Faults that a kernel's own results suggest: which factor is on a scale or on a result, which
features or rows are others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.calls import Call
from halfulp.reconstruct.call_kinds import option_of
from halfulp.reconstruct.emulating import GRADIENTS, SHORT, Emulator, Model, Twist
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import row_maximum, scores_of, weights_of
from halfulp.reconstruct.limits_read import cut_off
from halfulp.reconstruct.panel import Trial
from halfulp.reconstruct.ranges import ranges
from halfulp.reconstruct.silent_read import left_out, silent
from halfulp.reconstruct.sums_read import of_division
from halfulp.reconstruct.twists import Tensors

ALIKE = 0.98  # the cosine of a feature with the exact one that it is
ALONE = 0.8  # share that a factor of one trial's own must explain there
SURER = 1.1  # times the share that one of all heads explains: each head has its own
GONE = 0.01  # off 0, or off 1: a head is there, or it is not
LEAN = 3e-4  # a smaller factor is none
GONE = 1e-3  # a factor of scores that leaves nothing of them
STEPS, CONVERGED = 16, 1e-5  # of Newton's method, each half of the factor at most
ONE_KIND = 0.5  # of what scales differ by in calls of two kinds, that they may in those of one
ROOT = 0.02  # of a number: what a scale that was fitted may be off by
HALF = 0.5  # of an error, that what lies elsewhere must hold
STEADY = 0.1  # of a number that is added to every row's sum: what it may differ by
SOME = 16  # rows
ROUGHLY = 0.1  # of a row, that rounding may make its error at most
FAR = 5.0  # from 0, that scores lie whose exponentials may vanish
ULP = 2.0**-7  # of bf16: a result off by a smaller factor is one that is rounded to one side


def fitted_scales(trial: Trial, out: Observed) -> list[Twist]:
    """The factor on the scores that explains most of O's error, where one does: as another scale,
    and as one of S − m alone, whose lse keeps the maximum.
    """
    factor = _fitted_scale(trial, out)
    if factor is None:
        return []

    def turn(asked: Trial) -> Trial:
        return replace(asked, call=replace(asked.call, scale=asked.call.scale * factor))

    def powered(asked: Trial) -> Trial:
        changed, added = turn(asked), asked.call.sees.added
        if added is None:
            return changed
        sees = replace(changed.call.sees, mask=added * factor)
        return replace(changed, call=replace(changed.call, sees=sees))

    def back(asked: Trial, tensors: Tensors) -> Tensors:
        if "lse" not in tensors:
            return tensors
        top = row_maximum(asked.call).nan_to_num(0.0, neginf=0.0)
        return tensors | {"lse": tensors["lse"] - (factor - 1) * top}

    told = f"is {factor:.4g} × what was asked for"
    exponent = f"S − m is multiplied by {factor:.4g} before the exponential"
    name = f"{factor:.4g}" if abs(factor) > GONE else "gone"
    return [Twist(f"scale-{name}", f"the scale {told}", "scale", turn),
            Twist(f"exponent-{factor:.4g}", exponent, "exponential", powered, back)]  # fmt: skip


def _fitted_scale(trial: Trial, out: Observed) -> float | None:
    """The factor on the scores that explains most of O's error; None where none explains some."""
    factor = 1.0
    for _ in range(STEPS):
        here, moved = (_exact_out(trial, factor * (1 + step)) for step in (0.0, 1e-4))
        slope = (moved - here) / 1e-4
        size = float(slope.square().sum())
        if size == 0:
            return None
        step = max(-0.5, min(0.5, float(((out.value - here) * slope).sum()) / size))
        factor *= 1 + step
        if abs(step) < CONVERGED:
            break
    rest = out.value - _exact_out(trial, factor)
    slope = (_exact_out(trial, factor * (1 + 1e-4)) - _exact_out(trial, factor)) / 1e-4
    size = float(slope.square().sum())
    error = math.sqrt(float((rest * slope).square().sum())) / size if size else math.inf
    worse = float(rest.square().sum()) > 0.98 * out.total
    return None if worse or abs(factor - 1) < max(1e-4, 6 * error) else factor


def scales_of_their_own(emulator: Emulator, outs: Mapping[str, Observed]) -> list[Twist]:
    """A factor on the scale of every call that has one, where calls of one scale have one factor
    and others another, as a scale has that is rounded; or a scale of its own for every number of
    heads, keys, … that calls have, where it is one number's by another name.
    """
    fitted: dict[str, float] = {}
    for name, out in outs.items():
        call = emulator.trials[name].call
        if name != "small" and not call.softcap and call.query.shape[2] >= SOME:
            found = _fitted_scale(emulator.trials[name], out)
            fitted[name] = 1.0 if found is None else found
    calls = {name: emulator.trials[name].call for name in fitted}
    off = max((abs(f - 1) for f in fitted.values()), default=0.0)
    # one factor on all is a plainer thing
    if off < LEAN or max(fitted.values()) - min(fitted.values()) < off / 4:
        return []
    factors, apart = _each_its_own({n: (calls[n].scale, f) for n, f in fitted.items()})
    told = ", ".join(f"{f:.4g} × {scale:.3g}" for scale, f in sorted(factors.items()) if f != 1)
    ways: list[tuple[float, int, str, Callable[[Call], float]]]
    ways = [(apart, len(factors), told, lambda c: factors.get(c.scale, 1.0) * c.scale)]
    for what, number in _NUMBERS:
        each, apart = _each_its_own({n: (number(c), fitted[n] * c.scale) for n, c in calls.items()})
        both = {(number(c), c.scale) for c in calls.values()}
        if len(both) > len(each):  # else it is the scale's by another name
            ways.append((apart, len(each), *_scale_by(what, number, each)))
    least = min(apart for apart, *_ in ways)
    # of what is as good the plainest, which has fewest numbers
    _, _, told, scale = min((f for f in ways if f[0] <= max(2 * least, ROOT)), key=lambda f: f[1])
    return [] if least > ONE_KIND else [_scaled_as(f"the scale is {told}", scale)]


def _scale_by(
    what: str, number: Callable[[Call], float], each: Mapping[float, float]
) -> tuple[str, Callable[[Call], float]]:
    """A scale for each number of something, in words and as a function; a root of all numbers."""
    if all(abs(s * math.sqrt(x) - 1) < ROOT for x, s in each.items()):
        return f"1/√ of the number of {what}", lambda c: 1 / math.sqrt(number(c))
    told = ", ".join(f"{s:.3g} of calls with {x:g} {what}" for x, s in sorted(each.items()))
    return told, lambda c: each.get(number(c), c.scale)


_NUMBERS: tuple[tuple[str, Callable[[Call], float]], ...] = (
    ("heads", lambda c: c.query.shape[1]),
    ("key heads", lambda c: c.key.shape[1]),
    ("keys", lambda c: c.key.shape[2]),
    ("queries", lambda c: c.query.shape[2]),
    ("sequences", lambda c: c.query.shape[0]),
)
"""What calls have a number of, by which a kernel may scale that takes it for another."""


def _each_its_own(fitted: Mapping[str, tuple[float, float]]) -> tuple[dict[float, float], float]:
    """The median of the second for each of the first; and how far it is another where the first is
    the same, beside how far it is where it is not.
    """
    groups: dict[float, list[float]] = {}
    for of, found in fitted.values():
        groups.setdefault(of, []).append(found)
    each = {of: median(some) for of, some in groups.items()}
    apart = max(max(some) - min(some) for some in groups.values())
    varied = max(each.values()) - min(each.values())
    return each, apart / varied if varied else math.inf


def _scaled_as(text: str, scale: Callable[[Call], float]) -> Twist:
    def turn(trial: Trial) -> Trial | None:
        other = scale(trial.call)
        if other == trial.call.scale:
            return None
        return replace(trial, call=replace(trial.call, scale=other))

    return Twist(f"scales-{text}", text, "scale", turn)


def _exact_out(trial: Trial, factor: float) -> Tensor:
    call = replace(trial.call, scale=trial.call.scale * factor)
    value = call.value.double().repeat_interleave(call.groups, 1)
    return weights_of(call, scores_of(call)) @ value


def vanished(emulator: Emulator, explained: Collection[str] = ()) -> str:
    """Whether rows of O are 0, or not finite, by nothing but how far their scores lie from 0, as
    exponentials are that lack their row's maximum; in words. Of calls that are not `explained`.
    """
    outs = {n: o for (n, tensor), o in emulator.observed.items()
            if tensor == "out" and n not in explained}  # fmt: skip
    gone = {n: (~o.usable).any(-1) | o.gone for n, o in outs.items() if n != "small"}
    if sum(int(rows.sum()) for rows in gone.values()) < SOME:
        return ""
    tops = {n: row_maximum(emulator.trials[n].call) for n in gone}
    seen = {n: t.isfinite() for n, t in tops.items()}
    off = torch.cat([_row_errors(outs[n])[~rows & seen[n]] for n, rows in gone.items()])
    if len(off) and float(off.median()) > ROUGHLY:  # rows that need no maximum err as well
        return ""
    broken = torch.cat([tops[n][rows & seen[n]] for n, rows in gone.items()])
    right = torch.cat([tops[n][~rows & seen[n]] for n, rows in gone.items()])
    ways = ("below", torch.neg), ("above", torch.clone), ("further from 0 than", torch.abs)
    for told, far in ways:
        if len(broken) < SOME or not len(right):
            break
        least, most = far(broken).quantile(0.05), far(right).quantile(0.99)
        if float(least) > max(FAR, float(most)):
            number = float(-least if told == "below" else least)
            at = f"{told} {number:.2g}, and there alone"
            return f"O is 0, or not finite, in rows whose scores lie {at}"
    return ""


def _row_errors(observed: Observed) -> Tensor:
    """Of each row, beside the row, `[B, H, N]`."""
    off = torch.where(observed.usable, observed.value - observed.exact, 0.0)
    share: Tensor = off.norm(dim=-1) / observed.exact.norm(dim=-1).clamp_min(1e-300)
    return share


def exchanged(observed: Observed) -> tuple[str, str]:
    """Features, rows or heads that are others of the exact result's, or all in another layout."""
    got, exact = observed.value, observed.exact
    size = float(got.norm() * exact.norm()) or 1.0
    if float((got * exact).sum()) < ALIKE * size:
        for names, stored in _stored_otherwise(exact):
            if float((got * stored).sum()) > ALIKE * size:
                return f"{names[0]} is stored as {names[1]}, or the other way round", "layout"
    ways: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("features", "layout", lambda x: x.flatten(0, -2)),
        ("rows", "layout", lambda x: x.mT.flatten(0, -2)),
        ("heads", "other-data", lambda x: x.flatten(0, 1).flatten(1).mT),
        ("rows of all heads", "layout", lambda x: x.permute(0, 3, 1, 2).flatten(0, 1).flatten(1)),
    )
    for name, cause, columns in ways:
        got, exact = columns(observed.value), columns(observed.exact)
        if got.shape[-1] > 2 * got.shape[0]:
            continue
        off = (got - exact).square().sum(0)
        got, exact = (x / x.norm(dim=0).clamp_min(1e-300) for x in (got, exact))
        alike = exact.mT @ got
        best, at = alike.max(0)
        moved = ((best > ALIKE) & (alike.diagonal() < ALIKE)).nonzero().flatten()
        # one feature may be like another by chance
        most = float(off[moved].sum()) > HALF * float(off.sum())
        if most and len(moved) > (name == "features") and not bool((at[moved] == moved).any()):
            empty = not bool((exact[:, moved] != 0).any())  # which are in no other's place
            if name == "rows" and (empty or len(torch.unique(at[moved] - moved)) == 1):
                cause = "other-data"  # a block, or the next row, and no other order
            told = ", which should be 0," * empty
            others = ranges(at[moved].sort().values)
            return f"{name} {ranges(moved)}{told} are those of {others}", cause
    return "", ""


def _stored_otherwise(x: Tensor) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """A result `[B, H, N, D]` whose numbers lie in another order of dimensions, and are read in the
    right one, or the other way round; with the names of both orders.
    """
    names = "BHND"
    for dims in permutations((1, 2, 3)):
        if list(dims) != sorted(dims):
            told = f"[{', '.join(names[i] for i in (0, *dims))}]", "[B, H, N, D]"
            sizes = [x.shape[i] for i in (0, *dims)]
            yield told, x.permute(0, *dims).reshape(x.shape)
            yield told, x.reshape(sizes).permute([0, *(1 + dims.index(i) for i in (1, 2, 3))])


class Fitted(NamedTuple):
    """A factor on a candidate that fits a result best."""

    factor: float
    error: float  # standard
    share: float  # of what is left that it explains
    heads: Tensor  # the factor of each head, `[B, H, 1, 1]`
    share_of_heads: float  # that these explain, and
    share_of_rows: float  # that one of each row would


def factor_of(observed: Observed, candidate: Tensor) -> Fitted:
    """The factor of one result on one trial."""
    c = torch.where(observed.usable, candidate.double(), 0.0)
    rest = observed.value - c
    total, every = max(float(rest.square().sum()), 1e-300), float(c.square().sum())
    if every == 0:
        return Fitted(1.0, math.inf, 0.0, torch.ones(*c.shape[:2], 1, 1), 0.0, 0.0)
    (_, by_row), (heads, by_head) = ((along / size.clamp_min(1e-300), float(
        (along.square() / size.clamp_min(1e-300)).sum()) / total) for along, size in (
            ((rest * c).sum(dims, keepdim=True), c.square().sum(dims, keepdim=True))
            for dims in ((-1,), (-1, -2))))  # fmt: skip
    along, error = float((rest * c).sum()), float((rest * c).square().sum()) ** 0.5 / every
    return Fitted(1 + along / every, error, along**2 / every / total, 1 + heads, by_head, by_row)


def factors_on(emulator: Emulator, model: Model, name: str) -> list[Twist]:
    """The factor on what a model gives that fits one result best, where there is one."""
    fitted = {}
    for (trial, tensor), observed in emulator.observed.items():
        if tensor == name:
            got = emulator.made(emulator.trials[trial], model, name)
            if got is not None and got.shape == observed.value.shape:
                fitted[trial] = factor_of(observed, got)
    found = factors(name, fitted, emulator.trials)
    some = next(iter(emulator.trials.values()))
    if any(t.cause == "weights-disagree" for t in found) and of_division(emulator.run, some):
        return [replace(t, cause="reciprocal") for t in found]
    return found


def _some_are_gone(factors: Tensor) -> bool:
    """Whether factors of heads are 0 in some, and 0 or 1 in most: a few may have other data."""
    zero, one = factors.abs() < GONE, (factors - 1).abs() < GONE
    return bool(zero.any()) and float((zero | one).double().mean()) > HALF


def factors(tensor: str, fitted: Mapping[str, Fitted], trials: Mapping[str, Trial]) -> list[Twist]:
    """A factor on one result, from those of every trial; on O before its rounding as well. Factors
    that differ from trial to trial, or from head to head, count where they explain nearly all.
    """
    off = {t: f.factor for t, f in fitted.items() if abs(f.factor - 1) > max(6 * f.error, LEAN)}
    least, most = min(off.values(), default=1.0), max(off.values(), default=1.0)
    alike = most - least <= 0.02 * abs(most - 1) + 2e-3
    one = sum(off.values()) / max(1, len(off))
    some = [f for t, f in fitted.items() if t != "small"]  # what is small may round to 0
    by_head = not (off and alike) and bool(some) and (
        median(f.share_of_heads for f in some) > max(
            ALONE, SURER * median(f.share for f in some)))  # fmt: skip
    if by_head:
        off = {t: f.factor for t, f in fitted.items()}
    rows = median(1 - f.share_of_rows for f in some) if some else 0.0
    shares = [f.share_of_heads if by_head else f.share for t, f in fitted.items() if t in off]
    # what each row has its own of is no matter of a call or a head
    one_each = bool(shares) and median(shares) > ALONE and rows > HALF * (1 - median(shares))
    if not off.keys() - {"small"} or not (alike or one_each):
        return []
    if by_head:
        every = torch.cat([f.heads.flatten() for f in some])
        told = f"{float(every.min()):.3g} to {float(every.max()):.3g}, another in each head"
    elif alike:
        told = f"{one:.4g}"
    else:
        told = ", ".join(f"{f:.3g} on {t}" for t, f in list(off.items())[:4])
    cause, leans = "grad-scale" if tensor in GRADIENTS else "value-factor", ""
    if not off.keys() >= fitted.keys() - {"small"} and cause == "value-factor":
        cause = "unnormalized"  # in some calls alone
    if by_head and _some_are_gone(every):
        cause, told = "unwritten", "0 in some heads"
    if not by_head and all(abs(f - 1) < ULP for f in off.values()):
        cause = "grad-stored" if tensor in GRADIENTS else "out"
        leans = ", less than an ulp of bf16: it is rounded to one side"
    option = option_of([trials[t] for t in off])
    cause = option or cause

    def factor(trial: Trial) -> Tensor | float:
        by = fitted[trial.name].heads.to(torch.float32)
        return by if by_head else one if alike else off[trial.name]

    def back(trial: Trial, tensors: Tensors) -> Tensors:
        if tensor not in tensors or trial.name not in off:
            return tensors
        return tensors | {tensor: tensors[tensor] * factor(trial)}

    def turn(trial: Trial) -> Trial | None:
        return replace(trial) if trial.name in off else None

    key = f"factor-{tensor}-{told}-" + "-".join(f"{t}{f:.4g}" for t, f in off.items())
    found = [Twist(key, f"{SHORT[tensor]} is multiplied by {told}{leans}", cause, turn, back)]
    if tensor == "out":

        def before(trial: Trial) -> Trial | None:
            if trial.name not in off:
                return None
            by, groups = factor(trial), trial.call.groups
            if isinstance(by, Tensor):  # heads that share a V have its factor
                by = by.reshape(len(by), -1, groups, 1, 1).mean(2)
            return replace(trial, call=replace(trial.call, value=trial.call.value.float() * by))

        text = f"V is multiplied by {told}"
        if leans:
            cause = option or "weights-disagree"
            text = f"Ō is multiplied by {told} before it is rounded"
        found.append(Twist(f"{key}-before", text, cause, before, unrounded=("value",)))
    return found


def more_in_sums(outs: Mapping[str, Observed], trials: Mapping[str, Trial]) -> list[Twist]:
    """A number that is added to the sum of each row's weights, the largest of which is 1."""
    numbers, shares = [], []
    for name, out in outs.items():
        call = trials[name].call
        if call.sinks is None and name != "small":  # what is small may round to 0
            size = out.exact.square().sum(-1)
            share = size / (out.value * out.exact).sum(-1) - 1
            number = share * (scores_of(call).logsumexp(-1) - row_maximum(call)).exp()
            known = number.isfinite() & (size > 0)
            numbers.append(number[known])
            shares.append(share[known])
    if not numbers:
        return []
    (more, spread), (part, varied) = (
        (float(x.median()), float((x - x.median()).abs().median()))
        for x in (torch.cat(numbers), torch.cat(shares))
    )
    if part < LEAN or spread > STEADY * more or varied * more < 2 * spread * part:
        return []

    def back(trial: Trial, tensors: Tensors) -> Tensors:
        lse = scores_of(trial.call).logsumexp(-1)
        added = torch.log1p(more * (row_maximum(trial.call) - lse).exp()).nan_to_num(0.0)
        changed = {"out": (-added).exp().unsqueeze(-1), "lse": added}
        return tensors | {n: (x * changed[n] if n == "out" else x + changed[n]).to(x.dtype)
                          for n, x in tensors.items() if n in changed}  # fmt: skip

    return [Twist(f"sum-more-{more:.3g}", f"the row sum has {more:.3g} more, beside weights of at"
                  " most 1", "unnormalized", replace, back)]  # fmt: skip


def hints(emulator: Emulator) -> tuple[Twist, ...]:
    """Twists that the kernel's own results suggest: few, so that they are tried in every search."""
    found = [*silent(emulator), *left_out(emulator)]
    outs = {t: o for (t, name), o in emulator.observed.items() if name == "out" and t != "long"}
    for name in sorted(outs, key=lambda t: -outs[t].relative)[:3]:
        found += fitted_scales(emulator.trials[name], outs[name])
    found += scales_of_their_own(emulator, outs)
    found += more_in_sums(outs, emulator.trials)
    found += cut_off(outs, emulator.trials)
    return tuple({twist.key: twist for twist in found}.values())
