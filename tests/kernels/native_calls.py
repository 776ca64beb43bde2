"""Calls of the native library for its tests: inputs, results by name, and the recipes that it is
held to.
"""

import torch
from torch import Tensor

from halfulp import native
from halfulp.kernels import cpu
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, FP16_FLASH2, Shift
from halfulp.recipes.named import flash2
from tests.kernels.asked import Options

ISAS = () if native.missing() else native.ISAS[: native.ISAS.index(native.best_isa()) + 1]
PUBLISHED = BF16_FLASH2.with_(name="PUBLISHED", shift=Shift("stabilized", beta=7.0))
EXACT_DELTA = BF16_FLASH2.with_(name="EXACT_DELTA", delta_from="probabilities")
RECIPES = {
    "halfulp": BF16_HALFULP,
    "stock": BF16_FLASH2,
    "published": PUBLISHED,
    "exact_delta": EXACT_DELTA,
}
FP16_HALFULP = flash2(
    FP16_FLASH2.out,
    name="FP16_HALFULP",
    **{
        name: getattr(BF16_HALFULP, name)
        for name in (
            "base",
            "shift",
            "row_sum_from",
            "backward_weights",
            "delta_from",
            "residual_bits",
            "lse_from",
            "divisor_from",
        )
    },
    grad_value_from="lse",
)
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def drawn(
    seed: int, b: int, h: int, hk: int, n: int, nk: int, d: int, dv: int, dtype=torch.bfloat16
) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((h, n, d), (hk, nk, d), (hk, nk, dv), (h, n, dv))
    return tuple(torch.randn(b, *shape, generator=generator).to(dtype) for shape in shapes)


def library_results(
    x: Operands, options: Options, isa=None, grad_lse: Tensor | None = None
) -> dict[str, Tensor]:
    q, k, v, do = x
    saved = cpu.forward(*options.of(q, k, v), isa=isa)
    gradients = cpu.backward(*options.of(q, k, v), saved, do, grad_lse, isa=isa)
    found = {"out": saved.out, "lse": saved.lse, "residual": saved.residual}
    found |= {
        "dq": gradients.query,
        "dk": gradients.key,
        "dv": gradients.value,
        "dsinks": gradients.sinks,
    }
    return {name: value for name, value in found.items() if value is not None}


def error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true.double()).norm())


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
