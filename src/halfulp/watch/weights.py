"""What a step does to the weights: how large each matrix is and how far the optimizer moves it,
from a few thousand numbers of each; and the largest singular values of W_Q and W_K.

The numbers are copied before the update of a measured step and compared after it; nothing is kept
between two measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

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
ACCEPTED = (
    "layers of two dimensions in the module that calls attention, named such as q_proj and k_proj,"
    " query and key, wq and wk, or both with W_V below each other in c_attn, qkv_proj or in_proj"
)
"""What `projections` finds."""


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
        # cloned, since the update writes into the same memory
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
        heads: query heads and numbers in each, by the path of the module that called attention.

    Returns:
        By layer sigma_query and sigma_key `[H]`, the latter of the key head that a head reads.
    """
    generator = torch.Generator().manual_seed(0)
    by_path = dict(module_names(model))
    found = {}
    for layer, (many, width) in heads.items():
        held = projections(by_path.get(layer.partition(" (")[0]), many, width)
        pair = None if held is None else (held[0][0], held[1][0])
        if pair is None or not all(bool(x.isfinite().all()) for x in pair):
            continue
        known = head_sigmas(*pair, 1.0, None, generator)
        found[layer] = {
            "sigma_query": known.query,
            "sigma_key": known.key.repeat_interleave(many // len(pair[1])),
        }
    return found


def projections(
    module: nn.Module | None, heads: int, width: int | None = None
) -> tuple[list[Tensor], list[Tensor]] | None:
    """What makes a module's queries and keys, by head, as views; None where it is not found.

    Args:
        module: that calls attention.
        heads: of queries.
        width: D, numbers in a head; None: as wide as all query heads together allow.

    Returns:
        W_Q `[H, D, width]` and its bias `[H, D]`, if it has one; the same of W_K, by key head.
    """
    if module is None:
        return None
    named: dict[str, tuple[Tensor, Tensor | None]] = {}
    for path, inner in module.named_modules():
        weight, bias = getattr(inner, "weight", None), getattr(inner, "bias", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            # transformers' Conv1D holds its weight the other way round
            weight = weight.mT if type(inner).__name__ == "Conv1D" else weight
            named[path.rpartition(".")[2].lower()] = weight, bias
    for name, x in module.named_parameters(recurse=False):
        if x.ndim == 2:
            short = name.removesuffix("_weight")
            named[short.lower()] = x, getattr(module, f"{short}_bias", None)
    # of a sharded weight (DTensor) only a part is here, which has other singular values
    plain = {name: one for name, one in named.items() if not hasattr(one[0], "to_local")}
    query, key, fused = (
        next((one for name, one in plain.items() if name in names), None)
        for names in (_QUERY, _KEY, _FUSED)
    )
    if (query is None or key is None) and fused is not None:
        many = len(fused[0])
        each = width or many // 3 // heads
        rest, odd = divmod(many - heads * each, 2)
        if odd or rest <= 0:
            return None
        # W_K and W_V share evenly what W_Q leaves, however many key heads there are
        ends = (0, heads * each, heads * each + rest)
        query, key = (
            (fused[0][a:b], None if fused[1] is None else fused[1][a:b]) for a, b in pairwise(ends)
        )
    if query is None or key is None or query[0].shape[1] != key[0].shape[1]:
        return None
    each = len(query[0]) // heads
    of_key = len(key[0]) // each if each else 0
    # under a usual name something else may lie: only a weight that gives whole heads is taken
    fits = each == (width or each) and of_key and not heads % of_key
    if not fits or len(query[0]) != heads * each or len(key[0]) != of_key * each:
        return None
    of_query, of_keys = (
        [x.detach().view(-1, each, *x.shape[1:]) for x in pair if x is not None]
        for pair in (query, key)
    )
    return of_query, of_keys
