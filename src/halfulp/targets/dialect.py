"""Which attention implementations can be audited, and how a name on the command line becomes
one.
"""

from __future__ import annotations

import difflib

from halfulp.recipes import RECIPES
from halfulp.targets.builtin import builtin_targets
from halfulp.targets.loading import load
from halfulp.targets.own_kernels import recipe_target
from halfulp.targets.target import Target
from halfulp.targets.transformers_layer import transformers_target

ALGORITHM_RECIPES = {
    "halfulp": "BF16_HALFULP",
    "standard": "BF16_STANDARD",
    "flash1": "BF16_FLASH1",
    "flash2": "BF16_FLASH2",
    "torch_cpu": "TORCH_CPU_FLASH",
}
"""The recipe that stands for an algorithm named alone."""

_ACCEPTED = (
    "a built-in name (`halfulp ls targets`), 'recipe:NAME', 'module:function' or 'file.py:function'"
)


def resolve(name: str) -> Target:
    """The target of that name.

    Accepted are built-in names, "recipe:NAME", a recipe or algorithm name alone,
    "transformers:NAME", "module:function" and "file.py:function". Raises ValueError, one line, with
    what is accepted and the closest name.
    """
    builtin = {target.name: target for target in builtin_targets()}
    if name in builtin:
        return builtin[name]
    bare = name.removeprefix("recipe:")
    recipe = ALGORITHM_RECIPES.get(bare.lower(), bare.upper())
    if recipe in RECIPES:
        return recipe_target(RECIPES[recipe])
    family, _, rest = name.partition(":")
    if family == "transformers" and rest:
        return transformers_target(rest)
    if ":" in name and not name.startswith(("recipe:", "sdpa:", "flex:")):
        return load(name)
    known = [*builtin, *RECIPES, *ALGORITHM_RECIPES]
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(
        name.upper(), known, n=1
    )
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"target={name!r}: accepted is {_ACCEPTED}{hint}")
