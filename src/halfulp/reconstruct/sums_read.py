"""Sums of few terms, of terms whose signs change, of more and more terms: whether an operand, a
sum as it runs or its store is wrong.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from halfulp.algorithms import golden
from halfulp.calls import EVERYTHING, Sees
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import Run, Trial

BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # of a mantissa, the first counted
GROWS = 1.4  # times the error where there is more to sum: it is made as the sum runs
WHOLE = 64  # keys, whose number, and all below it, need few bits
DIVIDED = 2.0**-4  # of O: from there on it is no matter of a coarse reciprocal
SHARED = 1, 3, 5, 11  # keys that share a row's weight, of which one has a value
ALONG = 0.7  # the cosine of what its value is off by in the first and in the others
APART = 16.0  # the root of a score beside which others weigh nothing
CODES = 256  # magnitudes that codes of 8 bits have by two scales
SEVERAL = 8  # times as many elements
LARGER = 8  # times, that a term which weighs nothing is
PAIRED = 3  # times as large an error where values nearly cancel: it was made before the sum


def spread(dtype: torch.dtype) -> float:
    """The rms of rounding once to a dtype, relative; of float32 what sums make of it."""
    if dtype == torch.float32:
        return 2.0**-20
    return 2.0 ** -(BITS[dtype] - 1) / math.sqrt(12) / 1.4


def one_term(run: Run, trial: Trial, tensor: str) -> str | None:
    """Where a sum is wrong: "operand" before it, "store" after it, "sum" where one term alone is
    right to the last bit; None where nothing is given. A term is a value for O, a row of dO for dV;
    none is a 0.

    Of two terms that nearly cancel, an error of an operand is large beside what is left, one of the
    store is not.
    """
    dtype = trial.call.query.dtype
    errors = []
    for terms in (0, 1, 2):
        made = _few_terms(run, trial, tensor, terms)
        if made is None and terms == 0:
            continue  # a scale that is taken of nothing
        if made is None:
            return None
        got, exact = made
        if terms == 0:
            if bool(got.any()):
                return "store"  # something is added that no term makes
            continue
        errors.append(float((got - exact).norm() / exact.norm().clamp_min(1e-300)))
    if errors[0] < spread(dtype) / 8:
        return "sum"
    if _coded_together(run, trial, tensor):
        return "operand"
    if errors[1] <= PAIRED * errors[0]:
        return "store"
    return "operand" if tensor != "out" or _as_weighed(run, trial) else "store"


def _coded_together(run: Run, trial: Trial, tensor: str) -> bool:
    """Whether what one term alone makes is another number where a term that weighs nothing is
    larger, as where numbers share a scale of their codes: nothing that comes after a sum sees it.
    """
    call = trial.call
    fewest = min(call.query.shape[3], call.key.shape[2], call.query.shape[2])
    if call.softcap or fewest < 2:
        return False
    near = torch.zeros_like(call.query[:, :, :2])
    near[:, :, 0, 0] = near[:, :, 1, 1] = APART / math.sqrt(abs(call.scale) or 1.0)
    far = math.copysign(1.0, call.scale) * near[:, :: call.groups]
    found = []
    for times in (1, LARGER):
        value, do = call.value[:, :, :2].clone(), trial.grad_out[:, :, :2].clone()
        value[:, :, 1] *= times if tensor == "out" else 1
        do[:, :, 1] *= times if tensor != "out" else 1
        do[:, torch.arange(do.shape[1]) % call.groups > 0] = 0
        asked = replace(call, query=near, key=far, value=value, sees=EVERYTHING, sinks=None)
        name = f"{trial.name}/{tensor} beside {times}"
        result = run(replace(trial, name=name, call=asked, grad_out=do))
        got = None if result is None else getattr(result, tensor)
        if got is None or not bool(got.isfinite().all()):
            return False
        found.append(got[:, :, 0].double())
    return not torch.equal(*found)


def _as_weighed(run: Run, trial: Trial) -> bool:
    """Whether V of one key is off by the same numbers however little it weighs, as an operand is; a
    result is rounded at its own size.
    """
    errors = []
    for count in SHARED:
        some = torch.zeros(count, dtype=torch.long)
        read = _value_row(run, _of_keys(trial, some), 0)
        if read is None:
            return True
        errors.append(read[0] - read[1])
    along = sum(float((x * errors[0]).sum()) for x in errors[1:])
    size = sum(float(x.norm()) for x in errors[1:]) * float(errors[0].norm())
    return along > ALONG * size


def _of_keys(trial: Trial, some: Tensor) -> Trial:
    """The trial with some of its keys."""
    key, value = (x[:, :, some] for x in (trial.call.key, trial.call.value))
    return replace(trial, call=replace(trial.call, key=key, value=value))


def signed_sums(run: Run, trial: Trial) -> list[float]:
    """The rms error of O on values whose signs change from key to key, once in the middle, and
    never; NaN where nothing is given.

    Errors of weights are alike in the first two; those of a sum as it runs are large where it grows
    and shrinks again; those of what comes after the sum where it stays large.
    """
    call, found = trial.call, []
    n, width = call.value.shape[2:]
    draw = torch.Generator().manual_seed(n)
    sizes = 0.75 + 0.5 * torch.rand(n, width, generator=draw)
    random = torch.randint(0, 2, (n, width), generator=draw) * 2 - 1
    halves = torch.where(torch.arange(n) < n // 2, 1, -1)[:, None]
    for i, signs in enumerate((random, halves, halves**2)):
        value = (sizes * signs).to(call.value.dtype).expand_as(call.value).contiguous()
        asked = replace(call, value=value)
        result = run(replace(trial, name=f"{trial.name}/signs {i}", call=asked))
        exact = weights_of(call, scores_of(call)) @ value.double().repeat_interleave(call.groups, 1)
        found.append(math.nan if result is None else float((result.out - exact).square().mean()))
    return [math.sqrt(x) for x in found]


def value_rows(run: Run, trial: Trial) -> tuple[str, str]:
    """What V of single keys is where all weights are alike and V of the others is 0: its features
    in another order, or other numbers; with the cause, empty where it is what it should be.
    """
    n = trial.call.key.shape[2]
    for key in dict.fromkeys((1 % n, n // 3, n // 2 + 1, n - 2, n - 1)):
        read = _value_row(run, trial, key % n)
        if read is None:
            return "", ""
        got, exact = read
        if float((got - exact).norm()) < DIVIDED * float(exact.norm()):
            continue
        told = f"V of key {key % n} of {n} enters O"
        if float((got.sort().values - exact.sort().values).norm()) < DIVIDED * float(exact.norm()):
            return f"{told} with its features in another order", "layout"
        times = (got * exact).sum((-1, -2), keepdim=True) / exact.square().sum(
            (-1, -2), keepdim=True
        )
        if float((got - times * exact).norm()) < DIVIDED * float(got.norm()):
            least, most = float(times.min()), float(times.max())
            return f"{told} {least:.3g} to {most:.3g} times, by the head", "value-factor"
        return f"{told} as other numbers, where all weights are alike", "other-data"
    return "where all weights are alike, V enters O as it should", ""


def normalized(run: Run, trial: Trial) -> bool:
    """Whether O stays what it is where V is larger, and turns with it, as where V's rows are
    normalized.
    """
    found = []
    for times in (1, LARGER, -1):
        asked = replace(trial.call, value=trial.call.value * times)
        result = run(replace(trial, name=f"{trial.name}/V {times} times", call=asked))
        if result is None:
            return False
        found.append(result.out.double().nan_to_num(0.0, 0.0, 0.0))
    one, larger, turned = found
    off = max(float((larger - one).norm()), float((turned + one).norm()))
    return bool(one.any()) and off < DIVIDED * float(one.norm())


def few_values(x: Tensor) -> int:
    """How many numbers a result takes, their signs apart, where these are few beside its elements,
    as codes of 8 bits are; else 0.
    """
    some = x[x.isfinite()].abs()
    values = len(torch.unique(some))
    return values if some.numel() > SEVERAL * CODES and 1 < values <= CODES else 0


def value_error(run: Run, trial: Trial) -> float:
    """What V of one key is off by as it enters O, beside it; 0 where nothing is given."""
    read = _value_row(run, trial, trial.call.key.shape[2] // 2)
    return 0.0 if read is None else float((read[0] - read[1]).norm() / read[1].norm())


def _value_row(run: Run, trial: Trial, key: int) -> tuple[Tensor, Tensor] | None:
    """V of a key as it enters O where all weights are alike and V of the others is 0, and as it is,
    in each row.
    """
    call, n = trial.call, trial.call.key.shape[2]
    value = torch.zeros_like(call.value)
    value[:, :, key] = call.value[:, :, key]
    asked = replace(call, query=torch.zeros_like(call.query), value=value, sees=EVERYTHING,
                    sinks=None)  # fmt: skip
    result = run(replace(trial, name=f"{trial.name}/value {key}", call=asked))
    if result is None or not bool(result.out.isfinite().all()):
        return None
    exact = value[:, :, [key]].double().repeat_interleave(call.groups, 1)
    return result.out.double() * n, exact.expand_as(result.out)


def of_division(run: Run, trial: Trial) -> bool:
    """Whether O is off by a little where each row's weights are 1 and its sum a small integer,
    which every format holds: what is left to err is the division.
    """
    call, n = trial.call, WHOLE
    query, key, value = (
        x[:, :, torch.arange(n) % x.shape[2]] for x in (call.query, call.key, call.value)
    )
    ones = replace(call, query=torch.zeros_like(query), key=key, value=torch.ones_like(value),
                   sees=Sees(causal=True), sinks=None)  # fmt: skip
    do = trial.grad_out[:, :, torch.arange(n) % trial.grad_out.shape[2]]
    result = run(replace(trial, name=f"{trial.name}/ones", call=ones, grad_out=do))
    if result is None or not bool(result.out.isfinite().all()):
        return False
    off = (result.out.double() - 1).abs().amax(-1)
    least = 2.0 ** -BITS[call.query.dtype]
    return bool(least < off.amax() < DIVIDED) and bool((off > least).double().mean() > 0.25)


def from_terms(run: Run, trial: Trial, tensor: str) -> int:
    """From how many terms on a sum is wrong, where it gets worse with them; 0 where it is as wrong
    with so few that they are one tile, or nothing is given.

    Terms are keys for O and dQ, queries for dK and dV; results stay as large or grow, so that an
    error that is relative to them, or one of its own, gets no worse.
    """
    call, of_keys = trial.call, tensor in ("out", "grad_query")
    errors = []
    counts = (16, 32, 64, 128, 256, 1024)
    for count in counts:
        some = torch.arange(count)
        query, key, value, do = (
            x[:, :, some % x.shape[2]] if over == of_keys else x
            for x, over in ((call.query, False), (call.key, True), (call.value, True),
                            (trial.grad_out, False))
        )  # fmt: skip
        if tensor == "out":
            query, value = torch.zeros_like(query), value.abs()
        if tensor == "grad_query":
            do = do * (count // counts[0])
        small = replace(call, query=query, key=key, value=value, sees=EVERYTHING, sinks=None)
        asked = replace(trial, name=f"{trial.name}/{tensor} {count}", call=small, grad_out=do)
        result, exact = run(asked), getattr(golden(asked.call, do), tensor)
        got = None if result is None else getattr(result, tensor)
        if got is None or not bool(got.isfinite().all()):
            return 0
        errors.append(float((got - exact).norm() / exact.norm().clamp_min(1e-300)))
    if errors[-1] < GROWS * errors[0]:
        return 0
    return next(n for n, e in zip(counts, errors, strict=True) if e > math.sqrt(
        errors[0] * errors[-1]))  # fmt: skip


def _few_terms(run: Run, trial: Trial, tensor: str, terms: int) -> tuple[Tensor, Tensor] | None:
    """A result that is the mean (O) or the sum (dV) of one or two terms, and the exact one."""
    call, dtype = trial.call, trial.call.query.dtype
    x = (call.value if tensor == "out" else trial.grad_out)[:, :, :1].float()
    coarse = torch.ldexp((torch.frexp(x)[0] * 8).round() / 8, torch.frexp(x)[1])
    x = torch.cat([x, -coarse][:terms], 2).to(dtype) if terms else torch.zeros_like(x).to(dtype)
    terms = max(1, terms)
    if tensor == "out":
        key = torch.zeros_like(call.key[:, :, :terms])
        asked = replace(call, key=key, value=x, sees=EVERYTHING, sinks=None)
        result = run(replace(trial, name=f"{trial.name}/{terms} keys", call=asked))
        exact = x.double().mean(2, keepdim=True).repeat_interleave(call.groups, 1)
        got = None if result is None else result.out
        exact = exact.expand(*trial.grad_out.shape[:3], -1)
    else:
        heads = torch.arange(x.shape[1])
        x = x * (heads % call.groups == 0).view(1, -1, 1, 1)  # of a group one head has a dO
        query = torch.zeros_like(call.query[:, :, :terms])
        key, value = (t[:, :, :1] for t in (call.key, call.value))
        asked = replace(call, query=query, key=key, value=value, sees=EVERYTHING, sinks=None)
        result = run(replace(trial, name=f"{trial.name}/{terms} rows", call=asked, grad_out=x))
        exact = x[:, :: call.groups].double().sum(2, keepdim=True)
        got = None if result is None else result.grad_value
    if got is None or got.shape != exact.shape or not bool(got.isfinite().all()):
        return None
    return got.double(), exact
