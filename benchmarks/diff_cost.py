"""What `halfulp.diff` costs on a 12-layer GPT-2: time over the two passes that it compares, and
memory over what the model takes.

    python -m benchmarks.diff_cost [--layers 12] [--width 768] [--tokens 64] [--rows 1]

Each way runs in a process of its own; passes and comparisons alternate, and the figure is the
median of the ratios, on the clock and of the processor's time, which other work of the machine
moves less. Memory is the highest resident set beyond what lay there after the model was
built and had made one pass.
"""

import argparse
import gc
import resource
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from halfulp.diff import Setting
from halfulp.diff.setting import run
from halfulp.diff.two_sides import TwoSides


def resident():
    """Bytes that this process holds in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def clocks():
    """Seconds on the clock and of the processor."""
    return np.array([time.perf_counter(), time.process_time()])


class Highest:
    """The highest resident set while a block runs, looked at every millisecond."""

    def __enter__(self):
        self.bytes, self._on = resident(), True
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self):
        while self._on:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.001)

    def __exit__(self, *_):
        self._on = False
        self._thread.join()


def main():
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 12, "width": 768, "tokens": 64, "rows": 1, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=asked.layers, n_embd=asked.width, n_head=12)
    model = transformers.GPT2LMHeadModel(config).eval()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    ids = torch.randint(50257, (asked.rows, asked.tokens))
    batch = {"input_ids": ids}
    sides = {
        "math attention": Setting(model, attention="sdpa:math"),
        "bf16 autocast": Setting(model, autocast="bf16"),
    }
    print(f"model {size / 1e6:.0f} MB, {asked.rows} × {asked.tokens} tokens")
    for gradients in (False, True):
        for name, b in sides.items():
            a = Setting(model)
            ratios, highest, alone = [], 0, 0
            for side in (a, b):
                run(side, batch, gradients=gradients)
            for _ in range(asked.rounds):
                model.zero_grad(set_to_none=True)
                gc.collect()
                base = resident()
                began = clocks()
                with Highest() as peak:
                    for side in (a, b):
                        run(side, batch, gradients=gradients)
                passes = clocks() - began
                alone = max(alone, peak.bytes - base)
                with tempfile.TemporaryDirectory() as folder, Highest() as peak:
                    began = clocks()
                    TwoSides(a, b, gradients, Path(folder), swaps=False).add(batch)
                    ratios.append((clocks() - began) / passes)
                highest = max(highest, peak.bytes - base)
            wall, processor = np.median(ratios, 0)
            what = "gradients" if gradients else "forward"
            print(
                f"{name}, {what}: {wall:.2f} × the two passes ({passes[0]:.2f} s), {processor:.2f}"
                f" × their processor time; memory {highest / size:.2f} × the model's"
                f" beyond it, where the passes alone take {alone / size:.2f} ×",
                flush=True,
            )


if __name__ == "__main__":
    main()
