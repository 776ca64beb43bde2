"""`halfulp bench`: how fast attention kernels are beside each other, and how exact, in one
interleaved run.

Every kernel runs once a round, in an order that changes from round to round, so that whatever else
the machine does falls on all of them alike. Ratios are taken within a round; `bench_result` says
which of them are told.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfulp.attention import emulate, golden
from halfulp.experiments.bench_result import (
    BASELINE,
    GEMM,
    OWN,
    BenchResult,
    Quartiles,
    Setting,
    Timing,
    is_clear,
    quartiles,
)
from halfulp.formats import dtype_named
from halfulp.recipes import BF16_FLOOR, FP16_FLOOR, Recipe
from halfulp.runs.results import Progress, no_progress, part_of
from halfulp.targets import Target, builtin_targets, device_named, resolve

__all__ = ["SHAPES", "BenchResult", "Setting", "Timing", "bench"]

SHAPES = ((1, 12, 1024, 64), (1, 8, 2048, 64), (4, 12, 256, 64))
"""B, H, N, D of self-attention that is measured by default."""
# compile for every shape, or are another name of the same kernel
_SLOW = ("flex", "flash_attention_2")
_WARM_UP = 2
_LEAST_ROUNDS = 6  # with fewer no ratio is clear
_ERROR_ROWS = 2**22  # rows × keys of the floor that are held at once
_FLOORS = {"bfloat16": BF16_FLOOR, "float16": FP16_FLOOR}


def bench(
    kernels: Sequence[str] = (),
    settings: Sequence[Setting] = (),
    *,
    dtype: str | torch.dtype = "bfloat16",
    rounds: int = 9,
    device: str | torch.device = "cpu",
    command: str = "halfulp bench",
    progress: Progress | None = None,
) -> BenchResult:
    """Time kernels beside each other, forward and backward, and say how far each is from the floor
    of its format.

    Args:
        kernels: any name of a kernel (`halfulp ls targets`); all that run here, but emulations, if
            empty. The baseline, "sdpa", always takes part.
        settings: sizes; `SHAPES`, causal and not, if empty.
        dtype: bfloat16 or float16.
        rounds: timed rounds after the warm-up, at least 6.
        device: where the kernels run.
        command: what repeats it, for the tables.
        progress: called once a round.

    Raises:
        ValueError: a kernel or the device is not known or not here, a number is out of range, or a
            size is too large.
    """
    if rounds < _LEAST_ROUNDS:
        raise ValueError(f"rounds={rounds}: accepted is an integer of at least {_LEAST_ROUNDS}")
    kind, device = dtype_named(dtype, _FLOORS), device_named(device)
    chosen, skipped = _choose(kernels)
    sizes = list(settings) or [
        Setting(shape, causal) for shape in SHAPES for causal in (False, True)
    ]
    report = progress or no_progress
    timings: list[Timing] = []
    peaks: list[float] = []
    for i, setting in enumerate(sizes):
        inputs = _draw(setting, getattr(torch, kind), device)
        runs: dict[str, _Run] = {}
        for name, target in chosen.items():
            try:
                runs[name] = _Run.of(target, inputs, setting)
            except Exception as error:  # another's kernel may raise anything
                reason = f"{setting}: {' '.join(str(error).split())[:120]}"
                if name == BASELINE:
                    raise ValueError(
                        f"shape={reason}; accepted is a size that {BASELINE} can do here"
                    ) from error
                skipped.setdefault(name, reason)
        share = part_of(report, i / len(sizes), (i + 1) / len(sizes))
        spent = _interleaved(runs, inputs[0], rounds, share, str(setting))
        peaks += spent.peaks
        errors = {name: _errors(run, inputs, setting) for name, run in runs.items()}
        timings += [_timing(name, setting, spent, errors[name]) for name in runs]
    threads = torch.get_num_threads() if torch.device(device).type == "cpu" else None
    peak = quartiles([2.0 * GEMM**3 / peak / 1e9 for peak in peaks])
    return BenchResult(tuple(timings), skipped, kind, rounds, threads, peak, command)


@dataclass(frozen=True)
class _Run:
    """A kernel with its inputs in place."""

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor
    differentiable: bool

    @classmethod
    def of(cls, target: Target, inputs: Sequence[Tensor], setting: Setting) -> _Run:
        query, key, value = (x.detach().requires_grad_() for x in inputs[:3])
        options = {"is_causal": setting.is_causal, "scale": query.shape[-1] ** -0.5}
        if setting.key_heads is not None:
            if "enable_gqa" not in target.accepts:
                raise ValueError("takes no key heads of their own number")
            options["enable_gqa"] = True

        def forward() -> Tensor:
            found = target.call(query, key, value, **options)
            out = found[0] if isinstance(found, tuple) else found
            if not isinstance(out, Tensor):
                raise ValueError(f"returns {type(out).__name__}; accepted is a tensor")
            return out

        first = cls(forward, (query, key, value), inputs[3], True)
        out = forward()
        if not out.requires_grad:
            return cls(forward, first.leaves, inputs[3], False)
        try:
            first.backward(out)
        except RuntimeError:  # forward only, as FlexAttention is on a CPU
            return cls(forward, first.leaves, inputs[3], False)
        return first

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.grad_out)


@dataclass(frozen=True)
class _Spent:
    """Seconds of every round: forward and backward by kernel, and the gemm's."""

    times: dict[str, list[tuple[float, float | None]]]
    peaks: list[float]


