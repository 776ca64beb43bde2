"""Real activations to audit a kernel on: query, key, value and grad_out of a small language model trained on the spot.

Random inputs have no attention sinks, no keys that share a direction and no token that half the rows look at; a trained
model has all of that after a minute. The text is English prose that every CPython brings along, so nothing is fetched:
the language reference behind `help()`, or the standard library's docstrings where that is missing.
"""

from __future__ import annotations

import ast
import math
import os
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfulp.runs.results import Progress, no_progress

TENSORS = {"query": "q", "key": "k", "value": "v", "grad_out": "do"}
"""The tensors of a file by name, and the short spelling that is read as well."""


class Attention(Protocol):
    """An attention function with the keywords of PyTorch's own, on `[B, H, N, D]`."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        """Return out `[B, H, N, D]`."""
        ...


@dataclass(frozen=True)
class GptConfig:
    """A byte-level GPT and its training; the defaults take under a minute on one core."""

    layers: int = 2
    heads: int = 4
    width: int = 128
    context: int = 256  # bytes
    batch: int = 8  # sequences a step
    steps: int = 250
    learning_rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width, self.context, self.batch, self.steps) < 1:
            raise ValueError(f"config={self}: accepted are integers of at least 1")
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads}: accepted is a divisor of width={self.width}")


@dataclass(frozen=True)
class Captured:
    """Attention calls as a training run made them, bf16 values; batch entry b·layers + i is sequence b in layer i."""

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
                raise ValueError(f"{name} of shape {tuple(x.shape)}: accepted are 4 dimensions [B, H, N, D]")

    def layer(self, index: int) -> Captured:
        """Return one layer's calls."""
        if not 0 <= index < self.layers:
            raise ValueError(f"layer={index}: accepted are 0 to {self.layers - 1}")
        picked = {name: getattr(self, name)[index :: self.layers] for name in TENSORS}
        return replace(self, **picked, layers=1, source=f"{self.source}, layer {index}")


