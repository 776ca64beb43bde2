"""The user's own model as a workload: a function makes model, optimizer and batches, and everything
that the lab does with its own models it does with that one.

What the function must return is written in `CONTRACT`; what it returned is held against it, and
every misfit is one line that shows it.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from halfulp.interpose import Kernel, Observe, Operation, interpose
from halfulp.recipes import hash_seed
from halfulp.targets import device_named
from halfulp.targets.calling import one_line
from halfulp.targets.loading import load_function
from halfulp.training.attention import AttentionFunction, AttentionPlan
from halfulp.training.config import RunConfig, UserModel
from halfulp.training.determinism import own_generators, seed_generators
from halfulp.training.operations import OWN, check_seen, swaps_of
from halfulp.training.optimizer_arithmetic import OPTIMIZER, trained

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""loss(model, batch), where model may be a wrapper of the one that was made (DDP, FSDP)."""

CONTRACT = (
    "make(seed, device) -> (model, optimizer, batch) or (model, optimizer, batch, loss): a"
    " torch.nn.Module on that device; a torch.optim.Optimizer of its parameters, or a pair of one"
    " and its learning-rate scheduler; batch(step), step from 0, the tensors of that step, as a"
    " dictionary, a tuple or one tensor; loss(model, batch), a scalar tensor, without which the"
    " loss is model(**batch).loss"
)


