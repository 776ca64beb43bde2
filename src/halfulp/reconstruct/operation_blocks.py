"""What kernels do otherwise where an operation rounds to a block format: quantizing is a definition
of its own, in steps (magnitudes, their largest, scales, quotients by them, codes), and at each of
these the mistakes of the table may be made; beside other rules for scales and codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.formats import (
    BF16,
    FORMATS,
    FP32,
    OCP_E4M3,
    OCP_E5M2,
    BlockFormat,
    Format,
    round_to,
)
from halfulp.operations import OperationCalls, Rounding
from halfulp.reconstruct.operation_mistakes import (
    AlongAlter,
    Alter,
    cut,
    other_values,
    rare_shifts,
    rounded,
    shifts,
)
from halfulp.reconstruct.operation_trials import Trial
from halfulp.reconstruct.operation_ways import Way

_Rule = Callable[[Tensor, BlockFormat], Tensor]  # of a step's value
_Changes = Mapping[str, _Rule]  # by step
_Quantize = Callable[..., Tensor]  # (x, fmt=...) -> x
_SCALES = ("magnitudes", "largest", "scale", "read")  # steps whose mistakes are of a scale
_SAID = {
    "magnitudes": "what a scale is taken from",
    "largest": "the largest of a block",
    "scale": "a scale",
    "read": "the scale that codes are multiplied by",
    "scaled": "what is rounded to codes",
    "codes": "a code",
}
_ALONG = ("rows", "blocks", "a block")
BY_NAME = {f.name: f for f in FORMATS if isinstance(f, BlockFormat)}
"""Block formats, by what the option `format` of a quantizer calls them."""


def block_ways(calls: OperationCalls, base: Rounding) -> Iterator[Way]:
    """Other scales and codes, at every step that this recipe rounds to a block format, and where
    the operation itself rounds to one.
    """
    yield from _ways_of(calls, base, _tweaks())


def block_mistakes(calls: OperationCalls, base: Rounding) -> Iterator[Way]:
    """Every mistake of the table at every step of quantizing."""
    yield from _ways_of(calls, base, _mistakes())


def _ways_of(
    calls: OperationCalls, base: Rounding, changes: Iterator[tuple[str, str, _Quantize]]
) -> Iterator[Way]:
    chosen = calls.options.get("format")
    steps = {n: f for n, f in base.steps.items() if isinstance(f, BlockFormat)}
    steps = {n: f for n, f in steps.items() if n.startswith(f"{chosen}_")}
    for cause, text, quantize in changes if steps or chosen in BY_NAME else ():
        if steps:
            for role, of in _roles(steps).items():
                other = {n: partial(quantize, fmt=steps[n]) for n in of}
                yield Way(cause, f"{text}, of {role}", formats=other)
        else:
            yield Way(cause, text, of_calls=partial(_result, quantize))


def _roles(steps: dict[str, BlockFormat]) -> dict[str, list[str]]:
    roles = {"every operand": list(steps)}
    return roles | {f"{name.rpartition('_')[2]}s": [name] for name in steps}


def _result(quantize: _Quantize, calls: OperationCalls) -> Way:
    x, fmt = next(iter(calls.operands.values())), BY_NAME[calls.options["format"]]
    output = torch.stack([quantize(one.float(), fmt=fmt) for one in x])
    return Way("", "", results=lambda found: found | {"output": output})


def _tweaks() -> Iterator[tuple[str, str, _Quantize]]:
    for text, scale in _OTHER_SCALES.items():
        yield "block-scale", text, partial(_quantized, changes={"scale": scale})
    yield "block-scale", "there is no scale for the tensor", partial(_quantized, tensor=False)
    yield (
        "block-scale",
        "scales are taken from positive numbers alone",
        partial(_quantized, changes={"signed": lambda x, _: x.clamp_min(0)}),
    )
    for size in (16, 32, 64, 128, None):
        text = f"blocks are of {size or 'a whole row'}"
        yield "block-scale", text, partial(_quantized, size=size, sized=True)
    for text, code in _OTHER_CODES.items():
        yield "block-codes", text, partial(_quantized, code=code)
    for block in (16, 32):
        yield "end", f"what no whole {block} cover is left out", partial(_ended, block=block)


def _power(rule: Callable[[Tensor], Tensor]) -> _Rule:
    """A power of two, so rounded that the largest number of a block becomes the format's."""

    def scale(x: Tensor, fmt: BlockFormat) -> Tensor:
        return torch.exp2(rule((x / fmt.element.max).log2()).clamp(-127, 127))

    return scale


