"""A recipe says which format every named intermediate of attention is rounded to, and the structural choices around it.

The algorithms are written once; the arithmetic is a parameter. Every named intermediate passes through a `Step`, which rounds it as the recipe
says and shows it to observers. So one source gives the fp64 truth, any kernel's arithmetic, and every measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from halfulp import formats
from halfulp.formats import BlockFormat, Format, round_to

Algorithm = Literal["standard", "flash1", "flash2", "torch_cpu"]
ShiftKind = Literal["maximum", "integer", "stabilized", "offset"]
Order = Literal["native", "sequential", "blocked"]
Observer = Callable[[str, Tensor, Tensor], None]
AnyFormat = Format | BlockFormat


@dataclass(frozen=True)
class Shift:
    """What a row of scores is shifted by before the exponential (softmax does not change; its rounding does).

    `maximum`: the row maximum. `integer`: the maximum rounded up to an integer, so that every rescale in base 2 is exact.
    `offset`: the maximum plus a constant (Qiu & Yao, appendix C). `stabilized`: Qiu & Yao, Algorithm 1, lines 7-10: where the maximum is
    repeated, β·r_m if r_m > 0 and γ·r_m if r_m < 0.
    """

    kind: ShiftKind = "maximum"
    beta: float = 7.0  # factor for a positive repeated maximum, accepted > 1; the paper uses [2, 8]
    gamma: float = 0.0  # factor for a negative repeated maximum; the paper settles on 0
    tie_tolerance: float = 0.0  # scores this close to the maximum count as repeated; the official code uses 1e-3
    unconditional: bool = False  # shift also where the maximum is single (appendix C says why not)
    offset: float = 0.0  # for `offset`, in units of the scores

    def __post_init__(self) -> None:
        if self.kind not in ("maximum", "integer", "stabilized", "offset"):
            raise ValueError(f"kind={self.kind!r}: accepted are 'maximum', 'integer', 'stabilized', 'offset'")
        if self.kind == "stabilized" and self.beta <= 1:
            raise ValueError(f"beta={self.beta}: accepted is a factor above 1")


@dataclass(frozen=True)
class Matmul:
    """How a matrix product is summed: in which format, and in which order of k.

    `native`: one library gemm in the accumulate format (FP32 or FP64). `sequential`: k = 0, 1, 2, ... with one rounding after every
    product-and-add. `blocked`: `block` terms at a time by a gemm, rounded once when added to the running sum (tensor-core style).
    """

    accumulate: Format = formats.FP32
    order: Order = "native"
    block: int = 16

    def __post_init__(self) -> None:
        if self.order not in ("native", "sequential", "blocked"):
            raise ValueError(f"order={self.order!r}: accepted are 'native', 'sequential', 'blocked'")
        if self.order == "native" and self.accumulate not in (formats.FP32, formats.FP64):
            raise ValueError(f"accumulate={self.accumulate.name}: a native gemm accumulates in FP32 or FP64; use order='sequential' or 'blocked'")
        if self.block < 1:
            raise ValueError(f"block={self.block}: accepted is an integer of at least 1")


def _rounded(meaning: str) -> Any:
    """A recipe field that names a step: its format defaults to the compute precision, that is, no rounding."""
    return field(default=formats.FP64, metadata={"step": meaning})


@dataclass(frozen=True)
class Recipe:
    """Every rounding and every structural choice of one attention kernel. Change one with `recipe.with_(out=formats.FP32)`.

    A step whose format is wider than `compute` is not rounded.
    """

    name: str
    algorithm: Algorithm = "flash2"
    compute: Literal["float32", "float64"] = "float32"  # what holds intermediates and does the arithmetic between roundings
    matmul: Matmul = Matmul()
    block_query: int | None = 128  # rows of a tile; None: all
    block_key: int | None = 128  # columns of a tile; None: all
    base: Literal["e", "2"] = "e"  # of the exponential; base 2 folds log2(e) into the scale
    shift: Shift = Shift()
    row_sum_from: Literal["exact", "rounded"] = "exact"  # l from the weights before or after rounding
    backward_weights: Literal["lse", "maximum", "rounded"] = "lse"  # P = exp(S − lse), exp(S − m)/l, or the forward's rounded weights / l
    delta_from: Literal["out", "residual", "exact_out", "probabilities"] = "out"  # what δ is computed from
    residual_bits: int | None = None  # None: the residual of O as a float; n: n bits in units of half an ulp of O
    input_scaling: Literal["none", "tensor"] = "none"  # tensor: query, key, value and grad_out are scaled to the format's maximum
    weights_scale: float = 1.0  # factor on the weights before they are rounded (fp8 pre-scale)
    row_sum_floor: float = 0.0  # lower bound on one tile's row sum (the paper's official code uses 1e-10)
    lse_from: Literal["row_sum", "exact"] = "row_sum"  # exact: lse is computed from the weights before rounding even where l is not
    gradient_scale_at: Literal["products", "scores", "probabilities"] = "products"  # where α enters the backward pass
    seed: int = 0  # of stochastic rounding

    query: AnyFormat = _rounded("query as read")
    key: AnyFormat = _rounded("key as read")
    value: AnyFormat = _rounded("value as read")
    product: AnyFormat = _rounded("QKᵀ before scaling")
    scores: AnyFormat = _rounded("S = α QKᵀ")
    row_max: AnyFormat = _rounded("m")
    shifted_scores: AnyFormat = _rounded("S − m")
    weights: AnyFormat = _rounded("P̄ = exp(S − m)")
    weights_operand: AnyFormat = _rounded("P̄ as it enters P̄V (standard: P = P̄/l)")
    block_sum: AnyFormat = _rounded("rowsum of one tile of P̄")
    rescale: AnyFormat = _rounded("exp(m_old − m_new)")
    rescaled: AnyFormat = _rounded("running l and Ō after the rescale")
    row_sum: AnyFormat = _rounded("l")
    block_out: AnyFormat = _rounded("P̄V of one tile")
    accumulator: AnyFormat = _rounded("Ō after each tile")
    out: AnyFormat = _rounded("O")
    residual: AnyFormat = _rounded("O − round(O), kept for δ")
    lse: AnyFormat = _rounded("lse = m + log l")
    grad_out: AnyFormat = _rounded("dO as read")
    delta_products: AnyFormat = _rounded("the terms summed in δ")
    delta: AnyFormat = _rounded("δ")
    probabilities: AnyFormat = _rounded("P in the backward pass")
    probabilities_operand: AnyFormat = _rounded("P as it enters Pᵀ dO")
    scaled_probabilities: AnyFormat = _rounded("α P where α is applied to the probabilities")
    grad_probabilities: AnyFormat = _rounded("dP = dO Vᵀ")
    grad_centered: AnyFormat = _rounded("dP − δ")
    grad_scores: AnyFormat = _rounded("dS = P ∘ (dP − δ), as it enters dQ and dK")
    scaled_grad_scores: AnyFormat = _rounded("α dS where α is applied to the scores")
    grad_block: AnyFormat = _rounded("one tile's contribution to dQ, dK or dV")
    grad_accumulator: AnyFormat = _rounded("running dQ, dK, dV")
    grad_query: AnyFormat = _rounded("dQ")
    grad_key: AnyFormat = _rounded("dK")
    grad_value: AnyFormat = _rounded("dV")

    def __post_init__(self) -> None:
        for name in ("block_query", "block_key"):
            block = getattr(self, name)
            if block is not None and block < 1:
                raise ValueError(f"{name}={block}: accepted is an integer of at least 1, or None for all")
        if self.shift.kind == "integer" and self.base != "2":
            raise ValueError(f"base={self.base!r}: an integer shift is exact only with base '2'")
        if self.algorithm == "standard" and self.row_sum_from == "rounded":
            raise ValueError("row_sum_from='rounded': standard attention divides before it rounds the weights; accepted is 'exact'")
        if self.residual_bits is not None and not 2 <= self.residual_bits <= 16:
            raise ValueError(f"residual_bits={self.residual_bits}: accepted are 2 to 16, or None for a float residual")

    def with_(self, **changes: Any) -> Recipe:
        """The same recipe with fields replaced; raises ValueError for a name that is no field."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(f"{name}={changes[name]!r}: not a recipe field; accepted are {', '.join(sorted(known))}")
        return replace(self, **changes)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the arithmetic between roundings."""
        return torch.float64 if self.compute == "float64" else torch.float32


STEPS: dict[str, str] = {f.name: f.metadata["step"] for f in fields(Recipe) if "step" in f.metadata}
"""Every named intermediate and what it is, in the order of the algorithm."""


class Step:
    """The seam: `step(name, value)` returns the value rounded as the recipe says and shows (name, exact, rounded) to every observer.

    Observers must not change what they are shown. Stochastic rounding is keyed by the recipe's seed, the step's name and how often it was
    passed, so a run repeats bit for bit.
    """

    def __init__(self, recipe: Recipe, observers: Sequence[Observer] = ()) -> None:
        self.recipe = recipe
        self.observers = tuple(observers)
        self._passed: dict[str, int] = {}
        self._active = {
            name: fmt
            for name in STEPS
            if isinstance(fmt := getattr(recipe, name), BlockFormat) or not fmt.holds(recipe.dtype)
        }

    def __call__(self, name: str, exact: Tensor) -> Tensor:
        """Round `exact` (float32 or float64) to the step's format, in the same dtype."""
        assert name in STEPS, name
        fmt = self._active.get(name)
        if fmt is None:
            rounded = exact
        elif fmt.rounding == "stochastic" if isinstance(fmt, Format) else False:
            count = self._passed[name] = self._passed.get(name, 0) + 1
            rounded = round_to(exact, fmt, seed=hash_seed(self.recipe.seed, name, count))
        else:
            rounded = round_to(exact, fmt)
        for observe in self.observers:
            observe(name, exact, rounded)
        return rounded

    def rounds(self, name: str) -> bool:
        """Whether this step changes any bits."""
        return name in self._active


