"""A strict reader of the pages: what is open must be closed, and nothing may be fetched from
anywhere.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

from halfulp.report import html

VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "source",
    "track",
    "wbr",
}
# The one script that a page may have, and the policy that allows no other and no fetching.
SCRIPT = (Path(html.__file__).parent / "templates" / "page.js").read_text(encoding="utf-8")
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline';"
    f" script-src 'sha256-{b64encode(sha256(SCRIPT.encode()).digest()).decode()}';"
    " base-uri 'none'; form-action 'none'"
)
FETCHES = {"src", "srcset", "data", "action", "formaction", "poster", "background", "ping"}


class Page(HTMLParser):
    """A parsed page: its problems, the tags it uses, its ids, links and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.problems: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.described: list[str] = []
        self.policy = ""
        self._open: list[str] = []
        self._glue = False
        if not text.startswith("<!DOCTYPE html>"):
            self.problems.append("no doctype")
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self._open]
        self.problems += [
            f"id {name!r} twice" for name in set(self.ids) if self.ids.count(name) > 1
        ]
        self.problems += [
            f"link to {name}, which is not there" for name in self.links if name[1:] not in self.ids
        ]
        self.problems += [
            f"described by {name}, which is not there"
            for name in self.described
            if name not in self.ids
        ]
        if "script" in self.tags and self.policy != POLICY:
            self.problems.append(f"a script under the policy {self.policy!r}")

    @property
    def text(self) -> str:
        """All visible text."""
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self._start(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._start(tag, attrs)

    def handle_endtag(self, tag):
        if not self._open or self._open[-1] != tag:
            self.problems.append(f"</{tag}> closes {self._open[-1:]}")
            return
        self._open.pop()

    def handle_data(self, data):
        if "style" in self._open:
            if re.search(r"@import|url\((?!#)", data):
                self.problems.append("the style sheet fetches")
        elif "script" in self._open:
            if data != SCRIPT:
                self.problems.append("a <script> that is not the page's own")
        elif self._glue and self.words:
            self.words[-1] += data
        elif not {"title"} & set(self._open):
            self.words.append(data)
        self._glue = False

    def _start(self, tag, attrs):
        self.tags.append(tag)
        self._glue = tag == "wbr"
        if tag == "meta" and ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]
        if tag in {"iframe", "object", "embed", "link", "base", "form"}:
            self.problems.append(f"<{tag}>")
        for name, value in attrs:
            value = value or ""
            picture = tag == "img" and value.startswith("data:image/png;base64,")
            if (name in FETCHES and not picture) or name.startswith("on"):
                self.problems.append(f"{tag} {name}={value!r}")
            in_page = tag == "image" and value.startswith("data:image/png;base64,")
            if name == "href" and not value.startswith("#") and not in_page:
                self.problems.append(f"{tag} href={value!r}")
            if name == "href" and tag == "a":
                self.links.append(value)
            if "javascript:" in value or re.search(r"url\((?!#)", value):
                self.problems.append(f"{tag} {name}={value!r}")
            if name == "aria-describedby":
                self.described.append(value)
            if name == "id":
                self.ids.append(value)


def problems(text: str) -> list[str]:
    """What is wrong with a page; the address of a namespace is no address to fetch."""
    found = Page(text).problems
    addresses = [
        url for url in re.findall(r"https?://[^\s\"'<>)]+", text) if "w3.org/2000/svg" not in url
    ]
    return found + [f"address {url}" for url in addresses]
