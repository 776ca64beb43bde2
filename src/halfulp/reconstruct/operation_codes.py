"""Which number a kernel of quantized operands takes each code for: it is given operands that are
codes already, whose scales are 1 by any block, and whose products are with a single 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from halfulp.formats import BlockFormat, Format, round_to
from halfulp.operations import OperationCalls, Tensors, emulated, sizes_of
from halfulp.reconstruct.operation_blocks import BY_NAME
from halfulp.reconstruct.operation_scales import Product, products_of
from halfulp.reconstruct.operation_trials import Run, Trial

LEAST = 16  # numbers that share a scale, in every format
NEAR = 2.0**-7  # of a code: 16 bits, and a scale that is no power of two, round it by less
SAME = 0.95  # of what a code is taken for, that one number has to be
TOLD = 4  # codes, as examples
POWERS = (-3, -2, -1, 1, 2, 3, 4)  # of a scale that is another
MOST = 512  # calls at once
NO_NUMBER = 1e300  # stands for NaN


def codes_asked(run: Run, one: Trial) -> tuple[str, str] | None:
    """The cause and what is said of codes that are each taken for another, or are of another scale;
    None where all are right, or what they are taken for is no function of them, or one factor is
    all that is wrong.
    """
    said: dict[str, str] = {}
    for name, codes, taken, fmt in _asked(run, one):
        for power in POWERS:  # what a wrong scale rounds away is not a wrong code
            if torch.equal(round_to(codes * 2.0**-power, fmt) * 2.0**power, taken):
                text = f"scales of {name} are {2.0**power:g} times what they should be"
                said.setdefault(text, "block-scale")
                break
        else:
            if text := _told(codes.flatten(), taken.flatten(), fmt):
                said.setdefault(f"codes of {name} are taken for others: {text}", "block-codes")
    return (next(iter(said.values())), "; ".join(said)) if said else None


def _asked(run: Run, one: Trial) -> Iterator[tuple[str, Tensor, Tensor, Format]]:
    """Operands by name, what they hold, and what a kernel takes it for, element by element."""
    calls, chosen = one.calls, one.calls.options.get("format")
    if chosen in BY_NAME and list(one.kernel) == ["output"] and len(calls.operands) == 1:
        name, x = next(iter(calls.operands.items()))
        given = _codes(BY_NAME[chosen].element, x.shape[1:]).to(x.dtype)
        result = run(replace(calls, operands={name: given[None]}, manner=""))
        if result is not None:
            yield (
                name,
                given.double(),
                result.tensors["output"][0].double(),
                BY_NAME[chosen].element,
            )
        return
    for product in products_of(calls, one.failing):
        for of in (0, 1):
            role = "gradient" if product.names[of] in calls.grads else product.names[of]
            fmt = calls.operation.floor.steps.get(f"{chosen}_{role}")
            if isinstance(fmt, BlockFormat):
                yield from _of_product(run, calls, product, of, fmt.element)


def _of_product(
    run: Run, calls: OperationCalls, product: Product, of: int, fmt: Format
) -> Iterator[tuple[str, Tensor, Tensor, Format]]:
    """One operand of a product, its columns one after the other by those of the other that are 1
    at one place alone.
    """
    sizes = sizes_of(calls)
    length, rows = sizes[product.along], [sizes[s] for s in product.rows]
    count = min(-(-length // rows[1 - of]), MOST)
    places = torch.arange(count * rows[1 - of]).remainder(length).view(count, -1)
    own = _codes(fmt, (rows[of], length))
    other = torch.nn.functional.one_hot(places, length).to(own.dtype)
    given: Tensors = {
        n: torch.ones((count, *x.shape[1:]), dtype=x.dtype)
        for n, x in (calls.operands | calls.grads).items()
    }
    for at, x in ((of, own.expand(count, -1, -1)), (1 - of, other)):
        x = x.mT if product.turned[at] else x
        given[product.names[at]] = x.to(given[product.names[at]].dtype).contiguous()
    asked = replace(
        calls,
        operands={n: given[n] for n in calls.operands},
        grads={n: given[n] for n in calls.grads} if product.result.startswith("grad_") else {},
        manner="",
    )
    result = run(asked)
    if result is None or product.result not in result.tensors:
        return
    taken = result.tensors[product.result].double()
    if torch.equal(taken, emulated(asked, calls.operation.stock)[product.result].double()):
        return  # in another format, as many kernels have it
    # rows first: a result of this operand's rows may have them last
    symbols = calls.operation.shapes_of_results[product.result].split()
    taken = taken if symbols[0] == product.rows[of] else taken.mT
    yield product.names[of], own[:, places].transpose(0, 1), taken, fmt


def _codes(fmt: Format, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """All codes in turn, the largest at the first place of every sixteen, so that a scale is 1."""
    numbers = torch.linspace(-fmt.max, fmt.max, 2**12, dtype=torch.float64)
    small = fmt.max * 2.0 ** -torch.arange(0, 40, 0.05, dtype=torch.float64)
    every = torch.unique(round_to(torch.cat([numbers, small, -small]), fmt))
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    x: Tensor = every[order][torch.arange(shape[0] * shape[1]) % len(every)].view(*shape)
    x[:, ::LEAST] = fmt.max
    return x


def _told(codes: Tensor, taken: Tensor, fmt: Format) -> str:
    """What codes are taken for, where each is for one number."""
    taken = taken.nan_to_num(NO_NUMBER, torch.inf, -torch.inf)
    off = (taken - codes).abs() > NEAR * codes.abs()
    held = {float(code): taken[codes == code] for code in torch.unique(codes)}
    usual = {code: float(t.nanmedian()) for code, t in held.items()}
    if not bool(off.any()):
        return ""
    fits = torch.stack([t == usual[c] for c, of in held.items() for t in of]).double().mean()
    other = {c: t for c, t in usual.items() if abs(t - c) > NEAR * abs(c)}
    powers = {round(t / c, 2) for c, t in usual.items() if c}
    if float(fits) < SAME or not other or len(powers) == 1:
        return ""
    few = sorted(other, key=lambda c: (c < 0, abs(c)))
    few = [c for c in few if c > 0] or few
    said = {c: "NaN" if t == NO_NUMBER else f"{t:g}" for c, t in other.items()}
    told = ", ".join(f"{c:g} for {said[c]}" for c in few[:: max(1, len(few) // TOLD)][:TOLD])
    beyond = max(abs(c) for c in other)
    where = ", below the smallest normal one alone" if beyond < fmt.min_normal else ""
    return f"{told}{' …' if len(few) > TOLD else ''}{where}"
