"""Claims of Golden et al. about training: in-model comparison, weight drift in context,
text-to-image, speed.

The paper trained a text-to-image model on a cluster; here a diffusion transformer of a few layers
draws small pictures, so what holds is reproduced at reduced scale. At the full scale of the ledger
the runs are longer, a byte-level GPT stands beside, and more kinds of twins are trained.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfulp.experiments.compare import INITIALIZATION, REPEATED
from halfulp.experiments.drawing import draw_run, sheet_block
from halfulp.papers.claim import Claim, Lab, Measured, Rule
from halfulp.papers.in_model import compare_in_model, same_bits
from halfulp.papers.model_speed import Speed, measure_speed, speed_sizes
from halfulp.papers.twins import (
    FLASH,
    KINDS,
    LOW_PRECISION,
    PAPER,
    DriftResult,
    measure_drift,
    small_language,
    small_pictures,
)
from halfulp.runs.threads import one_thread
from halfulp.training.checkpoint import model_tensors
from halfulp.training.config import Optimizer, RunConfig
from halfulp.training.loop import train
from halfulp.training.presets import pictures as pictures_preset

_BF16, _FP16 = LOW_PRECISION
_CHANCE = 1e-3  # probability that a model which ignores names would draw as many pictures rightly


def _in_model(lab: Lab) -> Measured:
    """B6: both versions and fp64 at every call, and the same training without anybody looking."""
    steps, every = (200, 4) if lab.full else (60, 5)
    config = KINDS["flash"](small_pictures(steps))
    found = compare_in_model(config, every, command="halfulp claims B6", progress=lab.report)
    with one_thread():
        plain = train(config)
    deviations = [
        one for one in found.deviations if (one.version, one.against) == ("flash", "baseline")
    ]
    ratios = found.mean_ratio("flash")
    figures = {
        "calls": float(found.calls),
        "expected": float(len(found.layers) * -(-steps // every)),
        "layers": float(len(found.layers)),
        "same_bits": float(same_bits(model_tensors(plain.workload.model), found.weights)),
        "largest": max(one.largest for one in deviations),
        "mean": max(one.mean for one in deviations),
        "lowest_ratio": min(ratios.values()),
        "highest_ratio": max(ratios.values()),
    }
    text = (
        f"{found.calls} calls of {len(found.layers)} layers (self- and cross-attention) of a"
        f" text-to-image run: flash against baseline at most {figures['largest']:.2g}, mean up to"
        f" {figures['mean']:.1e}; flash's mean error against fp64 is {figures['lowest_ratio']:.2f}"
        f" to {figures['highest_ratio']:.2f} times the baseline's, by layer; the run's final"
        f" weights {'keep' if figures['same_bits'] else 'DO NOT KEEP'} their bits"
    )
    return Measured(figures, text, tuple(figure.as_dict() for figure in found.figures()[:1]))


def _drift(lab: Lab) -> DriftResult:
    """The twin runs of B7 and B8 on the text-to-image model."""
    steps, pairs = (200, None) if lab.full else (100, PAPER)
    return lab.once("drift", lambda: _measured(lab, small_pictures(steps), pairs))


def _language_drift(lab: Lab) -> DriftResult:
    return lab.once("language drift", lambda: _measured(lab, small_language(200), None, seeds=3))


def _measured(
    lab: Lab, config: RunConfig, pairs: Sequence[str] | None, seeds: int | None = None
) -> DriftResult:
    return measure_drift(
        config,
        lab.seeds[:seeds],
        pairs=pairs,
        workers=lab.workers,
        command="halfulp claims B8",
        progress=lab.report,
    )


def _apart(lab: Lab) -> Measured:
    """B7: flash against baseline, from the first checkpoint to the last, and the same run
    repeated.
    """
    compared = _drift(lab).compared
    flash, repeated = compared.of(FLASH), compared.of(REPEATED)
    slopes = [drift.slope for drift in flash]
    figures = {
        "seeds": float(len(flash)),
        "lowest_slope": min(slopes),
        "wasserstein_growth": min(drift.wasserstein[-1] / drift.wasserstein[0] for drift in flash),
        "difference_growth": min(
            drift.max_difference[-1] / drift.max_difference[0] for drift in flash
        ),
        "repeated": max(value for drift in repeated for value in drift.max_difference),
    }
    line = next(line for line in compared.summary() if line.name == FLASH)
    text = (
        f"text-to-image, bf16, {len(flash)} seeds, {line.steps} steps: Wasserstein distance"
        f" {line.wasserstein:.1e} and largest difference {line.max_difference:.1e} at the end, at"
        f" least × {figures['wasserstein_growth']:.1f} and × {figures['difference_growth']:.1f}"
        f" those of the first checkpoint; slope {line.slope} a step; the same run repeated:"
        f" {figures['repeated']:g}"
    )
    return Measured(figures, text, tuple(figure.as_dict() for figure in compared.figures()))


def _context(lab: Lab) -> Measured:
    """B8: the slopes of all kinds of twins, and the ratios between them."""
    result = _drift(lab)
    lines = {line.name: line for line in result.compared.summary()}
    ratio = result.ratio(_BF16)
    figures = {
        "seeds": float(lines[FLASH].seeds),
        "flash": lines[FLASH].slope.value,
        "initialization": lines[INITIALIZATION].slope.value,
        "bf16": lines[_BF16].slope.value,
        "fp16": lines[_FP16].slope.value,
        "uneven_initialization": lines[INITIALIZATION].unevenness,
        "uneven_fp16": lines[_FP16].unevenness,
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }
    text = f"text-to-image, {_slopes(lines.values())}; {_ratios(result)}; {_parts(figures)}"
    drawn = [figure.as_dict() for figure in result.compared.figures()[:1]]
    if lab.full:
        language = _language_drift(lab)
        text += f". Byte-level GPT, {_slopes(language.compared.summary())}; {_ratios(language)}"
        drawn += [
            {**f.as_dict(), "title": f"{f.title}, GPT"} for f in language.compared.figures()[:1]
        ]
    return Measured(figures, text, tuple(drawn))


_PARTS: tuple[tuple[str, Any], ...] = (
    ("flash ≤ initialization", lambda f: f["flash"] <= f["initialization"]),
    ("fp16 against fp32 > initialization", lambda f: f["fp16"] > f["initialization"]),
    ("and more uneven", lambda f: f["uneven_fp16"] > f["uneven_initialization"]),
    (
        "flash 2 to 5 times smaller than bf16 against fp32",
        lambda f: f["ratio_low"] <= 5 and f["ratio_high"] >= 2,
    ),
)


def _slopes(lines: Any) -> str:
    shown = [f"{line.name} {line.slope}" for line in lines if line.name != REPEATED]
    return "slopes of the Wasserstein distance a step: " + ", ".join(shown)


def _ratios(result: DriftResult) -> str:
    return ", ".join(f"{name} over flash × {result.ratio(name)}" for name in LOW_PRECISION)


def _parts(figures: dict[str, float]) -> str:
    return ", ".join(f"{name}: {'yes' if holds(figures) else 'no'}" for name, holds in _PARTS)


def _text_to_image(lab: Lab) -> Measured:
    """B9: train, then draw every name and look which picture of the data is nearest."""
    from scipy.stats import binom

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "pictures"
        with one_thread():
            run = train(drawing_config(full=lab.full), folder, progress=lab.report)
        drawn = draw_run(folder)
    loss, count = run.curve("loss"), len(drawn.names)
    chance = float(binom.sf(drawn.right - 1, count, 1 / count))
    figures = {
        "first_loss": loss[0],
        "last_loss": loss[-1],
        "right": float(drawn.right),
        "count": float(count),
        "chance": chance,
    }
    text = (
        f"{count} pictures with names ({drawn.source}), {run.config.steps} steps: loss"
        f" {loss[0]:.2f} → {loss[-1]:.3f}; {drawn.right} of {count} drawings are nearest to the"
        f" picture of their name (by chance 1; p = {chance:.0e})"
    )
    return Measured(figures, text, (sheet_block(drawn),))


def drawing_config(*, full: bool) -> RunConfig:
    """Return the training whose drawings are looked at: seconds, or the preset `pictures` for 1000
    steps.
    """
    if full:
        return replace(pictures_preset("torch:math", steps=1000), metrics_every=20)
    config = small_pictures(400)
    optimizer = Optimizer(learning_rate=4e-3, warm_up=50, schedule="cosine", clip=1.0)
    return replace(KINDS["baseline"](config), optimizer=optimizer)


def _speed(lab: Lab) -> Measured:
    """B10: forward and backward passes with plain and flash attention in turn."""
    sizes = speed_sizes()
    pairs = 20 if lab.full else 9
    found: list[Speed] = []
    for i, (name, config) in enumerate(sizes.items()):

        def told(fraction: float, message: str, done: int = i) -> None:
            lab.report((done + fraction) / len(sizes), message)

        found.append(measure_speed(name, config, pairs, progress=told))
    longest = max(
        (one for one in found if one.workload.startswith("pictures")), key=lambda one: one.tokens
    )
    low, high = longest.interval
    figures = {
        "speed_up": longest.speed_up,
        "low": low,
        "high": high,
        "tokens": float(longest.tokens),
    }
    text = (
        f"{'; '.join(map(str, found))} (processor time, bf16 autocast, one thread; plain products"
        " and softmax against torch:flash)"
    )
    return Measured(figures, text)


CLAIMS = (
    Claim(
        "B6",
        "B",
        "in-model comparison: at every attention call both versions see the same inputs",
        "method, no figure",
        _in_model,
        Rule(
            "every call of every compared step is measured, the versions differ somewhere, and the"
            " run's final weights are those of a run without comparison, bit for bit",
            lambda f: (
                f["calls"] == f["expected"] and f["same_bits"] == 1 and 0 < f["largest"] < math.inf
            ),
        ),
        setup="reduced",
        seconds=4.0,
    ),
    Claim(
        "B7",
        "B",
        "weights of flash and baseline runs drift apart, max difference and Wasserstein distance"
        " growing with steps",
        "fig. 7",
        _apart,
        Rule(
            "at least 3 seeds: in each the Wasserstein distance has a positive slope, both figures"
            " are larger at the last checkpoint than at the first, and the same run repeated"
            " differs by exactly 0",
            lambda f: (
                f["seeds"] >= 3
                and f["lowest_slope"] > 0
                and min(f["wasserstein_growth"], f["difference_growth"]) > 1
                and f["repeated"] == 0
            ),
        ),
        setup="reduced",
        seconds=40.0,
    ),
    Claim(
        "B8",
        "B",
        "flash drift is at most that of another random initialization; low precision drifts more"
        " and more variably",
        "fig. 8: flash 2 to 5 times smaller than low precision",
        _context,
        Rule(
            "at least 3 seeds, mean slopes of the Wasserstein distance on the text-to-image model:"
            " flash at most another initialization; fp16 against fp32 above it, and more uneven; 95"
            " % interval of bf16 against fp32 over flash meets 2 to 5",
            lambda f: f["seeds"] >= 3 and all(holds(f) for _, holds in _PARTS),
        ),
        setup="reduced",
        seconds=1.0,
    ),
    Claim(
        "B9",
        "B",
        "workload: text-to-image training",
        "a text-to-image model on 80 GB A100s",
        _text_to_image,
        Rule(
            "the loss falls below half of its first value, and so many drawings are nearest to the"
            " picture of their name that chance would give as many with a probability below"
            f" {_CHANCE:g}",
            lambda f: f["last_loss"] < f["first_loss"] / 2 and f["chance"] < _CHANCE,
        ),
        setup="reduced",
        seconds=6.0,
    ),
    Claim(
        "B10",
        "B",
        "flash attention speeds up the model's forward and backward pass",
        "14 %",
        _speed,
        Rule(
            "at the most patches that are measured, the 95 % interval of the median speed-up lies"
            " above 1.02",
            lambda f: f["low"] > 1.02,
        ),
        history="2026-11-22: 1.02 in place of 1, since a lower bound of 1.00015 is no speed-up",
        setup="reduced",
        seconds=12.0,
    ),
)
