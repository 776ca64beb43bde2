"""Everything that one attention call of a foreign model tells, by head.

The same measures as the monitor's, of fewer things: weights, inputs and a second pass are not at
hand. What is new is the error of the gradients themselves, since the kernel that ran is the user's.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from halfulp.calls import Sees
from halfulp.watch import measures
from halfulp.watch.foreign import Foreign
from halfulp.watch.measures import Figures
from halfulp.watch.running import SIZE, TOTAL
from halfulp.watch.taps import Observed

IN_GRADIENT = "delta_error_in_gradient"
NOT_FINITE = "not_finite"
MOST_SCORES = 2**20
"""Scores of a layer that are measured: as many batch entries as fit, at least one. With 2²² a run
of ten million parameters took 2.1 % longer (`benchmarks/watch_cost.py`)."""
CHUNK = 2**21
"""Scores held at once, of one head at least; a head with more is measured in some of its rows,
evenly spread.
"""

HIDDEN = "every row that was looked at is hidden by the mask"
SEES_FUTURE, BLIND, ADDS_FLAGS = "sees_future", "blind_rows", "mask_is_0_and_1"
NOT_ATTENTION = 0.25
"""Relative error of a head's O beyond which the call is not understood: a mask or another scale
inside the function.
"""


def entries_of(query: Tensor, key: Tensor) -> int:
    """Batch entries of `[B, H, N, D]` that are measured."""
    return min(len(query), max(1, MOST_SCORES // (query.shape[1] * query.shape[2] * key.shape[2])))


def call_figures(call: Foreign) -> tuple[Figures, Figures]:
    """Figures `[H]` of a call, and the parts of δ's error by batch entry `[E, H]`, in fp64.

    out_error, grad_query_error, grad_key_error and grad_value_error: ‖x − golden‖ / ‖golden‖ of
    what the attention gave, the last two of the key head that a head reads and NaN where some rows
    are left out. rows: query rows measured. not_finite: numbers that are not, of what it was fed,
    gave and got back. sees_future: share of the keys after a query that it sees, NaN where there
    are not as many keys as queries; blind_rows: share of queries that see no key;
    mask_is_0_and_1: 1 where the mask adds nothing but 0 and 1. All others as `measures` documents.
    Under dropout, whose mask is not known, everything is NaN that takes the exact O; the error of δ
    in dK remains, in units of what bf16's rounding of O would make.
    """
    tensors = {
        name: x.to(call.cast) if call.cast is not None and name in _READ else x
        for name, x in call.tensors.items()
    }
    query, key = tensors["query"], tensors["key"]
    rows, sees, whole = _rows(call.asked.sees, query.shape[2], key.shape[2], query.device)
    if not len(rows):
        call.unseen = HIDDEN
        return {}, {}
    heads, key_heads = query.shape[1], key.shape[1]
    group = heads // key_heads
    at_once = max(1, CHUNK // (len(query) * len(rows) * key.shape[2] * group))
    chunks = []
    for start in range(0, key_heads, at_once):
        stop = min(start + at_once, key_heads)
        of_key, of_query = slice(start, stop), slice(start * group, stop * group)
        part = {
            name: x[:, of_key if name in _BY_KEY_HEAD else of_query] for name, x in tensors.items()
        }
        seen = sees.of_heads(of_query)
        chunks.append(_chunk(call, part, rows, seen, whole))
    found, parts = measures.joined(chunks)
    far = float(found["out_error"].nan_to_num(0.0).max())
    if far > NOT_ATTENTION:
        call.unseen = f"its O is {far:.0%} off the attention that it was asked for"
        return {}, {}
    for name, count in (("entries", len(query)), ("rows", len(rows))):
        found[name] = torch.full((heads,), float(count))
    found[NOT_FINITE] = _not_finite(tensors, rows, group)
    shares = _mask_figures(call.asked.sees, query.shape[2], key.shape[2], query.device)
    for name, share in shares.items():
        found[name] = torch.full((heads,), share)
    return found, parts


def _mask_figures(sees: Sees, n: int, n_k: int, device: torch.device) -> dict[str, float]:
    """What the mask lets a layer see, of a few dozen of its rows."""
    rows = torch.arange(0, n, max(1, n // _MASK_ROWS), device=device)
    seen = sees.visible(rows, n, n_k)
    seen = seen if seen.dtype == torch.bool else seen > _HIDES
    later = torch.arange(n_k, device=device) > rows.unsqueeze(-1)
    flags, given = False, sees.mask
    if given is not None and given.is_floating_point():
        flags = bool(((given == 0) | (given == 1)).all()) and bool((given == 1).any())
    share = (seen & later).sum() / (later.sum() * seen[..., 0, 0].numel()) if n == n_k > 1 else None
    return {
        SEES_FUTURE: math.nan if share is None else float(share),
        BLIND: float((~seen.any(-1)).float().mean()),
        ADDS_FLAGS: float(flags),
    }


_MASK_ROWS = 32
_HIDES = -9e3  # added to a score it hides a key, whatever else is added: models use −1e4 to −∞


def _not_finite(tensors: Figures, rows: Tensor, group: int) -> Tensor:
    """`[H]`: how many of a head's numbers are infinite or not a number, in the rows looked at."""
    total = torch.zeros(tensors["query"].shape[1])
    for name, x in tensors.items():
        looked_at = x[:, :, rows] if name in _BY_ROW else x
        count = (~looked_at.isfinite()).sum((0, 2, 3)).float().cpu()
        total += count.repeat_interleave(group) if name in _BY_KEY_HEAD else count
    return total


