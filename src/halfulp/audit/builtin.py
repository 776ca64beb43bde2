"""The attention kernels that a machine already has: PyTorch's, FlashAttention's, transformers', and
our own recipes.

A target that cannot run here says why instead of falling back to another kernel: an audit of the
wrong kernel is worse than none.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp.attention import attention, emulate, explain_dispatch
from halfulp.audit.calling import Target, UnsupportedError
from halfulp.formats import Format
from halfulp.ops.dispatch import BACKENDS, missing
from halfulp.recipes import RECIPES, Recipe

BOTH = frozenset({"attn_mask", "enable_gqa"})
_NO_CUDA = "needs a CUDA device"
_TRANSFORMERS = {
    "sdpa": "transformers' call of scaled_dot_product_attention",
    "eager": (
        "transformers' eager attention, as Llama has it: softmax in fp32, weights in the input's"
        " dtype"
    ),
    "flex_attention": "transformers' call of FlexAttention",
    "flash_attention_2": "transformers' call of flash_attn",
}


# Name of the target: what it is, and the modules that may hold its flash_attn_func.
_FLASH_ATTN = {
    "flash_attn": ("flash_attn_func of the package flash_attn", ("flash_attn",)),
    "flash_attn:3": (
        "FlashAttention-3; fa3-fwd has its forward pass alone",
        ("flash_attn_interface", "fa3_fwd_interface"),
    ),
    "flash_attn:4": ("FlashAttention-4, of the package flash-attn-4", ("flash_attn.cute",)),
}


def builtin_targets() -> tuple[Target, ...]:
    """Every built-in target, those that cannot run here too (their `missing` says why)."""
    sdpa = [
        Target(
            "sdpa",
            _sdpa(None),
            BOTH,
            "torch.nn.functional.scaled_dot_product_attention, PyTorch's own choice of backend",
        )
    ]
    sdpa += [
        Target(f"sdpa:{name}", _sdpa(backend), BOTH, text, missing)
        for name, backend, text, missing in _sdpa_backends()
    ]
    flex_text = (
        "torch FlexAttention, uncompiled: the reference that holds all scores in fp32 (no gradients"
        " on a CPU)"
    )
    compiled_text = (
        "torch FlexAttention through torch.compile: some seconds for every new shape (no gradients,"
        " no lse on a CPU)"
    )
    others = [
        Target("flex", _flex, BOTH, flex_text),
        Target("flex:compiled", _flex_compiled, BOTH, compiled_text, _cannot_compile()),
        Target(
            "eager",
            _eager,
            BOTH,
            "softmax(q @ k.mT * scale) @ v in the input's dtype, the softmax in fp32",
        ),
        *map(_flash_attn_target, _FLASH_ATTN),
    ]
    others += [_halfulp_target(None), *(_halfulp_target(backend) for backend in BACKENDS)]
    transformers = [transformers_target(name) for name in _TRANSFORMERS]
    return (*sdpa, *others, *transformers, *(recipe_target(recipe) for recipe in RECIPES.values()))


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


def _halfulp_target(backend: str | None) -> Target:
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
        absent = _NO_CUDA
    return Target(name, call, BOTH, text, absent)


def transformers_target(name: str) -> Target:
    """A function of transformers' AttentionInterface, by its name in a config's
    `attn_implementation`, or "eager".
    """
    missing = None if _installed("transformers") else "transformers is not installed"
    if missing is None and name.startswith("flash_attention"):
        missing = _no_flash_attn()
    # flex_attention: its compiled kernel with a tensor as the mask crashes the process on a CPU
    # (transformers 5.23).
    masks = not name.startswith("flash_attention") and name != "flex_attention"

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return _transformers(name, query, key, value, **options)

    description = _TRANSFORMERS.get(name, f"transformers' attention function {name!r}")
    return Target(
        f"transformers:{name}",
        call,
        BOTH if masks else frozenset({"enable_gqa"}),
        description,
        missing,
    )


def _sdpa_backends() -> list[tuple[str, SDPBackend, str, str | None]]:
    cuda = torch.cuda.is_available()
    has_cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    cudnn = None if cuda and has_cudnn else f"{_NO_CUDA} with cuDNN"
    prefix = "scaled_dot_product_attention, "
    return [
        ("math", SDPBackend.MATH, prefix + "the math backend: every step a torch operation", None),
        (
            "flash",
            SDPBackend.FLASH_ATTENTION,
            prefix + "the flash backend (on a CPU, PyTorch's own)",
            None,
        ),
        (
            "efficient",
            SDPBackend.EFFICIENT_ATTENTION,
            prefix + "the memory-efficient backend",
            None if cuda else _NO_CUDA,
        ),
        ("cudnn", SDPBackend.CUDNN_ATTENTION, prefix + "the cuDNN backend", cudnn),
    ]


def _sdpa(backend: SDPBackend | None) -> Callable[..., Any]:
    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if backend is None:
            return functional.scaled_dot_product_attention(query, key, value, **options)
        # one backend enabled: PyTorch raises where it does not fit, and never takes another
        with sdpa_kernel(backend):
            try:
                return functional.scaled_dot_product_attention(query, key, value, **options)
            except RuntimeError as error:
                if "No available kernel" in str(error) or "No viable backend" in str(error):
                    raise UnsupportedError(
                        f"backend {backend.name} does not take these arguments on"
                        f" {query.device.type}"
                    ) from None
                raise

    return call


def _causal(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001  # FlexAttention's signature
    return i >= j


def _flex(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return _flex_with(flex_attention, True, query, key, value, **options)


def _flex_compiled(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: past its limit of recompilations torch would else run the uncompiled function and
    # say so only in a log.
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return _flex_with(compiled, query.device.type != "cpu", query, key, value, **options)


def _flex_with(
    function: Callable[..., Any],
    offers_lse: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
) -> Any:
    """FlexAttention's form of the arguments."""
    from torch.nn.attention.flex_attention import AuxRequest

    query, key, value, block_mask = _for_flex(query, key, value, is_causal)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "block_mask": block_mask}
    if attn_mask is not None:
        options["score_mod"] = _score_mod(attn_mask.expand(*query.shape[:3], key.shape[2]))
    if offers_lse:
        options["return_aux"] = AuxRequest(lse=True)
    with _many_graphs(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        returned = function(query, key, value, **options)
    return (returned[0], returned[1].lse) if offers_lse else returned


def _score_mod(mask: Tensor) -> Callable[..., Tensor]:
    def add(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + mask[batch, head, i, j]

    def choose(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(mask[batch, head, i, j], score, -math.inf)

    return choose if mask.dtype == torch.bool else add


@contextlib.contextmanager
def _many_graphs() -> Iterator[None]:
    """An audit calls with more shapes than torch.compile allows one function by default (8)."""
    import torch._dynamo.config

    with torch._dynamo.config.patch(recompile_limit=4096, accumulated_recompile_limit=4096):
        yield


def _cannot_compile() -> str | None:
    if torch.cuda.is_available():
        return None if _installed("triton") else "needs triton"
    return (
        None
        if any(shutil.which(name) for name in ("c++", "g++", "clang++"))
        else "needs a C++ compiler"
    )


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -math.inf)
            if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


def _flash_attn_target(name: str) -> Target:
    """A version of flash_attn: `[B, N, H, D]`, heads grouped by itself, a causal mask aligned at
    the bottom right.
    """
    text, modules = _FLASH_ATTN[name]

    def call(
        query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None, **_: Any
    ) -> Any:
        function = importlib.import_module(next(filter(_installed, modules))).flash_attn_func
        _same_lengths(query, key, is_causal)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        wants = (
            {"return_attn_probs": True} if name == "flash_attn" else {}
        )  # the others give lse, or none, by themselves
        returned = function(q, k, v, softmax_scale=scale, causal=is_causal, **wants)
        if isinstance(returned, Tensor):
            return returned.transpose(1, 2)
        out, lse, *_ = returned
        return out.transpose(1, 2) if lse is None else (out.transpose(1, 2), lse)

    return Target(name, call, frozenset({"enable_gqa"}), text, _no_flash_attn(modules))


def _transformers(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """An attention function as a transformers layer calls it: with a module that names it, masks
    `[B, 1, N_q, N_k]`.
    """
    function = _transformers_function(name)
    _same_lengths(query, key, is_causal)
    mask: Any = attn_mask
    if is_causal and name == "eager":  # its models always make the mask
        mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()
    if mask is not None:
        mask = mask.expand(
            query.shape[0], mask.shape[1] if mask.ndim == 4 else 1, query.shape[2], key.shape[2]
        )
        if mask.dtype == torch.bool and name == "eager":
            # As transformers writes a mask: the dtype's lowest number, not −inf.
            lowest = torch.finfo(query.dtype).min
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
                ~mask, lowest
            )
    if name == "flex_attention":
        query, key, value, mask = _for_flex(query, key, value, is_causal)
    module = SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1] if enable_gqa else 1,
        is_causal=is_causal,
        training=False,
        config=SimpleNamespace(_attn_implementation=name),
        layer_idx=0,
    )
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    with _many_graphs():
        returned = function(
            module, query, key, value, mask, scaling=scaling, dropout=0.0, is_causal=is_causal
        )
    out: Tensor = returned[0]
    return out.transpose(1, 2)


