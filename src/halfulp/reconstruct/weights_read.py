"""What weight a kernel gives each pair, read off: with unit vectors for values, O is P itself; with
unit vectors for dO, dV is P as the backward pass has it.

How it differs from the exact P says what is wrong, where no candidate does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfulp.calls import Call
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import Run, Trial
from halfulp.reconstruct.ranges import ranges

VISIBLE = 1e-6  # weights below it may round to 0
CLEAR = 2.0**-12  # weights whose ratio to the exact ones is looked at
FEW = 0.02  # of what weights are off by: pairs that make less of it are no matter of their own
SHARE = 0.85  # of the ratios' variance that a pattern must explain
MOST_KEYS = 320  # of a trial that is read
OTHER = 0.5  # of an operand's size: from there on it is no coarser one, but another
SOME = 24  # rows that a linear fit is tried on
_WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
STEADY = 0.2  # of how factors vary, that one number added to row sums may leave
WHOLE, KEPT = 32, 0.1  # keys with a factor of more are a part that is merged otherwise
FEW_ROWS = 16  # with fewer any ratio is a function of the key
# rms of the ratios that rounding makes
NOISE = {torch.bfloat16: 2.5e-3, torch.float16: 3.2e-4, torch.float32: 2.0**-21}


@dataclass(frozen=True)
class Read:
    """What the weights that were read say."""

    text: str
    cause: str  # a key of CAUSES; empty where they are right
    by_size: bool = False  # told by how large the ratios are, and no more


def forward_weights(run: Run, trial: Trial) -> Tensor | None:
    """P `[B, H, N, N_k]` float64 as O shows it; None where the kernel gives nothing, or N_k is
    large.
    """
    call = trial.call
    n_key, width = call.key.shape[2], call.value.shape[3]
    if n_key > MOST_KEYS:
        return None
    parts = []
    for first in range(0, n_key, width):
        rows = torch.arange(first, min(first + width, n_key))
        value = torch.zeros_like(call.value)
        value[:, :, rows, rows - first] = 1
        asked = replace(call, value=value)
        result = run(replace(trial, name=f"{trial.name}/values {first}", call=asked))
        if result is None or not bool(result.out.isfinite().all()):
            return None
        parts.append(result.out.double()[..., : len(rows)])
    return torch.cat(parts, -1)


def backward_weights(run: Run, trial: Trial) -> Tensor | None:
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
        for member in range(groups):
            grad_out = torch.zeros_like(trial.grad_out)
            grad_out[:, member::groups, rows, rows - first] = 1
            name = f"{trial.name}/rows {first} of {member}"
            result = run(replace(trial, name=name, grad_out=grad_out))
            grad = None if result is None else result.grad_value
            if grad is None or not bool(grad.isfinite().all()):
                return None
            read[:, member::groups, rows] = grad.double()[..., : len(rows)].mT
    return read


def compared(trial: Trial, read: Tensor, *, backward: bool = False) -> Read:
    """How weights that were read differ from the exact ones, in words."""
    call = trial.call
    exact = weights_of(call, scores_of(call))
    lost, extra = (read == 0) & (exact > VISIBLE), (read.abs() > VISIBLE) & (exact == 0)
    gone = lost.any(-1) & (read == 0).all(-1)  # whole rows: never written, or hidden
    every = gone[..., None].expand_as(lost)
    if _over_queries(read, exact):
        return Read("the weights of each key sum to 1 over the queries: the softmax is over the"
                    " other dimension", "layout")  # fmt: skip
    small = _small(call, exact, lost)
    if small is not None:
        return Read(small, _backward("weights") if backward else "weights")
    for marked, possible, told in (
        (lost & ~every, (exact > VISIBLE) & ~every, "get no weight"),
        (extra, exact == 0, "have weight though they are hidden"),
        (every & lost, exact > VISIBLE, "get no weight"),
    ):
        off = (read - exact).square()
        if float(off[marked].sum()) > FEW * float(off.sum()):
            pattern, cause = _pattern(call, marked, possible)
            if marked is extra and (own := _mask_cause(call)):
                cause = own  # what is hidden is a matter of what hides it
            return Read(f"{pattern} {told}", _backward(cause) if backward else cause)
    ratios = _ratios(trial, *logarithms(read, exact))
    return replace(ratios, cause=_backward(ratios.cause)) if backward else ratios


def _over_queries(read: Tensor, exact: Tensor) -> bool:
    """Whether columns sum to 1 and rows do not."""
    rows, columns = ((x.sum(dim) - 1).abs().mean() for x, dim in ((read, -1), (read, -2)))
    whole = float((exact.sum(-1) - 1).abs().max()) < 0.01  # of rows that see something, no sinks
    return whole and float(columns) < 0.01 and float(rows) > 0.1


def _small(call: Call, exact: Tensor, lost: Tensor) -> str | None:
    """Whether what is lost is what is small beside its row's largest weight, sinks counted."""
    if int(lost.sum()) < 8:
        return None
    largest = exact.amax(-1, keepdim=True)
    if call.sinks is not None:
        largest = torch.maximum(largest, 1 - exact.sum(-1, keepdim=True))
    seen = (exact > VISIBLE) & ~lost
    for size, told in ((exact / largest.clamp_min(1e-300), " of their row's largest"), (exact, "")):
        kept = size[seen].sort().values
        gone = size[lost].sort().values
        most = float(gone[len(gone) * 19 // 20])  # beside the maximum so far, some that are kept
        if len(kept) and most < float(kept[len(kept) // 10]):
            return f"weights below about {most:.2g}{told} are 0"
    return None


_IN_BACKWARD = {
    "causal-mask": "backward-mask", "mask": "backward-mask", "window": "backward-mask",
    "key-tail": "grad-tail", "query-tail": "grad-tail", "row-sum": "lse", "unnormalized": "lse",
    "scale": "backward-scores", "scores": "backward-scores", "exponential": "backward-scores",
    "softcap": "backward-scores", "weights": "probabilities", "rescale": "backward-weights",
    "split-merge": "backward-weights", "operand": "backward-scores",
}  # fmt: skip


def _backward(cause: str) -> str:
    return _IN_BACKWARD.get(cause, cause)


def _pattern(call: Call, marked: Tensor, possible: Tensor) -> tuple[str, str]:
    """Which pairs are marked, by the simplest coordinate that tells them from the others."""
    b, h, i, j = (c.expand_as(marked) for c in _coordinates(marked))
    masked = _mask_cause(call)
    if masked and int(marked.sum()) > 0.97 * int(possible.sum()):
        return "all pairs", masked
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
            # beyond a distance, and not at the diagonal
            far = bool(((values < -1) | (values > 1)).all()) and int(values[0]) == int(
                (j - i).min()
            )
            cause = (
                "window" if name.endswith("query") and far and not masked.startswith("m") else cause
            )
            return f"{name} {ranges(values)}", cause
    for width in (128, 64, 32, 16, 8):
        tile = i.div(width, rounding_mode="floor") * 4096 + j.div(width, rounding_mode="floor")
        if _told_by(tile, marked, possible) is not None:
            return f"whole tiles of {width} × {width} pairs", masked or "key-tail"
    for width in (128, 64, 32, 16):
        row = (b * marked.shape[1] + h) * marked.shape[2] + i
        tile = row * (-(-marked.shape[3] // width)) + j.div(width, rounding_mode="floor")
        if _told_by(tile, marked, possible) is not None and marked.shape[3] > width:
            return f"whole tiles of {width} keys, in some rows,", "tiles-skipped"
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
            return told, "other-data" if len(heads) < marked.shape[0] * marked.shape[1] else cause
    rows, keys = (torch.unique(c[marked]) for c in (i, j))
    share = float(marked.sum()) / max(1.0, float(possible.sum()))
    if _at_random(marked, possible):
        return f"{100 * share:.2g} % of the pairs, wherever they are,", "dropout"
    return (f"{100 * share:.2g} % of the pairs, of queries {ranges(rows)} and keys {ranges(keys)},",
            masked or "key-tail")  # fmt: skip


def _at_random(marked: Tensor, possible: Tensor) -> bool:
    """Whether as many pairs are marked in every row, and in every column, as chance would mark."""
    share = float(marked.sum()) / max(1.0, float(possible.sum()))
    for dim in (-1, -2):
        count = possible.sum(dim).double()
        spread = (marked.sum(dim) - share * count) / (count * share * (1 - share) + 1e-9).sqrt()
        if not 0.7 < float(spread[count > FEW_ROWS].std()) < 1.3:
            return False
    return 0 < share < 0.9


def _mask_cause(call: Call) -> str:
    if call.sees.mask is not None:
        return "mask"
    if call.sees.window is not None:
        return "window"
    return "causal-mask" if call.sees.causal else ""


def _coordinates(x: Tensor) -> Iterator[Tensor]:
    for dim, size in enumerate(x.shape):
        shape = [1] * x.ndim
        shape[dim] = size
        yield torch.arange(size).view(shape)


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


def logarithms(read: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Of the ratios of read and exact weights, 0 where they are not clear; and 1 where they are."""
    clear = (read > 0) & (exact > CLEAR)
    log = (read.clamp_min(1e-300) / exact.clamp_min(1e-300)).log()
    return torch.where(clear, log, 0.0), clear.double()


def _ratios(trial: Trial, log: Tensor, weight: Tensor) -> Read:
    """What the ratio of read and exact weights is a function of."""
    call = trial.call
    noise = NOISE[call.query.dtype]
    size = rms(log, weight)
    rows = log.sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_min(1)
    rest = centered(log, weight)
    common, spread = rms(rows.expand_as(log), weight), rms(rest, weight)
    clear = weight > 0
    told = clear.any(-1)
    size_of = scores_of(call).logsumexp(-1)[told].exp()
    alike = _row_factor(call, rows[told].exp().flatten(), size_of, common < 8 * noise)
    if spread < 2 * noise and (spread < noise or spread**2 < (1 - SHARE) * size**2):
        return alike if common > noise / 4 else Read("the weights are right", "")
    found = (
        _of_scores(call, rest, weight)
        or _of_groups(rest, weight)
        or _of_operands(call, rest, weight)
    )
    if found is not None:
        return found
    if common > size / 2:
        return alike
    return _of_size(call, rest, clear, noise, f"{100 * size:.2g} %")


def _of_size(call: Call, rest: Tensor, clear: Tensor, noise: float, size: str) -> Read:
    """What the size of the ratios goes with, by Gaussian likelihoods: errors of scores grow with
    the score, those of the exponent with its distance from the maximum, those of weights with
    nothing.
    """
    scores = scores_of(call)
    below = scores.amax(-1, keepdim=True) - scores
    y = rest[clear].square()
    found = []
    for base, text, cause in (
        (torch.ones_like(scores), f"the weights are off by {size}, whatever the score", "weights"),
        (scores.abs(), "the weights are off, and the more the larger the score", "scores"),
        (below, "the weights are off, and the more the further below the maximum", "row-max"),
    ):
        x = base[clear].square()
        much = max(float(y.mean()) - noise**2, 0.0) / max(float(x.mean()), 1e-300)
        variance = (much * x + noise**2).clamp_min(1e-300)
        found.append((float((y / variance + variance.log()).mean()), text, cause))
    plain, best = found[0], min(found)
    told = best if best[0] < plain[0] - 0.05 else plain
    return Read(*told[1:], by_size=True)


def _row_factor(call: Call, factor: Tensor, row_sum: Tensor, little: bool) -> Read:
    """What one factor a row says: of sinks, of all rows alike, or of each row sum, beside which
    keys that are no keys have one size.
    """
    told = f"each row's weights are off by one factor, {_spread(factor)}"
    if call.sinks is not None:
        return Read(told, "sinks")
    log, more = factor.log(), float(((1 / factor - 1) * row_sum).median())
    rest = log + torch.log1p(more / row_sum) if more > 0 else log
    varied = float((log - log.median()).abs().median())
    if not little and float(rest.abs().median()) < STEADY * varied:
        return Read(f"{told}: {more:.3g} keys of score 0 are counted", "padding")
    around = float(log.std()) > 2 * abs(float(log.mean()))
    if around and float(log.diff().square().mean()) > float(log.var()):  # from row to row another
        return Read(told, "row-sum")
    if not little:
        return Read(told, "unnormalized")
    constant = float(factor.std()) < 0.3 * abs(float(factor.mean()) - 1)
    return Read(told, "weights-disagree" if constant else "row-sum")


def _spread(x: Tensor) -> str:
    low, high = float(x.min()), float(x.max())
    return f"{low:.4g}" if high - low < 1e-3 * abs(high) else f"{low:.3g} to {high:.3g}"


def rms(x: Tensor, weight: Tensor) -> float:
    """Root of the mean square, weighted."""
    return math.sqrt(float((x.square() * weight).sum() / weight.sum().clamp_min(1)))


def centered(x: Tensor, weight: Tensor) -> Tensor:
    """Less each row's mean."""
    count = weight.sum(-1, keepdim=True).clamp_min(1)
    return (x - (x * weight).sum(-1, keepdim=True) / count) * weight


def _of_scores(call: Call, rest: Tensor, weight: Tensor) -> Read | None:
    """Ratios that follow the scores: another scale, features left out, another function."""
    total = float(rest.square().sum())
    scores = torch.where(weight > 0, scores_of(call), 0.0)
    along = centered(scores, weight)
    slope = float((rest * along).sum() / along.square().sum().clamp_min(1e-300))
    if float((rest - slope * along).square().sum()) < (1 - SHARE) * total:
        factor = f"{1 + slope:.4g}" if abs(slope) > 1e-3 else f"{1 + slope:.8g}"
        return Read(f"scores are {factor} × what they should be", "scale")
    features = _of_features(call, rest, weight)
    if features is not None:
        return features
    powers = torch.stack([centered(scores**n, weight).flatten() for n in range(1, 6)], -1)
    fitted = powers @ torch.linalg.lstsq(powers, rest.flatten()[:, None]).solution
    if float((rest.flatten() - fitted[:, 0]).square().sum()) < (1 - SHARE) * total:
        cause = "softcap" if call.softcap else "exponential"
        return Read("the weights are another function of the score than the exponential", cause)
    return None


def _of_features(call: Call, rest: Tensor, weight: Tensor) -> Read | None:
    """Which features of Q and K enter the scores with another factor than 1, on one head."""
    head = (0, 0)
    rows = slice(max(0, rest.shape[2] - 48), None)
    d = call.query.shape[3]
    r, w = rest[head][rows], weight[head][rows]
    products = call.query[head][rows, None].double() * call.key[head][None].double() * call.scale
    mean = (products * w[..., None]).sum(1, keepdim=True) / w.sum(1).clamp_min(1)[:, None, None]
    x, y = ((products - mean) * w[..., None]).flatten(0, 1), r.flatten()
    if int(w.sum()) < 4 * d:
        return None
    factor = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    if float((y - x @ factor).square().sum()) > (1 - SHARE) * float(y.square().sum()):
        return None
    off = factor.abs() > 0.25 * factor.abs().max()
    if not bool(factor.isfinite().all()) or not bool(off.any()):
        return None
    told = f"features {ranges(off.nonzero().flatten())} of {d} enter the scores"
    size = 1 + float(factor[off].mean())
    return Read(f"{told} {size:.2g} × what they should", "ragged" if abs(size) < 0.1 else "operand")


def _of_operands(call: Call, rest: Tensor, weight: Tensor) -> Read | None:
    """Ratios that are the scores of another Q or K: linear in the operand that is right, in each
    row or column, on one head.
    """
    d = call.query.shape[3]
    q, k = call.query[0, 0], call.key[0, 0]
    for name, ratios, weights, mine, other in (
        ("Q", rest[0, 0], weight[0, 0], q, k),
        ("K", rest[0, 0].mT, weight[0, 0].mT, k, q),
    ):
        many = weights.sum(-1).topk(min(SOME, len(weights))).indices
        y, w = ratios[many], weights[many]
        n = float(w.sum(-1).mean())
        if n < 1.25 * d:
            continue
        x = torch.cat([other.double(), torch.ones(len(other), 1, dtype=torch.float64)], -1)
        x = x[None] * w[..., None]
        fitted = torch.linalg.lstsq(x, (y * w)[..., None]).solution
        left = y * w - (x @ fitted)[..., 0]
        # what as many random numbers would explain does not count
        if float(left.square().sum()) * n / (n - d) < (1 - SHARE) * float((y * w).square().sum()):
            moved, own = fitted[:, :d, 0], call.scale * mine[many].double()
            along = (moved * own).sum(-1).square() / own.square().sum(-1).clamp_min(1e-300)
            size = float(moved.square().sum())
            # no format, and no factor of a row, makes another operand so unlike
            if size > OTHER**2 * float(own.square().sum()) and float(along.sum()) < size / 2:
                return Read(
                    f"the scores are those of another {name}, which is unlike", "other-data"
                )
            return Read(f"the scores are those of another {name}", "operand")
    return None


def _of_groups(rest: Tensor, weight: Tensor) -> Read | None:
    """Ratios that are a function of where the pair sits."""
    n, n_key = rest.shape[-2:]
    b, h, i, j = (c.expand_as(rest) for c in _coordinates(rest))
    head = b * rest.shape[1] + h
    candidates: list[tuple[Tensor, str, str]] = []
    if n >= FEW_ROWS:
        candidates += [
            (head * n_key + j, "the weights of each key are off by one factor", "operand"),
            (j - i + n, "the ratio of the weights to the exact ones is a function of key − query",
             "mask"),
        ]  # fmt: skip
    row = head * n + i
    for width in sorted({*_WIDTHS, *(-(-n_key // parts) for parts in (2, 3, 4, 8))}, reverse=True):
        if width < n_key:
            blocks = -(-n_key // width)
            told = f"{blocks} parts of {width} keys have each a factor in a row"
            cause = "rescale" if width in (16, 32, 64, 128) else "split-merge"
            candidates.append((row * blocks + j.div(width, rounding_mode="floor"), told, cause))
    total = float(rest.square().sum())
    for coordinate, text, cause in candidates:
        index = coordinate.flatten()
        size = int(index.max()) + 1
        sums = torch.zeros(size, dtype=torch.float64).index_add_(0, index, rest.flatten())
        counts = torch.zeros(size, dtype=torch.float64).index_add_(0, index, weight.flatten())
        explained = float((sums.square() / counts.clamp_min(1)).sum())
        if explained > SHARE * total:
            if cause == "operand":
                factor = (sums / counts.clamp_min(1)).view(-1, n_key).mean(0)
                return _few_keys(factor) or _blocks(factor) or Read(text, cause)
            return Read(text, cause)
    return None


def _blocks(ratio: Tensor, widths: tuple[int, ...] = (128, 64, 32, 16)) -> Read | None:
    """Keys of whole blocks that have one factor."""
    for width in widths:
        blocks = [ratio[i : i + width] for i in range(0, len(ratio), width)]
        inside = sum(float((b - b.mean()).square().sum()) for b in blocks)
        if len(blocks) > 1 and inside < (1 - SHARE) * float((ratio - ratio.mean()).square().sum()):
            factors = ", ".join(f"{float(b.mean().exp()):.3g}" for b in blocks[:4])
            return Read(f"keys of blocks of {width} have {factors} … × their weight", "rescale")
    return None


def _few_keys(ratio: Tensor) -> Read | None:
    """Keys that have another weight than all others, if they are few."""
    usual = ratio.median()
    off = (ratio - usual).abs() > 0.3 * (ratio - usual).abs().max()
    if int(off.sum()) * 2 > len(ratio) or _blocks(ratio, (128, 64)):
        return None
    factor = float((ratio[off].mean() - usual).exp())
    told = (
        f"keys {ranges(off.nonzero().flatten())} of {len(ratio)} have {factor:.3g} × their weight"
    )
    where = off.nonzero().flatten()
    at_an_end = len(where) == int(where[-1] - where[0]) + 1 and (
        int(where[0]) == 0 or int(where[-1]) == len(ratio) - 1)  # fmt: skip
    if factor > KEPT and len(where) >= WHOLE:  # a part, and none that is left out
        return Read(told, "split-merge" if int(where[0]) % 64 else "rescale")
    return Read(told, "key-tail") if at_an_end else None
