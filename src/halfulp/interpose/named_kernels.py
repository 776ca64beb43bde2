"""Kernels and recipes by name in the place of a model's own operations: a norm, a softmax, a loss,
a linear layer, an embedding or a rotary embedding computed by what `halfulp audit --op` knows or by
a function of the user's.

A model calls `F.layer_norm` with any leading dimensions, without weights, under autocast; a kernel
is called as its operation's definition says (`halfulp.operations`), on the same tensors. A recipe
computes the definition in float32 with its roundings, forward and backward, in the dtype that the
model's own call gives its result in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from halfulp.interpose.operation import Operation, leaves
from halfulp.operations import ATTENTION, Rounding, Steps, Tensors, operation_named
from halfulp.operations import Operation as Definition
from halfulp.targets import Target, is_code, one_line, resolve

DEFINED: Final = {
    "linear": ("linear",),
    "norm": ("rms_norm", "layer_norm"),
    "softmax": ("softmax",),
    "cross_entropy": ("cross_entropy",),
    "embedding": ("embedding",),
    "rotary": ("rope",),
    ATTENTION: (ATTENTION,),
}
"""The kinds that a kernel can stand for, and the operations of `halfulp ls operations` in them."""

_NAMES: Final = {
    "linear": "input weight bias",
    "addmm": "bias input weight",
    "layer_norm": "input normalized_shape weight bias eps",
    "rms_norm": "input normalized_shape weight eps",
    "softmax": "input dim _stacklevel dtype",
    "cross_entropy": "input target weight size_average ignore_index reduce reduction"
    " label_smoothing",
    "embedding": "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    "apply_rotary_pos_emb": "query key cos sin position_ids unsqueeze_dim",
    "scaled_dot_product_attention": "query key value attn_mask dropout_p is_causal",
}
_PLAIN: Final[dict[str, Any]] = {
    "scale_grad_by_freq": False, "sparse": False, "norm_type": 2.0, "_stacklevel": 3,
    "beta": 1, "alpha": 1, "unsqueeze_dim": 1, "dropout_p": 0.0, "enable_gqa": False,
}  # fmt: skip
_RECIPES: Final = {"recipe:stock": "stock", "recipe:floor": "floor"}


def kernel_named(name: str, kinds: tuple[str, ...]) -> Kernel:
    """Return what runs a kernel or a recipe of that name in the place of operations of these kinds;
    none: attention.

    A name of the user's code is loaded when it is first called, never here.

    Raises:
        ValueError: one of the kinds has no kernel of that name, or can have none.
    """
    targets: dict[str, Target | None] = {}
    for kind in kinds or (ATTENTION,):
        if kind not in DEFINED:
            raise ValueError(
                f"into={name!r}: no kernel can stand for operations of kind {kind}; accepted are"
                f" {', '.join(DEFINED)}"
            )
        refused: list[ValueError] = []
        for operation in DEFINED[kind]:
            try:
                targets[operation] = None if is_code(name) else resolve(name, "into", operation)
            except ValueError as error:
                refused.append(error)
        if len(refused) == len(DEFINED[kind]):
            raise refused[0]
    missing = [t.missing for t in targets.values() if t is not None and t.missing is not None]
    if missing:
        raise ValueError(f"into={name!r}: {missing[0]}; accepted is one that runs here")
    return Kernel(name, targets)


@dataclass
class Kernel:
    """A kernel or recipe, called in an operation's place."""

    name: str
    targets: dict[str, Target | None]  # by operation; None: code that is not loaded yet
    stood: int = 0  # operations that it was called for
    parts: int = 0  # of a rotary embedding that were left as they are
    argument: str = "into"  # that it was named by, for messages
    takes_whole = True  # a norm or rotary embedding that is written out by hand, as one operation
    _dtypes: dict[Any, torch.dtype] = field(default_factory=dict, repr=False)

    def __call__(self, operation: Operation) -> Any:
        """What the model gets, in the dtype that its own operation gives.

        Raises:
            ValueError: this operation, or what is asked of it, is not in the kernel's definition.
        """
        if operation.kind == "rotary" and operation.name != "apply_rotary_pos_emb":
            self.parts += 1  # cos and sin, which a kernel computes for itself
            return operation.run()
        if operation.name == "scaled_dot_product_attention" and ATTENTION in self.targets:
            self.stood += 1
            return self._attention(operation)
        if operation.kind == ATTENTION and ATTENTION in self.targets:
            return operation.run()
        try:
            given = _given(operation)
            read = _READERS.get(operation.name)
            if read is None:
                raise ValueError(f"is {operation.name}, which has no definition")
            dtype = self._dtype(operation)
            found = read(given, lambda *asked: self._run(dtype, *asked))
        except ValueError as error:
            said = str(error).removeprefix(f"{self.argument}={self.name!r}: ")
            if "accepted" not in said:
                said += (
                    f"; accepted are calls of {', '.join(_READERS)} as their definitions say, and"
                    " RMSNorm modules in transformers' form"
                )
            raise ValueError(f"{self.argument}={self.name!r}: {operation.place}: {said}") from error
        self.stood += 1
        return found

    def load(self) -> None:
        """Load code that is named; raises ValueError where it is of none of the operations."""
        refused = []
        for operation, target in self.targets.items():
            try:
                self.targets[operation] = target or resolve(self.name, self.argument, operation)
            except ValueError as error:
                refused.append(error)
        if len(refused) == len(self.targets):
            raise refused[0]

    def check(self) -> None:
        """Raise ValueError where a pass called it for nothing but parts of what it stands for."""
        if self.parts and not self.stood:
            raise ValueError(
                f"{self.argument}={self.name!r}: the model makes no whole operation that it can"
                " stand for; accepted are RMSNorm modules and apply_rotary_pos_emb in transformers'"
                " form"
            )

    def _run(self, dtype: torch.dtype, name: str, operands: Tensors, options: Any) -> Tensor:
        """The first result of an operation, as the kernel gives it, in that dtype."""
        if name not in self.targets:
            raise ValueError(f"{name} has no {self.name}")
        definition = operation_named(name)
        if name == "linear":  # as autocast does
            operands = {n: x.to(dtype) for n, x in operands.items()}
        if self.name in _RECIPES:
            recipe = getattr(definition, _RECIPES[self.name])
            return _in_recipe(definition, recipe, operands, options, dtype)
        target = self.targets[name]
        if target is None:
            target = self.targets[name] = resolve(self.name, self.argument, name)
        args, keywords = definition.arguments(operands, {**definition.options, **options})
        try:
            found = target.call(*args, **keywords)
        except Exception as error:
            raise ValueError(f"the kernel raises {one_line(error)}") from error
        found = found[0] if isinstance(found, tuple | list) else found
        if not isinstance(found, Tensor):
            raise ValueError(f"the kernel returns {type(found).__name__}, and no tensor")
        _check_gradient(found, operands)
        return found.to(dtype)

    def _attention(self, operation: Operation) -> Any:
        target = self.targets[ATTENTION]
        if target is None:
            target = self.targets[ATTENTION] = resolve(self.name, self.argument)
        given = _given(operation)
        query, key, value = (given.pop(name) for name in ("query", "key", "value"))
        asked = {"is_causal": False, "scale": None} | given
        out = target.call(query, key, value, **asked)
        return (out[0] if isinstance(out, tuple) else out).to(query.dtype)

    def _dtype(self, operation: Operation) -> torch.dtype:
        """The dtype that the model's own call gives, learned once a combination of dtypes."""
        every = list(leaves((operation.args, operation.kwargs)))
        kind = every[0].device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        asked = operation.kwargs.get("dtype")
        key = (operation.place, autocast, asked, *(x.dtype for x in every))
        if key not in self._dtypes:
            with torch.no_grad():
                self._dtypes[key] = next(leaves(operation.run())).dtype
        return self._dtypes[key]


