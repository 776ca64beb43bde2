"""Where rounding may come from in a user's model: every kind of operation in every module, every
head of its attention, and the optimizer's step; and what puts all but some of them into fp32.

What a model computes is found by running one batch of it with `halfulp.interpose` looking on. An
operation that fp32 could not change (its operands and results are fp32 or more, outside of
autocast) is no suspect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from halfulp.interpose import ITSELF, KINDS, Operation, interpose, leaves, module_names
from halfulp.isolate.substitutions import Cells, Place
from halfulp.training.attention_by_hand import BY_HAND, AttentionCalls
from halfulp.training.config import RunConfig
from halfulp.training.determinism import own_generators, seed_generators
from halfulp.training.operations import OUTSIDE, OWN, Assigned, OperationPlan
from halfulp.training.optimizer_arithmetic import OPTIMIZER, trained
from halfulp.training.score_clip import MOST, ScoreClip
from halfulp.training.session import AUTOCAST
from halfulp.training.workload import build_workload

Site: TypeAlias = tuple[str, str]
"""Path of a module and a kind of operation in it."""
FP32 = "fp32"
OPTIMIZER_STEP = "the optimizer's step on narrow weights"
_BY_MODULE = {"linear": "linear", "conv1d": "linear", "norm": "norm", "embed": "embedding"}
_ASIDE = ("cast", "elementwise", "reduction", "selection", "custom", "layout")


@dataclass(frozen=True)
class Layout:
    """What a model computes."""

    sites: tuple[Site, ...]  # suspects, in the order of their first call
    attention: tuple[tuple[str, int], ...]  # path and query heads of every call, in that order
    classes: Mapping[str, str]  # of modules, by path
    unseen: Mapping[str, str]  # modules whose operations cannot be seen: why
    by_hand: frozenset[str] = frozenset()  # modules that write their attention out in products
    unclipped: str = ""  # why QK-clip cannot be; empty where it can

    @property
    def paths(self) -> tuple[str, ...]:
        """Modules with a suspect, in the order of their first call."""
        return tuple(dict.fromkeys(path for path, _ in self.sites))

    def layers_of(self, sites: Iterable[Site]) -> list[int]:
        """The layers of attention that some sites are all of; none where one is another's."""
        chosen = list(sites)
        parts = {
            (path, kind)
            for path, _ in self.attention
            for kind in (BY_HAND if path in self.by_hand else ("attention",))
        }
        if not set(chosen) <= parts:
            return []
        paths = {path for path, _ in chosen}
        return [i for i, (path, _) in enumerate(self.attention) if path in paths]

    def cells(self, config: RunConfig) -> dict[Place, str]:
        """The attention of every head, as the plan of a run has it."""
        return {
            (i, j): config.attention.choice(i, j)
            for i, (_, heads) in enumerate(self.attention)
            for j in range(heads)
        }

    @property
    def steps(self) -> tuple[Site, ...]:
        """Of the suspects those that are the optimizer's."""
        return tuple(site for site in self.sites if site[1] == OPTIMIZER)

    def named(self, sites: Iterable[Site]) -> str:
        """Sites in words: "linear in layers.1.mlp.up (QuantLinear)"."""
        by_path: dict[str, list[str]] = {}
        given = list(sites)
        whole = self.steps and set(self.steps) <= set(given)
        for path, kind in given:
            if not (whole and kind == OPTIMIZER):
                by_path.setdefault(path, []).append(kind)
        found = [self._one(path, kinds) for path, kinds in by_path.items()]
        return "; ".join([OPTIMIZER_STEP, *found] if whole else found)

    def _one(self, path: str, kinds: list[str]) -> str:
        name = self.classes.get(path, "")
        # what a module writes out by hand is part of what it is there for
        whole = next((kind for part, kind in _BY_MODULE.items() if part in name.lower()), "")
        shown = list(dict.fromkeys(whole if whole and kind in _ASIDE else kind for kind in kinds))
        return f"{' and '.join(shown)} in {path or OUTSIDE}" + (f" ({name})" if name else "")


