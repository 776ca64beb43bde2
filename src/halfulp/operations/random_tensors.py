"""What the probes of operations are drawn with, and what several of them ask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halfulp.operations.operation_data import Draw, OperationProbe, Sizes, Tensors


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=generator)


def normal_rows(sizes: Sizes, generator: torch.Generator) -> Tensors:
    """An input `[T, D]` of them."""
    return {"input": normal(generator, sizes["T"], sizes["D"])}


def with_(draw: Draw, **changes: Callable[[Tensor], Tensor]) -> Draw:
    """The same draw with some of its tensors changed."""

    def changed(sizes: Sizes, generator: torch.Generator) -> Tensors:
        x = draw(sizes, generator)
        return x | {name: change(x[name]) for name, change in changes.items()}

    return changed


def outlier(draw: Draw, feature: int = 3, factor: float = 300.0) -> Draw:
    """The same draw with one feature of its input `[..., D]` far larger than the others."""

    def drawn(sizes: Sizes, generator: torch.Generator) -> Tensors:
        x = draw(sizes, generator)
        x["input"][..., feature % x["input"].shape[-1]] *= factor
        return x

    return drawn


def opposed_tokens(draw: Draw) -> Draw:
    """The same draw with a second half of its tokens that nearly takes back the first: what is
    left of a sum over tokens is small beside what its parts lose.
    """

    def drawn(sizes: Sizes, generator: torch.Generator) -> Tensors:
        x, half = draw(sizes, generator), sizes["T"] // 2
        x["input"][half : 2 * half] = x["input"][:half]
        grad = normal(generator, sizes["T"], sizes["D"])
        grad[half : 2 * half] = -grad[:half] * (1 + 2.0**-5 * grad[half : 2 * half].sign())
        return x | {"grad_output": grad}

    return drawn


def apart(rows: Tensor) -> Tensor:
    """The same rows `[T, N]`, far above 0 or far below it: what is small beside one row's maximum
    is nothing in float32 beside another's. By the sequence of Thue and Morse, which no shift leaves
    as it is, so that rows of any distance differ.
    """
    below = [number.bit_count() % 2 == 1 for number in range(len(rows))]
    return rows + torch.where(torch.tensor(below), -120.0, 120.0)[:, None]


def rows_apart(draw: Draw) -> OperationProbe:
    """The probe of such rows."""
    source = "FlashDecoding++, arXiv 2311.01282 (one maximum for all rows)"
    return OperationProbe("rows_apart", "a maximum that rows share", source, draw)


def odd_sizes(
    draw: Draw, exposes: str = "rows and features past the last whole block", **sizes: int
) -> OperationProbe:
    """The probe of 37 rows of 77, or of other sizes that are no multiple of any block."""
    source, sizes = "masked loads of Triton kernels, ragged tiles", sizes or {"D": 77}
    return OperationProbe("odd_sizes", exposes, source, draw, sizes={"T": 37, **sizes})
