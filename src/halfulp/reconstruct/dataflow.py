"""Bisection of the dataflow: every quantity between a kernel's inputs and its results is read off
with inputs of unit vectors, and held against what it should be, given what was read before it. The
first that differs is where the kernel is wrong.

S → P → O = P V;  dP = dO Vᵀ, δ = rowsum(dO ∘ O), dS = P ∘ (dP − δ);  dV = Pᵀ dO, dQ = dS K,
dK = dSᵀ Q. With K made of unit vectors, dQ is dS itself, with Q made of them dK is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfulp.calls import EVERYTHING, Result
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import Trial
from halfulp.reconstruct.suggested import ranges

Run = Callable[[Trial], Result | None]
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # of a mantissa, the first counted
OFF = 1.8  # times the spread that rounding makes: from there on a quantity differs
HELD = 0.9  # share of what differs that a place must hold
FITTED = 0.85  # share of it that a fit must explain
PAIRED = 3  # times as large an error where values nearly cancel: it was made before the sum


@dataclass(frozen=True)
class Unlike:
    """How one quantity differs from what it should be."""

    text: str  # empty where it does not
    kind: str  # right, head, tail, rows, factor, row-factor, column-factor, bits, zero or noise
    size: float = 0.0  # rms of the difference, of the quantity's
    bits: int = 0  # of the mantissas, where they are fewer than the dtype's

    @property
    def right(self) -> bool:
        """Whether it is what it should be."""
        return self.kind == "right"


RIGHT = Unlike("", "right")


def spread(dtype: torch.dtype) -> float:
    """The rms of rounding once to a dtype, relative; of float32 what sums make of it."""
    if dtype == torch.float32:
        return 2.0**-20
    return 2.0 ** -(BITS[dtype] - 1) / math.sqrt(12) / 1.4


def unlike(
    x: Tensor,
    exact: Tensor,
    sigma: Tensor,
    dtype: torch.dtype,
    of: tuple[str, str] = ("queries", "keys"),
) -> Unlike:
    """How `x` `[B, H, R, C]` differs from the exact one, where rounding makes an error of `sigma`;
    `of` is what its rows and columns are called.
    """
    usable = (sigma > 0) & x.isfinite() & exact.isfinite()
    x, exact = (torch.where(usable, t, 0.0) for t in (x, exact))
    weight = torch.where(usable, 1 / sigma.clamp_min(1e-300), 0.0)
    z = ((x - exact) * weight).square()
    count = usable.double()
    if float(z.sum()) < OFF**2 * float(count.sum().clamp_min(1)):
        # a place so small that it does not count among all
        small = place_of(z, count, of, least=30.0)
        return small or RIGHT
    size = math.sqrt(float((x - exact).square().sum() / exact.square().sum().clamp_min(1e-300)))
    place = place_of(z, count, of)
    where, kind = ("", "") if place is None else (place.text, place.kind)
    told, how = _fitted(x, exact, weight, float(z.sum()))
    bits = mantissa_bits(x)
    if how == "noise" and 0 < bits < BITS[dtype]:
        told, how = f"comes in {bits} bits", "bits"
    if how == "noise":
        told = f"is off by {100 * size:.2g} %"
    return Unlike(f"{told}{where}", kind or how, size, bits if bits < BITS[dtype] else 0)


def place_of(z: Tensor, count: Tensor, of: tuple[str, str], least: float = OFF**2) -> Unlike | None:
    """Few heads, rows or columns that hold what differs, where the others are right."""

    def few(dims: tuple[int, ...]) -> Tensor | None:
        excess, every = (z - count).sum(dims), count.sum(dims)
        bad = z.sum(dims) > least * every.clamp_min(1)
        most = HELD * float(excess.clamp_min(0).sum())
        held = bool(bad.any()) and float(excess[bad].sum()) > most
        return bad.nonzero() if held and 2 * int(bad.sum()) <= int((every > 0).sum()) else None

    found = few((2, 3))
    if found is not None:
        heads = [f"({b}, {h})" for b, h in found.tolist()]
        more = " and others" * (len(heads) > 3)
        return Unlike(f" in heads (sequence, head) {', '.join(heads[:3])}{more}", "head")
    for dims, name in (((0, 1, 3), of[0]), ((0, 1, 2), of[1])):
        found = few(dims)
        if found is not None:
            some, n = found.flatten(), z.shape[6 - sum(dims)]
            last = int(some[-1]) == n - 1 and len(some) == n - int(some[0])
            return Unlike(f" in {name} {ranges(some)} of {n}", "tail" if last else "rows")
    return None


def _fitted(x: Tensor, exact: Tensor, weight: Tensor, total: float) -> tuple[str, str]:
    """One factor, or one for each row or column, that explains what differs."""
    u, v = x * weight, exact * weight
    for dims, told, kind in (
        ((-1, -2, -3, -4), "", "factor"),
        ((-1,), "is off by a factor in each row", "row-factor"),
        ((-2,), "is off by a factor in each column", "column-factor"),
    ):
        along = (u * v).sum(dims, keepdim=True)
        factor = along / v.square().sum(dims, keepdim=True).clamp_min(1e-300)
        left = float((u - factor * v).square().sum())
        if left < (1 - FITTED) * total:
            if kind == "factor":
                f = float(factor)
                return "is 0" if abs(f) < 1e-6 else f"is {f:.4g} × what it should be", kind
            return told, kind
    return "", "noise"


def mantissa_bits(x: Tensor) -> int:
    """The bits that all but one in fifty of the numbers need, the first counted."""
    numbers = x[(x != 0) & x.isfinite()].double().abs()
    if len(numbers) < 32:
        return 0
    fraction, _ = torch.frexp(numbers)
    for bits in range(1, 24):
        scaled = fraction * 2.0**bits
        if float((scaled == scaled.round()).double().mean()) > 0.98:
            return bits
    return 24


# --- readings


@dataclass(frozen=True)
class ReadScores:
    """dS as one gradient shows it, with what it should be; `[B, H, N, N_k]` or parts of it."""

    read: Tensor
    exact: Tensor
    weights: Tensor  # P
    grad_weights: Tensor  # dP
    delta: Tensor
    delta_noise: Tensor  # what rounding O makes of it, relative to the rounding


def _unit(trial: Trial) -> float:
    """A power of two near 1/scale, so that scores are about the other operand's numbers."""
    return 2.0 ** round(-math.log2(abs(trial.call.scale) or 1.0))


