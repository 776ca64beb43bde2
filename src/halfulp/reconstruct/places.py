"""Where an error sits that no candidate explains: heads, rows, features, the factor of a row; and
on which trials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfulp.reconstruct.emulating import GRADIENTS, Emulator, Model
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import Trial
from halfulp.reconstruct.suggested import ranges
from halfulp.reconstruct.weights_read import (
    NOISE,
    Read,
    backward_weights,
    compared,
    forward_weights,
    one_key,
)

CONCENTRATED = 0.9  # share of the unexplained squared error that a place must hold
USUAL_HEADS = 0.6  # of two heads one always has a little more than half
USUAL = 0.5  # share of the model's own error that it may hold
ALIKE = 0.98  # the cosine of a feature with the exact one that it is
READ = 0.5  # of an error that weights as they were read may leave
LINEAR = 0.8  # share of it that one free number a row must explain
_SHORT = {"out": "O", "lse": "lse", "grad_query": "dQ", "grad_key": "dK", "grad_value": "dV"}
_ONLY: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset({"window"}), "calls with a window alone", "window"),
    (frozenset({"softcap"}), "calls with a softcap alone", "softcap"),
    (frozenset({"sinks"}), "calls with sinks alone", "sinks"),
    (frozenset({"masked", "biased"}), "calls with a mask alone", "mask"),
    (frozenset({"grouped", "decode"}), "grouped heads or several sequences alone", "key-heads"),
    (frozenset({"decode"}), "few queries alone", "query-tail"),
    (frozenset({"cross", "decode"}), "calls with other lengths of queries and keys alone",
     "ragged"),
    (frozenset({"causal", "ragged_causal", "cross", "window", "softcap", "sinks"}),
     "causal calls alone", "causal-mask"),
    (frozenset({"ragged", "ragged_causal", "cross", "grouped", "masked", "biased", "scaled",
                "decode", "window", "wide", "softcap", "sinks"}),
     "sizes off the block alone", "ragged"),
    (frozenset({"scaled"}), "a scale of the caller's alone", "scale"),
    (frozenset({"rising", "sharp"}), "rows whose maximum grows, or lies far from 0", "rescale"),
    (frozenset({"small"}), "small values alone", "operand"),
    (frozenset({"long", "decode"}), "long calls alone", "accumulator"),
)  # fmt: skip


_IN_GRADIENTS = {"key-heads": "group-sum", "causal-mask": "backward-mask"}  # where O is right
_OPTIONS = ("window", "softcap", "sinks", "mask")  # what only they show is a matter of theirs


@dataclass(frozen=True)
class Place:
    """Where the unexplained error of one result sits."""

    tensor: str
    trial: str  # the one it was looked at on
    text: str
    cause: str  # a key of CAUSES
    left: float  # share of the squared error that is not explained there
    times: float  # the kernel's error, in units of the model's
    trials_alone: bool = False  # its cause is told by nothing but the trials that show it
    was_read: bool = False  # its cause is told by the weights as they were read

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "tensor": _SHORT[self.tensor],
            "trial": self.trial,
            "text": self.text,
            "key": self.cause,
            "left": self.left,
            "times": self.times,
        }


def unexplained(emulator: Emulator, model: Model, share: float) -> list[Place]:
    """One place for each result that keeps more than `share` of its error on some trial."""
    found: list[Place] = []
    every = emulator.fits(model, frozenset(_SHORT))
    for tensor in _SHORT:
        bad = {t: fit for (t, name), fit in every.items() if name == tensor and fit.left > share}
        if not bad:
            continue
        # the long one can neither be read nor be looked through
        worst = max(bad, key=lambda t: (t != "long", _times(bad[t])))
        left, times = bad[worst].left, _times(bad[worst])
        gross = frozenset(t for t in bad if _times(bad[t]) > min(3.0, 0.5 * times))
        text, cause, alone, read = _told(emulator, model, tensor, worst, gross)
        if tensor in GRADIENTS and not any(p.tensor == "out" for p in found):
            cause = _IN_GRADIENTS.get(cause, cause)
        found.append(Place(tensor, worst, text, cause, left, times, alone, read))
    return _by_what_is_explained(found, {name for _, name in every})


def _by_what_is_explained(places: list[Place], offered: set[str]) -> list[Place]:
    """What results that are explained say about those that are not, where nothing else does."""
    bad = {p.tensor for p in places}
    if "out" in bad or not bad & set(GRADIENTS) or not set(GRADIENTS) <= offered:
        return places
    gradients = bad & set(GRADIENTS)
    if gradients == {"grad_value"}:
        told = "O, dQ and dK are explained: P as it enters dV", "probabilities"
    elif gradients == {"grad_query", "grad_key"}:
        told = "O and dV are explained, so is P: dS or δ", "grad-scores"
    elif len(gradients) == 3:
        told = "O is explained: P is recomputed otherwise in the backward pass", "backward-scores"
    else:
        names = " and ".join(_SHORT[g] for g in GRADIENTS if g in gradients)
        told = f"the others are explained: the sum that {names} alone is", "grad-accumulator"
    return [
        replace(p, text=f"{told[0]}; {p.text}", cause=told[1])
        if p.tensor in gradients
        and (
            p.cause == "gradient-unexplained"
            # an input would show in the others too
            or (p.trials_alone and p.cause == "operand" and len(gradients) == 1)
        )
        else p
        for p in places
    ]


def _times(fit: object) -> float:
    energy, other = float(fit.energy.sum()), float(fit.other.sum())  # type: ignore[attr-defined]
    return math.sqrt(energy / other) if other else math.inf


def _told(
    emulator: Emulator, model: Model, tensor: str, worst: str, bad: frozenset[str]
) -> tuple[str, str, bool, bool]:
    trial, observed = emulator.trials[worst], emulator.observed[worst, tensor]
    backward = model.way(tensor) if tensor in GRADIENTS else None
    candidate = emulator.tensors(trial, model.forward, backward).get(tensor)
    parts: list[str] = []
    cause = "gradient-unexplained" if tensor in GRADIENTS else "out-unexplained"
    seen = {t for t, name in emulator.observed if name == tensor}
    bad = frozenset(trial for trial in bad if not trial.startswith("probe "))
    only = next(((text, key) for trials, text, key in _ONLY
                 if bad and bad <= trials and not seen <= trials), None)  # fmt: skip
    if only is not None:
        parts.append(only[0])
        cause = only[1]
    read = _read(emulator, trial, tensor)
    if read is not None:
        parts.append(read.text)
        option = only is not None and only[1] in _OPTIONS
        if read.cause and read.cause != "accumulator":
            return "; ".join(parts), cause if option else read.cause, False, True
        cause = cause if option else read.cause or cause
    if candidate is None or candidate.shape[:3] != observed.value.shape[:3]:
        return "; ".join(parts) or "everywhere", cause, only is not None, False
    rest = observed.value - _like(candidate)
    rest = torch.where(observed.usable, rest, 0.0)
    expected = torch.where(observed.usable, _like(candidate) - observed.exact, 0.0)
    for text, key in (
        ("", "") if worst == "small" else _silent(observed),
        _exchanged(observed),
        _few_values(observed, tensor),
        _head(rest, expected),
        _rows(rest, expected, tensor),
        _factor(emulator, tensor, worst, rest),
    ):
        if text:
            parts.append(text)
            # what masks and heads alone show is not a matter of rows
            if only is None or only[1] == "ragged" or key in ("unwritten", "elements"):
                cause = key or cause
    alone = only is not None and cause == only[1]
    return "; ".join(parts) or "spread over all rows and heads", cause, alone, False


def _read(emulator: Emulator, trial: Trial, tensor: str) -> Read | None:
    """What the weights themselves say, where they can be read and explain the result."""
    if tensor not in ("out", "grad_value"):
        return None
    observed = emulator.observed[trial.name, tensor]
    if tensor == "out":
        weights = forward_weights(emulator.run, trial)
        if weights is None:
            return None
        value = trial.call.value.double().repeat_interleave(trial.call.groups, 1)
        made = weights @ value
    else:
        weights = backward_weights(emulator.run, trial)
        if weights is None:
            return None
        made = weights.mT @ trial.grad_out.double()
    read = compared(trial, weights, backward=tensor == "grad_value")
    rest = torch.where(observed.usable, observed.value - made, 0.0)
    if not read.cause:
        return _after_weights(emulator, trial, tensor)
    return read if float(rest.square().sum()) < READ * observed.total else None


def _like(candidate: Tensor) -> Tensor:
    found = candidate.double()
    found = found.unsqueeze(-1) if found.ndim == 3 else found
    return torch.where(found.isfinite(), found, 0.0)


def _after_weights(emulator: Emulator, trial: Trial, tensor: str) -> Read:
    """What is wrong where the weights are right: one key alone tells values and store from sums."""
    noise = NOISE[trial.call.query.dtype]
    if emulator.observed[trial.name, tensor].relative < 2 * noise:
        return Read(f"the weights are right to {100 * noise:.1g} %", "")
    told = "the weights are right: what differs is a sum over them, or the store"
    alone = one_key(emulator.run, trial) if tensor == "out" else None
    if alone is None:
        return Read(told, "")
    if alone:
        return Read(f"{told}; of one key alone O is its value, so it is the sum", "accumulator")
    return Read(f"{told}; of one key alone O is not its value", "")


def _few_values(observed: Observed, tensor: str) -> tuple[str, str]:
    """A result with fewer distinct numbers in a row than rounding to its format leaves: one that
    went through a coarser format with a scale of its own.
    """
    width = observed.value.shape[-1]
    if width < 16:
        return "", ""

    def distinct(x: Tensor) -> float:
        rows = x.abs().flatten(0, -2)[:64].sort(-1).values
        return float((rows.diff(dim=-1) > 0).double().mean())

    low = torch.bfloat16 if float((observed.value - observed.value.bfloat16()).abs().max()) == 0 \
        else torch.float16  # fmt: skip
    if distinct(observed.value) > 0.8 * distinct(observed.exact.to(low).double()):
        return "", ""
    cause = "grad-stored" if tensor in GRADIENTS else "out"
    return "its rows have few distinct numbers: a coarser format with a scale", cause


def _exchanged(observed: Observed) -> tuple[str, str]:
    """Features, or rows, that are the exact result's in another order."""
    for dim, name in ((-1, "features"), (-2, "rows")):
        got, exact = (x.transpose(dim, -1).flatten(0, -2) for x in (observed.value, observed.exact))
        if got.shape[-1] > got.shape[0]:
            continue
        got, exact = (x / x.norm(dim=0).clamp_min(1e-300) for x in (got, exact))
        alike = exact.mT @ got
        best, at = alike.max(0)
        moved = ((best > ALIKE) & (alike.diagonal() < ALIKE)).nonzero().flatten()
        if len(moved) > 1 and not bool((at[moved] == moved).any()):
            return (
                f"{name} {ranges(moved)} are those of {ranges(at[moved].sort().values)}",
                "layout",
            )
    return "", ""


