"""One call of an attention kernel that we did not write, on one case.

The kernel may refuse the arguments, raise, return the wrong shape, write into its inputs, leave
torch's switches turned or warn; whatever it does, the caller gets an `Outcome`, and the caller's
tensors, random numbers and torch settings are as before.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfulp.calls import Result, gradients_of
from halfulp.targets.form import BHND
from halfulp.targets.forming import BITS, FormedCall, Passed, formed, joined
from halfulp.targets.manner import FILLED, PLAIN, filled, parted
from halfulp.targets.signature import OPTIONAL
from halfulp.targets.state import as_before
from halfulp.targets.target import Outcome, Target, UnsupportedError

MODIFIES = "modifies its inputs"
LEAVES = "leaves changed (put back)"
FORWARD_ONLY = "not differentiable"
UNWRITTEN = "leaves elements of out as they were given, NaN"
CONSTANT_LSE = "lse is not differentiable"


def run_target(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float | None,
    grad_lse: Tensor | None = None,
    manner: str = PLAIN,
    **options: Any,
) -> Outcome:
    """Call a target on `query [B, H, N, D]` …, and with `grad_out [B, H, N, D_v]` take its
    gradients by autograd, with `grad_lse [B, H, N]` those of a loss that lse is in, too; one whose
    lse has none does not take it. `options` are those of `signature.OPTIONAL` that are asked for;
    `manner` says what memory the tensors lie in and how often it is called (`targets.manner`), the
    target's own form which tensors it is given (`targets.form`).

    NaN and infinities are results. NotImplementedError, ValueError and AssertionError of the
    forward pass are the target's way to refuse arguments (kind "refused"); what it declares not to
    take is "unsupported"; any other exception, wrong shape, dtype or device is kind "error". No
    exception escapes but KeyboardInterrupt. Runs outside anybody's autocast, without gradients
    where `grad_out` is None; what the call leaves changed in the process is put back and noted.
    """
    if target.missing is not None:
        return Outcome(None, target.missing, "unsupported")
    options = {name: x for name, x in options.items() if isinstance(x, Tensor) or x}
    for name in options:
        assert name in OPTIONAL, name
        if name not in target.accepts:
            return Outcome(None, f"does not take {name}", "unsupported")
    form = target.form or BHND
    if target.elsewhere is not None:
        asked = {"is_causal": is_causal, "scale": scale, "manner": manner, "form": str(form)}
        asked |= options | ({} if grad_lse is None else {"grad_lse": grad_lse})
        return target.elsewhere(query, key, value, grad_out, asked)
    if "G" in form.dims("key"):
        options.pop("enable_gqa", None)
    offset = key.shape[2] - query.shape[2] if is_causal and form.ends else 0
    if form.ends and options.pop("causal_offset", 0) != offset:
        return Outcome(None, "ends a causal mask's diagonal at the last key", "unsupported")
    grad_out = None if form.forward_only else grad_out
    given = {name: x for name, x in options.items() if isinstance(x, Tensor)}
    operands = {"query": query, "key": key, "value": value}
    wide = torch.float32 if form.autocast else query.dtype
    reach = {} if grad_out is None else {"grad_out": grad_out, "grad_lse": grad_lse}
    lent = _lent(operands, given, reach, wide)
    passed: list[Passed] = []
    autocast = torch.autocast(query.device.type, query.dtype, form.autocast)
    with (
        as_before(query.device, grad=grad_out is not None) as left,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        asked = {"is_causal": is_causal, "scale": scale} | options
        with filled() if manner.endswith(FILLED) else contextlib.nullcontext():
            inside = autocast if form.autocast else contextlib.nullcontext()
            outcome = _call(target, lent, asked, parted(manner), passed, inside)
    notes = outcome.notes + warned_lines([] if manner.endswith(FILLED) else warned)
    passed += [(name, lent[name], x) for name, x in given.items()]
    touched = dict.fromkeys(name for name, x, before in passed if not same_bits(x, before))
    if touched:
        notes = (f"{MODIFIES}: {', '.join(touched)}", *notes)
    if options.get("dropout_p"):
        left = [what for what in left if "random numbers" not in what]  # drawn, as was asked
    if left:
        notes += (f"{LEAVES}: {', '.join(left)}",)
    result = outcome.result
    if form.autocast and result is not None:
        result = _narrow(result, query.dtype)
    return replace(outcome, result=result, notes=tuple(dict.fromkeys(notes)))


def _lent(
    operands: dict[str, Tensor],
    given: dict[str, Tensor],
    reach: dict[str, Tensor | None],
    wide: torch.dtype,
) -> dict[str, Tensor]:
    """Copies of what a call is given, that require gradients where any `reach` its results."""
    lent = {name: x.detach().clone() for name, x in given.items()}
    # no copies: dO is laid out anew for every call, in memory of its own
    lent |= {name: x.detach() for name, x in reach.items() if x is not None}
    for name, x in operands.items():
        lent[name] = x.detach().to(wide, copy=True).requires_grad_(bool(reach))
    return lent


def _narrow(result: Result, dtype: torch.dtype) -> Result:
    tensors = {name: x.to(dtype) for name, x in result.given().items() if name != "lse"}
    return replace(result, **tensors)


def attempted(
    target: Target, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Any, Outcome | None]:
    """What the kernel returns; or None, and how it refused or failed."""
    try:
        return target.call(*args, **options), None
    except UnsupportedError as error:
        return None, Outcome(None, str(error), "unsupported")
    except (NotImplementedError, ValueError, AssertionError) as error:
        return None, Outcome(None, f"refuses: {one_line(error)}", "refused")
    # the user's Ctrl-C, which is to end the audit
    except KeyboardInterrupt:
        raise
    # SystemExit too: a kernel must not end the audit
    except BaseException as error:
        return None, Outcome(None, f"raises {one_line(error)}", "error")


def _call(
    target: Target,
    lent: dict[str, Tensor],
    options: dict[str, Any],
    manner: tuple[str, str, str],
    passed: list[Passed],
    inside: contextlib.AbstractContextManager[Any],
) -> Outcome:
    """Forward and backward; adds to `passed` what the kernel is given: copies, so that autograd
    lets them be written to.
    """
    memory, grad_memory, often = manner
    leaves = [lent[name] for name in ("query", "key", "value")]
    options = options | {name: lent[name] for name in options if name in lent}
    form, causal = target.form or BHND, bool(options["is_causal"])
    try:
        calls = formed(form, leaves, memory, target.by_name, causal)
    except UnsupportedError as error:
        return Outcome(None, str(error), "unsupported")
    outs, kept = [], []
    logs: list[Tensor | None] = []
    notes: tuple[str, ...] = ()
    for call in calls:
        passed += call.lent
        steps = [call] if call.before is None else [call.before, call]
        with inside:
            for step in steps * (2 if often == "twice" else 1):
                step.clear()
                given = options if not step.named else options | {"named": step.named}
                returned, failed = attempted(target, step.tensors, given)
                if failed is not None:
                    return failed
        try:
            out, lse, notes = _unpacked(call.returned(returned), leaves[0], call)
            if isinstance(out, str):
                return Outcome(None, out, "error")
            if call.unwritten:
                notes += (UNWRITTEN,)
            outs.append(out)
            logs.append(lse)
            # a copy, since the kernel may write its next result into the same memory
            kept.append(call.read(out.detach().clone()))
        except Exception as error:  # a class of tensors that cannot be looked at
            found = f"returns what cannot be read, {type(returned).__name__}: {one_line(error)}"
            return Outcome(None, found, "error")
    result = Result(joined(kept, leaves[0]))
    given_logs = [lse for lse in logs if lse is not None]
    if len(given_logs) == len(logs):
        result = replace(result, lse=joined([x.detach().clone() for x in given_logs], leaves[0]))
    if "grad_out" not in lent:
        return Outcome(result, None, "ok", notes)
    if not all(out.requires_grad for out in outs):
        return Outcome(result, None, "ok", (FORWARD_ONLY, *notes))
    grads = _grads(calls, lent["grad_out"].to(outs[0].dtype), grad_memory, leaves[0])
    # compared afterwards: autograd may hand the same gradient to others
    passed += [("grad_out", g, g.clone()) for g in grads]
    if "grad_lse" in lent:
        if result.lse is None or not all(lse.requires_grad for lse in given_logs):
            return Outcome(None, CONSTANT_LSE, "unsupported")
        outs += given_logs
        grads += _parted(lent["grad_lse"].to(result.lse.dtype), len(calls), leaves[0])
    passes = 1 + (often == "backward-twice")
    return _differentiated(result, (outs, grads), leaves, notes, passes)


def _grads(calls: list[FormedCall], grad_out: Tensor, memory: str, like: Tensor) -> list[Tensor]:
    """What reaches the result of each call."""
    if len(calls) == 1:
        return [calls[0].grad(grad_out, memory)]
    parts = _parted(grad_out, len(calls), like)
    return [call.grad(part, memory) for call, part in zip(calls, parts, strict=True)]


def _parted(x: Tensor, calls: int, like: Tensor) -> list[Tensor]:
    """`[B, H, ...]` in the parts of so many calls: `joined`'s inverse."""
    if calls == 1:
        return [x]
    if calls > like.shape[0]:
        return [part[None, None] for row in x for part in row]
    return [row[None] for row in x]