def _check_gradient(found: Tensor, operands: Tensors) -> None:
    # a kernel without a backward pass would cut off all that lies below it, without a word
    wanted = any(x.requires_grad for x in operands.values())
    if wanted and torch.is_grad_enabled() and not found.requires_grad:
        raise ValueError("the kernel's result carries no gradient, so it cannot be trained")


def _in_recipe(
    definition: Definition, recipe: Rounding, operands: Tensors, options: Any, dtype: torch.dtype
) -> Tensor:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"is in {dtype}; recipes are of bfloat16, float16 and float32")
    device = next(iter(operands.values())).device.type
    flat = {}
    for operand in definition.operands:
        x, kept = operands[operand.name], len(operand.shape.split()) - 1
        flat[operand.name] = x.reshape(-1, *x.shape[x.ndim - kept :])
    with torch.autocast(device, enabled=False):
        wide = {n: x.float() if x.is_floating_point() else x for n, x in flat.items()}
        if definition.name == "linear" and not recipe.steps:
            return torch.nn.functional.linear(wide["input"], wide["weight"]).to(dtype)
        change = recipe.change(str(dtype).removeprefix("torch."))
        found = definition.define(Steps(change), wide, {**definition.options, **options})
        return found[definition.results[0].name].to(dtype)


Run = Callable[[str, Tensors, dict[str, Any]], Tensor]


def _given(operation: Operation) -> dict[str, Any]:
    """The arguments of a torch function by name, without those that are at their defaults."""
    names = _NAMES.get(operation.name, "").split()
    # torch.softmax and the method have no _stacklevel between
    if operation.name == "softmax" and operation.function is not torch.nn.functional.softmax:
        names = ["input", "dim", "dtype"]
    given = dict(zip(names, operation.args, strict=False)) | dict(operation.kwargs)
    given = {{"mat1": "input", "mat2": "weight", "self": "input"}.get(k, k): x
             for k, x in given.items()}  # fmt: skip
    return {k: x for k, x in given.items() if x is not None and not _is_plain(k, x)}


