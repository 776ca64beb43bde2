"""A recipe says which format every named intermediate of attention is rounded to, and the structural choices around it.

The algorithms are written once; the arithmetic is a parameter. Every named intermediate passes through a `Step`, which
rounds it as the recipe says and shows it to observers. So one source gives the fp64 truth, any kernel's arithmetic, and
every measurement.
"""

# ruff: noqa: RUF009 - `_rounded` makes a dataclass field

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from halfulp import formats
from halfulp.formats import BlockFormat, Format, round_to

Algorithm = Literal["standard", "flash1", "flash2", "torch_cpu"]
ShiftKind = Literal["maximum", "integer", "stabilized", "offset"]
Order = Literal["native", "sequential", "blocked"]
Compute = Literal["float32", "float64"]
Base = Literal["e", "2"]
Exponential = Literal["direct", "split"]
RowSumFrom = Literal["exact", "rounded"]
BackwardWeights = Literal["lse", "maximum", "rounded"]
DeltaFrom = Literal["out", "residual", "exact_out", "probabilities"]
InputScaling = Literal["none", "tensor"]
LseFrom = Literal["row_sum", "exact"]
GradValueFrom = Literal["probabilities", "lse"]
GradientScaleAt = Literal["products", "scores", "probabilities"]
Observer = Callable[[str, Tensor, Tensor], None]
AnyFormat = Format | BlockFormat


@dataclass(frozen=True)
class Shift:
    """What a row of scores is shifted by before the exponential (softmax does not change; its rounding does).

    `maximum`: the row maximum. `integer`: the maximum rounded up to an integer, so that every rescale in base 2 is
    exact. `offset`: the maximum plus a constant (Qiu & Yao, appendix C). `stabilized`: Qiu & Yao, Algorithm 1, lines
    7-10: where the maximum is repeated, β·r_m if r_m > 0 and γ·r_m if r_m < 0.
    """

    kind: ShiftKind = "maximum"
    beta: float = 7.0  # factor for a positive repeated maximum, accepted > 1; the paper uses [2, 8]
    gamma: float = 0.0  # factor for a negative repeated maximum; the paper settles on 0
    tie_tolerance: float = 0.0  # scores this close to the maximum count as repeated; the official code uses 1e-3
    unconditional: bool = False  # shift also where the maximum is single (appendix C says why not)
    offset: float = 0.0  # for `offset`, in units of the scores

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, ShiftKind)
        if self.kind == "stabilized" and not 1 < self.beta < math.inf:
            raise ValueError(f"beta={self.beta}: accepted is a finite factor above 1")
        if self.kind == "stabilized" and not 0 <= self.gamma < math.inf:
            raise ValueError(f"gamma={self.gamma}: accepted is a finite factor of at least 0")
        if not 0 <= self.tie_tolerance < math.inf:
            raise ValueError(f"tie_tolerance={self.tie_tolerance}: accepted is a finite number of at least 0")
        if not math.isfinite(self.offset):
            raise ValueError(f"offset={self.offset}: accepted is a finite number")


@dataclass(frozen=True)
class Matmul:
    """How a matrix product is summed: in which format, and in which order of k.

    `native`: one library gemm in the accumulate format (FP32 or FP64). `sequential`: k = 0, 1, 2, ... with one rounding
    after every product-and-add. `blocked`: `block` terms at a time by a gemm, rounded once when added to the running
    sum (tensor-core style).
    """

    accumulate: Format = formats.FP32
    order: Order = "native"
    block: int = 16

    def __post_init__(self) -> None:
        _check_choice("order", self.order, Order)
        if not isinstance(self.accumulate, Format):
            raise ValueError(f"accumulate={self.accumulate}: accepted is a scalar format")
        if self.order == "native" and self.accumulate not in (formats.FP32, formats.FP64):
            accepted = "accepted are FP32 and FP64, or order='sequential' or 'blocked'"
            raise ValueError(f"accumulate={self.accumulate.name}: a native gemm cannot sum in it; {accepted}")
        _check_block("block", self.block)


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r}: accepted are {', '.join(map(repr, get_args(choices)))}")


