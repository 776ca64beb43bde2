"""What a bug report needs: `halfulp --version` in a few lines, and `halfulp doctor`, which tries
what can be tried here and says what would mend the rest.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfulp import __version__, native
from halfulp.cli.shell import PROGRAM, check_files, say, tell

_OPTIONAL = {
    "triton": "kernels on GPUs",
    "transformers": "attn_implementation and the audit of its layers",
    "diffusers": "its attention processors",
    "flash_attn": "patch and the audit of its kernels",
    "tiktoken": "halfulp tokens --tokenizer gpt2",
    "sklearn": "pictures of digits to train on",
    "tensorboard": "halfulp train --tensorboard",
    "wandb": "halfulp train --wandb",
}
"""What each package that may be missing is for."""


def version_text() -> str:
    """Return halfulp's version and those of what decides its bits, without importing torch."""
    packages = [f"Python {platform.python_version()}"]
    packages += [f"{name} {_version(name) or 'missing'}" for name in ("torch", "numpy", "triton")]
    return (
        f"{PROGRAM} {__version__}\n{', '.join(packages)}\n"
        f"{platform.platform()}\nnative library: {native.missing() or native.best_isa()}"
    )


def doctor(*, json: Path | None = None) -> int:
    """Say what works here, what does not, and what would mend it: halfulp doctor

    Exit code 0: attention works. 1: it does not.

    Args:
        json: File to write what was found to; - prints it instead of the text.
    """
    check_files(json)
    found = examine()
    tell(found, json, lambda: say(_text(found)))
    return 0 if all(check["works"] for check in found["checks"] if check["needed"]) else 1


def examine() -> dict[str, Any]:
    """Return versions, machine and checks as plain data."""
    from halfulp.runs.machine import describe_machine, describe_versions, git_revision

    checks = [
        _check("attention, forward and backward", _attention, needed=True),
        _check("native library", _native, mend="install halfulp again where a C++ compiler is"),
        _check("GPU", _gpu, mend="attention runs on the CPU without one"),
    ]
    for name, use in _OPTIONAL.items():
        checks.append(
            {
                "what": name,
                "works": find_spec(name) is not None,
                "needed": False,
                "said": _version(name) or "not installed",
                "mend": f"it is for {use}",
            }
        )
    return {
        "halfulp": __version__,
        "revision": git_revision(),
        "versions": describe_versions(),
        "machine": describe_machine(),
        "checks": checks,
    }


def _check(
    what: str, attempt: Callable[[], str], *, needed: bool = False, mend: str = ""
) -> dict[str, Any]:
    try:
        works, said = True, attempt()
    except ValueError as error:
        works, said = False, str(error)
    except Exception as error:  # whatever is broken here is what the user came to see
        works, said = False, f"{type(error).__name__}: {error}"
    return {"what": what, "works": works, "needed": needed, "said": said, "mend": mend}


def _attention() -> str:
    """A small call against its exact values; raises where the errors are beyond bf16's."""
    import torch

    from halfulp.attention import attention, explain_dispatch, golden

    draw = torch.Generator().manual_seed(0)
    query, key, value, upstream = (
        torch.randn(1, 2, 64, 32, generator=draw).to(torch.bfloat16) for _ in range(4)
    )
    truth = golden(query, key, value, upstream, is_causal=True)
    backend = explain_dispatch(query, key, value, is_causal=True).backend
    for x in (query, key, value):
        x.requires_grad_()
    out = attention(query, key, value, is_causal=True)
    grads = torch.autograd.grad(out, (query, key, value), upstream)
    found: dict[str, tuple[torch.Tensor, Any]] = {
        "O": (out.detach(), truth.out),
        "dQ": (grads[0], truth.grad_query),
        "dK": (grads[1], truth.grad_key),
        "dV": (grads[2], truth.grad_value),
    }
    said = []
    for name, (got, exact) in found.items():
        error = float((got.double() - exact).norm() / exact.norm())
        if not error < 0.02:  # bf16 holds 3 digits; a call that works stays below 0.01
            raise ValueError(f"{name} is wrong by {error:.1%} on backend {backend}")
        said.append(f"{name} {error:.1e}")
    return f"backend {backend}, relative errors in bf16: {', '.join(said)}"


def _native() -> str:
    return f"built, {native.best_isa()}"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        raise ValueError("none seen" if built else "this build of torch is for CPUs")
    return torch.cuda.get_device_name(0)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version({"sklearn": "scikit-learn"}.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    known = {key: value for key, value in found["machine"].items() if value}
    if "memory" in known:
        known["memory"] = f"{known['memory'] / 2**30:.1f} GiB"
    machine = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in known.items())
    lines = [f"halfulp {found['halfulp']} ({found['revision'] or 'installed'})", versions, machine]
    for check in found["checks"]:
        mend = f" ({check['mend']})" if check["mend"] and not check["works"] else ""
        lines.append(f"{'✓' if check['works'] else '✗'} {check['what']}: {check['said']}{mend}")
    return "\n".join(lines)
