"""Does our flash attention compute what a real kernel computes? Bit by bit against PyTorch's CPU
flash kernel.

The paper checked its micro-benchmark against the original kernel before trusting any deviation it
measured. Here the emulation is a recipe (`TORCH_CPU_FLASH`), so the check is stricter: every
element of O, lse, dQ, dK and dV is compared by its bits. Where some differ, one step of the
emulation after the other is given another model, and the one that explains more of the kernel's
bits says where the two part. The same models, used the other way round, show what a wrong idea of
one step costs.

Source: Golden et al., "Is Flash Attention Stable?" (arXiv 2405.02803), section 3; claim B1 of the
ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfulp.algorithms import Problem, torch_cpu
from halfulp.algorithms.torch_cpu_math import vector_exp, weights_exp
from halfulp.attention import emulate
from halfulp.calls import Call, Result, Sees
from halfulp.formats import BF16, FP32, Format, ulp
from halfulp.recipes import TORCH_CPU_FLASH, Recipe, Step
from halfulp.runs.results import Progress, no_progress

Shape: TypeAlias = tuple[int, int, int, int]  # batch, heads, N, D
Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # query, key, value, grad_out
Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, bool], Result]
"""query, key, value, grad_out `[B, H, N, D]` in bf16 and is_causal → out, lse and gradients."""

FORWARD = ("out", "lse")
BACKWARD = ("grad_query", "grad_key", "grad_value")
# one even shape, then lengths that no block divides and widths that are no power of two
SHAPES: tuple[Shape, ...] = (
    (1, 2, 1024, 64),
    (1, 2, 1000, 64),
    (2, 2, 333, 80),
    (1, 4, 192, 128),
    (2, 4, 129, 48),
    (2, 8, 77, 32),
)


@dataclass(frozen=True)
class TensorMatch:
    """How far one tensor of the emulation agrees with the kernel's."""

    tensor: str
    elements: int
    identical: int  # elements with the same value; 0 and −0 count as the same, NaN and NaN too
    # largest distance in ulps of the larger of the two values; inf where just one is finite
    largest_ulps: float

    @property
    def fraction(self) -> float:
        """The fraction of identical elements."""
        return self.identical / self.elements


@dataclass(frozen=True)
class StepModel:
    """One step of the kernel computed otherwise: a recipe change, or another exponential."""

    step: str  # the step or recipe field
    model: str  # what is assumed of it
    recipe: Recipe
    tensors: tuple[str, ...]  # FORWARD or BACKWARD: where it shows
    weights_exp: Callable[[Tensor], Tensor] = weights_exp
    probabilities_exp: Callable[[Tensor], Tensor] = vector_exp


@dataclass(frozen=True)
class StepCost:
    """The fraction of the kernel's bits that one model of a step gives, per tensor where it
    shows.
    """

    step: str
    model: str
    identical: dict[str, float]

    @property
    def mean(self) -> float:
        """Mean over the tensors."""
        return sum(self.identical.values()) / len(self.identical)


@dataclass(frozen=True)
class KernelMatch:
    """The emulation beside the kernel, over all shapes, maskings and seeds."""

    tensors: tuple[TensorMatch, ...]
    calls: int  # kernel calls compared, forward and backward
    bits_expected: bool  # whether the emulation claims this machine's bits
    # other models that explain more bits, best first; empty where all agree
    differing_steps: tuple[StepCost, ...]


def bits_expected() -> bool:
    """Whether TORCH_CPU_FLASH claims the kernel's bits here: torch 2.13, AVX-512, no matrix unit
    with its own sums.
    """
    release, vectors = torch.__version__.split(".")[:2], torch.backends.cpu.get_cpu_capability()
    return release == ["2", "13"] and vectors == "AVX512" and not torch.cpu._is_amx_tile_supported()


