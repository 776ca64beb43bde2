"""The commands that say where two computations part: `halfulp diff` and `halfulp record`."""

from __future__ import annotations

from pathlib import Path

from halfulp.cli.shell import (
    check_json,
    progress_bar,
    say,
    tell,
    typed_command,
    write_each,
)

MIXED = "accepted are two recordings, or none: record the other one too (`halfulp record`)"


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
    seed: int = 0,
    device: str = "cpu",
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
            model or halfulp.Setting with a list of batches; or a folder that `halfulp record`
            wrote.
        b: The other side: the same, whose batches are not used; or what is different from a, of
            dtype=bf16, autocast=bf16, attention=NAME (`halfulp ls targets`), pieces=N (the batch in
            pieces), decode=N (N tokens at once, then one by one with a cache), compiled, with
            commas between.
        batches: How many, where a function of the step makes them.
        gradients: Compare gradients of the loss too.
        no_swaps: Do not swap groups of operations to see which carries the gap.
        most: Groups of operations to swap.
        repetitions: Passes with random roundings, for the chance.
        seed: Given to the functions; both sides have the same.
        device: Given to the functions.
        html: File to write a page to.
        json: File to write every operation's figures to; - prints them instead of the tables.
    """
    from halfulp.diff import diff as compare
    from halfulp.diff.recording import compare_recordings
    from halfulp.diff.sides_by_name import changed, made
    from halfulp.report.diff_page import diff_page
    from halfulp.runs.folder import check_file, write_text

    check_file("html", html)
    check_json(json)
    recorded = [Path(side).is_dir() for side in (a, b)]
    if any(recorded):
        if not all(recorded):
            raise ValueError(f"a={a!r} and b={b!r}: {MIXED}")
        found = compare_recordings(a, b)
    else:
        first, given = made(a, "a", batches, seed, device)
        if not given:
            raise ValueError(f"a={a!r} makes no batches; accepted is (model, batches)")
        named = ":" in b and "=" not in b.partition(":")[0]
        second = made(b, "b", 0, seed, device)[0] if named else changed(first, b, "b")
        with progress_bar("diff") as progress:
            found = compare(
                first.named(a), second.named(b), given, gradients=gradients,
                attribute=not no_swaps, most=most, repetitions=repetitions, progress=progress,
            )  # fmt: skip
    plain = found.as_dict()
    write_each(
        lambda: tell(plain, json, lambda: say(found)),
        lambda: html and write_text(html, diff_page(plain, str(found), typed_command())),
    )
    return found.exit_code


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

    check_json(json)
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
