"""What became of a gap over steps of training, in words and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfulp.diff.after_steps import AfterSteps, AtStep
from halfulp.diff.noise import LEVEL, MARGIN
from halfulp.diff.paragraphs import (
    chance_text,
    drawn,
    group_table,
    group_tables,
    spread,
    wrapped,
)
from halfulp.runs.results import Table

ROWS, MODULES = 8, 8
_GAPS = ("outputs", "gradients", "weights")


def after_text(found: AfterSteps, width: int) -> str:
    """The section of a report that follows the passes."""
    last = found.steps[-1]
    said = [wrapped(f"After {last.step} steps of {found.optimizer}: {_headline(found)}.", width)]
    shown = _step_table(found, spread(found.steps, ROWS))
    said += ["", drawn(shown, width), "", wrapped(shown.caption, width), "", _growth(found)]
    if last.way:
        said += ["", drawn(_modules(found, MODULES), width)]
    if found.groups:
        said += ["", f"After {last.step} steps:", group_tables(found.groups, _GAPS, width)]
    if found.unmatched:
        said += [wrapped(f"A has no such parameter: {', '.join(found.unmatched[:4])}.", width)]
    return "\n".join(said)


def after_tables(found: AfterSteps) -> list[Table]:
    """All of its steps, modules and groups."""
    groups = group_table(found.groups, _GAPS, why=True)
    return [_step_table(found, found.steps), _modules(found, len(found.modules)), groups]


def _step_table(found: AfterSteps, steps: Sequence[AtStep]) -> Table:
    columns = ("step", "loss A", "B − A", "outputs", "× rounding", "p", "gradients", "× rounding",
               "weights", "× rounding", "updates")  # fmt: skip
    rounding = "the coarser of both formats" if found.formats else "A's formats"
    legend = (
        f"Means over {found.stretches} stretches of batches. Gaps B − A: outputs rms, gradients of"
        " A's size, weights of A's way from its first ones, updates the same in A's last updates."
        f" × rounding: over the gap of A trained with random roundings in {rounding}. p: of the gap"
        " in outputs, over sequences."
    )
    title = f"Both sides trained by {found.optimizer}"
    return Table(title, columns, tuple(map(_row, steps)), legend, "")


def _headline(found: AfterSteps) -> str:
    last = found.steps[-1]
    if not last.way and not last.outputs:
        return "not a bit differs"
    where = next((x for x in found.modules if x.first is not None), None)
    if found.p is None:
        said = "whether more than rounding is unknown: under 4 sequences a batch, or no rounding"
    else:
        more = "more than rounding" if found.p < LEVEL else "within rounding"
        said = f"{more} in the outputs, p = {chance_text(found.p)}"
    if where is not None:
        return f"{said}; the weights of {where.module} leave rounding first, at step {where.first}"
    return f"{said}; no module's weights are beyond {MARGIN:g} × what rounding makes"


def _row(at: AtStep) -> tuple[str, ...]:
    a, b = at.losses
    loss = ["-", "-"] if a is None or b is None else [f"{a:.5g}", f"{b - a:+.1e}"]
    way = _number(at.way) if at.way_error is None else f"{at.way:.1e} ± {at.way_error:.0e}"
    return (
        str(at.step), *loss, f"{at.outputs:.1e}", _times(at.outputs, at.outputs_noise),
        "-" if at.p is None else chance_text(at.p), _number(at.gradient),
        _times(at.gradient, at.gradient_noise), way, _times(at.way, at.way_noise),
        _number(at.updates),
    )  # fmt: skip


def _growth(found: AfterSteps) -> str:
    if found.growth is None:
        return "Growth of the gap in weights: not told by fewer than 3 steps."
    said = f"Growth of the gap in weights: × {found.growth[0]:.3g} ± {found.growth[1]:.1g} a step"
    if found.growth_noise is not None:
        factor, error = found.growth_noise
        said += f"; of rounding alone × {factor:.3g} ± {error:.1g}"
    return f"{said}."


def _modules(found: AfterSteps, most: int) -> Table:
    columns = ("weights of", "beyond rounding", "at the end", "× rounding", "first gradient",
               "× rounding")  # fmt: skip
    rows = tuple(
        (
            module.module, "never" if module.first is None else f"step {module.first}",
            _number(module.way[-1]), _times(module.way[-1], module.noise[-1]),
            _number(module.gradient), _times(module.gradient, module.gradient_noise),
        )
        for module in [x for x in found.modules if x.way and x.way[-1]][:most]
    )  # fmt: skip
    return Table("Modules, the first to leave rounding first", columns, rows, "", "")


def _number(x: float | None) -> str:
    return "-" if x is None or math.isnan(x) else f"{x:.1e}"


def _times(gap: float | None, noise: float | None) -> str:
    known = gap is not None and noise is not None and noise > 0
    return f"{gap / noise:.2g}" if known and gap is not None and noise else "-"
