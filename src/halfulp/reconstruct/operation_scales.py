"""Which scale a block of a quantized product is multiplied by, read off what a kernel makes of
blocks that each hold one code: the quotient of result and exact product is that of the scale that
was used and the one that is due, and over some draws of scales only one block's fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.formats import BlockFormat
from halfulp.operations import OperationCalls, Tensors, emulated, sizes_of
from halfulp.reconstruct.operation_mistakes import fitting, moved
from halfulp.reconstruct.operation_trials import Run, Trial

DRAWS = 8  # of the powers of two that are scales
POWERS = (-22, -9)  # such as every format and dtype has; the other operand's scales are 1
NEAR = 0.02  # of a power of two: 16 bits round a result by less
MOST = 0.9  # of the wrong scales, which one rule has to tell
KNOWN = 0.5  # of them that are another block's, from which on all are: by chance none is
COLUMNS = 12  # of a product, at most
SQUARE = 128


class Product(NamedTuple):
    """A result that is a product: its operands, whether each is transposed for it, and symbols."""

    result: str
    names: tuple[str, str]
    turned: tuple[bool, bool]  # where a matrix is [summed, rows]
    rows: tuple[str, str]
    along: str


class Scales(NamedTuple):
    """What is said of scales that are not their blocks' own."""

    text: str
    of_others: bool = False  # they are those of other blocks


def scales_read(run: Run, one: Trial) -> Scales | None:
    """What is said of a product whose operands are multiplied by other scales than
    their blocks'; None where they are right, or no product of quantized operands fails.
    """
    calls, said = one.calls, list[Scales]()
    for product in products_of(calls, one.failing):
        for of in (0, 1):
            said += [told._replace(text=f"{told.text}, in {product.result}")
                     for told in _told(run, calls, product, of)]  # fmt: skip
    if not said:
        return None
    return Scales("; ".join(x.text for x in said[:2]), any(x.of_others for x in said[:2]))


def products_of(calls: OperationCalls, failing: tuple[str, ...]) -> Iterator[Product]:
    """Results that fail and are products of quantized operands."""
    chosen = calls.options.get("format")
    formats = {n: f for n, f in calls.operation.floor.steps.items() if isinstance(f, BlockFormat)}
    if not any(n.startswith(f"{chosen}_") for n in formats):
        return
    given = calls.operands | calls.grads
    shapes = {n: s.split() for n, s in calls.operation.shapes_of_operands.items() if n in given}
    pairs = [(a, b) for i, a in enumerate(shapes) for b in list(shapes)[i + 1 :]]
    for result in failing:
        own = calls.operation.shapes_of_results[result].split()
        for pair in pairs:
            along = set(shapes[pair[0]]) & set(shapes[pair[1]]) - set(own)
            rows = [[s for s in shapes[n] if s not in along] for n in pair]
            if len(along) == 1 and sorted(rows) == sorted([s] for s in own):
                summed = along.pop()
                turned = [shapes[n].index(summed) == 0 for n in pair]
                yield Product(result, pair, (turned[0], turned[1]),
                               (rows[0][0], rows[1][0]), summed)  # fmt: skip


