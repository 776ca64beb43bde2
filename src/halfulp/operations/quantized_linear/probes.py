"""Inputs that expose what goes wrong in a linear layer of quantized operands, for every format."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.operations.operation_data import Draw, Sizes, Tensors
from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.quantized_linear.recipes import FORMATS
from halfulp.operations.random_tensors import normal

INDEPENDENT = ()  # rows share scales

_EVERY = 16  # no block is shorter


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    t, k, n = sizes["T"], sizes["K"], sizes["N"]
    return {
        "input": normal(g, t, k),
        "weight": normal(g, n, k) / k**0.5,
        "grad_output": normal(g, t, n),
    }


def _levels(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Every call at levels of its own, far from 1: one operand's may be high, and the others are so
    much lower that no product of two leaves float16.
    """
    high, place = int(torch.randint(0, 13, (), generator=g)), int(torch.randint(3, (), generator=g))
    powers = torch.randint(-12, 5 - high, (3,), generator=g)
    powers[place] = high
    drawn = zip(_plain(sizes, g).items(), powers.float().exp2(), strict=True)
    return {name: x * p for (name, x), p in drawn}


def _ranges(block: int, most: int) -> Draw:
    """Blocks of all sizes side by side along what each product sums over, of equal share in it."""

    def powers(length: int) -> Tensor:
        # 7 is prime to 3 and to 11: every power occurs, and neighbors lie far apart
        return torch.exp2((torch.arange(length) // block * 7 % (2 * most + 1) - most).float())

    def draw(sizes: Sizes, g: torch.Generator) -> Tensors:
        x = _plain(sizes, g)
        t, k, n = (powers(sizes[symbol]) for symbol in "TKN")
        return {
            "input": x["input"] * k / t[:, None],
            "weight": x["weight"] / k * n[:, None],
            "grad_output": x["grad_output"] * t[:, None] / n,
        }

    return draw


_FP8 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_FP4 = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _on_grid(codes: Tensor) -> Draw:
    """Codes, all of one sign, and a largest in every block: nothing is lost by quantizing, and what
    sums lose is seen.
    """

    highest = codes[-24:]  # sums of which need all digits

    def draw(sizes: Sizes, g: torch.Generator) -> Tensors:
        def matrix(rows: int, columns: int, level: float, first: int = 0) -> Tensor:
            x = highest[torch.randint(len(highest), (rows, columns), generator=g)]
            # every block's largest is the format's: its scale is the level, and codes stay codes
            x[::_EVERY], x[:, first::_EVERY] = codes[-1], codes[-1]
            return x * level

        t, k, n = sizes["T"], sizes["K"], sizes["N"]
        grad = (
            matrix(t, n, 1.0).to(torch.float8_e5m2).float() if len(codes) > 7 else matrix(t, n, 1)
        )
        return {
            "input": matrix(t, k, 1.0),
            "weight": matrix(n, k, 2.0**-6, first=1),
            "grad_output": grad * 2.0**-3,
        }

    return draw


def _lowest_codes(codes: Tensor) -> Draw:
    """Codes below the smallest normal number beside the largest of all, which meets zeros."""
    lowest = codes[: 7 if len(codes) > 7 else 1]

    def draw(sizes: Sizes, g: torch.Generator) -> Tensors:
        x = _on_grid(codes)(sizes, g)
        x["input"] = lowest[torch.randint(len(lowest), x["input"].shape, generator=g)]
        x["input"][:, ::_EVERY] = codes[-1]
        x["weight"][:, ::_EVERY] = 0.0
        return x

    return draw


def _zeros(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Blocks, rows and a whole gradient of zeros."""
    x = _plain(sizes, g)
    x["input"][:, :32] = 0.0
    x["input"][0] = 0.0
    x["weight"][0] = 0.0
    x["grad_output"] *= 0.0
    return x


_MX = "OCP Microscaling Formats 1.0"
_H100 = "DeepSeek-V3, arXiv 2412.19437 (14-bit accumulators)"


def _of(name: str) -> tuple[Probe, ...]:
    codes = _FP4 if name.endswith("fp4") else _FP8
    block = FORMATS[name].block_size or _EVERY
    exact, most = _on_grid(codes), 1 if name == "fp8_tensor" else 5
    size = 160 if block == 128 else 80
    every: tuple[tuple[str, str, str, Draw, dict[str, int]], ...] = (
        (
            "levels",
            "errors that any input shows, and scales that are stale or fixed",
            "TransformerEngine PR 3281 (finite output, zero gradients)",
            _levels,
            {},
        ),
        (
            "ranges",
            "a scale of another block or row, or of more than its block",
            "DeepGEMM 189 (10 × the error by the layout of scales)",
            _ranges(block, most),
            {"T": size, "K": size, "N": size},
        ),
        ("long_output", "sums in low precision", _H100, exact, {"T": 4, "K": 8192, "N": 4}),
        ("long_input", "dX summed in low precision", _H100, exact, {"T": 4, "K": 4, "N": 8192}),
        ("long_weight", "dW summed in low precision", _H100, exact, {"T": 8192, "K": 4, "N": 4}),
        (
            "lowest_codes",
            "codes below the smallest normal number, lost",
            _MX,
            _lowest_codes(codes),
            {},
        ),
        ("zeros", "scales of zero", "torchao PR 4798", _zeros, {}),
        (
            "odd_sizes",
            "a last block that is not whole",
            "masked loads of Triton kernels, ragged tiles",
            _plain,
            {"T": 37, "K": 77, "N": 19},
        ),
    )
    of_one_a_family = ("long_input", "long_weight")
    return tuple(
        Probe(f"{probe}_{name}", exposes, source, draw, options={"format": name}, sizes=sizes)
        for probe, exposes, source, draw, sizes in every
        if probe not in of_one_a_family or name in ("fp8_row", "mxfp8", "nvfp4")
    )


PROBES = tuple(probe for name in FORMATS for probe in _of(name))
