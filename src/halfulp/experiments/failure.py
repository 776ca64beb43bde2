"""A training that low-precision flash attention ruins in seconds, in true bf16, with nothing accelerated but the task.

One causal attention layer (W_Q, W_K, W_V, W_O; d = 32, one head, 32 tokens, batch 16) learns a random fp32 teacher by
mean squared error on one fixed batch with Adam (1e-3, 0.9/0.95, 50 steps of warm-up). Eight of the 32 input coordinates
are constant 1, so keys share a direction that softmax cannot see: the only thing that can push the scores along it is a
row sum of dS that is not zero. With attention that is free of that error the mean score stays where it is; with the
stock recipe it walks off, the weights with it, and in the end the loss. The failing runs have lost a factor of ten and
more against their own best; that factor is the rule by which a run is called failed.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import queue
import signal
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp.attention import emulate
from halfulp.recipes import RECIPES, Recipe, recipe_named
from halfulp.runs.results import Figure, Progress, Series, no_progress, plain_numbers
from halfulp.runs.threads import one_thread

AttentionFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
AttentionChoice: TypeAlias = str | Recipe | AttentionFunction
Outcome: TypeAlias = Literal["survived", "drifting", "failed"]

TORCH_CHOICES = ("torch:flash", "torch:math", "torch:fp32")
LOSS_FACTOR = 3.0
SCORE_DRIFT = 2.0
RULE = (
    f"failed: a number is not finite, or the loss (median of the last tenth of the run) is over {LOSS_FACTOR:g} times "
    f"its lowest (smallest median of any earlier tenth) and at least 1e-5; drifting: not failed, but the mean score "
    f"has moved by more than {SCORE_DRIFT:g} over the second half; survived: otherwise"
)
_LEAST_LOSS = 1e-5  # below it a loss that rises is fp32's own noise


@dataclass(frozen=True)
class Task:
    """The one-layer problem; the defaults are those of the failure as first seen."""

    batch: int = 16
    tokens: int = 32
    width: int = 32
    constant: int = 8  # input coordinates that are 1 for every token
    learning_rate: float = 1e-3
    warm_up: int = 50  # steps

    def __post_init__(self) -> None:
        if min(self.batch, self.tokens, self.width) < 1 or not 0 <= self.constant <= self.width:
            raise ValueError(f"task={self}: accepted are positive sizes and 0 to width constant coordinates")


@dataclass(frozen=True)
class FailureRun:
    """What one training recorded, every `record_every` steps and at the end."""

    attention: str
    seed: int
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    mean_score: tuple[float, ...]  # of the scores a query may see, scaled by 1/√d
    max_score: tuple[float, ...]
    sigma_query: tuple[float, ...]  # largest singular value of W_Q
    sigma_key: tuple[float, ...]
    planned_steps: int
    broke_at: int | None  # the step whose loss was not finite; the run ends there
    outcome: Outcome
    reason: str

    @property
    def survived(self) -> bool:
        """Whether the run neither failed nor drifts."""
        return self.outcome == "survived"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; numbers that are not finite become None."""
        plain = asdict(self)
        for name in ("loss", "mean_score", "max_score", "sigma_query", "sigma_key"):
            plain[name] = plain_numbers(getattr(self, name))
        plain["steps"] = list(self.steps)
        return plain | {"rule": RULE}


def run_failure(
    attention: AttentionChoice,
    seed: int = 0,
    steps: int = 4000,
    record_every: int = 50,
    *,
    task: Task | None = None,
    label: str | None = None,
    progress: Progress | None = None,
) -> FailureRun:
    """Train the layer once, on one thread, and say what became of it.

    Args:
        attention: "torch:flash", "torch:math" (PyTorch's own kernels in bf16), "torch:fp32", a recipe or the name of
            one, or a function of query, key, value `[batch, 1, tokens, width]` (fp32, causal) that returns out.
        seed: of teacher, data and student; equal seeds share all three whatever the attention.
        steps: optimizer steps.
        record_every: steps between two points of the curves.
        task: sizes and learning rate.
        label: the run's name in the result; by default that of the attention.
        progress: called at every recorded point.

    Raises:
        ValueError: the attention is not known or a number is out of range.
    """
    if steps < 1 or record_every < 1:
        raise ValueError(f"steps={steps}, record_every={record_every}: accepted are integers of at least 1")
    task = task or Task()
    attend, name = attention_function(attention), label or attention_name(attention)
    report = progress or no_progress
    points: list[tuple[float, ...]] = []
    at: list[int] = []
    broke_at = None
    with one_thread():
        training = _Training(attend, task, seed)
        for step in range(1, steps + 1):
            loss = training.step(step)
            if step % record_every == 0 or step == steps or not math.isfinite(loss):
                at.append(step)
                points.append((loss, *training.figures()))
                report(step / steps, f"{name}, seed {seed}: loss {loss:.1e}")
            if not math.isfinite(loss):
                broke_at = step
                break
    loss_curve, mean, largest, sigma_q, sigma_k = (tuple(column) for column in zip(*points, strict=True))
    outcome, reason = judge(loss_curve, mean, broke_at)
    return FailureRun(
        name, seed, tuple(at), loss_curve, mean, largest, sigma_q, sigma_k, steps, broke_at, outcome, reason
    )


