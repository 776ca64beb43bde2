"""Pages: plain data becomes one HTML file that opens anywhere, without a network and without
scripts.

A page is a title, a lead and sections; a section is a heading, one sentence that says what was
found, and blocks. Every text is escaped here and nowhere else, so that no caller can forget it.

Blocks are dictionaries with a "kind":
    {"kind": "text", "text"}                       a paragraph
    {"kind": "heading", "text"}                    a smaller heading
    {"kind": "list", "items"}                      bullet points
    {"kind": "facts", "pairs"}                     names and values
    {"kind": "code", "text", "caption"}            text as it stands, such as a terminal's or a program
    {"kind": "command", "command"}                 what to type to repeat something
    {"kind": "table", "title", "columns", "rows", "caption", "command"}   caption and command may be missing
    {"kind": "picture", "source", "alt", "caption"}   a PNG as a data: address; alt says what it shows
    {"kind": "figures", "figures"}                 figures and heat maps, side by side where there is room
    {"kind": "details", "summary", "blocks"}       blocks that are folded away until asked for
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from halfulp.report.heatmap import draw_picture
from halfulp.report.style import CSS
from halfulp.report.text import cell_text

Block = Mapping[str, Any]
Section = Mapping[str, Any]

BADGES: dict[str, tuple[str, str]] = {
    "sound": ("good", "✓"),
    "stock": ("warn", "●"),
    "defect": ("bad", "✗"),
    "forward sound": ("good", "✓"),
    "forward stock": ("warn", "●"),
    "incomplete": ("bad", "!"),
    "error": ("bad", "!"),
    "survived": ("good", "✓"),
    "drifting": ("warn", "●"),
    "bitwise": ("good", "✓"),
    "to rounding": ("good", "✓"),
    "broken": ("bad", "✗"),
    "failed": ("bad", "✗"),
    "reproduced": ("good", "✓"),
    "reproduced at reduced scale": ("good", "✓"),
    "reproduced with altered arithmetic": ("warn", "≈"),
    "not reproduced": ("bad", "✗"),
    "needs a GPU": ("none", "–"),
    "not yet": ("none", "–"),
    "skipped": ("none", "–"),
}
"""Words that a table shows as a badge: its tone and its sign, so that color is never the only
carrier.
"""

BADGE_COLUMNS = {"verdict", "outcome"}


def page(
    title: str, lead: str, sections: Sequence[Section], *, meta: str = "", footer: str = ""
) -> str:
    """Return one self-contained HTML document.

    Args:
        title: of the document, and its first heading.
        lead: what the page shows, in a sentence or two.
        sections: {"heading", "finding", "blocks"}; "finding" may be missing or empty.
        meta: a small line below the lead: when, where, how long.
        footer: a small line at the end.

    Raises:
        ValueError: a block's kind is unknown, or a figure cannot be drawn.
    """
    names = _anchors([str(section["heading"]) for section in sections])
    body = _own_ids(
        "\n".join(_section(section, name) for section, name in zip(sections, names, strict=True))
    )
    contents = _contents(sections, names) if len(sections) > 1 else ""
    below = f"<footer><p class='meta'>{_e(footer)}</p></footer>" if footer else ""
    about = f"<p class='meta'>{_e(meta)}</p>" if meta else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="description" content="{_e(lead)}">
<meta name="generator" content="halfulp">
<title>{_e(title)}</title>
<style>
{CSS}
</style>
</head>
<body>
<header>
<h1>{_e(title)}</h1>
<p class="lead">{_e(lead)}</p>
{about}
{contents}
</header>
<main>
{body}
</main>
{below}
</body>
</html>
"""


