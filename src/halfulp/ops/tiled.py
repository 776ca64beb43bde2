"""The backend "torch": the tiled algorithms in plain PyTorch, with the bits of `halfulp.emulate` in
the same recipe.

It runs on every device and takes every option, so it is what the fast kernels are held to and what
remains where none of them fits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfulp import algorithms
from halfulp.algorithms import Mask, Problem
from halfulp.algorithms.other_gradients import grad_mask, grad_sinks
from halfulp.algorithms.problem import LOG2_E, Dropout, residual_unit
from halfulp.formats import BF16, FP16, FP32, FP64, Format
from halfulp.kernels.options import KERNEL_RECIPES, Gradients, Options, Saved
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, STEPS, Matmul, Recipe, Shift, Step

FORMATS: dict[torch.dtype, Format] = {
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float32: FP32,
    torch.float64: FP64,
}
_IN_BF16: dict[str, Recipe] = {
    "halfulp": BF16_HALFULP,
    "stock": BF16_FLASH2,
    "published": BF16_FLASH2.with_(name="BF16_PUBLISHED", shift=Shift("stabilized", beta=7.0)),
    "exact_delta": BF16_FLASH2.with_(name="BF16_EXACT_DELTA", delta_from="probabilities"),
}


@cache
def recipe_of(name: str, dtype: torch.dtype) -> Recipe:
    """The recipe that a kernel's recipe means for inputs of `dtype`: what is bf16 in it takes that
    dtype's format.

    float32 and float64 inputs are worked on in their own dtype, where nothing is rounded, no
    residual is left, and l is what every weight is over: lse would round it. Raises ValueError for
    a name that is no kernel's recipe.
    """
    if name not in KERNEL_RECIPES:
        raise ValueError(f"recipe={name!r}: accepted are {', '.join(KERNEL_RECIPES)}")
    recipe, fmt = _IN_BF16[name], FORMATS[dtype]
    if fmt == BF16:
        return recipe
    changes: dict[str, Any] = {step: fmt for step in STEPS if getattr(recipe, step) == BF16}
    changes["name"] = recipe.name.replace("BF16", fmt.name.upper())
    if fmt in (FP32, FP64):
        changes |= {
            "residual_bits": None,
            "divisor_from": "row_sum",
            "grad_value_from": "probabilities",
        }
        if recipe.delta_from == "residual":
            changes["delta_from"] = "out"
    if fmt == FP64:
        changes |= {"compute": "float64", "matmul": Matmul(FP64)}
    return recipe.with_(**changes)


def supports(query: Tensor, key: Tensor, value: Tensor, options: Options) -> str | None:  # noqa: ARG001
    """None: plain PyTorch takes everything."""
    return None


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Saved:
    """Attention of `[B, H, N, D]` tensors; see `kernels.options` for what is given back."""
    step = Step(recipe_of(options.recipe, query.dtype))
    if 0 in (*query.shape[:3], *key.shape[:3]):
        return _nothing(query, value, options)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        problem = _problem(query, key, value, options, step)
        saved = algorithms.attend(problem, step)
        top = saved.largest_score if step.recipe.shift.kind == "integer" else saved.row_max
        lse, row_max, row_sum = (x.squeeze(-1) for x in (saved.lse, top, saved.row_sum))
        return Saved(
            saved.out.to(query.dtype).contiguous(),
            _to_bits(saved.out_for_delta - saved.out, saved.out, step.recipe),
            lse / problem.unit,
            row_max.contiguous(),
            row_sum.contiguous(),
            lse if problem.unit != 1 else None,
        )


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    saved: Saved,
    options: Options,
    *,
    mask_gradient: bool = False,
) -> Gradients:
    """Gradients of `forward`; those of sinks and, if asked for, of an additive mask beside those of
    the operands.
    """
    mask, sinks = options.attn_mask, options.sinks
    if 0 in (*query.shape[:3], *key.shape[:3]):
        dq, dk, dv = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
        )
        no_sinks = None if sinks is None else torch.zeros_like(sinks)
        return Gradients(
            dq,
            dk,
            dv,
            no_sinks,
            torch.zeros_like(mask) if mask_gradient and mask is not None else None,
        )
    step = Step(recipe_of(options.recipe, query.dtype))
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        problem = _problem(query, key, value, options, step)
        kept = _unpacked(saved, problem.unit, step.recipe)
        d_lse = None if grad_lse is None else grad_lse.unsqueeze(-1)
        dq, dk, dv = (
            g.to(x.dtype).contiguous()
            for g, x in zip(
                algorithms.attend_backward(problem, kept, grad_out, d_lse, step),
                (query, key, value),
                strict=True,
            )
        )
        of_sinks = (
            None
            if sinks is None
            else grad_sinks(problem, kept, grad_out, d_lse, step).to(sinks.dtype)
        )
        of_mask = None
        if mask_gradient and mask is not None:
            of_mask = grad_mask(problem, kept, grad_out, d_lse, step).to(mask.dtype)
        return Gradients(dq, dk, dv, of_sinks, of_mask)


def _problem(query: Tensor, key: Tensor, value: Tensor, options: Options, step: Step) -> Problem:
    recipe, mask = step.recipe, options.attn_mask
    if mask is not None:
        mask = mask.reshape((1,) * (2 - mask.ndim) + tuple(mask.shape))
    sinks = options.sinks
    if sinks is not None:
        sinks = sinks.to(recipe.dtype).view(1, -1, 1, 1) * (LOG2_E if recipe.base == "2" else 1.0)
    return Problem.read(
        query,
        key,
        value,
        Mask(options.is_causal, mask, options.window, options.causal_offset),
        options.scale,
        step,
        softcap=options.softcap,
        sinks=sinks,
        dropout=Dropout(options.dropout_p, options.seed) if options.dropout_p else None,
    )


def _to_bits(residual: Tensor, out: Tensor, recipe: Recipe) -> Tensor | None:
    """The residual as the integers it is made of."""
    if recipe.delta_from != "residual" or recipe.residual_bits is None:
        return None
    assert isinstance(recipe.out, Format)
    steps = torch.ldexp(residual, -residual_unit(out, recipe.out, recipe.residual_bits))
    return steps.nan_to_num_(0, 0, 0).to(torch.int8).contiguous()


def _unpacked(saved: Saved, unit: float, recipe: Recipe) -> algorithms.Saved:
    """What the tiled backward pass reads, in the compute dtype."""
    out = saved.out.to(recipe.dtype)
    for_delta = out
    if saved.residual is not None:
        assert isinstance(recipe.out, Format)
        assert recipe.residual_bits is not None
        for_delta = out + torch.ldexp(
            saved.residual.float(), residual_unit(out, recipe.out, recipe.residual_bits)
        )
    lse = saved.lse * unit if saved.own_lse is None else saved.own_lse
    lse, top, row_sum = (
        x.to(recipe.dtype).unsqueeze(-1) for x in (lse, saved.row_max, saved.row_sum)
    )
    row_max = top.ceil() if recipe.shift.kind == "integer" else top
    return algorithms.Saved(out, for_delta, lse, row_max, row_sum, top)


def _nothing(query: Tensor, value: Tensor, options: Options) -> Saved:
    """No queries, or no keys to see: out 0, lse −inf, or of the sink alone."""
    recipe = recipe_of(options.recipe, query.dtype)
    rows = query.new_zeros(query.shape[:3], dtype=recipe.dtype)
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    residual = out.to(torch.int8) if recipe.delta_from == "residual" else None
    lse = (
        rows - torch.inf
        if options.sinks is None
        else rows + options.sinks.to(recipe.dtype).view(1, -1, 1)
    )
    return Saved(out, residual, lse, lse.clone(), rows, lse.clone() if recipe.base == "2" else None)
