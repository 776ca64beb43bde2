"""bitsandbytes' NF4 and AdamW on a CPU.

Needs the package bitsandbytes.
`halfulp audit --op benchmarks/findings/nf4 benchmarks/findings/bitsandbytes_kernels.py:nf4`.
"""

from __future__ import annotations

import bitsandbytes
import bitsandbytes.functional as bnb
import torch
from torch import Tensor

AUDITED = {"nf4": "benchmarks/findings/nf4", "adamw_step": "adamw_step"}


def nf4(input: Tensor) -> Tensor:
    """quantize_4bit and dequantize_4bit, blocks of 64."""
    codes, state = bnb.quantize_4bit(input, blocksize=64, quant_type="nf4")
    return bnb.dequantize_4bit(codes, state)


def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The step of bitsandbytes.optim.AdamW with 32-bit states."""
    master = torch.nn.Parameter(param.clone())
    optimizer = bitsandbytes.optim.AdamW([master], lr, (beta1, beta2), eps, weight_decay)
    state = {"step": step - 1, "state1": exp_avg.clone(), "state2": exp_avg_sq.clone()}
    optimizer.initialized = True
    optimizer.state[master] = state
    master.grad = grad.to(param.dtype)
    optimizer.step()
    moved = optimizer.state[master]
    return master.detach(), moved["state1"], moved["state2"]
