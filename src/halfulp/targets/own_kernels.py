"""halfulp's own attention in each backend, and its emulations of recipes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfulp.attention import attention, emulate, explain_dispatch
from halfulp.formats import Format
from halfulp.ops.dispatch import missing
from halfulp.recipes import Recipe
from halfulp.targets.target import BOTH, NO_CUDA, Target, UnsupportedError


def halfulp_target(backend: str | None) -> Target:
    """`halfulp.attention`, in the backend that it chooses or in one."""
    name = "halfulp" if backend is None else f"halfulp:{backend}"

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        if backend is not None:
            found = explain_dispatch(query, key, value, backend=backend, **options)
            if found.backend is None:
                raise UnsupportedError(found.reasons[backend].removeprefix("not: "))
        return attention(query, key, value, backend=backend, return_lse=True, **options)

    text = "halfulp.attention, " + (
        "the kernel that it chooses here" if backend is None else f"backend {backend!r}"
    )
    absent = None if backend is None else missing(backend)
    if backend == "triton" and absent is None and not torch.cuda.is_available():
        absent = NO_CUDA
    return Target(name, call, BOTH, text, absent)


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
        BOTH,
        f"halfulp's emulation of {recipe.name} ({recipe.algorithm})",
    )
