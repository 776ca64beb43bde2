"""A target: a kernel under one signature, what it can be used for, and what one call of
it gave.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from torch import Tensor

from halfulp.targets.form import BHND, Form, recognized
from halfulp.targets.signature import OPTIONAL, SIGNATURE, Signature

BOTH = frozenset({"attn_mask", "enable_gqa"})
ALL = frozenset(OPTIONAL) - {"num_splits"}
NO_CUDA = "needs a CUDA device"


class UnsupportedError(NotImplementedError):
    """A target cannot take these arguments, which is no fault of its arithmetic."""


Opener: TypeAlias = "Callable[[], contextlib.AbstractContextManager[Target]]"


SEEDED = "random numbers"
"""Stands among what a kernel of an operation accepts where its caller says which it draws."""


@dataclass(frozen=True)
class Target:
    """An attention kernel by name, with what it can be used for."""

    name: str  # "sdpa:flash", "flex", "recipe:BF16_HALFULP", "pkg.mod:fn", "path/file.py:fn"
    # (query, key, value, *, is_causal, scale, [attn_mask], [window], ...) -> out or (out, lse)
    call: Callable[..., Any]
    # which of `signature.OPTIONAL` it takes; of another operation the options of which it does not
    # take the operation's own value, each with one that it takes: "reduction='mean'"
    accepts: frozenset[str]
    description: str  # one line for `halfulp ls targets`
    # why it cannot run here (None: it can), e.g. "flash_attn is not installed"
    missing: str | None = None
    # whether dropout leaves the weights that `golden` leaves, its seed drawn from torch's CPU
    # generator as `calls.draw_seed` does; others drop weights that nobody else knows
    same_dropout: bool = False
    forward_only: str | None = None  # why it gives no gradients here (None: it does)
    # the same for a layer in training, whose operands may be float32: out in query's dtype. None:
    # they are cast to bf16 and out is cast back.
    layer: Callable[..., Tensor] | None = field(default=None, repr=False)
    # the function that models call and `halfulp.watch` taps; None: it is tapped without being named
    function: Callable[..., Any] | None = field(default=None, repr=False)
    # how its tensors are given; None: not known, as of a user's function of q, k and v
    form: Form | None = BHND
    by_name: frozenset[str] = frozenset()  # parameters that the form's arguments may be given by
    unseen: str | None = None  # why `halfulp.watch` cannot look at its calls (None: it can)
    operation: str = "attention"  # which it computes: a name or a folder of `halfulp.operations`
    # makes the whole call in another process: (query, key, value, grad_out, options) -> Outcome, or
    # of another operation (calls, forward) -> Outcome
    elsewhere: Callable[..., Outcome] | None = field(default=None, repr=False)
    # `call` as it was named, and what opens it by its name; None: it was given without one
    named: tuple[Callable[..., Any], Opener] | None = field(default=None, repr=False, compare=False)

    @property
    def again(self) -> Opener | None:
        """Opens it by its name, as in a second process; None where its name means no kernel, or
        another than it calls.
        """
        return None if self.named is None or self.named[0] is not self.call else self.named[1]

    def in_form(self, form: Form) -> Target:
        """The same called in another form."""
        return replace(self, form=form, accepts=form.accepts(self.accepts))

    @classmethod
    def of(
        cls, function: Callable[..., Any], name: str | None = None, form: str | None = None
    ) -> Target:
        """The target of a function `f(query, key, value, *, is_causal, scale, ...)` on `[B, H, N,
        D]` tensors, or in another form (`targets.form`); None: what its parameters' names say, or
        an audit finds out.

        Other people's names of the options (`causal`, `sm_scale`, `window_size`: see
        `signature.SPELLINGS`) are understood. What the function does not take is never passed:
        asked for anyway (is_causal=True, a scale other than 1/√D, a mask, GQA), the case is
        unsupported. Raises ValueError for what is no such function, with the line that maps it.
        """
        name = name_of_function(function) if name is None else name
        if isinstance(function, type) or not callable(function):
            kind = type(function).__name__
            raise ValueError(f"target={name!r}: is no function but {kind}; accepted is {SIGNATURE}")
        known = recognized(function) if form is None else Form.parse(form)
        signature = Signature.of(function, name, known or BHND)
        signature.check(name)
        documented = (inspect.getdoc(function) or "").strip().split("\n")[0]
        many = hasattr(function, "_torchdynamo_orig_callable")  # what torch.compile gives

        def call(*tensors: Tensor, named: Mapping[str, Any] | None = None, **options: Any) -> Any:
            first = tensors[0] if tensors else next(iter((named or {}).values()))
            try:
                spelled = signature.spelled(options, first.shape[-1])
            except ValueError as error:
                raise UnsupportedError(str(error)) from None
            with many_graphs() if many else contextlib.nullcontext():
                return function(*tensors, **(named or {}), **spelled)

        return cls(
            name,
            call,
            (known or BHND).accepts(signature.accepts),
            documented or f"the function {name}",
            function=function,
            form=known,
            by_name=signature.by_name,
        )


@dataclass(frozen=True)
class Outcome:
    """What one call on one case gave."""

    # tensors in the target's dtype, gradients missing where not offered: a `Result` of attention,
    # an `OperationResult` of any other operation
    result: Any
    refusal: str | None  # unsupported / raised / wrong shape / wrong dtype: one line, no traceback
    # unsupported: the target declares that it does not take these arguments; refused: it raises
    # what says so
    kind: Literal["ok", "unsupported", "refused", "error"]
    # of a call that went through: "modifies its inputs", "not differentiable", warnings
    notes: tuple[str, ...] = ()

    def without_memory(self) -> Outcome:
        """The same, its tensors without their elements: measured, they are not needed."""
        if self.result is None:
            return self
        return replace(self, result=self.result.map(lambda x: x.new_empty(0)))


def name_of_function(function: Callable[..., Any]) -> str:
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


@contextlib.contextmanager
def many_graphs() -> Iterator[None]:
    """An audit calls with more shapes than torch.compile allows one function by default (8), beyond
    which it would run the uncompiled function and say so only in a log.
    """
    import torch._dynamo.config

    with torch._dynamo.config.patch(recompile_limit=4096, accumulated_recompile_limit=4096):
        yield