def _check_block(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: accepted is an integer of at least 1")


def _rounded(meaning: str) -> Any:
    """A recipe field that names a step; by default the step is not rounded."""
    return field(default=formats.FP64, metadata={"step": meaning})


@dataclass(frozen=True)
class Recipe:
    """Every rounding and every structural choice of one attention kernel; `recipe.with_(out=formats.FP32)` changes one.

    A step whose format holds every number of `compute` is not rounded.
    """

    name: str
    algorithm: Algorithm = "flash2"
    compute: Compute = "float32"  # what holds intermediates and does the arithmetic between roundings
    matmul: Matmul = Matmul()
    block_query: int | None = 128  # rows of a tile; None: all
    block_key: int | None = 128  # columns of a tile; None: all
    base: Base = "e"  # of the exponential; base 2 folds log2(e) into the scale
    exponential: Exponential = "direct"  # split: 2^(S − rint S) · 2^(rint S − m), bits that no tiling changes
    shift: Shift = Shift()
    row_sum_from: RowSumFrom = "exact"  # l from the weights before or after rounding
    backward_weights: BackwardWeights = "lse"  # P = exp(S − lse), exp(S − m)/l, or the rounded weights / l
    delta_from: DeltaFrom = "out"  # what δ is computed from
    residual_bits: int | None = None  # the residual of O in n bits, scaled by half an ulp of O; None: as a float
    input_scaling: InputScaling = "none"  # tensor: inputs are scaled to the format's maximum around the rounding
    weights_scale: float = 1.0  # factor on the weights before they are rounded (fp8 pre-scale)
    row_sum_floor: float = 0.0  # lower bound on one tile's row sum (the paper's official code uses 1e-10)
    lse_from: LseFrom = "row_sum"  # exact: from the weights before rounding even where l is not
    grad_value_from: GradValueFrom = "probabilities"  # lse: dV takes exp(S − lse), whatever dS takes
    gradient_scale_at: GradientScaleAt = "products"  # where α enters the backward pass
    seed: int = 0  # of stochastic rounding; a call repeats its draws, so give every call of a run another seed

    query: AnyFormat = _rounded("query as read")
    key: AnyFormat = _rounded("key as read")
    value: AnyFormat = _rounded("value as read")
    product: AnyFormat = _rounded("QKᵀ before scaling")
    scores: AnyFormat = _rounded("S = α QKᵀ")
    tie_threshold: AnyFormat = _rounded("r_m − tolerance: scores from there on count as repeated maxima")
    row_max: AnyFormat = _rounded("m")
    shifted_scores: AnyFormat = _rounded("S − m")
    weights: AnyFormat = _rounded("P̄ = exp(S − m)")
    weights_operand: AnyFormat = _rounded("P̄ as it enters P̄V (standard: P = P̄/l)")
    block_sum: AnyFormat = _rounded("rowsum of one tile of P̄")
    max_change: AnyFormat = _rounded("m_old − m_new")
    rescale: AnyFormat = _rounded("exp(m_old − m_new)")
    rescaled: AnyFormat = _rounded("running l and Ō after the rescale")
    row_sum: AnyFormat = _rounded("l")
    block_out: AnyFormat = _rounded("P̄V of one tile")
    accumulator: AnyFormat = _rounded("Ō after each tile")
    renormalized: AnyFormat = _rounded("O after each tile of FlashAttention-1")
    out: AnyFormat = _rounded("O")
    residual: AnyFormat = _rounded("O − round(O), kept for δ")
    log_row_sum: AnyFormat = _rounded("log l")
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
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name in ("block_query", "block_key"):
            if getattr(self, name) is not None:
                _check_block(name, getattr(self, name))
        for name in STEPS:
            if not isinstance(getattr(self, name), Format | BlockFormat):
                raise ValueError(f"{name}={getattr(self, name)!r}: accepted is a format, such as halfulp.formats.BF16")
        if not 0 < self.weights_scale < math.inf:
            raise ValueError(f"weights_scale={self.weights_scale}: accepted is a finite number above 0")
        if not 0 <= self.row_sum_floor < math.inf:
            raise ValueError(f"row_sum_floor={self.row_sum_floor}: accepted is a finite number of at least 0")
        if self.residual_bits is not None and not 2 <= self.residual_bits <= 16:
            raise ValueError(f"residual_bits={self.residual_bits}: accepted are 2 to 16, or None for a float residual")
        self._check_together()

    def _check_together(self) -> None:
        """What one field demands of another."""
        if self.shift.kind == "integer" and self.base != "2":
            raise ValueError(f"base={self.base!r}: an integer shift is exact only with base '2'")
        if self.exponential == "split" and self.shift.kind != "integer":
            raise ValueError(f"exponential='split': accepted only with an integer shift, not {self.shift.kind!r}")
        if self.algorithm == "standard" and self.row_sum_from == "rounded":
            raise ValueError("row_sum_from='rounded': standard attention divides before it rounds; accepted is 'exact'")
        if self.residual_bits is not None and not isinstance(self.out, Format):
            accepted = f"accepted is None where out is the block format {self.out.name}"
            raise ValueError(f"residual_bits={self.residual_bits}: {accepted}")
        if self.compute == "float64" and self.matmul.order == "native" and self.matmul.accumulate != formats.FP64:
            accepted = "accepted is Matmul(FP64), or order='sequential' or 'blocked'"
            raise ValueError(f"matmul={self.matmul.accumulate.name}: a native gemm on float64 sums in fp64; {accepted}")

    def with_(self, **changes: Any) -> Recipe:
        """The same recipe with fields replaced; raises ValueError for a name that is no field."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                accepted = ", ".join(sorted(known))
                raise ValueError(f"{name}={changes[name]!r}: not a recipe field; accepted are {accepted}")
        return replace(self, **changes)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the arithmetic between roundings."""
        return torch.float64 if self.compute == "float64" else torch.float32


_CHOICES = {name: hint for name, hint in get_type_hints(Recipe).items() if get_origin(hint) is Literal}

STEPS: dict[str, str] = {f.name: f.metadata["step"] for f in fields(Recipe) if "step" in f.metadata}
"""Every named intermediate and what it is, in the order of the algorithm."""


class Step:
    """The seam: `step(name, value)` rounds the value as the recipe says and shows (name, exact, rounded) to observers.

    An observer that changes what it is shown raises RuntimeError. Stochastic rounding is keyed by the recipe's seed,
    the step's name and how often it was passed, so a run repeats bit for bit.
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
        fmt = self._active.get(name)
        if fmt is None:
            assert name in STEPS, name
            rounded = exact
        elif (fmt.element if isinstance(fmt, BlockFormat) else fmt).rounding == "stochastic":
            rounded = round_to(exact, fmt, seed=self.next_seed(name))
        else:
            rounded = round_to(exact, fmt)
        for observe in self.observers:
            _show(observe, name, exact, rounded)
        return rounded

    def rounds(self, name: str) -> bool:
        """Whether this step changes any bits."""
        return name in self._active

    def next_seed(self, name: str) -> int:
        """A seed that no other passage of this run has."""
        count = self._passed[name] = self._passed.get(name, 0) + 1
        return hash_seed(self.recipe.seed, name, count)

    def scratch(self, x: Tensor) -> Tensor | None:
        """`x` as an output buffer if it may be overwritten: an observer may have kept it, and then it may not."""
        return None if self.observers else x


def _show(observe: Observer, name: str, exact: Tensor, rounded: Tensor) -> None:
    if exact.is_inference() or rounded.is_inference():  # no version counter, so the observer gets copies
        return observe(name, exact.clone(), rounded.clone())
    before = (exact._version, rounded._version)
    observe(name, exact, rounded)
    if (exact._version, rounded._version) != before:
        raise RuntimeError(f"an observer changed step {name!r}: it may look at what it is shown, not change it")
    return None


def hash_seed(seed: int, name: str, count: int) -> int:
    """A 31-bit seed from a recipe seed, a step's name and a counter (FNV-1a, the same on every machine)."""
    state = 0x811C9DC5
    for byte in f"{seed}/{name}/{count}".encode():
        state = ((state ^ byte) * 0x01000193) & 0xFFFFFFFF
    return state >> 1


def uniform(fmt: Format, algorithm: Algorithm = "flash2", **changes: Any) -> Recipe:
    """Every intermediate rounded to `fmt`, products summed in fp32: plain code on tensors of that dtype."""
    compute = "float64" if fmt.mantissa_bits > formats.FP32.mantissa_bits else "float32"
    accumulate = formats.FP64 if compute == "float64" else formats.FP32
    every: dict[str, Any] = dict.fromkeys(STEPS, fmt)
    structure: dict[str, Any] = {"algorithm": algorithm, "compute": compute, "matmul": Matmul(accumulate)}
    if algorithm == "standard":  # autograd keeps P itself
        structure |= {"backward_weights": "maximum", "delta_from": "probabilities", "gradient_scale_at": "scores"}
    named = {"name": f"{fmt.name.upper()}_UNIFORM_{algorithm.upper()}"}
    return Recipe(**(named | every | structure | changes))


def flash2(fmt: Format, **changes: Any) -> Recipe:
    """The stock kernel's recipe in `fmt`: operands and results rounded, all else fp32 (Dao 2023, Algorithms 1, 2)."""
    rounded = (*_READ, *_WRITTEN, "weights_operand", "probabilities_operand", "grad_scores")
    every: dict[str, Any] = dict.fromkeys(rounded, fmt)
    return Recipe(**({"name": f"{fmt.name.upper()}_FLASH2"} | every | changes))


def floor(fmt: Format) -> Recipe:
    """The least that a kernel with `fmt` operands and results must round; in fp64, with δ and l free of error."""
    whole: dict[str, Any] = {"matmul": Matmul(formats.FP64), "block_query": None, "block_key": None}
    consistent: dict[str, Any] = {"row_sum_from": "rounded", "lse_from": "exact", "delta_from": "probabilities"}
    return flash2(fmt, name=f"{fmt.name.upper()}_FLOOR", compute="float64", **whole, **consistent)


_READ = ("query", "key", "value", "grad_out")
_WRITTEN = ("out", "grad_query", "grad_key", "grad_value")
_INTEGER_SHIFT: dict[str, Any] = {
    "base": "2",
    "shift": Shift("integer"),
    "row_sum_from": "rounded",
    "backward_weights": "rounded",
}

FP64 = Recipe("FP64", compute="float64", matmul=Matmul(formats.FP64))
FP32 = Recipe("FP32")
# What autocast makes of softmax(q @ k.mT * scale) @ v. On a GPU the softmax is in fp32 and everything else bf16; on a
# CPU the softmax gives bf16, so that autograd keeps P rounded.
BF16_STANDARD = flash2(
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
BF16_STANDARD_CPU = BF16_STANDARD.with_(name="BF16_STANDARD_CPU", probabilities=formats.BF16)
BF16_FLASH1 = flash2(formats.BF16, name="BF16_FLASH1", algorithm="flash1", backward_weights="maximum")
BF16_FLASH2 = flash2(formats.BF16)
# The official code of Qiu & Yao: every tensor bf16. Its stabilized variant also counts tiles above the diagonal, which
# are skipped here, as rows with a repeated negative maximum.
BF16_AUTHORS = uniform(formats.BF16, name="BF16_AUTHORS", row_sum_floor=1e-10, gradient_scale_at="probabilities")
BF16_AUTHORS_STABILIZED = BF16_AUTHORS.with_(
    name="BF16_AUTHORS_STABILIZED", shift=Shift("stabilized", beta=2.0, tie_tolerance=1e-3)
)
BF16_PAPER_STABILIZED = BF16_AUTHORS.with_(
    name="BF16_PAPER_STABILIZED", shift=Shift("stabilized", beta=7.0), row_sum_floor=0.0
)
# lse and dV come from the weights before rounding: bf16(bf16(w) / l) would round twice, alike in all of a diffuse row.
BF16_HALFULP = flash2(
    formats.BF16,
    name="BF16_HALFULP",
    delta_from="residual",
    residual_bits=8,
    lse_from="exact",
    grad_value_from="lse",
    **_INTEGER_SHIFT,
)
FP16_FLASH2 = flash2(formats.FP16)
# The forward pass in fp8 as FlashAttention-3 has it, plus a pre-scale of the weights; the backward pass in bf16.
FP8_FLASH = flash2(
    formats.BF16,
    name="FP8_FLASH",
    **dict.fromkeys(("query", "key", "value", "weights_operand"), formats.OCP_E4M3),
    input_scaling="tensor",
    weights_scale=256.0,
)
TORCH_CPU_FLASH = flash2(  # query blocks of 256, or of 64 below 768 and 32 below 192 queries
    formats.BF16,
    name="TORCH_CPU_FLASH",
    algorithm="torch_cpu",
    block_query=256,
    block_key=512,
    grad_accumulator=formats.BF16,
)
BF16_FLOOR = floor(formats.BF16)
FP16_FLOOR = floor(formats.FP16)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        FP64, FP32, BF16_STANDARD, BF16_STANDARD_CPU, BF16_FLASH1, BF16_FLASH2, BF16_AUTHORS, BF16_AUTHORS_STABILIZED,
        BF16_PAPER_STABILIZED, BF16_HALFULP, FP16_FLASH2, FP8_FLASH, TORCH_CPU_FLASH, BF16_FLOOR, FP16_FLOOR,
    )
}  # fmt: skip


def recipe_named(name: str) -> Recipe:
    """The built-in recipe of that name, case-insensitively; raises ValueError with the accepted names."""
    recipe = RECIPES.get(name.upper())
    if recipe is None:
        raise ValueError(f"recipe={name!r}: accepted are {', '.join(RECIPES)}")
    return recipe