_OTHER_SCALES: dict[str, _Rule] = {
    "scales are four times their block's": lambda s, _: s * 4,
    "scales are a quarter of their block's": lambda s, _: s / 4,
    "scales are of codes up to 240": lambda s, f: s * (f.element.max / 240),
    "scales are of codes up to 256": lambda s, f: s * (f.element.max / 256),
    "scales are of codes up to 4": lambda s, f: s * (f.element.max / 4),
    "scales are of codes up to 8": lambda s, f: s * (f.element.max / 8),
    "one scale for all blocks": lambda s, _: s.amax().expand(s.shape),
    "one scale a row": lambda s, _: s.amax(-2, keepdim=True).expand(s.shape),
    "scales are powers of two": lambda s, _: torch.exp2(s.log2().floor()),
    "scales are powers of two, rounded up": lambda s, _: torch.exp2(s.log2().ceil()),
    "scales are rounded to bf16": lambda s, _: rounded(BF16)(s.float()).double(),
    "scales are cut to bf16": lambda s, _: cut(BF16)(s.float()).double(),
}
_POWERS: dict[str, _Rule] = {
    "scales are the power of two nearest to the largest / the format's": _power(torch.round),
    "scales are the power of two above the largest / the format's": _power(torch.ceil),
    "scales are the power of two below the largest / the format's": _power(torch.floor),
}
_OTHER_CODES: dict[str, Callable[[Tensor, Format], Tensor]] = {
    "codes are cut instead of rounded": lambda x, f: round_to(x, f, rounding="toward_zero"),
    "codes are rounded up": lambda x, f: round_to(x, f, rounding="up"),
    "codes are rounded down": lambda x, f: round_to(x, f, rounding="down"),
    "codes below the smallest normal one are lost": lambda x, f: _without_subnormals(
        round_to(x, f), f, x * 0
    ),
    "there are no codes below the smallest normal one": lambda x, f: _without_subnormals(
        round_to(x, f), f, (x / f.min_normal).round() * f.min_normal
    ),
    "codes end at 240": lambda x, f: round_to(x, f).clamp(-240, 240),
    "codes between two numbers go away from zero": lambda x, f: round_to(x * (1 + 2.0**-40), f),
    "codes between two numbers go toward zero": lambda x, f: round_to(x * (1 - 2.0**-40), f),
    "codes are E5M2": lambda x, _: round_to(x, OCP_E5M2.with_(overflow="saturate")),
    "codes are E4M3": lambda x, _: round_to(x, OCP_E4M3.with_(overflow="saturate")),
    "codes have lost their sign": lambda x, f: round_to(x, f).abs(),
    "codes are integers": lambda x, f: x.round().clamp(-f.max, f.max),
    "codes are not rounded": lambda x, f: x.clamp(-f.max, f.max),
}


