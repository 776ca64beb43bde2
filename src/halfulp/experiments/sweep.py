"""How far flash attention deviates numerically: over formats, sequence length, block size and block
order.

Flash attention is compared with the baseline and both with the fp64 golden value, on the same
random inputs. What "flash attention in bf16" means decides the answer: a kernel that rounds
operands and results only is no worse than the baseline, and one that keeps its running sums in bf16
is many times worse. So every sweep is measured for several families of recipes and says which gave
which figure. The inputs matter as much: with a zero-mean V, O shrinks with the length and the
deviation with it.

Source: Golden et al., "Is Flash Attention Stable?" (arXiv 2405.02803), figures 3 to 6. The text at
hand names neither the length nor the distribution of the paper's inputs; both are settings here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from halfulp.algorithms import blocks_for_memory
from halfulp.attention import emulate, golden
from halfulp.formats import BF16, FP16, FP32, FP64, Format, round_to
from halfulp.recipes import BF16_STANDARD, STEPS, Matmul, Recipe, flash2, uniform
from halfulp.runs.parallel import run_jobs
from halfulp.runs.results import Figure, Plain, Progress, Series, Table

FORMATS: tuple[Format, ...] = (BF16, FP16, FP32, FP64)
Inputs: TypeAlias = Literal["normal", "uniform"]
Statistic: TypeAlias = Literal["max", "mean", "std"]
Against: TypeAlias = Literal["baseline", "golden"]
Order: TypeAlias = Literal["published", "exchanged", "square", "square, B_c kept"]
ORDERS: tuple[Order, ...] = get_args(Order)
SWEPT = {"length": "length", "block": "memory", "order": "memory"}
"""Which size of `Setting` a sweep goes through, so that it is none of its settings."""


@dataclass(frozen=True)
class Setting:
    """What stays fixed in a sweep: sizes, inputs and how many seeds."""

    length: int = 1024  # N, tokens
    head_dim: int = 64  # d
    memory: int = 16384  # M, on-chip elements: B_c = ⌈M/4d⌉, B_r = min(⌈M/4d⌉, d)
    seeds: int = 10
    inputs: Inputs = "uniform"  # of query, key, value: uniform on [0, 1), or standard normal

    def __post_init__(self) -> None:
        for name in ("length", "head_dim", "memory", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)}: accepted is an integer of at least 1"
                )
        if self.inputs not in ("normal", "uniform"):
            raise ValueError(f"inputs={self.inputs!r}: accepted are 'normal' and 'uniform'")

    def command(self, what: str) -> str:
        """Return the line that repeats a sweep of it."""
        flags = (
            f"--{f.name.replace('_', '-')} {getattr(self, f.name)}"
            for f in fields(self)
            if f.name != SWEPT.get(what)
        )
        return f"halfulp sweep {what} {' '.join(flags)}"


@dataclass(frozen=True)
class Deviation:
    """How far one recipe's out is from another value, per seed: statistics of the absolute
    difference over elements.
    """

    format: str
    family: str
    against: Against
    x: float  # what is swept: mantissa bits, length or block area
    block_query: int | None
    block_key: int | None
    max: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class SweepResult(Plain):
    """One sweep: every deviation, with figures and a table made of them."""

    name: str
    setting: Setting
    deviations: tuple[Deviation, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]
    command: str

    def select(self, **wanted: object) -> list[Deviation]:
        """Return the deviations whose fields have these values."""
        return _select(self.deviations, **wanted)


def _select(found: Sequence[Deviation], **wanted: object) -> list[Deviation]:
    return [d for d in found if all(getattr(d, name) == x for name, x in wanted.items())]


def baseline(fmt: Format) -> Recipe:
    """Baseline attention in `fmt`: BF16_STANDARD with that format, so the softmax in fp32 and all
    else rounded.
    """
    steps = {name: fmt for name in STEPS if getattr(BF16_STANDARD, name) == BF16}
    # rows do not depend on each other: their block bounds memory alone
    return _computed(
        BF16_STANDARD.with_(name=f"{fmt.name}_STANDARD", block_query=128, **steps), fmt
    )


FAMILIES: dict[str, Callable[[Format], Recipe]] = {
    "flash2 stock": lambda fmt: _computed(flash2(fmt), fmt),
    "flash2 uniform": lambda fmt: uniform(fmt, "flash2"),
    "flash1 uniform": lambda fmt: uniform(fmt, "flash1"),
    "standard uniform": lambda fmt: uniform(fmt, "standard", block_query=128),
}
"""Families by name. "stock" rounds operands and results, as kernels do; "uniform" rounds every
intermediate.
"""

FLASH_FAMILIES = ("flash2 stock", "flash2 uniform", "flash1 uniform")
_OF_BLOCKS = "flash1 uniform"  # the family that sweeps over blocks measure


def sweep_precision(
    setting: Setting | None = None,
    *,
    formats: Sequence[Format] = FORMATS,
    families: Sequence[str] = (*FLASH_FAMILIES, "standard uniform"),
    progress: Progress | None = None,
) -> SweepResult:
    """Deviation per format, flash against baseline and each against golden (figures 3 and 4; claims
    B2, B3).
    """
    setting = setting or Setting()
    blocks = blocks_for_memory(setting.memory, setting.head_dim)
    jobs = [_Job(setting, fmt, families, blocks, fmt.mantissa_bits) for fmt in formats]
    found = _measure_all(jobs, progress)
    command = setting.command("precision")
    names = tuple(fmt.name for fmt in formats)
    flash = [family for family in families if family.startswith("flash")]
    against, both = "Flash attention against the baseline", "Both against the fp64 golden value"
    fig3 = tuple(_bars(found, family, "baseline", names) for family in flash)
    fig4 = tuple(_bars(found, family, "golden", names) for family in ("baseline", *families))
    caption = _caption(setting)
    figures = (
        Figure(against, "format", "max |difference| of O", fig3, caption, command, y_log=True),
        Figure(both, "format", "max |error| of O", fig4, caption, command, y_log=True),
    )
    return SweepResult(
        "precision",
        setting,
        found,
        figures,
        (_factors(found, formats, families, setting, command),),
        command,
    )


def sweep_length(
    setting: Setting | None = None,
    *,
    lengths: Sequence[int] = (128, 256, 512, 1024, 2048),
    formats: Sequence[Format] = (BF16,),
    families: Sequence[str] = FLASH_FAMILIES,
    progress: Progress | None = None,
) -> SweepResult:
    """Deviation over the sequence length at fixed block size (figure 5: max, mean and std; claim
    B4).
    """
    setting = setting or Setting()
    blocks = blocks_for_memory(setting.memory, setting.head_dim)
    jobs = [
        _Job(replace(setting, length=n), fmt, families, blocks, n)
        for fmt in formats
        for n in lengths
    ]
    found = _measure_all(jobs, progress)
    return _curves(
        "length",
        setting,
        found,
        formats,
        families,
        "sequence length N",
        ("max", "mean", "std"),
        "rises with N",
    )


def sweep_block(
    setting: Setting | None = None,
    *,
    memories: Sequence[int] = (1024, 2048, 4096, 8192, 16384, 32768),
    formats: Sequence[Format] = FORMATS,
    progress: Progress | None = None,
) -> SweepResult:
    """Deviation over the block area B_r · B_c, from on-chip memory M (figure 6c; claim B5)."""
    setting = setting or Setting(length=512, head_dim=32)
    jobs = [_block_job(setting, fmt, memory) for fmt in formats for memory in memories]
    found = _measure_all(jobs, progress)
    return _curves(
        "block",
        setting,
        found,
        formats,
        (_OF_BLOCKS,),
        "block area B_r · B_c",
        ("max",),
        "falls with the area",
    )


def sweep_order(
    setting: Setting | None = None,
    *,
    memories: Sequence[int] = (8192, 16384, 32768),
    formats: Sequence[Format] = FORMATS,
    progress: Progress | None = None,
) -> SweepResult:
    """Deviation with B_r and B_c as published, exchanged, and square: of the same area, or as wide
    (figures 6a and 6b; claim B5).

    The first three differ only where ⌈M/4d⌉ > d, so `memories` start above 4d². A square of the
    same area has narrower tiles, so more rescales; one as wide, which is what the paper argues
    with, differs in the number of rows alone, which no sum is taken over.
    """
    setting = setting or Setting(length=512, head_dim=32)
    jobs = [
        _block_job(setting, fmt, memory, variant)
        for fmt in formats
        for variant in ORDERS
        for memory in memories
    ]
    found = _measure_all(jobs, progress)
    named = [_OF_BLOCKS + _suffix(variant) for variant in ORDERS]
    says = "exchanged: larger; square: unchanged"
    return _curves("order", setting, found, formats, named, "block area B_r · B_c", ("max",), says)


def draw_inputs(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key, value `[seeds, 1, N, d]` in float64; seed i has its own generator."""
    drawn = []
    for seed in range(setting.seeds):
        g = torch.Generator().manual_seed(seed)
        shape = (3, 1, setting.length, setting.head_dim)
        draw = torch.randn if setting.inputs == "normal" else torch.rand
        # in fp64, from which every format rounds the same numbers
        drawn.append(draw(shape, generator=g, dtype=torch.float64))
    query, key, value = torch.stack(drawn, 1)
    return query, key, value


