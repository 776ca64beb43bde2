"""Many sequences in one call of the native library, as autograd sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfulp.calls import Call, Saved
from halfulp.ops.direct import plain
from halfulp.ops.dispatch import choose
from halfulp.ops.schema import ONCE


def takes(call: Call, recipe: str, backend: str | None) -> bool:
    """Whether the native library computes the sequences of such a call together: where it would
    compute each of them, and nobody looks on.
    """
    if torch.compiler.is_compiling() or not plain(call.query, call.key, call.value, call.sinks):
        return False
    from halfulp.kernels import cpu

    return choose(call, recipe, backend) is cpu


def attend(
    call: Call, recipe: str, queries: Tensor, keys: Tensor, seeds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Out `[1, H, T, D_v]` and lse `[1, H, T]` of sequences with these ends; see
    `kernels.cpu_packed`.
    """
    from halfulp.kernels.cpu_packed import Lengths

    lengths = Lengths(queries, keys, seeds)
    out, lse = _Packed.apply(call.query, call.key, call.value, call.sinks, call, recipe, lengths)  # type: ignore[no-untyped-call]
    return out, lse


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        call: Call,
        recipe: str,
        lengths: Any,
    ) -> Any:
        from halfulp.kernels import cpu_packed as packed

        saved = packed.forward(call, recipe, lengths)
        ctx.save_for_backward(query, key, value, sinks, *saved)
        # without its tensors, which autograd keeps
        nothing = query.new_empty(0)
        bare = replace(call, query=nothing, key=nothing, value=nothing, sinks=None)
        ctx.how = bare, recipe, lengths
        ctx.set_materialize_grads(False)
        return saved.out, saved.lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        from halfulp.kernels import cpu_packed as packed

        if grad_out is None and grad_lse is None:
            return (None,) * 7
        query, key, value, sinks, *saved = ctx.saved_tensors
        bare, recipe, lengths = ctx.how
        # a loss of lse alone, whose dO is 0
        if grad_out is None:
            grad_out = torch.zeros_like(saved[0])
        inputs = (query, key, value, sinks, grad_out, grad_lse)
        with torch.no_grad():
            call = replace(bare, query=query, key=key, value=value, sinks=sinks)
            found = packed.backward(call, recipe, Saved(*saved), grad_out, grad_lse, lengths)
        gradients = found[:4]
        if torch.is_grad_enabled():
            # or create_graph would take the gradients for constants, without a word
            gradients = _Once.apply(*gradients, *inputs)  # type: ignore[no-untyped-call]
        needs = ctx.needs_input_grad
        given = (g if need else None for g, need in zip(gradients, needs, strict=False))
        return (*given, None, None, None)


class _Once(torch.autograd.Function):
    """Gradients as a function of what they were computed from, to say that it has no derivative."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor | None) -> Any:  # noqa: ARG004
        return tuple(None if x is None else x.view_as(x) for x in given[:4])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise NotImplementedError(ONCE)
