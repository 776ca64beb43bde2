"""`halfulp bench`: how fast attention kernels are beside each other, and how exact, in one interleaved run.

Every kernel runs once a round, in an order that changes from round to round, so that whatever else the machine does
falls on all of them alike. Ratios are taken within a round. What is reported is their median with the quartiles, and no
ratio at all where the quartiles are further apart than the median is from 1.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfulp.attention import attention, emulate, golden
from halfulp.audit import Target, resolve
from halfulp.audit.targets import builtin_targets
from halfulp.recipes import BF16_FLOOR, FP16_FLOOR, Recipe
from halfulp.runs.machine import describe_machine, describe_versions
from halfulp.runs.results import Figure, Progress, Series, Table, no_progress

Quartiles: TypeAlias = tuple[float, float, float]
"""Lower quartile, median, upper quartile."""

BASELINE = "sdpa"
OWN_RECIPES = ("stock", "exact_delta", "published")
SHAPES = ((1, 12, 1024, 64), (1, 8, 2048, 64), (4, 12, 256, 64))
"""B, H, N, D of self-attention that is measured by default."""
_SLOW = ("flex", "flash_attention_2")  # compile for every shape, or are another name of the same kernel
_GEMM = 2048
_WARM_UP = 2
_ERROR_ROWS = 2**22  # rows × keys of the floor that are held at once
_FLOORS = {torch.bfloat16: BF16_FLOOR, torch.float16: FP16_FLOOR}


@dataclass(frozen=True)
class Setting:
    """One size to measure at."""

    shape: tuple[int, int, int, int]  # B, H, N, D
    is_causal: bool = False

    @property
    def work(self) -> float:
        """Operations of attention's products, forward and backward: 14·B·H·N²·D, half of it if causal."""
        b, h, n, d = self.shape
        return 14.0 * b * h * n * n * d * (0.5 if self.is_causal else 1.0)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.shape))}){' causal' if self.is_causal else ''}"


@dataclass(frozen=True)
class Timing:
    """What one kernel took at one size."""

    kernel: str
    setting: Setting
    forward_ms: Quartiles
    backward_ms: Quartiles | None  # None: it has no backward pass here
    ratio: Quartiles | None  # times as fast as the baseline, over what both can do; None: the spread hides it
    gemm_share: Quartiles | None  # of the measured peak of a matrix product in the same dtype
    errors: dict[str, float]  # relative L2 error of out, dQ, dK, dV over the floor's, first head


@dataclass(frozen=True)
class BenchResult:
    """All timings, and what they were made on."""

    timings: tuple[Timing, ...]
    skipped: dict[str, str]  # kernel: why it was left out
    dtype: str
    rounds: int
    threads: int
    peak_gflops: Quartiles
    command: str
    machine: dict[str, Any] = field(default_factory=describe_machine)
    versions: dict[str, str] = field(default_factory=describe_versions)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: every timing, the tables and the figures."""
        timings = [
            {"kernel": t.kernel, "shape": list(t.setting.shape), "is_causal": t.setting.is_causal,
             "forward_ms": t.forward_ms, "backward_ms": t.backward_ms, "ratio": t.ratio,
             "gemm_share": t.gemm_share, "errors": t.errors}
            for t in self.timings
        ]  # fmt: skip
        return {
            "timings": timings,
            "skipped": self.skipped,
            "dtype": self.dtype,
            "rounds": self.rounds,
            "threads": self.threads,
            "peak_gflops": self.peak_gflops,
            "machine": self.machine,
            "versions": self.versions,
            "tables": [table.as_dict() for table in self.tables()],
            "figures": [figure.as_dict() for figure in self.figures()],
        }

    def tables(self) -> list[Table]:
        """Return one table a size: speed and error in the same row."""
        columns = ("kernel", "forward ms", "backward ms", f"× {BASELINE}", "gemm peak", "O", "dQ", "dK", "dV")
        tables = []
        for setting in dict.fromkeys(t.setting for t in self.timings):
            rows = tuple(
                (t.kernel, *_cells(t), *(_error(t.errors.get(name)) for name in ("out", "dQ", "dK", "dV")))
                for t in self.timings
                if t.setting == setting
            )
            tables.append(Table(f"{setting}, {self.dtype}", columns, rows, self._caption(), self.command))
        return tables

    def figures(self) -> list[Figure]:
        """Return the speed of every kernel over the baseline's, by size; kernels without a clear ratio are left out."""
        settings = list(dict.fromkeys(t.setting for t in self.timings))
        series = []
        for kernel in dict.fromkeys(t.kernel for t in self.timings if t.ratio is not None):
            own = {t.setting: t.ratio for t in self.timings if t.kernel == kernel and t.ratio is not None}
            found = [(str(s), own[s]) for s in settings if s in own]
            names, ratios = zip(*found, strict=True)
            low, middle, high = (tuple(r[i] for r in ratios) for i in range(3))
            series.append(Series(kernel, names, middle, low, high, "bar"))
        title = f"Speed beside {BASELINE}, {self.dtype}"
        if not series:
            return []
        return [Figure(title, "(B, H, N, D)", "times as fast", tuple(series), self._caption(), self.command)]

    def _caption(self) -> str:
        return (
            f"Forward and backward, {self.rounds} interleaved rounds on {self.threads} threads: medians, quartiles. A "
            f"ratio is left out where the quartiles are further apart than the median is from 1. Of gemm peak: "
            f"attention's products over what a {_GEMM} × {_GEMM} product does in the same time "
            f"({self.peak_gflops[1]:.0f} Gflop/s). O, dQ, dK, dV: relative error of the first head over the floor's, "
            f"the least that a kernel with these formats must round."
        )


