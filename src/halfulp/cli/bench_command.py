"""`halfulp bench`: attention kernels timed beside each other, with their error in the same
table.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfulp.cli.shapes import parse_sizes
from halfulp.cli.shell import check_files, progress_bar, tell, typed_command

if TYPE_CHECKING:
    from halfulp.experiments.bench import Setting


def bench(
    kernels: tuple[str, ...] = (),
    /,
    *,
    shapes: tuple[str, ...] = (),
    dtype: str = "bfloat16",
    rounds: int = 9,
    threads: int | None = None,
    device: str = "cpu",
    json: Path | None = None,
    svg: Path | None = None,
) -> int:
    """Time attention kernels beside each other, forward and backward, and say how exact each is:
    halfulp bench

    Ratios are medians over interleaved rounds; where their spread hides the difference there is
    none. Errors are multiples of the floor, the least that a kernel whose products take operands of
    this dtype must round. Takes a few minutes by default, most of it for the slow peers. Exit code
    2: a kernel that was named cannot be timed.

    Args:
        kernels: Names of `halfulp ls targets`, file.py:function, or module:function; every kernel
            that runs here, but emulations, by default. sdpa is the baseline and always takes
            part.
        shapes: Size, B,H,N,D in elements, H/K for K key heads, NxM for M keys, with ",causal" where
            wanted, and again for another; three sizes, causal and not, by default.
        dtype: Of query, key, value and their gradients: bfloat16 or float16.
        rounds: Timed rounds, at least 6.
        threads: Of torch; its own number by default.
        device: Where the kernels run, such as cpu or cuda.
        json: File to write every figure to; - prints them instead of the tables.
        svg: File to draw speed and error to.
    """
    import torch

    from halfulp.experiments.bench import bench as benched

    sizes = [_setting(text) for text in shapes]
    check_files(json, svg=svg)
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: accepted is an integer of at least 1")
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    options: dict[str, Any] = {"dtype": dtype, "rounds": rounds, "device": device}
    try:
        with progress_bar("bench") as progress:
            plain = benched(
                kernels, sizes, progress=progress, command=typed_command(), **options
            ).as_dict()
    finally:
        torch.set_num_threads(before)
    _show(plain, json, svg)
    return 2 if kernels and plain["skipped"] else 0


def _show(plain: dict[str, Any], json: Path | None, svg: Path | None) -> None:
    """Print and write what was measured."""
    from halfulp.report.panels import draw_panels
    from halfulp.report.terminal import console, print_tables

    def show() -> None:
        *others, last = plain["tables"]
        print_tables([*({**table, "caption": None} for table in others), last])
        for name, reason in plain["skipped"].items():
            console().print(f"{name}: not timed, {reason}", style="dim", highlight=False)

    tell(plain, json, show, svg, lambda: draw_panels(plain["figures"]))


def _setting(text: str) -> Setting:
    from halfulp.experiments.bench import Setting

    sizes = parse_sizes(text)
    if sizes.causal and sizes.n_query != sizes.n_key:
        raise ValueError(
            f"shapes={text!r}: accepted by bench with causal is one number of tokens; kernels"
            " disagree which keys the first query sees"
        )
    return Setting(
        (sizes.batch, sizes.heads, sizes.n_query, sizes.head_dim),
        sizes.causal,
        None if sizes.key_heads == sizes.heads else sizes.key_heads,
        None if sizes.n_key == sizes.n_query else sizes.n_key,
    )
