"""A GPT small enough to read: nanoGPT's architecture, with attention left to whoever is asked to
compute it.

Pre-norm blocks, no bias anywhere, exact GELU, tied embeddings, learned positions (Karpathy, nanoGPT
`model.py`; Radford et al. 2019). Rotary positions, normalized queries and keys, and shared key
heads are options, since each of them changes how large scores grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from halfulp.training.attention import Attend, AttentionFunction, AttentionPlan
from halfulp.training.config import Language

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6  # of the RMS norm of queries and keys


class Gpt(nn.Module):
    """Tokens `[B, N]` to logits `[B, N, vocabulary]`; the weights come from `seed` alone, whatever
    attention runs.
    """

    def __init__(
        self,
        config: Language,
        plan: AttentionPlan,
        *,
        seed: int = 0,
        own: Mapping[str, AttentionFunction] | None = None,
    ) -> None:
        super().__init__()
        plan.check(config.layers, config.heads)
        self.context, width = config.context, config.width
        self.tokens = _embedding(config.vocabulary, width)
        learned = config.positions == "learned"
        self.positions = _embedding(config.context, width) if learned else None
        attends = (Attend(layer, config.heads, plan, own) for layer in range(config.layers))
        self.blocks = nn.ModuleList(Block(config, attend) for attend in attends)
        self.norm = nn.LayerNorm(width, bias=False)
        _initialize(self, config.layers, torch.Generator().manual_seed(seed))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, N, vocabulary]` of tokens int64 `[B, N]`, N at most the context."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(
                f"tokens of length {length}: accepted are at most context={self.context}"
            )
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Language, attend: Attend) -> None:
        super().__init__()
        width = config.width
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention = CausalAttention(config, attend)
        self.up, self.down = _linear(width, 4 * width), _linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, N, width]` to the same shape."""
        x = x + self.attention(self.norm1(x))
        update: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + update


class CausalAttention(nn.Module):
    """Queries, keys and values of X, attention by `attend`, and the projection back."""

    def __init__(self, config: Language, attend: Attend) -> None:
        super().__init__()
        self.heads, self.key_heads = config.heads, config.key_heads or config.heads
        self.head_dim = config.width // config.heads
        self.attend = attend
        self.qkv = _linear(config.width, (self.heads + 2 * self.key_heads) * self.head_dim)
        self.project = _linear(config.width, config.width)
        normed = config.query_key_norm
        self.query_norm = nn.RMSNorm(self.head_dim, eps=NORM_EPSILON) if normed else None
        self.key_norm = nn.RMSNorm(self.head_dim, eps=NORM_EPSILON) if normed else None
        self.rotary = Rotary(self.head_dim, config.context) if config.positions == "rope" else None

    def head_weights(self) -> tuple[Tensor, Tensor]:
        """W_Q `[H, D, width]` and W_K `[H_k, D, width]`, as X meets them: before any norm or
        rotation.
        """
        query, key, _ = torch.split(self.qkv.weight, self._sizes())
        shape = (-1, self.head_dim, self.qkv.in_features)
        return query.reshape(shape), key.reshape(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Map X `[B, N, width]` to the same shape."""
        parts = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).split(self._sizes(), -1)
        )
        query, key, value = parts
        # normed before they are rotated: a gain by coordinate would not commute with a rotation
        query, key = _normed(query, self.query_norm), _normed(key, self.key_norm)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        out = self.attend(query, key, value, is_causal=True)
        projected: Tensor = self.project(out.transpose(1, 2).flatten(2))
        return projected

    def _sizes(self) -> list[int]:
        return [heads * self.head_dim for heads in (self.heads, self.key_heads, self.key_heads)]


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864), element i paired with i + D/2, as in
    Llama.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, context: int) -> None:
        super().__init__()
        rates = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        # in fp64, since a large angle has few digits after the point in fp32
        angles = torch.arange(context, dtype=torch.float64)[:, None] * rates
        # not persistent: they follow from the configuration, so no checkpoint has them
        self.register_buffer("cos", angles.cos().float(), persistent=False)  # [context, D/2]
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate `[B, H, N, D]` in fp32 at least; the result has x's dtype."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        one, two = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    """The RMS norm with a learned gain per coordinate (Qwen3's and OLMo 2's QK-norm), computed in
    fp32 at least.
    """
    if norm is None:
        return x
    wide: Tensor = norm(x.to(torch.promote_types(x.dtype, torch.float32)))
    return wide.to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A matrix without bias whose values are set by `_initialize`; torch's own generator is not
    touched.
    """
    linear = skip_init(nn.Linear, inputs, outputs, bias=False)  # type: ignore[no-untyped-call]
    assert isinstance(linear, nn.Linear)
    return linear


def _embedding(count: int, width: int) -> nn.Embedding:
    embedding = skip_init(nn.Embedding, count, width)  # type: ignore[no-untyped-call]
    assert isinstance(embedding, nn.Embedding)
    return embedding


def _initialize(model: nn.Module, layers: int, generator: torch.Generator) -> None:
    """nanoGPT's: N(0, 0.02), what is added to the residual stream 0.02/√(2·layers); gains
    stay 1.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                # two branches a layer add to the stream: their variances together are one of 0.02
                residual = name.endswith(("project.weight", "down.weight"))
                parameter.normal_(
                    0.0, 0.02 / math.sqrt(2 * layers) if residual else 0.02, generator=generator
                )
