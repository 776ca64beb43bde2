"""Bisection of the dataflow: every quantity between a kernel's inputs and its results is read off
with inputs of unit vectors, and held against what it should be, given what was read before it.

The first that differs is where the kernel is wrong. S → P → O = P V;  dP = dO Vᵀ,
δ = rowsum(dO ∘ O), dS = P ∘ (dP − δ);  dV = Pᵀ dO, dQ = dS K, dK = dSᵀ Q. With K made of unit
vectors, dQ is dS itself, with Q made of them dK is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import Run, Trial
from halfulp.reconstruct.sums_read import from_terms, spread
from halfulp.reconstruct.unlike import FITTED, HELD, RIGHT, Unlike, mantissa_bits, unlike

SLIGHT = 0.03  # of a quantity: what errs so little is no part left out
LINES = 6  # times the variance by chance of a line's factor: it is the line's
LINED = 0.08  # share of an error that lines must hold
MANY = 24  # elements of a line that is looked at
LARGE = 0.2  # of it: what errs so much in some rows is no rounding of theirs
OTHER = 0.5  # of a quantity: what differs so much is another
ROUGH = 0.1  # of P dP: rounding dP to a format of two bits after the first makes less
APART = 4.0  # times other errors: what is so much larger has a source of its own
PILED = 0.3  # of all squared errors: what one element of each row holds of an error that is its own
BY_ROWS = 1.7  # times what O's rounding makes of δ: sound kernels are read at 1.2 to 1.4
ITSELF = 0.99  # the cosine of dS with what it is then
COARSE = 0.2  # of the root of δ's squared terms: rounding these makes no such error of it


@dataclass(frozen=True)
class ReadScores:
    """dS as one gradient shows it, with what it should be; `[B, H, N, N_k]` or parts of it."""

    read: Tensor
    exact: Tensor
    weights: Tensor  # P
    grad_weights: Tensor  # dP
    delta: Tensor
    delta_noise: Tensor  # what rounding O makes of it, relative to the rounding
    largest: Tensor  # where a row has its largest weight


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


def grad_scores_of(trial: Trial) -> Tensor:
    """The exact dS, `[B, H, N, N_k]`, float64."""
    p, dp, delta, _ = _exact(trial)
    return p * (dp - delta) * _slope(trial)


def shown(
    run: Run, trial: Trial, tensor: str, numbers: Tensor | float = 1.0, *, part: int = 0
) -> ReadScores | None:
    """dS of the last D keys, or of the first, second … D by their `part`, as dQ shows it, or of as
    many queries as dK does: they are unit vectors times `numbers`, and the others 0. Of heads that
    share one dK each is asked alone, the queries of the others being 0.
    """
    call, by_keys = trial.call, tensor == "grad_query"
    if not by_keys and call.groups > 1:
        return _joined([_shown(run, trial, tensor, numbers, member, part)
                        for member in range(call.groups)])  # fmt: skip
    return _shown(run, trial, tensor, numbers, 0, part)


def _joined(members: list[ReadScores | None]) -> ReadScores | None:
    """Heads of a group that were asked one by one."""
    some = [m for m in members if m is not None]
    if len(some) < len(members):
        return None
    return ReadScores(*(torch.stack([getattr(m, f.name) for m in some], 2).flatten(1, 2)
                        for f in fields(ReadScores)))  # fmt: skip


def _shown(
    run: Run, trial: Trial, tensor: str, numbers: Tensor | float, member: int, part: int
) -> ReadScores | None:
    call, by_keys = trial.call, tensor == "grad_query"
    groups = 1 if by_keys else call.groups
    name = "key" if by_keys else "query"
    operand = torch.zeros_like(getattr(call, name))
    n, width = operand.shape[2:]
    start = max(0, min(n - width, (part - 1) * width) if part else n - width)
    some = torch.arange(start, min(n, start + width))
    factor = numbers if isinstance(numbers, float) else numbers[: len(some)]
    unit = _unit(trial)
    operand[:, member::groups, some, some - some[0]] = unit * factor
    changed: dict[str, Any] = {name: operand}
    asked = replace(trial, name=f"{trial.name}/{name} {member}", call=replace(call, **changed))
    result = run(asked)
    got = None if result is None else getattr(result, tensor)
    if got is None:
        return None
    read = got.double()[..., : len(some)] / (torch.as_tensor(factor).double() * unit * call.scale)
    p, dp, delta, noise = _exact(asked)
    exact, top = p * (dp - delta) * _slope(asked), p == p.amax(-1, keepdim=True)
    if by_keys:
        exact, p, dp, top = (x[..., some] for x in (exact, p, dp, top))
        return ReadScores(read, exact, p, dp, delta, noise, top)
    several = (exact, p, dp, delta, noise, top)
    return ReadScores(read.mT, *(x[:, member::groups, some] for x in several))


# --- what they say together


@dataclass(frozen=True)
class Said:
    """What the readings say of one gradient."""

    text: str
    cause: str  # a key of CAUSES; empty where they say that nothing before the last sum is wrong
    cut: bool = False  # dS itself comes in fewer bits than its dtype's


_OWN = {
    "factor": "grad-scale", "row-factor": "grad-scale", "tail": "grad-tail", "rows": "grad-tail",
    "zero": "grad-tail", "head": "gradient-unexplained", "bits": "grad-stored",
    "noise": "grad-stored", "column-factor": "operand", "hidden": "backward-mask",
}  # fmt: skip
"""What one gradient alone does to dS that the other has right, by the kind of difference."""


def grad_scores(run: Run, trial: Trial, tensor: str) -> Said | None:
    """What dS is, as dQ and dK show it: right, wrong in one of them, or wrong in both, and then
    which of its parts; None where it cannot be read.
    """
    dtype = trial.call.query.dtype
    rows = trial.call.scores_shape[3 if tensor == "grad_query" else 2]
    for at in range(1 + -(-rows // trial.call.query.shape[3])):
        both = {name: shown(run, trial, name, part=at) for name in ("grad_query", "grad_key")}
        seen = {name: r for name, r in both.items() if r is not None}
        if tensor not in seen:
            return None
        found = {name: _held(r, dtype) for name, r in seen.items()}
        own = found[tensor]
        if not own.right:
            break
    name = "grad_key" if tensor == "grad_query" else "grad_query"
    other = found.get(name, own)
    if other.right and not own.right:  # the other end may be what is wrong
        again = shown(run, trial, name, part=int(not at))
        other = other if again is None else _held(again, dtype)
    short = {"grad_query": "dQ", "grad_key": "dK"}
    if own.right and (share := _at_largest(seen[tensor], dtype)) > PILED:
        # one element of each row is too few for all of dS to be called wrong
        told = f"{100 * share:.0f} % of dS's error, as {short[tensor]} shows it, lies at the"
        return Said(f"{told} largest score of each row", "max-gradient")
    if own.right:
        numbers = 1 + torch.linspace(0.01, 0.97, trial.call.query.shape[3])
        again = shown(run, trial, tensor, numbers.to(dtype))
        how = RIGHT if again is None else _held(again, dtype)
        plain = shown(run, trial, tensor)
        other_units = False
        if again is not None and plain is not None:
            more, share = _by_lines(again, dtype)
            other_units = more > LINES * _by_lines(plain, dtype)[0] and share > LINED
        if other_units or how.kind in ("column-factor", "row-factor"):
            of = "K" if tensor == "grad_query" else "Q"
            told = (
                f"dS is right as {short[tensor]} shows it: the {of} that it is multiplied by is off"
            )
            return Said(told, "operand")
        more = min(_delta_errs(r, dtype) for r in seen.values())
        if len(seen) > 1 and more > BY_ROWS:
            told = f"dS is right as dQ and dK show it, but for δ, which errs {more:.2g} × what"
            return Said(f"{told} the rounding of O makes of it", "delta")
        if how.right or how.kind == "noise":
            terms = from_terms(run, trial, tensor)
            told = f"dS is right as {short[tensor]} shows it, and {short[tensor]} is off"
            if terms:
                return Said(f"{told}, more so from {terms} terms on", "grad-accumulator")
        of = "" if other is own or other.right else ", unlike in the other gradient"
        told = f"dS is right as {short[tensor]} shows it{of}: what differs is an operand or a sum"
        return Said(told, "")
    part = _part(seen[tensor], own, dtype)
    if other.right and part.cause not in ("delta", "no-delta"):
        return _of_one(run, trial, tensor, seen[tensor], own)
    return part


def _of_one(run: Run, trial: Trial, tensor: str, read: ReadScores, own: Unlike) -> Said:
    """What one gradient alone does to dS, which the other has right."""
    short = {"grad_query": "dQ", "grad_key": "dK"}
    told = f"dS is right in {short['grad_key' if tensor == 'grad_query' else 'grad_query']}"
    pairs, some = _of_pairs(read), own.kind in ("tail", "rows")
    if pairs and not some and own.kind != "head":
        return Said(f"{told}, in {short[tensor]} it {pairs[0]}", pairs[1])
    kind = "noise" if some and own.size <= SLIGHT else own.kind
    cause = _OWN["zero" if own.how == "zero" else kind]
    if own.how == "noise" and kind in ("tail", "rows") and not pairs and own.size > LARGE:
        cause = "other-data"  # nothing is left out there
    if kind == "noise" and own.size > OTHER:  # no format is so coarse
        cause = "other-data"
    if own.kind == "bits":  # of a store, what is stored from sums comes in as few
        asked = run(trial)
        grad = None if asked is None else getattr(asked, tensor)
        if grad is not None and mantissa_bits(grad.double()) > own.bits:
            cause = "grad-scores"
    told = f"{told}, in {short[tensor]} it {own.text}"
    if cause == "grad-stored" and (terms := from_terms(run, trial, tensor)):
        told, cause = f"{told}, more so from {terms} terms on", "grad-accumulator"
    return Said(told, cause)


def _of_pairs(read: ReadScores) -> tuple[str, str] | None:
    """Pairs that alone are wrong, being left out or hidden, in words, with the cause."""
    error = (read.read - read.exact).square()
    hidden = read.weights == 0
    gone = (read.read == 0) & ~hidden
    if float(error[gone].sum()) > HELD * float(error.sum()):
        share = float(gone.sum()) / float((~hidden).sum())
        return f"is 0 for {100 * share:.3g} % of the pairs", "grad-tail"
    if float(error[hidden].sum()) > HELD * float(error.sum()):
        return "is not 0 for pairs that are hidden", "backward-mask"
    return None


def _delta_errs(read: ReadScores, dtype: torch.dtype) -> float:
    """How large the errors of δ are that rows of dS have in common, P times a number of each row,
    in units of those that O's rounding makes; what chance gives each row is none.
    """
    size = read.exact.abs()
    weight = 1 / (spread(dtype) * size.clamp_min(1e-3 * float(size.max()) + 1e-300))
    error, base = (read.read - read.exact) * weight, read.weights * weight
    chance = 1 / base.square().sum(-1, keepdim=True).clamp_min(1e-300)
    number = (error * base).sum(-1, keepdim=True) * chance
    seen = read.weights.amax(-1, keepdim=True) > 0
    most = (spread(dtype) * read.delta_noise)[seen].square().mean()
    much = (number.square() - chance)[seen].mean() / most.clamp_min(1e-300)
    return math.sqrt(max(0.0, float(much)))


def _by_lines(read: ReadScores, dtype: torch.dtype) -> tuple[float, float]:
    """How far rows and columns of dS are off by a factor of each, beside one of all, in units of
    what single elements would make of them by chance: an operand that is off is off for a whole
    line. And the share of the error that such factors make: of sums that are rounded it is small.
    """
    sigma = _sigma(read, dtype)
    weight = torch.where(sigma > 0, 1 / sigma.clamp_min(1e-300), 0.0)
    error, base = (read.read - read.exact) * weight, read.exact * weight
    error = error - base * (error * base).sum() / base.square().sum().clamp_min(1e-300)
    total = float(error.square().sum())
    most, share = 1.0, 0.0
    for dim in (-1, -2):
        size = base.square().sum(dim).clamp_min(1e-300)
        factor = (error * base).sum(dim).square() / size
        share = max(share, float(factor.sum()) / (total or 1.0))
        weighed = (error * base).square().sum(dim) / size
        lines = (weight > 0).sum(dim) >= MANY
        if total > 0 and bool(lines.any()):
            most = max(most, float(factor[lines].mean() / weighed[lines].mean().clamp_min(1e-300)))
    return most, share


def _sigma(read: ReadScores, dtype: torch.dtype) -> Tensor:
    """What rounding makes: of dS and P, and of δ through O; below normal numbers it is absolute."""
    delta = read.weights * read.delta_noise
    rounded = spread(dtype) * (2 * read.exact.square() + delta.square()).sqrt()
    return torch.where(rounded > 0, rounded + torch.finfo(dtype).smallest_normal * spread(dtype), 0)


def _held(read: ReadScores, dtype: torch.dtype) -> Unlike:
    how = unlike(read.read, read.exact, _sigma(read, dtype), dtype)
    hidden = (read.weights == 0) & read.read.isfinite()  # where rounding makes no error at all
    more, size = (float(x.square().sum()) for x in (read.read[hidden], read.exact))
    if how.right and more > SLIGHT**2 * size:
        return Unlike("is not 0 for pairs that are hidden", "hidden", math.sqrt(more / size))
    return how


def _part(read: ReadScores, how: Unlike, dtype: torch.dtype) -> Said:
    """Which part of dS = P ∘ (dP − δ) is wrong."""
    if how.kind == "hidden":
        return Said(f"dS {how.text}, in dQ and dK alike", "backward-mask")
    if pairs := _of_pairs(read):
        return Said(f"dS {pairs[0]}, in dQ and dK alike", pairs[1])
    if (whole := _without_weights(read)) is not None:
        return whole
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
        (p_dp, every, "dP is {:.4g} × what it should be", "grad-scale"),
        (p, (-1,), "δ of each row is off", "delta"),
    ):
        rest, factor = left(base, dims)
        # one factor on δ is an error of every row, and not the other way round
        if rest < (1 - FITTED) * total and (cause != "no-delta" or rest < 2 * rows):
            sign = -1.0 if cause == "no-delta" else 1.0
            size = 1 + sign * float(factor.mean()) if len(dims) == 4 else 0.0
            much = factor.square().mean() / read.delta_noise.square().mean().clamp_min(1e-300)
            if cause == "delta" and float(much) > COARSE**2:  # no format is so coarse
                told, cause = "δ of each row is another number", "no-delta"
            where = how.text.partition(" in ")[2] if how.kind in ("head", "rows", "tail") else ""
            return Said(f"dS is wrong in dQ and dK: {told.format(size)}" + f" in {where}" * bool(
                where), cause)  # fmt: skip
    told = f"dS {how.text}, in dQ and dK alike"
    if (share := _at_largest(read, dtype)) > PILED:
        told = f"{told}, {100 * share:.0f} % of it at the largest score of each row"
        return Said(told, "max-gradient")
    if how.kind == "tail":
        return Said(told, "grad-tail")
    # dS errs with itself where it, or P, is rounded; with P dP where dP is
    fine = how.kind == "noise" and how.size < OTHER  # no format is so coarse
    p_dp = read.weights * read.grad_weights
    if fine and _likelier(read, p_dp):
        if float((read.read - read.exact).norm()) > ROUGH * float(p_dp.norm()):
            return Said(f"{told}, as much as dP is, by no rounding", "no-delta")
        return Said(f"{told}, as much as dP is off", "delta")
    return Said(told, "grad-scores", how.kind == "bits")


def _without_weights(read: ReadScores) -> Said | None:
    """Whether dS is dP, or dP − δ: what is made of the softmax is left out."""
    seen = read.weights > 0
    for base, told, cause in (
        (read.grad_weights, "dP: P and δ are left out", "no-delta"),
        (read.grad_weights - read.delta, "dP − δ: P is left out", "backward-weights"),
    ):
        a, b = read.read[seen], base[seen]
        if float(a.dot(b)) > ITSELF * float(a.norm() * b.norm()) > 0:
            return Said(f"dS is {told}, in dQ and dK alike", cause)
    return None


def _at_largest(read: ReadScores, dtype: torch.dtype) -> float:
    """The share of the squared errors, in units of rounding's, at the largest weight of each row,
    where these are out of all proportion to the others.
    """
    sigma = _sigma(read, dtype)
    error = torch.where(sigma > 0, (read.read - read.exact) / sigma.clamp_min(1e-300), 0.0)
    top, other = error[read.largest].square(), error[~read.largest].square()
    apart = top.numel() > 0 and float(top.mean()) > APART**2 * float(other.mean())
    return float(top.sum() / error.square().sum()) if apart else 0.0


def _likelier(read: ReadScores, base: Tensor) -> bool:
    """Whether errors go with `base` rather than with dS itself: Gaussian likelihoods."""
    error = (read.read - read.exact).flatten()

    def deviance(scale: Tensor) -> float:
        s = scale.abs().flatten()
        some = (s > 1e-3 * s.max()) & (read.exact.abs().flatten() > 0)
        z = (error[some] / s[some]).square()
        return float(z.mean().log() + 2 * s[some].log().mean())

    return deviance(base) < deviance(read.exact) - 0.05
