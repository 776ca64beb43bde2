"""Which attention runs where: one function for the whole model, others for some of its layers and
heads.

Every choice is a line of text, so that a run folder can say it, a worker process can be told it,
and a run can be repeated from its record: any name of `halfulp.targets`, such as one of PyTorch's
kernels ("torch:flash"), a recipe ("BF16_FLASH2[out=fp32]"), or a function of the user's
("kernel.py:attention").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from halfulp.calls import Call, Sees
from halfulp.targets import Target, resolve
from halfulp.watch.taps import Tap

AttentionFunction: TypeAlias = Callable[..., Tensor]
"""f(query, key, value, *, is_causal, scale) -> out, all `[B, H, N, D]`, out in query's dtype."""


@dataclass(frozen=True)
class Assignment:
    """One attention for all layers and heads, or for those named."""

    attention: str
    layers: tuple[int, ...] | None = None  # from 0; None: all
    heads: tuple[int, ...] | None = None  # from 0; None: all

    def covers(self, layer: int, head: int) -> bool:
        """Whether it speaks of that head of that layer."""
        return (self.layers is None or layer in self.layers) and (
            self.heads is None or head in self.heads
        )

    def __str__(self) -> str:
        where = [
            f"{name} {','.join(map(str, numbers))}"
            for name, numbers in (("layer", self.layers), ("head", self.heads))
            if numbers is not None
        ]
        return f"{' '.join(where)}: {self.attention}" if where else self.attention


@dataclass(frozen=True)
class AttentionPlan:
    """Who computes attention in every head of every layer; of several assignments that cover a head
    the last counts.
    """

    assignments: tuple[Assignment, ...] = (Assignment("torch:flash"),)

    @classmethod
    def of(cls, *texts: str) -> AttentionPlan:
        """Read "CHOICE", "layer 1: CHOICE", "head 2,5: CHOICE" or "layer 0,1 head 2: CHOICE"; the
        first covers all.

        Raises:
            ValueError: a text is none of these, or the first leaves some heads without attention.
        """
        plan = cls(tuple(_assignment(text) for text in texts))
        if (
            not plan.assignments
            or plan.assignments[0].layers is not None
            or plan.assignments[0].heads is not None
        ):
            raise ValueError(
                f"attention={list(texts)!r}: accepted is first a choice for every head, such as"
                " torch:flash"
            )
        return plan

    def with_(self, *texts: str) -> AttentionPlan:
        """The same plan with more assignments, which count over the ones before."""
        return AttentionPlan((*self.assignments, *(_assignment(text) for text in texts)))

    def choice(self, layer: int, head: int) -> str:
        """The attention of one head."""
        return next(a.attention for a in reversed(self.assignments) if a.covers(layer, head))

    def groups(self, layer: int, heads: int) -> dict[str, list[int]]:
        """The heads of a layer by the attention that runs in them."""
        found: dict[str, list[int]] = {}
        for head in range(heads):
            found.setdefault(self.choice(layer, head), []).append(head)
        return found

    def check(self, layers: int, heads: int) -> None:
        """Raise ValueError for a layer or head that a model of that size has not."""
        for a in self.assignments:
            for name, numbers, count in (("layer", a.layers, layers), ("head", a.heads, heads)):
                for number in numbers or ():
                    if not 0 <= number < count:
                        raise ValueError(
                            f"attention={str(a)!r}: accepted are {name}s 0 to {count - 1}"
                        )

    def __str__(self) -> str:
        return "; ".join(map(str, self.assignments))


_WHERE = re.compile(
    r"\s*(?:layers?\s+(?P<layers>[\d,]+))?\s*(?:heads?\s+(?P<heads>[\d,]+))?\s*:\s*(?P<choice>.+)"
)


def _assignment(text: str) -> Assignment:
    match = _WHERE.fullmatch(text) if re.match(r"\s*(layer|head)", text) else None
    if match is None:
        if re.match(r"\s*(layers?|heads?)\s", text) or not text.strip():
            raise ValueError(
                f"attention={text!r}: accepted is CHOICE or, for some, 'layer 1 head 2,5: CHOICE'"
            )
        return Assignment(text.strip())
    layers, heads = (
        None if match[name] is None else tuple(int(n) for n in match[name].split(",") if n)
        for name in ("layers", "heads")
    )
    return Assignment(match["choice"].strip(), layers, heads)