def hash_seed(seed: int, name: str, count: int) -> int:
    """A 31-bit seed from a recipe seed, a step's name and a counter (FNV-1a, the same on every machine)."""
    state = 0x811C9DC5
    for byte in f"{seed}/{name}/{count}".encode():
        state = ((state ^ byte) * 0x01000193) & 0xFFFFFFFF
    return state >> 1


def uniform(fmt: Format, algorithm: Algorithm = "flash2", **changes: Any) -> Recipe:
    """Every intermediate rounded to `fmt`, products summed in fp32: what a plain implementation on tensors of that dtype does."""
    compute = "float64" if fmt.mantissa_bits > formats.FP32.mantissa_bits else "float32"
    accumulate = formats.FP64 if compute == "float64" else formats.FP32
    every: dict[str, Any] = dict.fromkeys(STEPS, fmt)
    structure: dict[str, Any] = {"algorithm": algorithm, "compute": compute, "matmul": Matmul(accumulate)}
    named = {"name": f"{fmt.name.upper()}_UNIFORM_{algorithm.upper()}"}
    return Recipe(**(named | every | structure | changes))


def flash2(fmt: Format, **changes: Any) -> Recipe:
    """The stock kernel's recipe in `fmt`: operands and results rounded, everything else fp32 (FlashAttention-2, Algorithms 1 and 2)."""
    rounded = (*_READ, *_WRITTEN, "weights_operand", "probabilities_operand", "grad_scores")
    every: dict[str, Any] = dict.fromkeys(rounded, fmt)
    return Recipe(**({"name": f"{fmt.name.upper()}_FLASH2"} | every | changes))