def judge(loss: Sequence[float], mean_score: Sequence[float], broke_at: int | None = None) -> tuple[Outcome, str]:
    """Return what became of a run, by `RULE`, and the figures that decided it; curves as `FailureRun` has them."""
    if broke_at is not None or not all(map(math.isfinite, (*loss, *mean_score))):
        return "failed", f"not finite at step {broke_at}" if broke_at is not None else "not finite"
    tenths = [_median(part) for part in _tenths(loss)]
    last, lowest = tenths[-1], min(tenths)
    moved = mean_score[-1] - mean_score[len(mean_score) // 2]
    figures = f"loss {last:.1e} at the end, {lowest:.1e} at best; mean score {mean_score[-1]:+.1f}, moved {moved:+.1f}"
    if last > LOSS_FACTOR * lowest and last >= _LEAST_LOSS:
        return "failed", figures
    return ("drifting" if abs(moved) > SCORE_DRIFT else "survived"), figures


def run_failures(
    attentions: Iterable[AttentionChoice],
    seeds: Iterable[int],
    steps: int = 4000,
    record_every: int = 50,
    *,
    task: Task | None = None,
    workers: int = 2,
    progress: Progress | None = None,
) -> list[FailureRun]:
    """Train with every attention on every seed, in `workers` processes; attentions outside.

    A worker is a fresh interpreter, so the calling script needs the usual `if __name__ == "__main__":`. One worker
    means this process. Results do not depend on the number of workers.

    Raises:
        ValueError: an attention is not known or a number is out of range.
    """
    choices = list(attentions)
    for attention in choices:
        attention_function(attention)  # an unknown name is refused here and not in a worker
    jobs = [(attention, seed, steps, record_every, task) for attention in choices for seed in seeds]
    report = progress or no_progress
    if workers <= 1 or len(jobs) <= 1:
        return [_run(job, _share(report, i, len(jobs))) for i, job in enumerate(jobs)]
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    with ProcessPoolExecutor(
        min(workers, len(jobs)), mp_context=context, initializer=_start_worker, initargs=(messages,)
    ) as pool:
        futures = [pool.submit(_in_worker, number, job) for number, job in enumerate(jobs)]
        try:
            _relay(futures, messages, report, len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def curves(runs: Sequence[FailureRun], command: str) -> list[Figure]:
    """Return figures of loss, mean score, σ(W_Q) and σ(W_K): a line per attention, the range over seeds."""
    shown: tuple[tuple[str, str, str, bool], ...] = (
        ("loss", "Training loss", "mean squared error", True),
        ("mean_score", "Mean score", "mean of S, natural units", False),
        ("sigma_query", "Largest singular value of W_Q", "σ(W_Q)", False),
        ("sigma_key", "Largest singular value of W_K", "σ(W_K)", True),
    )
    seeds = len({run.seed for run in runs})
    caption = f"{seeds} seed{'s' * (seeds > 1)}: the median, and the range where there are several. {RULE}."
    names = list(dict.fromkeys(run.attention for run in runs))
    return [
        Figure(title, "step", y_label, tuple(_series(runs, name, field) for name in names), caption, command, y_log=log)
        for field, title, y_label, log in shown
    ]


def attention_function(attention: AttentionChoice) -> AttentionFunction:
    """Return the causal attention of `[B, H, N, D]` fp32 tensors that the choice names.

    Raises:
        ValueError: the name is neither one of PyTorch's nor a recipe's.
    """
    if isinstance(attention, Recipe):
        return lambda query, key, value: emulate(query, key, value, is_causal=True, recipe=attention)
    if callable(attention):
        return attention
    if attention == "torch:fp32":
        return lambda query, key, value: functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    if attention in TORCH_CHOICES:
        backend = SDPBackend.FLASH_ATTENTION if attention == "torch:flash" else SDPBackend.MATH
        return lambda query, key, value: _torch_bf16(backend, query, key, value)
    if attention.upper() not in RECIPES:
        raise ValueError(
            f"attention={attention!r}: accepted are {', '.join(TORCH_CHOICES)} or a recipe: {', '.join(RECIPES)}"
        )
    return attention_function(recipe_named(attention))


def attention_name(attention: AttentionChoice) -> str:
    """Return what a choice is called in results."""
    if isinstance(attention, str):
        return attention if attention in TORCH_CHOICES else attention.upper()
    return attention.name if isinstance(attention, Recipe) else getattr(attention, "__name__", repr(attention))


def _torch_bf16(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.bfloat16() for x in (query, key, value))
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).float()


class _Training:
    """Teacher, data, student and optimizer of one run; seeded like the experiment that first showed the failure."""

    def __init__(self, attend: AttentionFunction, task: Task, seed: int) -> None:
        g = torch.Generator().manual_seed(100 + seed)
        d, t = task.width, task.tokens
        self.attend, self.task = attend, task
        self.hidden = torch.triu(torch.ones(t, t, dtype=torch.bool), 1)
        teacher = [torch.randn(d, d, generator=g) * 1.5 / math.sqrt(d) for _ in range(4)]
        self.x = torch.randn(task.batch, t, d, generator=g)
        self.x[..., : task.constant] = 1
        query, key, value = (self.x @ w.mT for w in teacher[:3])
        weights = (query @ key.mT * d**-0.5).masked_fill(self.hidden, -math.inf).softmax(-1)
        self.target = weights @ value @ teacher[3].mT
        self.student = [torch.nn.Parameter(torch.randn(d, d, generator=g) * 0.5 / math.sqrt(d)) for _ in range(4)]
        self.adam = torch.optim.Adam(self.student, lr=task.learning_rate, betas=(0.9, 0.95))
        self.scores_from: tuple[Tensor, Tensor] | None = None

    def step(self, number: int) -> float:
        """One optimizer step; the loss before it."""
        self.adam.param_groups[0]["lr"] = self.task.learning_rate * min(1, number / max(self.task.warm_up, 1))
        query, key, value = (self.x @ w.mT for w in self.student[:3])
        out = self.attend(query[:, None], key[:, None], value[:, None])[:, 0]
        loss = (out @ self.student[3].mT - self.target).square().mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        self.scores_from = (query.detach(), key.detach())
        return float(loss.item())

    def figures(self) -> tuple[float, float, float, float]:
        """Mean and largest score of the last forward pass, σ(W_Q) and σ(W_K) now."""
        assert self.scores_from is not None
        query, key = self.scores_from
        scores = (query @ key.mT * self.task.width**-0.5)[:, ~self.hidden]
        sigma_q, sigma_k = (_sigma(w.detach()) for w in self.student[:2])
        return scores.mean().item(), scores.max().item(), sigma_q, sigma_k


def _sigma(weights: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weights, 2)) if weights.isfinite().all() else math.nan


