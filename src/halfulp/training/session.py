"""One run's live state and its step: samples in, one update of the weights, a line of metrics where
one is due.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfulp.interpose import module_names
from halfulp.training.adjusted import nudge
from halfulp.training.attention import set_tap
from halfulp.training.checkpoint import (
    Checkpoint,
    model_tensors,
    optimizer_numbers,
    optimizer_tensors,
    restore,
)
from halfulp.training.config import RunConfig
from halfulp.training.determinism import seed_generators
from halfulp.training.distributed import World
from halfulp.training.journal import Row
from halfulp.training.operations import OWN, OperationPlan, check_seen
from halfulp.training.optimizer_arithmetic import OPTIMIZER, choices, trained
from halfulp.training.score_clip import ScoreClip
from halfulp.training.updates import Updates
from halfulp.training.user_model import UserWorkload
from halfulp.training.user_scores import UserScores
from halfulp.training.workload import Workload

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Session:
    """Model, optimizer and the place in the order of samples; `step` makes one step."""

    def __init__(
        self,
        config: RunConfig,
        workload: Workload,
        group: World,
        order: np.ndarray,
        start: Checkpoint | None,
    ) -> None:
        self.config, self.workload, self.group, self.order = config, workload, group, order
        # sharding puts other parameters into the model, and the user's optimizer holds the old ones
        before = {id(p): name for name, p in workload.model.named_parameters()}
        chosen = self._chosen()
        self.model = group.wrap(workload.model, unknown=workload.parts is not None)
        self.parameters = [p for p in workload.model.parameters() if p.requires_grad]
        named = dict(workload.model.named_parameters())
        self.updates = Updates(config, named, workload.parts, before, chosen)
        self.optimizer = self.updates.optimizer
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=config.autocast == "fp16")
        self.monitor, self.scores = None, None
        if isinstance(workload, UserWorkload) and config.measure_every:
            self.scores = UserScores(workload.model, config.measure_every)
            workload.observers.append(self.scores.saw)
        elif config.measure_every:
            from halfulp.watch.monitor import Monitor

            self.monitor = Monitor(workload.model, config.measure_every)
        self.done = 0  # steps made
        self.loss = math.nan  # of the last step, mean over all its samples, before its update
        self.rows: list[Row] = []
        if start is not None:
            self._take_up(start)
        self.updates.adjust(self._clip_of_scores())
        if config.adjusted.nudged and self.done == config.adjusted.since:
            nudge(self.parameters)
        self._places = config.adjusted.places(config.steps)
        self._since, self._at = time.perf_counter(), self.done

    def step(self) -> list[Row]:
        """Make one step and return the lines due after it."""
        config, number = self.config, self.done + 1
        rate = self.updates.begin(number)
        # before the step's own passes, from the same seed: measuring changes no bit of a run
        rows = (
            [] if self.monitor is None or not self.monitor.due(number) else [self._measure(number)]
        )
        self.optimizer.zero_grad()
        self._seed(number)
        measured = self.scores is not None and self.scores.begin(number)
        self.loss = self._gradients(number)
        if measured and self.scores is not None:
            rows.append({"step": number, "measure": self.scores.end()})
        shown = (
            number % config.metrics_every == 0
            or number == config.steps
            or not math.isfinite(self.loss)
        )
        # before clipping, whose limit is of the gradients and not of what fp16 had them scaled to
        self.scaler.unscale_(self.optimizer)
        norm = self._clip(shown)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.updates.end()
        self.done = number
        if shown:
            rows.append(self._metrics(rate, norm))
        self.rows += rows
        return rows

    def state(self) -> Checkpoint:
        """Return everything that the rest of the run depends on; all processes call it together."""
        return Checkpoint(
            self.done,
            model_tensors(self.workload.model),
            optimizer_tensors(self.workload.model, self.optimizer) | self.updates.masters(),
            {} if self.monitor is None else self.monitor.state(),
            self.scaler.state_dict(),
            optimizer_numbers(self.workload.model, self.optimizer) if self.updates.theirs else {},
        )

    def _chosen(self) -> dict[str, str]:
        """The arithmetic of the step of every weight of the user's model."""
        parts, operations = self.workload.parts, self.config.operations
        if parts is None or not operations.assignments:
            return {}
        said = [one for one in operations.assignments if one.kinds == (OPTIMIZER,)]
        paths = trained(self.workload.model, parts.optimizer)
        check_seen(OperationPlan(tuple(said)), [(path, OPTIMIZER) for path in paths])
        chosen = choices(
            self.workload.model, parts.optimizer, lambda path: operations.choice(path, OPTIMIZER)
        )
        if self.group.parallel == "fsdp" and any(into != OWN for into in chosen.values()):
            raise ValueError(
                f"operations={str(operations)!r}: the optimizer's step of sharded weights is their"
                " own; accepted with parallel='fsdp' is a plan of named kinds without optimizer"
            )
        return chosen

    def _clip_of_scores(self) -> ScoreClip | None:
        """QK-clip, if the configuration has it, looking at every call of attention."""
        most, model = self.config.adjusted.most_score, self.workload.model
        if most is None:
            return None
        if isinstance(self.workload, UserWorkload):
            clip = ScoreClip(most, dict(module_names(model)))
            self.workload.observers.append(clip.saw)
            return clip
        from halfulp.watch.passes import attention_modules

        clip = ScoreClip(most, attention_modules(model))
        set_tap(model, clip)
        return clip

    def _take_up(self, start: Checkpoint) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: it is not one of this configuration; the session may be half of it then.
        """
        if start.step > self.config.steps:
            raise ValueError(
                f"checkpoint: it is of step {start.step}; accepted are 0 to {self.config.steps}"
            )
        self.updates.replay(start.step)
        start = replace(start, optimizer=self.updates.take_up(start.optimizer))
        restore(start, self.workload.model, self.optimizer)
        try:
            if self.monitor is not None and start.monitor:
                self.monitor.load_state(start.monitor)
            if start.scaler:
                self.scaler.load_state_dict(start.scaler)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            said = f"{type(error).__name__} {' '.join(str(error).split())}"
            raise ValueError(
                f"checkpoint: the state of monitor or scaler is malformed ({said}); accepted is"
                " what a run wrote"
            ) from None
        self.done = start.step

    def _seed(self, number: int) -> None:
        place = int(self._places[number - 1])
        # by place in the data: where steps change their order, each brings its random numbers along
        seed_generators(self.group.device, self.config.seed, place, self.group.rank)

    def _batch(self, number: int, part: int) -> Any:
        """This process's share of a micro-batch."""
        size = self.config.batch // self.config.accumulation
        place = int(self._places[number - 1])
        samples = self.order[place - 1][part * size : (part + 1) * size]
        return self.workload.batch(np.asarray(self.group.share(samples)), place)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST.get(self.config.autocast)
        return nullcontext() if dtype is None else torch.autocast(self.group.device.type, dtype)

    def _gradients(self, number: int) -> float:
        """Sum the gradients of all micro-batches; return the mean loss over them and all
        processes.
        """
        parts = self.config.accumulation
        # summed on the device, which is waited for once a step
        total = torch.zeros((), device=self.group.device)
        for part in range(parts):
            batch = self._batch(number, part)
            # gradients cross between processes once a step, with the last micro-batch
            with self.group.gathering(self.model, part == parts - 1), self.workload.computing():
                with self._autocast():
                    loss = self.workload.loss(self.model, batch)
                if parts > 1:
                    loss = loss / parts
                torch.autograd.backward(self.scaler.scale(loss))
                total = total + loss.detach()
        return float(self.group.mean(total).item())

    def _clip(self, shown: bool) -> float:
        """The gradient norm before clipping; NaN where nobody looks at it."""
        clip = self.config.optimizer.clip
        if clip is None and not shown:
            return math.nan
        if clip is None:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            norm: Any = torch.nn.utils.get_total_norm(gradients)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, clip)
        # of sharded parameters the norm is a DTensor
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _measure(self, number: int) -> Row:
        """A measurement on the first micro-batch, with the weights that the step starts from."""
        assert self.monitor is not None
        batch = self._batch(number, 0)

        def loss() -> Tensor:
            self._seed(number)  # each pass draws what the step's own first pass will draw
            with self._autocast():
                return self.workload.loss(self.workload.model, batch)

        return {"step": number, "measure": self.monitor.measure(number, loss)}

    def _metrics(self, rate: float, norm: float) -> Row:
        now = time.perf_counter()
        seconds, steps = now - self._since, self.done - self._at
        tokens = self.workload.tokens_per_sample * self.config.batch * steps
        self._since, self._at = now, self.done
        row = {"step": self.done, "loss": self.loss, "grad_norm": norm, "learning_rate": rate}
        return (
            row
            | {"seconds": seconds, "tokens_per_second": tokens / seconds}
            | self.workload.figures()
        )