def _exact(trial: Trial) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = trial.call
    p = weights_of(call, scores_of(call))
    value = call.value.double().repeat_interleave(call.groups, 1)
    do = trial.grad_out.double()
    noise = (do * (p @ value)).square().sum(-1, keepdim=True).sqrt()
    dp = do @ value.mT
    return p, dp, (dp * p).sum(-1, keepdim=True), noise


def _slope(trial: Trial) -> Tensor | float:
    """The softcap's derivative."""
    call = trial.call
    if not call.softcap:
        return 1.0
    key = call.key.double().repeat_interleave(call.groups, 1)
    plain = call.query.double() @ key.mT * call.scale
    return 1 - torch.tanh(plain / call.softcap).square()


def shown(run: Run, trial: Trial, tensor: str, numbers: Tensor | float = 1.0) -> ReadScores | None:
    """dS of the last D keys as dQ shows it, or of the last D queries as dK does: they are unit
    vectors times `numbers`, and the others 0. None for dK of groups, which is a sum.
    """
    call, by_keys = trial.call, tensor == "grad_query"
    if not by_keys and call.groups != 1:
        return None
    name = "key" if by_keys else "query"
    operand = torch.zeros_like(getattr(call, name))
    n, width = operand.shape[2:]
    some = torch.arange(max(0, n - width), n)
    factor = numbers if isinstance(numbers, float) else numbers[: len(some)]
    unit = _unit(trial)
    operand[:, :, some, some - some[0]] = unit * factor
    changed: dict[str, Any] = {name: operand}
    asked = replace(trial, name=f"{trial.name}/{name}", call=replace(call, **changed))
    result = run(asked)
    got = None if result is None else getattr(result, tensor)
    if got is None:
        return None
    read = got.double()[..., : len(some)] / (unit * call.scale * factor)
    p, dp, delta, noise = _exact(asked)
    exact = p * (dp - delta) * _slope(asked)
    if by_keys:
        return ReadScores(read, exact[..., some], p[..., some], dp[..., some], delta, noise)
    exact, p, dp, delta, noise = (x[..., some, :] for x in (exact, p, dp, delta, noise))
    return ReadScores(read.mT, exact, p, dp, delta, noise)


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
    return "operand" if errors[1] > PAIRED * errors[0] else "store"


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
        if call.groups != 1:
            return None
        query = torch.zeros_like(call.query[:, :, :terms])
        key, value = (t[:, :, :1] for t in (call.key, call.value))
        asked = replace(call, query=query, key=key, value=value, sees=EVERYTHING, sinks=None)
        result = run(replace(trial, name=f"{trial.name}/{terms} rows", call=asked, grad_out=x))
        exact = x.double().sum(2, keepdim=True)
        got = None if result is None else result.grad_value
    if got is None or got.shape != exact.shape or not bool(got.isfinite().all()):
        return None
    return got.double(), exact


# --- what they say together


@dataclass(frozen=True)
class Said:
    """What the readings say of one gradient."""

    text: str
    cause: str  # a key of CAUSES; empty where they say that nothing before the last sum is wrong


_OWN = {
    "factor": "grad-scale", "row-factor": "grad-scale", "tail": "grad-tail", "rows": "grad-tail",
    "head": "other-data", "bits": "grad-stored", "noise": "grad-stored",
    "column-factor": "operand",
}  # fmt: skip
"""What one gradient alone does to dS that the other has right, by the kind of difference."""


