"""Faults in which data is taken: another head's or sequence's, in another layout, or parts that are
merged wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfulp.calls import Call
from halfulp.reconstruct.emulating import Twist
from halfulp.reconstruct.exact import scores_of, weights_of
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
        ("batch-previous", "each sequence takes the previous one's keys", "other-data",
         lambda at: ((at.b - 1) % at.batch, at.own)),
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


def _read(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    return x.contiguous().view(b, n, h, d).transpose(1, 2)


def _written(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    return x.transpose(1, 2).contiguous().view(b, h, n, d)


def _keys_reread() -> Twist:
    def turn(trial: Trial) -> Trial | None:
        call = trial.call
        if call.key.shape[1] == 1:
            return None
        return replace(trial, call=replace(call, key=_read(call.key), value=_read(call.value)))

    def back(_: Trial, tensors: Tensors) -> Tensors:
        keys = {"grad_key", "grad_value"}
        return {name: _written(x) if name in keys else x for name, x in tensors.items()}

    return Twist("layout-keys", "the memory of K and V, [B, H, N, D], is read as [B, N, H, D]",
                 "layout", turn, back)  # fmt: skip


def _as_far_apart(name: str, other: str) -> Twist:
    def turn(trial: Trial) -> Trial | None:
        x, wide = getattr(trial.call, name), getattr(trial.call, other).shape[-1]
        b, heads, n, d = x.shape
        if wide == d:
            return None
        own = torch.arange(b * heads).view(b, heads, 1, 1) * (n * d)
        places = own + torch.arange(n)[:, None] * wide + torch.arange(d)
        # what lies behind a head is the next one's; behind the last one lies what nobody knows
        moved: dict[str, Any] = {name: x.flatten()[places.clamp_max(x.numel() - 1)]}
        return replace(trial, call=replace(trial.call, **moved))

    told = f"rows of {name[0].upper()} are read as far apart as {other[0].upper()}'s"
    return Twist(f"apart-{name}-{other}", told, "layout", turn, lambda _, tensors: tensors)


def _operands_in(turned: Callable[[Tensor], Tensor], trial: Trial) -> Trial:
    call = trial.call
    q, k, v = (turned(x) for x in (call.query, call.key, call.value))
    return replace(trial, call=replace(call, query=q, key=k, value=v))


def _weighed_across(trial: Trial, tensors: Tensors) -> Tensors:
    if "out" not in tensors:
        return tensors
    call, weights = trial.call, weights_of(trial.call, _scores(trial))
    across = (weights.mT - weights) @ call.value.double().repeat_interleave(call.groups, 1)
    changed = (tensors["out"] + across).to(call.query.dtype)
    return tensors | {"out": changed.to(tensors["out"].dtype)}


def _transposed(trial: Trial) -> Trial | None:
    call = trial.call
    alike = call.query.shape == call.key.shape == call.value.shape
    sees = call.sees
    if not alike or sees.causal or sees.window or sees.mask is not None or call.sinks is not None:
        return None
    changed = {name: getattr(call, name).mT for name in ("query", "key", "value")}
    turned = replace(call, **changed, scale=call.scale, shape=None)
    return replace(trial, call=turned, grad_out=trial.grad_out.mT)


def _transposed_back(trial: Trial, tensors: Tensors) -> Tensors:
    # a row's lse is none of these, which have one for each feature
    lse = {"lse": torch.zeros(trial.call.query.shape[:3])} if "lse" in tensors else {}
    return {n: x.mT for n, x in tensors.items() if n != "lse"} | lse


def _in_place(name: str, other: str, trial: Trial) -> Trial | None:
    theirs = getattr(trial.call, other)
    if theirs.shape != getattr(trial.call, name).shape:
        return None
    changed: dict[str, Any] = {name: theirs}
    return replace(trial, call=replace(trial.call, **changed))


def _operands_otherwise() -> Iterator[Twist]:
    """Operands that are read in another order while O is not, or in another's place, and weights
    that are transposed.
    """
    for key, text, turned_to in (
        ("viewed", "rows of all heads, [B, N, H, D], are viewed as [B, H, N, D]", _written),
        ("read", "the memory of [B, H, N, D] is read as [B, N, H, D], and O is put in its place",
         _read),
    ):  # fmt: skip
        yield Twist(f"layout-{key}", text, "layout", partial(_operands_in, turned_to))
    yield Twist("weights-transposed", "the weights are transposed before they weigh V", "layout",
                lambda trial: replace(trial) if trial.call.scores_shape[2] ==
                trial.call.scores_shape[3] else None, _weighed_across)  # fmt: skip
    yield Twist("layout-features", "features attend to features: Q, K and V are transposed",
                "layout", _transposed, _transposed_back)  # fmt: skip
    for name, other in permutations(("query", "key", "value"), 2):
        told = f"{other[0].upper()} stands in the place of {name[0].upper()}"
        yield Twist(f"in-place-{name}-{other}", told, "other-data", partial(_in_place, name, other))


def layouts() -> Iterator[Twist]:
    """Operands read in another order of dimensions, or in another's place."""

    def turned(trial: Trial) -> Trial | None:
        call = trial.call
        if call.sees.mask is not None or call.sinks is not None:
            return None
        q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
        if q.shape[1] != k.shape[1]:
            return None
        return replace(trial, call=replace(call, query=q, key=k, value=v),
                       grad_out=trial.grad_out.transpose(1, 2))  # fmt: skip

    def turned_back(_: Trial, tensors: Tensors) -> Tensors:
        return {name: x.transpose(1, 2) for name, x in tensors.items()}

    def reread(trial: Trial) -> Trial:
        return replace(_operands_in(_read, trial), grad_out=_read(trial.grad_out))

    def rewritten(_: Trial, tensors: Tensors) -> Tensors:
        return {name: x if name == "lse" else _written(x) for name, x in tensors.items()}

    def rewritten_out(_: Trial, tensors: Tensors) -> Tensors:
        return tensors | ({"out": _written(tensors["out"])} if "out" in tensors else {})

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
    yield _keys_reread()
    yield _as_far_apart("value", "query")
    yield _as_far_apart("key", "value")
    yield Twist("layout-out", "O is written as [B, N, H, D] and returned as [B, H, N, D]",
                "layout", lambda trial: replace(trial), rewritten_out)  # fmt: skip
    yield Twist("layout-around", "O is written as [B, N, H, D] and returned as [B, H, N, D], and dO"
                " is taken so", "layout", lambda trial: replace(trial, grad_out=_read(
                    trial.grad_out)), rewritten_out, around=True)  # fmt: skip
    yield from _operands_otherwise()
    for first, second in (("query", "key"), ("key", "value"), ("query", "value")):
        yield Twist(f"exchanged-{first}-{second}", f"{first} and {second} are exchanged", "layout",
                    exchanged(first, second), back_exchanged(first, second))  # fmt: skip


