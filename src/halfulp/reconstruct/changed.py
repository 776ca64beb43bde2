"""Models that are near another: with one thing changed, in another recipe, with a mistake of one
pass in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import partial

from halfulp.recipes import Recipe
from halfulp.reconstruct import call_options, heads, space
from halfulp.reconstruct import twists as structure
from halfulp.reconstruct.descent import ORDERLY, Search
from halfulp.reconstruct.emulating import FORWARD, GRADIENTS, Emulator, Model, Twist, Way
from halfulp.reconstruct.evidence import SOUND, UNEXPLAINED, Fits
from halfulp.reconstruct.naming import differs
from halfulp.reconstruct.space import BACKWARD, EVERY, Change

OWN_BLOCKS = 64, 32, 128  # of keys, of a forward pass whose sums are not seen
Neighbors = Callable[[Model], Iterable[tuple[str, Model]]]


def neighbors_of(changes: Callable[[], Iterable[tuple[str, Change]]]) -> Neighbors:
    """What changes make of a model, each once."""

    def neighbors(model: Model) -> Iterator[tuple[str, Model]]:
        seen = {model}
        for text, change in changes():
            changed = change(model)
            if changed is not None and changed not in seen:
                seen.add(changed)
                yield text, changed

    return neighbors


def both(first: Neighbors, second: Neighbors) -> Neighbors:
    """What either offers."""

    def neighbors(model: Model) -> Iterator[tuple[str, Model]]:
        yield from first(model)
        yield from second(model)

    return neighbors


def with_own_forward(
    search: Search[Model], model: Model, gradients: frozenset[str], blocks: tuple[int, ...]
) -> Model:
    """The model with a backward pass that makes O and lse itself, where that explains the
    gradients: it is another kernel's, or runs the forward pass anew, and what is wrong with O is
    the forward pass's alone.
    """
    some = frozenset(search.screen(model, gradients, 1))
    own = model.forward.recipe.block_key
    for width in dict.fromkeys((own, *blocks, *OWN_BLOCKS)):
        tiled = space.setting(EVERY, block_key=width)(model) or model
        apart = replace(tiled, apart=True)
        near = all(f.left < ORDERLY for f in search.fits(apart, gradients, some).values())
        if near and search.explained(apart, gradients):
            return apart
    return model


def open_among(fits: Fits) -> frozenset[str]:
    """The results that err more than is explained: what a gradient has right, others do not have
    wrongly from what they share.
    """
    return frozenset(t for (_, t), f in fits.items() if f.left > UNEXPLAINED and f.times > SOUND)


def in_recipe(recipe: Recipe, way: Way) -> Way:
    """The way in another recipe, with its mistakes."""
    return replace(way, recipe=recipe)


def _with_twists(twists: tuple[Twist, ...], way: Way) -> Way:
    return replace(way, twists=twists)


def as_forward(model: Model) -> Iterator[tuple[str, Model]]:
    """The model with a field of its gradients' recipes as the forward pass has it."""
    own = model.forward.recipe
    for scope in (BACKWARD, *(frozenset({name}) for name in GRADIENTS)):
        for name in {n for g in scope for n in differs(model.way(g).recipe, own)}:
            if name in space.DIVIDES:
                changed = space.setting(scope, **{name: getattr(own, name)})(model)
                if changed is not None and changed != model:
                    yield name, changed


def with_shared_twists(model: Model) -> Iterator[Model]:
    """The model with the mistakes of one pass in all of them."""
    ways = (model.forward, *model.gradients)
    for twists in dict.fromkeys(way.twists for way in ways if way.twists):
        yield model.with_ways(EVERY, partial(_with_twists, twists))


def based(recipe: Recipe, like: Recipe) -> Recipe:
    """`recipe` in the base and with the shift that the other keeps its rows in."""
    if recipe.base == like.base and recipe.shift == like.shift:
        return recipe
    return recipe.with_(base=like.base, shift=like.shift)


def simpler(model: Model, stock: Model) -> Iterator[tuple[str, Model]]:
    """The model with one thing put back: a field in every way, in one pass or in one gradient; a
    twist.
    """
    own = stock.forward.recipe
    scopes = (EVERY, frozenset(FORWARD), BACKWARD, *(frozenset({name}) for name in GRADIENTS))
    for scope in scopes:
        ways = {model.way(name) for name in scope}
        names = [f.name for f in fields(own) if f.name != "name"]
        for name in names:
            if any(getattr(way.recipe, name) != getattr(own, name) for way in ways):
                changed = space.setting(scope, **{name: getattr(own, name)})(model)
                if changed is not None and changed != model:
                    yield name, changed
        if any(way.recipe.division != own.division for way in ways):
            changed = space.setting(scope, division=own.division, reciprocal=own.reciprocal)(model)
            if changed is not None:
                yield "division", changed
        for twist in {twist for way in ways for twist in way.twists}:

            def drop(way: Way, twist: Twist = twist) -> Way:
                return Way(way.recipe, tuple(t for t in way.twists if t != twist))

            yield twist.text, model.with_ways(scope, drop)


def twists_of(emulator: Emulator) -> tuple[Twist, ...]:
    """Those that change something on some trial."""
    every = [
        *structure.orders(), *structure.masks(), *structure.scales(), *structure.ends(),
        *structure.results(), *heads.rows(), *heads.sums(), *call_options.asked(),
        *heads.pairings(), *heads.layouts(), *heads.merges(),
    ]  # fmt: skip
    trials = list(emulator.trials.values())
    found = [twist for twist in every if any(twist.turn(trial) is not None for trial in trials)]
    return tuple(found)