@dataclass(frozen=True)
class _Job:
    setting: Setting
    fmt: Format
    families: Sequence[str]
    blocks: dict[str, int]
    x: float
    suffix: str = ""  # what is appended to the family's name


def _block_job(setting: Setting, fmt: Format, memory: int, order: Order = "published") -> _Job:
    blocks = blocks_for_memory(memory, setting.head_dim, exchanged=order == "exchanged")
    if order == "square":
        side = round(math.sqrt(blocks["block_query"] * blocks["block_key"]))
        blocks = {"block_query": side, "block_key": side}
    elif order == "square, B_c kept":
        blocks = blocks | {"block_query": blocks["block_key"]}
    area = blocks["block_query"] * blocks["block_key"]
    return _Job(setting, fmt, (_OF_BLOCKS,), blocks, area, _suffix(order))


def _suffix(order: Order) -> str:
    return "" if order == "published" else f", {order}"


def _measure_all(jobs: Sequence[_Job], progress: Progress | None) -> tuple[Deviation, ...]:
    found = run_jobs(_measure, jobs, workers=1, progress=progress, what="measurements")
    return tuple(deviation for one in found for deviation in one)


def _measure(job: _Job) -> list[Deviation]:
    """Baseline and families on inputs that the format holds, so that what differs is the arithmetic
    alone.
    """
    query, key, value = (round_to(x, job.fmt) for x in draw_inputs(job.setting))
    truth = golden(query, key, value).out
    with torch.no_grad():
        base = emulate(query, key, value, recipe=baseline(job.fmt))
        found = [_deviation(job, "baseline", "golden", base - truth, None)]
        for family in job.families:
            tiled = FAMILIES[family](job.fmt)
            recipe = tiled if tiled.algorithm == "standard" else tiled.with_(**job.blocks)
            out = emulate(query, key, value, recipe=recipe)
            found.append(_deviation(job, family + job.suffix, "golden", out - truth, recipe))
            found.append(_deviation(job, family + job.suffix, "baseline", out - base, recipe))
    return found


