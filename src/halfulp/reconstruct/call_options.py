"""Faults in what only some calls ask for: windows, softcap, sinks; and head dimensions off the
block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfulp.algorithms.problem import LOG2_E
from halfulp.calls import Call, Sees
from halfulp.formats import MXFP4, MXFP8_E4M3, NVFP4, round_to
from halfulp.reconstruct.emulating import GRADIENTS, SHORT, Twist
from halfulp.reconstruct.exact import scores_of
from halfulp.reconstruct.panel import Trial
from halfulp.reconstruct.twists import Tensors, hidden_too

STORED = ("out", "grad_query", "grad_key", "grad_value")


def asked() -> Iterator[Twist]:
    """All of them."""
    yield from _windows()
    yield from _softcaps()
    yield from _sinks()
    yield from _past_queries()
    for width in (16, 32, 64):
        text = f"features after the last whole block of {width} are left out of QKᵀ"
        yield Twist(f"features-{width}", text, "ragged", partial(_without_features, width))


def operands(dtype: torch.dtype) -> Iterator[Twist]:
    """Operands that are rounded once more than the kernel's format asks for: scaled before, through
    another format, or quantized.
    """
    yield from prescaled(dtype)
    for other in (torch.float16, torch.bfloat16):
        if other != dtype:
            told = str(other).removeprefix("torch.")
            for what, names in (("results", STORED), ("gradients", STORED[1:])):
                yield Twist(f"through-{told}-{what}", f"operands and {what} pass through {told}",
                            "operand", partial(_through, other, what == "results"),
                            partial(_results_through, other, names),
                            unrounded=("query", "key", "value", *STORED))  # fmt: skip
            for pair in (("query", "key"), ("key", "value")):
                yield Twist(f"through-{told}-{'-'.join(pair)}",
                            f"{_letters(pair)} pass through {told}",
                            "operand", partial(_in_format_of, pair, partial(_to, other)),
                            unrounded=pair)  # fmt: skip
    yield from _in_blocks()
    yield from _biases()
    yield from stored(dtype, {"out"})
    for name in ("query", "key", "value"):
        for key, text, dims in (("token", "row", (3,)), ("channel", "feature", (2,)),
                                ("head", "head", (2, 3)),
                                ("tensor", "tensor", (0, 1, 2, 3))):  # fmt: skip
            for fmt, largest in (("int8", 127.0), ("e4m3", 448.0)):
                told = f"the {name} is quantized to {fmt} with a scale for each {text}"
                turn = partial(_quantized, name, dims, fmt, largest)
                yield Twist(f"{fmt}-{name}-{key}", told, "operand", turn, unrounded=(name,))


def _in_blocks() -> Iterator[Twist]:
    """Operands whose features share scales by blocks, as of OCP's formats."""
    for fmt in (MXFP4, NVFP4, MXFP8_E4M3):
        for names in (("query", "key"), ("query", "key", "value"), ("key", "value"), ("value",)):
            told = f"{_letters(names)} in {fmt.name.upper()}, by blocks of features"
            turn = partial(_in_format_of, names, partial(round_to, fmt=fmt))
            yield Twist(f"{fmt.name}-{'-'.join(names)}", told, "operand", turn, unrounded=names)


def _letters(names: tuple[str, ...]) -> str:
    *most, last = (name[0].upper() for name in names)
    return f"{', '.join(most)} and {last}" if most else last


def prescaled(dtype: torch.dtype) -> Iterator[Twist]:
    """What the scores are multiplied by folded into operands that are rounded again; the number
    itself is rounded as well where it is a scalar of their format.
    """
    low = torch.bfloat16 if dtype == torch.float32 else dtype
    ways: tuple[tuple[str, str, tuple[str, ...], Callable[[float], float]], ...] = (
        ("query-scale", "Q is multiplied by the scale", ("query",), lambda a: a),
        ("key-scale", "K is multiplied by the scale", ("key",), lambda a: a),
        ("query-log2e", "Q is multiplied by scale · log₂e", ("query",), lambda a: a * LOG2_E),
        ("key-log2e", "K is multiplied by scale · log₂e", ("key",), lambda a: a * LOG2_E),
        ("roots", "Q and K are multiplied by √scale", ("query", "key"), math.sqrt),
        ("roots-log2e", "Q and K are multiplied by √(scale · log₂e)", ("query", "key"),
         lambda a: math.sqrt(a * LOG2_E)),
    )  # fmt: skip
    for key, text, names, factor in ways:
        for rounded in (False, True):
            scaled = partial(_scaled, names, factor, low, rounded)
            told = f"{text}, a number of the same format," if rounded else text
            yield Twist(f"prescaled-{key}{'-low' * rounded}", f"{told} and rounded again",
                        "prescaled", scaled, unrounded=names)  # fmt: skip


