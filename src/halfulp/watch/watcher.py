"""`halfulp.watch`: steps counted, one in a while measured, alarms raised, and everything written
down.

Between two measured steps there are hooks on the model and on optimizers, which count and keep a
few numbers: loss, gradient norm, a mark of the batch. In a measured step `foreign` taps the first
pass, and each call's figures are computed while the backward pass goes by.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfulp.runs.writers import Writer
from halfulp.watch.calls import call_figures, entries_of
from halfulp.watch.course import Course
from halfulp.watch.foreign import UNANSWERED, Foreign, Taps
from halfulp.watch.functions import ACCEPTED, functions_named
from halfulp.watch.hearing import hear, stop_hearing
from halfulp.watch.hooks import Tells, of_optimizers
from halfulp.watch.measures import Figures
from halfulp.watch.notebook import Notebook
from halfulp.watch.running import WINDOW, Running, errors_of_delta
from halfulp.watch.snapshots import MOST_HEADS, Snapshots
from halfulp.watch.troubles import Finding
from halfulp.watch.watchable import captured, check_model, give_back, take_model
from halfulp.watch.watching import (
    MOST_ALARMS,
    MOST_LINES,
    HeadAlarm,
    WatchReport,
    alarmed_heads,
    by_reason,
    report_of,
)
from halfulp.watch.weights import sigmas

LOG = logging.getLogger("halfulp.watch")
EVERY = 200
EARLY = 10
"""Steps between two measurements where nobody says: `EARLY` for the first ten, so that a run of a
hundred steps can be spoken of, `EVERY` from there on.
"""
_PASSES_WITHOUT_STEP = 1000
# measurements that may come to nothing, where a pass is made without a backward pass, before it is
# said
_PATIENCE = 3


class Watcher:
    """Watches a model; `halfulp.watch` makes it and documents it. Close it, or use it in `with`."""

    def __init__(
        self,
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
    ) -> None:
        for name, number, least in (
            ("every", every, 1),
            ("start", start, 0),
            ("snapshots", snapshots, 0),
        ):
            if number is not None and not (isinstance(number, int) and number >= least):
                raise ValueError(f"{name}={number!r}: accepted is an integer of at least {least}")
        if on_alarm is not None and not callable(on_alarm):
            raise ValueError(f"on_alarm={on_alarm!r}: accepted is a function of an alarm")
        for writer in writers:
            if not hasattr(writer, "row") or not hasattr(writer, "close"):
                raise ValueError(f"writers={writer!r}: accepted has row(line) and close()")
        if snapshots and folder is None:
            raise ValueError(f"snapshots={snapshots}: accepted with a folder to write them to")
        check_model(model, eager)
        self.model, self.on_alarm, self.eager = model, on_alarm, eager
        self.every, self._early = every or EVERY, every is None
        self.functions = functions_named(functions)
        self.steps = self._start = start  # that have ended
        self.measurements = 0
        self.alarms: list[HeadAlarm | Finding] = []  # every one that was new
        self._now: tuple[HeadAlarm, ...] = ()  # of the last measurement
        self._layers: list[str] = []
        self._running: dict[str, Running] = {}  # "layer/part"
        self._rows: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._unseen: dict[str, str] = {}  # why, by layer
        self._suspects: dict[str, str] = {}  # modules that look like attention, and why
        self._thread = 0  # the one that trains
        self._found: dict[str, Figures] = {}  # of the measurement that is being made
        self._taps: Taps | None = None
        self._stance: Any = None
        self._due, self._passes = True, 0
        # passes of a step; measurements that came to nothing in a row
        self._usual, self._failures = 1, 0
        self._by_hand = self._told = False
        self._ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._said: set[str] = set()
        config = {"model": type(model).__name__, "every": self.every, "eager": eager}
        self._notebook = Notebook(folder, config, writers)
        self._snapshots = Snapshots(model, self._notebook.folder, snapshots)
        self._course = Course(model, self._snapshots)
        take_model(model, self)
        self._handles = [
            model.register_forward_pre_hook(Tells(self.pass_begins), with_kwargs=True),
            model.register_forward_hook(Tells(lambda _, output: self.pass_ends(output))),
            register_optimizer_step_pre_hook(of_optimizers(self._optimizer_steps)),
            register_optimizer_step_post_hook(of_optimizers(self._optimizer_stepped)),
        ]
        # A hook on all optimizers outlives the watcher unless somebody takes it away.
        for handle in self._handles[2:]:
            weakref.finalize(self, handle.remove)
        hear(self)
        self._record("running")

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, loss: Tensor | float | None = None) -> None:
        """Say that a step has ended, for trainings that no optimizer of PyTorch's ends; from then
        on only this counts.

        Args:
            loss: written down with a measurement.
        """
        # by an optimizer, just now
        counted = not self._by_hand and self.steps > self._start and not self._passes
        self._by_hand = True
        if not counted:
            self.update_begins(None)
            self._step_ended(loss)

    def snapshot(self, path: str | Path | None = None) -> None:
        """Have the next step that begins written down whole: see `halfulp.runs.snapshot`.

        Args:
            path: of the folder to make; if None, one below `folder`/snapshots, counted among
                `snapshots`.

        Raises:
            ValueError: there is no path and none can be made, or it is there already.
        """
        self._snapshots.ask_for(None if path is None else Path(path))

    def report(self) -> WatchReport:
        """What is known after the last measurement; print it."""
        self._look()
        return report_of(
            list(self._rows),
            self._layers,
            self._now,
            steps=self.steps,
            measurements=self.measurements,
            unseen=self._unseen | self._suspects,
            warnings=self._course.warnings(),
            loss=self._course.health.loss_text(),
            findings=[one.as_dict() for one in self._course.found],
            looked=len(self._course.health.steps),
        )

    def close(self) -> None:
        """Take every hook away, once; what was measured stays to be reported."""
        if not self._handles:
            return
        self._finish(None)
        self._look()
        self._snapshots.closes()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        stop_hearing(self)
        give_back(self.model)
        self._record("done")
        self._notebook.close()

    def begin_pass(self, *args: Any, **kwargs: Any) -> None:
        """Say that a pass begins of a training that calls parts of the model and not the model
        itself; `end_pass` ends it.

        Args:
            args: what the pass is given, such as its batch.
            kwargs: more of it.
        """
        self._told = False
        self.pass_begins(args, kwargs, leaves=False)
        self._told = True

    def end_pass(self, output: Any = None) -> None:
        """Say that it ends; a loss may be given."""
        self._told = False
        if self._taps is not None:
            self._taps.leave()
        self.pass_ends(output)

    def pass_begins(self, args: Any, kwargs: Any, *, leaves: bool = True) -> None:
        """A forward pass of the model begins."""
        if self._told:
            return
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if not self._thread:
            self._thread = threading.get_ident()
        if self._thread != threading.get_ident():
            self._say("passes of another thread than the first are not looked at")
            return
        self._passes += 1
        self._course.pass_begins(args, kwargs)
        if self._passes == _PASSES_WITHOUT_STEP:
            self._say(
                f"{self._passes} passes and no optimizer step: accepted is one of PyTorch's, or"
                " watcher.step()"
            )
        if self._taps is not None:
            if self._taps.complete:  # of a gradient accumulated over passes the first is measured
                self._finish(None)
            else:
                self._taps.rest()
        elif (
            # where a step's first pass showed nothing another of its passes is tried next time
            (self._due and self._passes == 1 + self._failures % self._usual)
            or (self._snapshots.heads and self._snapshots.wanted and self._passes == 1)
        ) and not captured():
            if self.eager:
                # compiled code calls no function that could be tapped
                self._stance = torch.compiler.set_stance("force_eager")
            self._found = {}
            self._taps = Taps(self.model, self.functions, entries_of, self._take)
            self._taps.open((args, kwargs), leaves=leaves)

    def pass_ends(self, output: Any) -> None:
        """A forward pass of the model ends; what it returns may be its loss."""
        if self._told:
            return
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self._thread == threading.get_ident():
            self._course.pass_ends(output)

    def _here(self) -> bool:
        """Whether the thread that trains tells something of a step that has begun."""
        return self._thread == threading.get_ident() and self._passes > 0

    def heard_backward(self, begun_at: Tensor) -> None:
        """A backward pass begins."""
        if self._here():
            self._course.backward_begins(begun_at)

    def heard_scaled(self, scaler: GradScaler, loss: Tensor, scaled: Tensor) -> None:
        """A GradScaler has scaled a loss."""
        if self._here():
            self._course.scaled(scaler, loss, scaled)

    def heard_norm(self, grads: list[Tensor], norm: Tensor) -> None:
        """A gradient norm was computed to clip by it."""
        if self._here():
            self._course.clips(grads, norm)

    def heard_scaler(self, scaler: GradScaler, optimizer: Optimizer, skipped: bool) -> None:
        """A GradScaler has decided; if it met gradients that are not finite, this is a step of the
        training all the same.
        """
        if self._thread not in (0, threading.get_ident()) or not self._is_ours(optimizer):
            return
        if not skipped:
            self._course.scaler_steps(float(scaler.get_scale()))
        elif not self._by_hand and self._passes:
            self._course.scaler_skips(float(scaler.get_scale()))
            self._step_ended(None, skipped=True)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Whether it trains the model."""
        if optimizer not in self._ours:
            mine = {id(p) for p in self.model.parameters()}
            self._ours[optimizer] = any(
                id(p) in mine for group in optimizer.param_groups for p in group["params"]
            )
        return self._ours[optimizer]

    def _optimizer_steps(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if torch.compiler.is_compiling() or self._thread not in (0, threading.get_ident()):
            return
        # without a pass it has a closure that makes one
        if self._is_ours(optimizer) and not self._by_hand and self._passes:
            self.update_begins(optimizer)

    def update_begins(self, optimizer: Optimizer | None) -> None:
        """Gradients are there and the update is not made yet: said by optimizers, but by those
        that make their passes themselves.
        """
        measured = self._taps is not None and self._due and optimizer is not None
        last = self.alarms[-MOST_ALARMS:]
        self._course.update_begins(self.steps + 1, optimizer, last, measured=measured)

    def _optimizer_stepped(self, optimizer: Optimizer) -> None:
        if torch.compiler.is_compiling() or self._thread not in (0, threading.get_ident()):
            return
        if self._is_ours(optimizer):
            if self._passes and self._course.health.norm is None:
                self.update_begins(None)
            self._course.update_ends(optimizer)
        if self._by_hand or (not self._ours[optimizer] and any(self._ours.values())):
            return
        if self._passes:
            self._step_ended(None)
        elif self._ours[optimizer] and self.steps == self._start:
            self._say(
                f"an optimizer step and no forward pass of {type(self.model).__name__}: accepted is"
                " the module that the training calls, model(batch), watched after torch.compile"
                " and not before"
            )

    def _step_ended(self, loss: Tensor | float | None, *, skipped: bool = False) -> None:
        self._course.step_ends(self.steps + 1, loss, skipped=skipped)
        self._finish(loss)
        self.steps += 1
        self._usual, self._passes = max(self._passes, 1), 0
        self._snapshots.ends()
        early = self._early and self.steps - self._start < EARLY * (WINDOW // 2)
        self._due = self._due or (self.steps + 1) % (EARLY if early else self.every) == 0
        if self._course.due(self.steps):
            self._look()

    def _look(self) -> None:
        """Ask what else is wrong, by the steps since the last look."""
        leaning = [alarm.layer for alarm in self._now]
        last, found = self._course.look(self._layers, leaning, self._unseen, self.measurements)
        if last is not None:
            self._notebook.add_step(last)
        self._raise(found)
        if found:
            self._record("running")

    def _take(self, call: Foreign) -> None:
        """The figures of a call whose gradients are there, in the backward pass."""
        if self._snapshots.wanted and call.layer in self._snapshots.heads:
            self._snapshots.keep(call)
        if not self._due:
            return
        with torch.no_grad(), torch.autocast(call.tensors["query"].device.type, enabled=False):
            figures, parts = call_figures(call)
            if not figures:
                return
            self._found[call.layer] = figures | errors_of_delta(self._running, call.layer, parts)

    def _finish(self, loss: Tensor | float | None) -> None:
        """End a measurement, if one is being made: its row, its alarms."""
        if self._taps is None:
            return
        taps, self._taps = self._taps, None
        taps.close()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        if not self._due:  # it was for a snapshot
            return
        calls = list(taps.calls.values())
        self._unseen = {call.layer: call.unseen for call in calls if call.unseen}
        self._suspects |= taps.suspects
        if not self._found:
            self._notebook.add(self._course.add({"step": self.steps + 1, "measure": {}}))
            self._failed()
            return
        self._layers += [
            call.layer
            for call in calls
            if call.layer in self._found and call.layer not in self._layers
        ]
        heads = {layer: len(figures["max_score"]) for layer, figures in self._found.items()}
        for layer, values in sigmas(
            self.model,
            {c.layer: (heads[c.layer], c.head_dim) for c in calls if c.layer in heads},
        ).items():
            self._found[layer] |= values
        self._name_missed()
        self._due, self._failures = False, 0
        self.measurements += 1
        figured = dict.fromkeys(name for figures in self._found.values() for name in figures)
        measure: dict[str, list[list[float]]] = {
            name: [[] for _ in self._layers] for name in figured
        }
        for layer, figures in self._found.items():
            for name, figure in figures.items():
                measure[name][self._layers.index(layer)] = figure.double().cpu().tolist()
        row: dict[str, Any] = {"step": self.steps + 1, "measure": measure}
        if loss is not None:
            row["loss"] = float(loss.detach() if isinstance(loss, Tensor) else loss)
        row |= self._course.health.numbers()
        self._rows.append(row)
        self._notebook.add(self._course.add(row))
        if self.measurements == 1:
            self._record("running")  # with the layers
        self._alarm()

    def _name_missed(self) -> None:
        """Say once which attention is not measured, and why."""
        missed = {layer: why for layer, why in self._unseen.items() if why != UNANSWERED}
        for said in by_reason(missed | self._suspects):
            self._say(f"not measured: {said}")

    def _failed(self) -> None:
        """A pass has been tapped and nothing measured; another is tried soon, and then at the usual
        interval.
        """
        self._failures += 1
        self._due = self._failures < 2 * _PATIENCE
        where = f"step {self.steps + 1} of {type(self.model).__name__}"
        missed = self._unseen | self._suspects
        if not missed:
            self._say(f"no attention was seen in {where}: accepted are {ACCEPTED}")
        elif self._failures >= _PATIENCE or any(why != UNANSWERED for why in missed.values()):
            said = "; ".join(by_reason(missed))
            self._say(f"no attention is measured in {where}: {said}; accepted are {ACCEPTED}")

    def _alarm(self) -> None:
        found = alarmed_heads(list(self._rows), self._layers)
        before = {(alarm.kind, alarm.layer, alarm.head) for alarm in self._now}
        self._now = found
        new = [alarm for alarm in found if (alarm.kind, alarm.layer, alarm.head) not in before]
        self._raise(new)
        if new:
            heads: dict[str, list[int]] = {}
            for alarm in sorted(new, key=lambda one: -abs(one.t))[:MOST_HEADS]:
                heads.setdefault(alarm.layer, []).append(alarm.head)
            self._snapshots.heads = {layer: sorted(found) for layer, found in heads.items()}

    def _raise(self, new: Sequence[HeadAlarm | Finding]) -> None:
        """Have new alarms known, and a snapshot of the next step made."""
        self.alarms += new
        for alarm in new[:MOST_ALARMS]:
            LOG.warning("%s", alarm)
        if len(new) > MOST_ALARMS:
            LOG.warning(
                "step %d: %d more alarm; see Watcher.report()",
                new[0].step,
                len(new) - MOST_ALARMS,
            )
        if new and new[0].kind != "not_finite":  # of which one was made before its update
            self._snapshots.ask(f"{new[0].kind} {new[0].layer}")
        if self.on_alarm is not None:
            for alarm in new:
                self.on_alarm(alarm)

    def _say(self, text: str) -> None:
        """Warn, once."""
        if text.partition(" in step ")[0] not in self._said:
            self._said.add(text.partition(" in step ")[0])
            LOG.warning("%s", text)

    def _record(self, status: str) -> None:
        """Write down what the run is."""
        known: dict[str, Any] = {"layers": self._layers, "steps": self.steps}
        health = self._course.health
        known |= {"health": health.numbers(), "loss": health.loss_text()}
        known |= {"warnings": self._course.warnings(), "looked": len(health.steps)}
        known |= {"causes": [one.as_dict() for one in self._course.found[-MOST_LINES:]]}
        self._notebook.record(status, known | {"not measured": self._unseen | self._suspects})
