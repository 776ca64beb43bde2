"""A model small enough to be computed by hand beside: causal attention, then cross-attention, with
what disturbs.
"""

import torch
from torch import Tensor, nn

from halfulp.attention import golden
from halfulp.calls import Sees
from halfulp.training.attention import Attend, AttentionPlan
from halfulp.watch.taps import Observed

WIDTH, HEADS, HEAD_DIM = 12, 2, 4


class ToyAttention(nn.Module):
    def __init__(
        self,
        layer: int,
        plan: AttentionPlan,
        own=None,
        key_heads: int = HEADS,
        is_causal: bool = True,
    ):
        super().__init__()
        self.attend = Attend(layer, HEADS, plan, own)
        self.is_causal = is_causal
        self.query = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.key, self.value = (
            nn.Linear(WIDTH, key_heads * HEAD_DIM, bias=False) for _ in range(2)
        )
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def head_weights(self) -> tuple[Tensor, Tensor]:
        return self.query.weight.unflatten(0, (-1, HEAD_DIM)), self.key.weight.unflatten(
            0, (-1, HEAD_DIM)
        )

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        source = x if source is None else source
        query, key, value = (
            layer(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, source), (self.value, source))
        )
        out = self.attend(query, key, value, is_causal=self.is_causal)
        return self.out(out.transpose(1, 2).flatten(2))


class Toy(nn.Module):
    """Two layers; dropout draws random numbers and batch norm keeps a buffer that every forward
    pass moves.
    """

    def __init__(self, *plan: str, own=None, dropout: float = 0.1, key_heads: int = 1):
        super().__init__()
        torch.manual_seed(5)
        read = AttentionPlan.of(*plan)
        self.causal = ToyAttention(0, read, own, key_heads)
        self.cross = ToyAttention(1, read, own, is_causal=False)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        x = self.dropout(x + self.causal(x))
        x = self.norm(x.mT).mT
        return x + self.cross(x, source)


def toy_batch(seed: int = 0, entries: int = 3) -> tuple[Tensor, Tensor]:
    """X `[B, 6, WIDTH]` and a source of 4 tokens for the cross-attention."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(entries, 6, WIDTH, generator=g), torch.randn(entries, 4, WIDTH, generator=g)


def toy_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch).float().square().mean()


def random_call(
    seed: int = 0, *, is_causal: bool = True, rounded: bool = True, n: int = 6, n_k: int = 6
) -> Observed:
    """An fp64 call with O in bf16 (or exact to fp64 rounding), random dO and X, and no dK."""
    g = torch.Generator().manual_seed(seed)
    query, grad_out = (torch.randn(2, 3, n, 4, generator=g, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(2, 3, n_k, 4, generator=g, dtype=torch.float64) for _ in range(2))
    scale = 0.7
    out = golden(query, key, value, is_causal=is_causal, scale=scale).out
    out = out.bfloat16().double() if rounded else out
    inputs = torch.randn(2, n, 5, generator=g, dtype=torch.float64)
    return Observed(
        query, key, value, Sees(is_causal), scale, out=out, grad_out=grad_out, inputs=inputs
    )


def slow_scores(
    query: Tensor, key: Tensor, is_causal: bool, scale: float
) -> list[list[list[list[float]]]]:
    """α q·k of every pair that may be seen, by loops: [b][h][i][j], j up to i where causal."""
    b, h, n, _ = query.shape
    return [
        [
            [
                [
                    scale
                    * sum(
                        x * y
                        for x, y in zip(query[e, c, i].tolist(), key[e, c, j].tolist(), strict=True)
                    )
                    for j in range(min(i + 1, key.shape[2]) if is_causal else key.shape[2])
                ]
                for i in range(n)
            ]
            for c in range(h)
        ]
        for e in range(b)
    ]


def slow_weights(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    """P `[B, H, N, N_k]` by the definition, from `slow_scores`."""
    weights = torch.zeros(*query.shape[:3], key.shape[2], dtype=torch.float64)
    for b, entry in enumerate(slow_scores(query, key, is_causal, scale)):
        for h, rows in enumerate(entry):
            for i, row in enumerate(rows):
                terms = torch.tensor(row, dtype=torch.float64).exp()
                weights[b, h, i, : len(row)] = terms / terms.sum()
    return weights
