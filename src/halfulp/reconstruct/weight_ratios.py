"""What the ratio of weights that were read to the exact ones is a function of: the score, features,
another Q or K, the key, a block of keys, the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfulp.calls import Call
from halfulp.formats import BF16, FP16
from halfulp.reconstruct.elements_read import by_number, exchanged_features
from halfulp.reconstruct.exact import centered, rms, scores_of
from halfulp.reconstruct.operation_sums import running
from halfulp.reconstruct.panel import Trial
from halfulp.reconstruct.part_ratios import (
    COARSEST,
    hidden_counted,
    hides,
    of_parts,
    power_of_sums,
)
from halfulp.reconstruct.ranges import ranges
from halfulp.reconstruct.scaled_keys import scaled_keys

SHARE = 0.85  # of the ratios' variance that a pattern must explain
SLOPED = 0.01  # of it that a slope may leave: one factor for each of few blocks leaves more
OTHER = 0.5  # of an operand's size: from there on it is no coarser one, but another
SOME = 24  # rows that a linear fit is tried on
_WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
STEADY = 0.2  # of how factors vary, that one number added to row sums may leave
WHOLE, KEPT = 32, 0.1  # keys with a factor of more are a part that is merged otherwise
HALF, MORE = 0.5, 1.1  # of the squares, that one number explains; times what one a row leaves
ALONG = 0.5  # the cosine of factors with the row sums that they lack
TOLD = 0.5  # off 1, from where on a scale that enters twice is told from what is right
TWICE = 0.05  # of a factor of 2, that keys which are read twice may be off by
FEW_ROWS = 16  # with fewer any ratio is a function of the key
# rms of the ratios that rounding makes
NOISE = {torch.bfloat16: 2.5e-3, torch.float16: 3.2e-4, torch.float32: 2.0**-21}


@dataclass(frozen=True)
class Read:
    """What the weights that were read say."""

    text: str
    cause: str  # a key of CAUSES; empty where they are right
    by_size: bool = False  # told by how large the ratios are, and no more


def coordinates(x: Tensor) -> Iterator[Tensor]:
    """The sequence, head, query and key of each element."""
    for dim, size in enumerate(x.shape):
        shape = [1] * x.ndim
        shape[dim] = size
        yield torch.arange(size).view(shape)


def compared_ratios(
    trial: Trial, log: Tensor, weight: Tensor, backward: bool, sums: Tensor | None = None
) -> Read:
    """What the ratio of read and exact weights is a function of; `sums` are how many times those
    of the exact ones the rows' sums are.
    """
    call, noise, size = trial.call, NOISE[trial.call.query.dtype], rms(log, weight)
    rows = log.sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_min(1)
    rest = centered(log, weight)
    common, spread = rms(rows.expand_as(log), weight), rms(rest, weight)
    clear = weight > 0
    told = clear.any(-1)

    def alike() -> Read:
        little = common < 8 * noise
        by_row = spread < common / 4  # of each weight it would be another number
        if not little and (bits := cut_to(log[clear])) > by_row:  # no format has 1 bit alone
            if by_row and not backward:
                what = "each row's factor, as the reciprocal of its sum, is"
                return Read(f"{what} cut to {bits} bits of mantissa", "reciprocal")
            return Read(f"the weights are cut to {bits} bits of mantissa", "weights")
        if not (little or backward) and hidden_counted(call, rows.squeeze(-1), told):
            return Read("each row's sum has the pairs as well that are hidden", hides(call))
        if not little and (read := _of_a_short_sum(call, rows.squeeze(-1), told)):
            return read
        if backward and not little and (read := _of_parts_of_lse(call, rows.squeeze(-1), told)):
            return read
        size_of = scores_of(call).logsumexp(-1)[told].exp()
        return _row_factor(call, rows[told].exp().flatten(), size_of, little, backward)

    if backward and (own := _of_own_scores(call, log, weight, float(rest.square().sum()))):
        return own
    if spread < 2 * noise and (spread < noise or spread**2 < (1 - SHARE) * size**2):
        return alike() if common > noise / 4 else Read("the weights are right", "")
    found = (
        _of_maximum(call, rest, weight)
        or of_scores(call, rest, weight)
        or _of_scaled_keys(call, log, weight)
        or _of_groups(call, rest, weight, noise, log)
        or _of_operands(call, rest, weight)
    )
    if found is not None:
        return found
    # what other scores make of a row's weights leaves their sum as it is
    whole = sums is not None and not backward and float(sums[told].log().square().mean()) < (
        ALONG * common) ** 2  # fmt: skip
    if common > size / 2 and not whole:
        return alike()
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


def cut_to(log: Tensor) -> int:
    """The bits of mantissa that weights are cut to, the first not counted, where these logarithms
    of ratios are between 0 and what the last bit makes, as often at one as at the other; else 0.
    """
    mean, most = float(log.mean()), float(-log.min())
    even = 0.45 < float(log.std()) / max(-mean, 1e-300) < 0.7  # 1/√3 of what is uniform
    if mean >= 0 or not even or most > 5 * -mean or float(log.max()) > most / 16:
        return 0
    return round(math.log2(math.log(2) / 2 / -mean))  # half a unit over mantissas from 1 to 2


def _of_a_short_sum(call: Call, log: Tensor, told: Tensor) -> Read | None:
    """Whether one factor a row, as logarithms `[B, H, N]`, is what a sum over the row makes that is
    rounded after every key: it stays where it is once keys are small beside it.
    """
    if call.sinks is not None:
        return None
    scores = scores_of(call)
    terms = (scores - scores.amax(-1, keepdim=True)).exp()
    for fmt in (BF16, FP16):
        total = running(terms.float(), fmt, dim=3, block=1).double().sum(-1)
        left = log - (terms.sum(-1) / total).log()
        if float(left[told].square().mean()) < (1 - SHARE) * float(log[told].square().mean()):
            return Read(f"the row sum is rounded to {fmt} after every key", "row-sum")
    return None


def _of_parts_of_lse(call: Call, log: Tensor, told: Tensor) -> Read | None:
    """Whether one factor a row, as logarithms `[B, H, N]`, is what an lse makes of which the row's
    maximum and the logarithm of its sum have factors of their own, as of other bases.
    """
    scores = scores_of(call)
    top = scores.amax(-1)[told]
    if call.sinks is not None or len(top) < SOME:
        return None
    parts = torch.stack([top, scores.logsumexp(-1)[told] - top], -1)
    off = torch.linalg.lstsq(parts, log[told][:, None]).solution
    left = log[told] - (parts @ off)[:, 0]
    little = float(left.square().sum()) <= SLOPED * float(log[told].square().sum())
    if not little or float(off.abs().max()) < SLOPED:  # what rounding makes of it is no base
        return None
    of_top, of_sum = (1 - off[:, 0]).tolist()
    return Read(f"lse is read as {of_top:.3g} × the row's maximum + {of_sum:.3g} × the logarithm of"
                " its sum", "lse-other")  # fmt: skip


def _row_factor(call: Call, factor: Tensor, row_sum: Tensor, little: bool, backward: bool) -> Read:
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
    noise = NOISE[call.query.dtype]
    if _replaced(log, row_sum.log(), noise):
        return Read(f"{told}: as if each had another row's sum", "unnormalized")
    size = row_sum.log().abs() if backward else torch.ones_like(log)
    coarse = bool((log.abs() <= COARSEST * size + noise).all())
    around = coarse and float(log.std()) > 2 * abs(float(log.mean()))
    if around and float(log.diff().square().mean()) > float(log.var()):  # from row to row another
        return Read(told, "row-sum")
    if not little:
        return Read(told, "row-sum" if coarse and backward else "unnormalized")
    constant = float(factor.std()) < 0.3 * abs(float(factor.mean()) - 1)
    return Read(told, "weights-disagree" if constant else "row-sum")


def _replaced(log: Tensor, lse: Tensor, noise: float) -> bool:
    """Whether rows that are off are so by what their own sum has and another has not: what is
    rounded goes with no row's sum, what is of another row lacks all of its own.
    """
    off = log.abs() > 4 * noise
    if int(off.sum()) < SOME:
        return False
    x, y = (t[off] - t[off].mean() for t in (lse, log))
    slope = float((x * y).sum() / x.square().sum().clamp_min(1e-300))
    along = slope * float(x.square().sum().sqrt() / y.square().sum().clamp_min(1e-300).sqrt())
    return along > ALONG and abs(slope - 1) < 1 - ALONG


def _spread(x: Tensor) -> str:
    low, high = float(x.min()), float(x.max())
    return f"{low:.4g}" if high - low < 1e-3 * abs(high) else f"{low:.3g} to {high:.3g}"


def _of_own_scores(call: Call, log: Tensor, weight: Tensor, left: float) -> Read | None:
    """Whether weights that no row sums to 1 are off as their scores' multiples are: one number that
    leaves no more than one of each row.
    """
    scores = torch.where(weight > 0, scores_of(call), 0.0)
    slope = float((log * scores).sum() / scores.square().sum().clamp_min(1e-300))
    total = float((log - slope * scores).square().sum())
    if total > MORE * left or total > (1 - HALF) * float(log.square().sum()):
        return None
    return Read(f"scores are {1 + slope:.4g} × what they should be", "scale")


def of_scores(call: Call, rest: Tensor, weight: Tensor) -> Read | None:
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


def _of_scaled_keys(call: Call, log: Tensor, weight: Tensor) -> Read | None:
    text, cause = scaled_keys(call, log, weight)
    return Read(text, cause) if cause else None


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
    if abs(size / call.scale - 1) < TWICE and abs(call.scale - 1) > TOLD:
        return Read(f"{told} multiplied by the scale once more", "scale")
    return Read(f"{told} {size:.2g} × what they should", "ragged" if abs(size) < 0.1 else "operand")


def _of_operands(call: Call, rest: Tensor, weight: Tensor) -> Read | None:
    """Ratios that are the scores of another Q or K, linear in the right one, on one head."""
    d, q, k = call.query.shape[3], call.query[0, 0], call.key[0, 0]
    for name, ratios, weights, mine, other in (
        ("Q", rest[0, 0], weight[0, 0], q, k),
        ("K", rest[0, 0].mT, weight[0, 0].mT, k, q),
    ):
        another = f"the scores are those of another {name}"
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
            some = moved.norm(dim=-1) > OTHER * own.norm(dim=-1)  # the rest may be their own
            few = bool(moved[some].norm() > SHARE * moved.norm()) and not bool(some.all())
            of = f", as in rows {ranges(many[some].sort().values)}" if few else ""
            moved, own = (moved[some], own[some]) if few else (moved, own)
            along = (moved * own).sum(-1).square() / own.square().sum(-1).clamp_min(1e-300)
            size = float(moved.square().sum())
            # no format, and no factor of a row, makes another operand so unlike
            if size > OTHER**2 * float(own.square().sum()):
                if not few and (exchanged := exchanged_features(moved + own, own)):
                    return Read(exchanged, "layout")
                if float(along.sum()) < size / 2:
                    if not few and by_number(moved + own, own):
                        return Read(f"{another}, of other numbers, one for each", "operand")
                    return Read(f"{another}, which is unlike{of}", "other-data")
                if float(along.sum()) > SHARE * size:
                    factor = 1 + (moved * own).sum(-1) / own.square().sum(-1).clamp_min(1e-300)
                    told = f"{_spread(factor)} × what they should be, by the row of {name}"
                    return Read(f"scores are {told}", "scale")
            return Read(another, "operand")
    return None


def _of_groups(call: Call, rest: Tensor, weight: Tensor, noise: float, log: Tensor) -> Read | None:
    """Ratios that are a function of where the pair sits: `rest` in their rows, or `log`."""
    n, n_key = rest.shape[-2:]
    b, h, i, j = (c.expand_as(rest) for c in coordinates(rest))
    head = b * rest.shape[1] + h
    total, chance = float(rest.square().sum()), noise**2 * float(weight.sum())
    if n >= FEW_ROWS:
        factor, explained = _means(head * n_key + j, rest, weight)
        if explained > SHARE * total:
            factor = factor.view(-1, n_key).mean(0)
            read = _unequal_parts(call, rest, weight) or _sloped(factor)
            read = read or _few_keys(factor) or _blocks(factor)
            return read or Read("the weights of each key are off by one factor", "operand")
        told = "the ratio of the weights to the exact ones is a function of key − query"
        for of, text in ((0, told), (head * (n + n_key), f"{told}, another in each head")):
            if _means(of + j - i + n, rest, weight)[1] > SHARE * max(total - chance, total / 2):
                return Read(text, "mask")
    row, left = head * n + i, {}
    for width in sorted({*_WIDTHS, *(-(-n_key // parts) for parts in (2, 3, 4, 8))}, reverse=True):
        if width < n_key:
            part = row * -(-n_key // width) + j.div(width, rounding_mode="floor")
            explained = _means(part, rest, weight)[1]
            if explained > SHARE * max(total - chance, total / 2):
                left[width] = total - explained
    if not left:
        return None
    # the widest, unless one that is little narrower leaves far less
    width = max(left)
    narrower = min((x for x in left if 2 * x > width), key=left.__getitem__)
    width = narrower if left[narrower] < HALF * left[width] else width
    blocks = -(-n_key // width)
    means, _ = _means(row * blocks + j.div(width, rounding_mode="floor"), rest, weight)
    told, cause = of_parts(call, means.view(*rest.shape[:3], -1), width, log, weight)
    return Read(f"{blocks} parts of {width} keys have each a factor in a row{told}", cause)


def _means(where: Tensor, rest: Tensor, weight: Tensor) -> tuple[Tensor, float]:
    """The mean of ratios at each value of a coordinate, and how much of their squares it is."""
    index = where.flatten()
    sums, counts = (torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add_(
        0, index, x.flatten()) for x in (rest, weight))  # fmt: skip
    means = sums / counts.clamp_min(1)
    return means, float((sums * means).sum())


def _unequal_parts(call: Call, rest: Tensor, weight: Tensor) -> Read | None:
    """Whether a first part of the keys and a shorter rest are weighed by a power of their sums."""
    n_key = rest.shape[-1]
    for width in (128, 64, 32, 16):
        if width < n_key < 2 * width:
            each = zip(*(torch.split(x, width, -1) for x in (rest, weight)), strict=True)
            means = torch.stack([a.sum(-1) / w.sum(-1).clamp_min(1) for a, w in each], -1)
            if power := power_of_sums(call, means, width):
                return Read(f"the first {width} keys and the rest are weighed as of sums to the"
                            f" power of {power:.3g}", "split-merge")  # fmt: skip
    return None


def _of_maximum(call: Call, rest: Tensor, weight: Tensor) -> Read | None:
    """Keys whose weights are off by what the exponential of their row's maximum is, beside others:
    the maximum is taken off one of them alone.
    """
    count = weight.sum((0, 1, 2))
    each = rest.sum((0, 1, 2)) / count.clamp_min(1)
    low, high = float(each[count > 0].min()), float(each[count > 0].max())
    more = each > (low + high) / 2
    one, two = weight * (more & (count > 0)), weight * ~more
    n_one, n_two = one.sum(-1), two.sum(-1)
    known = (n_one > 0) & (n_two > 0)
    if int(known.sum()) < SOME:
        return None
    apart = (rest * one).sum(-1) / n_one.clamp_min(1) - (rest * two).sum(-1) / n_two.clamp_min(1)
    y, top = apart[known], scores_of(call).amax(-1)[known]
    x = top - top.mean()
    slope = float((x * (y - y.mean())).sum() / x.square().sum().clamp_min(1e-300))
    left = y - math.copysign(1.0, slope) * top
    if abs(abs(slope) - 1) > ALONG or float(left.square().sum()) > (1 - SHARE) * float(
        y.square().sum()):  # fmt: skip
        return None
    keys = ranges((more if 2 * int(more.sum()) <= len(more) else ~more).nonzero().flatten())
    told = f"weights of keys {keys} of {len(more)} and of the others are apart by exp of their"
    return Read(f"{told} row's maximum, which is taken off one of them alone", "maximum")


def _sloped(ratio: Tensor) -> Read | None:
    """A factor from each key to the next: rows have no other sum by it, and see no distance."""
    at = torch.arange(len(ratio)).double()
    at, own = at - at.mean(), ratio - ratio.mean()
    slope = float((at * own).sum() / at.square().sum())
    if float((own - slope * at).square().sum()) > SLOPED * float(own.square().sum()):
        return None
    told = f"weights grow by {math.exp(slope):.4g} × from key to key"
    return Read(f"{told}, as by a bias of distances", "mask")


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
    if abs(factor - 2) < TWICE and (not at_an_end or int(where[0]) == 0 < len(where) - 1 < WHOLE):
        # once, as of a last block that is moved back; again and again, as where parts overlap
        runs = 1 + int((where.diff() > 1).sum())
        return Read(f"{told}: they are read twice", "other-data" if runs == 1 else "split-merge")
    if factor > 1 and len(where) == 1 and at_an_end:
        return Read(f"{told}: a copy of it stands beyond the end", "padding")
    if factor > KEPT and len(where) >= WHOLE:  # a part, and none that is left out
        return Read(told, "split-merge" if int(where[0]) % 64 else "rescale")
    return Read(told, "key-tail") if at_an_end else None
