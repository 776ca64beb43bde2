"""What a target is held against on a case: the golden value, the stock recipe emulated, and the
floor of the format, each measured once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from halfulp import recipes
from halfulp.attention import emulate, golden
from halfulp.audit.figures import Measured, Noise, measure, natural_noise
from halfulp.audit.inputs import Case, Inputs
from halfulp.audit.probes import Probe, probe_named
from halfulp.calls import Result
from halfulp.recipes import Recipe

STOCK: dict[str, Recipe] = {
    "bfloat16": recipes.BF16_FLASH2,
    "float16": recipes.FP16_FLASH2,
    "float32": recipes.FP32,
}
FLOOR: dict[str, Recipe] = {
    "bfloat16": recipes.BF16_FLOOR,
    "float16": recipes.FP16_FLOOR,
    "float32": recipes.FP32,
}


@dataclass(frozen=True)
class References:
    """One case's inputs and what is known of them."""

    inputs: Inputs
    probe: Probe | None
    truth: Result
    noise: Noise
    stock: Measured
    floor: Measured


def emulated(x: Inputs, recipe: Recipe) -> Result:
    """The recipe's out, lse and gradients on given inputs, emulated."""
    q, k, v = (t.detach().requires_grad_() for t in (x.query, x.key, x.value))
    out, lse = emulate(q, k, v, recipe=recipe, return_lse=True, **x.options(seeded=True))
    grads = torch.autograd.grad(out, (q, k, v), x.grad_out)
    return Result(out.detach(), lse.detach(), *grads)


@lru_cache(maxsize=128)
def references(case: Case) -> References:
    """References of a case; kept, so that auditing many targets pays for them once."""
    x = case.inputs()
    probe = None if case.file else probe_named(case.probe)
    truth = golden(x.query, x.key, x.value, x.grad_out, **x.options(seeded=True))
    noise = natural_noise(x, truth.out)
    stock = measure(emulated(x, STOCK[case.dtype]), truth, noise, x, probe)
    floor = (
        stock
        if FLOOR[case.dtype] is STOCK[case.dtype]
        else measure(emulated(x, FLOOR[case.dtype]), truth, noise, x, probe)
    )
    return References(x, probe, truth, noise, stock, floor)
