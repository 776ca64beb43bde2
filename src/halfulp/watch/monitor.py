"""Measures every attention layer of a model while it trains, and leaves the training as it was.

A measurement makes two extra passes on a batch: one as the run itself makes it, and one with exact
attention, for the part of δ's error that has nothing to do with curvature (`curvature`). A run with
a monitor has the bits of one without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfulp.watch import measures
from halfulp.watch.directions import Direction, direction_of, step_figures, unit_matrix
from halfulp.watch.measures import Figures
from halfulp.watch.passes import Recorder, attention_modules, exact_pass, record
from halfulp.watch.running import CUMULATIVE, SIZE, Running, errors_of_delta
from halfulp.watch.spectral import head_sigmas
from halfulp.watch.taps import Observed

DEFAULT_EVERY = 200
"""Steps between two measurements (`benchmarks/monitor_cost.py`)."""
MOST_SCORES = 2**22
"""Scores of a layer that are measured: as many batch entries as fit, at least one."""
CHUNK = 2**21
"""Scores of a layer held at once; at least one head's."""
HISTORY = 4
"""Measured steps that error directions are compared with; each takes 8 · width² bytes a layer."""
PARTS = (
    "delta_error",
    "delta_error_first_order",
    "delta_error_curvature",
    "delta_error_in_gradient",
)


