"""How a function of an operation spells the operation's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfulp.operations import Operation
from halfulp.targets.signature import signature_of
from halfulp.targets.target import UnsupportedError

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "input": ("x", "inp", "inputs", "hidden_states", "hidden", "activations"),
    "weight": ("w", "weights", "gamma", "scale"),
    "bias": ("b", "beta"),
    "eps": ("epsilon", "variance_epsilon", "norm_eps"),
    "dim": ("axis",),
    "gate": ("g", "x_gate"),
    "up": ("u", "x_up"),
    "target": ("targets", "label", "labels", "y"),
    "logits": ("router_logits", "gating_output"),
    "k": ("top_k", "topk"),
    "renormalize": ("norm_topk_prob", "normalize"),
    "positions": ("position_ids", "pos"),
    "base": ("theta", "rope_theta"),
    "label_smoothing": ("smoothing",),
    "lse_square_scale": ("z_loss", "z_loss_weight"),
    "param": ("p", "params"),
    "grad": ("g", "gradient"),
    "exp_avg": ("m", "momentum"),
    "exp_avg_sq": ("v", "variance"),
    "lr": ("learning_rate",),
    "weight_decay": ("wd",),
}
"""What other people call an operation's arguments."""


@dataclass(frozen=True)
class OperationSignature:
    """Which of an operation's arguments a function takes, and how."""

    operation: Operation
    names: Mapping[str, str] | None  # ours: the function's, or None where it takes any
    by_name: bool  # else in the operation's order

    @classmethod
    def of(
        cls, operation: Operation, function: Callable[..., Any], name: str
    ) -> OperationSignature:
        """Read a function's signature.

        One whose names are all known takes its arguments by name, in any order, and needs no
        argument that only repeats what the operands say, a `normalized_shape` or `dim`. Any other
        takes them in the operation's order. Raises ValueError, with the line that maps it, for one
        that fits neither way.
        """
        try:
            parameters = signature_of(function).parameters
        except (TypeError, ValueError):  # of C
            return cls(operation, None, by_name=False)
        ours = (*_placed(operation), *operation.options)
        known = {
            our: theirs
            for theirs, p in parameters.items()
            for our in ours
            if (theirs == our or (theirs in SPELLINGS.get(our, ()) and our not in parameters))
            and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        wanted = [
            theirs
            for theirs, p in parameters.items()
            if p.default is p.empty and p.kind not in free
        ]
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            known = {option: option for option in operation.options} | known
        if set(wanted) <= set(known.values()) and all(x.name in known for x in operation.operands):
            return cls(operation, known, by_name=True)
        names = {option: known[option] for option in operation.options if option in known}
        meant = {theirs: our for our, theirs in known.items()}
        if not _fits(operation, signature_of(function), meant):
            line = _line(operation, name, meant, wanted)
            raise ValueError(
                f"target={name!r}: takes ({', '.join(map(str, parameters.values()))}); accepted is"
                f" {operation.signature}, so map it: {line}"
            )
        return cls(operation, names, by_name=False)

    def spelled(
        self, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the function is called with.

        Options that it does not take are left out where they have the operation's own value. Raises
        UnsupportedError for any other.
        """
        keywords: dict[str, Any] = {}
        given = dict(options)
        if self.by_name:
            given |= dict(zip(_placed(self.operation), args, strict=False))
            args = ()
        for name, value in given.items():
            if self.names is None:
                keywords[name] = value
            elif name in self.names:
                keywords[self.names[name]] = value
            elif name in self.operation.options and value != self.operation.options[name]:
                raise UnsupportedError(f"does not take {name}={value!r}")
        return args, keywords


def _placed(operation: Operation) -> list[str]:
    """The arguments that the operation is called with by position."""
    inside = operation.signature.partition("(")[2].rpartition(")")[0].partition("*")[0]
    return [p.strip() for p in inside.split(",") if p.strip()]


def _fits(operation: Operation, signature: inspect.Signature, meant: Mapping[str, str]) -> bool:
    """Whether a function can be called with as many arguments as the operation's, in its order,
    and no name that is known (`meant`: the function's: ours) stands in another's place.
    """
    placed = [p for p in _placed(operation) if p not in operation.options]
    options = [theirs for theirs, our in meant.items() if our in operation.options]
    try:
        bound = signature.bind_partial(*placed, **dict.fromkeys(options))
    except TypeError:
        return False
    return all(
        meant.get(theirs, our) == our
        for theirs, our in zip(signature.parameters, placed, strict=False)
    ) and all(
        name in bound.arguments or p.default is not p.empty
        for name, p in signature.parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


def _line(operation: Operation, name: str, ours: Mapping[str, str], wanted: list[str]) -> str:
    """A function that calls this one under the operation's names."""
    short = name.rpartition(":")[2].rpartition(".")[2] or "f"
    rest = [p for p in wanted if p not in ours]
    given = ", ".join([*(f"{p}={our}" for p, our in ours.items()), *(f"{p}=..." for p in rest)])
    return f"def {operation.signature}: return {short}({given})"
