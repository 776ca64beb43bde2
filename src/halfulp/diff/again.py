"""Making one side's operation once more on other operands: A's on what B's was handed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp.diff.setting import Setting
from halfulp.diff.tape import Ambience, Entry, Slot, result_of, tensors_of
from halfulp.interpose import Operation, leaves
from halfulp.interpose.another import expected_by_model, tag
from halfulp.interpose.operation import mapped

_KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)


@contextmanager
def ambient(ambience: Ambience, device: str) -> Iterator[None]:
    """What else decided how an operation was computed."""
    now = Ambience.now(device)
    with ExitStack() as stack:
        if ambience.attention != now.attention:
            kernels = zip(_KERNELS, ambience.attention, strict=True)
            stack.enter_context(sdpa_kernel([kernel for kernel, on in kernels if on]))
        on = ambience.autocast is not None
        if ambience.autocast != now.autocast or on:
            dtype = ambience.autocast or torch.bfloat16
            stack.enter_context(torch.autocast(device, dtype, enabled=on, cache_enabled=False))
        if ambience.matmul != now.matmul:
            torch.set_float32_matmul_precision(ambience.matmul)
            stack.callback(torch.set_float32_matmul_precision, now.matmul)
        yield


class Rerun:
    """One side's operations, ready to be made on other operands.

    Args:
        setting: whose operations they are.
        own_weights: take this side's parameters; else those of the model that runs, in this side's
            dtype, as where both are trained. Buffers are this side's.
    """

    def __init__(self, setting: Setting, own_weights: bool = True) -> None:
        self.setting = setting
        self._tensors = tensors_of(setting.model)
        if not own_weights:
            for name, _ in setting.model.named_parameters(remove_duplicate=False):
                del self._tensors[name]
        self._equal: dict[tuple[str, int], bool] = {}

    def on(self, entry: Entry, operation: Operation, *, own_form: bool = True) -> Any:
        """What this side's `entry` gives on the operands that another side's operation has.

        Args:
            own_form: with this side's arguments that are no tensors; else with the other's, as
                where one of them sees a part of the tokens.
        """
        given = list(leaves((operation.args, operation.kwargs)))
        slots = entry.slots
        fits = own_form and len(slots) == len(given)
        args, kwargs = entry.arguments if fits else (operation.args, dict(operation.kwargs))
        device = given[0].device.type if given else "cpu"

        def filled(x: Any) -> Any:
            return self._filled(x, given[x.index]) if isinstance(x, Slot) else x

        if fits:
            args, kwargs = mapped((args, kwargs), filled)
        function = entry.function if entry.name == operation.name or fits else operation.function
        stand_in = Operation(
            entry.kind, entry.name, entry.path, entry.order, function, args, kwargs
        )
        with ambient(entry.ambience, device):
            return self.setting.compute(stand_in)

    def _filled(self, slot: Slot, x: Tensor) -> Tensor:
        constant = None if slot.constant is None else self._tensors.get(slot.constant)
        if constant is not None and not self._is_running(slot, x):
            return constant
        return x.to(slot.dtype) if slot.dtype.is_floating_point else x

    def _is_running(self, slot: Slot, x: Tensor) -> bool:
        """Whether a weight of this side's stands for an equal one of the model that runs, whose
        gradient is looked at.
        """
        return isinstance(x, nn.Parameter) and self._holds(slot.constant or "", x)

    def same(self, entry: Entry, other: Entry, operation: Operation, theirs: Setting) -> bool:
        """Whether another side's operation is this side's in every respect, its operands aside."""
        if self.setting.swap_of(operation) is not theirs.swap_of(operation):
            return False
        if entry.function is not other.function and entry.function != other.function:
            return False
        if entry.ambience != other.ambience or entry.asks != other.asks:
            return False
        given = list(leaves((operation.args, operation.kwargs)))
        if not len(entry.slots) == len(other.slots) == len(given):
            return False
        return all(
            mine.dtype == theirs.dtype
            and mine.shape == theirs.shape
            and (mine.constant is None) == (theirs.constant is None)
            and (mine.constant is None or self._holds(mine.constant, x))
            for mine, theirs, x in zip(entry.slots, other.slots, given, strict=True)
        )

    def _holds(self, name: str, x: Tensor) -> bool:
        mine = self._tensors[name]
        if mine is x:
            return True
        key = name, id(x)
        if key not in self._equal:
            alike = mine.shape == x.shape and mine.dtype == x.dtype
            self._equal[key] = alike and torch.equal(mine, x)
        return self._equal[key]


class InPlaceOf:
    """Another side's operations in place of these: an arithmetic for `interpose`.

    Args:
        own: the setting that runs.
        other: whose operations are put in.
        answers: the other's entry by place; every other operation is the own setting's.
        own_form: as `Rerun.on`.
    """

    takes_wide = True

    def __init__(
        self, own: Setting, other: Rerun, answers: Mapping[str, Entry], own_form: bool = True
    ) -> None:
        self._own, self._other, self._answers = own, other, answers
        self._own_form = own_form
        self._expected: dict[str, torch.dtype] = {}

    def __call__(self, operation: Operation) -> Any:
        """What the model gets: a wider result stays wide until another operation takes it."""
        entry = self._answers.get(operation.place)
        if entry is None:
            return self._own.compute(narrowed(operation))
        expected = self._dtype(operation)
        found = self._other.on(entry, operation, own_form=self._own_form)
        return mapped(found, lambda x: noted(x, expected))

    def _dtype(self, operation: Operation) -> torch.dtype:
        """Of what the model expects here."""
        if operation.place not in self._expected:
            # only asked for its dtype: what it draws (dropout) must not be missing in the run
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                usual = result_of(self._own.compute(narrowed(operation)))
            assert usual is not None
            self._expected[operation.place] = usual.dtype
        return self._expected[operation.place]


def noted(x: Any, expected: torch.dtype) -> Any:
    """A result in the dtype that the model expects, or wider with a note of it."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == expected:
        return x
    wider = torch.finfo(x.dtype).bits > torch.finfo(expected).bits
    # noted on a view: x itself may be an operand or a parameter, which stands for itself
    return tag(x.view_as(x), expected) if wider else x.to(expected)


def narrowed(operation: Operation) -> Operation:
    """The operation as the model means it, wide operands rounded."""
    return operation.changed(expected_by_model)
