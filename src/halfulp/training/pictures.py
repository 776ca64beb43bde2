"""Text-to-image training as a workload: named pictures, noise that repeats, and a sampler to look
at the result.

Noise and time of a sample come from a generator of its own, keyed by data seed, step and sample. So
a step sees the same bits however the run is split over processes, and after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfulp.recipes import hash_seed
from halfulp.training.attention import AttentionFunction
from halfulp.training.config import Pictures, RunConfig
from halfulp.training.diffusion import DiffusionTransformer, add_noise, draw_samples, encode_name
from halfulp.training.glyphs import load_pictures
from halfulp.training.workload import Configured


class PictureWorkload(Configured):
    """Named pictures and the diffusion transformer that draws them; see
    `halfulp.training.workload.Workload`.
    """

    def __init__(
        self, config: RunConfig, device: torch.device, own: Mapping[str, AttentionFunction] | None
    ) -> None:
        assert isinstance(config.workload, Pictures)
        self.config = task = config.workload
        self.data_seed, self.device = config.seed_of_data, device
        self.tokens_per_sample = (task.size // task.patch) ** 2
        self.pictures = load_pictures(task.data, task.size, task.count)
        digest = hashlib.sha256(self.pictures.pixels.tobytes()).hexdigest()
        self.source: dict[str, Any] = {
            "data": task.data,
            "pictures": len(self.pictures.names),
            "sha256": digest,
        }
        pixels = torch.tensor(self.pictures.pixels, device=device).permute(0, 3, 1, 2)
        self._clean = pixels.float() / 127.5 - 1
        self._names = self.symbols(self.pictures.names)
        # modules draw their weights from torch's global generator, which the caller gets back
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash_seed(config.seed, "pictures", 0))
            made = DiffusionTransformer(task, config.attention, own)
        self.model: DiffusionTransformer = made.to(device)

    def order(self, steps: int, batch: int) -> np.ndarray:
        """Every picture once an epoch, in another order each; picture = sample modulo the number of
        pictures.

        The epoch is part of the sample, so that a picture that a step reads twice gets other noise
        the second time.
        """
        count, total = len(self.pictures.names), steps * batch
        draw = np.random.Generator(np.random.PCG64([self.data_seed, 1]))
        epochs = [epoch * count + draw.permutation(count) for epoch in range(-(-total // count))]
        return np.concatenate(epochs)[:total].reshape(steps, batch).astype(np.int64)

    def batch(self, samples: np.ndarray, step: int) -> tuple[Tensor, ...]:
        """Noisy pictures and their v `[B, 3, S, S]`, times `[B]`, names `[B, L]`."""
        shape = self._clean.shape[1:]
        noise, time = torch.empty(len(samples), *shape), torch.empty(len(samples))
        generator = torch.Generator()
        for i, sample in enumerate(samples.tolist()):
            generator.manual_seed(hash_seed(self.data_seed, f"sample {sample}", step))
            noise[i].normal_(generator=generator)
            time[i] = torch.rand((), generator=generator)
        chosen = torch.as_tensor(samples % len(self._clean), device=self.device)
        time = time.to(self.device)
        noisy, target = add_noise(self._clean[chosen], noise.to(self.device), time)
        return noisy, target, time, self._names[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean squared error of v; 1 before any training on pictures of unit variance."""
        noisy, target, time, names = batch
        return functional.mse_loss(model(noisy, time, names).float(), target)

    def symbols(self, names: Sequence[str]) -> Tensor:
        """Names as the model reads them, int64 `[B, L]`."""
        return torch.tensor(
            [encode_name(name, self.config.name_length) for name in names], device=self.device
        )

    @torch.no_grad()
    def draw(self, names: Sequence[str], *, seed: int = 0, steps: int = 30) -> np.ndarray:
        """Return pictures of these names by the model as it is now, uint8 `[B, size, size, 3]`.

        Without classifier-free guidance: a model that has learned its few pictures by heart leaves
        their range with it.

        Args:
            names: any texts; the model knows those that it was trained on.
            seed: of the noise that the drawing starts from.
            steps: of the sampler.
        """
        wanted = self.symbols(names)
        generator = torch.Generator().manual_seed(hash_seed(seed, "draw", 0))
        noise = torch.randn(
            len(names), 3, self.config.size, self.config.size, generator=generator
        ).to(self.device)
        drawn = draw_samples(lambda x, time: self.model(x, time, wanted), noise, steps, clip=1.0)
        pixels = ((drawn + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).cpu().numpy()
