"""Triton's interpreter and the emulator on the same call: what the tests of every Triton kernel
share.

The interpreter computes exp2 and log2 with numpy, whose last bits are not torch's; here both sides
take torch's, and the kernels' tanh, so that what is compared is the kernel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

from halfulp import algorithms
from halfulp.algorithms import Kept, Problem
from halfulp.calls import Result
from halfulp.kernels import triton_attention as door
from halfulp.kernels.triton_configs import Config
from halfulp.kernels.triton_scores import tanh
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, Recipe, Shift, Step
from halfulp.testing import Inputs
from tests.kernels.asked import Options

assert triton.knobs.runtime.interpret, "run by test_triton_interpreter.py, with TRITON_INTERPRET=1"

STOCK = BF16_FLASH2.with_(base="2")
RECIPES = {
    "halfulp": BF16_HALFULP,
    "stock": STOCK,
    "published": STOCK.with_(shift=Shift("stabilized", beta=7.0)),
    "exact_delta": STOCK.with_(delta_from="probabilities"),
}
TILES = Config(16, 32, 4, 1)
WIDE = Config(32, 32, 4, 1)
UNIT = 1 / math.log2(math.e)  # the scale at which base-2 scores are q·k itself


def torch_unary(function: Any) -> Any:
    return lambda self, arg: self.unary_op(
        arg, lambda x: function(torch.from_numpy(np.ascontiguousarray(x))).numpy()
    )


@pytest.fixture(autouse=True)
def same_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_exp2", torch_unary(torch.exp2))
    monkeypatch.setattr(InterpreterBuilder, "create_log2", torch_unary(torch.log2))
    monkeypatch.setattr(torch, "tanh", kernels_tanh)
    monkeypatch.setattr(interpreter, "_patch_lang", patched_once)


_patch_lang = interpreter._patch_lang


def patched_once(function: Any) -> Any:
    """Triton looks through its whole language for every function that a kernel calls, which took
    more than a third of these tests' time; what is patched already needs no second look.
    """
    langs = [lang for lang in (tl, tl.core) if lang in function.__globals__.values()]
    if any(tl.core.is_builtin(lang.load) for lang in langs):
        return _patch_lang(function)
    return None


@triton.jit
def _tanh_kernel(X, Out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(Out + at, tanh(tl.load(X + at, mask=inside, other=0.0)), mask=inside)


def kernels_tanh(x: Tensor) -> Tensor:
    """The kernels' tanh of every element."""
    flat = x.contiguous()
    out = torch.empty_like(flat)
    _tanh_kernel[(-(-flat.numel() // 4096),)](flat, out, flat.numel(), BLOCK=4096)
    return out


def run(
    inputs: Inputs, options: Options, tiles: Config = TILES, grad_lse: Tensor | None = None
) -> Any:
    """The kernels' result as `testing.attend` gives an emulation's."""
    q, k, v, do = inputs
    saved = door.forward(*options.of(q, k, v), config=tiles)
    grads = door.backward(
        *options.of(q, k, v), saved, do, grad_lse, configs={"query": tiles, "key": tiles}
    )
    return Result(saved.out, saved.lse, *grads[:3])


def emulated(
    recipe: Recipe, inputs: Inputs, options: Options, tiles: Config = TILES
) -> tuple[Problem, Kept]:
    """The problem as backend "torch" reads it but in the kernels' blocks, and what the forward
    pass keeps.
    """
    step = Step(recipe.with_(block_query=tiles.block_m, block_key=tiles.block_n))
    call, _ = options.of(*inputs.operands)
    problem = Problem.read(call, step)
    return problem, algorithms.attend(problem)


def exact_inputs(seed: int, length: int, key_length: int) -> Inputs:
    """Numbers so small and few that every sum of products is exact in fp32, in any order; scores
    have fractions.
    """
    draw = torch.Generator().manual_seed(seed)

    def whole(limit: int, *shape: int) -> Tensor:
        return torch.randint(-limit, limit + 1, (1, 2, *shape), generator=draw).bfloat16()

    return Inputs(
        whole(4, length, 16) / 16,
        whole(1, key_length, 16),
        whole(3, key_length, 16),
        grad_out=whole(2, length, 16),
    )
