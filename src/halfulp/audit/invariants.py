"""Relations that exact arithmetic guarantees between two calls of one kernel: what must agree, bit
for bit or to rounding.

Each relation calls the target on changed inputs and undoes the change. A difference as large as the
rounding of two independent calls is allowed and reported as "to rounding"; a larger one is a defect
whatever the golden value says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfulp.audit.figures import GRADIENTS
from halfulp.audit.inputs import Inputs
from halfulp.calls import Result

Run = Callable[[Inputs], Result | None]
TENSORS = ("out", *GRADIENTS)


@dataclass(frozen=True)
class Relation:
    """What one relation showed for one tensor."""

    invariant: str
    tensor: str
    difference: Tensor  # `[S]` norm per head of the difference of the two calls, over √2
    identical: float  # fraction of elements with the same bits
    confined: bool = True  # for NaN confinement: nothing outside the poisoned part changed


def _relation(invariant: str, first: Result, second: dict[str, Tensor | None]) -> list[Relation]:
    found = []
    for name, b in second.items():
        a = getattr(first, name)
        if a is None or b is None:
            continue
        a = a[:, :, : b.shape[2]]
        difference = (a.double() - b.double()).nan_to_num_(nan=torch.inf)
        norm = difference.flatten(2).square().sum(-1).sqrt().flatten() / 2**0.5
        found.append(Relation(invariant, name, norm, float((a == b).double().mean())))
    return found


def repeated_call(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """The same call twice: run-to-run determinism."""
    again = run(x)
    return (
        []
        if again is None
        else _relation("same call twice", base, {name: getattr(again, name) for name in TENSORS})
    )


def powers_of_two(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """V scaled by 4 and dO by 1/8 scale every result exactly."""
    other = run(replace(x, value=x.value * 4, grad_out=x.grad_out / 8))
    if other is None:
        return []
    factors = {"out": 0.25, "grad_query": 2.0, "grad_key": 2.0, "grad_value": 8.0}
    return _relation(
        "power-of-two scaling", base, {n: _times(getattr(other, n), f) for n, f in factors.items()}
    )


def batch_position(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Batches in reverse order, called with one batch fewer: a sequence's result does not depend on
    its neighbors.
    """
    keep = max(1, x.query.shape[0] - 1)

    def turned(t: Tensor) -> Tensor:
        return t[:keep].flip(0).contiguous()

    other = run(
        replace(
            x,
            query=turned(x.query),
            key=turned(x.key),
            value=turned(x.value),
            grad_out=turned(x.grad_out),
        )
    )
    if other is None:
        return []
    first = Result(
        base.out[:keep],
        None,
        *(
            None if t is None else t[:keep]
            for t in (base.grad_query, base.grad_key, base.grad_value)
        ),
    )
    return _relation(
        "batch position",
        first,
        {n: None if (t := getattr(other, n)) is None else t.flip(0) for n in TENSORS},
    )


def permuted_keys(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Keys and values in another order (not causal)."""
    n = x.key.shape[2]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(7)).to(x.key.device)
    other = run(replace(x, key=x.key[:, :, order], value=x.value[:, :, order]))
    if other is None:
        return []
    back = torch.argsort(order)
    undone = {
        n: None if (t := getattr(other, n)) is None else t[:, :, back]
        for n in ("grad_key", "grad_value")
    }
    return _relation(
        "permuted keys", base, {"out": other.out, "grad_query": other.grad_query, **undone}
    )


def duplicated_keys(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Every key and value twice (not causal): out and dQ as before, the two gradients of a key add
    up to the one before.
    """
    other = run(
        replace(x, key=torch.cat([x.key, x.key], 2), value=torch.cat([x.value, x.value], 2))
    )
    if other is None:
        return []
    n = x.key.shape[2]
    sums = {
        name: (
            None
            if (t := getattr(other, name)) is None
            else t[:, :, :n].double() + t[:, :, n:].double()
        )
        for name in ("grad_key", "grad_value")
    }
    return _relation(
        "duplicated keys", base, {"out": other.out, "grad_query": other.grad_query, **sums}
    )


def shifted_keys(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Keys plus a constant vector (along feature 0, which must be 0 before): out, dK and dV as
    before.
    """
    key = x.key.clone()
    key[..., 0] = 2.0
    other = run(replace(x, key=key))
    return (
        []
        if other is None
        else _relation(
            "key shift", base, {n: getattr(other, n) for n in ("out", "grad_key", "grad_value")}
        )
    )


def causal_prefix(run: Run, x: Inputs, _: Result) -> list[Relation]:
    """The first two thirds of a causal sequence alone, and the whole with no gradient from the
    tail, agree (also: padding at the end).
    """
    n = x.query.shape[2] * 2 // 3
    tail_silent = x.grad_out.clone()
    tail_silent[:, :, n:] = 0
    whole = run(replace(x, grad_out=tail_silent))
    cut = {
        name: getattr(x, name)[:, :, :n].contiguous()
        for name in ("query", "key", "value", "grad_out")
    }
    prefix = run(replace(x, **cut))
    if whole is None or prefix is None:
        return []
    return _relation(
        "causal prefix and padding", whole, {name: getattr(prefix, name) for name in TENSORS}
    )


def poison(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """NaN in one query row, and in one head's key and value: every other row and head is as
    before.
    """
    query, key, value = x.query.clone(), x.key.clone(), x.value.clone()
    row = x.query.shape[2] // 2
    query[0, 0, row] = torch.nan
    key[-1, -1, 0], value[-1, -1, 0] = torch.inf, torch.nan
    other = run(replace(x, query=query, key=key, value=value))
    if other is None:
        return []
    groups = x.query.shape[1] // x.key.shape[1]
    clean_query = torch.ones(x.query.shape[:3], dtype=torch.bool, device=x.query.device)
    clean_query[0, 0, row] = False
    clean_query[-1, -groups:] = False
    clean_key = torch.ones(x.key.shape[:3], dtype=torch.bool, device=x.key.device)
    clean_key[0, 0] = clean_key[-1, -1] = False
    found = []
    for name in TENSORS:
        a, b = getattr(base, name), getattr(other, name)
        if a is None or b is None:
            continue
        clean = clean_key if name in ("grad_key", "grad_value") else clean_query
        confined = bool(b[clean].isfinite().all())
        same = float((a[clean] == b[clean]).double().mean()) if clean.any() else 1.0
        found.append(
            Relation("NaN confined", name, torch.zeros(1, dtype=torch.float64), same, confined)
        )
    return found


def _times(x: Tensor | None, factor: float) -> Tensor | None:
    return None if x is None else x * factor


PLAIN = (
    repeated_call,
    powers_of_two,
    batch_position,
    permuted_keys,
    duplicated_keys,
    shifted_keys,
    poison,
)
CAUSAL = (causal_prefix,)
