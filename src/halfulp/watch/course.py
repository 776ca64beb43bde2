"""The course of a watched training beside its attention: what every step shows, what a measured one
does to the weights, where numbers stop being finite, and which cause is found for what goes wrong.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from halfulp.watch.health import Health, Step, gradient_norm, sentences_of
from halfulp.watch.nonfinite import Place, place_in_forward, place_in_gradients, place_in_weights
from halfulp.watch.running import WINDOW
from halfulp.watch.snapshots import Snapshots
from halfulp.watch.troubles import CAUSES, Finding, Seen, find
from halfulp.watch.weights import Moved

LOOK = 10
"""Steps between two looks at loss, gradient norm and batches: what is on a device is read then."""
_SKIPS = 2  # steps that a GradScaler leaves out as a matter of course, to find its scale


class Course:
    """What a training does, step by step; `Watcher` tells it."""

    def __init__(self, model: nn.Module, snapshots: Snapshots) -> None:
        self.model, self.snapshots = model, snapshots
        self.health = Health()
        self.found: list[Finding] = []  # each cause once a place, a bad batch once a step
        # where a number first was not finite: in an update, and in a step that was left out
        self.place: Place | None = None
        self._skipped_at: Place | None = None
        # the last measurements: {"step", "measure", "weights"}
        self.measured: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self.weights: dict[str, dict[str, float]] = {}  # of the step that is being measured
        self._moved: Moved | None = None
        self._rate, self._scale = math.nan, math.nan
        self._scaler: weakref.ref[GradScaler] | None = None  # that scaled the last loss
        self._scaled: tuple[weakref.ref[Tensor], Tensor] | None = None
        self._returned_loss = False  # by the last pass

    @property
    def careful(self) -> bool:
        """Whether each step is looked at before its update: where that waits for nothing, or where
        snapshots are wanted of what goes wrong.
        """
        first = next(iter(self.model.parameters()), None)
        return self.snapshots.careful or (first is not None and first.device.type == "cpu")

    def pass_begins(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A pass of the model begins."""
        self._returned_loss = False
        self.health.saw_batch((args, kwargs))
        if self.snapshots.holding or self.careful:
            self.snapshots.begins(args, kwargs)

    def pass_ends(self, output: Any) -> None:
        """A pass of the model ends; what it returns may be its loss."""
        self._returned_loss = self.health.saw_output(output)

    def backward_begins(self, begun_at: Tensor) -> None:
        """A backward pass begins: at the loss, where the model returned none."""
        if not self._returned_loss:
            # with a GradScaler a backward pass begins at the loss times the scale
            scaled = self._scaled is not None and self._scaled[0]() is begun_at
            self.health.saw_loss(self._scaled[1] if scaled and self._scaled else begun_at)
            self._returned_loss = True

    def scaled(self, scaler: GradScaler, loss: Tensor, scaled: Tensor) -> None:
        """A GradScaler has scaled a loss."""
        self._scaler = weakref.ref(scaler)
        # weak, since a scaled loss holds the whole graph of its step
        self._scaled = (weakref.ref(scaled), loss.detach())

    def clips(self, grads: Sequence[Tensor], norm: Tensor) -> None:
        """A gradient norm was computed, of this model's gradients or others'."""
        first = next((p for p in self.model.parameters() if p.grad is not None), None)
        if first is not None and any(first.grad is grad for grad in grads):
            self.health.saw_norm(norm, clipped=True)

    def scaler_skips(self, scale: float) -> None:
        """A GradScaler leaves out a step."""
        self._scale = scale
        if self.careful and self._skipped_at is None and self.health.skipped >= _SKIPS:
            self._skipped_at = self._found_place()

    def scaler_steps(self, scale: float) -> None:
        """A GradScaler lets a step be made."""
        self._scale = scale

    def update_begins(
        self, step: int, optimizer: Optimizer | None, alarms: Sequence[Any], *, measured: bool
    ) -> None:
        """An optimizer is about to step, or None has."""
        with torch.no_grad():
            known = self.health.norm is not None
            norm = None if known else gradient_norm(self.model.parameters())
        if norm is not None:
            self.health.saw_norm(norm, clipped=False)
        found = self.health.norm
        looks = optimizer is not None and self.careful and self.place is None
        # to read the norm is to wait for the device, which `careful` allows; after the update the
        # weights would be spoiled and the snapshot that of another step
        if looks and found is not None and not bool(found.isfinite()):
            self.place = self._found_place()
            self.snapshots.ask(f"not finite: {self.place}")
        if measured and self._moved is None:
            self._moved = Moved(self.model)
        if self.snapshots.wanted is not None:
            scaler = None if self._scaler is None else self._scaler()
            about: dict[str, Any] = {"loss": self.health.loss_text()}
            about |= {"scaler": {} if scaler is None else scaler.state_dict()}
            about |= {"causes": [str(one) for one in (*alarms, *self.found)]}
            about |= {"found": self._found(alarms)}
            self.snapshots.take(step, optimizer, about)

    def update_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        rates = [group.get("lr") for group in optimizer.param_groups]
        self._rate = max((float(x) for x in rates if x is not None), default=math.nan)
        if self._moved is not None:
            self.weights, self._moved = self._moved.figures(), None

    def step_ends(self, step: int, loss: Tensor | float | None, *, skipped: bool) -> None:
        """A step of this number ends."""
        if loss is not None:
            self.health.saw_step_loss(loss)
        self.health.end(step, self._rate, self._scale, skipped=skipped)
        self._moved = None

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """A measurement has been made; returns it with its weights."""
        row["weights"], self.weights = self.weights, {}
        self.measured.append(row)
        return row

    def due(self, steps: int) -> bool:
        """Whether to look, after so many steps."""
        return steps % LOOK == 0 or self.snapshots.careful or self.place is not None

    def look(
        self,
        layers: Sequence[str],
        leaning: Sequence[str],
        unseen: Mapping[str, str],
        measurements: int,
    ) -> tuple[Step | None, list[Finding]]:
        """The last of the steps since the last look, None where there was none, and the causes that
        are found for the first time.

        Args:
            layers: their names, in the order of the measurements.
            leaning: those of which a head alarms now.
            unseen: why others are not measured.
            measurements: of attention, that were made.
        """
        new = self.health.read()
        if not new:
            return None, []
        seen = Seen(
            list(self.health.steps),
            len(new),
            list(self.measured),
            layers,
            type(self.model).__name__,
            leaning,
            [one.since for one in self.found if CAUSES[one.kind].explains_loss],
            unseen,
            {one.kind for one in self.found},
            self.place,
            self._skipped_at,
            self.health.first_loss,
        )
        known = {_key(one) for one in self.found}
        said = _of_attention(leaning, unseen, measurements)
        fresh = [replace(one, attention=said) for one in find(seen) if _key(one) not in known]
        self.found += fresh
        return new[-1], fresh

    def warnings(self) -> list[str]:
        """What is wrong in words, a sentence each."""
        said = sentences_of(self.health.numbers())
        told = any(str(self.place) == one.detail for one in self.found)
        return said if self.place is None or told else [*said, str(self.place)]

    def _found(self, alarms: Sequence[Any]) -> list[dict[str, Any]]:
        """What alarmed and was found so far: kind, layer, and the head where it is one's."""
        known = [
            {"kind": one.kind, "layer": one.layer, "head": one.head}
            for one in (*alarms, *self.found)
        ]
        if self.place is not None:
            known.append({"kind": self.place.cause, "layer": self.place.path, "head": None})
        return known

    def _found_place(self) -> Place:
        """Where a number first was not finite, in the step that is being made."""
        # what lies there is looked at first; a pass is made again only where it shows nothing
        place = place_in_weights(self.model) or place_in_gradients(self.model)
        last = self.snapshots.last_batch
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        # a pass that one process makes alone would wait for the others
        if place is None and last is not None and not several:
            with contextlib.ExitStack() as stack:
                for device, dtype in self.snapshots.autocast.items():
                    stack.enter_context(torch.autocast(device, getattr(torch, dtype)))
                place = place_in_forward(self.model, self.model, tuple(last[0]), last[1])
        return place or Place("loss", "", "", 0.0)


def _key(one: Finding) -> tuple[str, str, int]:
    return one.kind, one.layer, one.since if one.kind == "bad_batch" else 0


def _of_attention(leaning: Sequence[str], unseen: Mapping[str, str], measurements: int) -> str:
    """What is known of rounding in attention where another cause is found."""
    if leaning:
        return f"Attention leans too, in {len(set(leaning))} layers."
    if measurements < WINDOW // 2:
        return (
            f"Whether attention's rounding plays a part is not known: that takes {WINDOW // 2}"
            f" measurements, of which there {'is' if measurements == 1 else 'are'} {measurements}."
        )
    but = f", but {len(unseen)} layers are not measured" if unseen else ""
    return f"Rounding in attention is not seen: no head that is measured leans so far{but}."