_READ = ("query", "key", "value")
_BY_ROW = ("query", "out", "grad_out", "grad_query")
_BY_KEY_HEAD = ("key", "value", "grad_key", "grad_value")


def _chunk(
    call: Foreign, tensors: Figures, rows: Tensor, sees: Sees, whole: bool
) -> tuple[Figures, Figures]:
    """Figures of some key heads and all heads that read them."""
    group = tensors["query"].shape[1] // tensors["key"].shape[1]
    full = {
        name: x.repeat_interleave(group, 1) if name in _BY_KEY_HEAD else x
        for name, x in tensors.items()
    }
    by_row = {name: full[name][:, :, rows] for name in _BY_ROW if name in full}
    given = full.get("grad_key") if group == 1 else None
    # as the gradients came: all rows of the query belong to dK
    all_rows = Observed(
        query=full["query"],
        key=full["key"],
        value=full["value"],
        scale=call.asked.scale,
        out=full["out"],
        grad_out=full["grad_out"],
        grad_key=given,
    )
    part = replace(
        all_rows,
        query=by_row["query"],
        sees=sees,
        out=by_row["out"],
        grad_out=by_row["grad_out"],
        grad_key=given if whole else None,
    )
    exact = measures.exact_call(part)
    found = measures.figures_of(exact) | measures.activation_figures(part)
    share = len(rows) / full["query"].shape[2]
    # dK sums over all rows, Σ|e| below over those looked at: scaled to as many
    in_gradient = measures.delta_error_in_gradient(all_rows) * share
    if call.asked.dropout:
        nan = torch.full_like(in_gradient, math.nan)
        # |e| as independent roundings of O make it: the root of a sum of squares over features
        unit = (part.grad_out * part.out).double().square().sum(-1).sqrt().sum(-1) * _HALF_ULP  # type: ignore[operator]
        unknown = dict.fromkeys(_NEED_OUT, torch.full_like(found["mean_score"], math.nan))
        return found | unknown, {SIZE: unit, TOTAL: nan, IN_GRADIENT: in_gradient}
    found["out_error"] = measures.relative_error(by_row["out"], exact.out)
    error = measures.delta_error(part, exact)
    found |= measures.row_sum_figures(part, exact, error) | measures.sign_figures(part, exact)
    golden = measures.exact_gradients(part, exact)
    found |= _gradient_errors(tensors, by_row, golden, whole)
    if group > 1 and "grad_query" in by_row:
        in_gradient = measures.delta_error_in_query_gradient(
            part, exact, by_row["grad_query"], golden[0]
        )
    return found, {SIZE: error.abs().sum(-1), TOTAL: error.sum(-1), IN_GRADIENT: in_gradient}


# the standard deviation of a rounding to bf16, relative, at most
_HALF_ULP = 2.0**-9 / math.sqrt(3)


def _gradient_errors(
    tensors: Figures, by_row: Figures, golden: tuple[Tensor, Tensor, Tensor], whole: bool
) -> Figures:
    found = dict.fromkeys(_ERRORS, torch.full_like(golden[0][0, :, 0, 0], math.nan))
    if "grad_query" in by_row:
        found["grad_query_error"] = measures.relative_error(by_row["grad_query"], golden[0])
    for name, exact in zip(("grad_key", "grad_value"), golden[1:], strict=True):
        if whole and name in tensors:
            group = exact.shape[1] // tensors[name].shape[1]
            # autograd sums dK and dV over the query heads that read one key head
            summed = exact.reshape(len(exact), -1, group, *exact.shape[2:]).sum(2)
            found[f"{name}_error"] = measures.relative_error(
                tensors[name], summed
            ).repeat_interleave(group)
    return found


_ERRORS = ("grad_query_error", "grad_key_error", "grad_value_error")
_SIGNS = ("sign_agreement", "guilty_feature", "guilty_sign_agreement", "guilty_share")
_NEED_OUT = (*_ERRORS, *_SIGNS, "out_error", "row_sum_grad_scores", "key_gradient_sum")


def _rows(sees: Sees, n: int, n_k: int, device: torch.device) -> tuple[Tensor, Sees, bool]:
    """The rows to measure, what their queries see, and whether they are all."""
    most = max(1, CHUNK // n_k)
    rows = torch.arange(0, n, -(-n // most), device=device)
    whole = len(rows) == n
    # causal from the top left hides no row wholly, and needs no mask
    if whole and sees.mask is None and sees.window is None and not (sees.causal and sees.offset):
        return rows, sees, whole
    mask = sees.visible(rows, n, n_k)
    seen = mask if mask.dtype == torch.bool else mask > -math.inf
    some = seen.any(-1).flatten(0, 1)
    alive = some.all(0)
    # a row that only some entries hide is left out for all
    whole = whole and not bool((some.any(0) & ~alive).any())
    return rows[alive], Sees(mask=mask[:, :, alive]), whole
