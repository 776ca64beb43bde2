"""A recorded training as a side of a comparison: its curves, its weights at a step, and, where its
code may run, its model as a Setting.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfulp.diff.after_steps import MakeOptimizer
from halfulp.diff.one_step import Step
from halfulp.diff.setting import DTYPES, Setting, tensors_in
from halfulp.interpose import Operation, Swap
from halfulp.training.attention import Attend, AttentionPlan
from halfulp.training.checkpoint import (
    Checkpoint,
    checkpoint_steps,
    load_checkpoint,
    load_weights,
    model_tensors,
    restore,
)
from halfulp.training.config import RunConfig, UserModel
from halfulp.training.determinism import own_generators
from halfulp.training.journal import Row, read_rows, recorded_order
from halfulp.training.operations import OWN, OperationPlan
from halfulp.training.optimizer_arithmetic import OPTIMIZER
from halfulp.training.run_json import config_from_dict, read_record
from halfulp.training.trust import named_code
from halfulp.training.updates import Updates
from halfulp.training.workload import Workload, build_workload

_WIDE = ("sdpa", "sdpa:fp32", "recipe:FP32", "recipe:FP64")


def with_outputs(loss: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Any]:
    """A `forward` of a Setting that gives the loss, and what the model gave on the way to it."""

    def forward(model: nn.Module, batch: Any) -> dict[str, Any]:
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda _, __, out: seen.append(out))
        try:
            found = loss(model, batch)
        finally:
            hook.remove()
        given = seen[-1] if seen else None
        logits = getattr(given, "logits", None)
        tensors = given if isinstance(given, tuple | list) else (given,)
        if logits is None:
            wide = (x for x in tensors if isinstance(x, Tensor) and x.dim() > 1)
            logits = next((x for x in wide if x.is_floating_point()), None)
        return {"loss": found} | ({} if logits is None else {"logits": logits})

    return forward


@dataclass(frozen=True)
class RunSide:
    """A run folder. Reading it imports nothing that it names.

    Attributes:
        folder: of the run.
        config: as its run.json has it, or with the code that the user named.
        record: its run.json.
        trusted: whether the code that the configuration names may run.
    """

    folder: Path
    config: RunConfig
    record: Mapping[str, Any]
    trusted: bool

    @classmethod
    def of(cls, folder: Path, config: RunConfig | None = None) -> RunSide:
        """Read a folder; with a configuration, one whose code the user trusts.

        Raises:
            ValueError: it holds no training run.
        """
        record = read_record(folder)
        return cls(folder, config or config_from_dict(record["config"]), record, config is not None)

    @cached_property
    def rows(self) -> list[Row]:
        """Its lines of metrics."""
        return [row for row in read_rows(self.folder) if "loss" in row]

    @cached_property
    def steps(self) -> list[int]:
        """Of its checkpoints."""
        return checkpoint_steps(self.folder / "checkpoints")

    @property
    def runs(self) -> bool:
        """Whether its model can be made: all code is halfulp's, or trusted."""
        return self.trusted or not named_code(self.config)

    def checkpoint(self, step: int) -> Checkpoint:
        """Of a step, with the optimizer's state.

        Raises:
            ValueError: it is torn.
        """
        return load_checkpoint(self.folder / "checkpoints" / f"step-{step}")

    def weights(self, step: int) -> dict[str, Tensor]:
        """Of the checkpoint of a step.

        Raises:
            ValueError: it is torn.
        """
        return load_weights(self.folder / "checkpoints" / f"step-{step}")

    def coarsest(self) -> torch.dtype:
        """The narrowest format that the run is known to compute in."""
        if self.config.autocast != "none":
            return DTYPES[str(self.config.autocast)]
        choices = {a.attention for a in self.config.attention.assignments}
        if not isinstance(self.config.workload, UserModel):  # whose attention reads bf16
            return torch.float32 if choices <= set(_WIDE) else torch.bfloat16
        last = self.weights(self.steps[-1]) if self.steps else {}
        dtypes = [x.dtype for x in last.values() if x.is_floating_point()]
        return max((torch.float32, *dtypes), key=lambda dtype: torch.finfo(dtype).eps)

    def made(self, seed: int | None = None, plain: bool = False) -> Workload:
        """The workload as it began.

        Args:
            seed: of the weights, instead of the run's.
            plain: with the stock attention, since weights do not depend on it.
        """
        config = self.config
        user = isinstance(config.workload, UserModel)
        if seed is not None:
            data_seed = None if user else config.seed_of_data
            config = replace(config, seed=seed, data_seed=data_seed)
        if plain:
            plan = AttentionPlan.of(OWN) if user else AttentionPlan()
            config = replace(config, attention=plan, operations=OperationPlan())
        with own_generators(torch.device(config.device)):
            return build_workload(config)

    def initial(self, seed: int | None = None) -> dict[str, Tensor] | None:
        """The weights before the first step; None where code that nobody trusts makes them, or
        where the run began from another's.
        """
        own = not isinstance(self.config.workload, UserModel)
        if self.record["start"] or not (own or self.trusted):
            return None
        return model_tensors(self.made(seed, plain=True).model)

    def setting(self, weights: Mapping[str, Tensor], name: str) -> Setting:
        """The model with these weights, computing as the run does, in eval mode.

        Raises:
            ValueError: they are another model's.
        """
        made = self.made()
        restore(Checkpoint(0, dict(weights), {}), made.model)
        swaps = (*made.swaps, *_attention_seen(made.model))
        autocast = None if self.config.autocast == "none" else self.config.autocast
        return Setting(
            made.model.eval(), name, autocast=autocast, swaps=swaps,
            forward=with_outputs(made.loss),
        )  # fmt: skip

    def steps_from(self, start: Checkpoint) -> MakeOptimizer:
        """What makes this run's steps after a checkpoint: its optimizer with the state that lies
        there, its rates, micro-batches, clipping and the scale of fp16.

        Raises:
            ValueError: they are made with changes that a copy is not trained with.
        """
        config, changed = self.config, self.config.adjusted
        arithmetic = [one for one in config.operations.assignments if OPTIMIZER in one.kinds]
        if arithmetic or changed.most_score is not None:
            what = "another arithmetic of its optimizer" if arithmetic else "QK-clip"
            raise ValueError(
                f"steps: {str(self.folder)!r} was trained with {what}; accepted are runs without"
            )

        def make(model: nn.Module) -> Step:
            made = self.made()
            before = {id(x): name for name, x in made.model.named_parameters()}
            parameters = dict(model.named_parameters())
            updates = Updates(config, parameters, made.parts, before, {})
            updates.replay(start.step)
            restore(replace(start, model=model_tensors(model)), model, updates.optimizer)
            updates.adjust(None)
            scaler = torch.amp.GradScaler(
                torch.device(config.device).type, enabled=config.autocast == "fp16"
            )
            if start.scaler and scaler.is_enabled():
                scaler.load_state_dict(start.scaler)
            return Step(
                updates.optimizer, updates.scheduler, config.optimizer.clip, config.accumulation,
                scaler, lambda k: updates.begin(start.step + k + 1),
            )  # fmt: skip

        return make

    def batches(self, step: int, count: int) -> list[Any]:
        """The batches that the run reads after a step; from its beginning, where it has ended.
        One that is another's again is left out: its sequences would be counted twice.
        """
        made = self.made(plain=True)
        order = recorded_order(self.folder, self.config, made.source)
        numbers = [(step + i) % len(order) for i in range(count)]
        found: list[Any] = []
        for number in numbers:
            batch = made.batch(order[number], number + 1)
            if not any(_equal(batch, other) for other in found):
                found.append(batch)
        return found


def _equal(one: Any, other: Any) -> bool:
    return all(map(torch.equal, tensors_in(one), tensors_in(other)))


def _attention_seen(model: nn.Module) -> tuple[Swap, ...]:
    """Make every attention of halfulp's own models one operation, PyTorch's, and return the swap
    that puts the run's own in its place: kernels and recipes are made of other operations each.
    """
    real: dict[str, Attend] = {}
    for path, module in model.named_modules():
        if isinstance(module, Attend):
            real[path] = copy.copy(module)
            half = not module.choices <= set(_WIDE)
            module.groups = [(None, partial(_stock, torch.bfloat16 if half else None))]

    def run(operation: Operation) -> Tensor:
        # bf16 operands go in as the fp32 that they were cut from, and are cut again to the same
        wide = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in operation.args)
        query, key, value = wide
        return real[operation.path].attend(query, key, value, **operation.kwargs)

    return (Swap(run, kinds=("attention",)),) if real else ()


def _stock(
    half: torch.dtype | None, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    q, k, v = (x if half is None else x.to(half) for x in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, **options).to(query.dtype)
