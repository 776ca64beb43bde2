"""What other people write out by hand in many torch functions, seen as the one operation that it
is: RMSNorm as a module of transformers' form, and `apply_rotary_pos_emb`.

A kernel can stand for the whole only. What a module computes is held against the definition on
numbers, not guessed from its name alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

ROTARY = "apply_rotary_pos_emb"
Seen = Callable[..., Any]
"""seen(kind, name, function, args, kwargs): the result of an operation, or of what stands for it;
`function` takes these arguments."""


def reach(model: nn.Module, seen: Callable[[], Seen | None]) -> Iterator[Callable[[], None]]:
    """Put `seen` around every whole operation of a model; yields what takes each out again."""
    turning: dict[str, Any] = {}
    reached: set[int] = set()
    for module in model.modules():
        if (weights := _rms_norm(module)) is not None:
            yield _norm(module, *weights, seen)
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            hook = module.register_forward_pre_hook(_noting(turning), with_kwargs=True)
            yield hook.remove
        known = vars(sys.modules.get(type(module).__module__, module))
        if callable(known.get(ROTARY)) and id(known) not in reached:
            reached.add(id(known))
            yield _rotary(known, turning, seen)


def _rms_norm(module: nn.Module) -> tuple[float, float] | None:
    """What is added to the weight (0, or 1 as in Gemma), and eps; None: it is no such module."""
    weight = getattr(module, "weight", None)
    eps = next(
        (e for e in (getattr(module, n, None) for n in ("variance_epsilon", "eps")) if e), None
    )
    named = "rmsnorm" in type(module).__name__.lower() and not isinstance(module, nn.RMSNorm)
    if not named or not isinstance(weight, Tensor) or weight.ndim != 1 or not eps:
        return None
    # rows of a mean that is not 0, on which a norm that subtracts it gives something else
    rows = torch.linspace(-2, 3, 2 * len(weight), device=weight.device).view(2, -1)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        try:
            # the class's own, past hooks and past what stands in its place on the instance
            found = type(module).forward(module, rows)
        except Exception:  # of another signature
            return None
        for added in (0.0, 1.0):
            exact = torch.nn.functional.rms_norm(
                rows, weight.shape, weight.float() + added, float(eps)
            )
            if isinstance(found, Tensor) and torch.allclose(found.float(), exact, rtol=1e-3):
                return added, float(eps)
    return None


def _norm(
    module: nn.Module, added: float, eps: float, seen: Callable[[], Seen | None]
) -> Callable[[], None]:
    stock = module.forward

    def forward(x: Tensor) -> Any:
        run = seen()
        if run is None:
            return stock(x)
        weight = module.weight
        assert isinstance(weight, Tensor)
        weight = weight + added if added else weight
        args = (x, weight.shape, weight, eps)
        return run("norm", "rms_norm", lambda x, *_: stock(x), args, {})

    module.forward = forward
    return lambda: module.__dict__.pop("forward", None) and None


def _noting(turning: dict[str, Any]) -> Callable[..., None]:
    """A hook that keeps which positions a rotary embedding makes its table of."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        with torch._C.DisableTorchFunction():  # no operation of the model's
            base = _base(module)
        turning.clear()
        turning["positions"] = positions
        known = base is not None and positions is not None
        turning["base"] = base if known else "its angles or its positions are not the definition's"

    return note


def _base(module: nn.Module) -> float | None:
    """Of angles position · base^(−2i/D), to the rounding of a table in bf16; None: of others."""
    frequency, config = module.inv_freq, getattr(module, "config", None)
    assert isinstance(frequency, Tensor)
    given = getattr(config, "rope_parameters", None) or {}
    said = getattr(config, "rope_theta", None) or given.get("rope_theta")
    base = float(said or (frequency[1].float() ** -len(frequency) if len(frequency) > 1 else 1e4))
    power = torch.arange(len(frequency), device=frequency.device) / len(frequency)
    plain = torch.allclose(frequency.float(), base**-power, rtol=2**-8)
    return base if plain and getattr(module, "attention_scaling", 1.0) == 1.0 else None


def _rotary(
    known: dict[str, Any], turning: dict[str, Any], seen: Callable[[], Seen | None]
) -> Callable[[], None]:
    stock = known[ROTARY]

    def function(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **{k: x for k, x in kwargs.items() if k not in turning})

    def turned(*args: Any, **kwargs: Any) -> Any:
        run = seen()
        if run is None or not turning:
            return stock(*args, **kwargs)
        return run("rotary", ROTARY, function, args, kwargs | turning)

    known[ROTARY] = turned
    return lambda: known.__setitem__(ROTARY, stock)
