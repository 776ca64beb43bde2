"""The command that judges kernels: `halfulp audit`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfulp.cli.audit_files import AuditFiles
from halfulp.cli.audit_part import AuditCalls, AuditPart, list_plan
from halfulp.cli.ending import WORSE
from halfulp.cli.shapes import parse_sizes
from halfulp.cli.shell import STDOUT, complain, load, progress_bar, tell, write_each

if TYPE_CHECKING:
    from halfulp.audit import Shape
    from halfulp.experiments.before import Before
    from halfulp.targets import CallLimits, Target

_NO_FILES = AuditFiles()
_WHOLE = AuditPart()
_CALLS = AuditCalls()


def audit(
    targets: tuple[str, ...],
    /,
    *,
    op: str = "attention",
    dtype: str = "bfloat16",
    shapes: tuple[str, ...] = (),
    full: bool = False,
    captured: tuple[Path, ...] = (),
    seed: int = 0,
    device: str = "cpu",
    forward: bool = False,
    against: str | None = None,
    calls: AuditCalls = _CALLS,
    part: AuditPart = _WHOLE,
    files: AuditFiles = _NO_FILES,
) -> int:
    """Say whether kernels are numerically sound: halfulp audit sdpa:flash mykernel.py:attention, or
    halfulp audit --op rms_norm mykernel.py:norm

    Exit code 0: all are sound or stock. 1: one has a defect. 2: one could not be audited, or not
    wholly: calls, gradients or inputs were lost, or it has no backward pass and was asked for one.
    3: a file, the disk or memory failed. 4: something unforeseen. 5: a figure is worse than
    --against has it.

    Args:
        targets: Built-in names (`halfulp ls targets`), package.module:function or
            path/file.py:function, called as f(query, key, value, *, is_causal, scale) on [B, H, N,
            D] tensors; of another operation as torch.nn.functional's function of its name. Two
            saved audits, before.json after.json, are compared, and nothing runs.
        op: The operation: one of `halfulp ls operations`, or a folder that defines another.
        dtype: Of the operands and their gradients: bfloat16, float16 or float32. In float32,
            where sound kernels differ by the order of sums, only errors 32 times the stock recipe's
            count.
        shapes: Size instead of the built-in ones, B,H,N,D in elements, and again for another; H/K
            is H query heads on K key heads, NxM is N queries on M keys.
        full: Several sizes and seeds, up to 8192 tokens: under ten minutes a target on two cores.
        captured: File of real activations (safetensors: query, key, value, grad_out) to audit on
            as well, and again for another.
        seed: Of the probe inputs.
        device: Where the targets run, such as cpu or cuda; what they are held against is computed
            on the CPU.
        forward: Ask for no gradients, of kernels that have no backward pass.
        against: What to compare with, figure by figure: a git revision of this repository, whose
            files are written to a temporary folder; another target; or FILE.json, a saved audit.
        calls: How the targets are called.
        part: Less than the whole, which then is no pass.
        files: What is written.
    """
    load("halfulp.experiments.before", "halfulp.experiments.audits")
    from halfulp.experiments.before import is_saved

    files.check()
    if targets and all(is_saved(name) for name in targets):
        return _compare_saved(targets, against, files)
    options: dict[str, Any] = {
        "op": op,
        "dtype": dtype,
        "depth": "full" if full else "quick",
        "seed": seed,
        "device": device,
        "forward": forward,
        "form": calls.form,
        "jobs": calls.jobs,
        "shapes": [_shape(text) for text in shapes],
        "captured": [str(path) for path in captured],
    } | part.options()
    if part.list:
        return list_plan(targets, options, files.json)
    return _audit_all(targets, options, calls.limits(), files, against)


def _audit_all(
    targets: Sequence[str],
    options: dict[str, Any],
    limits: CallLimits | None,
    files: AuditFiles,
    against: str | None,
) -> int:
    from halfulp.experiments.before import before
    from halfulp.runs.threads import one_thread

    names = list(dict.fromkeys(targets))
    if not names:
        raise ValueError(
            "targets: none given; accepted are names of `halfulp ls targets` or"
            " path/file.py:function"
        )
    with ExitStack() as stack:
        if options["jobs"] > 1:  # before processes are started, which have as many threads
            stack.enter_context(one_thread())
        chosen = _opened(names, options, limits, stack)
        compared = None
        if against is not None:
            compared = stack.enter_context(before(against, names, options, limits))
        return _audit(dict(zip(names, chosen, strict=True)), options, files, compared)


def _compare_saved(names: Sequence[str], against: str | None, files: AuditFiles) -> int:
    """Compare saved audits and print what changed."""
    from halfulp.audit.against import compare, read_audits
    from halfulp.report.comparison_table import print_comparison
    from halfulp.report.terminal import console

    if against is not None:
        names = [against, *names]
    if len(names) != 2:
        raise ValueError(
            f"targets of {len(names)} saved audit(s): accepted are two, before.json after.json"
        )
    if files.html is not None or files.repro is not None:
        raise ValueError("html, repro: accepted where something is audited, not of saved audits")
    old, new = (read_audits(name, "targets") for name in names)
    by_name = {report["target"]: report for report in old}
    if len(old) == len(new) == 1:
        by_name[new[0]["target"]] = old[0]
    pairs = [(by_name[r["target"]], r) for r in new if r["target"] in by_name]
    if not pairs:
        raise ValueError(f"{names[0]} and {names[1]} share no target")
    found = [compare(*pair).as_dict() for pair in pairs]

    def show() -> None:
        for comparison in found:
            print_comparison(comparison, console())

    files.write([], found)
    tell({"comparisons": found}, files.json, show)
    return WORSE if any(c["worse"] for c in found) else 0


def _opened(
    names: Iterable[str], options: dict[str, Any], limits: CallLimits | None, stack: ExitStack
) -> list[AbstractContextManager[Target]]:
    """Every target, or its ValueError before any work is done; processes end with the stack at the
    latest.

    A user's file is loaded now, in a process of its own, to know that it can be.
    """
    from halfulp.targets import isolated, resolve
    from halfulp.targets.dialect import is_code

    op, device, form = options["op"], options["device"], options["form"]
    opened: list[AbstractContextManager[Target]] = []
    for name in names:
        if limits is not None and is_code(name):
            loaded = ExitStack()
            stack.push(loaded)
            opened.append(
                _until_left(loaded, loaded.enter_context(isolated(name, device, limits, op, form)))
            )
            continue
        target = resolve(name, operation=op, form=form)
        if target.missing is not None:
            raise ValueError(
                f"target={target.name!r}: {target.missing}; accepted is one that runs here"
            )
        opened.append(nullcontext(target) if limits is None else isolated(name, device, limits, op))
    return opened


@contextmanager
def _until_left(loaded: ExitStack, target: Target) -> Iterator[Target]:
    with loaded:
        yield target


def _audit(
    chosen: dict[str, AbstractContextManager[Target]],
    options: dict[str, Any],
    files: AuditFiles,
    compared: Before | None,
) -> int:
    """Audit; print every target and write the files as soon as it is done; return the exit code."""
    from halfulp.audit.against import compare
    from halfulp.experiments.audits import audit_each
    from halfulp.report.audit_table import print_audit, print_summary
    from halfulp.report.comparison_table import print_comparison
    from halfulp.report.terminal import console

    to, code = console(), 0
    plain: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    failure: OSError | None = None
    # what a kernel prints into this process is no JSON
    quiet = redirect_stdout(sys.stderr) if files.json == STDOUT else nullcontext()
    try:
        with quiet:
            audited = audit_each(list(chosen.values()), options, files.repro, progress_bar)
            for name, (report, script) in zip(chosen, audited, strict=True):
                plain.append(report.as_dict())
                code = 1 if 1 in (code, report.exit_code) else max(code, report.exit_code)
                found = None
                if compared is not None and plain[-1]["verdict"] != "error":
                    found = compare(compared(name), plain[-1]).as_dict()
                    comparisons.append(found)
                    plain[-1]["against"] = found
                files.write_so_far(plain, comparisons)
                if files.json != STDOUT:
                    print_audit(plain[-1], to, script=script)
                    if found is not None:
                        to.print()
                        print_comparison(found, to)
                    to.print()
    except KeyboardInterrupt:  # what is done is written all the same
        complain(f"interrupted after {len(plain)} of {len(chosen)} targets")
        code = 130
    except OSError as error:  # a program that shows a defect could not be written
        failure = error
    write_each(
        lambda: tell(plain, files.json, lambda: print_summary(plain, to) if len(plain) > 1 else 0),
        lambda: files.write(plain, comparisons),
    )
    if failure is not None:
        raise failure
    return WORSE if code != 130 and any(c["worse"] for c in comparisons) else code


def _shape(text: str) -> Shape:
    from halfulp.audit import Shape

    sizes = parse_sizes(text)
    if sizes.causal:
        raise ValueError(
            f"shapes={text!r}: accepted without ,causal; an audit calls with a mask and without"
        )
    key_heads = None if sizes.key_heads == sizes.heads else sizes.key_heads
    return Shape(sizes.batch, sizes.heads, sizes.n_query, sizes.n_key, sizes.head_dim, key_heads)
