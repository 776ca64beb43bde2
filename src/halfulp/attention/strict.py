"""Attention that ran past a block of `halfulp.patch(strict=True)`, seen by its operators."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from halfulp.attention import open_blocks as blocks

_FUSED = (
    *("scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward"),
    *("_cudnn_attention_forward", "_native_multi_head_attention", "_safe_softmax"),
    "_transformer_encoder_layer_fwd",
)
_SQUARE = 8  # rows and columns from which a softmax looks like attention


class Strict(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at an attention operator of PyTorch's, or a softmax over square matrices, in a block
    that is open.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        name = func.__name__
        block = blocks.current()
        if block is not None and block.strict and not blocks.excused.on and "backward" not in name:
            x: Any = args[0] if args else None
            written_out = (
                name.startswith("_softmax")
                and x.ndim >= 3
                and x.shape[-1] == x.shape[-2] >= _SQUARE
                and args[1] in (-1, x.ndim - 1)
            )
            if written_out or any(part in name for part in _FUSED):
                what = f"a softmax over {tuple(x.shape)}" if written_out else f"aten.{name}"
                raise ValueError(
                    f"strict=True and attention ran past halfulp.patch(): {what}; accepted are the"
                    " functions that its docstring names"
                )
        return func(*args, **(kwargs or {}))
