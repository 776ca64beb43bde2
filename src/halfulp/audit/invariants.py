"""Relations that exact arithmetic guarantees between two calls of one kernel: what must agree, bit
for bit or to rounding.

Each relation calls the target on changed inputs and undoes the change. A difference as large as the
rounding of two independent calls is allowed and reported as "to rounding"; a larger one is a defect
whatever the golden value says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfulp.audit.figures import GRADIENTS
from halfulp.audit.inputs import Inputs
from halfulp.calls import Result, Sees
from halfulp.runs.results import Plain
from halfulp.targets.manner import FILLED

Run = Callable[[Inputs], Result | None]
TENSORS = ("out", *GRADIENTS)
OF_QUERIES, OF_KEYS = TENSORS[:2], TENSORS[2:]
OPERANDS = ("query", "key", "value", "grad_out")
_ALL = slice(None)


SHARED = "same random numbers"
"""The relation whose calls' errors are added up."""


@dataclass(frozen=True)
class Relation(Plain):
    """What one relation showed for one tensor."""

    APART = ("difference",)

    invariant: str
    tensor: str
    difference: Tensor  # `[S]` norm per head of the difference of the two calls, over √2
    identical: float  # fraction of elements with the same bits
    confined: bool = True  # for NaN confinement: nothing outside the poisoned part changed
    times_floor: float | None = None  # the difference over the floor's error, judged


def _relation(
    invariant: str,
    first: Result,
    second: dict[str, Tensor],
    rows: slice | list[int] = _ALL,
) -> list[Relation]:
    """Of the tensors of two calls; of `rows` of the first alone, whose difference is taken as that
    of as many rows as there are.
    """
    found = []
    for name, b in second.items():
        a = getattr(first, name)
        if a is None:
            continue
        a = a[:, :, : b.shape[2]] if rows == _ALL else a[:, :, rows]
        difference, same = between(a, b)
        part = 1.0 if rows == _ALL else a.shape[2] / getattr(first, name).shape[2]
        # two independent calls differ by √2 of one rounding; some rows have their share of squares
        norm = difference.flatten(2).square().sum(-1).sqrt().flatten() / (2 * part) ** 0.5
        found.append(Relation(invariant, name, norm, float(same.double().mean())))
    return found


