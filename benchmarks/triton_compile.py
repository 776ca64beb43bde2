"""The kernels compiled for chips that are not at hand: registers, shared memory, spills,
instructions per score.

The same launch plan that runs on a GPU is compiled for a named target, so the figures are of the
code that will run. What a figure cannot say without the chip is time.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from halfulp.calls import Call, Dropout, Saved, Sees
from halfulp.kernels.triton_backward import rows_kernel
from halfulp.kernels.triton_configs import Config
from halfulp.kernels.triton_launch import Launch, Target, backward_launches, forward_launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
KERNELS = ("forward", "query", "key")
VARIANTS = (
    "",
    "boolean",
    "additive",
    "softcap",
    "sinks",
    "dropout",
    "all",
)  # options of a call; "all" has a window and is causal too


@dataclass(frozen=True)
class Compiled:
    """What one compiled kernel takes, and what its inner loop does for one score."""

    registers: int  # a thread
    shared: int  # bytes a block
    spills: int  # bytes of stack a thread
    # a thread and score, by kind, in the loop without masks; {}: no loop, or AMD
    instructions: dict[str, float]


def launches(
    recipe: str = "halfulp",
    dim: int = 128,
    *,
    causal: bool = False,
    variant: str = "",
    target: str = "sm_90",
    dtype: torch.dtype = torch.bfloat16,
    config: Config | None = None,
    shape: tuple[int, int, int] = (1, 16, 4096),
) -> dict[str, Launch]:
    """The launches of one call by kind ("forward", "rows", "query", "key", "delta" where the recipe
    sums it over P).

    They are planned on tensors without memory; `shape` is B, H, N.
    """
    q, k, v, do = (torch.empty(*shape, dim, dtype=dtype, device="meta") for _ in range(4))
    call = replace(
        Call(q, k, v, Sees(causal), dim**-0.5), **_variant(variant, shape, dtype, causal)
    )
    chip = TARGETS[target]
    capability = Target(chip.arch, packs=True) if chip.backend == "cuda" else Target(0)
    forward, saved = forward_launch(call, recipe, capability, config)
    configs = None if config is None else {"query": config, "key": config}
    backward, _ = backward_launches(call, recipe, Saved(*saved), do, None, capability, configs)
    return {"forward": forward} | backward


def _variant(
    variant: str, shape: tuple[int, int, int], dtype: torch.dtype, causal: bool
) -> dict[str, Any]:
    """The fields of a call that a variant stands for; its mask is one for all batches and heads."""
    _, heads, length = shape
    boolean, additive = (
        torch.empty(length, length, dtype=kind, device="meta") for kind in (torch.bool, dtype)
    )
    each: dict[str, dict[str, Any]] = {
        "boolean": {"sees": Sees(causal, mask=boolean)},
        "additive": {"sees": Sees(causal, mask=additive)},
        "softcap": {"softcap": 50.0},
        "sinks": {"sinks": torch.empty(heads, device="meta")},
        "dropout": {"dropout": Dropout(0.1, 0)},
        "": {},
    }
    every = {name: value for one in each.values() for name, value in one.items()}
    if variant == "all":
        return every | {"sees": Sees(True, (1000, -1), 0, additive)}
    return each[variant]


def compile_launch(launch: Launch, target: str) -> Any:
    """Triton's compiled kernel of one launch for one of TARGETS.

    What a launch is specialized on (strides of 1, multiples of 16, pointers that 32 bits reach) is
    asked of Triton itself, as its own launches do.
    """
    kernel, backend = launch.kernel, make_backend(TARGETS[target])
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given, specialized, _ = bind(**launch.arguments)
    values, types = list(given.values()), [kind for kind, _ in specialized]
    marks = ["" if kind == "constexpr" else mark for kind, mark in specialized]
    constants = {
        path: get_iterable_path(values, path)
        for path in find_paths_if(types, lambda _, kind: kind == "constexpr")
    }
    attributes = {
        path: backend.parse_attr(get_iterable_path(marks, path))
        for path in find_paths_if(marks, lambda _, mark: isinstance(mark, str))
    }
    signature = dict(zip(kernel.arg_names, types, strict=True))
    source = ASTSource(kernel, signature, constants, attributes)
    schedule = {
        "num_warps": launch.config.warps,
        "num_stages": launch.config.stages,
        "enable_fp_fusion": True,
    }
    return triton.compile(source, target=TARGETS[target], options=schedule)


def measure(launch: Launch, target: str) -> Compiled:
    """Compile one launch and read what it takes from the compiled code."""
    compiled = compile_launch(launch, target)
    if TARGETS[target].backend == "hip":
        text = compiled.asm["amdgcn"]
        # scalars that spill go to lanes of registers
        spills = _number(r"\.private_segment_fixed_size:\s*(\d+)", text)
        return Compiled(
            _number(r"\.vgpr_count:\s*(\d+)", text), compiled.metadata.shared, spills, {}
        )
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = _cuobjdump("-res-usage", binary)
        assembly = _cuobjdump("-sass", binary)
    scores = launch.config.block_m * launch.config.block_n / (32 * launch.config.warps)
    found = {} if launch.kernel is rows_kernel else inner_loop(assembly)
    counts = {kind: n / scores for kind, n in found.items()}
    spills = _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
    return Compiled(_number(r"REG:(\d+)", usage), compiled.metadata.shared, spills, counts)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"compiled code without {pattern!r}")
    return int(found[1])


def _cuobjdump(option: str, binary: Path) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, binary], capture_output=True, text=True, check=True).stdout


# What an instruction is, by how its name begins; the first match counts, and the rest is "other".
KINDS = {
    "mma": ("HMMA", "HGMMA", "UTC", "QGMMA"),
    "exp2": ("MUFU",),
    "convert": ("F2FP", "F2F", "HADD2"),
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP", "FRND", "FCHK"),
    "memory": ("LD", "ST", "UTMA", "CCTL"),
    "uniform": ("U", "R2UR"),
    "integer": (
        "IMAD",
        "IADD",
        "LOP",
        "SHF",
        "PRMT",
        "ISETP",
        "SEL",
        "LEA",
        "MOV",
        "VIADD",
        "PLOP",
        "IMNMX",
        "VIMN",
    ),
}


def inner_loop(assembly: str) -> dict[str, int]:
    """Instructions of the loop over tiles without masks, by kind, with their "total"; from
    `cuobjdump -sass`.

    Among the loops that hold both matrix products and exponentials it is the shortest: a mask only
    adds to it.
    """
    code = [
        (int(m[1], 16), m[2].strip())
        for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+([^/;]*[A-Z][^;]*);", assembly)
    ]
    loops = []
    for end, text in code:
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if jump and int(jump[1], 16) < end:
            names = [_opcode(t) for at, t in code if int(jump[1], 16) <= at <= end]
            kinds = Counter(map(_kind, names))
            if kinds["mma"] >= 4 and kinds["exp2"] >= 4:
                loops.append(dict(kinds) | {"total": len(names)})
    if not loops:
        raise ValueError("compiled code without a loop of products and exponentials")
    return min(loops, key=lambda kinds: kinds["total"])


def _opcode(text: str) -> str:
    words = text.split()
    return words[1] if words[0].startswith("@") and len(words) > 1 else words[0]


def _kind(opcode: str) -> str:
    return next((kind for kind, starts in KINDS.items() if opcode.startswith(starts)), "other")


def row_name(target: str, dim: int, kind: str, recipe: str, causal: bool, variant: str = "") -> str:
    """The key of one kernel in the table."""
    return " ".join(
        (
            target,
            str(dim),
            kind,
            recipe,
            *(["causal"] if causal else []),
            *([variant] if variant else []),
        )
    )


def row(
    target: str, dim: int, kind: str, recipe: str, causal: bool, variant: str = ""
) -> dict[str, Any]:
    """One row of the table: tile sizes and what the compiled kernel takes, its instructions to two
    places. bf16.
    """
    launch = launches(recipe, dim, causal=causal, variant=variant, target=target)[kind]
    measured = asdict(measure(launch, target))
    instructions = {
        name: round(count, 2) for name, count in sorted(measured["instructions"].items())
    }
    return measured | {"instructions": instructions, "config": list(launch.config[:4])}


def rows() -> list[tuple[str, int, str, str, bool, str]]:
    """What the table holds: the two recipes to be compared, and options in the recipe that takes
    more, on every chip.

    Sinks are read by the forward kernel alone.
    """
    plain = [
        (target, dim, kind, recipe, causal, "")
        for causal in (False, True)
        for target in TARGETS
        for dim in (64, 128, 256)
        for kind in KERNELS
        for recipe in ("halfulp", "stock")
    ]
    return plain + [
        (target, dim, kind, "halfulp", False, variant)
        for target in TARGETS
        for dim in (64, 128)
        for kind in KERNELS
        for variant in VARIANTS
        if variant and (variant != "sinks" or kind == "forward")
    ]


def shipped_rows() -> dict[str, dict[str, Any]]:
    """The table beside this file, made with the triton version that it names under "triton"."""
    text = Path(__file__).with_name("triton_compiled.json").read_text("utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found