def layout_of(config: RunConfig) -> Layout:
    """Return what one batch of a user's model computes; imports and runs its code."""
    device = torch.device(config.device)
    sites: dict[Site, None] = {}
    calls = AttentionCalls()
    with own_generators(device):
        workload = build_workload(config)
        seed_generators(device, config.seed, 1, 0)
        batch = workload.batch(np.arange(config.batch), 1)
        dtype = AUTOCAST.get(config.autocast)
        cast = nullcontext() if dtype is None else torch.autocast(device.type, dtype)
        clip = ScoreClip(MOST, dict(module_names(workload.model)))

        def see(operation: Operation, found: Any) -> None:
            path, kind = operation.path, operation.kind
            calls.see(operation)
            clip.saw(operation, found)
            if kind in KINDS and kind != "other" and _matters(operation, found, config):
                sites.setdefault((path, kind))

        with interpose(workload.model, see) as seen, cast:
            workload.loss(workload.model, batch)
    assert workload.parts is not None
    for path, held in trained(workload.model, workload.parts.optimizer).items():
        own = config.operations.choice(path, OPTIMIZER) == OWN
        if not own or any(p.dtype.itemsize < torch.float32.itemsize for p in held):
            sites.setdefault((path, OPTIMIZER))
    unseen = {path: why for path, why in seen.unseen.items() if path != ITSELF or why}
    layers = tuple(zip((path for path, _ in calls.layers), calls.heads, strict=True))
    by_hand, why = frozenset(calls.by_hand), clip.unfit()
    return Layout(tuple(sites), layers, dict(seen.classes), unseen, by_hand, why)


def _matters(operation: Operation, found: Any, config: RunConfig) -> bool:
    """Whether the operation in fp32 could be another than it is."""
    if operation.kind in ("attention", "custom"):
        return True
    if config.operations.choice(operation.path, operation.kind) != OWN:
        return True
    floats = [x for x in (*operation.tensors(), *leaves(found)) if x.is_floating_point()]
    narrow = any(x.dtype.itemsize < torch.float32.itemsize for x in floats)
    device = floats[0].device.type if floats else "cpu"
    return narrow or (bool(floats) and torch.is_autocast_enabled(device))


def only_sites(config: RunConfig, kept: Iterable[Site]) -> OperationPlan:
    """Return a plan with fp32 everywhere but in some sites, which stay as the run has them."""
    by_choice: dict[tuple[str, str], list[str]] = {}
    for path, kind in kept:
        choice = config.operations.choice(path, kind)
        by_choice.setdefault((choice, kind), []).append(f"={path or OUTSIDE}")
    by_paths: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (choice, kind), paths in by_choice.items():
        by_paths.setdefault((choice, tuple(paths)), []).append(kind)
    left = (Assigned(into, tuple(kinds), paths) for (into, paths), kinds in by_paths.items())
    return OperationPlan((Assigned(FP32), *left))


def without_sites(config: RunConfig, chosen: Iterable[Site]) -> OperationPlan:
    """Return the run's plan with fp32 in some sites."""
    by_kind: dict[str, list[str]] = {}
    for path, kind in chosen:
        by_kind.setdefault(kind, []).append(f"={path or OUTSIDE}")
    return config.operations.with_(
        *(Assigned(FP32, (kind,), tuple(paths)) for kind, paths in by_kind.items())
    )


def attention_of(cells: Cells, layout: Layout, kept: Iterable[str]) -> dict[Place, str]:
    """Return the attention of every head, the model's own (which a plan of operations then puts
    into fp32) but in the layers of some paths.
    """
    left = {i for i, (path, _) in enumerate(layout.attention) if path in set(kept)}
    return {place: choice if place[0] in left else OWN for place, choice in cells.items()}
