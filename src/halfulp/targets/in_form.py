"""In which form a function of the user's is to be called, where its parameters do not say it: found
out by its first result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from halfulp.calls import Result
from halfulp.operations import ATTENTION
from halfulp.targets.form import BHND, FORMS
from halfulp.targets.target import Outcome, Target

# in a wrong order of dimensions O is off by about its own size, attention in bf16 by some 1e-3
_NO_ATTENTION, _ATTENTION = 0.5, 0.1
"""Relative errors of O above which a function may be called in another form, and below which it is
attention there."""


def in_its_form(
    target: Target,
    call: Callable[[Target], Outcome],
    exact: Callable[[], Tensor],
    outcome: Outcome,
) -> tuple[Target, Outcome]:
    """The target in the form in which its first result is attention, `exact` its O, and that
    result; `call` makes the same call of it in another form.

    Other forms are tried where it is not attention on `[B, H, N, D]`; those of single sequences
    only where the function takes no others, since their borders are what may be wrong. A function
    that fails in all of them fails with the line that says how it was called.
    """
    if target.operation != ATTENTION:
        return target, outcome
    result, refusal = outcome.result, outcome.refusal or ""
    fails = result is None and refusal.startswith(("raises", "refuses", "returns"))
    form = target.form or BHND
    unknown = target.form is None or form.of("qkv") is not None

    def off(result: Result) -> float:
        out = exact()
        return float((result.out.double() - out).norm() / out.norm())

    if unknown and (fails or (result is not None and off(result) > _NO_ATTENTION)):
        for other in form.others():
            if not (fails or other.plain or other.of("qkv")):
                continue
            turned = target.in_form(other)
            again = call(turned)
            if again.result is not None and off(again.result) < _ATTENTION:
                taken = f"takes [{', '.join(other.tensors[0].dims)}]"
                return turned, replace(again, notes=(taken, *again.notes))
    if fails and (target.function is not None or target.elsewhere is not None):
        others = ", ".join(name for name in FORMS if name != form.name)
        told = f"{refusal} (called as {form}; say --form or form= where it takes {others}"
        told += " or what a line says: docs/forms.md)"
        outcome = replace(outcome, refusal=told)
    return replace(target, form=form), outcome
