"""What a comparison found, as data and as text."""

from __future__ import annotations

import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from halfulp.diff.alignment import Aligned
from halfulp.diff.local_gap import LocalGap
from halfulp.diff.noise import LEVEL, Chance, speaks_for_rounding
from halfulp.diff.shares import Carried, Stand
from halfulp.diff.tape import asked_otherwise, dtype_name
from halfulp.runs.folder import json_text, write_json
from halfulp.runs.results import Table, plain_data

if TYPE_CHECKING:
    from halfulp.diff.after_steps import AfterSteps


@dataclass
class Compared:
    """Two sides after all batches, wherever they were run."""

    names: tuple[str, str]
    gaps: Mapping[str, LocalGap]  # by B's place
    aligned: Aligned
    stands: Sequence[Stand]
    parameters: Mapping[str, tuple[float, float, float]]  # Σ gap², Σ A², Σ gap · A of gradients
    unseen: Mapping[str, str]
    of_tokens: bool
    weights_differ: bool = False

    @property
    def identical(self) -> bool:
        """Whether not a bit differs in what both sides give."""
        outputs = all(torch.equal(*x.outputs) and x.losses[0] == x.losses[1] for x in self.stands)
        return outputs and not any(gap for gap, _, _ in self.parameters.values())


@dataclass(frozen=True)
class OperationGap:
    """One operation, over all batches; sizes are relative to A's result (rms)."""

    place: str
    answer: str | None  # A's place; None: A has no such operation
    kind: str
    number: int  # in the order of B's pass
    same: bool  # both sides make one and the same operation
    gap: float
    own: float  # B's result against A's operation on B's operands
    exact: bool  # or, in a part of the batch, against the operation in fp64
    inherited: float
    floor: float  # what rounding operands and result once on each side makes
    over_floor: float | None
    beyond: bool
    formats: str  # the coarsest of each side, where they differ; of the result of B's alone
    asks: str  # what is asked for differently
    lean: float
    lean_t: float | None
    gradient: float | None


@dataclass(frozen=True)
class GroupShare:
    """How much of the gap a group of operations carries; 1 is all of it."""

    name: str
    kinds: tuple[str, ...]
    operations: int
    share: float | None  # of the outputs, both ways averaged
    into: Mapping[str, tuple[float, float | None]]  # B's operations in A: of what, share, ± error
    out: Mapping[str, tuple[float, float | None]]  # A's operations in B
    why: str  # what is different in the first of them
    layer: bool  # one layer of the first group
    failed: str


