"""The commands that show and measure what the papers speak of: demo, sweep, claims, explain, ls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halfulp.cli.shell import (
    STDOUT,
    check_files,
    complain,
    progress_bar,
    say,
    tell,
    typed_command,
)

if TYPE_CHECKING:
    from halfulp.papers.claim import Lab
    from halfulp.runs.folder import NewRun


def demo(
    *,
    out: Path = Path("halfulp-demo"),
    seeds: int = 3,
    isolation_seeds: int = 3,
    json: Path | None = None,
) -> int:
    """Run the main job, end to end on a CPU in three to five minutes: halfulp demo --out DIR

    Act 1 trains a small model that low-precision attention can ruin, act 2 finds the cause, act 3
    audits every attention kernel of this machine, act 4 writes DIR/report.html, which opens without
    a network.

    Args:
        out: Folder to write; a demo that is there already is replaced at the end.
        seeds: How many times each training of act 1 is repeated, each from other weights and data.
        isolation_seeds: The same for the trainings of act 2.
        json: File to write the run's record to; - prints it instead of what each act found.
    """
    from halfulp.experiments.demo import DemoConfig, run_demo
    from halfulp.report.terminal import print_act
    from halfulp.runs.folder import NewRun, read_json

    config = DemoConfig(seeds=seeds, isolation_seeds=isolation_seeds)
    check_files(json)
    new = NewRun(out, "demo")

    def told(act: dict[str, Any]) -> None:
        if json != STDOUT:
            print_act(act)

    try:
        run_demo(
            config,
            new.folder,
            lambda number, title: progress_bar(f"{number} {title}"),
            told,
            final=out.resolve(),
        )
    except KeyboardInterrupt:
        complain(f"interrupted; what was measured lies in {_finish(new, out, told)}")
        return 130
    place = _finish(new, out, told)
    tell(
        read_json(place / "run.json"),
        json,
        lambda: say(f"\nThe report lies in {place / 'report.html'}"),
    )
    return 0


def _finish(new: NewRun, out: Path, told: Callable[[dict[str, Any]], None]) -> Path:
    """Act 4: the report of the run folder, which then takes its place; part of a run never replaces
    a whole one.
    """
    from halfulp.report.demo_page import demo_files, page_summary
    from halfulp.runs.folder import read_json, write_text

    began, folder = time.perf_counter(), new.folder
    run = read_json(folder / "run.json")
    if run is None:  # stopped before anything was written
        return new.keep()
    acts = [read_json(folder / f"{act['name']}.json") for act in run["acts"]]
    files = [write_text(folder / name, text) for name, text in demo_files(run, acts).items()]
    if run["status"] != "done":
        return new.keep() if out.exists() and any(out.iterdir()) else new.finish()
    finding = page_summary(acts, files[0].stat().st_size)
    told(
        {
            "number": 4,
            "title": "The report",
            "finding": finding,
            "seconds": time.perf_counter() - began,
        }
    )
    return new.finish()


def sweep(
    what: Literal["precision", "length", "block", "order"],
    /,
    *,
    length: int | None = None,
    head_dim: int | None = None,
    memory: int | None = None,
    seeds: int | None = None,
    inputs: Literal["uniform", "normal"] = "uniform",
    workers: int = 1,
    backend: str | None = None,
    fresh: bool = False,
    html: Path | None = None,
    json: Path | None = None,
) -> int:
    """Measure how far flash attention deviates numerically (the micro-benchmark of Golden et al.,
    arXiv 2405.02803). One that was interrupted goes on with the same command.

    Args:
        what: precision (over number formats), length (over tokens), block (over the block area), or
            order (block sizes as published, exchanged and square).
        length: N, tokens; 1024, or 512 for block and order.
        head_dim: d, elements; 64, or 32 for block and order.
        memory: M, on-chip memory in elements, where it is not swept; the blocks are M/4d keys by
            min(M/4d, d) queries.
        seeds: How many random inputs; figures are the median over them with the range.
        inputs: Query, key and value uniform on [0, 1) or standard normal.
        workers: Processes, one thread each.
        backend: As of `halfulp isolate`.
        fresh: Measure again what an earlier call of the same code on this machine has measured.
        html: File to write a page with the figures to.
        json: File to write every figure to; - prints them instead of the tables.
    """
    from halfulp.experiments import sweep as sweeps
    from halfulp.report.pages import experiment_page
    from halfulp.report.terminal import print_tables
    from halfulp.runs.keeping import keeping
    from halfulp.runs.parallel import spread_over

    check_files(json, html=html)
    sizes = {"length": length, "head_dim": head_dim, "memory": memory, "seeds": seeds}
    given = {name: size for name, size in sizes.items() if size is not None}
    swept = sweeps.SWEPT.get(what, "")
    if swept in given:
        raise ValueError(f"{swept}={given[swept]}: accepted where it is not what is swept")
    small = {"length": 512, "head_dim": 32} if what in ("block", "order") else {}
    setting = sweeps.Setting(**(small | given), inputs=inputs)
    measure: Callable[..., sweeps.SweepResult] = getattr(sweeps, f"sweep_{what}")
    with (
        progress_bar(f"sweep {what}") as progress,
        spread_over(backend, workers),
        keeping(fresh=fresh, backend=backend) as kept,
    ):
        plain = measure(setting, progress=progress).as_dict()
    plain["kept"] = kept.said()

    earlier = f"of an earlier call: {plain['kept']}" if plain["kept"] else ""

    def show() -> None:
        print_tables(plain["tables"])
        if earlier:
            say(f"{earlier} (--fresh measures them again)")

    def page() -> str:
        shown = (plain["figures"], plain["tables"])
        return experiment_page(f"Sweep over {what}", *shown, meta=earlier)

    tell(plain, json, show, html, page)
    return 0


def claims(
    ids: tuple[str, ...] = (),
    /,
    *,
    all: bool = False,
    workers: int | None = None,
    backend: str | None = None,
    fresh: bool = False,
    html: Path | None = None,
    json: Path | None = None,
) -> int:
    """Measure the papers' claims and judge each by a stated rule: halfulp claims A13 D1

    One that was interrupted goes on with the same command: each run and each claim is kept (in the
    folder of HALFULP_CACHE, by default ~/.cache/halfulp), times aside, and what was taken from an
    earlier call is said.

    Args:
        ids: Which (`halfulp ls claims`); every one by default, in about ten minutes on four idle
            cores.
        all: Measure at a larger scale: more seeds, steps and sizes, in an hour or so on four cores
            (an estimate).
        workers: Processes of one thread each; one for each core, at most four, by default.
        backend: As of `halfulp isolate`.
        fresh: Measure again what an earlier call of the same code on this machine has measured.
        html: File to write a page to.
        json: File to write the verdicts to; - prints them as JSON instead of text.
    """
    from halfulp.papers.ledger import run_claims, selected
    from halfulp.report.ledger_page import ledger_page, print_ledger
    from halfulp.report.terminal import console
    from halfulp.runs.keeping import keeping
    from halfulp.runs.parallel import spread_over

    check_files(json, html=html)
    chosen = [claim.id for claim in selected(ids)] if ids else None
    lab = laboratory(whole=all, workers=workers)
    spread = nullcontext() if backend is None else spread_over(backend, lab.workers)
    with (
        progress_bar("claims") as progress,
        spread,
        keeping(fresh=fresh, backend=backend),
    ):
        plain = [verdict.as_dict() for verdict in run_claims(chosen, progress, lab=lab)]

    def page() -> str:
        return ledger_page(plain, typed_command())

    tell(plain, json, lambda: print_ledger(plain, console()), html, page)
    return 0


def laboratory(*, whole: bool, workers: int | None) -> Lab:
    """Return where claims are measured, at the usual scale or at the largest; `workers` processes,
    or one for each core, at most four.
    """
    from halfulp.papers.claim import FULL_SEEDS, FULL_STEPS, Lab

    if workers is None:
        # the cores that this process may use, which may be fewer than the machine has
        workers = max(1, min(4, len(os.sched_getaffinity(0))))
    return Lab(workers, FULL_SEEDS, FULL_STEPS, full=True) if whole else Lab(workers)


def explain(
    values: tuple[str, ...],
    /,
    *,
    format: str = "bf16",
    operation: Literal["sum", "product", "dot"] = "sum",
    accumulate: str | None = None,
    json: Path | None = None,
) -> int:
    """Show one rounding bit by bit: halfulp explain -- -2.4071154594421387 -2.296875 --format bf16;
    or the page of a cause that an audit named: halfulp explain HU109

    Args:
        values: Decimal numbers, read as float64; for dot, the left vector and then the right one.
            One number alone is rounded as it is. Or the code of a cause (`halfulp ls causes`).
        format: Number format of the result (`halfulp ls formats`; eXmY for X exponent and Y
            mantissa bits).
        operation: What is computed of the values.
        accumulate: Number format of the running value; fp32, or that of the result where it is
            wider.
        json: File to write every step to; - prints them as JSON instead of text.
    """
    from halfulp.experiments.explain import explain as explained
    from halfulp.formats import parse_format

    check_files(json)
    if len(values) == 1 and values[0].upper().startswith("HU"):
        return _cause(values[0].upper(), json)
    running = None if accumulate is None else parse_format(accumulate)
    result = explained(values, parse_format(format), operation, accumulate=running)  # type: ignore[arg-type]
    tell(result.as_dict(), json, lambda: say(result.text().removesuffix("\n")))
    return 0


def _cause(code: str, json: Path | None) -> int:
    from rich.markdown import Markdown

    from halfulp.reconstruct.causes import page_of
    from halfulp.report.terminal import console

    text = page_of(code)
    tell({"code": code, "page": text}, json, lambda: console().print(Markdown(text)))
    return 0


def ls(
    what: Literal[
        "all",
        "formats",
        "recipes",
        "targets",
        "probes",
        "operations",
        "causes",
        "claims",
        "presets",
    ] = "all",
    /,
    *,
    op: str = "attention",
    json: Path | None = None,
) -> int:
    """List what there is: number formats, recipes, attention kernels to audit, probe inputs,
    operations, causes, claims, training presets.

    Args:
        what: Which list: formats, recipes, targets, probes, operations, causes, claims,
            presets, or all.
        op: The operation whose probes or targets are listed: one of `halfulp ls operations`, or a
            folder that defines another.
        json: File to write the lists to; - prints them as JSON instead of tables.
    """
    from halfulp.cli.listing import LISTS, OF_OPERATION
    from halfulp.operations import ATTENTION
    from halfulp.report.terminal import print_tables

    check_files(json)
    if op == ATTENTION:
        tables = {name: LISTS[name]().as_dict() for name in (LISTS if what == "all" else (what,))}
    elif what in OF_OPERATION:
        tables = {what: OF_OPERATION[what](op).as_dict()}
    else:
        raise ValueError(f"op={op!r}: an operation has lists of {' and '.join(OF_OPERATION)} only")
    rows = {
        name: [dict(zip(t["columns"], row, strict=True)) for row in t["rows"]]
        for name, t in tables.items()
    }

    def show() -> None:
        for i, table in enumerate(tables.values()):
            if i:
                say("")
            print_tables([table])

    tell(rows if what == "all" else rows[what], json, show)
    return 0
