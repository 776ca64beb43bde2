"""The short way of a call that nothing traces, transforms, casts or records: past PyTorch's
dispatcher to a call of the native library that was prepared for tensors like these.

The operator's way takes ten times as long as a small kernel. The bits are the same on both; what
this one cannot be sure of goes that one. All of it that is done at every call is one function of
the library (native/python.cpp): it asks whether anybody watches, reads the tensors, finds what was
prepared for their shapes and strides, checks them against it, and fills in pointers.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from halfulp.calls import Call
from halfulp.native import python_functions
from halfulp.ops.dispatch import choose, last_run
from halfulp.ops.schema import LN_2, attention_backward

_MOST = 512  # calls that are kept ready; then all are forgotten, as in a loop over lengths
_OPTIONS = (float, int, bool, str, type(None))
# None of them is true where no transform, mode, cast or record stands between a call and its
# kernel. Whether a compiler does is asked first of all, by `torch.compiler.is_compiling`: it cannot
# trace these.
_WATCHERS = (
    torch._C._are_functorch_transforms_active,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._is_any_autocast_enabled,
    torch._C._get_tracing_state,
    torch._C._autograd._profiler_enabled,
    lambda: forward_ad._current_level >= 0,
)


def learn(
    given: tuple[Tensor, Tensor, Tensor], options: tuple[Any, ...], call: Call, recipe: str,
    backend: str | None,
) -> None:  # fmt: skip
    """Prepare the call for the next one like it, where the native library runs it on the tensors as
    they were given.

    `options` are what `attend` was given after `return_lse`.
    """
    from halfulp.kernels import cpu

    numbers = [y for x in options for y in (x if type(x) is tuple else (x,))]
    if call.dropout is not None or not all(type(x) in _OPTIONS for x in numbers):
        return
    address = 0
    blanks: tuple[Tensor, ...] = ()
    if choose(call, recipe, backend) is cpu:
        structure, _ = cpu.structure(call, recipe, None)
        address = ctypes.addressof(structure)
        blanks = _blanks(call, cpu.keeps_residual(recipe, call.query.dtype))
    arguments = (None, None, None, *call.flat().numbers, recipe, backend, False)
    _learn(*given, options, _MOST, address, blanks, arguments)


def _blanks(call: Call, keeps_residual: bool) -> tuple[Tensor, ...]:
    """What `torch.empty_like` makes out, lse, what is kept and the gradients of: half the time of
    `torch.empty`, which reads its arguments first. Each is one element wide.
    """
    query, key, value = call.query, call.key, call.value
    shape, dtype = (*query.shape[:3], value.shape[3]), query.dtype
    kept = query[..., 0].numel() * (12 + shape[3] * keeps_residual)
    made = [(shape, dtype), (shape[:3], torch.float32), ((kept,), torch.uint8)]
    made += [(x.shape, dtype) for x in (query, key, value)]
    return tuple(torch.empty((), dtype=y).expand(x) for x, y in made)


class _Direct(torch.autograd.Function):
    """The kernel's two passes as autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, return_lse: bool, known: Any,
        arguments: tuple[Any, ...],
    ) -> Any:  # fmt: skip
        out, lse, kept = _forward(known, query, key, value, return_lse)
        ctx.save_for_backward(query, key, value, out, kept)
        ctx.known, ctx.arguments = known, arguments
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        if grad_out is None and grad_lse is None:
            return None, None, None, None, None, None
        query, key, value, out, kept = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        gradients = None
        if not torch.compiler.is_compiling():
            gradients = _backward(ctx.known, query, key, value, out, kept, grad_out, grad_lse)
        if gradients is None:
            statistics = _statistics(kept, out.shape[:3])
            gradients = attention_backward(
                grad_out, grad_lse, out, *statistics, query, key, value, *ctx.arguments
            )[:3]
        needs = ctx.needs_input_grad
        if not (needs[0] and needs[1] and needs[2]):
            gradients = tuple(x if n else None for x, n in zip(gradients, needs, strict=False))
        return (*gradients, None, None, None)


def _statistics(kept: Tensor, rows: torch.Size) -> tuple[Tensor, ...]:
    """lse, residual (or an empty tensor), row_max, row_sum and own_lse from what is kept."""
    end = 12 * rows.numel()
    row_max, row_sum, own_lse = kept[:end].view(torch.float32).view(3, *rows)
    residual = kept[end:].view(torch.int8).view(*rows, -1)
    # lse in its own base is what the kernel reads
    return own_lse * LN_2, residual, row_max, row_sum, own_lse


# plain(*tensors): whether each is a tensor of numbers in this machine's memory and nothing else, or
# None, and nobody watches.
# attend(query, key, value, return_lse, *options): the result; None for a call that may be learned,
# False for one that goes the operator's way.
plain, attend, _learn, _forward, _backward = python_functions(
    None, False, True, Tensor, torch.nn.Parameter, torch.strided, tuple, torch.empty_like,
    torch.get_num_threads, last_run,
    # past what Function.apply asks again, a tenth of a small call's training
    super(torch.autograd.Function, _Direct).apply,
    # batches of `is_grads_batched` are no transform
    torch._C._functorch.is_legacy_batchedtensor, _WATCHERS,
)  # fmt: skip
