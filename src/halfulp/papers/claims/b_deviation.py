"""Claims of the micro-benchmark paper: how far flash attention deviates, per format, length and
block shape.

The text at hand does not say what the paper's inputs or sizes were, nor in which precision its
running sums were held. So each claim names the recipe and inputs for which it is judged, and its
figures show the others beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from halfulp.experiments.compare_summary import Interval, geometric_interval, interval_of
from halfulp.experiments.sweep import (
    FLASH_FAMILIES,
    FORMATS,
    Deviation,
    Inputs,
    Setting,
    SweepResult,
    factor_of,
    sweep_block,
    sweep_length,
    sweep_order,
    sweep_precision,
)
from halfulp.papers import kernel_match
from halfulp.papers.claim import Claim, Lab, Measured, Rule, share_of
from halfulp.runs.results import Figure

_INPUTS: tuple[Inputs, ...] = ("uniform", "normal")
_UNIFORM = "flash1 uniform"


def _real_kernel(lab: Lab) -> Measured:
    """B1: TORCH_CPU_FLASH against PyTorch's CPU flash kernel, forward and backward, element by
    element.
    """
    found = kernel_match.match_torch_cpu_flash(progress=lab.report)
    parts = [
        f"{m.tensor} {m.elements - m.identical} of {m.elements} differ (at most"
        f" {m.largest_ulps:.3g} ulp)"
        for m in found.tensors
    ]
    text = f"{', '.join(parts)}; {found.calls} calls, N = 77 to 1024, causal and not"
    if found.differing_steps:
        text += (
            f"; the step that differs: {found.differing_steps[0].step}"
            f" ({found.differing_steps[0].model})"
        )
    figures = {
        "identical": min(match.fraction for match in found.tensors),
        "ulps of out": next(match.largest_ulps for match in found.tensors if match.tensor == "out"),
        "bits expected": float(found.bits_expected),
    }
    intervals = {
        f"{m.tensor}, elements that differ": share_of(m.elements - m.identical, m.elements)
        for m in found.tensors
    }
    return Measured(figures, text, (), intervals)


def _precision(lab: Lab, inputs: Inputs, length: int, memory: int) -> SweepResult:
    setting = Setting(length=length, memory=memory, inputs=inputs)
    return lab.once(f"precision {setting}", lambda: sweep_precision(setting, progress=lab.report))


def _formats(lab: Lab) -> Measured:
    """B2: median over seeds of max |flash − baseline| per format; the share of families in which it
    always falls.
    """
    falling, parts, drawn = [], [], []
    intervals: dict[str, Interval] = {}
    for inputs in _INPUTS:
        found = _precision(lab, inputs, 1024, 16384)
        for family in FLASH_FAMILIES:
            medians = [_median(found, family, fmt.name) for fmt in FORMATS]
            falling.append(all(a > b for a, b in pairwise(medians)))
            each = [
                found.select(family=family, format=fmt.name, against="baseline")[0].max
                for fmt in FORMATS
            ]
            seeds = [all(a > b for a, b in pairwise(one)) for one in zip(*each, strict=True)]
            intervals[f"{family}, {inputs}: seeds in which it falls"] = share_of(
                sum(seeds), len(seeds)
            )
            parts.append(f"{family}, {inputs}: " + " → ".join(f"{m:.1e}" for m in medians))
        drawn += _titled(found.figures[:1], "(after fig. 3)", inputs)
    names = ", ".join(fmt.name for fmt in FORMATS)
    text = (
        f"max |flash − baseline| in {names}: {'; '.join(parts)} (median of 10 seeds, N = 1024, d"
        " = 64)"
    )
    figures = {"falling": sum(falling) / len(falling)}
    return Measured(figures, text, tuple(drawn), intervals)


def _factor(lab: Lab) -> Measured:
    """B3: max error of flash over that of the baseline, both against golden, bf16; several inputs,
    lengths, tiles.
    """
    factors: dict[str, list[float]] = {family: [] for family in FLASH_FAMILIES}
    estimates: dict[str, list[Interval]] = {family: [] for family in FLASH_FAMILIES}
    where: list[str] = []
    settings = [(i, n, m) for i in _INPUTS for n in (512, 1024, 2048) for m in (4096, 16384)]
    for number, (inputs, length, memory) in enumerate(settings):
        lab.report(number / len(settings), f"bf16 against golden, {inputs} inputs, N = {length}")
        found = _bf16(lab, inputs, length, memory)
        (base,) = found.select(family="baseline", against="golden", format="bf16")
        for family in FLASH_FAMILIES:
            (this,) = found.select(family=family, against="golden", format="bf16")
            factors[family].append(factor_of(this, base) or float("nan"))
            estimates[family].append(_ratio(this.max, base.max))
        # B_c = ⌈M / 4 d⌉, d = 64
        where.append(f"{inputs}, N = {length}, B_c = {-(-memory // 256)}")
    shown = "; ".join(f"{family} × {min(f):.2g} to {max(f):.2g}" for family, f in factors.items())
    largest = where[max(range(len(where)), key=lambda i: factors[_UNIFORM][i])]
    text = (
        f"max error of flash over the baseline's, {len(settings)} settings of {_few(lab)} seeds:"
        f" {shown}; largest at {largest}"
    )
    figures = {"low": min(map(min, factors.values())), "high": min(map(max, factors.values()))}
    intervals = {
        f"{family}, {which} setting": pick(same, key=lambda one: one.value)
        for family, same in estimates.items()
        for which, pick in (("smallest", min), ("largest", max))
    }
    drawn = _titled(
        _precision(lab, "uniform", 1024, 16384).figures[1:], "(after fig. 4)", "uniform"
    )
    return Measured(figures, text, tuple(drawn), intervals)


def _bf16(lab: Lab, inputs: Inputs, length: int, memory: int) -> SweepResult:
    setting = Setting(length=length, memory=memory, inputs=inputs, seeds=_few(lab))
    bf16 = FORMATS[:1]
    return lab.once(
        f"bf16 {setting}", lambda: sweep_precision(setting, formats=bf16, families=FLASH_FAMILIES)
    )


def _few(lab: Lab) -> int:
    """Seeds where golden values take most of the time."""
    return 10 if lab.full else 5


def _length(lab: Lab) -> Measured:
    """B4: max, mean and std of |flash − baseline| at N = 2048 over those at N = 128, bf16, fixed
    blocks.
    """
    figures: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    parts, drawn = [], []
    for inputs in _INPUTS:
        found = _lengths(lab, inputs)
        drawn += _titled(found.figures, "(after fig. 5)", inputs)
        for family in (_UNIFORM, "flash2 stock"):
            points = found.select(family=family, against="baseline")
            ratios = {s: _growth(points, s) for s in ("max", "mean", "std")}
            for s in ratios:
                first, last = (getattr(point, s) for point in (points[0], points[-1]))
                intervals[f"{family}, {inputs}: {s}"] = _ratio(last, first)
            figures |= {f"{family}, {inputs}: {s}": ratio for s, ratio in ratios.items()}
            parts.append(
                f"{family}, {inputs}: " + ", ".join(f"{s} × {r:.2f}" for s, r in ratios.items())
            )
    least = min(figures.values())
    text = f"N = 2048 over N = 128: {'; '.join(parts)} (median of 10 seeds, d = 64, 64 × 64 blocks)"
    return Measured(figures | {"least": least}, text, tuple(drawn), intervals)


def _lengths(lab: Lab, inputs: Inputs) -> SweepResult:
    return lab.once(
        f"length {inputs}", lambda: sweep_length(Setting(inputs=inputs), progress=lab.report)
    )


def _blocks(lab: Lab) -> Measured:
    """B5: block dimensions exchanged, square at the same area, and larger; four formats."""
    order = lab.once("order", lambda: sweep_order(progress=lambda f, m: lab.report(f / 2, m)))
    size = lab.once("block", lambda: sweep_block(progress=lambda f, m: lab.report(0.5 + f / 2, m)))
    exchanged, square, narrower, larger = {}, {}, {}, {}
    intervals: dict[str, Interval] = {}
    for fmt in FORMATS:
        exchanged[fmt.name] = _against_published(order, fmt.name, "exchanged")
        square[fmt.name] = _against_published(order, fmt.name, "square, B_c kept")
        narrower[fmt.name] = _against_published(order, fmt.name, "square")
        points = size.select(format=fmt.name, family=_UNIFORM, against="baseline")
        larger[fmt.name] = _growth(points, "max")
        intervals[f"{fmt.name}, largest over smallest block"] = _ratio(
            points[-1].max, points[0].max
        )
        for changed in ("exchanged", "square, B_c kept", "square"):
            intervals[f"{fmt.name}, {changed}"] = interval_of(_by_seed(order, fmt.name, changed))
    parts = [
        f"{name} " + ", ".join(f"{fmt} × {ratio:.2f}" for fmt, ratio in ratios.items())
        for name, ratios in (
            ("exchanged", exchanged),
            ("square with B_c kept, the paper's argument", square),
            ("square of the same area, so with a smaller B_c and more rescales", narrower),
            ("largest over smallest block", larger),
        )
    ]
    text = (
        f"max |flash − baseline|, {_UNIFORM}, N = 512, d = 32, median of 10 seeds:"
        f" {'; '.join(parts)}"
    )
    figures = {
        "exchanged, bf16 and fp16": min(exchanged["bf16"], exchanged["fp16"]),
        "square, furthest from 1": max(square.values(), key=lambda ratio: abs(ratio - 1)),
        "square of the same area": max(narrower.values()),
        "larger": max(larger.values()),
    }
    drawn = (
        *_titled(order.figures, "(after fig. 6a, b)", "uniform"),
        *_titled(size.figures, "(after fig. 6c)", "uniform"),
    )
    return Measured(figures, text, drawn, intervals)


def _against_published(found: SweepResult, fmt: str, order: str) -> float:
    """The median, over blocks and seeds, of the deviation with that order over that of the
    published one.
    """
    # matched by block and seed, so that what the inputs do to both drops out
    return statistics.median(ratio for one in _ratios(found, fmt, order) for ratio in one)


def _ratios(found: SweepResult, fmt: str, order: str) -> list[list[float]]:
    """The deviation with that order over that of the published one, by block and seed."""
    changed = found.select(format=fmt, family=f"{_UNIFORM}, {order}", against="baseline")
    published = found.select(format=fmt, family=_UNIFORM, against="baseline")
    return [
        [a / b for a, b in zip(this.max, that.max, strict=True)]
        for this, that in zip(changed, published, strict=True)
    ]


def _by_seed(found: SweepResult, fmt: str, order: str) -> list[float]:
    """The same by seed, the mean over blocks."""
    return [statistics.fmean(same) for same in zip(*_ratios(found, fmt, order), strict=True)]


def _ratio(over: Sequence[float], under: Sequence[float]) -> Interval:
    """The ratio of two figures matched by seed: geometric mean with its 95 % interval."""
    return geometric_interval([a / b for a, b in zip(over, under, strict=True)])


def _titled(figures: Sequence[Figure], after: str, inputs: str) -> list[dict[str, Any]]:
    """Figures of a sweep as plain data, named after the paper's."""
    return [
        figure.as_dict() | {"title": f"{figure.title}, {inputs} inputs {after}"}
        for figure in figures
    ]


