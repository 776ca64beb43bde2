"""How a kernel spells its arguments.

Kernels are called by our names and take theirs: what a spelling below means is certain, anything
else is left at the kernel's own default or, where it has none, refused with the line that maps it.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

SIGNATURE = "f(query, key, value, *, is_causal, scale)"
SPELLINGS: dict[str, tuple[str, ...]] = {
    "is_causal": ("is_causal", "causal"),
    "scale": ("scale", "sm_scale", "softmax_scale", "scaling"),
    "attn_mask": ("attn_mask",),
    "enable_gqa": ("enable_gqa",),
    "window": ("window", "window_size"),
    "softcap": ("softcap", "logits_soft_cap"),
    "sinks": ("sinks", "s_aux"),
    "dropout_p": ("dropout_p",),
    "causal_offset": ("causal_offset",),
}
"""Our name of an option: what kernels call it, with the same meaning."""

OPTIONAL = tuple(name for name in SPELLINGS if name not in ("is_causal", "scale"))
"""Options that a kernel may lack."""


@dataclass(frozen=True)
class Signature:
    """Which options a function takes, and under which names."""

    names: Mapping[str, str]  # ours: the function's
    others: tuple[str, ...] = ()  # parameters of its own, left at their defaults
    wanted: tuple[str, ...] = ()  # of those, what has no default

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Signature:
        """Read a function's signature.

        A function of any keywords (**kwargs), or of none that Python can see, takes all options
        under our names but those that it spells otherwise.

        Raises:
            ValueError: it is no function, or takes fewer than three tensors.
        """
        if isinstance(function, type) or not callable(function):
            kind = type(function).__name__
            raise ValueError(f"target={name!r}: is no function but {kind}; accepted is {SIGNATURE}")
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # of C
            return cls({option: option for option in ("is_causal", "scale", *OPTIONAL[:2])})
        placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(placed) < 3 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            shown = ", ".join(p.name for p in parameters)
            raise ValueError(f"target={name!r}: takes ({shown}); accepted is {SIGNATURE}")
        rest = [p for p in parameters if p.kind is p.KEYWORD_ONLY or p in placed[3:]]
        found = {
            ours: p.name
            for p in rest
            for ours, theirs in SPELLINGS.items()
            if p.name in theirs and p.kind is not p.POSITIONAL_ONLY
        }
        others = [p for p in rest if p.name not in found.values()]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            found = {option: option for option in ("is_causal", "scale", *OPTIONAL[:2])} | found
        wanted = tuple(p.name for p in others if p.default is p.empty)
        return cls(found, tuple(p.name for p in others), wanted)

    @property
    def accepts(self) -> frozenset[str]:
        """Which of `OPTIONAL` it takes."""
        return frozenset(self.names) & frozenset(OPTIONAL)

    def check(self, name: str) -> None:
        """Raise ValueError, with the line that maps it, where it wants what nobody would give."""
        if self.wanted:
            raise ValueError(_unmapped(name, self))

    def spelled(self, options: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
        """The options under the function's names.

        What it does not take and what was not asked for is left out. Raises ValueError for what was
        asked for and it does not take.
        """
        spelled: dict[str, Any] = {}
        for name, value in options.items():
            if name in self.names:
                spelled[self.names[name]] = value
            elif name == "scale":
                if value is not None and not math.isclose(value, head_dim**-0.5):
                    raise ValueError(f"does not take scale, and this one is not 1/√D{self._near}")
            elif isinstance(value, Tensor) or value:
                raise ValueError(f"does not take {name}{self._near}")
        return spelled

    @property
    def _near(self) -> str:
        """What the function has that may be meant."""
        if not self.others:
            return ""
        known = ", ".join(self.others[:6])
        return f" under a name that is known here; it has {known}: map it with a function of yours"


def _unmapped(name: str, signature: Signature) -> str:
    short = name.rpartition(":")[2].rpartition(".")[2] or "f"
    known = [theirs for spellings in SPELLINGS.values() for theirs in spellings]
    given = []
    for argument in signature.wanted:
        close = difflib.get_close_matches(argument, known, n=1)
        ours = next((o for o, theirs in SPELLINGS.items() if close and close[0] in theirs), None)
        given.append(f"{argument}={'...' if ours is None else ours}")
    for ours in ("is_causal", "scale"):
        if ours in signature.names:
            given.append(f"{signature.names[ours]}={ours}")
    line = (
        f"def attention(query, key, value, *, is_causal, scale): return {short}(query, key, value,"
        f" {', '.join(given)})"
    )
    return (
        f"target={name!r}: wants {', '.join(signature.wanted)}, which nobody gives it; accepted is"
        f" {SIGNATURE}, so map it: {line}"
    )
