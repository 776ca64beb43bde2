"""`with halfulp.patch():` any code that calls PyTorch's attention, or FlashAttention's, runs the
repaired one.

A function is replaced wherever a loaded module holds it, `torch.nn.functional` first, by one that
asks at every call whether a block is open in the caller's context. So a thread or an asyncio task
that did not enter sees the stock kernel, while the threads in which PyTorch runs a backward pass
(which recompute checkpoints) follow whoever entered last.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, ModuleType
from typing import Any

import torch

from halfulp.attention import flex_attention as flex
from halfulp.attention import open_blocks as blocks
from halfulp.attention import stand_ins
from halfulp.attention.open_blocks import Patched

_FLASH = (
    *("flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func"),
    *("flash_attn_kvpacked_func", "flash_attn_varlen_qkvpacked_func"),
    "flash_attn_varlen_kvpacked_func",
)
_FUNCTIONS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (
        "torch.nn.functional",
        "multi_head_attention_forward",
        stand_ins.multi_head_attention_forward,
    ),
    ("torch.nn.attention.varlen", "varlen_attn", stand_ins.varlen_attn),
    ("torch.nn.attention.flex_attention", "flex_attention", flex.flex_attention),
    *(
        (module, name, stand_ins.flash)
        for module in ("flash_attn", "flash_attn_interface", "flash_attn.cute")
        for name in _FLASH
    ),
)
OWN = (__name__, blocks.__name__, flex.__name__, stand_ins.__name__)
"""Modules whose own references stay what they are."""

_lock = threading.Lock()
_holders = 0  # who needs the stock functions replaced: patches, and taps on models
_undo: list[Callable[[], None]] = []
_fused: list[bool] = []  # whether nn.MultiheadAttention's C++ path was on before the first entered


@contextmanager
def patch(
    *, recipe: str = "halfulp", backend: str | None = None, strict: bool = False
) -> Iterator[Patched]:
    """Run `halfulp.attention` where code in this block calls `F.scaled_dot_product_attention`, or
    flash_attn.

    Reached, however they were imported into a module: `F.scaled_dot_product_attention`;
    `nn.MultiheadAttention` and `nn.Transformer` layers, with weights too (their fused C++ path is
    switched off meanwhile); `varlen_attn` and `flex_attention` of `torch.nn.attention`; the
    functions of flash_attn 2, 3 (`flash_attn_interface`) and 4 (`flash_attn.cute`), packed or not;
    so transformers' and diffusers' models. Jagged tensors run as packed sequences, DTensors that
    are split over the batch or the heads part by part, and FlexAttention with any mask and with
    modifications that add a bias or cap scores. What halfulp cannot take (a paged cache, other
    nested tensors and DTensors, symbolic tracing, a block in which only the math kernel is allowed)
    runs as stock, with one warning that names it.

    Not reached: PyTorch's `scaled_dot_product_attention` kept outside modules' globals (a default
    argument, a partial, an attribute of an object), C++ code and `torch.ops.aten` calls, attention
    written out in matrix products, exported programs, and threads started in it.
    `strict=True` finds most of these. Code of `torch.compile` is traced again inside and outside of
    blocks; threads that share it share its attention too. Blocks nest; the innermost that is open
    counts, whatever the order or the thread in which they are closed. A checkpoint is recomputed
    with what its forward pass used, also outside of the block. The stock functions are back when
    the last block is left, by an exception too.

    Args:
        recipe: as `attention`.
        backend: as `attention`.
        strict: raise where attention runs past halfulp: a stock function that cannot be taken over,
            PyTorch's attention operators, or a softmax over square matrices. Slow.

    Yields:
        what was caught: `calls` by call site, function and backend; printed, a table.

    Raises:
        ValueError: recipe or backend does not exist; or, strict, attention ran past the block.

    Warns:
        RuntimeWarning: no attention was called in the block.
    """
    blocks.check(recipe, backend)
    block = Patched(recipe, backend, strict)
    hold()
    if blocks.enter(block):
        _fused.append(torch.backends.mha.get_fastpath_enabled())
        # the fused path calls no Python function that could be stood in for
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _strictly(strict):
            yield block
    finally:
        if blocks.leave(block):
            torch.backends.mha.set_fastpath_enabled(_fused.pop())
        release()
    if block.caught_nothing():
        warnings.warn(
            "halfulp.patch() caught no attention call: accepted are the functions that its"
            " docstring names; strict=True shows what else ran",
            RuntimeWarning,
            stacklevel=3,
        )


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


def _strictly(strict: bool) -> AbstractContextManager[Any]:
    if not strict:
        return nullcontext()
    from halfulp.attention.strict import Strict

    mode: AbstractContextManager[Any] = Strict()  # type: ignore[no-untyped-call]
    return mode


_SDPA = stand_ins.stand_in(stand_ins.stock_sdpa, stand_ins.scaled_dot_product_attention)


def _install() -> None:
    """Replace the stock functions in every loaded module; called with the lock held."""
    # by identity: what modules hold may compare in ways of its own, or not be hashable
    replacements: dict[int, Any] = {id(stand_ins.STOCK_SDPA): _SDPA}
    kept = [stand_ins.STOCK_SDPA]  # so that no other object gets its number
    redirected = set()
    for module_name, name, ours in _FUNCTIONS:
        stock = getattr(sys.modules.get(module_name), name, None)
        if stock is None or stock in redirected:
            continue
        if ours is not stand_ins.multi_head_attention_forward and _may_redirect(stock):
            redirected.add(stock)
            _undo.append(_redirect(stock, ours))
        else:
            kept.append(stock)
            replacements[id(stock)] = stand_ins.stand_in(stock, ours)
    for name, recomputing in _checkpoints().items():
        stock = getattr(sys.modules["torch.utils.checkpoint"], name)
        kept.append(stock)
        replacements[id(stock)] = recomputing
    modules = list(sys.modules.values())
    _undo.extend(
        _restore(*place) for place in exchange(replacements, modules, (*OWN, "torch._C._nn"))
    )


def exchange(
    by_id: Mapping[int, Any], modules: Sequence[ModuleType], but: Collection[str]
) -> Iterator[tuple[ModuleType, str, Any]]:
    """Exchange what modules hold; yield where, and what was there."""
    for module in modules:
        if not isinstance(module, ModuleType) or module.__name__ in but:
            continue
        # most modules hold none
        if not by_id.keys().isdisjoint(map(id, list(vars(module).values()))):
            for name, held in list(vars(module).items()):
                if id(held) in by_id:
                    setattr(module, name, by_id[id(held)])
                    yield module, name, held


def _may_redirect(stock: Any) -> bool:
    return isinstance(stock, FunctionType) and not stock.__code__.co_freevars


def _redirected(*args: Any, **kwargs: Any) -> Any:
    """Whose code a function has while it is stood in for."""
    return _either(*args, **kwargs)  # type: ignore[name-defined] # noqa: F821 # in that function's globals


def _redirect(stock: FunctionType, ours: Callable[..., Any]) -> Callable[[], None]:
    """Have a function of Python's run a stand-in by its code, so that whoever holds it is reached,
    a partial, a class, `torch.compile`; return what undoes it.
    """
    code, space = stock.__code__, stock.__globals__
    original = FunctionType(code, space, stock.__name__, stock.__defaults__)
    original.__kwdefaults__ = stock.__kwdefaults__
    original.__annotations__ = stock.__annotations__
    either = stand_ins.stand_in(original, ours)
    if "torch._dynamo" in sys.modules:  # importing it takes longer than most blocks
        either = torch.compiler.disable(either)  # type: ignore[no-untyped-call]
    name = f"_halfulp_{stock.__name__}_{id(stock)}"
    space[name] = either
    # the code that runs takes anything: without this whoever asks would see (*args, **kwargs)
    stock.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    stock.__code__ = _redirected.__code__.replace(co_names=(name,), co_name=stock.__name__)

    def undo() -> None:
        stock.__code__ = code
        del stock.__signature__  # type: ignore[attr-defined]
        del space[name]

    return undo


def _checkpoints() -> dict[str, Any]:
    """What stands in for the functions of torch.utils.checkpoint that run one and keep it to be run
    again, under their names.
    """
    from torch.utils import checkpoint

    def without_reentry(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return of_generators(_with_choice(function), *args, **kwargs)

    class Reentrant:
        """In the place of CheckpointFunction."""

        @staticmethod
        def apply(function: Callable[..., Any], *args: Any) -> Any:
            return of_functions(_with_choice(function), *args)

    # private names: a PyTorch that has others keeps its own functions, and a checkpoint that is
    # recomputed outside of the block then runs as stock
    names = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
    if not all(hasattr(checkpoint, name) for name in names):
        return {}
    of_generators = getattr(checkpoint, names[0])
    of_functions: Callable[..., Any] = getattr(checkpoint, names[1]).apply
    return dict(zip(names, (without_reentry, Reentrant), strict=True))


def _with_choice(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the block that is open now whenever it runs."""
    block = blocks.current()
    if block is None:
        return function

    def again(*args: Any, **kwargs: Any) -> Any:
        hold()  # outside of all blocks the stock functions are back
        try:
            with blocks.pinned(block):
                return function(*args, **kwargs)
        finally:
            release()

    return again


def _restore(module: ModuleType, name: str, held: Any) -> Callable[[], None]:
    return lambda: setattr(module, name, held)


def _uninstall() -> None:
    while _undo:
        _undo.pop()()
