"""Inputs on which the zoo's faults show, one maker each, independent of the package's own
probes.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """One attention call: tensors `[B, H, N, D]` and its options."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    is_causal: bool = False
    scale: float | None = None
    attn_mask: Tensor | None = None
    enable_gqa: bool = False

    def options(self) -> dict[str, Any]:
        """As keyword arguments."""
        options: dict[str, Any] = {"is_causal": self.is_causal, "scale": self.scale}
        if self.attn_mask is not None:
            options["attn_mask"] = self.attn_mask
        return options | ({"enable_gqa": True} if self.enable_gqa else {})


def gaussian(
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    *,
    n: int = 192,
    n_key: int | None = None,
    d: int = 64,
    heads: int = 4,
    key_heads: int | None = None,
    q: float = 1.0,
    k: float = 1.0,
    v: float = 1.0,
    do: float = 1.0,
    **options: Any,
) -> Inputs:
    """Independent normal entries with the standard deviations q, k, v, do."""
    g = torch.Generator().manual_seed(1000 + seed)
    many, keys = key_heads or heads, n_key or n
    shapes = ((heads, n, q), (many, keys, k), (many, keys, v), (heads, n, do))
    tensors = (
        torch.randn(1, h, rows, d, generator=g).mul_(std).to(dtype) for h, rows, std in shapes
    )
    return Inputs(*tensors, **options)


def causal(dtype=torch.bfloat16, seed=0):
    return gaussian(dtype, seed, is_causal=True)


def sharp(dtype=torch.bfloat16, seed=0):
    """Scores of the size that trained models have, standard deviation 9."""
    return gaussian(dtype, seed, q=3.0, k=3.0)


def ragged(dtype=torch.bfloat16, seed=0):
    """N is no multiple of the block."""
    return gaussian(dtype, seed, n=150)


def short_and_ragged(dtype=torch.bfloat16, seed=0):
    return gaussian(dtype, seed, n=37)


def odd_width(dtype=torch.bfloat16, seed=0):
    """d = 48: no power of two, and 1/√d is none."""
    return gaussian(dtype, seed, d=48, q=2.0)


def odd_scale(dtype=torch.bfloat16, seed=0):
    return gaussian(dtype, seed, q=3.0, k=3.0, scale=0.173)


def grouped(dtype=torch.bfloat16, seed=0):
    """Four query heads on two key heads."""
    return gaussian(dtype, seed, key_heads=2, enable_gqa=True)


def level(dtype, seed, height: float, **options):
    """Scores around `height`: one feature that all queries, and all keys, share."""
    x = gaussian(dtype, seed, **options)
    x.query[..., 0], x.key[..., 0] = 64.0, height * 8 / 64
    return x


def deep_negative(dtype=torch.bfloat16, seed=0):
    """Scores around −600, so that fp16 and bf16 hold them to 0.5 and 4."""
    return level(dtype, seed, -600.0)


def far_below_zero(dtype=torch.bfloat16, seed=0):
    """Scores around −12,000, below a mask value of −10,000."""
    return level(dtype, seed, -12288.0, is_causal=True)


def all_negative(dtype=torch.bfloat16, seed=0):
    """Scores around −120: exp underflows unless shifted by their own maximum, and exp(−lse)
    overflows.
    """
    return level(dtype, seed, -120.0)


def mixed_levels(dtype=torch.bfloat16, seed=0):
    """Rows around +150 and rows around −150 in one tile."""
    x = gaussian(dtype, seed)
    x.query[..., 0], x.key[..., 0] = 64.0, 150 * 8 / 64
    x.query[..., ::2, 0] = -64.0
    return x


