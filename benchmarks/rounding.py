"""Times rounding beside the packages that people use for it, and a copy of the same memory.

Every package rounds the same tensor to the same format in turn, one call each a round, so that a
busy machine slows all of them alike and the ratios hold; what is reported is the median of the
rounds' ratios, the smallest and the largest. The first round is warm-up. Run from the repository
root, in an environment with the `bench` extra:

    python benchmarks/rounding.py [--elements N] [--rounds N] [--json FILE]

Every package allocates its result through torch, and handing out 64 MiB of fresh memory in pages of
4 KiB takes Linux longer than rounding takes: the times would be the kernel's. Torch is therefore
asked for large pages, for all packages alike; THP_MEM_ALLOC_ENABLE=0 in the environment leaves them
out.

The target for a format without a native cast: 5 times qtorch and 50 times pychop on 2**24 numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch when it is imported

import pychop
import qtorch.quant
import torch
from torch import Tensor

from halfulp.formats import BF16, IEEE_E4M3, MXFP4, NVFP4, TF32, Format, custom, round_to

TARGETS = {"qtorch": 5.0, "pychop": 50.0}
Rounder = Callable[[Tensor], Tensor]


def peers(fmt: Format) -> dict[str, Rounder]:
    """Return every way to round to nearest in fmt; the peers know IEEE-style formats only."""
    chop = pychop.Chop(fmt.exponent_bits, fmt.mantissa_bits, rmode=1, subnormal=True)
    return {
        "halfulp": lambda x: round_to(x, fmt),
        "qtorch": lambda x: qtorch.quant.float_quantize(
            x, fmt.exponent_bits, fmt.mantissa_bits, "nearest"
        ),
        "pychop": chop,
    }


def alone() -> dict[str, Rounder]:
    """Return what has no peer here: a copy and a native cast for scale, other modes, block
    formats.
    """
    fmt = custom(5, 5)
    return {
        "copy": torch.clone,
        "torch cast to bf16 and back": lambda x: x.bfloat16().float(),
        "bf16": lambda x: round_to(x, BF16),
        "e5m5 stochastic": lambda x: round_to(x, fmt, rounding="stochastic"),
        "e5m5 stochastic, qtorch": lambda x: qtorch.quant.float_quantize(x, 5, 5, "stochastic"),
        "e5m5 toward zero": lambda x: round_to(x, fmt, rounding="toward_zero"),
        "mxfp4": lambda x: round_to(x, MXFP4),
        "nvfp4": lambda x: round_to(x, NVFP4),
    }


def interleaved(ways: dict[str, Rounder], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every call, by name, after a round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way(x)
            elapsed = time.perf_counter() - start
            if number > 0:
                seconds[name].append(elapsed)
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(fmt: Format, x: Tensor, rounds: int) -> dict[str, Any]:
    """Return times, ratios to halfulp and the number of elements on which a peer disagrees."""
    ways = peers(fmt)
    seconds = interleaved(ways, x, rounds)
    ours, sample = seconds["halfulp"], x.flatten()[: 2**20]
    reference = round_to(sample, fmt)
    result: dict[str, Any] = {
        "format": fmt.name,
        "seconds": {name: spread(times) for name, times in seconds.items()},
    }
    result["times_faster_than"] = {
        name: spread([theirs / mine for theirs, mine in zip(seconds[name], ours, strict=True)])
        for name in TARGETS
    }
    result["differing_of_2**20"] = {
        name: int((ways[name](sample) != reference).sum()) for name in TARGETS
    }
    return result


def show(title: str, times: dict[str, dict[str, float]], elements: int) -> None:
    print(f"\n{title}")
    for name, value in times.items():
        rate = elements / value["median"] / 1e9
        low, high = value["min"] * 1e3, value["max"] * 1e3
        print(
            f"  {name:<28} {value['median'] * 1e3:10.2f} ms  ({low:.2f} to {high:.2f})  {rate:7.3f}"
            " Gelem/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--elements", type=int, default=2**24, help="float32 numbers in the tensor")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each package")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args()

    pychop.backend("torch")
    x = torch.randn(options.elements // 128, 128, generator=torch.Generator().manual_seed(0))
    tile = x.flatten()[: 12 * 128 * 128].view(-1, 128)
    report: dict[str, Any] = {
        "elements": x.numel(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    report["large_pages"] = os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    print(
        f"{x.numel()} float32 numbers, {report['threads']} threads, torch {report['torch']},"
        " medians (spread)"
    )

    report["formats"] = []
    for fmt in (custom(5, 5), IEEE_E4M3, TF32):
        result = compare(fmt, x, options.rounds)
        report["formats"].append(result)
        show(f"{fmt.name}, nearest even", result["seconds"], x.numel())
        for name, ratio in result["times_faster_than"].items():
            verdict = "meets" if ratio["median"] >= TARGETS[name] else "MISSES"
            low, high, differing = ratio["min"], ratio["max"], result["differing_of_2**20"][name]
            print(
                f"  {ratio['median']:.1f} ({low:.1f} to {high:.1f}) times faster than {name},",
                end=" ",
            )
            print(
                f"{verdict} the target of {TARGETS[name]:.0f}; {differing} of 2**20 results differ"
            )

    report["alone"] = {
        name: spread(times) for name, times in interleaved(alone(), x, options.rounds).items()
    }
    show("For scale, and without a peer", report["alone"], x.numel())
    small = {
        name: spread(times)
        for name, times in interleaved(alone() | peers(custom(5, 5)), tile, 30).items()
    }
    report["tile"] = {"elements": tile.numel(), "seconds": small}
    show(
        f"An attention tile of {tile.numel()} numbers (halfulp, qtorch, pychop: e5m5)",
        small,
        tile.numel(),
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