def floor(fmt: Format) -> Recipe:
    """The least a kernel with `fmt` operands and results must round, computed in fp64 with δ and l free of error: the floor of the format."""
    exact: dict[str, Any] = {"compute": "float64", "matmul": Matmul(formats.FP64), "block_query": None, "block_key": None}
    consistent: dict[str, Any] = {"row_sum_from": "rounded", "lse_from": "exact", "delta_from": "probabilities"}
    return flash2(fmt, name=f"{fmt.name.upper()}_FLOOR", **exact, **consistent)


_READ = ("query", "key", "value", "grad_out")
_WRITTEN = ("out", "grad_query", "grad_key", "grad_value")
_INTEGER_SHIFT: dict[str, Any] = {"base": "2", "shift": Shift("integer"), "row_sum_from": "rounded", "backward_weights": "rounded"}

FP64 = Recipe("FP64", compute="float64", matmul=Matmul(formats.FP64))
FP32 = Recipe("FP32")
BF16_STANDARD = flash2(  # what autocast makes of softmax(q @ k.mT * scale) @ v: the softmax in fp32, everything else bf16
    formats.BF16,
    name="BF16_STANDARD",
    algorithm="standard",
    block_query=None,
    block_key=None,
    product=formats.BF16,
    scores=formats.BF16,
    backward_weights="maximum",
    delta_from="probabilities",
    grad_probabilities=formats.BF16,
    gradient_scale_at="scores",
    scaled_grad_scores=formats.BF16,
)
BF16_FLASH1 = flash2(formats.BF16, name="BF16_FLASH1", algorithm="flash1", backward_weights="maximum")
BF16_FLASH2 = flash2(formats.BF16)
BF16_AUTHORS = uniform(formats.BF16, name="BF16_AUTHORS", row_sum_floor=1e-10, gradient_scale_at="probabilities")
BF16_AUTHORS_STABILIZED = BF16_AUTHORS.with_(name="BF16_AUTHORS_STABILIZED", shift=Shift("stabilized", beta=2.0, tie_tolerance=1e-3))
BF16_PAPER_STABILIZED = BF16_AUTHORS.with_(name="BF16_PAPER_STABILIZED", shift=Shift("stabilized", beta=7.0), row_sum_floor=0.0)
BF16_HALFULP = flash2(formats.BF16, name="BF16_HALFULP", delta_from="residual", residual_bits=8, **_INTEGER_SHIFT)
FP16_FLASH2 = flash2(formats.FP16)
FP8_FLASH = flash2(  # forward in fp8 as FlashAttention-3 has it, plus a pre-scale of the weights; the backward pass in bf16
    formats.BF16,
    name="FP8_FLASH",
    **dict.fromkeys(("query", "key", "value", "weights_operand"), formats.OCP_E4M3.with_(overflow="saturate")),
    input_scaling="tensor",
    weights_scale=256.0,
)
TORCH_CPU_FLASH = flash2(formats.BF16, name="TORCH_CPU_FLASH", algorithm="torch_cpu", grad_accumulator=formats.BF16)
BF16_FLOOR = floor(formats.BF16)
FP16_FLOOR = floor(formats.FP16)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        FP64, FP32, BF16_STANDARD, BF16_FLASH1, BF16_FLASH2, BF16_AUTHORS, BF16_AUTHORS_STABILIZED, BF16_PAPER_STABILIZED,
        BF16_HALFULP, FP16_FLASH2, FP8_FLASH, TORCH_CPU_FLASH, BF16_FLOOR, FP16_FLOOR,
    )
}  # fmt: skip


def recipe_named(name: str) -> Recipe:
    """The built-in recipe of that name, case-insensitively; raises ValueError with the accepted names."""
    recipe = RECIPES.get(name.upper())
    if recipe is None:
        raise ValueError(f"recipe={name!r}: accepted are {', '.join(RECIPES)}")
    return recipe
