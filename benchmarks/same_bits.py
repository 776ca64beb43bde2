"""Computes the same things in two checkouts and compares them bit by bit: what a change that must
not change a number is held to.

    python benchmarks/same_bits.py BASE [--parts NAME ...] [--steps N] [--json FILE]

BASE is another checkout of the repository, its native library built; the other one is the checkout
that this file lies in. Each computes in a process of its own, on one thread: losses of the preset
`seconds` under every named recipe, golden values, every named recipe emulated forward and backward,
`halfulp.attention` in each of its CPU backends over recipes, dtypes and options, and verdicts and
figures of audits. Where something differs, the table says in which tensor, in how many elements and
by how much; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Found = Iterator[tuple[str, Any]]
_BOUNDS = ("_lower", "_upper")
_SHOWN = 12  # differences of a part that are printed
KERNEL_RECIPES = ("halfulp", "stock", "published", "exact_delta")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (37, 5), "causal_offset": 11},
    "softcap": {"softcap": 3.0, "is_causal": True},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])},
    "dropout": {"dropout_p": 0.3},
    "bool mask": {"attn_mask": torch.ones(130, 150).tril(20) > 0},
    "float mask": {"attn_mask": torch.linspace(-2, 2, 150).expand(130, 150)},
}
AUDITED = ("sdpa:flash", "sdpa:math", "eager", "halfulp", "halfulp:stock", "recipe:BF16_FLASH1")


def drawn(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value with two query heads to a key head, and the gradient of out."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((4, 130, 40), (2, 150, 40), (2, 150, 40), (4, 130, 40))
    return [torch.randn(2, *shape, generator=draw).to(dtype) for shape in shapes]


def results(function: Callable[..., Any], x: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """Out, lse and gradients of both, under a seed that dropout draws from."""
    torch.manual_seed(5)
    leaves = {n: t.clone().requires_grad_() for n, t in zip("qkv", x[:3], strict=True)}
    out, lse = function(*leaves.values(), enable_gqa=True, return_lse=True, **options)
    visible = torch.where(lse.isfinite(), lse, 0).sum() * 0.1
    loss = (out.double() * x[3].double()).sum() + visible
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out, "lse": lse, **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def losses(steps: int) -> Found:
    """The loss of every step of `seconds`, trained with each named recipe emulated."""
    from halfulp.recipes import RECIPES
    from halfulp.training.loop import train
    from halfulp.training.presets import seconds

    for name in RECIPES:
        config = seconds(f"recipe:{name}", steps=steps)
        try:
            run = train(replace(config, metrics_every=1, measure_every=0))
        except NotImplementedError:  # one of the two checkouts does not train with it
            continue
        yield name, torch.tensor(run.curve("loss"), dtype=torch.float64)


def golden(_: int) -> Found:
    """Golden values of what both checkouts take."""
    import halfulp

    for dtype, option in itertools.product((torch.bfloat16, torch.float64), OPTIONS):
        if set(OPTIONS[option]) <= {"is_causal", "attn_mask"}:
            x = drawn(1, dtype)
            found = halfulp.golden(*x, enable_gqa=True, **OPTIONS[option])
            for name, value in vars(found).items():
                if value is not None and name != "grad_mask":
                    yield f"{dtype}, {option}, {name}", value


def emulations(_: int) -> Found:
    """Every named recipe, natively and, observed, in the loops of Python."""
    import halfulp
    from halfulp.recipes import RECIPES

    for recipe, option in itertools.product(RECIPES, ("plain", "causal", "bool mask")):
        for observers in ((), [lambda *_: None]):
            x = drawn(2, torch.bfloat16)
            found = results(
                halfulp.emulate, x, recipe=recipe, observers=observers, **OPTIONS[option]
            )
            for name, value in found.items():
                yield f"{recipe}, {option}{', observed' if observers else ''}, {name}", value


def attention(_: int) -> Found:
    """`halfulp.attention` in the library and in plain PyTorch."""
    import halfulp

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for backend, recipe, dtype, option in itertools.product(
        ("cpu", "torch"), KERNEL_RECIPES, dtypes, OPTIONS
    ):
        call = {"backend": backend, "recipe": recipe} | OPTIONS[option]
        for name, value in results(halfulp.attention, drawn(3, dtype), **call).items():
            yield f"{backend}, {recipe}, {dtype}, {option}, {name}", value


def audits(_: int) -> Found:
    """Verdicts, and every figure of every case that both have."""
    import halfulp
    from halfulp.audit import Shape

    for name in AUDITED:
        try:
            report = halfulp.audit(name, shapes=[Shape(2, 2, 64, 64, 32)], explain=False)
        except ValueError:  # a name that one of the two checkouts does not know
            continue
        yield f"{name}, verdict", report.verdict
        for case in report.cases:
            # confidence bounds depend on how many tests an audit makes, the figures do not
            figures = [
                {name: x for name, x in row.as_dict().items() if not name.endswith(_BOUNDS)}
                for row in case.rows
            ]
            yield f"{name}, {case.case.probe}", json.dumps(figures, default=str)


PARTS: dict[str, Callable[[int], Found]] = {
    "losses": losses,
    "golden": golden,
    "emulations": emulations,
    "attention": attention,
    "audits": audits,
}


def emit(part: str, steps: int, to: Path) -> None:
    """Compute one part here and write what it found."""
    torch.set_num_threads(1)
    tensors, texts = {}, {}
    for name, value in PARTS[part](steps):
        if isinstance(value, Tensor):
            tensors[name] = value.detach().clone().contiguous()
        else:
            texts[name] = value
    save_file(tensors, to / "tensors.safetensors")
    (to / "texts.json").write_text(json.dumps(texts), encoding="utf-8")


def computed(checkout: Path, part: str, steps: int) -> dict[str, Any]:
    """One part, computed with the sources of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(checkout), "--emit", folder, "--parts", part]
        subprocess.run([*command, "--steps", str(steps)], env=environment, check=True)
        texts = json.loads((Path(folder) / "texts.json").read_text(encoding="utf-8"))
        return load_file(Path(folder) / "tensors.safetensors") | texts


