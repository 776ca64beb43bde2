"""A small diffusion transformer that draws named pictures: model, noise schedule and sampler.

The architecture is DiT's (Peebles & Xie, arXiv 2212.09748): patches as tokens, and the time as a
shift, scale and gate of every branch. Each block attends twice, to the patches and to the bytes of
the name, so that one training exercises two shapes of attention. The network predicts v (Salimans &
Ho, arXiv 2202.00512) on a cosine schedule, which stays finite at both ends, and pictures are drawn
by DDIM (Song et al., arXiv 2010.02502), which adds no noise of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfulp.training.attention import Attend, AttentionFunction, AttentionPlan
from halfulp.training.config import Pictures

PAD = 256  # the symbol behind a name's last byte
_SYMBOLS = 257
_FREQUENCIES = 64  # of the time's sines and cosines

Predict: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(x `[B, …]`, time `[B]` from 0 to 1) -> v, shaped like x."""


def encode_name(name: str, length: int) -> list[int]:
    """Return the bytes of a lower-cased name, cut or padded to `length` symbols."""
    symbols = list(name.lower().encode())[:length]
    return symbols + [PAD] * (length - len(symbols))


def noise_levels(time: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of picture and noise at a time from 0 (picture) to 1 (noise); their
    squares sum to 1.
    """
    angle = time * (math.pi / 2)
    return angle.cos(), angle.sin()


def add_noise(clean: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Return the noisy picture α·clean + σ·noise and what is to be predicted of it, v = α·noise −
    σ·clean.

    Args:
        clean: `[B, …]`.
        noise: like `clean`, standard normal.
        time: `[B]`, 0 to 1.
    """
    alpha, sigma = (_column(level, clean) for level in noise_levels(time))
    return alpha * clean + sigma * noise, alpha * noise - sigma * clean


def draw_samples(
    predict: Predict, noise: Tensor, steps: int = 30, clip: float | None = None
) -> Tensor:
    """Return what DDIM makes of the noise in `steps` equal steps of time, without any randomness of
    its own.

    Args:
        predict: v at a time.
        noise: `[B, …]`, standard normal: the state at time 1.
        steps: evaluations of `predict`; the error falls like 1/steps.
        clip: bound of the picture's values, which each step's estimate is cut to; None: no bound.

    Raises:
        ValueError: `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: accepted is an integer of at least 1")
    x = noise
    times = torch.linspace(1.0, 0.0, steps + 1, dtype=noise.dtype, device=noise.device)
    for now, then in itertools.pairwise(times):
        (alpha, sigma), (alpha_then, sigma_then) = noise_levels(now), noise_levels(then)
        v = predict(x, now.expand(len(x)))
        # x and v are picture and noise, turned by an angle: since α² + σ² = 1 this turns them back
        clean, rest = alpha * x - sigma * v, sigma * x + alpha * v
        # an estimate beyond what pictures hold would be carried through all later steps
        if clip is not None:
            clean = clean.clamp(-clip, clip)
        x = alpha_then * clean + sigma_then * rest
    return x


class DiffusionTransformer(nn.Module):
    """Maps a noisy picture, its time and a name to v; layers 2i attend to the patches, 2i + 1 to
    the name.
    """

    def __init__(
        self,
        config: Pictures,
        plan: AttentionPlan,
        own: Mapping[str, AttentionFunction] | None = None,
    ) -> None:
        super().__init__()
        plan.check(2 * config.layers, config.heads)
        width, pixels = config.width, 3 * config.patch**2
        self.patch, self.side = config.patch, config.size // config.patch
        self.read = nn.Linear(pixels, width)
        self.positions = nn.Parameter(torch.randn(self.side**2, width) * 0.02)
        self.name = NameEncoder(config.name_length, width)
        self.time = nn.Sequential(
            nn.Linear(2 * _FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.blocks = nn.ModuleList(_Block(config, i, plan, own) for i in range(config.layers))
        # without weights of its own: scale and shift come from the condition
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate = nn.Linear(width, 2 * width)
        self.write = nn.Linear(width, pixels)
        # so that the first v is 0 and the loss begins at v's own mean square
        for layer in (self.modulate, self.write):
            _zero(layer)

    def forward(self, noisy: Tensor, time: Tensor, name: Tensor) -> Tensor:
        """Return v `[B, 3, S, S]` of a noisy picture `[B, 3, S, S]` at time `[B]` with a name `[B,
        L]` of symbols.
        """
        x = self.read(self._patches(noisy)) + self.positions
        symbols = self.name(name)
        condition = functional.silu(self.time(_waves(time)) + symbols.mean(1))
        for block in self.blocks:
            x = block(x, symbols, condition)
        shift, scale = self.modulate(condition)[:, None].chunk(2, -1)
        return self._picture(self.write(self.norm(x) * (1 + scale) + shift))

    def _patches(self, picture: Tensor) -> Tensor:
        """`[B, 3, S, S]` to `[B, N, 3·patch²]`, row by row."""
        return functional.unfold(picture, self.patch, stride=self.patch).mT

    def _picture(self, patches: Tensor) -> Tensor:
        """The inverse of `_patches`."""
        size = self.side * self.patch
        return functional.fold(patches.mT.float(), (size, size), self.patch, stride=self.patch)


class NameEncoder(nn.Module):
    """Symbols of a name to vectors that know their neighbors: two convolutions of five symbols."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(_SYMBOLS, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(2))

    def forward(self, name: Tensor) -> Tensor:
        """Map symbols `[B, L]` to `[B, L, width]`."""
        x: Tensor = self.symbols(name) + self.positions
        for convolution in self.mix:
            x = x + functional.gelu(convolution(x.mT).mT)
        return x


class PictureAttention(nn.Module):
    """Attention of patches to themselves or to a name; the module that taps and measurements look
    for.
    """

    def __init__(self, width: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = attend.heads, attend
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def head_weights(self) -> tuple[Tensor, Tensor]:
        """W_Q and W_K `[H, D, width]`."""
        width = self.query.in_features
        query, key = (layer.weight.view(self.heads, -1, width) for layer in (self.query, self.key))
        return query, key

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        """Map X `[B, N, width]`, which attends to `source [B, N_k, width]` or to itself, to the
        same shape.
        """
        source = x if source is None else source
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, source), (self.value, source))
        )
        out = self.attend(query, key, value, is_causal=False)
        mixed: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return mixed


