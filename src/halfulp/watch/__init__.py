"""Measurements of attention while a model trains: what every layer and head does, and where its
error points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from halfulp.watch.watcher import Watcher
    from halfulp.watch.watching import HeadAlarm


def watch(
    model: nn.Module,
    every: int = 200,
    *,
    folder: str | Path | None = None,
    on_alarm: Callable[[HeadAlarm], None] | None = None,
    functions: Sequence[Callable[..., Any] | str] = (),
    eager: bool = False,
    start: int = 0,
) -> Watcher:
    """Watch the attention of any model while it trains: which layer and head leans, in which
    operation, and the fix.

    Nothing else changes in the training, and nothing in its bits. The first step is measured and
    then one in `every`, in its first forward and backward pass: what each call of
    `F.scaled_dot_product_attention` (transformers' "sdpa" too), `flash_attn_func` or
    `halfulp.attention` was fed and gave, and the gradients that came back, beside their exact
    values. A step ends where an optimizer of the model's parameters does, or where `Watcher.step`
    is called. Alarms are logged as warnings of "halfulp.watch" once ten measurements are made. Not
    seen: attention written out in matrix products, FlexAttention, packed sequences, softcap, sinks;
    under dropout, whose mask is not known, only the error of δ that dK shows. Under DDP or FSDP
    each process that calls this watches its own batches.

    Args:
        model: the module that the training calls, wrapped by DDP or not.
        every: steps between two measurements.
        folder: where run.json and metrics.jsonl are written, for `halfulp report`; must be new or
            empty.
        on_alarm: called with every new alarm.
        functions: attention functions of your own to watch too, called like
            `F.scaled_dot_product_attention`, or their names ("kernel.py:attention").
        eager: take a model of `torch.compile`, and run its measured steps without the compiler;
            their bits are then those of the eager model.
        start: steps made before, for a run that goes on.

    Raises:
        ValueError: the model is compiled and `eager` is not set, or is DataParallel or TorchScript;
            the folder holds files; a number is out of range.
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
    )


__all__ = ["watch"]