def grad_scores(run: Run, trial: Trial, tensor: str) -> Said | None:
    """What dS is, as dQ and dK show it: right, wrong in one of them, or wrong in both, and then
    which of its parts; None where it cannot be read.
    """
    dtype = trial.call.query.dtype
    seen = {name: shown(run, trial, name) for name in ("grad_query", "grad_key")}
    found = {name: _held(r, dtype) for name, r in seen.items() if r is not None}
    own = found.get(tensor)
    if own is None:
        return None
    other = found.get("grad_key" if tensor == "grad_query" else "grad_query", own)
    short = {"grad_query": "dQ", "grad_key": "dK"}
    if own.right:
        numbers = 1 + torch.linspace(0.01, 0.97, trial.call.query.shape[3])
        again = shown(run, trial, tensor, numbers.to(dtype))
        how = RIGHT if again is None else _held(again, dtype)
        if not how.right and how.kind in ("column-factor", "row-factor", "noise"):
            of = "K" if tensor == "grad_query" else "Q"
            told = (
                f"dS is right as {short[tensor]} shows it: the {of} that it is multiplied by is off"
            )
            return Said(told, "operand")
        of = "" if other is own or other.right else ", unlike in the other gradient"
        told = f"dS is right as {short[tensor]} shows it{of}: what differs is an operand or a sum"
        return Said(told, "")
    read = seen[tensor]
    assert read is not None
    part = _part(read, own, dtype)
    if other.right and part.cause not in ("delta", "no-delta"):
        told = f"dS is right in {short['grad_key' if tensor == 'grad_query' else 'grad_query']}"
        return Said(f"{told}, in {short[tensor]} it {own.text}", _OWN[own.kind])
    return part


def _sigma(read: ReadScores, dtype: torch.dtype) -> Tensor:
    """What rounding makes: of dS and P, and of δ through O; below normal numbers it is absolute."""
    delta = read.weights * read.delta_noise
    rounded = spread(dtype) * (2 * read.exact.square() + delta.square()).sqrt()
    return torch.where(rounded > 0, rounded + torch.finfo(dtype).smallest_normal * spread(dtype), 0)


def _held(read: ReadScores, dtype: torch.dtype) -> Unlike:
    return unlike(read.read, read.exact, _sigma(read, dtype), dtype)


def _part(read: ReadScores, how: Unlike, dtype: torch.dtype) -> Said:
    """Which part of dS = P ∘ (dP − δ) is wrong."""
    sigma = _sigma(read, dtype)
    weight = torch.where(sigma > 0, 1 / sigma.clamp_min(1e-300), 0.0)
    error = (read.read - read.exact) * weight
    total = float(error.square().sum())
    p, p_dp, p_delta = (
        t * weight for t in (read.weights, read.weights * read.grad_weights,
                             read.weights * read.delta)
    )  # fmt: skip

    def left(base: Tensor, dims: tuple[int, ...]) -> tuple[float, Tensor]:
        factor = (error * base).sum(dims, keepdim=True)
        factor = factor / base.square().sum(dims, keepdim=True).clamp_min(1e-300)
        return float((error - factor * base).square().sum()), factor

    every = (0, 1, 2, 3)
    rows, _ = left(p, (-1,))
    for base, dims, told, cause in (
        (p_delta, every, "δ is {:.4g} × what it should be", "no-delta"),
        (p_dp, every, "dP is {:.4g} × what it should be", "grad-scores"),
        (p, (-1,), "δ of each row is off", "delta"),
    ):
        rest, factor = left(base, dims)
        # one factor on δ is an error of every row, and not the other way round
        if rest < (1 - FITTED) * total and (cause != "no-delta" or rest < 2 * rows):
            sign = -1.0 if cause == "no-delta" else 1.0
            size = 1 + sign * float(factor.mean()) if len(dims) == 4 else 0.0
            where = how.text.partition(" in ")[2] if how.kind in ("head", "rows", "tail") else ""
            return Said(f"dS is wrong in dQ and dK: {told.format(size)}" + f" in {where}" * bool(
                where), cause)  # fmt: skip
    told = f"dS {how.text}, in dQ and dK alike"
    if how.kind == "head":
        return Said(told, "other-data")
    if how.kind == "tail":
        return Said(told, "grad-tail")
    # dS errs with itself where it, or P, is rounded; with P dP where dP is
    if how.kind == "noise" and _likelier(read, read.weights * read.grad_weights):
        return Said(f"{told}, as much as dP is off", "delta")
    return Said(told, "grad-scores")


def _likelier(read: ReadScores, base: Tensor) -> bool:
    """Whether errors go with `base` rather than with dS itself: Gaussian likelihoods."""
    error = (read.read - read.exact).flatten()

    def deviance(scale: Tensor) -> float:
        s = scale.abs().flatten()
        some = (s > 1e-3 * s.max()) & (read.exact.abs().flatten() > 0)
        z = (error[some] / s[some]).square()
        return float(z.mean().log() + 2 * s[some].log().mean())

    return deviance(base) < deviance(read.exact) - 0.05
