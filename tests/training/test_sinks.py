"""Sinks pass on what a run's metrics.jsonl says, under the same names, and nothing before there is
something to say.
"""

import io
import math
import sys
import types
import warnings

import pytest
from rich.console import Console

from halfulp.runs import writers
from halfulp.runs.writers import TensorBoardSink, WandbSink, scalars
from halfulp.training.loop import train
from halfulp.training.presets import seconds
from halfulp.training.run_json import config_as_dict
from halfulp.training.sinks import ConsoleSink, _rate

METRICS = {
    "step": 20,
    "loss": 0.5,
    "tokens_per_second": 1234.0,
    "note": "text",
    "flag": True,
    "count": 3,
}
MEASURE = {
    "step": 20,
    "measure": {"sigma_query": [[1.5, 2.5], [3.5, None]], "entropy": [0.25, 0.5], "whole": 7},
}


def test_names_of_numbers():
    assert dict(scalars(METRICS)) == {"loss": 0.5, "tokens_per_second": 1234.0, "count": 3.0}
    found = dict(scalars(MEASURE))
    assert math.isnan(found.pop("sigma_query/layer 1/head 1"))
    by_head = {
        "sigma_query/layer 0/head 0": 1.5,
        "sigma_query/layer 0/head 1": 2.5,
        "sigma_query/layer 1/head 0": 3.5,
    }
    assert found == by_head | {"entropy/layer 0": 0.25, "entropy/layer 1": 0.5, "whole": 7.0}


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    config = seconds(steps=60)
    folder = tmp_path / "tensorboard"
    sink = TensorBoardSink(folder, config_as_dict(config))
    assert not folder.exists(), "a run that is refused leaves nothing"
    run = train(config, sinks=[sink])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reader's own
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder)).Reload()
    assert len(run.metrics) == 2
    for row in run.metrics:
        for name, value in scalars(row):
            (found,) = [event for event in events.Scalars(name) if event.step == row["step"]]
            assert found.value == pytest.approx(value, rel=1e-6), name
    said = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "optimizer: {'learning_rate': 0.001" in said


class FakeRun:
    def __init__(self, options):
        self.options, self.lines, self.finished = options, [], 0

    def log(self, numbers, step):
        self.lines.append((step, numbers))

    def finish(self):
        self.finished += 1


def test_wandb_gets_every_number(tmp_path, monkeypatch):
    started = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: started.append(FakeRun(options)) or started[-1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(writers, "find_spec", lambda name: True)
    config = seconds(steps=60)
    sink = WandbSink("project", config_as_dict(config), tmp_path / "run")
    assert started == []
    run = train(config, sinks=[sink])
    (theirs,) = started
    folder = str(tmp_path / "run")
    expected = {
        "project": "project",
        "config": config_as_dict(config),
        "name": "run",
        "dir": folder,
    }
    assert theirs.options == expected
    assert theirs.lines == [(row["step"], dict(scalars(row))) for row in run.metrics]
    assert theirs.finished == 1


@pytest.mark.parametrize("make", [lambda c: TensorBoardSink("x", c), lambda c: WandbSink("p", c)])
def test_a_library_that_is_missing_is_said_before_the_run(monkeypatch, make):
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"accepted where it is installed; pip install 'halfulp\[\w+\]'"
    ):
        make({})


def test_a_run_that_never_began_ends_quietly(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "find_spec", lambda name: True)
    for sink in (
        TensorBoardSink(tmp_path / "t"),
        WandbSink("p"),
        ConsoleSink(5, "x"),
    ):
        sink.close()
    assert list(tmp_path.iterdir()) == []


def shown(terminal: bool, rows) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    sink = ConsoleSink(100, "minutes", console)
    for row in rows:
        sink.row(row)
    sink._bar.refresh()
    said = console.file.getvalue()
    sink.close()
    return said


def test_the_terminal_shows_step_loss_rate_and_time_left():
    said = shown(
        True, [METRICS, MEASURE, METRICS | {"step": 40, "loss": 0.25, "tokens_per_second": 4.56e6}]
    )
    for part in ("minutes", "40/100", "loss 0.25", "4.56M tokens/s", "left"):
        assert part in said


def test_a_loss_that_is_no_number_can_be_shown():
    assert "loss nan" in shown(True, [METRICS | {"loss": math.nan}])


def test_no_terminal_no_line():
    assert shown(False, [METRICS]) == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.5, "0.5"), (999, "999"), (1234, "1.23k"), (87_654, "87.7k"), (2e6, "2M")],
)
def test_rates_have_three_digits(number, text):
    assert _rate(number) == text