@dataclass(frozen=True)
class CaptureRun:
    """The trained model's captured calls, and how its training went."""

    captured: Captured
    loss: tuple[float, ...]  # nats a byte, every step

    @property
    def bits_per_byte(self) -> float:
        """Training loss over the last twentieth of the steps, in bits a byte (8 before any training)."""
        last = self.loss[-max(1, len(self.loss) // 20) :]
        return sum(last) / len(last) / math.log(2)


def train_and_capture(
    attention: Attention | None = None, config: GptConfig | None = None, *, progress: Progress | None = None
) -> CaptureRun:
    """Train a byte-level GPT and return what every attention layer sees and gets back on one more batch.

    Args:
        attention: called with bf16 tensors `[B, H, N, D]`; PyTorch's `scaled_dot_product_attention` if None.
        config: sizes, steps and seed; the run repeats bit for bit on one number of threads.
        progress: called every tenth step.
    """
    config = config or GptConfig()
    report = progress or no_progress
    text = torch.frombuffer(bytearray(english_text()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(config.seed)
    model = _Gpt(config, attention or functional.scaled_dot_product_attention, generator)
    adam = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for step in range(config.steps):
        warm, left = (step + 1) / 20, (config.steps - step) / config.steps
        adam.param_groups[0]["lr"] = config.learning_rate * min(1.0, warm) * (0.1 + 0.9 * left)
        loss = model.loss(*_batch(text, config, generator))
        adam.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        losses.append(loss.item())
        if step % 10 == 0 or step + 1 == config.steps:
            report((step + 1) / config.steps, f"byte-level GPT, step {step + 1}: loss {losses[-1]:.2f}")
    return CaptureRun(_capture(model, text, config, generator), tuple(losses))


@lru_cache(maxsize=1)
def english_text() -> bytes:
    """Return about half a megabyte of English prose that comes with Python, the same for the same Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions split it off
        return "\n\n".join(_docstrings(500_000)).encode()
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def save_captured(path: str | Path, captured: Captured) -> Path:
    """Write a safetensors file, whole or not at all: under a temporary name, synced, then renamed.

    Tensors query, key, value, grad_out `[B, H, N, D]`; metadata is_causal, scale, source, layers as text.
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
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)
    return target


def load_captured(path: str | Path) -> Captured:
    """Read what `save_captured` wrote, or any safetensors file with those tensors (q, k, v, do are accepted too).

    Without metadata the call counts as causal with scale 1/√D.

    Raises:
        ValueError: the file is missing, torn or lacks a tensor; one line says which.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            found = {name: name if name in names else short for name, short in TENSORS.items()}
            missing = [name for name, spelled in found.items() if spelled not in names]
            if missing:
                raise ValueError(
                    f"path={str(path)!r}: no tensor {missing[0]!r}; accepted are files with {', '.join(TENSORS)}"
                )
            tensors = {name: file.get_tensor(spelled) for name, spelled in found.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"path={str(path)!r}: {error}; accepted is a whole safetensors file") from None
    return Captured(
        **tensors,
        is_causal=metadata.get("is_causal", "true") == "true",
        scale=float(metadata.get("scale", tensors["query"].shape[-1] ** -0.5)),
        source=metadata.get("source", str(path)),
        layers=int(metadata.get("layers", 1)),
    )


class _Gpt(nn.Module):
    """Pre-norm blocks of causal attention and a two-layer perceptron on learned positions."""

    def __init__(self, config: GptConfig, attention: Callable[..., Tensor], generator: torch.Generator) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(config.context, width)
        self.blocks = nn.ModuleList(_Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.02, generator=generator)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte; both int64 `[B, N]`."""
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Block(nn.Module):
    def __init__(self, config: GptConfig, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        width = config.width
        self.heads, self.attention = config.heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.seen: dict[str, Tensor] | None = None  # set to a dict to record one call

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, N, width]` to the same shape."""
        qkv = self.qkv(self.norm1(x)).bfloat16().unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attention(query, key, value, is_causal=True, scale=query.shape[-1] ** -0.5)
        if self.seen is not None:
            self._record(query, key, value, out)
        attended: Tensor = x + self.project(out.float().transpose(1, 2).flatten(2))
        update: Tensor = self.down(functional.gelu(self.up(self.norm2(attended))))
        return attended + update

    def _record(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        seen = self.seen
        assert seen is not None
        seen.update(query=query.detach(), key=key.detach(), value=value.detach())
        out.register_hook(lambda grad: seen.update(grad_out=grad.detach().bfloat16()))  # type: ignore[no-untyped-call]


def _capture(model: _Gpt, text: Tensor, config: GptConfig, generator: torch.Generator) -> Captured:
    """One more forward and backward pass with every attention call recorded."""
    records: list[dict[str, Any]] = [{} for _ in model.blocks]
    for block, record in zip(model.blocks, records, strict=True):
        assert isinstance(block, _Block)
        block.seen = record
    torch.autograd.backward(model.loss(*_batch(text, config, generator)))
    stacked = {name: torch.stack([record[name] for record in records], 1).flatten(0, 1) for name in TENSORS}
    source = (
        f"byte-level GPT of {config.layers} layers, width {config.width}, after {config.steps} steps "
        f"on {config.batch} × {config.context} bytes of Python's own documentation, seed {config.seed}"
    )
    scale = (config.width // config.heads) ** -0.5
    return Captured(**stacked, is_causal=True, scale=scale, source=source, layers=config.layers)


def _batch(text: Tensor, config: GptConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bytes and the bytes after them, int64 `[batch, context]`."""
    length = min(config.context, len(text) - 1)
    starts = torch.randint(len(text) - length, (config.batch,), generator=generator)
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _docstrings(enough: int) -> list[str]:
    """Docstrings of the standard library's top modules in the order of their names, until there are enough bytes."""
    found: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(file.read_bytes())
        documented = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        found += [text for node in documented if (text := ast.get_docstring(node))]
        if sum(map(len, found)) >= enough:
            break
    return found


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
