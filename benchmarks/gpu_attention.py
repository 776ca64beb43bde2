"""halfulp.attention on a GPU: is it right, is it sound, how fast is it beside the stock kernels?

usage: python -m benchmarks.gpu_attention [--out gpu-attention] [--seconds 570]
           [--device cuda] [--small] [--only …]
       python -m benchmarks.gpu_attention --dry-run     (no GPU: plan all, down to the launches)
       python -m benchmarks.gpu_attention --compile FILE  (no GPU: compile for every chip)
       python -m benchmarks.gpu_attention --tune FILE   (time tile sizes on this GPU)
       python -m benchmarks.gpu_attention --tiles FILE  (measure with a table that --tune wrote)

A call ends after --seconds and the next one goes on where it ended: every figure is kept in --out
as soon as it is there, and results.json is written again at the end of each call.

- weights: do the forward and the two backward kernels round to the same weights, in spite of an
  approximate exp2?
- golden: relative error of O, dQ, dK, dV against fp64, per kernel and length.
- audit: halfulp's own audit of every kernel.
- speed: TFLOP/s forward and backward, every kernel in turn in each round: median, smallest and
  largest round.

--small does it on a CPU, with PyTorch's path in place of the Triton kernels; it is how the script
is tested.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import halfulp
from halfulp.audit.probes import Shape
from halfulp.audit.run import audit
from halfulp.runs.folder import write_json
from halfulp.runs.machine import describe_machine, describe_versions
from halfulp.targets import Target, resolve
from halfulp.targets.target import BOTH
from halfulp.testing import attend, errors, gaussian, golden, value_offset

RECIPES = ("halfulp", "stock", "published", "exact_delta")
STOCK = (
    "sdpa:flash",
    "sdpa:cudnn",
    "sdpa:efficient",
    "flex:compiled",
    "flash_attn",
    "flash_attn:3",
    "flash_attn:4",
)
PARTS = ("weights", "golden", "audit", "speed")
ROUNDS = 7


class Unit(NamedTuple):
    """One thing to measure: its part, its name, and what measures it."""

    part: str
    name: str
    measure: Callable[[], Any]


def kernel(name: str, device: str) -> Callable[..., Any]:
    """The attention function of a name: "halfulp:RECIPE" is ours, anything else an audit target."""
    family, _, recipe = name.partition(":")
    if family == "halfulp":
        backend = "triton" if device == "cuda" else "torch"
        return partial(halfulp.attention, recipe=recipe, backend=backend)
    target = resolve(name)
    if target.missing is not None:
        raise ValueError(f"{name}: {target.missing}")
    return target.call


def units(device: str, small: bool) -> Iterator[Unit]:
    """What is to be measured, the quick and telling first."""
    ours = [f"halfulp:{recipe}" for recipe in RECIPES]
    stock = ["sdpa:flash"] if small else list(STOCK)
    if device == "cuda":
        for dtype in ("bfloat16", "float16"):
            for causal in (False, True):
                yield Unit(
                    "weights", f"{dtype}{' causal' * causal}", partial(weights, dtype, causal)
                )
    for length in (128,) if small else (1024, 4096, 16384):
        for name in (*ours, *stock):
            yield Unit("golden", f"{name} N={length}", partial(error, name, length, device))
    for name in ("halfulp:halfulp",) if small else (*ours, *stock):
        yield Unit("audit", name, partial(audited, name, device, small))
    for dim, causal, length in speed_cases(small):
        case = f"d={dim} N={length}{' causal' * causal}"
        yield Unit(
            "speed", case, partial(speeds, [*ours, *stock], dim, length, causal, device, small)
        )


def speed_cases(small: bool) -> list[tuple[int, bool, int]]:
    """Head dimension, causal, length."""
    lengths = (128,) if small else (1024, 2048, 4096, 8192, 16384)
    return [
        (d, causal, n)
        for d in ((64,) if small else (64, 128))
        for causal in (False, True)
        for n in lengths
    ]


def weights(dtype: str, causal: bool) -> dict[str, int]:
    """How many rounded weights differ between kernels, of a quarter of a million."""
    from benchmarks.triton_weights import rounded_weights, weights_that_differ

    q, k, _, _ = gaussian(0, batch=8, heads=8, length=64, dim=64)
    q, k = (x.to("cuda", getattr(torch, dtype)) for x in (q, k))
    return weights_that_differ(rounded_weights(q, k, scale=0.125, is_causal=causal))


def error(name: str, length: int, device: str) -> dict[str, float]:
    """Relative errors against fp64 on inputs that show the stock recipe's: a common offset of V,
    causal.
    """
    inputs = value_offset(gaussian(0, heads=2, length=length, dim=64), 4.0)
    exact = golden(*(x.to(device) for x in inputs), is_causal=True)
    moved = inputs.map(lambda x: x.to(device, torch.bfloat16))
    return errors(attend(kernel(name, device), moved, is_causal=True, scale=None), exact)


def audited(name: str, device: str, small: bool) -> dict[str, Any]:
    """Verdict and reason of the audit, and its seconds."""
    shapes = [Shape(2, 2, 64, 64, 32)] if small else []
    target: Target | str = name
    if name.startswith("halfulp:"):
        target = Target(name, partial(kernel(name, device), return_lse=True), BOTH, "")
    report = audit(target, device=device, shapes=shapes, explain=False)
    return {"verdict": report.verdict, "reason": report.reason, "seconds": report.seconds}


def operations(batch: int, heads: int, length: int, dim: int, causal: bool) -> float:
    """Floating-point operations of the forward pass, as FlashAttention counts; the backward pass
    has 2.5 as many.
    """
    return 4.0 * batch * heads * length * length * dim * (0.5 if causal else 1.0)


def speeds(
    names: list[str], dim: int, length: int, causal: bool, device: str, small: bool
) -> dict[str, Any]:
    """TFLOP/s of every kernel, forward and backward: rounds in which each has its turn, so that
    clocks are shared.
    """
    shape = (1, 2, length, dim) if small else speed_shape(dim, length)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(4)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    refused: dict[str, dict[str, str]] = {}
    for name in names:
        calls[name], refused[name] = {}, {}
        which = "forward"
        try:
            forward = partial(_forward, prepared(name, length, causal, device), q, k, v, causal)
            out = forward()
            calls[name]["forward"] = forward
            which = "backward"
            backward = partial(torch.autograd.grad, out, (q, k, v), do, retain_graph=True)
            backward()
            calls[name]["backward"] = backward
        # a kernel that this chip or these arguments lack, or a forward pass alone
        except Exception as problem:
            refused[name][which] = " ".join(str(problem).split())[:200]
    times: dict[str, dict[str, list[float]]] = {
        name: {which: [] for which in passes} for name, passes in calls.items()
    }
    for _ in range(2 if small else ROUNDS):
        for name, passes in calls.items():
            for which, call in passes.items():
                times[name][which].append(seconds_of(call, device, 1 if small else 10))
    work = operations(*shape, causal)
    found: dict[str, Any] = {}
    for name in names:
        rates = {
            w: _rates(work * (1.0 if w == "forward" else 2.5), seconds)
            for w, seconds in times[name].items()
        }
        found[name] = rates | ({"refused": refused[name]} if refused[name] else {})
    return found


def speed_shape(dim: int, length: int) -> tuple[int, int, int, int]:
    """[B, H, N, D] with 16,384 tokens and 2,048 features, as FlashAttention's own benchmark has
    it.
    """
    return max(1, 16384 // length), 2048 // dim, length, dim


def prepared(name: str, length: int, causal: bool, device: str) -> Callable[..., Any]:
    """`kernel`, with FlexAttention's block mask made beforehand, as its users do."""
    if name != "flex:compiled":
        return kernel(name, device)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def below(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001 - FlexAttention's signature
        return j <= i

    mask = create_block_mask(below, None, None, length, length, device=device) if causal else None
    compiled = torch.compile(flex_attention)
    return lambda q, k, v, is_causal, scale: compiled(q, k, v, block_mask=mask, scale=scale)  # noqa: ARG005


def _forward(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    result = function(q, k, v, is_causal=causal, scale=None)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def seconds_of(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Seconds of one call, from the device's own clock where there is one; the first call is not
    counted.
    """
    call()
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats


def _rates(work: float, times: list[float]) -> dict[str, float]:
    """TFLOP/s: the median round, the slowest and the fastest."""
    rates = sorted(work / t / 1e12 for t in times)
    return {
        "median": statistics.median(rates),
        "least": rates[0],
        "most": rates[-1],
        "rounds": len(rates),
    }


def describe(found: dict[str, Any]) -> list[Table]:
    """Tables of what was measured, one for every part; ratios are to our own stock recipe, round
    for round medians.
    """
    tables = []
    for part in PARTS:
        rows = {
            name.removeprefix(f"{part}/"): one
            for name, one in found.items()
            if name.startswith(f"{part}/")
        }
        if not rows:
            continue
        if part != "speed":
            table = Table(part, "figures")
            for name, one in rows.items():
                table.add_row(name, json.dumps(one, default=str))
        else:
            ratios = ("of our stock", "of the fastest other")
            table = Table(
                "speed", "kernel", "forward TFLOP/s", *ratios, "backward TFLOP/s", *ratios
            )
            for case, kernels in rows.items():
                for name, one in kernels.items():
                    table.add_row(case, name, *_speed_cells(one, kernels))
        tables.append(table)
    return tables


def _speed_cells(one: dict[str, Any], kernels: dict[str, dict[str, Any]]) -> list[str]:
    """TFLOP/s and ratios of one kernel; a ratio nearer to 1 than the rounds are to each other says
    nothing.
    """
    cells = []
    for which in ("forward", "backward"):
        rates = one.get(which)
        if rates is None:
            cells += [one["refused"].get(which, "no forward pass"), "", ""]
            continue
        cells.append(f"{rates['median']:.4g} ({rates['least']:.4g} to {rates['most']:.4g})")
        spread = (rates["most"] - rates["least"]) / rates["median"]
        others = [
            k[which]["median"]
            for name, k in kernels.items()
            if which in k and not name.startswith("halfulp:")
        ]
        ours = kernels.get("halfulp:stock", {}).get(which, {}).get("median")
        for against in (ours, max(others, default=None)):
            ratio = None if against is None else rates["median"] / against
            cells.append(
                ""
                if ratio is None
                else "within the spread"
                if abs(ratio - 1) < spread
                else f"{ratio:.3f}"
            )
    return cells


def dry_run(todo: list[Unit]) -> dict[str, Any]:
    """What would be measured: which kernels are missing here and why, and what ours would launch in
    every speed case.

    Everything up to the launches is done, for every chip, on tensors without memory: blocks of the
    grid and tiles.
    """
    from benchmarks import triton_compile

    found: dict[str, Any] = {"units": [f"{unit.part}/{unit.name}" for unit in todo]}
    found["missing"] = {name: why for name in STOCK if (why := resolve(name).missing) is not None}
    found["launches"] = {}
    for dim, causal, length in speed_cases(small=False):
        for target in triton_compile.TARGETS:
            for recipe in RECIPES:
                shape = speed_shape(dim, length)
                planned = triton_compile.launches(
                    recipe, dim, causal=causal, target=target, shape=shape[:3]
                )
                found["launches"][f"{target} {recipe} d={dim} N={length}{' causal' * causal}"] = {
                    kind: [launch.grid[0], *launch.config] for kind, launch in planned.items()
                }
    return found


def run(todo: list[Unit], out: Path, deadline: float) -> tuple[dict[str, Any], list[str]]:
    """Measure what is not in `out` yet until the deadline; every figure so far, and the names of
    what is left.
    """
    kept = out / "measured"
    kept.mkdir(parents=True, exist_ok=True)
    found, left = {}, []
    for unit in todo:
        key = f"{unit.part}/{unit.name}"
        file = kept / f"{key.replace('/', '-').replace(' ', '_').replace(':', '-')}.json"
        if not file.is_file():
            if time.time() >= deadline:
                left.append(key)
                continue
            try:
                write_json(file, unit.measure())
            except Exception as problem:  # a kernel that this machine lacks, or memory
                write_json(file, {"refused": " ".join(str(problem).split())[:300]})
        found[key] = json.loads(file.read_text(encoding="utf-8"))
    return found, left


def compile_table(file: Path) -> None:
    """Write what every kernel takes on every chip, to the shipped table's form; goes on where it
    ended.
    """
    import triton
    from benchmarks import triton_compile

    version = {"triton": {"version": triton.__version__}}
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    done = kept if kept.get("triton") == version["triton"] else version
    for row in triton_compile.rows():
        name = triton_compile.row_name(*row)
        if name not in done:
            done[name] = triton_compile.row(*row)
            file.write_text(table_text(done), encoding="utf-8")


def table_text(table: dict[str, Any]) -> str:
    """JSON with one row on a line, so that a change of one kernel is a change of one line."""
    return (
        "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in table.items()) + "\n}\n"
    )


def main(argv: list[str] | None = None) -> None:
    """Measure what time allows, print the tables, write results.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-attention"), help="folder of figures, made if missing"
    )
    parser.add_argument(
        "--seconds", type=float, default=570.0, help="of this call; the next one goes on"
    )
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="where the kernels run"
    )
    parser.add_argument(
        "--small", action="store_true", help="sizes that say nothing, to test the script on a CPU"
    )
    parser.add_argument(
        "--only", nargs="*", choices=PARTS, default=list(PARTS), help="parts to run"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only plan, and print the plan as JSON; needs no GPU"
    )
    parser.add_argument(
        "--tiles",
        type=Path,
        metavar="FILE",
        help="a table that --tune wrote, in place of the package's",
    )
    parser.add_argument(
        "--compile", type=Path, metavar="FILE", help="only compile for every chip; needs no GPU"
    )
    parser.add_argument(
        "--tune", type=Path, metavar="FILE", help="only time tile sizes and write their table"
    )
    options = parser.parse_args(argv)
    if options.compile is not None:
        return compile_table(options.compile)
    if options.dry_run:
        print(
            json.dumps(
                dry_run([u for u in units("cuda", small=False) if u.part in options.only]), indent=1
            )
        )
        return None
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; --device cpu --small tests the script")
    if options.tune is not None:
        from benchmarks.triton_tune import tune

        tune(write=options.tune)
        return None
    if options.tiles is not None:
        from halfulp.kernels import triton_configs

        triton_configs.use(options.tiles)
    todo = [unit for unit in units(options.device, options.small) if unit.part in options.only]
    found, left = run(todo, options.out, time.time() + options.seconds)
    console = Console(width=180)
    for table in describe(found):
        console.print(table)
    console.print(
        f"not measured: {', '.join(left)}; the same command goes on"
        if left
        else "everything is measured"
    )
    record = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "left": left,
        "figures": found,
    }
    write_json(options.out / "results.json", record)
    return None


if __name__ == "__main__":
    main()
