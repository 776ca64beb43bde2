"""The explanation of a rounding as a table for a terminal, at most 100 columns wide."""

from __future__ import annotations

from decimal import Context, Decimal, Inexact
from fractions import Fraction
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfulp.experiments.explain import Code, Decision, Explanation

WIDTH = 100
_OPERATION_TITLES = {"sum": "sum", "product": "product", "dot": "dot product"}
_ROUNDING_TITLES = {
    "nearest_even": "to nearest, ties to even",
    "nearest_away": "to nearest, ties away from zero",
    "toward_zero": "toward zero",
    "up": "up",
    "down": "down",
}


def render(explanation: Explanation) -> str:
    """Return the whole explanation: operands, every rounding of the running value, and the last one
    in full.
    """
    direction = _ROUNDING_TITLES[explanation.rounding]
    title = (
        f"{_OPERATION_TITLES[explanation.operation]} in {explanation.format}, rounded {direction}"
    )
    if len(explanation.operands) == 1:
        title = f"{explanation.format}, rounded {direction}"
    else:
        title += f"; running value in {explanation.accumulate}"
    lines = [title, "", *_operands(explanation), ""]
    lines += [*_line("exact", decimal_text(explanation.exact)), ""]
    if len(explanation.operands) > 1:
        lines += _running(explanation)
    lines += _full(explanation.final)
    if explanation.steps_matter:
        lines += _line("note", f"rounding the exact value once would give {explanation.single!r}")
    if explanation.final.exact != explanation.exact:
        lines += _line("error", f"{explanation.error!r} in all, against the exact value")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _operands(explanation: Explanation) -> list[str]:
    codes = explanation.operands
    names = _names(explanation)
    wide = max(len(code.exponent) for code in codes)
    head = f"{'':5}{'value':<25}s {'exponent':<{wide}} fraction"
    return [
        head,
        *(f"{name:<5}{_bits(code, wide)}" for name, code in zip(names, codes, strict=True)),
    ]


def _names(explanation: Explanation) -> list[str]:
    n = len(explanation.operands)
    if explanation.operation != "dot":
        return [f"x{i}" for i in range(1, n + 1)]
    return [f"{letter}{i}" for letter in "xy" for i in range(1, n // 2 + 1)]


def _bits(code: Code, wide: int) -> str:
    return f"{code.value!r:<25}{code.sign} {code.exponent:<{wide}} {code.fraction}"


def _running(explanation: Explanation) -> list[str]:
    """One line a step; a two-operand sum or product has a single one."""
    lines = [f"{'':5}{'running value':<25}{explanation.accumulate + ' s exponent fraction':<40}"]
    for number, step in enumerate(explanation.steps, 1):
        decision = step.decision
        error = "exact" if decision.exact_result else f"error {decision.error:.3g}"
        lines.append(f"({number})  {step.label} = {decision.result!r}, {error}")
        lines.append(f"{'':5}{_bits(decision.code, len(decision.code.exponent))}")
        if step.carry > 0:
            lines.append(
                f"{'':5}the sum carries: its leading bit moves one place left, and the last bit"
                " kept with it"
            )
        elif step.carry < -1:
            lines.append(f"{'':5}the leading {-step.carry} bits cancel")
    return [*lines, ""]


def _full(decision: Decision) -> list[str]:
    """The rounding into the asked-for format, one labeled fact a line."""
    places = f"{decision.significand}|{decision.dropped or '0'}"
    sign = "−" if decision.exact < 0 else ""
    lines = [f"rounded to {decision.format}"]
    lines += _line("significand", f"{sign}{places} × 2^{decision.power}   (kept|dropped)")
    lines += _line("guard", f"{decision.guard}   round {decision.round}   sticky {decision.sticky}")
    lines += _line("ulp", f"{decision.ulp!r}")
    if decision.below != decision.above:
        lines += _line("below", _neighbor(decision, decision.below))
        lines += _line("above", _neighbor(decision, decision.above))
    lines += _line("decision", decision.reason)
    code = decision.code
    lines += _line(
        "result",
        f"{decision.result!r} = {' '.join((code.sign, code.exponent, code.fraction))}",
    )
    in_ulps = f" ({decision.error / decision.ulp:+.3f} ulp)" if isfinite(decision.error) else ""
    return [*lines, *_line("error", f"{decision.error!r}{in_ulps}" if decision.error else "0")]


def _neighbor(decision: Decision, value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return f"{value}"
    distance = float(abs(Fraction(value) - decision.exact))
    mark = "   ← taken" if value == decision.result else ""
    return f"{value!r}, {distance:.6g} away ({distance / decision.ulp:.3f} ulp){mark}"


def _line(label: str, text: str) -> list[str]:
    """A labeled line, continued below itself where it is too long."""
    parts = wrap(text, WIDTH - 14) or [""]
    return [f"{label if i == 0 else '':<14}{part}" for i, part in enumerate(parts)]


def decimal_text(exact: Fraction, digits: int = 40) -> str:
    """Return the decimal digits of a fraction, all of them if there are at most `digits`."""
    context = Context(prec=digits)
    quotient = context.divide(Decimal(exact.numerator), Decimal(exact.denominator))
    more = "…" if context.flags[Inexact] else ""
    return (
        f"{quotient.normalize(context):f}{more}"
        if abs(quotient.adjusted()) < digits
        else f"{quotient:E}{more}"
    )
