"""The short way of a call that nothing traces, transforms, casts or records: past PyTorch's
dispatcher to a call of the native library that was prepared for tensors like these.

The operator's way takes ten times as long as a small kernel. The bits are the same on both; what
this one cannot be sure of goes that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from halfulp.calls import Call
from halfulp.ops.dispatch import choose, last_run
from halfulp.ops.schema import LN_2, attention_backward

if TYPE_CHECKING:
    from halfulp.kernels.prepared import Prepared

_MOST = 512  # calls that are kept ready; then all are forgotten, as in a loop over lengths
_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (float, int, type(None))
_prepared: dict[Any, Known | None] = {}


class Known(NamedTuple):
    """A prepared call, and the operators' arguments after those that are tensors."""

    call: Prepared
    arguments: tuple[Any, ...]


def unwatched() -> bool:
    """Whether nobody stands between a call and its kernel: no transform, mode, cast or record.

    Whether a compiler does is asked first of all, by `torch.compiler.is_compiling`: it cannot trace
    these questions.
    """
    return not (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_any_autocast_enabled()
        or torch._C._get_tracing_state()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )


def plain(x: Any) -> bool:
    """Whether it is a tensor of numbers in this machine's memory and nothing else."""
    return type(x) in _PLAIN and x.is_cpu and x.layout is torch.strided and not x.is_neg()


def plain_gradient(x: Tensor | None) -> bool:
    """Whether it is plain, or none at all; batches of `is_grads_batched` are no transform."""
    return x is None or (plain(x) and not torch._C._functorch.is_legacy_batchedtensor(x))


def key_of(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    """What calls have in common that one prepared call serves; None where none can serve them.

    `options` are numbers, switches and names, or None.
    """
    if not (plain(query) and plain(key) and plain(value) and unwatched()):
        return None
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        query.dtype, key.dtype, value.dtype, torch.get_num_threads(), options,
    )  # fmt: skip


def attend(
    known: Known, query: Tensor, key: Tensor, value: Tensor, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Out, and lse if wanted, of a call that was prepared."""
    last_run.name = "cpu"
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        learned: Tensor | tuple[Tensor, Tensor]
        learned = _Direct.apply(query, key, value, known, return_lse)  # type: ignore[no-untyped-call]
        return learned
    if return_lse:
        out, lse, _ = known.call.keep(query, key, value, True)
        assert lse is not None
        return out, lse
    return known.call.forward(query, key, value)


def find(key: Any) -> Known | None:
    """The call prepared under this key."""
    try:
        return _prepared.get(key)
    except TypeError:  # an option that no key can hold
        return None


def learn(
    key: Any, given: tuple[Tensor, ...], call: Call, recipe: str, backend: str | None
) -> None:
    """Prepare the call for the next one like it, where the native library runs it on the tensors as
    they were given.
    """
    try:
        if key in _prepared:
            return
    except TypeError:
        return
    if len(_prepared) >= _MOST:
        _prepared.clear()
    _prepared[key] = None
    from halfulp.kernels import cpu, prepared

    if choose(call, recipe, backend) is not cpu:
        return
    made = (call.query, call.key, call.value)
    same = all(
        x.shape == y.shape and x.stride() == y.stride() and (x.stride(3) == 1 or x.shape[3] == 1)
        for x, y in zip(made, given, strict=True)
    )
    if same and call.sees.mask is None and call.sinks is None and call.dropout is None:
        arguments = (None, None, None, *call.flat().numbers, recipe, backend, False)
        _prepared[key] = Known(prepared.Prepared(call, recipe), arguments)


class _Direct(torch.autograd.Function):
    """The kernel's two passes as autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, known: Known, return_lse: bool
    ) -> Any:
        out, lse, kept = known.call.keep(query, key, value, return_lse)
        ctx.save_for_backward(query, key, value, out, kept)
        ctx.known = known
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        if grad_out is None and grad_lse is None:
            return None, None, None, None, None
        query, key, value, out, kept = ctx.saved_tensors
        known = ctx.known
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if (
            torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or not (plain_gradient(grad_out) and plain_gradient(grad_lse))
            # hooks may give back other tensors than were saved
            or not (plain(query) and plain(key) and plain(value) and plain(out) and plain(kept))
            or not unwatched()
        ):
            residual, row_max, row_sum, own_lse = known.call.statistics(kept)
            # lse in its own base is what the kernel reads
            statistics = (own_lse * LN_2, residual, row_max, row_sum, own_lse)
            gradients = attention_backward(
                grad_out, grad_lse, out, *statistics, query, key, value, *known.arguments
            )[:3]
        else:
            gradients = known.call.backward(query, key, value, out, kept, grad_out, grad_lse)
        needs = ctx.needs_input_grad
        if not (needs[0] and needs[1] and needs[2]):
            gradients = tuple(x if n else None for x, n in zip(gradients, needs, strict=False))
        return (*gradients, None, None)
