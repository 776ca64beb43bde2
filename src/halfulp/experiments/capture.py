"""Real activations to audit a kernel on: query, key, value and grad_out of a small language model
trained on the spot.

Random inputs have no attention sinks, no keys that share a direction and no token that half the
rows look at; a trained model has all of that after a minute. The text is English prose that every
CPython brings along, so nothing is fetched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfulp.calls import Call
from halfulp.runs.folder import write_bytes
from halfulp.runs.results import Progress, no_progress
from halfulp.training.attention import set_tap
from halfulp.training.config import Language, RunConfig
from halfulp.training.loop import train
from halfulp.training.presets import capture
from halfulp.training.workload import Workload

TENSORS = ("query", "key", "value", "grad_out")
"""The tensors of a call, and of a file of them."""


@dataclass(frozen=True)
class Captured:
    """Attention calls as a training run made them, bf16 values; batch entry b·layers + i is
    sequence b in layer i.
    """

    query: Tensor  # [B, H, N, D]
    key: Tensor
    value: Tensor
    grad_out: Tensor
    is_causal: bool
    scale: float
    source: str  # where they come from, in words
    layers: int = 1

    def __post_init__(self) -> None:
        for name in TENSORS:
            x = getattr(self, name)
            if x.ndim != 4:
                raise ValueError(
                    f"{name} of shape {tuple(x.shape)}: accepted are 4 dimensions [B, H, N, D]"
                )


@dataclass(frozen=True)
class CaptureRun:
    """The trained model's captured calls, and how its training went."""

    captured: Captured
    loss: tuple[float, ...]  # nats a token, every line of metrics

    @property
    def bits_per_byte(self) -> float:
        """Training loss over the last twentieth of the run, in bits a token, which the preset makes
        a byte.
        """
        last = self.loss[-max(1, len(self.loss) // 20) :]
        return sum(last) / len(last) / math.log(2)


def train_and_capture(
    config: RunConfig | None = None, *, progress: Progress | None = None
) -> CaptureRun:
    """Train a GPT and return what every attention layer sees and gets back on one more batch.

    Args:
        config: a run of a `Language` workload; the preset `capture` if None. It repeats bit for
            bit.
        progress: called at every line of metrics.

    Raises:
        ValueError: the configuration is of another workload, or the run ended in numbers that are
            not finite.
    """
    config = config or capture()
    language = config.workload
    if not isinstance(language, Language):
        raise ValueError(f"config.workload={language}: accepted is a Language")
    run = train(config, progress=progress or no_progress)
    if run.status == "failed":
        raise ValueError(
            f"config.attention={str(config.attention)!r}: {run.reason}; accepted is one that trains"
        )
    return CaptureRun(_capture(run.workload, config, language), run.curve("loss"))


def save_captured(path: str | Path, captured: Captured) -> Path:
    """Write a safetensors file that `halfulp audit --captured` reads, whole or not at all.

    Tensors query, key, value, grad_out `[B, H, N, D]`; metadata is_causal, scale, source, layers as
    text.
    """
    from safetensors.torch import save

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "is_causal": str(captured.is_causal).lower(),
        "scale": repr(captured.scale),
        "source": captured.source,
        "layers": str(captured.layers),
    }
    data = save({name: getattr(captured, name).contiguous() for name in TENSORS}, metadata)
    return write_bytes(target, data)


class _Seen:
    """A tap that keeps the calls of one pass, by layer."""

    def __init__(self) -> None:
        self.calls: dict[int, dict[str, Tensor]] = {}

    def __call__(self, layer: int, call: Call, out: Tensor) -> Tensor:
        """Return out as it came."""
        assert call.sees.causal
        assert call.scale == call.query.shape[-1] ** -0.5
        kept = {
            name: x.detach().bfloat16()
            for name, x in (("query", call.query), ("key", call.key), ("value", call.value))
        }
        self.calls[layer] = kept
        # dO comes in the backward pass, to the very tensor that is handed on
        out.register_hook(lambda grad: kept.update(grad_out=grad.detach().bfloat16()))  # type: ignore[no-untyped-call]
        return out


def _capture(workload: Workload, config: RunConfig, language: Language) -> Captured:
    """One more forward and backward pass, on the batch that a longer run would read next."""
    model, seen = workload.model, _Seen()
    set_tap(model, seen)
    samples = workload.order(config.steps + 1, config.batch)[-1]
    torch.autograd.backward(workload.loss(model, workload.batch(samples, config.steps + 1)))
    set_tap(model, None)
    calls = [seen.calls[layer] for layer in range(language.layers)]
    stacked = {
        name: torch.stack([call[name] for call in calls], 1).flatten(0, 1).cpu() for name in TENSORS
    }
    text = (
        "bytes of Python's own documentation"
        if language.data == "english"
        else f"tokens, data {language.data}"
    )
    source = (
        f"GPT of {language.layers} layers, width {language.width}, after {config.steps} steps "
        f"on {config.batch} × {language.context} {text}, seed {config.seed}"
    )
    scale = (language.width // language.heads) ** -0.5
    return Captured(**stacked, is_causal=True, scale=scale, source=source, layers=language.layers)
