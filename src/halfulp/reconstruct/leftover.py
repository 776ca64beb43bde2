"""Where what a model leaves of a result's error sits: a few elements, heads, rows, features."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.reconstruct.dataflow import SLIGHT
from halfulp.reconstruct.emulating import GRADIENTS, Emulator, Model
from halfulp.reconstruct.unlike import OFF, Unlike, place_of

CONCENTRATED = 0.9  # share of the unexplained squared error that a place must hold


def few_elements(emulator: Emulator, model: Model, tensor: str, bad: frozenset[str]) -> str:
    """Few elements that alone are wrong in most calls that are."""
    found = [where_left(emulator, model, tensor, name)[0] for name in sorted(bad)]
    some = [p.text for p in found if p is not None and p.kind == "elements"]
    return max(some, key=len) if 2 * len(some) > len(found) else ""


def _like(candidate: Tensor) -> Tensor:
    found = candidate.double()
    found = found.unsqueeze(-1) if found.ndim == 3 else found
    return torch.where(found.isfinite(), found, 0.0)


def where_left(
    emulator: Emulator, model: Model, tensor: str, name: str
) -> tuple[Unlike | None, str]:
    """Where what the model leaves sits, beside what it errs itself: heads, rows or features, with
    its cause; a few elements.
    """
    observed = emulator.observed[name, tensor]
    made = emulator.made(emulator.trials[name], model, tensor)
    if made is None or made.shape[:3] != observed.value.shape[:3]:
        return None, ""
    rest, usual = (
        torch.where(observed.usable, x, 0.0)
        for x in (observed.value - _like(made), _like(made) - observed.exact)
    )
    squares = rest.square()
    top = float(squares.flatten().topk(min(8, squares.numel())).values.sum())
    others = float(squares.sum()) - top
    if squares.numel() > 100 and others <= min((1 - CONCENTRATED) / CONCENTRATED * top,
                                               OFF**2 * float(usual.square().sum())):  # fmt: skip
        return Unlike("a few elements", "elements"), "elements"
    usual = usual.square()
    mean = float(usual.mean()) + 1e-300  # what it errs is larger in some rows and some features
    rows, features = (usual.mean(dim, keepdim=True) for dim in (-1, (0, 1, 2)))
    noise = rows.clamp_min(1e-3 * mean) * features.clamp_min(1e-3 * mean) / mean
    whose = "keys" if tensor in ("grad_key", "grad_value") else "queries"
    found = place_of(squares / noise, observed.usable.double(), (whose, "features"))
    if found is None:
        return None, ""
    if found.kind == "head":
        return found, "gradient-unexplained" if tensor in GRADIENTS else "out-unexplained"
    if found.of == "features":
        return found, "ragged"
    if found.inside is not None and float(squares[found.inside].sum()) < SLIGHT**2 * float(
        observed.exact[found.inside].square().sum()):  # fmt: skip
        return found, "gradient-unexplained" if tensor in GRADIENTS else "out-unexplained"
    return found, "grad-tail" if tensor in GRADIENTS else "query-tail"
