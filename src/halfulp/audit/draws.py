"""How the audit's probe inputs are drawn: sizes, and what each family puts into the tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

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

    unit: ClassVar[str] = "heads"  # what is drawn independently

    @property
    def key_heads(self) -> int:
        """Heads of key and value."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def work(self) -> int:
        """The number of scores."""
        return self.batch * self.heads * self.n_query * self.n_key

    def __str__(self) -> str:
        kv = "" if self.kv_heads is None else f"/{self.kv_heads}"
        n = f"{self.n_query}" if self.n_query == self.n_key else f"{self.n_query}×{self.n_key}"
        return f"({self.batch}, {self.heads}{kv}, {n}, {self.head_dim})"


Draw = Callable[[Shape, torch.Generator], dict[str, Tensor]]


def gaussian(
    shape: Shape, g: torch.Generator, *, q: float = 1.0, k: float = 1.0, v: float = 1.0
) -> dict[str, Tensor]:
    """Standard normal numbers, each operand times its factor."""
    d_v = shape.head_dim if shape.value_dim is None else shape.value_dim
    b, h, hk = shape.batch, shape.heads, shape.key_heads
    return {
        "query": torch.randn(b, h, shape.n_query, shape.head_dim, generator=g).mul_(q),
        "key": torch.randn(b, hk, shape.n_key, shape.head_dim, generator=g).mul_(k),
        "value": torch.randn(b, hk, shape.n_key, d_v, generator=g).mul_(v),
        "grad_out": torch.randn(b, h, shape.n_query, d_v, generator=g),
    }


def scaled(q: float = 1.0, k: float = 1.0, v: float = 1.0) -> Draw:
    """`gaussian` with these factors."""
    return lambda shape, g: gaussian(shape, g, q=q, k=k, v=v)


