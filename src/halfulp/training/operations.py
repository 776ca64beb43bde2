"""Which arithmetic computes which operations of a user's model: plans as data and as text, and what
`halfulp.interpose` is told of them.

An operation is named by its kind and by the path of the module that calls it. Attention has a plan
of its own, by layer and head (`halfulp.training.attention`); here that plan meets the calls of a
model that this package did not write.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfulp.attention import attention, emulate
from halfulp.complaints import meant
from halfulp.interpose import (
    KINDS,
    Kernel,
    Operation,
    Swap,
    arithmetic,
    interpose,
    module_names,
)
from halfulp.targets import canonical, recipe_in
from halfulp.training.attention import AttentionFunction, AttentionPlan, attention_function
from halfulp.training.attention_by_hand import (
    BY_HAND,
    SDPA,
    AttentionCalls,
    HeadsInFp32,
    Written,
    given,
)
from halfulp.training.optimizer_arithmetic import (
    OPTIMIZER,
    OptimizerArithmetic,
    check_optimizer,
    choices,
    trained,
)
from halfulp.training.score_clip import ScoreClip

OWN = "own"
"""The choice that leaves a model its own arithmetic, of attention or of anything else."""
OUTSIDE = "(outside)"
"""The path of what no module calls, such as a loss function."""
_WIDE = ("fp32", "fp64")
_FP32 = ("sdpa:fp32", "recipe:FP32", "recipe:FP64")
_CHANGED = (*(kind for kind in KINDS if kind != "other"), OPTIMIZER)


@dataclass(frozen=True)
class Assigned:
    """One arithmetic for all operations, or for those of some kinds or below some paths."""

    # "own", or as `halfulp.interpose.arithmetic`: "fp32", "fp64", a format, a kernel of the kinds
    into: str
    kinds: tuple[str, ...] = ()  # none: every kind
    paths: tuple[
        str, ...
    ] = ()  # globs; a path covers all below it, "=path" itself alone; none: all

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in _CHANGED:
                accepted = f"accepted are all, {', '.join(_CHANGED)}{meant(kind, _CHANGED)}"
                raise ValueError(f"operations={kind!r}: {accepted}")
        if self.into != OWN:
            called = tuple(kind for kind in self.kinds if kind != OPTIMIZER)
            try:
                if OPTIMIZER in self.kinds:
                    check_optimizer(self.into)
                if called or not self.kinds:
                    arithmetic(self.into, called)
            except ValueError as error:
                raise ValueError(str(error).replace("into=", "operations=", 1)) from None

    def covers(self, path: str, kind: str) -> bool:
        """Whether it speaks of operations of that kind in that module."""
        return (not self.kinds or kind in self.kinds) and (
            not self.paths or any(_covers(one, path) for one in self.paths)
        )

    def __str__(self) -> str:
        where = f" in {','.join(self.paths)}" if self.paths else ""
        return f"{','.join(self.kinds) or 'all'}{where}: {self.into}"


@dataclass(frozen=True)
class OperationPlan:
    """Who computes the operations of a model; of several assignments that cover one the last
    counts, and what none covers is the model's own.
    """

    assignments: tuple[Assigned, ...] = ()

    @classmethod
    def of(cls, *texts: str) -> OperationPlan:
        """Read "all: fp32", "linear,norm: fp32", "all in layers.1: fp32" or
        "linear in layers.1.mlp,=layers.2: e8m4".

        Raises:
            ValueError: a text is none of these; one line says what is accepted.
        """
        return cls(tuple(_assigned(text) for text in texts))

    def with_(self, *more: Assigned) -> OperationPlan:
        """The same plan with more assignments, which count over the ones before."""
        return OperationPlan((*self.assignments, *more))

    def choice(self, path: str, kind: str) -> str:
        """The arithmetic of one kind of operation in one module."""
        covering = (a for a in reversed(self.assignments) if a.covers(path, kind))
        found = next(covering, None)
        if found is None or (kind == OPTIMIZER and not found.kinds and found.into not in _WIDE):
            return OWN  # a kernel or a fault of all operations is none of the optimizer's
        return found.into

    def __str__(self) -> str:
        return "; ".join(map(str, self.assignments))


_TEXT = re.compile(r"\s*(?P<kinds>[\w, ]*?\w)(?:\s+in\s+(?P<paths>\S[^:]*?))?\s*:\s*(?P<into>\S.*)")


def _assigned(text: str) -> Assigned:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(
            f"operations={text!r}: accepted is 'KIND,KIND in MODULE,MODULE: ARITHMETIC', such as"
            " 'linear,norm in layers.1: fp32' or 'all: fp32'"
        )
    kinds, paths = (
        tuple(part.strip() for part in (match[name] or "").split(",") if part.strip())
        for name in ("kinds", "paths")
    )
    return Assigned(match["into"].strip(), () if kinds == ("all",) else kinds, paths)


def _covers(pattern: str, path: str) -> bool:
    path = path or OUTSIDE
    if pattern.startswith("="):
        return pattern[1:] == path
    # a pattern covers all that lies below, so every leading part of the path is held against it
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


@dataclass(frozen=True)
class _Planned(Swap):
    """All operations to which a plan gives one arithmetic."""

    plan: OperationPlan = OperationPlan()
    _known: dict[tuple[str, str], bool] = field(default_factory=dict, compare=False)

    def chooses(self, operation: Operation) -> bool:
        """Whether the plan puts this operation into that arithmetic."""
        # patterns are matched once a site, as every step of a training makes the same calls
        key = (operation.path, operation.kind)
        if key not in self._known:
            self._known[key] = operation.kind in _CHANGED and self.plan.choice(*key) == self.into
        return self._known[key]


def check_seen(plan: OperationPlan, seen: Iterable[tuple[str, str]], hidden: str = "") -> None:
    """Raise ValueError for an assignment that covers none of the operations that a model made, by
    path and kind; hidden: what else it may make, for the message.
    """
    known = list(seen)
    for one in plan.assignments:
        if not any(one.covers(*site) for site in known):
            paths = list(dict.fromkeys(path or OUTSIDE for path, _ in known))
            asked = one.paths[0].lstrip("=") if one.paths else ""
            hint = meant(asked, paths)
            raise ValueError(
                f"operations={str(one)!r}: the model makes no such operation{hidden}; accepted are"
                f" its modules, such as {', '.join(paths[:4])}, and kinds, such as"
                f" {', '.join(dict.fromkeys(kind for _, kind in known[:8]))}{hint}"
            )


class Heads:
    """Attention of a model by layer and head; a layer is a call, in the order of a pass.

    Args:
        plan: what runs where; "own" is the model's own.
        otherwise: what is put in the place of attention where the plan leaves a layer its own.
        own: functions of the caller's that the plan may name.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        otherwise: tuple[Swap, ...],
        own: Mapping[str, AttentionFunction] | None = None,
    ) -> None:
        self.plan, self.otherwise, self.own = plan, otherwise, own
        self.calls = AttentionCalls()

    def __call__(self, operation: Operation) -> Any:
        """Run one call of attention."""
        if operation.name != SDPA:
            raise ValueError(
                f"attention={str(self.plan)!r}: {operation.place} is not PyTorch's"
                f" {SDPA}, nor are its heads seen apart; accepted is {OWN!r} there"
            )
        named, layer = given(operation), self.calls.see(operation)
        assert layer is not None
        heads = named["query"].shape[-3]
        groups = self.plan.groups(layer, heads)
        # undivided the call stays open to what the plan of operations says of attention
        if list(groups) == [OWN]:
            swap = next((one for one in self.otherwise if one.chooses(operation)), None)
            return operation.run() if swap is None else swap.run(operation)
        parts: list[Tensor | None] = [None] * heads
        for choice, members in groups.items():
            out = _of_heads(choice, members, named, operation, self.own)
            for place, head in enumerate(members):
                parts[head] = out[..., place, :, :]
        return torch.stack([part for part in parts if part is not None], -3)

    def check(self, hidden: str = "") -> None:
        """Raise ValueError for a layer or head that no call has been of; hidden: what is not seen,
        for the message.
        """
        if not self.calls.layers:
            raise ValueError(
                f"attention={str(self.plan)!r}: no call of PyTorch's {SDPA} was seen{hidden};"
                f" accepted is {OWN!r}"
            )
        self.plan.check(len(self.calls.layers), max(self.calls.heads, default=1))

    def by_hand(self, operation: Operation) -> tuple[Written, list[int]]:
        """Of attention that is written out: how its heads lie, and which are to be in fp32.

        Raises:
            ValueError: the plan puts one into something else.
        """
        written = self.calls.by_hand[operation.path]
        groups = self.plan.groups(written.layer, written.heads)
        other = next((c for c in groups if c != OWN and canonical(c) not in _FP32[:2]), None)
        if other is not None:
            raise ValueError(
                f"attention={other!r}: attention of layer {written.layer}, {operation.path}, is"
                f" written out in products; accepted there are {OWN} and torch:fp32"
            )
        return written, [head for choice, of in groups.items() if choice != OWN for head in of]


