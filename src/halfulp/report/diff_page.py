"""The page of a comparison of two computations (`halfulp diff`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfulp.report.html import page
from halfulp.report.tables import table_block

LEAD = (
    "Both sides run on the same batches. Each operation of B is held against A's operation on the"
    " same operands: own is what is left, inherited what came in with them, and the floor is what"
    " rounding operands and result once on each side makes. Sizes are relative to A's result."
)


def diff_page(plain: Mapping[str, Any], said: str, command: str) -> str:
    """Return the page of a `halfulp.diff.Difference` in its plain form.

    Args:
        plain: its `as_dict`.
        said: its text, whose first paragraph is the verdict.
        command: that repeats it.
    """
    finding = " ".join(said.split("\n\n")[0].split())
    sections: list[dict[str, Any]] = [
        {"heading": "Verdict", "finding": finding, "blocks": []},
        {"heading": "What carries the gap", "finding": "", "blocks": [_groups(plain)]},
        {"heading": "Operations that differ", "finding": "", "blocks": [_operations(plain)]},
    ]
    sections += _after(plain)
    title = f"{plain['names'][0]} and {plain['names'][1]}"
    shown = [section for section in sections if section["finding"] or section["blocks"][0]["rows"]]
    return page(title, LEAD, shown, footer=f"Repeat everything on this page: {command}")


def runs_page(plain: Mapping[str, Any], said: str, command: str) -> str:
    """Return the page of a `halfulp.diff.two_runs.RunDifference`; arguments as `diff_page`."""
    finding = " ".join(said.split("\n\n")[0].split())
    lists = [["settings", x] for x in plain["settings"]]
    lists += [["versions and machine", x] for x in plain["environments"]]
    curves = [
        [x["name"], x["lines"], _never(x["first"]), _never(x["beyond"]), *x["last"]]
        for x in plain["curves"]
    ]
    weights = [
        [x["step"], *(_plainly(y) for y in (*x["gap"].values(), x["travelled"]))]
        for x in plain["drifts"]
    ]
    weights += [[k, *map(_plainly, x.values()), None] for k, x in plain["beside"].items()]
    modules = [
        [x["module"], _plainly(x["gap"]), _plainly(x["travelled"])]
        for x in (plain["drifts"] or [{"modules": ()}])[-1]["modules"]
    ]
    columns = ["‖B − A‖", "largest", "Wasserstein", "A's way"]
    tables = (
        ("What differs", ["of", "change"], lists),
        ("Curves", ["curve", "lines", "first bit", "beyond rounding", "step", "A", "B"], curves),
        ("Weights", ["step", *columns], weights),
        ("Modules at the last common step", ["module", "‖B − A‖", "A's way"], modules),
    )
    blocks = [table_block(title, names, rows) for title, names, rows in tables if rows]
    sections: list[dict[str, Any]] = [{"heading": "Verdict", "finding": finding, "blocks": blocks}]
    for key, heading in (
        ("same_weights", "The same weights, each run's arithmetic"),
        ("own_weights", "Each run's own weights"),
    ):
        if plain[key] is not None:
            shown = [x for x in (_groups(plain[key]), _operations(plain[key])) if x["rows"]]
            sections.append({"heading": heading, "finding": "", "blocks": shown})
            sections += _after(plain[key])
    title = f"{plain['names'][0]} and {plain['names'][1]}"
    return page(title, LEAD, sections, footer=f"Repeat everything on this page: {command}")


def _never(step: int | None) -> int | str:
    return "never" if step is None else step


def _plainly(x: float | None) -> str | None:
    return None if x is None else f"{x:.3g}"


def _groups(plain: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for group in plain["groups"]:
        for way, label in (("into", "B's in A"), ("out", "A's in B")):
            for of, (share, error) in group[way].items():
                said = f"{share:.0%}" + ("" if error is None else f" ± {error:.0%}")
                rows.append([group["name"], label, of, said, group["why"]])
    columns = ["operations", "swapped", "of the gap in", "carries", "what differs"]
    caption = "1 standard error, over sequences (outputs) or batches."
    return table_block("One group of operations swapped at a time", columns, rows, caption)


def _operations(plain: Mapping[str, Any]) -> dict[str, Any]:
    names = ("gap", "own", "inherited", "floor", "over_floor", "lean", "lean_t")
    told = [row for row in plain["operations"] if not row["same"] and row["own"]]
    rows = [
        [row["place"], *(None if row[x] is None else f"{row[x]:.2g}" for x in names), _mark(row)]
        for row in told
    ]
    columns = ["operation", "gap", "own", "inherited", "floor", "× floor", "leans", "t", ""]
    caption = "leans: the mean of own along A's rows, as a share of them, and its t."
    return table_block("In the order of B's pass", columns, rows, caption)


def _after(plain: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The section of both sides' training, if they were trained."""
    after = plain["after"]
    if after is None:
        return []
    blocks = [x for x in (_steps(after), _groups(after)) if x["rows"]]
    return [{"heading": "After some steps", "finding": "", "blocks": blocks}]


def _steps(after: Mapping[str, Any]) -> dict[str, Any]:
    names = ("outputs", "outputs_noise", "p", "gradient", "gradient_noise", "way", "way_noise")
    rows = [[at["step"], *at["losses"], *(_plainly(at[x]) for x in names)] for at in after["steps"]]
    return {
        "kind": "table",
        "title": f"Both sides trained by {after['optimizer']}",
        "columns": ["step", "loss A", "loss B", "outputs", "of rounding", "p", "gradients",
                    "of rounding", "weights", "of rounding"],
        "rows": rows,
        "caption": "Gaps beside those of A trained with random roundings; outputs rms, gradients as"
        " a share of A's, weights of A's way from its first ones.",
    }  # fmt: skip


def _mark(row: Mapping[str, Any]) -> str:
    said = [row["formats"], row["asks"], "beyond its floor" if row["beyond"] else ""]
    return "; ".join(filter(None, said))
