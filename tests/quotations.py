"""What README.md and docs/ quote of the program's output, and the program's own words beside it.

How to quote (tests/test_documents.py holds every page to it):

- A comment that begins with "# prints" after a statement of a ```python block: what the statement
  printed. "..." stands for anything.
- `<!-- output of the program above -->` before a bare ``` block or a > quote: what the python block
  before it printed, or a passage of that.
- `<!-- output of: halfulp ls formats -->`: what this command prints, run in an empty folder; what
  takes long is replayed from tests/recorded/ (`REPLAYED`).
- Either with "numbers aside" before the arrow, where numbers are another machine's: they are then
  held to be numbers, and no more.
- `<!-- in the words of: src/halfulp/isolate/ src/halfulp/report/legend.py -->`: every three words
  in a row stand so in a text of those files, "..." and numbers between them. For what nothing
  cheap can print.
- `<!-- not output -->`: a bare block that quotes nothing.

Python blocks of a page run one after the other in one namespace; `<!-- not run: REASON -->` before
a block leaves it out. A phrase of several words in "double quotes" outside code is the program's.

    python -m tests.quotations                    # compare every page
    python -m tests.quotations --write [PAGE...]  # and fill in what differs
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import itertools
import json
import os
import re
import sys
import tempfile
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import halfulp
from halfulp import cli
from halfulp.audit import Shape
from halfulp.runs.threads import one_thread

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "recorded"
WIDTH = 100  # of a > quote
SMALL = (Shape(1, 8, 96, 96, 32),)
"""Audits of pages are of this size: they say what the default says, in a quarter of its time."""

_PIECE = re.compile(
    r"^(?:<!-- *(?P<marker>[^\n]*?) *-->\n+)?"
    r"(?:```(?P<language>[\w-]*)\n(?P<code>.*?)^```$|(?P<quote>(?:^>[^\n]*\n?)+))",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")
_WORD = re.compile(r"\w+", re.UNICODE)


def pages() -> list[str]:
    """Every page that users read; the lab log and the table of classes are records of their day."""
    docs = (p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").rglob("*.md")))
    return ["README.md", *(p for p in docs if p not in ("docs/log.md", "docs/transformers.md"))]


@dataclass(frozen=True)
class Piece:
    """A fenced block or a > quote of a page."""

    start: int  # of its text, in the page
    text: str  # as it stands there
    language: str  # "" for a bare block; ">" for a quote
    marker: str

    @property
    def said(self) -> str:
        """Without the signs of a quote."""
        return (
            re.sub(r"^> ?", "", self.text, flags=re.MULTILINE)
            if self.language == ">"
            else self.text
        )


def pieces(page: str) -> Iterator[Piece]:
    """The blocks and quotes of a page's text."""
    for found in _PIECE.finditer(page):
        group = "code" if found["code"] is not None else "quote"
        language = ">" if group == "quote" else found["language"]
        yield Piece(found.start(group), found[group], language, found["marker"] or "")


