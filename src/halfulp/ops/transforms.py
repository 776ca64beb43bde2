"""What autocast and vmap make of the operators of `schema`: the same as of PyTorch's own attention.

Under autocast, float32 operands are read in the autocast dtype. Under vmap, the mapped dimension
joins the batch; where that cannot be (dropout, whose masks depend on the place in the batch, and
mapped sinks) the calls run one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad

from halfulp.calls import Call
from halfulp.ops.schema import (
    ONCE,
    How,
    Passed,
    attention_backward,
    attention_forward,
    gradients,
    keep,
)

_NO_FORWARD_MODE = (
    "halfulp.attention has no forward-mode derivative, as PyTorch's flash kernels have none"
)
# what has no batch dimension
_WHOLE = ("attn_mask", "sinks", "seed")


@cache
def _names(operator: Any) -> tuple[str, ...]:
    """The operator's arguments, in order."""
    return tuple(inspect.signature(operator._init_fn).parameters)


def _autocast_rule(device_type: str) -> Callable[..., Any]:
    key = DispatchKeySet(
        getattr(DispatchKey, "Autocast" + {"cpu": "CPU", "cuda": "CUDA"}[device_type])
    )

    def cast(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        given = dict(zip(_names(attention_forward), args, strict=True))
        for name in ("query", "key", "value"):
            # float64 stays, as under PyTorch's own autocast
            if given[name].dtype in (torch.float32, torch.float16, torch.bfloat16):
                given[name] = given[name].to(dtype)
        # or the operator would come back to this rule
        with torch._C._ExcludeDispatchKeyGuard(key):
            return torch.ops.halfulp.attention_forward(**given)

    return cast


for _device in ("cpu", "cuda"):
    torch.library.impl("halfulp::attention_forward", "Autocast" + _device.upper())(
        _autocast_rule(_device)
    )


@attention_forward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    return _mapped(attention_forward, info, in_dims, args)


@attention_backward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    return _mapped(attention_backward, info, in_dims, args)


class _Functional(torch.autograd.Function):
    """The operator for `torch.func`, which differentiates functions of this form and no
    operators.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return attention_forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return gradients(ctx, *grads, operator=_FunctionalBackward.apply)


class _FunctionalBackward(torch.autograd.Function):
    """The backward operator for `torch.func`, which takes it with gradients on; once
    differentiable.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise NotImplementedError(ONCE)


# The compiler counts the parameters of `forward` to tell whether the first of them is a context.
for _function, _operator in (
    (_Functional, attention_forward),
    (_FunctionalBackward, attention_backward),
):
    setattr(_function.forward, "__signature__", inspect.signature(_operator._init_fn))  # noqa: B010


def attend(
    call: Call, recipe: str, backend: str | None, *, mask_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """`attention_forward` of a call, under `torch.func` too; returns (out, lse)."""
    arguments = (*call.flat(), *How(recipe, backend, mask_gradient))
    if torch._C._are_functorch_transforms_active():
        passed = Passed(*_Functional.apply(*arguments))  # type: ignore[no-untyped-call]
    else:
        # The operator would drop a tangent without a word.
        if forward_ad._current_level >= 0 and any(map(_has_tangent, arguments)):
            raise NotImplementedError(_NO_FORWARD_MODE)
        passed = Passed(*attention_forward(*arguments))
    return passed.out, passed.lse


def _has_tangent(argument: Any) -> bool:
    return isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None  # type: ignore[no-untyped-call]


def _mapped(
    operator: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    size: int = info.batch_size
    given = dict(zip(_names(operator), args, strict=True))
    dims = dict(zip(given, in_dims, strict=True))
    mask, learned = given["attn_mask"], given["mask_gradient"]
    if any(given[name] is not None for name in ("sinks", "seed")) or (learned and mask is not None):
        return _one_by_one(operator, size, in_dims, args)
    batch: int = given["query"].shape[1 if dims["query"] == 0 else 0]
    for name, x in given.items():
        if isinstance(x, Tensor) and name not in _WHOLE:
            given[name] = _join(x, dims[name], size)
    if mask is not None:
        given["attn_mask"] = _join_mask(mask, dims["attn_mask"], size, batch)
    results = operator(**given)
    # an empty vector stands for what there is none of, and has no batch to split
    split = tuple(x.view(size, batch, *x.shape[1:]) if x.ndim > 1 else x for x in results)
    return split, tuple(0 if x.ndim > 1 else None for x in results)


def _join(x: Tensor, dim: int | None, size: int) -> Tensor:
    """`[B, …]` with a mapped dimension anywhere, or none, as `[size · B, …]`."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _join_mask(mask: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """The mask of every mapped call, as one that broadcasts to `[size · B, H, N, N_k]`."""
    if dim is None:
        if mask.ndim < 4 or mask.shape[0] == 1:
            return mask
        mask, dim = mask.unsqueeze(0).expand(size, *mask.shape), 0
    mask = mask.movedim(dim, 0)
    mask = mask.reshape(size, *(1,) * (5 - mask.ndim), *mask.shape[1:])
    return mask.expand(size, batch, *mask.shape[2:]).reshape(size * batch, *mask.shape[2:])


def _one_by_one(
    operator: Callable[..., Any], size: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    calls = [
        operator(
            *(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True))
        )
        for i in range(size)
    ]
    results = tuple(torch.stack(column) for column in zip(*calls, strict=True))
    return results, (0,) * len(results)
