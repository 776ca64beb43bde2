"""The door to the Triton kernels: what they support, and the two passes. Triton is imported on the
first call only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfulp.calls import Call, Gradients, Saved
from halfulp.recipes import KERNEL_RECIPES

if TYPE_CHECKING:
    from halfulp.kernels.triton_configs import Config
    from halfulp.kernels.triton_launch import Launch, Target

MAX_DIM = 256
MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 5)  # 3.4 makes no product of fewer than 16 columns, and l takes one of 8


def supports(call: Call, recipe: str) -> str | None:
    """None if the kernels run this call, else why not, in words. Triton is imported only for
    tensors on a GPU.
    """
    query, key, value = call.query, call.key, call.value
    if recipe not in KERNEL_RECIPES:
        return f"the recipe {recipe!r} is none of {', '.join(KERNEL_RECIPES)}"
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the dtype {query.dtype} is none of bfloat16, float16 and float32"
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return (
            f"key of dtype {key.dtype} and value of dtype {value.dtype} are not query's,"
            f" {query.dtype}"
        )
    widest = max(query.shape[-1], value.shape[-1])
    if widest > MAX_DIM:
        return f"the head dimension {widest} is above {MAX_DIM}"
    if 0 in (query.shape[-1], value.shape[-1], key.shape[-2], key.shape[1]):
        return "there is no key, or a head dimension is 0"
    if query.shape[1] % key.shape[1]:
        return f"{key.shape[1]} key heads do not divide {query.shape[1]} query heads"
    if not 0 < call.scale < float("inf"):
        return (
            f"the scale {call.scale} is not positive and finite: the row maximum is taken before it"
        )
    return _unsupported_option(call) or _unsupported_device(query)


def _unsupported_option(call: Call) -> str | None:
    mask, sinks, shape, device = call.sees.mask, call.sinks, call.scores_shape, call.query.device
    if not 0 <= call.softcap < float("inf"):
        return f"the softcap {call.softcap} is not 0 or positive and finite"
    if not 0 <= call.dropout_p <= 1:
        return f"the dropout probability {call.dropout_p} is not between 0 and 1"
    for name, x in (("attn_mask", mask), ("sinks", sinks)):
        if x is not None and (x.device != device or x.layout != torch.strided):
            return f"{name} on {x.device} ({x.layout}) where query is on {device}"
    if mask is not None:
        if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
            return f"attn_mask of dtype {mask.dtype}, neither bool nor floating point"
        given = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if len(given) != 4 or any(g not in (1, n) for g, n in zip(given, shape, strict=True)):
            return (
                f"attn_mask of shape {tuple(mask.shape)} does not broadcast to the scores' {shape}"
            )
    if sinks is not None and tuple(sinks.shape) != (shape[1],):
        return f"sinks of shape {tuple(sinks.shape)} for {shape[1]} heads"
    return None


def _unsupported_device(query: Tensor) -> str | None:
    if query.device.type == "cpu" and interpreting():
        return None
    if query.device.type != "cuda":
        return f"tensors on {query.device}: the Triton kernels run on GPUs"
    lacking = _unsupported_triton()
    if lacking is not None:
        return lacking
    capability = torch.cuda.get_device_capability(query.device)
    if torch.version.hip is None and capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def _unsupported_triton() -> str | None:
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < MIN_TRITON:
        return f"triton {triton.__version__} is older than {MIN_TRITON[0]}.{MIN_TRITON[1]}"
    return None


def interpreting() -> bool:
    """Whether triton was imported by someone who asked for its interpreter, which runs kernels on
    CPU tensors.
    """
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def forward(call: Call, recipe: str, *, config: Config | None = None) -> Saved:
    """O, its residual, lse, m and l; see `calls.Saved`. m is in base 2; −inf and l = 0 in a fully
    masked row.

    `config` overrides the tile sizes of the table. Raises ValueError where `supports` gives a
    reason.
    """
    _check(call, recipe)
    from halfulp.kernels.triton_launch import forward_launch

    launch, saved = forward_launch(call, recipe, target_of(call.query), config)
    run([launch], call.query)
    return saved


def backward(
    call: Call,
    recipe: str,
    saved: Saved,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *,
    configs: dict[str, Config] | None = None,
) -> Gradients:
    """dQ, dK, dV and the sinks' gradient, without atomics: the same bits on every run.

    `saved` is what `forward` gave for this call; `grad_lse [B, H, N]` is the gradient of the
    natural lse. `configs` overrides tile sizes ("query", "key"). Raises ValueError where `supports`
    gives a reason.
    """
    _check(call, recipe)
    from halfulp.kernels.triton_launch import backward_launches, grad_sinks

    query, sinks = call.query, call.sinks
    launches, gradients = backward_launches(
        call, recipe, saved, grad_out, grad_lse, target_of(query), configs
    )
    if query.numel() == 0:  # nothing is launched, and keys that nobody saw have a gradient of 0
        nothing = Gradients(*(x.zero_() for x in gradients[:3]))
        return nothing if sinks is None else nothing._replace(sinks=torch.zeros_like(sinks))
    run(launches.values(), query)
    return gradients if sinks is None else gradients._replace(sinks=grad_sinks(launches, sinks))


def _check(call: Call, recipe: str) -> None:
    reason = supports(call, recipe)
    if reason is not None:
        raise ValueError(
            f"recipe={recipe!r} on {call.query.device}: not for the Triton kernels: {reason}"
        )


def target_of(query: Tensor) -> Target:
    """What the kernels are compiled for where this tensor lies."""
    from halfulp.kernels.triton_launch import Target

    if query.device.type == "cpu":
        return Target(80, emulated=query.dtype == torch.bfloat16)
    if torch.version.hip is not None:
        return Target(0)
    major, minor = torch.cuda.get_device_capability(query.device)
    return Target(10 * major + minor, packs=True)


def run(launches: Iterable[Launch], query: Tensor) -> None:
    """Launch kernels where `query` lies; nothing for an empty query."""
    if query.numel() == 0:
        return
    if query.device.type == "cpu":
        _launch_all(launches)
        return
    with torch.cuda.device(query.device):
        _launch_all(launches)


def _launch_all(launches: Iterable[Launch]) -> None:
    import triton

    for kernel, grid, arguments, config in launches:
        if arguments["tiles"].DESCRIPTORS.value:
            triton.set_allocator(_workspace)
        kernel[grid](
            **arguments, num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True
        )


def _workspace(size: int, alignment: int, stream: Any) -> Tensor:  # noqa: ARG001 - triton's signature
    """Device memory in which Triton builds tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
