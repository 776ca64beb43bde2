"""Whether columns of O, or of dV, are made with weights of their own, as where a part of the
features has scores that are never added up with those of the others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import Run, Trial
from halfulp.reconstruct.ranges import ranges
from halfulp.reconstruct.weight_ratios import Read
from halfulp.reconstruct.weights_read import backward_weights, compared, forward_weights, weighed

COLUMNS = 8  # that are taken for alike: fewer than any tile has
ALIKE = 0.05  # of a squared error, that weights of columns which have the same may differ by
MOST = 0.9  # of the rows, in which a key is lost that is left out
LOST = {"key-tail", "query-tail", "grad-tail"}  # keys or queries that are left out
LEFT = 0.5  # of an error that weights as they were read may leave


def of_columns(run: Run, trial: Trial, total: float, *, backward: bool) -> Read | None:
    """What the weights are that some columns are made with and others are not, if those of each
    make the result, whose squared error is `total`; the weights are read through every 8 columns.
    """
    each = _by_columns(run, trial, backward)
    if len(each) < 2:
        return None
    exact = weights_of(trial.call, scores_of(trial.call))
    made = torch.cat([weighed(trial, x, backward)[..., COLUMNS * i : COLUMNS * (i + 1)]
                      for i, x in enumerate(each)], -1)  # fmt: skip
    result = run(trial)
    got = None if result is None else result.grad_value if backward else result.out
    if got is None or float((got.double() - made).square().sum()) > LEFT * total:
        return None
    off = [float((x - exact).square().sum()) for x in each]
    worst = off.index(max(off))
    mine = [float((x - each[worst]).square().sum()) < ALIKE * off[worst] for x in each]
    if all(mine):
        return None
    columns = torch.arange(got.shape[-1])[torch.tensor(mine).repeat_interleave(COLUMNS)]
    where = f"columns {ranges(columns)} of {got.shape[-1]}"
    if not bool(each[worst].any()):
        return Read(f"{where} are 0", "unwritten")
    own = compared(trial, each[worst], backward=backward)
    told = f"{where} have weights of their own: {own.text}"
    gone = ((each[worst] == 0) & (exact != 0)).double().mean((0, 1, 2))
    last = int(columns[0]) == len(mine) * COLUMNS - len(columns)
    if own.cause in LOST and last and float(gone[-1]) < MOST:
        return Read(told, "ragged")  # narrower heads have these keys, which lie at no end
    # what goes with the size of weights alone would be rounding, which no column has of its own
    return Read(told, "layout" if own.by_size or not own.cause else own.cause)


def _by_columns(run: Run, trial: Trial, backward: bool) -> list[Tensor]:
    """The weights as every 8 columns show them; empty where they do not, or there are no whole 8.

    What is read is shifted from reading to reading, so that each key, or query, is shown once by
    each of them.
    """
    width = trial.call.value.shape[3]
    if width % COLUMNS:
        return []
    read = backward_weights if backward else forward_weights
    shifted = []
    for shift in range(0, width, COLUMNS):
        weights = read(run, replace(trial, name=f"{trial.name}/by {shift}"), shift)
        if weights is None:
            return []
        shifted.append(weights)
    stacked = torch.stack(shifted)  # [shifts, B, H, N, N_k]
    dim = 3 if backward else 4
    at = torch.arange(stacked.shape[dim]) % width // COLUMNS
    index = at.view(-1, 1) if backward else at
    every = len(shifted)
    return [stacked.gather(0, ((g - index) % every).expand(stacked.shape[1:])[None])[0]
            for g in range(every)]  # fmt: skip
