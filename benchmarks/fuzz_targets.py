"""Hostile kernels by the hundred: each does one thing that no kernel should in one of its calls,
and the auditor must come out of it with a line, its own state and the next call whole.

Most run in this process (exceptions, results of a wrong kind, inputs that are changed, state that
is left behind); those that end a process, or would never end, run as `halfulp audit` runs them, in
one of their own. Three things are counted: calls that ended the auditor, deeds that were taken for
a whole call without a word, and calls after which a good kernel gave other bits.

    python -m benchmarks.fuzz_targets --calls 500 --isolated 60
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from halfulp.targets import CallLimits, Outcome, Target, isolated, run_target

STOCK = functional.scaled_dot_product_attention


class _Silent(BaseException):
    """An exception that cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raises(error: BaseException) -> Callable[..., Any]:
    def deed(*_: Tensor) -> None:
        raise error

    return deed


def _deep() -> None:
    _deep()


# What is done before the kernel computes; all of it must be as before when the call is over.
STATE: dict[str, Callable[..., Any]] = {
    "default dtype": lambda *_: torch.set_default_dtype(torch.float64),
    "no gradients": lambda *_: torch.set_grad_enabled(False),
    "threads": lambda *_: torch.set_num_threads(3),
    "torch's seed": lambda *_: torch.manual_seed(7),
    "Python's seed": lambda *_: random.seed(7),
    "numpy's seed": lambda *_: np.random.seed(7),  # noqa: NPY002
    "folder": lambda *_: os.chdir(tempfile.gettempdir()),
    "recursion limit": lambda *_: sys.setrecursionlimit(5000),
    "denormals": lambda *_: torch.set_flush_denormal(True),
    "sys.path": lambda *_: sys.path.insert(0, "/nowhere"),
    "a function replaced": lambda *_: setattr(
        functional, "scaled_dot_product_attention", torch.add
    ),
    "a method replaced": lambda *_: setattr(torch.Tensor, "softmax", None),
    "inference mode": lambda *_: torch.inference_mode().__enter__(),
    "autocast": lambda *_: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "anomaly mode": lambda *_: torch.autograd.set_detect_anomaly(True),
}
# What no call may be taken for whole with.
DEEDS: dict[str, Callable[..., Any]] = {
    "ValueError": _raises(ValueError("no")),
    "RuntimeError of many lines": _raises(RuntimeError("a\nb\n\x1b[31mc")),
    "SystemExit": _raises(SystemExit(0)),
    "GeneratorExit": _raises(GeneratorExit()),
    "an exception without words": _raises(_Silent()),
    "MemoryError": _raises(MemoryError()),
    "RecursionError": lambda *_: _deep(),
    "StopIteration": _raises(StopIteration()),
}
RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda _: None,
    "a list of lists": lambda out: [[out]],
    "sparse": lambda out: out.to_sparse(),
    "meta": lambda out: out.to("meta"),
    "another dtype": lambda out: out.to(torch.complex64),
    "another shape": lambda out: out[..., :-1],
    "transposed": lambda out: out.mT,
    "a number": lambda _: 1.0,
    "a dictionary": lambda out: {"out": out},
    "detached": lambda out: out.detach(),
}
INPUTS: dict[str, Callable[..., Any]] = {
    "query zeroed": lambda q, *_: q.data.zero_(),
    "key doubled": lambda _, k, *__: k.data.mul_(2),
    "value filled with NaN": lambda *qkv: qkv[2].data.fill_(torch.nan),
}
ENDS = {
    "sys.exit": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "segfault": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "interrupt": "raise KeyboardInterrupt",
    "20 GB": "torch.ones(20 * 2**30, dtype=torch.uint8)",
    "hang": "signal.pause()",
}


def kernel_of(
    before: Callable[..., Any] | None, after: Callable[[Tensor], Any] | None
) -> Callable[..., Any]:
    """A good kernel but for what it does before, or to its result."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
    ) -> Any:
        if before is not None:
            before(query, key, value)
        out = STOCK(query, key, value, is_causal=is_causal, scale=scale)
        return out if after is None else after(out)

    return kernel


def tensors(seed: int) -> list[Tensor]:
    """query, key, value and grad_out `[1, 2, 24, 8]`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, 24, 8, generator=generator) for _ in range(4)]


