"""A training that low-precision flash attention ruins in seconds, in true bf16, with nothing
accelerated but the task.

One causal attention layer (W_Q, W_K, W_V, W_O; d = 32, one head, 32 tokens, batch 16) learns a
random fp32 teacher by mean squared error on one fixed batch with Adam (1e-3, 0.9/0.95, 50 steps of
warm-up). Eight of the 32 input coordinates are constant 1, so keys share a direction that softmax
cannot see: the only thing that can push the scores along it is a row sum of dS that is not zero.
With attention that is free of that error the mean score stays where it is; with the stock recipe it
walks off, the weights with it, and in the end the loss. The failing runs have lost a factor of ten
and more against their own best; that factor is the rule by which a run is called failed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from halfulp.attention import emulate
from halfulp.isolate.rule import RULE, Outcome, judge
from halfulp.recipes import RECIPES, Recipe
from halfulp.runs.parallel import run_jobs
from halfulp.runs.results import Figure, Plain, Progress, Series
from halfulp.runs.threads import one_thread
from halfulp.training.attention import AttentionFunction, attention_function
from halfulp.training.config import LayerTask
from halfulp.training.loop import train
from halfulp.training.presets import seconds

AttentionChoice: TypeAlias = str | Recipe | AttentionFunction

CURVES = ("loss", "mean_score", "max_score", "sigma_query", "sigma_key", "sigma_query_key")


@dataclass(frozen=True)
class FailureRun(Plain):
    """What one training recorded, every `record_every` steps and at the end."""

    BESIDE = ("rule",)
    attention: str
    seed: int
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    mean_score: tuple[float, ...]  # of the scores a query may see, scaled by 1/√d
    max_score: tuple[float, ...]
    sigma_query: tuple[float, ...]  # largest singular value of W_Q
    sigma_key: tuple[float, ...]
    sigma_query_key: tuple[float, ...]  # of α W_Qᵀ W_K, which scores depend on alone
    broke_at: int | None  # the step whose loss was not finite; the run ends there
    outcome: Outcome
    reason: str

    @property
    def rule(self) -> str:
        """By which its outcome was judged."""
        return RULE


def run_failure(
    attention: AttentionChoice,
    seed: int = 0,
    steps: int = 4000,
    record_every: int = 50,
    *,
    task: LayerTask | None = None,
    folder: Path | None = None,
) -> FailureRun:
    """Train the layer once, on one thread, and say what became of it.

    Args:
        attention: "torch:flash", "torch:math" (PyTorch's own kernels in bf16), "torch:fp32", a
            recipe or the name of one, or a function `f(query, key, value, *, is_causal, scale)` of
            `[batch, 1, tokens, width]` in fp32.
        seed: of teacher, data and student; equal seeds share all three whatever the attention.
        steps: optimizer steps.
        record_every: steps between two points of the curves.
        task: sizes and learning rate.
        folder: where to write the run; None trains in memory.

    Raises:
        ValueError: the attention is not known or a number is out of range.
    """
    if steps < 1 or record_every < 1:
        raise ValueError(
            f"steps={steps}, record_every={record_every}: accepted are integers of at least 1"
        )
    name = attention_name(attention)
    own = None if isinstance(attention, str) else {name: _function(attention)}
    config = replace(
        seconds(name, seed=seed, steps=steps),
        workload=task or LayerTask(),
        metrics_every=record_every,
        measure_every=0,
    )
    # another number of threads sums in another order, which a run that fails makes much of
    with one_thread():
        run = train(config, folder, own=own)
    # the training loop took the signal; what was cut short has no outcome
    if run.status == "interrupted":
        raise KeyboardInterrupt
    broke_at = run.steps[-1] if run.status == "failed" else None
    drawn = {curve: run.curve(curve) for curve in CURVES}
    outcome, reason = judge(drawn["loss"], drawn["mean_score"], broke_at)
    return FailureRun(
        name, seed, run.steps, **drawn, broke_at=broke_at, outcome=outcome, reason=reason
    )


def run_failures(
    attentions: Iterable[AttentionChoice],
    seeds: Iterable[int],
    steps: int = 4000,
    *,
    workers: int = 2,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> list[FailureRun]:
    """Train with every attention on every seed, in `workers` processes; attentions outside.

    One worker means this process. Results do not depend on the number of workers. With a folder the
    run of the second attention on seed 3 lies in FOLDER/2-seed-3.

    Raises:
        ValueError: an attention is not known or a number is out of range.
        halfulp.runs.parallel.WorkerKilledError: a worker process was killed.
    """
    choices = list(attentions)
    for attention in choices:
        if isinstance(attention, str):
            attention_function(attention)  # an unknown name is refused here and not in a worker
    jobs = [
        (choice, seed, steps, folder and folder / f"{i}-seed-{seed}")
        for i, choice in enumerate(choices, 1)
        for seed in seeds
    ]
    if folder is not None:
        folder.mkdir(exist_ok=True)
    return run_jobs(_run, jobs, workers=workers, progress=progress)


def curves(runs: Sequence[FailureRun], command: str) -> list[Figure]:
    """Return figures of loss, mean score, σ(W_Q) and σ(W_K): a line per attention, the range over
    seeds.
    """
    shown: tuple[tuple[str, str, str, bool], ...] = (
        ("loss", "Training loss", "mean squared error", True),
        ("mean_score", "Mean score", "mean of S, natural units", False),
        ("sigma_query", "Largest singular value of W_Q", "σ(W_Q)", False),
        ("sigma_key", "Largest singular value of W_K", "σ(W_K)", True),
    )
    seeds = len({run.seed for run in runs})
    caption = (
        f"{seeds} seed{'s' * (seeds > 1)}: the median, and the range where there are several."
        f" {RULE}."
    )
    names = list(dict.fromkeys(run.attention for run in runs))
    return [
        Figure(
            title,
            "step",
            y_label,
            tuple(_series(runs, name, field) for name in names),
            caption,
            command,
            y_log=log,
        )
        for field, title, y_label, log in shown
    ]


def final_loss(run: FailureRun) -> float:
    """Median loss over the last tenth of the recorded points; NaN where the run broke off."""
    if run.broke_at is not None:
        return math.nan
    return statistics.median(run.loss[-max(1, len(run.loss) // 10) :])


def attention_name(attention: AttentionChoice) -> str:
    """Return what a choice is called in results."""
    if isinstance(attention, str):
        return attention.upper() if attention.upper() in RECIPES else attention
    return (
        attention.name
        if isinstance(attention, Recipe)
        else getattr(attention, "__name__", repr(attention))
    )


def _function(attention: Recipe | AttentionFunction) -> AttentionFunction:
    return partial(emulate, recipe=attention) if isinstance(attention, Recipe) else attention


def _series(runs: Sequence[FailureRun], name: str, field: str) -> Series:
    """The median over seeds at every step that all of them reached, and the range if there are
    several.
    """
    same = [run for run in runs if run.attention == name]
    steps = min((run.steps for run in same), key=len)
    columns = [[getattr(run, field)[i] for run in same] for i in range(len(steps))]
    return Series.over(name, steps, columns)


def _run(job: tuple[AttentionChoice, int, int, Path | None]) -> FailureRun:
    attention, seed, steps, folder = job
    return run_failure(attention, seed, steps, folder=folder)
