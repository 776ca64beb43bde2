"""Pages of run folders that are being written, given to browsers on this machine.

It listens on the loopback interface, reads and never writes, and answers GET and HEAD for pages
that it made up itself: an address names a run by a number of its own and never by a path, so that
none leads out of the folders that were given. A browser that some other page sends here under a
name of its own (DNS rebinding) is refused by the Host header.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from halfulp import __version__
from halfulp.cli.report_command import sections_of
from halfulp.cli.shell import typed_command

ADDRESS = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
_DEPTH = 2  # folders below one that was given in which runs are looked for
_MOST_RUNS = 500
_FILES = ("run.json", "metrics.jsonl", "isolation.json")
_TIMEOUT = 20.0  # seconds that a request may take to come
_POLICY = (
    "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none';"
    " img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
"""Beside the page's own, which allows its one script by hash: both hold."""


@dataclass
class _Made:
    """A page as it was made."""

    state: tuple[Any, ...]  # of the files that it was made of
    text: bytes
    tag: str
    ready: float  # when it may be made again


class Site:
    """The pages of the runs in some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder.resolve() for folder in folders]
        # a page is made again after this many times what making it took, at the earliest
        self.rest = 4.0
        self._made: dict[str, _Made] = {}
        self._lock = threading.Lock()  # figures are drawn and warnings caught one at a time

    def runs(self) -> dict[str, Path]:
        """Run folders by the number that their address has; links are not followed."""
        found = {}
        for folder in self.folders:
            for path in _runs_below(folder, _DEPTH):
                found[hashlib.sha256(str(path).encode(errors="replace")).hexdigest()[:12]] = path
                if len(found) == _MOST_RUNS:
                    return found
        return found

    def page(self, address: str) -> tuple[bytes, str] | None:
        """The page of an address and its tag; None where there is none."""
        runs = self.runs()
        if address == "/":
            return self._kept("/", tuple(_state(path) for path in runs.values()), runs)
        number = address.removeprefix("/run/")
        if number == address or number not in runs:
            return None
        return self._kept(address, _state(runs[number]), {number: runs[number]})

    def _kept(
        self, address: str, state: tuple[Any, ...], runs: dict[str, Path]
    ) -> tuple[bytes, str]:
        with self._lock:
            made = self._made.get(address)
            now = time.monotonic()
            if made is None or (made.state != state and now >= made.ready):
                tag = hashlib.sha256(repr((address, state)).encode(errors="replace")).hexdigest()
                tag = f'"{tag[:16]}"'
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    text = _index(runs, tag) if address == "/" else _page(runs, tag, caught)
                took = time.monotonic() - now
                # a fifth of the time at most goes into drawing, however often a browser asks
                ready = now + took * (1 + self.rest)
                data = text.encode(errors="backslashreplace")
                made = self._made[address] = _Made(state, data, tag, ready)
            return made.text, made.tag


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "run.json").is_file():
        yield folder
    if depth:
        try:
            inner = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        except OSError:
            return
        for path in inner:
            if path.is_dir() and not path.is_symlink():
                yield from _runs_below(path, depth - 1)


def _state(folder: Path) -> tuple[Any, ...]:
    """What changes when a run goes on."""
    state: list[Any] = [str(folder)]
    for name in _FILES:
        try:
            found = (folder / name).stat()
        except OSError:
            state.append(None)
        else:
            state.append((found.st_mtime_ns, found.st_size))
    return tuple(state)


def _index(runs: dict[str, Path], tag: str) -> str:
    from halfulp.report.html import page

    items = [
        {"text": _title(path), "to": f"/run/{number}", "note": _note(path)}
        for number, path in runs.items()
    ]
    blocks = [{"kind": "links", "items": items}]
    if not items:
        blocks = [{"kind": "text", "text": "No run has begun here yet."}]
    section = {"heading": "Runs", "blocks": blocks}
    return page("halfulp serve", "", [section], meta=f"halfulp {__version__}", tag=tag)


def _title(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _note(path: Path) -> str:
    """What a run.json says in a line; whatever it holds is somebody else's."""
    from halfulp.runs.folder import read_json
    from halfulp.watch.troubles import CAUSES

    record = read_json(path / "run.json")
    if not isinstance(record, dict):
        return "run.json is torn"
    said = [str(record.get(name)) for name in ("kind", "status", "started") if record.get(name)]
    if record.get("kind") == "watch":
        causes = record.get("causes")
        kinds = [str(one.get("kind")) for one in causes or () if isinstance(one, dict)]
        kinds = [CAUSES[kind].name if kind in CAUSES else kind for kind in kinds]
        said += [str(record.get("loss") or "")]
        said += [f"alarm: {', '.join(dict.fromkeys(kinds))}"] if kinds else []
    return ", ".join(word[:80] for word in said if word)


