"""A class of transformers with `attn_implementation="halfulp"`, held to its own eager attention.

Logits and the gradients of all parameters, in float32, on a plain text, padded on either side,
packed, and read in pieces with a cache; beside it, which calls reached halfulp.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.attention.tiny_transformers import LENGTH, built, inputs

BUDGET = 1e-4
"""Relative, in the norm: float32's noise through a few layers is 1e-7 to 1e-5; what is wrong is
above 1e-2."""
PIECES = (7, 1, 4)  # of the text, with a cache


@dataclass
class Held:
    """What came of one class."""

    name: str
    verdict: str = ""  # "equal", "refused", "no call", "wrong", "not built", "eager fails"
    said: str = ""  # the refusal, the reason, or what is wrong
    cases: dict[str, float] = field(
        default_factory=dict
    )  # worst relative error, logits and gradients
    calls: int = 0


def hold(name: str, model_type: str, implementation: str = "halfulp") -> Held:
    """Compare one class in every case that it takes."""
    held = Held(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            eager = built(name, model_type, "eager")
        except Exception as error:
            held.verdict, held.said = "not built", _line(error)
            return held
        try:
            _run(eager, inputs(eager))
        except Exception as error:
            held.verdict, held.said = "eager fails", _line(error)
            return held
        try:
            ours = built(name, model_type, implementation, eager.state_dict())
        except Exception as error:
            held.verdict, held.said = (
                "refused" if isinstance(error, ValueError) else "crashed",
                _line(error),
            )
            return held
        try:
            sdpa = built(name, model_type, "sdpa", eager.state_dict())
        except ValueError:
            sdpa = None
        with _counted(held):
            _compare(held, eager, ours, sdpa)
    return held


def _compare(held: Held, eager: nn.Module, ours: nn.Module, sdpa: nn.Module | None) -> None:
    for case, run in cases(eager).items():
        try:
            expected = run(eager)
        except Exception:
            continue  # a case that the class does not take
        try:
            got = run(ours)
        except ValueError as error:
            held.verdict, held.said = "refused", _line(error)
            return
        except Exception as error:
            held.verdict, held.said = "crashed", f"{case}: {_line(error)}"
            return
        error = _worst(got, expected)
        if error > BUDGET and sdpa is not None and _worst(got, run(sdpa)) <= BUDGET:
            held.said = f"{case}: as sdpa, which differs from eager by {error:.1e}"
            continue
        held.cases[case] = error
    worst = max(held.cases, key=lambda case: held.cases[case])
    if not held.cases[worst] <= BUDGET:
        held.verdict, held.said = "wrong", f"{worst}: {held.cases[worst]:.1e}"
    else:
        held.verdict = "equal" if held.calls else "no call"


def _worst(got: list[Tensor], expected: list[Tensor]) -> float:
    return max(difference(a, b) for a, b in zip(got, expected, strict=True))


def cases(model: nn.Module) -> dict[str, Callable[[nn.Module], list[Tensor]]]:
    """Every way in which the model is asked, by name."""
    given = inputs(model)
    found: dict[str, Callable[[nn.Module], list[Tensor]]] = {"plain": lambda m: _run(m, given)}
    names = inspect.signature(model.forward).parameters
    text = given.get("input_ids")
    if text is None:
        return found
    if "attention_mask" in names:
        for side in ("left", "right"):
            mask = torch.ones_like(text)
            mask[0, slice(4) if side == "left" else slice(-4, None)] = 0
            found[f"padded {side}"] = lambda m, mask=mask: _run(
                m, given | {"attention_mask": mask}, mask
            )
    if "decoder_input_ids" in names or "ForCausalLM" not in type(model).__name__:
        return found
    if "position_ids" in names:
        positions = torch.arange(LENGTH // 2).repeat(2).expand_as(text)
        found["packed"] = lambda m: _run(m, given | {"position_ids": positions, "use_cache": False})
    if "past_key_values" in names:
        found["cache"] = lambda m: _pieces(m, text)
    return found


def difference(ours: Tensor, expected: Tensor) -> float:
    """Relative, in the norm; infinite where one has a number and the other has none."""
    if not torch.equal(ours.isfinite(), expected.isfinite()):
        return float("inf")
    ours, expected = (x.double().nan_to_num(0, 0, 0) for x in (ours, expected))
    return float((ours - expected).norm() / expected.norm().clamp(min=1e-30))


def _run(model: nn.Module, given: Mapping[str, Tensor], seen: Tensor | None = None) -> list[Tensor]:
    """Outputs, and the whole gradient as one vector."""
    model.zero_grad()
    torch.manual_seed(0)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    given = {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
    outputs = list(_floating(model(**given)))[:1]
    if seen is not None:
        outputs = [x[seen.bool()] if x.shape[:2] == seen.shape else x for x in outputs]
    draw = torch.Generator().manual_seed(2)  # of outputs that are normed a plain sum is a constant
    sum((x.float() * torch.randn(x.shape, generator=draw)).mean() for x in outputs).backward()
    gradient = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )
    return [*(x.detach() for x in outputs), gradient]


def _pieces(model: nn.Module, text: Tensor) -> list[Tensor]:
    cache, logits = None, []
    with torch.no_grad():
        for piece in text.split(PIECES, dim=1):
            result = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            logits.append(result.logits)
    return [torch.cat(logits, 1)]


def _floating(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for name in sorted(output, key=lambda n: "logits" not in n):
            if name != "past_key_values":
                yield from _floating(output[name])
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _floating(part)


@contextmanager
def _counted(held: Held) -> Iterator[None]:
    """Count the calls that reach `halfulp.attention` by the registered name."""
    module = importlib.import_module("halfulp.attention.transformers")
    real = module.attention

    def count(*args: Any, **options: Any) -> Any:
        held.calls += 1
        return real(*args, **options)

    module.attention = count
    try:
        yield
    finally:
        module.attention = real


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