def rows() -> Iterator[Twist]:
    """Operands whose rows are their neighbors', before a kernel that is sound, which gives each row
    its own gradient.
    """
    for names in (("query",), ("key",), ("value",), ("key", "value")):
        for by, which in ((1, "before"), (-1, "after")):
            told = " and ".join(n[0].upper() for n in names)
            yield Twist(f"rows-{by}-{'-'.join(names)}", f"{told} of each row is that of the row"
                        f" {which}", "other-data", partial(_rolled, names, by),
                        partial(_rolled_back, names, by))  # fmt: skip


def _rolled(names: tuple[str, ...], by: int, trial: Trial) -> Trial | None:
    if trial.call.query.shape[2] == 1 and names == ("query",):
        return None
    changed = {name: getattr(trial.call, name).roll(by, 2) for name in names}
    return replace(trial, call=replace(trial.call, **changed))


def _rolled_back(names: tuple[str, ...], by: int, _: Trial, tensors: Tensors) -> Tensors:
    own = {f"grad_{name}" for name in names} & tensors.keys()
    return tensors | {name: tensors[name].roll(-by, 2) for name in own}


def sums() -> Iterator[Twist]:
    """Row sums that have more than the weights."""

    def turn(trial: Trial) -> Trial | None:
        if trial.call.sinks is not None:
            return None
        return replace(
            trial, call=replace(trial.call, sinks=torch.zeros(trial.call.query.shape[1]))
        )

    yield Twist("sum-one-more", "the row sum has exp(0) more, as with a sink of 0", "unnormalized",
                turn)  # fmt: skip


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
            ("late", "Ō is rescaled after a block is added, not before", "late"),
            ("late-both", "Ō and l are rescaled after a block is added, not before", "late both"),
        ):
            yield _merged(f"rescale-{block}-{key}", f"{text} (key blocks of {block})", "rescale",
                          _blocks(block), kind)  # fmt: skip
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
    return scores_of(trial.call)


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
        kept = torch.ones_like(rescale) if kind == "sums" else rescale
        late = 1.0 if m.isinf().all() else rescale  # nothing is rescaled at the first block
        acc = (acc + pv) * late if kind.startswith("late ") or kind == "late" else acc * kept + pv
        l = (l + block) * late if kind == "late both" else l * kept + block
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
