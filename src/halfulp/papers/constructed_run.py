"""A constructed training in which the mechanism of Qiu & Yao is what ruins the run, and their
softmax fix saves it.

In the failing run of `failure` the error of δ that pushes the scores comes from the curvature of
the loss, so the published fix cannot help there. Here everything the paper's account needs is put
in place, and nothing else:

- exact ties: every key stands three times in the context, with another value each time, so that a
  row's maximum is repeated and P̄ = 1 three times (scores are functions of the key alone, values
  are not);
- sharp rows: half of the queries match one key by 11 nats, so that the other tokens weigh less than
  an ulp of Ō and do no more than set its sticky bit;
- V of one sign: in 8 of 32 features, the guilty ones, V is about −3.5, and Ō, about −10.5, is
  rounded to bf16 before it is divided by l = 3;
- dO of one sign: in the guilty features the targets of the sharp rows lie above what attention can
  reach and those of the other rows below, so that dO is negative where O errs to the negative. The
  loss there is Huber's, whose slope is constant so far from its minimum: it has next to no
  curvature, which would push as well.

The other 24 features and the other rows learn a teacher by mean squared error and show the damage.
Weights start at the teacher's, as late in a training, and every step has a fresh batch. Fails in
1000 steps, 2 seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.attention import emulate
from halfulp.formats import BF16, FP32, round_to
from halfulp.isolate.rule import Outcome, Rule, judge
from halfulp.recipes import BF16_AUTHORS, BF16_FLASH2, BF16_HALFULP, BF16_PAPER_STABILIZED, Recipe
from halfulp.recipes import FP32 as FP32_RECIPE
from halfulp.runs.parallel import run_jobs
from halfulp.runs.results import Progress

RULE = Rule(least_loss=1e-4, score_drift=20.0)
"""Failed: a number is not finite, or the loss of the sound features (median of the last tenth) is
over so many times its lowest and at least 1e-4, 30 times what the fp32 twin reaches; drifting: not
failed, but the mean score has moved by more than 20 over the second half.
"""
STEPS = 1000
RECORD_EVERY = 20  # steps: a point costs an attention in fp32


@dataclass(frozen=True)
class Ties:
    """The constructed task; each of the paper's conditions can be taken away."""

    batch: int = 16
    keys: int = 10  # different keys of a context
    copies: int = 3  # of every key, with another value each
    # input coordinates that are 1 for every token: the direction in which scores run away
    constant: int = 8
    width: int = 32  # head dimension
    guilty: int = 8  # features whose V has one sign
    mean_value: float = -3.0  # of V there; each feature has up to 1.3 times as much
    gap: float = 11.0  # nats between a sharp row's match and the other keys
    base: float = -7.0  # score of the other keys
    # how far targets of guilty features lie from what is reachable; negative: dO of the other sign
    pull: float = 1.0
    slope: float = 0.1  # of the loss there, so the size of dO
    jitter: float = 0.0  # relative noise of the keys; 0.3: no ties are left
    mixed: bool = False  # V of both signs, feature by feature
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        if min(self.batch, self.keys, self.copies, self.constant, self.guilty) < 1:
            raise ValueError(f"task={self}: accepted are sizes of at least 1")
        if self.keys > self.width or self.guilty > self.width:
            raise ValueError(
                f"task={self}: accepted are at most width={self.width} keys and guilty features"
            )


_DESCRIBED = BF16_FLASH2.with_(
    name="described",
    scores=BF16,
    accumulator=BF16,
    row_sum_from="rounded",
    lse_from="exact",
    block_query=None,
    block_key=None,
)
_WHOLE: dict[str, Any] = {"block_query": None, "block_key": None}


@dataclass(frozen=True)
class Variant:
    """One run of the comparison: an attention, a task, and what it changes."""

    name: str
    change: str
    recipe: Recipe
    task: Ties = Ties()


