"""PyTorch's CPU flash attention kernel (bf16), bit for bit: a real kernel whose every intermediate
can be watched.

Where the other algorithms follow a paper, this one follows a binary: ATen's
`FlashAttentionKernel.cpp` as compiled for AVX-512 in torch 2.13, with its fast exponential, its
sixteen-lane sums, its fused multiply-adds and the bf16 gemms into which the gradients accumulate.
On such a machine O, lse, dQ, dK and dV have the kernel's bits; elsewhere the vector width differs
and a few bits with it. A recipe that rounds otherwise gets the same algorithm with that one step
changed.

Three limits. The kernel stores lse = 0 for a fully masked row; here it is −inf, as everywhere in
this package. Where there is but one head and one block of queries, the kernel's own bits change
with the number of threads; those here are of one thread. And where D is no multiple of 4, or a
block has only 2 or 3 queries, a few sums may differ in their last bit before they are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from halfulp.algorithms.matmul import product
from halfulp.algorithms.problem import Kept, Problem, read_input, shift_of
from halfulp.algorithms.torch_cpu_math import (
    fused_multiply_add,
    lane_sum,
    reduced_sum,
    row_product,
    scalar_exp,
    scalar_log,
    vector_exp,
    vector_product,
    weights_exp,
)
from halfulp.formats import BF16, FP32
from halfulp.recipes import STEPS, TORCH_CPU_FLASH, Matmul, Recipe, Step

Exponential = Callable[[Tensor], Tensor]

# The choices that may differ from the kernel's; the formats of all steps may, too.
_FREE = {
    "name",
    "matmul",
    "block_query",
    "block_key",
    "row_sum_from",
    "delta_from",
    "input_scaling",
    "seed",
}


def forward(problem: Problem, *, exponential: Exponential = weights_exp) -> Kept:
    """Query blocks outside, key blocks inside; O(N) memory beside one tile.

    `exponential` is that of the weights, on float32 tiles of shifted scores.

    Raises:
        ValueError: for tensors off the CPU, D_v ≠ D, or a recipe with another structure than the
            kernel's.
    """
    _check(problem)
    step = problem.step
    with _one_thread():
        gemm = _Gemm(step)
        parts = [_rows(problem, rows, gemm, exponential) for rows in _row_tiles(problem)]
        accumulator, m, l = (torch.cat(column, dim=2) for column in zip(*parts, strict=True))
        divisor = torch.where(l == 0, 1.0, l)  # the kernel's way to give fully masked rows O = 0
        # the kernel multiplies by a reciprocal, which rounds once more than a division
        exact = accumulator * (1 / divisor)
        out = step("out", exact)
        for_delta = out
        if problem.recipe.delta_from == "exact_out":
            for_delta = exact
        elif problem.recipe.delta_from == "residual":
            for_delta = out + step("residual", exact - out)
        # log 1 leaves a masked row the −inf of its maximum
        lse = step("lse", m + step("log_row_sum", scalar_log(divisor)))
    return Kept(out, for_delta, lse, m, l, m)


def backward(
    problem: Problem,
    kept: Kept,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *,
    exponential: Exponential = vector_exp,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV as `backward.backward` returns them; query blocks outside, key blocks inside.

    The kernel takes no `grad_lse`; one that is given is subtracted from δ. `exponential` is that of
    P.

    Raises:
        ValueError: as `forward`.
    """
    _check(problem)
    step, (batch, heads, _, dim) = problem.step, problem.query.shape
    with _one_thread():
        gemm = _Gemm(step)
        do = read_input("grad_out", grad_out, step)
        delta = step("delta", reduced_sum(step("delta_products", do * kept.out_for_delta)))
        if grad_lse is not None:
            delta = delta - torch.where(kept.lse == -math.inf, 0.0, grad_lse.to(delta.dtype))
        # in bf16 as in the kernel: every tile rounds the running gradients anew, so that errors
        # grow with the number of tiles
        dtype = torch.bfloat16 if gemm.bf16 else torch.float32
        dq = torch.zeros(problem.query.shape, dtype=dtype)
        dk, dv = (
            torch.zeros(batch, heads // problem.groups, problem.key.shape[2], dim, dtype=dtype)
            for _ in "kv"
        )
        # Query heads that share a key head add to its gradient one after the other.
        for member in range(problem.groups):
            part = _group_member(problem, kept, do, delta, member)
            _head_gradients(part, (dq[:, member :: problem.groups], dk, dv), gemm, exponential)
        dq, dk, dv = dq.float(), dk.float(), dv.float()
    return step("grad_query", dq), step("grad_key", dk), step("grad_value", dv)


def _rows(
    problem: Problem, rows: slice, gemm: _Gemm, exponential: Exponential
) -> tuple[Tensor, Tensor, Tensor]:
    """Ō, m and l of one block of query rows."""
    step = gemm.step
    state: tuple[Tensor, Tensor, Tensor] | None = None
    for cols in problem.col_tiles():
        if problem.sees.hides(rows, cols):
            continue
        scores = _forward_scores(problem, rows, cols, gemm)
        top = scores.amax(-1, keepdim=True)
        m_new = step("row_max", top if state is None else torch.maximum(state[1], top))
        shift = shift_of(m_new)
        shifted = step("shifted_scores", torch.sub(scores, shift, out=step.scratch(scores)))
        weights = step("weights", exponential(shifted))
        operand = step("weights_operand", weights)
        summed = operand if problem.recipe.row_sum_from == "rounded" else weights
        tile_sum, value = step("block_sum", lane_sum(summed)), problem.value[:, :, cols]
        if state is None:
            accumulator = step("accumulator", step("block_out", gemm(operand, value)))
            state = (accumulator, m_new, step("row_sum", tile_sum))
        else:
            accumulator, m, l = state
            rescale = step("rescale", scalar_exp(step("max_change", m - shift)))
            l_rescaled, rescaled = (
                step("rescaled", l * rescale),
                step("rescaled", accumulator * rescale),
            )
            # one instruction in the kernel, without a rounding between product and sum
            fused = not step.rounds("rescaled")
            l = step(
                "row_sum",
                fused_multiply_add(rescale, l, tile_sum) if fused else l_rescaled + tile_sum,
            )
            accumulator = step("accumulator", gemm.onto(rescaled, operand, value))
            state = (accumulator, m_new, l)
    assert state is not None  # the first key block is never hidden
    return state


def _forward_scores(problem: Problem, rows: slice, cols: slice, gemm: _Gemm) -> Tensor:
    """Masked scores of one tile; an additive mask joins in the multiplication by α, without a
    rounding between.
    """
    step = gemm.step
    s = step("product", gemm(problem.query[:, :, rows], problem.key[:, :, cols].mT))
    if problem.sees.added is None:
        return problem.sees.apply(step("scores", s * problem.call.scale), rows, cols, 1.0)
    alpha = torch.tensor(problem.call.scale, dtype=torch.float32)
    added = step("scores", fused_multiply_add(s, alpha, _mask_tile(problem, rows, cols)))
    return replace(problem.sees, mask=None).apply(added, rows, cols, 1.0)


def _mask_tile(problem: Problem, rows: slice, cols: slice) -> Tensor:
    added = problem.sees.added
    assert added is not None
    return added.expand(problem.call.scores_shape)[:, :, rows, cols].float()


@dataclass(frozen=True)
class _Heads:
    """What the backward pass reads of the query heads that have their key head for themselves."""

    problem: Problem
    lse: Tensor
    grad_out: Tensor
    delta: Tensor


def _group_member(problem: Problem, kept: Kept, do: Tensor, delta: Tensor, member: int) -> _Heads:
    """One query head of every group, with its mask."""
    if problem.groups == 1:
        return _Heads(problem, kept.lse, do, delta)
    heads = slice(member, None, problem.groups)
    q, k, v, lse, do, delta = (
        x[:, heads] for x in (problem.query, problem.key, problem.value, kept.lse, do, delta)
    )
    call = replace(problem.call, query=q, key=k, value=v, sees=problem.sees.of_heads(heads))
    return _Heads(Problem(call, problem.step, 1), lse, do, delta)


def _head_gradients(
    heads: _Heads, grads: tuple[Tensor, Tensor, Tensor], gemm: _Gemm, exponential: Exponential
) -> None:
    """Add every tile's contribution to dQ, dK and dV, in place."""
    problem, step = heads.problem, gemm.step
    dq, dk, dv = grads
    for rows in _row_tiles(problem):
        q, do, delta = (
            problem.query[:, :, rows],
            heads.grad_out[:, :, rows],
            heads.delta[:, :, rows],
        )
        # exp(S − lse) is P itself: this backward pass knows no row sum
        shift = shift_of(heads.lse[:, :, rows])
        for cols in problem.col_tiles():
            if problem.sees.hides(rows, cols):
                continue
            k, v = problem.key[:, :, cols], problem.value[:, :, cols]
            scores = _backward_scores(problem, rows, cols, gemm)
            shifted = step("shifted_scores", torch.sub(scores, shift, out=step.scratch(scores)))
            p = step("probabilities", exponential(shifted))
            operand = step("probabilities_operand", p)
            dp = step("grad_probabilities", gemm(do, v.mT))
            centered = step("grad_centered", torch.sub(dp, delta, out=step.scratch(dp)))
            ds = step("grad_scores", torch.mul(p, centered, out=step.scratch(centered)))
            gemm.add(dv[:, :, cols], operand.mT, do, 1.0)
            # α inside the gemm: dS is rounded without it
            gemm.add(dq[:, :, rows], ds, k, problem.call.scale)
            gemm.add(dk[:, :, cols], ds.mT, q, problem.call.scale)


def _backward_scores(problem: Problem, rows: slice, cols: slice, gemm: _Gemm) -> Tensor:
    """Masked scores of one tile, α multiplied inside the gemm."""
    step = gemm.step
    q, k = problem.query[:, :, rows], problem.key[:, :, cols].mT
    if step.rounds("product"):
        s = step("scores", step("product", gemm(q, k)) * problem.call.scale)
    else:
        s = step("scores", gemm(q, k, problem.call.scale))
    if problem.sees.added is None:
        return problem.sees.apply(s, rows, cols, 1.0)
    added = s + _mask_tile(problem, rows, cols)
    return replace(problem.sees, mask=None).apply(added, rows, cols, 1.0)


class _Gemm:
    """The kernel's matrix products, head by head; in a recipe that sums otherwise, that recipe's.

    Batched products are left alone: for small matrices torch sums them in another order than single
    ones.
    """

    def __init__(self, step: Step) -> None:
        self.step, recipe = step, step.recipe
        self.native = recipe.matmul == Matmul(FP32)
        read = (
            recipe.query,
            recipe.key,
            recipe.grad_out,
            recipe.probabilities_operand,
            recipe.grad_scores,
        )
        # One library call rounds the running gradient: only if all it reads and writes is bf16 can
        # it be made.
        self.bf16 = (
            self.native
            and {*read, recipe.grad_accumulator} == {BF16}
            and not step.rounds("grad_block")
        )

    def __call__(self, left: Tensor, right: Tensor, alpha: float = 1.0) -> Tensor:
        """alpha · left @ right in fp32."""
        if not self.native:
            return product(left, right, self.step) * alpha
        # the kernel sums vectors and single rows in another order than its other products
        if right.stride(-2) == 1 and 1 in (left.shape[-2], right.shape[-1]):
            return vector_product(left, right * alpha)
        if left.shape[-2] == 1:
            return row_product(left, right, left.new_zeros(())) * alpha
        total = left.new_empty(*left.shape[:-1], right.shape[-1])
        self._into(total, left, right, alpha, beta=0.0)
        return total

    def onto(self, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """total + left @ right, summed inside the gemm unless the recipe rounds the product
        first.
        """
        step = self.step
        if not self.native or step.rounds("block_out"):
            return total + step("block_out", self(left, right))
        # for whoever watches: the sum itself never has this product apart
        if step.observers:
            step("block_out", self(left, right))
        if left.shape[-2] == 1:
            return row_product(left, right, total)
        total = total.clone()
        self._into(total, left, right, 1.0, beta=1.0)
        return total

    def add(self, grad: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
        """Add alpha · left @ right to a running gradient, in place."""
        step = self.step
        if not self.bf16:
            grad.copy_(
                step("grad_accumulator", grad + step("grad_block", self(left, right, alpha)))
            )
            return
        if step.observers:
            step("grad_block", self(left, right, alpha))
        self._into(grad, left.bfloat16(), right.bfloat16(), alpha, beta=1.0)
        if step.observers:
            step("grad_accumulator", grad.float())

    def _into(self, total: Tensor, left: Tensor, right: Tensor, alpha: float, beta: float) -> None:
        for b in range(left.shape[0]):
            for t, l, r in zip(total[b].unbind(), left[b].unbind(), right[b].unbind(), strict=True):
                torch.addmm(t, l, r, beta=beta, alpha=alpha, out=t)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch with one thread, then with as many as before.

    More threads split a gemm and with it its sums, and cut vectorized loops where their ends are
    scalar. The kernel's gemms have one thread too, since they run inside its own parallel loop.
    """
    before = torch.get_num_threads()
    if before == 1:  # another thread's setting is then left alone
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _row_tiles(problem: Problem) -> list[slice]:
    """Query blocks: the recipe's size is the kernel's largest; short sequences have smaller
    ones.
    """
    n, block = problem.query.shape[2], problem.recipe.block_query
    block = n if block is None else min(block, 256 if n >= 768 else 64 if n >= 192 else 32)
    return [slice(start, min(start + block, n)) for start in range(0, n, block)]


def _check(problem: Problem) -> None:
    """Refuse what the kernel cannot do, in one line."""
    if problem.query.device.type != "cpu":
        raise ValueError(
            f"query on {problem.query.device}: accepted is cpu for {problem.recipe.name}"
        )
    if problem.value.shape[3] != problem.query.shape[3]:
        accepted = f"accepted is query's, {problem.query.shape[3]}"
        raise ValueError(f"value of head dimension {problem.value.shape[3]}: {accepted}")
    call, whole = problem.call, {"window": None, "causal_offset": 0, "softcap": 0.0, "sinks": None}
    for name, given in call.options().items():
        if name in whole or name == "dropout_p":
            accepted = f"accepted is {whole.get(name, 0.0)} with algorithm='torch_cpu'"
            raise ValueError(f"{name}={given}: {accepted}, since PyTorch's kernel has none")
    for name in (
        field.name
        for field in fields(Recipe)
        if field.name not in STEPS and field.name not in _FREE
    ):
        accepted, got = getattr(TORCH_CPU_FLASH, name), getattr(problem.recipe, name)
        if got != accepted:
            raise ValueError(f"{name}={got!r}: accepted is {accepted!r} with algorithm='torch_cpu'")
    delta_from = problem.recipe.delta_from
    if delta_from in ("probabilities", "recomputed"):
        accepted = "accepted are 'out', 'exact_out' and 'residual' with algorithm='torch_cpu'"
        raise ValueError(f"delta_from={delta_from!r}: {accepted}")