def attention_function(
    choice: str, own: Mapping[str, AttentionFunction] | None = None
) -> AttentionFunction:
    """Return the function that a choice names.

    Args:
        choice: any name that `halfulp.targets.resolve` knows of a kernel that has a backward pass,
            or a name in `own`. PyTorch's kernels, halfulp's and the user's read float32 operands in
            bf16; recipes, "sdpa" and "sdpa:fp32" take them as they are.
        own: functions of the caller's by name.

    Raises:
        ValueError: there is no such thing, or it cannot run or be trained on this machine.
    """
    if own is not None and choice in own:
        return own[choice]
    target = resolve(choice, "attention")
    if target.missing is not None:
        raise ValueError(f"attention={choice!r}: {target.missing}; accepted is one that runs here")
    if target.forward_only is not None:
        raise ValueError(
            f"attention={choice!r}: cannot be trained: {target.forward_only}; accepted is a kernel"
            " that has one, such as sdpa:math"
        )
    return partial(_out_of, target) if target.layer is None else target.layer


class Attend(nn.Module):
    """The seam between a model and its attention: the plan's function in every head, and a tap
    behind it.
    """

    def __init__(
        self,
        layer: int,
        heads: int,
        plan: AttentionPlan,
        own: Mapping[str, AttentionFunction] | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.heads = layer, heads
        self.choices = set(plan.groups(layer, heads))
        self.groups = [
            (
                None if len(members) == heads else torch.tensor(members),
                attention_function(choice, own),
            )
            for choice, members in plan.groups(layer, heads).items()
        ]
        self.tap: Tap | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None = None,
    ) -> Tensor:
        """Return out `[B, H, N, D_v]` of query `[B, H, N, D]`; key and value may have fewer heads
        (GQA).
        """
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        # a plan speaks of heads of queries, so each gets keys of its own before it is split by them
        if key.shape[1] != self.heads:
            key, value = (x.repeat_interleave(self.heads // x.shape[1], 1) for x in (key, value))
        out = self.attend(query, key, value, is_causal, scale)
        if self.tap is not None:
            out = self.tap(self.layer, Call(query, key, value, Sees(is_causal), scale), out)
        return out

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
    ) -> Tensor:
        """The plan's function in every head, of as many heads of key and value."""
        if len(self.groups) == 1:
            return self.groups[0][1](query, key, value, is_causal=is_causal, scale=scale)
        parts: list[Tensor | None] = [None] * self.heads
        for members, function in self.groups:
            assert members is not None
            members = members.to(query.device)
            out = function(
                query[:, members],
                key[:, members],
                value[:, members],
                is_causal=is_causal,
                scale=scale,
            )
            for place, head in enumerate(members.tolist()):
                parts[head] = out[:, place]
        return torch.stack([part for part in parts if part is not None], 1)


def set_tap(model: nn.Module, tap: Tap | None) -> None:
    """Put a tap behind every attention of a model, or take it away with None."""
    for module in model.modules():
        if isinstance(module, Attend):
            module.tap = tap


def _out_of(target: Target, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Out of a kernel, read in bf16 as kernels are, without the lse that some return beside it."""
    half = query.dtype if query.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    result = target.call(query.to(half), key.to(half), value.to(half), **options)
    out = result[0] if isinstance(result, tuple | list) else result
    if not isinstance(out, Tensor):
        raise ValueError(
            f"attention={target.name!r}: returns {type(out).__name__}; accepted is a tensor or"
            " (out, lse)"
        )
    # such a result would train nothing behind it, without a word
    if query.requires_grad and torch.is_grad_enabled() and not out.requires_grad:
        raise ValueError(
            f"attention={target.name!r}: cannot be trained: its result carries no gradient;"
            " accepted is a kernel that has a backward pass"
        )
    return out.to(query.dtype)
