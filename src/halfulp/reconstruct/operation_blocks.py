"""What kernels do otherwise where an operation rounds to a block format: other scales, other codes,
ends left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.formats import (
    FORMATS,
    FP32,
    OCP_E4M3,
    OCP_E5M2,
    BlockFormat,
    Format,
    round_to,
)
from halfulp.operations import OperationCalls, Rounding
from halfulp.reconstruct.operation_ways import Way

_Scales = Callable[[Tensor, Tensor], Tensor]  # (scales, largest magnitudes) -> scales
_Codes = Callable[[Tensor, Format], Tensor]


def block_ways(calls: OperationCalls, base: Rounding) -> Iterator[Way]:
    """Other scales and codes, at every step that this recipe rounds to a block format, and where
    the operation itself rounds to one.
    """
    chosen = calls.options.get("format")
    steps = {n: f for n, f in base.steps.items() if isinstance(f, BlockFormat)}
    steps = {n: f for n, f in steps.items() if n.startswith(f"{chosen}_")}
    known = {f.name: f for f in FORMATS if isinstance(f, BlockFormat)}
    for cause, text, quantize in _tweaks():
        if steps:
            for role, of in _roles(steps).items():
                other = {n: partial(quantize, fmt=steps[n]) for n in of}
                yield Way(cause, f"{text}, of {role}", formats=other)
        elif chosen in known:
            yield Way(cause, text, of_calls=partial(_result, known, quantize))


def _roles(steps: dict[str, BlockFormat]) -> dict[str, list[str]]:
    roles = {"every operand": list(steps)}
    return roles | {f"{name.rpartition('_')[2]}s": [name] for name in steps}


def _result(known: dict[str, BlockFormat], quantize: Any, calls: OperationCalls) -> Way:
    x, fmt = next(iter(calls.operands.values())), known[calls.options["format"]]
    output = torch.stack([quantize(one.float(), fmt=fmt) for one in x])
    return Way("", "", results=lambda found: found | {"output": output})


def _tweaks() -> Iterator[tuple[str, str, Callable[..., Tensor]]]:
    scales: tuple[tuple[str, _Scales], ...] = (
        ("scales are half of their block's", lambda s, _: s / 2),
        ("scales are twice their block's", lambda s, _: s * 2),
        ("scales are four times their block's", lambda s, _: s * 4),
        ("scales are the neighboring block's", lambda s, _: s.roll(1, -2)),
        ("scales are another row's", lambda s, _: s.roll(1, 0)),
        ("one scale for all blocks", lambda s, _: s.amax().expand(s.shape)),
        ("one scale a row", lambda s, _: s.amax(-2, keepdim=True).expand(s.shape)),
        ("scales are fixed at 1", lambda s, _: torch.ones_like(s)),
        ("scales are powers of two", lambda s, _: torch.exp2(s.log2().floor())),
    )
    for text, scale in scales:
        yield "block-scale", text, partial(_quantized, scale=scale)
    yield "block-scale", "there is no scale for the tensor", partial(_quantized, tensor=False)
    yield (
        "block-scale",
        "codes are multiplied by other scales, a row's neighbor's",
        partial(_quantized, read=lambda s, _: s.roll(1, 0)),
    )
    yield (
        "block-scale",
        "codes are multiplied by half of their scales",
        partial(_quantized, read=lambda s, _: s / 2),
    )
    for size in (16, 32, 64, 128, None):
        text = f"blocks are of {size or 'a whole row'}"
        yield "block-scale", text, partial(_quantized, size=size, sized=True)
    codes: tuple[tuple[str, _Codes], ...] = (
        ("codes are cut instead of rounded", lambda x, f: round_to(x, f, rounding="toward_zero")),
        ("codes below the smallest normal one are lost",
         lambda x, f: _without_subnormals(round_to(x, f), f, x * 0)),
        ("there are no codes below the smallest normal one", lambda x, f: _without_subnormals(
            round_to(x, f), f, (x / f.min_normal).round() * f.min_normal)),
        ("codes end at 240", lambda x, f: round_to(x, f).clamp(-240, 240)),
        ("codes between two numbers go away from zero",
         lambda x, f: round_to(x * (1 + 2.0**-40), f)),
        ("codes are E5M2", lambda x, _: round_to(x, OCP_E5M2.with_(overflow="saturate"))),
        ("codes are E4M3", lambda x, _: round_to(x, OCP_E4M3.with_(overflow="saturate"))),
    )  # fmt: skip
    for text, code in codes:
        yield "block-codes", text, partial(_quantized, code=code)
    for block in (16, 32):
        yield "end", f"what no whole {block} cover is left out", partial(_ended, block=block)


def _ended(x: Tensor, fmt: BlockFormat, block: int) -> Tensor:
    whole = x.shape[-1] // block * block
    kept = torch.cat([x[..., :whole], torch.zeros_like(x[..., whole:])], -1)
    return round_to(kept, fmt)


def _without_subnormals(x: Tensor, fmt: Format, instead: Tensor) -> Tensor:
    return torch.where(x.abs() < fmt.min_normal, instead, x)


def _quantized(
    x: Tensor,
    fmt: BlockFormat,
    scale: _Scales | None = None,
    read: _Scales | None = None,
    code: _Codes = round_to,
    tensor: bool = True,
    size: int | None = None,
    sized: bool = False,
) -> Tensor:
    """Rows of x quantized block by block: the scales of the format changed by `scale` before they
    divide, by `read` where they multiply again.
    """
    wide = x.double().reshape(-1, x.shape[-1])
    length = (size if sized else fmt.block_size) or wide.shape[-1]
    blocks = functional.pad(wide, (0, -wide.shape[-1] % length)).view(len(wide), -1, length)
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = _scales(wide, largest, fmt, tensor)
    scales = scale(scales, largest) if scale is not None else scales
    scaled = blocks / torch.where(scales == 0, torch.inf, scales)
    found = code(scaled.flatten(1), fmt.element).view(blocks.shape)
    found = found * (read(scales, largest) if read is not None else scales)
    return found.flatten(1)[:, : wide.shape[-1]].reshape(x.shape).to(x.dtype)


def _scales(x: Tensor, largest: Tensor, fmt: BlockFormat, tensor: bool) -> Tensor:
    if fmt.scale.mantissa_bits == 0:
        power = torch.frexp(largest)[1].double() - 1 - fmt.element.max_exponent
        return torch.exp2(power.clamp(-127, 127))
    whole = torch.ones((), dtype=torch.float64)
    if fmt.tensor_scale and tensor:
        whole = (x.abs().amax().float() / (fmt.scale.max * fmt.element.max)).double()
    whole = torch.where(whole == 0, 1.0, whole)
    share = largest / (fmt.element.max * whole)
    return (
        round_to(share, replace(fmt.scale, overflow="saturate") if fmt.scale is not FP32 else FP32)
        * whole
    )