@dataclass(frozen=True)
class _ByHand(Swap):
    """The parts of attention that a model writes out, where a plan tells its heads apart."""

    heads: Heads = None  # type: ignore[assignment]

    def chooses(self, operation: Operation) -> bool:
        """Whether some of its heads are to be in fp32."""
        layer = self.heads.calls.see(operation)  # linear layers tell how many tokens there are
        if operation.kind not in BY_HAND or layer is None:
            return False
        return bool(self.heads.by_hand(operation)[1])


def swaps_of(
    plan: AttentionPlan,
    operations: OperationPlan,
    own: Mapping[str, AttentionFunction] | None = None,
) -> tuple[tuple[Swap, ...], Heads | None]:
    """Return what `halfulp.interpose.interpose` is to swap for two plans, and the attention among
    it, if any is not the model's own.
    """
    kinds: dict[str, dict[str, None]] = {}
    for one in operations.assignments:
        if one.into != OWN and one.kinds != (OPTIMIZER,):
            called = (kind for kind in one.kinds if kind != OPTIMIZER)
            kinds.setdefault(one.into, {}).update(dict.fromkeys(called))
    planned = tuple(_Planned(into, tuple(of), plan=operations) for into, of in kinds.items())
    for swap in planned:
        if isinstance(swap.run, Kernel):
            # loaded now: a kernel that is not there is an error before the first step
            swap.run.argument = "operations"
            swap.run.load()
    if all(a.attention == OWN for a in plan.assignments):
        return planned, None
    heads = Heads(plan, planned, own)
    by_hand = _ByHand(HeadsInFp32(heads.by_hand), heads=heads)
    return (Swap(heads, kinds=("attention",)), by_hand, *planned), heads


