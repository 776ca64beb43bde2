"""What weight a kernel gives each pair, read off: with unit vectors for values, O is P itself; with
unit vectors for dO, dV is P as the backward pass has it.

How it differs from the exact P says what is wrong, where no candidate does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.algorithms.backward import sum_groups
from halfulp.calls import EVERYTHING, Call
from halfulp.reconstruct.exact import centered, logarithms, rms, scores_of, weights_of
from halfulp.reconstruct.keys_read import exchanged_keys, in_their_place, others_weigh
from halfulp.reconstruct.panel import Run, Trial
from halfulp.reconstruct.part_ratios import hides
from halfulp.reconstruct.ranges import ranges
from halfulp.reconstruct.weight_ratios import (
    FEW_ROWS,
    Read,
    compared_ratios,
    coordinates,
    of_scores,
)

VISIBLE = 1e-6  # weights below it may round to 0
NEGATIVE = 0.1  # of the weights: rounding and dropout make none of them so
FEW = 0.02  # of what weights are off by: pairs that make less of it are no matter of their own
MOST = 0.5  # of the weight of rows: where so much is missing, it is what is wrong with them
MOSTLY = 0.9  # of a head's rows
HELD, MANY_HELD = 0.1, 16  # weights within so much of a limit, and how many
NEAR = 0.05  # of a weight, which its rounding may make where it is small
OFTEN = 6  # less often than that a key may be counted
SOME_LOST = 4  # weights of a row that are 0, and that are not
TURNS, TURN = 4, 16  # more runs of keys, no farther from one to the next, are no tiles
ALONG = 0.3  # the cosine of weights with their own scores, from where on they are of these
ONE_NUMBER = 0.2  # of a weight, by which one number for all may be off
_MASKED = "a mask"  # that nobody asked for: how pairs are told that are hidden alike
MOST_KEYS = 320  # of a trial that is read


def forward_weights(run: Run, trial: Trial, shift: int = 0) -> Tensor | None:
    """P `[B, H, N, N_k]` float64 as O shows it; None where the kernel gives nothing, or N_k is
    large. The first key is shown by the column whose number is `shift`, the others by those after
    it, round and round.
    """
    call = trial.call
    n_key, width = call.key.shape[2], call.value.shape[3]
    if n_key > MOST_KEYS:
        return None
    parts = []
    for first in range(0, n_key, width):
        rows = torch.arange(first, min(first + width, n_key))
        value, columns = torch.zeros_like(call.value), (rows - first + shift) % width
        value[:, :, rows, columns] = 1
        asked = replace(call, value=value)
        result = run(replace(trial, name=f"{trial.name}/values {first}", call=asked))
        if result is None or not bool(result.out.isfinite().all()):
            return None
        parts.append(result.out.double()[..., columns])
    return torch.cat(parts, -1)


def backward_weights(run: Run, trial: Trial, shift: int = 0) -> Tensor | None:
    """The same as dV shows it; of heads that share one dV each is asked alone, dO of the others
    being 0.
    """
    call, (n, width) = trial.call, trial.grad_out.shape[2:]
    if max(n, call.key.shape[2]) > MOST_KEYS:
        return None
    groups = call.groups
    read = torch.zeros(*call.query.shape[:3], call.key.shape[2], dtype=torch.float64)
    for first in range(0, n, width):
        rows = torch.arange(first, min(first + width, n))
        columns = (rows - first + shift) % width
        for member in range(groups):
            grad_out = torch.zeros_like(trial.grad_out)
            grad_out[:, member::groups, rows, columns] = 1
            name = f"{trial.name}/rows {first} of {member}"
            result = run(replace(trial, name=name, grad_out=grad_out))
            grad = None if result is None else result.grad_value
            if grad is None or not bool(grad.isfinite().all()):
                return None
            read[:, member::groups, rows] = grad.double()[..., columns].mT
    return read


def weighed(trial: Trial, weights: Tensor, backward: bool) -> Tensor:
    """What weights make of V, which is O, or of dO, which is dV, float64."""
    call = trial.call
    if not backward:
        return weights @ call.value.double().repeat_interleave(call.groups, 1)
    return sum_groups(weights.mT @ trial.grad_out.double(), call.groups)


def compared(trial: Trial, read: Tensor, *, backward: bool = False) -> Read:
    """How weights that were read differ from the exact ones, in words."""
    call = trial.call
    exact = weights_of(call, scores_of(call))
    lost, extra = (read == 0) & (exact > VISIBLE), (read.abs() > VISIBLE) & (exact == 0)
    gone = lost.any(-1) & (read == 0).all(-1)  # whole rows: never written, or hidden
    every = gone[..., None].expand_as(lost)
    if over_queries(read, exact):
        return Read("the weights of each key sum to 1 over the queries: the softmax is over the"
                    " other dimension", "unnormalized")  # fmt: skip
    if alike := _all_alike(read, exact):
        return replace(alike, cause=in_backward(alike.cause)) if backward else alike
    if (most := _held(read, exact)) > 0:
        told = f"no weight is more than {most:.3g}: what should be is that"
        return Read(told, in_backward("weights") if backward else "weights")
    if float((read[exact > VISIBLE] < -VISIBLE).double().mean()) > NEGATIVE:
        told = "weights are below 0, as no exponential is"
        return Read(told, "backward-weights" if backward else "exponential")
    moved = not _of_own_scores(call, read, extra)
    small = _small(call, exact, lost)
    log, clear = logarithms(read, exact)
    if small is not None and (scaled := of_scores(call, centered(log, clear), clear)):
        return replace(scaled, cause=in_backward(scaled.cause)) if backward else scaled
    if small is not None:
        return Read(small[0], in_backward(small[1]) if backward else small[1])
    for marked, possible, told in (
        (lost & ~every, (exact > VISIBLE) & ~every, "get no weight"),
        (extra, exact == 0, "have weight though they are hidden"),
        (every & lost, exact > VISIBLE, "get no weight"),
    ):
        off = (read - exact).square()
        if float(off[marked].sum()) > FEW * float(off.sum()) or _most_of_rows(exact, marked):
            pattern, cause, of = _pattern(call, marked, possible)
            if of == _MASKED and not _rest_right(read, exact, marked):
                cause = "key-tail"
            if cause == "query-tail" and marked is not extra and not bool(gone.any()):
                told, cause = f"{told}, beside others that do", "key-tail"  # no query is left out
            if cause in ("", "dropout") and marked is not extra:  # nowhere in particular
                rest = exact[possible & ~marked]
                less = bool(len(rest)) and bool(2 * exact[marked].median() < rest.median())
                cause = "weights" if less else cause or "key-tail"
            if cause == "causal-mask" and call.sees.mask is None and _as_many(lost, extra):
                told, cause = f"{told}, and as many hidden ones do in each row", "other-data"
            if moved and cause == hides(call):
                told, cause = f"{told}, and hidden ones weigh as no keys of theirs do", "other-data"
            by_key = cause in ("key-tail", "split-merge")
            if by_key and (instead := in_their_place(read, exact, marked)):
                return Read(f"{pattern} {told}: {instead}", "other-data")
            if cause == "tiles-skipped" and _by_heads(marked, possible):
                cause = "split-merge"  # a part that is lost, whatever it weighs
            if marked is extra and not bool((exact[marked.any(-1)] != 0).any()):
                # which sees nothing at all; those that see some of the keys are shown these
                cause = hides(call) if _of_some(extra) else "masked-row"
            elif marked is extra and (theirs := others_weigh(read, exact, extra)):
                told, cause = f"{told}, {theirs}", "other-data"
            elif marked is extra and moved:
                told, cause = f"{told}, as no keys of theirs have", "other-data"
            elif marked is extra and (own := hides(call)):
                cause = own  # what is hidden is a matter of what hides it
            elif marked is not extra and (often := _others_often(read, exact, marked)):
                # twice, as where parts overlap, or whatever is there
                told = f"{told}, and others count {'twice' if often == 2 else f'{often} times'}"
                cause = "split-merge" if often == 2 else "other-data"
            if backward and call.groups > 1 and of == "heads":
                cause = "group-sum"
            return Read(f"{pattern} {told}", in_backward(cause) if backward else cause)
    if told := exchanged_keys(read, exact):
        return Read(told, "layout")
    sums = (read.sum(-1) / exact.sum(-1).clamp_min(1e-300)).clamp_min(1e-300)
    ratios = compared_ratios(trial, log, clear, backward, sums)
    return replace(ratios, cause=in_backward(ratios.cause)) if backward else ratios


def _most_of_rows(exact: Tensor, lost: Tensor) -> bool:
    """Whether rows lack more than they have: what is left counts so much more that its squares
    alone tell nothing.
    """
    part = torch.where(lost, exact, 0.0).sum(-1)
    return float(part.sum()) > MOST * float(exact.sum(-1)[part > 0].sum())


def leaves_out(run: Run, trial: Trial) -> bool:
    """Whether O has no weight, here and there in most rows, for pairs that should have one."""
    read = forward_weights(run, trial)
    if read is None:
        return False
    exact = weights_of(trial.call, scores_of(trial.call))
    lost = (read == 0) & (exact > VISIBLE)
    some = lost.any(-1) & (read != 0).any(-1)
    # what no row has was not chosen by any
    chosen = lost & ~(lost | (exact <= VISIBLE)).all(-2, keepdim=True)
    return bool(some.double().mean() > 0.5) and bool(2 * chosen.sum() > lost.sum())


def _of_some(extra: Tensor) -> bool:
    """Whether rows that have weight have it on keys here and there."""
    rows = extra[extra.any(-1)]
    until = rows.flip(-1).cummax(-1).values.flip(-1)  # up to the last that has some
    return bool((rows.sum(-1) < until.sum(-1) / 2).all())


def _as_many(lost: Tensor, extra: Tensor) -> bool:
    """Whether rows see as many keys as they should, and others: keys stand in another order."""
    return bool(extra.any()) and bool((lost.sum(-1) == extra.sum(-1)).all())


def _of_own_scores(call: Call, read: Tensor, extra: Tensor) -> bool:
    """Whether weights of hidden pairs go along with the scores of these pairs, or are one number;
    True where this is not known.
    """
    many = extra & (extra.sum(-1, keepdim=True) >= FEW_ROWS)
    if call.sees.added is not None or not bool(many.any()):
        return True
    log = torch.where(many, read.clamp_min(1e-300), 1.0).log()
    scores = scores_of(replace(call, sees=EVERYTHING))
    log, scores = (centered(x, many.double()) for x in (log, scores))
    along = float((log * scores).sum()) / max(1e-300, float(log.norm() * scores.norm()))
    return along > ALONG or rms(log, many.double()) < ONE_NUMBER


def over_queries(read: Tensor, exact: Tensor) -> bool:
    """Whether columns sum to 1 and rows do not."""
    rows, columns = ((x.sum(dim) - 1).abs().mean() for x, dim in ((read, -1), (read, -2)))
    whole = float((exact.sum(-1) - 1).abs().max()) < 0.01  # of rows that see something, no sinks
    return whole and float(columns) < 0.01 and float(rows) > 0.1


def over_heads(run: Run, trial: Trial) -> bool:
    """Whether the weights that a key has in all heads of a sequence, or in all sequences, sum to 1,
    and those of a row do not.
    """
    read = forward_weights(run, trial)
    if read is None or trial.call.groups > 1:
        return False
    off = [float((read.sum(dim) - 1).abs().mean()) for dim in (0, 1) if read.shape[dim] > 1]
    return any(x < 0.01 for x in off) and float((read.sum(-1) - 1).abs().mean()) > 0.1


def _all_alike(read: Tensor, exact: Tensor) -> Read | None:
    """Whether what a row sees weighs as much throughout, and 1 in every row."""
    seen = (exact > 0) & ((exact > 0).sum(-1, keepdim=True) > 1)  # of rows that see several
    if not bool(seen.any()):
        return None
    if bool(((read[seen] - 1).abs() < NEAR / 4).all()):
        return Read("every weight is 1, as of a softmax over one element", "unnormalized")
    mean = (read * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    if bool(((read - mean).abs() < NEAR / 4 * mean.abs())[seen].all()):
        return Read("all weights of a row are alike: scores are 0 × what they should be", "scale")
    return None


def _held(read: Tensor, exact: Tensor) -> float:
    """The number that weights are held below, if so; else 0."""
    most = float(read.max())
    held = read > (1 - HELD) * most
    above = exact > (1 + HELD) * most
    limited = int(above.sum()) >= MANY_HELD and float(exact.max()) > 1.5 * most
    return most if limited and float(held[above].double().mean()) > 1 - HELD else 0.0


def _small(call: Call, exact: Tensor, lost: Tensor) -> tuple[str, str] | None:
    """Whether what is lost is what is small beside its row's largest weight, sinks counted."""
    if int(lost.sum()) < 8:
        return None
    largest = exact.amax(-1, keepdim=True)
    if call.sinks is not None:
        largest = torch.maximum(largest, 1 - exact.sum(-1, keepdim=True))
    seen = (exact > VISIBLE) & ~lost
    rows = (lost.sum(-1) >= SOME_LOST) & (seen.sum(-1) >= SOME_LOST)
    tops = torch.where(lost, exact, 0.0).amax(-1)[rows]
    least = torch.where(seen, exact, math.inf).amin(-1)[rows]
    for size, told in ((exact / largest.clamp_min(1e-300), " of their row's largest"), (exact, "")):
        kept = size[seen].sort().values
        gone = size[lost].sort().values
        most = float(gone[len(gone) * 19 // 20])  # beside the maximum so far, some that are kept
        if len(kept) and most < float(kept[len(kept) // 10]):
            return f"weights below about {most:.2g}{told} are 0", "weights"
    if len(tops) >= SOME_LOST and float((tops <= 2 * least).double().mean()) > 0.9:
        return "each row loses its small weights, below a number of its own", "maximum"
    return None


def _others_often(read: Tensor, exact: Tensor, lost: Tensor) -> int:
    """How often, of rows that lose weights, some keys count that others do once; else 0."""
    rows = lost.any(-1)
    seen = ((exact > VISIBLE) & (read > 0))[rows]
    ratio = torch.where(seen, read[rows] / exact[rows], math.nan)
    least = torch.where(seen, ratio, math.inf).amin(-1, keepdim=True)
    times = (ratio / least)[seen]
    whole = times.round()
    if not len(times) or float(((times / whole - 1).abs() < NEAR).double().mean()) < MOSTLY:
        return 0
    counts = torch.bincount(whole[whole < OFTEN].long(), minlength=OFTEN)
    some = (counts > FEW * len(times)).nonzero().flatten()
    return int(some[-1]) if len(some) > 1 and int(counts[some].sum()) > MOSTLY * len(times) else 0


def _by_heads(lost: Tensor, possible: Tensor) -> bool:
    """Whether all rows of a head lose the same keys, as they do not where weights decide."""
    share = (lost & possible).sum(-2) / possible.sum(-2).clamp_min(1)
    return not bool(((share > 1 - MOSTLY) & (share < MOSTLY)).any())


_IN_BACKWARD = {
    "causal-mask": "backward-mask", "mask": "backward-mask", "window": "backward-mask",
    "key-tail": "grad-tail", "query-tail": "grad-tail", "row-sum": "lse",
    "unnormalized": "lse-other",
    "scale": "backward-scores", "scores": "backward-scores",
    "softcap": "backward-scores", "weights": "probabilities", "rescale": "backward-weights",
    "split-merge": "backward-weights", "operand": "backward-scores", "row-max": "backward-scores",
}  # fmt: skip


def in_backward(cause: str) -> str:
    """What stands for a cause where the backward pass has it."""
    return _IN_BACKWARD.get(cause, cause)


def _rest_right(read: Tensor, exact: Tensor, lost: Tensor) -> bool:
    """Whether what is not lost is right, but for one factor a row."""
    log, clear = logarithms(read, exact)
    clear = clear * ~lost
    return rms(centered(log, clear), clear) < NEAR


class _Pattern(NamedTuple):
    """Which pairs are marked, in words; the cause, and the coordinate that alone tells them."""

    text: str
    cause: str
    of: str = ""


def _pattern(call: Call, marked: Tensor, possible: Tensor) -> _Pattern:
    """Which pairs are marked, by the simplest coordinate that tells them from the others."""
    b, h, i, j = (c.expand_as(marked) for c in coordinates(marked))
    masked = hides(call)
    if masked and int(marked.sum()) > 0.97 * int(possible.sum()):
        return _Pattern("all pairs", masked)
    one_of_many = "unwritten" if bool((marked.any(-1) == marked.all(-1)).all()) else "other-data"
    simple: tuple[tuple[str, Tensor, str], ...] = (
        ("pairs of keys", j, "key-tail"),
        ("pairs of queries", i, "query-tail"),
        ("pairs with key − query", j - i, masked or "causal-mask"),
        ("heads", h, one_of_many),
        ("sequences", b, one_of_many),
    )
    for name, coordinate, cause in simple:
        values = _told_by(coordinate, marked, possible)
        if values is not None:
            if cause == "key-tail" and masked == "mask" and bool((values.diff() > 1).any()):
                cause = masked  # keys here and there
            if cause == "key-tail" and _by_turns(values):
                cause = "split-merge"  # parts that take keys by turns, and do not come together
            if name.endswith("query") and not masked and int((values.diff() > 1).sum()) > 1:
                if apart := _apart(coordinate, values, possible):
                    return _Pattern(f"pairs whose distance is no multiple of {apart}", "layout")
                cause = "dropout"  # nothing was asked that hides some distances among others
            # beyond a distance, and not at the diagonal
            far = bool(((values < -1) | (values > 1)).all()) and int(values[0]) == int(
                (j - i).min()
            )
            cause = (
                "window" if name.endswith("query") and far and not masked.startswith("m") else cause
            )
            return _Pattern(f"{name} {ranges(values)}", cause, name)
    for width in (128, 64, 32, 16, 8):
        tile = i.div(width, rounding_mode="floor") * 4096 + j.div(width, rounding_mode="floor")
        if _told_by(tile, marked, possible) is not None:
            others = i.div(width, rounding_mode="floor") != j.div(width, rounding_mode="floor")
            if not masked and not bool((marked & ~others).any()) and bool(
                marked[others & possible].double().mean() > MOSTLY):  # fmt: skip
                return _Pattern(f"pairs that are not in one chunk of {width}", "window")
            return _Pattern(f"whole tiles of {width} × {width} pairs", masked or "key-tail")
    for width in (128, 64, 32, 16):
        row = (b * marked.shape[1] + h) * marked.shape[2] + i
        tile = row * (-(-marked.shape[3] // width)) + j.div(width, rounding_mode="floor")
        if _told_by(tile, marked, possible) is not None and marked.shape[3] > width:
            return _Pattern(f"whole tiles of {width} keys, in some rows,", "tiles-skipped")
    for name, coordinate, cause in (
        ("keys", j, "key-tail"), ("queries", i, "query-tail"),
        ("key − query", j - i, masked or "causal-mask"),
    ):  # fmt: skip
        joint = (b * marked.shape[1] + h) * 8192 + coordinate + 4096
        if (values := _told_by(joint, marked, possible)) is not None:
            heads = torch.unique(values.div(8192, rounding_mode="floor"))
            some = torch.unique(values % 8192 - 4096)
            places = [f"({int(x) // marked.shape[1]}, {int(x) % marked.shape[1]})" for x in heads]
            told = f"pairs with {name} {ranges(some)} in heads {', '.join(places[:4])}"
            few = len(heads) < marked.shape[0] * marked.shape[1]
            if cause == "key-tail" and masked == "mask" and bool((some.diff() > 1).any()):
                cause = masked
            return _Pattern(told, "other-data" if few else cause)
    rows, keys = (torch.unique(c[marked]) for c in (i, j))
    share = float(marked.sum()) / max(1.0, float(possible.sum()))
    alike = _as_a_mask(marked, possible)
    if not alike and _at_random(marked, possible):
        return _Pattern(f"{100 * share:.2g} % of the pairs, wherever they are,", "dropout")
    told = f"{100 * share:.2g} % of the pairs, of queries {ranges(rows)} and keys {ranges(keys)},"
    return _Pattern(told, masked) if masked or not alike else _Pattern(told, "causal-mask", _MASKED)


def _as_a_mask(marked: Tensor, possible: Tensor) -> bool:
    """Whether the same pairs are marked in all heads of all sequences, some of each of their rows
    and some of each of their keys, and not those of some rows with some keys.
    """
    every = marked.any(1, keepdim=True).any(0, keepdim=True)
    rest = possible & ~marked
    rows, keys = every.any(-1, keepdim=True), every.any(-2, keepdim=True)
    some = rest.any(-1, keepdim=True) | ~rows, rest.any(-2, keepdim=True) | ~keys
    several = marked.shape[0] * marked.shape[1] > 1 and not bool((every == rows & keys).all())
    return several and bool((marked == every & possible).all()) and all(bool(x.all()) for x in some)


def _apart(distance: Tensor, marked: Tensor, possible: Tensor) -> int:
    """The number of which all distances are multiples that are not marked, as where tokens next to
    each other are heads; else 0.
    """
    rest = torch.unique(distance[possible & ~torch.isin(distance, marked)])
    every = math.gcd(*(int(x) for x in rest)) if len(rest) > TURNS else 0
    return every if every > 1 else 0


def _by_turns(numbers: Tensor) -> bool:
    """Whether indices are those that one or more of several have which take them by turns, and of
    no end: runs of one length, at one distance.
    """
    ends = [i + 1 for i, more in enumerate(numbers.diff().tolist()) if more > 1]
    runs = [part.tolist() for part in torch.tensor_split(numbers, ends)]
    distances = {b[0] - a[0] for a, b in pairwise(runs)}
    alike = len(distances) == 1 == len({len(run) for run in runs[1:-1]})
    return len(runs) > TURNS and alike and max(distances) <= TURN


def _at_random(marked: Tensor, possible: Tensor) -> bool:
    """Whether as many pairs are marked in every row, and in every column, as chance would mark."""
    share = float(marked.sum()) / max(1.0, float(possible.sum()))
    for dim in (-1, -2):
        count = possible.sum(dim).double()
        spread = (marked.sum(dim) - share * count) / (count * share * (1 - share) + 1e-9).sqrt()
        if not 0.7 < float(spread[count > FEW_ROWS].std()) < 1.3:
            return False
    return 0 < share < 0.9


def _told_by(coordinate: Tensor, marked: Tensor, possible: Tensor) -> Tensor | None:
    """The values of a coordinate at which pairs are marked, if all possible ones are there, but for
    three in a hundred.
    """
    low = int(coordinate.min())
    size = int(coordinate.max()) - low + 1
    here = coordinate[possible] - low
    count = torch.bincount(here, minlength=size)
    hits = torch.bincount(coordinate[marked] - low, minlength=size)
    some = hits * 2 > count
    wrong = torch.where(some, count - hits, hits).sum()
    if int(wrong) * 33 > int(hits.sum()) or not bool(some.any()):
        return None
    return some.nonzero().flatten() + low