def _is_plain(name: str, value: Any) -> bool:
    return name in _PLAIN and not isinstance(value, Tensor) and value == _PLAIN[name]


def _check(given: dict[str, Any], *known: str) -> None:
    others = [name for name in given if name not in known]
    if others:
        raise ValueError(f"has {', '.join(others)}, which the definition has not")


def _linear(given: dict[str, Any], run: Run) -> Tensor:
    _check(given, "input", "weight", "bias")
    x = given["input"]
    out = run("linear", {"input": x, "weight": given["weight"]}, {}).reshape(*x.shape[:-1], -1)
    return out if "bias" not in given else out + given["bias"].to(out.dtype)


def _addmm(given: dict[str, Any], run: Run) -> Tensor:
    return _linear(given | {"weight": given["weight"].mT}, run)


def _norm(name: str, given: dict[str, Any], run: Run) -> Tensor:
    _check(given, *_NAMES[name].split())
    x, shape = given["input"], tuple(given["normalized_shape"])
    if len(shape) != 1:
        raise ValueError(f"normalizes over {shape}; the definition is of the last dimension")
    weight = given.get("weight", x.new_ones(shape))
    operands = {"input": x, "weight": weight}
    if name == "layer_norm":
        operands["bias"] = given.get("bias", torch.zeros_like(weight))
    # PyTorch's own defaults
    plain = 1e-5 if name == "layer_norm" else torch.finfo(x.dtype).eps
    return run(name, operands, {"eps": given.get("eps", plain)}).reshape(x.shape)


def _softmax(given: dict[str, Any], run: Run) -> Tensor:
    _check(given, "input", "dim", "dtype")
    x = given["input"].to(given.get("dtype", given["input"].dtype)).transpose(given["dim"], -1)
    return run("softmax", {"input": x}, {}).reshape(x.shape).transpose(given["dim"], -1)


def _cross_entropy(given: dict[str, Any], run: Run) -> Tensor:
    options = ("ignore_index", "reduction", "label_smoothing")
    _check(given, "input", "target", *options)
    logits, target = given["input"], given["target"]
    if target.is_floating_point() or logits.ndim < 2:
        raise ValueError("has probabilities, or one row; the definition is of rows and indices")
    chosen = {"reduction": "mean"} | {name: given[name] for name in options if name in given}
    # torch has classes in the second dimension, the definition in the last
    rows = logits.movedim(1, -1)
    operands = {"input": rows.reshape(-1, rows.shape[-1]), "target": target.reshape(-1)}
    found = run("cross_entropy", operands, chosen)
    if chosen["reduction"] == "none":
        return found.reshape(target.shape)
    return found if found.ndim == 0 else found[0]  # a recipe gives the whole to every token


def _embedding(given: dict[str, Any], run: Run) -> Tensor:
    _check(given, "input", "weight", "padding_idx")
    index, weight, padding = given["input"], given["weight"], given.get("padding_idx")
    if padding is not None and padding < 0:
        padding += len(weight)
    found = run("embedding", {"input": index, "weight": weight}, {"padding_idx": padding})
    return found.reshape(*index.shape, weight.shape[1])


def _rotary(given: dict[str, Any], run: Run) -> tuple[Tensor, Tensor]:
    """Queries and keys `[B, H, T, D]` of positions `[B or 1, T]`."""
    _check(given, "query", "key", "cos", "sin", "position_ids", "positions", "base")
    if not isinstance(given["base"], float):
        raise ValueError(str(given["base"]))
    positions = given["positions"]
    shared = positions.shape[0] == 1 or bool((positions == positions[:1]).all())

    def turned(x: Tensor) -> Tensor:
        # the definition has one row of positions for all; sequences with their own go one by one
        parts = [x] if shared else torch.tensor_split(x, len(x))
        found = []
        for part, where in zip(parts, positions, strict=False):
            rows = part.permute(2, 0, 1, 3)
            operands = {"input": rows.flatten(1, 2), "positions": where}
            out = run("rope", operands, {"base": given["base"]})
            found.append(out.reshape(rows.shape).permute(1, 2, 0, 3))
        return torch.cat(found)

    return turned(given["query"]), turned(given["key"])


_READERS: Final[dict[str, Callable[[dict[str, Any], Run], Any]]] = {
    "linear": _linear,
    "addmm": _addmm,
    "layer_norm": lambda given, run: _norm("layer_norm", given, run),
    "rms_norm": lambda given, run: _norm("rms_norm", given, run),
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "apply_rotary_pos_emb": _rotary,
}
