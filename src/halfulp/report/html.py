"""Pages: plain data becomes one HTML file that opens anywhere, without a network.

A page is a title, a lead and sections; a section is a heading, one sentence that says what was
found, and blocks. Its templates lie in `templates/` and escape every text; pictures alone go in as
markup, once `svg.checked` has read them. The one script on it sorts and filters tables and opens
what is folded; the page's own policy forbids any other and all fetching, and without the script the
page says the same.

Blocks are dictionaries with a "kind":
    {"kind": "text", "text"}                       a paragraph
    {"kind": "heading", "text"}                    a smaller heading
    {"kind": "list", "items"}                      bullet points
    {"kind": "links", "items"}                     {"text", "to", "note"}: pages of the same server
    {"kind": "facts", "pairs"}                     names and values
    {"kind": "code", "text", "caption"}            text as it stands: a terminal's, a program
    {"kind": "command", "command"}                 what to type to repeat something
    {"kind": "table", "title", "columns", "rows", "caption", "command"}   see `tables.laid_out`
    {"kind": "picture", "source", "alt", "caption"}   a PNG as a data: address, and what it shows
    {"kind": "figures", "figures"}                 figures and heat maps, side by side with room
    {"kind": "details", "summary", "blocks"}       blocks that are folded away until asked for
A table's cell {"text", "to"} leads to the section or the details of that name.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfulp.report.heatmap import draw_picture
from halfulp.report.svg import checked
from halfulp.report.tables import laid_out
from halfulp.report.text import FORBIDDEN

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

Block = Mapping[str, Any]
Section = Mapping[str, Any]

KINDS = (
    "text",
    "heading",
    "list",
    "links",
    "facts",
    "code",
    "command",
    "table",
    "picture",
    "figures",
    "details",
)
_TEMPLATES = Path(__file__).parent / "templates"
_LONG = 16  # characters of a word that may need a place to break


def page(
    title: str,
    lead: str,
    sections: Sequence[Section],
    *,
    meta: str = "",
    footer: str = "",
    tag: str = "",
) -> str:
    """Return one self-contained HTML document.

    Args:
        title: of the document, and its first heading.
        lead: what the page shows, in a sentence or two.
        sections: {"heading", "finding", "blocks"}; "finding" may be missing or empty.
        meta: a small line below the lead: when, where, how long.
        footer: a small line at the end.
        tag: of a page that a server of its own gives: what changes when the page does. The page
            then asks its server for itself, and shows what is new.

    Raises:
        ValueError: a block's kind is unknown, a picture is not in the page itself, or a figure
            cannot be drawn.
    """
    for block in _every(block for section in sections for block in section["blocks"]):
        _check(block)
    names = _Names(sections)
    parts = ("page.js", "live.js") if tag else ("page.js",)
    script = "\n".join((_TEMPLATES / part).read_text(encoding="utf-8") for part in parts)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            lead=lead,
            sections=sections,
            names=names,
            meta=meta,
            footer=footer,
            tag=tag,
            script=script,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            picture=_Pictures(),
        )
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # without the extension all undefined names are errors, and all that is not Markup is escaped
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_clean,
    )
    environment.filters |= {
        "breakable": _breakable,
        "unique": _unique,
        "laid_out": laid_out,
        "with_commands": _with_commands,
    }
    return environment


def _clean(value: object) -> object:
    """Text without the control characters that HTML forbids; they become the replacement
    character.
    """
    return value if hasattr(value, "__html__") else FORBIDDEN.sub("\ufffd", str(value))


def _breakable(text: object) -> Markup:
    """Text whose long words may break after a sign between their parts, such as a recipe's name."""
    from markupsafe import Markup, escape

    words = re.split(r"(\s+)", str(_clean(text)))
    parts = [
        re.split(r"(?<=[_:/\[\],=.+])(?=\w)", word) if len(word) > _LONG else [word]
        for word in words
    ]
    return Markup("").join(Markup("<wbr>").join(map(escape, word)) for word in parts)


def _unique(values: Iterable[object]) -> list[object]:
    """Values that are not empty, each once, in order."""
    return [value for value in dict.fromkeys(values) if value]


def _with_commands(blocks: Sequence[Block]) -> list[tuple[Block, list[object]]]:
    """Blocks with the commands to say below them: one that what follows repeats is said there."""
    found: list[tuple[Block, list[object]]] = []
    after: list[object] = []
    for block in reversed(blocks):
        holders = block["figures"] if block["kind"] == "figures" else [block]
        commands = _unique(holder.get("command") for holder in holders)
        found.append((block, [command for command in commands if command not in after]))
        after = commands
    return found[::-1]


def _every(blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        yield from _every(block.get("blocks", ()))


def _check(block: Block) -> None:
    if block["kind"] not in KINDS:
        raise ValueError(f"kind={block['kind']!r}: accepted are {', '.join(KINDS)}")
    if block["kind"] == "links":
        for item in block["items"]:
            if not re.fullmatch(r"/[a-z0-9/-]*", item["to"]):
                raise ValueError(f"to={item['to']!r}: accepted is a path of the same server")
    if block["kind"] == "picture" and not str(block["source"]).startswith("data:image/png;base64,"):
        raise ValueError(
            f"source={str(block['source'])[:40]!r}: accepted is data:image/png;base64,… in the page"
            " itself"
        )


class _Names:
    """Ids of sections and of what is folded in them, and what a table's cell leads to."""

    def __init__(self, sections: Sequence[Section]) -> None:
        taken: set[str] = set()
        self.sections = [_slug(str(section["heading"]), taken) for section in sections]
        self._headings = {
            str(s["heading"]): i for s, i in zip(sections, self.sections, strict=True)
        }
        self._folded: dict[tuple[str, str], str] = {}
        for section, name in zip(sections, self.sections, strict=True):
            for block in _every(section["blocks"]):
                if block["kind"] == "details":
                    key = (name, str(block["summary"]))
                    self._folded.setdefault(key, _slug(f"{name} {block['summary']}", taken))
        self._given: set[str] = set()

    def folded(self, section: str, summary: str) -> str:
        """The id of details; empty for a second one of the same name."""
        name = self._folded[section, summary]
        first = name not in self._given
        self._given.add(name)
        return name if first else ""

    def lead_to(self, section: str, name: str) -> str:
        """The id of the details of that name in a section, or of the section of that name; empty
        where there is none.
        """
        return self._folded.get((section, name)) or self._headings.get(name, "")


def _slug(text: str, taken: set[str]) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"
    numbered = itertools.chain([words], (f"{words}-{i}" for i in itertools.count(2)))
    name = next(one for one in numbered if one not in taken)
    taken.add(name)
    return name


class _Pictures:
    """Draws figures for one page, on which the same picture may stand twice: ids are numbered."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, figure: Mapping[str, Any]) -> Markup:
        number = next(self._numbers)
        own = re.sub(
            r'( id="|href="#|url\(#|-describedby=")', rf"\g<1>p{number}-", draw_picture(figure)
        )
        return checked(own)
