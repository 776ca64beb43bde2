"""The constructed run as several claims look at it: trained once a lab, and what became of each of
its variants.
"""

from __future__ import annotations

import statistics

import torch

from halfulp.papers.claim import MANY_SEEDS, Lab, Mean, mean_of
from halfulp.papers.constructed_run import VARIANTS, MechanismRun, run_variants

_QUICK = ("described", "fp32", "softmax fix", "Ō in fp32", "no ties", "dO flipped")


def constructed(lab: Lab) -> dict[str, list[MechanismRun]]:
    """The run built from the paper's conditions and its variants; all of them at full scale."""
    names = [variant.name for variant in VARIANTS] if lab.full else _QUICK

    def measure() -> dict[str, list[MechanismRun]]:
        return run_variants(names, MANY_SEEDS, workers=lab.workers, progress=lab.report)

    return lab.once("constructed", measure)


def window(run: MechanismRun, name: str) -> Mean:
    """One figure of a constructed run while it runs away, steps 100 to 600."""
    values = [y for step, y in zip(run.steps, getattr(run, name), strict=True) if 100 < step <= 600]
    return mean_of(torch.tensor(values))


def constructed_text(lab: Lab) -> str:
    """What became of the constructed run and its variants, and of the sum's two parts."""
    runs = constructed(lab)
    said = []
    for name, same in runs.items():
        first, curved = (
            [window(run, part).value for run in same] for part in ("first_order", "curvature")
        )
        failed = sum(run.outcome == "failed" for run in same)
        losses = [statistics.median(run.loss[-10:]) for run in same]
        said.append(
            f"{name}: {failed} of {len(same)} failed, loss {min(losses):.0e} to {max(losses):.0e},"
            f" first order {statistics.mean(first):+.1e}, curvature {statistics.mean(curved):+.1e}"
        )
    return "; ".join(said)
