"""Calls of the native library with random shapes, layouts, values and options, each result held to
plain autograd's formulas in float64.

The error of a result may be `BUDGET` times what rounding its inputs, weights and results to the
dtype makes; NaN and infinities may not come of finite inputs. From the repository root, seeded and
bounded:

    python benchmarks/fuzz_native.py [--calls N] [--seed N] [--largest N] [--json FILE]

`make sanitize` runs it against builds of the library with sanitizers.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfulp.calls import Call, Dropout, Sees
from halfulp.kernels import cpu, cpu_packed
from halfulp.native import ISAS, best_isa, missing
from halfulp.ops import tiled

BUDGET = 8.0
RECIPES = ("halfulp", "stock", "exact_delta")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> Tensor:
    """Normal numbers, in a layout of four."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    b, h, n, d = shape
    layout = rng.randrange(4)
    if layout == 0:
        x = torch.randn(b, n, h, d, generator=generator).transpose(1, 2)
    elif layout == 1:  # of a larger tensor
        x = torch.randn(b, h, n + 2, d + 3, generator=generator)[:, :, 1:-1, 2:-1]
    elif layout == 2:
        x = torch.randn(b, h, d, n, generator=generator).transpose(2, 3)
    else:
        x = torch.randn(shape, generator=generator)
    return (x * 2.0 ** rng.randrange(-3, 2)).to(dtype)


def draw(rng: random.Random, largest: int) -> tuple[Call, str, dict[str, Any]]:
    """A call, its recipe, and what is said of it."""
    b, hk, groups = rng.randint(1, 2), rng.randint(1, 3), rng.choice((1, 1, 2, 3))
    n, nk = (rng.choice((1, rng.randint(1, 40), rng.randint(1, largest))) for _ in range(2))
    d, dv = (rng.choice((rng.randint(1, 40), 64, rng.randint(1, 256))) for _ in range(2))
    dtype, h = rng.choice(DTYPES), hk * groups
    said: dict[str, Any] = {"dtype": str(dtype)[6:], "shape": (b, h, hk, n, nk, d, dv)}
    q, k, v = (tensor(s, dtype, rng) for s in ((b, h, n, d), (b, hk, nk, d), (b, hk, nk, dv)))
    mask = None
    kind = rng.choice(("none", "none", "bool", "float"))
    if kind != "none":
        shape = [size if rng.random() < 0.6 else 1 for size in (b, h, n, nk)]
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        mask = torch.randn(shape, generator=generator)
        mask = mask > -1 if kind == "bool" else mask.masked_fill(mask > 2, -torch.inf)
    window = (rng.randint(0, 60), rng.randint(-1, 60)) if rng.random() < 0.3 else None
    sees = Sees(rng.random() < 0.4, window, rng.choice((0, nk - n, rng.randint(-50, 50))), mask)
    sinks = None
    if rng.random() < 0.3:
        sinks = 2 * torch.randn(h, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    softcap = rng.choice((0.0, 0.0, 0.5, 20.0))
    dropout = Dropout(rng.choice((0.1, 0.9)), rng.getrandbits(62)) if rng.random() < 0.3 else None
    recipe = rng.choice(RECIPES)
    said |= {"recipe": recipe, "mask": kind, "softcap": softcap, "sinks": sinks is not None}
    said |= {"dropout": dropout is not None, "causal": sees.causal, "window": window}
    return Call(q, k, v, sees, d**-0.5, softcap, sinks, dropout), recipe, said


def results(call: Call, recipe: str, do: Tensor, dlse: Tensor, kernel: Any, **more: Any) -> Any:
    """Out, lse and gradients by name."""
    learned = call.sees.mask is not None and call.sees.mask.is_floating_point()
    saved = kernel.forward(call, recipe, **more)
    grads = kernel.backward(call, recipe, saved, do, dlse, mask_gradient=learned, **more)
    found = {"out": saved.out, "lse": saved.lse, "dq": grads.query, "dk": grads.key}
    found |= {"dv": grads.value, "dsinks": grads.sinks, "dmask": grads.mask}
    return {name: x for name, x in found.items() if x is not None}


def doubled(call: Call) -> Call:
    mask, sinks = call.sees.mask, call.sinks
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    sees = Sees(call.sees.causal, call.sees.window, call.sees.offset, wide)
    operands = (x.double() for x in (call.query, call.key, call.value))
    wide_sinks = None if sinks is None else sinks.double()
    return Call(*operands, sees, call.scale, call.softcap, wide_sinks, call.dropout)


def wrong(call: Call, recipe: str, isa: str, rng: random.Random, packs: bool) -> str | None:
    """What is wrong with one call; None: nothing."""
    b, h, n, dv = *call.query.shape[:3], call.value.shape[3]
    do = tensor((b, h, n, dv), call.query.dtype, rng)
    dlse = torch.randn(b, h, n, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    found = results(call, recipe, do, dlse, cpu, isa=isa)
    true = results(doubled(call), recipe, do.double(), dlse.double(), tiled)
    like = results(call, recipe, do, dlse, tiled)
    unit = torch.finfo(call.query.dtype).eps
    for name, expected in true.items():
        x = found[name].double()
        seen = expected.isfinite()
        if not torch.equal(x.isfinite(), seen):
            return f"{name}: NaN or infinities where there are none, or none where there are"
        off, allowed = ((y - expected)[seen].norm() for y in (x, like[name].double()))
        scale = max(expected[seen].norm(), 1e-3 * true["out"].norm()) + 1e-6
        if off > BUDGET * (allowed + unit * scale):
            return f"{name}: off by {off:.3g}, plain PyTorch by {allowed:.3g}, size {scale:.3g}"
    if packs and call.sees.mask is None and b == 1 and call.dropout is None:
        cut = sorted(rng.randint(0, size) for size in (n,))
        ends = [torch.tensor([0, *cut, size]) for size in (n, call.key.shape[2])]
        ends[1][1] = min(int(ends[1][1]), int(ends[1][2]))
        saved = cpu_packed.forward(call, recipe, cpu_packed.Lengths(*ends))
        cpu_packed.backward(call, recipe, saved, do, dlse, cpu_packed.Lengths(*ends))
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=300, help="most queries and keys")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    here = ISAS[: ISAS.index(best_isa()) + 1]
    counts, failures = Counter[str](), []
    for number in range(chosen.calls):
        rng = random.Random(f"{chosen.seed} {number}")
        call, recipe, said = draw(rng, chosen.largest)
        isa = rng.choice(here)
        torch.set_num_threads(rng.choice((1, 1, 3)))
        counts.update((isa, said["dtype"], recipe, f"mask {said['mask']}"))
        counts.update(x for x in ("sinks", "dropout", "causal", "softcap", "window") if said[x])
        fault = wrong(call, recipe, isa, rng, packs=True)
        if fault is not None:
            failures.append({"number": number, "isa": isa, "fault": fault} | said)
            print(failures[-1])
    print(f"{chosen.calls} calls, seed {chosen.seed}: {len(failures)} outside their budget")
    print("  " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    if chosen.json:
        report = {"calls": chosen.calls, "counts": counts, "failures": failures}
        chosen.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
