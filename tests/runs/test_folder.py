"""Files are whole or not there, and a run replaces another one only when it is finished."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from halfulp.runs.folder import (
    NewRun,
    check_file,
    check_folder,
    is_run_folder,
    json_text,
    read_array,
    read_json,
    remove,
    write_json,
    write_text,
)
from halfulp.runs.lock import Lock, is_held
from halfulp.runs.record import new_record, read_record


def run_in(folder: Path, name: str = "first", kind: str = "demo") -> Path:
    folder.mkdir(exist_ok=True)
    write_json(folder / "run.json", {"halfulp": "0", "kind": kind, "name": name})
    (folder / "tensors").mkdir(exist_ok=True)
    return folder


def test_what_is_written_is_read(tmp_path):
    file = write_json(tmp_path / "a.json", {"δ": [1.5, math.nan, math.inf, None], 3: (True, "x")})
    assert read_json(file) == {"δ": [1.5, None, None, None], "3": [True, "x"]}
    assert list(tmp_path.iterdir()) == [file], "nothing temporary is left"
    assert file.stat().st_mode & 0o044, "others may read it, as any file written here"


def test_a_place_that_takes_no_file_is_told_by_the_name_that_was_given(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone/a\.txt'$"):
        write_text(tmp_path / "gone" / "a.txt", "text")


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_a_stopped_write_leaves_the_old_file(tmp_path, monkeypatch, stage):
    file = write_text(tmp_path / "a.txt", "old and whole")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync") if stage == "fsync" else (Path, "replace")), stopped)
    with pytest.raises(KeyboardInterrupt):
        write_text(file, "new " * 10_000)
    assert file.read_text(encoding="utf-8") == "old and whole"
    assert list(tmp_path.iterdir()) == [file]


def test_the_data_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("sync"), fsync(handle))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (order.append("rename"), replace(self, to))[1]
    )
    write_text(tmp_path / "a.txt", "x")
    assert order[:2] == ["sync", "rename"]


def test_json_has_no_nan():
    assert json.loads(json_text([math.nan, -math.inf, 0.1])) == [None, None, 0.1]


def test_a_new_run_takes_its_place_at_the_end(tmp_path):
    out = tmp_path / "demo"
    new = NewRun(out, "demo")
    assert not out.exists()
    run_in(new.folder)
    assert new.finish() == out
    assert is_run_folder(out, "demo")
    assert list(tmp_path.iterdir()) == [out]
    assert out.stat().st_mode & 0o055, "others may read it, as any folder made here"


def test_the_old_run_is_there_until_the_new_one_is_whole(tmp_path):
    out = run_in(tmp_path / "demo", "old")
    new = NewRun(out, "demo")
    run_in(new.folder, "new")
    assert read_json(out / "run.json")["name"] == "old"
    new.finish()
    assert read_json(out / "run.json")["name"] == "new"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a place where no folder can be made")
def test_a_place_where_nothing_can_be_made_is_called_as_it_was_given():
    with pytest.raises((OSError, ValueError), match="/proc/demo") as error:
        NewRun(Path("/proc/demo"), "demo")
    assert "partial" not in str(error.value)


@pytest.mark.parametrize("name", ["demo.replaced", "demo.partial", ".demo.replaced", "demo.old"])
def test_a_folder_of_the_users_is_left_alone_whatever_it_is_called(tmp_path, name):
    """A folder DEMO.replaced with somebody's thesis in it was once removed."""
    thesis = tmp_path / name / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("x", encoding="utf-8")
    for _ in range(2):
        new = NewRun(tmp_path / "demo", "demo")
        run_in(new.folder)
        new.finish()
    assert thesis.read_text(encoding="utf-8") == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "demo"])


