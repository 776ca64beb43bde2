"""How far the weights of a run have gone from its twin's where its loss spikes: what Golden et al.
leave for future work.

Three byte GPTs train in step, on the same data from the same weights: one whose loss spikes
(accelerated: O of one mantissa bit), its twin with standard attention, and a control with the same
O whose δ is rowsum(dP ∘ P), so that it rounds as coarsely and does not fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfulp.diff.weights_apart import wasserstein
from halfulp.papers.runs_a import Now, Plan, language_attention, train_steps
from halfulp.runs.threads import one_thread

EVERY = 10  # steps between two points


@dataclass(frozen=True)
class Approach:
    """Three runs of one seed, every `EVERY` steps."""

    seed: int
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    twin_loss: tuple[float, ...]
    control_loss: tuple[float, ...]
    distance: tuple[float, ...]  # Wasserstein distance of all weights from the twin's
    control_distance: tuple[float, ...]
    largest: tuple[float, ...]  # difference of a weight from the twin's


def approach(job: tuple[int, int, int]) -> Approach:
    """Train the three runs of a seed, for so many steps, with an O of so many mantissa bits."""
    seed, steps, bits = job
    attentions = (
        language_attention(bits),
        "BF16_STANDARD",
        language_attention(bits, delta_from="probabilities"),
    )
    plans = [Plan((attention,), seed, steps, layers=1) for attention in attentions]
    points: list[tuple[float, ...]] = []
    with one_thread():
        # in step, so that weights are compared while they are there and none has to be kept
        for run, twin, control in zip(*map(train_steps, plans), strict=True):
            if run.step % EVERY:
                continue
            weights = [_weights(now) for now in (run, twin, control)]
            losses = [now.rows[-1]["loss"] for now in (run, twin, control)]
            apart = [wasserstein(one, weights[1]) for one in (weights[0], weights[2])]
            most = float(np.abs(weights[0] - weights[1]).max())
            points.append((run.step, *losses, *apart, most))
    at, *columns = zip(*points, strict=True)
    return Approach(seed, tuple(map(int, at)), *columns)


def _weights(now: Now) -> np.ndarray:
    """All weights of the model as they are after the step, `[count]`."""
    parts = [p.detach().double().flatten().numpy() for p in now.workload.model.parameters()]
    return np.concatenate(parts)
