"""A search for a training of a language model that PyTorch's bf16 flash attention ruins with
nothing narrowed and nothing constructed: no mantissa cut, no ties, no altered rounding.

The student is a GPT that learns the next-token distribution of a random teacher of its own shape,
so that there is no label noise and the gradient goes to zero as it learns. Searched over: one fixed
batch or fresh ones, tokens a step, layers, an offset that all positions share (dense, or in a few
channels, as trained models have it), attention sinks, the rate, and bf16 autocast. After the list
come settings drawn at random, the same ones in every search.

Each trial is seed 0 with PyTorch's flash kernel beside its twin in fp32. What looks like a failure
is repeated with halfulp's attention and on seeds 1 and 2. Two verdicts, neither of this file's
making: the ledger's criterion (`halfulp.papers.claims.a_cause.CRITERION`), in nats of the
divergence from the teacher, and the rule of the one-layer task (`halfulp.isolate.rule`), by factors
of it.

Every run is a line of trials.jsonl in the folder; a search that is stopped goes on after the last
whole one. One thread.

    python -m benchmarks.natural_failure --hours 1.5 --out search
    python -m benchmarks.natural_failure --out search --table
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfulp.isolate.rule import Rule, judge_rows, read_curves
from halfulp.papers.claims import a_cause
from halfulp.papers.runs_a import Traced
from halfulp.runs.threads import one_thread
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, Optimizer, RunConfig
from halfulp.training.distributed import world
from halfulp.training.model import Gpt
from halfulp.training.session import Session
from halfulp.training.workload import Configured

FLASH, TWIN, SAVED = "torch:flash", "torch:fp32", "halfulp"
SEEDS = (0, 1, 2)
GAIN = 1.5  # a teacher's matrices: N(0, (GAIN / √inputs)²), those of the one-layer task
SPREAD = 2.0  # of a teacher's logits, standard deviation


@dataclass(frozen=True)
class Trial:
    """One setting; the fields are what is searched over."""

    layers: int = 1
    heads: int = 1
    width: int = 64
    context: int = 64
    vocabulary: int = 64
    sequences: int = 16  # a step
    fresh: bool = False  # other sequences at every step; else one batch for the whole run
    offset: float = 10.0  # shared by all positions, in standard deviations of an embedding
    channels: int = 0  # the offset lies in so many coordinates; 0: in all, drawn at random
    plain: bool = False  # the teacher has no offset
    sink: float = 0.0  # natural units that a teacher's scores of the first token are raised by
    gain: float = 1.0  # of what a teacher's attention adds to its stream
    rate: float = 1e-3
    second: float = 0.95  # β₂
    autocast: bool = False  # bf16, besides attention
    steps: int = 4000

    @property
    def said(self) -> str:
        """What differs from the setting that the search started from."""
        start = asdict(Trial())
        changed = {name: x for name, x in asdict(self).items() if x != start[name]}
        return ", ".join(f"{name} {value}" for name, value in changed.items()) or "the start"

    def config(self, attention: str, seed: int) -> RunConfig:
        """The run of one attention and seed."""
        return RunConfig(
            workload=Language(
                layers=self.layers,
                heads=self.heads,
                width=self.width,
                context=self.context,
                vocabulary=self.vocabulary,
            ),
            attention=AttentionPlan.of(attention),
            optimizer=Optimizer(self.rate, betas=(0.9, self.second), warm_up=50),
            steps=self.steps,
            batch=self.sequences,
            autocast="bf16" if self.autocast else "none",
            seed=seed,
            metrics_every=max(1, self.steps // 100),
            measure_every=max(1, self.steps // 40),
        )


LISTED: tuple[Trial, ...] = (
    Trial(),
    Trial(offset=1.0, channels=8),
    Trial(offset=3.0, channels=8),
    Trial(fresh=True),
    Trial(offset=3.0, channels=8, fresh=True),
    Trial(offset=1.0, channels=16, plain=True),
    Trial(sink=6.0),
    Trial(sink=6.0, steps=12_000),
    Trial(sink=12.0),
    Trial(sink=6.0, fresh=True),
    Trial(sink=6.0, rate=3e-3),
    Trial(sink=6.0, autocast=True),
    Trial(sink=6.0, layers=2),
    Trial(sink=6.0, gain=8.0),
    Trial(sink=6.0, gain=8.0, offset=3.0),
    Trial(sink=3.0, gain=8.0, width=32, context=32),
    Trial(sink=6.0, gain=8.0, rate=3e-3),
    Trial(sink=6.0, gain=8.0, fresh=True, sequences=64, steps=2000),
    Trial(offset=3.0, channels=8, sink=6.0),
    Trial(rate=3e-3),
    Trial(autocast=True),
    Trial(sink=6.0, width=32, context=32, sequences=2048, fresh=True, steps=500),
    Trial(sink=6.0, layers=4, steps=2000),
    Trial(sink=6.0, offset=30.0),
    Trial(sink=6.0, second=0.999),
    Trial(offset=30.0),
    Trial(layers=2),
    Trial(layers=2, offset=3.0, channels=8, fresh=True),
    Trial(layers=4, steps=2000),
    Trial(offset=3.0, channels=8, second=0.999),
    Trial(width=32, context=32, offset=3.0, channels=8),
    Trial(width=32, context=32, offset=3.0, channels=8, sequences=256, fresh=True, steps=3000),
    Trial(width=32, context=32, offset=3.0, channels=8, sequences=2048, fresh=True, steps=1000),
    Trial(steps=12_000),
)


def drawn() -> Iterator[Trial]:
    """Settings at random, without end; the same ones every time."""
    draw = random.Random(0)
    while True:
        layers = draw.choice((1, 1, 1, 2, 3))
        yield Trial(
            layers=layers,
            heads=draw.choice((1, 2, 4)),
            width=draw.choice((32, 64)),
            context=draw.choice((32, 64, 128)),
            sequences=draw.choice((8, 16, 64)),
            fresh=draw.choice((False, True)),
            offset=draw.choice((0.0, 1.0, 3.0, 10.0, 30.0)),
            channels=draw.choice((0, 2, 8, 16)),
            plain=draw.choice((False, True)),
            sink=draw.choice((0.0, 3.0, 6.0, 12.0)),
            gain=draw.choice((1.0, 3.0, 8.0)),
            rate=draw.choice((3e-4, 1e-3, 3e-3, 1e-2)),
            second=draw.choice((0.95, 0.999)),
            autocast=draw.choice((False, False, True)),
            steps=4000 if layers == 1 else 2000,
        )


class Taught(Configured):
    """A student GPT, its teacher, and the sequences they both read; see
    `halfulp.training.workload.Workload`. Loss: KL(teacher ‖ student), nats a token.
    """

    def __init__(self, trial: Trial, plan: AttentionPlan, seed: int) -> None:
        config = trial.config(FLASH, seed).workload
        assert isinstance(config, Language)
        self.trial, self.seed, self.tokens_per_sample = trial, seed, trial.context
        self.source: dict[str, Any] = {"data": "a random teacher", "seed": seed}
        self.model = Gpt(config, plan, seed=seed)
        self.teacher = Gpt(config, AttentionPlan.of(TWIN), seed=1000 + seed)
        draw = torch.Generator().manual_seed(2000 + seed)
        shared = torch.randn(trial.width, generator=draw)
        if trial.channels:
            shared = (torch.arange(trial.width) < trial.channels).float()
        with torch.no_grad():
            for name, weight in self.teacher.named_parameters():
                if weight.ndim == 2 and not name.endswith(("tokens.weight", "positions.weight")):
                    weight.mul_(GAIN / math.sqrt(weight.shape[1]) / weight.std())
                elif weight.ndim == 2:
                    weight.mul_(SPREAD / math.sqrt(trial.width) / weight.std())
            for model in (self.model, self.teacher):
                assert model.positions is not None
                if model is self.model or not trial.plain:
                    model.positions.weight += trial.offset * model.tokens.weight.std() * shared
            for block in self.teacher.blocks:
                block.attention.project.weight.mul_(trial.gain)
            if trial.sink:
                _raise_first(self.teacher, trial)

    def order(self, steps: int, batch: int) -> np.ndarray:
        """The number of every sequence: fresh ones, or the same ones at every step."""
        first = np.arange(batch, dtype=np.int64)
        return first + (
            np.arange(steps)[:, None] * batch
            if self.trial.fresh
            else np.zeros((steps, 1), np.int64)
        )

    def batch(self, samples: np.ndarray, step: int) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Tokens `[B, N]`, each sequence beginning with token 0, and the teacher's log chances
        of what follows `[B, N, vocabulary]`.
        """
        return (
            self._fixed if not self.trial.fresh else self._labelled(int(samples[0]), len(samples))
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return KL(teacher ‖ student), the mean over tokens, in fp32."""
        tokens, taught = batch
        mine = model(tokens).float().log_softmax(-1)
        return functional.kl_div(mine, taught, reduction="sum", log_target=True) / tokens.numel()

    def figures(self) -> dict[str, float]:
        """None beyond the loss."""
        return {}

    @cached_property
    def _fixed(self) -> tuple[Tensor, ...]:
        return self._labelled(0, self.trial.sequences)

    def _labelled(self, first: int, count: int) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(3_000_017 * (1 + self.seed) + first)
        shape = (count, self.trial.context)
        tokens = torch.randint(1, self.trial.vocabulary, shape, generator=draw)
        tokens[:, 0] = 0
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return tokens, self.teacher(tokens).log_softmax(-1)


def _raise_first(teacher: Gpt, trial: Trial) -> None:
    """Make the first token a sink of layer 0: scores of its key rise by `trial.sink` for a query of
    the average token.
    """
    attention = teacher.blocks[0].attention
    draw = torch.Generator().manual_seed(4000)
    tokens = torch.randint(1, trial.vocabulary, (64, trial.context), generator=draw)
    tokens[:, 0] = 0
    assert teacher.positions is not None
    x = teacher.blocks[0].norm1(teacher.tokens(tokens) + teacher.positions.weight)
    first, rest = x[0, 0], x[:, 1:].flatten(0, 1).mean(0)
    along = first - rest * (first @ rest) / (rest @ rest)  # what other tokens have none of
    width, size = trial.width, trial.width // trial.heads
    for head in range(trial.heads):
        rows = slice(head * size, (head + 1) * size)
        query = attention.qkv.weight[:width][rows] @ rest
        raised = trial.sink * math.sqrt(size) * query / (query @ query)
        attention.qkv.weight[width : 2 * width][rows] += torch.outer(raised, along) / (
            first @ along
        )


def trained(trial: Trial, attention: str, seed: int, until: float) -> dict[str, Any] | None:
    """One run as a line of the record; None where time was up before its end."""
    config, began = trial.config(attention, seed), time.time()
    with one_thread(), world("none", "cpu") as group:
        workload = Taught(trial, config.attention, seed)
        session = Session(config, workload, group, workload.order(config.steps, config.batch), None)
        rows: list[dict[str, Any]] = []
        while session.done < config.steps and (not rows or math.isfinite(session.loss)):
            rows += session.step()
            if time.time() > until:
                return None
    kept = ("sigma_query", "sigma_key", "max_score", "mean_score", "delta_error_positive")
    for row in rows:
        if "measure" in row:
            row["measure"] = {name: row["measure"][name] for name in kept}
    line = {"trial": asdict(trial), "attention": attention, "seed": seed}
    return line | {"rows": [_plain(row) for row in rows], "seconds": round(time.time() - began, 1)}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    names = ("step", "loss", "grad_norm", "measure")
    return {name: _short(row[name]) for name in names if name in row}


def _short(value: Any) -> Any:
    """Six digits, and null for what is not finite."""
    if isinstance(value, dict):
        return {name: _short(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_short(x) for x in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


@dataclass(frozen=True)
class Judged:
    """A run beside its twin, in figures and by both verdicts."""

    loss: float  # KL at the end, nats a token
    best: float  # its least
    twin_loss: float
    score: float  # largest |mean score| of any head, at its peak
    twin_score: float
    sigma: float  # largest σ(W_Q) at the end
    twin_sigma: float
    ledger: str  # failed, stable, or neither
    rule: str  # failed, drifting or survived
    reason: str

    @property
    def lost(self) -> bool:
        """Whether the loss itself has failed, by either."""
        return self.ledger == "failed" or (self.rule == "failed" and "loss" in self.reason)

    @property
    def looks(self) -> bool:
        """Whether it is worth other seeds: lost, run away, or drifting far beyond the twin."""
        return self.lost or self.rule == "failed" or self.score > 3 * max(3.0, self.twin_score)


def judged(line: dict[str, Any], twin: dict[str, Any]) -> Judged:
    """Judge a run by its line and its twin's."""
    trial = Trial(**line["trial"])
    found = judge_rows(line["rows"], Rule(), trial.steps, read_curves(twin["rows"]))
    mine, other = (_traced(trial, x) for x in (line, twin))
    broken = any(row.get("loss", 0.0) is None for row in line["rows"])
    said = "neither"
    if broken or a_cause.failed_share([mine], [other]):
        said = "failed"
    elif a_cause.stable_share([mine], [other]):
        said = "stable"
    losses = [math.nan if x is None else x for x in mine.loss()[1]]
    return Judged(
        losses[-1],
        min(losses),
        other.loss()[1][-1],
        _peak(mine),
        _peak(other),
        a_cause.sigma(mine),
        a_cause.sigma(other),
        said,
        found.outcome,
        found.reason,
    )


def _traced(trial: Trial, line: dict[str, Any]) -> Traced:
    rows = line["rows"]
    return Traced(
        trial.config(line["attention"], line["seed"]),
        [row for row in rows if "loss" in row],
        [row for row in rows if "measure" in row],
        {},
    )


def _peak(run: Traced) -> float:
    shown = [x for row in run.measures for layer in row["measure"]["mean_score"] for x in layer]
    return max((abs(x) for x in shown if x is not None), default=math.nan)


class Record:
    """trials.jsonl: what has been trained, and what is trained now."""

    def __init__(self, folder: Path, until: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.until = folder / "trials.jsonl", until
        self.lines: dict[tuple[Trial, str, int], dict[str, Any]] = {}
        whole = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        if whole and not whole[-1].endswith("\n"):  # the last one, of a search that was killed
            self.path.write_text("".join(whole[:-1]))
            del whole[-1]
        for line in map(json.loads, whole):
            self.lines[Trial(**line["trial"]), line["attention"], line["seed"]] = line

    def run(self, trial: Trial, attention: str, seed: int) -> dict[str, Any] | None:
        """The line of a run, trained if it is not there; None where time is up."""
        key = (trial, attention, seed)
        if key not in self.lines:
            line = trained(trial, attention, seed, self.until)
            if line is None:
                return None
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.lines[key] = line
        return self.lines[key]

    def judged(self, trial: Trial, attention: str, seed: int) -> Judged | None:
        """A run beside its twin; None where time is up."""
        twin = self.run(trial, TWIN, seed)
        line = twin and self.run(trial, attention, seed)
        return judged(line, twin) if line and twin else None

    def search(self, only: list[str]) -> None:
        """Go through the trials, those named or all, until time is up."""
        named = [trial for trial in LISTED if trial.said in only]
        for number, trial in enumerate(named if only else itertools.chain(LISTED, drawn()), 1):
            found = self.judged(trial, FLASH, 0)
            if found is None:
                return
            print(f"{number}. {trial.said}: {_words(found)}", flush=True)
            if not found.looks:
                continue
            for attention, seed in [(SAVED, 0), *itertools.product((FLASH, SAVED), SEEDS[1:])]:
                found = self.judged(trial, attention, seed)
                if found is None:
                    return
                print(f"   {attention}, seed {seed}: {_words(found)}", flush=True)

    def table(self) -> list[str]:
        """Every trial as a row of Markdown, seed 0 first, and the counts."""
        trials = list(dict.fromkeys(trial for trial, _, _ in self.lines))
        rows = [
            "| setting | attention, seeds | KL at the end (best; twin) | peak mean score (twin) |"
            " σ(W_Q) (twin) | ledger | rule |",
            "|---|---|---|---|---|---|---|",
        ]
        counts = dict.fromkeys(("trials", "ran away", "lost", "natural failures"), 0)
        for trial in trials:
            shown: dict[str, list[Judged]] = {}
            for (other, attention, seed), line in self.lines.items():
                if other == trial and attention != TWIN and (trial, TWIN, seed) in self.lines:
                    twin = self.lines[trial, TWIN, seed]
                    shown.setdefault(attention, []).append(judged(line, twin))
            rows += [_row(trial, attention, found) for attention, found in shown.items()]
            flash, saved = shown.get(FLASH, []), shown.get(SAVED, [])
            counts["trials"] += bool(flash)
            counts["ran away"] += any(x.looks for x in flash)
            counts["lost"] += any(x.lost for x in flash)
            counts["natural failures"] += (
                sum(x.lost for x in flash) >= 2
                and len(saved) == 3
                and not any(x.lost for x in saved)
            )
        return [*rows, "", ", ".join(f"{name}: {count}" for name, count in counts.items())]


def _words(found: Judged) -> str:
    return (
        f"KL {found.loss:.2e} (best {found.best:.2e}, twin {found.twin_loss:.2e}), peak mean score"
        f" {found.score:.1f} (twin {found.twin_score:.1f}), σ(W_Q) {found.sigma:.1f} (twin"
        f" {found.twin_sigma:.1f}); ledger: {found.ledger}; rule: {found.rule}, {found.reason}"
    )


def _row(trial: Trial, attention: str, found: list[Judged]) -> str:
    def each(form: str) -> str:
        return " / ".join(form.format(x) for x in found)

    return (
        f"| {trial.said} | {attention}, {len(found)} |"
        f" {each('{0.loss:.1e} ({0.best:.1e}; {0.twin_loss:.1e})')} |"
        f" {each('{0.score:.1f} ({0.twin_score:.1f})')} |"
        f" {each('{0.sigma:.1f} ({0.twin_sigma:.1f})')} | {each('{0.ledger}')} |"
        f" {each('{0.rule}')} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=1.5, help="how long to search")
    parser.add_argument("--out", type=Path, required=True, help="where the record lies")
    parser.add_argument("--table", action="store_true", help="show what is recorded, train nothing")
    said = [trial.said for trial in LISTED]
    parser.add_argument("--only", nargs="+", choices=said, default=[], metavar="SETTING")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    record = Record(chosen.out, time.time() + 3600 * chosen.hours)
    if not chosen.table:
        record.search(chosen.only)
    print("\n".join(record.table()))


if __name__ == "__main__":
    main()
