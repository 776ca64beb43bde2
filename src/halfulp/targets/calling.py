"""One call of an attention kernel that we did not write, on one case.

The kernel may refuse the arguments, raise, return the wrong shape, write into its inputs, leave
torch's switches turned or warn; whatever it does, the caller gets an `Outcome`, and the caller's
tensors, random numbers and torch settings are as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfulp.calls import Result
from halfulp.targets.manner import PLAIN, laid_out, parted
from halfulp.targets.signature import OPTIONAL
from halfulp.targets.state import as_before
from halfulp.targets.target import Outcome, Target, UnsupportedError

MODIFIES = "modifies its inputs"
LEAVES = "leaves changed (put back)"
FORWARD_ONLY = "not differentiable"


def run_target(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float | None,
    manner: str = PLAIN,
    **options: Any,
) -> Outcome:
    """Call a target on `query [B, H, N, D]` …, and with `grad_out [B, H, N, D_v]` take its
    gradients by autograd. `options` are those of `signature.OPTIONAL` that are asked for; `manner`
    says what memory the tensors lie in and how often it is called (`targets.manner`).

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
    if target.layout == "BNHD":
        turned = (None if x is None else x.transpose(1, 2) for x in (query, key, value, grad_out))
        asked = {"is_causal": is_causal, "scale": scale, "manner": manner} | options
        outcome = run_target(replace(target, layout="BHND"), *turned, **asked)  # type: ignore[arg-type]
        return replace(outcome, result=_turned(outcome.result))
    if target.elsewhere is not None:
        asked = {"is_causal": is_causal, "scale": scale, "manner": manner} | options
        return target.elsewhere(query, key, value, grad_out, asked)
    given = {"query": query, "key": key, "value": value}
    given |= {name: x for name, x in options.items() if isinstance(x, Tensor)}
    lent = {name: x.detach().clone() for name, x in given.items()}
    if grad_out is not None:
        given["grad_out"], lent["grad_out"] = grad_out, grad_out.detach().clone()
        lent |= {name: lent[name].requires_grad_() for name in ("query", "key", "value")}
    with (
        as_before(query.device, grad=grad_out is not None) as left,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        asked = {"is_causal": is_causal, "scale": scale} | options
        outcome = _call(target, lent, asked, parted(manner))
    notes = outcome.notes + warned_lines(warned)
    touched = [
        name for name, x in given.items() if not same_bits(lent.get(f"{name}/read", lent[name]), x)
    ]
    if touched:
        notes = (f"{MODIFIES}: {', '.join(touched)}", *notes)
    if options.get("dropout_p"):
        left = [what for what in left if "random numbers" not in what]  # drawn, as was asked
    if left:
        notes += (f"{LEAVES}: {', '.join(left)}",)
    return replace(outcome, notes=tuple(dict.fromkeys(notes)))


def _turned(result: Result | None) -> Result | None:
    """Results `[B, N, H, D]` and lse `[B, N, H]` as ours."""
    given = {} if result is None else result.given()
    return replace(result, **{n: x.transpose(1, 2) for n, x in given.items()}) if result else None


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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, Outcome(None, f"raises {one_line(error)}", "error")


def _call(
    target: Target, lent: dict[str, Tensor], options: dict[str, Any], manner: tuple[str, str, str]
) -> Outcome:
    """Forward and backward; adds to `lent` what the kernel reads: a copy, so that autograd lets it
    be written to.
    """
    differentiate = "grad_out" in lent
    leaves = [lent[name] for name in ("query", "key", "value")]
    memory, grad_memory, calls = manner
    read = [laid_out(x, memory) for x in leaves]
    lent |= {f"{name}/read": x for name, x in zip(("query", "key", "value"), read, strict=True)}
    options = options | {name: lent[name] for name in options if name in lent}
    for _ in range(2 if calls == "twice" else 1):
        returned, failed = attempted(target, read, options)
        if failed is not None:
            return failed
    try:
        out, lse, notes = _unpacked(returned, leaves)
        if isinstance(out, str):
            return Outcome(None, out, "error")
        kept = Result(out.detach().clone(), None if lse is None else lse.detach().clone())
    except Exception as error:  # a class of tensors that cannot be looked at
        found = f"returns what cannot be read, {type(returned).__name__}: {one_line(error)}"
        return Outcome(None, found, "error")
    if not differentiate:
        return Outcome(kept, None, "ok", notes)
    if not out.requires_grad:
        return Outcome(kept, None, "ok", (FORWARD_ONLY, *notes))
    grad_out = lent["grad_out/read"] = laid_out(lent["grad_out"], grad_memory)
    return _differentiated(kept, out, leaves, grad_out, notes, 1 + (calls == "backward-twice"))


def _differentiated(
    kept: Result,
    out: Tensor,
    leaves: list[Tensor],
    grad_out: Tensor,
    notes: tuple[str, ...],
    passes: int,
) -> Outcome:
    try:
        for left in reversed(range(passes)):
            grads = torch.autograd.grad(
                out, leaves, grad_out, allow_unused=True, retain_graph=left > 0
            )
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
    kept_grads = {
        f"grad_{name}": None if g is None else g.clone()
        for name, g in zip(names, grads, strict=True)
    }
    return Outcome(replace(kept, **kept_grads), None, "ok", notes)


def _unpacked(
    returned: Any, leaves: list[Tensor]
) -> tuple[Tensor | str, Tensor | None, tuple[str, ...]]:
    """(out or what is wrong with it, lse, notes) of whatever the target returned."""
    query, _, value = leaves
    rest: list[Any] = []
    if isinstance(returned, tuple | list):
        if not returned:
            return "returns an empty tuple: expected out or (out, lse)", None, ()
        returned, *rest = returned
    if not isinstance(returned, Tensor):
        return f"returns {type(returned).__name__}: expected a tensor or (out, lse)", None, ()
    if returned.is_nested or returned.layout != torch.strided:
        return f"returns out that is {_layout(returned)}: expected a dense tensor", None, ()
    expected = (*query.shape[:3], value.shape[3])
    if tuple(returned.shape) != expected:
        return f"returns out of shape {tuple(returned.shape)}: expected {expected}", None, ()
    if returned.dtype != query.dtype:
        return f"returns out of dtype {_dtype(returned)}: expected {_dtype(query)}", None, ()
    if returned.device != query.device:
        return f"returns out on {returned.device}: expected {query.device}", None, ()
    if not rest or rest[0] is None:
        return returned, None, ()
    lse = _lse(rest[0], (query.shape[0], query.shape[1], query.shape[2]))
    notes = (
        ()
        if lse is not None
        else (f"a second result that is no lse of shape {expected[:3]} was ignored",)
    )
    return returned, lse, notes


def _layout(x: Tensor) -> str:
    return "nested" if x.is_nested else str(x.layout).removeprefix("torch.")


def _lse(x: Any, expected: tuple[int, int, int]) -> Tensor | None:
    """`x` as lse `[B, H, N]`: also from `[B, N, H]` and from a trailing 1; None where it is none of
    these.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    b, h, n = expected
    column: Tensor = x.squeeze(-1) if x.ndim == 4 and x.shape[-1] == 1 else x
    if tuple(column.shape) == expected:
        return column
    return column.mT if tuple(column.shape) == (b, n, h) else None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit equality, so that NaN equals itself and −0 differs from 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8)
    )


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


def check_device(device: str) -> None:
    """Raise ValueError for a device that torch does not have here."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        said = " ".join(str(error).split()).partition(":")[0].rstrip(".")
        reason = said if len(said) < 80 else "torch knows no such device"
        raise ValueError(
            f"device={device!r}: {reason}; accepted is one that torch has here, such as cpu"
        ) from error
