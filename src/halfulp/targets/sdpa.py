"""PyTorch's attention: `scaled_dot_product_attention` with each of its backends, and the same in
plain operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp.targets.target import BOTH, NO_CUDA, Target, UnsupportedError

TAKES = BOTH | {"dropout_p"}


def sdpa_targets() -> tuple[Target, ...]:
    """PyTorch's own choice, its backends one by one, and attention written out."""
    chosen = Target(
        "sdpa",
        _sdpa(None),
        TAKES,
        "torch.nn.functional.scaled_dot_product_attention, PyTorch's own choice of backend",
        layer=functional.scaled_dot_product_attention,
    )
    in_fp32 = Target(
        "sdpa:fp32",
        _in_fp32,
        TAKES,
        "scaled_dot_product_attention on operands cast to float32, its result cast back",
        layer=_in_fp32,
    )
    backends = (
        Target(f"sdpa:{name}", _sdpa(backend), TAKES, text, missing)
        for name, backend, text, missing in _sdpa_backends()
    )
    eager = Target(
        "eager",
        _eager,
        BOTH,
        "softmax(q @ k.mT * scale) @ v in the input's dtype, the softmax in fp32",
        unseen="it is written out in matrix products, which are no call of a function",
    )
    return (chosen, *backends, in_fp32, eager)


def _sdpa_backends() -> list[tuple[str, SDPBackend, str, str | None]]:
    cuda = torch.cuda.is_available()
    has_cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    cudnn = None if cuda and has_cudnn else f"{NO_CUDA} with cuDNN"
    prefix = "scaled_dot_product_attention, "
    return [
        ("math", SDPBackend.MATH, prefix + "the math backend: every step a torch operation", None),
        (
            "flash",
            SDPBackend.FLASH_ATTENTION,
            prefix + "the flash backend (on a CPU, PyTorch's own)",
            None,
        ),
        (
            "efficient",
            SDPBackend.EFFICIENT_ATTENTION,
            prefix + "the memory-efficient backend",
            None if cuda else NO_CUDA,
        ),
        ("cudnn", SDPBackend.CUDNN_ATTENTION, prefix + "the cuDNN backend", cudnn),
    ]


def _sdpa(backend: SDPBackend | None) -> Callable[..., Any]:
    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if backend is None:
            return functional.scaled_dot_product_attention(query, key, value, **options)
        # one backend enabled: PyTorch raises where it does not fit, and never takes another
        with sdpa_kernel(backend):
            try:
                return functional.scaled_dot_product_attention(query, key, value, **options)
            except RuntimeError as error:
                if "No available kernel" in str(error) or "No viable backend" in str(error):
                    raise UnsupportedError(
                        f"backend {backend.name} does not take these arguments on"
                        f" {query.device.type}"
                    ) from None
                raise

    return call


def _in_fp32(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.float()
    with torch.autocast(query.device.type, enabled=False):
        out = functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), **options
        )
    return out.to(query.dtype)


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -math.inf)
            if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )
    # in fp32 as a GPU's autocast has it; a CPU's leaves the softmax in bf16 (docs/log.md)
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value
