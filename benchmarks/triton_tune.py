"""Tile sizes by measurement: times every candidate on the GPU at hand and writes a table for
`triton_configs`.

Run once for a kind of GPU and keep the file; `triton_configs.use` takes it. Nothing is tuned while
a model runs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfulp.calls import Call, Sees
from halfulp.kernels import triton_attention as door
from halfulp.kernels.triton_configs import KINDS, Config, config_for, shipped_table

BLOCKS = {
    "forward": ((64, 64), (128, 32), (128, 64), (128, 128)),
    "query": ((32, 32), (64, 32), (64, 64), (128, 64)),
    "key": ((32, 32), (32, 64), (64, 64), (32, 128), (64, 128)),
}
Timer = Callable[[Callable[[], Any]], float]


def candidates(kind: str, dim: int) -> list[Config]:
    """What is tried, the table's own choices not among them: tiles that may fit, 4 and 8 warps, 1
    to 3 stages.
    """
    tiles = [(m, n) for m, n in BLOCKS[kind] if dim <= 128 or m * n <= 64 * 64]
    schedules = itertools.product((4, 8), (1, 2, 3), (False, True))
    return [Config(*tile, *schedule) for tile, schedule in itertools.product(tiles, schedules)]


def gpu_time(call: Callable[[], Any]) -> float:
    """Milliseconds of one call: the median that Triton's own benchmark finds."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=50, return_mode="median"))


def tune(
    dims: Sequence[int] = (64, 128, 256),
    *,
    recipe: str = "halfulp",
    length: int = 4096,
    write: Path | None = None,
    timer: Timer = gpu_time,
    device: str = "cuda",
    choices: Callable[[str, int], list[Config]] = candidates,
) -> dict[str, Any]:
    """The fastest configuration of every kernel on this GPU, as a table; bf16, causal and not,
    without options.

    Where nothing is faster than the shipped choice, or a candidate does not fit, the shipped choice
    stays. `write` is a JSON file that gets the shipped table with this GPU's rows replaced. Minutes
    a dimension: each candidate compiles.
    """
    draw = torch.Generator().manual_seed(0)
    rows: dict[str, dict[str, Any]] = {}
    for dim in dims:
        shape = (1, 16 if dim <= 128 else 8, length, dim)
        q, k, v, do = (
            torch.randn(shape, generator=draw).to(device, torch.bfloat16) for _ in range(4)
        )
        rows[str(dim)] = {
            f"{kind} causal" if causal else kind: (
                _fastest(
                    kind,
                    Call(q, k, v, Sees(causal), dim**-0.5),
                    recipe,
                    do,
                    timer,
                    choices(kind, dim),
                )._asdict()
            )
            for kind in KINDS
            for causal in (False, True)
        }
    capability = door.target_of(q).capability
    for dim in dims:  # what calls with options run with is not timed
        for kind in KINDS:
            for count, name in ((1, "option"), (2, "options")):
                rows[str(dim)][f"{kind} {name}"] = config_for(
                    kind, capability, dim, False, options=count
                )._asdict()
    table = shipped_table() | {str(capability): rows}
    if write is not None:
        write.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return table


def _fastest(
    kind: str,
    call: Call,
    recipe: str,
    grad_out: Tensor,
    timer: Timer,
    choices: Sequence[Config],
) -> Config:
    capability, saved = door.target_of(call.query).capability, door.forward(call, recipe)
    best, least = (
        config_for(kind, capability, call.query.shape[3], call.sees.causal),
        float("inf"),
    )
    for config in (best, *choices):
        try:
            if kind == "forward":
                time = timer(partial(door.forward, call, recipe, config=config))
            else:  # the other backward kernel runs too, the same for every candidate
                time = timer(
                    partial(
                        door.backward, call, recipe, saved, grad_out, None, configs={kind: config}
                    )
                )
        except Exception as error:
            if "OutOfResources" not in type(error).__name__:
                raise
            continue  # more shared memory or registers than the chip has
        if time < least:
            best, least = config, time
    return best
