"""Twin runs for the comparison of Golden et al. (arXiv 2405.02803, section V): trained here, then
compared.

The paper sets the drift between flash and baseline attention beside that of other changes nobody
minds: another initialization, a lower precision. Here stand the same run once more (which must not
drift at all), other block sizes and the halfulp recipe as well. Every run is a folder that can be
resumed, and trains on one thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from halfulp.experiments.compare import (
    INITIALIZATION,
    REPEATED,
    CompareResult,
    drift_between,
)
from halfulp.experiments.compare_summary import (
    Drift,
    Interval,
    difference_by_seed,
    ratio_by_seed,
    unevenness_of,
)
from halfulp.runs.keeping import unfinished_folder
from halfulp.runs.parallel import run_jobs
from halfulp.runs.results import Progress
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, Optimizer, Pictures, RunConfig
from halfulp.training.loop import train

OTHER_WEIGHTS = 1000  # added to the seed for another initialization
_TILES = "BF16_FLASH2[block_query={0},block_key={0}]"

KINDS: dict[str, Callable[[RunConfig], RunConfig]] = {
    "baseline": lambda c: _with(c, "torch:math", "bf16"),
    "repeated": lambda c: _with(c, "torch:math", "bf16"),
    "weights": lambda c: dataclasses.replace(
        _with(c, "torch:math", "bf16"), seed=c.seed + OTHER_WEIGHTS
    ),
    "flash": lambda c: _with(c, "torch:flash", "bf16"),
    "halfulp": lambda c: _with(c, "BF16_HALFULP", "bf16"),
    "small-blocks": lambda c: _with(c, _TILES.format(8), "bf16"),
    "large-blocks": lambda c: _with(c, _TILES.format(64), "bf16"),
    "fp32": lambda c: _with(c, "FP32[algorithm=standard]", "none"),
    "fp32-flash": lambda c: _with(c, "torch:fp32", "none"),
    "fp16": lambda c: _with(c, "torch:math", "fp16"),
    "fp16-flash": lambda c: _with(c, "torch:flash", "fp16"),
}
"""Runs by name, made of one configuration; they share data, and all but "weights" their initial
weights.

"torch:fp32" is PyTorch's flash kernel on fp32 tensors, which it reads as they are on a CPU.
"""


@dataclass(frozen=True)
class Pair:
    """Two kinds of runs, and what they differ in."""

    name: str
    baseline: str
    run: str


FLASH = "flash against baseline attention, bf16"
PAIRS: tuple[Pair, ...] = (
    Pair(FLASH, "baseline", "flash"),
    Pair(INITIALIZATION, "baseline", "weights"),
    Pair("bf16 against fp32", "fp32", "baseline"),
    Pair("fp16 against fp32", "fp32", "fp16"),
    Pair(REPEATED, "baseline", "repeated"),
    Pair("flash against baseline attention, fp32", "fp32", "fp32-flash"),
    Pair("flash against baseline attention, fp16", "fp16", "fp16-flash"),
    Pair("blocks of 8 against 64", "large-blocks", "small-blocks"),
    Pair("halfulp recipe against baseline attention", "baseline", "halfulp"),
)
LOW_PRECISION = ("bf16 against fp32", "fp16 against fp32")
PAPER = (FLASH, INITIALIZATION, *LOW_PRECISION, REPEATED)
"""The comparisons of the paper, and the repeated run."""


@dataclass(frozen=True)
class DriftResult:
    """The drifts of one workload, and what the paper's ratio comes to."""

    compared: CompareResult

    def ratio(self, low_precision: str) -> Interval:
        """How many times as steep the drift of low precision is as that of flash attention."""
        pairs = self.compared.of(low_precision), self.compared.of(FLASH)
        return ratio_by_seed(*pairs, lambda drift: drift.slope)

    def apart(self, over: str, under: str = FLASH) -> Interval:
        """How many times as far apart the weights of one pair end as those of another (the paper,
        low precision over flash: 2 to 5).
        """
        pairs = self.compared.of(over), self.compared.of(under)
        return ratio_by_seed(*pairs, lambda drift: drift.wasserstein[-1])

    def steeper(self, one: str, other: str) -> Interval:
        """How much steeper the drift of one pair is than of another, a step."""
        pairs = self.compared.of(one), self.compared.of(other)
        return difference_by_seed(*pairs, lambda drift: drift.slope)

    def more_uneven(self, one: str, other: str) -> Interval:
        """How many times as far the distances of one pair lie from their line as those of
        another.
        """
        pairs = self.compared.of(one), self.compared.of(other)
        return ratio_by_seed(*pairs, lambda drift: unevenness_of(drift.steps, drift.wasserstein))