class Report(ABC):
    """What a comparison found, as data; print it, or `to_json`."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def to_json(self, file: str | Path | None = None) -> str:
        """The report as JSON text, written to a file too."""
        if file is not None:
            write_json(Path(file), self.as_dict())
        return json_text(self.as_dict())

    @abstractmethod
    def text(self, width: int) -> str:
        """The report in lines of at most so many letters."""

    def __str__(self) -> str:
        return self.text(min(shutil.get_terminal_size((100, 24)).columns, 120))

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Difference(Report):
    """The report of `halfulp.diff`: print it, or `to_json`.

    `verdict` is "identical", "within rounding", "beyond rounding" or "unknown" (too few sequences
    for a chance). `p` is the chance of a gap as large as this from rounding in A's formats;
    `p_formats` the same in the coarser formats of both sides, where they differ.
    """

    names: tuple[str, str]
    verdict: Literal["identical", "within rounding", "beyond rounding", "unknown"]
    p: float | None
    p_formats: float | None
    ratio: float | None
    what: str
    batches: int
    sequences: int
    gap: float
    lean: float
    lean_p: float | None
    losses: tuple[tuple[float | None, float | None], ...]
    first: OperationGap | None
    operations: tuple[OperationGap, ...]
    groups: tuple[GroupShare, ...]
    gradients: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    unpaired: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)
    left_out: int = 0
    weights_differ: bool = False
    after: AfterSteps | None = None

    @property
    def exit_code(self) -> int:
        """0: identical or within rounding; 1: beyond it, as a whole, in one operation or after
        steps; 2: not known.
        """
        late = self.after is not None and self.after.p is not None and self.after.p < LEVEL
        alone = self.first is not None and self.first.beyond and self.verdict != "identical"
        if late or alone:
            return 1
        return {"beyond rounding": 1, "unknown": 2}.get(self.verdict, 0)

    @property
    def culprit(self) -> str | None:
        """The group that carries most of the gap."""
        whole = [x for x in self.groups if not x.layer and x.share is not None]
        return whole[0].name if whole else None

    def text(self, width: int) -> str:
        """The verdict, sizes, groups and operations."""
        from halfulp.diff.wording import text

        return text(self, width)

    def sections(self) -> dict[str, list[Table]]:
        """Groups, operations and steps, whole."""
        from halfulp.diff.wording import sections

        return sections(self)


def summed_up(
    compared: Compared, chances: Mapping[str, Chance], carried: Sequence[Carried], left_out: int
) -> Difference:
    """The report of a comparison that is done."""
    same = compared.identical
    mine, coarser = chances.get("A"), chances.get("both")
    gaps = torch.cat([(x.outputs[1] - x.outputs[0]).flatten() for x in compared.stands])
    parting = [gap for gap in compared.gaps.values() if gap.parts]
    first = min(parting, key=lambda gap: gap.entry.number, default=None)
    aligned = compared.aligned
    return Difference(
        names=compared.names,
        verdict=_verdict(same, mine),
        p=1.0 if same else plain_data(mine.p if mine else math.nan),
        p_formats=plain_data(coarser.p) if coarser else None,
        ratio=plain_data(mine.ratio) if mine else None,
        what="log-probabilities" if compared.of_tokens else "outputs",
        batches=len(compared.stands),
        sequences=sum(len(x.outputs[0]) for x in compared.stands),
        gap=float(gaps.square().mean().sqrt()),
        lean=float(gaps.mean()),
        lean_p=plain_data(mine.lean_p) if mine else None,
        losses=tuple(x.losses for x in compared.stands),
        first=None if first is None else _row(first),
        operations=tuple(map(_row, compared.gaps.values())),
        groups=shares_of(carried),
        gradients={
            name: (math.sqrt(gap / size) if size else 0.0, along / size if size else 0.0)
            for name, (gap, size, along) in compared.parameters.items()
        },
        unpaired={
            "A": tuple(x.place for x in aligned.only_a),
            "B": tuple(x.place for x in aligned.only_b),
        },
        renamed=dict(aligned.renamed),
        unseen=dict(compared.unseen),
        left_out=left_out,
        weights_differ=compared.weights_differ,
    )


def _is_layer(one: Carried, carried: Sequence[Carried]) -> bool:
    """Whether a group is a layer of the first one."""
    return one is not carried[0] and set(map(id, one.group.members)) <= set(
        map(id, carried[0].group.members)
    )


def _verdict(
    same: bool, chance: Chance | None
) -> Literal["identical", "within rounding", "beyond rounding", "unknown"]:
    if same:
        return "identical"
    if chance is None or (math.isnan(chance.p) and not math.isinf(chance.ratio)):
        return "unknown"
    return "within rounding" if speaks_for_rounding(chance) else "beyond rounding"


def _row(gap: LocalGap) -> OperationGap:
    entry, answer = gap.entry, gap.answer
    formats, asks = dtype_name(entry.dtype) if answer is None else "", ""
    if answer is not None:
        if answer.coarsest != entry.coarsest:
            formats = f"{dtype_name(entry.coarsest)} for {dtype_name(answer.coarsest)}"
        asks = "; ".join(asked_otherwise(entry, answer))
    lean, t = gap.leaning
    gradient = math.sqrt(gap.gradient / gap.gradient_size) if gap.gradient_size else None
    return OperationGap(
        entry.place, None if answer is None else answer.place, entry.kind, entry.number, gap.same,
        gap.relative_gap, gap.relative_own, gap.exact, gap.relative_inherited,
        gap.relative_floor, plain_data(gap.over_floor), gap.beyond, formats, asks, lean,
        plain_data(t), gradient,
    )  # fmt: skip


def shares_of(carried: Sequence[Carried]) -> tuple[GroupShare, ...]:
    """What swapping groups, and layers of the first one after them, did, as data."""
    return tuple(_group_share(x, _is_layer(x, carried)) for x in carried)


def _group_share(carried: Carried, layer: bool) -> GroupShare:
    def shares(found: Sequence[Any]) -> dict[str, tuple[float, float | None]]:
        return {x.of: (x.share, plain_data(x.error)) for x in found if math.isfinite(x.share)}

    group = carried.group
    first = _row(max(group.members, key=lambda gap: (gap.parts, gap.relative_own)))
    return GroupShare(
        group.name, tuple(group.kinds), len(group.members), plain_data(carried.share()),
        shares(carried.into), shares(carried.out), reason(first), layer, carried.failed,
    )  # fmt: skip


def reason(row: OperationGap) -> str:
    """What is different in an operation, in a few words."""
    if row.answer is None:
        return f"only B has {row.place}, which gives {row.formats}"
    said = [x for x in (row.formats, row.asks) if x]
    if not said and row.over_floor is not None:
        said = [f"{row.over_floor:.2g} × its floor"]
    return f"{row.place}: {'; '.join(said)}" if said else row.place