class _Block(nn.Module):
    """Self-attention, attention to the name and a perceptron, each shifted, scaled and gated by the
    condition.
    """

    def __init__(
        self,
        config: Pictures,
        number: int,
        plan: AttentionPlan,
        own: Mapping[str, AttentionFunction] | None,
    ) -> None:
        super().__init__()
        width = config.width
        first, second = (Attend(2 * number + i, config.heads, plan, own) for i in range(2))
        self.patches, self.name = PictureAttention(width, first), PictureAttention(width, second)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulate = nn.Linear(width, 9 * width)
        # gates of 0: a block begins as the identity
        _zero(self.modulate)

    def forward(self, x: Tensor, name: Tensor, condition: Tensor) -> Tensor:
        modulation = self.modulate(condition)[:, None].chunk(9, -1)
        shift1, scale1, gate1, shift2, scale2, gate2, shift3, scale3, gate3 = modulation
        x = x + gate1 * self.patches(self.norm(x) * (1 + scale1) + shift1)
        x = x + gate2 * self.name(self.norm(x) * (1 + scale2) + shift2, name)
        update: Tensor = self.down(functional.gelu(self.up(self.norm(x) * (1 + scale3) + shift3)))
        mixed: Tensor = x + gate3 * update
        return mixed


def _waves(time: Tensor) -> Tensor:
    """Sines and cosines of a time `[B]`, `[B, 2·_FREQUENCIES]`, of periods from a thousandth of the
    range up.
    """
    # even steps of the logarithm: as many rates for coarse differences of time as for fine ones
    rates = torch.exp(torch.linspace(0.0, math.log(1000.0), _FREQUENCIES, device=time.device))
    angles = time[:, None].float() * rates
    return torch.cat((angles.cos(), angles.sin()), -1)


def _zero(layer: nn.Linear) -> None:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)


def _column(level: Tensor, like: Tensor) -> Tensor:
    return level.reshape(-1, *(1,) * (like.ndim - 1))
