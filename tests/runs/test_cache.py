"""The cache on disk: what it gives is what was kept, or nothing."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from halfulp.runs import cache

NAME = cache.name_of("a", 1)
TENSORS = {"x": torch.arange(6.0).view(2, 3), "n": torch.tensor(7)}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def entry(folder: Path, name: str = NAME) -> Path:
    return folder / name[0] / f"{name[1:]}.safetensors"


def test_what_was_kept_comes_back(folder):
    assert cache.read(NAME) is None
    cache.write(NAME, {"a": [1.5, None]}, TENSORS)
    plain, tensors = cache.read(NAME)
    assert plain == {"a": [1.5, None]}
    assert all(torch.equal(tensors[name], x) for name, x in TENSORS.items())
    assert cache.read(cache.name_of("a", 2)) is None
    assert cache.name_of("a", "b") != cache.name_of("ab")


def test_every_flipped_byte_is_nothing(folder):
    cache.write(NAME, {"a": 1}, TENSORS)
    whole = entry(folder).read_bytes()
    for at in range(len(whole)):
        entry(folder).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert cache.read(NAME) is None, at
    for cut in (0, 4, len(whole) // 2, len(whole) - 1):
        entry(folder).write_bytes(whole[:cut])
        assert cache.read(NAME) is None


def test_one_entry_is_no_other_under_another_name(folder):
    cache.write(NAME, {}, TENSORS)
    other = cache.name_of("b")
    entry(folder, other).parent.mkdir(exist_ok=True)
    entry(folder).rename(entry(folder, other))
    assert cache.read(other) is None


def test_what_was_read_last_stays(folder, monkeypatch):
    names = [f"0{i:063x}" for i in range(8)]
    for age, name in enumerate(names[:4]):
        cache.write(name, {}, {"x": torch.zeros(1000)})
        os.utime(entry(folder, name), (age, age))
    cache.read(names[0])
    held = sum(f.stat().st_size for f in folder.rglob("*.safetensors"))
    monkeypatch.setattr(cache, "MOST_BYTES", held)
    cache.write(names[4], {}, {"x": torch.zeros(1000)})
    left = {name for name in names if entry(folder, name).exists()}
    assert left == {names[0], names[2], names[3], names[4]}
    monkeypatch.setattr(cache, "MOST_BYTES", 0)
    cache.write(names[5], {}, {"x": torch.zeros(1000)})
    assert [name for name in names if entry(folder, name).exists()] == [names[5]]


def test_off_and_a_folder_that_cannot_be_are_no_errors(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, "off")
    cache.write(NAME, {}, TENSORS)
    assert cache.read(NAME) is None
    assert cache.folder() is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))
    cache.write(NAME, {}, TENSORS)
    assert cache.read(NAME) is None
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "halfulp" or os.uname().sysname == "Darwin"


def _write_and_read(number: int) -> bool:
    torch.set_num_threads(1)
    for i in range(20):
        name = cache.name_of(i)
        cache.write(name, {"i": i}, {"x": torch.full((50,), float(i))})
        found = cache.read(name)  # None where the other process has deleted it
        if found is not None and (found[0] != {"i": i} or not bool((found[1]["x"] == i).all())):
            return False
        if number == 0 and i == 10:
            for file in cache.folder().rglob("*.safetensors"):
                file.unlink(missing_ok=True)
    return True


def test_two_processes_at_once():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert all(pool.map(_write_and_read, range(2)))