def difference(a: Any, b: Any) -> str | None:
    """How two values differ, in words; None if not in a bit."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None if type(a) is type(b) and a == b else f"{a!r:.80} became {b!r:.80}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} became {tuple(b.shape)} {b.dtype}"
    bits = [x.reshape(-1).view(torch.uint8).view(x.numel(), -1) for x in (a, b)]
    other = (bits[0] != bits[1]).any(1)
    if not other.any():
        return None
    distance = (a.double() - b.double()).norm() / a.double().norm()
    return f"{int(other.sum())} of {a.numel()} elements, {float(distance):.1e} relative"


def main() -> int:
    """Compare, print the table, and write it where it was asked for."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]))
    parser.add_argument("base", type=Path)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--emit", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.emit is not None:
        emit(chosen.parts[0], chosen.steps, chosen.emit)
        return 0
    table: dict[str, Any] = {}
    for part in chosen.parts:
        here = Path(__file__).resolve().parents[1]
        before, after = (computed(x, part, chosen.steps) for x in (chosen.base, here))
        differ = {
            name: found
            for name in before.keys() & after.keys()
            if (found := difference(before[name], after[name])) is not None
        }
        alone = {
            "only before": sorted(before.keys() - after.keys()),
            "only after": sorted(after.keys() - before.keys()),
        }
        same = len(before.keys() & after.keys()) - len(differ)
        table[part] = {"identical": same, "differ": dict(sorted(differ.items())), **alone}
        print(f"{part}: {same} identical, {len(differ)} differ", flush=True)
        shown = sorted(differ.items())
        for name, text in shown[:_SHOWN]:
            print(f"    {name}: {text}")
        if len(shown) > _SHOWN:
            print(f"    … and {len(shown) - _SHOWN} more, all of which --json writes")
        for when, names in alone.items():
            if names:
                print(f"    {when}: {', '.join(names)}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(table, indent=1), encoding="utf-8")
    return int(any(found["differ"] for found in table.values()))


if __name__ == "__main__":
    sys.exit(main())
