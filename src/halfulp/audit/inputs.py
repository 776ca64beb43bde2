"""The inputs of one attention call under audit: a probe at one size, seed and dtype, or tensors
captured from a real model.

A case is named by its probe, shape, seed and dtype, and those four repeat it bit for bit on any
machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from halfulp.audit.probes import Probe, Shape, probe_named
from halfulp.calls import Call, Dropout, Sees, draw_seed
from halfulp.formats import dtype_named
from halfulp.operations import (
    ATTENTION,
    DTYPES,
    OperationProbe,
    Sizes,
    drawn_calls,
    operation_named,
    probe_of,
)
from halfulp.targets.manner import PLAIN

CAPTURED = "captured"

GENERATOR = 1_618_033_988_749
"""What torch's generator is seeded with beside a case's seed: no kernel that seeds it anew leaves
it as it was.
"""


@dataclass(frozen=True, kw_only=True)
class Inputs(Call):
    """A call in the audited dtype, the gradient that reaches its out, and what torch's CPU
    generator is seeded with before: a kernel with dropout draws its own seed from it.
    """

    grad_out: Tensor
    grad_lse: Tensor | None = None  # `[B, H, N]`, of a loss that lse is in
    generator_seed: int = GENERATOR
    manner: str = PLAIN  # how the kernel is called: `targets.manner`
    num_splits: int = 0  # into how many parts a kernel shall split its keys; 0: as it chooses

    def __iter__(self) -> Iterator[Tensor]:
        """query, key, value and grad_out, as `halfulp.golden` takes them."""
        return iter((*self.operands, self.grad_out))

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with query, key, value and grad_out changed."""
        query, key, value, grad_out = map(change, self)
        return replace(self, query=query, key=key, value=value, grad_out=grad_out)

    def to(self, device: str | torch.device) -> Inputs:
        """The same on another device."""
        moved: dict[str, Any] = {
            field.name: x.to(device)
            for field in fields(self)
            if isinstance(x := getattr(self, field.name), Tensor)
        }
        mask = None if self.sees.mask is None else self.sees.mask.to(device)
        return replace(self, **moved, sees=replace(self.sees, mask=mask))


