"""Calls of an operation's kernel that we did not write: several independent draws, one call each.

Whatever the kernel does, the caller gets an `Outcome`, and the caller's tensors, random numbers and
torch settings are as before.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from halfulp.calls import gradients_of
from halfulp.operations import (
    Operation,
    OperationCalls,
    OperationResult,
    Rounding,
    Tensors,
    emulated,
)
from halfulp.targets.calling import (
    FORWARD_ONLY,
    LEAVES,
    MODIFIES,
    attempted,
    one_line,
    same_bits,
    warned_lines,
)
from halfulp.targets.manner import FILLED, PLAIN, filled, laid_out, parted
from halfulp.targets.operation_signature import OperationSignature
from halfulp.targets.signature import signature_of
from halfulp.targets.state import as_before
from halfulp.targets.target import SEEDED, Outcome, Target, UnsupportedError


def operation_target(
    operation: Operation, function: Callable[..., Any], name: str, description: str = ""
) -> Target:
    """The target of a function with the operation's signature.

    An argument annotated `Literal[...]` takes no other values. Raises ValueError for what is no
    such function.
    """
    wrong = f"accepted is {operation.signature}"
    if isinstance(function, type) or not callable(function):
        raise ValueError(f"target={name!r}: is no function but {type(function).__name__}; {wrong}")
    documented = (inspect.getdoc(function) or "").strip().split("\n")[0]
    taken = OperationSignature.of(operation, function, name)
    declared = _declared(function)

    def call(*args: Any, **options: Any) -> Any:
        args, keywords = taken.spelled(args, options)
        for argument, value in keywords.items():
            if argument in declared and value not in declared[argument]:
                raise UnsupportedError(f"does not take {argument}={value!r}")
        return function(*args, **keywords)

    return Target(
        name,
        call,
        _only(taken, declared) | _seeds(function),
        description or documented or f"the function {name}",
        function=function,
        operation=operation.folder,
    )


def recipe_of_operation(operation: Operation, recipe: Rounding, name: str) -> Target:
    """The target that computes the operation's definition in a recipe's arithmetic."""

    def emulate(calls: OperationCalls, forward: bool) -> Outcome:
        calls = replace(calls, grads={}) if forward else calls
        return Outcome(OperationResult(emulated(calls, recipe)), None, "ok")

    text = f"{recipe.name}, emulated"
    return Target(name, emulate, frozenset(), text, operation=operation.folder, elsewhere=emulate)


def _seeds(function: Callable[..., Any]) -> frozenset[str]:
    """{SEEDED} where its caller says which random numbers it draws."""
    try:
        names = signature_of(function).parameters
    except (TypeError, ValueError):  # of C
        return frozenset()
    words = ("seed", "generator", "rng", "philox", "noise", "random")
    return frozenset({SEEDED} if any(w in name for name in names for w in words) else ())


def _declared(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The values of every argument whose annotation lists them."""
    try:
        hints = get_type_hints(function)
    except Exception:  # annotations that nobody can evaluate
        return {}
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def _only(taken: OperationSignature, declared: dict[str, tuple[Any, ...]]) -> frozenset[str]:
    """The first declared value of every option that is not declared to take the operation's own."""
    spelled = {our: (taken.names or {}).get(our, our) for our in taken.operation.options}
    return frozenset(
        f"{our}={declared[theirs][0]!r}"
        for our, theirs in spelled.items()
        if theirs in declared and taken.operation.options[our] not in declared[theirs]
    )


def run_operation(target: Target, calls: OperationCalls, *, forward: bool = False) -> Outcome:
    """Make every call, and unless `forward` its gradients by autograd.

    As `run_target`: what the kernel refuses is "refused" or "unsupported", any other exception,
    wrong shape, dtype or device is "error", and NaN is a result.
    """
    if target.missing is not None:
        return Outcome(None, target.missing, "unsupported")
    if target.elsewhere is not None:
        return target.elsewhere(calls, forward)
    device = next(iter(calls.operands.values())).device
    stacked: dict[str, list[Tensor | None]] = {}
    notes: tuple[str, ...] = ()
    full = calls.manner.endswith(FILLED)
    with (
        as_before(device, grad=not forward) as left,
        warnings.catch_warnings(record=True) as said,
        filled() if full else nullcontext(),
    ):
        # or Python would tell a warning once a place, and the next audit would not hear of it
        warnings.simplefilter("always")
        for number in range(calls.count):
            found = _one(target, calls, number, forward)
            notes += found.notes
            if found.kind != "ok":
                return replace(found, notes=tuple(dict.fromkeys(notes)))
            assert isinstance(found.result, OperationResult)
            for name, x in found.result.tensors.items():
                stacked.setdefault(name, []).append(x)
    notes += warned_lines([] if full else said)
    if left:
        notes += (f"{LEAVES}: {', '.join(left)}",)
    whole: Tensors = {}
    for name, parts in stacked.items():
        given = [x for x in parts if x is not None]
        if len(given) == calls.count:
            if len({x.shape for x in given}) > 1:
                return Outcome(None, f"returns {name} of a shape that changes", "error")
            whole[name] = torch.stack(given)
    return Outcome(OperationResult(whole), None, "ok", tuple(dict.fromkeys(notes)))


