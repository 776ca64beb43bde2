"""What a user's function returns (`halfulp.training.user_model.CONTRACT`), made of what they have:
a loader, a transformers `Trainer`, a Lightning module.

Of a loader only the data set, the batch size and the way to collate are taken. Its order is drawn
anew as a function of seed and epoch, since a run that resumes must read any step's batch without
the ones before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from halfulp.recipes import hash_seed

Batch = Callable[[int], Any]


def batches_of(loader: DataLoader[Any], seed: int) -> Batch:
    """Return the batch of a step, from 0, that a loader's data set, size and collation give.

    Every epoch is a permutation of its own where the loader shuffles, else the data set's order;
    rows that fill no batch at its end are left out.

    Args:
        loader: of a data set that has a length and gives items by number.
        seed: of the order.

    Raises:
        ValueError: the data set is an iterable, the loader has a sampler of batches of its own, or
            there is less than one batch.
    """
    size, dataset = loader.batch_size, loader.dataset
    if size is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        what = "its own sampler of batches" if size is None else f"a {type(dataset).__name__}"
        raise ValueError(
            f"loader={loader!r}: it has {what}; accepted is a batch_size and a data set with a"
            " length that gives items by number"
        )
    shuffles = isinstance(loader.sampler, RandomSampler)
    return _batches(dataset, size, seed, shuffles, loader.collate_fn)


def _batches(
    dataset: Any, size: int, seed: int, shuffles: bool, collate: Callable[[list[Any]], Any]
) -> Batch:
    rows = len(dataset)
    an_epoch = rows // size
    if not an_epoch:
        raise ValueError(f"dataset of {rows} rows: accepted is at least one batch of {size}")
    order: dict[int, list[int]] = {}  # of the last epoch that was asked for

    def batch(step: int) -> Any:
        epoch, number = divmod(step, an_epoch)
        if epoch not in order:
            order.clear()
            drawn = torch.Generator().manual_seed(hash_seed(seed, f"epoch {epoch}", 0))
            order[epoch] = (
                torch.randperm(rows, generator=drawn).tolist() if shuffles else list(range(rows))
            )
        chosen = order[epoch][number * size : (number + 1) * size]
        return collate([dataset[i] for i in chosen])

    return batch


def of_trainer(trainer: Any, seed: int) -> tuple[Any, Any, Batch, Callable[..., Tensor]]:
    """Return model, optimizer with its scheduler, batches and loss of a transformers `Trainer`.

    Its model, `compute_loss`, optimizer, scheduler, data set, collator and
    `per_device_train_batch_size` are used; the loop is halfulp's, so that precision and clipping
    are set there: `--set autocast=bf16`, `--set optimizer.clip=1.0` (the Trainer's default).

    Raises:
        ValueError: it has no data set with a length.
    """
    args, dataset = trainer.args, trainer.train_dataset
    if dataset is None or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"trainer: its train_dataset is a {type(dataset).__name__}; accepted is one with a"
            " length"
        )
    size = args.per_device_train_batch_size
    epochs = int(args.num_train_epochs * (len(dataset) // size))
    trainer.create_optimizer_and_scheduler(args.max_steps if args.max_steps > 0 else epochs)
    removing = getattr(trainer, "_get_collator_with_removed_columns", None)
    collate = trainer.data_collator
    if removing is not None:
        collate = removing(collate, description="training")
    batch = _batches(dataset, size, seed, True, collate)

    def loss(model: nn.Module, inputs: Any) -> Tensor:
        found: Tensor = trainer.compute_loss(model, dict(inputs))
        return found

    return trainer.model, (trainer.optimizer, trainer.lr_scheduler), batch, loss


class LightningSteps(nn.Module):
    """A Lightning module whose forward pass is its training step, so that DDP and FSDP see it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.numbered = len(inspect.signature(module.training_step).parameters) > 1
        module.log = module.log_dict = _nowhere  # no trainer that it could go to

    def forward(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        out = self.module.training_step(*((batch, 0) if self.numbered else (batch,)))
        loss: Tensor = out["loss"] if isinstance(out, dict) else out
        return loss


def of_lightning(
    module: Any, loader: DataLoader[Any], seed: int
) -> tuple[Any, Any, Batch, Callable[..., Tensor]]:
    """Return model, optimizer with its scheduler, batches and loss of a Lightning module.

    `training_step` gives the loss, `configure_optimizers` one optimizer and at most one scheduler,
    which takes a step after each of the optimizer's whatever its interval. Callbacks, and what the
    module logs, go nowhere; batch_idx is 0.

    Raises:
        ValueError: it optimizes by hand, or has several optimizers.
    """
    if not getattr(module, "automatic_optimization", True):
        raise ValueError(
            f"module={type(module).__name__}: it optimizes by hand; accepted is automatic"
            " optimization"
        )
    optimizer, scheduler = _configured(module)
    pair = optimizer if scheduler is None else (optimizer, scheduler)
    return LightningSteps(module), pair, batches_of(loader, seed), _loss_of_step


def _configured(module: Any) -> tuple[Any, Any]:
    """One optimizer and its scheduler of the forms that `configure_optimizers` may return."""
    made = module.configure_optimizers()
    schedulers: Any = None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list):
        made, schedulers = made
    elif isinstance(made, dict):
        made, schedulers = made["optimizer"], made.get("lr_scheduler")
    optimizers = made if isinstance(made, list | tuple) else [made]
    listed = schedulers if isinstance(schedulers, list) else [schedulers] if schedulers else []
    if len(optimizers) != 1 or len(listed) > 1:
        raise ValueError(
            f"module={type(module).__name__}: configure_optimizers gives {len(optimizers)}"
            f" optimizers and {len(listed)} schedulers; accepted are one and at most one"
        )
    first = listed[0] if listed else None
    return optimizers[0], first["scheduler"] if isinstance(first, dict) else first


def _loss_of_step(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def _nowhere(*_: Any, **__: Any) -> None:
    """What a module logs."""