def small_pictures(steps: int = 300) -> RunConfig:
    """Return the diffusion workload at its smallest: 16 pictures of 16 pixels, about 3 s for 300
    steps.

    The pictures are the shapes that this package draws itself, whatever fonts are installed, so
    that figures repeat elsewhere. The learning rate stays what it is, as drift is read off a line.
    """
    return RunConfig(
        Pictures(layers=2, heads=2, width=48, size=16, patch=4, count=16, data="shapes"),
        optimizer=Optimizer(learning_rate=2e-3, warm_up=30, clip=1.0),
        steps=steps,
        batch=16,
    )


def small_language(steps: int = 300) -> RunConfig:
    """Return a byte-level GPT of two layers on English text."""
    return RunConfig(
        Language(layers=2, heads=2, width=64, context=64, data="english"),
        optimizer=Optimizer(learning_rate=1e-3, warm_up=30, clip=1.0),
        steps=steps,
        batch=8,
    )


def measure_drift(
    config: RunConfig,
    seeds: Sequence[int] = (0, 1, 2),
    folder: Path | None = None,
    *,
    pairs: Iterable[str] | None = None,
    checkpoints: int = 10,
    workers: int = 2,
    command: str = "",
    progress: Progress | None = None,
) -> DriftResult:
    """Train twin runs and compare their weights.

    Args:
        config: workload, optimizer, steps and batch; attention, precision and seeds are replaced.
        seeds: of weights and data, a set of twin runs for each.
        folder: where the runs are written, KIND-SEED each, and resumed; None: somewhere that is
            gone afterwards, and there again for the next call where results are kept
            (`halfulp.runs.keeping`).
        pairs: names of `PAIRS`; all if None.
        checkpoints: how many a run.
        workers: processes.
        command: what repeats it, for the record.
        progress: called after every run.

    Raises:
        ValueError: a pair is not known, or the configuration does not fit.
    """
    chosen = _pairs(pairs)
    kinds = list(dict.fromkeys(kind for pair in chosen for kind in (pair.baseline, pair.run)))
    every = max(1, config.steps // checkpoints)
    asked = ("twins", config, tuple(seeds), [pair.name for pair in chosen], every)
    with unfinished_folder(*asked) if folder is None else nullcontext(folder) as root:
        root.mkdir(parents=True, exist_ok=True)
        jobs = {
            (kind, seed): (
                KINDS[kind](_recorded(config, seed, every)),
                root / f"{kind}-{seed}",
            )
            for seed in seeds
            for kind in kinds
        }
        run_jobs(_train, list(jobs.values()), workers=workers, progress=progress)
        folders = {key: path for key, (_, path) in jobs.items()}
        drifts = [
            _drift(pair, seed, folders[pair.baseline, seed], folders[pair.run, seed])
            for pair in chosen
            for seed in seeds
        ]
    caption = "Checkpoints of twin runs that share their data; each trained on one thread."
    return DriftResult(CompareResult(tuple(drifts), command, caption))


def _train(job: tuple[RunConfig, Path]) -> None:
    config, path = job
    train(config, path, resume=True)


def _pairs(names: Iterable[str] | None) -> list[Pair]:
    known = {pair.name: pair for pair in PAIRS}
    wanted = list(known) if names is None else list(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"pairs={name!r}: accepted are {', '.join(known)}")
    return [known[name] for name in wanted]


def _drift(pair: Pair, seed: int, baseline: Path, run: Path) -> Drift:
    """The drift of a pair, which holds of finished runs alone."""
    return dataclasses.replace(drift_between(baseline, run, pair.name), seed=seed)


def _recorded(config: RunConfig, seed: int, every: int) -> RunConfig:
    return dataclasses.replace(
        config,
        seed=seed,
        # said apart, since "weights" changes the seed and keeps the data
        data_seed=seed,
        checkpoint_every=every,
        # every checkpoint is compared, so none may be pruned
        keep=None,
        measure_every=0,
        metrics_every=every,
    )


def _with(config: RunConfig, attention: str, autocast: str) -> RunConfig:
    return dataclasses.replace(config, attention=AttentionPlan.of(attention), autocast=autocast)  # type: ignore[arg-type]