def _mistakes() -> Iterator[tuple[str, str, _Quantize]]:
    for text, rule in _POWERS.items():
        of_largest = partial(_quantized, changes={"from_largest": rule})
        yield "block-scale", text, of_largest
    for text, rule in _OTHER_SCALES.items():
        other = text.replace("scales are", "codes are multiplied by scales that are", 1)
        if other != text:
            yield "block-scale", other, partial(_quantized, changes={"read": rule})
    for block in (16, 32, 64, 128):
        text = f"a scale is of the {{}} {block} numbers of a block"
        for which, part in (("first", partial(_of_part, block, 0)),
                            ("last", partial(_of_part, block, -1))):  # fmt: skip
            change = {"magnitudes": part}
            yield "block-scale", text.format(which), partial(_quantized, changes=change)
    for step, said in _SAID.items():
        cause = "block-scale" if step in _SCALES else "block-codes"
        known = torch.tensor([1e-3, 500.0]) if step in ("scaled", "codes") else torch.tensor(1e3)
        for _, text, alter in other_values(known):
            if alter is not torch.zeros_like or cause == "block-codes":
                change = {step: partial(_by_value, alter)}
                yield cause, f"{said} {text}", partial(_quantized, changes=change)
        dims = _ALONG if cause == "block-codes" else _ALONG[:2]
        for dim, along in enumerate(dims):
            for _, text, shift in (*shifts(), *rare_shifts()):
                change = {step: partial(_along, shift, dim)}
                yield cause, f"{said} {text}, along {along}", partial(_quantized, changes=change)


def _along(alter: AlongAlter, dim: int, x: Tensor, _: BlockFormat) -> Tensor:
    return alter(x, dim=dim)


def _of_part(block: int, which: int, x: Tensor, _: BlockFormat) -> Tensor:
    return torch.split(x, block, -1)[which]


def _by_value(alter: Alter, x: Tensor, _: BlockFormat) -> Tensor:
    return alter(x)


def _ended(x: Tensor, fmt: BlockFormat, block: int) -> Tensor:
    whole = x.shape[-1] // block * block
    kept = torch.cat([x[..., :whole], torch.zeros_like(x[..., whole:])], -1)
    return round_to(kept, fmt)


def _without_subnormals(x: Tensor, fmt: Format, instead: Tensor) -> Tensor:
    return torch.where(x.abs() < fmt.min_normal, instead, x)


def _same(x: Tensor, _: BlockFormat) -> Tensor:
    return x


def _quantized(
    x: Tensor,
    fmt: BlockFormat,
    changes: _Changes | None = None,
    code: Callable[[Tensor, Format], Tensor] = round_to,
    tensor: bool = True,
    size: int | None = None,
    sized: bool = False,
) -> Tensor:
    """Rows of x quantized block by block, each step changed so."""

    def step(name: str, value: Tensor) -> Tensor:
        return (changes or {}).get(name, _same)(value, fmt)

    blocks = blocks_of(x, (size if sized else fmt.block_size) or x.shape[-1])
    magnitudes = step("magnitudes", step("signed", blocks).abs())
    largest = step("largest", magnitudes.amax(-1, keepdim=True))
    if changes and "from_largest" in changes:
        scales = step("from_largest", largest)
    else:
        scales = scales_of(x.double(), largest, fmt, tensor)
    scales = step("scale", scales)
    scaled = step("scaled", blocks / torch.where(scales == 0, torch.inf, scales))
    codes = step("codes", code(scaled.flatten(1), fmt.element).view(blocks.shape))
    found = codes * step("read", scales)
    return found.flatten(1)[:, : x.shape[-1]].reshape(x.shape).to(x.dtype)


def blocks_of(x: Tensor, length: int) -> Tensor:
    """Rows of x as `[rows, blocks, length]`, in fp64, filled up with zeros."""
    wide = x.double().reshape(-1, x.shape[-1])
    return functional.pad(wide, (0, -wide.shape[-1] % length)).view(len(wide), -1, length)


def scales_of(x: Tensor, largest: Tensor, fmt: BlockFormat, tensor: bool = True) -> Tensor:
    """The scales of a format's standard, by the largest magnitude of each block."""
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


