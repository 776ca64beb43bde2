"""Faults in which data is taken: another head's or sequence's, in another layout, or parts that are
merged wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.calls import Call
from halfulp.reconstruct.emulating import GRADIENTS, Twist
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.panel import Trial
from halfulp.reconstruct.twists import Tensors, Turn


class _At(NamedTuple):
    """A query head of a sequence."""

    b: int
    h: int
    batch: int
    heads: int
    groups: int

    @property
    def own(self) -> int:
        """Its key head."""
        return self.h // self.groups

    @property
    def keys(self) -> int:
        """How many key heads there are."""
        return self.heads // self.groups


Pick = Callable[[_At], tuple[int, int]]


def pairings() -> Iterator[Twist]:
    """Query heads with the wrong key heads, sequences with another's keys."""
    named: tuple[tuple[str, str, str, Pick], ...] = (
        ("tile", "query head h takes key head h mod H_k", "key-heads",
         lambda at: (at.b, at.h % at.keys)),
        ("zero", "every query head takes key head 0", "key-heads", lambda at: (at.b, 0)),
        ("next", "each query head takes the next one's key head", "other-data",
         lambda at: (at.b, (at.h + 1) % at.heads // at.groups)),
        ("previous", "each query head takes the key head before its own", "other-data",
         lambda at: (at.b, max(at.own - 1, 0))),
        ("reversed", "key heads are taken in reverse order", "key-heads",
         lambda at: (at.b, at.keys - 1 - at.own)),
        ("last", "the last query head takes the key head before its own", "other-data",
         lambda at: (at.b, max(at.own - (at.h == at.heads - 1), 0))),
        ("batch-0", "every sequence takes the first one's keys", "other-data",
         lambda at: (0, at.own)),
        ("batch-next", "each sequence takes the next one's keys", "other-data",
         lambda at: ((at.b + 1) % at.batch, at.own)),
        ("batch-last", "the last sequence takes the keys of the one before", "other-data",
         lambda at: (max(at.b - (at.b == at.batch - 1), 0), at.own)),
    )  # fmt: skip
    for key, text, cause, pick in named:
        for names in (("key", "value"), ("key",), ("value",)):
            only = "" if len(names) == 2 else f" ({names[0]} alone)"
            yield Twist(f"heads-{key}-{'-'.join(names)}", text + only, cause,
                        *_paired(pick, names))  # fmt: skip


def _paired(pick: Pick, names: tuple[str, ...]) -> tuple[Turn, Callable[[Trial, Tensors], Tensors]]:
    def places(call: Call) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        b, h, g = call.query.shape[0], call.query.shape[1], call.groups
        every = [(i, j) for i in range(b) for j in range(h)]
        return [pick(_At(i, j, b, h, g)) for i, j in every], [(i, j // g) for i, j in every]

    def turn(trial: Trial) -> Trial | None:
        call = trial.call
        found, own = places(call)
        if found == own:
            return None
        key, value = (
            _gathered(getattr(call, name), found if name in names else own, call)
            for name in ("key", "value")
        )
        return replace(trial, call=replace(call, key=key, value=value))

    def back(trial: Trial, tensors: Tensors) -> Tensors:
        found, own = places(trial.call)
        summed = {}
        for name, grad in (("key", "grad_key"), ("value", "grad_value")):
            if grad in tensors:
                where = found if name in names else own
                summed[grad] = _scattered(tensors[grad], where, getattr(trial.call, name))
        return tensors | summed

    return turn, back


def _gathered(x: Tensor, where: list[tuple[int, int]], call: Call) -> Tensor:
    b, h = call.query.shape[:2]
    index = torch.tensor(where)
    return x[index[:, 0], index[:, 1]].reshape(b, h, *x.shape[2:])


def _scattered(grad: Tensor, where: list[tuple[int, int]], like: Tensor) -> Tensor:
    total, index = grad.new_zeros(like.shape), torch.tensor(where)
    total.index_put_((index[:, 0], index[:, 1]), grad.flatten(0, 1), accumulate=True)
    return total


def layouts() -> Iterator[Twist]:
    """Operands read in another order of dimensions, or in another's place."""

    def turned(trial: Trial) -> Trial | None:
        call = trial.call
        if call.groups != 1 or call.sees.mask is not None:
            return None
        q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
        if q.shape[1] != k.shape[1]:
            return None
        return replace(trial, call=replace(call, query=q, key=k, value=v),
                       grad_out=trial.grad_out.transpose(1, 2))  # fmt: skip

    def turned_back(_: Trial, tensors: Tensors) -> Tensors:
        return {name: x.transpose(1, 2) for name, x in tensors.items()}

    def read(x: Tensor) -> Tensor:
        b, h, n, d = x.shape
        return x.contiguous().view(b, n, h, d).transpose(1, 2)

    def written(x: Tensor) -> Tensor:
        b, h, n, d = x.shape
        return x.transpose(1, 2).contiguous().view(b, h, n, d)

    def reread(trial: Trial) -> Trial:
        call = trial.call
        q, k, v = (read(x) for x in (call.query, call.key, call.value))
        return replace(trial, call=replace(call, query=q, key=k, value=v),
                       grad_out=read(trial.grad_out))  # fmt: skip

    def rewritten(_: Trial, tensors: Tensors) -> Tensors:
        return {name: x if name == "lse" else written(x) for name, x in tensors.items()}

    def rewritten_out(_: Trial, tensors: Tensors) -> Tensors:
        return tensors | ({"out": written(tensors["out"])} if "out" in tensors else {})

    def exchanged(first: str, second: str) -> Turn:
        def turn(trial: Trial) -> Trial | None:
            a, b = getattr(trial.call, first), getattr(trial.call, second)
            if a.shape != b.shape:
                return None
            return replace(trial, call=replace(trial.call, **{first: b, second: a}))

        return turn

    def back_exchanged(first: str, second: str) -> Callable[[Trial, Tensors], Tensors]:
        def back(_: Trial, tensors: Tensors) -> Tensors:
            one, two = f"grad_{first}", f"grad_{second}"
            if one not in tensors:
                return tensors
            return tensors | {one: tensors[two], two: tensors[one]}

        return back

    yield Twist("layout-BNHD", "operands [B, H, N, D] are taken for [B, N, H, D]: attention over"
                " heads", "layout", turned, turned_back)  # fmt: skip
    yield Twist("layout-strides", "the memory of [B, H, N, D] is read as [B, N, H, D]", "layout",
                reread, rewritten)  # fmt: skip
    yield Twist("layout-out", "O is written as [B, N, H, D] and returned as [B, H, N, D]",
                "layout", lambda trial: replace(trial), rewritten_out)  # fmt: skip
    for first, second in (("query", "key"), ("key", "value"), ("query", "value")):
        yield Twist(f"exchanged-{first}-{second}", f"{first} and {second} are exchanged", "layout",
                    exchanged(first, second), back_exchanged(first, second))  # fmt: skip


def merges() -> Iterator[Twist]:
    """Parts of the keys merged without the weights that belong to them, and sums that a growing
    maximum leaves as they are.
    """
    for parts in (2, 3, 4, 8):
        for key, text, kind in (
            ("mean", "with equal weights", "mean"),
            ("sums", "by their row sums, not rescaled to one maximum", "sums"),
            ("maxima", "by their maxima alone", "maxima"),
        ):
            yield _merged(f"split-{parts}-{key}", f"{parts} parts of the keys are merged {text}",
                          "split-merge", _equal(parts), kind)  # fmt: skip
    for block in (32, 64, 128):
        for key, text, kind in (
            ("neither", "neither Ō nor l is rescaled where the maximum grows", "sums"),
            ("out", "Ō is not rescaled where the maximum grows", "out"),
            ("sum", "l is not rescaled where the maximum grows", "sum"),
        ):
            yield _merged(f"rescale-{block}-{key}", f"{text} (key blocks of {block})", "rescale",
                          _blocks(block), kind)  # fmt: skip
        for jump in (2.0**-5, 0.5, 1.0, 5.0):
            yield _merged(f"rescale-{block}-below-{jump:g}", "Ō, but not l, is left as it is where"
                          f" the maximum grows by less than {jump:g} (key blocks of {block})",
                          "rescale", _blocks(block), f"lazy{jump}")  # fmt: skip
        yield _merged(f"rescale-{block}-clamped", f"the factor that rescales Ō is kept above e⁻⁵"
                      f" (key blocks of {block})", "rescale", _blocks(block),
                      "clamp")  # fmt: skip
        for bits in (4.0, 8.0, 16.0):
            yield _merged(f"skipped-{block}-{bits:g}", f"key blocks of {block} that lie"
                          f" {bits:g} below the maximum are skipped", "tiles-skipped",
                          _blocks(block), f"skip{bits}")  # fmt: skip
    for kind, text in (("whole", "O is not divided by l"), ("last", "O is divided by the l of the"
                       " last 64 keys alone"), ("first", "O is divided by the l of the first 64"
                       " keys alone")):  # fmt: skip
        yield _merged(f"unnormalized-{kind}", text, "unnormalized", _blocks(64), kind)


def _equal(parts: int) -> Callable[[int], list[slice]]:
    def cut(n: int) -> list[slice]:
        width = -(-n // parts)
        return [slice(i, min(i + width, n)) for i in range(0, n, width)]

    return cut


def _blocks(width: int) -> Callable[[int], list[slice]]:
    return lambda n: [slice(i, min(i + width, n)) for i in range(0, n, width)]


def _merged(key: str, text: str, cause: str, cut: Callable[[int], list[slice]], kind: str) -> Twist:
    def turn(trial: Trial) -> Trial | None:
        # the last block alone is what there is where one block is all
        several = len(cut(trial.call.key.shape[2])) > 1 or kind == "whole"
        return replace(trial) if several else None

    def back(trial: Trial, tensors: Tensors) -> Tensors:
        if "out" not in tensors:
            return tensors
        parts = tuple((s.start, s.stop) for s in cut(trial.call.key.shape[2]))
        out, lse = _online(trial, parts, kind)
        exact, exact_lse = _online(trial, parts, "exact")
        changed = (tensors["out"] + (out - exact)).to(trial.call.query.dtype)
        moved = (lse - exact_lse).nan_to_num(0.0)  # rows that see nothing
        return {"out": changed.to(tensors["out"].dtype), "lse": tensors["lse"] + moved}

    return Twist(key, text, cause, turn, back)


@lru_cache(maxsize=16)
def _scores(trial: Trial) -> Tensor:
    call = trial.call
    key = call.key.double().repeat_interleave(call.groups, 1)
    scores = call.query.double() @ key.mT * call.scale
    return call.sees.apply(scores, slice(0, scores.shape[2]), slice(0, scores.shape[3]), 1.0)


@lru_cache(maxsize=64)
def _online(trial: Trial, parts: tuple[tuple[int, int], ...], kind: str) -> tuple[Tensor, Tensor]:
    """O and lse in fp64 by an online softmax over parts of the keys, with one thing wrong."""
    call = trial.call
    value, every = call.value.double().repeat_interleave(call.groups, 1), _scores(trial)
    acc: Tensor | float = 0.0
    l: Tensor | float = 0.0
    m = torch.full((*every.shape[:3], 1), -math.inf, dtype=torch.float64)
    sums, outs, tops = [], [], []
    for first, last in parts:
        s = every[..., first:last]
        top = s.amax(-1, keepdim=True)
        if kind.startswith("skip"):
            s = s.masked_fill(top < m - float(kind[4:]), -math.inf)
            top = s.amax(-1, keepdim=True)
        m_new = torch.maximum(m, top)
        shift = torch.where(m_new == -math.inf, 0.0, m_new)
        p, rescale = (s - shift).exp(), (m - shift).exp()
        pv, block = p @ value[:, :, first:last], p.sum(-1, keepdim=True)
        kept = rescale
        if kind in ("out", "sums"):
            kept = torch.ones_like(rescale)
        elif kind.startswith("lazy"):
            kept = torch.where(m_new - m < float(kind[4:]), 1.0, rescale)
        elif kind == "clamp":
            kept = rescale.clamp_min(math.exp(-5.0)).masked_fill(rescale == 0, 0.0)
        acc = acc * kept + pv
        l = l * (1.0 if kind in ("sum", "sums") else rescale) + block
        own = torch.where(top == -math.inf, 0.0, top)
        part = (s - own).exp()
        l_part = part.sum(-1, keepdim=True)
        sums.append(l_part)
        tops.append(top)
        outs.append(part @ value[:, :, first:last] / torch.where(l_part == 0, 1.0, l_part))
        m = m_new
    assert isinstance(acc, Tensor)
    assert isinstance(l, Tensor)
    lse = (m + l.log()).squeeze(-1)
    if kind in ("mean", "maxima"):
        weights = torch.stack([torch.ones_like(x) for x in sums])
        if kind == "maxima":
            weights = (torch.stack(tops) - torch.where(m == -math.inf, 0.0, m)).exp()
        out = (weights * torch.stack(outs)).sum(0) / weights.sum(0).clamp_min(1e-300)
        return out, lse
    if kind in ("last", "first"):
        l = sums[-1] if kind == "last" else sums[0]
        top = tops[-1] if kind == "last" else tops[0]
        l = l * (top - m).exp()
    if kind == "whole":
        return acc, lse
    return acc / torch.where(l == 0, 1.0, l), lse


def sources(trial: Trial, out: Observed) -> Twist | None:
    """Which heads are computed from another's data: each head of O that is far off is looked for
    among what the other heads' keys and values would give it.
    """
    call = trial.call
    b, h = call.query.shape[:2]
    if b * h > 24 or call.sees.mask is not None:
        return None
    head_error = (out.value - out.exact).square().sum((-1, -2))
    head_size = out.exact.square().sum((-1, -2))
    wrong = [(i, j) for i in range(b) for j in range(h)
             if float(head_error[i, j]) > 0.02 * float(head_size[i, j])]  # fmt: skip
    if not wrong:
        return None
    found: dict[tuple[int, int], tuple[str, tuple[int, int]]] = {}
    for place in wrong:
        best = min(_candidates(call, place, out), default=None)
        if best is not None and best[0] < 0.02 * float(head_size[place]):
            found[place] = best[1:]
    if len(found) < len(wrong):
        return None
    what = {w for w, _ in found.values()}
    if len(what) > 1:
        return None
    which = what.pop()
    told = "; ".join(f"{place} from {source}" for place, (_, source) in list(found.items())[:3])
    words = {"kv": "key and value", "k": "key", "v": "value", "q": "query", "qkv": "all operands"}
    text = f"heads (sequence, head) are computed from another's {words[which]}: {told}"
    if len(found) > 3:
        text += f" and {len(found) - 3} more"
    return _from_elsewhere(trial.name, text, which, {k: v for k, (_, v) in found.items()})


def _candidates(
    call: Call, place: tuple[int, int], out: Observed
) -> Iterator[tuple[float, str, tuple[int, int]]]:
    b, h = call.query.shape[:2]
    g = call.groups
    for i in range(b):
        for j in range(h):
            for which in ("kv", "q", "qkv", "k", "v"):
                if (i, j) == place or (which in ("kv", "k", "v") and (i, j // g) == (
                    place[0], place[1] // g)):  # fmt: skip
                    continue
                q = (i, j) if "q" in which else place
                k = (i, j) if "k" in which else place
                v = (i, j) if "v" in which else place
                part = _head_out(call, q, (k[0], k[1] // g), (v[0], v[1] // g))
                off = float((part - out.value[place]).square().sum())
                yield off, which, (i, j)


def _head_out(call: Call, q: tuple[int, int], k: tuple[int, int], v: tuple[int, int]) -> Tensor:
    scores = call.query[q].double() @ call.key[k].double().mT * call.scale
    scores = call.sees.apply(scores, slice(0, scores.shape[0]), slice(0, scores.shape[1]), 1.0)
    return scores.softmax(-1).nan_to_num(0.0) @ call.value[v].double()


def _from_elsewhere(
    name: str, text: str, which: str, found: dict[tuple[int, int], tuple[int, int]]
) -> Twist:
    def moved(x: Tensor, letter: str, groups: int) -> Tensor:
        x = x if letter == "q" else x.repeat_interleave(groups, 1)
        if letter not in which:
            return x
        x = x.clone()
        original = x.clone()
        for place, source in found.items():
            x[place] = original[source]
        return x

    def turn(trial: Trial) -> Trial | None:
        call = trial.call
        if trial.name.partition("/")[0] != name or call.query.shape[1] <= max(
            max(p[1], s[1]) for p, s in found.items()):  # fmt: skip
            return None
        g = call.groups
        q, k, v = (moved(x, c, g) for x, c in ((call.query, "q"), (call.key, "k"),
                                               (call.value, "v")))  # fmt: skip
        return replace(trial, call=replace(call, query=q, key=k, value=v))

    def back(trial: Trial, tensors: Tensors) -> Tensors:
        call, changed = trial.call, dict(tensors)
        for grad, letter in zip(GRADIENTS, "qkv", strict=True):
            if grad not in tensors:
                continue
            x = tensors[grad].clone()
            if letter in which:
                own = tensors[grad]
                for place in found:
                    x[place] = 0
                for place, source in found.items():
                    x[source] += own[place]
            if letter != "q" and call.groups > 1:
                x = x.reshape(x.shape[0], -1, call.groups, *x.shape[2:]).sum(2)
            changed[grad] = x
        return changed

    return Twist(f"elsewhere-{name}-{which}-{sorted(found.items())}", text, "other-data", turn,
                 back)  # fmt: skip


def fitted_scales(trial: Trial, out: Observed) -> Twist | None:
    """The factor on the scale that explains most of O's error, where one explains more than
    half.
    """
    factor = 1.0
    for _ in range(4):
        here, moved = (_exact_out(trial, factor * (1 + step)) for step in (0.0, 1e-4))
        slope = (moved - here) / 1e-4
        size = float(slope.square().sum())
        if size == 0:
            return None
        factor *= 1 + max(-0.5, min(0.5, float(((out.value - here) * slope).sum()) / size))
    left = float((out.value - _exact_out(trial, factor)).square().sum())
    if left > 0.5 * out.total or abs(factor - 1) < 1e-4:
        return None

    def turn(asked: Trial) -> Trial:
        return replace(asked, call=replace(asked.call, scale=asked.call.scale * factor))

    text = f"the scale is {factor:.4g} × what was asked for"
    return Twist(f"scale-{factor:.4g}", text, "scale", turn)


def _exact_out(trial: Trial, factor: float) -> Tensor:
    call = trial.call
    key, value = (x.double().repeat_interleave(call.groups, 1) for x in (call.key, call.value))
    scores = call.query.double() @ key.mT * (call.scale * factor)
    scores = call.sees.apply(scores, slice(0, scores.shape[2]), slice(0, scores.shape[3]), 1.0)
    return scores.softmax(-1).nan_to_num(0.0) @ value
