"""Run folders and drifts with planted weights, for the tests of what is read off them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from halfulp.experiments.compare import Drift
from halfulp.runs.folder import write_json
from halfulp.training.attention import AttentionPlan
from halfulp.training.checkpoint import Checkpoint, save_checkpoint
from halfulp.training.config import LayerTask, RunConfig
from halfulp.training.run_json import new_record

BASE = RunConfig(LayerTask(), AttentionPlan.of("torch:math"), steps=30, data_seed=0)
STEPS = (10, 20, 30)
Change = Callable[[int, str, torch.Tensor], torch.Tensor]


def planted_run(folder: Path, config: RunConfig, change: Change = lambda step, name, x: x) -> Path:
    """A run folder whose weights at every step are those of the data seed, changed by `change`."""
    folder.mkdir()
    write_json(folder / "run.json", new_record(config, {}, "", None))
    data_seed = config.seed if config.data_seed is None else config.data_seed
    for step in STEPS:
        generator = torch.Generator().manual_seed(100 * data_seed + step)
        shapes = {"a": (6, 5), "b": (7,)}
        model = {
            name: change(step, name, torch.randn(shape, generator=generator))
            for name, shape in shapes.items()
        }
        save_checkpoint(folder / "checkpoints", Checkpoint(step, model, {}))
    return folder


def flash(**changes: object) -> RunConfig:
    return dataclasses.replace(BASE, attention=AttentionPlan.of("torch:flash"), **changes)  # type: ignore[arg-type]


def drift(seed: int, values: tuple[float, ...], name: str = "x") -> Drift:
    return Drift(name, seed, "", "", tuple(range(10, 10 * len(values) + 1, 10)), values, values, {})