def _deviation(
    job: _Job, family: str, against: Against, difference: Tensor, recipe: Recipe | None
) -> Deviation:
    size = difference.abs().flatten(1)
    # of all elements that there are, so no sample's correction
    std, mean = torch.std_mean(size, dim=1, correction=0)
    blocks = (None, None) if recipe is None else (recipe.block_query, recipe.block_key)
    largest = size.amax(1)
    return Deviation(
        job.fmt.name,
        family,
        against,
        job.x,
        *blocks,
        *(tuple(s.tolist()) for s in (largest, mean, std)),
    )


def _computed(recipe: Recipe, fmt: Format) -> Recipe:
    """The recipe held in float64 where float32 would round more coarsely than the format."""
    if fmt.mantissa_bits <= FP32.mantissa_bits:
        return recipe
    return recipe.with_(compute="float64", matmul=Matmul(FP64))


def _bars(
    found: Sequence[Deviation], family: str, against: Against, formats: tuple[str, ...]
) -> Series:
    points = [_select(found, format=f, family=family, against=against)[0] for f in formats]
    return Series.over(family, formats, [d.max for d in points], "bar")


def _curves(
    name: str,
    setting: Setting,
    found: tuple[Deviation, ...],
    formats: Sequence[Format],
    families: Sequence[str],
    x_label: str,
    shown: Sequence[Statistic],
    paper: str,
) -> SweepResult:
    """A figure per statistic, a line per format and family, and a table from first to last x."""
    command = setting.command(name)
    figures, rows = [], []
    for statistic in shown:
        series = []
        for fmt in formats:
            for family in families:
                points = _select(found, format=fmt.name, family=family, against="baseline")
                values = [getattr(d, statistic) for d in points]
                line = Series.over(f"{fmt.name}, {family}", [d.x for d in points], values)
                series.append(line)
                ends = (line.x[0], line.y[0], line.x[-1], line.y[-1])
                ratio = line.y[-1] / line.y[0] if line.y[0] else None
                rows.append((statistic, fmt.name, family, *ends, ratio, paper))
        title = f"Flash attention against the baseline: {statistic} of |difference|"
        y_label = f"{statistic} |difference| of O"
        figures.append(
            Figure(title, x_label, y_label, tuple(series), _caption(setting), command, True, True)
        )
    columns = (
        "statistic",
        "format",
        "family",
        "first x",
        "at first x",
        "last x",
        "at last x",
        "ratio",
        "paper",
    )
    table = Table(f"Deviation over {x_label}", columns, tuple(rows), _caption(setting), command)
    return SweepResult(name, setting, found, tuple(figures), (table,), command)