def _for_flex(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """What FlexAttention takes: on a CPU no tensors that require gradients, and a causal mask as a
    BlockMask.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if query.device.type == "cpu":
        query, key, value = query.detach(), key.detach(), value.detach()
    if not is_causal:
        return query, key, value, None
    lengths = query.shape[2], key.shape[2]
    return (
        query,
        key,
        value,
        create_block_mask(_causal, None, None, *lengths, device=query.device.type),
    )


def _transformers_function(name: str) -> Callable[..., Any]:
    if name == "eager":
        from transformers.models.llama.modeling_llama import eager_attention_forward

        return eager_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name not in ALL_ATTENTION_FUNCTIONS:
        known = ", ".join(ALL_ATTENTION_FUNCTIONS.keys())
        raise UnsupportedError(
            f"transformers has no attention function {name!r}: it has eager, {known}"
        )
    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]


def _same_lengths(query: Tensor, key: Tensor, is_causal: bool) -> None:
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            "aligns a causal mask of unequal lengths at the bottom right, not at the top left"
        )


def _no_flash_attn(modules: tuple[str, ...] = ("flash_attn",)) -> str | None:
    if not any(map(_installed, modules)):
        return f"{' or '.join(modules)} is not installed"
    return None if torch.cuda.is_available() else _NO_CUDA


def _installed(module: str) -> bool:
    package = module.partition(".")[0]  # find_spec imports the parents of what it looks for
    return (
        importlib.util.find_spec(package) is not None
        and importlib.util.find_spec(module) is not None
    )
