"""Language modeling: windows of a stream of tokens, a GPT, and the cross-entropy of the next
token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfulp.training.attention import AttentionFunction
from halfulp.training.config import Language, RunConfig
from halfulp.training.model import Gpt
from halfulp.training.synthetic import english_text, synthetic_tokens
from halfulp.training.tokens import read_tokens
from halfulp.training.workload import Configured


class LanguageWorkload(Configured):
    """A GPT and the stream it reads; a sample is where a window starts. See
    `halfulp.training.workload.Workload`.
    """

    def __init__(
        self, config: RunConfig, device: torch.device, own: Mapping[str, AttentionFunction] | None
    ) -> None:
        assert isinstance(config.workload, Language)
        self.config = task = config.workload
        self.tokens_per_sample, self.device = task.context, device
        self.data_seed = config.seed_of_data
        self.source: dict[str, Any]
        self.tokens, self.source = token_stream(task, self.data_seed)
        if len(self.tokens) <= task.context:
            raise ValueError(
                f"context={task.context}: accepted are fewer tokens than data={task.data!r} has"
            )
        self.model: Gpt = Gpt(task, config.attention, seed=config.seed, own=own).to(device)

    def order(self, steps: int, batch: int) -> np.ndarray:
        """Where windows start, int64 `[steps, batch]`; a longer run begins with a shorter one's."""
        rng = np.random.Generator(np.random.PCG64(self.data_seed))
        return rng.integers(len(self.tokens) - self.config.context, size=(steps, batch))

    def batch(self, samples: np.ndarray, step: int) -> tuple[Tensor, ...]:  # noqa: ARG002 - samples say it all
        """Tokens and the tokens after them, int64 `[B, context]` each."""
        last = len(self.tokens) - self.config.context - 1
        if samples.min() < 0 or samples.max() > last:  # another run's order, of other data
            raise ValueError(
                f"batches: windows start at {samples.min()} to {samples.max()}; accepted are 0 to"
                f" {last} of data={self.config.data!r}"
            )
        windows = self.tokens[np.asarray(samples)[:, None] + np.arange(self.config.context + 1)]
        read = torch.from_numpy(windows.astype(np.int64)).to(self.device)
        return read[:, :-1], read[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean cross-entropy in nats a token."""
        tokens, following = batch
        logits: Tensor = model(tokens)
        # in fp32, whatever autocast made of the logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def token_stream(config: Language, data_seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the tokens that a configuration names, and what they are, for the record: data,
    tokens, sha256.

    Raises:
        ValueError: there is no such data, or its tokens do not fit the vocabulary.
    """
    match config.data:
        case "synthetic":
            tokens = synthetic_tokens(config.vocabulary, data_seed)
            return tokens, {"data": "synthetic", "tokens": len(tokens), "sha256": _sha256(tokens)}
        case "english":
            tokens, needed = np.frombuffer(english_text(), dtype=np.uint8), 256
            about: dict[str, Any] = {
                "data": "english",
                "tokens": len(tokens),
                "sha256": _sha256(tokens),
            }
        case path:
            if not Path(path).is_file():
                raise ValueError(
                    f"data={path!r}: accepted are synthetic, english, or a token file (halfulp"
                    " tokens)"
                )
            tokens, sidecar = read_tokens(Path(path))
            needed, about = sidecar["vocabulary"], {"data": path, **sidecar}
    if config.vocabulary < needed:
        raise ValueError(
            f"vocabulary={config.vocabulary}: accepted for data={config.data!r} is at least"
            f" {needed}"
        )
    return tokens, about


def _sha256(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.tobytes()).hexdigest()
