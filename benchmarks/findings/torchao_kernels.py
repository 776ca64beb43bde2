"""torchao's quantizers, float8 linear layer, stochastic rounding and AdamW on a CPU.

Needs the package torchao.
`halfulp audit --op quantize benchmarks/findings/torchao_kernels.py:quantize`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import _fp32_to_bf16_sr
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

AUDITED = {
    "quantize": "quantize",
    "stochastic_round": "stochastic_round",
    "adamw_step": "adamw_step",
    "adamw_low": "adamw_low",
    "float8_linear": "quantized_linear",
}
_ELEMENTS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp4": torch.float4_e2m1fn_x2,
}


def quantize(input: Tensor, *, format: str) -> Tensor:
    """Its MX and NVFP4 tensors, with the scales of the standard (ScaleCalculationMode.FLOOR)."""
    if format == "nvfp4":
        whole = per_tensor_amax_to_scale(input.abs().amax().float())
        return NVFP4Tensor.to_nvfp4(input, per_tensor_scale=whole).dequantize(torch.float32)
    if format not in _ELEMENTS:
        raise NotImplementedError(f"torchao has no {format}")
    found = MXTensor.to_mx(input, _ELEMENTS[format], 32, scaling_mode=ScaleCalculationMode.FLOOR)
    return found.dequantize(torch.float32)


def stochastic_round(input: Tensor) -> Tensor:
    """What torchao's optimizers write bf16 weights with."""
    return _fp32_to_bf16_sr(input.float())


def float8_linear(
    input: Tensor, weight: Tensor, *, format: Literal["fp8_tensor", "fp8_row"]
) -> Tensor:
    """Its Float8Linear by the recipes tensorwise and rowwise, whose products are emulated in the
    operands' dtype where there is no GPU.
    """
    recipe = {"fp8_tensor": "tensorwise", "fp8_row": "rowwise"}[format]
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    rows, width = weight.shape
    layer = Float8Linear(width, rows, bias=False, config=config)
    return matmul_with_hp_or_float8_args.apply(input, weight.t(), layer.linear_mm_config, config)


def adamw_low(
    param: Tensor,
    grads: Tensor,
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
    """Steps of torchao's AdamW with bf16_stochastic_round, moments in fp32."""
    moved = [x.clone() for x in (param, exp_avg, exp_avg_sq)]
    rates = (torch.tensor(lr), beta1, beta2, weight_decay, eps)
    for number, grad in enumerate(grads):
        at = torch.tensor(float(step + number))
        single_param_adam(moved[0], grad, at, moved[1], moved[2], None, *rates, True, True)
    return moved[0], moved[1], moved[2]


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
    """The step of torchao's AdamW, weights and states in their own dtypes."""
    moved = [x.clone() for x in (param, exp_avg, exp_avg_sq)]
    rates = (torch.tensor(lr), beta1, beta2, weight_decay, eps)
    single_param_adam(
        moved[0], grad, torch.tensor(float(step)), moved[1], moved[2], None, *rates, True, False
    )
    return moved[0], moved[1], moved[2]
