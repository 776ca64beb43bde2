"""The runs behind Qiu & Yao's claims: what is trained, and what is kept of it for their figures.

Two trainings stand in for their GPT-2 of 12 layers. The one-layer task fails in seconds in true
bf16. The language model reads bytes of English; it is accelerated, which every figure of it has to
say: O keeps one mantissa bit (two at full scale) where bf16 has seven, so that it fails in hundreds
of steps instead of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from halfulp.papers.run_changes import OptimizerName, optimizer_named
from halfulp.runs.parallel import run_jobs
from halfulp.runs.results import Progress
from halfulp.runs.threads import one_thread
from halfulp.training.adjusted import Adjusted
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, RunConfig
from halfulp.training.loop import in_memory
from halfulp.training.presets import minutes, seconds
from halfulp.training.workload import Workload
from halfulp.watch.measures import Exact, exact_call
from halfulp.watch.passes import Recorder, attention_modules, exact_pass, record
from halfulp.watch.taps import Observed

STOCK_TILES = "block_query=none,block_key=16"
TASK_STOCK = f"BF16_FLASH2[{STOCK_TILES}]"
"""The stock recipe as `rungs` has it: two tiles of keys for 32 tokens."""


@dataclass(frozen=True)
class Snapshot:
    """One layer's call in one step, and dO as it would be if O were exact."""

    call: Observed
    exact_grad: Tensor  # dO(O_hp) [B, H, N, D_v]

    def exact(self) -> Exact:
        """Attention of the call in fp64."""
        return exact_call(self.call)


@dataclass(frozen=True)
class Traced:
    """A run with its lines of metrics and measurements, and whole calls of some of its steps."""

    config: RunConfig
    metrics: list[dict[str, Any]]
    measures: list[dict[str, Any]]  # {"step", "measure": {name: [layer][head]}}
    calls: dict[int, dict[int, Snapshot]]  # by step and layer

    def loss(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Steps and losses."""
        return tuple(row["step"] for row in self.metrics), tuple(
            row["loss"] for row in self.metrics
        )

    def measured(self, name: str, layer: int = 0, since: int = 0) -> list[list[float]]:
        """One figure of a layer from a step on: a list of heads for every measured step."""
        return [row["measure"][name][layer] for row in self.measures if row["step"] >= since]

    def measured_steps(self, since: int = 0) -> tuple[int, ...]:
        """The steps of `measured`."""
        return tuple(row["step"] for row in self.measures if row["step"] >= since)


@dataclass(frozen=True)
class Plan:
    """One run to be traced: attention, size, seed, and at which steps whole calls are kept."""

    attention: tuple[str, ...]  # of an `AttentionPlan`
    seed: int = 0
    steps: int = 500
    layers: int = 0  # of the language model; 0: the one-layer task
    heads: int = 2
    measure_every: int = 0
    at: tuple[int, ...] = ()
    width: int = 64  # of the language model
    query_key_norm: bool = False  # of the language model
    most_score: float | None = None  # τ of QK-clip; None: none
    optimizer: OptimizerName = "adamw"

    def config(self) -> RunConfig:
        """The run's configuration."""
        attention = AttentionPlan.of(*self.attention)
        if self.layers:
            config = minutes(seed=self.seed, steps=self.steps)
            assert isinstance(config.workload, Language)
            workload = replace(
                config.workload,
                layers=self.layers,
                heads=self.heads,
                width=self.width,
                query_key_norm=self.query_key_norm,
            )
            config = replace(config, workload=workload)
        else:
            config = seconds(seed=self.seed, steps=self.steps)
        return replace(
            config,
            attention=attention,
            metrics_every=10,
            measure_every=self.measure_every,
            adjusted=Adjusted(most_score=self.most_score),
        )


def language_attention(bits: int | None, **changes: str) -> str:
    """Return the stock recipe with an O of so many mantissa bits (None: fp32), and other fields
    changed.
    """
    fields = {"out": "fp32" if bits is None else f"e8m{bits}", **changes}
    return f"BF16_FLASH2[{','.join(f'{name}={value}' for name, value in fields.items())}]"


@dataclass(frozen=True)
class Now:
    """A run just after one of its steps."""

    config: RunConfig
    step: int
    rows: list[dict[str, Any]]  # due after this step
    workload: Workload
    samples: Callable[[], tuple[Tensor, ...]]  # the step's own


def train_steps(plan: Plan) -> Iterator[Now]:
    """Train one run, and yield after every step; the thread count is the caller's."""
    config = plan.config()
    with in_memory(config) as session:
        workload, order = session.workload, session.order
        if plan.optimizer != "adamw":
            optimizer, rate = optimizer_named(plan.optimizer, session.parameters)
            # both hold it: the session makes the step, and the updates set its rate
            session.optimizer = session.updates.optimizer = optimizer
            session.updates.rates = replace(config.optimizer, learning_rate=rate)
        while session.done < config.steps:
            rows = session.step()
            number = session.done
            yield Now(
                config,
                number,
                rows,
                workload,
                partial(workload.batch, order[number - 1], number),
            )


def trace(plan: Plan) -> Traced:
    """Train one run on one thread, and keep what the plan asks for."""
    rows: list[dict[str, Any]] = []
    calls: dict[int, dict[int, Snapshot]] = {}
    with one_thread():
        for now in train_steps(plan):
            rows += now.rows
            if now.step in plan.at:
                calls[now.step] = _snapshots(now.workload, now.samples())
    metrics = [row for row in rows if "loss" in row]
    return Traced(now.config, metrics, [row for row in rows if "measure" in row], calls)


def trace_all(
    plans: Sequence[Plan], *, workers: int = 2, progress: Progress | None = None
) -> list[Traced]:
    """Train runs in worker processes, in order."""
    return run_jobs(trace, plans, workers=workers, progress=progress)


def _snapshots(workload: Workload, samples: tuple[Tensor, ...]) -> dict[int, Snapshot]:
    """Every layer's call on a batch, by two passes that leave the model as it was."""
    recorder = Recorder(attention_modules(workload.model), lambda query, _: len(query), {})

    def loss() -> Tensor:
        value: Tensor = workload.loss(workload.model, samples)
        return value

    _, calls = record(workload.model, recorder, loss)
    _, grads = exact_pass(workload.model, recorder, loss)
    return {layer: Snapshot(call, grads[layer]) for layer, call in calls.items()}
