"""Kernels of Triton's tutorials, run on a CPU by Triton's interpreter.

No package has them: TRITON_TUTORIALS names the folder python/tutorials of a checkout of Triton.
What is read of a tutorial are its imports, functions and classes; its tests, benchmarks and GPU are
not. The softmax has no backward pass. The attention takes float16 and lengths that are multiples of
128 alone, and is slow in the interpreter.
`TRITON_TUTORIALS=… halfulp audit --op layer_norm …/triton_tutorials.py:layer_norm` audits one.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are decorated, below

import torch
from torch import Tensor

AUDITED = {"layer_norm": "layer_norm", "softmax": "softmax", "attention": "attention"}
# What the tutorials ask of a GPU, and the one tiling that is tried.
_GIVEN = """
import torch, triton
DEVICE = 'cpu'
is_hip = is_cuda = is_blackwell = is_hopper = supports_host_descriptor = lambda: False
configs = [triton.Config({'BLOCK_M': 64, 'BLOCK_N': 32}, num_stages=2, num_warps=4)]
"""


@cache
def _tutorial(name: str) -> ModuleType:
    """A tutorial without what it runs when it is imported, on the CPU."""
    folder = os.environ.get("TRITON_TUTORIALS")
    if folder is None:
        raise RuntimeError("TRITON_TUTORIALS is not set: the folder python/tutorials of Triton")
    tree = ast.parse((Path(folder) / name).read_text(encoding="utf-8"))
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef)
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, kept)
        or (
            isinstance(node, ast.FunctionDef)
            and "perf_report" not in ast.dump(node)
            and not node.name.startswith(("is_", "supports_", "test_"))
        )
    ]
    source = _GIVEN + ast.unparse(tree).replace("device='cuda'", "device='cpu'")
    own = Path(tempfile.mkdtemp()) / "tutorial.py"  # the interpreter reads a kernel's file
    own.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"tutorial_{name[:2]}", own)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layer_norm(input: Tensor, shape: object, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The fifth tutorial's LayerNorm; its gradients of weight and bias are summed over tokens in
    256 streams of the operands' format.
    """
    return _tutorial("05-layer-norm.py").LayerNorm.apply(input, shape, weight, bias, eps)


def softmax(input: Tensor, _: int = -1) -> Tensor:
    """The second tutorial's kernel, launched for as many programs as 4; forward alone."""
    module, out = _tutorial("02-fused-softmax.py"), torch.empty_like(input)
    rows, columns = input.shape
    module.softmax_kernel[(4,)](
        out, input, input.stride(0), out.stride(0), rows, columns,
        BLOCK_SIZE=module.triton.next_power_of_2(columns), num_stages=2,
    )  # fmt: skip
    return out


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> Tensor:
    """The sixth tutorial's attention."""
    if query.shape != key.shape or query.shape != value.shape or query.shape[2] % 128:
        raise NotImplementedError("keys other than a query each, or no multiple of 128")
    if query.shape[2] > 512:
        raise NotImplementedError("more than 512 tokens take minutes in the interpreter")
    if query.dtype != torch.float16:
        raise NotImplementedError("the tutorial casts to float16")
    contiguous = (x.contiguous() for x in (query, key, value))
    return _tutorial("06-fused-attention.py")._attention.apply(*contiguous, is_causal, scale, False)