def in_parts(
    x: Inputs,
    key_heads: int,
    found: Callable[[Inputs, tuple[slice, slice]], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """What is found of a call `[B, H, ...]` in parts of at least so many key heads of a sequence,
    the sequences and heads of each said beside it: less memory, and less of it far from the core.

    What belongs to a head by its number, or its place in a mask, is not taken apart.
    """
    batch, heads = x.key.shape[:2]
    if x.dropout is not None or x.sees.mask is not None or x.sinks is not None:
        return found(x, (slice(0, batch), slice(0, x.query.shape[1])))
    # the last part takes what is left over: a smaller one would be multiplied in another way
    starts = range(0, max(1, heads - key_heads + 1), key_heads)
    rows = []
    for b in range(batch):
        parts = []
        for start, stop in zip(starts, [*starts[1:], heads], strict=True):
            keys = (slice(b, b + 1), slice(start, stop))
            own = (keys[0], slice(start * x.groups, stop * x.groups))
            cut: dict[str, Any] = {"query": x.query[own], "grad_out": x.grad_out[own]}
            cut |= {"key": x.key[keys], "value": x.value[keys]}
            parts.append(found(replace(x, **cut), own))
        rows.append({name: torch.cat([p[name] for p in parts], 1) for name in parts[0]})
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def seed_drawn(generator_seed: int) -> int:
    """The seed that `halfulp.attention` draws where torch's CPU generator was just seeded so."""
    # of no device: without the list torch keeps and restores the state of every GPU
    with torch.random.fork_rng([]):
        torch.manual_seed(generator_seed)
        return int(draw_seed())


@dataclass(frozen=True)
class Case:
    """One probe of an operation at one size, seed and dtype; or, with `file`, the tensors captured
    there, cut to the size.
    """

    probe: str
    shape: Any = field(default_factory=Shape)  # a `Shape`, or another operation's `Sizes`
    seed: int = 0
    dtype: str = "bfloat16"
    file: str | None = None
    operation: str = ATTENTION  # a name or a folder

    @property
    def told(self) -> dict[str, Any]:
        """What names it, for JSON."""
        return {"probe": self.probe, "shape": str(self.shape), "seed": self.seed, "file": self.file}

    @property
    def known_probe(self) -> Probe | OperationProbe | None:
        """The probe that drew it; None of captured tensors."""
        if self.file is not None or self.probe == CAPTURED:
            return None
        if self.operation != ATTENTION:
            return probe_of(operation_named(self.operation), self.probe)
        return probe_named(self.probe)

    def inputs(self) -> Any:
        """`Inputs` of attention, or `OperationCalls`, the same bits on every machine.

        Raises ValueError for an unknown probe or dtype or an unreadable file.
        """
        dtype = dtype_named(self.dtype, DTYPES)
        if isinstance(self.shape, Sizes):
            generator = torch.Generator().manual_seed(_seed(self.probe, self.seed))
            operation = operation_named(self.operation)
            return drawn_calls(operation, self.probe, self.shape, dtype, generator)
        if self.file is not None:
            return _cut(read_captured(self.file), self.shape, DTYPES[dtype])
        probe = probe_named(self.probe)
        generator = torch.Generator().manual_seed(_seed(self.probe, self.seed))
        # on the CPU and in fp32, whatever is audited: a case has the same bits on every device, and
        # its dtypes differ by one rounding
        drawn = probe.draw(self.shape, generator)
        asked = probe.options(self.shape)
        operands: dict[str, Any] = {
            name: drawn[name].to(DTYPES[dtype]) for name in ("query", "key", "value", "grad_out")
        }
        p = asked.get("dropout_p", 0.0)
        return Inputs(
            **operands,
            sees=Sees(
                probe.is_causal,
                asked.get("window"),
                asked.get("causal_offset", 0),
                drawn.get("attn_mask"),
            ),
            scale=1 / math.sqrt(self.shape.head_dim) if probe.scale is None else probe.scale,
            softcap=asked.get("softcap", 0.0),
            sinks=drawn.get("sinks"),
            dropout=Dropout(p, seed_drawn(GENERATOR + self.seed)) if p else None,
            generator_seed=GENERATOR + self.seed,
            manner=probe.manner,
        )


_SPELLINGS = {"query": "q", "key": "k", "value": "v", "grad_out": "do"}


@lru_cache(maxsize=16)
def read_captured(file: str) -> Inputs:
    """Tensors of a safetensors file: query, key, value, grad_out (or q, k, v, do) as `[B, H, N,
    D]`; metadata is_causal and scale.

    Raises ValueError, in one line, for a file that cannot be read or lacks a tensor.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            metadata, names = opened.metadata() or {}, set(opened.keys())
            tensors = {}
            for name, short in _SPELLINGS.items():
                found = name if name in names else short
                if found not in names:
                    raise ValueError(
                        f"captured={file!r}: no tensor {name!r} or {short!r}; "
                        f"accepted are files that hold {', '.join(_SPELLINGS)}"
                    )
                tensors[name] = opened.get_tensor(found)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"captured={file!r}: {error}; accepted is a safetensors file") from None
    for name, x in tensors.items():
        if x.ndim != 4:
            raise ValueError(
                f"captured={file!r}: {name} has shape {tuple(x.shape)}; accepted are 4 dimensions"
                " [B, H, N, D]"
            )
    q, k = tensors["query"], tensors["key"]
    scale = float(metadata.get("scale", 1 / math.sqrt(q.shape[-1])))
    causal = metadata.get("is_causal", "true").lower() in ("true", "1")
    return Inputs(
        query=q,
        key=k,
        value=tensors["value"],
        grad_out=tensors["grad_out"],
        sees=Sees(causal),
        scale=scale,
    )


def shape_of(inputs: Inputs) -> Shape:
    """The size of given tensors."""
    (b, h, n, d), (_, hk, nk, _), dv = inputs.query.shape, inputs.key.shape, inputs.value.shape[3]
    return Shape(b, h, n, nk, d, None if h == hk else hk, None if d == dv else dv)


def _cut(x: Inputs, shape: Shape, dtype: torch.dtype) -> Inputs:
    """The first batches, heads and tokens of captured tensors; the head dimension stays."""
    q, do = (
        t[: shape.batch, : shape.heads, : shape.n_query].to(dtype) for t in (x.query, x.grad_out)
    )
    k, v = (t[: shape.batch, : shape.key_heads, : shape.n_key].to(dtype) for t in (x.key, x.value))
    return replace(x, query=q, key=k, value=v, grad_out=do)


def _seed(name: str, seed: int) -> int:
    # not hash(), which Python salts anew in every process
    named = sum(ord(c) * 257**i for i, c in enumerate(name))
    return int((named * 1000003 + seed) % 2**63)


def case_of(probe: Probe, shape: Shape, seed: int, dtype: str) -> Case:
    """The case of a probe at about `shape`, with the changes that the probe makes to it."""
    return Case(
        probe.name, shape if probe.change_shape is None else probe.change_shape(shape), seed, dtype
    )