def codes_read(trial: Trial) -> tuple[str, str] | None:
    """The cause and what is said of a quantizer that no way explains: its scales where its numbers
    are codes of another scale, block by block, its codes where each is always given as another.
    """
    fmt = BY_NAME.get(trial.calls.options.get("format", ""))
    if fmt is None or list(trial.kernel) != ["output"]:
        return None
    x = next(iter(trial.calls.operands.values()))[0].double()
    given = trial.kernel["output"][0]
    blocks, found = (blocks_of(t, fmt.block_size or t.shape[-1]) for t in (x, given))
    scales = scales_of(x, blocks.abs().amax(-1, keepdim=True), fmt)
    scales = torch.where(scales == 0, 1.0, scales)
    # codes times scales in float32 are no exact products
    due = round_to((blocks / scales).flatten(1), fmt.element).view(blocks.shape)
    own = round_to((found / scales).flatten(1), _PRODUCT).view(blocks.shape)
    found = own * scales
    wrong = (own != due).any(-1)
    powers = {}
    for power in (-3, -2, -1, 1, 2, 3):
        other = scales * 2.0**power
        codes = round_to((blocks / other).flatten(1), fmt.element).view(blocks.shape)
        same = wrong & (codes * other == found).all(-1)
        if bool(same.any()):
            powers[f"{2.0**power:g}"] = float(same.sum() / wrong.sum())
    if sum(powers.values()) > MOST:
        told = ", ".join(f"{by} times ({100 * of:.0f} %)" for by, of in powers.items())
        share = f"{100 * float(wrong.double().mean()):.0f} % of blocks have scales that are"
        return "block-scale", f"{share} {told} what they should be"
    off = (own != due) & own.isfinite()
    pairs = torch.unique(torch.stack([due[off], own[off]], 1), dim=0)
    of_code = {float(a): float(b) for a, b in pairs[:4]}
    often = int(off.sum()) >= OFTEN * len(pairs) > 0
    if often and len(pairs) == len(torch.unique(pairs[:, 0])):
        told = ", ".join(f"{a:g} as {b:g}" for a, b in of_code.items())
        return "block-codes", f"codes are given as others: {told}{' …' * (len(pairs) > 4)}"
    by = (own * blocks / scales).sum(-1) / (blocks / scales).square().sum(-1).clamp_min(1e-300)
    rest = (own - by[..., None] * blocks / scales).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-300)
    other = wrong & (rest < CODED) & ((by - 1).abs() > CODED / 4)
    if float(other.sum()) > MOST * float(wrong.sum()):
        low, high = (float(f(by[other])) for f in (torch.min, torch.max))
        share = f"{100 * float(wrong.double().mean()):.0f} % of blocks are"
        return (
            "block-scale",
            f"{share} read by {low:.3g} to {high:.3g} times the scale of their codes",
        )
    grid = bool((round_to(own.flatten(1), fmt.element).view(own.shape) == own).all())
    if not grid:
        of = 100 * float(wrong.double().mean())
        return "block-scale", f"{of:.0f} % of blocks are no codes times their scale"
    distance = (own - due)[off].abs()
    size = torch.maximum(own.abs(), due.abs())[off].clamp_min(fmt.element.min_normal)
    next_to = 2.0 ** (size.log2().floor() - fmt.element.mantissa_bits)
    if float((distance <= 2 * next_to).double().mean()) < MOST:
        return None  # not rounded otherwise: another number's
    nearby = float(distance.mean())
    low, high = (float(f(blocks[off].div(scales.expand_as(blocks)[off]).abs())) for f in (
        torch.min, torch.max))  # fmt: skip
    text = f"codes of numbers between {low:.3g} and {high:.3g} scales are off, by {nearby:.2g}"
    return "block-codes", text


_PRODUCT = Format("e11m12", 11, 12)  # what a product of few bits has of them, less the last
MOST = 0.8  # share of the blocks that are wrong, from which on scales explain them
CODED = 0.1  # relative error that codes of three bits may make of a block
OFTEN = 4  # times that each code is given as the same other one, from which on that is no chance
