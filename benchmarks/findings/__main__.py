"""Audit the kernels that people use and write the tables of docs/findings.md.

usage: python -m benchmarks.findings [--only GROUP ...] [--kernel NAME ...] [--dtype DTYPE ...]
       [--seeds 0 1 2 3 4] [--json FILE] [--write docs/findings.md]

Every kernel is audited by the command line, in a process of its own, as a reader would do it again;
the groups kept_results and jax_kept_results are measured here.
A group whose package is not installed is left out and named. With --json every verdict is written
as it comes, and what the file has already is not audited again, but for what ended in an error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.findings import kept_results
from rich.console import Console
from rich.progress import track

from halfulp.operations import operation_named, operation_names

HERE = Path(__file__).parent
ALL = ("bfloat16", "float16", "float32")
# The dtypes of each group's audits. Triton's interpreter truncates where it makes bf16.
GROUPS = {
    "attention": ("torch", ALL),
    "pytorch": ("torch", ALL),
    "pytorch_options": ("torch", ("bfloat16",)),
    "pytorch_compiled": ("torch", ("bfloat16",)),
    "kept_results": ("torch", ("bfloat16", "float16")),
    "transformers_models": ("transformers", ("bfloat16",)),
    "torchao_kernels": ("torchao", ("bfloat16",)),
    "bitsandbytes_kernels": ("bitsandbytes", ("bfloat16",)),
    "liger_kernels": ("liger-kernel", ("float16", "float32")),
    "triton_tutorials": ("triton", ("float16", "float32")),
    "jax_kernels": ("jax", ("bfloat16",)),
    "jax_kept_results": ("jax", ("bfloat16", "float16")),
    "flax_kernels": ("flax", ("bfloat16", "float32")),
    "mlx_kernels": ("mlx", ALL),
}
ATTENTION = ("sdpa:math", "sdpa:flash", "eager", "transformers:sdpa", "flex")
MARK = "<!-- tables of python -m benchmarks.findings -->"


def subjects(group: str) -> Iterator[tuple[str, str]]:
    """Operation and target of every kernel of a group, as the command line names them."""
    if group == "attention":
        yield from (("attention", name) for name in ATTENTION)
    elif group == "pytorch":
        for op in operation_names():
            yield from ((op, target.name) for target in operation_named(op).targets)
    elif group.endswith("kept_results"):
        yield from ((f"{group}/gradient", name) for name in gradients_of(group))
    else:
        path = HERE / f"{group}.py"
        for name, op in audited(path).items():
            yield op, f"{path.relative_to(HERE.parent.parent)}:{name}"


def gradients_of(group: str) -> dict[str, kept_results.Case]:
    """The functions of kept_results, or of jax_kept_results, which needs its package."""
    return importlib.import_module(f"benchmarks.findings.{group}").CASES


def audited(path: Path) -> dict[str, str]:
    """The file's own AUDITED, from a process of its own: some set what cannot be taken back."""
    code = (
        "import json, runpy, sys;print('\\n' + json.dumps(runpy.run_path(sys.argv[1])['AUDITED']))"
    )
    told = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    if told.returncode:
        raise SystemExit(f"{path}: {told.stderr.strip().splitlines()[-1]}")
    return json.loads(told.stdout.splitlines()[-1])


def verdict(op: str, target: str, dtype: str, seed: int) -> dict[str, Any]:
    """What `halfulp audit` says, or kept_results of a function that is no operation."""
    row: dict[str, Any] = {"op": op, "target": target, "dtype": dtype, "seed": seed}
    group, _, what = op.partition("/")
    if what == "gradient":
        return row | kept_results.verdict(gradients_of(group)[target], dtype, seed)
    command = ["audit", "--op", op, "--dtype", dtype, "--seed", str(seed), target]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "audit.json"
        ran = subprocess.run(
            [sys.executable, "-m", "halfulp", *command, "--json", str(file)],
            capture_output=True,
            text=True,
        )
        found = json.loads(file.read_text(encoding="utf-8"))[0] if file.exists() else None
    if found is None:
        return row | {"verdict": "error", "reason": (ran.stderr or ran.stdout).strip()[-300:]}
    kept = ("verdict", "reason", "smallest", "missing", "left_out", "tests")
    return row | {name: found.get(name) for name in kept}