def child(code: str, *arguments: object) -> int:
    """The exit status of a process that runs code with halfulp.runs imported."""
    start = "import os, signal, sys\nfrom pathlib import Path\n"
    start += (
        "from halfulp.runs.folder import NewRun, write_json\nfrom halfulp.runs.lock import Lock\n"
    )
    start += "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
    return subprocess.run(
        [sys.executable, "-c", start + code, *map(str, arguments)], check=False
    ).returncode


KILLED = """
new = NewRun(Path(sys.argv[1]), "demo")
write_json(new.folder / "run.json", {"halfulp": "0", "kind": "demo", "name": "new"})
if sys.argv[2] == "writing":
    die()
renames = []
rename = Path.rename
def counted(self, to):
    renames.append(to)
    return die() if len(renames) == int(sys.argv[2]) else rename(self, to)
Path.rename = counted
new.finish()
"""


@pytest.mark.parametrize("moment", ["writing", "1", "2"])
def test_a_run_killed_at_any_rename_loses_nobodys_run_and_leaves_nothing(tmp_path, moment):
    out = run_in(tmp_path / "demo", "old")
    assert child(KILLED, out, moment) == -signal.SIGKILL
    new = NewRun(out, "demo")
    assert list(new.folder.iterdir()) == [new.folder / ".lock"]
    assert read_json(out / "run.json")["name"] == "old"
    run_in(new.folder, "newest")
    new.finish()
    assert read_json(out / "run.json")["name"] == "newest"
    kept = [] if moment == "writing" else ["new"]  # it was whole: the reader's to remove
    beside = [path for path in tmp_path.iterdir() if path != out]
    assert [read_json(path / "run.json")["name"] for path in beside] == kept


def test_a_run_that_is_being_written_is_not_cleared_away(tmp_path):
    first, second = (NewRun(tmp_path / "demo", "demo") for _ in range(2))
    assert first.folder.is_dir()
    run_in(first.folder, "first")
    run_in(second.folder, "second")
    first.finish()
    second.finish()
    assert read_json(tmp_path / "demo" / "run.json")["name"] == "second"


def test_what_is_kept_for_the_reader_stays(tmp_path):
    kept = NewRun(tmp_path / "demo", "demo").keep()
    NewRun(tmp_path / "demo", "demo")
    assert kept.is_dir()


def test_other_files_are_never_replaced(tmp_path):
    thesis = tmp_path / "demo" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match="holds other files than a demo's; accepted is a new or"):
        NewRun(tmp_path / "demo", "demo")
    with pytest.raises(ValueError, match="holds other files than a demo's"):  # another kind of run
        NewRun(run_in(tmp_path / "training", kind="train"), "demo")
    assert thesis.exists()


def test_what_comes_to_stand_there_meanwhile_is_not_replaced(tmp_path):
    new = NewRun(tmp_path / "demo", "demo")
    run_in(new.folder)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match=f"the new run lies in '{new.folder}'"):
        new.finish()
    assert (tmp_path / "demo" / "thesis.tex").exists()
    assert is_run_folder(new.folder, "demo")


def test_an_empty_folder_is_taken_and_so_is_one_behind_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "demo").symlink_to("there")
    for _ in range(2):
        new = NewRun(tmp_path / "demo", "demo")
        run_in(new.folder)
        new.finish()
    assert (tmp_path / "demo").is_symlink()
    assert is_run_folder(tmp_path / "there", "demo")


def test_nothing_is_written_through_a_planted_link(tmp_path):
    """Names of temporary files cannot be guessed; a link in the file's own place is replaced."""
    victim = write_text(tmp_path / "victim", "mine")
    (tmp_path / "a.json").symlink_to(victim)
    write_json(tmp_path / "a.json", 1)
    assert victim.read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "a.json").is_symlink()
    remove(victim)
    (tmp_path / "link").symlink_to(tmp_path)
    remove(tmp_path / "link")
    assert tmp_path.is_dir()