def bench(
    kernels: Sequence[str] = (),
    settings: Sequence[Setting] = (),
    *,
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 9,
    device: str = "cpu",
    command: str = "halfulp bench",
    progress: Progress | None = None,
) -> BenchResult:
    """Time kernels beside each other, forward and backward, and say how far each is from the floor of its format.

    Args:
        kernels: audit targets (`halfulp ls targets`) and "halfulp:stock", "halfulp:exact_delta", "halfulp:published",
            our kernel with another recipe; all that run here if empty. The baseline, "sdpa", always takes part.
        settings: sizes; `SHAPES`, causal and not, if empty.
        dtype: bfloat16 or float16.
        rounds: timed rounds after the warm-up.
        device: where the kernels run.
        command: what repeats it, for the tables.
        progress: called once a round.

    Raises:
        ValueError: a kernel is not known or cannot run here, or a number is out of range.
    """
    if rounds < 3:
        raise ValueError(f"rounds={rounds}: accepted is an integer of at least 3")
    if dtype not in _FLOORS:
        raise ValueError(f"dtype={dtype}: accepted are torch.bfloat16 and torch.float16")
    chosen, skipped = _choose(kernels)
    sizes = list(settings) or [Setting(shape, causal) for shape in SHAPES for causal in (False, True)]
    report = progress or no_progress
    timings: list[Timing] = []
    peaks: list[float] = []
    for i, setting in enumerate(sizes):
        inputs = _draw(setting, dtype, device)
        runs: dict[str, _Run] = {}
        for name, target in chosen.items():
            try:
                runs[name] = _Run.of(target, inputs, setting)
            except Exception as error:  # another's kernel may raise anything
                skipped.setdefault(name, f"{setting}: {' '.join(str(error).split())[:120]}")
        share = partial(_part, report, i / len(sizes), (i + 1) / len(sizes), str(setting))
        spent = _interleaved(runs, inputs[0], rounds, share)
        peaks += spent.peaks
        errors = {name: _errors(run, inputs, setting) for name, run in runs.items()}
        timings += [_timing(name, setting, spent, errors[name]) for name in runs]
    kind = str(dtype).removeprefix("torch.")
    threads = torch.get_num_threads() if device == "cpu" else 0
    peak = _quartiles([2.0 * _GEMM**3 / peak / 1e9 for peak in peaks])
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
        scale = query.shape[-1] ** -0.5

        def forward() -> Tensor:
            found = target.call(query, key, value, is_causal=setting.is_causal, scale=scale)
            out = found[0] if isinstance(found, tuple) else found
            assert isinstance(out, Tensor)
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


def _interleaved(runs: dict[str, _Run], like: Tensor, rounds: int, report: Callable[[float], None]) -> _Spent:
    """Every kernel once a round, in a new order each, and a matrix product among them."""
    square = torch.randn(_GEMM, _GEMM, device=like.device).to(like.dtype)
    order = random.Random(0)
    spent = _Spent({name: [] for name in runs}, [])
    for turn in range(_WARM_UP + rounds):
        for name in order.sample([*runs, ""], len(runs) + 1):
            if not name:
                took: tuple[float, float | None] = (_clock(lambda: square @ square, like)[0], None)
            else:
                took = _time(runs[name], like)
            if turn >= _WARM_UP:
                spent.times[name].append(took) if name else spent.peaks.append(took[0])
        report((turn + 1) / (_WARM_UP + rounds))
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
    own, base = spent.times[name], spent.times[BASELINE]
    whole = own[0][1] is not None
    totals = [f + (b or 0.0) for f, b in own]
    beside = [f + (b or 0.0) if whole else f for f, b in base]
    ratio = _quartiles([b / t for b, t in zip(beside, totals, strict=True)])
    backward = _quartiles([1e3 * b for _, b in own if b is not None]) if whole else None
    done = setting.work * (1.0 if whole else 4 / 14)
    share = _quartiles([done / t / (2.0 * _GEMM**3 / p) for t, p in zip(totals, spent.peaks, strict=True)])
    clear = name != BASELINE and is_clear(ratio)
    return Timing(
        name, setting, _quartiles([1e3 * f for f, _ in own]), backward, ratio if clear else None, share, errors
    )


