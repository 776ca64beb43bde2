"""The command line: parse, call, print. What is computed lives below; nothing heavy is imported until it is needed.

Exit codes: 0 done; 1 an audited target has a defect; 2 a bad argument, or a target that could not be audited (a defect
in another one outranks it); 130 interrupted. A bad argument is one line on standard error, never a traceback.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halfulp import __version__

if TYPE_CHECKING:
    from halfulp.audit import Target

PROGRAM = "halfulp"
STDOUT = Path("-")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks δ shows a ? for it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if arguments in (["--version"], ["-V"]):
        print(f"{PROGRAM} {__version__}")
        return 0
    try:
        return _dispatch(arguments)
    except ValueError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def demo(*, out: Path = Path("halfulp-demo"), seeds: int = 2, ladder_seeds: int = 1, json: bool = False) -> int:
    """Run the main job, end to end on a CPU in under three minutes: halfulp demo --out DIR

    Act 1 trains a small model that low-precision attention can ruin, act 2 finds the cause, act 3 audits every
    attention kernel of this machine, act 4 writes DIR/report.html, which opens without a network.

    Args:
        out: Folder to write; a demo that is there already is replaced at the end.
        seeds: How many times each training of act 1 is repeated, each from other weights and data.
        ladder_seeds: The same for the trainings of act 2.
        json: Print the run's record as JSON instead of what each act found.
    """
    from halfulp.experiments.demo import DemoConfig, run_demo
    from halfulp.report.terminal import print_act, progress_bar
    from halfulp.runs.folder import open_run, read_json

    config = DemoConfig(seeds=seeds, ladder_seeds=ladder_seeds)
    folder = open_run(out)

    def told(act: dict[str, Any]) -> None:
        if not json:
            print_act(act)

    try:
        run_demo(config, folder, lambda number, title: progress_bar(f"{number} {title}"), told, final=out.resolve())
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; what was measured lies in {_finish(folder, out, told)}", file=sys.stderr)
        return 130
    place = _finish(folder, out, told)
    if json:
        _print_json(read_json(place / "run.json"))
    else:
        print(f"\nThe report lies in {place / 'report.html'}")
    return 0


def _finish(folder: Path, out: Path, told: Callable[[dict[str, Any]], None]) -> Path:
    """Act 4: the report of the run folder, which then takes its place; part of a run never replaces a whole one."""
    from halfulp.report.demo_page import demo_files, page_summary
    from halfulp.runs.folder import close_run, read_json, write_text

    began = time.perf_counter()
    run = read_json(folder / "run.json")
    if run is None:  # stopped before anything was written
        return folder
    acts = [read_json(folder / f"{act['name']}.json") for act in run["acts"]]
    files = [write_text(folder / name, text) for name, text in demo_files(run, acts).items()]
    if run["status"] != "done":
        return folder if out.exists() and any(out.iterdir()) else close_run(folder, out)
    finding = page_summary(acts, files[0].stat().st_size)
    told({"number": 4, "title": "The report", "finding": finding, "seconds": time.perf_counter() - began})
    return close_run(folder, out)


def audit(
    targets: tuple[str, ...],
    /,
    *,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    shapes: tuple[str, ...] = (),
    quick: bool = False,
    full: bool = False,
    captured: tuple[Path, ...] = (),
    seed: int = 0,
    device: str = "cpu",
    json: Path | None = None,
    html: Path | None = None,
    repro: Path | None = None,
) -> int:
    """Say whether attention kernels are numerically sound: halfulp audit sdpa:flash mykernel.py:attention

    Exit code 0: every one is sound or stock. 1: one has a defect. 2: none has, but one could not be audited.

    Args:
        targets: Built-in names (`halfulp ls targets`), package.module:function or path/file.py:function, called as
            f(query, key, value, *, is_causal, scale) on [B, H, N, D] tensors.
        dtype: Of query, key, value and their gradients.
        shapes: Sizes instead of the built-in ones, each B,H,N,D in elements; H/K is H query heads on K key heads.
        quick: Every probe at one size: under a minute a target on two cores. This is the default.
        full: Several sizes and seeds, up to 8192 tokens: under ten minutes a target on two cores.
        captured: Files of real activations (safetensors with query, key, value, grad_out) to audit on as well.
        seed: Of the probe inputs.
        device: Where the targets run, such as cpu or cuda; what they are held against is computed on the CPU.
        json: File to write every measured figure to; - prints them instead of the tables.
        html: File to write a page to.
        repro: Folder to write a program to for every defect: the smallest input that shows it.
    """
    from halfulp.audit import resolve
    from halfulp.experiments.audits import parse_shape
    from halfulp.runs.folder import check_file, check_folder

    if not targets:
        raise ValueError("targets: none given; accepted are names of `halfulp ls targets` or path/file.py:function")
    if quick and full:
        raise ValueError("quick and full are both given; accepted is one of them")
    sizes = [parse_shape(text) for text in shapes]
    check_file("json", None if json == STDOUT else json)
    check_file("html", html)
    check_folder("repro", repro)
    chosen = [resolve(name) for name in dict.fromkeys(targets)]  # every one, before any work is done
    for target in chosen:
        if target.missing is not None:
            raise ValueError(f"target={target.name!r}: {target.missing}; accepted is one that runs here")
    options: dict[str, Any] = {"dtype": dtype, "depth": "full" if full else "quick", "seed": seed, "device": device}
    options |= {"shapes": sizes, "captured": [str(path) for path in captured]}
    return _audit(chosen, options, json, html, repro)


def _audit(
    chosen: Sequence[Target], options: dict[str, Any], json: Path | None, html: Path | None, repro: Path | None
) -> int:
    """Audit, print every target as soon as it is done, write the files, and return the exit code."""
    from halfulp.experiments.audits import audit_each
    from halfulp.report.audit_table import print_audit, print_summary
    from halfulp.report.terminal import console, progress_bar

    to, plain, code = console(), [], 0
    try:
        for report, script in audit_each(chosen, options, repro, progress_bar):
            plain.append(report.as_dict())
            code = 1 if 1 in (code, report.exit_code) else max(code, report.exit_code)
            if json != STDOUT:
                print_audit(plain[-1], to, script=script)
                to.print()
    except KeyboardInterrupt:  # what is done is written all the same
        print(f"{PROGRAM}: interrupted after {len(plain)} of {len(chosen)} targets", file=sys.stderr)
        code = 130
    if json == STDOUT:
        _print_json(plain)
    elif len(plain) > 1:
        print_summary(plain, to)
    if plain:
        _write_audits(plain, None if json == STDOUT else json, html)
    return code


def _write_audits(plain: Sequence[dict[str, Any]], json: Path | None, html: Path | None) -> None:
    from halfulp.report.audit_page import audit_page
    from halfulp.runs.folder import write_json, write_text

    if json is not None:
        write_json(json, plain)
    if html is not None:
        versions = ", ".join(f"{name} {version}" for name, version in plain[0]["versions"].items())
        command = shlex.join([PROGRAM, *_last_arguments])
        write_text(html, audit_page(plain, command, meta=f"halfulp {__version__}, {versions}"))


def sweep(
    what: Literal["precision", "length", "block", "order"],
    /,
    *,
    length: int | None = None,
    head_dim: int | None = None,
    memory: int | None = None,
    seeds: int | None = None,
    inputs: Literal["uniform", "normal"] = "uniform",
    html: Path | None = None,
    json: bool = False,
) -> int:
    """Measure how far flash attention deviates numerically (the micro-benchmark of Golden et al., arXiv 2405.02803).

    Args:
        what: precision (over number formats), length (over tokens), block (over the block area), or order (block sizes
            as published, exchanged and square).
        length: N, tokens; 1024, or 512 for block and order.
        head_dim: d, elements; 64, or 32 for block and order.
        memory: M, on-chip memory in elements, where it is not swept; the blocks are M/4d keys by min(M/4d, d) queries.
        seeds: How many random inputs; figures are the median over them with the range.
        inputs: Query, key and value uniform on [0, 1) or standard normal.
        html: File to write a page with the figures to.
        json: Print JSON instead of tables.
    """
    from halfulp.experiments import sweep as sweeps
    from halfulp.report.pages import experiment_page
    from halfulp.report.terminal import console, print_table, progress_bar
    from halfulp.runs.folder import check_file, write_text

    check_file("html", html)
    small = what in ("block", "order")
    given = {"length": length, "head_dim": head_dim, "memory": memory, "seeds": seeds, "inputs": inputs}
    base = sweeps.Setting(length=512, head_dim=32) if small else sweeps.Setting()
    setting = replace(base, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    measures: dict[str, Callable[..., sweeps.SweepResult]] = {
        "precision": sweeps.sweep_precision,
        "length": sweeps.sweep_length,
        "block": sweeps.sweep_block,
        "order": sweeps.sweep_order,
    }
    with progress_bar(f"sweep {what}") as progress:
        plain = measures[what](setting, progress=progress).as_dict()
    if json:
        _print_json(plain)
    else:
        for table in plain["tables"]:
            print_table(table, console())
    if html is not None:
        write_text(html, experiment_page(f"Sweep over {what}", plain["figures"], plain["tables"]))
    return 0


def claims(ids: tuple[str, ...] = (), /, *, html: Path | None = None, json: bool = False) -> int:
    """Measure the papers' claims and judge each by a stated rule: halfulp claims A13 D1

    Args:
        ids: Which (`halfulp ls claims`); all of them by default, which takes some minutes.
        html: File to write a page to.
        json: Print JSON instead of text.
    """
    from halfulp.experiments.claims import run_claims, selected
    from halfulp.report.ledger import ledger_page, print_ledger
    from halfulp.report.terminal import console, progress_bar
    from halfulp.runs.folder import check_file, write_text

    check_file("html", html)
    chosen = [claim.id for claim in selected(ids)] if ids else None
    with progress_bar("claims") as progress:
        plain = [verdict.as_dict() for verdict in run_claims(chosen, progress)]
    if json:
        _print_json(plain)
    else:
        print_ledger(plain, console())
    if html is not None:
        write_text(html, ledger_page(plain, shlex.join([PROGRAM, *_last_arguments])))
    return 0


def explain(
    values: tuple[str, ...],
    /,
    *,
    format: str = "bf16",
    operation: Literal["sum", "product", "dot"] = "sum",
    accumulate: str | None = None,
    json: bool = False,
) -> int:
    """Show one rounding bit by bit: halfulp explain -- -2.4071154594421387 -2.296875 --format bf16

    Args:
        values: Two or more decimal numbers, read as float64; for dot, the left vector and then the right one.
        format: Number format of the result (`halfulp ls formats`; eXmY for X exponent and Y mantissa bits).
        operation: What is computed of the values.
        accumulate: Number format of the running value; fp32, or that of the result where it is wider.
        json: Print JSON instead of text.
    """
    from halfulp.experiments.explain import explain as explained
    from halfulp.formats import parse_format
    from halfulp.runs.folder import json_text

    running = None if accumulate is None else parse_format(accumulate)
    result = explained(values, parse_format(format), operation, accumulate=running)  # type: ignore[arg-type]
    print(json_text(result.as_dict()) + "\n" if json else result.text(), end="")
    return 0


def ls(
    what: Literal["all", "formats", "recipes", "targets", "probes", "claims"] = "all", /, *, json: bool = False
) -> int:
    """List what there is: number formats, recipes, attention kernels to audit, probe inputs, claims.

    Args:
        what: Which list: formats, recipes, targets, probes, claims, or all.
        json: Print JSON instead of tables.
    """
    from halfulp.experiments.listing import LISTS
    from halfulp.report.terminal import console, print_table

    tables = {name: LISTS[name]().as_dict() for name in (LISTS if what == "all" else (what,))}
    if json:
        rows = {name: [dict(zip(t["columns"], row, strict=True)) for row in t["rows"]] for name, t in tables.items()}
        _print_json(rows if what == "all" else rows[what])
        return 0
    to = console()
    for i, table in enumerate(tables.values()):
        if i:
            to.print()
        print_table(table, to)
    return 0


def _print_json(plain: Any) -> None:
    from halfulp.runs.folder import json_text

    print(json_text(plain))


COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "audit": audit,
    "sweep": sweep,
    "claims": claims,
    "explain": explain,
    "ls": ls,
}
_last_arguments: list[str] = []  # as typed, for the command that a page names


def _dispatch(arguments: list[str]) -> int:
    import tyro

    from halfulp.report.usage import usage_line

    _last_arguments[:] = arguments
    if arguments[:1] == ["explain"] and "--" in arguments:  # options may follow the numbers
        arguments.remove("--")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            call = tyro.extras.subcommand_cli_from_dict(
                {name: _later(command) for name, command in COMMANDS.items()},
                prog=PROGRAM,
                description="Finds, explains and fixes the rounding errors that break low-precision training. "
                "halfulp --version prints the version.",
                args=arguments or ["--help"],
                config=(
                    tyro.conf.FlagCreatePairsOff,
                    tyro.conf.DisallowNone,
                    tyro.conf.PositionalMetavarFromFieldName,
                ),
            )
    except SystemExit as stop:
        return 0 if not stop.code else _complain(usage_line(said.getvalue(), COMMANDS))
    return int(call())


def _later(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """The command as tyro reads it, but run only after parsing, whose messages are caught."""

    @functools.wraps(command)
    def bound(*args: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(command, *args, **options)

    return bound


def _complain(message: str) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return 2
