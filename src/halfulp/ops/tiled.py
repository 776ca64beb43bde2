"""The backend "torch": the tiled algorithms in plain PyTorch, with the bits of `halfulp.emulate` in
the same recipe.

It runs on every device and takes every option, so it is what the fast kernels are held to and what
remains where none of them fits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp import algorithms
from halfulp.algorithms import Kept, Problem
from halfulp.algorithms.other_gradients import grad_mask, grad_sinks
from halfulp.algorithms.problem import residual_unit
from halfulp.calls import Call, Gradients, Saved
from halfulp.formats import Format
from halfulp.recipes import Recipe, Step, recipe_of


def supports(call: Call, recipe: str) -> str | None:  # noqa: ARG001
    """None: plain PyTorch takes everything."""
    return None


def forward(call: Call, recipe: str) -> Saved:
    """Attention of `[B, H, N, D]` tensors; see `calls.Saved` for what is given back.

    Row statistics are in the recipe's own base, those of "halfulp" alone in 2.
    """
    query = call.query
    if 0 in call.scores_shape:
        return _nothing(call, recipe)
    # autocast would read the emulation's own products, which are in fp32, in its dtype
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        problem = Problem.read(call, Step(recipe_of(recipe, query.dtype)))
        kept = algorithms.attend(problem)
        top = kept.largest_score if problem.recipe.shift.kind == "integer" else kept.row_max
        lse, row_max, row_sum = (x.squeeze(-1) for x in (kept.lse, top, kept.row_sum))
        return Saved(
            kept.out.to(query.dtype).contiguous(),
            _to_bits(kept.out_for_delta - kept.out, kept.out, problem.recipe),
            lse / problem.unit,
            row_max.contiguous(),
            row_sum.contiguous(),
            # over log₂ e and times it again is not the same number: the backward pass needs this
            # one
            lse if problem.unit != 1 else None,
        )


def backward(
    call: Call,
    recipe: str,
    saved: Saved,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *,
    mask_gradient: bool = False,
) -> Gradients:
    """Gradients of `forward`; those of sinks and, if asked for, of an additive mask beside those of
    the operands.
    """
    query, mask, sinks = call.query, call.sees.mask, call.sinks
    operands = (query, call.key, call.value)
    if 0 in call.scores_shape:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in operands)
        no_sinks = None if sinks is None else torch.zeros_like(sinks)
        no_mask = torch.zeros_like(mask) if mask_gradient and mask is not None else None
        return Gradients(dq, dk, dv, no_sinks, no_mask)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        problem = Problem.read(call, Step(recipe_of(recipe, query.dtype)))
        kept = _unpacked(saved, problem)
        d_lse = None if grad_lse is None else grad_lse.unsqueeze(-1)
        computed = algorithms.attend_backward(problem, kept, grad_out, d_lse)
        dq, dk, dv = (g.to(x.dtype).contiguous() for g, x in zip(computed, operands, strict=True))
        of_sinks = of_mask = None
        if sinks is not None:
            of_sinks = grad_sinks(problem, kept, grad_out, d_lse).to(sinks.dtype)
        if mask_gradient and mask is not None:
            of_mask = grad_mask(problem, kept, grad_out, d_lse).to(mask.dtype)
        return Gradients(dq, dk, dv, of_sinks, of_mask)


def _to_bits(residual: Tensor, out: Tensor, recipe: Recipe) -> Tensor | None:
    """The residual as the integers it is made of."""
    if recipe.delta_from != "residual" or recipe.residual_bits is None:
        return None
    assert isinstance(recipe.out, Format)
    steps = torch.ldexp(residual, -residual_unit(out, recipe.out, recipe.residual_bits))
    # a row that is NaN or infinite has no residual, and C++ leaves open what int8 makes of NaN
    return steps.nan_to_num_(0, 0, 0).to(torch.int8).contiguous()


def _unpacked(saved: Saved, problem: Problem) -> Kept:
    """What the tiled backward pass reads, in the compute dtype."""
    recipe = problem.recipe
    out = saved.out.to(recipe.dtype)
    for_delta = out
    if saved.residual is not None:
        assert isinstance(recipe.out, Format)
        assert recipe.residual_bits is not None
        for_delta = out + torch.ldexp(
            saved.residual.float(), residual_unit(out, recipe.out, recipe.residual_bits)
        )
    lse = saved.lse * problem.unit if saved.own_lse is None else saved.own_lse
    lse, top, row_sum = (
        x.to(recipe.dtype).unsqueeze(-1) for x in (lse, saved.row_max, saved.row_sum)
    )
    row_max = top.ceil() if recipe.shift.kind == "integer" else top
    return Kept(out, for_delta, lse, row_max, row_sum, top)


def _nothing(call: Call, name: str) -> Saved:
    """No queries, or no keys to see: out 0, lse −inf, or of the sink alone."""
    query, recipe = call.query, recipe_of(name, call.query.dtype)
    rows = query.new_zeros(query.shape[:3], dtype=recipe.dtype)
    out = query.new_zeros(*query.shape[:3], call.value.shape[3])
    residual = out.to(torch.int8) if recipe.delta_from == "residual" else None
    lse = (
        rows - torch.inf
        if call.sinks is None
        else rows + call.sinks.to(recipe.dtype).view(1, -1, 1)
    )
    return Saved(out, residual, lse, lse.clone(), rows, lse.clone() if recipe.base == "2" else None)
