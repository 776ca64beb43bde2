"""Kernels of the rotary embedding that every machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn


def transformers_style(input: Tensor, positions: Tensor, *, base: float) -> Tensor:
    """As LlamaRotaryEmbedding and apply_rotary_pos_emb: fp32 angles, cos and sin rounded."""
    width = input.shape[-1]
    frequency = 1.0 / (base ** (torch.arange(0, width, 2).float() / width))
    angle = positions[:, None].float() * frequency
    angle = torch.cat([angle, angle], -1)[:, None]
    cos, sin = angle.cos().to(input.dtype), angle.sin().to(input.dtype)
    turned = torch.cat([-input[..., width // 2 :], input[..., : width // 2]], -1)
    return input * cos + turned * sin


def complex_numbers(input: Tensor, positions: Tensor, *, base: float, interleaved: bool) -> Tensor:
    """As Llama's reference code: a product of complex numbers in fp32."""
    width = input.shape[-1]
    frequency = 1.0 / (base ** (torch.arange(0, width, 2).float() / width))
    angle = positions[:, None].float() * frequency
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = input.float()
    if not interleaved:
        pairs = torch.stack([pairs[..., : width // 2], pairs[..., width // 2 :]], -1).flatten(-2)
    pairs = pairs.reshape(*input.shape[:-1], width // 2, 2)
    found = torch.view_as_real(torch.view_as_complex(pairs) * turn)
    if not interleaved:
        found = found.mT
    return found.flatten(-2).to(input.dtype)


TARGETS = (
    BuiltIn("transformers", "apply_rotary_pos_emb, written out", transformers_style),
    BuiltIn("complex", "a product of complex numbers in fp32", complex_numbers),
)