def _interleaved(
    runs: dict[str, _Run], like: Tensor, rounds: int, report: Progress, setting: str
) -> _Spent:
    """Every kernel once a round, in a new order each, and a matrix product among them."""
    square = torch.randn(GEMM, GEMM, device=like.device).to(like.dtype)
    order = random.Random(0)
    spent = _Spent({name: [] for name in runs}, [])
    # the gemm is one of those that take turns, under the name ""
    for turn in range(_WARM_UP + rounds):
        for name in order.sample([*runs, ""], len(runs) + 1):
            if not name:
                took: tuple[float, float | None] = (_clock(lambda: square @ square, like)[0], None)
            else:
                took = _time(runs[name], like)
            if turn >= _WARM_UP:
                spent.times[name].append(took) if name else spent.peaks.append(took[0])
        report((turn + 1) / (_WARM_UP + rounds), setting)
    return spent


def _time(run: _Run, like: Tensor) -> tuple[float, float | None]:
    forward, out = _clock(run.forward, like)
    if not run.differentiable:
        return forward, None
    return forward, _clock(partial(run.backward, out), like)[0]


def _clock(work: Callable[[], Any], like: Tensor) -> tuple[float, Any]:
    """Seconds, and what the work gave; a GPU is waited for."""
    _wait(like)
    began = time.perf_counter()
    result = work()
    _wait(like)
    return time.perf_counter() - began, result


def _wait(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)


def _timing(name: str, setting: Setting, spent: _Spent, errors: dict[str, float]) -> Timing:
    own = spent.times[name]
    whole = own[0][1] is not None
    totals = [f + (b or 0.0) for f, b in own]
    # 2 of the 7 products of N² d are the forward pass's
    done = setting.work * (1.0 if whole else 4 / 14)
    return Timing(
        kernel=name,
        setting=setting,
        forward_ms=quartiles([1e3 * f for f, _ in own]),
        backward_ms=quartiles([1e3 * b for _, b in own if b is not None]) if whole else None,
        ratio=_told(spent, name, BASELINE),
        halfulp_ratio=_told(spent, OWN, name),
        # over the gemm of the same round, which whatever slows the machine slows as well
        gemm_share=quartiles(
            [done / t / (2.0 * GEMM**3 / p) for t, p in zip(totals, spent.peaks, strict=True)]
        ),
        errors=errors,
    )


