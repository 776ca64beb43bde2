"""The commands that say where two computations part: `halfulp diff` and `halfulp record`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfulp.cli.shell import check_files, progress_bar, say, tell, typed_command

RUN, RECORDING, SETTING = "a run folder", "a recording", "a setting"
MIXED = (
    "accepted are two recordings (record the other one too: `halfulp record`), two run folders, or"
    " none of them"
)


@dataclass(frozen=True)
class RunOptions:
    """Of two run folders.

    Args:
        at: Of two run folders: step of the checkpoints whose models are run; by default the last
            that both have.
        beside: Run folder that differs from a in its seed, for scale; may be given again.
        workload: The file.py:function that makes the model of both run folders, named by you.
        trust: Run the code that the run folders name as their model or attention.
    """

    at: int | None = None
    beside: tuple[Path, ...] = ()
    workload: str | None = None
    trust: bool = False

    def check(self, kinds: list[str]) -> None:
        """Raise ValueError for what is given without run folders."""
        for name, value in vars(self).items():
            if value and RUN not in kinds:
                raise ValueError(f"{name}={value!r}: accepted with two run folders")


_NO_RUNS = RunOptions()


def diff(
    a: str,
    b: str,
    /,
    *,
    batches: int = 2,
    gradients: bool = False,
    no_swaps: bool = False,
    most: int = 12,
    repetitions: int = 2,
    steps: int = 0,
    seed: int = 0,
    device: str = "cpu",
    runs: RunOptions = _NO_RUNS,
    html: Path | None = None,
    json: Path | None = None,
) -> int:
    """Say where two computations part, and whether it is more than rounding: halfulp diff
    my.py:make attention=sdpa:math

    Exit code 0: they are identical or differ within rounding. 1: by more, as a whole or in one
    operation. 2: unknown.

    Args:
        a: The side that counts as right: path/file.py:function or package.module:function, whose
            make(seed, device) returns (model, optimizer, batch) as of `halfulp train`, or make() a
            model or halfulp.Setting with a list of batches; or a folder that `halfulp record` or
            `halfulp train` wrote.
        b: The other side: the same, whose batches are not used; or what is different from a, of
            dtype=bf16, autocast=bf16, attention=NAME (`halfulp ls targets`), pieces=N (the batch in
            pieces), decode=N (N tokens at once, then one by one with a cache), compiled, with
            commas between.
        batches: How many, where a function of the step makes them; with steps as many as they take.
        gradients: Compare gradients of the loss too.
        no_swaps: Do not swap groups of operations to see which carries the gap.
        most: Groups of operations to swap.
        repetitions: Passes with random roundings, for the chance.
        steps: Train both sides so many steps as well, with the optimizers that the functions make
            (two run folders: from a's checkpoint, each as its run was trained), and compare loss,
            outputs, gradients and weights after each; without dropout.
        seed: Given to the functions; both sides have the same.
        device: Given to the functions.
        runs: What two run folders are compared with.
        html: File to write a page to.
        json: File to write every operation's figures to; - prints them instead of the tables.
    """
    from halfulp.diff.recording import compare_recordings
    from halfulp.diff.two_runs import diff_runs

    check_files(json, html=html)
    kinds = [_kind(side) for side in (a, b)]
    options: dict[str, Any] = {"gradients": gradients, "attribute": not no_swaps}
    options |= {"most": most, "repetitions": repetitions}
    runs.check(kinds)
    _check_kinds(a, b, kinds, steps)
    if kinds[0] == RUN and Path(a).resolve() == Path(b).resolve():
        raise ValueError(f"b={b!r} is the same folder as a; accepted is another")
    with progress_bar("diff") as progress:
        found: Any
        if kinds[0] == RUN:
            options |= vars(runs) | {"batches": batches, "steps": steps, "progress": progress}
            found = diff_runs(Path(a), Path(b), **options)
        elif kinds[0] == RECORDING:
            found = compare_recordings(a, b)
        else:
            found = _made(a, b, batches, steps, seed, device, {**options, "progress": progress})
    tell(found.as_dict(), json, lambda: say(found), html, lambda: _page(found))
    return int(found.exit_code)


def _page(found: Any) -> str:
    from halfulp.report.diff_page import diff_page

    tables = {name: [x.as_dict() for x in part] for name, part in found.sections().items()}
    return diff_page(found.names, str(found), tables, typed_command())


def _kind(side: str) -> str:
    if (Path(side) / "run.json").is_file():
        return RUN
    return RECORDING if Path(side).is_dir() else SETTING


def _check_kinds(a: str, b: str, kinds: list[str], steps: int) -> None:
    if kinds[0] == SETTING and ":" not in a:
        raise ValueError(
            f"a={a!r}: there is no such folder; accepted are 'file.py:function', 'module:function',"
            " and a folder that `halfulp record` or `halfulp train` wrote"
        )
    if kinds[0] != kinds[1]:
        raise ValueError(f"a={a!r} is {kinds[0]} and b={b!r} {kinds[1]}: {MIXED}")
    if steps and RECORDING in kinds:
        raise ValueError(f"steps={steps}: accepted with two settings or two run folders")


def _made(
    a: str, b: str, batches: int, steps: int, seed: int, device: str, options: dict[str, Any]
) -> Any:
    """Compare two settings that functions make."""
    from halfulp.diff import diff as compare
    from halfulp.diff.after_steps import STRETCHES
    from halfulp.diff.sides_by_name import changed, made, optimizer_of

    needed = STRETCHES * (steps + 1) if steps else 0
    first, given = made(a, "a", max(batches, needed), seed, device)
    if not given:
        raise ValueError(f"a={a!r} makes no batches; accepted is (model, batches)")
    named = ":" in b and "=" not in b.partition(":")[0]
    second = made(b, "b", 0, seed, device)[0] if named else changed(first, b, "b")
    if steps:
        sides = (a, "a"), ((b, "b") if named else (a, "a"))
        options["optimizer"] = tuple(optimizer_of(*side, seed, device) for side in sides)
    return compare(first.named(a), second.named(b), given, steps=steps, **options)


def record(
    make: str,
    /,
    *,
    out: Path,
    setting: str = "",
    batches: int = 2,
    gradients: bool = False,
    repetitions: int = 2,
    seed: int = 0,
    device: str = "cpu",
    json: Path | None = None,
) -> int:
    """Write down one side of a comparison, for `halfulp diff A.rec B.rec` anywhere: halfulp record
    my.py:make --out A.rec

    Args:
        make: path/file.py:function or package.module:function, as of `halfulp diff`.
        out: New folder; whole or not there.
        setting: What is different from what the function makes, such as attention=sdpa:math.
        batches: How many, where a function of the step makes them.
        gradients: Record the gradients of the loss by parameter too.
        repetitions: Passes with random roundings, for the chance.
        seed: Given to the function; both sides need the same.
        device: Given to the function.
        json: File to write what was recorded to; - prints it as JSON instead of text.
    """
    from halfulp.diff.recording import record as write_down
    from halfulp.diff.sides_by_name import changed, made
    from halfulp.runs.folder import check_folder

    check_files(json)
    check_folder("out", out)
    chosen, given = made(make, "make", batches, seed, device)
    if setting:
        chosen = changed(chosen, setting, "setting")
    if not given:
        raise ValueError(f"make={make!r} makes no batches; accepted is (model, batches)")
    about = {"command": typed_command()}
    write_down(
        chosen.named(make), given, out, gradients=gradients, repetitions=repetitions, about=about
    )
    size = sum(file.stat().st_size for file in out.iterdir())
    name = chosen.named(make).name
    plain = {"name": name, "batches": len(given), "folder": str(out), "bytes": size}
    said = f"{len(given)} batches of {name} lie in {out}, {size / 1e6:.1f} MB"
    tell(plain, json, lambda: say(said))
    return 0
