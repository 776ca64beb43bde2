"""Which operation of one pass answers to which of another: by module path and order, and by shape
where names differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import torch

from halfulp.diff.tape import Entry
from halfulp.interpose.standing import ITSELF

Token = tuple[str, tuple[int, ...]]
# kinds that stand for each other where modules are cut otherwise
_SORTS = dict.fromkeys(("linear", "matmul"), "product")
_SORTS |= dict.fromkeys(("elementwise", "reduction", "cast", "selection"), "by hand")


@dataclass
class Aligned:
    """Pairs of operations by place, and what has none."""

    pairs: dict[str, str] = field(default_factory=dict)  # B's place: A's
    only_a: list[Entry] = field(default_factory=list)
    only_b: list[Entry] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)  # B's path: A's, matched by shape
    paths_b: frozenset[str] = frozenset()  # of the modules in which B does something

    def instead(self, entry: Entry) -> torch.dtype:
        """The coarsest format of what A alone does in the place of an operation that B alone has;
        float32 at least.

        That is what A alone gives in its module, or as the same operation of that size elsewhere.
        Where neither is, modules were cut otherwise (experts one by one or fused, on tokens in
        another order): operations of its sort in the nearest module around it, there or in modules
        of it that B has not.
        """
        path = self.renamed.get(entry.path, entry.path)
        alike = entry.name, entry.shape
        found = [x for x in self.only_a if x.path == path or (x.name, x.shape) == alike]
        sort = _SORTS.get(entry.kind, entry.kind)
        others = [x for x in self.only_a if _SORTS.get(x.kind, x.kind) == sort]
        for around in () if found else _around(path):
            found = [x for x in others if x.path == around or self._moved(x.path, around)]
            if found:
                break
        dtypes = torch.float32, *(x.dtype for x in found)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def _moved(self, path: str, around: str) -> bool:
        inside = around == ITSELF or path.startswith(f"{around}.")
        return inside and path not in self.paths_b


def align(a: Sequence[Entry], b: Sequence[Entry], shapes: bool = True) -> Aligned:
    """Align two passes.

    Args:
        a, b: the operations of one pass or piece, in order.
        shapes: whether results that answer to each other have one shape (not between a whole
            batch and pieces of it).
    """
    mine, theirs = _by_path(a), _by_path(b)
    found = Aligned(paths_b=frozenset(theirs))
    common = [path for path in theirs if path in mine]
    found.renamed = _renamed(
        {path: mine[path] for path in mine if path not in theirs},
        {path: theirs[path] for path in theirs if path not in mine},
        shapes,
    )
    matched = {path: path for path in common} | found.renamed
    for path, answer in matched.items():
        _align_calls(mine[answer], theirs[path], shapes, found)
    found.only_b += [x for path in theirs if path not in matched for x in theirs[path]]
    answered = set(matched.values())
    found.only_a += [x for path in mine if path not in answered for x in mine[path]]
    found.only_a.sort(key=lambda entry: entry.number)
    found.only_b.sort(key=lambda entry: entry.number)
    return found


def _around(path: str) -> Iterator[str]:
    """A module and those that it lies in, the model at last."""
    while path and path != ITSELF:
        yield path
        path = path.rpartition(".")[0]
    yield ITSELF


def _by_path(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.path, []).append(entry)
    return found


def _token(entry: Entry, shapes: bool) -> Token:
    return entry.name, entry.shape if shapes else ()


def _align_calls(a: list[Entry], b: list[Entry], shapes: bool, found: Aligned) -> None:
    left, right = ([_token(x, shapes) for x in side] for side in (a, b))
    if left == right:
        found.pairs |= {y.place: x.place for x, y in zip(a, b, strict=True)}
        return
    # autojunk would leave out what is frequent, which in a model of many layers is most
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    for what, i, i_end, j, j_end in matcher.get_opcodes():
        if what == "equal" or (what == "replace" and _like(left[i:i_end], right[j:j_end])):
            pairs = zip(a[i:i_end], b[j:j_end], strict=True)
            found.pairs |= {y.place: x.place for x, y in pairs}
        else:
            found.only_a += a[i:i_end]
            found.only_b += b[j:j_end]


def _like(a: Sequence[Token], b: Sequence[Token]) -> bool:
    """Whether other functions stand in the same order with the same shapes."""
    return len(a) == len(b) and all(x[1] == y[1] for x, y in zip(a, b, strict=True))


def _renamed(
    a: Mapping[str, list[Entry]], b: Mapping[str, list[Entry]], shapes: bool
) -> dict[str, str]:
    """Modules of other names that make the same operations, in their order."""
    names_a, names_b = list(a), list(b)
    left = [tuple(_token(x, shapes) for x in a[path]) for path in names_a]
    right = [tuple(_token(x, shapes) for x in b[path]) for path in names_b]
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    return {
        names_b[block.b + k]: names_a[block.a + k]
        for block in matcher.get_matching_blocks()
        for k in range(block.size)
    }