@pytest.mark.parametrize(
    "kind", ["missing", "empty", "torn", "deep", "nan", "bytes", "folder", "fifo", "loop"]
)
def test_what_is_no_json_file_reads_as_none(tmp_path, kind):
    path = tmp_path / "a.json"
    texts = {"empty": b"", "torn": b'{"a": 1', "deep": b"[" * 200_000, "nan": b"[NaN]"}
    texts |= {"bytes": b'"\xff\xfe"'}
    if kind in texts:
        path.write_bytes(texts[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)  # which would be waited for without end
    elif kind == "loop":
        path.symlink_to(path)
    assert read_json(path) is None
    with pytest.raises(ValueError, match=r"\w"):
        read_array(path)


def test_an_array_whose_header_is_torn_anywhere_is_a_line(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((3, 2)))
    data = path.read_bytes()
    for place in range(128):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            with contextlib.suppress(ValueError):  # and nothing else
                read_array(path)


def test_one_process_writes_a_folder_and_its_end_gives_it_free(tmp_path):
    lock = Lock(tmp_path)
    assert is_held(tmp_path)
    with pytest.raises(ValueError, match=f"being written by process {os.getpid()} on "):
        Lock(tmp_path)
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    assert child("lock = Lock(Path(sys.argv[1])); die()", tmp_path) == -signal.SIGKILL
    assert (tmp_path / ".lock").exists()
    assert not is_held(tmp_path)
    Lock(tmp_path).release()


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_a_lock_that_is_something_else_is_said(tmp_path, kind):
    path = tmp_path / ".lock"
    {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path)}.get(
        kind, lambda: path.symlink_to("victim")
    )()
    with pytest.raises(ValueError, match=r"lock='.*/\.lock': it is a link, a folder or a pipe"):
        Lock(tmp_path)
    assert not (tmp_path / "victim").exists()


def test_a_record_that_was_altered_is_refused(tmp_path):
    record = new_record("train", {"steps": 3}, None, data={"sha256": "1"}, batches="2")
    write_json(tmp_path / "run.json", record)
    assert read_record(tmp_path, "train", "demo")["config"] == {"steps": 3}
    for changed in (
        {"config": {"steps": 4}},
        {"data": {}},
        {"batches": "3"},
        {"machine": []},
        {"kind": "demo"},
        {"status": None},
        {"seal": None},
    ):
        write_json(tmp_path / "run.json", record | changed)
        with pytest.raises(ValueError, match=r"was altered|there is no run\.json") as refused:
            read_record(tmp_path, "train")
        assert "\n" not in str(refused.value)
    for name in ("seal", "config", "machine"):
        write_json(tmp_path / "run.json", {k: v for k, v in record.items() if k != name})
        with pytest.raises(ValueError, match="missing or was altered"):
            read_record(tmp_path, "train")


@pytest.mark.parametrize(
    ("check", "name", "says"),
    [
        (check_file, "no/a.json", "there is no folder"),
        (check_file, "", "is a folder; accepted is a file"),
        (check_folder, "no/where", "there is no folder"),
        (check_folder, "file", "is a file; accepted is a folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path, check, name, says):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match=says) as caught:
        check("html", tmp_path / name)
    assert str(caught.value).startswith("html=")


def test_places_that_can_be_written_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_file("json", None)
    check_file("json", Path("a.json"))
    check_folder("repro", Path("new"))
    check_folder("repro", tmp_path)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal's device")
def test_a_device_is_written_to_and_not_replaced():
    """`--json /dev/null` by root must leave a device there."""
    main, device = os.openpty()
    try:
        path = Path(os.ttyname(device))
        check_file("json", path)
        write_text(path, "all of it")
        assert path.is_char_device()
        assert os.read(main, 100) == b"all of it"
    finally:
        os.close(main)
        os.close(device)


def test_a_pipe_that_nobody_reads_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "isolation.json")
    with pytest.raises(OSError, match="No such device"):
        write_json(tmp_path / "isolation.json", {})
