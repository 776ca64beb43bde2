"""How often `halfulp.diff` accuses equal engines: pairs of settings that differ in the order of
their sums alone, on models of transformers with random weights.

    python -m benchmarks.diff_null [--count 200] [--compiled 4] [--out FILE]

An accusation is a verdict other than "identical" and "within rounding", or an operation that is
named as parting. `--compiled` adds pairs of a model and itself through torch.compile (inductor).
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


def pairs(count):
    """What is compared, each way on each model and dtype with other weights and tokens."""
    for i in range(count):
        name, way = WAYS[i % len(WAYS)]
        kind = MODELS[i // len(WAYS) % len(MODELS)]
        dtype = DTYPES[i // (len(WAYS) * len(MODELS)) % len(DTYPES)]
        yield i, kind, dtype, name, way


def one(i, kind, dtype, name, way):
    model = language_model(kind, dtype, seed=i)
    found = diff(model, Setting(model, name, **way), batches(seed=i, length=24), attribute=False)
    return {
        "model": kind,
        "dtype": str(dtype),
        "way": name,
        "verdict": found.verdict,
        "p": found.p,
        "ratio": found.ratio,
        "first": None if found.first is None else found.first.place,
        "lean_p": found.lean_p,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--compiled", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began, rows = time.perf_counter(), []
    cases = list(pairs(asked.count))
    for i in range(asked.compiled):
        cases.append((1000 + i, MODELS[i % 2], DTYPES[i % 4 // 2], "compiled", {"compiled": True}))
    for case in cases:
        rows.append(one(*case))
        if rows[-1]["verdict"] not in ("identical", "within rounding") or rows[-1]["first"]:
            print("accused:", rows[-1], flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps(rows, indent=1))
    wrong = [r for r in rows if r["verdict"] not in ("identical", "within rounding") or r["first"]]
    differ = [r for r in rows if r["verdict"] != "identical"]
    print(
        f"{len(rows)} comparisons of equal engines, {len(differ)} of them not identical:"
        f" {len(wrong)} accused, {1 - len(wrong) / len(rows):.1%} silent;"
        f" smallest p {min((r['p'] or 0) for r in differ):.2g};"
        f" {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
