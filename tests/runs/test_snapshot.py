"""Snapshots come back as they were, tell what was altered, and never run anything."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfulp.runs.generators import generator_states, set_generator_states
from halfulp.runs.snapshot import JSON, Snapshot, is_snapshot, read_snapshot, write_snapshot

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def parts(batches=(), **more) -> Snapshot:
    weight = torch.randn(3, 4)
    given = {
        "step": 7,
        "reason": "asked for",
        "model": {"a.weight": weight, "a.tied": weight, "b": weight[1]},
        "optimizer": {"a.weight/exp_avg": torch.randn(3, 4), "a.weight/step": torch.tensor(7.0)},
        "batches": batches,
        "generators": generator_states(),
        "calls": {"blocks.0|odd": {"query": torch.randn(1, 2, 5, 4)}},
        "about": {"loss": 1.5, "heads": {"blocks.0|odd": [1, 3]}},
    }
    return Snapshot(**(given | more))


def same(a, b) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@settings(max_examples=40)
@given(args=st.lists(plain, max_size=3), kwargs=st.dictionaries(st.text(max_size=4), plain))
def test_plain_batches_come_back_as_they_were(tmp_path_factory, args, kwargs):
    folder = tmp_path_factory.mktemp("snapshots") / "one"
    write_snapshot(folder, parts([(tuple(args), kwargs)]))
    assert read_snapshot(folder).batches == ((tuple(args), kwargs),)


def test_everything_comes_back_bit_by_bit(tmp_path):
    words, picture = torch.randint(9, (2, 5)), torch.randn(2, 3).bfloat16()
    made = parts([((words,), {"labels": [picture, words.T], "deep": {"x": (picture, 3)}})])
    found = read_snapshot(write_snapshot(tmp_path / "one", made))
    assert is_snapshot(tmp_path / "one")
    assert (found.step, found.reason, found.about["loss"]) == (7, "asked for", 1.5)
    for name in ("model", "optimizer", "generators"):
        before, after = getattr(made, name), getattr(found, name)
        assert set(after) == set(before)
        assert all(same(before[key], after[key]) for key in before)
    assert same(found.calls["blocks.0|odd"]["query"], made.calls["blocks.0|odd"]["query"])
    ((args, kwargs),) = found.batches
    assert same(args[0], words)
    assert same(kwargs["labels"][1], words.T)
    assert same(kwargs["deep"]["x"][0], picture)


def test_generators_go_on_where_they_were():
    def draw():
        return (
            torch.rand(2).tolist(),
            [random.random(), random.gauss(0, 1)],
            [float(np.random.normal()), float(np.random.random())],  # noqa: NPY002
        )

    random.gauss(0, 1)  # leaves a second number behind
    np.random.normal()  # noqa: NPY002
    states = generator_states()
    first = draw()
    assert draw() != first
    set_generator_states(states)
    assert draw() == first
    for name, state in (("cpu", torch.zeros(3)), ("tpu", states["cpu"]), ("python", states["cpu"])):
        with pytest.raises(ValueError, match=f"generators: {name}"):
            set_generator_states({name: state})
    set_generator_states(states)


def test_what_is_too_large_is_left_out_and_named(tmp_path):
    made = parts([((torch.zeros(4),), {})], model={"w": torch.zeros(10)})
    small = read_snapshot(write_snapshot(tmp_path / "one", made, most_bytes=60))
    assert set(small.about["left_out"]) == {"optimizer", "calls", "generators"}
    assert (small.optimizer, small.generators, small.calls) == ({}, {}, {})
    assert len(small.batches) == 1
    with pytest.raises(ValueError, match="the model's size at least, 40"):
        write_snapshot(tmp_path / "two", made, most_bytes=39)
    assert not (tmp_path / "two").exists()


def test_objects_in_a_batch_are_left_out_and_named(tmp_path):
    made = parts([((object(),), {"cache": {"k": threading_lock()}, 3: 4})])
    found = read_snapshot(write_snapshot(tmp_path / "one", made))
    assert found.batches == (((None,), {"cache": {"k": None}}),)
    assert set(found.about["left_out"]) == {"batch 0, 0", "batch 0, cache, k"}


def threading_lock():
    import threading

    return threading.Lock()


@pytest.mark.parametrize("file", ["model", "optimizer", "batch", "generators", "calls", JSON])
@pytest.mark.parametrize("fault", ["flip", "cut", "gone"])
def test_a_file_that_was_altered_is_one_line(tmp_path, file, fault):
    folder = write_snapshot(tmp_path / "one", parts([((torch.zeros(4),), {})]))
    path = folder / (file if file == JSON else f"{file}.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if fault == "gone":
        path.unlink()
    else:
        path.write_bytes(data if fault == "flip" else data[:-3])
    with pytest.raises(ValueError, match=r"snapshot='.*one': .*accepted is a whole one"):
        read_snapshot(folder)


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("halfulp.runs.snapshot.FORMAT", 2)
    folder = write_snapshot(tmp_path / "one", parts())
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format 2 of a snapshot, and this halfulp reads 1"):
        read_snapshot(folder)
    (folder / JSON).write_text(json.dumps(json.loads((folder / JSON).read_text())["batches"]))
    with pytest.raises(ValueError, match="missing or torn"):
        read_snapshot(folder)
