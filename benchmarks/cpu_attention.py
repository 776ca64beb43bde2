"""Times the native CPU attention beside PyTorch's flash kernel, forward and backward, with its
error.

Every way runs once a round in an order that changes from round to round, a bf16 gemm among them;
what is reported is the median over the rounds of ratios within the round, with the quartiles. The
share of the gemm is the arithmetic of attention's products (14·N·N_k·d·H for d = d_v, half of it if
causal) over what the gemm does in the same time. No ratio is printed where its quartiles lie on
both sides of 1. From the repository root:

    python benchmarks/cpu_attention.py [--shape B,H,N,D[,causal] ...] [--recipes NAME ...] [--rounds
    N] [--threads N]
                                       [--options NAME ...] [--error SHAPE] [--calls] [--goals]
                                       [--scaling] [--json FILE]

--options adds the same recipes with softcap, sinks or dropout; --calls measures what a call costs
beside its arithmetic, in microseconds, on one head of 16 tokens; --goals holds every dtype and
shape, decoding and tiny calls among them, to the speed that is wanted of it, in processor time,
which other programs on the machine disturb least, and says what the machine's own gemm would reach
with nothing but attention's products; --scaling measures how much of N threads' ideal, N times one
thread's speed, is reached (85 % is wanted; the machine must be idle).

The target: "halfulp" 1.5 times as fast as PyTorch's kernel and 55 % of the gemm at every shape, on
2 threads, with gradient errors within 1.3 times the format's floor (--error 1,1,16384,64).
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

from halfulp import attention, emulate, golden
from halfulp.calls import Call, Dropout, Sees
from halfulp.kernels import cpu
from halfulp.native import best_isa, missing
from halfulp.recipes import BF16_FLOOR
from halfulp.runs.machine import describe_machine

SHAPES = ("1,12,1024,64", "1,8,2048,64", "1,8,2048,64,causal", "1,8,4096,128", "4,12,256,64")
SDPA = functional.scaled_dot_product_attention
TORCH, GEMM = "PyTorch flash", "bf16 gemm"
GEMM_SIZE = 2048
WARM_UP = 3
Gradients = tuple[Tensor, Tensor, Tensor]


def native(
    name: str, inputs: list[Tensor], causal: bool
) -> tuple[Callable[[], Any], Callable[[Any], Gradients]]:
    """The library in a recipe, or in "recipe+option"."""
    q, k, v, do = inputs
    recipe, _, option = name.partition("+")
    more: dict[str, dict[str, Any]] = {
        "": {},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": torch.zeros(q.shape[1])},
        "dropout": {"dropout": Dropout(0.1, 1)},
    }
    call = Call(q, k, v, Sees(causal), q.shape[-1] ** -0.5, **more[option])

    def backward(saved: Any) -> Gradients:
        return cpu.backward(call, recipe, saved, do, None)[:3]

    return lambda: cpu.forward(call, recipe), backward


def pytorch(
    inputs: list[Tensor], causal: bool
) -> tuple[Callable[[], Any], Callable[[Any], Gradients]]:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return forward, lambda out: torch.autograd.grad(out, (q, k, v), inputs[3])


def draw(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]


def seconds(forward: Callable[[], Any], backward: Callable[[Any], Any]) -> tuple[float, float]:
    start = time.perf_counter()
    out = forward()
    middle = time.perf_counter()
    backward(out)
    return middle - start, time.perf_counter() - middle


def measure(
    shape: tuple[int, ...], causal: bool, recipes: list[str], rounds: int
) -> dict[str, Any]:
    """Medians and quartiles of one shape: milliseconds, speed over PyTorch's kernel, share of the
    gemm.
    """
    inputs, order = draw(shape), random.Random(0)
    square = torch.randn(GEMM_SIZE, GEMM_SIZE).bfloat16()
    ways = {TORCH: pytorch(inputs, causal)} | {
        name: native(name, inputs, causal) for name in recipes
    }
    ways[GEMM] = (lambda: square @ square, lambda _: None)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(WARM_UP + rounds):
        for name in order.sample(list(ways), len(ways)):
            taken = seconds(*ways[name])
            if turn >= WARM_UP:
                spent[name].append(taken)
    b, h, n, d = shape
    work = 14.0 * b * h * n * n * d / (2 if causal else 1)
    peak = [2.0 * GEMM_SIZE**3 / first for first, _ in spent[GEMM]]
    rows = {}
    for name in (TORCH, *recipes):
        total = [sum(pair) for pair in spent[name]]
        rows[name] = {
            "forward_ms": quartiles([1e3 * first for first, _ in spent[name]]),
            "backward_ms": quartiles([1e3 * second for _, second in spent[name]]),
            "speed": quartiles([sum(t) / x for t, x in zip(spent[TORCH], total, strict=True)]),
            "gemm_share": quartiles([work / x / p for x, p in zip(total, peak, strict=True)]),
        }
    return {
        "shape": shape,
        "causal": causal,
        "gemm_gflops": [x / 1e9 for x in quartiles(peak)],
        "ways": rows,
    }


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def line(name: str, row: dict[str, list[float]]) -> str:
    low, middle, high = row["speed"]
    ratio = (
        f"{middle:5.2f} ({low:.2f}-{high:.2f})" if low > 1 or high < 1 else "no clear difference"
    )
    share = "{1:.0%} ({0:.0%}-{2:.0%})".format(*row["gemm_share"])
    if name == TORCH:
        ratio = "1"
    return (
        f"  {name:21} {row['forward_ms'][1]:8.2f} {row['backward_ms'][1]:8.2f}  {ratio:20} {share}"
    )


def errors(shape: tuple[int, ...], causal: bool, recipes: list[str]) -> dict[str, list[float]]:
    """Relative errors of dQ, dK and dV over those of the floor, against the exact gradient."""
    inputs = draw(shape)
    exact = golden(*inputs, is_causal=causal)
    wanted = [x for x in (exact.grad_query, exact.grad_key, exact.grad_value) if x is not None]
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    # in fp64 blocks change nothing but the memory
    whole_rows = BF16_FLOOR.with_(block_query=max(1, 2**22 // shape[2]))
    floor = torch.autograd.grad(
        emulate(*leaves, is_causal=causal, recipe=whole_rows), leaves, inputs[3]
    )
    ways = {TORCH: pytorch(inputs, causal)} | {
        name: native(name, inputs, causal) for name in recipes
    }
    result = {"floor itself": [relative(x, y) for x, y in zip(floor, wanted, strict=True)]}
    for name, (forward, backward) in ways.items():
        own = backward(forward())
        result[name] = [
            relative(x, y) / lowest
            for x, y, lowest in zip(own, wanted, result["floor itself"], strict=True)
        ]
    return result


def calls(rounds: int) -> dict[str, float]:
    """Medians in microseconds of calls on (1, 1, 16, 64), each way in its turn."""
    q = draw((1, 1, 16, 64))[0]
    leaf, ones = q.clone().requires_grad_(), torch.ones_like(q)
    sdpa, call = SDPA, Call(q, q, q, scale=0.125)
    ways: dict[str, Callable[[], Any]] = {
        "PyTorch's SDPA": lambda: sdpa(q, q, q),
        "halfulp.attention": lambda: attention(q, q, q),
        "of it the kernel": lambda: cpu.forward(call, "halfulp"),
        "PyTorch's SDPA, forward and backward": lambda: torch.autograd.grad(
            sdpa(leaf, leaf, leaf), leaf, ones
        ),
        "halfulp.attention, forward and backward": lambda: torch.autograd.grad(
            attention(leaf, leaf, leaf), leaf, ones
        ),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, way in ways.items():
            for _ in range(200):
                start = time.perf_counter()
                way()
                if turn:
                    spent[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in spent.items()}


# [B, H, N, N_k, D] of the goals: tiny, small, ragged, middling, long, and one query at a time, the
# last with four query heads to a key head.
GOAL_SHAPES = (
    (1, 1, 16, 16, 64),
    (16, 1, 32, 32, 32),
    (2, 4, 77, 77, 64),
    (1, 8, 256, 256, 64),
    (1, 8, 1024, 1024, 64),
    (1, 8, 1, 2048, 64),
    (8, 8, 1, 512, 64),
    (1, 32, 1, 2048, 64),
)


def goals(rounds: int) -> list[dict[str, Any]]:
    """halfulp.attention over PyTorch's SDPA in processor time, forward and training, each cell with
    its goal: 1, in training 2 (float32) or 2.5 (bf16) from 256 tokens on.
    """
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for b, h, n, nk, d in GOAL_SHAPES:
            generator = torch.Generator().manual_seed(0)
            grouped = {"enable_gqa": True} if h == GOAL_SHAPES[-1][1] else {}
            sizes = ((h, n), *[(h // 4 if grouped else h, nk)] * 2)
            q, k, v = (torch.randn(b, *size, d, generator=generator).to(dtype) for size in sizes)
            leaves, ones = [x.clone().requires_grad_() for x in (q, k, v)], torch.ones_like(q)
            long = n >= 256
            most = {torch.bfloat16: 2.5, torch.float32: 2.0}.get(dtype, 1.0) if long else 1.0
            for kind, goal in (("forward", 1.0), ("training", most))[: 2 if n > 1 else 1]:
                spent: dict[Any, list[float]] = {attention: [], SDPA: []}
                square = torch.randn(GEMM_SIZE // 2, GEMM_SIZE // 2, generator=generator).to(dtype)
                inner = max(1, 2**22 // (b * h * (n * nk * d + 2**14)))
                for turn in range(WARM_UP + rounds):
                    for way in spent:
                        start = time.process_time()
                        for _ in range(inner):
                            if kind == "forward":
                                way(q, k, v, **grouped)
                            else:
                                torch.autograd.grad(way(*leaves), leaves, ones)
                        if turn >= WARM_UP:
                            spent[way].append(time.process_time() - start)
                ratios = [y / x for x, y in zip(*spent.values(), strict=True)]
                cell = {"dtype": str(dtype)[6:], "shape": (b, h, n, nk, d), "kind": kind}
                found.append(cell | {"goal": goal, "speed": quartiles(ratios)})
                low, middle, high = found[-1]["speed"]
                verdict = "met" if middle >= goal else "missed"
                if long and kind == "training":
                    gemm = []  # beside the others it would leave one of them a cold cache
                    for _ in spent[SDPA]:
                        start = time.process_time()
                        square @ square
                        gemm.append(time.process_time() - start)
                    share = 14.0 * b * h * n * nk * d * inner / (2.0 * (GEMM_SIZE // 2) ** 3)
                    most_of = [y / (share * g) for y, g in zip(spent[SDPA], gemm, strict=True)]
                    found[-1]["gemm"] = quartiles(most_of)
                    verdict += " (the gemm: {1:.2f}, {0:.2f}-{2:.2f})".format(*found[-1]["gemm"])
                print(
                    f"  {cell['dtype']:9} {cell['shape']!s:24} {kind:9}"
                    f" {middle:6.2f} ({low:.2f}-{high:.2f}) of {goal}: {verdict}"
                )
    return found


def scaling(threads: int, rounds: int) -> list[dict[str, Any]]:
    """The speed of training on `threads` threads over `threads` times that on one, in real time."""
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for b, h, n, d in ((1, 8, 1024, 64), (1, 12, 2048, 64), (4, 8, 256, 64)):
            leaves = [torch.randn(b, h, n, d).to(dtype).requires_grad_() for _ in range(3)]
            ones = torch.ones_like(leaves[0])
            spent: dict[int, list[float]] = {1: [], threads: []}
            for turn in range(WARM_UP + rounds):
                for count, taken in spent.items():
                    torch.set_num_threads(count)
                    start = time.perf_counter()
                    torch.autograd.grad(attention(*leaves), leaves, ones)
                    if turn >= WARM_UP:
                        taken.append(time.perf_counter() - start)
            shares = [x / y / threads for x, y in zip(spent[1], spent[threads], strict=True)]
            row = {"dtype": str(dtype)[6:], "shape": (b, h, n, d), "share": quartiles(shares)}
            found.append(row)
            print(
                f"  {row['dtype']:9} {row['shape']!s:20}"
                + " {1:.0%} ({0:.0%}-{2:.0%}) of the ideal".format(*quartiles(shares))
            )
    return found


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def parse(text: str) -> tuple[tuple[int, ...], bool]:
    *numbers, last = text.split(",")
    causal = last == "causal"
    return tuple(int(x) for x in (numbers if causal else [*numbers, last])), causal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", nargs="+", default=SHAPES)
    parser.add_argument(
        "--recipes", nargs="+", default=["halfulp", "stock", "published", "exact_delta"]
    )
    parser.add_argument("--options", nargs="+", default=[], choices=["softcap", "sinks", "dropout"])
    parser.add_argument("--goals", action="store_true", help="measure every cell that has a goal")
    parser.add_argument("--scaling", action="store_true", help="measure threads against one")
    parser.add_argument("--calls", action="store_true", help="measure small calls alone")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--error", metavar="SHAPE", help="also measure gradient errors over the floor at this shape"
    )
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    torch.set_num_threads(chosen.threads)
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "threads": chosen.threads,
        "isa": best_isa(),
    }
    print(f"{chosen.threads} threads, {report['isa']}, {chosen.rounds} rounds")
    if chosen.goals:
        print("halfulp.attention over PyTorch's SDPA, processor time")
        report["goals"] = goals(chosen.rounds)
        chosen.shape = []
    if chosen.scaling:
        print(f"training on {chosen.threads} threads over {chosen.threads} times the speed on one")
        report["scaling"] = scaling(chosen.threads, chosen.rounds)
        chosen.shape = []
    if chosen.calls:
        report["calls_us"] = calls(chosen.rounds)
        print(
            "\n".join(f"  {name:40} {value:6.1f} µs" for name, value in report["calls_us"].items())
        )
        chosen.shape = []
    chosen.recipes += [
        f"{recipe}+{option}" for recipe in chosen.recipes for option in chosen.options
    ]
    report["shapes"] = []
    if chosen.shape:
        print(f"{'':24} forward backward  over PyTorch         share of the gemm")
    for text in chosen.shape:
        report["shapes"].append(measure(*parse(text), chosen.recipes, chosen.rounds))
        print(f"{text}   gemm {report['shapes'][-1]['gemm_gflops'][1]:.0f} Gflop/s")
        for name, row in report["shapes"][-1]["ways"].items():
            print(line(name, row))
    if chosen.error:
        report["error_over_floor"] = errors(*parse(chosen.error), chosen.recipes)
        print(f"{chosen.error}: relative error of dQ, dK, dV over the floor's")
        for name, row in report["error_over_floor"].items():
            print(f"  {name:14} " + "  ".join(f"{x:.3g}" for x in row))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
