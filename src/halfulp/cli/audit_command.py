"""The command that judges attention kernels: `halfulp audit`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halfulp import __version__
from halfulp.cli.shapes import parse_sizes
from halfulp.cli.shell import (
    STDOUT,
    check_json,
    complain,
    progress_bar,
    tell,
    typed_command,
    write_each,
)

if TYPE_CHECKING:
    from halfulp.audit import Shape
    from halfulp.targets import CallLimits, Target


def audit(
    targets: tuple[str, ...],
    /,
    *,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    shapes: tuple[str, ...] = (),
    full: bool = False,
    captured: tuple[Path, ...] = (),
    seed: int = 0,
    device: str = "cpu",
    forward: bool = False,
    in_process: bool = False,
    call_seconds: float = 120.0,
    call_gigabytes: float = 8.0,
    json: Path | None = None,
    html: Path | None = None,
    repro: Path | None = None,
) -> int:
    """Say whether attention kernels are numerically sound: halfulp audit sdpa:flash
    mykernel.py:attention

    Exit code 0: every one is sound or stock. 1: one has a defect. 2: none has, but one could not be
    audited, or not wholly: calls, gradients or inputs were lost, or it has no backward pass and
    was asked for one. 3: something else went wrong.

    Args:
        targets: Built-in names (`halfulp ls targets`), package.module:function or
            path/file.py:function, called as f(query, key, value, *, is_causal, scale) on [B, H, N,
            D] tensors.
        dtype: Of query, key, value and their gradients. In float32, where sound kernels differ by
            the order of sums, only errors 32 times the stock recipe's count.
        shapes: Size instead of the built-in ones, B,H,N,D in elements, and again for another; H/K
            is H query heads on K key heads, NxM is N queries on M keys.
        full: Several sizes and seeds, up to 8192 tokens: under ten minutes a target on two cores
            instead of one.
        captured: File of real activations (safetensors with query, key, value, grad_out) to audit
            on as well, and again for another.
        seed: Of the probe inputs.
        device: Where the targets run, such as cpu or cuda; what they are held against is computed
            on the CPU.
        forward: Ask for no gradients, of kernels that have no backward pass.
        in_process: Call the targets in this process. Otherwise each runs in one of its own, where
            an exit, a crash, a hang or endless memory ends nothing else.
        call_seconds: After how long a call is given up.
        call_gigabytes: Of memory that a target's process may take beyond what it starts with, on a
            CPU under Linux.
        json: File to write every measured figure to; - prints them instead of the tables.
        html: File to write a page to.
        repro: Folder to write a program to for every defect: the smallest input that shows it.
    """
    from halfulp.targets import CallLimits

    sizes = [_shape(text) for text in shapes]
    _check(targets, json, html, repro)
    options: dict[str, Any] = {
        "dtype": dtype,
        "depth": "full" if full else "quick",
        "seed": seed,
        "device": device,
        "forward": forward,
    }
    options |= {"shapes": sizes, "captured": [str(path) for path in captured]}
    limits = None if in_process else CallLimits(call_seconds, call_gigabytes)
    with ExitStack() as stack:
        chosen = _opened(dict.fromkeys(targets), device, limits, stack)
        return _audit(chosen, options, json, html, repro)


def _check(
    targets: Sequence[str], json: Path | None, html: Path | None, repro: Path | None
) -> None:
    from halfulp.runs.folder import check_file, check_folder

    if not targets:
        raise ValueError(
            "targets: none given; accepted are names of `halfulp ls targets` or"
            " path/file.py:function"
        )
    check_json(json)
    check_file("html", html)
    check_folder("repro", repro)


def _opened(
    names: Iterable[str], device: str, limits: CallLimits | None, stack: ExitStack
) -> list[AbstractContextManager[Target]]:
    """Every target, or its ValueError before any work is done; processes end with the stack at the
    latest.

    A user's file is loaded now, in a process of its own, to know that it can be.
    """
    from halfulp.targets import isolated, resolve
    from halfulp.targets.dialect import is_code

    opened: list[AbstractContextManager[Target]] = []
    for name in names:
        if limits is not None and is_code(name):
            loaded = ExitStack()
            stack.push(loaded)
            opened.append(_until_left(loaded, loaded.enter_context(isolated(name, device, limits))))
            continue
        target = resolve(name)
        if target.missing is not None:
            raise ValueError(
                f"target={target.name!r}: {target.missing}; accepted is one that runs here"
            )
        opened.append(nullcontext(target) if limits is None else isolated(name, device, limits))
    return opened


@contextmanager
def _until_left(loaded: ExitStack, target: Target) -> Iterator[Target]:
    with loaded:
        yield target


def _audit(
    chosen: Sequence[AbstractContextManager[Target]],
    options: dict[str, Any],
    json: Path | None,
    html: Path | None,
    repro: Path | None,
) -> int:
    """Audit; print every target and write the files as soon as it is done; return the exit code."""
    from halfulp.experiments.audits import audit_each
    from halfulp.report.audit_table import print_audit, print_summary
    from halfulp.report.terminal import console

    to, code = console(), 0
    plain: list[dict[str, Any]] = []
    failure: OSError | None = None
    # what a kernel prints into this process is no JSON
    quiet = redirect_stdout(sys.stderr) if json == STDOUT else nullcontext()
    try:
        with quiet:
            for report, script in audit_each(chosen, options, repro, progress_bar):
                plain.append(report.as_dict())
                code = 1 if 1 in (code, report.exit_code) else max(code, report.exit_code)
                _write(plain, None if json == STDOUT else json, html)
                if json != STDOUT:
                    print_audit(plain[-1], to, script=script)
                    to.print()
    except KeyboardInterrupt:  # what is done is written all the same
        complain(f"interrupted after {len(plain)} of {len(chosen)} targets")
        code = 130
    except OSError as error:  # a program that shows a defect could not be written
        failure = error
    write_each(
        lambda: tell(plain, json, lambda: print_summary(plain, to) if len(plain) > 1 else None),
        lambda: _write_page(plain, html),
    )
    if failure is not None:
        raise failure
    return code


def _write(plain: Sequence[dict[str, Any]], json: Path | None, html: Path | None) -> None:
    """Write what is done so far; where that cannot be, the last time says so."""
    from halfulp.runs.folder import write_json

    with suppress(OSError):
        write_each(
            lambda: None if json is None else write_json(json, plain),
            lambda: _write_page(plain, html),
        )


def _write_page(plain: Sequence[dict[str, Any]], html: Path | None) -> None:
    from halfulp.report.audit_page import audit_page
    from halfulp.runs.folder import write_text

    if html is not None and plain:
        versions = ", ".join(f"{name} {version}" for name, version in plain[0]["versions"].items())
        command = typed_command()
        write_text(html, audit_page(plain, command, meta=f"halfulp {__version__}, {versions}"))


def _shape(text: str) -> Shape:
    from halfulp.audit import Shape

    sizes = parse_sizes(text)
    if sizes.causal:
        raise ValueError(
            f"shapes={text!r}: accepted without ,causal; an audit calls with a mask and without"
        )
    key_heads = None if sizes.key_heads == sizes.heads else sizes.key_heads
    return Shape(sizes.batch, sizes.heads, sizes.n_query, sizes.n_key, sizes.head_dim, key_heads)