def _e(text: object) -> str:
    """Escape any text; control characters that HTML forbids become the replacement character."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", "\ufffd", escape(str(text)))


def _anchors(headings: Sequence[str]) -> list[str]:
    names: list[str] = []
    for i, heading in enumerate(headings, 1):
        words = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"
        names.append(f"{words}-{i}" if words in names else words)
    return names


def _own_ids(body: str) -> str:
    """Number the pictures and put the number into their ids, since the same picture may stand on a
    page twice.
    """
    numbers = itertools.count(1)

    def own(picture: re.Match[str]) -> str:
        number = next(numbers)
        return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>p{number}-", picture[0])

    return re.sub(r"<svg .*?</svg>", own, body, flags=re.DOTALL)


def _contents(sections: Sequence[Section], names: Sequence[str]) -> str:
    items = [
        f"<li><a href='#{name}'>{_e(section['heading'])}</a>{_e(section.get('finding') or '')}</li>"
        for section, name in zip(sections, names, strict=True)
    ]
    return f"<nav aria-label='Contents'><ol>{''.join(items)}</ol></nav>"


def _section(section: Section, name: str) -> str:
    finding = f"<p class='finding'>{_e(section['finding'])}</p>" if section.get("finding") else ""
    return (
        f"<section id='{name}' aria-labelledby='{name}-h'><h2"
        f" id='{name}-h'>{_e(section['heading'])}</h2>"
        f"{finding}\n{_blocks(section['blocks'])}</section>"
    )


def _blocks(blocks: Iterable[Block]) -> str:
    return "\n".join(_block(block) for block in blocks)


def _block(block: Block) -> str:
    render = _RENDERERS.get(block["kind"])
    if render is None:
        raise ValueError(f"kind={block['kind']!r}: accepted are {', '.join(_RENDERERS)}")
    return render(block)


def _text(block: Block) -> str:
    return f"<p>{_e(block['text'])}</p>"


def _heading(block: Block) -> str:
    return f"<h3>{_e(block['text'])}</h3>"


def _list(block: Block) -> str:
    return f"<ul>{''.join(f'<li>{_e(item)}</li>' for item in block['items'])}</ul>"


def _facts(block: Block) -> str:
    return f"<dl>{''.join(f'<dt>{_e(name)}</dt><dd>{_e(value)}</dd>' for name, value in block['pairs'])}</dl>"


def _code(block: Block) -> str:
    caption = f"<p class='note'>{_e(block['caption'])}</p>" if block.get("caption") else ""
    return f"{caption}<pre tabindex='0'><code>{_e(block['text'])}</code></pre>"


def _command(block: Block) -> str:
    return (
        f"<p class='command'>Repeat: <code>{_e(block['command'])}</code></p>"
        if block.get("command")
        else ""
    )


def _details(block: Block) -> str:
    return (
        f"<details><summary>{_e(block['summary'])}</summary>\n{_blocks(block['blocks'])}</details>"
    )


def _figures(block: Block) -> str:
    """Figures of one measurement share a command and a caption; each is said once, below all of
    them.
    """
    figures = block["figures"]
    commands = list(dict.fromkeys(figure["command"] for figure in figures))
    captions = list(dict.fromkeys(figure["caption"] for figure in figures))
    shared = len(captions) == 1
    cells = "\n".join(_figure(figure, with_caption=not shared) for figure in figures)
    below = f"<p class='note'>{_e(captions[0])}</p>" if shared and captions[0] else ""
    return f"<div class='figures'>{cells}</div>{below}" + "".join(
        _command({"command": c}) for c in commands
    )


def _figure(figure: Mapping[str, Any], *, with_caption: bool) -> str:
    caption = (
        f"<figcaption>{_e(figure['caption'])}</figcaption>"
        if with_caption and figure["caption"]
        else ""
    )
    return f"<figure><h3>{_e(figure['title'])}</h3>{draw_picture(figure)}{caption}</figure>"


def _picture(block: Block) -> str:
    if not str(block["source"]).startswith("data:image/png;base64,"):
        raise ValueError(
            f"source={str(block['source'])[:40]!r}: accepted is data:image/png;base64,… in the page"
            " itself"
        )
    caption = f"<figcaption>{_e(block['caption'])}</figcaption>" if block.get("caption") else ""
    return (
        f"<figure class='sheet'><img src='{_e(block['source'])}'"
        f" alt='{_e(block['alt'])}'>{caption}</figure>"
    )


def _table(block: Block) -> str:
    columns, rows = [str(column) for column in block["columns"]], block["rows"]
    classes = [_column_class([row[i] for row in rows]) for i in range(len(columns))]
    head = "".join(
        f"<th scope='col'{_class(name if name == 'number' else '')}>{_e(column)}</th>"
        for column, name in zip(columns, classes, strict=True)
    )
    body = []
    for row in rows:
        cells = [f"<th scope='row'{_class(classes[0])}>{_cell(row[0], columns[0])}</th>"]
        cells += [
            f"<td{_class(classes[i])}>{_cell(row[i], columns[i])}</td>"
            for i in range(1, len(columns))
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    title, caption = block.get("title") or "", block.get("caption") or ""
    named = f"<h3>{_e(title)}</h3>" if title else ""
    said = f"<p class='note'>{_e(caption)}</p>" if caption else ""
    return (
        f"{named}{said}<div class='scroll' role='region' aria-label='{_e(title or 'table')}'"
        " tabindex='0'><table>"
        f"<thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(body)}</tbody></table></div>{_command(block)}"
    )


def _column_class(cells: Sequence[object]) -> str:
    """Numbers stand flush right, short texts stay on one line, long ones get room."""
    if _is_numeric(cells):
        return "number"
    longest = max((len(cell_text(cell)) for cell in cells), default=0)
    return "short" if longest <= 24 else "wide" if longest > 38 else ""


def _class(name: str) -> str:
    return f" class='{name}'" if name else ""


def _cell(value: object, column: str) -> str:
    text = cell_text(value)
    tone_and_sign = BADGES.get(text) if column in BADGE_COLUMNS else None
    if tone_and_sign is None:
        return _e(text)
    tone, sign = tone_and_sign
    return f"<span class='badge {tone}'>{sign} {_e(text)}</span>"


def _is_numeric(cells: Sequence[object]) -> bool:
    texts = [cell_text(cell) for cell in cells if cell is not None]
    number = r"[+−-]?[\d∞][\d.,e+−-]*"
    return bool(texts) and all(
        re.fullmatch(rf"{number}( … {number}| ?[×%s])?", text) for text in texts
    )


_RENDERERS: dict[str, Callable[[Block], str]] = {
    "text": _text,
    "heading": _heading,
    "list": _list,
    "facts": _facts,
    "code": _code,
    "command": _command,
    "table": _table,
    "picture": _picture,
    "figures": _figures,
    "details": _details,
}
