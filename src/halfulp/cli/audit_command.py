"""The command that judges attention kernels: `halfulp audit`."""

from __future__ import annotations

from collections.abc import Sequence
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
    from halfulp.targets import Target


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
    json: Path | None = None,
    html: Path | None = None,
    repro: Path | None = None,
) -> int:
    """Say whether attention kernels are numerically sound: halfulp audit sdpa:flash
    mykernel.py:attention

    Exit code 0: every one is sound or stock. 1: one has a defect. 2: none has, but one could not be
    audited.

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
        json: File to write every measured figure to; - prints them instead of the tables.
        html: File to write a page to.
        repro: Folder to write a program to for every defect: the smallest input that shows it.
    """
    from halfulp.runs.folder import check_file, check_folder
    from halfulp.targets import resolve

    if not targets:
        raise ValueError(
            "targets: none given; accepted are names of `halfulp ls targets` or"
            " path/file.py:function"
        )
    sizes = [_shape(text) for text in shapes]
    check_json(json)
    check_file("html", html)
    check_folder("repro", repro)
    # every one, before any work is done
    chosen = [resolve(name) for name in dict.fromkeys(targets)]
    for target in chosen:
        if target.missing is not None:
            raise ValueError(
                f"target={target.name!r}: {target.missing}; accepted is one that runs here"
            )
    options: dict[str, Any] = {
        "dtype": dtype,
        "depth": "full" if full else "quick",
        "seed": seed,
        "device": device,
    }
    options |= {"shapes": sizes, "captured": [str(path) for path in captured]}
    return _audit(chosen, options, json, html, repro)


def _audit(
    chosen: Sequence[Target],
    options: dict[str, Any],
    json: Path | None,
    html: Path | None,
    repro: Path | None,
) -> int:
    """Audit, print every target as soon as it is done, write the files, and return the exit
    code.
    """
    from halfulp.experiments.audits import audit_each
    from halfulp.report.audit_table import print_audit, print_summary
    from halfulp.report.terminal import console

    to, plain, code = console(), [], 0
    failure: OSError | None = None
    try:
        for report, script in audit_each(chosen, options, repro, progress_bar):
            plain.append(report.as_dict())
            code = 1 if 1 in (code, report.exit_code) else max(code, report.exit_code)
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