VARIANTS: tuple[Variant, ...] = (
    Variant(
        "described",
        "the paper's account: bf16 scores, fp32 sums, Ō rounded before the division",
        _DESCRIBED,
    ),
    Variant("fp32", "everything in fp32", FP32_RECIPE.with_(name="fp32", **_WHOLE)),
    Variant(
        "softmax fix",
        "described, with the published shift of tied rows, β = 7",
        _DESCRIBED.with_(name="softmax fix", shift=BF16_PAPER_STABILIZED.shift),
    ),
    Variant(
        "Ō in fp32",
        "described, Ō not rounded",
        _DESCRIBED.with_(name="Ō in fp32", accumulator=FP32),
    ),
    Variant(
        "dP∘P",
        "described, δ = rowsum(dP ∘ P)",
        _DESCRIBED.with_(name="dP∘P", delta_from="probabilities"),
    ),
    Variant(
        "no ties",
        "described, keys with 30 % noise",
        _DESCRIBED.with_(name="no ties"),
        Ties(jitter=0.3),
    ),
    Variant(
        "V of both signs",
        "described, every other guilty feature positive",
        _DESCRIBED,
        Ties(mixed=True),
    ),
    Variant("dO flipped", "described, dO of the other sign", _DESCRIBED, Ties(pull=-1.0)),
    Variant(
        "authors",
        "the official code's recipe: every tensor bf16",
        BF16_AUTHORS.with_(name="authors", **_WHOLE),
    ),
    Variant(
        "authors + softmax fix",
        "… with its published fix, β = 7",
        BF16_PAPER_STABILIZED.with_(name="authors + softmax fix", **_WHOLE),
    ),
    Variant("halfulp", "BF16_HALFULP", BF16_HALFULP.with_(name="halfulp", **_WHOLE)),
)


BETAS = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
"""Of the published fix: what the paper uses, [2, 8]."""


def with_beta(beta: float) -> Variant:
    """Return the variant with the published fix at some β."""
    name = f"softmax fix, β = {beta:g}"
    shift = replace(BF16_PAPER_STABILIZED.shift, beta=beta)
    return Variant(name, f"described, with {name}", _DESCRIBED.with_(name=name, shift=shift))


@dataclass(frozen=True)
class MechanismRun:
    """What one run recorded, every `RECORD_EVERY` steps."""

    variant: str
    seed: int
    steps: tuple[int, ...]
    loss: tuple[float, ...]  # of the sound features
    pulled_loss: tuple[float, ...]  # of the guilty features
    mean_score: tuple[float, ...]
    max_score: tuple[float, ...]
    first_order: tuple[float, ...]  # Σ dO(O_hp) ∘ (O_lp − O_hp), all rows of the step
    curvature: tuple[float, ...]  # the rest of Σ (δ_lp − δ_hp)
    sharp_error: tuple[float, ...]  # mean of O_lp − O_hp in guilty features of sharp rows
    agreement: tuple[float, ...]  # how often dO(O_hp) and O_lp − O_hp have one sign there
    tied_rows: tuple[float, ...]  # share of rows whose largest score is repeated
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class _Batch:
    """Inputs of queries and keys, and targets `[B, N, width]`; the first `keys` queries are the
    sharp ones.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    target: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What W_Q, W_K and W_V read."""
        return self.query, self.key, self.value


