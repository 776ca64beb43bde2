"""Do the forward and the two backward kernels round to the same weights? Read from their results,
not their source.

exp2 is approximate on GPUs, and the forward pass may round a score less its running maximum where
the backward pass has the final one. The kernels that run are the ones of training; their inputs are
chosen so that a result is the weights: V = 1 (the unit matrix) makes O = P̂ / l; with δ = −l, V =
0, and a unit matrix beside Q or K, dK and dQ hold P̂.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfulp.calls import Call, Saved, Sees
from halfulp.kernels import triton_attention as door
from halfulp.kernels.triton_configs import Config
from halfulp.kernels.triton_launch import backward_launches, forward_launch

_RECIPE = "halfulp"
SIZE = 64  # queries, keys and features of one head


def rounded_weights(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    configs: dict[str, Config] | None = None,
) -> dict[str, Tensor]:
    """P̂ `[B, H, 64, 64]` of "forward", "query" (dQ's kernel) and "key" (dK's), shifted by the
    final m; bf16 or fp16.

    query and key are `[B, H, 64, 64]`. Raises ValueError for other shapes, and where the kernels do
    not run.
    """
    for name, x in (("query", query), ("key", key)):
        if x.ndim != 4 or x.shape[2:] != (SIZE, SIZE):
            raise ValueError(
                f"{name} of shape {tuple(x.shape)}: accepted is [B, H, {SIZE}, {SIZE}]"
            )
    configs = configs or {}
    sees = Sees(is_causal)
    reason = door.supports(Call(query, key, key, sees, scale), _RECIPE)
    if reason is not None:
        raise ValueError(f"query: {reason}")
    unit = torch.eye(SIZE, dtype=query.dtype, device=query.device).expand_as(query).contiguous()
    nothing = torch.zeros_like(unit)
    target = door.target_of(query)
    wide_query, wide_key = torch.cat([query, nothing], 3), torch.cat([key, nothing], 3)
    launch, saved = forward_launch(
        Call(wide_query, wide_key, unit, sees, scale), _RECIPE, target, configs.get("forward")
    )
    exact = torch.empty(saved.out.shape, dtype=torch.float32, device=query.device)
    launch.arguments.update(saved=launch.arguments["saved"]._replace(out=exact), RESIDUAL=False)
    door.run([launch], query)
    for unfilled in (saved.out, saved.residual):
        if unfilled is not None:
            unfilled.zero_()
    weights = {"forward": (exact * saved.row_sum[..., None]).to(query.dtype)}
    beside = {
        "query": (wide_query, torch.cat([key, unit], 3)),
        "key": (torch.cat([query, unit], 3), wide_key),
    }
    for kind, (q, k) in beside.items():
        weights[kind] = _from_gradient(kind, Call(q, k, nothing, sees, scale), saved, configs)
    return weights


def _from_gradient(kind: str, call: Call, saved: Saved, configs: dict[str, Config]) -> Tensor:
    """P̂ from the half of dQ or dK that belongs to the unit matrix."""
    launches, gradients = backward_launches(
        call, _RECIPE, saved, call.value, None, door.target_of(call.query), configs
    )
    door.run([launches["rows"]], call.query)  # the rows' shift
    arguments: dict[str, Any] = launches[kind].arguments
    arguments["stats"].delta.fill_(-1)  # δ / l: dS = P̂ (0 / l + 1)
    arguments["call"] = arguments["call"]._replace(alpha=1.0)
    door.run([launches[kind]], call.query)
    return gradients.query[..., SIZE:] if kind == "query" else gradients.key[..., SIZE:].mT


def weights_that_differ(weights: dict[str, Tensor]) -> dict[str, int]:
    """How many of the weights differ between each two kernels, and "of": how many there are."""
    names = list(weights)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    counts = {f"{a}, {b}": int((weights[a] != weights[b]).sum()) for a, b in pairs}
    return counts | {"of": next(iter(weights.values())).numel()}