def rising(dtype=torch.bfloat16, seed=0):
    """Scores climb by 40 from key tile to key tile, so that the maximum changes at every tile."""
    x = gaussian(dtype, seed)
    x.query[..., 0] = 8.0
    x.key[..., 0] = (torch.arange(x.key.shape[2]) // 64 * 40.0).to(dtype)
    return x


def creeping(dtype=torch.bfloat16, seed=0):
    """The maximum grows by a little (1/64) with every key tile: one token per tile stands out."""
    x = gaussian(dtype, seed, q=0.05, n_key=512, n=64)
    x.query[..., 0], x.key[..., 0] = 8.0, 0.0
    for tile in range(8):
        x.key[:, :, tile * 64, 0] = 4.0 + tile / 64
    x.value[:, :, :, :] = x.value.abs()
    return x


def sink(dtype=torch.bfloat16, seed=0):
    """One key takes about half of the mass; each other weight lies 9 below it, their values share a
    sign.
    """
    x = gaussian(dtype, seed, q=0.1, n=256, n_key=4096, heads=2)
    x.query[..., 0], x.key[..., 0] = 8.0, 0.0
    x.key[:, :, 0, 0] = 9.0
    x.value[:, :, 1:] = x.value[:, :, 1:].abs()
    return x


def lone_key(dtype=torch.bfloat16, seed=0):
    """One key takes nearly all of every row's mass, at scores that differ from row to row."""
    x = gaussian(dtype, seed)
    x.query[..., 0] = 8.0 + torch.rand(
        x.query.shape[:3], generator=torch.Generator().manual_seed(seed)
    ).to(dtype)
    x.key[:, :, 3, 0] = 12.0
    return x


def ties_across_tiles(dtype=torch.bfloat16, seed=0):
    """Key 64 (next tile) repeats key 3, which every row prefers."""
    x = gaussian(dtype, seed)
    x.query[..., 0] = 8.0
    x.key[:, :, 3, 0] = 8.0
    x.key[:, :, 64] = x.key[:, :, 3]
    return x


def ties_below_zero(dtype=torch.bfloat16, seed=0):
    """The row maximum, about −200, appears twice."""
    x = level(dtype, seed, -240.0)
    x.key[:, :, 3, 0] = -200.0 * 8 / 64
    x.key[:, :, 5] = x.key[:, :, 3]
    return x


def constant_values(dtype=torch.bfloat16, seed=0):
    """V = 1: O = 1 whatever the weights."""
    x = gaussian(dtype, seed)
    return replace(x, value=torch.ones_like(x.value))


def value_offset(dtype=torch.bfloat16, seed=0):
    """All values near 4: dP and δ are large and cancel."""
    x = gaussian(dtype, seed)
    return replace(x, value=(x.value.float() * 0.5 + 4).to(dtype))


def constant_feature(dtype=torch.bfloat16, seed=0):
    """One feature of V is 64 everywhere: dP and δ share 64 dO, O holds it exactly, and their
    difference is small.
    """
    x = gaussian(dtype, seed, q=0.5)
    x.value[..., 0] = 64.0
    return x


def positive_values(dtype=torch.bfloat16, seed=0):
    """Values of one sign: rounding that leans adds up."""
    x = gaussian(dtype, seed)
    return replace(x, value=(x.value.abs().float() + 0.5).to(dtype))


def common_keys(dtype=torch.bfloat16, seed=0):
    """Keys share a large component, orthogonal to the queries: δ's error is multiplied by it in
    dQ.
    """
    x = gaussian(dtype, seed)
    x.query[..., 0], x.key[..., 0] = 0.0, 32.0
    return x


def tiny_values(dtype=torch.bfloat16, seed=0):
    """Values of 1e-9: normal in bf16, nothing in fp16."""
    return gaussian(dtype, seed, v=1e-9)


def tiny_gradients(dtype=torch.bfloat16, seed=0):
    """grad_out of 1e-7, as without loss scaling."""
    return gaussian(dtype, seed, do=1e-7)


def long(dtype=torch.bfloat16, seed=0):
    """Many terms in every sum over queries and keys."""
    return gaussian(dtype, seed, n=1536, heads=1)


def long_positive(dtype=torch.bfloat16, seed=0):
    """Many terms of one sign in every row sum and in dV."""
    x = gaussian(dtype, seed, n=1024, heads=1)
    return replace(x, value=x.value.abs(), grad_out=x.grad_out.abs())


def per_head_bias(dtype=torch.bfloat16, seed=0):
    """An additive mask that differs by head."""
    x = gaussian(dtype, seed)
    n, slopes = x.query.shape[2], torch.tensor([0.5, 0.25, 0.0625, 0.0])
    distance = (torch.arange(n)[:, None] - torch.arange(n)[None, :]).abs()
    return replace(x, attn_mask=(-slopes[:, None, None] * distance).to(dtype)[None])


def masked_rows(dtype=torch.bfloat16, seed=0):
    """Three rows may attend to nothing."""
    x = gaussian(dtype, seed)
    mask = torch.rand(1, 1, 192, 192, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., 10:13, :] = False
    return replace(x, attn_mask=mask)