def _differentiated(
    kept: Result,
    results: tuple[list[Tensor], list[Tensor]],
    leaves: list[Tensor],
    notes: tuple[str, ...],
    passes: int,
) -> Outcome:
    outs, grad_outs = results
    try:
        # what a kernel keeps must last for a second pass over the same graph
        # kept for all passes but the last, which frees the graph as training does
        for left in reversed(range(passes)):
            grads = gradients_of(outs, grad_outs, leaves, keep_graph=left > 0)
    except NotImplementedError as error:
        refused = f"backward pass refuses: {one_line(error)}"
        return Outcome(kept, None, "ok", (FORWARD_ONLY, refused, *notes))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Outcome(None, f"backward pass raises {one_line(error)}", "error", notes)
    names = ("query", "key", "value")
    for name, g in zip(names, grads, strict=True):
        if g is not None and g.layout != torch.strided:
            return Outcome(None, f"gives a gradient of {name} that is {_layout(g)}", "error", notes)
    notes += tuple(
        f"no gradient for {name}" for name, g in zip(names, grads, strict=True) if g is None
    )
    kept_grads: dict[str, Any] = {
        f"grad_{name}": None if g is None else g.clone()
        for name, g in zip(names, grads, strict=True)
    }
    return Outcome(replace(kept, **kept_grads), None, "ok", notes)


