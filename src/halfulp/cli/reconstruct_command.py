"""The command that says what a kernel does: `halfulp reconstruct`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from halfulp.cli.shell import check_files, load, tell


def reconstruct(
    target: str,
    /,
    *,
    op: str = "attention",
    dtype: str = "bfloat16",
    device: str = "cpu",
    form: str | None = None,
    effort: int = 2500,
    seed: int = 0,
    in_process: bool = False,
    call_seconds: float = 120.0,
    call_gigabytes: float = 8.0,
    json: Path | None = None,
) -> int:
    """Find which arithmetic a kernel's errors come from: halfulp reconstruct mykernel.py:attention

    The kernel is called on a dozen small inputs. Recipes, and faults of structure, are emulated on
    the same inputs until one errs as the kernel does; what none explains is said, with where it
    sits. Exit code 0: every result's error is explained. 1: some is not.

    Args:
        target: A built-in name (`halfulp ls targets`), package.module:function or
            path/file.py:function, as of `halfulp audit`.
        op: The operation: one of `halfulp ls operations`, or a folder that defines another.
        dtype: Of query, key, value and their gradients: bfloat16, float16 or float32.
        device: Where the target runs, such as cpu or cuda; candidates are emulated on the CPU.
        form: How a function takes its tensors, in a line such as 'qkv[B,N,3,H,D]' (docs/forms.md);
            without it what its parameters are called, and its first result, say it.
        effort: Emulations after which the most expensive parts of the search are left out; a
            thousand take one or two seconds. Of attention alone.
        seed: Of the inputs.
        in_process: Call the target in this process, not in one of its own.
        call_seconds: After how long a call is given up.
        call_gigabytes: Of memory that the target's process may take beyond what it starts with.
        json: File to write everything to; - prints it instead of the tables.
    """
    load("halfulp.reconstruct")
    from halfulp.operations import ATTENTION
    from halfulp.reconstruct import OperationReconstruction, Reconstruction, reconstruct_operation
    from halfulp.reconstruct import reconstruct as search
    from halfulp.report.reconstruct_table import print_operation, print_reconstruction
    from halfulp.report.terminal import console
    from halfulp.targets import CallLimits, isolated, resolve

    check_files(json)
    limits = CallLimits(call_seconds, call_gigabytes, copied=True)
    given = resolve(target, operation=op, form=form) if in_process else None
    opened = nullcontext(given) if given else isolated(target, device, limits, op, form)
    found: Reconstruction | OperationReconstruction
    with opened as chosen:
        if op == ATTENTION:
            found = search(chosen, dtype=dtype, device=device, effort=effort, seed=seed)
        else:
            found = reconstruct_operation(chosen, op, dtype=dtype, device=device, seed=seed)
    plain, show = found.as_dict(), print_reconstruction if op == ATTENTION else print_operation
    tell(plain, json, lambda: show(plain, console()))
    return 0 if found.understood else 1