def hot_token(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """One key in the middle takes nearly all the mass of every row."""
    x = gaussian(shape, g)
    # beside e¹⁴ the 255 other keys, e^½ each in the mean, have 3.5e-4 of the mass
    return aim(x, [shape.n_key // 2], 14.0)


def aim(x: dict[str, Tensor], positions: list[int], score: float) -> dict[str, Tensor]:
    """Give the keys at `positions` (the same bits) a score of about `score` for every query,
    through feature 1.
    """
    d = x["query"].shape[-1]
    x["query"][..., 1 % d] = 4.0
    x["key"][..., 1 % d] = 0.0
    aimed = torch.zeros(d)
    # times the queries' 4 and α = 1/√d this is the score
    aimed[1 % d] = score * math.sqrt(d) / 4.0
    for position in positions:
        x["key"][:, :, position % x["key"].shape[2]] = aimed
    return x


def ties(count: int, score: float, *, apart: bool = False) -> Draw:
    """`count` keys with equal bits hold every row's maximum, of about `score`; all other scores lie
    below; V is negative throughout.
    """

    def draw(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
        x = gaussian(shape, g, q=0.5)
        n = shape.n_key
        positions = (
            # neighbors share a tile, but for its border; apart, each has another where tiles are
            # narrow
            [i * (n // count) + 1 for i in range(count)] if apart else list(range(1, count + 1))
        )
        x["key"][..., 1 % shape.head_dim] = 0
        x = aim(x, positions, score)
        if score <= 0:  # push every other key below the tied ones
            others = torch.ones(n, dtype=torch.bool)
            others[[p % n for p in positions]] = False
            x["key"][:, :, others, 1 % shape.head_dim] = (
                (score - 6.0) * math.sqrt(shape.head_dim) / 4.0
            )
        # of one sign, so that biased roundings of Ō add up instead of cancelling (Qiu & Yao)
        x["value"] = -(x["value"].abs() + 0.5)
        return x

    return draw


def sink(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """The first token takes most of the mass, and its value is small, as in trained language
    models.
    """
    # e⁹ against e^½ for each other key: 95 % of the mass of a row that sees 256
    x = aim(gaussian(shape, g), [0], 9.0)
    x["value"][:, :, 0] *= 0.05
    return x


def values(change: Callable[[Tensor], Tensor]) -> Draw:
    """Gaussian, with the values changed."""

    def draw(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
        x = gaussian(shape, g)
        x["value"] = change(x["value"])
        return x

    return draw


def constant_values(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Every token has the same value, another number in each feature; few keys carry each row, so
    that their rounding does not average out.
    """
    x = gaussian(shape, g, q=3.0, k=2.0)
    x["value"][:] = x["value"][:, :, :1] + 2.0
    return x


def shared_keys(base: Draw, constant: float) -> Draw:
    """Feature 0 of every key is one constant: softmax cannot see it, dQ's feature 0 must vanish."""

    def draw(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
        x = base(shape, g)
        x["key"][..., 0] = constant
        return x

    return draw


def repeated_tokens(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Runs of eight equal tokens: keys, values and queries repeat."""
    x = gaussian(shape, g)
    for name, n in (("query", shape.n_query), ("key", shape.n_key), ("value", shape.n_key)):
        x[name] = x[name][:, :, torch.arange(n) // 8]
    return x


def level(level: float) -> Draw:
    """Every score lies around `level`, through one feature that all keys share."""

    def draw(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
        x = gaussian(shape, g)
        # root² α is the level: query and key have equal parts in it
        root = math.sqrt(abs(level) * math.sqrt(shape.head_dim))
        x["query"][..., 0] = root
        x["key"][..., 0] = math.copysign(root, level)
        return x

    return draw


def rows_apart(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Scores of a query lie around 120 or -120, by turns."""
    x = level(120.0)(shape, g)
    x["query"][..., 1::2, 0] *= -1
    return x


def rising(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Scores rise with the key's position, so that the running maximum changes in every tile."""
    x = gaussian(shape, g)
    x["query"][..., 0] = 4.0
    x["key"][..., 0] = torch.linspace(0, 20.0, shape.n_key) * math.sqrt(shape.head_dim) / 4.0
    return x


def two_live_keys(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Two keys, near the first and the last, carry every row; all the others weigh exactly nothing.

    A row of dS is then two numbers that cancel, and so do their roundings. What is left is where
    the backward pass disagrees with the forward pass about the weights, and half of the rows change
    their maximum in the last tile.
    """
    x = gaussian(shape, g)
    n = shape.n_key
    x["query"][..., 1 % shape.head_dim] = 4.0
    # e⁻²⁰⁰ is 0 in float32, where the smallest number is about e⁻¹⁰³
    x["key"][..., 1 % shape.head_dim] = -200.0 * math.sqrt(shape.head_dim) / 4.0
    x["key"][:, :, [min(5, n - 1), max(n - 5, 0)], 1 % shape.head_dim] = 0.0
    return x


def free_feature(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Gaussian, with a feature that is 0 in every key, so that a constant can be added there
    without rounding.
    """
    x = gaussian(shape, g)
    x["key"][..., 0] = 0
    return x


def outlier_features(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """Two features of query, key and value are twelve times larger, as in trained transformers."""
    x = gaussian(shape, g, q=0.5)
    for name in ("query", "key", "value"):
        x[name][..., : min(2, x[name].shape[-1])] *= 12.0 if name == "value" else 4.0
    return x


def masked_rows(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """A random boolean mask with a few rows that may attend to nothing."""
    x = gaussian(shape, g)
    mask = torch.rand(shape.batch, 1, shape.n_query, shape.n_key, generator=g) > 0.3
    mask[:, :, :: max(1, shape.n_query // 3)] = False
    return x | {"attn_mask": mask}


def additive_mask(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """A linear position bias of another slope in each head (ALiBi), added to the scores."""
    i, j = torch.arange(shape.n_query)[:, None], torch.arange(shape.n_key)[None, :]
    # with one slope a kernel that reads the first head's mask for all would pass (docs/log.md)
    slopes = 2.0 ** -(1 + torch.arange(shape.heads, dtype=torch.float32))[:, None, None]
    return gaussian(shape, g) | {"attn_mask": (-(i - j).abs() * slopes)[None]}


def learned_sinks(shape: Shape, g: torch.Generator) -> dict[str, Tensor]:
    """A learned score in every row whose value is 0, of another size in each head."""
    return gaussian(shape, g) | {"sinks": drawn_sinks(shape, g)}


def drawn_sinks(shape: Shape, g: torch.Generator) -> Tensor:
    """Of another size in each head."""
    return torch.randn(shape.heads, generator=g) * 2 + 2


def lengths(shape: Shape) -> Shape:
    """Lengths and a head dimension that are no multiples of a block."""
    # of the default size 211, a prime, and d = 40, which is no power of two
    n_query, n_key = (n - 45 if n > 45 else n - n // 4 for n in (shape.n_query, shape.n_key))
    return replace(shape, n_query=n_query, n_key=n_key, head_dim=max(8, shape.head_dim - 24))


def cross(shape: Shape) -> Shape:
    """A third of the queries."""
    return replace(shape, n_query=max(1, shape.n_query // 3), n_key=shape.n_key)


def wider_values(shape: Shape) -> Shape:
    """Values half as wide again as keys."""
    return replace(shape, value_dim=shape.head_dim * 3 // 2)


def grouped(shape: Shape) -> Shape:
    """Half as many key heads as query heads."""
    return replace(shape, kv_heads=max(1, shape.heads // 2)) if shape.heads > 1 else shape
