"""Measurements of attention while a model trains: what every layer and head does, and where its
error points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from halfulp.runs.writers import Writer
    from halfulp.watch.troubles import Finding
    from halfulp.watch.watcher import Watcher
    from halfulp.watch.watching import HeadAlarm


def watch(
    model: nn.Module,
    every: int | None = None,
    *,
    folder: str | Path | None = None,
    on_alarm: Callable[[HeadAlarm | Finding], None] | None = None,
    functions: Sequence[Callable[..., Any] | str] = (),
    eager: bool = False,
    start: int = 0,
    snapshots: int = 0,
    writers: Sequence[Writer] = (),
) -> Watcher:
    """Watch the attention of any model while it trains: which layer and head leans, in which
    operation, and the fix.

    Nothing else changes in the training, and nothing in its bits. One step in `every` is measured,
    the first one too, in its first forward and backward pass: what each call of
    `F.scaled_dot_product_attention` (transformers' "sdpa" too), `flash_attn_func` or
    `halfulp.attention` was fed and gave, and the gradients that came back, beside their exact
    values. A step ends where an optimizer of the model's parameters does, or where `Watcher.step`
    is called, or where a GradScaler leaves one out. Alarms are logged as warnings of
    "halfulp.watch" once ten measurements are made. Not measured, but named in the report and once
    in the log: attention written out in matrix products, FlexAttention, packed sequences, softcap,
    sinks, and modules that are named like attention; under dropout, whose mask is not known, only
    the error of δ that dK shows. Losses (where the model returns them) and gradients that are not
    finite are named too. Under DDP or FSDP each process that calls this watches its own batches, in
    a folder of its own, `folder/rank-N`.

    Args:
        model: the module that the training calls, wrapped by DDP or not.
        every: steps between two measurements; if None, 10 up to step 100 and 200 from there on.
        folder: where run.json and metrics.jsonl are written, for `halfulp report`; must be new or
            empty. What can no longer be written there is said once, and measuring goes on.
        on_alarm: called with every new alarm.
        functions: attention functions of your own to watch too, called like
            `F.scaled_dot_product_attention`, or their names ("kernel.py:attention").
        eager: take a model of `torch.compile`, and run its measured steps without the compiler;
            their bits are then those of the eager model.
        start: steps made before, for a run that goes on.
        snapshots: how many snapshots (`halfulp.read_snapshot`) are written without being asked for,
            below the folder: of the step that gave numbers that are not finite, before its update,
            and of the step after an alarm. Each holds the weights and the optimizer's moments. With
            more than 0 each step waits for its gradient norm. `Watcher.snapshot` asks for one.

        writers: where measurements go besides the folder: `halfulp.runs.writers.TensorBoardSink`
            and `WandbSink`, or anything with `row` and `close`.

    Raises:
        ValueError: the model is being watched already; it is compiled and `eager` is not set, or is
            DataParallel or TorchScript; the folder holds files; a number is out of range.
    """
    from halfulp.watch.watcher import Watcher

    return Watcher(
        model,
        every,
        folder=folder,
        on_alarm=on_alarm,
        functions=functions,
        eager=eager,
        start=start,
        snapshots=snapshots,
        writers=writers,
    )


__all__ = ["watch"]