class _Construction:
    """Teacher, student and the stream of batches of one seed."""

    def __init__(self, task: Ties, seed: int) -> None:
        self.task, self.generator = task, torch.Generator().manual_seed(100 + seed)
        self.teacher = self._teacher()
        self.student = [torch.nn.Parameter(w.clone()) for w in self.teacher]

    def _teacher(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_Q `[width, constant + 2 keys]`, W_K `[width, constant + keys]`, W_V `[width, 16]`."""
        task, g = self.task, self.generator
        n, d, c = task.keys, task.width, task.constant
        # a sharp query and its key share one entry of this size: q · k / √d = size² / √d = gap
        size = math.sqrt(task.gap * math.sqrt(d))
        query, key = torch.zeros(d, c + 2 * n), torch.zeros(d, c + n)
        query[:n, c : c + n] = torch.eye(n) * size
        key[:n, c:] = torch.eye(n) * size
        # soft rows: 1.5 nats
        query[:n, c + n :] = torch.randn(n, n, generator=g) * 1.5 * math.sqrt(d) / size
        for w in (query, key):
            w[:, :c] = torch.randn(d, c, generator=g) * 0.8 / math.sqrt(c)
        q, k = query[:, :c].sum(1), key[:, :c].sum(1)
        # along q, by what makes q · k of the constant coordinates base · √d
        key[:, :c] += ((task.base * math.sqrt(d) - q @ k) / (q @ q) * q)[:, None] / c
        value = torch.randn(d, 16, generator=g) * 0.125
        # V's input 0 is 1 in every token: its column is the mean of V
        value[:, 0] = 0
        value[: task.guilty, 0] = task.mean_value * (1 + 0.3 * torch.rand(task.guilty, generator=g))
        if task.mixed:
            value[: task.guilty : 2, 0] *= -1
        return query, key, value

    def batch(self) -> _Batch:
        """A fresh batch: keys and queries stand as they do in all of them, values are drawn."""
        task, g = self.task, self.generator
        n, c = task.keys, task.constant
        names = torch.eye(n).repeat(task.copies, 1).expand(task.batch, -1, -1)
        if task.jitter:
            names = names * (1 + task.jitter * torch.randn(names.shape, generator=g))
        key = torch.cat([torch.ones(*names.shape[:2], c), names], -1)
        query = torch.cat([torch.ones(2 * n, c), torch.eye(2 * n)], 1).expand(task.batch, -1, -1)
        value = torch.randn(task.batch, key.shape[1], 16, generator=g)
        value[..., 0] = 1
        q, k, v = (x @ w.mT for x, w in zip((query, key, value), self.teacher, strict=True))
        target = (q @ k.mT * task.width**-0.5).softmax(-1) @ v
        pull = torch.where(torch.arange(2 * n) < n, task.pull, -task.pull)
        target[..., : task.guilty] += pull[:, None]
        return _Batch(query, key, value, target)

    def losses(self, out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Of the guilty features, and of the sound ones."""
        g = self.task.guilty
        pulled = functional.huber_loss(out[..., :g], target[..., :g], delta=self.task.slope)
        return pulled, (out[..., g:] - target[..., g:]).square().mean()


def run_variant(variant: Variant, seed: int = 0, steps: int = STEPS) -> MechanismRun:
    """Train one variant and judge it by `RULE`; equal seeds share teacher and data wherever the
    task is the same.

    Raises:
        ValueError: `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: accepted is an integer of at least 1")
    points: list[tuple[float, ...]] = []
    at: list[int] = []
    broke_at = None
    for now in _steps(variant, seed, steps):
        loss, pulled = now.loss.item(), now.pulled.item()
        broke_at = None if math.isfinite(loss + pulled) else now.number
        if now.number % RECORD_EVERY == 0 or now.number == steps or broke_at:
            at.append(now.number)
            points.append((loss, pulled, *_figures(now)))
        if broke_at:
            break
    columns: list[Any] = list(zip(*points, strict=True))
    outcome, reason = judge(columns[0], columns[2], broke_at, RULE)
    columns += [outcome, reason]
    return MechanismRun(variant.name, seed, tuple(at), *columns)


@dataclass(frozen=True)
class _Now:
    """One step before its update."""

    number: int
    made: _Construction
    variant: Variant
    batch: _Batch
    inputs: tuple[Tensor, Tensor, Tensor]  # query, key, value [B, 1, N, width]
    out: Tensor  # [B, N, width]
    pulled: Tensor
    loss: Tensor


def _steps(variant: Variant, seed: int, steps: int) -> Iterator[_Now]:
    """The training itself: yields every step, and makes its update when asked for the next."""
    task, made = variant.task, _Construction(variant.task, seed)
    adam = torch.optim.Adam(made.student, lr=task.learning_rate, betas=(0.9, 0.95))
    w_q, w_k, w_v = made.student
    for number in range(1, steps + 1):
        adam.param_groups[0]["lr"] = task.learning_rate * min(1, number / 50)
        batch = made.batch()
        query, key, value = (
            (x @ w.mT)[:, None] for x, w in zip(batch.inputs, (w_q, w_k, w_v), strict=True)
        )
        out = emulate(query, key, value, recipe=variant.recipe)[:, 0]
        pulled, loss = made.losses(out, batch.target)
        yield _Now(number, made, variant, batch, (query, key, value), out, pulled, loss)
        adam.zero_grad()
        (pulled + loss).backward()  # type: ignore[no-untyped-call]
        adam.step()


def run_variants(
    names: Iterable[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = STEPS,
    *,
    workers: int = 2,
    progress: Progress | None = None,
) -> dict[str, list[MechanismRun]]:
    """Train variants (all without names) on every seed.

    Raises:
        ValueError: there is no variant of that name.
    """
    known = {variant.name: variant for variant in VARIANTS}
    known |= {variant.name: variant for variant in map(with_beta, BETAS)}
    wanted = list(names) or [variant.name for variant in VARIANTS]
    for name in wanted:
        if name not in known:
            raise ValueError(f"variant={name!r}: accepted are {', '.join(known)}")
    jobs = [(known[name], seed, steps) for name in wanted for seed in seeds]
    found = run_jobs(_job, jobs, workers=workers, progress=progress)
    return {name: found[i * len(seeds) : (i + 1) * len(seeds)] for i, name in enumerate(wanted)}


def _job(job: tuple[Variant, int, int]) -> MechanismRun:
    return run_variant(*job)


def _exact(now: _Now) -> tuple[Tensor, Tensor, Tensor]:
    """O_lp − O_hp and dO at O_hp `[B, N, width]`, and the scores `[B, N, N_k]` of bf16 operands."""
    query, key, value = (round_to(x.detach(), BF16) for x in now.inputs)
    # scores rounded as the variant rounds them: the error is that of P̄V and O alone
    recipe = FP32_RECIPE.with_(scores=now.variant.recipe.scores, **_WHOLE)
    exact = emulate(query, key, value, recipe=recipe)[:, 0]
    scores = (query @ key.mT * now.variant.task.width**-0.5)[:, 0]
    return now.out.detach() - exact, _slope(now, exact), scores


def _figures(now: _Now) -> tuple[float, ...]:
    """Mean and largest score, the parts of Σ(δ_lp − δ_hp), error and signs in sharp rows, the share
    of tied rows.
    """
    task = now.variant.task
    error, slope, scores = _exact(now)
    first, whole = (
        float((slope * error).sum()),
        float((_slope(now, now.out.detach()) * error).sum()),
    )
    sharp = error[:, : task.keys, : task.guilty]
    # an error of 0 has no sign
    same = (sharp * slope[:, : task.keys, : task.guilty])[sharp != 0] > 0
    tied = (scores == scores.amax(-1, keepdim=True)).sum(-1) > 1
    signs = float(same.float().mean())
    return (
        float(scores.mean()), float(scores.max()), first, whole - first, float(sharp.mean()), signs,
        float(tied.float().mean()),
    )  # fmt: skip


def _slope(now: _Now, out: Tensor) -> Tensor:
    """dO at some O."""
    at = out.clone().requires_grad_()
    pulled, loss = now.made.losses(at, now.batch.target)
    (slope,) = torch.autograd.grad(pulled + loss, at)
    return slope


@dataclass(frozen=True)
class Profile:
    """What the sharp rows of one step look like from inside (figures 5 and 6 of the paper)."""

    step: int
    guilty: int  # the first features
    grad_out: tuple[float, ...]  # mean of dO(O_hp) by feature
    error: tuple[float, ...]  # mean of O_lp − O_hp by feature
    weights: tuple[float, ...]  # P̄ of one sharp row by token, in bf16
    values: tuple[float, ...]  # V of the first guilty feature by token, in bf16
    running_error: tuple[float, ...]  # of bf16(Σ P̄V) up to a token, against the sum in fp64
    all_values: tuple[float, ...]  # V of that feature in the whole batch


def profile(variant: Variant, seed: int = 0, steps: int = 300) -> Profile:
    """Train up to a step and look into its sharp rows; raises ValueError for fewer than one
    step.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: accepted is an integer of at least 1")
    *_, now = _steps(variant, seed, steps)
    task = variant.task
    error, slope, scores = _exact(now)
    rows = slice(0, task.keys)
    value = round_to(now.inputs[2].detach(), BF16)[:, 0, :, 0]
    # the sharp row whose first guilty feature errs farthest to the negative
    entry, row = divmod(int(error[:, rows, 0].argmin()), task.keys)
    rounded = round_to(scores[entry, row], BF16)
    weights = round_to((rounded - rounded.max()).exp(), BF16)
    # in fp64, so that what is shown is the rounding of the sums to bf16 alone
    sums = (weights.double() * value[entry].double()).cumsum(0)
    return Profile(
        step=steps,
        guilty=task.guilty,
        grad_out=tuple(slope[:, rows].mean((0, 1)).tolist()),
        error=tuple(error[:, rows].mean((0, 1)).tolist()),
        weights=tuple(weights.tolist()),
        values=tuple(value[entry].tolist()),
        running_error=tuple((round_to(sums, BF16) - sums).tolist()),
        all_values=tuple(value.flatten().tolist()),
    )