def _one(target: Target, calls: OperationCalls, number: int, forward: bool) -> Outcome:
    operation = calls.operation
    memory, grad_memory, often = parted(calls.manner or PLAIN)
    given = {name: x[number] for name, x in calls.operands.items()}
    lent = {name: x.detach().clone() for name, x in given.items()}
    leaves = [] if forward else [lent[x.name].requires_grad_() for x in operation.differentiable]
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    for _ in range(1 + (often == "twice")):
        read = {n: laid_out(x, memory) for n, x in lent.items()}  # autograd lets it be written to
        args, keywords = operation.arguments(read, calls.options)
        returned, failed = attempted(target, args, keywords)
        if failed is not None and failed.kind == "error":
            sizes = ", ".join(f"{x.name} {list(given[x.name].shape)}" for x in operation.operands)
            return replace(failed, refusal=f"{failed.refusal}; it was given {sizes}")
        if failed is not None:
            return failed
    try:
        results = operation.read(returned, given, calls.options)
    except ValueError as error:
        return Outcome(None, f"returns {error}", "error")
    except Exception as error:
        return Outcome(None, f"returns what cannot be read: {one_line(error)}", "error")
    wrong = _wrong(results, calls)
    if wrong is not None:
        return Outcome(None, f"returns {wrong}", "error")
    # copies, since the backward pass may write into what it kept
    kept = {name: x.detach().clone() for name, x in results.items()}
    outcome = Outcome(OperationResult(kept), None, "ok")
    if leaves:
        given_grads = [laid_out(g[number], grad_memory, 0) for g in calls.grads.values()]
        passes = 1 + (often == "backward-twice")
        outcome = _differentiated(outcome, results, leaves, calls, given_grads, passes)
    touched = [name for name, x in given.items() if not same_bits(read[name], x)]
    if touched:
        outcome = replace(outcome, notes=(f"{MODIFIES}: {', '.join(touched)}", *outcome.notes))
    return outcome


def _wrong(results: Tensors, calls: OperationCalls) -> str | None:
    """What is wrong with results, in words that follow "returns"."""
    device = next(iter(calls.operands.values())).device
    for name, (dimensions, dtypes) in calls.expected().items():
        x = results.get(name)
        if x is None:
            continue
        if x.is_nested or x.layout != torch.strided:
            return f"{name} that is no dense tensor"
        if x.ndim != dimensions:
            return f"{name} of shape {tuple(x.shape)}: expected {dimensions} dimensions"
        if x.dtype not in dtypes:
            found, *known = (str(d).removeprefix("torch.") for d in (x.dtype, *dtypes))
            return f"{name} of dtype {found}: expected {' or '.join(known)}"
        if x.device != device:
            return f"{name} on {x.device}: expected {device}"
    return None


def _differentiated(
    outcome: Outcome,
    results: Tensors,
    leaves: list[Tensor],
    calls: OperationCalls,
    given_grads: list[Tensor],
    passes: int,
) -> Outcome:
    assert isinstance(outcome.result, OperationResult)
    pairs = [
        (results[name.removeprefix("grad_")], g)
        for name, g in zip(calls.grads, given_grads, strict=True)
        if results[name.removeprefix("grad_")].requires_grad
    ]
    if not pairs:
        return replace(outcome, notes=(FORWARD_ONLY,))
    for (x, g), name in zip(pairs, calls.grads, strict=False):
        if x.shape != g.shape:
            text = f"returns {name.removeprefix('grad_')} of shape {tuple(x.shape)}: expected"
            return Outcome(None, f"{text} {tuple(g.shape)}", "error")
    try:
        for left in reversed(range(passes)):
            reach = [g.to(x.dtype) for x, g in pairs]
            outs = [x for x, _ in pairs]
            grads = gradients_of(outs, reach, leaves, keep_graph=left > 0)
    except NotImplementedError as error:
        notes = (FORWARD_ONLY, f"backward pass refuses: {one_line(error)}")
        return replace(outcome, notes=notes)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Outcome(None, f"backward pass raises {one_line(error)}", "error")
    tensors = dict(outcome.result.tensors)
    lacking: tuple[str, ...] = ()
    given: list[Tensor | None] = list(grads)
    for operand, found in zip(calls.operation.differentiable, given, strict=True):
        if found is None:
            lacking += (f"no gradient for {operand.name}",)
        else:
            # embeddings may give a sparse one
            tensors[f"grad_{operand.name}"] = found.detach().to_dense().clone()
    return replace(outcome, result=OperationResult(tensors), notes=lacking)
