"""Watching from inside other people's loops: callbacks for transformers' Trainer and for Lightning.

Each makes its class when it is called, since the class it inherits from is that library's. Under
`accelerate` none is needed: `halfulp.watch(model)` after `accelerator.prepare` is enough.
"""

from __future__ import annotations

import logging
from typing import Any

from halfulp.watch import watch

LOG = logging.getLogger("halfulp.watch")


def transformers_callback(every: int | None = None, **options: Any) -> Any:
    """A `transformers.TrainerCallback` that watches a Trainer's model from its first step to its
    last: `Trainer(..., callbacks=[transformers_callback()])`.

    The callback has the watcher as `watcher` once the training has begun, and logs its report when
    it ends.

    Args:
        every: steps between two measurements, as `halfulp.watch` has it.
        **options: of `halfulp.watch`; `start` is the Trainer's own step.
    """
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        """Opens a watcher and closes it."""

        watcher: Any = None

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            """The training begins, or goes on."""
            if self.watcher is not None:
                self.watcher.close()
            given = {"start": state.global_step, **options}
            self.watcher = watch(model, every, **given)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """It ends."""
            self.watcher.close()
            LOG.info("%s", self.watcher.report())

    return Watching()


def lightning_callback(every: int | None = None, **options: Any) -> Any:
    """A `lightning.Callback` that watches the module that a Lightning Trainer fits:
    `Trainer(..., callbacks=[lightning_callback()])`.

    A pass goes from the batch to the backward pass, whatever `training_step` calls. The callback
    has the watcher as `watcher` once the training has begun, and logs its report when it ends.

    Args:
        every: steps between two measurements, as `halfulp.watch` has it.
        **options: of `halfulp.watch`; `start` is the Trainer's own step.

    Raises:
        ModuleNotFoundError: neither lightning nor pytorch_lightning is installed.
    """
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback

    class Watching(Callback):  # type: ignore[misc]
        """Opens a watcher, tells it of passes, and closes it."""

        watcher: Any = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """The training begins, or goes on."""
            given = {"start": trainer.global_step, **options}
            self.watcher = watch(pl_module, every, **given)

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            """A pass begins; its backward pass follows it."""
            self.watcher.begin_pass(batch, batch_idx)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            """The loss is there."""
            self.watcher.end_pass(loss * trainer.accumulate_grad_batches)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            """Gradients are there, in the optimizer's own closure."""
            self.watcher.update_begins(optimizer)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """It ends."""
            self.watcher.close()
            LOG.info("%s", self.watcher.report())

        def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
            """It fails: what was measured is kept."""
            if self.watcher is not None:
                self.watcher.close()

    return Watching()