def _unpacked(
    returned: Any, query: Tensor, call: FormedCall
) -> tuple[Tensor | str, Tensor | None, tuple[str, ...]]:
    """(out or what is wrong with it, lse `[B, H, N]`, notes) of whatever the target returned."""
    rest: list[Any] = []
    if isinstance(returned, tuple | list):
        if not returned:
            return "returns an empty tuple: expected out or (out, lse)", None, ()
        returned, *rest = returned
    if not isinstance(returned, Tensor):
        return f"returns {type(returned).__name__}: expected a tensor or (out, lse)", None, ()
    if returned.is_nested or returned.layout != torch.strided:
        return f"returns out that is {_layout(returned)}: expected a dense tensor", None, ()
    if tuple(returned.shape) != call.shape:
        return f"returns out of shape {tuple(returned.shape)}: expected {call.shape}", None, ()
    if returned.dtype != query.dtype and not call.form.autocast:
        return f"returns out of dtype {_dtype(returned)}: expected {_dtype(query)}", None, ()
    if returned.device != query.device:
        return f"returns out on {returned.device}: expected {query.device}", None, ()
    if not rest or rest[0] is None:
        return returned, None, ()
    lse = call.read_lse(rest[0])
    notes = (
        ()
        if lse is not None
        else (f"a second result that is no lse of shape {call.shape[:-1]} was ignored",)
    )
    return returned, lse, notes


def _layout(x: Tensor) -> str:
    return "nested" if x.is_nested else str(x.layout).removeprefix("torch.")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit equality, so that NaN equals itself and −0 differs from 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = BITS.get(a.element_size(), torch.uint8)
    x, y = (t.detach().contiguous().view(whole) for t in (a, b))
    # numpy compares integers in a sixth of the time
    return np.array_equal(x.numpy(), y.numpy()) if x.is_cpu else torch.equal(x, y)


def warned_lines(caught: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """The kernel's own warnings; those about deprecations concern its author's code, not its
    numbers.
    """
    silent = (
        DeprecationWarning,
        PendingDeprecationWarning,
        FutureWarning,
        ImportWarning,
        ResourceWarning,
    )
    return tuple(
        f"warns: {short(str(w.message))}" for w in caught if not issubclass(w.category, silent)
    )


def one_line(error: BaseException) -> str:
    """An exception as "Type: first line of its message"; the message may itself raise."""
    try:
        text = str(error).strip()
    except BaseException:
        text = "(a message that cannot be read)"
    return f"{type(error).__name__}: {short(text)}" if text else type(error).__name__


def short(text: str, most: int = 200) -> str:
    """The first line of anybody's text, with nothing in it that a terminal would obey."""
    line = " ".join(text.strip().split("\n")[0].split())
    line = "".join(c if c.isprintable() else "�" for c in line)
    return line if len(line) <= most else line[: most - 1] + "…"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def device_named(device: str | torch.device) -> str:
    """Return the device's name; raise ValueError for one that torch does not have here."""
    try:
        torch.zeros(1, device=device).item()  # meta's tensors hold no numbers
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        said = " ".join(str(error).split()).partition(":")[0].rstrip(".")
        reason = said if len(said) < 80 else "torch knows no such device"
        raise ValueError(
            f"device={str(device)!r}: {reason}; accepted is one that torch has here, such as cpu"
        ) from error
    return str(device)
