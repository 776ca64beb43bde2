"""Golden et al.'s pictures that no sweep or comparison draws already, as plain data."""

from __future__ import annotations

import math
from typing import Any

from halfulp.papers.spike_run import Approach
from halfulp.runs.results import Figure, Series


def spike_figures(run: Approach, rise: float, command: str) -> list[dict[str, Any]]:
    """The loss of a run, its twin and a control, and how far the weights of two of them are from
    the twin's; the rise of the loss marked.
    """
    steps = tuple(map(float, run.steps))
    losses = (
        ("low precision", run.loss),
        ("twin", run.twin_loss),
        ("control, δ from dP ∘ P", run.control_loss),
    )
    distances = (
        ("low precision", run.distance),
        ("control, δ from dP ∘ P", run.control_distance),
    )
    marked = [] if math.isinf(rise) else [run.steps.index(int(rise))]

    def drawn(shown: tuple[tuple[str, tuple[float, ...]], ...]) -> tuple[Series, ...]:
        lines = tuple(Series(name, steps, y) for name, y in shown)
        y = shown[0][1]
        at = tuple(steps[i] for i in marked), tuple(y[i] for i in marked)
        return (*lines, *([Series("the loss rises", *at, style="points")] if marked else []))

    caption = (
        f"Byte GPT of one layer, seed {run.seed}; the twin has standard attention. Accelerated: O"
        " keeps fewer mantissa bits than bf16."
    )
    title = "weights at a loss spike (future work in the paper)"
    return [
        Figure(
            f"Loss: {title}", "step", "loss, nats a byte", drawn(losses), caption, command
        ).as_dict(),
        Figure(
            f"Distance: {title}",
            "step",
            "Wasserstein distance from the twin",
            drawn(distances),
            caption,
            command,
            y_log=True,
        ).as_dict(),
    ]
