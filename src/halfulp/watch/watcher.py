"""`halfulp.watch`: steps counted, one in a while measured, alarms raised, and everything written
down.

Between two measured steps there is one hook on the model and one on optimizers, which count. In a
measured step `foreign` taps the first pass, and each call's figures are computed while the backward
pass goes by.
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
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfulp.watch.calls import Figures, call_figures, entries_of
from halfulp.watch.foreign import UNANSWERED, Foreign, Hook, Taps
from halfulp.watch.functions import ACCEPTED, functions_named
from halfulp.watch.health import Health, sentences_of
from halfulp.watch.notebook import Notebook
from halfulp.watch.running import WINDOW, Running, errors_of_delta
from halfulp.watch.scaler import hear_skips, stop_hearing
from halfulp.watch.watching import (
    MOST_ALARMS,
    HeadAlarm,
    WatchReport,
    alarmed_heads,
    report_of,
)

LOG = logging.getLogger("halfulp.watch")
EVERY = 200
EARLY = 10
"""Steps between two measurements where nobody says: `EARLY` for the first ten, so that a run of a
hundred steps can be spoken of, `EVERY` from there on.
"""
_WATCHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Watcher]] = weakref.WeakKeyDictionary()
_PASSES_WITHOUT_STEP = 1000
# measurements that may come to nothing, where a pass is made without a backward pass, before it is
# said
_PATIENCE = 3


class Watcher:
    """Watches a model; made by `halfulp.watch`, which documents the arguments. Close it, or use it
    in `with`.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int | None = None,
        *,
        folder: str | Path | None = None,
        on_alarm: Callable[[HeadAlarm], None] | None = None,
        functions: Sequence[Callable[..., Any] | str] = (),
        eager: bool = False,
        start: int = 0,
    ) -> None:
        for name, number, least in (("every", every, 1), ("start", start, 0)):
            if number is not None and number < least:
                raise ValueError(f"{name}={number}: accepted is an integer of at least {least}")
        _check_model(model, eager)
        self.model, self.on_alarm, self.eager = model, on_alarm, eager
        self.every, self._early = every or EVERY, every is None
        self.functions = functions_named(functions)
        self.steps = self._start = start  # that have ended
        self.measurements = 0
        self.alarms: list[HeadAlarm] = []  # every one that was new
        self._now: tuple[HeadAlarm, ...] = ()  # of the last measurement
        self._layers: list[str] = []
        self._running: dict[str, Running] = {}  # "layer/part"
        self._rows: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._unseen: dict[str, str] = {}  # why, by layer
        self._suspects: dict[str, str] = {}  # modules that look like attention, and why
        self.health = Health()
        self._thread = 0  # the one that trains
        self._found: dict[str, Figures] = {}  # of the measurement that is being made
        self._taps: Taps | None = None
        self._stance: Any = None
        self._due, self._passes = True, 0
        # passes of a step; measurements that came to nothing in a row
        self._usual, self._failures = 1, 0
        self._by_hand = False
        self._ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._said: set[str] = set()
        config = {"model": type(model).__name__, "every": self.every, "eager": eager}
        self._notebook = Notebook(folder, config)
        _open_on(model, self)
        ended = _StepEnds(weakref.ref(self))
        self._handles = [
            model.register_forward_pre_hook(_Begins(self)),
            model.register_forward_hook(_Ends(self)),
            register_optimizer_step_post_hook(ended),
        ]
        # A hook on all optimizers outlives the watcher unless somebody takes it away.
        weakref.finalize(self, self._handles[-1].remove)
        hear_skips(self, Watcher._step_skipped)
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
            self._step_ended(loss)

    def report(self) -> WatchReport:
        """What is known after the last measurement; print it."""
        return report_of(
            list(self._rows),
            self._layers,
            self._now,
            steps=self.steps,
            measurements=self.measurements,
            unseen=self._unseen | self._suspects,
            warnings=sentences_of(self.health.numbers()),
            loss=self.health.loss_text(),
        )

    def close(self) -> None:
        """Take every hook away; what was measured stays to be reported. Nothing if that has been
        done.
        """
        if not self._handles:
            return
        self._finish(None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        stop_hearing(self)
        _WATCHED.pop(self.model, None)
        self._record("done")

    def _pass_begins(self, _model: nn.Module, _args: Any) -> None:
        """A forward pass of the model begins."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if not self._thread:
            self._thread = threading.get_ident()
        if self._thread != threading.get_ident():
            self._say("passes of another thread than the first are not looked at")
            return
        self._passes += 1
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
        elif self._due and self._passes == 1 + self._failures % self._usual and not _captured():
            if self.eager:
                self._stance = torch.compiler.set_stance("force_eager")
            self._found = {}
            self._taps = Taps(self.model, self.functions, entries_of, self._take)
            self._taps.open()

    def _pass_ends(self, output: Any) -> None:
        """A forward pass of the model ends; what it returns may be its loss."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self._thread == threading.get_ident():
            self.health.saw_output(output, self.steps + 1)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Whether it trains the model."""
        if optimizer not in self._ours:
            mine = {id(p) for p in self.model.parameters()}
            self._ours[optimizer] = any(
                id(p) in mine for group in optimizer.param_groups for p in group["params"]
            )
        return self._ours[optimizer]

    def _step_skipped(self, optimizer: Optimizer) -> None:
        """A GradScaler met gradients that are not finite: a step of the training all the same."""
        if self._is_ours(optimizer) and not self._by_hand and self._passes:
            self.health.skipped += 1
            self._step_ended(None)

    def _optimizer_stepped(self, optimizer: Optimizer) -> None:
        if torch.compiler.is_compiling() or self._thread not in (0, threading.get_ident()):
            return
        if self._is_ours(optimizer):
            self.health.saw_gradients(optimizer, self.steps + (0 if self._by_hand else 1))
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

    def _step_ended(self, loss: Tensor | float | None) -> None:
        if loss is not None:
            self.health.saw_loss(loss, self.steps + 1)
        self._finish(loss)
        self.steps += 1
        self._usual, self._passes = max(self._passes, 1), 0
        early = self._early and self.steps - self._start < EARLY * (WINDOW // 2)
        self._due = self._due or (self.steps + 1) % (EARLY if early else self.every) == 0

    def _take(self, call: Foreign) -> None:
        """The figures of a call whose gradients are there, in the backward pass."""
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
        calls = list(taps.calls.values())
        self._unseen = {call.layer: call.unseen for call in calls if call.unseen}
        self._suspects |= taps.suspects
        if not self._found:
            self._failed(calls)
            return
        self._layers += [
            call.layer
            for call in calls
            if call.layer in self._found and call.layer not in self._layers
        ]
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
        row |= self.health.numbers()
        self._rows.append(row)
        self._notebook.add(row)
        if self.measurements == 1:
            self._record("running")  # with the layers
        self._alarm()

    def _name_missed(self) -> None:
        """Say once which attention is not measured, and why."""
        missed = self._unseen | self._suspects
        for why in dict.fromkeys(why for why in missed.values() if why != UNANSWERED):
            names = ", ".join(layer for layer in missed if missed[layer] == why)
            self._say(f"not measured: {names} ({why})")

    def _failed(self, calls: Sequence[Foreign]) -> None:
        """A pass has been tapped and nothing measured; another is tried soon, and then at the usual
        interval.
        """
        self._failures += 1
        self._due = self._failures < 2 * _PATIENCE
        where = f"step {self.steps + 1} of {type(self.model).__name__}"
        if not calls:
            self._say(f"no attention was seen in {where}: accepted are {ACCEPTED}")
        elif self._failures >= _PATIENCE or any(call.unseen != UNANSWERED for call in calls):
            whys = "; ".join(
                f"{call.layer}: {call.unseen}" for call in {c.unseen: c for c in calls}.values()
            )
            self._say(
                f"no attention call could be measured in {where} ({whys}): accepted are {ACCEPTED}"
            )

    def _alarm(self) -> None:
        found = alarmed_heads(list(self._rows), self._layers)
        before = {(alarm.kind, alarm.layer, alarm.head) for alarm in self._now}
        self._now = found
        new = [alarm for alarm in found if (alarm.kind, alarm.layer, alarm.head) not in before]
        self.alarms += new
        for alarm in new[:MOST_ALARMS]:
            LOG.warning("%s", alarm)
        if len(new) > MOST_ALARMS:
            LOG.warning(
                "step %d: %d more heads alarm; see Watcher.report()",
                new[0].step,
                len(new) - MOST_ALARMS,
            )
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
        known |= {"health": self.health.numbers(), "loss": self.health.loss_text()}
        self._notebook.record(status, known | {"not measured": self._unseen | self._suspects})


class _StepEnds:
    """The hook on every optimizer: it must not keep the watcher, and with it the model, alive."""

    def __init__(self, watcher: weakref.ref[Watcher]) -> None:
        self.watcher = watcher

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        watcher = self.watcher()
        if watcher is not None:
            watcher._optimizer_stepped(optimizer)


class _Begins(Hook):
    """The model's hook before its forward pass."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def __call__(self, model: nn.Module, args: Any) -> None:
        self.watcher._pass_begins(model, args)


class _Ends(Hook):
    """The model's hook after its forward pass."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def __call__(self, _model: nn.Module, _args: Any, output: Any) -> None:
        self.watcher._pass_ends(output)


def _open_on(model: nn.Module, watcher: Watcher) -> None:
    """Take a model for a watcher; raises ValueError if one is watching it, or a part of it, or
    what it is part of: calls are shown to one alone.
    """
    mine = set(model.modules())
    for other, found in list(_WATCHED.items()):
        before = found()
        if before is not None and before._handles and not mine.isdisjoint(other.modules()):
            raise ValueError(
                f"model={type(model).__name__} is being watched already: accepted is one watcher a"
                " model; close the other with watcher.close()"
            )
    _WATCHED[model] = weakref.ref(watcher)


def _check_model(model: nn.Module, eager: bool) -> None:
    """Raise ValueError for a model whose attention cannot be tapped."""
    name = f"model={type(model).__name__}"
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name}: accepted is an nn.Module")
    if isinstance(model, torch.jit.ScriptModule | nn.DataParallel):
        raise ValueError(
            f"{name}: accepted is a model that runs in Python, by itself or in"
            " DistributedDataParallel"
        )
    if model._compiled_call_impl is not None:
        raise ValueError(
            f"{name} is compiled in place: accepted is torch.compile(model), with eager=True"
        )
    if eager:
        return
    for module in model.modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ValueError(
                f"{name} is compiled, and its graph cannot be tapped: accepted is eager=True, which"
                " runs the measured steps without the compiler, or a model that is not compiled"
            )


def _captured() -> bool:
    """Whether a CUDA graph is being captured, in which nothing may be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
