"""A target: an attention kernel that we did not write, under one signature, and what one call of it
gave.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from halfulp.algorithms import AttentionResult

OPTIONAL = ("attn_mask", "enable_gqa")
BOTH = frozenset(OPTIONAL)
SIGNATURE = "f(query, key, value, *, is_causal, scale)"
NO_CUDA = "needs a CUDA device"


class UnsupportedError(NotImplementedError):
    """A target cannot take these arguments, which is no fault of its arithmetic."""


@dataclass(frozen=True)
class Target:
    """A real attention implementation under audit."""

    name: str  # "sdpa:flash", "flex", "recipe:BF16_HALFULP", "pkg.mod:fn", "path/file.py:fn"
    # (query, key, value, *, is_causal, scale, [attn_mask], [enable_gqa]) -> out or (out, lse)
    call: Callable[..., Any]
    accepts: frozenset[str]  # which of {"attn_mask", "enable_gqa"} it takes
    description: str  # one line for `halfulp ls targets`
    # why it cannot run here (None: it can), e.g. "flash_attn is not installed"
    missing: str | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Target:
        """The target of a function `f(query, key, value, *, is_causal, scale, ...)` on `[B, H, N,
        D]` tensors.

        Arguments the function does not take are never passed: asked for anyway (is_causal=True, a
        scale other than 1/√D, a mask, GQA), the case is unsupported. Raises ValueError for what is
        no such function.
        """
        name = _name_of(function) if name is None else name
        taken = _keywords(function, name)
        optional = frozenset(OPTIONAL) if taken is None else taken & frozenset(OPTIONAL)
        documented = (inspect.getdoc(function) or "").strip().split("\n")[0]
        return cls(
            name,
            _only_what_it_takes(function, taken),
            optional,
            documented or f"the function {name}",
        )


@dataclass(frozen=True)
class Outcome:
    """What one call on one case gave."""

    # tensors in the target's dtype; gradients None where not offered
    result: AttentionResult | None
    refusal: str | None  # unsupported / raised / wrong shape / wrong dtype: one line, no traceback
    kind: Literal["ok", "unsupported", "error"]
    # of a call that went through: "modifies its inputs", "not differentiable", warnings
    notes: tuple[str, ...] = ()


def _keywords(function: Callable[..., Any], name: str) -> frozenset[str] | None:
    """The keyword arguments a function takes besides its three tensors; None for any (**kwargs, or
    no signature).
    """
    if isinstance(function, type) or not callable(function):
        raise ValueError(
            f"target={name!r}: is no function but {type(function).__name__}; accepted is"
            f" {SIGNATURE}"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        shown = ", ".join(p.name for p in parameters)
        raise ValueError(f"target={name!r}: takes ({shown}); accepted is {SIGNATURE}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p in positional[3:])


def _only_what_it_takes(
    function: Callable[..., Any], taken: frozenset[str] | None
) -> Callable[..., Any]:
    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        **options: Any,
    ) -> Any:
        if taken is None or "is_causal" in taken:
            options["is_causal"] = is_causal
        elif is_causal:
            raise UnsupportedError("does not take is_causal")
        if taken is None or "scale" in taken:
            options["scale"] = scale
        elif scale is not None and not math.isclose(scale, query.shape[-1] ** -0.5):
            raise UnsupportedError("does not take scale, and this one is not 1/√D")
        return function(query, key, value, **options)

    return call


def _name_of(function: Callable[..., Any]) -> str:
    """ "module:function", or "file.py:function" for a function of the script that runs."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(kind, "__module__", None) or "function"
    if module == "__main__":
        with contextlib.suppress(TypeError):
            module = inspect.getfile(kind)
    return f"{module}:{kind.__qualname__}"


def installed(module: str) -> bool:
    """Whether a module can be imported, found out without importing it."""
    package = module.partition(".")[0]  # find_spec imports the parents of what it looks for
    return (
        importlib.util.find_spec(package) is not None
        and importlib.util.find_spec(module) is not None
    )
