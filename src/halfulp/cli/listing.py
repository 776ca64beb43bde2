"""What there is, as tables: number formats, recipes, attention kernels, probe inputs, operations,
claims and training presets.
"""

from __future__ import annotations

from collections.abc import Callable

from halfulp.formats import FORMATS, Format
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


def targets() -> Table:
    """Return the built-in targets, those that cannot run here with the reason."""
    from halfulp.targets import builtin_targets

    rows: list[tuple[Cell, ...]] = [
        (t.name, "yes" if t.missing is None else "no", f"{t.description}{_why(t.missing)}")
        for t in builtin_targets()
    ]
    title = "Targets; package.module:function and path/file.py:function are others"
    return _table(title, ("target", "here", "what it is"), rows, "targets")


def _why(missing: str | None) -> str:
    return f"; {missing}" if missing else ""


def probes() -> Table:
    """Return the probe inputs with what each is built to expose."""
    from halfulp.audit import PROBES

    rows: list[tuple[Cell, ...]] = [(probe.name, probe.exposes, probe.source) for probe in PROBES]
    return _table("Probe inputs", ("probe", "built to expose", "source"), rows, "probes")


def causes() -> Table:
    """Return what an audit can find, by its code; docs/causes has a page of each."""
    from halfulp.reconstruct import CAUSES
    from halfulp.reconstruct.codes import CODES

    found = sorted((code, CAUSES[key]) for key, code in CODES.items())
    rows: list[tuple[Cell, ...]] = [(code, c.name, c.resembles) for code, c in found]
    return _table("Causes", ("code", "what the kernel does", "resembles"), rows, "causes")


def operations() -> Table:
    """Return the operations that can be audited."""
    from halfulp.operations import ATTENTION, operation_named, operation_names

    attention = "f(query, key, value, *, is_causal, scale)"
    rows: list[tuple[Cell, ...]] = [
        (ATTENTION, attention, "`halfulp ls probes`", "`halfulp ls targets`")
    ]
    for name in operation_names():
        operation = operation_named(name)
        probes = ", ".join(probe.name for probe in operation.probes)
        here = [target.name for target in operation.targets]
        built_in = ", ".join([*here, "recipe:stock", "recipe:floor"])
        rows.append((name, operation.signature, probes, built_in))
    title = "Operations: halfulp audit --op NAME kernel.py:function"
    columns = ("operation", "signature", "probe inputs", "built-in targets")
    return _table(title, columns, rows, "operations")


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


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[Cell, ...]], name: str) -> Table:
    return Table(title, columns, tuple(rows), "", f"halfulp ls {name}")


LISTS: dict[str, Callable[[], Table]] = {
    "formats": formats,
    "recipes": recipes,
    "targets": targets,
    "probes": probes,
    "operations": operations,
    "causes": causes,
    "claims": claims,
    "presets": presets,
}
"""Every list by the name that the command line knows it by."""
