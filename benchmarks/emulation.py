"""Times emulated attention, forward and backward, beside naive fp32 attention with autograd.

Every recipe runs once a round, in an order that changes from round to round; what is reported is
the median over the rounds of the ratio to naive attention in the same round, with the quartiles.
The first rounds are warm-up. Emulation takes many small parallel steps where naive attention takes
a few large ones, so other programs on the same cores slow it more: see the ratio of processor times
too, which with --threads 1 holds on a busy machine. From the repository root:

    python benchmarks/emulation.py [--shape B,H,N,D] [--recipes NAME ...] [--rounds N] [--threads N]
    [--json FILE]

The target: every recipe at (1, 12, 1024, 64) within 0.6 times naive attention on 2 threads. A
format stands for FlashAttention-2 with every intermediate rounded to them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp import emulate
from halfulp.formats import Format, parse_format
from halfulp.recipes import Recipe, recipe_named
from halfulp.recipes.named import uniform

SHAPE, TARGET = "1,12,1024,64", 0.6
DEFAULT = ("BF16_FLASH2", "BF16_HALFULP", "BF16_STANDARD", "BF16_FLASH1", "FP32")
FORMATS = ("bf16", "fp16", "tf32", "ocp_e4m3", "ocp_e5m2", "e5m7", "e8m2", "e3m4")
NAIVE = "naive fp32, autograd"
WARM_UP = 2
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def contestants(recipes: list[str], causal: bool) -> dict[str, Attention]:
    """Naive attention, PyTorch's own bf16 kernel, and the recipes."""

    def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(
                torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
            )
        return torch.softmax(scores, -1) @ v

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q, k, v = (x.bfloat16() for x in (q, k, v))
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def emulated(name: str) -> Attention:
        recipe = recipe_of(name)
        return lambda q, k, v: emulate(q, k, v, is_causal=causal, recipe=recipe)

    return {NAIVE: naive, "PyTorch's bf16 kernel": kernel} | {
        name: emulated(name) for name in recipes
    }


def recipe_of(name: str) -> Recipe:
    """A built-in recipe by its name, or everything in one format; ValueError for a name that is
    neither.
    """
    try:
        return recipe_named(name)
    except ValueError:
        fmt = parse_format(name)
        if not isinstance(fmt, Format):
            raise ValueError(
                f"recipe={name!r}: accepted are built-in recipes and scalar formats"
            ) from None
        return uniform(fmt)


def once(attention: Attention, inputs: list[Tensor]) -> tuple[float, float, float]:
    """Seconds of one forward pass, of one backward pass, and processor seconds of both."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    processor, start = time.process_time(), time.perf_counter()
    out = attention(q, k, v)
    middle = time.perf_counter()
    out.backward(inputs[3].to(out.dtype))
    return middle - start, time.perf_counter() - middle, time.process_time() - processor


def measure(
    ways: dict[str, Attention], shape: tuple[int, ...], rounds: int
) -> dict[str, dict[str, float]]:
    """Median milliseconds and, paired round by round, the ratio to naive attention with its
    quartiles.
    """
    generator, order = torch.Generator().manual_seed(0), random.Random(0)
    inputs = [torch.randn(shape, generator=generator) for _ in range(4)]
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for turn in range(WARM_UP + rounds):
        for name in order.sample(list(ways), len(ways)):
            spent = once(ways[name], inputs)
            if turn >= WARM_UP:
                seconds[name].append(spent)
    result = {}
    for name, spent in seconds.items():
        ratios = [
            sum(mine[:2]) / sum(naive[:2])
            for mine, naive in zip(spent, seconds[NAIVE], strict=True)
        ]
        processor = [mine[2] / naive[2] for mine, naive in zip(spent, seconds[NAIVE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        forward, backward, _ = (
            1000 * statistics.median(column) for column in zip(*spent, strict=True)
        )
        result[name] = {
            "forward_ms": forward,
            "backward_ms": backward,
            "processor_ratio": statistics.median(processor),
        }
        result[name] |= {
            "ratio": middle,
            "ratio_quartile_1": low,
            "ratio_quartile_3": high,
            "ratio_min": min(ratios),
        }
    return result


def options() -> argparse.Namespace:
    """The command line; a bad value is answered in one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default=SHAPE, help=f"B,H,N,D (default: {SHAPE})")
    parser.add_argument(
        "--recipes", nargs="+", default=[*DEFAULT, *FORMATS], help="built-in recipes, formats"
    )
    parser.add_argument("--causal", action="store_true", help="causal attention")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: 15)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    chosen = parser.parse_args()
    sizes = chosen.shape.split(",")
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) for size in sizes):
        parser.error(f"--shape {chosen.shape}: accepted are four positive integers B,H,N,D")
    for name, least in (("rounds", 2), ("threads", 1)):
        if getattr(chosen, name) < least:
            parser.error(
                f"--{name} {getattr(chosen, name)}: accepted is an integer of at least {least}"
            )
    try:
        for recipe in chosen.recipes:
            recipe_of(recipe)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main() -> None:
    """Measure and print."""
    chosen = options()
    torch.set_num_threads(chosen.threads)
    ways = contestants(chosen.recipes, chosen.causal)
    figures = measure(ways, tuple(int(size) for size in chosen.shape.split(",")), chosen.rounds)
    kind = "causal" if chosen.causal else "full"
    print(f"shape {chosen.shape}, {kind}, {chosen.threads} threads, {chosen.rounds} rounds")
    print(
        f"{'':24}{'forward':>10}{'backward':>11}   ratio to naive (quartiles; least), of processor"
        " times"
    )
    for name, row in figures.items():
        spread = (
            f"({row['ratio_quartile_1']:.2f} to {row['ratio_quartile_3']:.2f};"
            f" {row['ratio_min']:.2f})"
        )
        spent = f"{row['forward_ms']:7.0f} ms{row['backward_ms']:8.0f} ms"
        print(f"{name:24}{spent}   {row['ratio']:.2f} {spread}, {row['processor_ratio']:.2f}")
    if not chosen.causal and chosen.shape == SHAPE:
        missed = [name for name in chosen.recipes if figures[name]["ratio"] > TARGET]
        print(
            f"target: every recipe at most {TARGET}:"
            f" {'missed by ' + ', '.join(missed) if missed else 'met'}"
        )
    if chosen.json:
        settings: dict[str, Any] = {
            "shape": chosen.shape,
            "causal": chosen.causal,
            "threads": chosen.threads,
        }
        settings |= {"rounds": chosen.rounds, "torch": torch.__version__}
        chosen.json.write_text(json.dumps(settings | {"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