def _growth(points: list[Deviation], statistic: str) -> float:
    """The last point's median over the first's."""
    first, last = (
        statistics.median(getattr(point, statistic)) for point in (points[0], points[-1])
    )
    return float(last / first)


def _median(found: SweepResult, family: str, fmt: str) -> float:
    (point,) = found.select(family=family, format=fmt, against="baseline")
    return statistics.median(point.max)


CLAIMS = (
    Claim(
        "B1",
        "the micro-benchmark's flash attention agrees with the real kernel",
        "validated against the original kernel, no figure",
        _real_kernel,
        Rule(
            "every element of O, lse, dQ, dK and dV identical; on a machine or torch whose bits the"
            " recipe does not claim, at least 80 % of every tensor identical and O within 2 ulps",
            lambda f: (
                f["identical"] == 1
                or (f["bits expected"] == 0 and f["identical"] >= 0.8 and f["ulps of out"] <= 2)
            ),
        ),
        seconds=8.0,
    ),
    Claim(
        "B2",
        "the deviation of flash attention from the baseline shrinks as the mantissa grows, bf16 to"
        " fp64",
        "fig. 3: it falls from format to format",
        _formats,
        Rule(
            "it falls at every step of the mantissa, for every family of recipes",
            lambda f: f["falling"] == 1,
        ),
        seconds=8.0,
    ),
    Claim(
        "B3",
        "against the fp64 golden value, bf16 flash attention deviates about 10 times more than the"
        " baseline",
        "fig. 4: about 10 times",
        _factor,
        Rule(
            f"for every family of recipes ({', '.join(FLASH_FAMILIES)}) the factor is above 1 in"
            f" every setting (inputs {' and '.join(_INPUTS)}) and reaches 10 in some",
            lambda f: f["low"] > 1 and f["high"] >= 10,
        ),
        history=f"2026-11-22: over all families; before, for {_UNIFORM} alone",
        seconds=30.0,
    ),
    Claim(
        "B4",
        "the deviation grows with the sequence length: max, mean and standard deviation",
        "fig. 5: all three rise",
        _length,
        Rule(
            f"for {_UNIFORM} and flash2 stock, on {' and '.join(_INPUTS)} inputs, all three at N ="
            " 2048 are at least 1.5 × those at N = 128",
            lambda f: f["least"] >= 1.5,
        ),
        history=(
            f"2026-11-22: over both families and all inputs; before, for {_UNIFORM} on uniform"
            " inputs alone"
        ),
        seconds=8.0,
    ),
    Claim(
        "B5",
        "exchanging the block dimensions raises the deviation; square blocks change nothing; larger"
        " blocks lower it",
        "fig. 6: raised (a), unchanged (b), lowered (c)",
        _blocks,
        Rule(
            "exchanged above × 1.1 in bf16 and fp16; square with B_c kept, as the paper argues,"
            " within × 0.8 to 1.25 in all four formats; largest block below × 0.9 of the smallest"
            " in all four",
            lambda f: (
                f["exchanged, bf16 and fp16"] > 1.1
                and 0.8 <= f["square, furthest from 1"] <= 1.25
                and f["larger"] < 0.9
            ),
        ),
        history=(
            "2026-11-22: square blocks with B_c kept; before, of the same area, which has more"
            " rescales"
        ),
        seconds=8.0,
    ),
)
