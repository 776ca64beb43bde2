"""Kernels of Triton's tutorials, run on a CPU by Triton's interpreter.

No package has them: TRITON_TUTORIALS names the folder python/tutorials of a checkout of Triton.
What is read of a tutorial are its imports, functions and classes; its tests, benchmarks and GPU are
not. The softmax has no backward pass, the attention is slow in the interpreter: neither is here.
`TRITON_TUTORIALS=… halfulp audit --op layer_norm …/triton_tutorials.py:layer_norm` audits one.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import tempfile
from pathlib import Path
from types import ModuleType

os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are decorated, below

from torch import Tensor

AUDITED = {"layer_norm": "layer_norm"}


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
        or (isinstance(node, ast.FunctionDef) and "perf_report" not in ast.dump(node))
    ]
    source = ast.unparse(tree).replace("device='cuda'", "device='cpu'")
    source = "DEVICE = 'cpu'\n" + source
    own = Path(tempfile.mkdtemp()) / "tutorial.py"  # the interpreter reads a kernel's file
    own.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"tutorial_{name[:2]}", own)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_LAYER_NORM = _tutorial("05-layer-norm.py") if "TRITON_TUTORIALS" in os.environ else None


def layer_norm(input: Tensor, shape: object, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The fifth tutorial's LayerNorm; its gradients of weight and bias are summed over tokens in
    256 streams of the operands' format.
    """
    module = _LAYER_NORM or _tutorial("05-layer-norm.py")
    return module.LayerNorm.apply(input, shape, weight, bias, eps)
