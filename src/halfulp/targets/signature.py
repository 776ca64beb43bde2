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
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from halfulp.targets.form import Form

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
    "num_splits": ("num_splits", "n_splits", "num_kv_splits", "kv_splits", "split_k"),
}
"""Our name of an option: what kernels call it, with the same meaning."""

OPTIONAL = tuple(name for name in SPELLINGS if name not in ("is_causal", "scale"))
"""Options that a kernel may lack."""


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """What a function takes, and a module's forward pass: calling a module takes anything.

    Raises:
        ValueError, TypeError: Python cannot see it, as of C.
    """
    return inspect.signature(function.forward if isinstance(function, Module) else function)


@dataclass(frozen=True)
class Signature:
    """Which options a function takes, and under which names."""

    names: Mapping[str, str]  # ours: the function's
    others: tuple[str, ...] = ()  # parameters of its own, left at their defaults
    wanted: tuple[str, ...] = ()  # of those, what has no default
    by_name: frozenset[str] = frozenset()  # the parameters that can be given by name

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, form: Form) -> Signature:
        """Read a function's signature, beside what its form says.

        A function of any keywords (**kwargs), or of none that Python can see, takes `is_causal`,
        `scale`, `attn_mask` and `enable_gqa` under these names unless it spells them otherwise;
        other options, which **kwargs may swallow, where it spells them.

        Raises:
            ValueError: it takes fewer tensors than its form has.
        """
        try:
            parameters = list(signature_of(function).parameters.values())
        # C says nothing of its parameters: it is taken to have those of PyTorch's own function
        except (TypeError, ValueError):  # of C
            known = {option: option for option in ("is_causal", "scale", *OPTIONAL[:2])}
            return cls(known | form.options)
        placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        count = len(form.tensors)
        few = len(placed) < count and not any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if few or any(isinstance(p.default, float | int | str) for p in placed[:count]):
            shown = ", ".join(str(p) for p in parameters)
            raise ValueError(
                f"target={name!r}: takes ({shown}); accepted is {SIGNATURE}, or op=, --op with the"
                " name of another operation"
            )
        rest = [p for p in parameters if p.kind is p.KEYWORD_ONLY or p in placed[count:]]
        rest = [p for p in rest if p.name not in form.given]
        found = {
            ours: p.name
            for p in rest
            for ours, theirs in SPELLINGS.items()
            if p.name in theirs
            and p.kind is not p.POSITIONAL_ONLY
            # a number of splits is never asked for but where two are compared
            and (ours != "num_splits" or p.default is not p.empty)
        }
        found |= form.options
        others = [p for p in rest if p.name not in found.values()]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            found = {option: option for option in ("is_causal", "scale", *OPTIONAL[:2])} | found
        wanted = tuple(p.name for p in others if p.default is p.empty)
        by_name = frozenset(p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY)
        return cls(found, tuple(p.name for p in others), wanted, by_name)

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
                # a kernel without the argument divides by √D itself
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
        f" {SIGNATURE}, so map it: {line}; or say what it means in the form that it is called in,"
        f" form='{_form_line(signature)}'"
    )


def _form_line(signature: Signature) -> str:
    """A form in which every argument that is wanted has a place for its meaning."""
    given = ", ".join(f"{argument}=..." for argument in signature.wanted)
    return f"q[B,H,N,D], k[B,H,N,D], v[B,H,N,D], {given}"
