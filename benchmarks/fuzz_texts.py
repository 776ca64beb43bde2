"""Hostile texts in pages, on terminals, in run folders and in programs that halfulp writes."""

from __future__ import annotations

import ast
import random
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from benchmarks.fuzz_forks import HOSTILE, bad_end, run

from halfulp.audit.inputs import Case
from halfulp.audit.probes import Shape
from halfulp.audit.shrink import script
from halfulp.audit.verdict import Finding
from halfulp.report.html import page
from halfulp.report.text import HIDDEN, visible
from halfulp.runs.folder import write_json
from halfulp.runs.record import new_record

OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal obeys, and a page forbids."""


class Tags(HTMLParser):
    """The tags of a page with the names of their attributes, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take a tag, and where it points to if that is not on the page."""
        links = [
            v for k, v in attrs if k in ("href", "src") and not str(v).startswith(("#", "data:"))
        ]
        self.found.append((tag, tuple(sorted(k for k, _ in attrs if k != "class")), tuple(links)))


def a_page(text: str, where: int) -> str:
    """A page with a text in one of its places, harmless ones in the others."""
    texts = ["word"] * 14
    texts[where] = text
    t = iter(texts)
    table = {"kind": "table", "title": next(t), "columns": [next(t), "outcome"]}
    table |= {"rows": [[next(t), "failed"]], "caption": next(t), "command": next(t)}
    figure = {"title": next(t), "x_label": next(t), "y_label": "y", "x_log": False, "y_log": False}
    series = {"label": next(t), "x": [1, 2], "y": [1.0, 2.0], "low": None, "high": None}
    figure |= {"series": [series | {"style": "line"}], "caption": next(t), "command": "c"}
    blocks = [table, {"kind": "figures", "figures": [figure]}]
    blocks += [
        {"kind": "facts", "pairs": [(next(t), next(t))]},
        {"kind": "list", "items": [next(t)]},
    ]
    blocks += [{"kind": "code", "text": next(t), "caption": "c"}]
    section = {"heading": "Heading", "finding": next(t), "blocks": blocks}
    return page("Title", "lead", [section], meta="m", footer="f")


def shape_of(text: str) -> Counter[Any]:
    """What a page is made of; words may be broken in other places and drawn in more pieces."""
    loose = ("wbr", "tspan", "text", "path", "use", "g", "defs", "style", "span")
    return Counter(tag for tag in Tags(text).found if tag[0] not in loose)


def injections(number: int, chance: random.Random, room: Path) -> Counter[str]:
    """Put hostile texts into pages, terminals, run folders and programs."""
    table: Counter[str] = Counter()
    harmless = {where: shape_of(a_page("word", where)) for where in range(14)}
    folder = room / "injected"
    while table["injections"] < number:
        text = "".join(chance.sample(HOSTILE, chance.choice((1, 1, 2, 3))))
        where = chance.randrange(14)
        made = a_page(text, where)
        wrong = (
            shape_of(made) != harmless[where] or "<script>alert" in made or "<svg onload" in made
        )
        wrong |= OBEYED.search(made.replace("\r", "")) is not None
        finding = Finding("defect", "error", text, "out", None, text, 2.0)
        file = text.replace("\0", "").replace("\ud800", "")
        case = Case(text, Shape(), 0, "bfloat16", file=file)
        kinds = [type(x) for x in ast.parse(script(text, finding, case)).body]
        wrong |= kinds != [ast.Expr, ast.ImportFrom, ast.Assign, ast.Raise]
        wrong |= HIDDEN.search(visible(text)) is not None
        table["injections"] += 3
        if chance.random() < 0.2:  # and through the doors of a command
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
            config = {"seeds": text, text.replace("\0", ""): 1}
            record = new_record("demo", config, text) | {"status": text, "acts": []}
            write_json(folder / "run.json", record)
            for command in (
                ["report", folder],
                ["report", str(room / text.replace("\0", "").replace("/", ""))],
                ["train", text.replace("\0", ""), "--out", text.replace("\0", "")],
                ["ls", text.replace("\0", "")],
            ):
                ended = run(command, room)
                shown = ended.out + ended.err
                wrong |= bad_end(ended) or OBEYED.search(shown) is not None
                table["injections"] += 1
        table["obeyed"] += wrong
        if wrong:
            print("injection:", ascii(text), where)
    return table