def _told(spent: _Spent, name: str, other: str) -> Quartiles | None:
    """How many times as fast as another a kernel is, over what both can do; None where that cannot
    be told.
    """
    if name == other or name not in spent.times or other not in spent.times:
        return None
    pairs = [
        (spent.times[kernel], all(b is not None for _, b in spent.times[kernel]))
        for kernel in (name, other)
    ]
    both = all(whole for _, whole in pairs)
    mine, others = ([f + (b or 0.0) if both else f for f, b in times] for times, _ in pairs)
    ratios = [b / a for a, b in zip(mine, others, strict=True)]
    return quartiles(ratios) if is_clear(ratios) else None


def _errors(run: _Run, inputs: Sequence[Tensor], setting: Setting) -> dict[str, float]:
    """Relative errors of the first key head and its queries over those of the floor, for what is
    not 0 and not exact by luck.
    """
    out = run.forward()
    found = {"out": out.detach()}
    if run.differentiable:
        found |= dict(zip(("dQ", "dK", "dV"), run.backward(out), strict=True))
    group = setting.shape[1] // setting.key_shape[1]
    heads = {"out": group, "dQ": group, "dK": 1, "dV": 1}
    first = [
        x[:1, :count].detach().cpu() for x, count in zip(inputs, (group, 1, 1, group), strict=True)
    ]
    exact, floor = _floor(setting, *first)
    told = [name for name in found if floor.get(name, 0.0) > 0]
    return {
        name: _distance(found[name][:1, : heads[name]].cpu(), exact[name]) / floor[name]
        for name in told
    }


def _floor(setting: Setting, *head: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Golden values of one key head's calls, and the floor's relative errors."""
    names = ("out", "dQ", "dK", "dV")
    truth = golden(*head, is_causal=setting.is_causal)
    exact = dict(
        zip(names, (truth.out, truth.grad_query, truth.grad_key, truth.grad_value), strict=True)
    )
    recipe: Recipe = _FLOORS[dtype_named(head[0].dtype, _FLOORS)].with_(
        block_query=max(1, _ERROR_ROWS // head[1].shape[2])
    )
    leaves = [x.clone().requires_grad_() for x in head[:3]]
    out = emulate(*leaves, is_causal=setting.is_causal, recipe=recipe)
    least = dict(
        zip(names, (out.detach(), *torch.autograd.grad(out, leaves, head[3])), strict=True)
    )
    whole = {name: x for name, x in exact.items() if x is not None and bool(x.any())}
    return whole, {name: _distance(least[name], x) for name, x in whole.items()}


def _distance(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def _choose(kernels: Sequence[str]) -> tuple[dict[str, Target], dict[str, str]]:
    """The kernels to time, the baseline first, and those that were left out with the reason."""
    if kernels:
        chosen = {name: resolve(name, "kernel") for name in dict.fromkeys([BASELINE, *kernels])}
        for name, target in chosen.items():
            if target.missing is not None:
                raise ValueError(
                    f"kernel={name!r}: {target.missing}; accepted is one that runs here"
                )
        return chosen, {}
    known = {
        t.name: t for t in builtin_targets() if not t.name.startswith(("recipe:", "transformers:"))
    }
    skipped = {name: t.missing for name, t in known.items() if t.missing is not None}
    skipped |= {
        name: "compiles for every shape; name it to time it"
        for name in known
        if name.startswith(_SLOW)
    }
    chosen = {name: t for name, t in known.items() if name not in skipped}
    return {BASELINE: chosen.pop(BASELINE), **chosen}, skipped


def _draw(setting: Setting, dtype: torch.dtype, device: str) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    try:
        shapes = (setting.shape, setting.key_shape, setting.key_shape, setting.shape)
        return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]
    except RuntimeError as error:
        raise ValueError(
            f"shape={setting}: does not fit into memory; accepted is a smaller one"
        ) from error