def _factors(
    found: Sequence[Deviation],
    formats: Sequence[Format],
    families: Sequence[str],
    setting: Setting,
    command: str,
) -> Table:
    """Each family's error against golden, as a multiple of the baseline's; the paper states bf16's
    factor only.
    """
    rows = []
    for fmt in formats:
        (base,) = _select(found, format=fmt.name, family="baseline", against="golden")
        for family in ("baseline", *families):
            (this,) = _select(found, format=fmt.name, family=family, against="golden")
            figures = [statistics.median(x) for x in (this.max, this.mean, this.std)]
            factor = 1.0 if this is base else factor_of(this, base)
            paper = "about 10" if fmt == BF16 and family.startswith("flash") else ""
            rows.append((fmt.name, family, *figures, factor, paper))
    columns = (
        "format",
        "family",
        "max |error|",
        "mean |error|",
        "std |error|",
        "max / baseline's",
        "paper's factor",
    )
    return Table(
        "Error against the fp64 golden value", columns, tuple(rows), _caption(setting), command
    )


def factor_of(this: Deviation, base: Deviation) -> float | None:
    """Return the median over seeds of the ratio of the two largest errors; None where the base has
    none.
    """
    ratios = [a / b for a, b in zip(this.max, base.max, strict=True) if b]
    return statistics.median(ratios) if ratios else None


def _caption(setting: Setting) -> str:
    return (
        f"{setting.seeds} seeds, {setting.inputs} inputs, d = {setting.head_dim}, N ="
        f" {setting.length} and M = {setting.memory} elements where not swept; the median over"
        " seeds, and the range from least to most."
    )
