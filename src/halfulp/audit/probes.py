"""Probe inputs: each family of inputs is built to expose one failure that tolerance tests on
Gaussian inputs do not see.

Every (batch, head) pair is drawn independently, so that a figure taken per head has a standard
error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """The size of a case."""

    batch: int = 4
    heads: int = 4
    n_query: int = 256
    n_key: int = 256
    head_dim: int = 64
    kv_heads: int | None = None  # None: as many as heads
    value_dim: int | None = None  # None: head_dim

    @property
    def key_heads(self) -> int:
        """Heads of key and value."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def __str__(self) -> str:
        kv = "" if self.kv_heads is None else f"/{self.kv_heads}"
        n = f"{self.n_query}" if self.n_query == self.n_key else f"{self.n_query}×{self.n_key}"
        return f"({self.batch}, {self.heads}{kv}, {n}, {self.head_dim})"


Draw = Callable[[Shape, torch.Generator], dict[str, Tensor]]


def _nothing_else(_: Shape) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Probe:
    """A named family of inputs."""

    name: str
    exposes: str  # the failure it is built for
    source: str  # the paper or public bug it comes from
    draw: Draw
    is_causal: bool = False
    scale: float | None = None  # None: 1/√D
    # feature 0 of every key holds this constant: dQ's feature 0 then reads Σ_j dS_ij, δ's error,
    # row by row
    shared_feature: float = 0.0
    change_shape: Callable[[Shape], Shape] | None = None
    judged_by: str | None = None  # the one figure that counts; None: all
    # times the usual slack of that figure, where the floor is free of error by cancellation
    slack: float = 1.0
    # what else the call asks for at that size: window, causal_offset, softcap, dropout_p; sinks and
    # masks are drawn
    options: Callable[[Shape], dict[str, Any]] = _nothing_else


def _gaussian(
    shape: Shape, g: torch.Generator, *, q: float = 1.0, k: float = 1.0, v: float = 1.0
) -> dict[str, Tensor]:
    d_v = shape.head_dim if shape.value_dim is None else shape.value_dim
    b, h, hk = shape.batch, shape.heads, shape.key_heads
    return {
        "query": torch.randn(b, h, shape.n_query, shape.head_dim, generator=g) * q,
        "key": torch.randn(b, hk, shape.n_key, shape.head_dim, generator=g) * k,
        "value": torch.randn(b, hk, shape.n_key, d_v, generator=g) * v,
        "grad_out": torch.randn(b, h, shape.n_query, d_v, generator=g),
    }


def _scaled(q: float = 1.0, k: float = 1.0, v: float = 1.0) -> Draw:
    return lambda shape, g: _gaussian(shape, g, q=q, k=k, v=v)