def is_clear(ratio: Quartiles) -> bool:
    """Whether a ratio may be told: its quartiles are no further apart than its median is from 1."""
    low, middle, high = ratio
    return high - low <= abs(middle - 1)


def _errors(run: _Run, inputs: Sequence[Tensor], setting: Setting) -> dict[str, float]:
    """Relative errors of the first head over those of the floor, which must round as much."""
    out = run.forward()
    found = {"out": out.detach()}
    if run.differentiable:
        found |= dict(zip(("dQ", "dK", "dV"), run.backward(out), strict=True))
    first = [x[:1, :1].detach().cpu() for x in inputs]
    exact, floor = _floor(setting, *first)
    return {name: _distance(x[:1, :1].cpu(), exact[name]) / floor[name] for name, x in found.items()}


def _floor(setting: Setting, *head: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Golden values of one head, and the floor's relative errors."""
    names = ("out", "dQ", "dK", "dV")
    truth = golden(*head, is_causal=setting.is_causal)
    exact = dict(zip(names, (truth.out, truth.grad_query, truth.grad_key, truth.grad_value), strict=True))
    recipe: Recipe = _FLOORS[head[0].dtype].with_(block_query=max(1, _ERROR_ROWS // head[1].shape[2]))
    leaves = [x.clone().requires_grad_() for x in head[:3]]
    out = emulate(*leaves, is_causal=setting.is_causal, recipe=recipe)
    least = dict(zip(names, (out.detach(), *torch.autograd.grad(out, leaves, head[3])), strict=True))
    whole = {name: x for name, x in exact.items() if x is not None}
    return whole, {name: _distance(least[name], x) for name, x in whole.items()}


def _distance(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def _choose(kernels: Sequence[str]) -> tuple[dict[str, Target], dict[str, str]]:
    """The kernels to time, the baseline first, and those that were left out with the reason."""
    if kernels:
        chosen = {name: _named(name) for name in dict.fromkeys([BASELINE, *kernels])}
        for name, target in chosen.items():
            if target.missing is not None:
                raise ValueError(f"kernel={name!r}: {target.missing}; accepted is one that runs here")
        return chosen, {}
    known = {t.name: t for t in builtin_targets() if not t.name.startswith(("recipe:", "transformers:"))}
    known |= {f"halfulp:{recipe}": _own(recipe) for recipe in OWN_RECIPES}
    skipped = {name: t.missing for name, t in known.items() if t.missing is not None}
    skipped |= {name: "compiles for every shape; name it to time it" for name in known if name.startswith(_SLOW)}
    chosen = {name: t for name, t in known.items() if name not in skipped}
    return {BASELINE: chosen.pop(BASELINE), **chosen}, skipped


def _named(name: str) -> Target:
    recipe = name.removeprefix("halfulp:")
    return _own(recipe) if name.startswith("halfulp:") and recipe in OWN_RECIPES else resolve(name)


def _own(recipe: str) -> Target:
    def call(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        return attention(query, key, value, is_causal=is_causal, scale=scale, recipe=recipe)

    return Target(f"halfulp:{recipe}", call, frozenset(), f"halfulp.attention with the recipe {recipe}")


def _draw(setting: Setting, dtype: torch.dtype, device: str) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(setting.shape, generator=g).to(device, dtype) for _ in range(4)]


def _part(report: Progress, start: float, end: float, what: str, fraction: float) -> None:
    report(start + (end - start) * fraction, what)


def _quartiles(values: Sequence[float]) -> Quartiles:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _cells(timing: Timing) -> tuple[str, str, str, str]:
    ratio = "not distinguishable" if timing.ratio is None else _spread(timing.ratio, "{:.2f}")
    backward = "none here" if timing.backward_ms is None else f"{timing.backward_ms[1]:.1f}"
    share = "" if timing.gemm_share is None else f"{100 * timing.gemm_share[1]:.0f} %"
    return f"{timing.forward_ms[1]:.1f}", backward, "1" if timing.kernel == BASELINE else ratio, share


def _spread(values: Quartiles, form: str) -> str:
    low, middle, high = (form.format(x) for x in values)
    return f"{middle} ({low}–{high})"


def _error(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