@contextmanager
def planned(
    model: nn.Module,
    operations: str = "",
    attention: str = OWN,
    *,
    optimizer: Optimizer | None = None,
    most_score: float | None = None,
) -> Iterator[None]:
    """Inside the block a model of anybody's computes by a plan, forward and backward: what
    `halfulp train my.py:make --set operations=... --attention ...` does, in a loop of your own.

    Args:
        model: the plain module; around it may be DDP or FSDP.
        operations: such as "norm,linear in transformer.h.1: fp32; softmax: fp32".
        attention: such as "halfulp", or "own; layer 1 head 2,5: torch:fp32".
        optimizer: whose steps the plan is of too, and after whose steps scores are clipped. Wider
            copies of narrow weights live in the block alone, in no checkpoint.
        most_score: QK-clip: W_Q and W_K of a head whose largest score in a step was beyond it are
            scaled after the step (`halfulp.training.score_clip`); natural units.

    Raises:
        ValueError: a plan is not accepted, or names what the model, once it has run, has not; it
            takes an optimizer, and none is given.
    """
    texts, heads = (
        [part.strip() for part in text.split(";") if part.strip()]
        for text in (operations, attention)
    )
    plan = OperationPlan.of(*texts)
    asks = next((str(one) for one in plan.assignments if OPTIMIZER in one.kinds), None)
    if optimizer is None and (asks is not None or most_score is not None):
        said = f"most_score={most_score}" if asks is None else f"operations={asks!r}"
        raise ValueError(f"{said}: accepted with optimizer=, whose steps it is of")
    swaps, places = swaps_of(AttentionPlan.of(*heads), plan)
    made: dict[tuple[str, str], None] = {}
    clip = None if most_score is None else ScoreClip(most_score, dict(module_names(model)))

    def see(operation: Operation, found: Any) -> None:
        made.setdefault((operation.path, operation.kind))
        if clip is not None:
            clip.saw(operation, found)

    with ExitStack() as stack:
        if clip is not None and optimizer is not None:
            stack.callback(clip.attach(optimizer).remove)
        if optimizer is not None:
            steps = choices(model, optimizer, lambda path: plan.choice(path, OPTIMIZER))
            named = dict(model.named_parameters())
            arithmetic = OptimizerArithmetic(optimizer, named, steps, 0)
            arithmetic.attach()
            stack.callback(arithmetic.remove)
        seen = stack.enter_context(interpose(model, see, swaps=swaps))
        yield
    if made or seen.unseen:
        own = {} if optimizer is None else trained(model, optimizer)
        check_seen(plan, [*made, *((path, OPTIMIZER) for path in own)], seen.hidden)
        if places is not None:
            places.check(seen.hidden)


def _of_heads(
    choice: str,
    members: list[int],
    named: dict[str, Any],
    operation: Operation,
    own: Mapping[str, AttentionFunction] | None,
) -> Tensor:
    """Out `[..., h, N, D]` of some heads, in query's dtype."""
    # a mask with one head's place is shared by all of them
    mask = named["attn_mask"]
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mask[..., members, :, :]
    q, k, v = (named[name][..., members, :, :] for name in ("query", "key", "value"))
    causal, scale, dropout = named["is_causal"], named["scale"], named["dropout_p"]
    if own is None or choice not in own:
        if choice == OWN:
            stock: Tensor = operation.function(q, k, v, mask, dropout, causal, scale=scale)
            return stock
        if canonical(choice) in _FP32:
            # autocast would cast the wide operands back again
            wide = None if mask is None or mask.dtype == torch.bool else mask.float()
            with torch.autocast(q.device.type, enabled=False):
                out: Tensor = operation.function(
                    *(x.float() for x in (q, k, v)),
                    mask if wide is None else wide,
                    dropout,
                    causal,
                    scale=scale,
                )
            return out.to(q.dtype)
        if (recipe := recipe_in(choice)) is not None:
            return emulate(
                q, k, v, mask, dropout_p=dropout, is_causal=causal, scale=scale, recipe=recipe
            )
        if choice == "halfulp":
            return attention(q, k, v, mask, dropout, causal, scale)
    if mask is not None or dropout:
        raise ValueError(
            f"attention={choice!r}: {operation.place} has a mask or dropout; accepted there are"
            f" {OWN}, torch:fp32, halfulp and recipes"
        )
    return attention_function(choice, own)(
        q, k, v, is_causal=causal, scale=q.shape[-1] ** -0.5 if scale is None else scale
    )
