"""Faults drawn from what can be combined: a step of the tiled kernel x a kind of difference x a
region in which it is wrong. `drawn(seed, count)` are as many as wanted; what is drawn by a new seed
was not developed on.
"""

# ruff: noqa: ARG005, D102 - steps have the signatures of the kernel that they are put into

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.fourth_kernel import Tiled, attention, bf16, e4m3, shifted
from torch import Tensor

Change = Callable[[Tensor], Tensor]


def noise(x: Tensor) -> Tensor:
    g = torch.Generator().manual_seed(sum(x.shape))
    return x * (1 + 2.0**-5 * torch.randn(x.shape, generator=g))


# rounding, or another function
KINDS: dict[str, tuple[Change, bool]] = {
    "bf16": (bf16, True),
    "4bits": (e4m3, True),
    "cut": (shifted, True),
    "noise": (noise, True),
    "factor": (lambda x: x * 1.04, False),
    "half": (lambda x: x * 0.5, False),
    "zero": (lambda x: x * 0.0, False),
    "stale": (lambda x: x.roll(1, -2), False),
}


def _where(mask: Callable[[Any, Tensor], Tensor | bool]) -> Callable[[Change], Any]:
    def wrap(change: Change) -> Any:
        def changed(self: Any, x: Tensor) -> Tensor:
            hidden = x.isinf()
            new = torch.where(hidden, x, change(torch.where(hidden, 0.0, x)))
            return torch.where(torch.as_tensor(mask(self, x)), new, x)

        return changed

    return wrap


def _heads(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])[:, None, None]


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2])[:, None]


REGIONS: dict[str, tuple[Any, set[str]]] = {
    "all": (_where(lambda self, x: True), set()),
    "all2": (_where(lambda self, x: True), set()),
    "head": (_where(lambda self, x: _heads(x) == 1), {"other-data", "key-heads"}),
    "later_keys": (_where(lambda self, x: self.c.start >= 64), {"rescale", "key-tail"}),
    "later_rows": (_where(lambda self, x: self.r.start >= 64), {"query-tail", "other-data"}),
    "ragged": (_where(lambda self, x: self.c.stop % 64 != 0), {"ragged", "key-tail", "padding"}),
    "diagonal": (_where(lambda self, x: self.at["causal"] and self.r.start == self.c.start),
                 {"causal-mask"}),
    "positive": (_where(lambda self, x: x > 0), set()),
    "large": (_where(lambda self, x: x.abs() > 0.5 * x.abs().amax((-1, -2), keepdim=True)), set()),
    "grouped": (_where(lambda self, x: self.at["groups"] > 1), {"key-heads"}),
    "some_rows": (_where(lambda self, x: _rows(x) % 4 == 3), {"query-tail", "other-data"}),
    "long": (_where(lambda self, x: self.at["n"] > 128), {"accumulator", "key-tail"}),
}  # fmt: skip
_BACK = {"key-tail": "grad-tail", "query-tail": "grad-tail", "causal-mask": "backward-mask",
         "key-heads": "group-sum", "accumulator": "grad-accumulator"}  # fmt: skip


class Drawn(Tiled):
    """Knows the tile that it works on."""

    at: Any
    r, c = slice(0, 64), slice(0, 64)

    def operands(self, q, k, v, at):
        self.at = at | {"n": k.shape[2]}
        return q, k, v

    def scores(self, q, k, rows, cols, at):
        self.r, self.c = rows, cols
        return super().scores(q, k, rows, cols, at)


def _low(x: Tensor, at: Any) -> Tensor:
    return at["low"](x)