def main() -> None:
    """Audit, keep, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=tuple(GROUPS), help="a group, repeatable"
    )
    parser.add_argument("--kernel", nargs="*", help="kernels by name; all where not given")
    parser.add_argument(
        "--dtype", nargs="*", choices=ALL, help="those of the group where not given"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument(
        "--json", type=Path, help="keep every verdict in this file, and go on from it"
    )
    parser.add_argument("--write", type=Path, help="replace the tables of this page")
    options = parser.parse_args()
    if options.write and options.only and not options.json:
        parser.error("--write with --only: give --json FILE too, which holds the other groups")
    rows = (
        json.loads(options.json.read_text("utf-8"))
        if options.json and options.json.exists()
        else []
    )
    rows = [row for row in rows if row["verdict"] != "error"]
    done = {(row["op"], row["target"], row["dtype"], row.get("seed", 0)) for row in rows}
    console = Console(stderr=True)
    for group in options.only or GROUPS:
        package, dtypes = GROUPS[group]
        try:
            release = version(package)
        except PackageNotFoundError:
            console.print(f"{group}: left out, {package} is not installed")
            continue
        if group == "triton_tutorials" and "TRITON_TUTORIALS" not in os.environ:
            console.print(f"{group}: left out, TRITON_TUTORIALS names no folder of tutorials")
            continue
        asked = [
            (*s, dtype, seed)
            for seed in options.seeds
            for s in subjects(group)
            for dtype in options.dtype or dtypes
            if not options.kernel or s[1].rpartition(":")[2] in options.kernel
        ]
        # stochastic_round gives bf16 whatever it is given
        asked = [s for s in asked if s[0] != "stochastic_round" or s[2] == "bfloat16"]
        if group == "triton_tutorials":  # its attention casts to float16
            asked = [s for s in asked if s[0] != "attention" or s[2] == "float16"]
        asked = [s for s in asked if s not in done]
        for one in track(asked, description=group, console=console):
            rows.append(verdict(*one) | {"group": group, "version": release})
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    told = tables(rows)
    print(told)
    if options.write:
        before, _, _ = options.write.read_text("utf-8").partition(MARK)
        options.write.write_text(f"{before}{MARK}\n\n{told}\n", encoding="utf-8")


def tables(rows: list[dict[str, Any]]) -> str:
    """A table a group, in Markdown: one line a kernel and dtype, of its first seed, and how many of
    its seeds agree where there are more.
    """
    lines = []
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        package = GROUPS[group][0]
        lines += [f"### {group} ({package} {own[0]['version']})", ""]
        lines += ["| kernel | operation | dtype | verdict | figure |", "|---|---|---|---|---|"]
        kernels: dict[Any, list[dict[str, Any]]] = {}
        for row in own:
            kernels.setdefault((row["op"], row["target"], row["dtype"]), []).append(row)
        for row, *others in kernels.values():
            name = row["target"].rpartition(":")[2] if "/" in row["target"] else row["target"]
            op = row["op"].rpartition("/")[2]
            how = row["verdict"]
            if others:
                agree = 1 + sum(other["verdict"] == how for other in others)
                how += f", {agree} of {1 + len(others)} seeds"
            lines.append(f"| `{name}` | {op} | {row['dtype']} | {how} | {_figure(row)} |")
        lines.append("")
    return "\n".join(lines)


def _figure(row: dict[str, Any]) -> str:
    if row["verdict"] == "sound":
        return f"{row['tests']} tests, none fails"
    return " ".join(str(row["reason"]).replace("|", "\\|").split())


if __name__ == "__main__":
    main()