def _page(runs: dict[str, Path], tag: str, caught: list[Any]) -> str:
    from halfulp.report.run_page import run_page

    (path,) = runs.values()
    sections: list[dict[str, Any]]
    try:
        _, sections = sections_of(path)
        found = ""
    except (ValueError, OSError) as error:
        sections, found = [], " ".join(str(error).split())
    said = [found] if found else []
    said += list(dict.fromkeys(str(one.message) for one in caught))
    back = {"kind": "links", "items": [{"text": "All runs", "to": "/", "note": ""}]}
    blocks: list[dict[str, Any]] = [{"kind": "list", "items": said}] if said else []
    finding = "It could not be read, or not wholly." if said else "Read as it stands in its folder."
    first = {"heading": "This run", "finding": finding, "blocks": [*blocks, back]}
    return run_page([first, *sections], [path.name], typed_command(), f"halfulp {__version__}", tag)


class _Handler(BaseHTTPRequestHandler):
    """Answers for one site; the server has it."""

    server_version, sys_version = "halfulp", ""
    protocol_version = "HTTP/1.0"  # no connection outlives its answer, or the server
    timeout = _TIMEOUT

    def do_GET(self) -> None:
        """A page."""
        self._answer(whole=True)

    def do_HEAD(self) -> None:
        """Its headers."""
        self._answer(whole=False)

    def _answer(self, *, whole: bool) -> None:
        assert isinstance(self.server, Server)
        if not self._is_meant():
            self._send(403, b"This address answers to its own name alone.\n", whole)
            return
        try:
            found = self.server.site.page(urlsplit(self.path).path)
        except (OSError, ValueError) as error:
            said = " ".join(str(error).split())
            self._send(500, f"{said}\n".encode(errors="backslashreplace"), whole)
            return
        if found is None:
            self._send(404, b"There is no such page.\n", whole)
            return
        text, tag = found
        if self.headers.get("If-None-Match") == tag:
            self._send(304, b"", False, ETag=tag)
            return
        self._send(200, text, whole, kind="text/html", ETag=tag)

    def _is_meant(self) -> bool:
        """Whether the browser asked for this machine, and no page of another site did."""
        assert isinstance(self.server, Server)
        port = self.server.port
        hosts = {f"{name}:{port}" for name in _NAMES} | (set(_NAMES) if port == 80 else set())
        # of two Host headers either may be the one that a browser meant
        if len(self.headers.get_all("Host", [])) != 1 or self.headers["Host"].lower() not in hosts:
            return False
        # a page elsewhere that embeds or fetches this one reaches it by its true name, and says so
        # here
        return self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")

    def _send(
        self, status: int, data: bytes, whole: bool, kind: str = "text/plain", **more: str
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(data)),
            "Content-Security-Policy": _POLICY,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            **more,
        }
        if status == 304:
            del headers["Content-Type"], headers["Content-Length"]
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if whole:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: the terminal is the user's."""


class Server(ThreadingHTTPServer):
    """A site on the loopback interface; close it with `server_close`."""

    daemon_threads = True

    def __init__(self, site: Site, port: int) -> None:
        """Raise OSError where the port is taken; 0 takes any that is free."""
        self.site = site
        super().__init__((ADDRESS, port), _Handler)

    def handle_error(self, *_: Any) -> None:
        """Nothing: a browser that went away is no error."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"http://{ADDRESS}:{self.port}/"
