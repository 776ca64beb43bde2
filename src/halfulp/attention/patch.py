"""`with halfulp.patch():` any code that calls PyTorch's attention, or FlashAttention's, runs the
repaired one.

The function is replaced wherever a loaded module holds it, `torch.nn.functional` first, by one that
asks at every call whether the patch is on in the caller's context. So a thread or an asyncio task
that did not enter sees the stock kernel, while the threads in which PyTorch runs a backward pass
(which recompute checkpoints) follow whoever entered last.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from halfulp import ops
from halfulp.attention.attend import attention
from halfulp.attention.varlen import attention_varlen
from halfulp.calls import is_causal_bias
from halfulp.recipes import kernel_recipe


@dataclass(frozen=True, eq=False)
class _Choice:
    """What one `with` block asks for; two blocks are never equal."""

    recipe: str
    backend: str | None


_chosen: ContextVar[_Choice | None] = ContextVar("halfulp_patch", default=None)
_lock = threading.Lock()
_entered: list[_Choice] = []  # of all contexts, in the order they entered
_newest: tuple[str, str | None] | None = None  # of `_entered`, as compiled code can watch it
_holders = 0  # who needs the stock functions replaced: patches, and taps on models
_undo: list[Callable[[], None]] = []
_fused: list[bool] = []  # whether nn.MultiheadAttention's C++ path was on before the first entered


@contextmanager
def patch(*, recipe: str = "halfulp", backend: str | None = None) -> Iterator[None]:
    """Run `halfulp.attention` where code in this block calls `F.scaled_dot_product_attention`, or
    flash_attn.

    Reached: `torch.nn.functional.scaled_dot_product_attention` however it was imported into a
    module, `nn.MultiheadAttention` and `nn.Transformer` layers (their fused C++ path is switched
    off meanwhile), transformers' and diffusers' "sdpa" models, and flash_attn's `flash_attn_func`
    and `flash_attn_varlen_func` where it is installed. Not reached: functions kept outside modules'
    globals (a default argument, a partial, an attribute of an object), C++ code and
    `torch.ops.aten` calls, FlexAttention, exported programs, and threads started in it. Code of
    `torch.compile` is traced again inside and outside of blocks; threads that share it share its
    attention too. What `torch.nn.attention.sdpa_kernel` asks for is not looked at. Blocks nest; the
    innermost counts. The stock function is back when the last block is left, by an exception too.

    Args:
        recipe: as `attention`.
        backend: as `attention`.

    Raises:
        ValueError: recipe or backend does not exist.
    """
    kernel_recipe(recipe)
    if backend is not None and backend not in ops.BACKENDS:
        raise ValueError(f"backend={backend!r}: accepted are None, {', '.join(ops.BACKENDS)}")
    choice = _Choice(recipe, backend)
    hold()
    with _lock:
        if not _entered:
            _fused.append(torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
        _entered.append(choice)
        _renew()
    token = _chosen.set(choice)
    try:
        yield
    finally:
        with _lock:
            _entered.remove(choice)
            _renew()
            if not _entered:
                torch.backends.mha.set_fastpath_enabled(_fused.pop())
        release()
        # a generator may be closed in another context, whose choice this is not
        with suppress(ValueError):
            _chosen.reset(token)


def hold() -> None:
    """Have the stock functions replaced until `release`, by ones that do the same wherever no patch
    is on.
    """
    global _holders
    with _lock:
        if not _holders:
            _install()
        _holders += 1


def release() -> None:
    """Undo one `hold`."""
    global _holders
    with _lock:
        _holders -= 1
        if not _holders:
            _uninstall()


def _renew() -> None:
    global _newest
    _newest = (_entered[-1].recipe, _entered[-1].backend) if _entered else None


def _choice(newest: tuple[str, str | None] | None) -> tuple[str, str | None] | None:  # noqa: ARG001
    """Recipe and backend of the calling context; in a thread of the backward pass, of who entered
    last anywhere.

    `newest` is `_newest`: compiled code is traced again when it is another.
    """
    choice = _chosen.get()
    if choice is None and _entered and torch._C._current_graph_task_id() != -1:
        choice = _entered[-1]
    return None if choice is None else (choice.recipe, choice.backend)


# What torch.compiler.assume_constant_result does, which would import the compiler: a compiled
# function keeps the choice that it was traced under for as long as what it watches is the same, the
# patched function and `_newest`.
setattr(_choice, "_dynamo_marked_constant", True)  # noqa: B010  # functions have no such attribute, says mypy


_STOCK = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function, which runs `halfulp.attention` where the patch is on."""
    choice = _choice(_newest)
    if choice is not None:
        return attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
            recipe=choice[0], backend=choice[1],
        )  # fmt: skip
    # it knows PyTorch's function by identity
    if attn_mask is not None and is_causal_bias(attn_mask):
        from torch.nn.attention.bias import CausalBias

        assert isinstance(attn_mask, CausalBias)
        return CausalBias._dispatch(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    return _STOCK(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _where_on(stock: Callable[..., Any], repaired: Callable[..., Any]) -> Callable[..., Any]:
    """FlashAttention's function, whichever arguments its version takes, and the repaired one where
    the patch is on.
    """

    @functools.wraps(stock)
    def either(*args: Any, **kwargs: Any) -> Any:
        choice = _choice(_newest)
        return stock(*args, **kwargs) if choice is None else repaired(choice, *args, **kwargs)

    return either


def _flash_attn_func(
    choice: tuple[str, str | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """FlashAttention's function of `[B, N, H, D]`, causal at the bottom right; always
    deterministic.
    """
    del deterministic
    _refuse(alibi_slopes=alibi_slopes)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = attention(
        query, key, value, None, dropout_p, causal, softmax_scale, True, return_lse=True,
        window=_window(window_size), softcap=softcap, causal_offset=key.shape[2] - query.shape[2],
        recipe=choice[0], backend=choice[1],
    )  # fmt: skip
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def _flash_attn_varlen_func(
    choice: tuple[str, str | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """FlashAttention's function of packed sequences `[T, H, D]`; always deterministic."""
    del max_seqlen_q, max_seqlen_k, deterministic
    _refuse(alibi_slopes=alibi_slopes, block_table=block_table)
    out, lse = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=softmax_scale,
        window=_window(window_size),
        softcap=softcap,
        recipe=choice[0],
        backend=choice[1],
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out


def _window(window_size: tuple[int, int]) -> tuple[int, int] | None:
    left, right = window_size
    return None if left < 0 and right < 0 else (max(left, -1), max(right, -1))


def _refuse(**arguments: Tensor | None) -> None:
    for name, given in arguments.items():
        if given is not None:
            raise ValueError(f"{name} is given: accepted is None inside halfulp.patch()")


def _install() -> None:
    """Replace the stock functions in every loaded module; called with the lock held."""
    replacements: dict[int, Callable[..., Any]] = {id(_STOCK): scaled_dot_product_attention}
    flash_attn = sys.modules.get("flash_attn")
    for name, repaired in (
        ("flash_attn_func", _flash_attn_func),
        ("flash_attn_varlen_func", _flash_attn_varlen_func),
    ):
        stock = getattr(flash_attn, name, None)
        if stock is not None:
            replacements[id(stock)] = _where_on(stock, repaired)
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__ in (__name__, "torch._C._nn"):
            continue
        # most modules hold none
        if not replacements.keys().isdisjoint(map(id, list(vars(module).values()))):
            for name, held in list(vars(module).items()):
                if id(held) in replacements:
                    setattr(module, name, replacements[id(held)])
                    _undo.append(_restore(module, name, held))


def _restore(module: ModuleType, name: str, held: Any) -> Callable[[], None]:
    return lambda: setattr(module, name, held)


def _uninstall() -> None:
    while _undo:
        _undo.pop()()