def _tenths(values: Sequence[float]) -> list[Sequence[float]]:
    """Up to ten consecutive parts of about equal length."""
    parts = min(10, len(values))
    edges = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _series(runs: Sequence[FailureRun], name: str, field: str) -> Series:
    """The median over seeds at every step that all of them reached, and the range if there are several."""
    same = [run for run in runs if run.attention == name]
    steps = min((run.steps for run in same), key=len)
    columns = [[getattr(run, field)[i] for run in same] for i in range(len(steps))]
    median = tuple(_median(column) for column in columns)
    several = len(same) > 1
    low = tuple(min(column) for column in columns) if several else None
    high = tuple(max(column) for column in columns) if several else None
    return Series(name, tuple(steps), median, low, high)


_Job: TypeAlias = tuple[AttentionChoice, int, int, int, Task | None]
_messages: list[Any] = []  # in a worker: the queue to its parent


def _run(job: _Job, report: Progress) -> FailureRun:
    attention, seed, steps, record_every, task = job
    return run_failure(attention, seed, steps, record_every, task=task, progress=report)


def _share(report: Progress, number: int, count: int) -> Progress:
    return lambda fraction, message: report((number + fraction) / count, message)


def _start_worker(messages: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process: end at once, without a traceback
    _messages[:] = [messages]


def _in_worker(number: int, job: _Job) -> FailureRun:
    return _run(job, lambda fraction, message: _messages[0].put((number, fraction, message)))


def _relay(futures: Sequence[Future[FailureRun]], messages: Any, report: Progress, count: int) -> None:
    """Hand on what the workers say about `count` jobs until they are done; raises what a worker raised."""
    done = [0.0] * count
    pending: set[Future[FailureRun]] = set(futures)
    while pending:
        finished, pending = wait(pending, timeout=0.1)
        for future in finished:
            future.result()
        message = ""
        while True:
            try:
                number, done[number], message = messages.get_nowait()
            except queue.Empty:
                break
        if message:
            report(sum(done) / count, message)
    report(1.0, "trained")