@dataclass(frozen=True)
class Parts:
    """What the user's function returned, held against the contract."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any  # of torch.optim.lr_scheduler, or None
    batch: Callable[[int], Any]
    loss: Loss


class UserWorkload:
    """The user's model and batches; see `halfulp.training.workload.Workload`.

    A sample is a row of the step's batch, so that micro-batches and processes share a batch's rows.
    """

    def __init__(
        self, config: RunConfig, device: torch.device, own: Mapping[str, AttentionFunction] | None
    ) -> None:
        assert isinstance(config.workload, UserModel)
        self.config = made = config.workload
        self.seed, self.device, self._operations = config.seed, device, config.operations
        self.swaps, self._heads = swaps_of(config.attention, config.operations, own)
        self.observers: list[Observe] = []  # shown every operation of every pass
        self._checked = False  # whether the plans were held against what the model computes
        function, module = load_named(made.make)
        self.source: dict[str, Any] = {"data": "made by the model's own function"}
        self.sha256 = source_digest(module)
        self.parts = _parts(function, made.make, config.seed, device)
        self.model = self.parts.model.train()
        first = self._made(0)
        if not _same_bits(first, self._made(0)):
            raise _misfit(
                made.make,
                "batch(0) gave other values when it was called again, as an iterator would",
            )
        self.rows = _rows(first, made.make)
        self._held_against(made)
        self.tokens_per_sample = _tokens(first)

    def _held_against(self, config: UserModel) -> None:
        """Say where this is not the source that a run was recorded with."""
        if not config.sha256:
            return
        if config.sha256 != self.sha256:
            warnings.warn(
                f"workload={config.make!r}: its file was changed since the run was recorded"
                f" (SHA-256 {self.sha256[:12]}…, then {config.sha256[:12]}…); what is trained now"
                " need not be what was trained then",
                stacklevel=2,
            )
        if config.rows != self.rows:
            raise ValueError(
                f"workload={config.make!r}: its batches have {self.rows} rows; accepted are the"
                f" {config.rows} of the run"
            )

    def order(self, steps: int, batch: int) -> np.ndarray:
        """The rows of every step's batch, in their order."""
        return np.broadcast_to(np.arange(batch, dtype=np.int64), (steps, batch))

    def batch(self, samples: np.ndarray, step: int) -> Any:
        """Those rows of the step's batch, on the run's device, in the container that the user's
        function made.
        """
        made = self._made(step - 1)
        if len(samples) == self.rows:
            return made
        chosen = torch.tensor(np.array(samples), device=self.device)
        return each_tensor(made, lambda x: x[chosen] if x.ndim and x.shape[0] == self.rows else x)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The user's loss."""
        loss = self.parts.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            what = (
                f"a tensor of shape {tuple(loss.shape)} of {loss.dtype}"
                if isinstance(loss, Tensor)
                else f"a {type(loss).__name__}"
            )
            raise _misfit(self.config.make, f"the loss is {what}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise _misfit(self.config.make, "the loss carries no gradient")
        return loss

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The plans' arithmetic, in the forward and the backward pass; nothing where they leave all
        as it is.

        Raises:
            ValueError: a plan names what the model has not, known after the first pass.
        """
        see = self._see if self.observers else None
        if self._checked or not self.swaps:
            with (
                interpose(self.model, see, swaps=self.swaps) if see or self.swaps else nullcontext()
            ):
                yield
            return
        made: dict[tuple[str, str], None] = {}

        def note(operation: Operation, found: Any) -> None:
            made.setdefault((operation.path, operation.kind))
            if see is not None:
                see(operation, found)

        with interpose(self.model, note, swaps=self.swaps) as interposed:
            yield
        self._checked = True
        steps = ((path, OPTIMIZER) for path in trained(self.model, self.parts.optimizer))
        check_seen(self._operations, [*made, *steps], interposed.hidden)
        if self._heads is not None:
            self._heads.check(interposed.hidden)
        for swap in self.swaps:
            if isinstance(swap.run, Kernel):
                swap.run.check()

    def _see(self, operation: Operation, found: Any) -> None:
        for observe in self.observers:
            observe(operation, found)

    def figures(self) -> dict[str, float]:
        """None beyond the loss."""
        return {}

    def _made(self, step: int) -> Any:
        """The whole batch of a step; what it draws from the global generators is a function of the
        seed and the step, the same in every process.
        """
        with own_generators(self.device):
            start = hash_seed(self.seed, f"batch {step}", 0)
            random.seed(start)
            np.random.seed(start)  # noqa: NPY002
            torch.manual_seed(start)
            made = self.parts.batch(step)
        if isinstance(made, Mapping | list | tuple | Tensor):
            return each_tensor(made, lambda x: x.to(self.device))
        raise _misfit(self.config.make, f"batch({step}) gave a {type(made).__name__}")


def user_run(
    name: str, *, seed: int = 0, device: str | torch.device = "cpu", **fields: Any
) -> RunConfig:
    """Return the configuration of a run of the model that a function makes.

    Args:
        name: "file.py:function" or "module:function"; it is imported and called once.
        seed: given to the function.
        device: given to it too.
        **fields: of `RunConfig`, such as steps.

    Raises:
        ValueError: there is no such function, or what it returns is not what `CONTRACT` says.
    """
    made, plan = UserModel(absolute(name), "", 1), AttentionPlan.of(OWN)
    device = device_named(device)
    config = RunConfig(made, plan, seed=seed, device=device, preset=name)
    with own_generators(torch.device(device)):
        workload = UserWorkload(config, torch.device(device), None)
    made = replace(made, sha256=workload.sha256, rows=workload.rows)
    return replace(config, workload=made, batch=made.rows, **fields)


def load_named(name: str) -> tuple[Callable[..., Any], ModuleType]:
    """Return the function that a workload's name stands for, and its module.

    Raises:
        ValueError: there is none, or its file does not load.
    """
    try:
        function, module = load_function(name)
    except ValueError as error:
        raise ValueError(str(error).replace("target=", "workload=", 1)) from error
    if not callable(function):
        raise _misfit(name, f"it is a {type(function).__name__}")
    return function, module


def source_digest(module: ModuleType) -> str:
    """Return the SHA-256 of the file of a module; empty where it has none."""
    file = getattr(module, "__file__", None)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def absolute(name: str) -> str:
    """The name with the file's whole path, so that it is found from every folder."""
    where, colon, function = name.rpartition(":")
    is_file = where.endswith(".py") or "/" in where
    return f"{Path(where).resolve()}{colon}{function}" if is_file else name


def _parts(function: Callable[..., Any], name: str, seed: int, device: torch.device) -> Parts:
    seed_generators(device, seed, 0, 0)
    try:
        made = function(seed, device)
    except Exception as error:
        raise ValueError(
            f"workload={name!r}: make({seed}, {str(device)!r}) raises {one_line(error)}; accepted"
            f" is {CONTRACT}"
        ) from error
    if not isinstance(made, tuple | list) or len(made) not in (3, 4):
        held = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise _misfit(name, f"it returns a {type(made).__name__}{held}")
    model, optimizer, batch, loss = (*made, None)[:4]
    optimizer, scheduler = (
        optimizer if isinstance(optimizer, tuple) and len(optimizer) == 2 else (optimizer, None)
    )
    for what, one, fits in (
        ("model", model, isinstance(model, nn.Module)),
        ("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer)),
        ("scheduler", scheduler, scheduler is None or callable(getattr(scheduler, "step", None))),
        ("batch", batch, callable(batch)),
        ("loss", loss, loss is None or callable(loss)),
    ):
        if not fits:
            raise _misfit(name, f"its {what} is a {type(one).__name__}")
    _check_optimizer(name, model, optimizer, scheduler)
    loss = partial(_loss_of, name) if loss is None else loss
    return Parts(model, optimizer, scheduler, batch, loss)


def _check_optimizer(name: str, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    own = {id(p) for p in model.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise _misfit(name, "its optimizer has tensors that are no parameters of the model")
    # state without a count of steps is of steps that were made, too
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise _misfit(name, "its optimizer has made steps already")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise _misfit(name, "its scheduler goes by a loss, and not by the step alone")


def arguments_of(model: nn.Module, batch: Any) -> tuple[Any, Mapping[str, Any]]:
    """How a model is called with a batch: by name with a dictionary, else one by one.

    Raises ValueError where its forward has not these parameters.
    """
    alone = (batch,) if isinstance(batch, Tensor) else batch
    args, named = ((), batch) if isinstance(batch, Mapping) else (alone, {})
    try:
        inspect.signature(model.forward).bind(*args, **named)
    except TypeError as error:
        raise ValueError(f"the model does not take its batch, and no loss does: {error}") from None
    return args, named


def _loss_of(name: str, model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model returns: as its attribute, under that name, as its only scalar, or
    alone.
    """
    try:
        args, named = arguments_of(model, batch)
    except ValueError as error:
        raise _misfit(name, str(error)) from None
    out = model(*args, **named)
    found = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if found is None and isinstance(out, tuple):
        scalars = [x for x in out if isinstance(x, Tensor) and x.ndim == 0]
        found = scalars[0] if len(scalars) == 1 else None
    result: Tensor = out if found is None else found
    return result


def _misfit(name: str, what: str) -> ValueError:
    return ValueError(f"workload={name!r}: {what}; accepted is {CONTRACT}")


def each_tensor(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor in it changed; what is no tensor stays."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: each_tensor(x, change) for name, x in batch.items()}
    # a named tuple takes its fields one by one
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(x, change) for x in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(each_tensor(x, change) for x in batch)
    return batch


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def see(x: Tensor) -> Tensor:
        found.append(x)
        return x

    each_tensor(batch, see)
    return found


def _rows(batch: Any, name: str) -> int:
    rows = next((x.shape[0] for x in _tensors(batch) if x.ndim), 0)
    if not rows:
        raise _misfit(name, "batch(0) has no tensor with rows")
    return rows


def _tokens(batch: Any) -> int:
    """Tokens a row: the length of the first tensor of whole numbers; 1 where there is none."""
    whole = (x for x in _tensors(batch) if x.ndim > 1 and x.dtype in (torch.int64, torch.int32))
    return next((x.shape[1] for x in whole), 1)


def _same_bits(one: Any, other: Any) -> bool:
    pairs = (_tensors(one), _tensors(other))
    return len(pairs[0]) == len(pairs[1]) and all(
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(*pairs, strict=True)
    )
