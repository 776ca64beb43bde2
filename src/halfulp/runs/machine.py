"""Where a run was made: versions, git revision and machine, so that its figures can be compared
with another's.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PACKAGES = ("halfulp", "torch", "numpy", "scipy", "safetensors", "transformers")


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed here."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found


def describe_machine() -> dict[str, Any]:
    """Return system, processor, cores, memory in bytes, the vector instructions and threads that
    torch uses, and how many processes work together.
    """
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if hasattr(os, "sysconf")
        else None,
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "processes": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
    }


@cache
def source_digest(*names: str) -> str:
    """Return a digest of this package's source files, all or those in some folders and files of it,
    and of the native library that was built beside them.
    """
    top = Path(__file__).parents[1]
    files = {f for name in names or (".",) for f in ((top / name).rglob("*.py"))}
    files |= {top / name for name in names if name.endswith(".py")} | {*top.glob("libhalfulp.*")}
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(hashlib.sha256(file.read_bytes()).digest())
        whole.update(str(file.relative_to(top)).encode())
    return whole.hexdigest()


@cache
def bits_of_machine() -> tuple[str, ...]:
    """Return what of this machine may change the bits of a result."""
    told = describe_machine()
    known = ("system", "architecture", "processor", "vector_instructions")
    return tuple(str(told[name]) for name in known)


def bits_of_process() -> tuple[Any, ...]:
    """Return the settings of this process, threads aside, that may change the bits of a result."""
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )


@cache  # of what this process has imported
def git_revision() -> str | None:
    """Return the commit of the source tree that this package runs from, with "+" if it was changed
    since; else None.
    """
    source = Path(__file__).parents[2]
    if not (source.parent / ".git").exists():
        return None
    commit = _git(source, "rev-parse", "HEAD")
    return (
        None
        if commit is None
        else commit + ("+" if _git(source, "status", "--porcelain", "--", ".") else "")
    )


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unknown"