@dataclass
class Page:
    """A page as it is read from top to bottom; what is wrong with it is in `wrong`."""

    text: str
    space: dict[str, Any] = field(default_factory=lambda: {"__name__": "document"})
    printed: str = ""  # by the last python block
    printed_by_all: str = ""
    wrong: list[str] = field(default_factory=list)
    renewed: list[tuple[Piece, str]] = field(default_factory=list)

    def read(self) -> Page:
        """Run its python and compare its quotations."""
        audit = halfulp.audit
        small = functools.partial(audit, shapes=SMALL)
        with mock.patch.object(halfulp, "audit", small):
            for piece in pieces(self.text):
                if piece.language == "python":
                    if not piece.marker.startswith("not run: "):
                        self._run(piece)
                elif piece.language in ("", "text", ">") and piece.marker != "not output":
                    self._compare(piece)
        known = literals("src/halfulp")
        for phrase in quoted_phrases(self.text):
            if _words(phrase) not in known:
                self.wrong.append(f'"{phrase}": in no text of src/halfulp')
        return self

    def rewritten(self) -> str:
        """The page with what was compared and found different filled in."""
        text = self.text
        for piece, new in reversed(self.renewed):
            text = text[: piece.start] + new + text[piece.start + len(piece.text) :]
        return text

    def _run(self, piece: Piece) -> None:
        claims, self.printed = _claims(piece.text), ""
        for statement in ast.parse(piece.text).body:
            out = io.StringIO()
            code = compile(ast.Module([statement], []), "document", "exec", dont_inherit=True)
            with contextlib.redirect_stdout(out):
                exec(code, self.space)
            said = claims.get(statement.end_lineno or 0)
            if said is not None and not matches(said, out.getvalue(), numbers_aside=True):
                self.wrong.append(f"# prints {said}\n  it printed: {out.getvalue().strip()}")
            self.printed += out.getvalue()
        self.printed_by_all += self.printed

    def _compare(self, piece: Piece) -> None:
        aside = piece.marker.endswith("numbers aside")
        marker = piece.marker.removesuffix("numbers aside").rstrip(" ,")
        if marker.startswith("in the words of: "):
            known = literals(*marker.removeprefix("in the words of: ").split())
            self.wrong += [
                f"“{words}”: {marker} have it not" for words in unsaid(piece.said, known)
            ]
            return
        if marker == "output of the program above":
            out = self.printed
        elif marker.startswith("output of: "):
            out = printed_by(marker.removeprefix("output of: "))
        else:
            said = textwrap.shorten(piece.said, 60)
            self.wrong.append(f"{said!r} has no comment that says what prints it")
            return
        if not matches(piece.said, out, numbers_aside=aside):
            self.wrong.append(f"{marker}: the page has\n{piece.said}\nit printed\n{out}")
            self.renewed.append((piece, _as_in(piece, out)))


def matches(quoted: str, printed: str, *, numbers_aside: bool = False) -> bool:
    """Whether a passage of what was printed reads as quoted, but for white space; "..." stands for
    anything.
    """
    wanted, found = (" ".join(x.split()) for x in (quoted, printed))
    if numbers_aside:
        wanted, found = (_NUMBER.sub("#", x) for x in (wanted, found))
    pattern = ".*".join(re.escape(part.strip()) for part in wanted.split("..."))
    return bool(wanted) and re.search(pattern, found) is not None


def unsaid(quoted: str, known: str) -> list[str]:
    """Three words in a row of a quotation, numbers between them aside, that no known text has."""
    found = []
    for part in _NUMBER.sub("...", quoted).split("..."):
        words = _WORD.findall(part)
        size = min(3, len(words))
        for at in range(len(words) - size + 1 if words else 0):
            phrase = f" {' '.join(words[at : at + size])} "
            if phrase not in known:
                found.append(phrase.strip())
    return found


def quoted_phrases(page: str) -> list[str]:
    """What stands in double quotes, several words, outside code, quotes and comments."""
    prose = _PIECE.sub("", page)
    prose = re.sub(r"<!--.*?-->|`[^`]*`", "", prose, flags=re.DOTALL)
    found = re.findall(r'"([^"\n]*(?:\n[^"\n]+)?)"', prose)
    return [" ".join(x.split()) for x in found if len(_WORD.findall(x)) > 1]


@functools.cache
def literals(*paths: str) -> str:
    """All texts in the sources of these files and folders: words alone, one space between."""
    files = [
        file
        for path in paths
        for file in (
            [ROOT / path] if (ROOT / path).is_file() else sorted((ROOT / path).rglob("*.py"))
        )
    ]
    assert files, paths
    return "\n".join(words for file in files for words in _literals_of(file))


