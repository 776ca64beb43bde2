"""The tile loops of the algorithms and of their shared backward pass in the native library: the
same bits, one call.

`refused` says which calls stay with the PyTorch loops. What opens and closes a pass, O(N) work,
stays in Python.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from halfulp.algorithms.arithmetic import fixed
from halfulp.algorithms.problem import Problem, State
from halfulp.formats import FP32, Format
from halfulp.formats.compiled import c_format
from halfulp.native import BEST_ISA, CEmulation, CFormat, CTensor, function, missing, run
from halfulp.recipes import Recipe

_MASKS = {torch.bool: 1, torch.float32: 2}
_ALGORITHMS = {"flash2": 0, "flash1": 1, "standard": 2}
_SHIFTS = {"maximum": 0, "integer": 1, "offset": 2, "stabilized": 3}
_SCALE_AT = {"products": 0, "scores": 1, "probabilities": 2}


@lru_cache(maxsize=1)
def _steps() -> tuple[str, ...]:
    """The steps that the library rounds, in its order."""
    # asked of the library, so that its list and Python's cannot part
    name = function("halfulp_step_name", "i", ctypes.c_char_p)
    names: list[str] = []
    while (found := name(len(names))) is not None:
        names.append(found.decode())
    return tuple(names)


def refused(problem: Problem) -> str | None:
    """Why the library does not run these loops, in words; None where it does."""
    recipe, call = problem.recipe, problem.call
    # observers are called where a step rounds, and inside of the library no Python is called
    reasons = (
        "observers" if problem.step.observers else None,
        None if fixed(problem.query) and type(problem.query) is Tensor else "not float32 on a CPU",
        "softcap, sinks or dropout"
        if call.softcap or call.sinks is not None or call.dropout
        else None,
        None if recipe.matmul.order in ("native", "sequential") else "products in blocks",
        None if recipe.matmul.accumulate == FP32 else "products not summed in fp32",
        "a polynomial" if recipe.exp_degree is not None else None,
        "a scaled operand" if recipe.scale_into != "product" else None,
        "a reciprocal" if recipe.division != "divide" else None,
        "a rescale of O or l alone" if recipe.rescale_of != "both" else None,
        "no keys or no queries" if 0 in problem.query.shape or 0 in problem.key.shape else None,
        missing(),
    )
    return next((reason for reason in reasons if reason is not None), None) or _format_refused(
        recipe
    )


@lru_cache(maxsize=256)
def _format_refused(recipe: Recipe) -> str | None:
    for name, fmt in recipe.rounded_steps.items():
        if name not in _steps():
            continue
        if not isinstance(fmt, Format) or c_format(fmt, fmt.rounding, recipe.dtype) is None:
            return f"{name} in {fmt.name}"
    return None


def forward(problem: Problem) -> State:
    """The state after all key blocks, as the loops of the recipe's algorithm make it."""
    # the standard algorithm shifts a row by the maximum of all its keys, not of a block
    call, held = _call(problem, whole_rows=problem.recipe.algorithm == "standard")
    call.algorithm = _ALGORITHMS[problem.recipe.algorithm]
    out = torch.empty(*problem.query.shape[:3], problem.value.shape[3])
    rows = [torch.empty(*problem.query.shape[:3], 1) for _ in range(4)]
    call.out = out.data_ptr()
    call.row_max, call.row_sum, call.exact_row_sum, call.largest = (x.data_ptr() for x in rows)
    run("halfulp_emulate_forward", call)
    del held
    return State(out, *rows)


