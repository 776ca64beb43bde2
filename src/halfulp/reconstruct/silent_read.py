"""Results that are 0 where exact ones are not: never written, written over, or read past an end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from halfulp.algorithms import golden
from halfulp.calls import EVERYTHING
from halfulp.reconstruct.emulating import SHORT, Emulator, Twist
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of
from halfulp.reconstruct.moved_read import over_the_end
from halfulp.reconstruct.others_read import among_more
from halfulp.reconstruct.panel import Trial, simplicity
from halfulp.reconstruct.ranges import ranges
from halfulp.reconstruct.twists import Tensors

FAR, HALF_FAR = 60.0, 16.0  # scores, below which exponentials are nothing, and nothing in float16
HIGHER = 256.0  # by which scores are raised
MOSTLY = 0.98  # of a result is 0: all of it is
FEW = 0.03  # of a result's rows may be 0 without being a matter of their own
HALF = 0.5  # of an error, that rows which are 0 must hold
FEATURES = 0.25  # of it, that features must, whose numbers others may hold


def silent(emulator: Emulator) -> list[Twist]:
    """Results that are 0 where exact ones are not, in whole rows or, of some heads, in whole
    columns: as never written, with the gradient that reaches them or without.
    """
    zero: dict[tuple[str, str], Tensor] = {}
    for place, observed in emulator.observed.items():
        if place[1] == "lse" or place[0] == "small":  # what is small may round to 0
            continue
        gone = (observed.value == 0) & (observed.exact != 0)
        rows, columns = gone.all(-1, keepdim=True), gone.all(-2, keepdim=True)
        if bool(columns.any()) and not bool(columns.all(-1).any()):
            zero[place] = columns.expand(gone.shape)
        elif float(rows.float().mean()) > FEW:
            zero[place] = rows.expand(gone.shape)
    if not zero:
        return []
    found = []
    names = dict.fromkeys(name for _, name in zero)
    where = "; ".join(_which(zero, name) for name in names)
    width, beyond = over_the_end(zero), _beyond_the_end(emulator, zero)
    if width:
        where += f", as many as the last {width} of the head before reach beyond its end"
    elif beyond:
        where += ", which are others' where more sequences follow"
    for key, told in (("", ""), ("-gone", ", and no gradient passes there")):
        if key and "out" not in names:
            continue

        def turn(trial: Trial, key: str = key) -> Trial | None:
            base = trial.name
            if not any((base, name) in zero for name in names):
                return None
            gone = zero.get((base, "out"))
            if key and gone is not None and gone.shape == trial.grad_out.shape:
                return replace(trial, grad_out=trial.grad_out.masked_fill(gone, 0))
            return replace(trial)

        def back(trial: Trial, tensors: Tensors) -> Tensors:
            changed = dict(tensors)
            for name in tensors:
                gone = zero.get((trial.name, name))
                if gone is not None and gone.shape == tensors[name].shape:
                    changed[name] = tensors[name].masked_fill(gone, 0)
            return changed

        # a part of the sequence that gradients lack has all of its features, and others not
        part = not any(bool((gone[..., :1, :] == gone).all()) for gone in zero.values())
        cause = "grad-tail" if part and "out" not in names else "unwritten"
        if width or beyond:
            cause = "other-data"
        found.append(Twist(f"silent{key}", f"results are never written: {where}{told}", cause,
                           turn, back))  # fmt: skip
    return found


def left_out(emulator: Emulator) -> list[Twist]:
    """Keys that nobody sees, where dV is 0 and should not be: chosen by what they hold, so that
    weights which are read off by other values have others.
    """
    gone: dict[str, Tensor] = {}
    for (name, tensor), observed in emulator.observed.items():
        added = emulator.trials[name].call.sees.added
        if tensor == "grad_value" and name != "small" and added is None:
            zero = observed.gone
            if FEW < float(zero.double().mean()) < MOSTLY:
                gone[name] = zero
    if not gone:
        return []

    def turn(trial: Trial) -> Trial | None:
        call, keys = trial.call, gone.get(trial.name)
        if keys is None:
            return None
        if call.value is not emulator.trials[trial.name].call.value:  # others of other numbers
            result = emulator.run(trial)
            if result is None or result.grad_value is None:
                return None
            exact = golden(call, trial.grad_out).grad_value
            assert exact is not None  # since there is a dO
            keys = Observed.of(result.grad_value, exact).gone
        seen = ~keys.repeat_interleave(call.groups, 1)[:, :, None]
        seen = seen if call.sees.mask is None else seen & call.sees.mask
        shown = seen.expand(*call.query.shape[:3], -1)
        return replace(trial, call=replace(call, sees=replace(call.sees, mask=shown)))

    told = "; ".join(f"{ranges(keys.flatten(0, 1).any(0).nonzero().flatten())} on {name}"
                     for name, keys in list(gone.items())[:2])  # fmt: skip
    last = all(_last_of_all(keys) for keys in gone.values())
    text = "keys are left out" if last else "keys are left out, others in each head"
    cause = "key-tail" if last else "tiles-skipped"
    return [Twist("left-out", f"{text}: {told}", cause, turn)]


def _last_of_all(keys: Tensor) -> bool:
    """Whether marked keys `[B, H_k, N_k]` are the last ones, as many in every head."""
    first = keys[:1, :1]
    return bool((keys == first).all()) and bool((first.int().diff() >= 0).all())


def below_the_maximum(emulator: Emulator) -> bool:
    """Whether rows of O are 0 whose scores lie far below the maximum that is taken off: in those
    calls alone where what they see scores far below what is hidden from them, below other rows, or
    below 0, and others as low are not; or they are there where all scores lie higher.
    """
    told = []
    for (name, tensor), observed in emulator.observed.items():
        if tensor == "out" and name != "small" and bool(observed.gone.any()):
            call, gone = emulator.trials[name].call, observed.gone
            seen, every = (scores_of(x).amax(-1) for x in (call, replace(call, sees=EVERYTHING)))
            most = every.amax(-1, keepdim=True).clamp_min(0).expand_as(every)
            far = HALF_FAR if call.query.dtype == torch.float16 else FAR
            if call.sees.added is not None or bool(((most - seen)[gone] < far).any()):
                return _there_where_higher(emulator, name, gone)
            rest = seen[~gone & seen.isfinite()]
            others = bool((rest < seen[gone].max()).any())  # no number hides those that are lower
            told.append(others or bool((every - seen)[gone].max() > far))
    return any(told)


def _there_where_higher(emulator: Emulator, name: str, gone: Tensor) -> bool:
    """Whether most rows of O that are 0 on a call are not where its scores are all higher: a
    feature of Q and of K is what adds to each.
    """
    trial = emulator.trials[name]
    call = trial.call
    if call.softcap:  # which raises none past it
        return False
    query, key = call.query.clone(), call.key.clone()
    query[..., 0], key[..., 0] = HIGHER / 8, 8 / call.scale
    higher = replace(call, query=query, key=key)
    result = emulator.run(replace(trial, name=f"{trial.name}/higher", call=higher))
    if result is None:
        return False
    there = (result.out.nan_to_num(0.0) != 0).any(-1)
    return float(there[gone].double().mean()) > MOSTLY / 2


def _beyond_the_end(emulator: Emulator, zero: Mapping[tuple[str, str], Tensor]) -> bool:
    """Whether heads that are 0 on the simplest call with such heads are others' among more."""
    heads = {key: gone.flatten(2).all(-1) for key, gone in zero.items()}
    some = [key for key, gone in heads.items() if bool(gone.any()) and not bool(gone.all())]
    if not some:
        return False
    trial, tensor = min(some, key=lambda key: simplicity(key[0]))
    return among_more(emulator.run, emulator.trials[trial], tensor, heads[trial, tensor])


