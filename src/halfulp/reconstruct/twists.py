"""Faults of structure, each as the call that would be computed instead: masks, ends of sequences,
heads, layouts and scales.

Every function returns twists that may fit any call; where one changes nothing it says so itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from halfulp.algorithms.problem import LOG2_E
from halfulp.calls import Call, Sees
from halfulp.reconstruct.emulating import GRADIENTS, Twist
from halfulp.reconstruct.exact import row_maximum
from halfulp.reconstruct.panel import Trial

BLOCKS = (16, 32, 64, 128)

Turn = Callable[[Trial], Trial | None]
Tensors = dict[str, Tensor]


def _with(trial: Trial, **changes: object) -> Trial:
    return replace(trial, call=replace(trial.call, **changes))  # type: ignore[arg-type]


def _sees(trial: Trial, **changes: object) -> Trial:
    return _with(trial, sees=replace(trial.call.sees, **changes))  # type: ignore[arg-type]


def _positions(call: Call) -> tuple[Tensor, Tensor]:
    return torch.arange(call.query.shape[2])[:, None], torch.arange(call.key.shape[2])[None, :]


def masks() -> Iterator[Twist]:
    """Causal masks that are off, ignored or aligned otherwise; masks of others."""

    def causal(change: Callable[[Call], Sees | None]) -> Turn:
        def turn(trial: Trial) -> Trial | None:
            sees = change(trial.call) if trial.call.sees.causal else None
            return None if sees is None else _with(trial, sees=sees)

        return turn

    def pattern(visible: Callable[[Tensor, Tensor], Tensor]) -> Turn:
        return causal(lambda call: Sees(mask=visible(*_positions(call))))

    def aligned(call: Call) -> Sees | None:
        offset = call.key.shape[2] - call.query.shape[2]
        return None if offset == call.sees.offset else replace(call.sees, offset=offset)

    def shifted(by: int) -> Turn:
        return causal(lambda call: replace(call.sees, offset=call.sees.offset + by))

    name = "causal-mask"
    yield Twist("causal+1", "the causal mask lets each query see one key too many", name,
                shifted(1))  # fmt: skip
    yield Twist("causal-1", "the causal mask hides the diagonal", name, shifted(-1))
    yield Twist("causal-none", "the causal mask is not applied", name, causal(lambda _: Sees()))
    yield Twist("causal-aligned", "the causal mask is aligned at the bottom right, not at the top"
                " left", name, causal(aligned))  # fmt: skip
    yield Twist("causal-turned", "the causal mask hides the past, not the future", name,
                pattern(lambda i, j: j >= i))  # fmt: skip
    for block in BLOCKS:
        for key, text, visible in _at_blocks(block):
            yield Twist(f"causal-{key}-{block}", text, name, pattern(visible))
    yield Twist("causal-always", "a causal mask is applied that was not asked for", name,
                lambda t: None if t.call.sees.causal else _sees(t, causal=True))  # fmt: skip
    yield from _given_masks()
    yield from _finite_masks()


def _at_blocks(block: int) -> Iterator[tuple[str, str, Callable[[Tensor, Tensor], Tensor]]]:
    def edge(i: Tensor, j: Tensor) -> Tensor:
        return j <= i + (i % block == block - 1)

    def whole(i: Tensor, j: Tensor) -> Tensor:
        return j // block <= i // block

    def before(i: Tensor, j: Tensor) -> Tensor:
        return (j // block < i // block) | (j == i)

    def chunk(i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j // block == i // block)

    yield "chunk", f"no query sees a key before its own block of {block}", chunk
    yield "edge", f"the last query of blocks of {block} sees the next block's first key", edge
    told = f"the causal mask is applied in blocks of {block}: the whole block on the diagonal is"
    yield "whole", f"{told} seen", whole
    yield "before", f"the blocks of {block} on the diagonal are skipped", before


def _mask4(trial: Trial) -> Tensor | None:
    mask = trial.call.sees.mask
    return None if mask is None else mask[(None,) * (4 - mask.ndim)]


def _given_masks() -> Iterator[Twist]:
    def given(change: Callable[[Tensor, Trial], Tensor | None]) -> Turn:
        def turn(trial: Trial) -> Trial | None:
            mask = _mask4(trial)
            changed = None if mask is None else change(mask, trial)
            return None if changed is None else _sees(trial, mask=changed)

        return turn

    def additive(factor: Callable[[Trial], float]) -> Turn:
        return given(lambda m, t: None if m.dtype == torch.bool else m * factor(t))

    def of(dim: int, pick: Callable[[int], list[int]]) -> Turn:
        return given(
            lambda m, _: None if m.shape[dim] == 1 else m.index_select(
                dim, torch.tensor(pick(m.shape[dim])))
        )  # fmt: skip

    def rolled(by: int, dim: int, mask: Tensor, _: Trial) -> Tensor:
        return mask.roll(by, dim)

    def square(mask: Tensor, _: Trial) -> Tensor | None:
        return mask.mT if mask.shape[-1] == mask.shape[-2] else None

    name = "mask"
    yield Twist("mask-none", "the mask is not applied", name, lambda t: (
        None if t.call.sees.mask is None else _sees(t, mask=None)))  # fmt: skip
    yield Twist("mask-head-0", "every head uses head 0's mask", name, of(1, lambda n: [0] * n))
    yield Twist("mask-next-head", "each head uses the next one's mask", name,
                of(1, lambda n: [(h + 1) % n for h in range(n)]))  # fmt: skip
    yield Twist("mask-batch-0", "every sequence uses the first one's mask", name,
                of(0, lambda n: [0] * n))  # fmt: skip
    for dim, told in ((-1, "key"), (-2, "query")):
        for by, where in ((1, "before"), (-1, "after")):
            text = f"the mask is that of the {told} {where}"
            yield Twist(f"mask-{told}{by:+d}", text, name, given(partial(rolled, by, dim)))
    for block in BLOCKS:
        told = f"the mask is that of the first query of each block of {block}"
        first = partial(lambda b, n: [i // b * b for i in range(n)], block)
        yield Twist(f"mask-first-{block}", told, name, of(-2, first))
    yield Twist("mask-turned", "the mask is read transposed", name, given(square))
    yield Twist("mask-inverted", "the boolean mask hides what it should show", name,
                given(lambda m, _: ~m if m.dtype == torch.bool else None))  # fmt: skip
    yield Twist("mask-added", "the boolean mask is added to the scores as 0 and 1", name, given(
        lambda m, _: m.float() if m.dtype == torch.bool else None))  # fmt: skip
    yield Twist("mask-scaled", "the additive mask is multiplied by the scale", name,
                additive(lambda t: t.call.scale))  # fmt: skip
    yield Twist("mask-base-2", "the additive mask lacks log₂e in base 2", name,
                additive(lambda _: 1 / LOG2_E))  # fmt: skip
    yield Twist("mask-log2e", "the additive mask is multiplied by log₂e twice", name,
                additive(lambda _: LOG2_E))  # fmt: skip
    yield Twist("mask-negative", "the additive mask is subtracted", name, additive(lambda _: -1.0))
    yield Twist("mask-twice", "the additive mask is added twice", name, additive(lambda _: 2.0))
    yield Twist("mask-bf16", "the additive mask is rounded to bf16", name, given(
        lambda m, _: None if m.dtype == torch.bool else m.bfloat16().float()))  # fmt: skip


def _finite_masks() -> Iterator[Twist]:
    for number in (-1e4, -1e9, -65504.0, -1e3, -100.0):

        def turn(trial: Trial, number: float = number) -> Trial | None:
            call, (i, j) = trial.call, _positions(trial.call)
            least, greatest = call.bounds
            hidden = torch.zeros(len(i), j.shape[1], dtype=torch.bool)
            for bound, beyond in ((greatest, torch.gt), (least, torch.lt)):
                hidden = hidden if bound is None else hidden | beyond(j - i, bound)
            mask = call.sees.mask
            added = torch.zeros(()) if call.sees.added is None else call.sees.added
            if mask is not None and mask.dtype == torch.bool:
                hidden = hidden | ~mask
            if not bool(hidden.any()):
                return None
            return _with(trial, sees=Sees(mask=torch.where(hidden, number, added.float())))

        yield Twist(f"hidden{number:g}", f"hidden pairs get {number:g}", "mask-finite", turn,
                    number=number)  # fmt: skip


def scales() -> Iterator[Twist]:
    """Scales that are missing, another's, or multiplied by a base's factor."""

    def scaled(factor: Callable[[Call], float]) -> Turn:
        def turn(trial: Trial) -> Trial | None:
            new = factor(trial.call)
            return None if new == trial.call.scale else _with(trial, scale=new)

        return turn

    def root(width: float) -> float:
        return 1 / math.sqrt(width)

    name = "scale"
    factors: tuple[tuple[str, str, Callable[[Call], float]], ...] = (
        ("none", "scores are not scaled", lambda _: 1.0),
        ("own", "the scale that was asked for is ignored for 1/√D", lambda c: root(
            c.query.shape[-1])),
        ("1/D", "the scale is 1/D", lambda c: 1 / c.query.shape[-1]),
        ("1/sqrt(Dv)", "the scale is 1/√D of the values", lambda c: root(c.value.shape[-1])),
        ("padded", "the scale is that of D padded to a power of two", lambda c: c.scale * math.sqrt(
            c.query.shape[-1] / 2 ** math.ceil(math.log2(c.query.shape[-1])))),
        ("bf16", "the scale is rounded to bf16", lambda c: float(
            torch.tensor(c.scale).bfloat16())),
        ("fp16", "the scale is rounded to fp16", lambda c: float(torch.tensor(c.scale).half())),
        ("twice", "the scale is applied twice", lambda c: c.scale**2),
        ("log2e", "scores lack the factor ln 2, or have log₂e twice", lambda c: c.scale * LOG2_E),
        ("ln2", "scores in base 2 lack the factor log₂e", lambda c: c.scale / LOG2_E),
        ("half", "the scale is halved", lambda c: c.scale / 2),
        ("double", "the scale is doubled", lambda c: c.scale * 2),
        ("negative", "the scale has the wrong sign", lambda c: -c.scale),
        ("sqrt", "the scale's root is taken once too often", lambda c: math.sqrt(c.scale)),
    )  # fmt: skip
    for key, text, factor in factors:
        yield Twist(f"scale-{key}", text, name, scaled(factor))
    yield Twist("scale-after", "O is scaled in place of the scores", name, scaled(lambda _: 1.0),
                lambda trial, tensors: tensors | {
                    n: x * trial.call.scale for n, x in tensors.items() if n != "lse"})  # fmt: skip


def _cut_keys(
    key: str, text: str, start: Callable[[int], int], stop: Callable[[int], int]
) -> Twist:
    """Only some of the keys are seen."""

    def turn(trial: Trial) -> Trial | None:
        n = trial.call.key.shape[2]
        first, last = max(0, start(n)), min(n, stop(n))
        if (first, last) == (0, n) or last - first < 1:
            return None
        i, j = _positions(trial.call)
        return hidden_too(trial, ((j >= first) & (j < last)).expand(len(i), -1))

    return Twist(key, text, "key-tail", turn)


def hidden_too(trial: Trial, seen: Tensor) -> Trial:
    """Pairs that are not seen `[N, N_k]` hidden as well, whatever else the call says."""
    call, (i, j) = trial.call, _positions(trial.call)
    least, greatest = call.bounds
    if greatest is not None:
        seen = seen & (j - i <= greatest)
    if least is not None:
        seen = seen & (j - i >= least)
    mask = call.sees.mask
    if mask is None:
        new = seen
    elif mask.dtype == torch.bool:
        new = mask & seen
    else:
        new = mask.masked_fill(~seen, -math.inf)
    return _with(trial, sees=Sees(mask=new))


def orders() -> Iterator[Twist]:
    """Orders of summing that are no fault."""

    def turn(trial: Trial) -> Trial | None:
        call, (i, j) = trial.call, _positions(trial.call)
        seen = torch.ones(len(i), j.shape[1], dtype=torch.bool)
        hidden = hidden_too(trial, seen).call.sees.mask if call.bounds != (None, None) else None
        mask = call.sees.mask if hidden is None else hidden
        if mask is not None:
            mask = mask.flip(-1)
        k, v = call.key.flip(2), call.value.flip(2)
        return _with(trial, key=k, value=v, sees=Sees(mask=mask))

    def back(_: Trial, tensors: Tensors) -> Tensors:
        return tensors | {n: tensors[n].flip(2) for n in GRADIENTS[1:] if n in tensors}

    yield Twist("keys-reversed", "keys are visited from the last to the first", "", turn, back)


def _start(_: int) -> int:
    return 0


def _second(_: int) -> int:
    return 1


def _end(n: int) -> int:
    return n


def ends() -> Iterator[Twist]:
    """Ends of sequences: keys never visited, queries never written, padding that counts."""
    for block in BLOCKS:
        yield from _block_ends(block)
    for count in (1, 2, 4, 8):
        text = "the last key is" if count == 1 else f"the last {count} keys are"
        yield _cut_keys(f"key-minus-{count}", f"{text} left out", _start, partial(_less, count))
    yield _cut_keys("key-first", "the first key is left out", _second, _end)
    yield _without_queries("query-last", "the last query is left out", lambda n: slice(n - 1, n))
    yield _without_queries("query-first", "the first query is left out", lambda _: slice(0, 1))


def _less(count: int, n: int) -> int:
    return n - count


def _block_ends(block: int) -> Iterator[Twist]:
    def whole(n: int) -> int:
        return n if n < block else n // block * block

    def last(n: int) -> int:
        return n if n <= block else (n - 1) // block * block

    def first(n: int) -> int:
        return block if n > block else 0

    text = f"the keys after the last whole block of {block} are left out"
    yield _cut_keys(f"key-tail-{block}", text, _start, whole)
    text = f"the last block of {block} keys is left out"
    yield _cut_keys(f"key-last-{block}", text, _start, last)
    text = f"the first block of {block} keys is left out"
    yield _cut_keys(f"key-first-{block}", text, first, _end)
    yield _padded(block, masked=False)
    yield _padded(block, masked=True)
    yield _padded(block, masked=False, most=1)
    text = f"queries after the last whole block of {block} are left out"
    yield _without_queries(f"query-tail-{block}", text, lambda n: slice(whole(n), n))
    text = f"the last block of {block} queries is left out"
    rows = lambda n: slice((n - 1) // block * block, n)  # noqa: E731
    yield _without_queries(f"query-last-{block}", text, rows, least=block)


def _padded(block: int, masked: bool, most: int = 128) -> Twist:
    """Zeros after the last key that are not hidden, at most so many."""

    def turn(trial: Trial) -> Trial | None:
        call = trial.call
        missing = min(most, -call.key.shape[2] % block)
        if not missing or (call.sees.causal and call.query.shape[2] <= call.key.shape[2]):
            return None
        if call.sees.mask is not None and not masked:
            return None
        key, value = (
            torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (call.key, call.value)
        )
        mask = call.sees.mask
        if mask is not None:
            mask = torch.nn.functional.pad(
                mask, (0, missing), value=float(mask.dtype == torch.bool)
            )
        return _with(trial, key=key, value=value, sees=replace(call.sees, mask=mask))

    def back(trial: Trial, tensors: Tensors) -> Tensors:
        n = trial.call.key.shape[2]
        cut = {name: tensors[name][:, :, :n] for name in GRADIENTS[1:] if name in tensors}
        return tensors | cut

    which = "the zeros that pad" if most > 1 else "one of the zeros that pad"
    text = f"{which} the last block of {block} keys keep{'s its' if most == 1 else ' their'} weight"
    text += " under a mask too" if masked else ""
    return Twist(f"padding-{block}-{most}{'-masked' * masked}", text, "padding", turn, back)


def _without_queries(key: str, text: str, rows: Callable[[int], slice], least: int = 0) -> Twist:
    """Queries that are not computed: their results are 0, and they add nothing to dK and dV."""

    def turn(trial: Trial) -> Trial | None:
        n = trial.call.query.shape[2]
        gone = rows(n)
        if gone.stop <= gone.start or (gone.start == 0 and gone.stop == n) or n <= least:
            return None
        grad_out = trial.grad_out.clone()
        grad_out[:, :, gone] = 0
        return replace(trial, grad_out=grad_out)

    def back(trial: Trial, tensors: Tensors) -> Tensors:
        gone, found = rows(trial.call.query.shape[2]), dict(tensors)
        for name in ("out", "lse", "grad_query"):
            if name in found:
                found[name] = found[name].clone()
                found[name][:, :, gone] = 0
        return found

    return Twist(key, text, "query-tail", turn, back)


def results() -> Iterator[Twist]:
    """Gradients and lse that are multiplied by what they should not be, or summed over too
    little.
    """

    def times(names: tuple[str, ...], factor: Callable[[Call], float]) -> Callable[
        [Trial, Tensors], Tensors]:  # fmt: skip
        def back(trial: Trial, tensors: Tensors) -> Tensors:
            changed = {n: tensors[n] * factor(trial.call) for n in names if n in tensors}
            return tensors | changed

        return back

    short = {"grad_query": "dQ", "grad_key": "dK", "grad_value": "dV"}
    factors: tuple[tuple[str, str, Callable[[Call], float]], ...] = (
        ("unscaled", "lacks the scale", lambda c: 1 / c.scale),
        ("rescaled", "has the scale twice", lambda c: c.scale),
        ("group", "is the mean over its group of query heads, not their sum",
         lambda c: 1 / c.groups),
        ("zero", "is 0", lambda _: 0.0),
    )  # fmt: skip
    for tensor in GRADIENTS:
        for key, text, factor in factors:
            cause = {"group": "group-sum", "zero": "unwritten"}.get(key, "grad-scale")
            yield Twist(f"{tensor}-{key}", f"{short[tensor]} {text}", cause, _everywhere,
                        times((tensor,), factor))  # fmt: skip
    for one, two in (GRADIENTS[:2], GRADIENTS[1:], GRADIENTS[::2]):
        yield Twist(f"{one}-{two}", f"{short[one]} and {short[two]} are exchanged", "layout",
                    _everywhere, partial(_exchanged, one, two))  # fmt: skip
    for key, pick in (("last", -1), ("first", 0)):
        yield _one_of_group(key, key, pick)
    yield from _other_lses()


def _exchanged(one: str, two: str, _: Trial, tensors: Tensors) -> Tensors:
    if one not in tensors or tensors[one].shape != tensors[two].shape:
        return tensors
    return tensors | {one: tensors[two], two: tensors[one]}


def _other_lses() -> Iterator[Twist]:
    changes: tuple[tuple[str, str, Callable[[Tensor, Tensor, float], Tensor]], ...]
    changes = (
        ("base-2", "lse is in base 2", lambda x, *_: x * LOG2_E),
        ("base-e", "lse is multiplied by ln 2", lambda x, *_: x / LOG2_E),
        ("no-max", "lse lacks the row maximum", lambda x, m, _: x - m),
        ("max", "lse is the row maximum alone", lambda _, m, __: m),
        ("mixed", "lse has its maximum in base 2, its logarithm natural",
         lambda x, m, _: x - m + m * LOG2_E),
        ("sign", "lse has the wrong sign", lambda x, *_: -x),
        ("exp", "lse is the row sum, not its logarithm", lambda x, m, _: (x - m).exp()),
        ("scaled", "lse has its maximum scaled twice", lambda x, m, a: x - m + m * a),
        ("unscaled", "lse has its maximum before the scale", lambda x, m, a: x - m + m / a),
    )  # fmt: skip
    for key, text, change in changes:
        yield from _other_lse(key, text, change)


def _everywhere(trial: Trial) -> Trial:
    """A call that is computed as asked; what comes of it is not."""
    return replace(trial)


def _other_lse(
    key: str, text: str, change: Callable[[Tensor, Tensor, float], Tensor]
) -> Iterator[Twist]:
    def back(trial: Trial, tensors: Tensors) -> Tensors:
        if "lse" not in tensors:
            return tensors
        return tensors | {"lse": change(tensors["lse"], row_maximum(trial.call), trial.call.scale)}

    yield Twist(f"lse-{key}", text, "lse-other", _everywhere, back)


def _one_of_group(key: str, text: str, pick: int) -> Twist:
    def turn(trial: Trial) -> Trial | None:
        groups = trial.call.groups
        if groups == 1:
            return None
        k, v = (x.repeat_interleave(groups, 1) for x in (trial.call.key, trial.call.value))
        return _with(trial, key=k, value=v)

    def back(trial: Trial, tensors: Tensors) -> Tensors:
        return tensors | {
            name: _by_group(tensors[name], trial.call.groups)[:, :, pick]
            for name in GRADIENTS[1:]
            if name in tensors
        }

    told = f"dK and dV of a key head come of the {text} of its query heads alone"
    return Twist(f"group-{key}", told, "group-sum", turn, back)


def _by_group(x: Tensor, groups: int) -> Tensor:
    return x.reshape(x.shape[0], -1, groups, *x.shape[2:])
