"""What a recipe is: the format of every named intermediate, and the structural choices, each
checked.
"""

# ruff: noqa: RUF009 - `_rounded` makes a dataclass field

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from halfulp import formats
from halfulp.formats import BlockFormat, Format

Algorithm = Literal["standard", "flash1", "flash2", "torch_cpu"]
ShiftKind = Literal["maximum", "integer", "stabilized", "offset"]
Order = Literal["native", "sequential", "blocked"]
Compute = Literal["float32", "float64"]
Base = Literal["e", "2"]
Exponential = Literal["direct", "split"]
RowSumFrom = Literal["exact", "rounded"]
BackwardWeights = Literal["lse", "maximum", "rounded"]
DeltaFrom = Literal["out", "residual", "exact_out", "recomputed", "probabilities"]
InputScaling = Literal["none", "tensor"]
LseFrom = Literal["row_sum", "exact"]
DivisorFrom = Literal["row_sum", "lse", "balanced"]
RescaleOf = Literal["both", "out", "row_sum"]
GradValueFrom = Literal["probabilities", "lse"]
GradientScaleAt = Literal["products", "scores", "probabilities"]
ScaleInto = Literal["product", "query", "key"]
Division = Literal["divide", "multiply"]
AnyFormat = Format | BlockFormat


@dataclass(frozen=True)
class Shift:
    """What a row of scores is shifted by before the exponential (softmax does not change; its
    rounding does).

    `maximum`: the row maximum. `integer`: the maximum rounded up to an integer, so that every
    rescale in base 2 is exact. `offset`: the maximum plus a constant (Qiu & Yao, appendix C).
    `stabilized`: Qiu & Yao, Algorithm 1, lines 7-10: where the maximum is repeated, β·r_m if r_m >
    0 and γ·r_m if r_m < 0.
    """

    kind: ShiftKind = "maximum"
    beta: float = 7.0  # factor for a positive repeated maximum, accepted > 1; the paper uses [2, 8]
    gamma: float = 0.0  # factor for a negative repeated maximum; the paper settles on 0
    # scores this close to the maximum count as repeated; the official code uses 1e-3
    tie_tolerance: float = 0.0
    unconditional: bool = False  # shift also where the maximum is single (appendix C says why not)
    offset: float = 0.0  # for `offset`, in units of the scores

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, ShiftKind)
        if self.kind == "stabilized" and not 1 < self.beta < math.inf:
            raise ValueError(f"beta={self.beta}: accepted is a finite factor above 1")
        if self.kind == "stabilized" and not 0 <= self.gamma < math.inf:
            raise ValueError(f"gamma={self.gamma}: accepted is a finite factor of at least 0")
        if not 0 <= self.tie_tolerance < math.inf:
            raise ValueError(
                f"tie_tolerance={self.tie_tolerance}: accepted is a finite number of at least 0"
            )
        if not math.isfinite(self.offset):
            raise ValueError(f"offset={self.offset}: accepted is a finite number")