def _scaled(names: tuple[str, ...], factor: Callable[[float], float], low: torch.dtype,
            rounded: bool, trial: Trial) -> Trial | None:  # fmt: skip
    f = factor(abs(trial.call.scale))
    times = float(torch.tensor(f).to(low)) if rounded else f
    if rounded and times == f:
        return None  # as without it
    changed = {n: (getattr(trial.call, n).float() * times).to(low).float() / f for n in names}
    return replace(trial, call=replace(trial.call, **changed))


def grad_outs(dtype: torch.dtype) -> Iterator[Twist]:
    """dO over the row's sum, rounded once more, as for weights that are not divided by it."""
    if dtype != torch.float32:
        told = f"dO is divided by the row's sum and rounded to {str(dtype).removeprefix('torch.')}"
        yield Twist("do-over-sum", told, "operand", _divided, unrounded=("grad_out",))


def _divided(trial: Trial) -> Trial:
    scores, do = scores_of(trial.call), trial.grad_out
    top = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    row_sum = (scores - top).exp().sum(-1, keepdim=True)
    row_sum = torch.where(row_sum == 0, 1.0, row_sum)
    return replace(trial, grad_out=((do.double() / row_sum).to(do.dtype) * row_sum).float())


def _biases() -> Iterator[Twist]:
    """What is added to scores, rounded: as it is, or in base 2."""
    for fmt in (torch.bfloat16, torch.float16):
        for unit, base in ((1.0, ""), (LOG2_E, " in base 2")):
            told = str(fmt).removeprefix("torch.")
            yield Twist(f"bias-{told}{base}", f"the additive mask is rounded to {told}{base}",
                        "mask", partial(_with_bias, fmt, unit))  # fmt: skip


def _with_bias(fmt: torch.dtype, unit: float, trial: Trial) -> Trial | None:
    sees = trial.call.sees
    if sees.added is None:
        return None
    mask = (sees.added.float() * unit).to(fmt).float() / unit
    return replace(trial, call=replace(trial.call, sees=replace(sees, mask=mask)))


def stored(dtype: torch.dtype, which: Set[str]) -> Iterator[Twist]:
    """O or some gradients, rounded to the other format of 16 bits, or to one of 8 with a scale for
    each tensor, and then to their own.
    """
    names = tuple(name for name in STORED if name in which)
    what = " and ".join(SHORT[name] for name in names) + (" pass" if names[1:] else " passes")
    what = "gradients pass" if names == GRADIENTS else what
    cause = "out" if names == ("out",) else "grad-stored"
    other = {torch.bfloat16: (torch.float16,), torch.float16: (torch.bfloat16,)}.get(dtype, ())
    for fmt in (*other, torch.float8_e4m3fn, torch.float8_e5m2):
        told = str(fmt).removeprefix("torch.").removeprefix("float8_").removesuffix("fn")
        scaled = " with a scale for each tensor" * (fmt.itemsize == 1)
        yield Twist(f"through-{told}-{'-'.join(names)}", f"{what} through {told}{scaled}", cause,
                    replace, partial(_results_through, fmt, names), unrounded=names)  # fmt: skip


def _through(fmt: torch.dtype, whole: bool, trial: Trial) -> Trial:
    turned = _in_format_of(("query", "key", "value"), partial(_to, fmt), trial)
    grad_out = trial.grad_out.to(fmt).to(trial.grad_out.dtype) if whole else trial.grad_out
    return replace(turned, grad_out=grad_out)


def _to(fmt: torch.dtype, x: Tensor) -> Tensor:
    return x.to(fmt).float()


def _in_format_of(
    names: tuple[str, ...], rounded: Callable[[Tensor], Tensor], trial: Trial
) -> Trial:
    changed: dict[str, Any] = {n: rounded(getattr(trial.call, n).float()) for n in names}
    return replace(trial, call=replace(trial.call, **changed))


def _results_through(
    fmt: torch.dtype, names: tuple[str, ...], trial: Trial, tensors: Tensors
) -> Tensors:
    low = trial.grad_out.dtype
    return {n: x if n == "lse" else (_in_format(x, fmt) if n in names else x).to(low).to(x.dtype)
            for n, x in tensors.items()}  # fmt: skip


def _in_format(x: Tensor, fmt: torch.dtype) -> Tensor:
    """Of one of 8 bits the largest number becomes the format's."""
    if fmt.itemsize > 1:
        return x.to(fmt)
    unit = x.abs().amax().clamp_min(1e-30) / torch.finfo(fmt).max
    return (x / unit).to(fmt).to(x.dtype) * unit


