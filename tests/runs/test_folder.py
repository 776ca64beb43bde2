"""Files are whole or not there, and a run replaces another one only when it is finished."""

import json
import math
import os
from pathlib import Path

import pytest

from halfulp.runs.folder import (
    check_file,
    check_folder,
    close_run,
    is_run_folder,
    json_text,
    open_run,
    read_json,
    write_json,
    write_text,
)


def run_in(folder: Path, name: str = "first") -> Path:
    folder.mkdir(exist_ok=True)
    write_json(folder / "run.json", {"halfulp": "0", "name": name})
    (folder / "tensors").mkdir(exist_ok=True)
    return folder


def test_what_is_written_is_read(tmp_path):
    file = write_json(tmp_path / "a.json", {"δ": [1.5, math.nan, math.inf, None], 3: (True, "x")})
    assert read_json(file) == {"δ": [1.5, None, None, None], "3": [True, "x"]}
    assert list(tmp_path.iterdir()) == [file], "nothing temporary is left"
    assert file.stat().st_mode & 0o044, "others may read it, as any file written here"


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


@pytest.mark.parametrize("text", ["", '{"a": 1', "[1, 2"])
def test_a_torn_file_reads_as_none(tmp_path, text):
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    assert read_json(tmp_path / "a.json") is None
    assert read_json(tmp_path / "missing.json") is None


def test_json_has_no_nan():
    assert json.loads(json_text([math.nan, -math.inf, 0.1])) == [None, None, 0.1]


def test_a_new_run_takes_its_place_at_the_end(tmp_path):
    out = tmp_path / "demo"
    beside = open_run(out)
    assert not out.exists()
    run_in(beside)
    assert close_run(beside, out) == out
    assert is_run_folder(out)
    assert list(tmp_path.iterdir()) == [out]


def test_the_old_run_is_there_until_the_new_one_is_whole(tmp_path):
    out = run_in(tmp_path / "demo", "old")
    beside = open_run(out)
    run_in(beside, "new")
    assert read_json(out / "run.json")["name"] == "old"
    close_run(beside, out)
    assert read_json(out / "run.json")["name"] == "new"
    assert list(tmp_path.iterdir()) == [out]


def test_part_of_a_run_that_was_killed_is_cleared(tmp_path):
    out = tmp_path / "demo"
    run_in(open_run(out), "killed")
    assert list(open_run(out).iterdir()) == []


@pytest.mark.parametrize("where", ["demo", "demo.partial"])
def test_other_files_are_never_replaced(tmp_path, where):
    (tmp_path / where).mkdir()
    (tmp_path / where / "thesis.tex").write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match="holds other files; accepted is a new or empty folder"):
        open_run(tmp_path / "demo")
    assert (tmp_path / where / "thesis.tex").exists()


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "demo").mkdir()
    run_in(open_run(tmp_path / "demo"))


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
