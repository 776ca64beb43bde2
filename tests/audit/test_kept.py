"""References on disk: the bits that were computed, under a name that every dependence changes."""

from dataclasses import replace

import pytest
import torch

from halfulp.audit import Case, Shape, kept, references
from halfulp.runs import cache
from halfulp.runs.values import encoded

CASE = Case("keys_common", Shape(2, 2, 24, 40, 16, kv_heads=1))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    references.references.cache_clear()
    yield tmp_path / "cache"
    references.references.cache_clear()


def same(a, b) -> bool:
    return repr(encoded(a, one := {})) == repr(encoded(b, two := {})) and all(
        torch.equal(one[n].view(torch.uint8), two[n].view(torch.uint8)) for n in one
    )


def test_what_comes_back_has_the_bits_that_were_computed(folder, monkeypatch):
    computed = references._standard(CASE)
    assert kept.read(CASE, references.Standard) is None
    references.references(CASE)
    references.references.cache_clear()
    monkeypatch.setattr(references, "_standard", lambda _: pytest.fail("computed again"))
    assert same(references.references(CASE).standard, computed)
    assert not same(references._exact(CASE).truth, replace(references._exact(CASE).truth, lse=None))


def test_a_torn_entry_is_computed_again(folder):
    computed = references.references(CASE).standard
    (file,) = folder.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    references.references.cache_clear()
    assert same(references.references(CASE).standard, computed)
    # whole, but of another form than this version's
    cache.write(kept.name_of(CASE, references.Standard), {"noise": None}, {})
    assert kept.read(CASE, references.Standard) is None
    assert same(references.references(CASE).standard, computed)


def test_everything_that_changes_bits_changes_the_name(tmp_path, monkeypatch):
    names = {kept.name_of(CASE, references.Standard)}

    def another():
        before = len(names)
        names.add(kept.name_of(CASE, references.Standard))
        return len(names) == before + 1

    assert not another()
    for changed in (
        replace(CASE, seed=1),
        replace(CASE, dtype="float16"),
        replace(CASE, probe="gaussian"),
        replace(CASE, shape=replace(CASE.shape, kv_heads=None)),
    ):
        names.add(kept.name_of(changed, references.Standard))
    assert len(names) == 5
    torch.set_num_threads(2)
    assert another()
    monkeypatch.setattr(kept, "__version__", "0")
    assert another()
    monkeypatch.setattr(kept, "_MADE_BY", kept._MADE_BY[1:])
    assert another()
    for text in (b"one", b"two"):  # a captured file by what is in it
        (tmp_path / "file").write_bytes(text)
        names.add(kept.name_of(replace(CASE, file=str(tmp_path / "file")), references.Standard))
    assert len(names) == 10
    copy = tmp_path / "copy"
    copy.write_bytes(b"two")
    assert kept.name_of(replace(CASE, file=str(copy)), references.Standard) in names


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(references, "_held", {})
    cases = [replace(CASE, seed=seed) for seed in range(4)]
    size = references._exact(cases[0]).bytes
    monkeypatch.setattr(references, "MOST_HELD", 2 * size)
    for case in cases:
        references._exact(case)
    assert list(references._held) == cases[2:]
    references._exact(cases[2])
    references._exact(cases[0])
    assert list(references._held) == [cases[2], cases[0]]
    monkeypatch.setattr(references, "MOST_HELD", 0)
    assert references._exact(cases[1]).bytes == size
    assert list(references._held) == [cases[1]]


@pytest.mark.parametrize("recipe", [references.STOCK["bfloat16"], references.FLOOR["bfloat16"]])
def test_a_key_head_at_a_time_has_the_same_bits(recipe, monkeypatch):
    x = CASE.inputs()
    whole = references.emulated(x, recipe)
    monkeypatch.setattr(references, "_MOST_SCORES", 0)
    assert same(references.emulated(x, recipe), whole)
    assert same(references.emulated(replace(x, sinks=None), recipe), whole)
