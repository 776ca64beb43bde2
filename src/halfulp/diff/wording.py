"""A difference in words and a table."""

from __future__ import annotations

from collections.abc import Sequence

from halfulp.diff.difference import Difference, OperationGap, reason
from halfulp.diff.noise import FAR, LEVEL
from halfulp.diff.paragraphs import ROWS, chance_text, drawn, group_table, group_tables, wrapped
from halfulp.diff.steps_wording import after_tables, after_text
from halfulp.runs.results import Table


def text(found: Difference, width: int) -> str:
    """The report as text."""
    return "\n".join([wrapped(headline(found), width), "", without_verdict(found, width)]).rstrip()


def without_verdict(found: Difference, width: int) -> str:
    """The report without its first sentence."""
    said = [_sizes(found, width)]
    if found.first is not None and found.verdict != "identical":
        said += ["", wrapped(f"First to part: {reason(found.first)}.", width)]
    if found.groups:
        said += ["", group_tables(found.groups, _gaps(found), width)]
    parting = [x for x in found.operations if not x.same and x.own and (x.beyond or not x.exact)]
    if parting and found.verdict != "identical":
        said += ["", _operations(parting, width)]
    if found.after is not None:
        said += ["", after_text(found.after, width)]
    said += ["", *(wrapped(line, width) for line in notes(found))]
    return "\n".join(said).rstrip()


def headline(found: Difference) -> str:
    """The verdict in one sentence."""
    a, b = found.names
    over = f"{found.batches} batch{'es' * (found.batches != 1)}, {found.sequences} sequences"
    if found.verdict == "identical":
        return f"halfulp.diff: {a} and {b} are identical, bit by bit, on {over}."
    chance = "" if found.p is None else f", p = {chance_text(found.p)}"
    if found.verdict == "within rounding":
        said = f"halfulp.diff: {a} and {b} differ within rounding{chance}, on {over}"
        if found.first is not None and found.first.beyond:
            more = sum(x.beyond for x in found.operations)
            which = "one operation differs" if more == 1 else f"{more} operations differ"
            said += f", as a whole; {which} by more"
        return f"{said}."
    if found.verdict == "unknown":
        return (
            f"halfulp.diff: whether {a} and {b} differ by more than rounding is unknown: {over}"
            " are too few for a chance, or nothing that differs was seen."
        )
    said = f"halfulp.diff: {a} and {b} differ by more than rounding{chance}, on {over}"
    if found.p_formats is not None and found.p_formats >= LEVEL:
        p = chance_text(found.p_formats)
        said += f"; rounding to the coarser of both formats explains it, p = {p}"
    whole = [x for x in found.groups if not x.layer and x.share is not None]
    if whole and whole[0].share is not None and whole[0].share > 0.3:
        said += f". {whole[0].name} carries {whole[0].share:.0%} of it ({whole[0].why})"
    return f"{said}."


def _sizes(found: Difference, width: int) -> str:
    said = f"{found.what}: rms gap {found.gap:.2e}, mean {found.lean:+.1e}"
    if found.lean_p is not None:
        said += (
            f" ({'leans' if found.lean_p < LEVEL else 'no lean'}, p = {chance_text(found.lean_p)})"
        )
    if found.ratio is not None:
        times = f"{found.ratio:.3g}" if found.ratio < 0.99 * FAR else f"{FAR:g} or more"
        said += f"; {times} × what rounding in A's formats makes"
    known = [(x, y) for x, y in found.losses if x is not None and y is not None]
    if known:
        a, b = (sum(side) / len(known) for side in zip(*known, strict=True))
        said += f". Loss {a:.6g} and {b:.6g} ({b - a:+.1e})"
    if found.gradients:
        name, (gap, lean) = max(found.gradients.items(), key=lambda item: item[1][0])
        said += f". Gradients: largest gap {gap:.1e} of its size, in {name} (along it {lean:+.1e})"
    return wrapped(f"{said}.", width)


def _gaps(found: Difference) -> list[str]:
    """What a group may carry of."""
    loss = any(x is not None for x, _ in found.losses)
    return ["outputs", *["loss"] * loss, *["gradients"] * bool(found.gradients)]


def sections(found: Difference) -> dict[str, list[Table]]:
    """Everything that it has in tables, below their headings."""
    told = [x for x in found.operations if not x.same and x.own]
    return {
        "What carries the gap": [group_table(found.groups, _gaps(found), why=True)],
        "Operations that differ": [_operation_table(told, why=True)],
        "After some steps": [] if found.after is None else after_tables(found.after),
    }


def _operations(rows: Sequence[OperationGap], width: int) -> str:
    chosen = sorted(rows, key=lambda row: -row.own)[:ROWS]
    shown = _operation_table(sorted(chosen, key=lambda row: row.number))
    more = len(rows) - len(chosen)
    rest = f"\nand {more} smaller ones; --json (to_json()) has all" if more else ""
    return f"{drawn(shown, width)}{rest}\n\n{wrapped(shown.caption, width)}"


def _operation_table(rows: Sequence[OperationGap], why: bool = False) -> Table:
    lines: list[tuple[str, ...]] = []
    for row in rows:
        over = "-" if row.over_floor is None else f"{row.over_floor:.2g}"
        t = "-" if row.lean_t is None else f"{row.lean_t:+.1f}"
        marks = filter(None, (row.formats, row.asks, "beyond its floor" * row.beyond))
        lines.append((
            row.place, f"{row.own:.1e}", over, f"{row.lean:+.0e}", t, f"{row.inherited:.1e}",
            f"{row.gap:.1e}", f"{row.floor:.1e}", *("; ".join(marks),) * why,
        ))  # fmt: skip
    columns = ("operation", "own", "× floor", "leans", "t", "inherited", "gap", "floor")
    named = (*columns, *("what differs",) * why)
    return Table("In the order of B's pass", named, tuple(lines), _SIZES, "")


_SIZES = (
    "Sizes relative to A's result. own: B − A's operation on B's operands; floor: what rounding"
    " operands and result once on both sides makes; leans: the mean of own along A's rows, as a"
    " share of them, and its t; inherited: what came in; gap: B − A."
)


def notes(found: Difference) -> list[str]:
    """What was not paired, not seen and not tried."""
    said = []
    if found.weights_differ:
        said.append("The two sides' weights are not the same.")
    for side, other in (("A", "B"), ("B", "A")):
        places = found.unpaired.get(side, ())
        if places:
            shown = ", ".join(places[:4]) + (f" and {len(places) - 4} more" if places[4:] else "")
            said.append(f"Only {side} has: {shown} ({other} has nothing that answers).")
    if found.renamed:
        b, a = next(iter(found.renamed.items()))
        said.append(
            f"{len(found.renamed)} modules were matched by shape, such as B's {b} with A's {a}."
        )
    for path, why in list(found.unseen.items())[:4]:
        said.append(f"Not seen: {path}: {why}.")
    for group in found.groups:
        if group.failed:
            said.append(f"Not swapped: {group.name}: {group.failed}.")
    if found.left_out:
        said.append(f"{found.left_out} more groups that differ were not swapped (--most).")
    return said