def between(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The difference of two results, in fp64, and where they are the same: no number is as far as
    can be from a number, and the same as none, which is judged where one call is.
    """
    same = (a == b) | (a.isnan() & b.isnan())
    return (a.double() - b.double()).nan_to_num_(nan=torch.inf).masked_fill_(same, 0.0), same


def _given(found: Result, names: Sequence[str] = TENSORS) -> dict[str, Tensor]:
    return {name: t for name in names if (t := getattr(found, name)) is not None}


def repeated_call(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """The same call twice: run-to-run determinism."""
    again = run(x)
    return [] if again is None else _relation("same call twice", base, _given(again))


def filled_memory(run: Run, x: Inputs, _: Result) -> list[Relation]:
    """Sequences that no tile divides, twice in memory that was full of NaN before: every element of
    the results is written, and no other is read.
    """
    n = max(1, x.query.shape[2] - 5)
    cut: dict[str, Any] = {name: getattr(x, name)[:, :, :n].contiguous() for name in OPERANDS}
    short = replace(x, **cut)
    filled = replace(short, manner=f"contiguous/contiguous/{FILLED}")
    runs = [found for y in (short, filled, filled) if (found := run(y)) is not None]
    shown = []
    for name in TENSORS:
        finite = [t.isfinite() for found in runs if (t := getattr(found, name)) is not None]
        if len(finite) == 3:
            # what is never a number says nothing of memory
            same = torch.stack(finite).all(0) | ~torch.stack(finite).any(0)
            none = torch.zeros(1, dtype=torch.float64)
            share = float((getattr(runs[0], name) == getattr(runs[2], name)).double().mean())
            shown.append(Relation("memory full of NaN", name, none, share, bool(same.all())))
    return shown


def lse_in_the_loss(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """With ± a power of two as lse's gradient, dQ and dK are more by what the kernel itself gives
    on values that are the keys: scale · dL ∘ (P K), and scale · Pᵀ (dL ∘ Q). dL makes about a
    quarter of dQ. Of a kernel that gives lse, whose gradient can be asked for.
    """
    if base.lse is None or base.grad_query is None:
        return []
    signs = torch.randint(2, base.lse.shape, generator=torch.Generator().manual_seed(11)) * 2.0 - 1
    signs = signs.to(x.query.device)
    # ∂lse/∂S is P, so lse's share of dQ is of P K, the kernel's own out on V = K, and with dO = ± Q
    # its dV there is that of dK: one call gives both, without a golden value
    of_keys = run(replace(x, value=x.key, grad_out=x.query * signs[..., None].to(x.query.dtype)))
    if of_keys is None or of_keys.grad_value is None:
        return []
    of_query, of_key = signs[..., None] * of_keys.out.double(), of_keys.grad_value.double()
    share = float(base.grad_query.double().norm() / (x.scale * of_query.norm()))
    if not 0 < share < math.inf:
        return []
    # so that ± dL is exact in every format
    size = 2.0 ** round(math.log2(share / 4))
    other = run(replace(x, grad_lse=signs * size))
    if other is None:
        return []
    undone = _given(other, ("out", "grad_value"))
    more = {"grad_query": of_query, "grad_key": of_key}
    for name, got in _given(other, tuple(more)).items():
        undone[name] = got.double() - x.scale * size * more[name]
    return _relation("lse in the loss", base, undone)


def powers_of_two(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """V scaled by 4 and dO by 1/8 scale every result exactly."""
    # different powers, so that a result that takes the wrong one of the two shows
    other = run(replace(x, value=x.value * 4, grad_out=x.grad_out / 8))
    if other is None:
        return []
    factors = {"out": 0.25, "grad_query": 2.0, "grad_key": 2.0, "grad_value": 8.0}
    undone = {name: t * factors[name] for name, t in _given(other).items()}
    return _relation("power-of-two scaling", base, undone)


def batch_position(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Batches in reverse order: a sequence's result does not depend on its place."""
    reversed_: dict[str, Any] = {name: getattr(x, name).flip(0) for name in OPERANDS}
    other = run(replace(x, **reversed_))
    if other is None:
        return []
    turned = {name: t.flip(0) for name, t in _given(other).items()}
    return _relation("batch position", base, turned)


def batch_composition(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Each sequence alone: a result does not depend on who else is in the batch."""
    parts = []
    for i in range(x.query.shape[0]):
        own: dict[str, Any] = {name: getattr(x, name)[i : i + 1] for name in OPERANDS}
        parts.append(run(replace(x, **own)))
    return _relation("batch composition", base, _joined(parts, 0))


def heads_apart(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Half of the heads in each of two calls, as tensor parallelism gives them to two ranks."""
    half, of_keys = x.query.shape[1] // 2, x.key.shape[1] // 2
    if not of_keys:
        return []
    whole = {"query": half, "grad_out": half, "key": of_keys, "value": of_keys}
    parts = []
    for i in range(2):
        own: dict[str, Any] = {n: getattr(x, n)[:, i * k : (i + 1) * k] for n, k in whole.items()}
        parts.append(run(replace(x, **own)))
    return _relation("heads over two ranks", base, _joined(parts, 1))


def query_chunks(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """The queries in two calls, each on all keys (not causal); what reaches a key adds up."""
    rows = x.query.shape[2] // 3
    if not rows:
        return []
    parts = [
        run(replace(x, query=x.query[:, :, part], grad_out=x.grad_out[:, :, part]))
        for part in (slice(None, rows), slice(rows, None))
    ]
    joined = _joined(parts, 2)
    joined |= {name: _halves(joined[name]) for name in OF_KEYS if name in joined}
    return _relation("queries in chunks", base, joined)


def split_keys(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """The keys in three calls, their results merged by lse (not causal), as split-KV does: of a
    kernel that gives lse.
    """
    n = x.key.shape[2]
    if base.lse is None or n < 8:
        return []
    parts = []
    # parts of different lengths, most of which end within a tile
    for start, end in ((0, n // 4), (n // 4, n // 2 + 3), (n // 2 + 3, n)):
        part = slice(start, end)
        found = run(replace(x, key=x.key[:, :, part], value=x.value[:, :, part]))
        if found is None or found.lse is None:
            return []
        parts.append(found)
    logs = torch.stack([part.lse.double() for part in parts if part.lse is not None])
    # e^lse of a part is its row sum, so parts are weighed by a softmax over their lse
    shares = torch.softmax(logs, 0).unsqueeze(-1)
    outs = torch.stack([part.out.double() for part in parts])
    return _relation("keys split, merged by lse", base, {"out": (shares * outs).sum(0)})


def split_count(run: Run, x: Inputs, _: Result) -> list[Relation]:
    """The keys in one part and in four, of a kernel that can be told how many."""
    one, four = (run(replace(x, num_splits=count)) for count in (1, 4))
    if one is None or four is None:
        return []
    return _relation("split count", one, _given(four))


def padded_keys(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Keys more that a mask hides (not causal): of a kernel that takes a mask."""
    # no tile's multiple, so that hidden keys share a tile with seen ones
    n, more = x.key.shape[2], 29
    # finite and far from the last key, so that whatever leaks through the mask shows
    key, value = (
        torch.cat([t, 2 * t[:, :, -1:].expand(-1, -1, more, -1)], 2) for t in (x.key, x.value)
    )
    mask = (torch.arange(n + more) < n).to(x.key.device).expand(x.query.shape[2], n + more)
    other = run(replace(x, key=key, value=value, sees=replace(x.sees, mask=mask)))
    if other is None:
        return []
    cut = {name: t[:, :, :n] for name, t in _given(other, OF_KEYS).items()}
    return _relation("padding behind a mask", base, _given(other) | cut)


def _joined(parts: list[Result | None], axis: int) -> dict[str, Tensor]:
    """The results of several calls as of one, but what one of them lacks."""
    every = [{} if part is None else _given(part) for part in parts]
    names = [name for name in TENSORS if all(name in found for found in every)]
    return {name: torch.cat([found[name] for found in every], axis) for name in names}


def _halves(x: Tensor) -> Tensor:
    """What two halves along the sequence add up to."""
    first, second = x.double().chunk(2, 2)
    return first + second


def permuted_keys(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Keys and values in another order (not causal)."""
    n = x.key.shape[2]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(7)).to(x.key.device)
    other = run(replace(x, key=x.key[:, :, order], value=x.value[:, :, order]))
    if other is None:
        return []
    back = torch.argsort(order)
    undone = {name: t[:, :, back] for name, t in _given(other, OF_KEYS).items()}
    return _relation("permuted keys", base, _given(other) | undone)


def duplicated_keys(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Every key and value twice (not causal): out and dQ as before, the two gradients of a key add
    up to the one before.
    """
    key, value = (torch.cat([t, t], 2) for t in (x.key, x.value))
    other = run(replace(x, key=key, value=value))
    if other is None:
        return []
    sums = {name: _halves(t) for name, t in _given(other, OF_KEYS).items()}
    return _relation("duplicated keys", base, _given(other) | sums)


def shifted_keys(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Keys plus a constant vector (along feature 0, which must be 0 before): out, dK and dV as
    before.
    """
    key = x.key.clone()
    # a power of two, so that the shift itself rounds nothing
    key[..., 0] = 2.0
    other = run(replace(x, key=key))
    return [] if other is None else _relation("key shift", base, _given(other, ("out", *OF_KEYS)))


def causal_prefix(run: Run, x: Inputs, _: Result) -> list[Relation]:
    """The first two thirds of a causal sequence alone, and the whole with no gradient from the
    tail, agree (also: padding at the end).
    """
    # 170 of 256: the prefix ends inside a tile
    n = x.query.shape[2] * 2 // 3
    # or the tail's rows would reach the prefix's keys in the whole call alone
    tail_silent = x.grad_out.clone()
    tail_silent[:, :, n:] = 0
    whole = run(replace(x, grad_out=tail_silent))
    cut: dict[str, Any] = {name: getattr(x, name)[:, :, :n].contiguous() for name in OPERANDS}
    prefix = run(replace(x, **cut))
    if whole is None or prefix is None:
        return []
    return _relation("causal prefix and padding", whole, _given(prefix))


def one_at_a_time(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """Some rows of a causal call by themselves, one query on the keys before it: decode against
    prefill.
    """
    n = x.query.shape[2]
    rows = [n // 2, n * 3 // 4 + 1, n - 2, n - 1]
    parts = []
    for row in rows:
        own, before = slice(row, row + 1), slice(row + 1)
        cut = {"query": x.query[:, :, own], "grad_out": x.grad_out[:, :, own]}
        cut |= {"key": x.key[:, :, before], "value": x.value[:, :, before]}
        # the keys end with the query's own: nothing is left to mask
        alone: dict[str, Any] = cut | {"sees": Sees()}
        parts.append(run(replace(x, **alone)))
    joined = _joined(parts, 2)
    of_queries = {name: joined[name] for name in OF_QUERIES if name in joined}
    return _relation("decode against prefill", base, of_queries, rows)


def later_chunk(run: Run, x: Inputs, base: Result) -> list[Relation]:
    """The last third of a causal sequence's queries on all keys: chunked prefill, of a kernel whose
    diagonal may begin elsewhere.
    """
    start = x.query.shape[2] * 2 // 3
    own = slice(start, None)
    cut = {"query": x.query[:, :, own], "grad_out": x.grad_out[:, :, own]}
    moved: dict[str, Any] = cut | {"sees": replace(x.sees, offset=start)}
    other = run(replace(x, **moved))
    if other is None:
        return []
    return _relation("prefill in chunks", base, _given(other, OF_QUERIES), own)


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
    # a row's NaN reaches every key of its head through dK and dV, and no further
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


PLAIN: dict[str, Callable[[Run, Inputs, Result], list[Relation]]] = {
    "same call twice": repeated_call,
    "memory full of NaN": filled_memory,
    "lse in the loss": lse_in_the_loss,
    "power-of-two scaling": powers_of_two,
    "batch position": batch_position,
    "batch composition": batch_composition,
    "heads over two ranks": heads_apart,
    "queries in chunks": query_chunks,
    "keys split, merged by lse": split_keys,
    "split count": split_count,
    "padding behind a mask": padded_keys,
    "permuted keys": permuted_keys,
    "duplicated keys": duplicated_keys,
    "key shift": shifted_keys,
    "NaN confined": poison,
}
CAUSAL: dict[str, Callable[[Run, Inputs, Result], list[Relation]]] = {
    "causal prefix and padding": causal_prefix,
    "decode against prefill": one_at_a_time,
    "prefill in chunks": later_chunk,
}
"""By the name that each gives its findings, held equal to it by test."""
