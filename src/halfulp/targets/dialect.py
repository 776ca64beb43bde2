"""One dialect for naming a kernel: whatever audits, trains, isolates, times or watches attention
reads names here.

"torch" and "torch:flash" are other names of "sdpa" and "sdpa:flash", a recipe alone of
"recipe:NAME", and an algorithm alone of the recipe that stands for it. Reading a name runs nobody's
code but a user's own module or file, and that only in `resolve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from halfulp.complaints import meant
from halfulp.operations import ATTENTION, Operation, operation_named
from halfulp.ops import BACKENDS
from halfulp.recipes import KERNEL_RECIPES, RECIPES, Recipe, recipe_named
from halfulp.targets.builtin import builtin_targets
from halfulp.targets.loading import in_file, load, load_function
from halfulp.targets.operation_calling import operation_target, recipe_of_operation
from halfulp.targets.own_kernels import halfulp_named, recipe_target
from halfulp.targets.target import Target, name_of_function
from halfulp.targets.transformers_layer import transformers_target

ALGORITHM_RECIPES = {
    "standard": "BF16_STANDARD",
    "flash1": "BF16_FLASH1",
    "flash2": "BF16_FLASH2",
    "torch_cpu": "TORCH_CPU_FLASH",
}
"""The recipe that stands for an algorithm named alone."""

FAMILIES = ("sdpa", "torch", "flex", "eager", "flash_attn", "halfulp", "recipe", "transformers")
"""What stands before a colon in a built-in name, where it is never a module's name."""

ACCEPTED = (
    "a built-in name (`halfulp ls targets`), a recipe such as BF16_FLASH2[out=fp32],"
    " 'module:function' or 'file.py:function'"
)


def canonical(name: str) -> str:
    """The one spelling of a built-in name; any other name as it is.

    Runs and loads nothing. "torch:flash" → "sdpa:flash", "bf16_flash2" → "recipe:BF16_FLASH2",
    "halfulp:stock:cpu" → "halfulp:cpu:stock".
    """
    name = name.strip()
    try:
        recipe = recipe_in(name)
    except ValueError:
        return name
    if recipe is not None:
        return f"recipe:{recipe.name}"
    family, colon, rest = name.partition(":")
    if family == "torch":
        return f"sdpa{colon}{rest}"
    own = halfulp_named(rest.split(":")) if family == "halfulp" and colon else None
    return name if own is None else own.name


def is_code(name: str) -> bool:
    """Whether a name is that of a module or file, which `resolve` would import; this does not."""
    return ":" in name and canonical(name).partition(":")[0] not in FAMILIES


def recipe_in(name: str) -> Recipe | None:
    """The recipe that a name is the text of, "recipe:" before it or not; None: it is no recipe's.

    Raises:
        ValueError: it begins like a recipe's, and a field or value in the brackets is not known.
    """
    bare = name.strip().removeprefix("recipe:").strip()
    base = bare.partition("[")[0].strip()
    base = ALGORITHM_RECIPES.get(base.lower(), base)
    if base == "halfulp" and name.strip() != bare:
        base = "BF16_HALFULP"
    if base.upper() not in RECIPES:
        return None
    return recipe_named(f"{base}{bare[bare.find('[') :] if '[' in bare else ''}")


def resolve(
    name: str, argument: str = "target", operation: str = ATTENTION, form: str | None = None
) -> Target:
    """The target of that name, of attention or of another operation (`halfulp ls operations`); a
    function of the user's in that form (`targets.form`).

    Accepted are built-in names, recipes ("recipe:NAME", a recipe or algorithm alone, with changes
    in brackets), "halfulp" with a backend, a kernel recipe or both ("halfulp:cpu:stock"),
    "transformers:NAME", "module:function" and "file.py:function". Whether it can run here its
    `missing` says. Raises ValueError, one line that names the `argument`, with what is accepted and
    the closest name.
    """
    if form is not None and (operation != ATTENTION or not is_code(name)):
        raise ValueError(
            f"form={form!r} of {name}: accepted is the form of an attention function of your own"
        )
    if operation == ATTENTION:
        found = _of_attention(name, argument, form)
    else:
        found = _of_operation(operation_named(operation), name, argument)
    return replace(found, named=(found.call, partial(_opened, name, operation, form)))


def target_of(
    target: str | Target | Callable[..., Any], op: str = ATTENTION, form: str | None = None
) -> Target:
    """What a caller names, made or hands over as a function, ready to be called.

    Raises ValueError for what is none, and for a kernel that this machine lacks.
    """
    if isinstance(target, Target):
        chosen = target
    elif isinstance(target, str):
        chosen = resolve(target, operation=op, form=form)
    elif op == ATTENTION:
        chosen = Target.of(target, form=form)
    else:
        chosen = operation_target(operation_named(op), target, name_of_function(target))
    if chosen.missing is not None:
        raise ValueError(f"target={chosen.name!r}: {chosen.missing}")
    return chosen


def _of_attention(name: str, argument: str, form: str | None) -> Target:
    try:
        recipe = recipe_in(name)
    except ValueError as error:
        raise ValueError(f"{argument}={name!r}: {error}") from None
    if recipe is not None:
        return recipe_target(recipe)
    spelled = canonical(name)
    for target in builtin_targets():
        if target.name == spelled:
            return target
    family, colon, rest = spelled.partition(":")
    own = halfulp_named(rest.split(":")) if family == "halfulp" and colon else None
    if own is not None:
        return own
    if family == "transformers" and rest:
        return transformers_target(rest)
    if is_code(name):
        try:
            return load(name, form)
        except ValueError as error:
            said = str(error).replace("target=", f"{argument}=", 1)
            near = _hint(name) if isinstance(error.__cause__, ModuleNotFoundError) else ""
            raise ValueError(f"{said}{near}") from error
    raise ValueError(f"{argument}={name!r}: accepted is {ACCEPTED}{in_file(name) or _hint(name)}")


@contextmanager
def _opened(name: str, operation: str, form: str | None) -> Iterator[Target]:
    yield resolve(name, operation=operation, form=form)


def _of_operation(operation: Operation, name: str, argument: str) -> Target:
    """A built-in target of the operation, one of its recipes, or the user's own function."""
    for target in operation_targets(operation):
        if target.name == name:
            return target
    known = [target.name for target in operation_targets(operation)]
    if ":" not in name or name.startswith("recipe:"):
        raise ValueError(
            f"{argument}={name!r}: of {operation.name} accepted are {', '.join(known)},"
            f" 'module:function' or 'file.py:function'{in_file(name) or meant(name, known)}"
        )
    try:
        return operation_target(operation, load_function(name)[0], name)
    except ValueError as error:
        raise ValueError(str(error).replace("target=", f"{argument}=", 1)) from error


def operation_targets(operation: Operation) -> list[Target]:
    """The targets of an operation that every machine has: its own, and its recipes."""
    found = [
        operation_target(operation, t.function, t.name, t.description) for t in operation.targets
    ]
    for name, recipe in (("stock", operation.stock), ("floor", operation.floor)):
        found.append(recipe_of_operation(operation, recipe, f"recipe:{name}"))
    return found


def _hint(name: str) -> str:
    """The nearest name, if any is near."""
    builtin = [target.name for target in builtin_targets()]
    torchs = [known.replace("sdpa", "torch") for known in builtin if known.startswith("sdpa")]
    known = [*builtin, *torchs, *RECIPES, *ALGORITHM_RECIPES]
    known += [f"halfulp:{backend}:{recipe}" for backend in BACKENDS for recipe in KERNEL_RECIPES]
    return meant(name, known)