def torch_cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, is_causal: bool, **options: Any
) -> Result:
    """PyTorch's own kernel, forward and backward; `options` are its attn_mask (float) and scale."""
    ops, inputs = torch.ops.aten, (query, key, value)
    out, lse = ops._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, is_causal, **options)
    backward = ops._scaled_dot_product_flash_attention_for_cpu_backward
    return Result(out, lse, *backward(grad_out, *inputs, out, lse, 0.0, is_causal, **options))


def match_torch_cpu_flash(
    shapes: Sequence[Shape] = SHAPES,
    causal: Sequence[bool] = (False, True),
    seeds: Sequence[int] = (0, 1),
    *,
    kernel: Kernel = torch_cpu_flash,
    progress: Progress = no_progress,
) -> KernelMatch:
    """Compare the kernel with `emulate(recipe="TORCH_CPU_FLASH")` on standard normal bf16 inputs.

    Where bits differ, `differing_steps` ranks the models of single steps that explain more of them,
    measured on the first call that differs. `kernel` may be any function with the same arguments.

    Raises:
        ValueError: without a shape, a masking or a seed.
    """
    for name, values in (("shapes", shapes), ("causal", causal), ("seeds", seeds)):
        if not values:
            raise ValueError(f"{name}={values!r}: accepted is at least one")
    calls = [(shape, masked, seed) for shape in shapes for masked in causal for seed in seeds]
    matches: list[tuple[TensorMatch, ...]] = []
    differing: tuple[StepCost, ...] = ()
    for number, (shape, masked, seed) in enumerate(calls):
        progress(number / len(calls), f"{list(shape)}{', causal' if masked else ''}, seed {seed}")
        inputs = _inputs(shape, seed)
        real = kernel(*inputs, masked)
        matches.append(compare(real, emulated(*inputs, masked)))
        if not differing and any(match.identical < match.elements for match in matches[-1]):
            differing = _explain(real, inputs, masked, matches[-1])
    progress(1.0, "done")
    total = tuple(_sum(column) for column in zip(*matches, strict=True))
    return KernelMatch(total, len(calls), bits_expected(), differing)


def models() -> tuple[StepModel, ...]:
    """Return other models of single steps, in the order of the algorithm."""

    def forward(step: str, model: str, **changes: Any) -> StepModel:
        return StepModel(step, model, TORCH_CPU_FLASH.with_(**changes), FORWARD)

    def backward(step: str, model: str, **changes: Any) -> StepModel:
        return StepModel(step, model, TORCH_CPU_FLASH.with_(**changes), BACKWARD)

    return (
        forward("product", "QKᵀ rounded to bf16", product=BF16),
        forward("block_key", "key blocks of 128", block_key=128),
        replace(forward("weights", "the exponential exact to fp32"), weights_exp=torch.exp),
        forward("weights_operand", "weights not rounded for PV", weights_operand=FP32),
        forward("row_sum", "l from the rounded weights", row_sum_from="rounded"),
        forward("rescaled", "l and Ō in bf16 after each rescale", rescaled=BF16),
        forward("accumulator", "Ō in bf16 after each key block", accumulator=BF16),
        backward("delta", "δ from O before rounding", delta_from="exact_out"),
        replace(
            backward("probabilities", "the exponential of torch.exp"), probabilities_exp=torch.exp
        ),
        backward("probabilities_operand", "P not rounded for dV", probabilities_operand=FP32),
        backward("grad_probabilities", "dP rounded to bf16", grad_probabilities=BF16),
        backward("grad_scores", "dS not rounded", grad_scores=FP32),
        backward("block_query", "query blocks of 128", block_query=128),
        backward("grad_accumulator", "gradients accumulated in fp32", grad_accumulator=FP32),
    )


def emulated(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, is_causal: bool
) -> Result:
    """TORCH_CPU_FLASH through the public door, in the dtypes of the kernel's results."""
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out, lse = emulate(*leaves, is_causal=is_causal, recipe=TORCH_CPU_FLASH, return_lse=True)
    return Result(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out))


