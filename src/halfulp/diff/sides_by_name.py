"""Sides of a comparison by name: a function in a user's file, and what is to be different."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from halfulp.complaints import meant
from halfulp.diff.run_sides import with_outputs
from halfulp.diff.setting import Setting
from halfulp.targets import device_named
from halfulp.targets.loading import load_function

OPTIONS = ("dtype", "autocast", "attention", "pieces", "decode", "compiled")
CONTRACT = (
    "make(seed, device), or make(), that returns a model or a halfulp.Setting; (one of them, a list"
    " of batches); or (model, optimizer, batch[, loss]) as of `halfulp train`"
)


def made(name: str, argument: str, count: int, seed: int = 0, device: str = "cpu") -> tuple[
    Setting, list[Any]
]:  # fmt: skip
    """The Setting that "file.py:function" makes, in eval mode, and its batches.

    Args:
        name: also "module:function".
        argument: how a complaint names it.
        count: batches to ask a batch function for.
        seed: given to the function, and to torch before.
        device: given to the function.

    Raises:
        ValueError: the function is not there, fails, or returns something else than `CONTRACT`.
    """
    try:
        function, _ = load_function(name)
    except ValueError as error:
        raise ValueError(str(error).replace("target=", f"{argument}=", 1)) from error
    given = _called(function, seed, device)
    parts = given if isinstance(given, tuple) else (given,)
    setting = parts[0]
    if isinstance(setting, nn.Module):
        forward = with_outputs(parts[3]) if len(parts) > 3 else None
        setting = Setting(setting.eval(), forward=forward)
    if not isinstance(setting, Setting):
        raise ValueError(f"{argument}={name!r} returns {type(setting).__name__}; {CONTRACT}")
    if len(parts) >= 3 and callable(parts[2]):
        return setting, [parts[2](step) for step in range(count)]
    if len(parts) == 2 and isinstance(parts[1], Sequence):
        return setting, list(parts[1])
    if len(parts) == 1:
        return setting, []
    raise ValueError(f"{argument}={name!r} returns a tuple of {len(parts)}; {CONTRACT}")


def optimizer_of(name: str, argument: str, seed: int = 0, device: str = "cpu") -> Any:
    """A function of a model that makes the optimizer, with its scheduler, that "file.py:function"
    makes of its own.

    Raises:
        ValueError: the function makes none.
    """
    function, _ = load_function(name)

    def make(model: nn.Module) -> Any:
        given = _called(function, seed, device)
        if not isinstance(given, tuple) or len(given) < 3:
            raise ValueError(
                f"steps with {argument}={name!r}, which makes no optimizer; accepted is make(seed,"
                " device) that returns (model, optimizer, batch[, loss])"
            )
        optimizer, scheduler = given[1] if isinstance(given[1], tuple) else (given[1], None)
        names = {id(x): name for name, x in given[0].named_parameters()}
        parameters = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [parameters[names[id(x)]] for x in group["params"]]
        return optimizer if scheduler is None else (optimizer, scheduler)

    return make


def _called(function: Callable[..., Any], seed: int, device: str) -> Any:
    device_named(device)
    torch.manual_seed(seed)
    takes = inspect.signature(function).parameters
    return function(seed, torch.device(device)) if len(takes) >= 2 else function()


def changed(setting: Setting, text: str, argument: str) -> Setting:
    """A setting with options changed, spelled "attention=sdpa:math,autocast=bf16".

    Raises:
        ValueError: an option or its value is not known.
    """
    given: dict[str, Any] = {f.name: getattr(setting, f.name) for f in fields(Setting)}
    given |= {"name": text, "dtype": None}
    for part in _parts(text):
        name, equals, value = part.partition("=")
        if name not in OPTIONS or not (equals or name == "compiled"):
            raise ValueError(
                f"{argument}={text!r}: {part!r} is not accepted; accepted are"
                f" {', '.join(f'{x}=' for x in OPTIONS[:-1])} compiled, with commas between"
                f"{meant(name, OPTIONS)}"
            )
        if name in ("pieces", "decode"):
            if not value.isdigit():
                raise ValueError(
                    f"{argument}={text!r}: {part!r}: accepted is a whole number from 1"
                )
            given[name] = int(value)
        else:
            given[name] = True if name == "compiled" else value
    return Setting(**given)


def _parts(text: str) -> list[str]:
    """Split at commas that are outside of brackets, which recipes have."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]
