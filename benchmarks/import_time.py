"""Time every name of `halfulp` beside `import torch`, which it contains: the target is a ratio
under 1.2. `import halfulp` alone imports none of them and takes milliseconds.

Fresh processes, in pairs of random order, so that a busy spell of the machine falls on both of a
pair; the time is the import statement's own, without the start of the interpreter. The ratio is the
median over the pairs, which a spell that outlasts some of them moves least.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys

MODULES = {"torch": "import torch", "halfulp": "from halfulp import *"}
TARGET = 1.2


def import_seconds(module: str) -> float:
    """Return the seconds `import module` takes in a fresh process."""
    code = (
        f"import time; start = time.perf_counter(); {MODULES[module]}\n"
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def summary(values: list[float]) -> dict[str, float]:
    """Return median, quartiles, smallest and largest."""
    low, median, high = statistics.quantiles(values, n=4)
    return {
        "median": median,
        "quartile_1": low,
        "quartile_3": high,
        "min": min(values),
        "max": max(values),
    }


def measure(pairs: int) -> dict[str, dict[str, float]]:
    """Time both imports `pairs` times each, after one untimed round that fills the file cache; a
    summary each.
    """
    for module in MODULES:
        import_seconds(module)
    order = random.Random(0)
    seconds: dict[str, list[float]] = {module: [] for module in MODULES}
    for _ in range(pairs):
        for module in order.sample(list(MODULES), len(MODULES)):
            seconds[module].append(import_seconds(module))
    paired = [
        ours / torch for torch, ours in zip(seconds["torch"], seconds["halfulp"], strict=True)
    ]
    return {name: summary(values) for name, values in (seconds | {"paired": paired}).items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--pairs", type=int, default=11, help="timed imports of each module (default: 11)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error(f"--pairs {options.pairs}: a spread needs 2 or more")
    result = measure(options.pairs)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'':>8}  {'median':>8}  {'quartiles':>17}  {'range':>17}")
    for name, unit in (("torch", "s"), ("halfulp", "s"), ("paired", "×")):
        row = result[name]
        quartiles = f"{row['quartile_1']:.3f} to {row['quartile_3']:.3f}"
        span = f"{row['min']:.3f} to {row['max']:.3f}"
        print(f"{name:>8}  {row['median']:>6.3f} {unit}  {quartiles:>17}  {span:>17}")
    print(f"halfulp / torch: {result['paired']['median']:.3f} (target: under {TARGET})")


if __name__ == "__main__":
    main()
