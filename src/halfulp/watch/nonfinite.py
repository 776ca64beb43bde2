"""Where in a model a number first stopped being finite.

Gradients tell it of a backward pass: it runs from the loss to the inputs, so what was spoiled first
is the last module, in the order of the forward pass, whose gradients are not finite. Of a forward
pass another one tells it, on the same batch, in which every module says what it was given and gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfulp.interpose import ITSELF, leaves, module_names
from halfulp.watch.passes import undisturbed


@dataclass(frozen=True)
class Place:
    """A module, and what was not finite there."""

    kind: str  # "forward", "backward", "weights", "inputs" or "loss"
    path: str
    dtype: str  # of what was not finite, such as "float16"
    largest: float  # finite |number| that the module was given (forward), 0 where not known

    @property
    def cause(self) -> str:
        """Which of `troubles.CAUSES` it is."""
        return "fp16_overflow" if self.dtype == "float16" else "not_finite"

    def __str__(self) -> str:
        if self.kind == "forward":
            given = f", given numbers of up to {self.largest:.3g}" if self.largest else ""
            return f"{self.path} gave the first numbers that are not finite, in {self.dtype}{given}"
        if self.kind == "backward":
            return f"the backward pass of {self.path} gave the first that are not finite"
        if self.kind == "weights":
            return f"weights of {self.path} are not finite"
        if self.kind == "inputs":
            return f"what {self.path} is given is not finite"
        return "what the model gives is finite: the loss made of it is not, or overflows"


def place_in_gradients(model: nn.Module) -> Place | None:
    """Where the backward pass gave the first gradients that are not finite; None where all are
    finite, or so are none, which is the loss's doing.
    """
    bad, known = [], []
    for path, parameter in _parameters(model):
        grad = parameter.grad
        if grad is None or grad.layout != torch.strided or hasattr(grad, "to_local"):
            continue
        known.append(path)
        if not bool(grad.isfinite().all()):
            bad.append((path, str(grad.dtype).removeprefix("torch.")))
    # a backward pass goes from the last module to the first: the last bad one was the first; if no
    # module follows it, the loss gave it what was bad
    if not bad or bad[-1][0] == known[-1]:
        return None
    return Place("backward", *bad[-1], 0.0)


def place_in_weights(model: nn.Module) -> Place | None:
    """The first module whose weights are not finite."""
    for path, parameter in _parameters(model):
        if not hasattr(parameter, "to_local") and not bool(parameter.isfinite().all()):
            return Place("weights", path, str(parameter.dtype).removeprefix("torch."), 0.0)
    return None


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each with the path of its module, in the model's order."""
    for path, module in module_names(model):
        for parameter in module.parameters(recurse=False):
            yield path, parameter


def place_in_forward(
    model: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Place | None:
    """Where a forward pass on these arguments gives the first numbers that are not finite; None
    where it gives none. Generators and buffers are left as they were.
    """
    found: list[Place] = []
    handles = [
        module.register_forward_hook(_Looks(path, found), with_kwargs=True)
        for path, module in module_names(model)
    ]
    try:
        with undisturbed(model), torch.no_grad():
            call(*args, **kwargs)
    except Exception as error:  # the pass itself may fail by what is not finite
        if not found:
            found.append(Place("forward", f"a pass that ended in {type(error).__name__}", "", 0.0))
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


class _Looks:
    """Notes the first module that gives what is not finite."""

    def __init__(self, path: str, found: list[Place]) -> None:
        self.path, self.found = path, found

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        bad = next((x for x in _floats(output) if not bool(x.isfinite().all())), None)
        if bad is None or self.found:
            return
        given = _floats((args, kwargs))
        dtype = str(bad.dtype).removeprefix("torch.")
        # a mask that is added has −inf by right
        if not all(bool((x.isfinite() | x.isneginf()).all()) for x in given):
            # a module that gives on what it was given is not the first, unless nobody made it
            if self.path == ITSELF:
                self.found.append(Place("inputs", self.path, dtype, 0.0))
            return
        spoiled = any(not bool(p.isfinite().all()) for p in module.parameters(recurse=False))
        sizes = (x[x.isfinite()].abs().max() for x in given if bool(x.isfinite().any()))
        largest = max(map(float, sizes), default=0.0)
        self.found.append(Place("weights" if spoiled else "forward", self.path, dtype, largest))


def _floats(value: Any) -> list[Tensor]:
    """Every tensor of floating point numbers in what a module is given or gives."""
    return [x.detach() for x in leaves(value) if x.is_floating_point()]
