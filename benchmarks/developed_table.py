"""Faults that `halfulp reconstruct` was developed on: a table of every step of attention and every
kind of difference, in an order drawn once; the first sixty are what is reported. No unseen set.
"""

# ruff: noqa: ARG005 - steps have the signatures of the kernel that they are put into

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.second import Dense, attention, e4m3
from tests.audit.zoo_kernel import keep_bits
from torch import Tensor

Change = Callable[[Tensor], Tensor]


def noise(x: Tensor) -> Tensor:
    g = torch.Generator().manual_seed(sum(x.shape))
    return x * (1 + 2.0**-6 * torch.randn(x.shape, generator=g))


def fixed(x: Tensor) -> Tensor:
    step = x.abs().amax().clamp_min(1e-30) / 100
    return (x / step).round() * step


def last_rows(change: Change) -> Change:
    """The last of every 64 rows changed."""
    return lambda x: torch.where(
        (torch.arange(x.shape[2]) % 64 == 63)[:, None], change(x), x
    )  # fmt: skip


def first_head(change: Change) -> Change:
    return lambda x: torch.cat([change(x[:, :1]), x[:, 1:]], 1)


def tail(x: Tensor) -> Tensor:
    n = x.shape[2]
    return torch.where((torch.arange(n) < n // 16 * 16)[:, None], x, x * 0.5)


KINDS: dict[str, Change] = {
    "bits5": lambda x: keep_bits(x, 5),
    "fixed": fixed,
    "e4m3": e4m3,
    "noise": noise,
    "factor": lambda x: x * 1.01,
    "rows": last_rows(lambda x: x * 0.9),
    "prev": last_rows(lambda x: x.roll(1, 2)),
    "head": first_head(lambda x: x * 1.03),
    "heads": first_head(lambda x: keep_bits(x, 4)),
    "tail": tail,
    "cols": lambda x: torch.where(torch.arange(x.shape[3]) // 32 % 2 == 1, x * 0.97, x),
    "square": lambda x: x + 0.01 * x * x.abs() / x.abs().amax().clamp_min(1e-30),
}


def _operand(place: int) -> Callable[[Change], dict[str, object]]:
    return lambda f: {
        "operands": lambda self, *x: tuple(f(t) if i == place else t for i, t in enumerate(x))
    }


_SUMS = {"grad-stored", "grad-accumulator", "grad-scale", "grad-tail"}
# by step: the kernel's methods with a change put in, and the causes that are right for it
STEPS: dict[str, tuple[Callable[[Change], dict[str, object]], set[str]]] = {
    "q": (_operand(0), {"operand", "scores"}),
    "k": (_operand(1), {"operand", "scores"}),
    "v": (_operand(2), {"operand"}),
    "s": (lambda f: {"product": lambda self, q, k, a: f(q @ k.mT * a)}, {"scores"}),
    "sf": (lambda f: {"scores": lambda self, q, k, at: f(Dense.scores(self, q, k, at)),
                      "scores_again": Dense.scores}, {"scores", "row-max", "exponential"}),
    "sb": (lambda f: {"scores_again": lambda self, q, k, at: f(self.scores(q, k, at))},
           {"backward-scores"}),
    "exp": (lambda f: {"exp": lambda self, x: f(torch.exp(x))}, {"exponential", "weights"}),
    "w": (lambda f: {"weights": lambda self, p, low: low(f(p))},
          {"weights", "weights-disagree", "rescale"}),
    "l": (lambda f: {"row_sum": lambda self, p: f(p.sum(-1, keepdim=True))},
          {"row-sum", "unnormalized", "weights-disagree"}),
    "acc": (lambda f: {"sum_values": lambda self, p, v, low: f(low(p) @ v)},
            {"accumulator", "unnormalized"}),
    "o": (lambda f: {"out": lambda self, o, low: low(f(o))}, {"out"}),
    "lse": (lambda f: {"lse": lambda self, m, l, at: f(m + l.log())}, {"lse", "lse-other"}),
    "delta": (lambda f: {"delta": lambda self, do, o: f((do * o).sum(-1, keepdim=True))},
              {"delta", "no-delta"}),
    "do": (lambda f: {"grad_out": lambda self, do: f(do)}, {"operand", "grad-scores"}),
    "dp": (lambda f: {"grad_weights": lambda self, do, v: f(do @ v.mT)},
           {"delta", "grad-scores"}),
    "diff": (lambda f: {"grad_scores": lambda self, p, dp, d, s, low: low(p * f(dp - d) * s)},
             {"delta", "grad-scores", "no-delta"}),
    "ds": (lambda f: {"grad_scores": lambda self, p, dp, d, s, low: low(f(p * (dp - d) * s))},
           {"grad-scores"}),
    "pds": (lambda f: {"grad_scores": lambda self, p, dp, d, s, low: low(f(p) * (dp - d) * s)},
            {"grad-scores", "backward-scores", "probabilities"}),
    "pdv": (lambda f: {"grad_value": lambda self, p, do, low: low(f(p)).mT @ do},
            {"probabilities"}),
    "kdq": (lambda f: {"grad_query": lambda self, ds, k, a: ds @ f(k) * a}, {"operand", *_SUMS}),
    "qdk": (lambda f: {"grad_key": lambda self, ds, q, a: ds.mT @ f(q) * a}, {"operand", *_SUMS}),
    "dq": (lambda f: {"grad_query": lambda self, ds, k, a: f(ds @ k * a)}, _SUMS),
    "dk": (lambda f: {"grad_key": lambda self, ds, q, a: f(ds.mT @ q * a)}, _SUMS),
    "dv": (lambda f: {"grad_value": lambda self, p, do, low: f(low(p).mT @ do)}, _SUMS),
}  # fmt: skip
PLACES = {
    "rows": {"query-tail", "key-tail", "grad-tail", "other-data", "ragged"},
    "prev": {"query-tail", "key-tail", "grad-tail", "other-data", "layout"},
    "head": {"other-data", "scale"},
    "heads": {"other-data"},
    "tail": {"query-tail", "key-tail", "grad-tail", "ragged"},
    "cols": {"ragged", "key-tail", "layout"},
    "factor": {"scale", "unnormalized", "grad-scale", "exponential"},
}
_NONE = {
    ("l", "cols"), ("lse", "cols"), ("delta", "cols"), ("lse", "e4m3"), ("l", "e4m3"),
    ("delta", "e4m3"), ("s", "tail"), ("w", "factor"), ("exp", "factor"), ("acc", "e4m3"),
    ("v", "factor"), ("o", "e4m3"), ("sb", "tail"), ("dq", "e4m3"),
}  # fmt: skip
"""What is no fault, or not one of that step alone."""


def _visible(change: Change) -> Change:
    """Of scores, those that are not hidden."""

    def changed(x: Tensor) -> Tensor:
        hidden = x.isinf()
        return torch.where(hidden, x, change(torch.where(hidden, 0.0, x)))

    return changed


def _fault(step: str, kind: str) -> Fault:
    put, right = STEPS[step]
    methods = put(_visible(KINDS[kind]))
    kernel = type(step + kind, (Dense,), methods)()
    return Fault(f"{step}_{kind}", frozenset(right | PLACES.get(kind, set())), attention(kernel))


_EVERY = [(step, kind) for step in STEPS for kind in KINDS if (step, kind) not in _NONE]
random.Random(7).shuffle(_EVERY)
FAULTS = [_fault(step, kind) for step, kind in _EVERY[:60]]
SOUND: list[Fault] = []