@dataclass(frozen=True)
class Matmul:
    """How a matrix product is summed: in which format, and in which order of k.

    `native`: one library gemm in the accumulate format (FP32 or FP64). `sequential`: k = 0, 1, 2,
    ... with one rounding after every product-and-add. `blocked`: `block` terms at a time by a gemm,
    rounded once when added to the running sum (tensor-core style).
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
            raise ValueError(
                f"accumulate={self.accumulate.name}: a native gemm cannot sum in it; {accepted}"
            )
        _check_block("block", self.block)


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(
            f"{name}={value!r}: accepted are {', '.join(map(repr, get_args(choices)))}"
        )


def _check_block(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: accepted is an integer of at least 1")


def _rounded(meaning: str) -> Any:
    """A recipe field that names a step; by default the step is not rounded."""
    return field(default=formats.FP64, metadata={"step": meaning})


@dataclass(frozen=True)
class Recipe:
    """Every rounding and every structural choice of one attention kernel;
    `recipe.with_(out=formats.FP32)` changes one.

    A step whose format holds every number of `compute` is not rounded.
    """

    name: str
    algorithm: Algorithm = "flash2"
    # what holds intermediates and does the arithmetic between roundings
    compute: Compute = "float32"
    matmul: Matmul = Matmul()
    block_query: int | None = 128  # rows of a tile; None: all
    block_key: int | None = 128  # columns of a tile; None: all
    base: Base = "e"  # of the exponential; base 2 folds log2(e) into the scale
    # split: 2^(S − rint S) · 2^(rint S − m), bits that no tiling changes
    exponential: Exponential = "direct"
    # 2^x by a polynomial of that degree on every binade, exact at its ends; None: exactly rounded
    exp_degree: int | None = None
    scale_into: ScaleInto = "product"  # what α is multiplied into
    division: Division = "divide"  # multiply: by a reciprocal of l, rounded
    shift: Shift = Shift()
    row_sum_from: RowSumFrom = "exact"  # l from the weights before or after rounding
    # of Ō and l the ones that the rounded factor rescales; the other takes the exact one
    rescale_of: RescaleOf = "both"
    # P = exp(S − lse), exp(S − m)/l, or the rounded weights / l
    backward_weights: BackwardWeights = "lse"
    # rowsum(dO ∘ ·) of O as stored, with its residual, before rounding, or recomputed as P V in the
    # backward pass; or rowsum(dP ∘ P)
    delta_from: DeltaFrom = "out"
    # the residual of O in n bits, scaled by half an ulp of O; None: as a float
    residual_bits: int | None = None
    # tensor: inputs are scaled to the format's maximum around the rounding
    input_scaling: InputScaling = "none"
    weights_scale: float = 1.0  # factor on the weights before they are rounded (fp8 pre-scale)
    # lower bound on one tile's row sum (the paper's official code uses 1e-10)
    row_sum_floor: float = 0.0
    lse_from: LseFrom = "row_sum"  # exact: from the weights before rounding even where l is not
    # of dS's weights: the l of O, the l of lse, or between (algorithms.balance)
    divisor_from: DivisorFrom = "row_sum"
    # lse: dV takes exp(S − lse), whatever dS takes
    grad_value_from: GradValueFrom = "probabilities"
    gradient_scale_at: GradientScaleAt = "products"  # where α enters the backward pass
    # of stochastic rounding; a call repeats its draws, so give every call of a run another seed
    seed: int = 0

    query: AnyFormat = _rounded("query as read")
    key: AnyFormat = _rounded("key as read")
    value: AnyFormat = _rounded("value as read")
    scaled_operand: AnyFormat = _rounded("α Q or α K where α is multiplied into one of them")
    product: AnyFormat = _rounded("QKᵀ before scaling")
    scores: AnyFormat = _rounded("S = α QKᵀ")
    tie_threshold: AnyFormat = _rounded(
        "r_m − tolerance: scores from there on count as repeated maxima"
    )
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
    reciprocal: AnyFormat = _rounded("1/l where O is multiplied by it")
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
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: accepted is a format, such as"
                    " halfulp.formats.BF16"
                )
        if not 0 < self.weights_scale < math.inf:
            raise ValueError(
                f"weights_scale={self.weights_scale}: accepted is a finite number above 0"
            )
        if not 0 <= self.row_sum_floor < math.inf:
            raise ValueError(
                f"row_sum_floor={self.row_sum_floor}: accepted is a finite number of at least 0"
            )
        if self.residual_bits is not None and not 2 <= self.residual_bits <= 16:
            raise ValueError(
                f"residual_bits={self.residual_bits}: accepted are 2 to 16, or None for a float"
                " residual"
            )
        if self.exp_degree is not None and not 1 <= self.exp_degree <= 8:
            raise ValueError(
                f"exp_degree={self.exp_degree}: accepted are 1 to 8, or None for no polynomial"
            )
        self._check_together()

    def _check_together(self) -> None:
        """What one field demands of another."""
        if self.shift.kind == "integer" and self.base != "2":
            raise ValueError(f"base={self.base!r}: an integer shift is exact only with base '2'")
        if self.exponential == "split" and self.shift.kind != "integer":
            raise ValueError(
                f"exponential='split': accepted only with an integer shift, not {self.shift.kind!r}"
            )
        if self.algorithm == "standard" and self.row_sum_from == "rounded":
            raise ValueError(
                "row_sum_from='rounded': standard attention divides before it rounds; accepted is"
                " 'exact'"
            )
        if self.residual_bits is not None and not isinstance(self.out, Format):
            accepted = f"accepted is None where out is the block format {self.out.name}"
            raise ValueError(f"residual_bits={self.residual_bits}: {accepted}")
        if (
            self.compute == "float64"
            and self.matmul.order == "native"
            and self.matmul.accumulate != formats.FP64
        ):
            accepted = "accepted is Matmul(FP64), or order='sequential' or 'blocked'"
            raise ValueError(
                f"matmul={self.matmul.accumulate.name}: a native gemm on float64 sums in fp64;"
                f" {accepted}"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    @cached_property
    def rounded_steps(self) -> dict[str, AnyFormat]:
        """The steps that change bits, with their formats."""
        every = ((name, getattr(self, name)) for name in STEPS)
        return {
            name: fmt
            for name, fmt in every
            if isinstance(fmt, BlockFormat) or not fmt.holds(self.dtype)
        }

    def with_(self, **changes: Any) -> Recipe:
        """The same recipe with fields replaced; raises ValueError for a name that is no field."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                accepted = ", ".join(sorted(known))
                raise ValueError(
                    f"{name}={changes[name]!r}: not a recipe field; accepted are {accepted}"
                )
        return replace(self, **changes)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the arithmetic between roundings."""
        return torch.float64 if self.compute == "float64" else torch.float32


_CHOICES = {
    name: hint for name, hint in get_type_hints(Recipe).items() if get_origin(hint) is Literal
}

STEPS: dict[str, str] = {f.name: f.metadata["step"] for f in fields(Recipe) if "step" in f.metadata}
"""Every named intermediate and what it is, in the order of the algorithm."""