def _told(run: Run, calls: OperationCalls, product: Product, of: int) -> Iterator[Scales]:
    """What is said of one operand's scales."""
    sizes = sizes_of(calls)
    length, rows = sizes[product.along], sizes[product.rows[of]]
    steps = calls.operation.floor.steps
    formats = [f for n, f in steps.items() if n.startswith(f"{calls.options['format']}_")
               and isinstance(f, BlockFormat)]  # fmt: skip
    block = min((f.block_size or length for f in formats), default=length)
    count = -(-length // block)
    most, generator = formats[0].element.max, torch.Generator().manual_seed(0)
    for group in (1, SQUARE, rows):
        shape = (DRAWS, -(-rows // group), count)
        powers = torch.randint(*POWERS, shape, generator=generator).double()
        asked = _asked(calls, product, of, powers, (group, block, 0), most)
        due = _due(asked, product)
        made = emulated(asked, calls.operation.floor)[product.result].double()
        if bool(((made / due).log2().abs() < NEAR).all()):
            break
    else:
        return
    seen = []
    for number in dict.fromkeys((0, 1, 2, count // 2, count - 1)):
        if number < count:
            asked = _asked(calls, product, of, powers, (group, block, number), most)
            given = run(asked)
            if given is None or product.result not in given.tensors:
                return
            off = (given.tensors[product.result].double() / _due(asked, product)).log2()
            # rows first: a result of this operand's rows may have them last
            own = calls.operation.shapes_of_results[product.result].split()
            off = off if own[0] == product.rows[of] else off.mT
            every = torch.arange(off.shape[2])
            seen.append((number, off[:, :, every[:: -(-len(every) // COLUMNS)]]))
    yield from _rules(_Seen(product.names[of], product.rows[of], group, powers, seen))


def _asked(
    calls: OperationCalls,
    product: Product,
    of: int,
    powers: Tensor,
    where: tuple[int, int, int],
    most: float,
) -> OperationCalls:
    """Calls in which every block of one operand holds one code, times its power of two, and the
    other operand's blocks have one scale, and cancel but for one of them.
    """
    group, block, number = where
    sizes = sizes_of(calls)
    length, rows = sizes[product.along], [sizes[s] for s in product.rows]
    blocks = torch.arange(length) // block
    own = most * 2.0 ** powers.repeat_interleave(group, 1)[:, : rows[of]][:, :, blocks]
    place = torch.arange(length) - blocks * block
    signs = 1.0 - 2.0 * (place % 2)
    last = torch.where(blocks == blocks[-1], length % 2, 0)
    signs = torch.where((last == 1) & (torch.arange(length) == length - 1), 0.0, signs)
    signs = torch.where(blocks == number, 1.0, signs)
    other = (most * signs).expand(len(powers), rows[1 - of], length)
    given: Tensors = {}
    for name, x in (calls.operands | calls.grads).items():
        given[name] = torch.ones((len(powers), *x.shape[1:]), dtype=x.dtype)
    for at, x in ((of, own), (1 - of, other)):
        x = x.mT if product.turned[at] else x
        given[product.names[at]] = x.to(given[product.names[at]].dtype).contiguous()
    grads = {n: given[n] for n in calls.grads} if product.result.startswith("grad_") else {}
    return replace(calls, operands={n: given[n] for n in calls.operands}, grads=grads, manner="")


def _due(calls: OperationCalls, product: Product) -> Tensor:
    """The exact product, in the result's own order."""
    given = calls.operands | calls.grads
    a, b = (given[n].double().mT if turned else given[n].double()
            for n, turned in zip(product.names, product.turned, strict=True))  # fmt: skip
    found = a @ b.mT
    own = calls.operation.shapes_of_results[product.result].split()
    return found if own[0] == product.rows[0] else found.mT


class _Seen(NamedTuple):
    """By how many powers of two results are off: of some blocks, `[draws, rows, columns]`."""

    name: str
    symbol: str
    group: int  # rows that share a scale
    powers: Tensor  # [draws, groups, blocks]
    off: list[tuple[int, Tensor]]


def _rules(seen: _Seen) -> Iterator[Scales]:
    """What the scales that were used have in common; nothing where all are right."""
    wrong = [(off.abs() > NEAR) | ~off.isfinite() for _, off in seen.off]
    if not any(bool(w.any()) for w in wrong):
        return
    # of each scale that is wrong on any draw: its row, its block, what it is and what it was
    places, used, due = [], [], []
    for (number, off), bad in zip(seen.off, wrong, strict=True):
        rows = torch.arange(off.shape[1]) // seen.group
        own = seen.powers[:, rows, number][:, :, None].expand(off.shape)
        row, column = bad.any(0).nonzero(as_tuple=True)
        places.append(torch.stack([row // seen.group, torch.full_like(row, number)]))
        used.append((own + off)[:, row, column])
        due.append(own[:, row, column])
    e, s = torch.cat(used, 1).nan_to_num(torch.nan, torch.nan, torch.nan), torch.cat(due, 1)
    of = torch.stack([w.any(0).any(1) for w in wrong]).any(0)
    regions = fitting(seen.symbol, of, ~of) if seen.group == 1 and bool((~of).any()) else []
    where = f", {regions[0].text}" if regions else ""
    if text := _by_value(e, s):
        yield Scales(f"scales of {seen.name} are {text}{where}")
    elif other := _of_another(seen, torch.cat(places, 1), e, s):
        yield other._replace(text=f"scales of {seen.name} are {other.text}{where}")


def _by_value(e: Tensor, s: Tensor) -> str:
    """Whether scales that are due say which are used."""
    if not bool(e.isfinite().all()) or bool(((e - s - (e - s).median()).abs() < NEAR).all()):
        return ""  # of a factor other ways tell more
    if float((e - e.median()).abs().max()) < NEAR:
        return f"not read: {2.0 ** float(e.median()):.4g} stands for all of them"
    told = {}
    for power in torch.unique(s):
        of = e[s == power]
        if float((of - of[0]).abs().max()) > NEAR:
            return ""
        told[f"2^{int(power)}"] = f"{2.0 ** float(of[0]):.4g}"
    few = list(told.items())[:: max(1, len(told) // 3)]
    return "taken for other numbers: " + ", ".join(f"{a} for {b}" for a, b in few)


_KINDS = ("those of", "multiplied by those of", "held at most at those of")


def _of_another(seen: _Seen, places: Tensor, e: Tensor, s: Tensor) -> Scales | None:
    """The other block whose scale is used, is used as well, or limits it, on every draw."""
    powers, (row, block) = seen.powers, places
    largest = {f"{seen.name}'s row": powers.amax(2)[:, row], "a column": powers.amax(1)[:, block],
               f"all of {seen.name}": powers.amax((1, 2))[:, None].expand(s.shape)}  # fmt: skip
    for told, other in largest.items():
        if not torch.equal(other, s) and bool(((e - other).abs() < NEAR).all()):
            return Scales(f"the largest of {told}")
    sources = powers.flatten(1)  # [draws, groups × blocks]
    for kind, text in enumerate(_KINDS):
        fits = torch.ones(e.shape[1], sources.shape[1], dtype=torch.bool)
        for used, due, of in zip(e, s, sources, strict=True):
            other = (of + 0 * due[:, None], due[:, None] + of,
                     torch.minimum(due[:, None], of[None, :]))[kind]  # fmt: skip
            fits &= (used[:, None] - other).abs() < NEAR
        if float(fits.any(1).double().mean()) >= KNOWN:
            return Scales(f"{text} {_pattern(seen, places, fits)}", of_others=kind == 0)
    return None


def _pattern(seen: _Seen, places: Tensor, fits: Tensor) -> str:
    """Which blocks fit, in words: by a rule for rows and one for blocks, or an example."""
    (row, block), (_, groups, count) = places, seen.powers.shape
    at = torch.arange(len(row))
    rows = seen.symbol if seen.group == 1 else f"{seen.group} {seen.symbol}"
    example = int(fits.any(1).nonzero()[0, 0])
    sources = fits[example].nonzero()[:, 0]
    other = divmod(int(sources[0]), count)
    every = [
        (told_row, told_block)
        for told_row, of_row in moved(row, groups, rows, example, sources // count)
        for told_block, of_block in moved(block, count, "blocks", example, sources % count)
        if float(fits[at, of_row * count + of_block].double().mean()) >= MOST
    ]
    if every:
        told = " and ".join(text for text in every[0] if text)
        return f"what lies {told}" if told else "the same block"
    here = f"{rows} {int(row[example])}, block {int(block[example])}"
    return f"other blocks: {here} has that of {rows} {other[0]}, block {other[1]}"