def groups() -> Iterator[Twist]:
    """Gradients of heads that share a key head, rounded before they are added, or as they are."""
    for key, text in (("", ""), ("-low", ", in it")):
        told = f"dK and dV of each query head are rounded to their format and then added{text}"
        yield Twist(f"group-rounded{key}", told, "grad-accumulator", _each_head,
                    partial(_heads_added, bool(key)))  # fmt: skip


def _each_head(trial: Trial) -> Trial | None:
    call = trial.call
    if call.groups == 1:
        return None
    key, value = (x.repeat_interleave(call.groups, 1) for x in (call.key, call.value))
    return replace(trial, call=replace(call, key=key, value=value))


def _heads_added(low: bool, trial: Trial, tensors: Tensors) -> Tensors:
    dtype, groups = trial.call.query.dtype, trial.call.groups
    added = {}
    for name in {"grad_key", "grad_value"} & tensors.keys():
        grad = tensors[name]
        first, *others = (grad[:, member::groups] for member in range(groups))
        for x in others:
            first = (first + x).to(dtype).to(x.dtype) if low else first + x
        added[name] = first.to(dtype).to(first.dtype)
    return tensors | added


def _quantized(name: str, dims: tuple[int, ...], fmt: str, largest: float, trial: Trial) -> Trial:
    x = getattr(trial.call, name).float()
    unit = x.abs().amax(dims, keepdim=True).clamp_min(1e-30) / largest
    whole = (x / unit).round() if fmt == "int8" else (x / unit).to(torch.float8_e4m3fn).float()
    return replace(trial, call=replace(trial.call, **{name: whole * unit}))


def _of(name: str, change: Callable[[Call], Call | None], trial: Trial) -> Trial | None:
    """The trial with its call changed, where it asks for that option."""
    call = trial.call
    value = call.sees.window if name == "window" else getattr(call, name)
    changed = change(call) if isinstance(value, Tensor) or value else None
    return None if changed is None else replace(trial, call=changed)


