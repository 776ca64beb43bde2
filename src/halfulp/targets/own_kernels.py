"""halfulp's own attention, in each backend and kernel recipe, and its emulations of recipes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfulp.attention import attention, emulate, explain_dispatch
from halfulp.formats import Format
from halfulp.ops import BACKENDS
from halfulp.ops.dispatch import missing
from halfulp.recipes import KERNEL_RECIPES, Recipe
from halfulp.targets.target import ALL, NO_CUDA, Target, UnsupportedError


def halfulp_targets() -> tuple[Target, ...]:
    """`halfulp.attention` as it comes, in each backend, and with each other kernel recipe."""
    others = [recipe for recipe in KERNEL_RECIPES if recipe != "halfulp"]
    return (
        halfulp_target(),
        *(halfulp_target(backend) for backend in BACKENDS),
        *(halfulp_target(None, recipe) for recipe in others),
    )


def halfulp_target(backend: str | None = None, recipe: str = "halfulp") -> Target:
    """`halfulp.attention`, in the backend that it chooses or in one, with one of the kernels'
    recipes.
    """
    parts = ["halfulp", *([backend] if backend else []), *([recipe] if recipe != "halfulp" else [])]

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        if backend is not None:
            # asked first: a ValueError from the call would be a refusal, which makes an audit
            # incomplete, where a backend that does not take the inputs is only left out
            found = explain_dispatch(query, key, value, backend=backend, recipe=recipe, **options)
            if found.backend is None:
                raise UnsupportedError(found.reasons[backend].removeprefix("not: "))
        return attention(
            query, key, value, backend=backend, recipe=recipe, return_lse=True, **options
        )

    text = "halfulp.attention, " + (
        "the kernel that it chooses here" if backend is None else f"backend {backend!r}"
    )
    text += "" if recipe == "halfulp" else f", with the recipe {recipe!r}"
    absent = None if backend is None else missing(backend)
    if backend == "triton" and absent is None and not torch.cuda.is_available():
        absent = NO_CUDA
    return Target(":".join(parts), call, ALL, text, absent, same_dropout=True)


def halfulp_named(parts: list[str]) -> Target | None:
    """The target of "halfulp" and a backend, a recipe or both in either order; None for others."""
    backends = [part for part in parts if part in BACKENDS]
    recipes = [part for part in parts if part in KERNEL_RECIPES]
    if len(backends) > 1 or len(recipes) > 1 or len(backends) + len(recipes) < len(parts):
        return None
    return halfulp_target(backends[0] if backends else None, *recipes)


def recipe_target(recipe: Recipe) -> Target:
    """A recipe of halfulp, emulated; it takes inputs of a dtype that its results hold."""

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(recipe.out, Format) or not recipe.out.holds(query.dtype):
            given = str(query.dtype).removeprefix("torch.")
            raise UnsupportedError(
                f"dtype {given} holds more than {recipe.out.name}, the format of {recipe.name}'s"
                " results"
            )
        return emulate(query, key, value, recipe=recipe, return_lse=True, **options)

    return Target(
        f"recipe:{recipe.name}",
        call,
        ALL,
        f"halfulp's emulation of {recipe.name} ({recipe.algorithm})",
        same_dropout=True,
        layer=partial(emulate, recipe=recipe),
        function=emulate,
    )