def backward(
    problem: Problem,
    shift: Tensor,
    divisor: Tensor | None,
    value_divisor: Tensor | None,
    delta: Tensor,
    grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV as the loops of `backward.backward` sum them; row statistics and δ `[B, H, N_q,
    1]`.
    """
    call, held = _call(problem, shift, divisor, value_divisor, grad_out)
    # bound to its name: the library reads this memory until the call is over
    delta = delta.expand(shift.shape).contiguous()
    gradients = [torch.zeros(x.shape) for x in (problem.query, problem.key, problem.value)]
    call.delta = delta.data_ptr()
    call.grad_query, call.grad_key, call.grad_value = (x.data_ptr() for x in gradients)
    run("halfulp_emulate_backward", call)
    del held
    dq, dk, dv = gradients
    return dq, dk, dv


def summed_delta(
    problem: Problem,
    shift: Tensor,
    divisor: Tensor | None,
    value_divisor: Tensor | None,
    grad_out: Tensor,
) -> Tensor:
    """rowsum(dP ∘ P) `[B, H, N_q, 1]` before its rounding."""
    call, held = _call(problem, shift, divisor, value_divisor, grad_out)
    delta = torch.zeros(shift.shape)
    call.summed_delta = delta.data_ptr()
    run("halfulp_emulate_delta", call)
    del held
    return delta


def _call(
    problem: Problem,
    shift: Tensor | None = None,
    divisor: Tensor | None = None,
    value_divisor: Tensor | None = None,
    grad_out: Tensor | None = None,
    *,
    whole_rows: bool = False,
) -> tuple[CEmulation, list[object]]:
    """The call, but for its results, and what it points into."""
    recipe, (b, h, n, d), (nk, dv) = problem.recipe, problem.query.shape, problem.value.shape[2:]
    call = CEmulation()
    call.isa, call.threads = BEST_ISA, torch.get_num_threads()
    call.batch, call.heads, call.n_query, call.n_key, call.d, call.dv = b, h, n, nk, d, dv
    call.block_query = recipe.block_query or n
    call.block_key = nk if whole_rows else recipe.block_key or nk
    least, greatest = problem.call.bounds
    call.bounded_below, call.bounded_above = least is not None, greatest is not None
    call.least, call.greatest = least or 0, greatest or 0
    call.mask_factor, call.score_factor, call.gradient_scale = (
        problem.unit,
        problem.call.scale * problem.unit,
        problem.call.scale,
    )
    formats = _formats(recipe)
    call.formats = ctypes.addressof(formats)
    _describe(call, recipe)
    tensors = {
        "query": problem.query,
        "key": problem.key,
        "value": problem.value,
        "grad_out": grad_out,
    }
    tensors |= {"shifts": shift, "divisor": divisor, "value_divisor": value_divisor}
    held: list[object] = [formats]
    for name, x in tensors.items():
        if x is not None:
            # the structure holds bare addresses: a copy that nothing else refers to would be freed
            x = x.contiguous()
            held.append(x)
            setattr(call, name, x.data_ptr())
    mask = problem.sees.mask
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.to(torch.float32)
        mask = mask.expand(b, h, n, nk)
        # broadcast dimensions keep their stride of 0; along the keys numbers must be neighbors
        mask = mask if mask.stride(3) == 1 or nk == 1 else mask.contiguous()
        held.append(mask)
        call.mask = CTensor(mask.data_ptr(), *mask.stride()[:3])
        call.mask_kind = _MASKS[mask.dtype]
    return call, held


def _describe(call: CEmulation, recipe: Recipe) -> None:
    """What the recipe says."""
    shift = recipe.shift
    call.base2, call.split = recipe.base == "2", recipe.exponential == "split"
    call.shift, call.unconditional = _SHIFTS[shift.kind], shift.unconditional
    call.beta, call.gamma, call.tie_tolerance, call.offset = (
        shift.beta,
        shift.gamma,
        shift.tie_tolerance,
        shift.offset,
    )
    call.row_sum_rounded = recipe.row_sum_from == "rounded"
    # lse of unrounded weights needs a sum of its own only where the first is of rounded ones
    call.row_sum_exact = recipe.row_sum_from == "rounded" and recipe.lse_from == "exact"
    call.weights_scale, call.row_sum_floor = recipe.weights_scale, recipe.row_sum_floor
    call.weights_rounded, call.scale_at = (
        recipe.backward_weights == "rounded",
        _SCALE_AT[recipe.gradient_scale_at],
    )


@lru_cache(maxsize=256)
def _formats(recipe: Recipe) -> ctypes.Array[CFormat]:
    formats = (CFormat * len(_steps()))()
    for i, name in enumerate(_steps()):
        fmt = recipe.rounded_steps.get(name)
        if (
            isinstance(fmt, Format)
            and (found := c_format(fmt, fmt.rounding, recipe.dtype)) is not None
        ):
            formats[i] = found
    return formats
