"""`halfulp serve`: what it gives to whom, and, in a browser, how a page follows its run."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import halfulp
from halfulp import cli
from halfulp.cli.live import Server, Site
from halfulp.cli.serve_command import serve
from tests.watch.gpt import GPT, train

HOSTILE = "<img src=x onerror=alert(1)>'\"&amp;\u202e\x07 run"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A watched run that has ended; copies of its files are runs of their own."""
    run = tmp_path_factory.mktemp("recorded") / "run"
    torch.manual_seed(0)
    with halfulp.watch(model := GPT(), every=1, folder=run):
        train(model, 12)
    return run


def begin(recorded: Path, run: Path, lines: int | None = None, **changed: Any) -> Path:
    """A run folder with the first lines of the recorded one."""
    run.mkdir(parents=True)
    record = json.loads((recorded / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(json.dumps(record | changed), encoding="utf-8")
    written = (recorded / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(written[:lines]), encoding="utf-8")
    return run


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of the folder `runs`, which is empty; its pages have no pictures, which take a
    second each.
    """
    monkeypatch.setattr("halfulp.report.html.draw_picture", lambda figure: "<svg></svg>")
    (tmp_path / "runs").mkdir()
    server = Server(Site([tmp_path / "runs"]), 0)
    server.site.rest = 0.0
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
    """Status, text and headers of an answer."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    for name, value in ({"Host": f"127.0.0.1:{port}"} | headers).items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.headers
    connection.close()
    return found


def address(server: Server, run: Path) -> str:
    (number,) = (number for number, path in server.site.runs().items() if path == run.resolve())
    return f"/run/{number}"


def test_no_other_host_and_no_other_site_is_answered(served: Server, recorded: Path) -> None:
    begin(recorded, served.site.folders[0] / "one")
    port = served.server_address[1]
    assert served.server_address[0] == "127.0.0.1"
    for host in (f"127.0.0.1:{port}", f"LOCALHOST:{port}"):
        assert ask(served, "/", Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "", f"127.0.0.1:{port}.evil", "127.0.0.1"):
        status, text, _ = ask(served, "/", Host=host)
        assert (status, "run" in text) == (403, False), host
    assert ask(served, "/", Sec_Fetch_Site="cross-site")[0] == 403
    _, _, headers = ask(served, "/", Origin="http://evil.example")
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(served, "/", method)[0] == 501
    raw = socket.create_connection(("127.0.0.1", port), timeout=30)
    raw.sendall(b"GET / HTTP/1.1\r\n\r\n")  # no host at all
    assert b" 403 " in raw.recv(100)
    raw.close()


@pytest.mark.parametrize(
    "path",
    [
        "/../run.json",
        "/run/../../etc/passwd",
        "/run/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/run/one",
        "/run/",
        "/run/000000000000",
        "/secret.txt",
        "/runs/one/run.json",
        "/\\..\\x",
        "/run/%00",
        "http://evil.example/run/x",
    ],
)
def test_addresses_are_no_paths(served: Server, recorded: Path, path: str) -> None:
    begin(recorded, served.site.folders[0] / "one")
    (served.site.folders[0] / "secret.txt").write_text("secret")
    status, text, _ = ask(served, path)
    assert (status, "secret" in text) == (404, False)


def test_links_are_not_followed_and_hidden_folders_are_no_runs(
    served: Server, recorded: Path, tmp_path: Path
) -> None:
    outside = begin(recorded, tmp_path / "outside")
    (served.site.folders[0] / "link").symlink_to(outside)
    begin(recorded, served.site.folders[0] / ".hidden")
    assert served.site.runs() == {}
    assert "No run has begun here yet" in ask(served, "/")[1]


def test_hostile_names_are_text(served: Server, recorded: Path) -> None:
    run = begin(
        recorded,
        served.site.folders[0] / HOSTILE,
        loss="</script><b>",
        layers=["<script>alert(2)</script>", "b"],
    )
    for path in ("/", address(served, run)):
        status, text, _ = ask(served, path)
        assert status == 200
        assert "<img" not in text.replace('<img src="data:', "")
        assert "<script>alert" not in text
        assert "&lt;img" in text
        assert "\x07" not in text


def test_what_is_not_new_is_not_sent_again(served: Server, recorded: Path) -> None:
    run = begin(recorded, served.site.folders[0] / "one", 3)
    path = address(served, run)
    status, text, headers = ask(served, path)
    assert (status, "the last at step 3" in text) == (200, True)
    assert ask(served, path, If_None_Match=headers["ETag"])[:2] == (304, "")
    assert ask(served, path, "HEAD")[:2] == (200, "")
    lines = (recorded / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(lines[3:6])
    status, text, _ = ask(served, path, If_None_Match=headers["ETag"])
    assert (status, "the last at step 6" in text) == (200, True)


@pytest.mark.parametrize("fault", ["torn line", "torn record", "gone", "older", "another's"])
def test_what_cannot_be_read_is_said_on_the_page(
    served: Server, recorded: Path, fault: str
) -> None:
    run = begin(recorded, served.site.folders[0] / "one", 3)
    path = address(served, run)
    if fault == "torn line":
        with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"step": 4, "measure": {"max_sc')
    elif fault == "torn record":
        (run / "run.json").write_text('{"halfulp": "0.1.0", "kind"')
    elif fault == "gone":
        (run / "metrics.jsonl").unlink()
    else:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        for name in ("causes", "looked", "warnings", "matrices"):
            del record[name]
        if fault == "another's":
            del record["layers"]
        (run / "run.json").write_text(json.dumps(record | {"halfulp": "0.0.1"}), encoding="utf-8")
    status, text, _ = ask(served, path)
    assert status == 200
    says = {
        "torn line": "line 4 is torn and was left out",
        "torn record": "there is no run.json, or it is torn",
        "gone": "0 measurements",
        "older": "the last at step 3",
        "another&#39;s": "",
        "another's": "is not as halfulp writes it",
    }
    assert says[fault] in " ".join(text.replace("<wbr>", "").split())
    assert ask(served, "/")[0] == 200


def test_bad_arguments_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = Server(Site([tmp_path]), 0)
    for arguments, says in (
        ([], "runs: none given"),
        ([str(tmp_path / "none")], "is no folder"),
        ([str(tmp_path), "--port", "99999"], "port=99999: accepted is 0 to 65535"),
        ([str(tmp_path), "--port", str(taken.server_address[1])], "accepted is one that is free"),
    ):
        assert cli.main(["serve", *arguments]) == 2
        assert says in capsys.readouterr().err
    taken.server_close()


# in a browser -------------------------------------------------------------------------------------


def test_a_page_follows_its_run_until_the_server_ends(
    browser: Any, recorded: Path, tmp_path: Path
) -> None:
    from tests.report.test_browser import FAULTS

    (tmp_path / "runs").mkdir()
    server = Server(Site([tmp_path / "runs"]), 0)
    server.site.rest = 0.0
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    said: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.clock.install()  # two seconds pass when the test says so
    page.goto(server.url)
    assert "No run has begun here yet" in page.inner_text("main")

    run = begin(recorded, tmp_path / "runs" / HOSTILE, 10, status="running", ended=None)
    page.clock.run_for(2500)
    page.get_by_role("link", name="onerror").wait_for()
    for width in (390, 1200):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(FAULTS) == []
    page.get_by_role("link", name="onerror").click()
    page.get_by_text("the last at step 10").first.wait_for()
    for width in (390, 1200):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(FAULTS) == []
    assert page.locator("svg").count() > 0

    lines = (recorded / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(lines[10:])
    page.clock.run_for(2500)
    page.get_by_text("the last at step 12").first.wait_for()
    assert page.locator("#live").inner_text().startswith("Live")
    assert said == []

    server.shutdown()
    thread.join()
    server.server_close()
    page.clock.run_for(2500)
    page.get_by_text("Nobody answers").wait_for()
    assert "the last at step 12" in page.inner_text("main")
    assert all("ERR_CONNECTION_REFUSED" in text for text in said), said
    context.close()


def test_a_log_has_the_address_while_it_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    log = (tmp_path / "log").open("w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", log)
    look = lambda *_, **__: seen.append((tmp_path / "log").read_text(encoding="utf-8"))  # noqa: E731
    monkeypatch.setattr(Server, "serve_forever", look)
    with log:
        assert serve((tmp_path,), port=0) == 0
    assert seen[0].startswith("http://127.0.0.1:")
