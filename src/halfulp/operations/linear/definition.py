"""A linear layer, y = x Wᵀ, as torch.nn.functional.linear, and the products of its gradients."""

from __future__ import annotations

from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors

SIGNATURE = "linear(input, weight)"
OPERANDS = (Operand("input", "T K"), Operand("weight", "N K"))
RESULTS = (Output("output", "T N"),)
SIZES = (
    Sizes.given(T=16, K=128, N=32),
    Sizes.given(T=32, K=512, N=64),
    Sizes.given(T=17, K=130, N=33),
)


def define(step: Seam, x: Tensors, _: Options) -> Tensors:
    """T rows of K features to N."""
    shape = (len(x["input"]), *x["weight"].shape)
    rows = step("_inputs", x["input"][:, None].expand(shape))  # whose gradients are terms of dX
    products = step("products", rows * step("_weights", x["weight"][None].expand(shape)))
    return {"output": products.sum(-1)}
