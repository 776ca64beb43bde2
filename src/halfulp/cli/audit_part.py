"""Less than a whole audit: which probes, how long, or only the list of what would run; and how
targets are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfulp.cli.shell import tell, typed_command

if TYPE_CHECKING:
    from halfulp.targets import CallLimits


@dataclass(frozen=True)
class AuditPart:
    """How much of the plan runs.

    Args:
        only: Name of a probe to run instead of all (`halfulp ls probes`), sizes or relations, and
            again for another.
        seconds: After how many no further case is begun, the most telling first; what is left out
            is said.
        list: Say what would run, and run nothing.
    """

    only: tuple[str, ...] = ()
    seconds: float | None = None
    list: bool = False

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `halfulp.audit`."""
        return {"only": tuple(dict.fromkeys(self.only)), "seconds": self.seconds}


@dataclass(frozen=True)
class AuditCalls:
    """How targets are called.

    Args:
        form: How functions take their tensors, in a line such as 'qkv[B,N,3,H,D]' or 'q[T,H,D],
            k[T,H,D], v[T,H,D], cu_seqlens' (docs/forms.md); without it what their parameters are
            called, and their first result, say it.
        in_process: Call the targets in this process. Otherwise each runs in one of its own, where
            an exit, a crash, a hang or endless memory ends nothing else.
        jobs: Processes that the calls of one target and their measuring are shared over, each on
            one thread; reconstruction and shrinking stay in one, targets follow one another. Of use
            with --full and for slow kernels: each process takes seconds to start.
        call_seconds: After how long a call is given up.
        call_gigabytes: Of memory that a target's process may take on, on a CPU under Linux.
    """

    form: str | None = None
    in_process: bool = False
    jobs: int = 1
    call_seconds: float = 120.0
    call_gigabytes: float = 8.0

    def limits(self) -> CallLimits | None:
        """What one call may take; None in this process."""
        from halfulp.targets import CallLimits

        return (
            None
            if self.in_process
            else CallLimits(self.call_seconds, self.call_gigabytes, copied=True)
        )


def list_plan(targets: Sequence[str], options: Mapping[str, Any], json: Path | None) -> int:
    """Print every case that an audit of the first target would run; loads nobody's code."""
    from halfulp.audit.choosing import budget, chosen
    from halfulp.audit.planning import plan, plan_of
    from halfulp.operations import ATTENTION
    from halfulp.report.terminal import console, print_table
    from halfulp.runs.results import Cell, Table

    given = (options["depth"], options["dtype"], options["seed"])
    asked = (options["shapes"], options["captured"])
    op = options["op"]
    whole = plan(*given, *asked) if op == ATTENTION else plan_of(op, *given, *asked)
    todo = chosen(whole, budget(options["only"], options["seconds"]))
    rows: list[tuple[Cell, ...]] = [
        (case.probe, str(case.shape), case.seed, _exposes(case)) for case in todo.all_cases
    ]
    rows += [("relations", str(case.shape), case.seed, "two calls") for case in todo.relations]
    columns = ("probe", "size", "seed", "exposes")
    title = f"{len(rows)} cases of {', '.join(targets) or 'any target'}"
    table = Table(title, columns, tuple(rows), "", typed_command())
    plain = [dict(zip(columns, row, strict=True)) for row in rows]
    tell(plain, json, lambda: print_table(table.as_dict(), console()))
    return 0


def _exposes(case: Any) -> str:
    probe = case.known_probe
    return "real activations" if probe is None else str(probe.exposes)