def _silent(observed: Observed) -> tuple[str, str]:
    """Rows that are 0 where exact ones are not."""
    zero = (observed.value == 0).all(-1) & (observed.exact != 0).any(-1)
    count = int(zero.sum())
    if count == 0:
        return "", ""
    heads = zero.all(-1)
    if bool(heads.any()) and int(heads.sum()) * zero.shape[-1] == count:
        return f"{int(heads.sum())} of {heads.numel()} heads are 0", "unwritten"
    return f"{count} of {zero.numel()} rows are 0", "unwritten"


def _head(rest: Tensor, expected: Tensor) -> tuple[str, str]:
    """Few heads that hold it, and no more than half of what the model errs."""
    energy = rest.square().sum((-1, -2))
    total, count = float(energy.sum()), energy.numel()
    if count < 2 or total == 0:
        return "", ""
    order = energy.flatten().argsort(descending=True)
    usual = expected.square().sum((-1, -2)).flatten()
    for n in range(1, count // 2 + 1):
        if float(energy.flatten()[order[:n]].sum()) >= CONCENTRATED * total:
            if float(usual[order[:n]].sum()) > USUAL_HEADS * float(usual.sum()):
                break
            places = (
                ", ".join(
                    f"({int(i) // energy.shape[1]}, {int(i) % energy.shape[1]})" for i in order[:3]
                )
                if n >= 3
                else ", ".join(
                    f"({int(i) // energy.shape[1]}, {int(i) % energy.shape[1]})" for i in order[:n]
                )
            )
            return f"head{'s' * (n > 1)} (sequence, head) {places}" + " and others" * (
                n > 3), "other-data"  # fmt: skip
    return "", ""


def _rows(rest: Tensor, expected: Tensor, tensor: str) -> tuple[str, str]:
    """A stretch of rows, the edges of blocks, or a few elements that hold it, and no more than half
    of what the model errs.
    """
    energy = rest.square().sum(-1).sum((0, 1))
    total, n = float(energy.sum()), len(energy)
    if total == 0:
        return "", ""
    elements = rest.square().flatten()
    top = elements.topk(min(8, len(elements)))
    if float(top.values.sum()) >= CONCENTRATED * total and len(elements) > 100:
        return "a few elements", "elements"
    whose = "keys" if tensor in ("grad_key", "grad_value") else "queries"
    tail_cause = "key-tail" if whose == "keys" else "query-tail"
    if tensor in GRADIENTS:
        tail_cause = "grad-tail"
    position = torch.arange(n)
    candidates: list[tuple[Tensor, str, str]] = []
    for width in (16, 32, 64, 128):
        start = (n - 1) // width * width
        if start > 0 and (n - start) * 2 <= n:
            candidates.append((position >= start, f"the {whose} from {start} on, of {n}",
                               tail_cause))  # fmt: skip
    for count in (1, 8, 16, 32, 64):
        if count * 2 <= n:
            candidates.append((position < count, f"the first {count} {whose}", tail_cause))
    for width in (16, 32, 64, 128):
        for edge, text in ((width - 1, "last"), (0, "first")):
            if n > width:
                candidates.append((position % width == edge, f"the {text} of every {width} {whose}",
                                   "causal-mask"))  # fmt: skip
    usual = expected.square().sum(-1).sum((0, 1))
    for here, text, cause in candidates:
        if _holds(energy, usual, here):
            return text, cause
    columns, usual = (x.square().sum((0, 1, 2)) for x in (rest, expected))
    d = len(columns)
    feature = torch.arange(d)
    for width in (8, 16, 32):
        for here, text in ((feature >= d - width, "last"), (feature < width, "first")):
            if d > width and _holds(columns, usual, here):
                return f"the {text} {width} of {d} features", "ragged"
    return "", ""


def _holds(energy: Tensor, usual: Tensor, here: Tensor) -> bool:
    """Whether a place holds nearly all of an error, and not of what is usual as well."""
    most = float(energy[here].sum()) >= CONCENTRATED * float(energy.sum())
    return most and float(usual[here].sum()) <= USUAL * float(usual.sum())


def _factor(emulator: Emulator, tensor: str, name: str, rest: Tensor) -> tuple[str, str]:
    """One free number for every query row: what of the rest is a wrong row sum, P or δ.

    O errs along itself where l is off; dV = Pᵀ dO, dQ = dS K and dK = dSᵀ Q are linear in a factor
    on each row of P, and in an error of each row's δ.
    """
    total = float(rest.square().sum())
    if total == 0:
        return "", ""
    observed = emulator.observed[name, "out"]
    if tensor == "out":
        exact = observed.exact
        along = (rest * exact).sum(-1).square() / exact.square().sum(-1).clamp_min(1e-300)
        if float(along.sum()) >= LINEAR * total:
            return "every row of O is off by a factor: its row sum", "row-sum"
        return "", ""
    if tensor not in GRADIENTS:
        return "", ""
    call, do = emulator.trials[name].call, emulator.trials[name].grad_out.double()
    if call.groups != 1:
        return "", ""
    p, ds = _exact_scores(emulator, name)
    shares: dict[str, float] = {}
    for b in range(p.shape[0]):
        for h in range(p.shape[1]):
            for kind, share in _explained(
                tensor,
                p[b, h],
                ds[b, h],
                call.query[b, h].double(),
                call.key[b, h].double(),
                do[b, h],
                rest[b, h],
            ):
                shares[kind] = shares.get(kind, 0.0) + share  # fmt: skip
    for kind in ("delta", "weights"):
        if shares.get(kind, 0.0) >= LINEAR * total:
            return {
                "delta": ("an error of each row's δ makes it", "delta"),
                "weights": ("a factor on each row of P makes it: lse, or a row sum", "lse"),
            }[kind]
    return "", ""


def _exact_scores(emulator: Emulator, name: str) -> tuple[Tensor, Tensor]:
    """P and dS, float64 `[B, H, N, N_k]`."""
    trial = emulator.trials[name]
    p = weights_of(trial.call, scores_of(trial.call))
    dp = trial.grad_out.double() @ trial.call.value.double().mT
    return p, p * (dp - (dp * p).sum(-1, keepdim=True))


def _explained(
    tensor: str, p: Tensor, ds: Tensor, q: Tensor, k: Tensor, do: Tensor, rest: Tensor
) -> list[tuple[str, float]]:
    """How much of the rest of one head each kind of factor explains, squared."""
    if tensor == "grad_query":  # every row by itself
        along = {"delta": p @ k, "weights": ds @ k}
        return [
            (
                kind,
                float(((rest * u).sum(-1).square() / u.square().sum(-1).clamp_min(1e-300)).sum()),
            )
            for kind, u in along.items()
        ]
    pairs = {"delta": (p, q), "weights": (ds, q)} if tensor == "grad_key" else {"weights": (p, do)}
    found = []
    for kind, (left, right) in pairs.items():
        # rest [N_k, D] = Σ_i x_i left[i] ⊗ right[i]: normal equations in x
        gram = (left @ left.mT) * (right @ right.mT)
        b = ((left @ rest) * right).sum(-1)
        x = torch.linalg.lstsq(gram, b[:, None]).solution[:, 0]
        found.append((kind, float(b @ x)))
    return found
