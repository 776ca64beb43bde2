"""Captured activations: they are what attention saw and got back, and a file is whole or not
there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from halfulp.audit.inputs import read_captured
from halfulp.experiments.capture import (
    TENSORS,
    Captured,
    CaptureRun,
    save_captured,
    train_and_capture,
)
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, LayerTask, Optimizer, RunConfig

LANGUAGE = Language(layers=2, heads=2, width=16, context=12, data="english")
TINY = RunConfig(
    LANGUAGE, optimizer=Optimizer(learning_rate=3e-3, warm_up=20), batch=3, steps=4, metrics_every=1
)


class Recorder:
    """Attention that keeps what it sees and what gradient it gets."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Tensor]] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> Tensor:
        call = {"query": query.detach(), "key": key.detach(), "value": value.detach()}
        self.calls.append(call)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale
        )
        out.register_hook(lambda grad: call.update(grad_out=grad.detach()))
        return out


def computed_by(attention: Callable[..., Tensor]) -> RunConfig:
    """The tiny run with a function of ours as its attention."""
    module = ModuleType("attention_of_a_test")
    module.attend = attention  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return replace(TINY, attention=AttentionPlan.of(f"{module.__name__}:attend"))


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[CaptureRun, Recorder]]:
    recorder = Recorder()
    yield train_and_capture(computed_by(recorder)), recorder
    del sys.modules["attention_of_a_test"]


def equal(a: Captured, b: Captured) -> bool:
    pairs = ((getattr(a, f.name), getattr(b, f.name)) for f in fields(Captured))
    return all(
        torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, Tensor) else x == y
        for x, y in pairs
    )


def test_what_is_captured_is_what_attention_saw_and_got_back(
    trained: tuple[CaptureRun, Recorder],
) -> None:
    run, recorder = trained
    assert len(recorder.calls) == LANGUAGE.layers * (TINY.steps + 1)
    for index, call in enumerate(recorder.calls[-LANGUAGE.layers :]):
        for name in TENSORS:
            captured = getattr(run.captured, name)[index :: run.captured.layers]
            assert torch.equal(captured, call[name])
            assert captured.dtype == torch.bfloat16
    assert run.captured.query.shape == (6, 2, 12, 8)
    assert run.captured.grad_out.abs().max() > 0


def test_training_learns_and_repeats() -> None:
    config = replace(TINY, steps=40, workload=replace(LANGUAGE, width=32, context=32))
    said: list[float] = []
    first = train_and_capture(config, progress=lambda fraction, message: said.append(fraction))
    again = train_and_capture(config)
    assert first.loss == again.loss
    assert equal(first.captured, again.captured)
    assert first.loss[-1] < first.loss[0] - 1.0
    assert said == sorted(said)
    assert said[-1] == 1.0


def test_the_kernel_of_the_plan_sees_the_same_values(
    trained: tuple[CaptureRun, Recorder],
) -> None:
    """A kernel of PyTorch's and a function that calls it leave the same activations, to the bit."""
    by_plan = train_and_capture(TINY)
    assert by_plan.loss == trained[0].loss
    assert equal(by_plan.captured, trained[0].captured)


def test_what_cannot_be_captured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config.workload=LayerTask.*: accepted is a Language"):
        train_and_capture(RunConfig(LayerTask()))

    def nan(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        return query * torch.nan

    with pytest.raises(ValueError, match=r"the loss of step 1 is nan; accepted is one that trains"):
        train_and_capture(computed_by(nan))


def test_a_file_brings_back_every_bit(trained: tuple[CaptureRun, Recorder], tmp_path: Path) -> None:
    captured = replace(trained[0].captured, is_causal=False, scale=0.1234567890123)
    path = save_captured(tmp_path / "sub" / "tensors.safetensors", captured)
    found = read_captured(str(path))
    assert all(torch.equal(getattr(found, name), getattr(captured, name)) for name in TENSORS)
    assert found.query.dtype == torch.bfloat16
    assert (found.sees.causal, found.scale) == (False, 0.1234567890123)
    assert [p.name for p in path.parent.iterdir()] == ["tensors.safetensors"]


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_torn_file_is_refused_in_one_line(
    trained: tuple[CaptureRun, Recorder], tmp_path: Path, kept: int
) -> None:
    path = save_captured(tmp_path / "whole.safetensors", trained[0].captured)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"torn\.safetensors") as error:
        read_captured(str(torn))
    assert "\n" not in str(error.value)


def test_a_write_that_breaks_off_leaves_the_old_file(
    trained: tuple[CaptureRun, Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_captured(tmp_path / "tensors.safetensors", trained[0].captured)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save_captured(path, trained[0].captured)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["tensors.safetensors"]


def test_a_file_is_for_whom_the_umask_says(
    trained: tuple[CaptureRun, Recorder], tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        path = save_captured(tmp_path / "tensors.safetensors", trained[0].captured)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_bad_shapes_are_refused() -> None:
    flat = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="query of shape"):
        Captured(flat, flat, flat, flat, True, 1.0, "")