class Monitor:
    """Per layer and head: spectral norms, scores, weights, δ's error and its direction; see
    `measure`.

    Args:
        model: its attention modules have `attend` (with `layer`, `heads`, `tap`) and
            `head_weights()`, and are called with X `[B, N, width]` first, once a pass.
        every: steps between two measurements.

    Raises:
        ValueError: the model has no such modules, or `every` is below 1.
    """

    def __init__(self, model: nn.Module, every: int = DEFAULT_EVERY) -> None:
        if every < 1:
            raise ValueError(f"every={every}: accepted is an integer of at least 1")
        self.model, self.every, self.modules = model, every, attention_modules(model)
        # a list of lists is as long as the model, empty where nothing is measured
        self.rows = max(self.modules) + 1
        # a half-precision model cannot hold an exact O
        self.curvature = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
        self.reads: dict[int, Tensor] = {}
        self.running: dict[str, Running] = {}  # "layer/part"
        self.vectors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.errors: dict[int, Tensor] = {}  # [K, H, D, width] fp32, the last one last
        self.means: dict[int, Tensor] = {}

    def due(self, step: int) -> bool:
        """Whether this step, counted from 1, is to be measured."""
        return step % self.every == 0

    def measure(self, step: int, loss: Callable[[], Tensor]) -> dict[str, Any]:
        """Measure the model as it stands; `loss` makes one forward pass and returns a
        differentiable number.

        Returns:
            loss, loss_exact (of the second pass), and by name [layer][head], an empty list for a
            layer that is not measured; NaN where a figure is not defined. Beside what
            `score_figures`, `weight_figures`, `repetition_figures`, `row_sum_figures`,
            `sign_figures`, `activation_figures`, `direction_of` and `step_figures` document:

            - entries: batch entries measured;
            - sigma_query, sigma_key (by key head), sigma_query_key: largest singular values of W_Q,
              W_K and α W_Qᵀ W_K (A6, A19);
            - delta_error: Σ(δ_lp − δ_hp) over the measured entries and all rows (A10), and its
              parts delta_error_first_order and delta_error_curvature (D9), and
              delta_error_in_gradient; each with _t, in standard errors over batch entries, and
              _steps_t, over the last measured steps (`Running.t`), each of which counts in units of
              its delta_error_size;
            - delta_error_size: Σ|δ_lp − δ_hp| (gradients shrink by orders of magnitude while a run
              learns);
            - delta_error_cumulative, its sum over the measured steps so far (fig. 5a),
              delta_error_positive, the share of them above 0, and delta_error_sign_p, the two-sided
              sign test.
        """
        recorder = Recorder(self.modules, self._entries, self.reads)
        value, calls = record(self.model, recorder, loss)
        scalars, exact_grads = {"loss": value}, dict[int, Tensor]()
        if self.curvature:
            scalars["loss_exact"], exact_grads = exact_pass(self.model, recorder, loss)
        # it holds the graphs of both passes, which are let go before anything is computed
        del recorder
        found: dict[str, list[list[float]]] = {}
        with torch.no_grad():
            for layer, call in calls.items():
                # of step and layer alone: a run that is resumed draws the controls of one that was
                # not, and no generator's state has to be kept
                generator = torch.Generator().manual_seed(step * 1009 + layer)
                figures = self._layer(layer, call, exact_grads.get(layer), generator)
                for name, figure in figures.items():
                    rows = found.setdefault(name, [[] for _ in range(self.rows)])
                    rows[layer] = figure.double().cpu().tolist()
        return scalars | found

    def state(self) -> dict[str, Tensor]:
        """Everything that later measurements depend on, by name, on the CPU."""
        found = {f"{layer}/reads": reads.clone() for layer, reads in self.reads.items()}
        for name, running in self.running.items():
            found |= running.tensors(name)
        for layer, vectors in self.vectors.items():
            found |= {f"{layer}/vector{i}": x.cpu().clone() for i, x in enumerate(vectors)}
        for name, stacks in (("errors", self.errors), ("means", self.means)):
            found |= {f"{layer}/{name}": x.cpu().clone() for layer, x in stacks.items()}
        return found

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: it is of a model with other layers.
        """
        layers = sorted({int(name.partition("/")[0]) for name in state})
        if any(layer not in self.modules for layer in layers):
            raise ValueError(
                f"state of layers {layers}: accepted are {', '.join(map(str, self.modules))}"
            )
        self.reads = {layer: state[f"{layer}/reads"].cpu() for layer in layers}
        self.running, self.vectors, self.errors, self.means = {}, {}, {}, {}
        for layer in layers:
            device = self.modules[layer].head_weights()[0].device
            for part in (*PARTS, CUMULATIVE):
                self.running[f"{layer}/{part}"] = Running.of(f"{layer}/{part}", state)
            first, second, third = (state[f"{layer}/vector{i}"].to(device) for i in range(3))
            self.vectors[layer] = (first, second, third)
            for name, stacks in (("errors", self.errors), ("means", self.means)):
                if f"{layer}/{name}" in state:
                    stacks[layer] = state[f"{layer}/{name}"].to(device)

    def _entries(self, query: Tensor, key: Tensor) -> int:
        """Batch entries of a layer that are measured."""
        scores = query.shape[1] * query.shape[2] * key.shape[2]
        return min(len(query), max(1, MOST_SCORES // scores))

    def _layer(
        self, layer: int, call: Observed, exact_grad: Tensor | None, generator: torch.Generator
    ) -> Figures:
        """All figures of one layer."""
        heads = call.query.shape[1]
        # some heads at a time, since each needs several fp64 tensors of its scores' size
        at_once = max(1, CHUNK // (len(call.query) * call.query.shape[2] * call.key.shape[2]))
        chunks = []
        for start in range(0, heads, at_once):
            stop = min(start + at_once, heads)
            grad = None if exact_grad is None else exact_grad[:, start:stop]
            chunks.append(self._chunk(call.heads(start, stop), grad, generator))
        found, parts = measures.joined([chunk[:2] for chunk in chunks])
        found |= errors_of_delta(self.running, layer, parts)
        found |= self._sigmas(layer, call.scale, generator)
        if chunks[0][2] is not None:
            directions = [direction for _, _, direction in chunks if direction is not None]
            found |= self._steps(layer, directions, generator)
        return found | {"entries": torch.full((heads,), float(len(call.query)))}

    def _chunk(
        self, call: Observed, exact_grad: Tensor | None, generator: torch.Generator
    ) -> tuple[Figures, Figures, Direction | None]:
        """Figures `[h]` of some heads, the parts of δ's error by batch entry `[B, h]`, and the
        error direction.
        """
        exact = measures.exact_call(call)
        error = measures.delta_error(call, exact)
        found = measures.figures_of(exact) | measures.row_sum_figures(call, exact, error)
        found |= measures.sign_figures(call, exact)
        found |= measures.activation_figures(call)
        total = error.sum(-1)
        # e with dO of the exact pass, which knows nothing of this rounding; what is then left of e
        # is errᵀ H err, the curvature part (`curvature`)
        first = torch.full_like(total, torch.nan)
        if exact_grad is not None:
            first = (exact_grad.double() * (call.out.double() - exact.out)).sum((2, 3))
        read = measures.delta_error_in_gradient(call)
        parts = dict(zip(PARTS, (total, first, total - first, read), strict=True)) | {
            SIZE: error.abs().sum(-1)
        }
        direction = None if call.inputs is None else direction_of(call, exact, error, generator)
        return found | ({} if direction is None else direction.figures), parts, direction

    def _sigmas(self, layer: int, scale: float, generator: torch.Generator) -> Figures:
        query, key = self.modules[layer].head_weights()
        sigmas = head_sigmas(query, key, scale, self.vectors.get(layer), generator)
        self.vectors[layer] = sigmas.vectors
        return {
            "sigma_query": sigmas.query,
            "sigma_key": sigmas.key,
            "sigma_query_key": sigmas.query_key,
        }

    def _steps(self, layer: int, parts: list[Direction], generator: torch.Generator) -> Figures:
        """This step's direction beside the last ones, which it then joins."""
        now = Direction(
            torch.cat([part.error for part in parts]),
            torch.cat([part.mean_term for part in parts]),
            {},
        )
        found = step_figures(now, self.errors.get(layer), self.means.get(layer), generator)
        # R is made a unit, so that no step weighs more than another; means of unit terms stay as
        # long as they are, since their products are mean cosines over all pairs of terms
        for stacks, matrix in ((self.errors, unit_matrix(now.error)), (self.means, now.mean_term)):
            # kept for cosines alone, for which fp32 is enough
            new = matrix.float()[None]
            stacks[layer] = torch.cat([stacks[layer], new])[-HISTORY:] if layer in stacks else new
        return found
