"""Where two computations part: two settings of one model, two engines, two versions, and whether it
is more than rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfulp.diff.one_step import Step
from halfulp.diff.setting import Setting
from halfulp.runs.results import Progress, no_progress

if TYPE_CHECKING:
    from torch import nn

    from halfulp.diff.after_steps import MakeOptimizer
    from halfulp.diff.difference import Difference


def diff(
    a: nn.Module | Setting,
    b: nn.Module | Setting,
    batches: Iterable[Any],
    *,
    gradients: bool = False,
    attribute: bool = True,
    repetitions: int = 2,
    most: int = 12,
    steps: int = 0,
    optimizer: MakeOptimizer | tuple[MakeOptimizer, MakeOptimizer] | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Say where two computations part, how far, by whose fault, and whether rounding explains it.

    Both sides run on the same batches. Each operation of B is held against A's operation on the
    same operands: what is left is its own gap, the rest came in. Groups of operations that differ
    are then put from B into A, and taken out of B, one at a time.

    Args:
        a: the side that counts as right: a model, or a `Setting` of one.
        b: the other side; the same model, or another one with the same weights.
        batches: tensors, tuples or dictionaries that the models are called with. With `input_ids`
            log-probabilities of the tokens that come next are compared, else the outputs. A chance
            needs 4 sequences in all.
        gradients: compare the gradients of the loss (the model's own, or the mean of −log p), by
            operation and by parameter.
        attribute: swap groups of operations.
        repetitions: passes of A with random roundings, per batch, for the chance.
        most: groups that are swapped.
        steps: train a copy of both models (in the mode that they are in, on the same batches one
            after the other) so many steps as well, and compare loss, outputs, gradients and weights
            after each. Dropout draws alike on both sides only where both draw as often.
        optimizer: makes, of a model, its optimizer, a pair of one and its scheduler, or a `Step`
            (which also clips, accumulates, scales the loss); a pair of functions is A's and B's.
            Needed for steps, e.g. `lambda model: torch.optim.AdamW(model.parameters())`.
        folder: where results lie meanwhile; by default the system's folder for temporary files.
        progress: called with the fraction done and what is being worked on.

    Returns:
        what was found; printed, a table.

    Raises:
        ValueError: something that cannot be compared, in one line.
    """
    from halfulp.diff.setting import setting_of
    from halfulp.diff.two_sides import compared

    chosen = list(batches)
    if not chosen:
        raise ValueError("batches is empty; accepted is at least one")
    for name, value in (("repetitions", repetitions), ("most", most)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: accepted is a whole number from 1")
    return compared(
        setting_of(a, "A", "a"),
        setting_of(b, "B", "b"),
        chosen,
        gradients=gradients,
        attribute=attribute,
        repetitions=repetitions,
        most=most,
        folder=folder,
        steps=steps,
        optimizers=_optimizers(steps, optimizer),
        progress=progress or no_progress,
    )


def _optimizers(steps: int, optimizer: Any) -> tuple[MakeOptimizer, MakeOptimizer] | None:
    """A's and B's, where both are trained."""
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps={steps!r}: accepted is a whole number from 0")
    if bool(steps) != (optimizer is not None):
        raise ValueError(
            f"steps={steps!r} and optimizer={optimizer!r}: accepted are both, or neither; such as"
            " lambda model: torch.optim.AdamW(model.parameters())"
        )
    return optimizer if isinstance(optimizer, tuple) or optimizer is None else (optimizer,) * 2


__all__ = ["Setting", "Step", "diff"]