def compare(real: Result, ours: Result) -> tuple[TensorMatch, ...]:
    """Count identical elements and the largest distance for every tensor that both have."""
    found = []
    for name in FORWARD + BACKWARD:
        a, b = getattr(real, name), getattr(ours, name)
        if a is None or b is None:
            continue
        distance = ulps_apart(a, b, FP32 if name == "lse" else BF16)
        found.append(
            TensorMatch(name, a.numel(), int((distance == 0).sum()), float(distance.max()))
        )
    return tuple(found)


def ulps_apart(a: Tensor, b: Tensor, fmt: Format) -> Tensor:
    """|a − b| in ulps of the larger of the two in `fmt`, elementwise, float64.

    0 where both are the same infinity or both NaN, inf where only one of them is finite or NaN.
    """
    a, b = a.double(), b.double()
    spacing = ulp(torch.maximum(a.abs(), b.abs()), fmt)
    same = (a == b) | (a.isnan() & b.isnan())
    return (
        # equal infinities and two NaN give NaN here, and are set to 0 last
        ((a - b).abs() / spacing).nan_to_num(nan=math.inf, posinf=math.inf).masked_fill_(same, 0.0)
    )


def _explain(
    real: Result, inputs: Tensors, causal: bool, plain: tuple[TensorMatch, ...]
) -> tuple[StepCost, ...]:
    """The models that give more of the kernel's bits than the recipe, in the half where bits differ
    first.
    """
    differ = {match.tensor for match in plain if match.identical < match.elements}
    half = FORWARD if differ & set(FORWARD) else BACKWARD
    recipe = StepModel("", "", TORCH_CPU_FLASH, half)
    base = StepCost("", "", _fractions(real, inputs, causal, recipe))
    tried = [
        StepCost(m.step, m.model, _fractions(real, inputs, causal, m))
        for m in models()
        if m.tensors == half
    ]
    return tuple(
        sorted((cost for cost in tried if cost.mean > base.mean), key=lambda cost: -cost.mean)
    )


def _fractions(real: Result, inputs: Tensors, causal: bool, model: StepModel) -> dict[str, float]:
    """The fraction of identical elements, per tensor of the half where the model shows."""
    query, key, value, grad_out = inputs
    step = Step(model.recipe)
    call = Call(query, key, value, Sees(causal), 1 / math.sqrt(query.shape[-1]))
    problem = Problem.read(call, step)
    saved = torch_cpu.forward(problem, exponential=model.weights_exp)
    ours = Result(saved.out.to(real.out.dtype), saved.lse.squeeze(-1))
    if model.tensors == BACKWARD:
        # the kernel's own O and lse, so that no step of the backward pass is blamed for a forward
        # pass that differs
        assert real.lse is not None
        kernels_own = real.out.float() if model.recipe.delta_from == "out" else saved.out_for_delta
        saved = replace(saved, out_for_delta=kernels_own, lse=real.lse.unsqueeze(-1))
        grads = torch_cpu.backward(
            problem, saved, grad_out, None, exponential=model.probabilities_exp
        )
        ours = Result(ours.out, ours.lse, *(g.to(grad_out.dtype) for g in grads))
    return {
        match.tensor: match.fraction
        for match in compare(real, ours)
        if match.tensor in model.tensors
    }


def _inputs(shape: Shape, seed: int) -> Tensors:
    """Standard normal numbers in bf16."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value, grad_out = (
        torch.randn(shape, generator=generator).bfloat16() for _ in range(4)
    )
    return query, key, value, grad_out


def _sum(column: tuple[TensorMatch, ...]) -> TensorMatch:
    """The same tensor over all calls."""
    elements, identical = (
        sum(getattr(match, name) for match in column) for name in ("elements", "identical")
    )
    return TensorMatch(
        column[0].tensor, elements, identical, max(match.largest_ulps for match in column)
    )