T = Tiled
# the method with the change put in, causes of a rounding, causes of another function
STEPS: dict[str, tuple[Callable[[Any], dict[str, Any]], set[str], set[str]]] = {
    "q": (lambda f: {"product": lambda self, q, k, at: T.product(self, f(self, q), k, at)},
          {"operand", "scores", "prescaled"}, {"operand", "scale"}),
    "k": (lambda f: {"product": lambda self, q, k, at: T.product(self, q, f(self, k), at)},
          {"operand", "scores", "prescaled"}, {"operand", "scale"}),
    "s": (lambda f: {"product": lambda self, q, k, at: f(self, T.product(self, q, k, at))},
          {"scores", "products"}, {"scale", "scores"}),
    "shift": (lambda f: {"shift": lambda self, s, m: f(self, s - m)},
              {"row-max", "exponential", "scores"}, {"row-max", "exponential", "scale"}),
    "exp": (lambda f: {"exp2": lambda self, x: f(self, torch.exp2(x))},
            {"exponential", "weights"}, {"exponential", "weights", "rescale"}),
    "a": (lambda f: {"factor": lambda self, x: f(self, torch.exp2(x))},
          {"rescale", "accumulator", "row-sum"}, {"rescale"}),
    "p": (lambda f: {"weights": lambda self, p, at: at["low"](f(self, p))},
          {"weights", "weights-disagree", "weights-row-sum"},
          {"weights", "weights-disagree", "rescale", "unnormalized"}),
    "l": (lambda f: {"add_row": lambda self, l, a, p, at: f(self, T.add_row(self, l, a, p, at))},
          {"row-sum"}, {"row-sum", "unnormalized", "weights-disagree"}),
    "acc": (lambda f: {"add_values": lambda self, *x: f(self, T.add_values(self, *x))},
            {"accumulator"}, {"accumulator", "unnormalized", "rescale"}),
    "o": (lambda f: {"divide": lambda self, *x: _low(f(self, T.divide(self, *x)), x[2])},
          {"out"}, {"out", "unnormalized"}),
    "lse": (lambda f: {"lse": lambda self, *x: f(self, T.lse(self, *x))}, {"lse"},
            {"lse", "lse-other"}),
    "delta": (lambda f: {"delta": lambda self, *x: f(self, T.delta(self, *x))},
              {"delta"}, {"delta", "no-delta"}),
    "sb": (lambda f: {"scores_again": lambda self, *x: f(self, self.scores(*x))},
           {"backward-scores"}, {"backward-scores"}),
    "pb": (lambda f: {"weights_again": lambda self, *x: f(self, T.weights_again(self, *x))},
           {"backward-weights", "probabilities", "backward-scores"},
           {"backward-weights", "probabilities", "backward-scores", "lse"}),
    "dp": (lambda f: {"grad_weights": lambda self, *x: f(self, T.grad_weights(self, *x))},
           {"delta", "grad-scores"}, {"grad-scores", "delta", "no-delta"}),
    "ds": (lambda f: {"grad_scores": lambda self, *x: f(self, T.grad_scores(self, *x))},
           {"grad-scores"}, {"grad-scores", "grad-scale"}),
    "pdv": (lambda f: {"value_part": lambda self, p, do, at: T.value_part(self, f(self, p), do,
                                                                        at)},
            {"probabilities"}, {"probabilities"}),
    "dsk": (lambda f: {"key_part": lambda self, ds, q, at: T.key_part(self, ds, f(self, q), at)},
            {"operand", "grad-accumulator"}, {"operand", "grad-scale", "grad-scores"}),
    "dsq": (lambda f: {"query_part": lambda self, ds, k, at: T.query_part(self, ds, f(self, k),
                                                                        at)},
            {"operand", "grad-accumulator"}, {"operand", "grad-scale", "grad-scores"}),
    "dq": (lambda f: {"add_query": lambda self, dq, part, at: f(self, dq + part)},
           {"grad-accumulator", "grad-stored"}, {"grad-accumulator", "grad-scale"}),
    "dk": (lambda f: {"add_key": lambda self, dk, part, at: f(self, dk + part)},
           {"grad-accumulator", "grad-stored"}, {"grad-accumulator", "grad-scale"}),
}  # fmt: skip
_NEVER = {  # no harm, no fault of a rounding, or not of a tile
    ("p", "bf16"), ("o", "bf16"), ("ds", "bf16"), ("pdv", "bf16"), ("q", "bf16"), ("k", "bf16"),
    ("dsk", "bf16"), ("dsq", "bf16"), ("a", "noise"), ("lse", "4bits"), ("delta", "zero"),
    ("p", "cut"), ("q", "cut"), ("k", "cut"), ("dsk", "cut"), ("dsq", "cut"),
}  # fmt: skip


def fault_of(step: str, kind: str, region: str, style: type = Tiled) -> Fault:
    put, rounding, function = STEPS[step]
    change, rounds = KINDS[kind]
    wrap, places = REGIONS[region]
    if step in ("delta", "sb", "pb", "dp", "ds", "pdv", "dsk", "dsq", "dq", "dk"):
        places = {_BACK.get(p, p) for p in places}
    right = (rounding if rounds else function) | places
    if kind == "stale":
        right |= {"other-data", "layout"}
    kernel = type("Kernel", (Drawn,) if style is Tiled else (Drawn, style), put(wrap(change)))()
    return Fault(f"{step}_{kind}_{region}", frozenset(right), attention(kernel))


def drawn(seed: int, count: int) -> list[Fault]:
    """As many faults, without repetition."""
    every = [(s, k, r) for s in STEPS for k in KINDS for r in REGIONS if (s, k) not in _NEVER]
    return [fault_of(*x) for x in random.Random(seed).sample(every, count)]


FAULTS = drawn(1, 60)
SOUND: list[Fault] = []