def _which(zero: Mapping[tuple[str, str], Tensor], name: str) -> str:
    """Where a result is 0, on the trial where most is."""
    trial = max(
        (t for t, n in zero if n == name), key=lambda t: float(zero[t, name].float().mean())
    )
    gone = zero[trial, name]
    label = f"{SHORT[name]} on {trial}"
    if not bool(gone.all(-1).any()):
        columns = gone.flatten(0, -2).any(0).nonzero().flatten()
        heads = gone.flatten(2).any(-1)
        whose = "" if bool(heads.all()) else f" in {_heads(heads)}"
        return f"{label}, features {ranges(columns)} of {gone.shape[-1]}{whose}"
    rows = gone[..., 0]
    heads = rows.all(-1)
    if bool(heads.any()) and bool((rows == heads.unsqueeze(-1)).all()):
        return f"{label}, {_heads(heads)}"
    some = rows.flatten(0, 1).any(0).nonzero().flatten()
    return f"{label}, rows {ranges(some)} of {rows.shape[-1]}"


def _heads(marked: Tensor) -> str:
    every = [f"({b}, {h})" for b, h in marked.nonzero().tolist()]
    return f"heads (sequence, head) {', '.join(every[:4])}"


def silent_rows(observed: Observed) -> tuple[str, str]:
    """Rows, or features in every row, that are 0 where exact ones are not."""
    gone = (observed.value == 0) & (observed.exact != 0)
    features = gone.flatten(0, -2).all(0)
    if bool(features.any()) and not bool(features.all()):
        lost = float(observed.exact[..., features].square().sum())
        if lost > FEATURES * observed.total:  # the others may hold what these should
            told = ranges(features.nonzero().flatten())
            return f"features {told} of {len(features)} are 0", "unwritten"
    zero = observed.gone
    count = int(zero.sum())
    lost = float((observed.exact.square() * zero[..., None]).sum())
    if count == 0 or lost < HALF * observed.total:  # what rounds to 0 is not all that is off
        return "", ""
    heads = zero.all(-1)
    if bool(heads.any()) and int(heads.sum()) * zero.shape[-1] == count:
        return f"{int(heads.sum())} of {heads.numel()} heads are 0", "unwritten"
    return f"{count} of {zero.numel()} rows are 0", "unwritten"


def is_zero(observed: Observed) -> bool:
    """Whether nearly all of a result is 0 where the exact one is not."""
    some = (observed.exact != 0) & observed.usable
    return bool(some.any()) and float((observed.value[some] == 0).double().mean()) > MOSTLY