def bits(outcome: Outcome) -> tuple[Any, ...]:
    """What a good kernel gave, to be compared."""
    assert outcome.kind == "ok", outcome.refusal
    given = outcome.result
    assert given is not None
    found = (given.out, given.grad_query, given.grad_key, given.grad_value)
    return tuple(None if x is None else tuple(x.flatten().tolist()) for x in found)


def attack_here(count: int, seed: int) -> collections.Counter[str]:
    """Hostile calls in this process."""
    draw = random.Random(seed)
    kinds: list[tuple[str, str]] = [
        (kind, name)
        for kind, table in (
            ("state", STATE), ("raises", DEEDS), ("result", RESULTS), ("inputs", INPUTS)
        )
        for name in table
    ]  # fmt: skip
    good = Target.of(kernel_of(None, None), "good")
    found: collections.Counter[str] = collections.Counter()
    for number in range(count):
        kind, name = kinds[number % len(kinds)]
        before = {"state": STATE, "raises": DEEDS, "inputs": INPUTS}.get(kind, {}).get(name)
        target = Target.of(kernel_of(before, RESULTS.get(name)), name)
        given, is_causal = tensors(draw.randrange(2**31)), draw.random() < 0.5
        wanted = bits(run_target(good, *given, is_causal=is_causal, scale=None))
        found["calls"] += 1
        try:
            outcome = run_target(target, *given, is_causal=is_causal, scale=None)
        except BaseException as error:
            found["ended the auditor"] += 1
            print(f"{kind} {name}: {type(error).__name__} came through")
            continue
        said = outcome.kind != "ok" or bool(outcome.notes)
        # a seed that is put back and gradients that are taken anyway need no word
        if not said and kind != "state":
            found["taken for whole"] += 1
            print(f"{kind} {name}: not a word")
        lines = [outcome.refusal or "", *outcome.notes]
        if any("\n" in line or "\x1b" in line for line in lines):
            found["more than a line"] += 1
            print(f"{kind} {name}: {lines}")
        if bits(run_target(good, *given, is_causal=is_causal, scale=None)) != wanted:
            found["left something behind"] += 1
            print(f"{kind} {name}: the next call has other bits")
    return found


def attack_processes(count: int, seed: int, folder: Path) -> collections.Counter[str]:
    """Hostile calls in processes of their own."""
    draw = random.Random(seed)
    found: collections.Counter[str] = collections.Counter()
    names = list(ENDS)
    for number in range(count):
        name = names[number % len(names)]
        file = folder / f"kernel_{number}.py"
        body = f"""
            import ctypes, os, signal, sys, torch

            def kernel(query, key, value, *, is_causal, scale):
                if is_causal:
                    {ENDS[name]}
                attend = torch.nn.functional.scaled_dot_product_attention
                return attend(query, key, value, is_causal=is_causal, scale=scale)
        """
        file.write_text(textwrap.dedent(body), encoding="utf-8")
        given = tensors(draw.randrange(2**31))
        found["calls"] += 1
        try:
            with isolated(f"{file}:kernel", limits=CallLimits(seconds=2, gigabytes=4)) as target:
                outcome = run_target(target, *given, is_causal=True, scale=None)
                after = run_target(target, *given, is_causal=False, scale=None)
        except BaseException as error:
            found["ended the auditor"] += 1
            print(f"{name}: {type(error).__name__} came through")
            continue
        if outcome.kind == "ok":
            found["taken for whole"] += 1
            print(f"{name}: not a word")
        if after.kind != "ok" and name != "hang":  # which is not called again
            found["no next call"] += 1
            print(f"{name}: the next call: {after.refusal}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=500, help="in this process")
    parser.add_argument("--isolated", type=int, default=60, help="in processes of their own")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    here = attack_here(chosen.calls, chosen.seed)
    with tempfile.TemporaryDirectory() as folder:
        apart = attack_processes(chosen.isolated, chosen.seed, Path(folder))
    for where, found in (("in this process", here), ("in their own", apart)):
        wrong = {name: number for name, number in found.items() if name != "calls"}
        print(f"{where}: {found['calls']} hostile calls, {wrong or 'none of them harmful'}")
    print(f"{time.perf_counter() - began:.0f} s")
    sys.exit(len(here) > 1 or len(apart) > 1)


if __name__ == "__main__":
    main()
