"""What there is, as tables: number formats, recipes, attention kernels, probe inputs, operations,
claims and training presets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from halfulp.formats import FORMATS, Format
from halfulp.operations import ATTENTION, operation_named, operation_names
from halfulp.recipes import RECIPES, Recipe
from halfulp.runs.results import Cell, Table


def formats() -> Table:
    """Return the number formats by name."""
    rows: list[tuple[Cell, ...]] = []
    for fmt in FORMATS:
        element = fmt if isinstance(fmt, Format) else fmt.element
        scaling = "" if isinstance(fmt, Format) else f"{fmt.scale.name}, one for {fmt.block_size}"
        bits = f"1+{element.exponent_bits}+{element.mantissa_bits}"
        numbers = (element.max, element.min_normal, element.unit_roundoff)
        rows.append((fmt.name, bits, *numbers, element.overflow, scaling))
    columns = ("format", "bits", "largest", "least normal", "unit roundoff", "overflow", "scale")
    return _table(
        "Number formats (bits: sign, exponent, mantissa); eXmY names any other",
        columns,
        rows,
        "formats",
    )


def recipes() -> Table:
    """Return the named recipes with the choices that tell them apart."""
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            r.algorithm,
            r.row_sum_from,
            r.delta_from,
            r.backward_weights,
            r.shift.kind,
            *_held(r),
        )
        for name, r in RECIPES.items()
    ]
    columns = ("recipe", "algorithm", "l from", "δ from", "P from", "shift", "scores", "out")
    return _table(
        "Recipes: how attention is computed, and what is rounded to what", columns, rows, "recipes"
    )


def _held(recipe: Recipe) -> tuple[str, str]:
    """What scores and O are held in: a step that is not rounded stays in the format of the
    computation.
    """
    computed = "fp64" if recipe.compute == "float64" else "fp32"
    steps = (recipe.scores, recipe.out)
    scores, out = (computed if fmt.holds(recipe.dtype) else fmt.name for fmt in steps)
    return scores, out


def targets(op: str) -> Table:
    """Return the built-in targets of an operation, those that cannot run here with the reason."""
    from halfulp.targets import builtin_targets, operation_targets

    known = builtin_targets() if op == ATTENTION else operation_targets(operation_named(op))
    rows: list[tuple[Cell, ...]] = [
        (t.name, "yes" if t.missing is None else "no", f"{t.description}{_why(t.missing)}")
        for t in known
    ]
    title = f"Targets of {op}; package.module:function and path/file.py:function are others"
    return _table(title, ("target", "here", "what it is"), rows, f"targets --op {op}")


def _why(missing: str | None) -> str:
    return f"; {missing}" if missing else ""


def probes(op: str) -> Table:
    """Return the probe inputs of an operation with what each is built to expose."""
    from halfulp.audit import PROBES

    known = PROBES if op == ATTENTION else operation_named(op).probes
    rows: list[tuple[Cell, ...]] = [(probe.name, probe.exposes, probe.source) for probe in known]
    columns = ("probe", "built to expose", "source")
    return _table(f"Probe inputs of {op}", columns, rows, f"probes --op {op}")


def causes() -> Table:
    """Return what an audit can find, by its code; docs/causes has a page of each."""
    from halfulp.reconstruct import CAUSES

    found = sorted(CAUSES.values(), key=lambda cause: cause.code)
    rows: list[tuple[Cell, ...]] = [(c.code, c.name, c.resembles) for c in found]
    return _table("Causes", ("code", "what the kernel does", "resembles"), rows, "causes")


def operations() -> Table:
    """Return the operations that can be audited."""
    from halfulp.audit import PROBES
    from halfulp.targets import builtin_targets, operation_targets

    signature = "f(query, key, value, *, is_causal, scale)"
    rows: list[tuple[Cell, ...]] = [(ATTENTION, signature, len(PROBES), len(builtin_targets()))]
    for name in operation_names():
        operation = operation_named(name)
        targets = operation_targets(operation)
        rows.append((name, operation.signature, len(operation.probes), len(targets)))
    title = "Operations: halfulp audit --op NAME kernel.py:function"
    columns = ("operation", "signature", "probes", "targets")
    note = "Names: halfulp ls probes --op NAME, halfulp ls targets --op NAME."
    return _table(title, columns, rows, "operations", note)


def claims() -> Table:
    """Return the claims of the ledger."""
    from halfulp.papers.ledger import CLAIMS

    rows: list[tuple[Cell, ...]] = [
        (claim.id, claim.statement, claim.without if claim.measure is None else "yes")
        for claim in CLAIMS
    ]
    return _table("Claims", ("claim", "statement", "measured"), rows, "claims")


def presets() -> Table:
    """Return the trainings that `halfulp train` has ready."""
    from halfulp.training.presets import PRESETS

    rows: list[tuple[Cell, ...]] = []
    for name, preset in PRESETS.items():
        config = preset()
        rows.append(
            (
                name,
                " ".join((preset.__doc__ or "").split("\n\n")[0].split()),
                config.steps,
                str(config.attention),
            )
        )
    return _table("Trainings", ("preset", "what it does", "steps", "attention"), rows, "presets")


def _table(
    title: str, columns: tuple[str, ...], rows: list[tuple[Cell, ...]], name: str, note: str = ""
) -> Table:
    return Table(title, columns, tuple(rows), note, f"halfulp ls {name}")


LISTS: dict[str, Callable[[], Table]] = {
    "formats": formats,
    "recipes": recipes,
    "targets": partial(targets, ATTENTION),
    "probes": partial(probes, ATTENTION),
    "operations": operations,
    "causes": causes,
    "claims": claims,
    "presets": presets,
}
"""Every list by the name that the command line knows it by."""

OF_OPERATION: dict[str, Callable[[str], Table]] = {"targets": targets, "probes": probes}
"""The lists that every operation has one of."""