def _hot_token(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """One key in the middle takes nearly all the mass of every row."""
    x = _gaussian(shape, g)
    return _aim(x, [shape.n_key // 2], 14.0)


def _aim(x: dict[str, Tensor], positions: list[int], score: float) -> dict[str, Tensor]:
    """Give the keys at `positions` (the same bits) a score of about `score` for every query,
    through feature 1.
    """
    d = x["query"].shape[-1]
    x["query"][..., 1 % d] = 4.0
    x["key"][..., 1 % d] = 0.0
    aimed = torch.zeros(d)
    aimed[1 % d] = score * math.sqrt(d) / 4.0
    for position in positions:
        x["key"][:, :, position % x["key"].shape[2]] = aimed
    return x


def _ties(count: int, score: float, *, apart: bool = False) -> Draw:
    """`count` keys with equal bits hold every row's maximum, of about `score`; all other scores lie
    below; V is negative throughout.
    """

    def draw(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
        x = _gaussian(shape, g, q=0.5)
        n = shape.n_key
        positions = (
            [i * (n // count) + 1 for i in range(count)] if apart else list(range(1, count + 1))
        )
        x["key"][..., 1 % shape.head_dim] = 0
        x = _aim(x, positions, score)
        if score <= 0:  # push every other key below the tied ones
            others = torch.ones(n, dtype=torch.bool)
            others[[p % n for p in positions]] = False
            x["key"][:, :, others, 1 % shape.head_dim] = (
                (score - 6.0) * math.sqrt(shape.head_dim) / 4.0
            )
        x["value"] = -(x["value"].abs() + 0.5)
        return x

    return draw


def _sink(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """The first token takes most of the mass, and its value is small, as in trained language
    models.
    """
    x = _aim(_gaussian(shape, g), [0], 9.0)
    x["value"][:, :, 0] *= 0.05
    return x


def _values(change: Callable[[Tensor], Tensor]) -> Draw:
    def draw(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
        x = _gaussian(shape, g)
        x["value"] = change(x["value"])
        return x

    return draw


def _constant_values(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Every token has the same value, another number in each feature; few keys carry each row, so
    that their rounding does not average out.
    """
    x = _gaussian(shape, g, q=3.0, k=2.0)
    x["value"][:] = x["value"][:, :, :1] + 2.0
    return x


def _shared_keys(base: Draw, constant: float) -> Draw:
    """Feature 0 of every key is one constant: softmax cannot see it, dQ's feature 0 must vanish."""

    def draw(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
        x = base(shape, g)
        x["key"][..., 0] = constant
        return x

    return draw


def _repeated_tokens(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Runs of eight equal tokens: keys, values and queries repeat."""
    x = _gaussian(shape, g)
    for name, n in (("query", shape.n_query), ("key", shape.n_key), ("value", shape.n_key)):
        x[name] = x[name][:, :, torch.arange(n) // 8]
    return x


def _level(level: float, spread: float = 1.0) -> Draw:
    """Every score lies around `level`, through one feature that all keys share."""

    def draw(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
        x = _gaussian(shape, g, q=spread)
        root = math.sqrt(abs(level) * math.sqrt(shape.head_dim))
        x["query"][..., 0] = root
        x["key"][..., 0] = math.copysign(root, level)
        return x

    return draw


def _rising(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Scores rise with the key's position, so that the running maximum changes in every tile."""
    x = _gaussian(shape, g)
    x["query"][..., 0] = 4.0
    x["key"][..., 0] = torch.linspace(0, 20.0, shape.n_key) * math.sqrt(shape.head_dim) / 4.0
    return x


def _two_live_keys(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Two keys, near the first and the last, carry every row; all the others weigh exactly nothing.

    A row of dS is then two numbers that cancel, and so do their roundings. What is left is where
    the backward pass disagrees with the forward pass about the weights, and half of the rows change
    their maximum in the last tile.
    """
    x = _gaussian(shape, g)
    n = shape.n_key
    x["query"][..., 1 % shape.head_dim] = 4.0
    x["key"][..., 1 % shape.head_dim] = -200.0 * math.sqrt(shape.head_dim) / 4.0
    x["key"][:, :, [min(5, n - 1), max(n - 5, 0)], 1 % shape.head_dim] = 0.0
    return x


def _free_feature(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Gaussian, with a feature that is 0 in every key, so that a constant can be added there
    without rounding.
    """
    x = _gaussian(shape, g)
    x["key"][..., 0] = 0
    return x


def _outlier_features(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Two features of query, key and value are twelve times larger, as in trained transformers."""
    x = _gaussian(shape, g, q=0.5)
    for name in ("query", "key", "value"):
        x[name][..., : min(2, x[name].shape[-1])] *= 12.0 if name == "value" else 4.0
    return x


def _masked_rows(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """A random boolean mask with a few rows that may attend to nothing."""
    x = _gaussian(shape, g)
    mask = torch.rand(shape.batch, 1, shape.n_query, shape.n_key, generator=g) > 0.3
    mask[:, :, :: max(1, shape.n_query // 3)] = False
    return x | {"attn_mask": mask}


def _additive_mask(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """A linear position bias of another slope in each head (ALiBi), added to the scores."""
    i, j = torch.arange(shape.n_query)[:, None], torch.arange(shape.n_key)[None, :]
    slopes = 2.0 ** -(1 + torch.arange(shape.heads, dtype=torch.float32))[:, None, None]
    return _gaussian(shape, g) | {"attn_mask": (-(i - j).abs() * slopes)[None]}


def _learned_sinks(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """A learned score in every row whose value is 0, of another size in each head."""
    return _gaussian(shape, g) | {"sinks": torch.randn(shape.heads, generator=g) * 2 + 2}


def _lengths(shape: Shape) -> Shape:
    n_query, n_key = (n - 45 if n > 45 else n - n // 4 for n in (shape.n_query, shape.n_key))
    return replace(shape, n_query=n_query, n_key=n_key, head_dim=max(8, shape.head_dim - 24))


def _cross(shape: Shape) -> Shape:
    return replace(shape, n_query=max(1, shape.n_query // 3), n_key=shape.n_key)


def _wider_values(shape: Shape) -> Shape:
    return replace(shape, value_dim=shape.head_dim * 3 // 2)


def _grouped(shape: Shape) -> Shape:
    return replace(shape, kv_heads=max(1, shape.heads // 2)) if shape.heads > 1 else shape


_PAPER = "Qiu & Yao, arXiv 2510.04212"
_ONE_SIGN = _values(lambda v: v.abs() + 0.25)
_OFFSET = _values(lambda v: v + 8.0)

PROBES: tuple[Probe, ...] = (
    Probe(
        "gaussian",
        "errors that any input shows",
        "Golden et al., arXiv 2405.02803, section IV",
        _gaussian,
    ),
    Probe(
        "gaussian_causal",
        "faults of causal masking",
        "Golden et al., arXiv 2405.02803",
        _gaussian,
        is_causal=True,
    ),
    Probe(
        "diffuse",
        "small weights lost from the numerator only",
        "flashinfer PR 5020 (fp8 weights without pre-scale)",
        _scaled(q=0.1),
    ),
    Probe("hot_token", "rounding of the one large weight", _PAPER + ", section 3.3.2", _hot_token),
    Probe(
        "ties_two",
        "biased rounding where two weights are 1",
        _PAPER + ", section 3.3.2",
        _ties(2, 6.0),
    ),
    Probe(
        "ties_three",
        "biased rounding where three weights are 1",
        _PAPER + ", section 3.3.2",
        _ties(3, 6.0),
    ),
    Probe(
        "ties_many",
        "underflow of the published fix at a large repeated maximum",
        _PAPER + ", Algorithm 1 (D2)",
        _ties(24, 50.0),
    ),
    Probe(
        "ties_negative",
        "underflow of the published fix at a negative repeated maximum",
        _PAPER + ", Algorithm 1 (D1)",
        _ties(2, -200.0),
    ),
    Probe(
        "ties_zero", "a repeated maximum of exactly 0", _PAPER + ", Algorithm 1 (D3)", _ties(2, 0.0)
    ),
    Probe(
        "ties_apart",
        "equal maxima in different tiles",
        _PAPER + ", Algorithm 1 (D4)",
        _ties(2, 6.0, apart=True),
    ),
    Probe(
        "sink",
        "δ's error where one token takes the mass",
        _PAPER + ", discussion of attention sinks",
        _sink,
        is_causal=True,
    ),
    Probe(
        "value_one_sign",
        "signed error of O",
        _PAPER + ", section 3.3.2",
        _shared_keys(_ONE_SIGN, 4.0),
        shared_feature=4.0,
    ),
    Probe(
        "value_offset",
        "cancellation of dP and δ",
        "jax PR 40128 (rounded before a cancelling sum)",
        _shared_keys(_OFFSET, 4.0),
        shared_feature=4.0,
    ),
    Probe(
        "value_constant",
        "weights and row sum that disagree",
        "flash-attention PR 2721",
        _constant_values,
    ),
    Probe(
        "keys_common",
        "δ's error, amplified by what all keys share",
        "flash-attention PR 2893",
        _shared_keys(_scaled(q=0.5), 32.0),
        shared_feature=32.0,
    ),
    Probe("repeated_tokens", "equal tokens in runs", _PAPER + ", section 3.3.2", _repeated_tokens),
    Probe("all_negative", "a row maximum stuck at 0", "flash-attention issue 2082", _level(-30.0)),
    Probe(
        "deep_negative",
        "scores recomputed too coarsely, finite −inf",
        "cudnn-frontend 744, flashinfer 4267",
        _level(-600.0),
    ),
    Probe(
        "lse_below_88",
        "exp(−lse) overflowing in the backward pass",
        "pytorch issue 196678",
        _level(-120.0),
        is_causal=True,
    ),
    Probe(
        "very_large", "overflow of unshifted weights", "flash-attention issue 2082", _level(400.0)
    ),
    Probe(
        "sharp",
        "scores of trained size, where their rounding counts",
        "FastVideo PR 1730 (key pre-scaled in bf16)",
        _scaled(q=3.0, k=2.0),
    ),
    Probe(
        "odd_scale",
        "the scale folded into a rounded operand",
        "FastVideo PR 1730 (key pre-scaled in bf16)",
        _scaled(q=2.0, k=2.0),
        scale=0.173,
    ),
    Probe(
        "rising",
        "rescaling when the maximum changes late",
        "FlashAttention-2, Algorithm 1",
        _rising,
    ),
    Probe(
        "two_live_keys",
        "weights that differ between the two passes",
        "exact arithmetic: a row of dS sums to 0",
        _shared_keys(_two_live_keys, 4.0),
        shared_feature=4.0,
        judged_by="row sums of dS (δ's error)",
        slack=8.0,
    ),
    Probe(
        "outlier_features",
        "features far larger than the others",
        _PAPER + ", fig. 5",
        _outlier_features,
    ),
    Probe(
        "tiny",
        "small and subnormal values lost",
        "triton PR 3408 (row sums too coarse)",
        _scaled(k=1e-3, v=1e-30),
    ),
    Probe(
        "odd_lengths",
        "N and d that are no multiples of the block",
        "flash-attention, ragged tiles",
        _gaussian,
        change_shape=_lengths,
    ),
    Probe(
        "odd_lengths_causal",
        "ragged tiles on the diagonal",
        "flash-attention, ragged tiles",
        _gaussian,
        is_causal=True,
        change_shape=_lengths,
    ),
    Probe(
        "cross",
        "different numbers of queries and keys",
        "cross-attention",
        _gaussian,
        change_shape=_cross,
    ),
    Probe(
        "wider_values",
        "value heads wider than query heads",
        "multi-head latent attention",
        _gaussian,
        change_shape=_wider_values,
    ),
    Probe(
        "gqa",
        "query heads sharing a key head",
        "grouped-query attention",
        _gaussian,
        is_causal=True,
        change_shape=_grouped,
    ),
    Probe("free_feature", "relations between calls that break", "exact arithmetic", _free_feature),
    Probe(
        "free_feature_causal",
        "relations between causal calls that break",
        "exact arithmetic",
        _free_feature,
        is_causal=True,
    ),
    Probe(
        "masked_rows", "rows that may attend to nothing", "pytorch, fully masked rows", _masked_rows
    ),
    Probe("additive_mask", "a bias added to the scores", "ALiBi position bias", _additive_mask),
    Probe(
        "window",
        "windows that end inside a tile",
        "sliding-window attention",
        _gaussian,
        options=lambda _: {"window": (37, 5)},
    ),
    Probe(
        "window_causal",
        "a causal window's two edges",
        "sliding-window attention",
        _gaussian,
        is_causal=True,
        options=lambda _: {"window": (45, -1)},
    ),
    Probe(
        "causal_offset",
        "a diagonal that starts elsewhere than at the top left",
        "FlashAttention, causal at the bottom right",
        _gaussian,
        is_causal=True,
        change_shape=_cross,
        options=lambda shape: {"causal_offset": shape.n_key - shape.n_query},
    ),
    Probe(
        "softcap",
        "a softcap, and its slope in the backward pass",
        "Gemma 2, arXiv 2408.00118",
        _scaled(q=3.0, k=2.0),
        options=lambda _: {"softcap": 4.0},
    ),
    Probe(
        "learned_sinks",
        "sinks left out of the row sum, or of δ",
        "attention sinks, arXiv 2309.17453",
        _learned_sinks,
    ),
    Probe(
        "dropout",
        "a backward pass that drops other weights, or forgets their scale",
        "flash-attention, dropout",
        _gaussian,
        options=lambda _: {"dropout_p": 0.25},
    ),
)


def probe_named(name: str) -> Probe:
    """The built-in probe of that name; raises ValueError with the accepted names."""
    for probe in PROBES:
        if probe.name == name:
            return probe
    raise ValueError(f"probe={name!r}: accepted are {', '.join(p.name for p in PROBES)}")
