"""How often `halfulp.diff` accuses equal engines: pairs of settings that differ in the order of
their sums alone, on models of transformers with random weights.

    python -m benchmarks.diff_null [--count 200] [--compiled 4] [--steps 0] [--out FILE]

An accusation is a verdict other than "identical" and "within rounding", or an operation that is
named as parting. `--compiled` adds pairs of a model and itself through torch.compile (inductor).
With `--steps` both sides are trained as well, in the ways that can be; a chance below 0.01 after
the last step, and a module whose weights leave rounding, are accusations then, too.
"""

import argparse
import json
import time
import warnings
from pathlib import Path

import torch
from tests.diff.planted import batches, language_model

from halfulp.diff import Setting, diff

WAYS = (
    ("PyTorch's math attention", {"attention": "sdpa:math"}),
    ("one sequence at a time", {"pieces": 1}),
    ("three sequences at a time", {"pieces": 3}),
    ("token by token with a cache", {"decode": 20}),
)
MODELS = ("GPT2", "Llama", "Mixtral")
DTYPES = (torch.float32, torch.bfloat16)
OPTIMIZERS = (
    lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
)


def pairs(count, steps):
    """What is compared, each way on each model and dtype with other weights and tokens."""
    ways = [x for x in WAYS if not (steps and "decode" in x[1])]
    for i in range(count):
        name, way = ways[i % len(ways)]
        kind = MODELS[i // len(ways) % len(MODELS)]
        dtype = DTYPES[i // (len(ways) * len(MODELS)) % len(DTYPES)]
        yield i, kind, dtype, name, way


def one(i, kind, dtype, name, way, steps):
    model = language_model(kind, dtype, seed=i)
    given = batches(2 * (steps + 1), seed=i, length=24)
    more = {"steps": steps, "optimizer": OPTIMIZERS[i % len(OPTIMIZERS)]} if steps else {}
    found = diff(model, Setting(model, name, **way), given, attribute=False, **more)
    after = found.after
    parted = [] if after is None else [x.module for x in after.modules if x.first is not None]
    return {
        "model": kind,
        "dtype": str(dtype),
        "way": name,
        "verdict": found.verdict,
        "p": found.p,
        "ratio": found.ratio,
        "first": None if found.first is None else found.first.place,
        "lean_p": found.lean_p,
        "late_p": None if after is None else after.p,
        "late": bool(parted) or (after is not None and after.p is not None and after.p < 0.01),
        "modules": parted,
    }


def accused(row):
    silent = row["verdict"] in ("identical", "within rounding")
    return not silent or row["first"] is not None or row["late"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--compiled", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began, rows = time.perf_counter(), []
    cases = list(pairs(asked.count, asked.steps))
    for i in range(asked.compiled):
        cases.append((1000 + i, MODELS[i % 2], DTYPES[i % 4 // 2], "compiled", {"compiled": True}))
    for case in cases:
        rows.append(one(*case, asked.steps))
        if accused(rows[-1]):
            print("accused:", rows[-1], flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps(rows, indent=1))
    wrong = [row for row in rows if accused(row)]
    differ = [r for r in rows if r["verdict"] != "identical"]
    print(
        f"{len(rows)} comparisons of equal engines, {len(differ)} of them not identical:"
        f" {len(wrong)} accused, {1 - len(wrong) / len(rows):.1%} silent;"
        f" smallest p {min((r['p'] or 0) for r in differ):.2g};"
        f" {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
