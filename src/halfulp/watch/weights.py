"""What a step does to the weights: how large each matrix is and how far the optimizer moves it,
from a few thousand numbers of each; and the largest singular values of W_Q and W_K.

The numbers are copied before the update of a measured step and compared after it; nothing is kept
between two measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from halfulp.interpose.standing import ITSELF, module_names
from halfulp.watch.spectral import head_sigmas

SAMPLE = 4096
"""Numbers of a matrix that are looked at, evenly spread: its root mean square is then known to
about a hundredth.
"""
_QUERY = {"q_proj", "query", "wq", "to_q", "q", "q_lin", "query_proj", "linear_q", "q_linear"}
_KEY = {"k_proj", "key", "wk", "to_k", "k", "k_lin", "key_proj", "linear_k", "k_linear"}
# W_Q, W_K and W_V one below the other; GPT-NeoX's query_key_value mixes heads and is none of these
_FUSED = {"c_attn", "qkv_proj", "qkv", "wqkv", "in_proj", "to_qkv"}


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters of two dimensions or more by name, without what wrappers add."""
    found: dict[str, nn.Parameter] = {}
    for path, module in module_names(model):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.ndim >= 2:
                found.setdefault(name if path == ITSELF else f"{path}.{name}", parameter)
    return found


class Moved:
    """Samples of matrices before an update, to be compared with what is there after it."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = matrices(model)
        self._before = {name: _sample(x).clone() for name, x in self._parameters.items()}

    def figures(self) -> dict[str, dict[str, float]]:
        """By matrix: rms, its root mean square after the update, and update, that of the update in
        units of the one before it (NaN where that was 0).
        """
        names = list(self._before)
        if not names:
            return {}
        after = [_sample(x) for x in self._parameters.values()]
        before = list(self._before.values())
        rows = torch.stack(
            [
                torch.stack([_rms(b), _rms(a), _rms(a - b)])
                for b, a in zip(before, after, strict=True)
            ]
        ).tolist()
        return {
            name: {"rms": now, "update": change / was if was else math.nan}
            for name, (was, now, change) in zip(names, rows, strict=True)
        }


def _sample(parameter: Tensor) -> Tensor:
    """Up to `SAMPLE` numbers of a parameter, fp32, on the CPU if that is one device of several."""
    local = getattr(parameter, "to_local", None)  # a DTensor's part that is here
    flat = (parameter if local is None else local()).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].float()


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt().cpu() if x.numel() else torch.zeros(())


def sigmas(model: nn.Module, heads: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, Tensor]]:
    """Largest singular values of the projections of attention layers, by head, where the layer has
    them under a usual name.

    Args:
        model: whose.
        heads: query and key heads by the path of the module that called attention.

    Returns:
        By layer sigma_query and sigma_key `[H]`, the latter of the key head that a head reads.
    """
    generator = torch.Generator().manual_seed(0)
    by_path = dict(module_names(model))
    found = {}
    for layer, (many, of_key) in heads.items():
        module = by_path.get(layer.partition(" (")[0])
        pair = None if module is None else _projections(module, many, of_key)
        if pair is None or not all(bool(x.isfinite().all()) for x in pair):
            continue
        known = head_sigmas(*pair, 1.0, None, generator)
        found[layer] = {
            "sigma_query": known.query,
            "sigma_key": known.key.repeat_interleave(many // of_key),
        }
    return found


def _projections(module: nn.Module, heads: int, key_heads: int) -> tuple[Tensor, Tensor] | None:
    """W_Q `[H, D, width]` and W_K `[H_k, D, width]`; None where they are not found."""
    named = {}
    for path, inner in module.named_modules():
        weight = getattr(inner, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            # transformers' Conv1D holds its weight the other way round
            turned = type(inner).__name__ == "Conv1D"
            named[path.rpartition(".")[2].lower()] = weight.mT if turned else weight
    for name, x in module.named_parameters(recurse=False):
        if x.ndim == 2:
            named[name.removesuffix("_weight").lower()] = x
    named = {name: x for name, x in named.items() if not hasattr(x, "to_local")}
    query = next((x for name, x in named.items() if name in _QUERY), None)
    key = next((x for name, x in named.items() if name in _KEY), None)
    if query is None or key is None:
        fused = next((x for name, x in named.items() if name in _FUSED), None)
        if fused is None or len(fused) % (heads + 2 * key_heads):
            return None
        each = len(fused) // (heads + 2 * key_heads)
        query, key = fused[: heads * each], fused[heads * each : (heads + key_heads) * each]
    if len(query) % heads or len(key) % key_heads or query.shape[1] != key.shape[1]:
        return None
    query = query.reshape(heads, -1, query.shape[1])
    key = key.reshape(key_heads, -1, key.shape[1])
    return (query, key) if query.shape[1] == key.shape[1] else None