def _literals_of(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    comments = set()
    for node in ast.walk(tree):  # a parent before its children
        if isinstance(node, ast.Expr):
            comments.add(id(node.value))
        elif id(node) in comments:
            continue
        elif isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "\n" for p in node.values)
            yield from map(_words, "".join(map(str, parts)).split("\n"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _words(node.value)


def _words(text: str) -> str:
    return f" {' '.join(_WORD.findall(_NUMBER.sub(' ', text)))} "


def _claims(code: str) -> dict[int, str]:
    """What comments of a block say is printed, by the line they end."""
    return {
        token.start[0]: token.string.removeprefix("# prints").strip()
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT and token.string.startswith("# prints")
    }


def printed_by(command: str) -> str:
    """What commands print, one after the other where there are several ("&&")."""
    out, before = io.StringIO(), Path.cwd()
    replayed: Callable[[], str] | None = REPLAYED.get(command)
    if replayed is not None:
        return replayed()
    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(out):
        os.chdir(empty)
        try:
            for one in command.split(" && "):
                program, *arguments = one.split()
                assert program == "halfulp", one
                with contextlib.redirect_stderr(out):
                    cli.main(arguments)
        finally:
            os.chdir(before)
    return out.getvalue()


def _as_in(piece: Piece, out: str) -> str:
    """What was printed, as a piece of its kind."""
    lines = out.strip("\n").split("\n")
    if piece.language != ">":
        return "\n".join(line.rstrip() for line in lines) + "\n"
    wrapped = itertools.chain.from_iterable(textwrap.wrap(x, WIDTH - 2) or [""] for x in lines)
    return "".join(f"> {line}".rstrip() + "\n" for line in wrapped)


def record_isolation(folder: Path) -> None:
    """Keep the outcomes of a finished `halfulp isolate` for `replay_isolation`."""
    plain = json.loads((folder / "isolation.json").read_text(encoding="utf-8"))
    runs = {
        f"{rung['attention']}, seed {run['seed']}": run
        for rung in plain["rungs"]
        for run in rung["runs"]
    }
    text = json.dumps(runs, indent=0, sort_keys=True, ensure_ascii=False)
    (RECORDED / "isolate_seconds.json").write_text(text + "\n", encoding="utf-8")


def replay_isolation() -> str:
    """`halfulp isolate` of the preset `seconds`: its questions and its words, with outcomes of runs
    that were made before (`--record-isolation FOLDER`).
    """
    from rich.console import Console

    from halfulp.isolate import climb
    from halfulp.isolate.isolation import isolate
    from halfulp.isolate.rung import Job, RungRun
    from halfulp.report.trial_page import print_trial
    from halfulp.training.presets import seconds

    recorded = json.loads((RECORDED / "isolate_seconds.json").read_text(encoding="utf-8"))

    def run(job: Job) -> RungRun:
        key = f"{job.config.attention}, seed {job.config.seed}"
        assert key in recorded, f"{key} is not recorded: see tests/quotations.py"
        made = {f: recorded[key][f] for f in RungRun.__dataclass_fields__}
        return RungRun(**made | {"rung": job.rung, "folder": str(job.folder)})

    out = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(climb, "run_rung", run):
        found = isolate(seconds(), out=Path(folder) / "out", workers=1, seeds=(0, 1, 2))
    print_trial(found.as_dict(), Console(file=out, width=200))
    return out.getvalue()


REPLAYED: dict[str, Callable[[], str]] = {"halfulp isolate flash": replay_isolation}
"""Commands that take long, by what prints their words from what is recorded."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", default=pages(), help="README.md, docs/ci.md …")
    parser.add_argument("--write", action="store_true", help="fill in what differs")
    parser.add_argument(
        "--record-isolation", type=Path, help="a finished folder of halfulp isolate"
    )
    chosen = parser.parse_args()
    if chosen.record_isolation:
        record_isolation(chosen.record_isolation)
        return 0
    found = 0
    for name in chosen.pages:
        with one_thread():
            page = Page((ROOT / name).read_text(encoding="utf-8")).read()
        found += len(page.wrong)
        for line in page.wrong:
            print(f"{name}: {line}")
        if chosen.write and page.renewed:
            (ROOT / name).write_text(page.rewritten(), encoding="utf-8")
            print(f"{name}: {len(page.renewed)} filled in")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
