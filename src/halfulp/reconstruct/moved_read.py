"""Numbers of a result that are right and stand in another place: found by the runs of features that
they are, wherever in memory these should be.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfulp.reconstruct.evidence import Observed

RUN = 16  # numbers in a row, by which they are known
SAMPLE = 192  # runs that are looked for
SAME = 0.995  # the cosine of a run with the one that it is; of random ones none comes near
OWN = 0.9  # with its own, from where on it is in its place
MOST = 0.8  # of the runs that are wrong, and not 0
LEAST = 12  # runs
WIDTHS = (16, 32, 64, 128, 256)


def misplaced(observed: Observed, others: Mapping[str, Tensor] | None = None) -> tuple[str, str]:
    """Whether what is wrong is right elsewhere, in words with an example, and the cause: in the
    result itself, or in `others`, exact ones by name. What is 0 says nothing.
    """
    got = observed.value.flatten()
    if observed.exact.ndim != 4 or observed.exact.shape[-1] < RUN or len(got) < 4 * RUN:
        return "", ""
    mine, own = (x.flatten().unfold(0, RUN, RUN // 2) for x in (observed.value, observed.exact))
    size, right = mine.norm(dim=-1), own.norm(dim=-1)
    typical = float(right.median())
    # what is moved is moved in whole rows
    width = observed.exact.shape[-1]
    known = (size > 0) & (torch.arange(len(mine)) * (RUN // 2) % width <= width - RUN)
    error = (mine - own).square().sum(-1)
    some = known & (error.sqrt() > 0.5 * right)
    off = float(error[some].sum())
    # runs of numbers that are all but 0 are like any other
    some &= (size > 0.1 * typical) & (right > 0.1 * typical)
    if typical == 0 or off < MOST * float(error[known].sum()):
        return "", ""
    asked = some.nonzero().flatten()
    asked = asked[:: max(1, len(asked) // SAMPLE)]
    if len(asked) < LEAST:
        return "", ""
    place = asked * (RUN // 2)
    at_home = (_unit(mine[asked]) * _unit(own[asked])).sum(-1) >= OWN
    for name, exact in {"": observed.exact, **(others or {})}.items():
        best, at = (_unit(mine[asked]) @ _unit(exact.flatten().unfold(0, RUN, 1)).T).max(-1)
        found = (best > SAME) & ~at_home
        if int(found.sum()) < max(LEAST, MOST * len(asked)):
            continue
        first = int(found.nonzero()[0])
        here, there = (_where(int(x[first]), like) for x, like in (
            (place, observed.exact), (at, exact)))  # fmt: skip
        if name:
            return f"numbers of {name} stand there: at {here} those of {there}", "other-data"
        apart = torch.unique((at - place)[found])
        told = f", {int(apart)} numbers on" if len(apart) == 1 else ""
        return f"numbers stand in another's place{told}: at {here} those of {there}", "layout"
    return "", ""


def over_the_end(zero: Mapping[tuple[str, str], Tensor]) -> int:
    """The width of blocks whose last one of a head reaches as many rows beyond its end as are 0
    `[B, H, N, D]` at the start of others, in every call and in two of other lengths; else 0.
    """
    every = [gone.all(-1).flatten(0, 1).any(0) for gone in zero.values()]
    rows = [x for x in every if not bool(x.all())]  # whole heads are beyond any block
    for width in WIDTHS:
        beyond = [-len(x) % width for x in rows]
        if len({len(x) for x in rows}) > 1 and all(
            int(x.sum()) == int(x[:most].sum()) > OWN * most
            for x, most in zip(rows, beyond, strict=True)
        ):
            return width
    return 0


def _unit(x: Tensor) -> Tensor:
    made: Tensor = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return made


def _where(position: int, like: Tensor) -> tuple[int, ...]:
    """The sequence, head, row and feature."""
    found = []
    for size in reversed(like.shape):
        position, rest = divmod(position, size)
        found.append(rest)
    return tuple(reversed(found))
