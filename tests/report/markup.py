"""A strict reader of the pages: what is open must be closed, and nothing may be fetched from
anywhere.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

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
        self._open: list[str] = []
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
        elif not {"title"} & set(self._open):
            self.words.append(data)

    def _start(self, tag, attrs):
        self.tags.append(tag)
        if tag in {"script", "iframe", "object", "embed", "link", "base", "form"}:
            self.problems.append(f"<{tag}>")
        for name, value in attrs:
            value = value or ""
            if name in FETCHES or name.startswith("on"):
                self.problems.append(f"{tag} {name}={value!r}")
            if name == "href" and not value.startswith("#"):
                self.problems.append(f"{tag} href={value!r}")
            if name == "href" and tag == "a":
                self.links.append(value)
            if "javascript:" in value or re.search(r"url\((?!#)", value):
                self.problems.append(f"{tag} {name}={value!r}")
            if name == "id":
                self.ids.append(value)


def problems(text: str) -> list[str]:
    """What is wrong with a page; the address of a namespace is no address to fetch."""
    found = Page(text).problems
    addresses = [
        url for url in re.findall(r"https?://[^\s\"'<>)]+", text) if "w3.org/2000/svg" not in url
    ]
    return found + [f"address {url}" for url in addresses]