def _windows() -> Iterator[Twist]:
    def sized(left: Callable[[int], int]) -> Callable[[Call], Call]:
        def change(call: Call) -> Call:
            assert call.sees.window is not None
            window = left(call.sees.window[0]), call.sees.window[1]
            return replace(call, sees=replace(call.sees, window=window))

        return change

    def turned(call: Call) -> Call:
        assert call.sees.window is not None
        return replace(call, sees=replace(call.sees, window=call.sees.window[::-1]))

    def tiles(width: int, call: Call) -> Call:
        least, greatest = call.bounds
        i = torch.arange(call.query.shape[2])[:, None]
        j = torch.arange(call.key.shape[2])[None, :]
        seen = torch.ones(len(i), j.shape[1], dtype=torch.bool)
        if greatest is not None:
            seen &= j - i <= greatest
        if least is not None:
            seen &= j // width >= (i + least).div(width, rounding_mode="floor")
        return replace(call, sees=Sees(mask=seen))

    ways: list[tuple[str, str, Callable[[Call], Call]]] = [
        ("none", "is not applied", lambda c: replace(c, sees=replace(c.sees, window=None))),
        ("+1", "lets each query see one key too many", sized(lambda n: n + 1)),
        ("-1", "hides one key too many", sized(lambda n: n - 1)),
        ("half", "is half as wide", sized(lambda n: n // 2)),
        ("double", "is twice as wide", sized(lambda n: 2 * n)),
        ("turned", "has its sides exchanged", turned),
        *((f"tiles-{w}", f"is applied to whole tiles of {w} keys", partial(tiles, w))
          for w in (16, 32, 64)),
    ]  # fmt: skip
    for key, text, change in ways:
        yield Twist(f"window-{key}", f"the window {text}", "window", partial(_of, "window", change))


def _softcaps() -> Iterator[Twist]:
    def capped(factor: Callable[[Call], float]) -> Callable[[Call], Call]:
        return lambda call: replace(call, softcap=call.softcap * factor(call))

    def flat(call: Call) -> Call:
        hidden = scores_of(call)
        plain = call.query.double() @ call.key.double().repeat_interleave(call.groups, 1).mT
        added = (hidden - plain * call.scale).float()
        return replace(call, softcap=0.0, sees=Sees(mask=added))

    ways: tuple[tuple[str, str, Callable[[Call], Call]], ...] = (
        ("none", "scores are not capped", lambda c: replace(c, softcap=0.0)),
        ("unscaled", "scores are capped before they are scaled", capped(lambda c: c.scale)),
        ("log2e", "the cap is too large by log₂e", capped(lambda _: LOG2_E)),
        ("ln2", "the cap is too small by log₂e", capped(lambda _: 1 / LOG2_E)),
        ("flat", "the derivative of the cap is left out of dS", flat),
    )
    for key, text, change in ways:
        yield Twist(f"softcap-{key}", text, "softcap", partial(_of, "softcap", change))

    def before_the_cap(hidden: bool, call: Call) -> Call | None:
        """Scores as they are where what is added to them, or hides them, goes through the cap."""
        if hidden == (call.sees.added is not None):
            return None
        key, cap = call.key.double().repeat_interleave(call.groups, 1), call.softcap
        plain = call.query.double() @ key.mT * call.scale
        n, n_key = plain.shape[2:]
        added = call.sees.apply(torch.zeros_like(plain), slice(0, n), slice(0, n_key), 1.0)
        added = cap * (torch.tanh((plain + added) / cap) - torch.tanh(plain / cap))
        return replace(call, sees=Sees(mask=added.float()))

    for key, told, hidden in (("bias", "the additive mask is added", False),
                              ("hidden", "what is hidden is set to −∞", True)):  # fmt: skip
        yield Twist(f"softcap-{key}", f"{told} before the cap, not after it", "softcap",
                    partial(_of, "softcap", partial(before_the_cap, hidden)))  # fmt: skip
    for cap in (10.0, 15.0, 20.0, 30.0, 50.0):
        yield Twist(f"softcap-{cap:g}", f"scores are capped at {cap:g}, which was not asked for",
                    "softcap", partial(_capped_at, cap))  # fmt: skip


def _capped_at(cap: float, trial: Trial) -> Trial | None:
    if trial.call.softcap:
        return None
    return replace(trial, call=replace(trial.call, softcap=cap))


def _sinks() -> Iterator[Twist]:
    def times(factor: Callable[[Call], float]) -> Callable[[Call], Call | None]:
        def change(call: Call) -> Call | None:
            return None if call.sinks is None else replace(call, sinks=call.sinks * factor(call))

        return change

    def of_head(pick: Callable[[Tensor], Tensor]) -> Callable[[Call], Call | None]:
        def change(call: Call) -> Call | None:
            return None if call.sinks is None else replace(call, sinks=pick(call.sinks))

        return change

    ways: tuple[tuple[str, str, Callable[[Call], Call | None]], ...] = (
        ("none", "sinks are left out", lambda c: replace(c, sinks=None)),
        ("scaled", "sinks are multiplied by the scale", times(lambda c: c.scale)),
        ("log2e", "sinks are multiplied by log₂e", times(lambda _: LOG2_E)),
        ("ln2", "sinks lack log₂e in base 2", times(lambda _: 1 / LOG2_E)),
        ("bf16", "sinks are rounded to bf16", of_head(lambda s: s.bfloat16().float())),
        ("fp16", "sinks are rounded to fp16", of_head(lambda s: s.half().float())),
        ("next", "each head takes the next one's sink", of_head(lambda s: s.roll(-1))),
        ("first", "every head takes head 0's sink", of_head(lambda s: s[:1].expand_as(s))),
    )
    for key, text, change in ways:
        yield Twist(f"sinks-{key}", text, "sinks", partial(_of, "sinks", change))

    def back(trial: Trial, tensors: Tensors) -> Tensors:
        if "lse" not in tensors:
            return tensors
        return tensors | {"lse": scores_of(trial.call).logsumexp(-1)}

    yield Twist("sinks-lse", "sinks are left out of lse", "sinks",
                partial(_of, "sinks", lambda c: replace(c)), back)  # fmt: skip


def _past_queries() -> Iterator[Twist]:
    """Keys beyond the number of queries, where sizes are taken for one another."""

    def zeros(names: tuple[str, ...], trial: Trial) -> Trial | None:
        n, changed = trial.call.query.shape[2], {}
        if trial.call.key.shape[2] <= n:
            return None
        for name in names:
            changed[name] = getattr(trial.call, name).clone()
            changed[name][:, :, n:] = 0
        return replace(trial, call=replace(trial.call, **changed))

    def hidden(trial: Trial) -> Trial | None:
        n, n_key = trial.call.scores_shape[2:]
        return hidden_too(trial, (torch.arange(n_key) < n).expand(n, -1)) if n_key > n else None

    told = "beyond the number of queries"
    yield Twist("past-queries", f"keys {told} are left out", "key-tail", hidden)
    for names, what in ((("key",), "K is"), (("value",), "V is"),
                        (("key", "value"), "K and V are")):  # fmt: skip
        key = f"past-queries-{'-'.join(names)}"
        yield Twist(key, f"{what} 0 {told}", "key-tail", partial(zeros, names))


def _without_features(width: int, trial: Trial) -> Trial | None:
    d = trial.call.query.shape[3]
    if d % width == 0 or d < width:
        return None
    query, key = trial.call.query.clone(), trial.call.key.clone()
    query[..., d // width * width :] = 0
    key[..., d // width * width :] = 0
    return replace(trial, call=replace(trial.call, query=query, key=key))
